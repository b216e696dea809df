"""Memory that moves between slots and pages: granules, allocators, stores, decisions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from engine import Engine, Limits
from simulate import Simulation, flash
from workloads import build

from sglang_dsv4.cache.backing import Backing, HostBacking, Memory
from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.granules import GRANULE, Region, overhead, page_group, plan_around, plan_split, slot_group
from sglang_dsv4.cache.handle import EntryStore, SlotStore
from sglang_dsv4.cache.movable import MovablePages, MovableSlots
from sglang_dsv4.cache.sizing import SlotPoolConfigurator, granule_for, plan_for, plan_slots
from sglang_dsv4.cache.superseded import paths_of
from sglang_dsv4.geometry import Geometry

CONFIGS = Path(__file__).parents[1] / "configs"
PAGE = 128


def geometry(name: str, **options) -> Geometry:
    return Geometry.from_config(json.loads((CONFIGS / f"{name}.json").read_text()), **options)


# Granules


def granules_of(region: Region, items: int) -> set[int]:
    """One by one."""
    found: set[int] = set()
    for layer in range(region.layers):
        start = layer * region.stride
        found |= set(range(start // region.granule, -(-(start + region.used(items)) // region.granule)))
    return found


@pytest.mark.parametrize(
    "name, page, granule", [("v4_flash", 128, GRANULE), ("v4_pro", 256, GRANULE), ("tiny", 128, 4096)]
)
def test_granules_are_those_that_the_leading_items_of_all_layers_touch(name, page, granule):
    g = geometry(name, page_size=page)
    for group in (slot_group(g, 300, granule), page_group(g, 3000, granule)):
        for region in group.regions:
            for fewer, more in ((1, 2), (5, 9), (9, 100), (100, 290), (290, region.most)):
                assert region.granules(fewer) == len(granules_of(region, fewer))
                parts = [set(part) for part in region.between(fewer, more)]
                assert sum(map(len, parts)) == len(set().union(*parts)), "a granule is named twice"
                assert set().union(*parts) == granules_of(region, more) - granules_of(region, fewer)


def test_the_bytes_of_the_stores_are_those_of_the_geometry():
    g = geometry("v4_flash")
    slots, pages = slot_group(g, 5000, 1), page_group(g, 50_000, 1)
    assert slots.nbytes(1234) == g.slot_pool_bytes(1234)
    assert pages.nbytes(12_346) == g.page_pool_bytes(12_346 * PAGE)


@pytest.mark.parametrize("gib", [4, 20, 60])
def test_a_few_slots_become_about_as_many_pages_as_have_their_bytes(gib):
    """Layers begin at different places of a granule, so memory moves in lots smaller than the 28 slots of a granule."""
    g = geometry("v4_flash")
    plan = plan_split(g, gib << 30, slots=20 * gib, least_slots=20, least_pages=100)
    worth = g.slot_bytes / float(g.page_size * g.token_alloc_bytes)
    for count in (8, 16, 64):
        gained = plan.pages_beside(plan.slots - count) - plan.pages
        assert 0.75 * count * worth < gained < 1.3 * count * worth
    assert plan.nbytes(plan.slots, plan.pages) <= plan.budget
    used = g.slot_pool_bytes(plan.slots + 1) + g.page_pool_bytes((plan.pages + 1) * PAGE)
    assert plan.budget - used < 1.5 * overhead(g, GRANULE)


def test_a_plan_around_a_split_begins_with_it_and_has_its_bytes():
    g = geometry("tiny")
    plan = plan_around(g, slots=20, pages=90, least_slots=10, least_pages=1000, granule=4096)
    assert (plan.slots, plan.pages, plan.least_pages) == (20, 90, 90)
    assert plan.budget == plan.nbytes(20, 90) and plan.pages_beside(20) >= 90
    with pytest.raises(ValueError, match="bytes do not hold"):
        plan_split(g, 10 * g.slot_bytes, slots=9, least_slots=5, least_pages=8, granule=GRANULE)


# Sizing


def test_memory_moves_where_granules_waste_little_and_nobody_set_a_size(monkeypatch):
    g = geometry("v4_flash")
    gib = 1 << 30
    monkeypatch.delenv("SGLANG_DSV4_SPLIT", raising=False)
    assert granule_for(g, "cuda", 60 * gib, sized_by_user=False) == GRANULE
    assert granule_for(g, "cuda:1", 2 * gib, sized_by_user=False) == 0
    assert granule_for(g, "cuda", 60 * gib, sized_by_user=True) == 0
    assert granule_for(g, "cuda", 60 * gib, sized_by_user=False, ranks=2) == 0
    assert granule_for(g, "xpu", 60 * gib, sized_by_user=False) == 0
    monkeypatch.setenv("SGLANG_DSV4_SPLIT", "moves")
    assert granule_for(g, "cuda", 60 * gib, sized_by_user=True, ranks=2) == GRANULE
    monkeypatch.setenv("SGLANG_DSV4_SPLIT", "static")
    assert granule_for(g, "cpu", 60 * gib, sized_by_user=False) == 0


@pytest.mark.parametrize("gib", [8, 60])
def test_a_server_whose_memory_moves_begins_within_its_bytes_and_keeps_what_requests_need(gib):
    g, memory = geometry("v4_flash"), gib << 30
    slots = plan_slots(g, memory, 64)
    left = memory - g.slot_pool_bytes(slots.slots + 1)
    sizes = SlotPoolConfigurator(g, slots.max_running_requests + 1, GRANULE, slots.slots)
    pages = sizes.calculate_pool_sizes(left, PAGE).max_total_num_tokens // PAGE
    kept = 5 * slots.max_running_requests
    plan = plan_for(g, GRANULE, slots=slots.slots, pages=pages, slots_kept=kept, context=1 << 17)
    tails = g.tail_bytes(slots.max_running_requests + 1)
    assert memory - (300 << 20) < plan.nbytes(plan.slots, plan.pages) + tails <= memory
    assert plan.least_slots == kept and plan.least_pages == min(pages, 1026)
    assert plan_for(g, 0, slots=9, pages=9, slots_kept=5, context=100) is None


# Allocators


def slots_of(size: int = 10) -> MovableSlots:
    return MovableSlots(size, "cpu")


def test_slots_are_handed_out_lowest_first():
    slots = slots_of()
    taken = slots.alloc(6)
    slots.free(taken[[3, 1]])
    assert slots.alloc(3).tolist() == [2, 4, 7]


def test_a_drain_withholds_what_is_free_and_what_comes_back_and_size_follows():
    slots = slots_of()
    slots.alloc(9)
    slots.start_drain(3)
    assert (slots.size, slots.available_size(), slots.drain.done) == (9, 0, False)  # 10 was free
    slots.free(torch.tensor([2, 9]))
    assert (slots.size, slots.free_ids(), slots.drain.done) == (8, [2], False)
    slots.free(torch.tensor([8]))
    assert slots.drain.done
    slots.drain.finish()
    assert (slots.size, slots.drain.end) == (7, 7)
    slots.grow(2)
    assert (slots.size, slots.free_ids()) == (9, [2, 8, 9])


def test_a_drain_that_is_given_up_or_flushed_returns_everything():
    slots = slots_of()
    slots.start_drain(4)
    slots.cancel_drain()
    assert (slots.size, slots.free_ids()) == (10, list(range(1, 11)))
    slots.start_drain(4)
    slots.clear()
    assert (slots.size, slots.free_ids(), slots.drain.limit) == (10, list(range(1, 11)), None)


@pytest.mark.parametrize("need_sort", [False, True])
def test_pages_drain_and_grow_as_slots_do(need_sort):
    pages = MovablePages(10 * PAGE, PAGE, torch.uint8, "cpu", None, need_sort)
    taken = pages.alloc(9 * PAGE)
    pages.start_drain(3)
    assert (pages.size, pages.available_size()) == (9 * PAGE, 0)
    pages.free_group_begin()
    pages.free(taken[7 * PAGE :])
    pages.free(taken[: 2 * PAGE])
    pages.free_group_end()
    assert pages.drain.done and sorted(pages.free_ids()) == [1, 2]
    pages.drain.finish()
    pages.grow(1)
    assert (pages.size, pages.num_pages, sorted(pages.free_ids())) == (8 * PAGE, 8, [1, 2, 8])
    pages.clear()
    assert pages.free_ids() == list(range(1, 9))


# Stores


def stores(granule: int = 4096) -> tuple[SlotStore, EntryStore, Memory]:
    g = geometry("tiny")
    plan = plan_around(g, slots=12, pages=60, least_slots=2, least_pages=4, granule=granule)
    memory = Memory(plan.budget, granule)
    slots = SlotStore(g, 13, "cpu", HostBacking(plan.slot_stores, memory))
    return slots, EntryStore(g, 61 * PAGE, "cpu", HostBacking(plan.page_stores, memory)), memory


def test_stores_keep_their_bytes_and_addresses_through_moves(monkeypatch):
    monkeypatch.setenv("SGLANG_DSV4_POISON", "1")
    slots, pages, memory = stores()
    addresses = [one.data_ptr() for one in (slots.windows, slots.overlaps, pages.csa, pages.keys, pages.hca)]
    for slot in range(13):
        slots.slot_windows[:, slot], slots.overlaps[:, slot] = slot, float(slot)
    pages.keys[:, :30] = 7
    begin = memory.nbytes
    slots.resize(9)
    pages.resize(75 * PAGE)
    assert slots.nbytes + pages.nbytes == memory.nbytes <= memory.most * memory.granule
    assert all(bool((slots.slot_windows[:, slot] == slot).all()) for slot in range(9))
    assert bool((slots.overlaps[:, 12] != slots.overlaps[:, 12]).any()), "what went is NaN"
    assert bool((pages.keys[:, :30] == 7).all()) and bool((pages.keys[:, 31:37] == 0xFF).all()), "what is new is NaN"
    pages.resize(61 * PAGE)
    slots.resize(13)
    assert memory.nbytes == begin
    assert all(bool((slots.slot_windows[:, slot] == slot).all()) for slot in range(9))
    assert bool((slots.slot_windows[:, 9:13] == 0xFF).all())
    assert addresses == [one.data_ptr() for one in (slots.windows, slots.overlaps, pages.csa, pages.keys, pages.hca)]


def test_more_than_the_budget_is_refused():
    _slots, pages, _ = stores()
    with pytest.raises(RuntimeError, match="release before you commit"):
        pages.resize(80 * PAGE)


def test_memory_that_the_host_released_reads_as_zero_and_is_no_longer_resident():
    slots, _, _ = stores()
    slots.slot_windows[:, :13] = 5
    slots.resize(3)
    assert not bool((slots.slot_windows[:, 8] == 5).any()) and bool((slots.slot_windows[:, :3] == 5).all())


@pytest.mark.parametrize("page", [128, 256])
def test_pages_are_copied_whole(page):
    g = geometry("tiny", page_size=page)
    store = EntryStore(g, 9 * page, "cpu")
    generator = torch.Generator().manual_seed(0)
    for pool in (store.csa, store.keys, store.hca):
        pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, generator=generator))
    from sglang_dsv4.cache.audit import page_checksum

    before = [page_checksum(store, one) for one in range(9)]
    store.copy_pages([7, 4], [2, 5])
    wanted = [before[{2: 7, 5: 4}.get(one, one)] for one in range(9)]
    assert [page_checksum(store, one) for one in range(9)] == wanted


# Moves


def engine_for(workload, *, running: int = 1, granule: int = 65_536) -> Engine:
    from simulate import limits_for

    g = flash()
    limits = limits_for(workload, "third", g, users=running, chunk=8192)
    return Engine(Limits(**{**vars(limits), "granule": granule}), g)


def check(engine: Engine) -> None:
    """SGLang's sums, the budget, and that nothing lives where there is no memory."""
    tree, slots, pages = engine.tree, engine.pool.mamba_allocator, engine.pages
    plan, paths = engine.pool.split_plan, paths_of(engine.tree)
    assert plan.nbytes(slots.drain.end, pages.drain.end) <= plan.budget
    assert engine.pool.mamba_pool.memory.nbytes == plan.nbytes(slots.drain.end, pages.drain.end)
    assert engine.pool.mamba_pool.size == slots.size >= plan.least_slots
    assert pages.size // PAGE >= min(plan.least_pages, plan.pages)
    held = set(tree.all_values_flatten().tolist())
    assert all(PAGE <= token < (pages.drain.end + 1) * PAGE for token in held)
    snapshots = tree.all_mamba_values_flatten().tolist()
    assert len(set(snapshots)) == len(snapshots) and all(1 <= slot <= slots.drain.end for slot in snapshots)
    assert not set(snapshots) & set(slots.free_ids()) and not {t // PAGE for t in held} & set(pages.free_ids())
    assert sorted(slot for slot, *_ in located(paths, tree)) == sorted(snapshots), "a snapshot is not on the books"
    if not engine.running:
        assert slots.available_size() + engine.snapshots == slots.size
        assert pages.available_size() + tree.full_evictable_size() + tree.full_protected_size() == pages.size


def located(paths, tree):
    from sglang_dsv4.cache.split import _located

    return _located(paths.snapshots_of(tree))


@pytest.mark.parametrize("running", [1, 3])
@pytest.mark.parametrize("name", ["short-chats", "branching", "dropped-reasoning"])
def test_books_hold_after_every_request_while_memory_moves(name, running):
    workload = build(name, scale=0.3, **({"chats": 40} if name == "short-chats" else {}))
    engine = engine_for(workload, running=running)
    before = counters.numbers()
    simulation = Simulation(workload, engine, users=running)
    finished = simulation._finished

    def checked(one) -> None:
        finished(one)
        check(engine)

    simulation._finished = checked
    simulation.run()
    after = counters.numbers()
    assert after["lots_to_pages"] + after["lots_to_slots"] > before["lots_to_pages"] + before["lots_to_slots"]
    for owner in (engine.tree, engine.pool, engine.pages):  # as SGLang flushes
        getattr(owner, "reset" if owner is engine.tree else "clear")()
    check(engine)


def test_two_trees_that_see_the_same_move_alike():
    """As ranks do: nothing that decides looks at a clock, an address or a hash of Python's own."""
    workload = build("short-chats", scale=0.3, chats=40)
    ends = []
    for _ in range(2):
        engine = engine_for(workload)
        before = counters.numbers()
        rows = Simulation(workload, engine).run()
        seen = {name: count - before[name] for name, count in counters.numbers().items()}
        slots, places = engine.pool.mamba_allocator.drain.end, engine.tree.all_mamba_values_flatten().tolist()
        tokens = engine.tree.all_values_flatten().tolist()
        ends.append(([row.cached for row in rows], seen, slots, sorted(places), sorted(tokens)))
    assert ends[0] == ends[1] and ends[0][1]["lots_to_slots"] > 0


def test_slots_that_a_request_needs_end_a_drain_of_slots():
    engine = engine_for(build("short-chats", scale=0.3))
    split = paths_of(engine.tree).split
    slots, pages = engine.pool.mamba_allocator, engine.pages
    slots.alloc(slots.available_size())
    slots.start_drain(3)
    split.target = slots.drain.end - 3
    slots.free(torch.tensor([slots.drain.end]))
    assert slots.available_size() == 0
    split.yield_to(0, 1)
    assert slots.available_size() == 1 and split.target is None
    pages.start_drain(2)
    split.target = slots.drain.end + 1
    split.yield_to(PAGE, 0)
    assert pages.available_size() == pages.size and split.target is None


def test_meta_stores_have_no_bytes_but_books():
    g = geometry("tiny")
    plan = plan_around(g, slots=12, pages=60, least_slots=2, least_pages=4, granule=4096)
    memory = Memory(plan.budget, 4096)
    store = EntryStore(g, 61 * PAGE, "meta", Backing(plan.page_stores, memory))
    assert store.csa.is_meta and store.nbytes == memory.nbytes == plan.page_stores.nbytes(61)
    random.seed(0)
    for _ in range(20):
        store.resize(random.randrange(2, 61) * PAGE)
        assert store.nbytes == memory.nbytes
