"""Where snapshots are taken. Positions only; no pools, no tree, no SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_dsv4.geometry import WINDOW

# Tokens between the rungs of a long prompt's ladder, and between those of them that may displace a superseded
# snapshot; the others take free slots only while many are free. docs/tuning.md shows what other distances give.
LADDER, COARSE = 2048, 8192
# A prompt of so many tokens and such a part of the pool keeps footholds.
LONG, LARGE = 65_536, 1 / 8
# Part of its length that a lone text may grow by before the beginning that stays beside it is cut.
GROWTH = 1 / 16


def is_lone(prompt_len: int, pool: int) -> bool:
    """Whether no second text as long as the prompt fits in a pool of so many tokens."""
    return LONG <= prompt_len <= pool < 2 * prompt_len


def footholds(prompt_len: int, pool: int, page: int, *, lone: bool) -> tuple[int, ...]:
    """Page boundaries whose snapshots the path of the prompt keeps when it goes on; `pool` tokens of pages at most.

    Where few texts as long fit, the end of one can go and its beginning be found: as far as the rungs at doubling
    distances up to its middle. Beside a lone text only so much of another stays as the pool has beyond it. If another
    is about as long, the deepest foothold is there, and one halfway for when it has grown more than that allows.
    """
    if prompt_len < max(LONG, LARGE * pool):
        return ()
    if lone:
        beside = pool - int(prompt_len * (1 + GROWTH))
        return tuple(sorted({max(LADDER, at // page * page) for at in (beside // 2, beside)}))
    return tuple(LADDER << n for n in range(16) if 2 * (LADDER << n) <= prompt_len)


class Positions(NamedTuple):
    """Ascending page boundaries whose state an extend step should keep.

    needed   a later request is expected to resume there: worth another, older snapshot
    rungs    somebody may branch near there: worth a slot that nobody else wants
    """

    needed: tuple[int, ...]
    rungs: tuple[int, ...]

    @property
    def last(self) -> int | None:
        return max((*self.needed, *self.rungs), default=None)


@dataclass(frozen=True)
class SnapshotPolicy:
    """Snapshots of a prefill, at page boundaries only.

    page_size  tokens; every compressor tail is empty at its multiples
    ladder     tokens between rungs, 0 for none
    """

    page_size: int
    ladder: int = LADDER

    def positions(
        self,
        *,
        prefix_len: int,
        extend_end: int,
        prompt_len: int,
        branch: int | None = None,
        system_end: int | None = None,
        footholds: tuple[int, ...] = (),
    ) -> Positions:
        """Positions in (prefix_len, extend_end] whose state this extend step should keep.

        branch      where cached text goes on differently, if the tree reported it: the next request that shares it
                    resumes there
        system_end  tokens before the first user message: other conversations share them, this one's second request on
        footholds   of a lone text: another as long pushes it back to one of them
        Needed besides: the last page boundary of the prompt. A prompt of whole pages also keeps the page before: a
        match is capped one token short of the prompt, so its exact repeat can resume only there. Where a prompt goes
        on after the step, the step's end is a rung like the others.
        """
        needed = {self._floor(prompt_len), self._floor(prompt_len - 1)}
        needed |= {self._floor(mark) for mark in (branch, system_end) if mark is not None}
        needed.update(footholds)
        kept = self._within(needed, prefix_len, extend_end)
        rungs = {self._floor(extend_end)}
        if self.ladder:
            first = prefix_len // self.ladder * self.ladder + self.ladder
            rungs |= {self._floor(rung) for rung in range(first, extend_end, self.ladder)}
        return Positions(kept, tuple(p for p in self._within(rungs, prefix_len, extend_end) if p not in kept))

    def _floor(self, length: int) -> int:
        return length // self.page_size * self.page_size

    @staticmethod
    def _within(positions: set[int], prefix_len: int, extend_end: int) -> tuple[int, ...]:
        return tuple(sorted(p for p in positions if prefix_len + WINDOW <= p <= extend_end))
