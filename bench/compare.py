"""Ours and SGLang's in-tree DeepSeek-V4 on one GPU at equal KV bytes: what each finds of a workload and how fast.

    python bench/compare.py CUT_MODEL --config configs/v4_flash.json --dummy --out compare.json
    python bench/compare.py CUT_MODEL --config configs/v4_flash.json --dummy --out compare.json --resume

All servers stand on the GPU at the same time; one of them works at a time. Each preset is replayed closed loop against
each server (`bench/replay.py`), in-tree once for each window ratio. KV bytes are counted alike for all, at the depth of
--config: a model of cut depth gets the pools that the bytes hold at full depth. Rows are saved as they come, as
FILE and as a Markdown page beside it; --resume measures only those that FILE lacks.

A preset is replayed twice against each server, the cache flushed between, and the second time counts: at new numbers of
tokens kernels are still compiled, a second each, and as servers share what is compiled the first one would pay for all.

A preset is NAME, NAME@FACTOR (all lengths times FACTOR), NAME:N (its first N requests) or both, NAME@FACTOR:N.
--answers bounds what is generated: what a cache finds hangs on prompts, and long answers take most of the time.

Servers run without tokenizer unless --tokenizer is given. Ours then knows no role tokens, and so not where a system
prompt ends: the third request that shares one finds it instead of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import report  # noqa: E402
import workloads  # noqa: E402
from measure import save_text, writable, write  # noqa: E402
from replay import replay, tokens_of  # noqa: E402
from rivals import (  # noqa: E402
    DEFAULT_RATIO,
    FULL_TOKENS,
    GpuLaunch,
    card,
    geometry,
    in_tree_bytes,
    in_tree_tokens,
    pools_for,
    same_kernels,
    together,
    vocabulary_of,
)

from sglang_dsv4.console import positive, run_program  # noqa: E402
from sglang_dsv4.serving import Client, Launch, Server, ServerError, exit_on_signals  # noqa: E402

PRESETS = ("short-chats", "coding-agent", "shared-system-prompt", "no-reuse")
OTHER_RATIOS = (0.05, 0.2)
LEAST_FACTOR, MOST_FACTOR = 0.001, 100.0  # of a preset's lengths
OURS = "ours"
PASSES = 2  # of a preset against a server; the last one counts


def contestants(options: argparse.Namespace) -> tuple[dict[str, Launch], dict[str, dict[str, Any]]]:
    """How to start each system, and what its rows say of its memory."""
    budget = in_tree_bytes(options.tokens, DEFAULT_RATIO, options.users)
    g = geometry(options.config or options.model, os.environ.get("SGLANG_DSV4_INDEXER", "fp4"))
    pools = pools_for(g, budget, options.users)
    base = GpuLaunch(
        options.model,
        mem_share=options.mem_share,
        tokenizer=options.tokenizer,
        extra_args=("--load-format", "dummy") if options.dummy else (),
    )
    launches: dict[str, Launch] = {OURS: base.over(pools, options.users)}
    memory: dict[str, dict[str, Any]] = {
        OURS: {"kv_bytes": pools.bytes, "pools": {"tokens": pools.tokens, "slots": pools.slots}}
    }
    for ratio in dict.fromkeys((DEFAULT_RATIO, *options.ratios)):
        tokens = in_tree_tokens(budget, ratio, options.users)
        name = f"in-tree, ratio {ratio}{' (default)' if ratio == DEFAULT_RATIO else ''}"
        launches[name] = base.in_tree(tokens, ratio, options.users)
        pool = {"tokens": tokens, "window_tokens": int(tokens * ratio)}
        memory[name] = {"kv_bytes": in_tree_bytes(tokens, ratio, options.users), "pools": pool, "ratio": ratio}
    return launches, memory


def workload(preset: str, chats: int | None, answers: int | None, path: Path | None) -> workloads.Workload:
    """The stream that NAME[@FACTOR][:N] means, under that name. Raises ValueError, one line.

    answers  most tokens that a request generates
    """
    found = re.fullmatch(r"([^@:]+)(?:@([0-9]*\.?[0-9]+))?(?::([0-9]+))?", preset)
    if found is None or found[1] not in workloads.PRESETS:
        raise ValueError(f"{preset!r} is not NAME[@FACTOR][:N] of one of {', '.join(workloads.PRESETS)}")
    factor, limit = float(found[2] or 1), int(found[3]) if found[3] else None
    if not LEAST_FACTOR <= factor <= MOST_FACTOR or limit == 0:
        raise ValueError(f"{preset!r}: FACTOR lies between {LEAST_FACTOR} and {MOST_FACTOR:.0f}, N is at least 1")
    built = workloads.build(found[1], scale=factor, path=path, chats=chats, limit=limit)
    if answers is not None:
        built = replace(built, requests=tuple(replace(r, answer=min(r.answer, answers)) for r in built.requests))
    return replace(built, name=preset)


class Bench:
    """Replays presets against servers; keeps a row for each pair."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ids = (min(1000, vocabulary_of(options.model) // 2), vocabulary_of(options.model))
        self.rows: list[dict[str, Any]] = []
        self.starts: dict[str, float] = {}
        self.kernels: dict[str, Any] = {}
        names = ("users", "tokens", "chats", "answers")
        self.setting = {name: getattr(options, name) for name in names} | {"passes": PASSES}
        if options.resume and options.out.exists():
            self.take_over(options.out)

    def take_over(self, path: Path) -> None:
        """The rows of an earlier run. Raises ValueError, one line, where they do not belong beside new ones."""
        try:
            kept = json.loads(path.read_text())
            setting, runs = kept.get("setting"), kept.get("runs", ())
            rows = [row for row in runs if "stopped" not in row]
            known = all({"workload", "system", "commit"} <= set(row) for row in rows)
            self.starts, self.kernels = dict(kept.get("start_s", {})), dict(kept.get("kernels", {}))
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"{path} is not a result of this benchmark") from None
        if setting != self.setting:
            raise ValueError(f"{path} was measured with {setting}, not with {self.setting}")
        if not known:
            raise ValueError(f"{path} has rows without workload, system or commit")
        self.rows = rows

    def run(self) -> None:
        """Raises ServerError where a server does not start or has died."""
        launches, memory = contestants(self.options)
        options = self.options
        built = [workload(preset, options.chats, options.answers, options.path) for preset in options.presets]
        missing = [(w, name) for w in built for name in launches if not self.has(w.name, name)]
        needed = {name: launch for name, launch in launches.items() if any(name == other for _, other in missing)}
        if not needed:
            return
        with together(needed, self.options.logs, self.starts) as servers:
            self.kernels = same_kernels(servers)
            for stream, name in missing:
                row = self.row(stream, name, servers[name])
                self.rows.append({**row, **memory[name], "commit": options.commit})
                self.save()
                print(line(self.rows[-1]), flush=True)

    def has(self, preset: str, system: str) -> bool:
        return any(row["workload"] == preset and row["system"] == system for row in self.rows)

    def replay(self, client: Client, stream: workloads.Workload, system: str) -> dict[str, Any]:
        source = tokens_of(client, self.ids)
        return replay(client, stream, users=self.options.users, speed=None, source=source, system=system)

    def row(self, stream: workloads.Workload, name: str, server: Server) -> dict[str, Any]:
        """A preset that a server cannot take is a row that says so; a server that died ends the run."""
        try:
            passes = [self.replay(server.client, stream, name) for _ in range(PASSES)]
        except ServerError as error:
            if server.process.poll() is not None:
                raise ServerError(f"{name} died during {stream.name}: {server.last_words()}") from None
            return {"workload": stream.name, "system": name, "stopped": str(error)}
        result = {key: value for key, value in passes[-1].items() if key != "url"}
        return {**result, "cached_tokens_of_passes": [each["cached_tokens"] for each in passes]}

    def save(self) -> None:
        options = self.options
        if not options.out:
            return
        result = {
            "card": card(),
            "commit": options.commit,
            "command": " ".join(["python", "bench/compare.py", *sys.argv[1:]]),
            "setting": self.setting,
            "kernels": self.kernels,
            "start_s": self.starts,
            "runs": self.rows,
        }
        write(options.out, result)
        save_text(options.out.with_suffix(".md"), page(self.rows))


def best(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each preset ours, in-tree at its default, and in-tree at the other ratio that found most."""
    chosen: list[Mapping[str, Any]] = []
    for preset in dict.fromkeys(row["workload"] for row in rows):
        of_preset = [row for row in rows if row["workload"] == preset and "stopped" not in row]
        chosen += [row for row in of_preset if row.get("ratio") in (None, DEFAULT_RATIO)]
        others = [row for row in of_preset if row.get("ratio") not in (None, DEFAULT_RATIO)]
        chosen += sorted(others, key=lambda row: row["cached_tokens"])[-1:]
    return chosen


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ours beside in-tree's default and best, then everything as `report.py` shows it."""
    head = (
        *(
            "preset",
            "system",
            "KV bytes",
            "cached",
            "of prompt",
            "first token p50, p95 ms",
            "between tokens p50, p95 ms",
        ),
        *("prompt tokens/s", "answer tokens/s"),
    )
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for row in best(rows):
        times = [f"{row[key].get(p, 0) * 1e3:.1f}" for key in ("ttft_s", "inter_token_s") for p in ("p50", "p95")]
        cells = (row["workload"], row["system"], f"{row['kv_bytes']:,}", f"{row['cached_tokens']:,}", row["hit_rate"])
        rates = (row["prompt_tokens_per_s"], row["answer_tokens_per_s"])
        lines.append(" | ".join(map(str, (*cells, ", ".join(times[:2]), ", ".join(times[2:]), *rates))))
    short = "\n".join(f"| {line} |" for line in lines)
    stopped = [f"* {r['workload']}, {r['system']}: {r['stopped']}" for r in rows if "stopped" in r]
    done = [dict(row) for row in rows if "stopped" not in row]
    return "\n\n".join(["# Equal KV bytes", short, *stopped, report.markdown(done, [])])


def line(row: Mapping[str, Any]) -> str:
    told = f"{row['workload']}, {row['system']}: "
    if "stopped" in row:
        return told + row["stopped"]
    first, between = row["ttft_s"], row["inter_token_s"]
    return told + (
        f"{row['cached_tokens']} of {row['prompt_tokens']} cached, "
        f"first token {first.get('p50')} and {first.get('p95')} s, "
        f"between tokens {between.get('p50')} and {between.get('p95')} s, {row['answer_tokens_per_s']} answer tokens/s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder, or with --dummy one with a config.json alone")
    parser.add_argument("--config", type=Path, help="config.json whose bytes are counted (the model's)")
    parser.add_argument("--dummy", action="store_true", help="random weights over config.json alone")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="see above")
    parser.add_argument("--users", type=positive, default=16, help="requests in flight, and most that run (16)")
    parser.add_argument(
        "--tokens", type=positive, default=FULL_TOKENS, help="of the in-tree pool whose bytes all get (300,000)"
    )
    parser.add_argument("--ratios", type=float, nargs="*", default=list(OTHER_RATIOS), help="besides in-tree's default")
    parser.add_argument("--chats", type=positive, help="number of chats of short-chats (120)")
    parser.add_argument("--answers", type=positive, help="most tokens that a request generates (the preset's)")
    parser.add_argument("--path", type=Path, help="recording for mooncake")
    parser.add_argument("--mem-share", type=float, default=0.9, help="--mem-fraction-static of every server")
    parser.add_argument("--tokenizer", action="store_true", help="servers load the checkpoint's tokenizer")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out, measure the others")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "compare")
    parser.add_argument("--out", type=writable, help="JSON file for the rows; a Markdown page is written beside it")
    options = parser.parse_args()
    exit_on_signals()
    if options.resume and not options.out:
        parser.error("--resume needs --out")
    bench = None
    try:
        bench = Bench(options)
        bench.run()
    except (ServerError, ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    finally:
        if bench is not None and bench.rows:
            bench.save()
    return 0


if __name__ == "__main__":
    run_program("compare", main)
