"""Interior snapshots of a running request: taken by an extend step, waiting to be published beside its last one.

They ride on SGLang's request object under one private attribute each, so that they end with the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

_WAITING = "_dsv4_interior_snapshots"
_PUBLISHING = "_dsv4_publishing_slot"


class InteriorSnapshot(NamedTuple):
    """State after `length` tokens, in `slot` (int64 [1])."""

    length: int
    slot: Tensor


def interior_snapshots(req: Any) -> list[InteriorSnapshot]:
    """Those that wait, ascending by length."""
    return getattr(req, _WAITING, [])


def add_interior_snapshot(req: Any, snapshot: InteriorSnapshot) -> None:
    setattr(req, _WAITING, [*interior_snapshots(req), snapshot])


def take_interior_snapshots(req: Any) -> list[InteriorSnapshot]:
    """Those that wait; they wait no longer, and their slots are the caller's."""
    waiting = interior_snapshots(req)
    setattr(req, _WAITING, [])
    return waiting


def publishing_slot(req: Any) -> Tensor | None:
    """Slot of the interior snapshot that is going into the tree right now."""
    return getattr(req, _PUBLISHING, None)


@contextmanager
def publishing(req: Any, slot: Tensor) -> Iterator[None]:
    setattr(req, _PUBLISHING, slot)
    try:
        yield
    finally:
        setattr(req, _PUBLISHING, None)
