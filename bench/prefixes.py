"""All text that was ever seen, as a tree of pages: the longest shared prefix of a prompt under unbounded memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_Ids32 = NDArray[np.int32]


class Walk(NamedTuple):
    """What of a prompt was seen before.

    pages   ids of the leading whole pages that were seen, in order
    tokens  longest shared prefix, to the token
    """

    pages: list[int]
    tokens: int


class PrefixIndex:
    """Interned pages: a page's id stands for the whole text up to its end."""

    def __init__(self, page: int) -> None:
        self.page = page
        self._ids: dict[tuple[int, bytes], int] = {}
        self._after: dict[int, list[_Ids32]] = {}  # what followed a page: whole pages and unfinished ends

    @property
    def pages(self) -> int:
        """Distinct whole pages seen."""
        return len(self._ids)

    def walk(self, tokens: Ids) -> Walk:
        """Look `tokens`, int64 [n], up without adding them."""
        ids = tokens.astype(np.int32)
        parent, seen, at = 0, list[int](), 0
        while at + self.page <= len(ids):
            found = self._ids.get((parent, ids[at : at + self.page].tobytes()))
            if found is None:
                break
            parent, at = found, at + self.page
            seen.append(parent)
        rest = ids[at : at + self.page]
        return Walk(seen, at + max((_common(rest, other) for other in self._after.get(parent, ())), default=0))

    def add(self, tokens: Ids) -> list[int]:
        """Take up `tokens`, int64 [n]; returns the ids of their whole pages."""
        ids = tokens.astype(np.int32)
        parent, path = 0, list[int]()
        whole = len(ids) // self.page * self.page
        for at in range(0, whole, self.page):
            key = (parent, ids[at : at + self.page].tobytes())
            found = self._ids.get(key)
            if found is None:
                found = self._ids[key] = len(self._ids) + 1
                self._after.setdefault(parent, []).append(np.frombuffer(key[1], dtype=np.int32))
            parent = found
            path.append(parent)
        if whole < len(ids):
            self._after.setdefault(parent, []).append(ids[whole:])
        return path


def _common(a: _Ids32, b: _Ids32) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
