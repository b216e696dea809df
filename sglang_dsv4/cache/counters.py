"""What became of snapshots and pages since the server began. Host integers of the scheduler's process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """All count upwards.

    published           snapshots that the tree took over
    interior_published  of them and of the duplicates, those taken beside the last one of an extend step
    interior_refused    interior snapshots that found no slot to spare
    duplicates          snapshots that the tree had already; their slots were given back
    skipped             answers' ends that were not published because none is ever resumed
    superseded          snapshots dropped because their conversation had gone on
    snapshots_evicted   snapshots dropped with the leaf that was worth least
    pages_evicted       pages dropped for that reason
    lots_to_pages       moves of memory from slots to pages (`split.py`)
    lots_to_slots       and from pages to slots
    snapshots_moved     snapshots that were copied to another slot for that
    pages_moved         pages that were copied to another place for that
    missed_tokens       tokens of prompts that were not found, by cause (`causes.py`)
    hits, hit_tokens    requests that resumed, and what they found, by the kind of place; "nowhere" found nothing
    """

    published: int = 0
    interior_published: int = 0
    interior_refused: int = 0
    duplicates: int = 0
    skipped: int = 0
    superseded: int = 0
    snapshots_evicted: int = 0
    pages_evicted: int = 0
    lots_to_pages: int = 0
    lots_to_slots: int = 0
    snapshots_moved: int = 0
    pages_moved: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[str] = field(default_factory=Counter)
    missed_tokens: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> dict[str, int]:
        """The counts that are single numbers, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


counters = Counters()
