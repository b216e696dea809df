"""What a split that moves at run time could gain: pages and snapshots draw from one number of bytes.

    python bench/moving.py [PRESET...] [--path MOONCAKE.jsonl] [--memory third,0.5,0.75] [--lot 1,28] [--out FILE]

The same bytes, tree and policy as `simulate.py`, but a byte serves whichever pool needs it. Superseded snapshots go
first whatever is short, while snapshots hold more than `--floor` of the bytes; then the leaf that is worth least a
byte. With `--lot N` snapshots hold their bytes in lots of N slots, and a lot turns into pages once as many slots are
free as it has. Which slots are free together is not looked at, and moving costs nothing: more than what can be built.
Simulator, no server.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import workloads  # noqa: E402
from engine import Engine, Limits  # noqa: E402
from kept import Kept, told  # noqa: E402
from measure import memories, part, positives, writable  # noqa: E402
from simulate import Simulation, flash, limits_for, oracle_tokens  # noqa: E402
from workloads import PRESETS, Workload  # noqa: E402

from sglang_dsv4.cache import reuse  # noqa: E402
from sglang_dsv4.cache.sizing import SLOTS_PER_REQUEST  # noqa: E402
from sglang_dsv4.cache.superseded import paths_of  # noqa: E402
from sglang_dsv4.console import positive, table  # noqa: E402
from sglang_dsv4.geometry import Geometry  # noqa: E402


class SharedBytes:
    """How many pages and slots are left of one number of bytes.

    budget  bytes of pages and snapshots; `reserve` slots of running requests come on top
    lot     slots by which snapshots take and give back bytes
    """

    def __init__(self, pages: Any, slots: Any, geometry: Geometry, budget: int, reserve: int, lot: int = 1) -> None:
        self.pages, self.slots, self.budget, self.reserve, self.lot = pages, slots, budget, reserve, lot
        self.page_bytes = int(geometry.page_size * geometry.token_alloc_bytes)
        self.slot_bytes = geometry.slot_bytes
        self._free_tokens, self._free_slots = pages.available_size, slots.available_size
        self._alloc = slots.alloc
        # SGLang's allocators answer with what the bytes allow, beside what their numbers do.
        pages.available_size, slots.available_size, slots.alloc = self.tokens_left, self.slots_left, self.alloc

    @property
    def snapshots(self) -> int:
        """Slots beyond those that are kept for running requests."""
        return max(0, int(self.slots.size - self._free_slots()) - self.reserve)

    @property
    def used_pages(self) -> int:
        return int(self.pages.num_pages - self._free_tokens() // self.pages.page_size)

    @property
    def part(self) -> float:
        """Of the bytes, what snapshots hold."""
        return self.snapshots * self.slot_bytes / self.budget

    @property
    def left(self) -> int:
        """Bytes that neither pages nor lots of snapshots hold."""
        lots = -(-self.snapshots // self.lot)
        return int(self.budget - self.used_pages * self.page_bytes - lots * self.lot * self.slot_bytes)

    def tokens_left(self) -> int:
        return min(self._free_tokens(), max(0, self.left) // self.page_bytes * self.pages.page_size)

    def slots_left(self) -> int:
        unused = max(0, self.reserve - int(self.slots.size - self._free_slots()))
        in_lots = -self.snapshots % self.lot
        lots = max(0, self.left) // (self.lot * self.slot_bytes)
        return min(self._free_slots(), unused + in_lots + lots * self.lot)

    def alloc(self, need_size: int) -> Any:
        return self._alloc(need_size) if need_size <= self.slots_left() else None


class BytesModel(reuse.ReuseModel):
    """Leaves by worth a byte: a leaf gives back its pages and the snapshot at its end."""

    def __init__(self, snapshot_pages: float) -> None:
        super().__init__()
        self.snapshot_pages = snapshot_pages

    def _rank(self, key: Any, *, by_span: bool) -> tuple[float, int, Any]:
        span = 0.75 * (1 << key.span_bits)
        return self.values(key.cls)[key.age] * span / (span + self.snapshot_pages), self._serials[key], key


class SharedEngine(Engine):
    """A server with the bytes of `limits` that no split divides."""

    def __init__(self, limits: Limits, geometry: Geometry, *, lot: int = 1, floor: float = 0.1) -> None:
        page_bytes = int(limits.page * geometry.token_alloc_bytes)
        reserve = SLOTS_PER_REQUEST * limits.running
        budget = limits.pages * page_bytes + (limits.slots - reserve) * geometry.slot_bytes
        most = dataclasses.replace(
            limits, pages=budget // page_bytes, slots=reserve + budget // geometry.slot_bytes
        )
        super().__init__(most, geometry)
        self.limits = dataclasses.replace(most, pages=limits.pages, slots=limits.slots)  # the oracle's bytes
        self.shared = SharedBytes(self.pages, self.pool.mamba_allocator, geometry, budget, reserve, lot)
        self.floor = floor
        paths_of(self.tree).order.model = BytesModel(geometry.slot_bytes / page_bytes)
        self._sglang_evicts = self.tree.evict_for_alloc
        self.tree.evict_for_alloc = self._make_room

    def admits(self, run: Any) -> bool:
        """One at a time: whatever it needs can be evicted."""
        tokens = len(run.ids) + len(run.answer) + 2 * self.limits.page
        return not self.running and tokens <= self.shared.budget // self.shared.page_bytes * self.limits.page

    def room(self) -> int:
        """Every token that could be free."""
        held = int(self.tree.full_protected_size()) // self.limits.page * self.shared.page_bytes
        return int((self.shared.budget - held) // self.shared.page_bytes * self.limits.page)

    def _make_room(self, params: Any, **kwargs: Any) -> Any:
        """Superseded snapshots first, then leaves, until the bytes are there; SGLang's own way if that fails."""
        paths, tree = paths_of(self.tree), self.tree
        tokens = self.pages.available_size() + params.num_tokens
        slots = self.shared.slots_left() + params.mamba_num
        evicted, states = 0, 0

        def short() -> bool:
            return bool(self.pages.available_size() < tokens or self.shared.slots_left() < slots)

        while short() and self.shared.part > self.floor and paths.trim(tree, 1):
            states += 1
        while short():
            gone = paths.order.evict(tree, 1, 0)
            if gone == (0, 0):
                break
            evicted, states = evicted + gone[0], states + gone[1]
        left = dataclasses.replace(
            params,
            num_tokens=max(0, tokens - self.pages.available_size()),
            mamba_num=max(0, slots - self.shared.slots_left()),
        )
        result = self._sglang_evicts(left, **kwargs)
        result.num_tokens_evicted += evicted
        result.mamba_num_evicted += states
        return result

    @property
    def used_pages(self) -> int:
        return self.shared.used_pages


def measure(workload: Workload, memory: str, lots: list[int], floor: float) -> list[dict[str, Any]]:
    """A row for the static split and one for each lot. Raises ValueError where a request does not fit."""
    geometry = flash()
    limits = limits_for(workload, memory, geometry, users=1, chunk=8192)
    rows = []
    for lot in [0, *lots]:
        engine = SharedEngine(limits, geometry, lot=lot, floor=floor) if lot else Engine(limits, geometry)
        simulation = Simulation(workload, engine)
        cached = sum(row.cached for row in simulation.run(progress=True))
        known = oracle_tokens(simulation, geometry)
        rows.append(
            {
                "workload": workload.name,
                "requests": len(workload.requests),
                "memory": memory,
                "floor": floor if lot else None,
                "split": "moves" if lot == 1 else f"moves in lots of {lot}" if lot else "static",
                "limits": dataclasses.asdict(limits),
                "cached_tokens": cached,
                "oracle_tokens": known,
                "cached_over_oracle": round(cached / known, 4) if known else 1.0,
                "peak_pages": engine.peak_pages,
                "peak_snapshots": engine.peak_snapshots,
            }
        )
    return rows


def describe(results: Sequence[dict[str, Any]]) -> str:
    """A line a run."""
    keys = ("workload", "memory", "split", "cached_tokens", "oracle_tokens", "cached_over_oracle")
    keys = (*keys, "peak_pages", "peak_snapshots")
    return table(keys, [tuple(row[key] for key in keys) for row in results], left=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="*", default=[name for name in PRESETS if name != "mooncake"])
    parser.add_argument("--path", type=Path, help="recording for mooncake, which is then measured, too")
    parser.add_argument("--chats", type=positive, help="number of chats of short-chats (120)")
    parser.add_argument("--memory", type=memories, default=["third"], help="comma-separated, as for simulate.py")
    parser.add_argument("--lot", type=positives, default=[1], help="comma-separated slots by which memory moves")
    parser.add_argument("--floor", type=part, default=0.1, help="part of the bytes that superseded snapshots may keep")
    parser.add_argument("--limit", type=positive, help="requests to take from the beginning")
    parser.add_argument("--out", type=writable, help="JSON file for the results")
    args = parser.parse_args()
    kept = Kept(args.out, command=" ".join(["python", "bench/moving.py", *sys.argv[1:]]))
    with told("moving", kept, describe):
        for name in dict.fromkeys([*args.workload, *(["mooncake"] if args.path else [])]):
            path = args.path if name == "mooncake" else None
            built = workloads.build(name, path=path, chats=args.chats, limit=args.limit)
            for memory in args.memory:
                kept.add(measure(built, memory, args.lot, args.floor))


if __name__ == "__main__":
    main()
