"""One attention layer written straight from the model's definition: whole sequence, no cache, float64.

Independent of the operations: shares only the row codecs' rounding, which has tests of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.attention.core import LayerInputs, LayerParams
from sglang_dsv4.formats import RowCodec, hadamard


@dataclass
class OracleResult:
    out: Tensor  # [T, H, 512]
    entries: Tensor | None  # [E, 512] after the store's rounding
    keys: Tensor | None  # [E, 128]
    selected: list[set[int]]  # entries each token attends to


def _turn(x: Tensor, rope: Tensor, sign: int = 1) -> Tensor:
    pairs = torch.view_as_complex(x[..., -64:].double().reshape(*x.shape[:-1], 32, 2).contiguous())
    angle = torch.complex(rope[..., :32].double(), sign * rope[..., 32:].double())
    return torch.cat([x[..., :-64].double(), torch.view_as_real(pairs * angle).flatten(-2)], -1)


def _pooled(kv_score: Tensor, ape: Tensor, ratio: int, width: int) -> Tensor:
    c, z = kv_score.double().chunk(2, dim=-1)
    count = kv_score.shape[0] // ratio
    rows = []
    for i in range(count):
        own = range(i * ratio, (i + 1) * ratio)
        if ratio == 4:
            members = [(j, slice(0, width)) for j in range((i - 1) * 4, i * 4) if i > 0]
            members += [(j, slice(width, 2 * width)) for j in own]
        else:
            members = [(j, slice(0, width)) for j in own]
        values = torch.stack([c[j, half] for j, half in members])
        scores = torch.stack([z[j, half] + ape[j % ratio, half].double() for j, half in members])
        rows.append((torch.softmax(scores, 0) * values).sum(0))
    return torch.stack(rows) if rows else kv_score.new_zeros((0, width), dtype=torch.float64)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def attention(params: LayerParams, x: LayerInputs, codec: RowCodec, index_codec: RowCodec) -> OracleResult:
    tokens, ratio, rope = x.q.shape[0], params.ratio, params.rope
    window = codec.round_trip(x.kv.float()).double()
    entries = keys = None
    count = tokens // ratio if ratio else 0
    if count:
        assert params.compressor is not None and x.kv_score is not None
        starts = torch.arange(count) * ratio
        pooled = _normed(
            _pooled(x.kv_score, params.compressor.ape, ratio, 512),
            params.compressor.norm_weight,
            params.compressor.eps,
        )
        entries = codec.round_trip(_turn(pooled, rope[starts]).float()).double()
        if ratio == 4:
            index = params.index_compressor
            assert index is not None and x.index_kv_score is not None
            pooled = _normed(_pooled(x.index_kv_score, index.ape, 4, 128), index.norm_weight, index.eps)
            keys = index_codec.round_trip(hadamard(_turn(pooled, rope[starts]).float())).double()
    outs, chosen = [], []
    for t in range(tokens):
        visible = (t + 1) // ratio if ratio else 0
        picked = list(range(visible))
        if ratio == 4 and visible > params.index_topk:
            assert keys is not None and x.index_q is not None and x.index_weights is not None
            turned = _turn(x.index_q[t], rope[t]).float()
            query = index_codec.round_trip(hadamard(turned)).double()
            weights = x.index_scale * x.index_weights[t].double()
            scores = (torch.relu(query @ keys[:visible].T) * weights[:, None]).sum(0).float()
            picked = sorted(range(visible), key=lambda i: (-float(scores[i]), i))[: params.index_topk]
        rows = [window[max(0, t - 127) : t + 1]]
        if picked:
            assert entries is not None
            rows.append(entries[sorted(picked)])
        k = torch.cat(rows)
        logits = x.q[t].double() @ k.T * params.scale
        full = torch.cat([logits, params.sink.double()[:, None]], 1)
        out = torch.softmax(full, 1)[:, :-1] @ k
        outs.append(_turn(out, rope[t], -1))
        chosen.append(set(picked))
    return OracleResult(torch.stack(outs), entries, keys, chosen)
