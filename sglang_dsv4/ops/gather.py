"""Decode what a prefill step attends to into dense rows, once per request instead of once per query.

Reads the window pool, the step's K rows and the entry pages; writes the workspace only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import CSA_RATIO, HCA_RATIO, HEAD_DIM, MAIN_FP8, WINDOW
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import FLOATS, Check
from sglang_dsv4.ops.meta import StepMeta, Workspace


def gather(
    workspace: Tensor,
    window: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    meta: StepMeta,
    plan: Workspace,
    *,
    ratio: int,
    codec: RowCodec,
) -> None:
    """Fill `workspace` with `[history | chunk | entries]` of every request.

    workspace  float [rows >= plan.num_rows, 512] (bfloat16 holds every decoded FP8 row exactly), written in place
    window     uint8 [2 * slots, group bytes]; holds the 128 positions before this step: call this before
               `append_window`, which overwrites them
    kv         float [N, 512], this step's rows; they pass through the store's rounding like any stored row
    entries    uint8 [groups, group bytes] after `flush`, or None for ratio 0
    History rows before position 0 are left as they are; no valid index names them.
    """
    device = meta.device
    request = torch.arange(meta.num_requests, device=device)
    back = torch.arange(-WINDOW, 0, device=device)
    position = meta.prefix_lens.long()[:, None] + back
    present = (position >= 0) & (meta.seq_lens > meta.prefix_lens)[:, None]
    source = meta.slots.long()[:, None] * WINDOW + position % WINDOW
    target = plan.offsets[:, None] + WINDOW + back
    workspace[target[present]] = codec.gather(window, source[present]).to(workspace.dtype)

    valid = meta.valid_tokens()
    rows = plan.token_rows(meta, meta.positions)
    workspace[rows[valid]] = codec.round_trip(kv[valid].float()).to(workspace.dtype)

    if ratio and entries is not None:
        requests = torch.repeat_interleave(request, plan.num_entries)
        starts = torch.cumsum(plan.num_entries, 0) - plan.num_entries
        ids = torch.arange(requests.numel(), device=device) - starts[requests]
        extent = (meta.seq_lens - meta.prefix_lens).long()[requests]
        target = plan.offsets[requests] + WINDOW + extent + ids
        source = meta.entry_rows(requests, ids, ratio)
        workspace[target] = codec.gather(entries, source).to(workspace.dtype)


def gather_cuda(
    workspace: Tensor,
    window: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    meta: StepMeta,
    plan: Workspace,
    *,
    ratio: int,
    codec: RowCodec,
) -> None:
    """CUDA face of `gather`: one launch, FP8 rows into a bfloat16 workspace, `kv` bfloat16 or float32.

    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("gather")
    check.codec("codec", codec, (MAIN_FP8,))
    fields = check.meta(meta)
    check.tensor("workspace", workspace, torch.bfloat16, (None, HEAD_DIM), strided=1, align=16)
    if workspace.shape[0] < plan.num_rows:
        must = f"[{plan.num_rows}, {HEAD_DIM}] or more rows for this plan"
        raise check.fail("workspace", str(list(workspace.shape)), must)
    check.pool("window", window, MAIN_FP8)
    check.tensor("kv", kv, FLOATS, ("tokens", HEAD_DIM), strided=1, align=16)
    if ratio not in (0, CSA_RATIO, HCA_RATIO):
        raise check.fail("ratio", repr(ratio), f"0, {CSA_RATIO} or {HCA_RATIO}")
    if ratio and entries is None:
        raise check.fail("entries", "None", f"the entry pool of a layer of ratio {ratio}")
    pool = window if entries is None or not ratio else check.pool("entries", entries, MAIN_FP8)
    check.tensor("plan.offsets", plan.offsets, torch.int64, ("requests",))
    check.tensor("plan.num_entries", plan.num_entries, torch.int64, ("requests",))
    launch = jit.function("gather", "gather", check.cuda())
    launch(workspace, window, kv, pool, plan.offsets, plan.num_entries, plan.num_rows, ratio, *fields)
