"""One attention layer of one step: the order in which the operations run. No SGLang here.

Prefill:  flush, gather, append_window, (index), sparse_prefill. `gather` stands before `append_window` because a
          128-row ring cannot serve more than one query: the chunk would overwrite the history it still needs.
Decode:   flush, append_window, (index), sparse_attention, so that a block's last token sees its own entry.

What a layer computes from its input is asked for when it is needed (`Projections`), so that in a captured decode
step entries, window and index choice can run beside the query's projection (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sglang_dsv4.attention.lanes import ENTRIES, INDEX, WINDOW, Lanes, NoLanes
from sglang_dsv4.cache.handle import CacheHandle, LayerCache
from sglang_dsv4.geometry import CSA_RATIO, HCA_RATIO, HEAD_DIM
from sglang_dsv4.geometry import WINDOW as WINDOW_ROWS
from sglang_dsv4.ops.append_window import WindowNorm
from sglang_dsv4.ops.decode_rows import DecodeRows
from sglang_dsv4.ops.dispatch import Operations
from sglang_dsv4.ops.flush import CompressorParams
from sglang_dsv4.ops.index_scores import many_queries
from sglang_dsv4.ops.meta import StepMeta, Workspace, all_entry_ids
from sglang_dsv4.ops.score_plan import ScorePlan

# Scores of a prefill step that exist at a time: 256 MB.
SCORE_BUDGET = 1 << 26


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


class Projections(Protocol):
    """What a layer makes of its input. Every method is called at most once a step and layer; in decode on streams of
    their own, so `entries` and `head_weights` use the input alone, the others what `prepare` left besides."""

    def prepare(self) -> None:
        """What `raw_window`, `index_query` and `query` share; called before them."""
        ...

    def entries(self) -> tuple[Tensor, Tensor | None]:
        """float32 [N, 2 * coff * 512], C then Z without ape; and for CSA the indexer's, float32 [N, 512]."""
        ...

    def raw_window(self) -> tuple[Tensor, WindowNorm | None]:
        """float [N, 512], and what is still to be done to it."""
        ...

    def head_weights(self) -> tuple[Tensor, float]:
        """float [N, heads] and what it is to be multiplied by. CSA only."""
        ...

    def index_query(self) -> Tensor:
        """float [N, heads, 128], not rotated. CSA only."""
        ...

    def query(self) -> Tensor:
        """float [N, H, 512], normed and rotated."""
        ...


@dataclass
class LayerInputs:
    """Projections of this step's tokens that are there already.

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

    def prepare(self) -> None:
        pass

    def entries(self) -> tuple[Tensor, Tensor | None]:
        assert self.kv_score is not None
        return self.kv_score, self.index_kv_score

    def raw_window(self) -> tuple[Tensor, WindowNorm | None]:
        return self.kv, None

    def head_weights(self) -> tuple[Tensor, float]:
        assert self.index_weights is not None
        return self.index_weights, self.index_scale

    def index_query(self) -> Tensor:
        assert self.index_q is not None
        return self.index_q

    def query(self) -> Tensor:
        return self.q


@dataclass
class Step:
    """A step's metadata, the pools, and what the layers of one kind share in it.

    prefix_lens, seq_lens   host lengths, prefill only; max_seq_len is the host bound of any length in the step
    lanes                   side streams of a decode step
    rows                    what a server's decode step was given of it; computed where absent
    scoring                 which requests of a decode step the indexer scores together; each alone where absent
    chose                   told every CSA layer's id and chosen entries, where somebody wants to know
    """

    meta: StepMeta
    cache: CacheHandle
    ops: Operations
    is_decode: bool
    max_seq_len: int
    prefix_lens: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    lanes: Lanes | NoLanes = field(default_factory=NoLanes)
    rows: DecodeRows | None = None
    scoring: ScorePlan | None = None
    chose: Callable[[int, Tensor], None] | None = None
    _shared: dict[object, object] = field(default_factory=dict)
    _workspace: Tensor | None = None

    def shared(self, key: object, build):  # type: ignore[no-untyped-def]
        """Compute once per step what every layer of a kind needs again."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def window_rows(self) -> Tensor:
        return self.shared("window rows", self.meta.window_rows) if self.rows is None else self.rows.window_rows

    def dense_entry_ids(self, ratio: int) -> Tensor:
        width = self.max_seq_len // ratio
        return self.shared(("ids", ratio), lambda: all_entry_ids(self.meta, ratio, width))

    def dense_entry_rows(self, ratio: int) -> tuple[Tensor, Tensor | None]:
        """int32 [N, K] pool rows of all visible entries in order, and the int32 [N] lengths of them if known."""
        if self.rows is not None and ratio == HCA_RATIO:
            return self.rows.hca_rows, self.rows.hca_lens

        def build() -> Tensor:
            requests = self.meta.token_to_req.clamp(min=0)[:, None]
            return self.meta.entry_rows(requests, self.dense_entry_ids(ratio), ratio).int()

        return self.shared(("rows", ratio), build), None

    def plan(self, ratio: int) -> Workspace:
        return self.shared(
            ("plan", ratio), lambda: Workspace.plan(self.prefix_lens, self.seq_lens, ratio, self.meta.device)
        )

    def workspace(self, rows: int, dtype: torch.dtype) -> Tensor:
        """[>= rows, 512], one buffer for all layers of the step."""
        if self._workspace is None or self._workspace.shape[0] < rows or self._workspace.dtype != dtype:
            self._workspace = torch.empty(rows, HEAD_DIM, dtype=dtype, device=self.meta.device)
        return self._workspace


def attend(params: LayerParams, x: Projections, step: Step) -> Tensor:
    """float [N, H, 512]: attention output of one layer, de-rotated; the step's rows and entries are stored."""
    cache = step.cache.layer(params.layer_id)
    if step.is_decode:
        return _decode(params, x, cache, step)
    return _prefill(params, x, cache, step)


def _flush(params: LayerParams, x: Projections, cache: LayerCache, step: Step) -> None:
    if params.ratio == 0:
        return
    kv_score, index_kv_score = x.entries()
    if params.ratio == CSA_RATIO:
        step.ops.flush_csa(
            params.compressor,
            kv_score,
            params.index_compressor,
            index_kv_score,
            cache.overlap,
            cache.tail,
            cache.entries,
            cache.index_keys,
            step.meta,
            codec=cache.codec,
            index_codec=cache.index_codec,
        )
    else:
        step.ops.flush_hca(params.compressor, kv_score, cache.tail, cache.entries, step.meta, codec=cache.codec)


def _choose(
    params: LayerParams,
    x: Projections,
    head_weights: tuple[Tensor, float],
    cache: LayerCache,
    step: Step,
    *,
    first: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """int32 [N, k] entries that a CSA layer's tokens attend to: pool rows, or with `first`, int32 [N], workspace rows.

    `first` is the workspace row of the first entry of each token's request; `out`, int32 [N, k], takes the result.
    """
    raw_weights, scale = head_weights
    query, weights = step.ops.index_query(
        x.index_query(),
        raw_weights,
        params.rope,
        step.meta.positions,
        codec=cache.index_codec,
        scale=scale,
        many=many_queries(step.meta),
    )
    width = step.max_seq_len // CSA_RATIO
    tokens, slices = step.meta.num_tokens, _score_slices(step, width)
    if out is None and len(slices) > 1:
        out = torch.empty(tokens, params.index_topk, dtype=torch.int32, device=query.device)
    for start, stop in slices:
        meta = step.meta if stop - start == tokens else step.meta.tokens(start, stop)
        scores = step.ops.index_scores(
            query[start:stop],
            weights[start:stop],
            cache.index_keys,
            meta,
            codec=cache.index_codec,
            max_entries=width,
            plan=step.scoring,
        )
        entries = step.ops.index_topk(
            scores,
            meta,
            topk=params.index_topk,
            physical=first is None,
            first=None if first is None else first[start:stop],
            out=None if out is None else out[start:stop],
        )
    entries = entries if out is None else out
    if step.chose is not None:
        step.chose(params.layer_id, entries)
    return entries


def _score_slices(step: Step, width: int) -> list[tuple[int, int]]:
    """Token ranges whose scores stay within SCORE_BUDGET: a chunk at a million tokens would take 8.6 GB."""
    tokens = step.meta.num_tokens
    if step.is_decode:
        return [(0, tokens)]
    rows = max(1, SCORE_BUDGET // max(1, width))
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _decode(params: LayerParams, x: Projections, cache: LayerCache, step: Step) -> Tensor:
    lanes, rows, lens, entries = step.lanes, None, None, None
    with lanes.lane(ENTRIES):
        _flush(params, x, cache, step)
    if params.ratio and step.max_seq_len >= params.ratio:
        entries = cache.entries
    chooses = entries is not None and params.ratio == CSA_RATIO
    if chooses:
        with lanes.lane(INDEX):
            head_weights = x.head_weights()
    x.prepare()
    with lanes.lane(WINDOW):
        kv, norm = x.raw_window()
        step.ops.append_window(cache.window, kv, step.meta, codec=cache.codec, norm=norm)
    if chooses:
        with lanes.lane(INDEX, after=ENTRIES):
            rows = _choose(params, x, head_weights, cache, step)
    elif entries is not None:
        rows, lens = step.dense_entry_rows(params.ratio)
    window_rows = step.window_rows()
    q = x.query()
    lanes.join()
    return step.ops.sparse_attention(
        q,
        cache.window,
        window_rows,
        entries,
        rows,
        params.sink,
        params.rope,
        step.meta.positions,
        scale=params.scale,
        codec=cache.codec,
        entry_lens=lens,
    )


def _prefill(params: LayerParams, x: Projections, cache: LayerCache, step: Step) -> Tensor:
    _flush(params, x, cache, step)
    x.prepare()
    kv, norm = x.raw_window()
    if norm is not None:
        kv = step.ops.norm_window(kv, norm, step.meta.positions)
    plan = step.plan(params.ratio)
    dtype = torch.bfloat16 if cache.codec.layout.name == "fp8" else torch.float32
    workspace = step.workspace(plan.num_rows, dtype)
    step.ops.gather(workspace, cache.window, kv, cache.entries, step.meta, plan, ratio=params.ratio, codec=cache.codec)
    step.ops.append_window(cache.window, kv, step.meta, codec=cache.codec)
    indices = _prefill_indices(params, x, cache, step, plan)
    return step.ops.sparse_prefill(
        x.query(), workspace, indices, params.sink, params.rope, step.meta.positions, scale=params.scale
    )


def _prefill_indices(params: LayerParams, x: Projections, cache: LayerCache, step: Step, plan: Workspace) -> Tensor:
    """int32 [N, K] workspace rows that each token attends to, -1 masked.

    The layers of a kind share one tensor. Those of CSA write what they choose into it, each for itself.
    """
    ratio, meta = params.ratio, step.meta
    if not ratio or step.max_seq_len < ratio:
        return step.shared(("indices", ratio), lambda: plan.indices(meta))
    if ratio != CSA_RATIO:
        return step.shared(("indices", ratio), lambda: plan.indices(meta, step.dense_entry_ids(ratio)))
    topk = params.index_topk
    indices = step.shared(("indices", ratio, topk), lambda: plan.indices(meta, room=topk))
    first = step.shared(("first entries", ratio), lambda: plan.first_entries(meta))
    _choose(params, x, x.head_weights(), cache, step, first=first, out=indices[:, WINDOW_ROWS : WINDOW_ROWS + topk])
    return indices
