"""The pure-torch model as SGLang sees it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.runtime_context import get_parallel, process_model_config
from torch import Tensor, nn

from sglang_dsv4.models.backbone import SlotModel

# SGLang may run a request a few positions past the context length before it stops it.
_MARGIN = 128


class _InvariantHead(QuantizeMethodBase):
    """Makes the logits processor multiply by the head's own rule instead of a plain matmul."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return layer(args[0], torch.float32)


class DeepseekV4SlotForCausalLM(SlotModel):
    """Entry point of the pure-torch host in SGLang: official weight names, one process, one device.

    Raises ValueError for quantised weights or tensor parallelism.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        if quant_config is not None:
            raise ValueError("the pure-torch host has no quantised weights: use an unquantised checkpoint")
        if get_parallel().tp_size > 1:
            raise ValueError("the pure-torch host runs in one process: use --tp-size 1")
        length = process_model_config().context_len + _MARGIN
        super().__init__(config, length=length, dtype=torch.get_default_dtype())
        self.head.quant_method = _InvariantHead()
        self.logits_processor = LogitsProcessor(config)

    @property
    def lm_head(self) -> nn.Module:
        return self.head

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        **_: Any,
    ) -> LogitsProcessorOutput:
        """`input_ids`, `positions` int `[N]`; logits of the positions that SGLang asks for."""
        hidden = self.hidden_states(input_ids, positions, forward_batch, input_embeds)
        return self.logits_processor(input_ids, hidden, self.head, forward_batch)


EntryClass = DeepseekV4SlotForCausalLM
