"""The model override: reads a checkpoint's own config.json and answers SGLang's questions about state.

`--model-config-parser dsv4_slot` ends here. Touches no device and no pool.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import BaseLinearStateParams, Mamba2StateDType
from sglang.srt.configs.model_config_parser_registry import ModelConfigParserBase
from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

from sglang_dsv4 import cpu_engine
from sglang_dsv4.geometry import HEAD_DIM, PAGE_SIZES, Geometry
from sglang_dsv4.refusals import ARCHITECTURE, Refused, refuse_checkpoint, store_format
from sglang_dsv4.server_defaults import mark_fp4_experts

MODEL_TYPE = "deepseek_v4"

_parsed = False
_Base: Any = _CONFIG_REGISTRY[MODEL_TYPE]


@dataclass(kw_only=True, frozen=True)
class SlotStateParams(BaseLinearStateParams):
    """What SGLang's sizing asks of a state model; bytes come from the geometry, not from these shapes."""

    slot_bytes: int

    @property
    def shape(self) -> SimpleNamespace:
        return SimpleNamespace(
            conv=[(1, 1)],
            temporal=(1, 1, 0),
            num_k_heads_per_tp=1,
            conv_shard_groups=None,
            conv_slice_axis=0,
            disable_conv_window_dedup=True,
        )

    @property
    def mamba_cache_per_req(self) -> int:
        return self.slot_bytes


class DeepseekV4SlotConfig(_Base):
    """SGLang's own deepseek_v4 configuration class, with every raw field kept and the state model's answers added."""

    model_type = MODEL_TYPE

    def geometry(self, page_size: int = PAGE_SIZES[0]) -> Geometry:
        """Sizes at a page size, in the row formats chosen for this process."""
        main, index = store_format()
        return Geometry.from_config(self.raw_config, page_size=page_size, store=main, indexer=index)

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return list(range(self.num_hidden_layers))

    @property
    def linear_layer_ids(self) -> list[int]:
        return list(range(self.num_hidden_layers))

    @property
    def mamba_chunk_size(self) -> int:
        """Grid of snapshot positions inside a chunk: the smallest page, at which every compressor tail is empty."""
        return PAGE_SIZES[0]

    @property
    def mamba2_cache_params(self) -> SlotStateParams:
        return SlotStateParams(
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
            layers=self.linear_layer_ids,
            slot_bytes=self.geometry().slot_bytes,
        )


def build_config(raw: dict[str, Any]) -> DeepseekV4SlotConfig:
    """Configuration of a raw config.json mapping. Raises `Refused` for a checkpoint that the pools cannot hold."""
    refuse_checkpoint(raw)
    config: Any = DeepseekV4SlotConfig(**raw)
    # The transformers base class reshapes or drops some released fields; the raw values are what the model means.
    for name, value in raw.items():
        setattr(config, name, value)
    config.architectures = [ARCHITECTURE]
    config.raw_config = dict(raw)
    config.v_head_dim = HEAD_DIM  # keys are values; the base class has another model's width
    if raw.get("n_group") is not None:
        # The released file carries V3's topk_group; V4 has no group limit.
        config.topk_group = raw["n_group"]
    return config


class SlotConfigParser(ModelConfigParserBase):
    """Reads `config.json` of a local folder or a hub repository."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> DeepseekV4SlotConfig:
        path = Path(model) / "config.json"
        if not path.is_file():
            from transformers.utils import cached_file

            found = cached_file(str(model), "config.json", revision=revision)
            if found is None:
                raise Refused(
                    f"{model} has no config.json: pass a DeepSeek-V4 checkpoint folder or repository"
                )
            path = Path(found)
        global _parsed
        _parsed = True
        register_models()
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            cpu_engine.prepare()
        try:
            raw = json.loads(path.read_text())
        except ValueError as error:
            raise Refused(f"{path} is not JSON", str(error), "fetch the checkpoint's config.json again") from None
        mark_fp4_experts(raw, str(model))
        return build_config(raw)


def register_models() -> None:
    """Enter the model class into SGLang's registry, in this process only; called where our parser runs."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models[ARCHITECTURE] = host()


def host() -> type:
    """The model around the attention: SGLang's own on CUDA, the pure-torch one where SGLang serves on a CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not torch.cuda.is_available():
        from sglang_dsv4.models.torch_host import DeepseekV4SlotForCausalLM as TorchHost

        return TorchHost
    from sglang_dsv4.models.in_tree_host import DeepseekV4SlotForCausalLM as InTreeHost

    return InTreeHost


def serves_ours() -> bool:
    """True in a process that has parsed a checkpoint for our model."""
    return _parsed


def is_ours(model_config: Any) -> bool:
    """True for a ModelConfig that our parser made."""
    return isinstance(getattr(model_config, "hf_config", None), DeepseekV4SlotConfig)
