"""Benchmarks against a real server with the least memory that its requests allow.

Warm answers equal cold ones, the simulator finds the tokens that the server finds and misses the others for the reasons
that the server counts, replay reports what it says.

A cold answer is one that the same server gives right after a flush, as in `workload.py`; that a server with
--disable-radix-cache gives the same is shown in `test_exactness.py`.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from answers import Recording
from engine import Engine, Limits
from measure import Row, summary
from replay import gauges, missed_by_cause, replay
from simulate import Simulation
from workload import PAGE, serve
from workloads import Conversations, Ids, Piece, Request, TokenSource, Workload, build

from sglang_dsv4.cache.causes import NEW, NO_SNAPSHOT
from sglang_dsv4.cache.causes import PAGE as PAGE_EVICTED
from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.metrics import COUNTED, PREFIX
from sglang_dsv4.cache.sizing import SLOTS_PER_REQUEST
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.tiny import SPECIAL_TOKENS, tiny_config, write_checkpoint

USER = SPECIAL_TOKENS.index("<｜User｜>")
SOURCE = TokenSource(low=300, high=1200, user=USER)
PAGES, SLOTS, RUNNING, CHUNK = 11, 10, 2, 256


class Recorded(Conversations):
    """Answers that a server gave."""

    def __init__(self, source: TokenSource) -> None:
        super().__init__(source)
        self.answers: dict[tuple[str, int], Ids] = {}

    def drawn_answer(self, request: Request) -> Ids:
        return self.answers[request.session, request.turn]

    def answered(self, request: Request, prompt, answer) -> None:
        super().answered(request, prompt, answer)
        whole = self._said[request.session]
        self.answers[request.session, request.turn] = whole[len(prompt) :]


def streams() -> list[Request]:
    """Chats, edits and regenerated answers, dropped reasoning, shared system prompts and a long text, interleaved."""

    def turns(name: str, scale: float, *sessions: str) -> list[Request]:
        return [r for r in build(name, scale=scale).requests if r.session in sessions]

    parts = [
        turns("short-chats", 0.12, "chat 1", "chat 2")[:6],
        turns("branching", 0.06, "editor 1"),
        turns("dropped-reasoning", 0.1, "thinker 15")[:3],
        turns("shared-system-prompt", 0.05, *(f"group {g} user {u}" for g in (5, 6) for u in range(3)))[:5],
        turns("alternating-long", 0.0112, "reader 0")[:2],
    ]
    order = [(i / len(part), request) for part in parts for i, request in enumerate(part)]
    in_order = [request for _, request in sorted(order, key=lambda pair: pair[0])]
    return [replace(request, answer=min(request.answer, 12)) for request in in_order]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


WORKLOAD = Workload("mixed", tuple(streams()))
METRICS = ("--enable-metrics",) if importlib.util.find_spec("prometheus_client") else ()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    limits = {"max_total_tokens": PAGES * PAGE, "max_mamba_cache_size": SLOTS, "max_running_requests": RUNNING}
    with serve(model, tmp_path_factory.mktemp("log") / "server.log", *METRICS, **limits) as server:
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


def send(server, workload: Workload, cold: Recording, users: int) -> tuple[dict[str, Any], Recording]:
    """The report of a replay from an empty cache, compared with the cold answers, and its own answers."""
    kept = Recording(workload.name)
    options = {"users": users, "speed": None, "source": SOURCE, "system": "x", "keep": kept, "against": cold}
    return replay(server.client, workload, **options), kept


@pytest.fixture(scope="module")
def served(server, cold) -> tuple[dict[str, Any], Recording]:
    """One request after the other."""
    return send(server, WORKLOAD, cold, 1)


def test_the_server_has_the_least_memory_that_its_requests_allow():
    """SGLang gives a prompt its whole pages and holds one back; it would cut an answer that then does not fit."""
    needed = [
        -(-length // PAGE) * PAGE + PAGE + 1 + request.answer
        for length, request in zip(WORKLOAD.lengths(), WORKLOAD.requests, strict=True)
    ]
    assert (PAGES - 1) * PAGE < max(needed) <= PAGES * PAGE and SLOTS == SLOTS_PER_REQUEST * RUNNING


def test_every_replayed_request_is_answered_as_from_an_empty_cache(served):
    result, answers = served
    assert result["compared"] == len(WORKLOAD.requests) == len(answers.answers)
    assert result["different"] == [] and result["largest_logprob_difference"] == 0.0
    assert sum(answer.cached_tokens > 0 for answer in answers.answers.values()) > 5


def test_two_users_at_once_are_answered_as_from_an_empty_cache(server, cold):
    half = replace(WORKLOAD, requests=WORKLOAD.requests[: len(WORKLOAD.requests) // 2])
    result, _ = send(server, half, cold, RUNNING)
    assert result["compared"] == len(half.requests) and result["different"] == []


def simulated(workload: Workload, answers: Recording) -> list[Row]:
    """The same requests, one after the other, in the simulator with the server's limits and answers."""
    talk = Recorded(SOURCE)
    talk.answers = {key: np.asarray(answer.output_ids, dtype=np.int64) for key, answer in answers.answers.items()}
    geometry = Geometry.from_config(tiny_config(), page_size=PAGE)
    engine = Engine(Limits(PAGES, SLOTS, RUNNING, CHUNK, PAGE, 4096), geometry, user_token=USER)
    return Simulation(workload, engine, talk=talk).run()


def test_cached_tokens_of_a_sequential_trace_equal_the_servers_on_tight_pools(served):
    result, answers = served
    before = replace(counters)
    rows = simulated(WORKLOAD, answers)
    assert [(row.prompt, row.cached) for row in rows] == [
        (answer.prompt_tokens, answer.cached_tokens) for answer in answers.answers.values()
    ]
    evicted = counters.pages_evicted - before.pages_evicted, counters.snapshots_evicted - before.snapshots_evicted
    assert min(evicted) > 0 and counters.superseded > before.superseded, "the pools were not tight enough"
    assert any("page evicted" in row.missed for row in rows)
    if METRICS:
        assert result["missed_tokens"] == summary(rows, PAGE)["missed_tokens"]


@pytest.mark.skipif(not METRICS, reason="prometheus_client is not installed: see requirements/test.txt")
def test_the_metrics_tell_a_place_without_snapshot_from_evicted_pages(server):
    """Texts part inside the second page, where no snapshot stood before; then long ones drive it out."""
    texts = [("text", "one"), ("text", "other"), ("long", "end"), ("longer", "end"), ("text", "third")]
    sizes = {"text": 200, "long": 900, "longer": 950}
    requests = [
        Request(f"s{i}", 0, float(i), 0, (Piece(begin, sizes[begin]), Piece(end, 200)), 2)
        for i, (begin, end) in enumerate(texts)
    ]
    workload, kept = Workload("causes", tuple(requests)), Recording("causes")
    result = replay(server.client, workload, users=1, speed=None, source=SOURCE, system="x", keep=kept)
    assert result["missed_tokens"] == summary(simulated(workload, kept), PAGE)["missed_tokens"]
    assert {cause: result["missed_tokens"][cause] for cause in (PAGE_EVICTED, NO_SNAPSHOT)} == {
        PAGE_EVICTED: PAGE,
        NO_SNAPSHOT: PAGE,
    }
    assert result["missed_tokens_by_server"][NEW] == result["prompt_tokens"] - 2 * PAGE


@pytest.mark.skipif(not METRICS, reason="prometheus_client is not installed: see requirements/test.txt")
def test_metrics_name_pages_snapshots_evictions_and_hits(server):
    workload = build("short-chats", scale=0.15, chats=1)
    result = replay(
        server.client, replace(workload, requests=workload.requests[:2]), users=1, speed=None, source=SOURCE, system="x"
    )
    assert result["cached_tokens"] > 0 and result["ttft_s"]["p50"] > 0
    assert 0 < result["peak_pages"] <= PAGES and 0 < result["peak_snapshots"] <= SLOTS
    time.sleep(0.6)
    server.client.generate(SOURCE.draw("anything", 300).tolist(), 2, logprobs=False)
    time.sleep(0.6)
    found = gauges(server.url)
    assert found[PREFIX + "pages_total"] == PAGES and found[PREFIX + "slots_total"] == SLOTS
    assert found[PREFIX + "page_bytes_in_use"] > 0 and found[PREFIX + "snapshot_bytes_in_use"] > 0
    assert sum(missed_by_cause(server.url).values()) > 0
    for name, _ in COUNTED.values():
        assert f"{PREFIX}{name}_total" in found
    assert found[PREFIX + "snapshots_published_total"] > 0 and found[PREFIX + "pages_evicted_total"] > 0
    assert found[PREFIX + "hits_total"] > 0 and PREFIX + "hit_tokens_total" in found
