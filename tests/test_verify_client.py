"""`verify` passes a faithful server and notices every way of being unfaithful."""

from __future__ import annotations

import math
import urllib.request
from dataclasses import replace

import pytest
from fake_server import FakeServer, free_port

from sglang_dsv4.serving import Answer, Client, ServerError
from sglang_dsv4.verify import compare, verify


def run(server: FakeServer, **options: object) -> tuple[bool, str]:
    lines: list[str] = []
    client = Client(server.url)
    passed = verify(client, words=client.words(), say=lines.append, **options)  # type: ignore[arg-type]
    return passed, "\n".join(lines)


@pytest.mark.parametrize("page", (128, 256))
def test_a_faithful_server_passes(page):
    with FakeServer(page=page) as server:
        passed, text = run(server)
    assert passed, text
    assert text.splitlines()[-1].endswith("failed=0")


@pytest.mark.parametrize(
    "fault, said",
    [
        ("other tokens after a hit", "other token at"),
        ("other logprobs after a hit", "other logprob at"),
        ("NaN after a hit", "other logprob at"),
        ("nothing is cached", "nothing cached"),
        ("flush does nothing", "cached after a flush"),
        ("aligned repeats miss", "exact repeat, 2 pages +0"),
        ("branches leave nothing", "nothing cached"),
        ("answers leave nothing", "cached too little"),
    ],
)
def test_an_unfaithful_server_fails(fault, said):
    with FakeServer(fault) as server:
        passed, text = run(server)
    assert not passed
    failed = [line for line in text.splitlines() if said in line and not line.endswith(" ok")]
    assert failed, text
    only_missed = {"nothing is cached", "aligned repeats miss", "branches leave nothing", "answers leave nothing"}
    assert ("did anybody else use or flush" in text) is (fault in only_missed), text


def test_any_hit_accepts_a_short_one_but_not_none():
    with FakeServer("answers leave nothing") as server:
        assert run(server, any_hit=True)[0]
    with FakeServer("nothing is cached") as server:
        assert not run(server, any_hit=True)[0]


@pytest.mark.parametrize(
    "fault, said",
    [
        ("another program", "not as SGLang does"),
        ("a web page", "not as SGLang does"),
        ("no radix cache", "--disable-radix-cache"),
        ("no cache report", "does not report cached tokens"),
        ("no tokenizer", "--token-ids"),
        ("refuses to flush", "does not flush its cache"),
        ("ends early", "ended a request after"),
        ("a full queue", "aborted a request: The request queue is full."),
        ("cut off", "broke the connection in the middle of an answer"),
        ("an error in the stream", "out of memory"),
        ("pages of nothing", "not as SGLang does"),
        ("a list in the stream", "sent an event that is no object"),
        ("bytes in the stream", "sent an event without JSON"),
        ("a number of ids", "output_ids are no list"),
        ("no numbers in the logprobs", "sent an answer that cannot be read"),
    ],
)
def test_a_server_that_cannot_be_checked_is_one_clear_line(fault, said, monkeypatch):
    flush = Client.flush
    monkeypatch.setattr(Client, "flush", lambda self: flush(self, patience_s=0.5))
    with FakeServer(fault) as server, pytest.raises(ServerError) as error:
        run(server)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_short_context_is_refused_before_anything_is_sent():
    with FakeServer(max_prompt=600) as server, pytest.raises(ServerError, match="--context-length"):
        run(server)
    assert server.flushes == 0


def test_an_unreachable_address_is_one_clear_line():
    client = Client(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServerError, match="no server at"):
        client.info()
    assert not client.ready()


@pytest.mark.parametrize("url", ("ftp://host:1", "http://", "", "http://a..b:80", f"http://{'x' * 80}:80"))
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ServerError, match="not a server's address"):
        Client(url)


@pytest.mark.parametrize("key", ("two\nlines", "schlüssel"))
def test_an_api_key_that_no_header_carries_is_refused_and_not_shown(key):
    with pytest.raises(ServerError, match="API key") as error:
        Client("http://localhost:1", api_key=key)
    assert key not in str(error.value)


def test_an_address_without_a_scheme_is_http():
    assert Client("localhost:30000").url == "http://localhost:30000"


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert urllib.request.getproxies()["http"]
    with FakeServer() as server:
        assert Client(server.url).info().page_size == 128


def test_a_device_server_is_compared_with_the_tolerance():
    with FakeServer("other logprobs after a hit", device="cuda") as server:
        assert run(server)[0]
        assert not run(server, tolerance=1e-4)[0]


def answer(ids: list[int], logprobs: list[float], runner_up: list[float]) -> Answer:
    return Answer(10, 0, tuple(ids), tuple(logprobs), tuple(runner_up), 0.0, 0.0)


COLD = answer([5, 6, 7], [-1.0, -0.70, -0.5], [-3.0, -0.75, -2.0])


def test_ids_may_part_at_a_near_tie_only():
    part = replace(COLD, output_ids=(5, 9, 9), logprobs=(-1.0, -0.69, -4.0))
    assert compare(part, COLD, 0.1) == (0.0, "")
    assert compare(part, COLD, 0.01)[1] == "other token at 1"
    early = replace(COLD, output_ids=(4, 6, 7))
    assert compare(early, COLD, 0.1)[1] == "other token at 0"


def test_no_tolerance_admits_no_tie():
    tie = replace(COLD, runner_up=COLD.logprobs)
    assert compare(replace(tie, output_ids=(5, 9, 7)), tie, 0.0)[1] == "other token at 1"


def test_differences_are_reported_at_their_largest():
    other = replace(COLD, logprobs=(-1.0, -0.72, -0.5))
    difference, fault = compare(other, COLD, 0.1)
    assert not fault and math.isclose(difference, 0.02)
    assert compare(other, COLD, 0.0)[1] == "other logprob at 1"


def test_missing_logprobs_are_a_fault():
    assert compare(replace(COLD, logprobs=()), COLD, 0.1)[1] == "logprobs missing"
