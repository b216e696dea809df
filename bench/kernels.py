"""Times the CUDA kernels: microseconds, bytes, GB/s, share of the copy bandwidth measured in the same run, rivals.

    python bench/kernels.py [--only TEXT] [--out bench/results/kernels.json]

Each case is captured once as a CUDA graph over several input sets that together exceed the L2 cache and replayed;
the median replay counts. A rival is timed in five alternated rounds. The copy of equally many bytes shows what of
a short kernel's time is the launch itself.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import pkgutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import kernel_cases  # noqa: E402
from kernel_cases.base import (  # noqa: E402
    Case,
    Timer,
    copy_bandwidth,
    copy_us,
    first_line,
    select,
    skip_slow_rivals,
    warm_up,
)
from measure import save_text, writable  # noqa: E402

from sglang_dsv4.console import run_program  # noqa: E402

ROUNDS = 5


def commit() -> str:
    """The commit that is measured, marked where the tree differs from it; "unknown" outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return (head.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")


def measure(case: Case, bandwidth: float, device: torch.device) -> dict[str, Any]:
    ours = Timer(case.run, case.sets)
    rival, not_run = None, list(case.not_run)
    if case.rival_run:
        try:
            rival = Timer(case.rival_run, case.sets)
        except Exception as error:  # a rival that does not run here must not cost our own figure
            not_run.append(f"{case.rival}: {first_line(error)}")
    us, rival_us = [], []
    for _ in range(ROUNDS):
        us.append(ours.median_us())
        if rival:
            rival_us.append(rival.median_us())
    best = statistics.median(us)
    result: dict[str, Any] = {
        "op": case.op,
        "shape": case.shape,
        "us": round(best, 2),
        "bytes": case.bytes,
        "gbps": round(case.bytes / best / 1e3, 1),
        "share_of_copy": round(case.bytes / (best * 1e-6) / bandwidth, 3),
        "copy_us": round(copy_us(case.bytes, device), 2),
        "rival": case.rival if rival else None,
        "rival_us": round(statistics.median(rival_us), 2) if rival_us else None,
        "not_run": not_run,
        "spread_us": [round(min(us), 2), round(max(us), 2)],
    }
    if case.flops:
        result["tflops"] = round(case.flops / best / 1e6, 1)
    return result


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Of earlier runs. Raises ValueError for a file of something else."""
    if not out.is_file() or not out.stat().st_size:
        return []
    rows = json.loads(out.read_text())
    if not isinstance(rows, list) or not all(isinstance(r, dict) and {"op", "shape"} <= r.keys() for r in rows):
        raise ValueError("no list of cases")
    return rows


def keep(out: Path, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Puts a case's row among all, in place of the one it had, and these into the file: nothing that ends the run loses
    figures. Raises OSError."""
    rows[:] = [r for r in rows if (r["op"], r["shape"]) != (row["op"], row["shape"])] + [row]
    save_text(out, json.dumps(rows, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="case modules, or text in 'op shape'")
    parser.add_argument("--out", type=writable, default=ROOT / "bench" / "results" / "kernels.json")
    parser.add_argument("--no-slow-rivals", action="store_true", help="leave out rivals that compile at first use")
    parser.add_argument("--commit", default=None, help="commit to record where there is no checkout")
    args = parser.parse_args()
    try:
        rows = rows_of(args.out)
    except (OSError, ValueError, RecursionError) as error:
        told = f"{args.out} cannot take rows beside what it holds ({error}): name another --out"
        parser.exit(2, f"bench/kernels.py: {told}\n")
    if not torch.cuda.is_available():
        parser.exit(2, "bench/kernels.py: no CUDA device\n")
    if args.no_slow_rivals:
        skip_slow_rivals()
    device = torch.device("cuda", torch.cuda.current_device())
    card, revision = torch.cuda.get_device_name(device), args.commit or commit()
    warm_up(device)
    bandwidth = copy_bandwidth(device)
    print(f"{card}, copy {bandwidth / 1e9:.0f} GB/s, torch {torch.__version__}, commit {revision}")
    print(f"{'op':26} {'shape':38} {'us':>9} {'MB':>9} {'GB/s':>7} {'copy':>6} {'copy us':>8}  rival")
    modules = sorted(m.name for m in pkgutil.iter_modules(kernel_cases.__path__) if m.name not in ("base", "in_tree"))
    chosen = [m for m in modules if m in args.only] or modules
    texts = [t for t in args.only if t not in modules]
    select(texts)
    for name in chosen:
        module = importlib.import_module(f"kernel_cases.{name}")
        for case in module.cases(device) if hasattr(module, "cases") else ():
            if texts and not any(t in f"{case.op} {case.shape}" for t in texts):
                continue
            try:
                row = measure(case, bandwidth, device)
            except Exception as error:  # a case that fails must not cost the others their numbers
                print(f"{case.op:26} {case.shape:38} failed: {first_line(error)}", flush=True)
                continue
            finally:
                del case
                gc.collect()
            try:
                keep(args.out, rows, {**row, "card": card, "commit": revision, "copy_gbps": round(bandwidth / 1e9, 1)})
            except OSError as error:  # figures are printed all the same, and tried again with the next case's
                print(f"bench/kernels.py: {args.out} cannot be written ({error})", file=sys.stderr)
            rivals = [f"{row['rival']} {row['rival_us']} us"] if row["rival"] else []
            rival = "; ".join([*rivals, *(f"not run: {reason}" for reason in row["not_run"])])
            print(
                f"{row['op']:26} {row['shape']:38} {row['us']:9.2f} {row['bytes'] / 1e6:9.3f} {row['gbps']:7.0f} "
                f"{100 * row['share_of_copy']:5.1f}% {row['copy_us']:8.2f}  {rival}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    run_program("kernels", main)
