"""One attention layer of one step: the order in which the operations run. No SGLang here.

Prefill:  flush, gather, append_window, (index), sparse_prefill. `gather` stands before `append_window` because a
          128-row ring cannot serve more than one query: the chunk would overwrite the history it still needs.
Decode:   flush, append_window, (index), sparse_attention, so that a block's last token sees its own entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_dsv4.cache.handle import CacheHandle, LayerCache
from sglang_dsv4.geometry import CSA_RATIO, HEAD_DIM
from sglang_dsv4.ops.dispatch import Operations
from sglang_dsv4.ops.flush import CompressorParams
from sglang_dsv4.ops.meta import StepMeta, Workspace, all_entry_ids


@dataclass
class LayerParams:
    """What attention needs of a layer besides its inputs.

    sink   float32 [H], a logit per head
    rope   float32 [positions, 64], cos of 32 pairs then sin, of the layer's own base
    """

    layer_id: int
    ratio: int
    num_heads: int
    scale: float
    sink: Tensor
    rope: Tensor
    compressor: CompressorParams | None = None
    index_compressor: CompressorParams | None = None
    index_topk: int = 0


@dataclass
class LayerInputs:
    """Projections of this step's tokens.

    q               float [N, H, 512], normed and rotated
    kv              float [N, 512], normed and rotated
    kv_score        float32 [N, 2 * coff * 512], C then Z without ape; CSA and HCA
    index_kv_score  float32 [N, 512], the same for the indexer; CSA
    index_q         float [N, heads, 128], neither rotated nor rounded; CSA
    index_weights   float [N, heads], still to be multiplied by index_scale; CSA
    """

    q: Tensor
    kv: Tensor
    kv_score: Tensor | None = None
    index_kv_score: Tensor | None = None
    index_q: Tensor | None = None
    index_weights: Tensor | None = None
    index_scale: float = 1.0


@dataclass
class Step:
    """A step's metadata, the pools, and what the layers of one kind share in it.

    prefix_lens, seq_lens   host lengths, prefill only; max_seq_len is the host bound of any length in the step
    """

    meta: StepMeta
    cache: CacheHandle
    ops: Operations
    is_decode: bool
    max_seq_len: int
    prefix_lens: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    _shared: dict[object, object] = field(default_factory=dict)
    _workspace: Tensor | None = None

    def shared(self, key: object, build):  # type: ignore[no-untyped-def]
        """Compute once per step what every layer of a kind needs again."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def window_rows(self) -> Tensor:
        return self.shared("window rows", self.meta.window_rows)

    def dense_entry_ids(self, ratio: int) -> Tensor:
        width = self.max_seq_len // ratio
        return self.shared(("ids", ratio), lambda: all_entry_ids(self.meta, ratio, width))

    def dense_entry_rows(self, ratio: int) -> Tensor:
        def build() -> Tensor:
            requests = self.meta.token_to_req.clamp(min=0)[:, None]
            return self.meta.entry_rows(requests, self.dense_entry_ids(ratio), ratio).int()

        return self.shared(("rows", ratio), build)

    def plan(self, ratio: int) -> Workspace:
        return self.shared(
            ("plan", ratio), lambda: Workspace.plan(self.prefix_lens, self.seq_lens, ratio, self.meta.device)
        )

    def workspace(self, rows: int, dtype: torch.dtype) -> Tensor:
        """[>= rows, 512], one buffer for all layers of the step."""
        if self._workspace is None or self._workspace.shape[0] < rows or self._workspace.dtype != dtype:
            self._workspace = torch.empty(rows, HEAD_DIM, dtype=dtype, device=self.meta.device)
        return self._workspace


def attend(params: LayerParams, x: LayerInputs, step: Step) -> Tensor:
    """float [N, H, 512]: attention output of one layer, de-rotated; the step's rows and entries are stored."""
    cache = step.cache.layer(params.layer_id)
    _flush(params, x, cache, step)
    if step.is_decode:
        return _decode(params, x, cache, step)
    return _prefill(params, x, cache, step)


def _flush(params: LayerParams, x: LayerInputs, cache: LayerCache, step: Step) -> None:
    if params.ratio == 0:
        return
    if params.ratio == CSA_RATIO:
        step.ops.flush_csa(
            params.compressor,
            x.kv_score,
            params.index_compressor,
            x.index_kv_score,
            cache.overlap,
            cache.tail,
            cache.entries,
            cache.index_keys,
            step.meta,
            codec=cache.codec,
            index_codec=cache.index_codec,
        )
    else:
        step.ops.flush_hca(
            params.compressor, x.kv_score, cache.tail, cache.entries, step.meta, codec=cache.codec
        )


def _selected(
    params: LayerParams, x: LayerInputs, cache: LayerCache, step: Step, *, physical: bool
) -> Tensor | None:
    """int32 [N, K] entry ids or pool rows that each token attends to; None where there are none at all."""
    if params.ratio == 0 or step.max_seq_len < params.ratio:
        return None
    if params.ratio != CSA_RATIO:
        return step.dense_entry_rows(params.ratio) if physical else step.dense_entry_ids(params.ratio)
    query, weights = step.ops.index_query(
        x.index_q,
        x.index_weights,
        params.rope,
        step.meta.positions,
        codec=cache.index_codec,
        scale=x.index_scale,
    )
    scores = step.ops.index_scores(
        query,
        weights,
        cache.index_keys,
        step.meta,
        codec=cache.index_codec,
        max_entries=step.max_seq_len // CSA_RATIO,
    )
    return step.ops.index_topk(scores, step.meta, topk=params.index_topk, physical=physical)


def _decode(params: LayerParams, x: LayerInputs, cache: LayerCache, step: Step) -> Tensor:
    step.ops.append_window(cache.window, x.kv, step.meta, codec=cache.codec)
    rows = _selected(params, x, cache, step, physical=True)
    return step.ops.sparse_attention(
        x.q,
        cache.window,
        step.window_rows(),
        cache.entries if rows is not None else None,
        rows,
        params.sink,
        params.rope,
        step.meta.positions,
        scale=params.scale,
        codec=cache.codec,
    )


def _prefill(params: LayerParams, x: LayerInputs, cache: LayerCache, step: Step) -> Tensor:
    plan = step.plan(params.ratio)
    dtype = torch.bfloat16 if cache.codec.layout.name == "fp8" else torch.float32
    workspace = step.workspace(plan.num_rows, dtype)
    step.ops.gather(
        workspace, cache.window, x.kv, cache.entries, step.meta, plan, ratio=params.ratio, codec=cache.codec
    )
    step.ops.append_window(cache.window, x.kv, step.meta, codec=cache.codec)
    indices = step.shared(("window", params.ratio), lambda: plan.window_indices(step.meta))
    ids = _selected(params, x, cache, step, physical=False)
    if ids is not None:
        indices = torch.cat([indices, plan.entry_indices(step.meta, ids)], dim=1)
    return step.ops.sparse_prefill(
        x.q, workspace, indices, params.sink, params.rope, step.meta.positions, scale=params.scale
    )
