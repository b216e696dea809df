"""Write this step's window rows to each request's ring, and in a prefill chunk to the snapshots that are due.

Reads the step's K rows; writes the window pool only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import HEAD_DIM, MAIN_FP8, ROPE_DIM, WINDOW
from sglang_dsv4.models.invariant import rms_norm
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import FLOATS, Check
from sglang_dsv4.ops.flush import rotate
from sglang_dsv4.ops.meta import StepMeta


@dataclass
class WindowNorm:
    """What makes a window row of a raw projection: RMS norm, then rotation at the token's position.

    weight  float [512]
    eps     RMS norm epsilon
    rope    float32 [positions, 64], cos of 32 pairs then sin, of the layer's own base
    """

    weight: Tensor
    eps: float
    rope: Tensor

    def apply(self, kv: Tensor, positions: Tensor) -> Tensor:
        """float32 [N, 512]: normed and rotated, nothing rounded to less than float32 in between."""
        return rotate(rms_norm(kv.float(), self.weight.float(), self.eps), self.rope[positions])


def norm_window(kv: Tensor, norm: WindowNorm, positions: Tensor) -> Tensor:
    """float32 [N, 512]: window rows of the raw projection `kv`, float [N, 512]; positions int64 [N]."""
    return norm.apply(kv, positions)


def norm_window_cuda(kv: Tensor, norm: WindowNorm, positions: Tensor) -> Tensor:
    """CUDA face of `norm_window`: one launch, as `append_window_cuda` norms. Raises ValueError as that does."""
    check = Check("norm_window")
    check.tensor("kv", kv, FLOATS, ("tokens", HEAD_DIM), strided=1, align=16)
    check.tensor("positions", positions, torch.int64, ("tokens",))
    _check_norm(check, norm)
    device = check.cuda()
    out = kv.new_empty((kv.shape[0], HEAD_DIM), dtype=torch.float32)
    if kv.shape[0]:
        launch = jit.function("append_window", "norm_window", device)
        launch(kv, norm.weight, float(norm.eps), norm.rope, positions, out)
    return out


def _check_norm(check: Check, norm: WindowNorm) -> None:
    check.tensor("norm.weight", norm.weight, FLOATS, (HEAD_DIM,), align=16)
    check.tensor("norm.rope", norm.rope, torch.float32, (None, ROPE_DIM), strided=1, align=16)
    if norm.rope.shape[0] == 0:
        raise check.fail("norm.rope", "an empty table", "a table of at least one position")


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


def append_window(
    window: Tensor, kv: Tensor, meta: StepMeta, *, codec: RowCodec, norm: WindowNorm | None = None
) -> None:
    """Quantise `kv` and store it at ring row `position % 128` of each request's slot.

    window  uint8 [2 * slots, group bytes], the layer's window pool, written in place
    kv      float [N, 512], after norm and rotation; with `norm` the raw projection
    norm    applied to kv first. A model that rounds kv to bfloat16 after norm or rotation gives other rows: here
            the row is quantised from float32.
    A snapshot due after `len` tokens receives positions [len - 128, len), which all lie in this step.
    Padded tokens leave every byte unchanged.
    """
    if norm is not None:
        kv = norm.apply(kv, meta.positions)
    for rows in append_window_rows(meta):
        codec.scatter(window, rows, kv)


def append_window_cuda(
    window: Tensor, kv: Tensor, meta: StepMeta, *, codec: RowCodec, norm: WindowNorm | None = None
) -> None:
    """CUDA face of `append_window`: one launch, FP8 rows, `kv` bfloat16 or float32, its rows any stride apart.

    With `norm` squares are summed in float32 (the reference: float64), so a value beside a rounding boundary may take
    the other code; a position past the rope table turns like its last row.
    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("append_window")
    check.codec("codec", codec, (MAIN_FP8,))
    fields = check.meta(meta)
    check.pool("window", window, MAIN_FP8)
    check.tensor("kv", kv, FLOATS, ("tokens", HEAD_DIM), strided=1, align=16)
    if norm is None:
        jit.function("append_window", "append_window", check.cuda())(window, kv, *fields)
        return
    _check_norm(check, norm)
    launch = jit.function("append_window", "append_window_normed", check.cuda())
    launch(window, kv, norm.weight, float(norm.eps), norm.rope, *fields)
