"""What exact replay could save: prompt tokens that were computed although their pages stood, for want of a snapshot.

    python bench/standing.py [PRESET...] [--path MOONCAKE.jsonl] [--memory third] [--out FILE]

A window at a position is a function of the tokens before it: one of V4-Flash's 43 layers reaches 127 tokens back, so
5,461 tokens computed again give the state of any place whose pages stand. Of what a request misses there, that much
is computed either way; only what is beyond it can be saved. Simulator, no server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import workloads  # noqa: E402
from engine import Engine  # noqa: E402
from kept import Kept, told  # noqa: E402
from measure import memories, parts, writable  # noqa: E402
from simulate import Simulation, flash, limits_for  # noqa: E402
from workloads import PRESETS, Workload  # noqa: E402

from sglang_dsv4.console import positive, table  # noqa: E402
from sglang_dsv4.geometry import WINDOW, Geometry  # noqa: E402


def replayed_tokens(geometry: Geometry) -> int:
    """Tokens to compute again for the exact state at a place whose pages stand."""
    return geometry.num_layers * (WINDOW - 1)


def saved(standing: Sequence[int], replayed: int) -> int:
    """Tokens that replay saves, given what each request missed although its pages stood."""
    return sum(max(0, tokens - replayed) for tokens in standing)


def measure(workload: Workload, memory: str, share: float | None) -> dict[str, Any]:
    """One row of the result. Raises ValueError where a request does not fit."""
    geometry = flash()
    limits = limits_for(workload, memory, geometry, users=1, chunk=8192, share=share)
    rows = Simulation(workload, Engine(limits, geometry)).run(progress=True)
    standing, replayed = [row.standing for row in rows], replayed_tokens(geometry)
    prompt = sum(row.prompt for row in rows)
    return {
        "workload": workload.name,
        "memory": memory,
        "share": share,
        "limits": asdict(limits),
        "requests": len(rows),
        "prompt_tokens": prompt,
        "cached_tokens": sum(row.cached for row in rows),
        "standing_tokens": sum(standing),
        "requests_with_standing": sum(tokens > 0 for tokens in standing),
        "requests_that_gain": sum(tokens > replayed for tokens in standing),
        "replayed_tokens": replayed,
        "saved_tokens": saved(standing, replayed),
        "saved_part": round(saved(standing, replayed) / prompt, 5),
    }


def describe(results: Sequence[dict[str, Any]]) -> str:
    """A line a run."""
    keys = ("workload", "memory", "share", "prompt_tokens", "standing_tokens", "saved_tokens", "saved_part")
    return table(keys, [tuple("default" if row[key] is None else row[key] for key in keys) for row in results], left=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="*", default=[name for name in PRESETS if name != "mooncake"])
    parser.add_argument("--path", type=Path, help="recording for mooncake, which is then measured, too")
    parser.add_argument("--memory", type=memories, default=["third"], help="comma-separated, as for simulate.py")
    parser.add_argument("--share", type=parts, help="comma-separated parts for snapshots, instead of the default")
    parser.add_argument("--limit", type=positive, help="requests to take from the beginning")
    parser.add_argument("--out", type=writable, help="JSON file for the results")
    args = parser.parse_args()
    shares = args.share or [None]
    kept = Kept(args.out, command=" ".join(["python", "bench/standing.py", *sys.argv[1:]]))
    with told("standing", kept, describe):
        for name in [*args.workload, *(["mooncake"] if args.path else [])]:
            path = args.path if name == "mooncake" else None
            built = workloads.build(name, path=path, limit=args.limit)
            for memory in args.memory:
                for share in shares:
                    kept.add([measure(built, memory, share)])


if __name__ == "__main__":
    main()
