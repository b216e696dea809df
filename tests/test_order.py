"""What leaves the tree first: the order learned from reuse, and that evicting by it keeps the tree's rules."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from engine import Engine, Limits
from simulate import Simulation, flash
from workloads import Piece, Request, Workload

from sglang_dsv4.cache import reuse
from sglang_dsv4.cache.habits import ANSWER, INNER, PROMPT
from sglang_dsv4.cache.order import EvictionOrder
from sglang_dsv4.cache.reuse import MarkClass, ReuseModel, best_rates, extend_chain
from sglang_dsv4.cache.superseded import paths_of

PAGE = 128


def chain(*pages: int) -> array[int]:
    return array("q", pages)


def serve(model: ReuseModel, *pages: int, kind: str = PROMPT, node: int | None = None, span: int = 1):
    arrival = model.arrives(chain(*pages))
    model.stands(arrival, len(pages), kind, node if node is not None else pages[-1], span)
    return arrival.passed[-1]


# Values


def test_what_comes_soon_or_never_loses_value_with_age_and_what_comes_around_gains():
    soon = best_rates([0.5, 0.3, 0.1, 0.02])
    around = best_rates([0.0, 0.0, 0.0, 1.0])
    assert soon == sorted(soon, reverse=True) and around == sorted(around)
    assert around[3] == pytest.approx(1 / 4)  # it comes within the 8 requests of its age, at half time
    assert best_rates([0.5, 0.0, 0.0, 0.01])[0] == pytest.approx(0.5 / 0.75)  # kept for one request, then given up
    assert best_rates([0.0, 0.5])[0] == pytest.approx(0.5 / (1 + 2 * 0.75))


def test_while_nothing_is_known_old_marks_are_worth_less():
    values = ReuseModel().values(MarkClass(PROMPT, 0, 0))
    assert values == sorted(values, reverse=True) and values[0] > 2 * values[2]


def test_a_round_of_texts_lets_those_go_that_were_just_used():
    model = ReuseModel()
    for _ in range(12):
        for text in range(8):
            serve(model, text + 1)
    order = []
    while (mark := model.worst(by_span=False)) is not None:
        order.append(mark.node)
        model.withdraw(mark)
    assert order[:3] == [8, 7, 6]


def test_conversations_that_have_had_all_their_turns_go_before_those_that_have_one_to_come():
    """Each has two turns; the second follows eight requests later, so the ended ones are the younger marks."""
    model, lag = ReuseModel(), 8
    for text in range(1, 200):
        serve(model, text, kind=PROMPT)
        if text > lag:
            serve(model, text - lag, 10_000 + text - lag, kind=PROMPT)
    gone = model.worst(by_span=False)
    assert gone.node > 10_000
    going_on = model.end_of(199)
    assert model.values(gone.cls)[0] < model.values(going_on.cls)[0] / 4


def test_evicted_texts_still_teach():
    """Nothing is ever kept here, so only texts that are gone can tell that they come back."""
    model = ReuseModel()
    for _ in range(10):
        for text in range(4):
            model.withdraw(serve(model, text + 1))
    mark = serve(model, 1)
    assert model.values(mark.cls)[1] > model.values(mark.cls)[0]


def test_a_text_that_strangers_share_is_told_from_one_that_its_own_conversation_passes():
    model = ReuseModel()
    for user in range(20):
        arrival = model.arrives(chain(7, 100 + user))
        model.stands(arrival, 1, INNER, 7, 1)
        model.stands(arrival, 2, PROMPT, 100 + user, 1)
    for turn in range(20):
        serve(model, *range(1000, 1001 + turn))
    shared, own = model.mark(7, INNER, 0), model.mark(1000, PROMPT, 0)
    assert shared.cls.strangers == reuse._STRANGERS and shared.cls.turn == 0
    assert own.cls.strangers == 0 and own.cls.turn == reuse._TURNS
    serve(model, 5, kind=INNER)
    serve(model, 5, 6)
    before = model.mark(5, INNER, 0).cls.strangers
    serve(model, 5, 6, 8)
    assert model.mark(5, INNER, 0).cls.strangers == before  # its second turn is no stranger


def test_an_edited_turn_counts_as_one_more_of_the_same_conversation():
    model = ReuseModel()
    serve(model, 1)
    serve(model, 1, 2)
    assert serve(model, 1, 3).cls.turn == 2


def test_branches_that_their_conversation_left_go_before_those_it_went_on_with():
    model = ReuseModel()
    for talk in range(100, 4000, 100):
        serve(model, talk)
        serve(model, talk, talk + 1)
        if talk % 200:
            serve(model, talk, talk + 1, talk + 2)
        else:
            serve(model, talk, talk + 2)  # the turn was edited
    serve(model, 9000)
    serve(model, 9000, 9001)
    left, going_on = model.end_of(3801), model.end_of(9001)
    assert left.cls == going_on.cls._replace(left=True)
    assert model.values(left.cls)[0] < model.values(going_on.cls)[0] / 2
    order = []
    while (mark := model.worst(by_span=False)) is not None:
        order.append(mark.node)
        model.withdraw(mark)
    assert set(range(201, 4000, 200)) <= set(order[: order.index(9001)])


def test_a_branch_to_which_its_conversation_returns_is_not_left_any_more():
    model = ReuseModel()
    serve(model, 100)
    serve(model, 100, 101)
    serve(model, 100, 102)
    assert model.end_of(101).cls.left
    serve(model, 100, 101, 103)
    assert not model.mark(101, PROMPT, 0).cls.left and model.end_of(102).cls.left


def test_strangers_on_the_same_beginning_do_not_leave_each_others_branches():
    model = ReuseModel()
    for user in range(5):
        arrival = model.arrives(chain(7, 100 + user))
        model.stands(arrival, 1, INNER, 7, 1)
        model.stands(arrival, 2, PROMPT, 100 + user, 1)
    serve(model, 7, 100, 200)
    assert [model.mark(100 + user, PROMPT, 0).cls.left for user in range(5)] == [False] * 5


def test_ends_of_answers_that_nobody_resumes_go_before_ends_of_prompts():
    model = ReuseModel()
    for talk in range(1, 40):
        for turn in range(3):
            arrival = model.arrives(chain(*(talk * 100 + i for i in range(turn + 1))))
            model.stands(arrival, turn + 1, PROMPT, talk * 100 + turn, 1)
            arrival.chain.append(talk * 100 + 50 + turn)
            model.stands(arrival, turn + 2, ANSWER, talk * 100 + 50 + turn, 1)
    prompt, answer = model.mark(1, PROMPT, 0), model.mark(2, ANSWER, 0)
    assert model.values(answer.cls)[0] < model.values(prompt.cls)[0] / 2


def test_where_slots_are_short_the_snapshot_goes_that_the_fewest_tokens_hang_on():
    model = ReuseModel()
    serve(model, 1, span=4)
    serve(model, 2, span=1)
    assert model.worst(by_span=False).node == 1
    assert model.worst(by_span=True).node == 2


def test_weights_stay_finite_and_marks_are_bounded(monkeypatch):
    monkeypatch.setattr(reuse, "_REMEMBERED", 50)
    monkeypatch.setattr(reuse, "_FADE", 0.5)
    model = ReuseModel()
    for text in range(3000):
        serve(model, text % 60)
    assert all(mark.stamp >= 0 for known in model._marks.values() for mark in known.members)
    assert len(model._marks) == 50 and model._weight <= 1024 * 2**16
    assert sum(len(group) for group in model._leaves.values()) == len(model._ends) == 60  # forgotten, yet still leaves
    assert sum(table.reached[0] for table in model._tables.values()) < 1e9


def test_equal_texts_of_two_namespaces_are_two():
    text, order = array("q", range(PAGE)), EvictionOrder()
    requests = [SimpleNamespace(origin_input_ids=text, extra_key=key, cache_salt=None) for key in ("a", "b", "a")]
    for request in requests:
        order.arrives(SimpleNamespace(page_size=PAGE), request)
    keys = [request._dsv4_arrival.chain[0] for request in requests]
    assert keys[0] == keys[2] != keys[1]


def test_every_process_hashes_a_text_alike():
    """Ranks are processes, each with a seed of its own for Python's hashes of strings."""
    program = (
        "from types import SimpleNamespace as S; from array import array; from sglang_dsv4.cache import order; "
        "text = array('q', range(256)); a = S(chain=array('q')); "
        "r = S(extra_key='a', cache_salt=None, full_untruncated_fill_ids=text); "
        "order._extend(a, r, 128); print(list(a.chain))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_a_hash_stands_for_all_text_before_it_and_grows_with_the_answer():
    long, short = array("q"), array("q")
    extend_chain(long, array("q", range(1000)), PAGE, 0)
    extend_chain(short, array("q", range(300)), PAGE, 0)
    assert len(long) == 7 and short == long[:2]
    extend_chain(short, array("q", range(1000)), PAGE, 0)
    assert short == long
    other = array("q")
    extend_chain(other, array("q", [5, *range(1, 1000)]), PAGE, 0)
    assert not set(other) & set(long)


# In the tree


def one(session, turn, *pieces, keep=None, answer=10):
    return Request(session, turn, 0.0, keep, tuple(Piece(*p) for p in pieces), answer)


def run(requests, limits):
    simulation = Simulation(Workload("test", tuple(requests)), Engine(limits, flash()))
    simulation.run()
    return simulation


def test_more_chats_in_turn_than_fit_find_what_was_kept_of_them():
    """Ten chats of ten pages in turn, pages for seven: the one not used for longest is always the one that comes."""
    requests = [one(f"chat {i}", t, (f"{i}/{t}", 1280 if t == 0 else 10)) for t in range(12) for i in range(10)]
    rows = run(requests, Limits(pages=90, slots=5 + 30)).rows
    late = rows[60:]
    assert sum(row.cached for row in late) > 0.35 * sum(row.ideal for row in late)


def test_strangers_do_not_displace_a_conversation_that_comes_back():
    requests = []
    for turn in range(30):
        requests += [one("chat", turn, (f"chat/{turn}", 1280 if turn == 0 else 20))]
        requests += [one(f"stranger {turn} {i}", 0, (f"{turn} {i}", 1280)) for i in range(6)]
    rows = run(requests, Limits(pages=64, slots=5 + 30)).rows
    chat = [row for row in rows if row.session == "chat"][10:]
    assert sum(row.cached > 0 for row in chat) > 0.8 * len(chat)


def engine_with(*texts):
    engine = Engine(Limits(pages=100, slots=5 + 20), flash())
    for number, text in enumerate(texts):
        for _ in engine.start(np.arange(*text, dtype=np.int64), np.full(4, 3, dtype=np.int64), number).steps():
            pass
    return engine


def test_evicting_frees_what_it_says_and_leaves_the_tree_sound():
    engine = engine_with((10_000, 11_300), (20_000, 21_300), (30_000, 31_300))
    tree, free = engine.tree, engine.pages.available_size()
    snapshots = engine.snapshots
    tokens, states = paths_of(tree).order.evict(tree, 5 * PAGE, 0)
    assert engine.pages.available_size() - free == tokens >= 5 * PAGE
    assert snapshots - engine.snapshots == states >= 1
    tree.tree_core.sanity_check([], [])
    rest = paths_of(tree).order.evict(tree, 10**9, 10**9)
    assert engine.pages.available_size() == 100 * PAGE and engine.snapshots == 0
    assert rest[1] == snapshots - states
    assert paths_of(tree).order.model.worst(by_span=False) is None


def test_what_a_running_request_holds_stays_and_may_go_when_it_has_ended():
    engine = engine_with((10_000, 11_300), (20_000, 21_300))
    order = paths_of(engine.tree).order
    run = engine.start(np.arange(10_000, 11_400, dtype=np.int64), np.full(300, 3, dtype=np.int64), 9)
    steps = run.steps()
    next(steps), next(steps)
    order.evict(engine.tree, 10**9, 10**9)
    engine.tree.tree_core.sanity_check([], [])
    assert engine.tree.full_evictable_size() == 0 and engine.tree.full_protected_size() > 0
    for _ in steps:
        pass
    order.evict(engine.tree, 10**9, 10**9)
    assert engine.pages.available_size() == 100 * PAGE


def test_pages_that_no_snapshot_makes_usable_go_with_the_snapshot_that_did():
    engine = engine_with(*((10_000, end) for end in (11_300, 11_700, 12_100)), (20_000, 21_300))
    paths, pages = paths_of(engine.tree), engine.used_pages
    while paths.trim(engine.tree, 1):
        pass
    assert (engine.used_pages, engine.snapshots) == (pages, 2)
    paths.order.evict(engine.tree, 0, 2)
    assert (engine.used_pages, engine.snapshots) == (0, 0)


def test_a_locked_leaf_is_passed_over_and_not_forgotten():
    engine = engine_with((10_000, 11_300))
    tree, order = engine.tree, paths_of(engine.tree).order
    lock = tree.lock(order.model.worst(by_span=False).node)
    assert order.evict(tree, 10**9, 0) == (0, 0)
    tree.unlock(lock)
    order.evict(tree, 10**9, 0)
    assert engine.used_pages == 0


def test_ends_of_system_prompts_are_marks():
    requests = [one(f"user {i}", 0, ("system", 1280), ("<user>", 1), (f"question {i}", 300), keep=0) for i in range(4)]
    simulation = run(requests, Limits(pages=100, slots=5 + 20))
    classes = [mark.cls for mark in paths_of(simulation.engine.tree).order.model._marks.values()]
    assert MarkClass("passed", 0, 3) in classes


def test_a_leaf_weighs_more_once_the_snapshots_above_it_are_gone():
    engine = engine_with((10_000, 11_300))
    for turn in range(2):
        for _ in engine.start(np.arange(10_000, 11_600 + 300 * turn), np.full(4, 3, dtype=np.int64), turn + 5).steps():
            pass
    paths = paths_of(engine.tree)
    mark = paths.order.model.worst(by_span=True)
    before = mark.span
    assert paths.trim(engine.tree, 10) > 0
    assert mark.span == 1900 // PAGE > before


def test_a_flush_forgets_what_was_learned():
    engine = engine_with((10_000, 11_300))
    order = paths_of(engine.tree).order
    learned = order.model
    engine.tree.reset()
    assert paths_of(engine.tree).order.model is not learned and order.model.worst(by_span=False) is None


def test_superseded_snapshots_go_before_leaves_and_a_request_of_pages_takes_no_more_than_leaves():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine = engine_with((10_000, 11_300), (10_000, 11_700), (20_000, 21_300))
    pages = engine.used_pages
    assert engine.tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1)).mamba_num_evicted == 1
    assert engine.used_pages == pages
    engine.tree.evict_for_alloc(EvictParams(num_tokens=PAGE, mamba_num=0))
    assert pages > engine.used_pages > 0


# Faults found by driving the tree at random


def test_a_request_that_was_retracted_before_a_flush_goes_on_after_it():
    """SGLang flushes with requests waiting while generation is paused; what they bring along is of the old tree."""
    from sglang.srt.mem_cache.common import release_kv_cache

    engine = Engine(Limits(pages=100, slots=5 + 20, chunk=512), flash())
    serve_text(engine, np.arange(10_000, 11_300), 0)
    run = engine.start(np.arange(10_000, 12_300), np.full(4, 3, dtype=np.int64), 1)
    next(run.steps())
    release_kv_cache(run.req, engine.tree, checkpoint=False)
    run.req.reset_for_retract()
    engine.running.clear()
    engine.tree.reset(), engine.pool.clear(), engine.pages.clear(), engine.pool.reset_aux_cache_allocator()
    serve_text(engine, np.arange(20_000, 21_300), 2)
    for _ in run.steps():
        pass
    order = paths_of(engine.tree).order
    order.evict(engine.tree, 10**9, 0)
    assert engine.used_pages == 0


def serve_text(engine, text, number):
    for _ in engine.start(text, np.full(4, 3, dtype=np.int64), number).steps():
        pass


def test_a_flush_empties_every_record_of_the_tree():
    engine = engine_with((10_000, 11_300), (10_000, 11_700))
    assert len(paths_of(engine.tree))
    engine.tree.reset()
    assert not len(paths_of(engine.tree)) and not paths_of(engine.tree).habits._kinds


def test_a_leaf_further_along_the_text_of_a_request_that_has_not_come_so_far_may_still_go():
    model = ReuseModel()
    serve(model, 1, 2, 3)
    arrival = model.arrives(chain(1, 2, 3))
    model.stands(arrival, 1, INNER, 1, 1)
    assert {model.end_of(node) is not None for node in (1, 3)} == {True}
    model.stands(arrival, 2, INNER, 2, 1)
    assert model.end_of(1) is None and model.end_of(3) is not None


# Time that the scheduler spends


def test_leaves_that_requests_hold_are_looked_up_once_not_at_every_eviction(monkeypatch):
    engine = engine_with(*((begin, begin + 700) for begin in range(10_000, 20_000, 1000)))
    tree, order = engine.tree, paths_of(engine.tree).order
    locks = [tree.lock(node) for node in list(order.model._ends)]
    tries, original = [], tree.inc_lock_ref
    monkeypatch.setattr(tree, "inc_lock_ref", lambda *args: tries.append(args) or original(*args))
    for _ in range(20):
        assert order.evict(tree, PAGE, 0) == (0, 0)
    assert len(tries) <= 2 * len(locks)
    for lock in locks:
        tree.unlock(lock)
    order.evict(tree, 10**9, 0)
    assert engine.used_pages == 0


def test_held_leaves_are_tried_again_after_some_requests_though_others_could_go():
    model = ReuseModel()
    held = serve(model, 1)
    model.hold(held)
    serve(model, 2)
    assert model.worst(by_span=False).node == 2 and model.end_of(1) is held
    for text in range(3, 3 + reuse._REFRESH):
        model.withdraw(serve(model, text))
    model.withdraw(model.end_of(2))
    assert model.worst(by_span=False) is held


def test_many_leaves_go_for_one_ranking_of_their_groups(monkeypatch):
    model = ReuseModel()
    for text in range(1, 300):
        serve(model, text, span=1 << text % 9)
    groups, leaves = len(model._leaves), len(model._ends)
    asked, original = [], ReuseModel.values
    monkeypatch.setattr(ReuseModel, "values", lambda self, cls: asked.append(cls) or original(self, cls))
    order = []
    while (mark := model.worst(by_span=False)) is not None:
        order.append(original(model, mark.cls)[mark.age])
        model.withdraw(mark)
    assert groups > 50 and len(order) == leaves and order == sorted(order)
    assert len(asked) <= groups + 2 * leaves


def test_a_leaf_that_is_offered_while_others_go_takes_its_turn():
    model = ReuseModel()
    for text in range(1, 60):
        serve(model, text, span=1 << 12)
    first = model.end_of(1)
    assert model.worst(by_span=True) is not first
    model.offer(first, 1000, 1, chain(1))
    assert model.worst(by_span=True) is first


def test_the_best_rate_is_that_over_all_ages_to_give_up_at():
    random = np.random.default_rng(0)
    for _ in range(200):
        chances = (random.random(reuse._AGES) ** 4 * random.integers(0, 2, reuse._AGES)).tolist()
        for begin, rate in enumerate(best_rates(chances)):
            alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
            for age in range(begin, len(chances)):
                hits, time = hits + alive * chances[age], time + alive * (1 - chances[age] / 2) * (1 << age)
                alive, best = alive * (1 - chances[age]), max(best, hits / time)
            assert rate == pytest.approx(best, rel=1e-9)


def test_an_answer_costs_its_own_pages_and_no_copy_of_the_prompt():
    class Request:
        last_node, kv, extra_key, cache_salt = 5, SimpleNamespace(cache_protected_len=9 * PAGE), None, None
        full_untruncated_fill_ids = array("q", range(9 * PAGE))

        @property
        def origin_input_ids(self):
            raise AssertionError("the whole text was read")

    order, request = EvictionOrder(), Request()
    known: array[int] = array("q")
    extend_chain(known, array("q", range(8 * PAGE)), PAGE, 0)
    request._dsv4_arrival = order.model.arrives(array("q", known))
    core = SimpleNamespace(collect_path_info=lambda nodes: [[SimpleNamespace(path_end=9 * PAGE)]])
    order.stands(SimpleNamespace(page_size=PAGE, disable=False, tree_core=core), request, PROMPT, snapshot=True)
    assert request._dsv4_arrival.chain[:-1] == known and order.model.end_of(5).span == 9


def test_hashes_of_a_text_are_the_same_in_every_process():
    found = array("q")
    extend_chain(found, array("q", range(300)), PAGE, 0)
    assert list(found) == [8233993916420097736, 4238193453590367796]


@pytest.mark.parametrize(("back", "missing"), [((3, 0), (2, 0)), ((0, 5), (0, 1)), ((2, 1), (2, 1))])
def test_nothing_is_evicted_for_what_a_move_gives_back(back, missing):
    """Pages and slots that a move withheld come back because some are missing."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine = engine_with((10_000, 11_300), (10_000, 11_700), (20_000, 21_300))
    told, page = [], engine.tree.page_size
    paths_of(engine.tree).split = SimpleNamespace(
        yield_to=lambda *_: (back[0] * page, back[1]),
        consider=lambda _tree, _paths, *wanted: told.append(wanted),
        may_trim=lambda _: True,
        went=lambda *_: None,
        slots=engine.pool.mamba_allocator,
    )
    pages, snapshots = engine.used_pages, engine.snapshots
    engine.tree.evict_for_alloc(EvictParams(num_tokens=missing[0] * page, mamba_num=missing[1]))
    assert (engine.used_pages, engine.snapshots) == (pages, snapshots)
    assert told == [(missing[0] * page, missing[1])]


def test_snapshots_that_a_lone_text_left_behind_go_before_leaves_however_few_there_are():
    """Where memory moves others stay below a floor, because somebody may branch off there."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine = engine_with((10_000, 11_300), (10_000, 11_700), (20_000, 21_300))
    paths = paths_of(engine.tree)
    paths.split = SimpleNamespace(
        yield_to=lambda *_: (0, 0),
        consider=lambda *_: None,
        may_trim=lambda _: False,
        went=lambda *_: None,
        slots=engine.pool.mamba_allocator,
    )
    pages, snapshots = engine.used_pages, engine.snapshots
    for node in list(paths._prompts):
        paths._lone[node] = paths._prompts.pop(node)
    assert engine.tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1)).mamba_num_evicted == 1
    assert engine.used_pages == pages and engine.snapshots == snapshots - 1
    engine.tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
    assert engine.used_pages < pages
