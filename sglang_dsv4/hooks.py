"""Every place where SGLang's code is wrapped, with the signature that the wrapper was written for.

All wrappers act on our own config class only and hand everything else to SGLang unchanged. SGLang logs a hook
that fails to apply and goes on, so targets are checked by signature before registration, and the backend refuses
to exist over pools that are not ours.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"


@dataclass
class _Sized:
    """What sizing decided in this process, between its hooks: SGLang's configurator takes no attributes.

    granule  in which memory moves between slots and pages; 0 if it does not
    tokens   of pages
    """

    granule: int = 0
    tokens: int = 0


_sized = _Sized()


@dataclass(frozen=True)
class Hook:
    """A wrapped target.

    target    dotted path
    expected  parameter names of the target in SGLang 0.5.23, `self` included
    wrapper   called with the original first (AROUND)
    purpose   what breaks without it
    """

    target: str
    expected: tuple[str, ...]
    wrapper: Callable[..., Any]
    purpose: str

    def problem(self) -> str | None:
        """One line if the target is missing or has another signature, else None."""
        try:
            found = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} is missing ({error}): {self.purpose}; install the tested SGLang version"
        names = tuple(inspect.signature(inspect.unwrap(found)).parameters)
        if names not in (self.expected, ("args", "kwargs")):
            return (
                f"{self.target} takes ({', '.join(names)}) instead of ({', '.join(self.expected)}): {self.purpose}; "
                f"install the tested SGLang version"
            )
        return None


@contextmanager
def _memory_for(what: str, remedy: str) -> Iterator[None]:
    """Ends an allocation that does not fit as one line instead of a traceback."""
    from sglang_dsv4.refusals import Refused

    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's own class for it is a RuntimeError, on a CPU a bare one
        text = str(error)
        if isinstance(error, RuntimeError) and not any(sign in text for sign in ("out of memory", "allocate memory")):
            raise
        raise Refused(f"no memory for {what}", text or "the machine has no more", remedy) from None


def _build_request_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(self.model_config):
        return original(self, **kwargs)
    import sglang.srt.mem_cache.kv_cache_configurator as module

    from sglang_dsv4.cache.slots import SlotReqToTokenPool, building

    saved = module.HybridReqToTokenPool
    module.HybridReqToTokenPool = SlotReqToTokenPool
    try:
        remedy = "lower --max-mamba-cache-size, --max-running-requests or --mem-fraction-static"
        geometry = self.model_config.hf_config.geometry(self.page_size)
        plan = _split_plan(self, geometry, kwargs["max_num_reqs"])
        moving = None if plan is None else _moving_memory(self, plan)
        with building(geometry, moving=moving), _memory_for("slots and tails", remedy):
            return original(self, **kwargs)
    finally:
        module.HybridReqToTokenPool = saved


def _split_plan(configurator: Any, geometry: Any, requests: int) -> Any:
    """How memory is to move between slots and pages; None if it is not."""
    from sglang.srt.runtime_context import get_memory, get_schedule

    from sglang_dsv4.cache.sizing import plan_for

    if get_memory().disable_radix_cache:
        return None
    return plan_for(
        geometry,
        _sized.granule,
        slots=get_schedule().max_mamba_cache_size,
        pages=_sized.tokens // geometry.page_size,
        slots_kept=configurator._calculate_mamba_ratio() * requests,
        context=configurator.model_config.context_len,
    )


def _moving_memory(configurator: Any, plan: Any) -> Any:
    """The plan's memory; None, and one line in the log, where one of the ranks does not get it.

    The split is static then, of as many slots and pages: they need less, for no granule stays half empty.
    """
    from sglang_dsv4.cache.backing import memory_behind
    from sglang_dsv4.cache.ranks import least

    moving, why = None, "another rank does not get the memory for it"
    try:
        moving = memory_behind(configurator.device, plan)
    except (OSError, RuntimeError) as error:
        why = str(error)
    if least(int(moving is not None), configurator.server_args.tp_size):
        return moving
    if moving is not None:
        moving.close()
    logger.warning("memory does not move between slots and pages: %s", why)
    return None


def _build_page_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(self.model_config):
        return original(self, **kwargs)
    from sglang_dsv4.cache.pages import PagePool
    from sglang_dsv4.cache.sizing import describe

    requests = kwargs["req_to_token_pool"]
    sizes = kwargs["sizes"]
    geometry = self.model_config.hf_config.geometry(self.page_size)
    tokens = sizes.max_total_num_tokens
    with _memory_for(f"pages of {tokens} tokens", "lower --max-total-tokens or --mem-fraction-static"):
        plan, moving = requests.split_plan, requests.mamba_pool.moving
        assert plan is None or plan.pages == tokens // geometry.page_size, "pages were sized anew after slots"
        pool = PagePool(geometry, tokens, self.device, backing=None if moving is None else moving.pages)
    line = describe(
        geometry, pool.store, requests.mamba_pool.store, requests.tails, sizes.max_running_requests
    )
    if plan is not None:
        line += f"; memory moves between slots ({plan.least_slots} to {plan.most_slots}) and pages"
    logger.info(line)
    return pool


def _build_page_allocator(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(self.model_config) or kwargs["req_to_token_pool"].split_plan is None:
        return original(self, **kwargs)
    import sglang.srt.mem_cache.kv_cache_configurator as module

    from sglang_dsv4.cache.movable import MovablePages

    saved = module.PagedTokenToKVPoolAllocator
    module.PagedTokenToKVPoolAllocator = MovablePages
    try:
        return original(self, **kwargs)
    finally:
        module.PagedTokenToKVPoolAllocator = saved


def _pool_configurator(original: Callable[..., Any], kvc: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(kvc.model_config):
        return original(kvc)
    from sglang.srt.runtime_context import get_schedule

    from sglang_dsv4.cache.sizing import SlotPoolConfigurator

    slots = get_schedule().max_mamba_cache_size or 0
    # Little memory has slots for fewer requests than may run: the others get no rows.
    rows = min(get_schedule().max_running_requests or 0, slots // kvc._calculate_mamba_ratio()) + 1
    return SlotPoolConfigurator(kvc.model_config.hf_config.geometry(kvc.page_size), rows, _sized.granule, slots)


def _state_memory(original: Callable[..., Any], self: Any, total_rest_memory: float) -> float:
    from sglang_dsv4.config import is_ours

    if is_ours(self.model_config):
        from sglang.srt.runtime_context import get_schedule

        from sglang_dsv4.cache.backing import cannot_move
        from sglang_dsv4.cache.ranks import least
        from sglang_dsv4.cache.sizing import choose_slots, granule_for
        from sglang_dsv4.refusals import Refused

        geometry, available = self.model_config.hf_config.geometry(self.page_size), int(total_rest_memory * (1 << 30))
        sized = get_schedule().max_mamba_cache_size is not None or get_schedule().max_total_tokens is not None
        ranks = self.server_args.tp_size
        granule = granule_for(geometry, str(self.device), available, sized_by_user=sized, ranks=ranks)
        wanted, why = granule, "another rank cannot move it, or was told not to"
        if granule and (fault := cannot_move(self.device)):
            granule, why = 0, fault
        _sized.granule = least(granule, ranks)
        if wanted and not _sized.granule:
            logger.warning("memory does not move between slots and pages: %s", why)
        choose_slots(geometry, available)
        left: float = original(self, total_rest_memory)
        if left <= 0:  # SGLang would say the same by a traceback
            slots = get_schedule().max_mamba_cache_size
            what, why = "no memory is left for pages", f"{max(0, available)} bytes are left for {slots} slots and pages"
            raise Refused(what, why, "raise --mem-fraction-static or lower --max-mamba-cache-size")
        return left
    return original(self, total_rest_memory)


def _max_requests(original: Callable[..., Any], self: Any, token_capacity: int) -> int:
    from sglang_dsv4.config import is_ours

    if is_ours(self.model_config):
        from sglang.srt.runtime_context import get_schedule

        from sglang_dsv4.refusals import check_pool_size

        check_pool_size(
            page=self.page_size,
            pool_tokens=token_capacity,
            state_slots=get_schedule().max_mamba_cache_size,
            slots_per_request=self._calculate_mamba_ratio(),
            geometry=self.model_config.hf_config.geometry(self.page_size),
        )
        _sized.tokens = token_capacity
    return original(self, token_capacity)


def _attention_backend(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(runner.model_config):
        return original(runner, full_attn_backend)
    # Ours serves every layer; SGLang would wrap it with a backend for linear attention layers.
    return full_attn_backend


def _post_capture_sizing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.refusals import BACKEND

    if args and getattr(args[0], "model_config_parser", None) == BACKEND:
        return False
    return original(*args, **kwargs)


def _plan_snapshots(original: Callable[..., Any], self: Any, req: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(self.model_config):
        return original(self, req)
    from sglang_dsv4.cache.publish import plan_snapshots

    return plan_snapshots(self, req)


def _before_prefill(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    if isinstance(self.req_to_token_pool, SlotReqToTokenPool) and self.waiting_queue:
        from sglang_dsv4.cache.publish import publish_ahead

        last = self.last_batch
        if last is not None and last.forward_mode.is_extend():
            publish_ahead(self.tree_cache, last.reqs, self.waiting_queue)  # the chunk that goes on is not among them
    return original(self, running_batch)


def _prompt_budget(original: Callable[..., Any], self: Any, input_tokens: int, *args: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.cache.pages import PagePool

    # SGLang holds a page back at admission but accepts prompts that reach into it: such a request would wait for
    # ever, and every request behind it. None makes the scheduler refuse it with a message.
    if isinstance(self.get_kvcache(), PagePool) and input_tokens + self.page_size >= kwargs["token_capacity"]:
        return None
    return original(self, input_tokens, *args, **kwargs)


def _input_check(original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.config import serves_ours
    from sglang_dsv4.request_rules import input_fault

    fault = input_fault(req) if serves_ours() else None
    if fault is None:
        return original(req, *args, **kwargs)
    # SGLang lets a refused request take part in one more step, with one token in the prompt's place.
    req.input_embeds = None
    req.logprob.top_logprobs_num = 0
    req.sampling_params.min_new_tokens = 0
    return fault


def _request_check(original: Callable[..., Any], self: Any, obj: Any) -> None:
    from sglang_dsv4.config import serves_ours
    from sglang_dsv4.request_rules import request_fault

    if serves_ours() and (fault := request_fault(obj)):
        raise ValueError(fault)
    original(self, obj)


def _update_from_disk(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.config import is_ours

    if not is_ours(self.model_config):
        return original(self, *args, **kwargs)
    from sglang_dsv4.new_weights import update

    return update(original, self, *args, **kwargs)


def _refusal_text(original: Callable[..., Any]) -> str:
    import sys

    from sglang_dsv4.refusals import Refused

    error = sys.exc_info()[1]
    return str(error) if isinstance(error, Refused) else original()


def _checkpoint(original: Callable[..., Any], self: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    if not isinstance(self.req_to_token_pool, SlotReqToTokenPool):
        original(self, req, up_to=up_to, **kwargs)
        return
    from sglang_dsv4.cache.debug import audit_enabled
    from sglang_dsv4.cache.publish import checkpoint

    checkpoint(original, self, req, up_to=up_to, **kwargs)
    if audit_enabled() and not self.disable:
        from sglang_dsv4.cache.audit import audit

        audit(self)


def _evict_for_alloc(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    if not isinstance(self.req_to_token_pool, SlotReqToTokenPool):
        return original(self, *args, **kwargs)
    from sglang_dsv4.cache.superseded import evict_for_alloc

    return evict_for_alloc(original, self, *args, **kwargs)


def _evict_leaf(original: Callable[..., Any], self: Any, node_id: int, tracker: Any) -> Any:
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    if not isinstance(self.req_to_token_pool, SlotReqToTokenPool):
        return original(self, node_id, tracker)
    from sglang_dsv4.cache.superseded import evict_leaf

    return evict_leaf(original, self, node_id, tracker)


def _cache_action(original: Callable[..., Any], self: Any, action: Any) -> None:
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    if isinstance(self.req_to_token_pool, SlotReqToTokenPool):
        from sglang_dsv4.cache.superseded import defer

        if defer(self, action):
            return
    original(self, action)


def _report(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    tree = getattr(getattr(self, "scheduler", None), "tree_cache", None)
    if isinstance(getattr(tree, "req_to_token_pool", None), SlotReqToTokenPool):
        from sglang_dsv4.cache.metrics import Reporter

        reporter = getattr(self, "_dsv4_reporter", None)
        if reporter is None:
            labels = self.metrics_collector.labels if self.current_scheduler_metrics_enabled else None
            reporter = self._dsv4_reporter = Reporter(labels)
        reporter.report(tree, logs=self.is_stats_logging_rank)
    return result


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_CONFIGURATOR}._build_hybrid_req_pool",
        ("self", "max_num_reqs", "extra_max_context_len"),
        _build_request_pool,
        "requests get no slots",
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        ("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
        _build_page_pool,
        "there are no pages for compressed entries",
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        (
            "self",
            "sizes",
            "token_to_kv_pool",
            "is_dsv4_model",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
        ),
        _build_page_allocator,
        "memory does not move between slots and pages",
    ),
    Hook(
        f"{_CONFIGURATOR}._handle_max_mamba_cache",
        ("self", "total_rest_memory"),
        _state_memory,
        "slots and snapshots are not sized",
    ),
    Hook(
        f"{_CONFIGURATOR}.resolve_max_num_reqs",
        ("self", "token_capacity"),
        _max_requests,
        "a pool too small for one request is not noticed",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        ("kvc",),
        _pool_configurator,
        "pages are not sized",
    ),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        ("runner", "full_attn_backend"),
        _attention_backend,
        "the backend would be wrapped for linear attention",
    ),
    Hook(
        "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned",
        ("server_args",),
        _post_capture_sizing,
        "pages would be resized as if they were plain keys and values",
    ),
    Hook(
        f"{_BATCH}._mamba_radix_cache_v2_req_prepare_for_extend",
        ("self", "req"),
        _plan_snapshots,
        "snapshots stand where repeats cannot use them",
    ),
    Hook(
        f"{_SCHEDULER}.Scheduler.get_new_batch_prefill",
        ("self", "running_batch"),
        _before_prefill,
        "prompts that share a prefix and follow one another closely are computed twice",
    ),
    Hook(
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        ("self", "input_tokens", "max_new_tokens", "token_capacity", "sliding_window_size", "chunk_size"),
        _prompt_budget,
        "a prompt as long as the page pool blocks the server",
    ),
    Hook(
        f"{_SCHEDULER}.validate_input_length",
        ("req", "max_req_input_len", "allow_auto_truncate"),
        _input_check,
        "an empty prompt or a token id outside the vocabulary ends the server",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_token_ids_logprob",
        ("self", "obj"),
        _request_check,
        "a negative place of the first logprob, or embeddings for single tokens, end the server",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk",
        ("self", "model_path", "load_format", "weight_name_filter", "recapture_cuda_graph"),
        _update_from_disk,
        "new weights that do not fit end the server",
    ),
    Hook(
        f"{_SCHEDULER}.get_exception_traceback",
        (),
        _refusal_text,
        "a refusal in the scheduler ends a traceback instead of being one line",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
        ("self", "req", "up_to", "kwargs"),
        _checkpoint,
        "a request keeps one snapshot of its prompt only",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_for_alloc",
        ("self", "params", "allocation_reclaim_satisfied"),
        _evict_for_alloc,
        "snapshots that a conversation has left behind outlive those that others need",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf",
        ("self", "node_id", "tracker"),
        _evict_leaf,
        "memory that is to move from pages to slots waits for pages that cannot be found",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._apply_cache_action",
        ("self", "action"),
        _cache_action,
        "snapshots of a path are dropped while there is room",
    ),
    *(
        Hook(f"{_REPORTER}.{name}", expected, _report, "neither the log nor /metrics says what the cache does")
        for name, expected in (
            ("report_prefill_stats", ("self", "batch", "prefill_stats", "can_run_cuda_graph", "dp_cooperation_info")),
            ("report_decode_stats", ("self", "can_run_cuda_graph", "running_batch", "num_generated_tokens")),
        )
    ),
)


def problems() -> list[str]:
    """One line per hook whose target does not match what it was written for."""
    return [line for hook in HOOKS if (line := hook.problem()) is not None]


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.wrapper, HookType.AROUND)
