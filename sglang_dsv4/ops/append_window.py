"""Write this step's window rows to each request's ring, and in a prefill chunk to the snapshots that are due.

Reads the step's K rows; writes the window pool only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import HEAD_DIM, MAIN_FP8, WINDOW
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import FLOATS, Check
from sglang_dsv4.ops.meta import StepMeta


def append_window_rows(meta: StepMeta) -> Tensor:
    """int64 [1 + S, N]: pool row that each token is written to, in the live ring and in every due snapshot.

    -1 where a token is not written: padded, or older than the 128 positions that the ring keeps (two tokens of
    one chunk would otherwise meet in one row).
    """
    position, valid = meta.positions, meta.valid_tokens()
    ring_row = position % WINDOW
    live = valid & (position >= meta.of_token(meta.seq_lens) - WINDOW)
    none = torch.full_like(position, -1)
    rows = [torch.where(live, meta.of_token(meta.slots) * WINDOW + ring_row, none)]
    for s in range(meta.snapshot_slots.shape[1]):
        slot, length = meta.of_token(meta.snapshot_slots[:, s]), meta.of_token(meta.snapshot_lens[:, s])
        due = valid & (slot >= 0) & (position >= length - WINDOW) & (position < length)
        rows.append(torch.where(due, slot * WINDOW + ring_row, none))
    return torch.stack(rows)


def append_window(window: Tensor, kv: Tensor, meta: StepMeta, *, codec: RowCodec) -> None:
    """Quantise `kv` and store it at ring row `position % 128` of each request's slot.

    window  uint8 [2 * slots, group bytes], the layer's window pool, written in place
    kv      float [N, 512], after norm and rotation
    A snapshot due after `len` tokens receives positions [len - 128, len), which all lie in this step.
    Padded tokens leave every byte unchanged.
    """
    for rows in append_window_rows(meta):
        codec.scatter(window, rows, kv)


def append_window_cuda(window: Tensor, kv: Tensor, meta: StepMeta, *, codec: RowCodec) -> None:
    """CUDA face of `append_window`: one launch, FP8 rows, `kv` bfloat16 or float32.

    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("append_window")
    check.codec("codec", codec, (MAIN_FP8,))
    fields = check.meta(meta)
    check.pool("window", window, MAIN_FP8)
    check.tensor("kv", kv, FLOATS, ("tokens", HEAD_DIM), strided=1, align=16)
    jit.function("append_window", "append_window", check.cuda())(window, kv, *fields)
