"""Pick the entries that a CSA query attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.geometry import CSA_RATIO
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import Check
from sglang_dsv4.ops.meta import StepMeta

MAX_TOPK = 2048
MAX_WIDTH = 3 << 17  # entries; 1.5 million tokens


def index_topk(
    scores: Tensor,
    meta: StepMeta,
    *,
    topk: int,
    physical: bool,
    first: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """int32 [N, topk]: the visible entries with the highest scores, ascending by id, -1 behind them.

    scores    float32 [N, width] of `index_scores`; columns past a token's visible entries are never read
    physical  True for pool rows (decode), False for entry ids in the request (prefill)
    first     int32 [N], of entry ids alone: added to a token's, which makes them rows of the prefill workspace
    out       int32 [N, topk], rows any stride apart: written and returned instead of a new tensor
    Equal scores: the lower id wins, so the same tokens select the same set however the prompt was cut. Where no
    more than `topk` entries are visible, all are selected.
    """
    visible = meta.visible_entries(CSA_RATIO)[:, None]
    ids = torch.arange(scores.shape[1], device=scores.device)
    known = scores.masked_fill(ids >= visible, float("-inf"))
    order = torch.sort(known, dim=1, descending=True, stable=True).indices[:, :topk]
    rank = torch.arange(order.shape[1], device=scores.device)
    hole = scores.shape[1]
    picked = torch.where(rank < visible, order, torch.full_like(order, hole)).sort(dim=1).values
    if picked.shape[1] < topk:
        picked = torch.nn.functional.pad(picked, (0, topk - picked.shape[1]), value=hole)
    picked = picked.masked_fill(picked == hole, -1)
    if physical:
        requests = meta.token_to_req.clamp(min=0)[:, None].expand_as(picked)
        picked = meta.entry_rows(requests, picked, CSA_RATIO)
    elif first is not None:
        picked = torch.where(picked >= 0, picked + first[:, None], picked)
    return picked.int() if out is None else out.copy_(picked)


def index_topk_cuda(
    scores: Tensor,
    meta: StepMeta,
    *,
    topk: int,
    physical: bool,
    first: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """CUDA face of `index_topk`: one launch, no workspace; selects the same sets as the reference.

    Columns past a token's visible entries may be loaded, but nothing depends on them. NaN ranks below every number.
    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("index_topk")
    fields = check.meta(meta)
    check.tensor("scores", scores, torch.float32, ("tokens", None), strided=1)
    if not 0 < topk <= MAX_TOPK:
        raise check.fail("topk", repr(topk), f"1 to {MAX_TOPK}")
    if scores.shape[1] >= MAX_WIDTH:
        raise check.fail("scores", f"{scores.shape[1]} columns wide", f"narrower than {MAX_WIDTH}")
    if first is None:
        first = scores.new_empty(0, dtype=torch.int32)
    elif physical:
        raise check.fail("first", "given", "None where pool rows are asked for")
    else:
        check.tensor("first", first, torch.int32, ("tokens",))
    if out is None:
        out = scores.new_empty((meta.num_tokens, topk), dtype=torch.int32)
    else:
        check.tensor("out", out, torch.int32, ("tokens", topk), strided=1)
    device = check.cuda()
    if meta.num_tokens:
        jit.function("index_topk", "index_topk", device)(scores, out, first, physical, *fields)
    return out
