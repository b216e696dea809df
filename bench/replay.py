"""Replays a workload against any running SGLang server over HTTP and reports what its cache gave.

    python bench/replay.py PRESET|TRACE --url http://HOST:PORT [--users N | --speed X] [--scale X] [--out FILE]
    python bench/replay.py PRESET|TRACE --url http://HOST:PORT --ids cold.json       # of a server without cache
    python bench/replay.py PRESET|TRACE --url http://HOST:PORT --against cold.json   # fails where an answer differs

Prompts are token ids; answers are forced to the recorded length. A session's requests wait for each other. With
`--users N` each of N users sends the next request as soon as it is answered; with `--speed X` requests are sent when
they arrived in the recording, X times as fast.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import answers  # noqa: E402
import workloads  # noqa: E402
from answers import Recording  # noqa: E402
from measure import (  # noqa: E402
    CAUSES,
    HIDDEN,
    NO_SNAPSHOT,
    PAGE,
    SNAPSHOT,
    Row,
    factor,
    misses,
    percentiles,
    summary,
    writable,
    write,
)
from prefixes import PrefixIndex  # noqa: E402
from workloads import ASSISTANT, USER, Conversations, Ids, Request, TokenSource, Workload  # noqa: E402

from sglang_dsv4.console import Progress, id_range, positive, run_program, table, tolerance  # noqa: E402
from sglang_dsv4.serving import Answer, Client, ServerError  # noqa: E402
from sglang_dsv4.workers import Workers  # noqa: E402

ROLE_TOKENS = {USER: "<｜User｜>", ASSISTANT: "<｜Assistant｜>"}
MISSED = "sglang_dsv4:missed_tokens_total"
_METRIC = r"^([\w:]+)(\{[^}]*\})? ([-+.\deE]+)$"
_CAUSE = r'cause="([^"]*)"'
SETTLED_S = 0.5  # until a server has counted its last request
GAUGES = {"peak_pages": "sglang_dsv4:pages_in_use", "peak_snapshots": "sglang_dsv4:snapshots_in_use"}


@dataclass(frozen=True)
class ServerTokens(TokenSource):
    """Token ids that a server's tokenizer knows as ordinary text, and its role tokens."""

    ids: tuple[int, ...] = ()

    def draw(self, key: str, count: int) -> Ids:
        drawn = super().draw(key, count)
        return drawn if key in ROLE_TOKENS else self._ids[drawn]

    @functools.cached_property
    def _ids(self) -> Ids:
        return np.asarray(self.ids, dtype=np.int64)  # once: a vocabulary takes longer than what is drawn from it


def tokens_of(client: Client, id_range: tuple[int, int] | None) -> ServerTokens:
    """Role tokens become an ordinary token where the tokenizer does not know them as one."""
    ids = client.words(id_range).ids
    roles = []
    for number, text in enumerate(ROLE_TOKENS.values()):
        try:
            found = client.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        except (ServerError, KeyError, TypeError):
            found = []
        roles.append(int(found[0]) if len(found) == 1 else ids[number])
    return ServerTokens(low=0, high=len(ids), user=roles[0], assistant=roles[1], ids=ids)


@dataclass
class _Sent:
    request: Request
    prompt: Ids
    ideal: int
    answer: Answer | None = None


@dataclass
class Replay:
    """One run. `run()` once; then `sent` holds the requests in the order in which they began.

    logprobs  ask for them
    script    answers with which conversations go on, whatever the server says: its prompts are those of the run that
              was recorded, so one differing answer is one difference
    """

    client: Client
    workload: Workload
    source: TokenSource
    page: int
    users: int = 1
    speed: float | None = None
    logprobs: bool = False
    script: Recording | None = None
    sent: list[_Sent] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self) -> None:
        """Raises ServerError with the first request that fails; none is sent any more."""
        self._waiting = list(self.workload.requests)
        self._busy: set[str] = set()
        self._change = threading.Condition()
        self._talk, self._index = Conversations(self.source), PrefixIndex(self.page)
        self._bar = Progress(len(self._waiting), self.workload.name)
        self._ended = False
        self._start = time.perf_counter()
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(stop,), daemon=True)
        watcher.start()
        # Recorded arrivals are an open loop: as many threads as sessions, so that none waits for another's answer.
        sessions = len({r.session for r in self._waiting})
        threads = min(self.users if self.speed is None else sessions, 512)
        try:
            with Workers(threads) as pool:
                pool.until([pool.submit(self._user) for _ in range(threads)])
        finally:
            self._end()  # or the threads of a run that failed would go on with what has not been sent
            self.seconds = time.perf_counter() - self._start
            stop.set()
        watcher.join()

    def _user(self) -> None:
        while (sent := self._take()) is not None:
            sent.answer = self.client.generate(sent.prompt.tolist(), sent.request.answer, logprobs=self.logprobs)
            self._done(sent)

    def _end(self) -> None:
        """No request is sent any more."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _take(self) -> _Sent | None:
        """The next request that may be sent, or None when there is none left."""
        with self._change:
            while self._waiting and not self._ended:
                request = next((r for r in self._waiting if r.session not in self._busy), None)
                delay = None if request is None else self._delay(request)
                if request is None or delay:
                    self._change.wait(delay)
                    continue
                self._waiting.remove(request)
                self._busy.add(request.session)
                prompt = self._talk.prompt(request)
                ideal = min(self._index.walk(prompt).tokens, len(prompt) - 1)
                self._index.add(prompt)
                self.sent.append(_Sent(request, prompt, ideal))
                return self.sent[-1]
            return None

    def _delay(self, request: Request) -> float:
        if self.speed is None:
            return 0.0
        return max(0.0, self._start + request.arrival / self.speed - time.perf_counter())

    def _done(self, sent: _Sent) -> None:
        assert sent.answer is not None
        said = sent.answer if self.script is None else self.script.answers[_key(sent.request)]
        with self._change:
            self._talk.answered(sent.request, sent.prompt, list(said.output_ids))
            self._index.add(np.concatenate([sent.prompt, np.asarray(sent.answer.output_ids, dtype=np.int64)]))
            self._busy.discard(sent.request.session)
            self._bar.step(sent.request.session)
            self._change.notify_all()

    def _watch(self, stop: threading.Event) -> None:
        """Peaks from /metrics, where the server has them."""
        while True:
            found = gauges(self.client.url)
            for peak, name in GAUGES.items():
                if name in found:
                    self.peaks[peak] = max(self.peaks.get(peak, 0), int(found[name]))
            if stop.wait(1.0):
                return

    def rows(self) -> list[Row]:
        rows = []
        for sent in self.sent:
            assert sent.answer is not None
            prompt, cached = len(sent.prompt), sent.answer.cached_tokens
            # Neither pages nor snapshots can be seen from here, so what they cost is one cause: see `told_apart`.
            found = misses(prompt=prompt, cached=cached, ideal=sent.ideal, page=self.page, pages_hit=0, best_snapshot=0)
            if NO_SNAPSHOT in found:
                found[HIDDEN] = found.pop(NO_SNAPSHOT)
            rows.append(Row(sent.request.session, sent.request.turn, prompt, cached, sent.ideal, found))
        return rows

    def times(self) -> dict[str, Any]:
        """Seconds to the first token and between tokens, and tokens a second of the whole run."""
        answers = [sent.answer for sent in self.sent if sent.answer is not None]
        gaps = []
        for answer in answers:
            for (before, had), (now, have) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
                gaps += [(now - before) / (have - had)] * (have - had)
        prompt = sum(a.prompt_tokens for a in answers)
        generated = sum(len(a.output_ids) for a in answers)
        return {
            "ttft_s": percentiles(a.first_token_s for a in answers),
            "inter_token_s": percentiles(gaps),
            "prompt_tokens_per_s": round(prompt / self.seconds, 2),
            "answer_tokens_per_s": round(generated / self.seconds, 2),
            "ttft_samples_s": [round(a.first_token_s, 5) for a in answers],
        }


def _key(request: Request) -> answers.Key:
    return request.session, request.turn


def gauges(url: str) -> dict[str, float]:
    """The server's metrics without labels, by name; empty where it has none."""
    return {name: float(value) for name, _, value in re.findall(_METRIC, _metrics(url), re.M)}


def missed_by_cause(url: str) -> dict[str, int]:
    """Tokens missed since the server began, by cause; empty where it does not count them. All ranks count alike."""
    found = [(labels, value) for name, labels, value in re.findall(_METRIC, _metrics(url), re.M) if name == MISSED]
    causes = [(cause[1], int(float(value))) for labels, value in found if (cause := re.search(_CAUSE, labels))]
    return {cause: max(n for other, n in causes if other == cause) for cause, _ in causes}


def _metrics(url: str) -> str:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/metrics", timeout=5) as response:
            text: str = response.read().decode(errors="replace")
    except OSError:
        return ""
    return text


def told_apart(missed: dict[str, int], by_server: dict[str, int]) -> dict[str, int]:
    """Missed tokens with what is one cause from here divided as the server counted it.

    Left as it is where the two do not add up to the same: others used the server, or it had forgotten what was seen.
    """
    known = {cause: by_server.get(cause, 0) for cause in (PAGE, SNAPSHOT, NO_SNAPSHOT)}
    if not missed.get(HIDDEN) or sum(known.values()) != missed[HIDDEN]:
        return missed
    return {cause: n for cause in CAUSES if (n := {**missed, HIDDEN: 0, **known}.get(cause, 0))}


def replay(
    client: Client,
    workload: Workload,
    *,
    users: int,
    speed: float | None,
    source: TokenSource,
    system: str,
    flush: bool = True,
    keep: Recording | None = None,
    against: Recording | None = None,
    tolerance: float = 0.0,
) -> dict[str, Any]:
    """The report of one run, as written to JSON. Raises ServerError.

    keep     gets the answers, with logprobs
    against  answers to compare with, request by request
    """
    if against is not None:
        answers.covers(against, workload.name, [_key(request) for request in workload.requests])
    info = client.info()
    longest = max(n + r.answer for n, r in zip(workload.lengths(), workload.requests, strict=True))
    if longest > info.max_prompt:
        raise ServerError(f"a request has {longest} tokens but {client.url} takes {info.max_prompt}; use --scale")
    if flush:
        client.flush()
    wanted = keep is not None or against is not None
    run = Replay(client, workload, source, info.page_size, users, speed, wanted, against)
    before = missed_by_cause(client.url)
    run.run()
    if missed_by_cause(client.url):
        time.sleep(SETTLED_S)
    by_server = {cause: n - before.get(cause, 0) for cause, n in missed_by_cause(client.url).items()}
    result = summary(run.rows(), info.page_size)
    result["missed_tokens"] = told_apart(result["missed_tokens"], by_server)
    if by_server:
        result["missed_tokens_by_server"] = by_server
    got = Recording(workload.name) if keep is None else keep
    for sent in run.sent:
        assert sent.answer is not None
        got.add(_key(sent.request), sent.prompt, sent.answer)
    compared = {}
    if against is not None:
        lines, worst = answers.differences(got, against, tolerance)
        compared = {"compared": len(got.answers), "largest_logprob_difference": worst, "different": lines}
    return {
        "system": system,
        "workload": workload.name,
        "url": client.url,
        "server": {"version": info.version, "device": info.device, "page": info.page_size},
        "users": users if speed is None else None,
        "speed": speed,
        **result,
        **run.times(),
        **{name: run.peaks.get(name) for name in GAUGES},
        "seconds": round(run.seconds, 2),
        **compared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay a workload against a running SGLang server.")
    parser.add_argument("workload", help=f"{', '.join(workloads.PRESETS)}, or the path of a recording")
    parser.add_argument("--url", required=True, help="http://HOST:PORT")
    parser.add_argument("--path", type=Path, help="recording for coding-agent or mooncake")
    parser.add_argument("--scale", type=factor, default=1.0, help="factor on all lengths")
    parser.add_argument("--chats", type=positive, help="number of chats of short-chats (120)")
    parser.add_argument("--limit", type=positive, help="requests to take from the beginning")
    parser.add_argument("--users", type=positive, default=1, help="requests in flight, closed loop (1)")
    parser.add_argument("--speed", type=factor, help="recorded arrivals, this many times as fast, instead of --users")
    ordinary = "ordinary token ids, for a server without tokenizer"
    parser.add_argument("--token-ids", metavar="LOW:HIGH", type=id_range, help=ordinary)
    parser.add_argument("--system", default="ours", help="name of the system in reports")
    parser.add_argument("--keep-cache", action="store_true", help="do not flush the server's cache first")
    parser.add_argument("--out", type=writable, help="JSON file for the result")
    parser.add_argument("--ids", type=writable, help="JSON file for every answer's token ids and logprobs")
    parser.add_argument("--against", type=Path, help="such a file: compare each answer with the one in it")
    parser.add_argument("--tolerance", type=tolerance, default=0.0, help="of logprobs, for --against (0: to the bit)")
    args = parser.parse_args()
    if args.path and not set(workloads.RECORDED).intersection([args.workload]):
        parser.error(f"--path is for {' and '.join(workloads.RECORDED)}")
    try:
        built = workloads.build(args.workload, scale=args.scale, path=args.path, chats=args.chats, limit=args.limit)
        against = Recording.load(args.against) if args.against else None
        kept = Recording(built.name) if args.ids else None
        client = Client(args.url)
        result = replay(
            client,
            built,
            users=args.users,
            speed=args.speed,
            source=tokens_of(client, args.token_ids),
            system=args.system,
            flush=not args.keep_cache,
            keep=kept,
            against=against,
            tolerance=args.tolerance,
        )
        if kept is not None:
            kept.save(args.ids)
    except (OSError, ValueError, ServerError) as error:
        sys.exit(f"replay: {error}")
    shown = [(key, value) for key, value in result.items() if not isinstance(value, list)]
    print(table(("figure", "value"), shown, left=2))
    if args.out:
        write(args.out, {"runs": [result]})
    if different := result.get("different"):
        sys.exit("\n".join([f"replay: {len(different)} of {result['compared']} answers differ", *different]))


if __name__ == "__main__":
    run_program("replay", main)
