"""Attention of a prefill step's queries over the dense workspace by per-query row indices.

Reads the workspace that `gather` filled; writes nothing but its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.ops.sparse_attention import ROW_BUDGET, attend


def sparse_prefill(
    q: Tensor, workspace: Tensor, indices: Tensor, sink: Tensor, rope: Tensor, positions: Tensor, *, scale: float
) -> Tensor:
    """float [N, H, 512] in q's dtype, de-rotated at each query's position.

    q          float [N, H, 512]
    workspace  float [rows, 512]
    indices    int32 [N, K] workspace rows, -1 masked; causality is in them
    sink       float32 [H]; rope float32 [positions, 64]; positions int64 [N]
    """
    out = torch.empty_like(q)
    step = max(1, ROW_BUDGET // max(1, indices.shape[1]))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        picked = indices[part].long()
        keys = workspace[picked.clamp(min=0)].float()
        out[part] = attend(q[part], keys, picked >= 0, sink, rope[positions[part]], scale=scale)
    return out
