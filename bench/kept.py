"""Results that outlive whatever ends a program: their file is rewritten after every run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import write

from sglang_dsv4.console import INTERRUPTED


class Kept:
    """Rows as they come, and in a JSON file if one is named.

    about  what the file says beside the rows
    """

    def __init__(self, out: Path | None, **about: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self._about = about
        self._out = out

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows += rows
        if self._out is not None:
            write(self._out, {**self._about, "runs": self.rows})


@contextmanager
def told(program: str, kept: Kept, describe: Callable[[Sequence[dict[str, Any]]], str]) -> Iterator[None]:
    """Whatever ends the body: print what was measured, then why in one line.

    Exits with 1 after an OSError or ValueError, with 130 after Ctrl-C.
    """
    why, status = "", 0
    try:
        yield
    except KeyboardInterrupt:
        why, status = "stopped", INTERRUPTED
    except (OSError, ValueError) as error:
        why, status = str(error), 1
    if kept.rows:
        print(describe(kept.rows), flush=True)
    if why:
        print(f"{program}: {why}", file=sys.stderr)
        raise SystemExit(status)
