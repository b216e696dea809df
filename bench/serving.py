"""In-tree cache and ours at equal bytes on one GPU: cached tokens, time per token, prefill speed.

    python bench/serving.py MODEL --only sizes prefill decode long fresh [--dummy] [--profile] [--out FILE]
    python bench/serving.py CUT_MODEL --only chats --config configs/v4_flash.json

MODEL is a checkpoint folder, or with --dummy one that holds a config.json alone. All servers of a test stand on one GPU
at the same time and take turns. KV bytes are counted alike for both: pages, windows, slots and tails. How many tokens a
cache finds depends on its pools, not on what the layers compute: `chats` gives a model of cut depth the pools that the
bytes hold at the depth of --config.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import decode
import workloads
from chats import CHAT_TOKENS, RUNNING, WINDOW_RATIOS, Chats, curve
from measure import writable, write
from replay import replay, tokens_of
from rivals import (
    DEFAULT_RATIO,
    FULL_TOKENS,
    IN_TREE_FULL,
    IN_TREE_WINDOW,
    GpuLaunch,
    Pools,
    card,
    config_of,
    geometry,
    in_tree_bytes,
    in_tree_tokens,
    pools_for,
    together,
    vocabulary_of,
)

from sglang_dsv4.console import positive, run_program
from sglang_dsv4.serving import Client, Server, ServerError, exit_on_signals
from sglang_dsv4.workers import Workers

OURS, IN_TREE = "ours", "in_tree"
SIDE_BY_SIDE = ("prefill", "decode", "long", "fresh")  # served by one pair of servers
TESTS = ("sizes", *SIDE_BY_SIDE, "distinct", "chats", "drafts")
FRESH, FRESH_RUNS = 32, 3  # requests of `fresh`, and how often each server answers them
# In-tree with its multi-token prediction: one draft token a step.
DRAFTS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)


def rows_of_sizes(config: Path) -> Iterator[dict[str, Any]]:
    """Bytes a token: arithmetic, no server."""
    for indexer in ("fp4", "fp8"):
        g = geometry(config, indexer)
        mine = float(g.token_alloc_bytes)
        theirs = IN_TREE_FULL + DEFAULT_RATIO * IN_TREE_WINDOW
        name = f"{indexer} indexer keys"
        yield {"test": f"bytes a cached token, {name}", OURS: mine, IN_TREE: theirs, "unit": "B"}
        yield {"test": f"cached tokens per GB, {name}", OURS: 1e9 / mine, IN_TREE: 1e9 / theirs, "unit": "tokens"}
        fit = (64e9 - g.slot_bytes * 5 * RUNNING - g.tail_bytes(RUNNING)) / mine
        rival = in_tree_tokens(int(64e9), DEFAULT_RATIO, RUNNING)
        test = f"tokens that fit in 64 GB, {name}, no snapshots"
        yield {"test": test, OURS: int(fit), IN_TREE: rival, "unit": "tokens"}
        yield {"test": f"bytes a snapshot, {name}", OURS: g.slot_bytes, IN_TREE: None, "unit": "B"}


@dataclass
class Bench:
    """Starts servers, keeps rows.

    base    what both servers have in common
    config  where the bytes of `chats` are taken from
    """

    base: GpuLaunch
    config: Path
    logs: Path
    repeats: int
    save: Callable[[], None]

    def __post_init__(self) -> None:
        self.vocabulary = vocabulary_of(self.base.model)
        self.rows: list[dict[str, Any]] = []
        self.starts: dict[str, float] = {}
        self.profiles: dict[str, Any] = {}

    def chats(self, counts: list[int], ratios: list[float], scale: int) -> None:
        """Cached tokens of the later turns against the number of chats, in `scale` times the in-tree pool's bytes."""
        budget = scale * in_tree_bytes(FULL_TOKENS, DEFAULT_RATIO, RUNNING)
        pools = pools_for(geometry(self.config), budget, RUNNING)
        launches = {f"{OURS} x{scale}": self.base.over(pools, RUNNING)}
        for ratio in ratios:
            tokens = in_tree_tokens(budget, ratio, RUNNING)
            launches[f"in-tree x{scale} ratio {ratio}"] = self.base.in_tree(tokens, ratio, RUNNING)
        # No times are taken here, and many servers start faster without graphs.
        launches = {name: replace(launch, graphs=False) for name, launch in launches.items()}
        with together(launches, self.logs, self.starts) as servers, Workers(len(servers)) as pool:
            curves = pool.gather(lambda s: curve(s[1].client, s[0], counts, self.vocabulary), servers.items())
        mine, rivals = curves[0], dict(zip(ratios, curves[1:], strict=True))
        for count in counts:
            self.rows.append(chat_row(count, budget, pools, mine[count], {r: c[count] for r, c in rivals.items()}))

    def side_by_side(self, tests: set[str], contexts: list[int], batches: list[int], *, profiled: bool) -> None:
        """Prefill, decode steps over one shared prefix, long conversations; kernel profiles on request."""
        running, tokens = max(batches), 2 * max(contexts) + 256 * 1024
        launches = {
            OURS: self.base.over(Pools(tokens, 5 * running + 256, 0), running),
            IN_TREE: self.base.in_tree(tokens, 0.3, running),
        }
        with together(launches, self.logs, self.starts) as servers:
            clients = {name: server.client for name, server in servers.items()}
            if "prefill" in tests:
                rates = decode.prefill_rates(clients, self.vocabulary, self.repeats)
                self.pair("prefill, chunks of 8,192, context 32,768", rates, "tokens/s")
                for name, server in servers.items() if profiled else ():
                    chunk = decode.profile_prefill(server, self.vocabulary, 32768, 8192)
                    self.profiles[f"{name}, prefill chunk of 8,192 of 32,768"] = chunk
                    self.save()
            if "decode" in tests:
                self.decode(servers, contexts, batches, profiled=profiled)
            if "long" in tests:
                test = "8 chats of 32,768 tokens, 3 turns: cached tokens, median time to first token"
                rows = {
                    name: decode.long_turns(client, self.vocabulary, 8, 32768, 3) for name, client in clients.items()
                }
                self.rows.append({"test": test, **rows})
                self.save()
            if "fresh" in tests:
                self.fresh(clients)

    def fresh(self, clients: dict[str, Client]) -> None:
        """What the cache costs where nothing is found: the preset without any reuse, replayed closed loop."""
        stream = workloads.build("no-reuse", limit=FRESH)
        source = tokens_of(clients[OURS], (1000, self.vocabulary))
        tokens = sum(stream.lengths()) + sum(request.answer for request in stream.requests)
        rates: dict[str, list[float]] = {name: [] for name in clients}
        first: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(FRESH_RUNS):
            for name, client in clients.items():
                found = replay(client, stream, users=RUNNING, speed=None, source=source, system=name)
                rates[name].append(tokens / found["seconds"])
                first[name].append(found["ttft_s"]["p50"])
        test = f"{FRESH} prompts that share nothing, {RUNNING} at a time"
        self.pair(f"{test}: prompt and answer tokens", rates, "tokens/s")
        self.pair(f"{test}: median time to the first token", first, "s")

    def decode(self, servers: dict[str, Server], contexts: list[int], batches: list[int], *, profiled: bool) -> None:
        for cell, times in decode.shared_cells(servers, self.vocabulary, contexts, batches, self.repeats):
            self.pair(f"decode step, {cell}", times, "ms")
            batch, _, context = cell.split()[:3]
            if profiled and int(context) == max(contexts):
                prompts = decode.shared_prompts(int(context), int(batch), self.vocabulary)
                for name, server in servers.items():
                    self.profiles[f"{name}, {cell}"] = decode.profile(server, prompts)
                    self.save()

    def distinct(self, context: int, batch: int) -> None:
        """Decode steps where every request has its own context."""
        tokens = (context + decode.own_steps(self.repeats) + 512) * batch
        launches = {
            OURS: self.base.over(Pools(tokens, 5 * batch + 128, 0), batch),
            IN_TREE: self.base.in_tree(tokens, DEFAULT_RATIO, batch),
        }
        with together(launches, self.logs, self.starts) as servers:
            cell, times = decode.distinct_cell(servers, self.vocabulary, context, batch, self.repeats)
            self.pair(f"decode step, {cell}", times, "ms")

    def drafts(self, context: int, batches: list[int]) -> None:
        """Decode steps of the in-tree server with multi-token prediction, which ours has not."""
        running = max(batches)
        launch = self.base.in_tree(context + 64 * 1024, 0.3, running)
        launch = replace(launch, extra_args=(*launch.extra_args, *DRAFTS))
        with together({"in_tree with drafts": launch}, self.logs, self.starts) as servers:
            (server,) = servers.values()
            decode.cache_prefix(server, context, self.vocabulary)
            for batch in batches:
                prompts = decode.shared_prompts(context, batch, self.vocabulary)
                found = decode.drafted_steps(server, prompts, 200)
                test = f"decode step with 1 draft token, {batch} x {context} shared"
                middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
                self.rows.append({"test": test, OURS: None, IN_TREE: middle, "unit": "ms, tokens"})
                self.save()
                print(f"  {test}: {middle}", flush=True)

    def pair(self, test: str, values: dict[str, list[float]], unit: str) -> None:
        a, b = statistics.median(values[OURS]), statistics.median(values[IN_TREE])
        self.rows.append({"test": test, OURS: a, IN_TREE: b, "ratio": round(a / b, 4), "unit": unit, "all": values})
        self.save()
        print(f"  {test}: {a:.3f} against {b:.3f} {unit}, {a / b:.3f}", flush=True)


def chat_row(count: int, budget: int, pools: Pools, mine: Chats, rivals: dict[float, Chats]) -> dict[str, Any]:
    default = next(iter(rivals.values()))
    return {
        "test": f"{count} chats of {CHAT_TOKENS} in {budget} B: cached tokens of turns 2 and 3",
        OURS: mine.cached,
        IN_TREE: default.cached,
        "in_tree_best": max(r.cached for r in rivals.values()),
        "in_tree_by_ratio": {str(ratio): r.cached for ratio, r in rivals.items()},
        "prompt_tokens": mine.prompt,
        "pools": {"tokens": pools.tokens, "slots": pools.slots},
        "unit": "tokens",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dummy", action="store_true", help="random weights over config.json alone")
    parser.add_argument("--config", type=Path, help="config.json whose bytes `sizes` and `chats` count")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--chats", type=positive, nargs="+", default=[60, 120, 240, 500, 1000])
    parser.add_argument("--ratios", type=float, nargs="+", default=list(WINDOW_RATIOS))
    parser.add_argument("--scale", type=positive, nargs="+", default=[1, 8], help="times the bytes of the in-tree pool")
    parser.add_argument("--contexts", type=positive, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 16, 64])
    cells = [(64, 32768), (16, 131072)]
    parser.add_argument("--own", type=cell, nargs="+", default=cells, help="BATCHxCONTEXT of `distinct`")
    parser.add_argument(
        "--repeats", type=positive, default=5, help="runs of each server in turn, of which the median counts"
    )
    parser.add_argument("--profile", action="store_true", help="kernel profiles into the results")
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallel ranks of every server")
    parser.add_argument("--mem-share", type=float, default=0.9, help="--mem-fraction-static of every server")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "serving")
    parser.add_argument("--out", type=writable)
    options = parser.parse_args()
    exit_on_signals()
    extra = ("--load-format", "dummy") if options.dummy else ()

    def save() -> None:
        """Rows are written as they come: a run that is stopped keeps what it measured."""
        write_rows(bench, options)

    try:
        base = GpuLaunch(options.model, mem_share=options.mem_share, tp=options.tp, extra_args=extra)
        bench = Bench(base, options.config or options.model, options.logs, options.repeats, save)
        try:
            run(bench, options)
        finally:
            save()
    except (ServerError, OSError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 1
    return 0


def cell(text: str) -> tuple[int, int]:
    """BATCHxCONTEXT."""
    batch, _, context = text.partition("x")
    return positive(batch), positive(context)


def run(bench: Bench, options: argparse.Namespace) -> None:
    if "sizes" in options.only:
        bench.rows += rows_of_sizes(bench.config)
    if pairs := set(options.only) & set(SIDE_BY_SIDE):
        bench.side_by_side(pairs, options.contexts, options.batches, profiled=options.profile)
    if "distinct" in options.only:
        for batch, context in options.own:
            bench.distinct(context, batch)
    if "drafts" in options.only:
        bench.drafts(min(options.contexts), options.batches)
    if "chats" in options.only:
        for scale in options.scale:
            bench.chats(options.chats, options.ratios, scale)


def write_rows(bench: Bench, options: argparse.Namespace) -> None:
    if not options.out:
        return
    raw = config_of(options.model)
    shape = {k: raw.get(k) for k in ("num_hidden_layers", "n_routed_experts", "hidden_size", "num_attention_heads")}
    result = {
        "card": card(),
        "commit": options.commit,
        "command": " ".join(sys.argv),
        "geometry": shape,
        "start_s": bench.starts,
        "rows": bench.rows,
        "profiles": bench.profiles,
    }
    write(options.out, result)


if __name__ == "__main__":
    run_program("serving", main)
