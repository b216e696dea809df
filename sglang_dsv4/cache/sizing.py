"""How many pages, slots and request rows fit: every byte that the pools allocate is in these formulas."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

from sglang_dsv4.cache.granules import GRANULE, SplitPlan, overhead, plan_around, plan_split
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.refusals import Refused, check_pool_tokens
from sglang_dsv4.switches import SPLIT

# State slots that SGLang needs per running request with overlap scheduling: live, two tracking, two in flight.
SLOTS_PER_REQUEST = 5
# Part of the memory beyond the fixed share that becomes snapshots, the rest becomes pages. Measured: docs/tuning.md.
SNAPSHOT_SHARE = 0.28
# Requests may not take more than this part of the memory for state before anything is cached.
FIXED_SHARE_LIMIT = 0.5
# By device: granules in which memory moves between slots and pages. CUDA maps no less than 2 MiB, the host a page.
GRANULES = {"cpu": mmap.PAGESIZE, "cuda": GRANULE}
# Part of the memory that granules which are not full may take; where it is more, the split is static.
OVERHEAD_LIMIT = 1 / 16


@dataclass(frozen=True)
class SlotPlan:
    """slots in all (without the dummy), of which `snapshots` are not needed by running requests."""

    max_running_requests: int
    slots: int

    @property
    def snapshots(self) -> int:
        return self.slots - SLOTS_PER_REQUEST * self.max_running_requests


def plan_slots(geometry: Geometry, available_bytes: int, max_running_requests: int) -> SlotPlan:
    """Split memory between running requests, snapshots and pages; the pages take what is left.

    Fewer requests run where their state alone would take more than half of the memory. Raises Refused where not even
    one request fits.
    """
    per_request = SLOTS_PER_REQUEST * geometry.slot_bytes + geometry.tail_bytes(1)
    dummies = geometry.slot_bytes + geometry.tail_bytes(1)
    fitting = int((available_bytes * FIXED_SHARE_LIMIT - dummies) // per_request)
    requests = min(max_running_requests, fitting)
    if requests < 1:
        raise Refused(
            f"{max(0, available_bytes)} bytes of KV memory cannot hold one request's state",
            f"one needs {int((per_request + dummies) / FIXED_SHARE_LIMIT) + 1} bytes",
            "raise --mem-fraction-static",
        )
    spare = available_bytes - dummies - requests * per_request
    return SlotPlan(requests, SLOTS_PER_REQUEST * requests + split_bytes(geometry, spare)[1])


def split_bytes(geometry: Geometry, spare_bytes: int, share: float | None = None) -> tuple[int, int]:
    """(pages, snapshots) for the bytes that running requests do not hold as state.

    share  of the bytes that becomes snapshots; SNAPSHOT_SHARE if not given
    """
    snapshots = int(spare_bytes * (SNAPSHOT_SHARE if share is None else share) // geometry.slot_bytes)
    left = spare_bytes - snapshots * geometry.slot_bytes
    return int(left / geometry.token_alloc_bytes) // geometry.page_size, snapshots


def fit_tokens(geometry: Geometry, available_bytes: int) -> int:
    """Most tokens, a whole number of pages, whose pool (SGLang's padding page included) fits in the bytes."""
    page = geometry.page_size
    tokens = int(available_bytes / geometry.token_alloc_bytes) // page * page
    while tokens > 0 and geometry.page_pool_bytes(tokens + page) > available_bytes:
        tokens -= page
    return max(tokens, 0)


class SlotPoolConfigurator(MemoryPoolConfigurator):
    """SGLang's sizing question for the page pool; slots were already subtracted from `available_bytes`."""

    def __init__(self, geometry: Geometry, request_rows: int, granule: int = 0, slots: int = 0) -> None:
        """granule  in which memory moves between `slots` and pages; 0 if it does not"""
        self.geometry = geometry
        self.request_rows = request_rows
        self.granule, self.slots = granule, slots

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        left = available_bytes - self.geometry.tail_bytes(self.request_rows)
        if not self.granule:
            tokens = fit_tokens(self.geometry, left)
            if not tokens:  # of which SGLang makes no config
                beside = f" beside {self.slots} slots and {self.request_rows - 1} requests' tails"
                check_pool_tokens(0, page_size, beside)
            return self._config(tokens)
        budget = left + self.geometry.slot_pool_bytes(self.slots + 1)
        try:
            plan = plan_split(
                self.geometry, budget, slots=self.slots, least_slots=1, least_pages=1, granule=self.granule
            )
        except ValueError:
            what = f"{max(0, left)} bytes of KV memory beside {self.slots} slots hold no page"
            why = f"where memory moves, up to {overhead(self.geometry, self.granule)} bytes lie in granules not full"
            raise Refused(what, why, f"raise --mem-fraction-static or set {SPLIT}=static") from None
        return self._config(plan.pages * page_size)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        return self._config(max_total_num_tokens // self.geometry.page_size * self.geometry.page_size)

    @staticmethod
    def _config(tokens: int) -> MemoryPoolConfig:
        return MemoryPoolConfig(max_total_num_tokens=tokens)


def granule_for(
    geometry: Geometry, device: str, available_bytes: int, *, sized_by_user: bool, ranks: int = 1
) -> int:
    """Bytes by which memory moves between slots and pages at run time; 0 where the split is static.

    It moves on a CPU and on CUDA, unless the user set either size, where granules waste little, with one tensor
    parallel rank: several move alike by construction, which has not been seen on GPUs.
    """
    told, kind = os.environ.get(SPLIT), device.partition(":")[0]
    granule = GRANULES.get(kind, 0)
    if told == "static" or not granule:
        return 0
    if told == "moves":
        return granule
    wasteful = overhead(geometry, granule) > OVERHEAD_LIMIT * available_bytes
    return 0 if sized_by_user or wasteful or ranks > 1 else granule


def plan_for(
    geometry: Geometry, granule: int, *, slots: int, pages: int, slots_kept: int, context: int
) -> SplitPlan | None:
    """The split that a server begins with, to move from there. What a single request may need stays in pages.

    slots_kept  that running requests may take
    context     tokens of the longest request
    """
    if not granule:
        return None
    least = min(pages, -(-context // geometry.page_size) + 2)
    return plan_around(
        geometry, slots=slots, pages=pages, least_slots=min(slots, slots_kept), least_pages=least, granule=granule
    )


def describe(geometry: Geometry, pages: Any, slots: Any, tails: Any, max_running_requests: int) -> str:
    """The start-up line: what was allocated, and the byte counts of the tensors themselves."""
    token_pages = pages.num_tokens // geometry.page_size - 1
    snapshots = slots.num_slots - 1 - SLOTS_PER_REQUEST * max_running_requests
    total = pages.nbytes + slots.nbytes + tails.nbytes
    return (
        f"DeepSeek-V4 slot cache: {token_pages} pages of {geometry.page_size} tokens ({pages.nbytes} bytes, "
        f"{float(geometry.token_alloc_bytes):.2f} a token), {slots.num_slots - 1} slots ({slots.nbytes} bytes, "
        f"{geometry.slot_bytes} each), of them {max(snapshots, 0)} snapshots beyond {max_running_requests} running "
        f"requests, {tails.num_rows - 1} request rows ({tails.nbytes} bytes of tails), {total} bytes in all; "
        f"rows {geometry.main.name}, indexer keys {geometry.index.name}"
    )


def choose_slots(geometry: Geometry, available_bytes: int) -> None:
    """Set SGLang's number of state slots where the user left it open."""
    from sglang.srt.runtime_context import get_context, get_memory, get_schedule

    schedule = get_schedule()
    if schedule.max_mamba_cache_size is not None or get_memory().disable_radix_cache:
        return
    plan = plan_slots(geometry, available_bytes, schedule.max_running_requests)
    get_context().override("sglang_dsv4.slots", max_mamba_cache_size=plan.slots)
