"""The simulator finds the tokens that a server finds: the same requests, one after the other, on tight pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine import Engine, Limits
from simulate import Simulation
from workload import PAGE, serve
from workloads import Conversations, Ids, Request, TokenSource, Workload, build

from sglang_dsv4.geometry import Geometry
from sglang_dsv4.tiny import SPECIAL_TOKENS, tiny_config, write_checkpoint

USER = SPECIAL_TOKENS.index("<｜User｜>")
SOURCE = TokenSource(low=300, high=1200, user=USER)
PAGES, SLOTS, RUNNING, CHUNK = 18, 14, 2, 256


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
    return [replace(request, answer=min(request.answer, 40)) for request in in_order]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def test_cached_tokens_of_a_sequential_trace_equal_the_servers_on_tight_pools(model, tmp_path):
    workload = Workload("mixed", tuple(streams()))
    talk = Recorded(SOURCE)
    limits = {"max_total_tokens": PAGES * PAGE, "max_mamba_cache_size": SLOTS, "max_running_requests": RUNNING}
    served = []
    with serve(model, tmp_path / "server.log", **limits) as server:
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
    rows = Simulation(workload, engine, talk=again).run()
    assert [(row.prompt, row.cached) for row in rows] == served
    reasons = {cause for row in rows for cause in row.missed}
    assert {"page evicted", "snapshot evicted"} <= reasons, "the pools were not tight enough to show anything"
