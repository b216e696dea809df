"""Attention of a prefill step's queries over the dense workspace by per-query row indices.

Reads the workspace that `gather` filled; writes nothing but its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.geometry import HEAD_DIM, ROPE_DIM
from sglang_dsv4.ops import flash_mla, jit
from sglang_dsv4.ops.checks import Check
from sglang_dsv4.ops.exact_attention import attend
from sglang_dsv4.ops.sparse_attention import choose

# Neighbouring queries share most of their rows: this many are attended together, over the union of those rows.
QUERY_TILE = 64


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
    for start in range(0, q.shape[0], QUERY_TILE):
        part = slice(start, start + QUERY_TILE)
        picked = indices[part].long()
        present = picked >= 0
        rows, where = torch.unique(picked[present], return_inverse=True)
        valid = torch.zeros(picked.shape[0], max(1, rows.numel()), dtype=torch.bool, device=q.device)
        valid[present.nonzero()[:, 0], where] = True
        keys = workspace[rows] if rows.numel() else workspace.new_zeros(1, workspace.shape[1])
        out[part] = attend(q[part], keys, valid, sink, rope[positions[part]], scale=scale)
    return out


def sparse_prefill_cuda(
    q: Tensor,
    workspace: Tensor,
    indices: Tensor,
    sink: Tensor,
    rope: Tensor,
    positions: Tensor,
    *,
    scale: float,
    kernel: str = "auto",
) -> Tensor:
    """CUDA face of `sparse_prefill`: bfloat16, `scale` positive; no workspace of its own.

    `kernel`: "flash_mla" (64 or 128 heads, on Hopper; it copies index rows whose width is no multiple of 64),
    "hopper", "portable", or "auto", the first of these that serves the device. Raises ValueError for an argument that
    the kernel cannot take.
    """
    check = Check("sparse_prefill")
    check.tensor("q", q, torch.bfloat16, ("tokens", "heads", HEAD_DIM), strided=1, align=16)
    check.tensor("workspace", workspace, torch.bfloat16, (None, HEAD_DIM), strided=1, align=16)
    check.tensor("indices", indices, torch.int32, ("tokens", None), strided=1)
    check.tensor("sink", sink, torch.float32, ("heads",))
    check.tensor("rope", rope, torch.float32, (None, ROPE_DIM), align=16)
    check.tensor("positions", positions, torch.int64, ("tokens",))
    if not scale > 0:
        raise check.fail("scale", repr(scale), "positive")
    device = check.cuda()
    if not q.numel():
        return q.new_empty(q.shape)
    arch = jit.architecture(device)
    if kernel == "auto" and flash_mla.serves(q.shape[1], arch):
        kernel = "flash_mla"
    kernel = choose(kernel, q.shape[1], arch, check)
    if kernel == "flash_mla":
        return flash_mla.prefill(q, workspace, indices, sink, rope, positions, scale)
    out = q.new_empty(q.shape)
    run = jit.function("sparse_prefill", "sparse_prefill", device)
    run(q, workspace, indices, sink, rope, positions, out, scale, kernel == "hopper")
    return out
