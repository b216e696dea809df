"""When prefixes are asked for again, learned from all that were seen lately, evicted or not.

A mark is a place in the text where somebody may resume: the end of a prompt, of an answer, of what conversations
share. It is found again by a hash of the text before it, so a mark whose pages are gone still tells whether keeping
them would have been right. Marks of one class share statistics: of those that reached an age, how many were asked
for before twice that age. Ages are counted in requests, so nothing depends on a clock.

The value of a mark is the best rate of hits that keeping it can give, over all times to keep it: hits expected until
then, over the time it is kept until then. Where hits come soon or never, marks lose value as they grow old, and the
one not used for longest goes first. Where everything comes around in turn, they gain, and what was used just now goes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dsv4.cache.habits import PROMPT

_REMEMBERED = 1 << 16  # marks; those that were not passed for longest are forgotten
_AGES = 20  # age b lasts from 2^b to 2^(b+1) requests
_TURNS, _STRANGERS = 15, 7  # more count as so many
_PRIOR = 0.5  # part of the marks of any age that is passed before twice that age, while nothing is known
_TRUST = 1.0  # observations that weigh as much as what the wider class says
_REFRESH = 16  # requests between new values
_FADE = 0.5 ** (1 / 2048)  # weight that observations lose with every request
_PASSED = "passed"


class MarkClass(NamedTuple):
    """What marks have in common.

    kind       of place while nobody has passed it, or "passed"
    turn       requests of its conversation so far
    strangers  requests of other conversations that passed it
    left       its conversation has gone on somewhere else since
    """

    kind: str
    turn: int
    strangers: int
    left: bool = False


class _Group(NamedTuple):
    """Leaves between which only the time of their offer decides."""

    cls: MarkClass
    age: int
    span_bits: int


class Mark:
    """A place in the text. `node` ends there if it is a leaf of the tree; `span` pages are lost with it.

    A leaf that is `held` cannot go for now.
    """

    __slots__ = ("age", "chain", "cls", "held", "is_end", "members", "node", "passes", "span", "stamp", "talk")

    def __init__(self, kind: str, turn: int) -> None:
        self.cls = MarkClass(kind, min(turn, _TURNS), 0)
        self.is_end = kind == PROMPT
        self.held = False
        self.age = self.stamp = self.passes = self.span = 0
        self.node: int | None = None
        self.chain: array[int] | None = None  # hashes of a text that passes here
        self.members: dict[Mark, None] = {}  # of the conversation that began here, those that it has not left
        self.talk: Mark | None = None  # end of the first prompt of the conversation that passed last


class Arrival:
    """What is known of a request: the hashes of its pages, the marks on its way, their pages, and its conversation."""

    def __init__(self, model: ReuseModel, chain: array[int], found: list[tuple[int, Mark]], talk: Mark | None) -> None:
        self.model, self.chain, self.talk = model, chain, talk
        self.depths, self.passed = [depth for depth, _ in found], [mark for _, mark in found]

    @property
    def turn(self) -> int:
        return self.talk.passes if self.talk is not None else 0


class _Table:
    """Of the marks that reached each age, how many, and how many of them were passed at that age."""

    __slots__ = ("hits", "reached")

    def __init__(self) -> None:
        self.hits, self.reached = [0.0] * _AGES, [0.0] * _AGES


class ReuseModel:
    """Marks, their statistics, and which of those that are leaves is worth least."""

    def __init__(self, snapshot_pages: float | None = None) -> None:
        """snapshot_pages  that a snapshot costs: leaves are ranked by their worth a byte then, whatever is short"""
        self.now = 0
        self.snapshot_pages = snapshot_pages
        self._marks: OrderedDict[int, Mark] = OrderedDict()
        self._tables: dict[tuple[object, ...], _Table] = defaultdict(_Table)
        self._weight = 1.0  # of an observation made now
        self._waiting: list[deque[tuple[Mark, int]]] = [deque() for _ in range(_AGES)]
        self._values: dict[MarkClass, list[float]] = {}
        self._leaves: dict[_Group, dict[Mark, None]] = {}
        self._serials: dict[_Group, int] = {}  # of the groups that hold a leaf, in the order of their making
        self._next_serial = count()
        self._ranks: dict[bool, list[tuple[float, int, _Group]]] = {}  # `worst` in either way, good until the next tick
        self._held: dict[Mark, None] = {}
        self._ends: dict[int, Mark] = {}  # node -> its mark, of all leaves

    def arrives(self, chain: array[int]) -> Arrival:
        """A request whose pages have these hashes passes the marks on its way, whether or not their pages stand."""
        self._tick()
        found = [(at, mark) for at, key in enumerate(chain, 1) if (mark := self._marks.get(key)) is not None]
        talk = next((mark for _, mark in found if mark.is_end), None)
        if talk is not None:
            talk.passes += 1
        arrival = Arrival(self, chain, found, talk)
        for at, mark in found:
            self._count(mark, hits=1.0)
            strange = talk is None or mark.talk is not talk
            cls = MarkClass(_PASSED, min(arrival.turn, _TURNS), min(mark.cls.strangers + strange, _STRANGERS))
            self._belongs(mark, talk)
            self._begin(mark, cls)
            self._marks.move_to_end(chain[at - 1])
        if talk is not None:
            self._leaves_behind(talk, arrival)
        return arrival

    def _leaves_behind(self, talk: Mark, arrival: Arrival) -> None:
        """The conversation goes on with the request: marks that it did not pass are on a branch that was left."""
        passed = set(arrival.passed)
        for mark in [member for member in talk.members if member not in passed]:
            del talk.members[mark]
            if mark.stamp >= 0:  # it is not forgotten
                self._begin(mark, mark.cls._replace(left=True))

    @staticmethod
    def _belongs(mark: Mark, talk: Mark | None) -> None:
        """The conversation is the last one that passed the mark."""
        if mark.talk is not None:
            mark.talk.members.pop(mark, None)
        mark.talk = talk
        if talk is not None:
            talk.members[mark] = None

    def stands(self, arrival: Arrival, pages: int, kind: str, node: int, span: int) -> None:
        """The request's first pages stand in the tree as far as `node`, a leaf."""
        mark = self.mark(arrival.chain[pages - 1], kind, arrival.turn)
        if kind == PROMPT and arrival.talk is None:
            arrival.talk = mark
            for passed in arrival.passed:
                self._belongs(passed, mark)
        self._belongs(mark, arrival.talk)
        for depth, above in zip(arrival.depths, arrival.passed, strict=True):
            if depth < pages:
                self.withdraw(above)
        arrival.depths.append(pages)
        arrival.passed.append(mark)
        self.offer(mark, node, span, arrival.chain)

    def mark(self, key: int, kind: str, turn: int) -> Mark:
        """The mark at the place of that hash, which is new if there was none."""
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = Mark(kind, turn)
            self._begin(mark, mark.cls)
            if len(self._marks) > _REMEMBERED:
                forgotten = self._marks.popitem(last=False)[1]
                forgotten.stamp = -1
                self._belongs(forgotten, None)
        return mark

    # Leaves

    def offer(self, mark: Mark, node: int, span: int, chain: array[int]) -> None:
        """The mark may go: the leaf `node` ends there."""
        self.withdraw(mark)
        if (other := self._ends.get(node)) is not None:  # of the same place, forgotten since
            self.withdraw(other)
        mark.node, mark.span, mark.chain = node, span, chain
        self._ends[node] = mark
        self._join(mark)

    def withdraw(self, mark: Mark) -> None:
        if mark.node is not None:
            self._leave(mark)
            del self._ends[mark.node]
            mark.node = mark.chain = None

    def hold(self, mark: Mark) -> None:
        """A request holds the leaf. It does not go until it is offered anew or tried again, now and then."""
        if mark.node is not None:
            self._leave(mark)
            mark.held = True
            self._held[mark] = None

    def try_held(self) -> None:
        """Held leaves may be free by now."""
        for mark in list(self._held):
            self._leave(mark)
            self._join(mark)

    def end_of(self, node: int) -> Mark | None:
        """The mark at the leaf `node`, None if that was not offered."""
        return self._ends.get(node)

    def worst(self, *, by_span: bool) -> Mark | None:
        """The leaf worth least, a page or, `by_span`, as a whole. Groups of like leaves are ranked once a request."""
        ranks = self._ranks.get(by_span)
        if ranks is None:
            ranks = self._ranks[by_span] = [self._rank(key, by_span=by_span) for key in self._leaves]
            heapify(ranks)
        while ranks:
            _, serial, key = ranks[0]
            if self._serials.get(key) == serial:
                values, group = self.values(key.cls), self._leaves[key]
                gains = key.age + 1 < _AGES and values[key.age + 1] > values[key.age]
                return next(reversed(group)) if gains else next(iter(group))
            heappop(ranks)
        return None

    def _rank(self, key: _Group, *, by_span: bool) -> tuple[float, int, _Group]:
        worth = self.values(key.cls)[key.age]
        if self.snapshot_pages is not None:
            span = 0.75 * (1 << key.span_bits)
            return worth * span / (span + self.snapshot_pages), self._serials[key], key
        return worth * (1 << key.span_bits) if by_span else worth, self._serials[key], key

    def _join(self, mark: Mark) -> None:
        key = _Group(mark.cls, mark.age, mark.span.bit_length())
        group = self._leaves.get(key)
        if group is None:
            group = self._leaves[key] = {}
            self._serials[key] = next(self._next_serial)
            for by_span, ranks in self._ranks.items():
                heappush(ranks, self._rank(key, by_span=by_span))
        group[mark] = None

    def _leave(self, mark: Mark) -> None:
        if mark.held:
            mark.held = False
            del self._held[mark]
            return
        key = _Group(mark.cls, mark.age, mark.span.bit_length())
        group = self._leaves[key]
        del group[mark]
        if not group:
            del self._leaves[key], self._serials[key]

    # Statistics

    def values(self, cls: MarkClass) -> list[float]:
        """What a mark of that class is worth at each age: hits a request while it is kept, kept as long as is best."""
        known = self._values.get(cls)
        if known is None:
            known = self._values[cls] = best_rates(self._chances(cls))
        return known

    def _tick(self) -> None:
        self.now += 1
        self._weight /= _FADE
        self._ranks.clear()
        if self.now % _REFRESH == 0:
            self._values.clear()
            self.try_held()
            if self._weight > 1024:
                for table in self._tables.values():
                    table.hits = [x / self._weight for x in table.hits]
                    table.reached = [x / self._weight for x in table.reached]
                self._weight = 1.0
        for age, waiting in enumerate(self._waiting[:-1]):
            while waiting and self.now - waiting[0][1] >= 2 << age:
                mark, stamp = waiting.popleft()
                if mark.stamp == stamp:
                    self._move(mark, mark.cls, age + 1)
                    self._waiting[age + 1].append((mark, stamp))
                    self._count(mark, reached=1.0)

    def _begin(self, mark: Mark, cls: MarkClass) -> None:
        mark.stamp = self.now
        self._move(mark, cls, 0)
        self._waiting[0].append((mark, self.now))
        self._count(mark, reached=1.0)

    def _move(self, mark: Mark, cls: MarkClass, age: int) -> None:
        stands = mark.node is not None and not mark.held
        if stands:
            self._leave(mark)
        mark.cls, mark.age = cls, age
        if stands:
            self._join(mark)

    def _count(self, mark: Mark, *, hits: float = 0.0, reached: float = 0.0) -> None:
        for key in self._wider(mark.cls):
            table = self._tables[key]
            table.hits[mark.age] += hits * self._weight
            table.reached[mark.age] += reached * self._weight

    @staticmethod
    def _wider(cls: MarkClass) -> tuple[tuple[object, ...], ...]:
        return (), (cls.kind, cls.strangers, cls.left), cls

    def _chances(self, cls: MarkClass) -> list[float]:
        chances, trust = [_PRIOR] * _AGES, _TRUST * self._weight
        for key in self._wider(cls):
            table = self._tables.get(key)
            if table is not None:
                chances = [
                    (hits + trust * wider) / (reached + trust)
                    for hits, reached, wider in zip(table.hits, table.reached, chances, strict=True)
                ]
        return chances


def best_rates(chances: Sequence[float]) -> list[float]:
    """For each age the best ratio of hits to time kept, over all ages at which to give up.

    chances  of being passed at an age, for a mark that reached it
    """
    rates: list[float] = []
    later: list[tuple[float, float, float]] = []  # stretches of later ages: hits, time, part left; the best comes last
    for age in reversed(range(len(chances))):
        chance = min(chances[age], 1.0)
        hits, time, left = chance, (1 - chance / 2) * (1 << age), 1 - chance
        while later and later[-1][0] * time > hits * later[-1][1]:
            more, longer, rest = later.pop()
            hits, time, left = hits + left * more, time + left * longer, left * rest
        later.append((hits, time, left))
        rates.append(hits / time)
    return rates[::-1]


def extend_chain(chain: array[int], tokens: array[int], page: int, seed: int) -> None:
    """Append the hashes of the whole pages of `tokens` that are not in `chain` yet; each stands for all text before."""
    first, pages = len(chain), len(tokens) // page
    if pages <= first:
        return
    words = np.frombuffer(tokens, dtype=np.uint64, count=pages * page).reshape(pages, page)
    before = chain[-1] if chain else seed
    for digest in (words[first:] @ _factors(page)).tolist():
        before = hash((before, digest))
        chain.append(before)


@cache
def _factors(page: int) -> NDArray[np.uint64]:
    """By which the tokens of a page are multiplied before they are added, modulo 2^64: equal in all processes."""
    return np.random.default_rng(0).integers(1 << 64, size=page, dtype=np.uint64) | np.uint64(1)
