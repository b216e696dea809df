"""Requests whose cold answers are known, and servers of every configuration to send them to.

A cold answer is one given by a server whose cache was emptied just before. The same request must get the same token
ids and the same logprobs, bit for bit, whatever is cached, evicted, retracted or running beside it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from sglang_dsv4.serving import Answer, Client, Launch, Server

PAGE = 128
CHECKED = {"SGLANG_DSV4_POISON": "1", "SGLANG_DSV4_AUDIT": "1", "SGLANG_DEBUG_MEMORY_POOL": "1"}


def words(key: str, count: int) -> list[int]:
    rng = random.Random(key)
    return [rng.randrange(300, 1200) for _ in range(count)]


@dataclass(frozen=True)
class Request:
    name: str
    ids: tuple[int, ...]
    answer: int


def _request(name: str, ids: list[int], answer: int = 3) -> Request:
    return Request(name, tuple(ids), answer)


SHARED = words("shared", 400)
EDGES = [_request(f"edge {n}", words("edge", 400)[:n]) for n in (1, 127, 128, 129, 255, 256, 257)]
BRANCHES = [
    _request(f"branch at {at}", SHARED[:at] + words(f"branch {at}", 40))
    for at in (*range(124, 134), *range(253, 262))
]
LONG = _request("long", words("long", 1100), 4)
CROWD = [_request(f"crowd {i}", SHARED[:256] + words(f"crowd {i}", 10 + 9 * i), 12) for i in range(16)]
DEEP = [_request(f"deep {i}", SHARED[:384] + words(f"deep {i}", 5 + 17 * i), 8) for i in range(3)]
TURNS, TURN_ANSWER = 3, 70


@dataclass
class Cold:
    """Cold answers by request name, and a conversation whose turns follow from cold answers."""

    answers: dict[str, Answer]
    turns: list[Request] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        return [*EDGES, *BRANCHES, LONG, *DEEP, *CROWD, *self.turns]


def ask(client: Client, request: Request) -> Answer:
    return client.generate(request.ids, request.answer)


def same(answer: Answer, cold: Answer) -> bool:
    return answer.output_ids == cold.output_ids and answer.logprobs == cold.logprobs


def cold_answers(client: Client) -> Cold:
    cold = Cold({})
    for request in cold.requests:
        client.flush()
        cold.answers[request.name] = ask(client, request)
        assert cold.answers[request.name].cached_tokens == 0
    ids = words("conversation", 190)
    for turn in range(TURNS):
        request = _request(f"turn {turn}", ids, TURN_ANSWER)
        client.flush()
        answer = cold.answers[request.name] = ask(client, request)
        cold.turns.append(request)
        ids = ids + list(answer.output_ids) + words(f"user {turn}", 20)
    return cold


def serve(model: Path, log: Path, *args: str, env: dict[str, str] | None = None, **limits: int) -> Server:
    """A server with poisoned pools, the tree audit and SGLang's own pool checks on."""
    sizes = {"max_total_tokens": 16384, "max_running_requests": 16, "max_mamba_cache_size": 160, **limits}
    return Server(
        Launch(model, chunked_prefill_size=256, extra_args=args, **sizes), log, env={**CHECKED, **(env or {})}
    )


def differences(client: Client, cold: Cold, requests: list[Request], *, together: bool = False) -> list[str]:
    """Names of the requests whose answers differ from their cold ones."""
    if together:
        answers = client.generate_together([r.ids for r in requests], [r.answer for r in requests])
    else:
        answers = [ask(client, r) for r in requests]
    return [r.name for r, a in zip(requests, answers, strict=True) if not same(a, cold.answers[r.name])]
