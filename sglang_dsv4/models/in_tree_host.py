"""SGLang's in-tree DeepSeek-V4 with its attention replaced: the model that a CUDA device serves.

Weights, their loading, MoE, residual streams, quantisation and tensor parallelism are SGLang's own code; a layer's
attention is built by `SlotDecoderLayer` instead and has the in-tree parameters under the in-tree names. Nothing here
changes SGLang's module for a model that is built elsewhere in the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.layer_boundary import get_attn_tp_context
from sglang.srt.models import deepseek_v4 as in_tree
from sglang.srt.runtime_context import process_model_config
from torch import Tensor

from sglang_dsv4.attention.layer import SlotRadixAttention
from sglang_dsv4.geometry import INDEX_DIM
from sglang_dsv4.ops.append_window import WindowNorm
from sglang_dsv4.ops.flush import CompressorParams
from sglang_dsv4.refusals import Refused

# SGLang may run a request a few positions past the context length before it stops it.
_MARGIN = 128

_rope_tables: dict[tuple[Any, ...], Tensor] = {}


def rope_rows(attention: Any) -> Tensor:
    """float32 [positions, 64], cosines then sines, of an in-tree layer's own frequencies; layers of a kind share it.

    It reaches as far as the served context, not as the model: a million rows would take 256 MiB.
    """
    length = min(process_model_config().context_len + _MARGIN, attention.freqs_cis.shape[0])
    key = (length, attention.freqs_cis.device, *sorted(attention.rope_kwargs.items()))
    if key not in _rope_tables:
        frequencies = attention.freqs_cis[:length]
        _rope_tables[key] = torch.cat([frequencies.real, frequencies.imag], dim=-1).float().contiguous()
    return _rope_tables[key]


def plain_ape(compressor: Any, out: Tensor) -> None:
    """Write an in-tree compressor's position biases to `out` [ratio, coff * c] in the checkpoint's order.

    The in-tree loader reorders the biases of overlapping blocks: first all rows of one half, then of the other.
    """
    ape = compressor.ape.data
    if compressor.overlap and compressor.ape_converted:
        first, second = ape.view(2, compressor.ratio, compressor.head_dim)
        ape = torch.cat([first, second], dim=-1)
    out.copy_(ape)


class SlotMQALayer(in_tree.MQALayer):
    """The in-tree attention module around `SlotRadixAttention`.

    It keeps the parameters, and what the decoder layer and the loader touch; the in-tree cache is never asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = args[0] if args else kwargs["config"]
        ape = {}
        for name, owner in (("ape_main", self), ("ape_index", self.indexer)):
            if owner is not None and owner.compressor is not None:
                ape[name] = torch.empty_like(owner.compressor.ape.data)
                self.register_buffer(name, ape[name], persistent=False)
        self.register_buffer("sink_local", torch.empty(self.n_local_heads, dtype=torch.float32), persistent=False)
        rope = rope_rows(self)

        def pooling(owner: Any, name: str) -> CompressorParams:
            norm = owner.compressor.norm
            return CompressorParams(ape[name], norm.weight.data, norm.variance_epsilon, rope)

        self.attn_mqa = SlotRadixAttention(
            layer_id=self.layer_id,
            ratio=self.compress_ratio,
            num_heads=self.n_local_heads,
            scale=self.softmax_scale,
            sink=self.sink_local,
            rope=rope,
            compressor=pooling(self, "ape_main") if self.compressor is not None else None,
            index_compressor=pooling(self.indexer, "ape_index") if self.indexer is not None else None,
            index_topk=config.index_topk,
        )
        self._current = False

    def refresh_attn_sink_cache(self) -> None:
        """Copy what attention keeps in another form; SGLang calls this after every loading of weights."""
        first = self.attn_tp_rank * self.n_local_heads
        self.sink_local.copy_(self.attn_sink.data[first : first + self.n_local_heads])
        if self.compressor is not None:
            plain_ape(self.compressor, self.ape_main)
        if self.indexer is not None:
            plain_ape(self.indexer.compressor, self.ape_index)
        self._current = True

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        forward_batch: Any,
        x_quant: Any = None,
        defer_all_reduce: bool = False,
    ) -> Any:
        """`x [N, hidden]`, `positions int64 [N]`; what the in-tree module returns."""
        if not get_attn_tp_context().input_scattered and x.shape[0] == 0:
            return x
        if not self._current:
            self.refresh_attn_sink_cache()
        projections = LayerProjections(self, x, x if x_quant is None else x_quant, positions)
        out = self.attn_mqa.run(projections, forward_batch)
        return self._project_wo_b(self._project_wo_a(out), defer_all_reduce)

    def _project_wo_a(self, out: Tensor) -> Tensor:
        """[N, groups, o_lora_rank] of attention outputs [N, heads, 512], which are de-rotated already."""
        groups, rank = self.n_local_groups, self.o_lora_rank
        out = out.view(out.shape[0], groups, -1)
        if not self.wo_a_fp8:
            return torch.einsum("tgd,grd->tgr", out, self.wo_a.weight.view(groups, rank, -1))
        tokens, _, width = out.shape
        if in_tree._FP8_WO_A_UE8M0:
            codes, scales = in_tree.sglang_per_token_group_quant_fp8_dsv4_wo_a(out)
            recipe = (1, 1, 128)
        else:
            codes, scales = in_tree.sglang_per_token_group_quant_fp8(
                out.reshape(tokens * groups, width).contiguous(), group_size=128, scale_ue8m0=False
            )
            codes, scales = codes.view(tokens, groups, width), scales.view(tokens, groups, -1)
            recipe = (1, 128, 128)
        weight = self.wo_a.weight.view(groups, rank, width)
        return in_tree._fp8_wo_a_einsum(codes, scales, weight, self.wo_a.weight_scale_inv.data, recipe=recipe)


class LayerProjections:
    """`core.Projections` of an in-tree layer, with its fused kernels; results live until the layer returns."""

    def __init__(self, layer: SlotMQALayer, x: Tensor, x_linear: Any, positions: Tensor) -> None:
        self.layer = layer
        self.x = x
        self.x_linear = x_linear
        self.positions = positions
        self._kept: list[Any] = []

    def prepare(self) -> None:
        layer = self.layer
        if layer.fuse_wqa_wkv:
            both, _ = layer.wqkv_a(self.x_linear)
            latent, self.kv = both[..., : layer.q_lora_rank], both[..., layer.q_lora_rank :]
        else:
            latent, _ = layer.wq_a(self.x_linear)
            self.kv, _ = layer.wkv(self.x_linear)
        self.latent, self.latent_linear = layer._normalize_q_lora(latent)

    def entries(self) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        main = self._keep(layer.compressor._compute_wkv_gate(self.x))
        if layer.indexer is None:
            return main, None
        return main, self._keep(layer.indexer.compressor._compute_wkv_gate(self.x))

    def raw_window(self) -> tuple[Tensor, WindowNorm]:
        layer = self.layer
        return self.kv, WindowNorm(layer.kv_norm.weight.data, layer.eps, layer.attn_mqa.params.rope)

    def head_weights(self) -> tuple[Tensor, float]:
        indexer = self.layer.indexer
        return self._keep(indexer.weights_proj(self.x)[0]), indexer.weight_scale

    def index_query(self) -> Tensor:
        indexer = self.layer.indexer
        return self._keep(indexer.wq_b(self.latent)[0]).view(-1, indexer.n_heads, INDEX_DIM)

    def query(self) -> Tensor:
        return self._keep(self.layer._compute_q_b(self.latent_linear, self.positions))

    def _keep(self, value: Tensor) -> Tensor:
        self._kept.append(value)
        return value


class SlotDecoderLayer(in_tree.DeepseekV4DecoderLayer):
    """The in-tree decoder layer, built around `SlotMQALayer`."""

    def _build_self_attn(self, **kwargs: Any) -> SlotMQALayer:
        return SlotMQALayer(**kwargs)


@contextmanager
def _slot_layers() -> Iterator[None]:
    """The in-tree model looks its layer class up in its own module while it is built."""
    saved = in_tree.DeepseekV4DecoderLayer
    in_tree.DeepseekV4DecoderLayer = SlotDecoderLayer
    try:
        yield
    finally:
        in_tree.DeepseekV4DecoderLayer = saved


class DeepseekV4SlotForCausalLM(in_tree.DeepseekV4ForCausalLM):
    """SGLang's DeepSeek-V4 over pages and slots. Raises Refused where the in-tree module does not take the layer."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        with _slot_layers():
            super().__init__(config, quant_config, prefix)
        for layer in self.model.layers:
            attention = getattr(layer, "self_attn", None)
            if not isinstance(attention, SlotMQALayer):
                raise Refused(
                    f"layer {getattr(layer, 'layer_id', '?')} has {type(attention).__name__} for attention",
                    "SGLang's model was not built around the slot attention",
                    "run `sglang-dsv4 check`",
                )


EntryClass = DeepseekV4SlotForCausalLM
