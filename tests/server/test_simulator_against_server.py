"""Benchmarks against a real server: the simulator finds the tokens that it finds, replay reports what it says."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace

import pytest
from engine import Engine, Limits
from replay import gauges, replay
from simulate import Simulation
from workload import PAGE, serve
from workloads import Conversations, Ids, Request, TokenSource, Workload, build

from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.metrics import COUNTED, PREFIX
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.tiny import SPECIAL_TOKENS, tiny_config, write_checkpoint

USER = SPECIAL_TOKENS.index("<｜User｜>")
SOURCE = TokenSource(low=300, high=1200, user=USER)
PAGES, SLOTS, RUNNING, CHUNK = 24, 12, 2, 256


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
    """Chats, edits, regenerated answers and dropped reasoning, a few requests of each, interleaved."""
    parts = [
        build("short-chats", scale=0.15, chats=4).requests[:8],
        build("branching", scale=0.06).requests[:8],
        build("dropped-reasoning", scale=0.1).requests[:5],
        build("shared-system-prompt", scale=0.05).requests[:6],
    ]
    order = [(i / len(part), request) for part in parts for i, request in enumerate(part)]
    in_order = [request for _, request in sorted(order, key=lambda pair: pair[0])]
    return [replace(request, answer=min(request.answer, 24)) for request in in_order]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


METRICS = ("--enable-metrics",) if importlib.util.find_spec("prometheus_client") else ()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    limits = {"max_total_tokens": PAGES * PAGE, "max_mamba_cache_size": SLOTS, "max_running_requests": RUNNING}
    with serve(model, tmp_path_factory.mktemp("log") / "server.log", *METRICS, **limits) as server:
        yield server


def test_cached_tokens_of_a_sequential_trace_equal_the_servers_on_tight_pools(server):
    workload = Workload("mixed", tuple(streams()))
    talk = Recorded(SOURCE)
    served = []
    server.client.flush()
    for request in workload.requests:
        prompt = talk.prompt(request)
        answer = server.client.generate(prompt.tolist(), request.answer, logprobs=False)
        talk.answered(request, prompt, list(answer.output_ids))
        served.append((len(prompt), answer.cached_tokens))

    again = Recorded(SOURCE)
    again.answers = talk.answers
    geometry = Geometry.from_config(tiny_config(), page_size=PAGE)
    engine = Engine(Limits(PAGES, SLOTS, RUNNING, CHUNK, PAGE, 4096), geometry, user_token=USER)
    before = replace(counters)
    rows = Simulation(workload, engine, talk=again).run()
    assert [(row.prompt, row.cached) for row in rows] == served
    evicted = counters.pages_evicted - before.pages_evicted, counters.snapshots_evicted - before.snapshots_evicted
    assert min(evicted) > 0 and counters.superseded > before.superseded, "the pools were not tight enough"
    assert any("page evicted" in row.missed for row in rows)


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
    for name, _ in COUNTED.values():
        assert f"{PREFIX}{name}_total" in found
    assert found[PREFIX + "snapshots_published_total"] > 0 and found[PREFIX + "pages_evicted_total"] > 0
    assert found[PREFIX + "hits_total"] > 0 and PREFIX + "hit_tokens_total" in found
