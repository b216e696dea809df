"""Turns result files of `simulate.py` and `replay.py` into a Markdown page with plots.

    python bench/report.py RESULT.json... --out FOLDER

Plots need matplotlib: `pip install 'sglang-dsv4[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLUMNS = (
    ("workload", "workload"),
    ("system", "system"),
    ("memory", "memory"),
    ("requests", "requests"),
    ("prompt_tokens", "prompt"),
    ("cached_tokens", "cached"),
    ("ideal_tokens", "ideal"),
    ("recomputed_over_ideal", "recomputed / ideal"),
    ("cached_over_oracle", "cached / oracle"),
    ("peak_pages", "peak pages"),
    ("peak_snapshots", "peak snapshots"),
)
_NEEDED = ("workload", "system", "missed_tokens", "recomputed_over_ideal", "hit_rate")  # of a run
PANELS = 3  # side by side
_TIMES = (("ttft_s", "first token"), ("inter_token_s", "between tokens"))


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All runs of the files. Raises ValueError, naming the file that is not a result."""
    runs: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = json.loads(path.read_text())["runs"]
            for run in found:
                _check(run)
            runs += found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a result of simulate.py or replay.py ({error!r})") from None
    return runs


def _check(run: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or AttributeError where the page cannot be made of a run."""
    timed = [key for key, _ in _TIMES] if run.get("ttft_s") else []
    if missing := [name for name in (*_NEEDED, *timed, *(["answer_tokens_per_s"] if timed else [])) if name not in run]:
        raise KeyError(*missing)
    for name in ("missed_tokens", *timed):
        if not isinstance(run[name], dict) or not all(isinstance(v, int | float) for v in run[name].values()):
            raise TypeError(f"{name} is {run[name]!r}")


def markdown(runs: Sequence[dict[str, Any]], plots: Sequence[str]) -> str:
    lines = ["# Replay results", "", _table([label for _, label in _COLUMNS], [_cells(run) for run in runs])]
    timed = [run for run in runs if run.get("ttft_s")]
    if timed:
        head = [
            "workload",
            "system",
            *(f"{label} {p}" for _, label in _TIMES for p in ("p50", "p95")),
            "answer tokens/s",
        ]
        rows = [
            [
                run["workload"],
                run["system"],
                *(f"{run[key].get(p, 0) * 1e3:.1f} ms" for key, _ in _TIMES for p in ("p50", "p95")),
                run["answer_tokens_per_s"],
            ]
            for run in timed
        ]
        lines += ["", "## Times", "", _table(head, rows)]
    lines += ["", "## Why tokens were missed", "", _missed(runs)]
    for name in plots:
        lines += ["", f"![{Path(name).stem.replace('_', ' ')}]({name})"]
    return "\n".join(lines) + "\n"


def _cells(run: dict[str, Any]) -> list[Any]:
    return ["" if run.get(key) is None else run[key] for key, _ in _COLUMNS]


def _missed(runs: Sequence[dict[str, Any]]) -> str:
    causes = sorted({cause for run in runs for cause in run["missed_tokens"]})
    rows = [
        [run["workload"], run["system"], run.get("memory", ""), *(run["missed_tokens"].get(c, 0) for c in causes)]
        for run in runs
    ]
    return _table(["workload", "system", "memory", *causes], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def plot(runs: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """PNG files in `folder`; returns their names. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'sglang-dsv4[bench]'") from None
    matplotlib.use("Agg")
    made = [_memory(runs, folder), _recomputed(runs, folder), _first_token(runs, folder)]
    return [name for name in made if name]


def _memory(runs: Sequence[dict[str, Any]], folder: Path) -> str | None:
    """Hit rate against memory, one panel a workload, one line a system."""
    import matplotlib.pyplot as plt

    series: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.get("bytes"):
            series[run["workload"]][run["system"]].append((run["bytes"] / 1e9, run["hit_rate"]))
    panels = {name: systems for name, systems in series.items() if any(len(p) > 1 for p in systems.values())}
    if not panels:
        return None
    wide = min(len(panels), PANELS)
    rows = -(-len(panels) // wide)
    figure, axes = plt.subplots(rows, wide, figsize=(4 * wide, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (name, systems) in zip(axes.flat, panels.items(), strict=False):
        for system, points in systems.items():
            x, y = zip(*sorted(points), strict=True)
            axis.plot(x, y, marker="o", label=system)
        axis.set(title=name, xlabel="GB", ylabel="hit rate", ylim=(0, 1))
        axis.legend(fontsize=7)
    return _save(figure, folder, "hit_rate_by_memory.png")


def _recomputed(runs: Sequence[dict[str, Any]], folder: Path) -> str | None:
    import matplotlib.pyplot as plt

    labels = [f"{run['workload']}\n{run['system']} {run.get('memory', '')}" for run in runs]
    figure, axis = plt.subplots(figsize=(max(5, 0.8 * len(runs)), 3.6))
    axis.bar(range(len(runs)), [run["recomputed_over_ideal"] for run in runs])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(runs)), labels, rotation=60, ha="right", fontsize=6)
    axis.set_ylabel("recomputed / ideal")
    return _save(figure, folder, "recomputed_over_ideal.png")


def _first_token(runs: Sequence[dict[str, Any]], folder: Path) -> str | None:
    import matplotlib.pyplot as plt

    timed = [run for run in runs if run.get("ttft_samples_s")]
    if not timed:
        return None
    figure, axis = plt.subplots(figsize=(5, 3.4))
    for run in timed:
        samples = sorted(run["ttft_samples_s"])
        share = [(i + 1) / len(samples) for i in range(len(samples))]
        axis.step(samples, share, where="post", label=f"{run['workload']}, {run['system']}")
    axis.set(xlabel="seconds to the first token", ylabel="share of requests", ylim=(0, 1))
    axis.legend(fontsize=7)
    return _save(figure, folder, "first_token.png")


def _save(figure: Any, folder: Path, name: str) -> str:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(folder / name, dpi=110)
    plt.close(figure)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Markdown page with plots from result files.")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for README.md and the plots")
    parser.add_argument("--no-plots", action="store_true", help="tables only")
    args = parser.parse_args()
    try:
        runs = load(args.results)
        args.out.mkdir(parents=True, exist_ok=True)
        plots = [] if args.no_plots else plot(runs, args.out)
        (args.out / "README.md").write_text(markdown(runs, plots))
    except (OSError, ValueError) as error:
        sys.exit(f"report: {error}")
    print(args.out / "README.md")


if __name__ == "__main__":
    main()
