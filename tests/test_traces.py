"""Recorded sessions become prompts that share what the recording shared."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from sglang_dsv4 import traces
from sglang_dsv4.cli import trace_folder
from sglang_dsv4.demo import Sent, ideal_hits, shared_tokens
from sglang_dsv4.serving import Answer, Words
from sglang_dsv4.traces import Request, Session, Trace

WORDS = Words(tuple(range(1000, 2000)))
BLOCK = 64


def trace(name: str, *requests: list[int], system: int = 2) -> Trace:
    made = [Request(len(blocks) * BLOCK, 40 * BLOCK, tuple(blocks)) for blocks in requests]
    return Trace(name, BLOCK, system * BLOCK, tuple(made))


def talk(session: Session) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of every turn; answers are numbers that no prompt contains."""
    said: list[int] = []
    turns = []
    for index, turn in enumerate(session.turns):
        prompt = session.prompt(index, said, WORDS)
        answer = list(range(index * 100, index * 100 + turn.answer))
        turns.append((prompt, answer))
        said = prompt + answer
    return turns


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_the_shipped_sessions_are_enough_for_the_demo():
    found = traces.sessions(traces.load_folder(trace_folder()), turns=4)
    assert len(found) == 8
    for session in found:
        lengths = [len(prompt) for prompt, _ in talk(session)]
        assert min(lengths) > session.system_tokens > 128


def test_a_growing_prompt_contains_the_previous_answer():
    (session,) = traces.sessions([trace("a", numbers(1, 10), numbers(1, 90))], turns=2)
    (first, answer), (second, _) = talk(session)
    assert second[: len(first) + len(answer)] == first + answer
    # The recorded growth held the answer: the replayed one does too, so the length is the recording's.
    assert len(second) == 90


def test_a_rewritten_history_is_cut_where_the_recording_cut_it():
    recorded = trace("a", numbers(1, 10), [*numbers(1, 6), *numbers(50, 9)])
    (session,) = traces.sessions([recorded], turns=2)
    (first, _), (second, _) = talk(session)
    assert len(second) == 15
    assert shared_tokens(first, second) == 6


def test_a_last_block_that_filled_up_still_counts_as_growth():
    recorded = trace("a", numbers(1, 10), [*numbers(1, 9), *numbers(50, 40)])
    (session,) = traces.sessions([recorded], turns=2)
    assert session.turns[1].keep is None


def test_a_turn_always_says_something_new():
    (session,) = traces.sessions([trace("a", numbers(1, 10), numbers(1, 10))], turns=2)
    (first, answer), (second, _) = talk(session)
    assert len(second) == len(first) + len(answer) + traces.MIN_NEW_TOKENS


def test_sessions_share_the_system_prompt_and_nothing_else():
    recorded = [trace("a", numbers(1, 30), system=9), trace("b", numbers(1, 30), system=5)]
    one, two = (talk(s)[0][0] for s in traces.sessions(recorded, turns=1))
    assert shared_tokens(one, two) == 5


@pytest.mark.parametrize("scale", (Fraction(1, 3), Fraction(1), Fraction(5, 2)))
def test_equal_blocks_give_equal_tokens_at_any_scale(scale):
    recorded = trace("a", numbers(1, 20), [*numbers(1, 15), *numbers(100, 60)])
    (session,) = traces.sessions([recorded], turns=2, tokens_per_block=scale)
    (first, _), (second, _) = talk(session)
    assert len(first) == 2 + int(18 * scale)
    assert shared_tokens(first, second) >= 2 + int(13 * scale)
    assert talk(session) == talk(session)


def test_short_sessions_are_left_out():
    assert traces.sessions([trace("a", numbers(1, 4))], turns=2) == []


def test_packing_keeps_the_requests(tmp_path: Path):
    published = {
        "id": "trace_1",
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 70,
        "system_tokens": 60,
        "requests": [
            {"t": 0.0, "type": "s", "in": 200, "out": 9, "hash_ids": [1, 2, 3], "think_time": 1.0},
            {"t": 1.0, "type": "n", "in": 300, "out": 7, "hash_ids": [1, 2, 7, 8, 4], "stop": ""},
        ],
    }
    source, target = tmp_path / "trace_1.json", tmp_path / "packed.json"
    source.write_text(json.dumps(published))
    traces.pack(source, target, 2)
    assert traces.load(target) == traces.load(source)
    assert "hash_ids" not in target.read_text()


@pytest.mark.parametrize("text", ("", "[]", '{"id": "x"}', '{"requests": [{"in": 1}]}'))
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "trace_9.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace_9\.json"):
        traces.load(path)


def test_an_empty_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no"):
        traces.load_folder(tmp_path)


def sent(wave: int, prompt: list[int], answer: list[int]) -> Sent:
    reply = Answer(len(prompt), 0, tuple(answer), (), (), 0.0, 0.0)
    return Sent("s", 0, wave, tuple(prompt), reply)


def test_the_ideal_resumes_at_prompt_ends_answer_ends_and_branches():
    page = 4
    first = numbers(1, 9)
    answer = numbers(100, 6)
    requests = [
        sent(0, first, answer),  # leaves 8 and 12 (15 tokens, 14 of them stored)
        sent(1, first, answer),  # its own repeat: 8 of 9
        sent(2, [*first, *answer, 7], [1]),  # the next turn: 12
        sent(3, [*first[:6], *numbers(50, 6)], [1]),  # a branch at 6: nothing stands at 4 yet
        sent(4, [*first[:6], *numbers(70, 6)], [1]),  # another: now 4
    ]
    assert ideal_hits(requests, page) == [0, 8, 12, 0, 4]


def test_the_ideal_leaves_the_last_token_to_compute():
    requests = [sent(0, numbers(1, 8), numbers(50, 9)), sent(1, numbers(1, 8), [9])]
    assert ideal_hits(requests, 4) == [0, 4]


def test_the_ideal_expects_nothing_from_requests_in_flight():
    requests = [sent(0, numbers(1, 9), [5]), sent(0, numbers(1, 9), [5]), sent(1, numbers(1, 9), [5])]
    assert ideal_hits(requests, 4) == [0, 0, 8]


def test_recorded_lengths_never_shrink_without_a_cut():
    for session in traces.sessions(traces.load_folder(trace_folder()), turns=4, tokens_per_block=Fraction(1, 4)):
        for (before, answer), (after, _), turn in zip(
            *zip(*pairwise(talk(session)), strict=True), session.turns[1:], strict=True
        ):
            if turn.keep is None:
                assert len(after) > len(before) + len(answer)
