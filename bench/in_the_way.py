"""How long finding and moving what lies in the way of a move takes, by the size of the tree.

    python bench/in_the_way.py [--nodes 1000,5000,20000] [--out FILE]

Chats of three turns on eight shared system prompts fill a tree, no model. Every third leaf goes, so that pages and
slots are free everywhere. Then looks are timed, in milliseconds of the thread: at pages above the end after one lot, at
snapshots above it after one and eight, and at the lowest snapshots, which go up after slots grew. Stores are meta
tensors: copies of rows are not in the times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from engine import Engine, Limits  # noqa: E402
from kept import Kept, told  # noqa: E402
from measure import positives, writable  # noqa: E402
from simulate import Simulation, flash  # noqa: E402
from workloads import Piece, Request, Workload  # noqa: E402

from sglang_dsv4.cache.counters import counters  # noqa: E402
from sglang_dsv4.cache.superseded import paths_of  # noqa: E402
from sglang_dsv4.console import table  # noqa: E402

TURNS, PAGES_PER_CHAT, SLOTS_PER_CHAT, NODES_PER_CHAT = 3, 19, 5.5, 6


def chats(count: int) -> Workload:
    """Turn by turn, all chats in between."""
    requests = [
        Request(f"chat {i}", turn, 0.0, None, _pieces(i, turn), 150) for turn in range(TURNS) for i in range(count)
    ]
    return Workload("chats", tuple(requests))


def _pieces(chat: int, turn: int) -> tuple[Piece, ...]:
    system = (Piece(f"system {chat % 8}", 1000),) if turn == 0 else ()
    return (*system, Piece("<user>", 1), Piece(f"question {chat} {turn}", 500 + 100 * (chat % 5)))


def filled(nodes: int) -> Engine:
    """A tree of about so many nodes."""
    count = max(8, round(nodes / NODES_PER_CHAT))
    pages, slots = PAGES_PER_CHAT * count, round(SLOTS_PER_CHAT * count)
    limits = Limits(pages, slots, context=1 << 13, granule=65_536)
    engine = Engine(limits, flash())
    Simulation(chats(count), engine).run()
    tree, order = engine.tree, paths_of(engine.tree).order
    ends = [mark.node for group in order.model._leaves.values() for mark in group]
    gone = dict.fromkeys(tree.tree_components, 0)
    for node in sorted(ends)[::3]:
        if not tree.tree_core.collect_path_info([node])[0][-1].num_children:
            tree._evict_device_leaf(node, gone)
    return engine


def nodes_of(engine: Engine) -> int:
    """Of all numbers that nodes have had."""
    core, newest = engine.tree.tree_core, max(paths_of(engine.tree).order.model._ends)
    return sum(_stands(core, node) for node in range(1, newest + 1))


def _stands(core: Any, node: int) -> bool:
    try:
        return bool(core.collect_path_info([node])[0])
    except KeyError:
        return False


def timed(action: Callable[[], Any]) -> float:
    """Milliseconds that this thread computed: others may use the machine."""
    start = time.thread_time()
    action()
    return 1000 * (time.thread_time() - start)


def looks(engine: Engine, kind: str, lots: int) -> dict[str, Any]:
    """A drain of so many lots, looked at until it is done or nothing more can move."""
    tree, split = engine.tree, paths_of(engine.tree).split
    assert split is not None
    allocator: Any = split.pages if kind == "pages" else split.slots
    move = split._move_pages if kind == "pages" else split._move_snapshots
    name = f"{kind if kind == 'pages' else 'snapshots'}_moved"
    allocator.start_drain(_cost(split, lots) if kind == "pages" else lots * split.lot)
    times, before, begin = [], getattr(counters, name), getattr(counters, name)
    while not allocator.drain.done:
        times.append(timed(lambda: move(tree)))
        if getattr(counters, name) == before and len(times) > 8:
            break
        before = getattr(counters, name)
    done = allocator.drain.done
    moved = getattr(counters, name) - begin
    allocator.cancel_drain()
    return {"what": kind, "lots": lots, "moved": moved, "done": done, "looks": len(times), **_summary(times)}


def _cost(split: Any, lots: int) -> int:
    """Pages that so many lots of slots cost."""
    return int(split.pages.drain.end - split._pages_beside(split.slots.drain.end + lots * split.lot))


def _summary(times: list[float]) -> dict[str, float]:
    return {"longest_ms": round(max(times, default=0.0), 2), "all_ms": round(sum(times), 2)}


def raised(engine: Engine) -> dict[str, Any]:
    """A lot of slots is free at the upper end: the lowest snapshots go there."""
    split = paths_of(engine.tree).split
    assert split is not None
    free = split.slots.free_ids()
    low, high = free[: -split.lot], free[-split.lot :]
    split.slots.take(low)
    before = counters.snapshots_moved
    time_ms = timed(lambda: split._raise_snapshots(engine.tree, high[0]))
    split.slots.give_back(low)
    moved = counters.snapshots_moved - before
    return {"what": "raised", "lots": 1, "moved": moved, "done": True, "looks": 1, **_summary([time_ms])}


def measure(nodes: int) -> list[dict[str, Any]]:
    engine = filled(nodes)
    size = {"nodes": nodes_of(engine), "snapshots": engine.snapshots, "pages": engine.used_pages}
    found = [looks(engine, kind, lots) for kind, lots in (("pages", 1), ("slots", 1), ("slots", 8))]
    return [{**size, **one} for one in [*found, raised(engine)]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the finding of what lies in the way of a move.")
    parser.add_argument("--nodes", type=positives, default=[1000, 5000, 20_000], help="comma-separated sizes of trees")
    parser.add_argument("--out", type=writable, help="JSON file for the results")
    args = parser.parse_args()
    kept = Kept(args.out)
    with told("in_the_way", kept, lambda rows: table(tuple(rows[0]), [tuple(row.values()) for row in rows], left=0)):
        for nodes in args.nodes:
            kept.add(measure(nodes))


if __name__ == "__main__":
    main()
