"""Score every visible indexer key of a request against a query's index heads.

Reads packed keys from pages; writes nothing but its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import CSA_RATIO, INDEX_DIM
from sglang_dsv4.ops.meta import StepMeta

# Keys are multiplied in whole tiles so that a score does not depend on how many keys stand beside it.
KEY_TILE = 64
QUERY_TILE = 64


def index_scores(
    q: Tensor, weights: Tensor, index_keys: Tensor, meta: StepMeta, *, codec: RowCodec, max_entries: int
) -> Tensor:
    """float32 [N, max_entries]: sum over heads of weight * relu(q . key), -inf where an entry is not visible.

    q            float32 [N, heads, 128], rotated, Hadamard-transformed and rounded like the keys
    weights      float32 [N, heads], scaled; may be negative
    index_keys   uint8 [groups, group bytes], the layer's indexer keys
    max_entries  width of the result, at least the visible entries of every token
    """
    out = q.new_full((q.shape[0], max_entries), float("-inf"), dtype=torch.float32)
    visible = meta.visible_entries(CSA_RATIO)
    offsets = meta.token_offsets.tolist()
    for request in range(meta.num_requests):
        first, last = offsets[request], offsets[request + 1]
        count = int(visible[last - 1]) if last > first else 0
        if count == 0:
            continue
        ids = torch.arange(-(-count // KEY_TILE) * KEY_TILE, device=meta.device)
        ids = torch.where(ids < count, ids, torch.full_like(ids, -1))
        rows = meta.entry_rows(torch.full_like(ids, request), ids, CSA_RATIO)
        keys = codec.gather(index_keys, rows).double()
        for start in range(first, last, QUERY_TILE):
            stop = min(start + QUERY_TILE, last)
            dots = (q[start:stop].double().reshape(-1, INDEX_DIM) @ keys.T).relu_()
            dots = dots.view(stop - start, q.shape[1], -1) * weights[start:stop, :, None].double()
            scores = dots.sum(dim=1)[:, :count].float()
            hidden = torch.arange(count, device=meta.device) >= visible[start:stop, None]
            out[start:stop, :count] = scores.masked_fill(hidden, float("-inf"))
    return out
