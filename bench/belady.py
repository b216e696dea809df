"""An offline cache that knows the future: Belady's rule, counted in bytes.

It holds the same two kinds of things as the real one, pages and snapshots, in one budget that it may divide as it
likes. When something must go, what is used again last goes first; what is never used again goes at once. It is
generous to itself: it takes a snapshot wherever a later request will resume, and where it has dropped the end of a
prefix, the snapshot stands at the new end. Nothing in it is bound to a tree, an allocator or a schedule, except that
a running request holds its own pages and what it leaves.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

BOTH = ("page", "snapshot")
Item = tuple[str, int]  # ("page" or "snapshot", id of the page or of the page at whose end it stands)


@dataclass(frozen=True)
class Use:
    """One request of the stream, by page ids in order.

    prompt    tokens
    reusable  leading pages that an unbounded cache would have found
    path      pages of prompt and answer
    """

    prompt: int
    reusable: int
    path: Sequence[int]


def cached_tokens(uses: Sequence[Use], *, budget: int, page_bytes: int, snapshot_bytes: int, page: int) -> list[int]:
    """Tokens that the oracle finds for each request, served one after the other.

    budget  bytes for pages and snapshots together
    """
    return _Oracle(uses, {BOTH: budget}, page_bytes, snapshot_bytes).run(page)


def cached_tokens_of_split(uses: Sequence[Use], *, pages: int, snapshots: int, page: int) -> list[int]:
    """The same for an oracle that cannot turn pages into snapshots: it has so many of each."""
    return _Oracle(uses, {("page",): pages, ("snapshot",): snapshots}, 1, 1).run(page)


class _Oracle:
    def __init__(
        self, uses: Sequence[Use], budgets: dict[tuple[str, ...], int], page_bytes: int, snapshot_bytes: int
    ) -> None:
        """budgets  bytes by the kinds of items that share them"""
        self.uses, self.budgets = uses, budgets
        self.budget_of = {kind: kinds for kinds in budgets for kind in kinds}
        self.sizes = {"page": page_bytes, "snapshot": snapshot_bytes}
        self.when: dict[Item, list[int]] = defaultdict(list)
        for number, use in enumerate(uses):
            for item in self._needed(use):
                self.when[item].append(number)
        self.kept: set[Item] = set()
        self.depth: dict[Item, int] = {}
        self.bytes = dict.fromkeys(budgets, 0)
        self._queues: dict[tuple[str, ...], list[tuple[int, int, Item]]] = {kinds: [] for kinds in budgets}

    @staticmethod
    def _needed(use: Use) -> list[Item]:
        pages: list[Item] = [("page", p) for p in use.path[: use.reusable]]
        return [*pages, ("snapshot", use.path[use.reusable - 1])] if use.reusable else pages

    def run(self, page: int) -> list[int]:
        found = []
        for number, use in enumerate(self.uses):
            found.append(self._hit(use) * page)
            self._serve(number, use)
        return found

    def _hit(self, use: Use) -> int:
        """Pages that the request finds: as deep as pages stand, if a snapshot stands there."""
        standing = 0
        while standing < use.reusable and ("page", use.path[standing]) in self.kept:
            standing += 1
        if standing and ("snapshot", use.path[use.reusable - 1]) in self.kept:
            return standing
        while standing and ("snapshot", use.path[standing - 1]) not in self.kept:
            standing -= 1
        return standing

    def _serve(self, number: int, use: Use) -> None:
        held = {(kind, p) for p in use.path for kind in self.sizes}
        for depth, page in enumerate(use.path, 1):
            self._take(("page", page), depth, number)
            self._take(("snapshot", page), depth, number)
        self._make_room(held)
        for page in use.path:
            if not self._next(("page", page), number):
                self._drop(("page", page))
        self._make_room(set())

    def _next(self, item: Item, number: int) -> int:
        """Number of the next request after `number` that needs the item, or 0."""
        uses = self.when.get(item, ())
        at = bisect_right(uses, number)
        return uses[at] if at < len(uses) else 0

    def _take(self, item: Item, depth: int, number: int) -> None:
        following = self._next(item, number)
        if item[0] == "snapshot" and not following:
            self._drop(item)
            return
        if item not in self.kept:
            self.kept.add(item)
            self.bytes[self.budget_of[item[0]]] += self.sizes[item[0]]
        rank = -depth if item[0] == "page" else 0  # of what is used at the same time ends go first, snapshots last
        heapq.heappush(self._queues[self.budget_of[item[0]]], (-(following or len(self.uses)), rank, item))
        self.depth[item] = following or len(self.uses)

    def _drop(self, item: Item) -> None:
        if item in self.kept:
            self.kept.remove(item)
            self.bytes[self.budget_of[item[0]]] -= self.sizes[item[0]]

    def _make_room(self, held: set[Item]) -> None:
        """Drop what is used last until the rest fits. `held` stays."""
        for kinds, queue in self._queues.items():
            spared = []
            while self.bytes[kinds] > self.budgets[kinds] and queue:
                entry = heapq.heappop(queue)
                following, item = -entry[0], entry[2]
                if item not in self.kept or self.depth[item] != following:
                    continue
                if item in held:
                    spared.append(entry)
                else:
                    self._drop(item)
            for entry in spared:
                heapq.heappush(queue, entry)
