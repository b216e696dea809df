"""Memory that moves between slots and pages: stores, decisions, what lies in the way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import Engine, Limits
from simulate import Simulation, flash
from workloads import build

from sglang_dsv4.cache import split as split_module
from sglang_dsv4.cache import whereabouts
from sglang_dsv4.cache.backing import Backing, HostBacking, Memory
from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.granules import plan_around
from sglang_dsv4.cache.handle import EntryStore, SlotStore
from sglang_dsv4.cache.metrics import Usage
from sglang_dsv4.cache.order import locked
from sglang_dsv4.cache.superseded import paths_of
from sglang_dsv4.cache.whereabouts import PageNodes, SlotNodes
from sglang_dsv4.geometry import Geometry

CONFIGS = Path(__file__).parents[1] / "configs"
PAGE = 128


def geometry(name: str, **options) -> Geometry:
    return Geometry.from_config(json.loads((CONFIGS / f"{name}.json").read_text()), **options)


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


def check(engine: Engine, *, noted: bool = True) -> None:
    """SGLang's sums, the budget, that nothing lives where there is no memory and everything is found."""
    tree, slots, pages = engine.tree, engine.pool.mamba_allocator, engine.pages
    plan, paths = engine.pool.split_plan, paths_of(engine.tree)
    assert plan.nbytes(slots.drain.end, pages.drain.end) <= plan.budget
    assert engine.pool.mamba_pool.moving.memory.nbytes == plan.nbytes(slots.drain.end, pages.drain.end)
    assert engine.pool.mamba_pool.size == slots.size >= plan.least_slots
    assert pages.size // PAGE >= min(plan.least_pages, plan.pages)
    held = set(tree.all_values_flatten().tolist())
    assert all(PAGE <= token < (pages.drain.end + 1) * PAGE for token in held)
    snapshots = tree.all_mamba_values_flatten().tolist()
    assert len(set(snapshots)) == len(snapshots) and all(1 <= slot <= slots.drain.end for slot in snapshots)
    assert not set(snapshots) & set(slots.free_ids()) and not {t // PAGE for t in held} & set(pages.free_ids())
    in_slots = paths.split._snapshots_in(tree, range(1, slots.drain.end + 1))
    assert [slot for slot, *_ in in_slots] == sorted(snapshots), "a snapshot is not on the books"
    if noted:
        assert pages_found(engine) == pages_in_tree(engine), "a page is not on the books"
    if not engine.running:
        assert slots.available_size() + engine.snapshots == slots.size
        assert pages.available_size() + tree.full_evictable_size() + tree.full_protected_size() == pages.size


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


def life_of_a_rank(*, reports: bool) -> dict[str, object]:
    """What a rank does in a while; one of them reports what there is."""
    workload = build("dropped-reasoning", scale=0.3)  # memory is on the move in a fifth of its steps
    engine = engine_for(workload, running=3)
    engine.watch = lambda: Usage.of(engine.tree) if reports else None
    split, moves = paths_of(engine.tree).split, []

    def noted(kind: str, notes: PageNodes | SlotNodes) -> None:
        tell = notes.moved
        notes.moved = lambda old, new: moves.append([kind, old.tolist(), new.tolist()]) or tell(old, new)

    noted("pages", split._page_nodes)
    noted("slots", split._slot_nodes)
    before = counters.numbers()
    rows = Simulation(workload, engine, users=3).run()
    slots, pages = engine.pool.mamba_allocator, engine.pages
    return {
        "cached": [row.cached for row in rows],
        "counts": {name: count - before[name] for name, count in counters.numbers().items()},
        "moves": moves,
        "ends": [slots.drain.end, pages.drain.end],
        "free": [slots.free_ids(), pages.free_ids()],
        "tree": [sorted(engine.tree.all_mamba_values_flatten().tolist()), texts_of(engine)],
    }


def test_two_ranks_move_alike():
    """Nothing that decides looks at a clock, an address, a hash of Python's own or what was asked in between."""
    folder = Path(__file__).parent
    code = "import json, test_split; print(json.dumps(test_split.life_of_a_rank(reports=False)))"
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", code]
    other = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    own = json.loads(json.dumps(life_of_a_rank(reports=True)))
    said, _ = other.communicate(timeout=300)
    assert other.returncode == 0 and json.loads(said.splitlines()[-1]) == own
    assert own["counts"]["lots_to_slots"] > 0 and {kind for kind, *_ in own["moves"]} == {"pages", "slots"}


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


def test_a_move_that_nobody_asks_for_any_more_is_given_up_and_a_flush_ends_one():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine = small_engine(running=2)
    paths, slots, pages = paths_of(engine.tree), engine.pool.mamba_allocator, engine.pages

    def short_once() -> None:
        """Slots are short while a running request sits on the highest pages."""
        taken = slots.alloc(slots.available_size())
        engine.tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        slots.free(taken)
        assert paths.split.target is not None and pages.drain.limit is not None

    held = pages.alloc((pages.available_size() // PAGE - 26) * PAGE)
    running = answer(engine, text(1, 24), 1, steps=1)
    pages.free(held)
    short_once()
    list(running)
    for number in range(split_module.PATIENCE + 2):
        answer(engine, text(2, 3), 100 + number)
    assert paths.split.target is None and pages.drain.limit is None and pages.size == pages.drain.end * PAGE

    held = pages.alloc((pages.available_size() // PAGE - 26) * PAGE)
    running = answer(engine, text(3, 24), 2, steps=1)
    pages.free(held)
    short_once()
    list(running)
    for owner in (engine.tree, engine.pool, engine.pages):  # as SGLang flushes
        getattr(owner, "reset" if owner is engine.tree else "clear")()
    assert paths_of(engine.tree).split.target is None and pages.drain.limit is None


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


# What lies in the way


def small_engine(**limits) -> Engine:
    return Engine(Limits(**{"pages": 120, "slots": 16, "context": 4096, "granule": 4096, **limits}), flash())


def answer(engine: Engine, ids: list[int] | torch.Tensor, number: int = 0, steps: int | None = None):
    """A request with that prompt and an answer of 3 tokens, done, or `steps` into it."""
    run = engine.start(np.asarray(ids, dtype=np.int64), np.arange(3, dtype=np.int64) + 7000, number)
    life = run.steps()
    for _ in life if steps is None else range(steps):
        if steps is not None:
            next(life)
    return life


def text(seed: int, pages: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 10_000, size=pages * PAGE + 5).tolist()


def match(engine: Engine, ids: list[int]) -> list[int]:
    """The pages that a waiting request finds. The tree splits a node where the text ends, and nothing is inserted."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    found = engine.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids))))
    return (engine.tree.path_device_indices(found.last_device_node)[::PAGE] // PAGE).tolist()


def pages_in_tree(engine: Engine) -> list[int]:
    return sorted({token // PAGE for token in engine.tree.all_values_flatten().tolist()})


def pages_found(engine: Engine) -> list[int]:
    split = paths_of(engine.tree).split
    return sorted(page for page, *_ in split._pages_in(engine.tree, range(1, engine.pages.drain.end + 1)))


def leaves_of(engine: Engine) -> list[int]:
    tree, found = engine.tree, []
    for node in range(1, 10_000):
        try:
            path = tree.tree_core.collect_path_info([node])[0]
        except KeyError:
            continue
        if path and not path[-1].num_children:
            found.append(node)
    return found


def test_pages_are_found_when_a_waiting_request_split_their_node_and_the_lower_part_went():
    engine = small_engine()
    shared = text(0, 9)
    answer(engine, shared)
    match(engine, shared[: 4 * PAGE])
    before = pages_in_tree(engine)
    assert pages_found(engine) == before
    while len(left := pages_in_tree(engine)) > 4:
        engine.tree._evict_device_leaf(leaves_of(engine)[0], dict.fromkeys(engine.tree.tree_components, 0))
        assert pages_found(engine) == pages_in_tree(engine) != left
    assert pages_found(engine) == before[:4]


def test_pages_are_found_after_leaves_went_in_sglangs_own_order_and_came_back(monkeypatch):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    monkeypatch.setattr(whereabouts, "MOST_GONE", 5)
    engine = small_engine()
    for number in range(24):
        chat = number % 6
        ids = text(100, 3)[: 3 * PAGE] + text(chat, 5)[: (2 + number // 6) * PAGE] + text(number, 1)
        answer(engine, ids, number)
        assert pages_found(engine) == pages_in_tree(engine)
        if number % 5 == 4:
            engine.tree.evict(EvictParams(num_tokens=9 * PAGE, mamba_num=1))
            assert pages_found(engine) == pages_in_tree(engine)
    assert len(leaves_of(engine)) > 3


def fill_above(engine: Engine, count: int) -> list[int]:
    """Cached texts of three pages until a drain of `count` pages has some of them above its limit; those pages."""
    number = 0
    while engine.pages.available_size() > 6 * PAGE:
        answer(engine, text(number, 3), number)
        number += 1
    for leaf in leaves_of(engine)[: number // 2]:
        engine.tree._evict_device_leaf(leaf, dict.fromkeys(engine.tree.tree_components, 0))
    engine.pages.start_drain(count)
    limit = engine.pages.drain.limit
    return [page for page in pages_in_tree(engine) if page > limit]


def texts_of(engine: Engine) -> dict[int, list[int]]:
    """Node -> its pages."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    found = {}
    for node in range(1, 10_000):
        try:
            value = engine.tree.tree_core.get_component_device_value(node, ComponentType.FULL)
        except KeyError:
            continue
        if value is not None and len(value):
            assert (value.view(-1, PAGE) - value[::PAGE, None] == torch.arange(PAGE)).all()
            found[node] = (value[::PAGE] // PAGE).tolist()
    return found


def test_one_look_moves_so_many_pages_and_the_next_goes_on(monkeypatch):
    monkeypatch.setattr(split_module, "PAGES_A_LOOK", 4)
    engine = small_engine()
    split = paths_of(engine.tree).split
    above, before = fill_above(engine, 30), texts_of(engine)
    assert len(above) > 9
    for _ in range(40):
        held = len([page for page in pages_in_tree(engine) if page > engine.pages.drain.limit])
        more = split._move_pages(engine.tree)
        left = len([page for page in pages_in_tree(engine) if page > engine.pages.drain.limit])
        assert held - 4 <= left <= held
        if not more:
            break
    assert engine.pages.drain.done and not more
    after, limit = texts_of(engine), engine.pages.drain.limit
    assert after.keys() == before.keys() and pages_found(engine) == pages_in_tree(engine)
    assert all(
        new == old if old <= limit else new <= limit
        for node in before
        for old, new in zip(before[node], after[node], strict=True)
    )


def test_what_a_request_holds_stays_and_what_lies_around_it_moves():
    engine = small_engine(running=2)
    split = paths_of(engine.tree).split
    above = fill_above(engine, 30)
    one = next(number for number in range(99) if set(match(engine, text(number, 3))) & set(above))
    life = answer(engine, text(one, 3), 999, steps=1)
    held = {page for node, pages in texts_of(engine).items() if locked(engine.tree, node) for page in pages}
    assert held & set(above) and set(above) - held
    before = texts_of(engine)
    split._move_pages(engine.tree)
    after, limit = texts_of(engine), engine.pages.drain.limit
    for node, pages in before.items():
        for old, new in zip(pages, after[node], strict=True):
            assert new == old if old in held or old <= limit else new <= limit
    for _ in life:
        pass


def test_a_snapshot_that_a_request_holds_stays_and_the_others_move_a_look_at_a_time(monkeypatch):
    monkeypatch.setattr(split_module, "SNAPSHOTS_A_LOOK", 2)
    engine = small_engine(running=2, slots=24)
    split, slots = paths_of(engine.tree).split, engine.pool.mamba_allocator
    low = slots.alloc(8)
    for number in range(5):
        answer(engine, text(number, 3), number)
    life = answer(engine, text(2, 3), 999, steps=1)
    slots.free(low)
    before = split._snapshots_in(engine.tree, range(1, slots.drain.end + 1))
    before = [(slot, node, split_module._snapshot_locked(engine.tree, node)) for slot, node, _ in before]
    assert [held for *_, held in before].count(True) == 1 and min(before)[0] > 8
    slots.start_drain(slots.drain.end - 8)
    while split._move_snapshots(engine.tree):
        pass
    after = {node: slot for slot, node, _ in split._snapshots_in(engine.tree, range(1, slots.drain.end + 1))}
    assert all(after[node] == slot if held else after[node] <= 8 for slot, node, held in before)
    slots.cancel_drain()
    for _ in life:
        pass


def test_after_slots_grew_the_lowest_snapshots_go_up(monkeypatch):
    monkeypatch.setattr(split_module, "SNAPSHOTS_A_LOOK", 2)
    engine = small_engine(running=2, slots=24)
    split, slots = paths_of(engine.tree).split, engine.pool.mamba_allocator
    for number in range(6):
        answer(engine, text(number, 3), number)
    life = answer(engine, text(0, 3), 999, steps=1)
    before = split._snapshots_in(engine.tree, range(1, slots.drain.end + 1))
    before = [(slot, node) for slot, node, _ in before if not split_module._snapshot_locked(engine.tree, node)]
    first = slots.drain.end - 2
    split._raise_snapshots(engine.tree, first)
    after = {node: slot for slot, node, _ in split._snapshots_in(engine.tree, range(1, slots.drain.end + 1))}
    assert len(before) == 5 and [after[node] for _, node in before] == [first, first + 1, first + 2, *dict(before[3:])]
    for _ in life:
        pass


@pytest.mark.parametrize(
    "wrong", ["another node", "no node", "a node that is gone", "another depth", "another end", "too deep"]
)
def test_an_entry_that_is_wrong_moves_nothing(wrong):
    engine = small_engine()
    split = paths_of(engine.tree).split
    above, before = fill_above(engine, 30), texts_of(engine)
    noted, nodes = split._page_nodes._noted, list(before)
    for page in above:
        other = next(node for node in nodes if page not in before[node])
        if wrong == "another depth":
            noted[0, page] = (noted[0, page] + 1) % 3
        elif wrong == "too deep":
            noted[0, page] = 1000
        elif wrong == "another end":
            noted[2, page] -= 1
        else:
            noted[1, page] = {"another node": other, "no node": 0, "a node that is gone": 9_999}[wrong]
    while split._move_pages(engine.tree):
        pass
    assert texts_of(engine) == before and not engine.pages.drain.done


def test_a_move_is_given_up_when_nobody_knows_what_lies_in_its_way():
    engine = small_engine()
    paths = paths_of(engine.tree)
    fill_above(engine, 5)
    paths.split.target = engine.pool.mamba_allocator.drain.end + 1
    paths.split._began = paths.split._again = paths.order.model.now
    paths.split._page_nodes.clear()
    for _ in range(split_module.PATIENCE):
        assert paths.split.target is not None
        paths.order.model.now += 1
        paths.split.consider(engine.tree, paths, 0, 0)
    assert paths.split.target is None and engine.pages.drain.limit is None
    check(engine, noted=False)


def test_a_move_goes_on_once_what_was_held_has_come_back_and_looks_once_a_request(monkeypatch):
    engine = small_engine(running=2)
    paths, pages = paths_of(engine.tree), engine.pages
    split, waits = paths.split, []
    end = pages.drain.end
    taken = pages.alloc(pages.available_size())
    pages.start_drain(split.pages.drain.end - split._pages_beside(split.slots.drain.end + split.lot))
    split.target = split.slots.drain.end + split.lot
    now = split._began = paths.order.model.now = 5
    split._again = now + 3  # when it looks at what is cached
    sweep = pages.drain.sweep
    monkeypatch.setattr(pages.drain, "sweep", lambda free: waits.append(paths.order.model.now) or sweep(free))
    count = pages.drain.left

    def back(first: int, last: int) -> None:
        pages.free_segment(taken[(first - 1) * PAGE : last * PAGE], start_pos=0)
        split.consider(engine.tree, paths, 0, 0)

    back(end - count + 2, end)
    assert not waits  # one of those that are going is certainly held
    for page in range(1, 4):  # others, as many as that one
        back(page, page)
    assert waits == [now]
    paths.order.model.now += 1
    back(4, 4)
    assert waits == [now, now + 1] and split.target is not None
    paths.order.model.now += 1
    back(end - count + 1, end - count + 1)
    assert waits == [now, now + 1, now + 2] and split.target is None and pages.drain.end == end - count


def test_a_slot_whose_snapshot_went_holds_none():
    engine = small_engine()
    split, slots = paths_of(engine.tree).split, engine.pool.mamba_allocator
    for number in range(4):
        answer(engine, text(number, 3), number)
    for leaf in leaves_of(engine)[:2]:
        engine.tree._evict_device_leaf(leaf, dict.fromkeys(engine.tree.tree_components, 0))
    taken = slots.alloc(slots.available_size())  # by requests: the entries of the snapshots before are still there
    found = split._snapshots_in(engine.tree, range(1, slots.drain.end + 1))
    assert [slot for slot, *_ in found] == sorted(engine.tree.all_mamba_values_flatten().tolist())
    split._slot_nodes._noted[int(taken[0])] = found[0][1]  # as if a snapshot had moved and its entry stayed
    assert split._snapshots_in(engine.tree, [int(taken[0]), found[0][0]]) == [found[0]]


def test_entries_of_leaves_that_went_are_brought_up_to_date(monkeypatch):
    """A chain of parents, some gone before others were noted."""
    settled, plain = PageNodes(50, "cpu"), PageNodes(50, "cpu")
    rng = random.Random(0)
    monkeypatch.setattr(whereabouts, "MOST_GONE", 4)
    parents, leaves, newest = {1: (1, 0)}, [1], 1
    for _ in range(300):
        if rng.random() < 0.6 or len(leaves) < 2:
            newest += 1
            parents[newest] = (parent := rng.choice(leaves)), 2 + 3 * (parent > 1)
            leaves.append(newest)
            pages = torch.tensor(rng.sample(range(1, 50), 3))
            settled.entered(pages, 2, newest)
            plain.entered(pages, 2, newest)
        else:
            bare = [node for node in leaves[1:] if node not in [parents[other][0] for other in leaves]]
            gone = rng.choice(bare)
            leaves.remove(gone)
            settled.went(gone, *parents[gone])
            plain._heirs[gone] = parents[gone]
        assert settled.read(range(50)) == plain.read(range(50))
        assert len(settled._heirs) < 4
        assert {node for _, node, _ in settled.read(range(1, 50))} <= {0, *leaves}


def test_noting_what_lies_where_asks_the_device_for_nothing(monkeypatch):
    monkeypatch.setattr(whereabouts, "MOST_GONE", 2)
    pages, slots = PageNodes(50, "meta"), SlotNodes(20, "meta")
    pages.entered(torch.empty(3, dtype=torch.int32, device="meta"), 2, 7)
    slots.entered(torch.empty(1, dtype=torch.int64, device="meta"), 7)
    for leaf in (8, 9):
        pages.went(leaf, 7, 5)
    assert not pages._heirs
    with pytest.raises((NotImplementedError, RuntimeError)):
        pages.read([1])


def test_a_flush_forgets_whose_places_were_whose():
    engine = small_engine()
    answer(engine, text(0, 5))
    for owner in (engine.tree, engine.pool, engine.pages):
        getattr(owner, "reset" if owner is engine.tree else "clear")()
    split = paths_of(engine.tree).split
    assert not split._page_nodes._noted.any() and not split._slot_nodes._noted.any() and pages_found(engine) == []
    answer(engine, text(1, 5))
    assert pages_found(engine) == pages_in_tree(engine) != []
