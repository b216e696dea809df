"""The sizing formulas against the bytes of the tensors, and what they do with little memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dsv4.cache.granules import GRANULE
from sglang_dsv4.cache.handle import CacheHandle, EntryStore, SlotStore, TailStore
from sglang_dsv4.cache.sizing import SLOTS_PER_REQUEST, SlotPoolConfigurator, describe, fit_tokens, plan_slots
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.refusals import Refused

CONFIGS = Path(__file__).parents[1] / "configs"
GB = 10**9


def geometry(name, **options):
    return Geometry.from_config(json.loads((CONFIGS / f"{name}.json").read_text()), **options)


@pytest.mark.parametrize("store, indexer", [("fp8", "fp4"), ("fp8", "fp8"), ("fp32", "fp32")])
@pytest.mark.parametrize("page", [128, 256])
def test_formulas_equal_the_bytes_of_the_tensors(store, indexer, page):
    g = geometry("tiny", page_size=page, store=store, indexer=indexer)
    pages, slots, tails = EntryStore(g, 5 * page, "cpu"), SlotStore(g, 7, "cpu"), TailStore(g, 4, "cpu")
    assert pages.nbytes == g.page_pool_bytes(5 * page)
    assert slots.nbytes == g.slot_pool_bytes(7)
    assert tails.nbytes == g.tail_bytes(4)
    line = describe(g, pages, slots, tails, 1)
    assert f"{pages.nbytes + slots.nbytes + tails.nbytes} bytes in all" in line
    assert f"4 pages of {page} tokens" in line and "6 slots" in line and "3 request rows" in line


@pytest.mark.parametrize("name", ["v4_flash", "v4_pro"])
@pytest.mark.parametrize("memory", [8 * GB, 40 * GB, 64 * GB])
def test_all_pools_together_fill_the_memory_and_never_exceed_it(name, memory):
    g = geometry(name)
    plan = plan_slots(g, memory, 256)
    left = memory - g.slot_pool_bytes(plan.slots + 1)
    tokens = SlotPoolConfigurator(g, plan.max_running_requests + 1).calculate_pool_sizes(left, 128).max_total_num_tokens
    used = g.slot_pool_bytes(plan.slots + 1) + g.tail_bytes(plan.max_running_requests + 1)
    used += g.page_pool_bytes(tokens + g.page_size)
    assert used <= memory
    assert memory - used < 2 * g.page_pool_bytes(64 * g.page_size)
    assert plan.snapshots > 0 and tokens % g.page_size == 0


def test_running_requests_never_take_more_than_half_of_a_small_memory():
    g = geometry("v4_flash")
    plan = plan_slots(g, 4 * GB, 256)
    assert 1 <= plan.max_running_requests < 256
    assert SLOTS_PER_REQUEST * plan.max_running_requests * g.slot_bytes < 2 * GB


def test_too_little_for_one_request_is_refused_with_the_number_needed():
    g = geometry("v4_flash")
    with pytest.raises(Refused, match=r"cannot hold one request's state: one needs \d+ bytes; raise"):
        plan_slots(g, 10**7, 256)
    with pytest.raises(Refused, match=r"^0 bytes of KV memory"):  # weights took more than their part
        plan_slots(g, -(10**7), 256)


def test_memory_without_a_page_is_refused_where_it_does_not_move():
    g = geometry("v4_flash")
    with pytest.raises(Refused, match=r"room for 0 tokens: .* needs 384 tokens \(3 pages\) beside 9 slots and 1"):
        SlotPoolConfigurator(g, 2, 0, 9).calculate_pool_sizes(g.tail_bytes(2) + 10**5, g.page_size)


@pytest.mark.parametrize("slots, running, rows", [(488, 256, 98), (488, 20, 21), (5, 256, 2)])
def test_tails_are_set_aside_for_the_requests_that_slots_allow(monkeypatch, slots, running, rows):
    from sglang.srt import runtime_context

    from sglang_dsv4 import config, hooks

    hf_config = SimpleNamespace(geometry=lambda page: geometry("v4_flash", page_size=page))
    model = SimpleNamespace(hf_config=hf_config)
    configurator = SimpleNamespace(model_config=model, page_size=128, _calculate_mamba_ratio=lambda: SLOTS_PER_REQUEST)
    schedule = SimpleNamespace(max_mamba_cache_size=slots, max_running_requests=running)
    monkeypatch.setattr(config, "is_ours", lambda model: True)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    assert hooks._pool_configurator(None, configurator).request_rows == rows


@pytest.mark.parametrize("left", [-(10**9), 0, 10**6, 10**8])
def test_memory_of_which_no_granule_is_left_for_a_page_is_refused(left):
    g = geometry("v4_flash")
    with pytest.raises(Refused, match=r"^\d+ bytes .*9 slots hold no page: .*granules.*SGLANG_DSV4_SPLIT=static"):
        SlotPoolConfigurator(g, 2, GRANULE, 9).calculate_pool_sizes(left, g.page_size)


@pytest.mark.parametrize("memory, left", [(-1.5, -2.0), (0.5, -0.25), (0.5, 0.0)])
def test_slots_that_leave_nothing_for_pages_are_refused(monkeypatch, memory, left):
    from sglang.srt import runtime_context

    from sglang_dsv4 import config, hooks

    hf_config = SimpleNamespace(geometry=lambda page: geometry("tiny", page_size=page))
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config),
        page_size=128,
        device="cpu",
        server_args=SimpleNamespace(tp_size=1),
    )
    schedule = SimpleNamespace(max_mamba_cache_size=2000, max_total_tokens=None)
    monkeypatch.setattr(config, "is_ours", lambda model: True)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(hooks, "_sized", hooks._Sized())
    with pytest.raises(Refused, match=r"^no memory is left for pages: \d+ bytes .* for 2000 slots and pages; raise"):
        hooks._state_memory(lambda self, memory: left, configurator, memory)


def test_capacity_is_the_most_whole_pages_that_fit():
    g = geometry("v4_flash")
    for memory in (10**8, 10**9 + 12345):
        tokens = fit_tokens(g, memory)
        assert g.page_pool_bytes(tokens + g.page_size) <= memory < g.page_pool_bytes(tokens + 66 * g.page_size)


@pytest.mark.parametrize("page", [128, 256])
def test_every_layer_is_bound_once_to_pools_of_its_kind(page):
    g = geometry("tiny", page_size=page)
    cache = CacheHandle(g, EntryStore(g, 2 * page, "cpu"), SlotStore(g, 3, "cpu"), TailStore(g, 2, "cpu"))
    seen = []
    for layer, ratio in enumerate(g.ratios):
        handle = cache.layer(layer)
        assert handle.ratio == ratio
        pools = (handle.window, handle.entries, handle.index_keys, handle.overlap, handle.tail)
        present = [p is not None for p in pools]
        assert present == {0: [1, 0, 0, 0, 0], 4: [1, 1, 1, 1, 1], 128: [1, 1, 0, 0, 1]}[ratio]
        seen += [p.data_ptr() for p in pools if p is not None]
    assert len(seen) == len(set(seen))
