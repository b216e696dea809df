"""What command lines share: types of arguments, how a program ends, aligned tables and a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

FEWEST_IDS = 16  # fewer distinct token ids make prompts that look alike
INTERRUPTED = 130  # what a shell shows of a program that Ctrl-C ended
_BAR = 30


def positive(text: str) -> int:
    """Type of an argument: a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def id_range(text: str) -> tuple[int, int]:
    """Type of an argument: LOW:HIGH, the first token id and the one behind the last."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) + FEWEST_IDS <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH with at least {FEWEST_IDS} ids between")
    return int(low), int(high)


def tolerance(text: str) -> float:
    """Type of an argument: a number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def run_program(program: str, main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns; after Ctrl-C with one line."""
    try:
        status = main() or 0
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        status = INTERRUPTED
    raise SystemExit(status)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Columns as wide as their widest cell; the first `left` of them flush left, the others flush right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        sized = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in sized).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


class Progress:
    """A bar that redraws itself on a terminal and says every tenth part elsewhere."""

    def __init__(self, total: int, label: str, out: TextIO | None = None) -> None:
        self.total, self.label, self.done = total, label, 0
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._said = -1

    def step(self, note: str = "") -> None:
        self.done += 1
        share = self.done / self.total
        if self._live:
            filled = int(share * _BAR)
            bar = "#" * filled + "." * (_BAR - filled)
            end = "\n" if self.done == self.total else ""
            self._out.write(f"\r{self.label} [{bar}] {self.done}/{self.total} {note:<24.24}{end}")
        elif int(share * 10) > self._said:
            self._said = int(share * 10)
            self._out.write(f"{self.label} {self.done}/{self.total} {note}\n")
        self._out.flush()
