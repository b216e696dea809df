"""Runs a workload through SGLang's own tree with our pools and policy, without a model.

    python bench/simulate.py PRESET|TRACE [--scale X] [--memory ample|third|BYTES] [--users N] [--out FILE]

Cached tokens are what a server would report: exactly so for requests that run one after the other
(`tests/server/test_simulator_against_server.py`).
`--users N` lets N requests run at once, in steps as SGLang prepares them: prompts before answers, those
that fit into a chunk together and the beginning of the next, and the result of a step after the next was prepared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import belady  # noqa: E402
import workloads  # noqa: E402
from engine import Engine, Ids, Limits, Run  # noqa: E402
from kept import Kept, told  # noqa: E402
from measure import Row, factor, memories, misses, parts, summary, writable  # noqa: E402
from prefixes import PrefixIndex  # noqa: E402
from workloads import Conversations, Request, TokenSource, Workload  # noqa: E402

from sglang_dsv4.cache.counters import counters  # noqa: E402
from sglang_dsv4.cache.policy import LADDER  # noqa: E402
from sglang_dsv4.cache.sizing import SLOTS_PER_REQUEST, split_bytes  # noqa: E402
from sglang_dsv4.console import Progress, positive, table  # noqa: E402
from sglang_dsv4.geometry import Geometry  # noqa: E402

CONFIG = ROOT / "configs" / "v4_flash.json"


def flash(page: int = 128) -> Geometry:
    return Geometry.from_config(json.loads(CONFIG.read_text()), page_size=page)


@dataclass
class _Active:
    request: Request
    prompt: Ids
    answer: Ids
    run: Run
    path: list[int]
    ideal: int
    best_snapshot: int
    steps: Iterator[str]
    phase: str = "prefill"
    wait: int = 0  # tokens of answer until its next step


class Simulation:
    """One workload on one engine. `run()` once, then read `rows`, `uses` and the engine's peaks."""

    def __init__(
        self, workload: Workload, engine: Engine, *, users: int = 1, talk: Conversations | None = None
    ) -> None:
        self.workload, self.engine, self.users = workload, engine, users
        self.talk = talk or Conversations(TokenSource())
        self.page = engine.limits.page
        self.index = PrefixIndex(self.page)
        self.snapshots_ever: set[int] = set()
        self.rows: list[Row] = []
        self.uses: list[belady.Use] = []
        self._in_flight: list[_Active] = []  # those whose prompts the last step completed

    def run(self, progress: bool = False) -> list[Row]:
        waiting = deque(self.workload.requests)
        active: list[_Active] = []
        bar = Progress(len(waiting), self.workload.name) if progress else None
        while waiting or active:
            if not self._prefill(waiting, active):
                for one in self._decode(active):
                    active.remove(one)
                    self._finished(one)
                    if bar:
                        bar.step(one.request.session)
        return self.rows

    def _decode(self, active: list[_Active]) -> list[_Active]:
        """All answers grow until one of them needs memory or ends; returns those that ended."""
        passed = min(one.wait for one in active)
        for one in active:
            one.wait -= passed
            if not one.wait:
                self._step(one)
                one.wait = one.run.decoded
        return [one for one in active if one.phase == "done"]

    @staticmethod
    def _step(one: _Active) -> None:
        one.phase = next(one.steps, "done")

    def _prefill(self, waiting: deque[Request], active: list[_Active]) -> bool:
        """A step of the prompt that goes on and of those that fit beside it, in the order of arrival; False if none."""
        before, self._in_flight = self._in_flight, []
        sent = self._sent(waiting, active) if before else []
        for other in before:
            other.run.publish_ahead([self.talk.prompt(request) for request in sent])
        left, began = self.engine.limits.chunk, False
        going_on = next((one for one in active if one.phase == "prefill"), None)
        one = going_on or self._admitted(waiting, active)
        while one is not None:
            one.run.most = left
            self._step(one)
            left, began = left - one.run.pages_of_step * self.page, True
            if one.phase == "prefill":
                break
            self._in_flight.append(one)
            one = self._admitted(waiting, active) if left > 0 else None
        for other in before if began else ():
            other.run.prompt_done()
        return began

    def _admitted(self, waiting: deque[Request], active: list[_Active]) -> _Active | None:
        """The next request, if memory allows it to start."""
        request = next(iter(self._sent(waiting, active)), None)
        if request is None:
            return None
        one = self._prepare(request)
        if not self.engine.admits(one.run):
            if active:
                return None
            raise ValueError(
                f"{request.session} turn {request.turn} has {len(one.prompt)} + {request.answer} tokens, more than "
                f"{self.engine.limits.pages} pages hold; give more memory"
            )
        waiting.remove(request)
        self._seen(one)
        active.append(one)
        return one

    def _sent(self, waiting: deque[Request], active: list[_Active]) -> list[Request]:
        """Those that users have sent and that have not begun; a session waits for itself."""
        busy = {one.request.session for one in active}
        found: list[Request] = []
        for request in waiting:
            if len(active) + len(found) >= self.users:
                break
            if request.session not in busy:
                busy.add(request.session)
                found.append(request)
        return found

    def _prepare(self, request: Request) -> _Active:
        prompt, answer = self.talk.prompt(request), self.talk.drawn_answer(request)
        run = self.engine.start(prompt, answer, len(self.rows))
        return _Active(request, prompt, answer, run, [], 0, 0, run.steps())

    def _seen(self, one: _Active) -> None:
        walk = self.index.walk(one.prompt)
        one.ideal = min(walk.tokens, len(one.prompt) - 1)
        usable = walk.pages[: one.ideal // self.page]
        one.best_snapshot = max(
            (depth * self.page for depth, page in enumerate(usable, 1) if page in self.snapshots_ever), default=0
        )
        whole = np.concatenate([one.prompt, one.answer])
        self.index.add(one.prompt)
        one.path = self.index.add(whole)
        one.run.on_snapshot = lambda length: self.snapshots_ever.add(one.path[length // self.page - 1])
        self.uses.append(belady.Use(len(one.prompt), one.ideal // self.page, one.path))

    def _finished(self, one: _Active) -> None:
        self.talk.answered(one.request, one.prompt, one.answer)
        missed = misses(
            prompt=len(one.prompt),
            cached=one.run.cached,
            ideal=one.ideal,
            page=self.page,
            pages_hit=one.run.pages_hit,
            best_snapshot=one.best_snapshot,
        )
        request = one.request
        cached, standing = one.run.cached, max(0, one.run.pages_hit - one.run.cached)
        self.rows.append(Row(request.session, request.turn, len(one.prompt), cached, one.ideal, missed, standing))


def limits_for(
    workload: Workload, memory: str, geometry: Geometry, *, users: int, chunk: int, share: float | None = None
) -> Limits:
    """Pages and slots for "ample", "third", a fraction such as "0.5", or a number of bytes.

    The bytes are those beyond what running requests hold as state. A fraction is of the bytes of the workload's
    distinct tokens, but leaves enough pages for its longest request alone. `share` of them becomes snapshots.
    """
    page, lengths = geometry.page_size, workload.lengths()
    longest = max(n + r.answer for n, r in zip(lengths, workload.requests, strict=True))
    distinct = workloads.distinct_tokens(workload, page)
    context = longest + 2 * page
    if memory == "ample":
        pages = distinct // page + users * (longest // page + 4)
        # A request leaves rungs, ends of chunks and a few others; slots are not scarce while a quarter of them is free.
        left = sum(n // LADDER + n // chunk + 8 for n in lengths)
        return Limits(pages, left * 4 // 3 + SLOTS_PER_REQUEST * users + 64, users, chunk, page, context)
    part = 1 / 3 if memory == "third" else float(memory)
    relative = part <= 1
    spare = int(distinct * part * geometry.token_alloc_bytes) if relative else int(part)
    pages, snapshots = split_bytes(geometry, spare, share)
    pages = max(pages, longest // page + 4) if relative else pages
    return Limits(pages, SLOTS_PER_REQUEST * users + snapshots, users, chunk, page, context)


def oracle_tokens(simulation: Simulation, geometry: Geometry) -> int:
    """Cached tokens of the oracle with the same bytes, the running requests' own slots not counted."""
    limits, page = simulation.engine.limits, geometry.page_size
    page_bytes = int(page * geometry.token_alloc_bytes)
    snapshots = limits.slots - SLOTS_PER_REQUEST * limits.running
    budget = limits.pages * page_bytes + snapshots * geometry.slot_bytes
    found = belady.cached_tokens(
        simulation.uses, budget=budget, page_bytes=page_bytes, snapshot_bytes=geometry.slot_bytes, page=page
    )
    return sum(found)


def split_oracle_tokens(simulation: Simulation) -> int:
    """Cached tokens of the oracle with the same pages and the same snapshots."""
    limits = simulation.engine.limits
    snapshots = limits.slots - SLOTS_PER_REQUEST * limits.running
    return sum(
        belady.cached_tokens_of_split(simulation.uses, pages=limits.pages, snapshots=snapshots, page=limits.page)
    )


def simulate(
    workload: Workload,
    memory: str,
    *,
    users: int = 1,
    chunk: int = 8192,
    share: float | None = None,
    granule: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """The report of one run, as written to JSON."""
    geometry = flash()
    limits = limits_for(workload, memory, geometry, users=users, chunk=chunk, share=share)
    limits = replace(limits, granule=granule)
    if chunk % limits.page:
        raise ValueError(f"a chunk of {chunk} tokens is no multiple of the page, {limits.page}: servers refuse it")
    before = counters.numbers()
    start = time.perf_counter()
    simulation = Simulation(workload, Engine(limits, geometry), users=users)
    rows = simulation.run(progress)
    seconds = time.perf_counter() - start
    known = oracle_tokens(simulation, geometry)
    result = summary(rows, limits.page)
    return {
        "system": "simulator" if share is None else f"share {share}",
        "workload": workload.name,
        "memory": memory,
        "limits": asdict(limits),
        "bytes": int(limits.pages * limits.page * geometry.token_alloc_bytes) + limits.slots * geometry.slot_bytes,
        **result,
        "oracle_tokens": known,
        "split_oracle_tokens": split_oracle_tokens(simulation),
        "cached_over_oracle": _over(result["cached_tokens"], known),
        "peak_pages": simulation.engine.peak_pages,
        "peak_snapshots": simulation.engine.peak_snapshots,
        "counters": {name: count - before[name] for name, count in counters.numbers().items()},
        "seconds": round(seconds, 2),
    }


def _over(cached: int, known: int) -> float | None:
    """None where the oracle finds nothing and the cache does."""
    if known:
        return round(cached / known, 4)
    return None if cached else 1.0


def describe(results: Sequence[dict[str, Any]]) -> str:
    """A line a run."""
    head = ("workload", "memory", "prompt", "cached", "ideal", "recomputed/ideal", "oracle", "cached/oracle", "s")
    keys = ("workload", "memory", "prompt_tokens", "cached_tokens", "ideal_tokens", "recomputed_over_ideal")
    tail = ("oracle_tokens", "cached_over_oracle", "seconds")
    return table(head, [tuple("" if r[k] is None else r[k] for k in (*keys, *tail)) for r in results], left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a workload through the cache without a model.")
    parser.add_argument("workload", nargs="+", help=f"{', '.join(workloads.PRESETS)}, or the path of a recording")
    parser.add_argument("--path", type=Path, help="recording for coding-agent or mooncake")
    parser.add_argument("--scale", type=factor, default=1.0, help="factor on all lengths")
    parser.add_argument("--chats", type=positive, help="number of chats of short-chats (120)")
    parser.add_argument("--limit", type=positive, help="requests to take from the beginning")
    parser.add_argument(
        "--memory",
        type=memories,
        default=["ample", "third"],
        help="comma-separated: ample, third, a fraction of the distinct tokens, bytes",
    )
    parser.add_argument("--share", type=parts, help="comma-separated parts of it for snapshots, instead of the default")
    parser.add_argument("--granule", type=positive, default=0, help="bytes by which memory moves; 0: it does not")
    parser.add_argument("--users", type=positive, default=1, help="requests that run at once")
    parser.add_argument("--chunk", type=positive, default=8192, help="prompt tokens of a step")
    parser.add_argument("--out", type=writable, help="JSON file for the results")
    args = parser.parse_args()
    if args.path and not set(workloads.RECORDED).intersection(args.workload):
        parser.error(f"--path is for {' and '.join(workloads.RECORDED)}")
    kept = Kept(args.out)
    with told("simulate", kept, describe):
        for name in args.workload:
            built = workloads.build(name, scale=args.scale, path=args.path, chats=args.chats, limit=args.limit)
            for memory in args.memory:
                for share in args.share or [None]:
                    how = {"users": args.users, "chunk": args.chunk, "share": share, "granule": args.granule}
                    kept.add([simulate(built, memory, **how, progress=True)])


if __name__ == "__main__":
    main()
