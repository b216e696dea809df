"""Memory that moves between slots and pages under requests: warm answers equal cold ones, the simulator moves alike.

Pools are poisoned and audited: what a move releases is NaN, and what it copies must have the checksum of the original.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace

import numpy as np
import pytest
import soak
from answers import Recording
from engine import Engine, Limits
from replay import gauges, replay
from simulate import Simulation
from workload import CHECKED, PAGE
from workloads import Conversations, Piece, Request, TokenSource, Workload

from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.metrics import PREFIX
from sglang_dsv4.cache.sizing import GRANULES, SLOTS_PER_REQUEST, plan_for
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.serving import Launch, Server
from sglang_dsv4.tiny import SPECIAL_TOKENS, tiny_config, write_checkpoint

USER = SPECIAL_TOKENS.index("<｜User｜>")
SOURCE = TokenSource(low=300, high=1200, user=USER)
PAGES, SLOTS, RUNNING, CHUNK, CONTEXT = 70, 14, 2, 256, 1500
METRICS = ("--enable-metrics",) if importlib.util.find_spec("prometheus_client") else ()


def session(name: str, turns: int, first: int, step: int, answer: int) -> list[Request]:
    return [
        Request(name, turn, 0.0, None, (Piece(f"{name} {turn}", step if turn else first),), answer)
        for turn in range(turns)
    ]


def in_turn(sessions: list[list[Request]]) -> list[Request]:
    return [one[turn] for turn in range(max(map(len, sessions))) for one in sessions if turn < len(one)]


def moving_requests() -> tuple[Request, ...]:
    """Short chats want slots, then long texts want pages, then short chats again."""
    chats = [in_turn([session(f"{part} {i}", 2, 150, 130, 4) for i in range(9)]) for part in ("early", "late")]
    longs = in_turn([session(f"long {i}", 2, 900, 120, 4) for i in range(4)])
    return (*chats[0], *longs, *chats[1])


WORKLOAD = Workload("moving", moving_requests())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    launch = Launch(
        write_checkpoint(folder),
        chunked_prefill_size=CHUNK,
        max_total_tokens=PAGES * PAGE,
        max_running_requests=RUNNING,
        max_mamba_cache_size=SLOTS,
        extra_args=("--context-length", str(CONTEXT), *METRICS),
    )
    with Server(launch, folder / "server.log", env={**CHECKED, "SGLANG_DSV4_SPLIT": "moves"}) as server:
        yield server


@pytest.fixture(scope="module")
def cold(server) -> Recording:
    talk, recording = Conversations(SOURCE), Recording(WORKLOAD.name)
    for request in WORKLOAD.requests:
        server.client.flush()
        prompt = talk.prompt(request)
        answer = server.client.generate(prompt.tolist(), request.answer)
        assert answer.cached_tokens == 0
        talk.answered(request, prompt, list(answer.output_ids))
        recording.add((request.session, request.turn), prompt, answer)
    return recording


class Recorded(Conversations):
    """Answers that a server gave."""

    def __init__(self, answers) -> None:
        super().__init__(SOURCE)
        self.answers = {key: np.asarray(answer.output_ids, dtype=np.int64) for key, answer in answers.items()}

    def drawn_answer(self, request: Request):
        return self.answers[request.session, request.turn]


def engine() -> Engine:
    geometry = Geometry.from_config(tiny_config(), page_size=PAGE)
    kept = SLOTS_PER_REQUEST * RUNNING
    plan = plan_for(geometry, GRANULES["cpu"], slots=SLOTS, pages=PAGES, slots_kept=kept, context=CONTEXT)
    return Engine(Limits(PAGES, SLOTS, RUNNING, CHUNK, PAGE, CONTEXT), geometry, user_token=USER, plan=plan)


def moved(server) -> dict[str, float]:
    time.sleep(0.6)
    server.client.generate(SOURCE.draw("anything", 5).tolist(), 2, logprobs=False)
    time.sleep(0.6)
    found = gauges(server.url)
    return soak.moved(server.url) | {name: found[PREFIX + name] for name in ("pages_total", "slots_total")}


def test_memory_moves_both_ways_in_the_workload():
    before = replace(counters)
    Simulation(WORKLOAD, engine()).run()
    assert counters.lots_to_pages > before.lots_to_pages and counters.lots_to_slots > before.lots_to_slots
    assert counters.snapshots_moved > before.snapshots_moved and counters.pages_moved > before.pages_moved


@pytest.fixture(scope="module")
def served(server, cold):
    """One request after the other, from the split that the server began with: its report, answers and metrics."""
    before = moved(server) if METRICS else {}
    kept = Recording(WORKLOAD.name)
    options = {"users": 1, "speed": None, "source": SOURCE, "system": "x", "keep": kept, "against": cold}
    result = replay(server.client, WORKLOAD, **options)
    return result, kept, before, moved(server) if METRICS else {}


def test_requests_are_answered_as_from_an_empty_cache_while_memory_moves(served):
    result, kept, before, after = served
    assert result["compared"] == len(WORKLOAD.requests)
    assert result["different"] == [] and result["largest_logprob_difference"] == 0.0
    assert sum(answer.cached_tokens > 0 for answer in kept.answers.values()) > 10
    if METRICS:
        assert all(after[name] > before[name] for name in soak.MOVES), (before, after)
        assert SLOTS_PER_REQUEST * RUNNING <= after["slots_total"] and CONTEXT // PAGE < after["pages_total"]


def test_the_simulator_finds_what_the_server_finds(served):
    answers = served[1].answers
    rows = Simulation(WORKLOAD, engine(), talk=Recorded(answers)).run()
    assert [row.cached for row in rows] == [answer.cached_tokens for answer in answers.values()]


def test_two_users_at_once_are_answered_as_from_an_empty_cache(server, cold):
    options = {"users": RUNNING, "speed": None, "source": SOURCE, "system": "x", "against": cold}
    result = replay(server.client, WORKLOAD, **options)
    assert result["compared"] == len(WORKLOAD.requests) and result["different"] == []


def test_the_log_says_that_memory_moves(server):
    assert "memory moves between slots" in server.log.read_text()
