"""The whole model in plain torch, without SGLang: embedding, layers, head, checkpoint loading.

It exists for tests, for the demo and for machines without a GPU. Rows never depend on the batch
(`invariant`), so a request gives the same bits alone, in company, in chunks or resumed. It keeps two float64
slices of every weight and runs every expert on every token: fine for a few million parameters, hopeless for
the released checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dsv4.attention.projections import CoreFactory, SlotAttention
from sglang_dsv4.attention.rope import rope_table
from sglang_dsv4.models.invariant import RMSNorm, RowLinear
from sglang_dsv4.models.mhc import HyperConnection, HyperHead
from sglang_dsv4.models.moe import MoE

DRAFT_PREFIX = "mtp."  # the checkpoint's draft layers; this host does not draft
_NAMES_IN_ERROR = 4


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each between a collapse and a merge of the residual streams."""

    def __init__(
        self, config: Any, layer_id: int, rope: Tensor, *, dtype: torch.dtype, core: CoreFactory | None
    ) -> None:
        super().__init__()
        ratio = config.compress_ratios[layer_id]
        self.attn = SlotAttention(config, layer_id, ratio, rope, dtype=dtype, core=core)
        self.ffn = MoE(config, layer_id < config.num_hash_layers, dtype)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)

    def forward(self, streams: Tensor, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        """`streams [N, n, hidden]` in and out."""
        x, post, comb = self.hc_attn(streams)
        x = self.attn(self.attn_norm(x), positions, forward_batch)
        streams = self.hc_attn.merge(x, streams, post, comb)
        x, post, comb = self.hc_ffn(streams)
        x = self.ffn(self.ffn_norm(x), input_ids)
        return self.hc_ffn.merge(x, streams, post, comb)

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by official name below `prefix` (`layers.N`)."""
        named: dict[str, Tensor] = {f"{prefix}.attn.{name}": p for name, p in self.attn.named_parameters()}
        wo_a = self.attn.wo_a.weight
        named[f"{prefix}.attn.wo_a.weight"] = wo_a.view(-1, wo_a.shape[-1])  # stored group after group
        named |= self.ffn.named_tensors(f"{prefix}.ffn")
        named[f"{prefix}.attn_norm.weight"] = self.attn_norm.weight
        named[f"{prefix}.ffn_norm.weight"] = self.ffn_norm.weight
        return named | self.hc_attn.named_tensors(f"{prefix}.hc_attn") | self.hc_ffn.named_tensors(f"{prefix}.hc_ffn")


class SlotModel(nn.Module):
    """DeepSeek-V4 in plain torch.

    config  attribute access to the fields of the checkpoint's own config.json; `compress_ratios` may be
            longer than `num_hidden_layers` (draft layers)
    length  positions that the rotary tables cover: the context that is served
    dtype   of weights and activations, float32 or bfloat16; norms, hyper-connections, compressors and sinks
            stay float32
    core    builds each layer's slot attention, see `SlotAttention`
    Raises ValueError for a configuration outside the released scheme.
    """

    def __init__(
        self, config: Any, *, length: int, dtype: torch.dtype = torch.float32, core: CoreFactory | None = None
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} is not supported: use float32 or bfloat16")
        if getattr(config, "tie_word_embeddings", False):
            raise ValueError("tie_word_embeddings is set; the released models have a head of their own")
        count = config.num_hidden_layers
        if len(config.compress_ratios) < count:
            raise ValueError(f"compress_ratios has {len(config.compress_ratios)} entries for {count} layers")
        self.config, self.dtype = config, dtype
        tables = {ratio: rope_table(config, ratio, length) for ratio in (0, 4)}
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed.weight.requires_grad_(False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, tables[4 if config.compress_ratios[i] else 0], dtype=dtype, core=core)
            for i in range(count)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_head = HyperHead(config)
        self.head = RowLinear(config.hidden_size, config.vocab_size, dtype=dtype)

    def hidden_states(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None
    ) -> Tensor:
        """`[N, hidden]` in front of the head, for `input_ids`, `positions` int `[N]`; normalised."""
        x = self.embed(input_ids) if input_embeds is None else input_embeds.to(self.dtype)
        streams = x.unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for layer in self.layers:
            streams = layer(streams, input_ids, positions, forward_batch)
        return self.norm(self.hc_head(streams))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[N, vocab]` of `hidden [N, hidden]`."""
        return self.head(hidden, torch.float32)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the model by its official checkpoint name; writing to one writes to the model."""
        named: dict[str, Tensor] = {"embed.weight": self.embed.weight}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            named |= layer.named_tensors(f"layers.{i}")
        named["norm.weight"] = self.norm.weight
        named["head.weight"] = self.head.weight
        return named | self.hc_head.named_tensors("hc_head")

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads a whole checkpoint under the official names; draft layers are skipped.

        Raises one ValueError that lists what is missing, unexpected, repeated, mis-shaped, quantised or names experts
        that there are not. Nothing is written before all tensors are there and judged.
        """
        targets, experts = self.named_tensors(), self.config.n_routed_experts
        loaded: dict[str, Tensor] = {}
        kinds = ("unexpected", "repeated", "mis-shaped", "quantised", "of other experts")
        faults: dict[str, list[str]] = {kind: [] for kind in kinds}
        for name, value in weights:
            if name.startswith(DRAFT_PREFIX):
                continue
            target = targets.get(name)
            if target is None:
                faults["quantised" if name.endswith(".scale") else "unexpected"].append(name)
            elif name in loaded:
                faults["repeated"].append(name)
            elif value.shape != target.shape:
                faults["mis-shaped"].append(f"{name} {list(value.shape)} instead of {list(target.shape)}")
            elif value.is_floating_point() != target.is_floating_point() or value.dtype.itemsize == 1:
                faults["quantised"].append(f"{name} ({value.dtype})")
            elif name.endswith(".tid2eid") and not 0 <= int(value.min()) <= int(value.max()) < experts:
                faults["of other experts"].append(f"{name} (there are {experts})")
            loaded[name] = value
        faults["missing"] = sorted(targets.keys() - loaded.keys())
        if any(faults.values()):
            raise ValueError(does_not_fit(faults))
        for name, value in loaded.items():
            targets[name].copy_(value)
        for module in self.modules():
            if isinstance(module, RowLinear):
                module.refresh()


def does_not_fit(faults: Mapping[str, Sequence[str]]) -> str:
    """One line of what does not fit: names of tensors by kind."""
    kinds = []
    for kind, names in faults.items():
        if names:
            more = f", and {len(names) - _NAMES_IN_ERROR} more" if len(names) > _NAMES_IN_ERROR else ""
            hint = " (this host needs float weights)" if kind == "quantised" else ""
            kinds.append(f"{len(names)} {kind}{hint}: {', '.join(names[:_NAMES_IN_ERROR])}{more}")
    return f"the checkpoint does not fit this model: {'; '.join(kinds)}"
