"""Pick the entries that a CSA query attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.geometry import CSA_RATIO
from sglang_dsv4.ops.meta import StepMeta


def index_topk(scores: Tensor, meta: StepMeta, *, topk: int, physical: bool) -> Tensor:
    """int32 [N, topk]: the visible entries with the highest scores, ascending by id, -1 behind them.

    scores    float32 [N, width] of `index_scores`; columns past a token's visible entries are never read
    physical  True for pool rows (decode), False for entry ids in the request (prefill)
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
    return picked.int()
