"""Why tokens of a prompt were not found: what became of the pages that it shares with earlier text.

The tree knows what stands. Why something does not takes a memory of what once stood: a hash of every page that was
seen, and whether a snapshot ever stood at its end. Host integers; no pools, no SGLang.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

NEW = "not seen before"  # or the unfinished page where a text that was seen ends: pages are all that is remembered
PAGE, SNAPSHOT, NO_SNAPSHOT = "page evicted", "snapshot evicted", "no snapshot near the divergence"
LEAST_REMEMBERED = 1 << 16  # pages


class Seen(NamedTuple):
    """Of a prompt: leading tokens, in whole pages, that were seen, and the deepest snapshot that ever stood on them."""

    tokens: int
    snapshot: int


def page_misses(*, cached: int, reusable: int, pages_hit: int, best_snapshot: int) -> dict[str, int]:
    """Why tokens between `cached` and `reusable` were missed; all in tokens, all whole pages.

    reusable       leading tokens that were seen before, short of the prompt's last
    pages_hit      leading tokens whose pages still stood
    best_snapshot  deepest snapshot that ever stood on the shared pages
    """
    deepest = max(cached, min(best_snapshot, reusable))
    standing = max(cached, min(pages_hit, deepest))
    return {PAGE: deepest - standing, SNAPSHOT: standing - cached, NO_SNAPSHOT: max(0, reusable - deepest)}


class SeenPages:
    """Hashes of pages, each for all text before its end, and whether a snapshot stood there.

    What was not passed for longest is forgotten, ends of texts before their beginnings: then it counts as new.
    """

    def __init__(self, room: int = LEAST_REMEMBERED) -> None:
        self.room = room
        self._pages: OrderedDict[int, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def walk(self, chain: Sequence[int], page: int, most: int) -> Seen:
        """What of the text with these page hashes was seen, as far as `most` tokens."""
        pages = snapshot = 0
        for key in chain[: most // page]:
            stood = self._pages.get(key)
            if stood is None:
                break
            pages += 1
            if stood:
                snapshot = pages
        return Seen(pages * page, snapshot * page)

    def passed(self, chain: Sequence[int]) -> None:
        """A text with these page hashes was sent or answered."""
        for key in reversed(chain):
            self._pages.setdefault(key, False)
            self._pages.move_to_end(key)
        while len(self._pages) > self.room:
            self._pages.popitem(last=False)

    def snapshot(self, key: int) -> None:
        """A snapshot stands at the end of that page."""
        self._pages[key] = True
