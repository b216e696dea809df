"""Where requests resume: at the end of an answer, or at the end of the prompt before it.

A chat whose encoding keeps answers as they were resumes at the answer's end and never again at the prompt's. One
whose encoding drops the reasoning from earlier turns resumes at the prompt's end only. Which traffic a server gets is
not known beforehand, and the wrong half of the snapshots is wasted memory; so it is counted.
"""

from __future__ import annotations

from collections import OrderedDict

PROMPT, ANSWER, INNER = "prompt end", "answer end", "inner"
_REMEMBERED = 1 << 16  # nodes whose kind is known; older ones count for nothing
_MEMORY = 64  # resumes after which an observation has lost about two thirds of its weight
_SURE, _EVIDENCE = 0.95, 12.0  # share and weight of observations that decide
_TRY = 8  # one answer's end in so many is kept even where none is resumed


class ResumeHabits:
    """Counts resumes by kind, the last ones most."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[int, str] = OrderedDict()
        self._answered: set[int] = set()  # prompt ends behind which an answer's end was published
        self._at_answer = self._at_prompt = 0.0
        self._skipped = 0

    def published(self, node: int, kind: str, behind: int | None = None) -> None:
        """A snapshot of that kind stands at `node`; an answer's end stands behind the prompt end `behind`."""
        self._kinds.setdefault(node, kind)
        if kind == ANSWER and behind is not None:
            self._answered.add(behind)
        while len(self._kinds) > _REMEMBERED:
            self._answered.discard(self._kinds.popitem(last=False)[0])

    def resumed(self, node: int) -> str:
        """A request found its prefix at `node`; returns the kind of the place."""
        kind = self._kinds.get(node, INNER)
        if kind == ANSWER:
            self._count(1.0, 0.0)
        elif kind == PROMPT and node in self._answered:
            self._count(0.0, 1.0)
        return kind

    def _count(self, answer: float, prompt: float) -> None:
        fade = 1 - 1 / _MEMORY
        self._at_answer, self._at_prompt = self._at_answer * fade + answer, self._at_prompt * fade + prompt

    @property
    def _weight(self) -> float:
        return self._at_answer + self._at_prompt

    def prompt_ends_are_spent(self) -> bool:
        """Whether a prompt's end is of no use once its answer's end stands."""
        return self._weight >= _EVIDENCE and self._at_answer >= _SURE * self._weight

    def keep_answer_end(self) -> bool:
        """Whether to publish the next answer's end. Now and then yes in any case: habits change."""
        if self._weight < _EVIDENCE or self._at_prompt < _SURE * self._weight:
            return True
        self._skipped += 1
        return self._skipped % _TRY == 0

    def clear(self) -> None:
        """Forget nodes, which are gone; what was learned stays."""
        self._kinds.clear()
        self._answered.clear()
