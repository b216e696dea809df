"""Drives attention steps over real stores without SGLang: requests, pages in random order, snapshots, resumes.

Used by tests of the operations and of the model; everything starts poisoned with NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from sglang_dsv4.attention.core import Step
from sglang_dsv4.cache.handle import CacheHandle, EntryStore, SlotStore, TailStore
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.ops.dispatch import Operations, operations
from sglang_dsv4.ops.meta import StepMeta


@dataclass
class Request:
    """A running request: its request row, its slot, its pages, and how many tokens stand."""

    row: int
    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class Stage:
    """Pools for a handful of requests; hands out rows, slots and shuffled pages."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        pages: int = 64,
        slots: int = 24,
        rows: int = 12,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.geometry = geometry
        self.device = device
        page = geometry.page_size
        self.entries = EntryStore(geometry, (pages + 1) * page, device)
        self.slots = SlotStore(geometry, slots + 1, device)
        self.tails = TailStore(geometry, rows + 1, device)
        for store in (self.entries, self.slots, self.tails):
            store.poison()
        self.cache = CacheHandle(geometry, self.entries, self.slots, self.tails)
        self.ops: Operations = operations(torch.device(device).type)
        order = random.Random(seed)
        self.free_pages = list(range(1, pages + 1))
        order.shuffle(self.free_pages)
        self.free_slots = list(range(1, slots + 1))
        order.shuffle(self.free_slots)
        self.free_rows = list(range(1, rows + 1))

    def admit(
        self, *, pages: list[int] | None = None, snapshot: int | None = None, length: int = 0
    ) -> Request:
        """A new request; with `snapshot` it resumes after `length` tokens whose pages it shares."""
        request = Request(self.free_rows.pop(), self.free_slots.pop(), list(pages or []), length)
        self.slots.poison(torch.tensor([request.slot]))
        self.tails.poison(torch.tensor([request.row]))
        if snapshot is not None:
            source, target = torch.tensor([snapshot]), torch.tensor([request.slot])
            self.ops.copy_state(self.slots.slot_windows, self.slots.overlaps, source, target)
        return request

    def retire(self, request: Request) -> None:
        """Give row and slot back, dirty as they are; pages stay (a tree would own them)."""
        self.free_rows.append(request.row)
        self.free_slots.append(request.slot)

    def new_slot(self) -> int:
        return self.free_slots.pop()

    def step(
        self,
        requests: list[Request],
        counts: list[int],
        *,
        decode: bool = False,
        snapshots: dict[int, list[tuple[int, int]]] | None = None,
        padding: int = 0,
    ) -> Step:
        """The step in which request i gets counts[i] more tokens; lengths advance at once.

        snapshots  request index to [(length, slot)]
        padding    padded tokens at the end, and as many padded requests (dummy row and slot)
        """
        page = self.geometry.page_size
        prefix = [r.length for r in requests]
        lens = [r.length + n for r, n in zip(requests, counts, strict=True)]
        for request, length in zip(requests, lens, strict=True):
            while len(request.pages) * page < length:
                request.pages.append(self.free_pages.pop())
            request.length = length
        columns = max(1, max(len(r.pages) for r in requests))
        table = [r.pages + [0] * (columns - len(r.pages)) for r in requests] + [[0] * columns] * padding
        owner = [i for i, n in enumerate(counts) for _ in range(n)] + [-1] * padding
        positions = [p for a, b in zip(prefix, lens, strict=True) for p in range(a, b)] + [0] * padding
        offsets = [0]
        for n in counts + [0] * padding:
            offsets.append(offsets[-1] + n)
        wanted = snapshots or {}
        width = max((len(v) for v in wanted.values()), default=0)
        due = [(wanted.get(i, []) + [(-1, -1)] * width)[:width] for i in range(len(requests) + padding)]

        def ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        pad = [0] * padding
        meta = StepMeta(
            req_rows=ints([r.row for r in requests] + pad),
            slots=ints([r.slot for r in requests] + pad),
            prefix_lens=ints(prefix + pad),
            seq_lens=ints(lens + pad),
            token_offsets=ints(offsets),
            token_to_req=ints(owner),
            positions=ints(positions, torch.int64),
            page_table=ints(table),
            snapshot_slots=ints([[s for _, s in row] for row in due]).reshape(len(due), width),
            snapshot_lens=ints([[n for n, _ in row] for row in due]).reshape(len(due), width),
            page_size=page,
        )
        return Step(meta, self.cache, self.ops, decode, max(lens), prefix + pad, lens + pad)

    def snapshot(self, request: Request) -> int:
        """Copy the request's slot, as a decode step does at a page boundary."""
        slot = self.new_slot()
        self.ops.copy_state(
            self.slots.slot_windows, self.slots.overlaps, torch.tensor([request.slot]), torch.tensor([slot])
        )
        return slot
