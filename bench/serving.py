"""In-tree cache and ours at equal bytes on one GPU: cached tokens, time per token, prefill speed.

    python bench/serving.py MODEL [--only chats ...] [--out bench/results/serving.json]

MODEL is a checkpoint folder, or with --dummy one that holds a config.json alone. Servers run one after another; each is
started once for all tests that it can serve. KV bytes are counted alike for both: pages, windows, slots and tails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rivals import IN_TREE_PAGE, START_TIMEOUT_S, GpuLaunch, Pools, card, geometry, pools_for, text

from sglang_dsv4.serving import Client, Server

CHAT_TOKENS, LATER_TOKENS, ANSWER_TOKENS, TURNS = 2048, 64, 32, 3
FULL_TOKENS = 300_000  # the in-tree pool whose bytes both get
RUNNING = 16
WINDOW_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # in-tree's default first
DECODE_STEPS, REPEATS = 128, 5

# In-tree bytes of V4-Flash: per token of the full pool and of the window pool, and per request row (SGLang 0.5.23).
IN_TREE_FULL, IN_TREE_WINDOW, IN_TREE_ROW = 3899.25, 31875.0, 10_485_760


@dataclass(frozen=True)
class Chats:
    """What a chat run saw in turns 2 and 3."""

    cached: int
    prompt: int
    seconds: float


def in_tree_bytes(tokens: int, ratio: float, running: int) -> int:
    """KV bytes that the in-tree pools of a V4-Flash geometry take."""
    return int(tokens * IN_TREE_FULL + tokens * ratio * IN_TREE_WINDOW + running * IN_TREE_ROW)


def in_tree_tokens(budget: int, ratio: float, running: int) -> int:
    """Tokens of the full pool, whole pages, that `budget` bytes hold at a window ratio."""
    per_token = IN_TREE_FULL + ratio * IN_TREE_WINDOW
    return int((budget - running * IN_TREE_ROW) / per_token) // IN_TREE_PAGE * IN_TREE_PAGE


def chat_turns(
    client: Client, chats: int, vocabulary: int, *, tokens: int = CHAT_TOKENS, users: int = RUNNING
) -> Chats:
    """`chats` conversations, every turn of all before the next turn of any; `users` requests at a time."""
    history = [text(f"chat {i}", tokens, vocabulary) for i in range(chats)]
    cached = prompt = 0
    started = time.perf_counter()
    for turn in range(TURNS):
        with ThreadPoolExecutor(users) as pool:
            answers = list(pool.map(lambda ids: client.generate(ids, ANSWER_TOKENS, logprobs=False), history))
        for i, answer in enumerate(answers):
            if turn:
                cached += answer.cached_tokens
                prompt += answer.prompt_tokens
            more = text(f"chat {i} turn {turn}", LATER_TOKENS, vocabulary)
            history[i] = [*history[i], *answer.output_ids, *more]
    return Chats(cached, prompt, time.perf_counter() - started)


def batch_seconds(client: Client, prompts: list[list[int]], steps: int) -> float:
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True},
    }
    started = time.perf_counter()
    client.post("/generate", body)
    return time.perf_counter() - started


def token_ms(client: Client, prompts: list[list[int]]) -> list[float]:
    """Milliseconds a decode step of the whole batch, REPEATS times: the prompts' caches are warm."""
    batch_seconds(client, prompts, 2)
    out = []
    for _ in range(REPEATS):
        short, long = (batch_seconds(client, prompts, steps) for steps in (1, 1 + DECODE_STEPS))
        out.append((long - short) / DECODE_STEPS * 1e3)
    return out


def decode_cells(client: Client, vocabulary: int, contexts: list[int], batches: list[int]) -> dict[str, list[float]]:
    """Decode step times with one shared prefix, per batch and context."""
    cells = {}
    for context in contexts:
        prefix = text(f"prefix {context}", context, vocabulary)
        client.flush()
        client.generate(prefix, 1, logprobs=False)
        for batch in batches:
            prompts = [[*prefix, *text(f"tail {i}", 8, vocabulary)] for i in range(batch)]
            cells[f"{batch} x {context} shared"] = token_ms(client, prompts)
    return cells


def prefill_rate(client: Client, vocabulary: int, context: int = 32768) -> list[float]:
    """Prompt tokens a second of one cold prompt, REPEATS times."""
    out = []
    for i in range(REPEATS):
        client.flush()
        answer = client.generate(text(f"cold {i}", context, vocabulary), 1, logprobs=False)
        out.append(context / answer.first_token_s)
    return out


def rows_of_sizes(model: Path) -> Iterator[dict[str, Any]]:
    """Bytes a token: arithmetic, no server."""
    for indexer in ("fp4", "fp8"):
        g = geometry(model, indexer)
        mine = float(g.token_alloc_bytes)
        theirs = IN_TREE_FULL + WINDOW_RATIOS[0] * IN_TREE_WINDOW
        name = f"{indexer} indexer keys"
        yield {"test": f"bytes a cached token, {name}", "ours": mine, "in_tree": theirs, "unit": "B"}
        yield {"test": f"cached tokens per GB, {name}", "ours": 1e9 / mine, "in_tree": 1e9 / theirs, "unit": "tokens"}
        yield {"test": f"bytes a snapshot, {name}", "ours": g.slot_bytes, "in_tree": None, "unit": "B"}


class Bench:
    """Starts servers, keeps rows."""

    def __init__(self, model: Path, logs: Path, extra: tuple[str, ...]) -> None:
        self.model = model
        self.logs = logs
        self.extra = extra
        self.vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        self.rows: list[dict[str, Any]] = []
        self.starts: dict[str, float] = {}

    def serve(self, name: str, launch: GpuLaunch, use: Callable[[Client], Any]) -> Any:
        started = time.monotonic()
        log = self.logs / f"{name.replace(' ', '_')}.log"
        with Server(replace(launch, extra_args=(*launch.extra_args, *self.extra)), log, timeout=START_TIMEOUT_S) as s:
            self.starts[name] = round(time.monotonic() - started, 1)
            print(f"{name}: ready after {self.starts[name]} s", flush=True)
            return use(s.client)

    def ours(self, pools: Pools, running: int, batch: int) -> GpuLaunch:
        return GpuLaunch(
            self.model,
            max_total_tokens=pools.tokens,
            max_mamba_cache_size=pools.slots,
            max_running_requests=running,
            max_batch=batch,
        )

    def theirs(self, tokens: int, ratio: float, running: int, batch: int) -> GpuLaunch:
        flags = ("--swa-full-tokens-ratio", str(ratio))
        return GpuLaunch(
            self.model,
            plugin=False,
            max_total_tokens=tokens,
            max_running_requests=running,
            max_batch=batch,
            extra_args=flags,
        )

    def chats(self, counts: list[int], ratios: tuple[float, ...], scale: int) -> None:
        """Cached tokens of the later turns against the number of chats, in `scale` times the in-tree pool's bytes."""
        budget = scale * in_tree_bytes(FULL_TOKENS, WINDOW_RATIOS[0], RUNNING)

        def run(client: Client) -> dict[int, Chats]:
            seen = {}
            for count in counts:
                client.flush()
                seen[count] = chat_turns(client, count, self.vocabulary)
                print(f"  {count} chats: {seen[count]}", flush=True)
            return seen

        pools = pools_for(self.model, budget, RUNNING)
        mine = self.serve(f"ours chats x{scale}", self.ours(pools, RUNNING, RUNNING), run)
        rivals = {}
        for ratio in ratios:
            launch = self.theirs(in_tree_tokens(budget, ratio, RUNNING), ratio, RUNNING, RUNNING)
            rivals[ratio] = self.serve(f"in-tree chats x{scale} ratio {ratio}", launch, run)
        for count in counts:
            self.rows.append(
                {
                    "test": f"{count} chats of {CHAT_TOKENS} in {budget} B: cached tokens of turns 2 and 3",
                    "ours": mine[count].cached,
                    "in_tree": rivals[ratios[0]][count].cached,
                    "in_tree_best": max(r[count].cached for r in rivals.values()),
                    "in_tree_by_ratio": {str(ratio): r[count].cached for ratio, r in rivals.items()},
                    "prompt_tokens": mine[count].prompt,
                    "seconds": mine[count].seconds,
                    "unit": "tokens",
                }
            )

    def speed(self, contexts: list[int], batches: list[int]) -> None:
        """Decode step times and prefill rate."""

        def run(client: Client) -> tuple[dict[str, list[float]], list[float]]:
            prefill_rate(client, self.vocabulary, 2048)  # compiles what the first prompt needs
            return decode_cells(client, self.vocabulary, contexts, batches), prefill_rate(client, self.vocabulary)

        running, tokens = max(batches), 2 * max(contexts) + 64 * 1024
        pools = Pools(tokens, 6 * running + 64, 0)
        mine, my_rate = self.serve("ours speed", self.ours(pools, running, running), run)
        theirs, their_rate = self.serve("in-tree speed", self.theirs(tokens, 0.3, running, running), run)
        for cell in mine:
            self.row(f"decode step, {cell}", mine[cell], theirs[cell], "ms")
        self.row("prefill, chunks of 8,192, context 32,768", my_rate, their_rate, "tokens/s")

    def row(self, test: str, mine: list[float], theirs: list[float], unit: str) -> None:
        a, b = statistics.median(mine), statistics.median(theirs)
        self.rows.append({"test": test, "ours": a, "in_tree": b, "ratio": a / b, "unit": unit, "all": [mine, theirs]})
        print(f"  {test}: {a:.3f} against {b:.3f} {unit}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dummy", action="store_true", help="random weights over config.json alone")
    parser.add_argument("--only", nargs="+", choices=("sizes", "chats", "speed"), default=["sizes", "chats", "speed"])
    parser.add_argument("--chats", type=int, nargs="+", default=[60, 120, 240, 500, 1000])
    parser.add_argument("--ratios", type=float, nargs="+", default=list(WINDOW_RATIOS))
    parser.add_argument("--scale", type=int, nargs="+", default=[1, 8], help="times the bytes of the in-tree pool")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = Bench(options.model, options.logs, ("--load-format", "dummy") if options.dummy else ())
    if "sizes" in options.only:
        bench.rows += rows_of_sizes(options.model)
    if "chats" in options.only:
        for scale in options.scale:
            bench.chats(options.chats, tuple(options.ratios), scale)
    if "speed" in options.only:
        bench.speed(options.contexts, options.batches)
    raw = json.loads((options.model / "config.json").read_text())
    shape = {k: raw[k] for k in ("num_hidden_layers", "n_routed_experts", "hidden_size", "num_attention_heads")}
    result = {
        "card": card(),
        "commit": options.commit,
        "command": " ".join(sys.argv),
        "geometry": shape,
        "start_s": bench.starts,
        "rows": bench.rows,
    }
    print(json.dumps(result["rows"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
