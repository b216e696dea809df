"""What a free costs while memory moves between pages and slots: microseconds of this thread, tensors on the CPU.

    python bench/frees.py [--pages 30000]

Segments of four pages come back to an allocator of which more or less is free: with nothing being drained, in a drain
that they are not part of, and in a drain of which they are what is missing. On a GPU a free besides must not wait:
`tests/test_movable.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_dsv4.cache.movable import MovablePages  # noqa: E402
from sglang_dsv4.console import positive, table  # noqa: E402

PAGE, SEGMENT, FREES, TIMES = 128, 4, 90, 5


def microseconds(pages: int, free: int, drained: str) -> float:
    """Of one free; `drained` is nothing, others or these."""
    allocator = MovablePages(pages * PAGE, PAGE, torch.uint8, "cpu", None, False)  # type: ignore[arg-type]
    low = allocator.alloc(free * PAGE)
    held = allocator.alloc((pages - free) * PAGE)
    allocator.free(low)
    if drained != "nothing":
        allocator.start_drain(FREES * SEGMENT + 8)
    size = SEGMENT * PAGE
    going = [held[at : at + size] for at in range(0, FREES * size, size)]
    if drained == "these":
        going = [held[len(held) - at - size : len(held) - at] for at in range(0, FREES * size, size)]
    begin = time.thread_time()
    for segment in going:
        allocator.free_segment(segment, start_pos=0)
    return (time.thread_time() - begin) / FREES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=positive, default=30_000)
    pages = parser.parse_args().pages
    kinds = ("nothing", "others", "these")
    rows = [
        (str(free), *(f"{min(microseconds(pages, free, kind) for _ in range(TIMES)):.0f}" for kind in kinds))
        for free in (pages // 30, pages // 2, pages - 2000)
    ]
    print(table(("free pages", *(f"drained: {kind}, µs" for kind in kinds)), rows, left=0))


if __name__ == "__main__":
    main()
