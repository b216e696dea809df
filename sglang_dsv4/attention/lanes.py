"""Side streams of a captured decode step: what does not depend on each other runs beside each other.

A lane starts behind everything that its parent stream was given before, and `join` puts the parent behind all lanes.
Tensors that a lane reads or makes must stay referenced until then: the allocator knows one stream per tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ENTRIES, WINDOW, INDEX = range(3)


class NoLanes:
    """Everything in order on the current stream."""

    @contextmanager
    def lane(self, which: int, after: int | None = None) -> Iterator[None]:
        yield

    def join(self) -> None:
        pass


class Lanes:
    """Three CUDA streams, shared by all layers of all graphs of a process."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in (ENTRIES, WINDOW, INDEX)]
        self._used: set[int] = set()

    @contextmanager
    def lane(self, which: int, after: int | None = None) -> Iterator[None]:
        """Run the body on lane `which`, behind the parent's work so far and behind lane `after`."""
        stream = self._streams[which]
        stream.wait_stream(torch.cuda.current_stream())
        if after in self._used:
            stream.wait_stream(self._streams[after])
        self._used.add(which)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Put the current stream behind every lane that was used."""
        current = torch.cuda.current_stream()
        for which in sorted(self._used):
            current.wait_stream(self._streams[which])
        self._used.clear()
