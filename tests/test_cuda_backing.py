"""Memory behind reserved addresses on CUDA, over a driver that only keeps books: the calls and their order.

`bench/backing_check.py` does the same on a card.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4 import hooks
from sglang_dsv4.cache import backing
from sglang_dsv4.cache.backing import CudaBacking, CudaMemory, cannot_move, memory_behind
from sglang_dsv4.cache.granules import GRANULE, SplitPlan, plan_around, plan_split
from sglang_dsv4.cache.ranks import least
from sglang_dsv4.geometry import Geometry

BUDGET = 3 << 30
FLASH = Path(__file__).parent.parent / "configs" / "v4_flash.json"


def geometry() -> Geometry:
    return Geometry.from_config(json.loads(FLASH.read_text()), page_size=128)


class Books:
    """A driver that refuses what CUDA leaves undefined."""

    most: int | None = None
    has_maps = True
    fails: tuple[str, int] = ("", 0)  # which call, and which one of those

    def __init__(self, device: int) -> None:
        self.calls: Counter[str] = Counter()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address: handle
        self.allowed: set[int] = set()
        self.handles: set[int] = set()

    def maps(self) -> bool:
        return self.has_maps

    def granularity(self) -> int:
        self._called("granularity")
        return GRANULE

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.fails == (name, self.calls[name]):
            raise RuntimeError(f"{name} failed: status 999")

    def reserve(self, size: int, alignment: int) -> int:
        self._called("reserve")
        assert size % GRANULE == 0 and alignment == GRANULE
        address = (len(self.reserved) + 1) << 44
        self.reserved[address] = size
        return address

    def create(self, size: int) -> int:
        self._called("create")
        assert size == GRANULE
        if self.most is not None and len(self.handles) == self.most:
            raise RuntimeError("cuMemCreate failed: out of memory")
        handle = len(self.handles) + 1
        self.handles.add(handle)
        return handle

    def release(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        self.handles.remove(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._called("map")
        assert size == GRANULE and self._inside(address) and address not in self.mapped
        assert handle in self.handles and handle not in self.mapped.values(), "a handle stands at two addresses"
        self.mapped[address] = handle

    def allow(self, address: int, size: int) -> None:
        self._called("allow")
        new = set(range(address, address + size, GRANULE))
        assert new <= set(self.mapped), "access to what is not mapped"
        self.allowed |= new

    def unmap(self, address: int, size: int) -> None:
        assert size == GRANULE
        del self.mapped[address]
        self.allowed.discard(address)

    def free_addresses(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= one < address + size for one in self.mapped)

    def _inside(self, address: int) -> bool:
        return any(base <= address < base + size for base, size in self.reserved.items())


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(backing, "Driver", Books)
    monkeypatch.setattr(
        backing, "tensor_at", lambda address, nbytes, device: torch.empty(nbytes, dtype=torch.uint8, device="meta")
    )


@pytest.fixture
def made(driver, monkeypatch) -> list[Books]:
    """Every driver that was made."""
    found: list[Books] = []
    monkeypatch.setattr(backing, "Driver", lambda device: found.append(Books(device)) or found[-1])
    return found


def a_plan(budget: int = BUDGET) -> SplitPlan:
    return plan_split(geometry(), budget, slots=200, least_slots=20, least_pages=100, granule=GRANULE)


def stores(budget: int = BUDGET):
    plan = a_plan(budget)
    memory = CudaMemory(plan.budget, GRANULE, 0)
    return plan, memory, CudaBacking(plan.slot_stores, memory), CudaBacking(plan.page_stores, memory)


def test_every_granule_in_use_is_mapped_once_and_open_to_kernels(driver):
    plan, memory, slots, pages = stores()
    books = memory.driver
    slots.resize(201)
    pages.resize(plan.pages + 1)
    for count in (199, 180, 181, 20, plan.most_slots, 200):
        sizes = [(slots, count + 1), (pages, plan.pages_beside(count) + 1)]
        for store, items in sizes if count < slots.items else reversed(sizes):  # what shrinks goes first
            store.resize(items)
        assert len(books.mapped) == memory.used and books.allowed == set(books.mapped)
        for store in (slots, pages):
            for region in store.group.regions:
                base = store._bases[region.name]
                for first, last in region.spans(store.items):
                    assert all(base + one * GRANULE in books.mapped for one in range(first, last))
    for store in (slots, pages):
        store.close()
    memory.close()
    assert not books.mapped and not books.handles and not books.reserved


def test_all_memory_is_there_before_anything_moves(driver):
    plan, memory, slots, pages = stores()
    created = len(memory.driver.handles)
    assert created == plan.budget // GRANULE
    slots.resize(201)
    pages.resize(plan.pages + 1)
    pages.resize(plan.pages_beside(plan.most_slots) + 1)
    slots.resize(plan.most_slots + 1)
    assert len(memory.driver.handles) == created


def nothing_left(books: Books) -> bool:
    return not (books.mapped or books.allowed or books.handles or books.reserved)


def test_all_stores_are_mapped_as_the_split_begins(made):
    plan = a_plan()
    moving = memory_behind("cuda:0", plan)
    assert (moving.slots.items, moving.pages.items) == (plan.slots + 1, plan.pages + 1)
    assert len(made[0].mapped) == moving.memory.used and made[0].allowed == set(made[0].mapped)
    moving.close()
    assert nothing_left(made[0])


@pytest.mark.parametrize("call", ["granularity", "create", "reserve", "map", "allow"])
@pytest.mark.parametrize("when", ["first", "half-way", "last"])
def test_a_start_that_fails_leaves_nothing_behind(made, monkeypatch, call, when):
    memory_behind("cuda:0", a_plan())
    count = made[0].calls[call]
    monkeypatch.setattr(Books, "fails", (call, {"first": 1, "half-way": count // 2 + 1, "last": count}[when]))
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        memory_behind("cuda:0", a_plan())
    assert nothing_left(made[1])


class Ranks:
    """Two ranks in two threads, and the collective call between them."""

    def __init__(self, monkeypatch) -> None:
        from sglang.srt import runtime_context

        self.barrier, self.said, self.own = threading.Barrier(2), [], threading.local()
        group = SimpleNamespace(world_group=SimpleNamespace(cpu_group=None))
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: group)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, told, op, group) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        self.said.append(int(told))
        self.barrier.wait(30)
        told.fill_(min(self.said[-2:]))
        self.barrier.wait(30)

    def both(self, work) -> list:
        """What `work(rank)` returns on each."""
        with ThreadPoolExecutor(2) as pool:
            return [future.result(60) for future in [pool.submit(work, rank) for rank in (0, 1)]]


def a_configurator(device: str, ranks: int = 1) -> SimpleNamespace:
    g = geometry()
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(geometry=lambda page: g)),
        page_size=128,
        device=device,
        server_args=SimpleNamespace(tp_size=ranks),
    )


def test_memory_that_is_not_there_is_given_back_and_told_in_one_line(made, monkeypatch, caplog):
    monkeypatch.setattr(Books, "most", 100)
    with caplog.at_level(logging.WARNING):
        assert hooks._moving_memory(a_configurator("cuda:0"), a_plan()) is None
    assert nothing_left(made[0])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "memory does not move between slots and pages: cuMemCreate failed: out of memory"


@pytest.mark.parametrize("poor", [None, 0, 1])
def test_where_one_rank_does_not_get_its_memory_the_split_of_all_is_static(driver, monkeypatch, caplog, poor):
    books = [Books(0), Books(1)]
    if poor is not None:
        books[poor].most = 100
    monkeypatch.setattr(backing, "Driver", lambda device: books[device])
    plan, ranks = a_plan(), Ranks(monkeypatch)
    with caplog.at_level(logging.WARNING):
        got = ranks.both(lambda rank: hooks._moving_memory(a_configurator(f"cuda:{rank}", 2), plan))
    lines = sorted(record.getMessage().split(": ", 1)[1] for record in caplog.records)
    if poor is None:
        assert None not in got and not lines
    else:
        assert got == [None, None] and all(map(nothing_left, books))
        assert lines == ["another rank does not get the memory for it", "cuMemCreate failed: out of memory"]


def test_ranks_agree_over_sglangs_own_group(monkeypatch):
    from sglang.srt import runtime_context
    from torch import distributed

    assert least(7, 1) == 7
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        group = SimpleNamespace(world_group=SimpleNamespace(cpu_group=distributed.group.WORLD))
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: group)
        assert least(7, 2) == 7
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("moves", [True, False])
def test_a_server_that_does_not_get_its_memory_has_static_pools_of_the_same_sizes(monkeypatch, caplog, moves):
    from engine import Limits, _publish_config, request_pool_arguments
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from sglang_dsv4 import config
    from sglang_dsv4.cache.movable import MovablePages

    tiny = json.loads((FLASH.parent / "tiny.json").read_text())
    g = Geometry.from_config(tiny, page_size=128)
    plan = plan_around(g, slots=12, pages=60, least_slots=10, least_pages=4, granule=4096)
    configurator = a_configurator("cpu")
    configurator.model_config.hf_config.geometry = lambda page: g
    monkeypatch.setattr(config, "is_ours", lambda model: True)
    monkeypatch.setattr(hooks, "_split_plan", lambda *sizes: plan)
    if not moves:
        monkeypatch.setattr(backing.HostBacking, "_reserve", lambda self, region: _no_addresses())
    _publish_config(Limits(pages=60, slots=12, running=2))

    def pool_of(self, max_num_reqs):
        return kv_cache_configurator.HybridReqToTokenPool(**request_pool_arguments(max_num_reqs, 12, 4096))

    def allocator_of(self, req_to_token_pool, token_to_kv_pool):
        return kv_cache_configurator.PagedTokenToKVPoolAllocator(
            60 * 128, 128, torch.uint8, "cpu", token_to_kv_pool, False
        )

    with caplog.at_level(logging.WARNING):
        requests = hooks._build_request_pool(pool_of, configurator, max_num_reqs=2)
    sizes = SimpleNamespace(max_total_num_tokens=60 * 128, max_running_requests=2)
    pages = hooks._build_page_pool(None, configurator, req_to_token_pool=requests, sizes=sizes)
    allocator = hooks._build_page_allocator(
        allocator_of, configurator, req_to_token_pool=requests, token_to_kv_pool=pages
    )
    assert (requests.split_plan is plan) == (requests.mamba_pool.moving is not None) == moves
    assert type(allocator) is (MovablePages if moves else PagedTokenToKVPoolAllocator)
    assert requests.mamba_pool.size == 12 and allocator.size == 60 * 128
    assert pages.store.nbytes + requests.mamba_pool.store.nbytes <= plan.budget
    assert (pages.store.backing is not None) == moves
    assert ("memory does not move between slots and pages: no addresses" in caplog.text) == (not moves)


def _no_addresses() -> None:
    raise OSError("no addresses")


def test_a_device_without_virtual_memory_says_so(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert cannot_move("cpu") is None and cannot_move("cuda") is None
    monkeypatch.setattr(Books, "has_maps", False)
    assert cannot_move("cuda:1") == "the driver has no virtual memory management for this device"


def test_a_driver_without_a_call_says_so():
    driver = backing.Driver.__new__(backing.Driver)
    driver._library = SimpleNamespace(cuMemUnmap=lambda *where: 0, cuMemRelease=lambda handle: 2)
    driver.unmap(0, 1)
    with pytest.raises(RuntimeError, match="cuMemRelease failed: out of memory"):
        driver.release(1)
    with pytest.raises(RuntimeError, match="the driver has no cuMemAddressFree"):
        driver.free_addresses(0, 1)


def test_a_machine_without_cuda_says_so():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    assert cannot_move("cuda:0")


@pytest.mark.parametrize("why", [None, "no virtual memory"])
def test_a_server_on_such_a_device_starts_with_a_split_that_stays(monkeypatch, caplog, why):
    from sglang.srt import runtime_context

    from sglang_dsv4 import config
    from sglang_dsv4.cache import sizing

    schedule = SimpleNamespace(max_mamba_cache_size=None, max_total_tokens=None)
    monkeypatch.delenv("SGLANG_DSV4_SPLIT", raising=False)
    monkeypatch.setattr(config, "is_ours", lambda model: True)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(sizing, "choose_slots", lambda *sizes: None)
    monkeypatch.setattr(backing, "cannot_move", lambda device: why)
    monkeypatch.setattr(hooks, "_sized", hooks._Sized())
    with caplog.at_level(logging.WARNING):
        assert hooks._state_memory(lambda self, memory: memory, a_configurator("cuda"), 60.0) == 60.0
    assert hooks._sized.granule == (0 if why else GRANULE)
    assert bool(why) == ("memory does not move between slots and pages: no virtual memory" in caplog.text)


@pytest.mark.parametrize("without", [None, 0, 1])
def test_ranks_move_memory_all_or_none(monkeypatch, caplog, without):
    """One rank's card, or its environment, may be another."""
    from sglang.srt import runtime_context

    from sglang_dsv4 import config
    from sglang_dsv4.cache import sizing

    schedule, sized = SimpleNamespace(max_mamba_cache_size=None, max_total_tokens=None), threading.local()
    monkeypatch.setenv("SGLANG_DSV4_SPLIT", "moves")
    monkeypatch.setattr(config, "is_ours", lambda model: True)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(sizing, "choose_slots", lambda *sizes: None)
    monkeypatch.setattr(backing, "cannot_move", lambda device: "no maps" if device == f"cuda:{without}" else None)
    monkeypatch.setattr(hooks, "_sized", sized)
    ranks = Ranks(monkeypatch)

    def granule(rank: int) -> int:
        hooks._state_memory(lambda self, memory: memory, a_configurator(f"cuda:{rank}", 2), 60.0)
        return sized.granule

    with caplog.at_level(logging.WARNING):
        assert ranks.both(granule) == [GRANULE if without is None else 0] * 2
    assert len(caplog.records) == (0 if without is None else 2) and ("no maps" in caplog.text) == (without is not None)
