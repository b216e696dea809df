"""Decode what a prefill step attends to into dense rows, once per request instead of once per query.

Reads the window pool, the step's K rows and the entry pages; writes the workspace only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import WINDOW
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
