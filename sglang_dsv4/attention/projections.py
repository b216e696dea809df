"""Attention block of the pure-torch host: the projections around the slot attention, official names.

Queries and window rows leave here normalised and rotated. Compressor projections leave as they are (C and Z
in float32, position bias not added), because pooling, its normalisation and its rotation happen where the
state lives. So do indexer queries and weights: `index_query` rotates, rounds and scales them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sglang_dsv4.attention.rope import apply_rope
from sglang_dsv4.geometry import CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM
from sglang_dsv4.models.invariant import GridRows, RMSNorm, RowLinear, grid_rows, rms_norm
from sglang_dsv4.ops.flush import CompressorParams


class SlotCore(Protocol):
    """What the projections feed; `attention.layer.SlotRadixAttention` is the one that a server uses."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        forward_batch: Any,
        *,
        kv_score: Tensor | None = None,
        index_kv_score: Tensor | None = None,
        index_q: Tensor | None = None,
        index_weights: Tensor | None = None,
        index_scale: float = 1.0,
    ) -> Tensor:
        """float `[N, H, 512]`, de-rotated. Shapes of the arguments: `attention.core.LayerInputs`."""
        ...


CoreFactory = Callable[..., SlotCore]


class Compressor(nn.Module):
    """Projections and pooling weights of one compressor; all float32, as the released model uses them."""

    def __init__(self, hidden_size: int, width: int, ratio: int, eps: float) -> None:
        super().__init__()
        channels = width * (2 if ratio == CSA_RATIO else 1)
        self.ape = nn.Parameter(torch.zeros(ratio, channels, dtype=torch.float32), requires_grad=False)
        self.wkv = RowLinear(hidden_size, channels, dtype=torch.float32)
        self.wgate = RowLinear(hidden_size, channels, dtype=torch.float32)
        self.norm = RMSNorm(width, eps)

    def forward(self, x: GridRows) -> Tensor:
        """float32 `[N, 2 * channels]`: C, then Z without the position bias."""
        return torch.cat([self.wkv(x), self.wgate(x)], dim=-1)

    def params(self, rope: Tensor) -> CompressorParams:
        """What pooling needs; holds this module's own tensors, so weights may be loaded afterwards."""
        return CompressorParams(ape=self.ape, norm_weight=self.norm.weight, eps=self.norm.eps, rope=rope)


class Indexer(nn.Module):
    """Queries, head weights and key compressor that choose a CSA layer's entries."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        if config.index_head_dim != INDEX_DIM:
            raise ValueError(f"index_head_dim is {config.index_head_dim}; only {INDEX_DIM} is supported")
        self.heads = config.index_n_heads
        self.wq_b = RowLinear(config.q_lora_rank, self.heads * INDEX_DIM, dtype=dtype)
        self.weights_proj = RowLinear(config.hidden_size, self.heads, dtype=dtype)
        self.compressor = Compressor(config.hidden_size, INDEX_DIM, CSA_RATIO, config.rms_norm_eps)
        self.scale = INDEX_DIM**-0.5 * self.heads**-0.5

    def forward(self, x: GridRows, q_lora: GridRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[N, heads, 128]`, float64 weights `[N, heads]` without `scale`, C and Z `[N, 512]`."""
        q = self.wq_b(q_lora, torch.float32).unflatten(-1, (self.heads, INDEX_DIM))
        return q, self.weights_proj(x, torch.float64), self.compressor(x)


class SlotAttention(nn.Module):
    """Attention of one layer: hidden states `[N, hidden]` in and out.

    ratio   0, 4 or 128
    rope    float32 [positions, 64] of the layer's own base, from `rope.rope_table`
    core    builds the slot attention from keyword arguments; `SlotRadixAttention` unless given
    Raises ValueError for head sizes that the row formats do not store.
    """

    def __init__(
        self,
        config: Any,
        layer_id: int,
        ratio: int,
        rope: Tensor,
        *,
        dtype: torch.dtype,
        core: CoreFactory | None = None,
    ) -> None:
        super().__init__()
        if config.head_dim != HEAD_DIM:
            raise ValueError(f"head_dim is {config.head_dim}; only {HEAD_DIM} is supported")
        heads, groups, eps = config.num_attention_heads, config.o_groups, config.rms_norm_eps
        if heads % groups:
            raise ValueError(f"{heads} attention heads do not divide into o_groups = {groups}")
        self.heads, self.groups, self.eps, self.rope = heads, groups, eps, rope
        self.wq_a = RowLinear(config.hidden_size, config.q_lora_rank, dtype=dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = RowLinear(config.q_lora_rank, heads * HEAD_DIM, dtype=dtype)
        self.wkv = RowLinear(config.hidden_size, HEAD_DIM, dtype=dtype)
        self.kv_norm = RMSNorm(HEAD_DIM, eps)
        self.wo_a = RowLinear(heads // groups * HEAD_DIM, config.o_lora_rank, groups=groups, dtype=dtype)
        self.wo_b = RowLinear(groups * config.o_lora_rank, config.hidden_size, dtype=dtype)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32), requires_grad=False)
        self.compressor = Compressor(config.hidden_size, HEAD_DIM, ratio, eps) if ratio else None
        self.indexer = Indexer(config, dtype) if ratio == CSA_RATIO else None
        assert ratio in (0, CSA_RATIO, HCA_RATIO)
        if core is None:
            from sglang_dsv4.attention.layer import SlotRadixAttention

            core = SlotRadixAttention
        self.core = core(
            layer_id=layer_id,
            ratio=ratio,
            num_heads=heads,
            scale=HEAD_DIM**-0.5,
            sink=self.attn_sink,
            rope=rope,
            compressor=self.compressor.params(rope) if self.compressor is not None else None,
            index_compressor=self.indexer.compressor.params(rope) if self.indexer is not None else None,
            index_topk=config.index_topk,
        )

    def forward(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        """`x [N, hidden]`, `positions int [N]`; `forward_batch` is passed to the slot attention untouched."""
        rows = grid_rows(x)
        q_lora = grid_rows(self.q_norm(self.wq_a(rows)))
        q = rms_norm(self.wq_b(q_lora).unflatten(-1, (self.heads, HEAD_DIM)), None, self.eps)
        q = apply_rope(q, self.rope, positions)
        kv = apply_rope(self.kv_norm(self.wkv(rows)), self.rope, positions)
        extra: dict[str, Any] = {}
        if self.compressor is not None:
            extra["kv_score"] = self.compressor(rows)
        if self.indexer is not None:
            extra["index_q"], extra["index_weights"], extra["index_kv_score"] = self.indexer(rows, q_lora)
            extra["index_scale"] = self.indexer.scale
        out = self.core(q, kv, forward_batch, **extra)
        lora = self.wo_a(out.reshape(x.shape[0], self.groups, -1))
        return self.wo_b(lora.flatten(1))
