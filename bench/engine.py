"""SGLang's cache without a model: its radix tree, allocators and request records, with our pools, policy and hooks.

Every decision about memory is made by the code that a server runs: `match_prefix`, page and slot allocation,
`plan_snapshots`, `checkpoint`, eviction, release. What a server computes is left out, and so are the bytes: stores are
meta tensors. The order of the calls is that of a server with overlap scheduling, in which a step is prepared before
the result of the one before it is processed; so the last token of an answer is stored too.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_dsv4.cache.granules import SplitPlan, plan_split
from sglang_dsv4.cache.sizing import SLOTS_PER_REQUEST
from sglang_dsv4.geometry import Geometry

Ids = NDArray[np.int64]
VOCABULARY = 1 << 30


@dataclasses.dataclass(frozen=True)
class Limits:
    """A server's memory and steps.

    pages    of `page` tokens
    slots    state slots: running requests and snapshots, the dummy not counted
    running  most requests that run at once
    chunk    most prompt tokens of a step
    context  most tokens of a request
    granule  bytes by which memory moves between pages and slots, which are those at first; 0 if it does not
    """

    pages: int
    slots: int
    running: int = 1
    chunk: int = 8192
    page: int = 128
    context: int = 1 << 18
    granule: int = 0


class Engine:
    """The cache of one server. Requests are generators that do one step at a time; see `start`."""

    def __init__(
        self, limits: Limits, geometry: Geometry, *, user_token: int = 1, plan: SplitPlan | None = None
    ) -> None:
        """user_token begins a user's message, as the chat template's role token does on a server.

        plan  how memory moves; made from the limits if not given
        """
        _publish_config(limits)
        self.limits = limits
        plan = _plan(limits, geometry) if plan is None and limits.granule else plan
        self.pool, self.pages = _build_pools(limits, geometry, plan)
        self.pool.user_token = user_token
        self.tree = _build_tree(self.pool, self.pages, limits.page)
        self.running: list[Run] = []
        self.peak_pages = self.peak_snapshots = 0

    @property
    def snapshots(self) -> int:
        """Snapshots that the tree owns."""
        return int(self.tree.mamba_evictable_size() + self.tree.mamba_protected_size())

    @property
    def used_pages(self) -> int:
        return int(self.pages.size - self.pages.available_size()) // self.limits.page

    def start(self, ids: Ids, answer: Ids, number: int) -> Run:
        """A request with prompt `ids`, int64 [n], that is going to be answered with `answer`, int64 [m]."""
        return Run(self, ids, answer, number)

    def admits(self, run: Run) -> bool:
        """Whether the request may begin now: what others began fits beside it."""
        if len(self.running) >= self.limits.running:
            return False
        needed = len(run.ids) + len(run.answer) + self.limits.page
        if not self.running:
            return needed < self.room()  # nothing else holds memory: to match would only move the tree's clock
        found = run.found()
        lock = self.tree.lock(found.last_device_node)  # what is found cannot be evicted for the rest
        room = self.room() - sum(other.to_store for other in self.running)
        self.tree.unlock(lock)
        return bool(needed - found.device_prefix_len < room)

    def room(self) -> int:
        """Tokens that are free or can be."""
        return int(self.pages.available_size() + self.tree.full_evictable_size())

    def watch(self) -> None:
        self.peak_pages = max(self.peak_pages, self.used_pages)
        self.peak_snapshots = max(self.peak_snapshots, self.snapshots)


class Run:
    """One request. `steps()` is its life: it yields after every step "prefill" if its prompt goes on, else "decode".

    The result of the step that completes the prompt is processed in the next one, unless `prompt_done` comes before.

    most     prompt tokens that the next step may take; several prompts share a step
    decoded  tokens of answer that the last step stands for
    """

    def __init__(self, engine: Engine, ids: Ids, answer: Ids, number: int) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.engine, self.ids, self.answer = engine, ids, answer
        self.answer_left, self.most = len(answer), engine.limits.chunk
        params = SamplingParams(max_new_tokens=len(answer), ignore_eos=True, temperature=0)
        self.req: Any = Req(str(number), "", array("q", ids.tobytes()), params, vocab_size=VOCABULARY)
        self.cached = self.pages_hit = self.decoded = 0
        self.on_snapshot: Callable[[int], None] | None = None

    def found(self) -> Any:
        """What the tree says of the prompt now, without taking anything."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.engine.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", self.ids[:-1].tobytes()))))

    def steps(self) -> Iterator[str]:
        engine = self.engine
        engine.running.append(self)
        engine.tree.published = self.on_snapshot
        self._match()
        yield from self._prefill()
        yield from self._decode()
        self._finish()
        engine.running.remove(self)

    def _match(self) -> None:
        self.req.init_next_round_input(self.engine.tree)
        self.cached = int(self.req.prefix_len)
        self.pages_hit = int(self.engine.tree.last_full_hit)
        self.req.lock = self.engine.tree.lock(self.req.last_node)

    def _prefill(self) -> Iterator[str]:
        """A chunk enters the tree before the next."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        engine, req, first = self.engine, self.req, True
        while True:
            length = self.most
            if not first:
                room = engine.room()
                room -= sum(run.to_store for run in engine.running if run is not self)
                length = min(length, room) if room > 0 else length
            req.extend_end = min(len(self.ids), req.prefix_len + length)
            self._extend()
            first = False
            engine.watch()
            if req.extend_end == len(self.ids):
                yield "decode"
                return
            yield "prefill"
            engine.tree.published = self.on_snapshot
            checkpoint_kv_cache(req, engine.tree)

    @property
    def to_store(self) -> int:
        """Tokens for which it is going to ask, up to a whole page."""
        return len(self.ids) - int(self.req.extend_end) + self.answer_left + self.engine.limits.page

    @property
    def pages_of_step(self) -> int:
        """Pages of prompt that the last step took, to be asked right after it."""
        return -(-self.req.extend_len // self.engine.limits.page)

    def publish_ahead(self, waiting: Sequence[Ids]) -> None:
        """The prompt is complete, and a prefill step is prepared for such prompts before its result is processed."""
        from sglang_dsv4.cache.publish import publish_ahead

        self.engine.tree.published = self.on_snapshot
        others = [SimpleNamespace(origin_input_ids=array("q", ids.tobytes()), extra_key=None) for ids in waiting]
        publish_ahead(self.engine.tree, [self.req], others)

    def prompt_done(self) -> None:
        """Process the result of the step that completed the prompt, once."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        if not self.req.output_ids:
            self.req.output_ids = array("q", self.answer[:1].tobytes())
            if len(self.answer) > 1:
                self.engine.tree.published = self.on_snapshot
                checkpoint_kv_cache(self.req, self.engine.tree)

    def _extend(self) -> None:
        from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_req_slots

        from sglang_dsv4.cache.publish import plan_snapshots

        engine, req = self.engine, self.req
        pool, tree, start, end = engine.pool, engine.tree, req.prefix_len, req.extend_end
        fresh = not req.kv.holds_kv
        prefix = tree.prefix_device_indices(req) if fresh and start else torch.empty(0, dtype=torch.int64)
        batch = SimpleNamespace(req_to_token_pool=pool, tree_cache=tree, reqs=[req])
        row = alloc_req_slots(pool, [req], tree)[0]
        if fresh:
            pool.req_to_token[row, :start] = prefix
        last = pool.req_to_token[row, start - 1 : start].long() if start else torch.tensor([-1])
        starts, ends = torch.tensor([start]), torch.tensor([end])
        found = alloc_paged_token_slots_extend(tree, starts, starts, ends, ends, last, end - start)
        pool.req_to_token[row, start:end] = found
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        plan_snapshots(batch, req)
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False

    def _decode(self) -> Iterator[str]:
        """Steps that need a page, and the one after each, are done one by one; the others change no memory."""
        engine, page = self.engine, self.engine.limits.page
        prompt, total = len(self.ids), len(self.ids) + len(self.answer)
        length = prompt
        while length < total:
            begin, length = length, min(total, length // page * page + page)
            self._store_decoded(begin, begin + 1)
            if begin == prompt:  # the prompt's result is processed after the first step has been prepared
                self.prompt_done()
            if length > begin + 1:
                self._store_decoded(begin + 1, length)
            if length % page == 0:
                self._track(length)
            self.answer_left, self.decoded = total - length, length - begin
            engine.watch()
            yield "decode"

    def _store_decoded(self, begin: int, end: int) -> None:
        from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode

        kv, table = self.req.kv, self.engine.pool.req_to_token
        last = table[kv.req_pool_idx, begin - 1 : begin].long()
        lengths = torch.tensor([begin + 1])
        try:
            first = int(alloc_paged_token_slots_decode(self.engine.tree, lengths, lengths, last)[0])
        except RuntimeError as error:  # what was room when the request was let in has become snapshots since
            told = "running requests are out of pages, where a server takes one back: give more memory"
            raise ValueError(told) from error
        table[kv.req_pool_idx, begin:end] = torch.arange(first, first + end - begin, dtype=table.dtype)
        kv.kv_allocated_len = kv.kv_committed_len = end

    def _track(self, length: int) -> None:
        """A decode snapshot: the tracking slots change places."""
        kv = self.req.kv
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.engine.pool.get_mamba_ping_pong_other_idx(kv.mamba_last_track_idx)
        kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, length

    def _finish(self) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        self.req.output_ids = array("q", self.answer.tobytes())
        self.req.finished_reason = FINISH_LENGTH(length=len(self.answer))
        self.req.finished_len = len(self.answer)
        self.engine.tree.published = self.on_snapshot
        release_kv_cache(self.req, self.engine.tree, checkpoint=True)
        self.answer_left = 0


def _publish_config(limits: Limits) -> None:
    """SGLang's components read their settings from a process-wide record."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    from sglang_dsv4.refusals import DEFAULT_PER_PATH

    args = ServerArgs(
        model_path="dummy", page_size=limits.page, device="cpu", mamba_max_states_per_path=DEFAULT_PER_PATH
    )
    args._mamba_cache_chunk_size = limits.page
    set_global_server_args_for_scheduler(args)


def request_pool_arguments(running: int, slots: int, context: int) -> dict[str, Any]:
    """What SGLang constructs a request pool of a hybrid model with, here of bookkeeping on a CPU."""
    return {
        "size": running,
        "mamba_size": slots,
        "mamba_spec_state_size": running,
        "max_context_len": context,
        "device": "cpu",
        "enable_memory_saver": False,
        "cache_params": SimpleNamespace(dtype=SimpleNamespace(conv=torch.uint8)),
        "mamba_layer_ids": [0],
        "enable_mamba_extra_buffer": True,
        "enable_overlap_schedule": True,
    }


def _build_pools(limits: Limits, geometry: Geometry, plan: SplitPlan | None) -> tuple[Any, Any]:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from sglang_dsv4.cache.backing import memory_behind
    from sglang_dsv4.cache.movable import MovablePages
    from sglang_dsv4.cache.pages import PagePool
    from sglang_dsv4.cache.slots import SlotReqToTokenPool, building

    moving = None if plan is None else memory_behind("meta", plan)
    with building(geometry, store_device="meta", moving=moving):
        slots = limits.slots if plan is None else plan.slots
        pool = SlotReqToTokenPool(**request_pool_arguments(limits.running, slots, limits.context))
    if moving is not None:
        tokens = moving.plan.pages * limits.page
        store = PagePool(geometry, tokens, "meta", backing=moving.pages)
        return pool, MovablePages(tokens, limits.page, torch.uint8, "cpu", store, False)
    tokens = limits.pages * limits.page
    store = PagePool(geometry, tokens, "meta")
    return pool, PagedTokenToKVPoolAllocator(tokens, limits.page, torch.uint8, "cpu", store, False)


def _plan(limits: Limits, geometry: Geometry) -> SplitPlan:
    """The bytes of the split at first, to move from there. Begins with fewer slots where granules leave a request too
    few pages. Raises ValueError where they leave too few anyway."""
    kept, pages = SLOTS_PER_REQUEST * limits.running, limits.context // limits.page  # the longest request and one
    budget = geometry.slot_pool_bytes(limits.slots + 1) + geometry.page_pool_bytes((limits.pages + 1) * limits.page)
    slots = limits.slots
    while True:
        try:
            return plan_split(
                geometry, budget, slots=slots, least_slots=kept, least_pages=pages, granule=limits.granule
            )
        except ValueError:
            if slots == kept:
                raise
            slots -= 1


def _build_tree(pool: Any, pages: Any, page: int) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_dsv4.cache import superseded
    from sglang_dsv4.cache.publish import checkpoint

    class Tree(UnifiedRadixCache):
        """SGLang's tree, wrapped as the plugin wraps it, without touching the class that others use."""

        published: Callable[[int], None] | None = None
        last_full_hit = 0

        def match_prefix(self, params: Any) -> Any:
            result = super().match_prefix(params)
            self.last_full_hit = result.full_kv_hit_length
            return result

        def insert(self, params: Any) -> Any:
            result = super().insert(params)
            if self.published is not None and params.mamba_value is not None:
                self.published(len(params.key))
            return result

        def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
            checkpoint(UnifiedRadixCache.checkpoint_into_tree, self, req, up_to=up_to, **kwargs)

        def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
            return superseded.evict_for_alloc(UnifiedRadixCache.evict_for_alloc, self, params, **kwargs)

        def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
            return superseded.evict_leaf(UnifiedRadixCache._evict_device_leaf, self, node_id, tracker)

        def _apply_cache_action(self, action: Any) -> None:
            if not superseded.defer(self, action):
                super()._apply_cache_action(action)

    return Tree(
        CacheInitParams(
            disable=False,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=pages,
            page_size=page,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            enable_mamba_extra_buffer=True,
        )
    )
