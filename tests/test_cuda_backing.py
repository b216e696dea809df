"""Memory behind reserved addresses on CUDA, over a driver that only keeps books: the calls and their order.

`bench/backing_check.py` does the same on a card.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4 import hooks
from sglang_dsv4.cache import backing
from sglang_dsv4.cache.backing import CudaBacking, CudaMemory, cannot_move
from sglang_dsv4.cache.granules import GRANULE, plan_split
from sglang_dsv4.geometry import Geometry

BUDGET = 3 << 30
FLASH = Path(__file__).parent.parent / "configs" / "v4_flash.json"


def geometry() -> Geometry:
    return Geometry.from_config(json.loads(FLASH.read_text()), page_size=128)


class Books:
    """A driver that refuses what CUDA leaves undefined."""

    most: int | None = None
    has_maps = True

    def __init__(self, device: int) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address: handle
        self.allowed: set[int] = set()
        self.handles: set[int] = set()

    def maps(self) -> bool:
        return self.has_maps

    def granularity(self) -> int:
        return GRANULE

    def reserve(self, size: int, alignment: int) -> int:
        assert size % GRANULE == 0 and alignment == GRANULE
        address = (len(self.reserved) + 1) << 44
        self.reserved[address] = size
        return address

    def create(self, size: int) -> int:
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
        assert size == GRANULE and self._inside(address) and address not in self.mapped
        assert handle in self.handles and handle not in self.mapped.values(), "a handle stands at two addresses"
        self.mapped[address] = handle

    def allow(self, address: int, size: int) -> None:
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


def stores(budget: int = BUDGET):
    plan = plan_split(geometry(), budget, slots=200, least_slots=20, least_pages=100, granule=GRANULE)
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


def test_memory_that_is_not_there_is_given_back_and_told_as_one_line(driver, monkeypatch):
    monkeypatch.setattr(Books, "most", 100)
    made = []
    monkeypatch.setattr(backing, "Driver", lambda device: made.append(Books(device)) or made[-1])
    from sglang_dsv4.refusals import Refused

    with pytest.raises(Refused, match="no memory for slots"), hooks._memory_for("slots", "take less"):
        stores()
    assert not made[0].handles


def test_a_device_without_virtual_memory_says_so(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert cannot_move("cpu") is None and cannot_move("cuda") is None
    monkeypatch.setattr(Books, "has_maps", False)
    assert cannot_move("cuda:1") == "the driver has no virtual memory management for this device"


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
    g = geometry()
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(geometry=lambda page: g)),
        page_size=128,
        device="cuda",
        server_args=SimpleNamespace(tp_size=1),
    )
    with caplog.at_level(logging.WARNING):
        assert hooks._state_memory(lambda self, memory: memory, configurator, 60.0) == 60.0
    assert hooks._sized.granule == (0 if why else GRANULE)
    assert bool(why) == ("memory does not move between slots and pages: no virtual memory" in caplog.text)
