"""Whether memory can move between slots and pages on this card: `cache/backing.py` put to the test, without a server.

    python bench/backing_check.py [--device cuda|cpu] [--gib 4] [--out FILE]

Stores of V4-Flash's geometry over reserved addresses. Every slot and page is written, memory moves to pages, back and
further, and after every move everything that must have stayed is compared, what is new is written and read, and the
memory in use is held against the budget. On CUDA besides: a graph captured before the moves reads through the
reservation after them, also where there was no memory when it was captured, as do `copy_state` (the project's kernel,
with --kernels) and plain copies; bandwidth through the reservation against a plain tensor; time of the moves.
Stops at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from measure import writable, write  # noqa: E402

from sglang_dsv4.cache.backing import backing_for, memory_for  # noqa: E402
from sglang_dsv4.cache.granules import GRANULE, plan_split  # noqa: E402
from sglang_dsv4.cache.handle import EntryStore, SlotStore  # noqa: E402
from sglang_dsv4.console import run_program  # noqa: E402
from sglang_dsv4.geometry import Geometry  # noqa: E402

PAGE = 128


class Check:
    """One plan, its stores, and what every slot and page should hold: a byte that its number says."""

    def __init__(self, device: str, budget: int) -> None:
        config = json.loads((ROOT / "configs" / "v4_flash.json").read_text())
        self.device, self.geometry = device, Geometry.from_config(config, page_size=PAGE)
        slots = int(0.3 * budget / self.geometry.slot_bytes)
        self.plan = plan_split(self.geometry, budget, slots=slots, least_slots=20, least_pages=100, granule=GRANULE)
        self.slots, self.pages = slots, self.plan.pages
        began = time.perf_counter()
        self.memory = memory_for(device, budget, GRANULE)
        self.states = SlotStore(
            self.geometry, slots + 1, device, backing_for(device, self.plan.slot_stores, self.memory)
        )
        self.entries = EntryStore(
            self.geometry, (self.pages + 1) * PAGE, device, backing_for(device, self.plan.page_stores, self.memory)
        )
        self.wait()
        self.seconds = time.perf_counter() - began

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def in_use(self) -> int:
        """Bytes that the stores have memory for. Raises where the books and the budget disagree."""
        used = self.states.nbytes + self.entries.nbytes
        expect(used == self.memory.nbytes, f"stores have {used} bytes, the memory says {self.memory.nbytes}")
        expect(used <= self.plan.budget, f"{used} bytes are more than {self.plan.budget}")
        return used

    def write(self, slots: range, pages: range) -> None:
        for slot in slots:
            self.states.slot_windows[:, slot] = slot % 251
            self.states.overlaps[:, slot] = float(slot)
        for page in pages:
            for pool in (self.entries.csa, self.entries.keys):
                pool[:, page // 2] = page // 2 % 241
            self.entries.hca[:, page // 64] = page // 64 % 239

    def compare(self) -> None:
        """Every byte of every slot and page. Raises at a difference."""
        device = self.device
        numbers = torch.arange(1, self.slots + 1, device=device)
        windows = self.states.slot_windows[:, 1 : self.slots + 1]
        for layer in windows:
            expect(bool((layer == (numbers % 251).to(torch.uint8)[:, None]).all()), "a window changed")
        for layer in self.states.overlaps[:, 1 : self.slots + 1].flatten(2):
            expect(bool((layer == numbers.float()[:, None]).all()), "overlap rows changed")
        for pool, per_group, modulus in (
            (self.entries.csa, 2, 241),
            (self.entries.keys, 2, 241),
            (self.entries.hca, 64, 239),
        ):
            groups = torch.arange(self.pages // per_group, device=device)
            for layer in pool[:, : len(groups)]:
                expect(bool((layer == (groups % modulus).to(torch.uint8)[:, None]).all()), "a page changed")

    def move(self, slots: int) -> dict[str, Any]:
        """Have so many slots and the pages that fit beside them; writes what is new."""
        old_slots, old_pages = self.slots, self.pages
        pages = self.plan.pages_beside(slots)
        self.wait()
        began = time.perf_counter()
        stores: list[Callable[[], None]] = [
            lambda: self.states.resize(slots + 1),
            lambda: self.entries.resize((pages + 1) * PAGE),
        ]
        for resize in stores if slots < old_slots else reversed(stores):
            resize()
        milliseconds = (time.perf_counter() - began) * 1e3
        self.slots, self.pages = slots, pages
        self.write(range(old_slots + 1, slots + 1), range(old_pages, pages + 1))
        self.wait()
        self.compare()
        in_use = self.in_use()
        return {"slots": slots, "pages": pages, "ms": round(milliseconds, 3), "in_use": in_use}


def expect(right: bool, what: str) -> None:
    if not right:
        raise RuntimeError(what)


def moves(check: Check) -> list[dict[str, Any]]:
    first = check.slots
    steps = [first - 1, first - 8, first - 24, first, first + 16, 20, check.plan.most_slots, first]
    return [check.move(slots) for slots in steps]


def graph_reads(check: Check) -> str:
    """A captured gather of a slot and a page per replay, before and after moves, and of memory that is new."""
    slot, group = (torch.ones(1, dtype=torch.int64, device="cuda") for _ in range(2))
    out = torch.empty(2, dtype=torch.uint8, device="cuda")

    def read() -> None:
        out[:1] = check.states.slot_windows[-1].index_select(0, slot)[:, -1]
        out[1:] = check.entries.csa[-1].index_select(0, group)[:, -1]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()

    def replayed(a_slot: int, a_group: int) -> None:
        slot.fill_(a_slot)
        group.fill_(a_group)
        graph.replay()
        expect(out.tolist() == [a_slot % 251, a_group % 241], f"graph read {out.tolist()} at {a_slot}, {a_group}")

    first = check.slots
    replayed(first, 3)
    check.move(first - 16)
    replayed(first - 16, check.pages // 2 - 1)  # pages that had no memory when the graph was captured
    check.move(first + 16)
    replayed(first + 16, check.pages // 2 - 1)  # and slots
    check.move(first)
    replayed(1, 1)
    return "reads through the reservation before and after moves"


def copies(check: Check, kernels: bool) -> str:
    """Slots by `copy_state`, pages by `copy_pages`."""
    from sglang_dsv4.ops.copy_state import copy_state, copy_state_cuda

    src, dst = (torch.tensor([n], device=check.device) for n in (check.slots, 2))
    (copy_state_cuda if kernels else copy_state)(check.states.slot_windows, check.states.overlaps, src, dst)
    found = check.states.slot_windows[:, 2]
    expect(bool((found == check.slots % 251).all()), "copy_state copied something else")
    expect(bool((check.states.overlaps[:, 2] == float(check.slots)).all()), "copy_state missed overlap rows")
    check.write(range(2, 3), range(0))
    last = check.pages // 2 * 2 - 2
    check.entries.copy_pages([last, last + 1], [2, 3])
    expect(bool((check.entries.keys[:, 1, :4352] == last // 2 % 241).all()), "copy_pages copied something else")
    check.write(range(0), range(2, 4))
    check.wait()
    check.compare()
    return "slots and pages"


def bandwidth(check: Check) -> dict[str, float]:
    """GB/s, read and written, of copies of all windows of a layer, and of a read of them."""
    through = check.states.slot_windows[check.geometry.num_layers // 2, : check.slots]
    plain = torch.empty_like(through)
    other = torch.empty_like(through)

    def rate(work: Callable[[], object], nbytes: int) -> float:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        began, times = time.perf_counter(), 50
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        return round(nbytes * times / (time.perf_counter() - began) / 1e9, 1)

    size = through.nbytes
    return {
        "copy plain": rate(lambda: other.copy_(plain), 2 * size),
        "copy from reservation": rate(lambda: other.copy_(through), 2 * size),
        "copy to reservation": rate(lambda: through.copy_(other), 2 * size),
        "read plain": rate(lambda: plain.view(torch.int64).sum(), size),
        "read reservation": rate(lambda: through.view(torch.int64).sum(), size),
        "MB": round(size / 1e6, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gib", type=float, default=4.0, help="budget of slots and pages")
    parser.add_argument("--kernels", action="store_true", help="copy slots by the project's kernel, built first")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=writable)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "backing_check: no CUDA device; --device cpu checks the bookkeeping\n")
    result: dict[str, Any] = {"commit": options.commit}
    try:
        result["card"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        check = Check(options.device, int(options.gib * (1 << 30)))
        result |= {"budget": check.plan.budget, "in_use": check.in_use(), "start_s": round(check.seconds, 3)}
        result |= {"granules": check.memory.used, "slots": check.slots, "pages": check.pages}
        if options.device == "cuda":
            result["free_before"] = torch.cuda.mem_get_info()[0]
        check.write(range(check.slots + 1), range(check.pages + 1))
        check.wait()
        check.compare()
        result["moves"] = moves(check)
        result["copies"] = copies(check, options.kernels)
        if options.device == "cuda":
            result["free_after"] = torch.cuda.mem_get_info()[0]
            result["graph"] = graph_reads(check)
            result["GB/s"] = bandwidth(check)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"backing_check: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1))
    if options.out:
        write(options.out, result)
    return 0


if __name__ == "__main__":
    run_program("backing_check", main)
