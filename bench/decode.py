"""Decode step times, prefill rates and kernel profiles of running servers, which take turns on one GPU.

A step's time is SGLang's own: every LOG_INTERVAL steps a server logs its tokens a second since the line before. What a
client sees holds the arrival of the requests too, which takes seconds for 64 prompts of 131,072 tokens.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rivals import LOG_INTERVAL, text

from sglang_dsv4.serving import Client, Server, ServerError

WINDOWS = 3  # log lines of a run that count; the first one holds the prefill
_LINE = re.compile(r"Decode batch.*#running-req: (\d+),.*gen throughput \(token/s\): ([0-9.]+)")
_DRAFTED = re.compile(
    r"Decode batch.*#running-req: (\d+),.*accept len: ([0-9.]+),.*gen throughput \(token/s\): ([0-9.]+)"
)
PROFILED_STEPS = 8


def batch_seconds(client: Client, prompts: list[list[int]], steps: int) -> float:
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True},
    }
    started = time.perf_counter()
    client.post("/generate", body)
    return time.perf_counter() - started


def token_ms(server: Server, prompts: list[list[int]]) -> float:
    """Milliseconds a decode step of the whole batch, whose prompts are cached; the median of WINDOWS log lines.

    Raises ServerError where the log has none, that is where not all prompts ever ran together.
    """
    before = server.log.stat().st_size
    batch_seconds(server.client, prompts, (WINDOWS + 1) * LOG_INTERVAL + 8)
    times = step_times(server.log, before, len(prompts))[1:]
    if not times:
        raise ServerError(f"{server.log} has no decode steps of {len(prompts)} requests")
    return statistics.median(times)


def step_times(log: Path, begin: int, batch: int) -> list[float]:
    """Milliseconds a step that the log's lines from byte `begin` on give for decode batches of that size."""
    return [batch / float(rate) * 1e3 for (rate,) in _told(_LINE, log, begin, batch)]


def _told(line: re.Pattern[str], log: Path, begin: int, batch: int) -> list[tuple[str, ...]]:
    """What `line` finds behind the number of requests, where that is `batch`, from byte `begin` of the log on."""
    with log.open("rb") as file:
        file.seek(begin)
        found = line.findall(file.read().decode(errors="replace"))
    return [tuple(rest) for running, *rest in found if int(running) == batch]


def drafted_steps(server: Server, prompts: list[list[int]], steps: int) -> list[dict[str, float]]:
    """What a server with draft tokens logs of a decode batch: milliseconds a step, tokens a step and a second.

    Raises ServerError where the log has no such line.
    """
    before, batch = server.log.stat().st_size, len(prompts)
    batch_seconds(server.client, prompts, steps)
    found = [
        {
            "step_ms": round(batch * float(accepted) / float(rate) * 1e3, 3),
            "tokens_a_step": float(accepted),
            "tokens_a_second": float(rate),
        }
        for accepted, rate in _told(_DRAFTED, server.log, before, batch)
    ][1:]
    if not found:
        raise ServerError(f"{server.log} has no decode steps of {len(prompts)} requests with draft tokens")
    return found


def alternated(servers: dict[str, Server], prompts: list[list[int]], repeats: int) -> dict[str, list[float]]:
    """`token_ms` of every server in turn, `repeats` times."""
    times: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(repeats):
        for name, server in servers.items():
            times[name].append(round(token_ms(server, prompts), 4))
    return times


def shared_prompts(context: int, batch: int, vocabulary: int) -> list[list[int]]:
    prefix = text(f"prefix {context}", context, vocabulary)
    return [[*prefix, *text(f"tail {i}", 8, vocabulary)] for i in range(batch)]


def cache_prefix(server: Server, context: int, vocabulary: int) -> None:
    """What `shared_prompts` begin with, and nothing else, is cached."""
    server.client.flush()
    server.client.generate(text(f"prefix {context}", context, vocabulary), 1, logprobs=False)


def shared_cells(
    servers: dict[str, Server], vocabulary: int, contexts: list[int], batches: list[int], repeats: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Step times where all requests share one cached prefix."""
    for context in contexts:
        for server in servers.values():
            cache_prefix(server, context, vocabulary)
        for batch in batches:
            yield (
                f"{batch} x {context} shared",
                alternated(servers, shared_prompts(context, batch, vocabulary), repeats),
            )


def distinct_cell(
    servers: dict[str, Server], vocabulary: int, context: int, batch: int, repeats: int
) -> tuple[str, dict[str, list[float]]]:
    """Step times where every request has a context of its own.

    Each server computes the prompts once and then goes on and is paused in turn: a cache of windows may not hold what
    it takes to begin so many contexts again.
    """
    prompts = [text(f"own {context} {i}", context, vocabulary) for i in range(batch)]
    begun = [Paused(server, prompts, own_steps(repeats)) for server in servers.values()]
    times: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(repeats):
        for name, running in zip(servers, begun, strict=True):
            times[name].append(round(running.token_ms(), 4))
    for running in begun:
        running.end()
    return f"{batch} x {context} distinct", times


def own_steps(repeats: int) -> int:
    """Answer tokens that `distinct_cell` may take of every request, with what passes before a server is paused."""
    return (repeats + 1) * (WINDOWS + 3) * LOG_INTERVAL


class Paused:
    """A batch that a server has begun to decode, paused but for the runs that are timed. Raises ServerError."""

    def __init__(self, server: Server, prompts: list[list[int]], steps: int) -> None:
        self.server, self.batch = server, len(prompts)
        self._pool = ThreadPoolExecutor(1)
        server.client.flush()
        self._answer = self._pool.submit(batch_seconds, server.client, prompts, steps)
        self._lines(server.log.stat().st_size, 1)
        self._pause()

    def token_ms(self) -> float:
        """Milliseconds a step; the median of WINDOWS log lines."""
        before = self.server.log.stat().st_size
        self.server.client.post("/continue_generation", {})
        times = self._lines(before, WINDOWS + 1)[1 : WINDOWS + 1]  # the first one holds the pause
        self._pause()
        return statistics.median(times)

    def end(self) -> None:
        self.server.client.post("/continue_generation", {})
        self.server.client.abort_all()
        with contextlib.suppress(ServerError):
            self._answer.result()
        self._pool.shutdown()

    def _pause(self) -> None:
        self.server.client.post("/pause_generation", {"mode": "in_place"})

    def _lines(self, begin: int, count: int) -> list[float]:
        """Step times that the log gives from byte `begin` on, as soon as there are so many."""
        while len(times := step_times(self.server.log, begin, self.batch)) < count:
            if self._answer.done():
                self._answer.result()
                raise ServerError(f"{self.server.log} has too few decode steps of {self.batch} requests")
            time.sleep(0.05)
        return times


def prefill_rates(
    clients: dict[str, Client], vocabulary: int, repeats: int, context: int = 32768
) -> dict[str, list[float]]:
    """Prompt tokens a second of one cold prompt, every server in turn, `repeats` times."""
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for i in range(repeats + 1):
        for name, client in clients.items():
            client.flush()
            answer = client.generate(text(f"cold {i}", context, vocabulary), 1, logprobs=False)
            rates[name].append(context / answer.first_token_s)
    return {name: all_of[1:] for name, all_of in rates.items()}  # the first prompt compiles what it needs


def long_turns(client: Client, vocabulary: int, chats: int, tokens: int, turns: int) -> dict[str, list[float]]:
    """Cached tokens and seconds of each turn of a few long conversations, one request after the other."""
    client.flush()
    history = [text(f"long {i}", tokens, vocabulary) for i in range(chats)]
    cached: list[float] = []
    seconds: list[float] = []
    for turn in range(turns):
        answers = [client.generate(ids, 32, logprobs=False) for ids in history]
        cached.append(sum(a.cached_tokens for a in answers))
        seconds.append(round(statistics.median(a.first_token_s for a in answers), 4))
        for i, answer in enumerate(answers):
            history[i] = [*history[i], *answer.output_ids, *text(f"long {i} turn {turn}", 224, vocabulary)]
    return {"cached": cached, "first_token_s": seconds}


def profile(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """Kernels of one decode step of the batch: SGLang's own profiler over PROFILED_STEPS replayed steps.

    Raises ServerError where no trace appears.
    """
    folder = Path(tempfile.mkdtemp())
    before = server.log.stat().st_size
    decoding = threading.Thread(target=batch_seconds, args=(server.client, prompts, 300))
    decoding.start()
    while decoding.is_alive() and not step_times(server.log, before, len(prompts)):
        time.sleep(0.05)
    server.client.start_profile(folder, PROFILED_STEPS)
    decoding.join()
    return summary(_trace(server, folder), PROFILED_STEPS)


def profile_prefill(server: Server, vocabulary: int, context: int, chunk: int) -> dict[str, Any]:
    """Kernels of one chunk of a cold prompt, the mean of all its chunks. Raises ServerError where no trace appears."""
    folder, chunks = Path(tempfile.mkdtemp()), -(-context // chunk)
    server.client.flush()
    server.client.start_profile(folder, chunks)
    server.client.generate(text("cold profile", context, vocabulary), 4, logprobs=False)  # a step after them ends it
    return summary(_trace(server, folder), chunks)


def _trace(server: Server, folder: Path) -> dict[str, Any]:
    """The trace that a server writes to the folder once it has done the steps asked for."""
    for _ in range(150):
        found = sorted(folder.rglob("*.trace.json*"))
        if found:
            time.sleep(1.0)  # until it is written to its end
            trace: dict[str, Any] = json.loads(gzip.open(found[0]).read())
            return trace
        time.sleep(0.2)
    raise ServerError(f"{server.url} wrote no profile to {folder}")


def plain_name(name: str) -> str:
    """A kernel's name without arguments and template parameters."""
    bare = re.sub(r"^(void|static) ", "", name.replace("(anonymous namespace)::", ""))
    return re.split(r"[<(]", bare, maxsplit=1)[0][-70:]


def summary(trace: dict[str, Any], steps: int) -> dict[str, Any]:
    """Per step: microseconds, how long any kernel ran, and each kernel's launches and time.

    Steps replay the same kernels, so totals are divided by the number of steps; what stands between steps counts.
    """
    events = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    events.sort(key=lambda e: e["ts"])
    if not events:
        return {"kernels": 0}
    span = events[-1]["ts"] + events[-1]["dur"] - events[0]["ts"]
    busy, end = 0.0, 0.0
    for e in events:  # kernels on several streams overlap
        busy += max(0.0, e["ts"] + e["dur"] - max(e["ts"], end))
        end = max(end, e["ts"] + e["dur"])
    count: dict[str, int] = defaultdict(int)
    total: dict[str, float] = defaultdict(float)
    for e in events:
        count[plain_name(e["name"])] += 1
        total[plain_name(e["name"])] += e["dur"]
    order = sorted(total, key=lambda name: -total[name])
    return {
        "steps": steps,
        "step_us": round(span / steps, 1),
        "busy_us": round(busy / steps, 1),
        "kernel_us": round(sum(total.values()) / steps, 1),
        "kernels": round(len(events) / steps, 1),
        "by_kernel": [[name, round(count[name] / steps, 2), round(total[name] / steps, 2)] for name in order],
    }
