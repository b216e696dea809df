"""All text that was ever seen, as a tree of pages: the longest shared prefix of a prompt under unbounded memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_TOKEN = 4  # bytes


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
        self._after: dict[int, list[bytes]] = {}  # what followed a page, sorted: whole pages and unfinished ends

    @property
    def pages(self) -> int:
        """Distinct whole pages seen."""
        return len(self._ids)

    def walk(self, tokens: Ids) -> Walk:
        """Look `tokens`, int64 [n], up without adding them."""
        text, size = _bytes(tokens), self.page * _TOKEN
        parent, seen, at = 0, list[int](), 0
        while at + size <= len(text):
            found = self._ids.get((parent, text[at : at + size]))
            if found is None:
                break
            parent, at = found, at + size
            seen.append(parent)
        return Walk(seen, at // _TOKEN + _longest(text[at : at + size], self._after.get(parent, [])))

    def add(self, tokens: Ids) -> list[int]:
        """Take up `tokens`, int64 [n]; returns the ids of their whole pages."""
        text, size = _bytes(tokens), self.page * _TOKEN
        parent, path = 0, list[int]()
        whole = len(text) // size * size
        for at in range(0, whole, size):
            key = (parent, text[at : at + size])
            found = self._ids.get(key)
            if found is None:
                found = self._ids[key] = len(self._ids) + 1
                insort(self._after.setdefault(parent, []), key[1])
            parent = found
            path.append(parent)
        if whole < len(text):
            insort(self._after.setdefault(parent, []), text[whole:])
        return path


def _bytes(tokens: Ids) -> bytes:
    """Big-endian, so that bytes sort as tokens do."""
    return tokens.astype(">i4").tobytes()


def _longest(text: bytes, others: list[bytes]) -> int:
    """Tokens that `text` shares with the one of the sorted `others` that begins most like it: a neighbour."""
    at = bisect_left(others, text)
    return max((_common(text, other) for other in others[max(0, at - 1) : at + 1]), default=0)


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix in tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.frombuffer(a[:n], dtype=">i4") != np.frombuffer(b[:n], dtype=">i4"))
    return int(different[0]) if len(different) else n // _TOKEN
