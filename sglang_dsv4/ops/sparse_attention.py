"""Attention of decode queries over packed window rows and packed entries, one softmax with the sink.

Reads the window pool and the entry pages; writes nothing but its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.ops.flush import rotate

# Queries are processed in slices of bounded memory: a slice holds this many decoded rows.
ROW_BUDGET = 1 << 15


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    sink: Tensor,
    rope: Tensor,
    positions: Tensor,
    *,
    scale: float,
    codec: RowCodec,
) -> Tensor:
    """float [N, H, 512] in q's dtype: softmax(q . K * scale) K over window and entries, de-rotated at the query.

    q            float [N, H, 512], rotated at its position
    window       uint8 [2 * slots, group bytes], this step's rows already appended
    window_rows  int [N, 128] rows of `window`, -1 masked
    entries      uint8 [groups, group bytes] or None; entry_rows int [N, K] rows of it, -1 masked, or None
    sink         float32 [H], a logit whose value is zero
    rope         float32 [positions, 64]; positions int64 [N]
    A query without any valid row returns zeros. Rows behind -1 are never read as numbers: they may hold NaN.
    """
    out = torch.empty_like(q)
    width = window_rows.shape[1] + (entry_rows.shape[1] if entry_rows is not None else 0)
    step = max(1, ROW_BUDGET // max(1, width))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        keys, valid = [codec.gather(window, window_rows[part].long())], [window_rows[part] >= 0]
        if entries is not None and entry_rows is not None:
            keys.append(codec.gather(entries, entry_rows[part].long()))
            valid.append(entry_rows[part] >= 0)
        out[part] = attend(
            q[part], torch.cat(keys, 1), torch.cat(valid, 1), sink, rope[positions[part]], scale=scale
        )
    return out


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, rope: Tensor, *, scale: float) -> Tensor:
    """float [n, H, 512] in q's dtype, accumulated in float64 and rounded once.

    q float [n, H, 512]; keys float [n, K, 512]; valid bool [n, K]; sink float32 [H]; rope float32 [n, 64]
    """
    keys = torch.where(valid[..., None], keys.double(), 0.0)
    logits = torch.matmul(q.double(), keys.transpose(1, 2)) * scale
    logits = logits.masked_fill(~valid[:, None, :], float("-inf"))
    sinks = sink.double()[None, :, None]
    top = torch.maximum(logits.amax(dim=-1, keepdim=True), sinks)
    # All masked and a sink of -inf leaves no finite maximum; the weights below are then exactly zero.
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    weights = torch.exp(logits - top)
    drain = torch.exp(torch.where(sinks == float("inf"), torch.full_like(top, float("inf")), sinks - top))
    total = weights.sum(dim=-1, keepdim=True) + drain
    weights = torch.where(total > 0, weights / total, torch.zeros_like(weights))
    out = torch.matmul(weights, keys).float()
    return rotate(out, rope[:, None, :], inverse=True).to(q.dtype)
