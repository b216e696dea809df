"""What no rule without knowledge of the future can exceed, in expectation, where arrivals are random by construction.

    python bench/bounds.py

A preset whose users answer after a fixed pause and an exponential time has no memory: of the conversations whose pause
is over, each is equally likely to be next, whatever was seen. So before a request at most `room / conversations` pages
can be expected to be found, with room for everything that is held. The bound is generous: it knows which conversations
have ended, what their next prompts will share and when a new one comes, holds nothing else, and needs no snapshots.
For shared system prompts it knows how many users of each are still to come, which is all that an order says that was
drawn at random.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import numpy as np  # noqa: E402
import workloads  # noqa: E402
from prefixes import PrefixIndex  # noqa: E402
from workloads import Conversations, Request, TokenSource, Workload  # noqa: E402

PAUSE = {"short-chats": 5.0, "branching": 5.0, "dropped-reasoning": 10.0}  # seconds before which nobody answers


def reusable_pages(workload: Workload, page: int) -> list[int]:
    """Whole pages of each prompt that were seen before it, in the stream's order."""
    index, talk, found = PrefixIndex(page), Conversations(TokenSource()), []
    for request in workload.requests:
        prompt, answer = talk.prompt(request), talk.drawn_answer(request)
        found.append(min(index.walk(prompt).tokens, len(prompt) - 1) // page)
        index.add(np.concatenate([prompt, answer]))
        talk.answered(request, prompt, answer)
    return found


def memoryless(
    requests: Sequence[Request], reusable: Sequence[int], *, room: float | Fraction, pause: float, snapshot: float = 0
) -> float:
    """Pages that can be expected to be found in all; `room` pages.

    snapshot  pages that one takes beside each kept conversation
    """
    following: dict[str, list[tuple[float, float, int]]] = {}  # of a session: last request, next one, pages it shares
    last: dict[str, float] = {}
    for request, pages in zip(requests, reusable, strict=True):
        if request.session in last:
            following.setdefault(request.session, []).append((last[request.session], request.arrival, pages))
        last[request.session] = request.arrival
    total = 0.0
    waits = [wait for session in following.values() for wait in session]
    for _, now, _ in waits:
        shares = sorted((pages for begin, end, pages in waits if begin + pause <= now <= end), reverse=True)
        space = room
        for pages in shares:
            total += max(0, min(pages, space - snapshot)) / len(shares)
            space -= pages + snapshot
    return total


def shuffled(groups: Sequence[str], *, pages: int, room: float | Fraction, snapshot: float = 0) -> float:
    """Pages that can be expected to be found in all, for prompts of `pages` pages, one a group, in random order.

    snapshot  pages that one takes beside each kept prompt
    """
    left, seen, total = Counter(groups), set[str](), 0.0
    for group in groups:
        kept, space = 0.0, room
        for count in sorted((left[known] for known in seen), reverse=True):
            kept += count * max(0, min(pages, space - snapshot))
            space -= pages + snapshot
        total += kept / left.total()
        left[group] -= 1
        seen.add(group)
    return total


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    from simulate import flash, limits_for

    from sglang_dsv4.cache.sizing import SLOTS_PER_REQUEST

    geometry = flash()
    page = geometry.page_size
    for name in (*PAUSE, "shared-system-prompt"):
        workload = workloads.build(name)
        limits = limits_for(workload, "third", geometry, users=1, chunk=8192)
        snapshots = limits.slots - SLOTS_PER_REQUEST * limits.running
        snapshot = geometry.slot_bytes / float(page * geometry.token_alloc_bytes)
        every_byte = limits.pages + snapshots * snapshot
        for what, room, each in (
            ("pages", limits.pages, 0.0),
            ("pages and snapshots", every_byte, 0.0),
            ("both and a snapshot for each prefix", every_byte, snapshot),
        ):
            if name in PAUSE:
                reusable = reusable_pages(workload, page)
                found = memoryless(workload.requests, reusable, room=room, pause=PAUSE[name], snapshot=each)
            else:
                found = shuffled(
                    [r.session.split(" user")[0] for r in workload.requests],
                    pages=8192 // page,
                    room=room,
                    snapshot=each,
                )
            print(f"{name}: {found * page:,.0f} tokens with the bytes of {what}")


if __name__ == "__main__":
    main()
