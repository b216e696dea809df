"""The cache under whole workloads, without a model: SGLang's tree, our pools, policy and publishing."""

from __future__ import annotations

import json
from dataclasses import replace

import belady
import bounds
import numpy as np
import pytest
import simulate as simulator
from engine import Engine, Limits
from measure import misses, summary
from moving import SharedEngine
from prefixes import PrefixIndex
from simulate import Simulation, describe, flash, limits_for, oracle_tokens, simulate
from workloads import PRESETS, Conversations, Piece, Request, TokenSource, Workload, build

from sglang_dsv4.cache.causes import NEW
from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.split import SPARE
from sglang_dsv4.cache.superseded import paths_of

PAGE = 128


def run(workload, limits, users=1):
    simulation = Simulation(workload, Engine(limits, flash()), users=users)
    simulation.run()
    return simulation


def stream(*requests: Request) -> Workload:
    return Workload("test", requests)


def one(session, turn, *pieces, keep=None, answer=10):
    return Request(session, turn, 0.0, keep, tuple(Piece(*p) for p in pieces), answer)


AMPLE = Limits(pages=400, slots=200)
REUSE = [name for name in PRESETS if name not in ("no-reuse", "mooncake")]


@pytest.mark.parametrize("name", REUSE)
def test_with_ample_memory_every_whole_page_that_was_seen_is_found(name):
    workload = build(name, limit=60)
    simulation = run(workload, limits_for(workload, "ample", flash(), users=1, chunk=8192))
    lost = sum(row.ideal // PAGE * PAGE - row.cached for row in simulation.rows)
    recomputed = sum(row.prompt - row.cached for row in simulation.rows)
    assert 0 <= lost <= 0.03 * recomputed


def test_a_shared_system_prompt_of_any_length_is_found_by_the_second_request():
    for system in (700, 3000, 9000):
        requests = [
            one(f"user {i}", 0, ("system", system), ("<user>", 1), (f"question {i}", 300), keep=0) for i in range(2)
        ]
        assert run(stream(*requests), AMPLE).rows[1].cached == system // PAGE * PAGE


def test_without_a_role_token_the_second_request_finds_a_rung_and_the_third_what_it_branched_off():
    requests = [one(f"user {i}", 0, ("system", 3000), (f"question {i}", 300), keep=0) for i in range(3)]
    assert [row.cached for row in run(stream(*requests), AMPLE).rows] == [0, 2048, 2944]


def test_a_prompt_is_found_again_when_its_answer_was_dropped():
    requests = [one("chat", 0, ("question", 1000), answer=700), one("chat", 1, ("short answer", 200), keep=1000)]
    assert run(stream(*requests), AMPLE).rows[1].cached == 896


def test_a_quiet_chat_outlives_the_past_of_a_busy_one():
    """Six slots for snapshots: the busy chat leaves two a turn behind, the quiet one needs one."""
    quiet = one("quiet", 0, ("question", 600), answer=200)
    busy = [one("busy", turn, (f"more {turn}", 500), answer=200) for turn in range(8)]
    simulation = run(stream(quiet, *busy, one("quiet", 1, ("next", 50))), Limits(pages=400, slots=5 + 6))
    assert simulation.rows[-1].cached == 768
    assert [row.cached for row in simulation.rows[2:-1]] == [row.ideal // PAGE * PAGE for row in simulation.rows[2:-1]]


def test_requests_that_run_together_find_what_is_theirs_and_leak_nothing():
    workload = build("short-chats", scale=0.3, chats=12)
    simulation = run(workload, Limits(pages=160, slots=60, running=6, chunk=256), users=6)
    engine = simulation.engine
    assert len(simulation.rows) == len(workload.requests) and engine.running == []
    assert sum(row.cached for row in simulation.rows) > 0
    engine.tree.reset()
    owned = engine.pool.mamba_allocator.available_size() + engine.snapshots
    assert engine.pool.available_size() == 6
    assert owned + simulation_snapshots(simulation) == 60


def shares(group: str, name: str, question: int) -> Request:
    return one(name, 0, (f"system {group}", 1500), ("<user>", 1), (name, question), keep=0, answer=40)


def found_at_once(*requests: Request, chunk: int = 1024) -> list[int]:
    """What each finds where all arrive together."""
    users = len(requests)
    simulation = run(stream(*requests), Limits(pages=400, slots=200, running=users, chunk=chunk), users=users)
    found = {row.session: row.cached for row in simulation.rows}
    return [found[request.session] for request in requests]


def test_a_prompt_that_comes_right_after_its_prefix_was_computed_finds_all_of_it():
    """The step that completes the first is in flight when the third is prepared."""
    other = one("other", 0, ("other", 240), answer=40)
    assert found_at_once(shares("a", "first", 400), other, shares("a", "third", 300)) == [0, 0, 1408]


def test_prompts_of_one_step_find_what_stood_before_the_step():
    """As far as the first one's chunk, which entered the tree when its next one was prepared."""
    assert found_at_once(shares("a", "first", 100), shares("a", "second", 10), chunk=1280) == [0, 1280]


def test_sixteen_users_with_shared_system_prompts_at_once_find_more_than_the_in_tree_cache_does():
    """The preset and pools of the comparison on a GPU, where the in-tree cache finds 701,696 tokens of it."""
    workload = build("shared-system-prompt", limit=96)
    workload = replace(workload, requests=tuple(replace(r, answer=32) for r in workload.requests))
    rows = run(workload, Limits(pages=1751, slots=164, running=16), users=16).rows
    assert sum(row.cached for row in rows) == 703_360


def simulation_snapshots(simulation: Simulation) -> int:
    """Slots that the tree held before it was reset; resetting a tree forgets its slots."""
    free = set(simulation.engine.pool.mamba_allocator.free_slots.tolist())
    return 60 - len(free)


def test_the_oracle_is_never_beaten_and_equals_the_ideal_with_room_for_all():
    workload = build("branching", scale=0.5, limit=80)
    for memory in ("ample", "third"):
        simulation = run(workload, limits_for(workload, memory, flash(), users=1, chunk=8192))
        assert oracle_tokens(simulation, flash()) >= sum(row.cached for row in simulation.rows)
    ideal = [use.reusable * PAGE for use in simulation.uses]
    budget = 1 << 50
    assert belady.cached_tokens(simulation.uses, budget=budget, page_bytes=1, snapshot_bytes=8, page=PAGE) == ideal


def test_the_oracle_gives_up_the_end_of_what_is_used_last():
    a, b, once = list(range(1, 11)), list(range(11, 21)), list(range(21, 26))
    uses = [belady.Use(1300, reusable, path) for reusable, path in ((0, a), (0, b), (0, once), (10, a), (10, b))]
    found = belady.cached_tokens(uses, budget=24, page_bytes=1, snapshot_bytes=1, page=PAGE)
    assert found == [0, 0, 0, 10 * PAGE, 7 * PAGE]


def test_the_oracle_of_a_split_cannot_use_room_of_the_other_kind():
    a, b = list(range(1, 11)), list(range(11, 21))
    uses = [belady.Use(1300, reusable, path) for reusable, path in ((0, a), (0, b), (10, a), (10, b))]
    found = {
        split: belady.cached_tokens_of_split(uses, pages=split[0], snapshots=split[1], page=PAGE)[2:]
        for split in ((20, 2), (15, 2), (20, 1), (10, 9))
    }
    ten = 10 * PAGE
    assert found[20, 2] == [ten, ten] and found[15, 2] == [5 * PAGE, 5 * PAGE]
    assert sorted(found[20, 1]) == [0, ten] and sum(found[10, 9]) < sum(found[15, 2])


def test_what_random_arrivals_allow_is_what_fits_shared_among_all_who_may_come():
    """Two chats of ten pages, room for one: whoever comes finds five pages on average; in a pause nobody else comes."""
    requests = [one("a", 0), one("b", 0), one("a", 1), one("b", 1)]
    times = [replace(request, arrival=at) for request, at in zip(requests, (0.0, 1.0, 20.0, 21.0), strict=True)]
    assert bounds.memoryless(times, [0, 0, 10, 10], room=10, pause=5) == 5 + 10
    assert bounds.memoryless(times, [0, 0, 10, 10], room=100, pause=5) == 20
    assert bounds.shuffled(["a", "b", "a", "b"], pages=10, room=10) == pytest.approx(10 / 3 + 5 + 10)
    assert bounds.memoryless(times, [0, 0, 10, 10], room=10, pause=5, snapshot=2) == 4 + 8
    assert bounds.memoryless(times, [0, 0, 10, 10], room=13, pause=5, snapshot=2) == 5 + 10  # none for one page more
    assert bounds.shuffled(["a", "a"], pages=10, room=10, snapshot=2) == 8


def test_of_two_long_sessions_in_turn_the_beginning_of_the_other_stays():
    """Room for one of them and 60 pages. The end goes first, and a snapshot stands low enough for what is left."""
    limits = limits_for(build("alternating-long"), "third", flash(), users=1, chunk=8192)
    rows = run(build("alternating-long", limit=8), limits).rows
    assert [row.cached for row in rows[:2]] == [0, 0] and all(row.cached >= 2048 for row in rows[2:])


@pytest.mark.parametrize("memory, part", [("third", 0.62), ("0.5", 0.52)])
def test_of_two_long_sessions_in_turn_much_of_what_fits_beside_the_other_stays_where_memory_moves(memory, part):
    workload = build("alternating-long")
    simulation = run(workload, replace(limits_for(workload, memory, flash(), users=1, chunk=8192), granule=65_536))
    assert sum(row.cached for row in simulation.rows) >= part * oracle_tokens(simulation, flash())
    assert simulation.engine.pool.mamba_allocator.size >= 5 + SPARE


def test_a_split_that_moves_never_holds_more_than_its_bytes_and_gives_to_both():
    workload = build("dropped-reasoning", limit=80)
    limits = limits_for(workload, "third", flash(), users=1, chunk=8192)
    for lot in (1, 7):
        engine = SharedEngine(limits, flash(), lot=lot)
        left, watch = [], engine.watch
        engine.watch = lambda left=left, watch=watch, engine=engine: (left.append(engine.shared.left), watch())
        rows = Simulation(workload, engine).run()
        assert sum(row.cached for row in rows) > 0 and engine.running == []
        assert 0 <= min(left) < 100 * engine.shared.page_bytes
        assert engine.peak_pages > limits.pages and engine.peak_snapshots > limits.slots


def test_memory_moves_in_lots():
    engine = SharedEngine(Limits(pages=100, slots=5 + 20), flash(), lot=4)
    shared, slots = engine.shared, engine.pool.mamba_allocator
    whole = shared.tokens_left()
    taken = slots.alloc(5)
    assert shared.snapshots == 0 and shared.tokens_left() == whole
    slots.alloc(1)
    lot = whole - shared.tokens_left()
    assert lot // PAGE == -(-4 * shared.slot_bytes // shared.page_bytes)
    slots.alloc(3)
    assert shared.tokens_left() == whole - lot
    slots.alloc(1)
    assert shared.tokens_left() < whole - lot
    slots.free(taken)
    assert shared.tokens_left() == whole
    assert slots.alloc(10**6) is None


def test_missed_tokens_have_one_cause_each():
    cases = [
        ({"prompt": 1000, "cached": 0, "ideal": 0, "pages_hit": 0, "best_snapshot": 0}, {"never cached": 1000}),
        (
            {"prompt": 1000, "cached": 0, "ideal": 100, "pages_hit": 0, "best_snapshot": 0},
            {"never cached": 900, "below one page": 100},
        ),
        (
            {"prompt": 1000, "cached": 256, "ideal": 700, "pages_hit": 384, "best_snapshot": 512},
            {
                "never cached": 300,
                "below one page": 60,
                "page evicted": 128,
                "snapshot evicted": 128,
                "no snapshot near the divergence": 128,
            },
        ),
        (
            {"prompt": 1000, "cached": 640, "ideal": 700, "pages_hit": 640, "best_snapshot": 640},
            {"never cached": 300, "below one page": 60},
        ),
    ]
    for case, expected in cases:
        assert misses(page=PAGE, **case) == expected
        assert sum(expected.values()) == case["prompt"] - case["cached"]


def test_the_longest_shared_prefix_is_exact_to_the_token():
    index, draw = PrefixIndex(PAGE), TokenSource().draw
    text = draw("text", 1000)
    assert index.walk(text).tokens == 0
    index.add(text)
    for shared in (1, 127, 128, 129, 500, 1000):
        other = np.concatenate([text[:shared], draw("other", 200)])
        assert index.walk(other).tokens == shared
        assert len(index.walk(other).pages) == shared // PAGE


def test_the_longest_shared_prefix_is_found_among_many_like_texts():
    draw = np.random.default_rng(7)
    index, known = PrefixIndex(4), []
    for _ in range(300):
        text = draw.integers(0, 2, draw.integers(1, 14)) * 300 + draw.integers(0, 2)
        shared = [int((np.cumprod(a[: len(text)] == text[: len(a)])).sum()) for a in known]
        assert index.walk(text).tokens == max(shared, default=0)
        index.add(text)
        known.append(text)


def test_equal_keys_are_equal_tokens_and_a_stream_is_the_same_every_time():
    source = TokenSource()
    assert np.array_equal(source.draw("a", 100)[:50], source.draw("a", 50))
    assert not np.array_equal(source.draw("a", 50), source.draw("b", 50))
    assert source.draw("a", 9)[:3].tolist() == [15096, 77672, 99369]
    for name in REUSE:
        assert build(name) == build(name)
        talk, lengths = Conversations(source), build(name, limit=30).lengths()
        for request, length in zip(build(name, limit=30).requests, lengths, strict=True):
            prompt = talk.prompt(request)
            talk.answered(request, prompt, talk.drawn_answer(request))
            assert len(prompt) == length


def test_nodes_that_are_gone_are_passed_over():
    """After a flush the record of paths names nodes that no longer exist."""
    engine = Engine(Limits(pages=100, slots=5 + 8), flash())
    talk, requests = Conversations(TokenSource()), build("branching", scale=0.1, limit=12).requests

    def serve(request, number):
        prompt, answer = talk.prompt(request), talk.drawn_answer(request)
        for _ in engine.start(prompt, answer, number).steps():
            pass
        talk.answered(request, prompt, answer)

    for number, request in enumerate(requests[:6]):
        serve(request, number)
    paths = paths_of(engine.tree)
    assert len(paths)
    engine.tree.reset()
    engine.pages.clear()
    engine.pool.clear()
    engine.pool.mamba_allocator.clear()
    assert paths.trim(engine.tree, 5) == 0
    for number, request in enumerate(requests[6:]):
        serve(request, number)
    assert engine.snapshots > 0


@pytest.mark.parametrize("name", [*REUSE, "no-reuse"])
def test_the_cache_itself_knows_why_tokens_were_missed(name):
    """What a server shows in /metrics equals what is computed from all text that was ever seen."""
    workload = build(name, limit=90)
    before = counters.missed_tokens.copy()
    rows = run(workload, limits_for(workload, "third", flash(), users=1, chunk=8192, share=0.1)).rows
    counted = {cause: counters.missed_tokens[cause] - before[cause] for cause in counters.missed_tokens}
    missed = summary(rows, PAGE)["missed_tokens"]
    new = missed.pop("never cached", 0) + missed.pop("below one page", 0)
    assert {cause: n for cause, n in counted.items() if n} == {NEW: new, **missed}
    assert name == "no-reuse" or missed


def test_ends_of_answers_are_left_out_only_while_slots_are_scarce():
    """With room for them, a turn finds the whole answer before it even if no turn so far has looked for one."""
    workload = build("dropped-reasoning", limit=150)
    left_out = {}
    for memory in ("ample", "third"):
        before = counters.skipped
        run(workload, limits_for(workload, memory, flash(), users=1, chunk=8192))
        left_out[memory] = counters.skipped - before
    assert left_out["ample"] == 0 and left_out["third"] > 0


def simulated(monkeypatch, *arguments) -> None:
    monkeypatch.setattr("sys.argv", ["simulate.py", "short-chats", "--limit", "3", *map(str, arguments)])
    simulator.main()


def runs_of(file) -> list[str]:
    return [run["memory"] for run in json.loads(file.read_text())["runs"]]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(simulator, "simulate", None)
    for out in (tmp_path, tmp_path / "a file" / "x.json"):
        (tmp_path / "a file").write_text("")
        with pytest.raises(SystemExit) as ended:
            simulated(monkeypatch, "--out", out)
        said = capsys.readouterr()
        assert ended.value.code == 2 and said.out == ""
        assert "--out" in said.err.splitlines()[-1] and "cannot be written" in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "says"), [(ValueError("too small"), 1, "too small"), (KeyboardInterrupt(), 130, "stopped")]
)
def test_what_was_measured_outlives_what_ends_the_program(error, code, says, monkeypatch, tmp_path, capsys):
    whole = simulator.simulate

    def fails(workload, memory, **how):
        if memory == "third":
            raise error
        return whole(workload, memory, **how)

    monkeypatch.setattr(simulator, "simulate", fails)
    out = tmp_path / "new" / "runs.json"
    with pytest.raises(SystemExit) as ended:
        simulated(monkeypatch, "--memory", "ample,third", "--out", out)
    said = capsys.readouterr()
    assert ended.value.code == code and f"simulate: {says}\n" in said.err
    assert "ample" in said.out and runs_of(out) == ["ample"]


def test_a_file_that_was_there_is_kept_until_something_is_measured(monkeypatch, tmp_path):
    out = tmp_path / "runs.json"
    out.write_text("before")
    monkeypatch.setattr(simulator, "simulate", lambda *a, **k: (_ for _ in ()).throw(ValueError("at once")))
    with pytest.raises(SystemExit):
        simulated(monkeypatch, "--out", out)
    assert out.read_text() == "before"
    monkeypatch.undo()
    simulated(monkeypatch, "--memory", "ample", "--out", out)
    assert runs_of(out) == ["ample"]


def test_a_recording_without_a_request_is_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no request"):
        build("mooncake", path=empty)
    empty.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"empty\.jsonl is not a Mooncake trace"):
        build("mooncake", path=empty)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"input_length": float("inf")}, "input_length is inf"),
        ({"input_length": 0}, "input_length is 0"),
        ({"input_length": True}, "input_length is True"),
        ({"output_length": -3}, "output_length is -3"),
        ({"output_length": 3_000_000_000}, "output_length is 3000000000"),
        ({"input_length": 1025}, "hash_ids are not those of 1025 tokens"),
        ({"hash_ids": "12"}, "hash_ids are not those of 600 tokens"),
        ({"timestamp": float("nan")}, "timestamp is nan"),
        ({"timestamp": True}, "timestamp is True"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
    ],
)
def test_what_is_no_request_of_a_recording_is_named_with_its_line(changed, says, tmp_path):
    good = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(good | changed)}\n")
    with pytest.raises(ValueError, match=rf"trace\.jsonl is not a Mooncake trace: line 2: .*{says}"):
        build("mooncake", path=file)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"trace\.jsonl is not a Mooncake trace: line 1: RecursionError"):
        build("mooncake", path=file)
    line = json.dumps(good | {"note": "\u2028"}, ensure_ascii=False)
    file.write_text(f"{line}\n\n{line}\n")
    assert build(str(file)).lengths() == [600, 600]


def test_a_recording_for_a_preset_that_takes_none_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        simulated(monkeypatch, "--path", "recording.jsonl")
    assert "--path is for coding-agent and mooncake" in capsys.readouterr().err


def test_a_chunk_that_servers_refuse_is_refused():
    with pytest.raises(ValueError, match="a chunk of 100 tokens is no multiple of the page, 128"):
        simulate(build("branching", limit=3), "ample", chunk=100)


def test_an_oracle_that_finds_nothing_makes_no_ratio():
    """What running requests leave free of their five slots, the oracle does not have."""
    result = simulate(build("short-chats", limit=60, scale=0.1), "0.05", users=16)
    assert result["oracle_tokens"] == 0 < result["cached_tokens"]
    assert result["cached_over_oracle"] is None and "None" not in describe([result])
