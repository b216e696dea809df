"""The attention layer that a model holds: a RadixAttention whose keys are pages and slots."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor

from sglang_dsv4.attention.core import LayerInputs, LayerParams, Projections, Step, attend
from sglang_dsv4.geometry import HEAD_DIM
from sglang_dsv4.ops.flush import CompressorParams


class SlotRadixAttention(RadixAttention):
    """Hands a layer's projections to the backend, which owns the step's metadata and the pools."""

    def __init__(
        self,
        *,
        layer_id: int,
        ratio: int,
        num_heads: int,
        scale: float,
        sink: Tensor,
        rope: Tensor,
        compressor: CompressorParams | None,
        index_compressor: CompressorParams | None,
        index_topk: int,
    ) -> None:
        super().__init__(num_heads, HEAD_DIM, scale, num_kv_heads=1, layer_id=layer_id)
        self.params = LayerParams(
            layer_id, ratio, num_heads, scale, sink, rope, compressor, index_compressor, index_topk
        )

    def forward(
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
        """float [N, H, 512], de-rotated. Shapes of the arguments: `core.LayerInputs`.

        forward_batch  SGLang's ForwardBatch, or a `core.Step` where no server is involved
        """
        inputs = LayerInputs(q, kv, kv_score, index_kv_score, index_q, index_weights, index_scale)
        return self.run(inputs, forward_batch).view(q.shape)

    def run(self, x: Projections, forward_batch: Any) -> Tensor:
        """float [N, H, 512], de-rotated: `forward` for projections that are computed when they are needed."""
        if isinstance(forward_batch, Step):
            return attend(self.params, x, forward_batch)
        return get_attn_backend().forward(None, None, None, self, forward_batch, False, inputs=x)
