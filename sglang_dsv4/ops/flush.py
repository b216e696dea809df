"""Pool completed compression blocks into entries and keep what the unfinished one still needs.

Reads this step's compressor projections and the state; writes entries (and CSA indexer keys) into pages that
belong to the running requests, the tails of their request rows, and the overlap rows of their slots and of the
snapshots that are due.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec, hadamard
from sglang_dsv4.geometry import (
    CSA_RATIO,
    CSA_STATE_DIM,
    HCA_RATIO,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP8,
    ROPE_DIM,
    STATE_PARTS,
)
from sglang_dsv4.models.invariant import exp, ordered_sum, rms_norm
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import FLOATS, Check
from sglang_dsv4.ops.meta import StepMeta


@dataclass
class CompressorParams:
    """Weights that pooling needs; the projections themselves are done by the caller.

    ape          float32 [ratio, coff * c]  added to Z by offset in the block (coff 2 for CSA, 1 for HCA)
    norm_weight  float [c]
    eps          RMS norm epsilon
    rope         float32 [positions, 64]    cos of 32 pairs, then sin
    """

    ape: Tensor
    norm_weight: Tensor
    eps: float
    rope: Tensor


def flush_csa(
    main: CompressorParams,
    main_kv_score: Tensor,
    index: CompressorParams,
    index_kv_score: Tensor,
    overlap: Tensor,
    tail: Tensor,
    entries: Tensor,
    index_keys: Tensor,
    meta: StepMeta,
    *,
    codec: RowCodec,
    index_codec: RowCodec,
) -> None:
    """CSA: entry i pools the overlap halves of block i-1 and the normal halves of block i.

    main_kv_score   float32 [N, 2048]  C (overlap half 512, normal half 512), then Z likewise, without ape
    index_kv_score  float32 [N, 512]   the same for the indexer, halves of 128
    overlap         float32 [slots, 4, 2, 640]    overlap halves of odd blocks by offset; (C, Z); main | indexer
    tail            float32 [rows, 4, 2, 2, 640]  by offset: [0] overlap half of even blocks, [1] normal half
    entries         uint8 [groups, group bytes], index_keys uint8 [groups, group bytes]; all written in place

    The halves alternate between slot and request row by block parity: at a page boundary the last block is odd, so the
    slot alone can resume, and a decode step of one token never overwrites what it reads: run twice it writes the same
    bytes. A longer step may overwrite state that its first block read; it must not be repeated over its own result.
    """
    x = torch.cat([_halves(main_kv_score, main.ape, meta), _halves(index_kv_score, index.ape, meta)], dim=-1)
    token, position = _block_ends(meta, CSA_RATIO)
    if token.numel():
        pooled = _pool(*_csa_rows(x, overlap, tail, meta, token, position))
        request = meta.token_to_req[token]
        rows = meta.entry_rows(request, position // CSA_RATIO, CSA_RATIO)
        start = position + 1 - CSA_RATIO
        codec.scatter(entries, rows, _finish(pooled[:, :HEAD_DIM], main, start))
        index_codec.scatter(index_keys, rows, hadamard(_finish(pooled[:, HEAD_DIM:], index, start)))
    _keep_csa_state(x, overlap, tail, meta)


def flush_hca(
    params: CompressorParams, kv_score: Tensor, tail: Tensor, entries: Tensor, meta: StepMeta, *, codec: RowCodec
) -> None:
    """HCA: entry i pools the 128 rows of its own block.

    kv_score  float32 [N, 1024]  C, then Z without ape
    tail      float32 [rows, 128, 2, 512], by position % 128; (C, Z)
    entries   uint8 [groups, group bytes], written in place like the tail
    """
    position = meta.positions
    c, z = kv_score.float().unflatten(-1, (2, HEAD_DIM)).unbind(1)
    x = torch.stack([c, z + params.ape[position % HCA_RATIO]], dim=1)
    token, end = _block_ends(meta, HCA_RATIO)
    if token.numel():
        offset = torch.arange(HCA_RATIO, device=meta.device)
        request = meta.token_to_req[token].long()
        in_step = end[:, None] - (HCA_RATIO - 1) + offset >= meta.prefix_lens[request].long()[:, None]
        source = (token[:, None] - (HCA_RATIO - 1) + offset).clamp(min=0)
        kept = tail[meta.req_rows[request].long()]
        rows = torch.where(in_step[..., None, None], x[source], kept)
        pooled = _pool(rows[:, :, 0], rows[:, :, 1])
        pool_rows = meta.entry_rows(request, end // HCA_RATIO, HCA_RATIO)
        codec.scatter(entries, pool_rows, _finish(pooled, params, end + 1 - HCA_RATIO))
    pending = meta.valid_tokens() & (position >= meta.of_token(meta.seq_lens) // HCA_RATIO * HCA_RATIO)
    tail[meta.of_token(meta.req_rows)[pending], position[pending] % HCA_RATIO] = x[pending]


def _halves(kv_score: Tensor, ape: Tensor, meta: StepMeta) -> Tensor:
    """float32 [N, half, (C, Z), c] with ape added to Z."""
    c, z = kv_score.float().chunk(2, dim=-1)
    z = z + ape[meta.positions % CSA_RATIO]
    return torch.stack([c.unflatten(-1, (2, -1)), z.unflatten(-1, (2, -1))], dim=2)


def _block_ends(meta: StepMeta, ratio: int) -> tuple[Tensor, Tensor]:
    """Indices and positions of the tokens that complete a block."""
    token = ((meta.positions + 1) % ratio == 0).logical_and(meta.valid_tokens()).nonzero().squeeze(1)
    return token, meta.positions[token]


def _csa_rows(
    x: Tensor, overlap: Tensor, tail: Tensor, meta: StepMeta, token: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """C and Z float32 [E, 8, 640] of each completed block: four overlap halves, then four normal halves."""
    request = meta.token_to_req[token].long()
    row, slot = meta.req_rows[request].long(), meta.slots[request].long()
    prefix = meta.prefix_lens[request].long()[:, None]
    offset = torch.arange(CSA_RATIO, device=meta.device)
    block = end // CSA_RATIO
    previous_odd = (block % 2 == 0)[:, None, None, None]
    kept_previous = torch.where(previous_odd, overlap[slot], tail[row, :, 0])
    parts = []
    for back, half, kept in ((2 * CSA_RATIO - 1, 0, kept_previous), (CSA_RATIO - 1, 1, tail[row, :, 1])):
        in_step = end[:, None] - back + offset >= prefix
        source = (token[:, None] - back + offset).clamp(min=0)
        parts.append(torch.where(in_step[..., None, None], x[source, half], kept))
    # Block 0 has no predecessor: decided by position, whatever the buffers hold.
    first = (block == 0)[:, None, None]
    c_previous = parts[0][:, :, 0].masked_fill(first, 0.0)
    z_previous = parts[0][:, :, 1].masked_fill(first, float("-inf"))
    return torch.cat([c_previous, parts[1][:, :, 0]], dim=1), torch.cat([z_previous, parts[1][:, :, 1]], dim=1)


def _keep_csa_state(x: Tensor, overlap: Tensor, tail: Tensor, meta: StepMeta) -> None:
    position, valid = meta.positions, meta.valid_tokens()
    row, slot = meta.of_token(meta.req_rows), meta.of_token(meta.slots)
    current = meta.of_token(meta.seq_lens) // CSA_RATIO
    block, offset = position // CSA_RATIO, position % CSA_RATIO
    recent = valid & (block >= current - 1)
    odd, even, pending = recent & (block % 2 == 1), recent & (block % 2 == 0), valid & (block == current)
    overlap[slot[odd], offset[odd]] = x[odd, 0]
    tail[row[even], offset[even], 0] = x[even, 0]
    tail[row[pending], offset[pending], 1] = x[pending, 1]
    for s in range(meta.snapshot_slots.shape[1]):
        target, length = meta.of_token(meta.snapshot_slots[:, s]), meta.of_token(meta.snapshot_lens[:, s])
        due = valid & (target >= 0) & (position >= length - CSA_RATIO) & (position < length)
        overlap[target[due], offset[due]] = x[due, 0]


def _pool(c: Tensor, z: Tensor) -> Tensor:
    """float32 [E, c] of [E, rows, c]: softmax over the rows per channel, float64 in row order, rounded once."""
    weights = exp(z.double() - z.amax(dim=1, keepdim=True).double())
    return (ordered_sum(weights * c, 1) / ordered_sum(weights, 1)).float()


def _finish(pooled: Tensor, params: CompressorParams, start: Tensor) -> Tensor:
    """float32 [E, c]: RMS norm, then rotation of the last 64 channels at the block's first position."""
    return rotate(rms_norm(pooled, params.norm_weight, params.eps), params.rope[start])


def rotate(x: Tensor, rope: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate channel pairs (2k, 2k+1) of the last 64 channels.

    x     float32 [..., c]
    rope  float32 [..., 64], cos of 32 pairs then sin, broadcast against x without its channel axis
    """
    cos, sin = rope.chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = x[..., -ROPE_DIM::2], x[..., -ROPE_DIM + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-ROPE_DIM], turned], dim=-1)


def _check_compressor(
    check: Check, name: str, params: CompressorParams, ratio: int, width: int, halves: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    """The compressor's weights in the order of the kernels' parameters."""
    check.tensor(f"{name}.ape", params.ape, torch.float32, (ratio, halves * width), align=16)
    check.tensor(f"{name}.norm_weight", params.norm_weight, FLOATS, (width,))
    check.tensor(f"{name}.rope", params.rope, torch.float32, (None, ROPE_DIM), strided=1)
    return params.ape, params.norm_weight, params.rope, float(params.eps)


def flush_csa_cuda(
    main: CompressorParams,
    main_kv_score: Tensor,
    index: CompressorParams,
    index_kv_score: Tensor,
    overlap: Tensor,
    tail: Tensor,
    entries: Tensor,
    index_keys: Tensor,
    meta: StepMeta,
    *,
    codec: RowCodec,
    index_codec: RowCodec,
) -> None:
    """CUDA face of `flush_csa`: main rows, indexer keys and state in one launch; FP8 rows, MXFP4 or FP8 keys.

    Both projections are float32 or both bfloat16. A block that starts past the rope table is not stored.
    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("flush_csa")
    check.codec("codec", codec, (MAIN_FP8,))
    check.codec("index_codec", index_codec, (INDEX_FP4, INDEX_FP8))
    fields = check.meta(meta)
    check.tensor("main_kv_score", main_kv_score, FLOATS, ("tokens", 4 * HEAD_DIM), strided=1, align=16)
    dtype = main_kv_score.dtype
    check.tensor("index_kv_score", index_kv_score, dtype, ("tokens", 4 * INDEX_DIM), strided=1, align=16)
    check.tensor("overlap", overlap, torch.float32, (None, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM), strided=1, align=16)
    check.tensor("tail", tail, torch.float32, (None, CSA_RATIO, 2, STATE_PARTS, CSA_STATE_DIM), strided=1, align=16)
    check.pool("entries", entries, MAIN_FP8)
    check.pool("index_keys", index_keys, index_codec.layout)
    main_weights = _check_compressor(check, "main", main, CSA_RATIO, HEAD_DIM, 2)
    index_weights = _check_compressor(check, "index", index, CSA_RATIO, INDEX_DIM, 2)
    launch = jit.function("flush_csa", "flush_csa", check.cuda())
    launch(
        main_kv_score,
        *main_weights,
        index_kv_score,
        *index_weights,
        overlap,
        tail,
        entries,
        index_keys,
        index_codec.layout == INDEX_FP4,
        *fields,
    )


def flush_hca_cuda(
    params: CompressorParams,
    kv_score: Tensor,
    tail: Tensor,
    entries: Tensor,
    meta: StepMeta,
    *,
    codec: RowCodec,
) -> None:
    """CUDA face of `flush_hca`: one launch, FP8 rows, `kv_score` float32 or bfloat16.

    A block that starts past the rope table is not stored. Raises ValueError for an argument that the kernel
    cannot take.
    """
    check = Check("flush_hca")
    check.codec("codec", codec, (MAIN_FP8,))
    fields = check.meta(meta)
    check.tensor("kv_score", kv_score, FLOATS, ("tokens", 2 * HEAD_DIM), strided=1, align=16)
    check.tensor("tail", tail, torch.float32, (None, HCA_RATIO, STATE_PARTS, HEAD_DIM), strided=1, align=16)
    check.pool("entries", entries, MAIN_FP8)
    weights = _check_compressor(check, "params", params, HCA_RATIO, HEAD_DIM, 1)
    jit.function("flush_hca", "flush_hca", check.cuda())(kv_score, *weights, tail, entries, *fields)
