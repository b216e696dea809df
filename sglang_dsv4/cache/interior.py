"""Interior snapshots: taken by an extend step beside its last one, waiting to be published. Host bookkeeping only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class InteriorSnapshot(NamedTuple):
    """State after `length` tokens, in `slot` (int64 [1]). A kept one stays when its path goes on."""

    length: int
    slot: Tensor
    kept: bool = False


class InteriorSnapshots:
    """Waiting snapshots by request row.

    Written when the scheduler prepares an extend step, read when that step is launched (before anything else is
    scheduled), taken when the step's result enters the tree or the request gives its row back.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[InteriorSnapshot]] = {}
        self.publishing: Tensor | None = None  # slot that is going into the tree right now

    def add(self, row: int, snapshot: InteriorSnapshot) -> None:
        waiting = self._waiting.setdefault(row, [])
        waiting.append(snapshot)
        waiting.sort(key=lambda one: one.length)

    def waiting(self, row: int) -> list[InteriorSnapshot]:
        """Ascending by length."""
        return self._waiting.get(row, [])

    def take(self, row: int | None) -> list[InteriorSnapshot]:
        """Those that wait; they wait no longer and their slots are the caller's."""
        return self._waiting.pop(row, []) if row is not None else []

    def clear(self) -> None:
        self._waiting.clear()

    @contextmanager
    def publish(self, slot: Tensor) -> Iterator[None]:
        self.publishing = slot
        try:
            yield
        finally:
            self.publishing = None
