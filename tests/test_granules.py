"""Which granules stores need, and how a split that moves begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dsv4.cache.granules import GRANULE, Region, overhead, page_group, plan_around, plan_split, slot_group
from sglang_dsv4.cache.sizing import SlotPoolConfigurator, granule_for, plan_for, plan_slots
from sglang_dsv4.geometry import Geometry

CONFIGS = Path(__file__).parents[1] / "configs"
PAGE = 128


def geometry(name: str, **options) -> Geometry:
    return Geometry.from_config(json.loads((CONFIGS / f"{name}.json").read_text()), **options)


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
