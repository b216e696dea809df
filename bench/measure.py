"""What a run over a workload comes to: one row a request, and the summary that simulator and replay both write."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dsv4.cache.causes import NO_SNAPSHOT, PAGE, SNAPSHOT, page_misses
from sglang_dsv4.console import positive

NEVER, BELOW = "never cached", "below one page"
HIDDEN = "evicted or no snapshot"  # from a server that does not say which
CAUSES = (NEVER, BELOW, PAGE, SNAPSHOT, NO_SNAPSHOT, HIDDEN)


# Types of arguments: whatever cannot be meant is one line that names it.


def positives(text: str) -> list[int]:
    """Comma-separated."""
    return [positive(each) for each in text.split(",")]


def part(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= _number(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return float(text)


def parts(text: str) -> list[float]:
    """Comma-separated."""
    return [part(each) for each in text.split(",")]


MOST_BYTES = 2.0**50  # that a memory may have


def factor(text: str) -> float:
    """A number above 0."""
    if not 0 < _number(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def writable(text: str) -> Path:
    """A file for results, tried before anything is measured; left as it is, or not there."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def memories(text: str) -> list[str]:
    """Comma-separated sizes of memory as `simulate.limits_for` takes them."""
    for each in text.split(","):
        if each not in ("ample", "third") and not 0 < _number(each) <= MOST_BYTES:
            raise argparse.ArgumentTypeError(f"{each!r} is none of ample, third, a fraction, a number of bytes")
    return text.split(",")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


@dataclass(frozen=True)
class Row:
    """One request, in tokens.

    ideal     longest prefix that any earlier prompt or answer began with, short of the last token
    missed    tokens by cause; they add up to prompt - cached
    standing  of the missed tokens those whose pages stood when the request came; 0 where nobody can tell
    """

    session: str
    turn: int
    prompt: int
    cached: int
    ideal: int
    missed: dict[str, int] = field(default_factory=dict)
    standing: int = 0


def misses(*, prompt: int, cached: int, ideal: int, page: int, pages_hit: int, best_snapshot: int) -> dict[str, int]:
    """Why each token of `prompt` beyond `cached` was missed; all in tokens.

    ideal          longest shared prefix, to the token
    pages_hit      leading tokens whose pages still stood
    best_snapshot  deepest snapshot that ever stood on the shared pages
    """
    reusable = ideal // page * page
    found = {
        NEVER: prompt - max(ideal, cached),
        BELOW: max(0, ideal - max(reusable, cached)),
        **page_misses(cached=cached, reusable=reusable, pages_hit=pages_hit, best_snapshot=best_snapshot),
    }
    return {cause: tokens for cause, tokens in found.items() if tokens}


def summary(rows: Sequence[Row], page: int) -> dict[str, Any]:
    """Totals in tokens. `recomputed_over_ideal` is 1.0 for a cache that finds every shared token."""
    prompt, cached, ideal = (sum(getattr(r, name) for r in rows) for name in ("prompt", "cached", "ideal"))
    missed: dict[str, int] = defaultdict(int)
    turns: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        turns[row.turn].append(row)
        for cause, tokens in row.missed.items():
            missed[cause] += tokens
    return {
        "requests": len(rows),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "ideal_tokens": ideal,
        "ideal_whole_pages": sum(r.ideal // page * page for r in rows),
        "recomputed_tokens": prompt - cached,
        "recomputed_over_ideal": _ratio(prompt - cached, prompt - ideal),
        "cached_over_ideal": _ratio(cached, ideal),
        "hit_rate": _ratio(cached, prompt),
        "hit_rate_by_turn": {
            str(t): _ratio(sum(r.cached for r in rs), sum(r.prompt for r in rs)) for t, rs in sorted(turns.items())
        },
        "missed_tokens": {cause: missed[cause] for cause in CAUSES if missed[cause]},
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90, p95 and p99, nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {p: ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))] for p in (50, 90, 95, 99)}
    return {f"p{p}": round(v, 6) for p, v in at.items()}


def write(path: Path, result: dict[str, Any], rows: Sequence[Row] = ()) -> None:
    """One JSON object; `rows` are added if given."""
    if rows:
        result = {**result, "rows": [asdict(r) for r in rows]}
    save_text(path, json.dumps(result, indent=1) + "\n")


def save_text(path: Path, text: str) -> None:
    """The whole text or what the file had before, whatever ends the program meanwhile. Raises OSError."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text)
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
