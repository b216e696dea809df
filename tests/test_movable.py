"""SGLang's allocators with an upper end that moves."""

from __future__ import annotations

import pytest
import torch

from sglang_dsv4.cache.movable import MovablePages, MovableSlots

PAGE = 128


def slots_of(size: int = 10) -> MovableSlots:
    return MovableSlots(size, "cpu")


def test_slots_are_handed_out_lowest_first():
    slots = slots_of()
    taken = slots.alloc(6)
    slots.free(taken[[3, 1]])
    assert slots.alloc(3).tolist() == [2, 4, 7]


def test_a_drain_withholds_what_is_free_and_what_came_back_and_size_follows():
    slots = slots_of()
    slots.alloc(9)
    slots.start_drain(3)
    assert (slots.size, slots.available_size(), slots.drain.done) == (9, 0, False)  # 10 was free
    slots.free(torch.tensor([2, 9]))
    assert (slots.size, slots.free_ids(), slots.drain.done) == (8, [2], False)
    slots.free(torch.tensor([8]))
    assert (slots.available_size(), slots.drain.done) == (1, True)
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
    assert (pages.size, pages.available_size(), pages.may_be_done) == (9 * PAGE, 4 * PAGE, True)
    pages.settle()
    assert pages.drain.done and pages.free_ids() == [1, 2]
    pages.drain.finish()
    pages.grow(1)
    assert (pages.size, pages.num_pages, sorted(pages.free_ids())) == (8 * PAGE, 8, [1, 2, 8])
    pages.clear()
    assert pages.free_ids() == list(range(1, 9))


@pytest.mark.parametrize("need_sort", [False, True])
def test_what_comes_back_during_a_drain_is_neither_looked_at_nor_sorted(monkeypatch, need_sort):
    """A GPU's scheduler would wait for the step in flight. Tensors on meta raise where somebody asks for values."""
    slots = MovableSlots(10, "meta")
    pages = MovablePages(10 * PAGE, PAGE, torch.uint8, "meta", None, need_sort)
    some_slots, some_pages = slots.alloc(9), pages.alloc(9 * PAGE)
    for allocator in (slots, pages):
        allocator.drain.start(3, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "sort", None)
        slots.free(some_slots[:1])
        slots.free(some_slots[1:4])
        pages.free_segment(some_pages[: 2 * PAGE], start_pos=0)
        pages.free_group_begin()
        pages.free_segment(some_pages[2 * PAGE : 4 * PAGE], start_pos=0)
        pages.free_group_end()
    assert pages.may_be_done and pages.available_size() == 5 * PAGE and len(pages.alloc(5 * PAGE)) == 5 * PAGE
    with pytest.raises((NotImplementedError, RuntimeError)):
        slots.available_size()
    for allocator in (slots, pages):  # a move is given up
        allocator.drain.withheld = {9, 10}
        allocator.cancel_drain()
    assert slots.available_size() == 7 and pages.available_size() == 2 * PAGE


def test_slots_that_came_back_are_looked_at_once(monkeypatch):
    slots, waits = slots_of(), []
    slots.alloc(10)
    slots.start_drain(4)
    sweep = slots.drain.sweep
    monkeypatch.setattr(slots.drain, "sweep", lambda free: waits.append(len(free)) or sweep(free))
    for slot in (3, 10, 8):
        slots.free(torch.tensor([slot]))
    assert (slots.available_size(), slots.size, slots.schedulable_available_size()) == (1, 8, 1) and waits == [3]
    assert slots.alloc(2) is None and slots.alloc(1).tolist() == [3] and waits == [3]
    slots.free(torch.tensor([9]))
    assert slots.alloc(1) is None and waits == [3, 1]


def test_pages_that_came_back_above_the_end_are_handed_out_last():
    pages = MovablePages(10 * PAGE, PAGE, torch.uint8, "cpu", None, False)
    taken = pages.alloc(8 * PAGE)
    pages.start_drain(4)  # 9 and 10 are free
    for page in (8, 2):
        pages.free_segment(taken[(page - 1) * PAGE : page * PAGE], start_pos=0)
    assert [int(pages.alloc(PAGE)[0]) // PAGE, int(pages.alloc(PAGE)[0]) // PAGE, pages.alloc(PAGE)] == [2, 8, None]
    assert not pages.may_be_done  # none is free, so there is nothing to look at
    pages.settle()
    assert pages.drain.left == 2


def test_what_a_move_gives_back_is_withheld_at_once_and_what_stays_is_free():
    for allocator in (slots_of(), MovablePages(10 * PAGE, PAGE, torch.uint8, "cpu", None, False)):
        allocator.alloc(10 if isinstance(allocator, MovableSlots) else 10 * PAGE)
        allocator.start_drain(3)
        allocator.give_back([9, 3, 8, 10])
        assert allocator.drain.done and allocator.free_ids() == [3]


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("page", [9, 2, 8])
def test_a_page_that_comes_back_twice_is_noticed_where_sglang_looks_for_that(monkeypatch, page, group):
    """Twice while it is withheld, while it is free, and once more after its memory went."""
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    pages = MovablePages(9 * PAGE, PAGE, torch.uint8, "cpu", None, False)
    taken = pages.alloc(9 * PAGE)
    pages.start_drain(2)
    tokens = taken[(page - 1) * PAGE : page * PAGE]
    pages.free_segment(tokens, start_pos=0)
    pages.settle()
    if page == 8:
        pages.free(taken[8 * PAGE :])
        pages.settle()
        pages.drain.finish()
    if group:
        pages.free_group_begin()
        pages.free(tokens)
    with pytest.raises(AssertionError):
        pages.free_group_end() if group else pages.free_segment(tokens, start_pos=0)
