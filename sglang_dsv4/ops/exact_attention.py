"""The arithmetic of the attention references: sums so rounded that no order of addition can change a bit.

A query then gets the same output whether it is decoded alone, prefilled in a chunk, or attended to in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.models.invariant import exp, grid_rows, round_rows
from sglang_dsv4.ops.flush import rotate

KEY_BITS = 20  # of a key row, relative to its largest channel; FP8 rows lose nothing that their scales kept apart
WEIGHT_BITS = 20  # of a query's weights; with 20-bit values up to 8,192 products add up exactly
_SUM_GRID = 1.5 * 2.0 ** (52 - 38)  # weights are at most 1: on a grid of 2**-38 up to 2**14 of them add up exactly


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, rope: Tensor, *, scale: float) -> Tensor:
    """float [n, H, 512] in q's dtype: softmax with the sink over each query's valid keys, values = keys, de-rotated.

    q      float [n, H, 512]
    keys   float [n, K, 512], a set for each query, or [U, 512], one set that all of them pick from; finite
    valid  bool [n, K] or [n, U]
    sink   float32 [H]; rope float32 [n, 64]
    Dot products and sums are exact in float64 for up to 8,192 keys; what follows is elementwise and rounded once.
    """
    queries, heads, _ = q.shape
    shared = keys.dim() == 2
    rows = grid_rows(q.double()).values
    rounded = round_rows(keys.double(), KEY_BITS)
    if shared:
        logits = (rows.flatten(0, 1) @ rounded.T).view(queries, heads, -1)
    else:
        logits = torch.matmul(rows, rounded.transpose(1, 2))
    hidden = ~valid[:, None, :]
    logits = logits.mul_(scale).masked_fill_(hidden, float("-inf"))
    sinks = sink.double()[None, :, None]
    top = torch.maximum(logits.amax(dim=-1, keepdim=True), sinks)
    # All masked with a sink of -inf, or a sink of +inf, leaves no finite maximum: every weight below is then zero.
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    weights = exp(logits.sub_(top)).masked_fill_(hidden, 0.0)
    drain = torch.where(torch.isfinite(sinks), exp(sinks - top), torch.exp(sinks).expand_as(top))
    total = (weights + _SUM_GRID).sub_(_SUM_GRID).sum(dim=-1, keepdim=True) + drain
    weights = torch.where(total > 0, weights / total, torch.zeros_like(weights))
    # A key's own magnitude goes into its weight, so that values of all keys lie on one grid.
    power = _magnitude(rounded)
    carried = round_rows(weights * power.squeeze(-1).unsqueeze(-2), WEIGHT_BITS)
    values = rounded / power
    if shared:
        out = (carried.flatten(0, 1) @ values).view(queries, heads, -1)
    else:
        out = torch.matmul(carried, values)
    return rotate(out.float(), rope[:, None, :], inverse=True).to(q.dtype)


def _magnitude(rows: Tensor) -> Tensor:
    """float64 [..., 1]: the power of two below each row's largest magnitude; 1 for a row of zeros."""
    top = rows.abs().amax(dim=-1, keepdim=True)
    return torch.where(top > 0, torch.exp2(torch.floor(torch.log2(top))), torch.ones_like(top))
