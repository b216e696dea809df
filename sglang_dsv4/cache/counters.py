"""What became of snapshots and pages since the server began. Host integers of the scheduler's process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """All count upwards.

    published           snapshots that the tree took over
    interior_published  of them, those taken beside the last one of an extend step
    interior_refused    interior snapshots that found no slot to spare
    duplicates          snapshots that the tree had already
    superseded          snapshots dropped because their conversation had gone on
    """

    published: int = 0
    interior_published: int = 0
    interior_refused: int = 0
    duplicates: int = 0
    superseded: int = 0


counters = Counters()
