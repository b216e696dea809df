"""How memory moves between slots and pages while a server runs.

Pages and slots have one number of bytes (`granules.SplitPlan`). Where pages are short and slots lie idle, or hold
superseded snapshots beyond a tenth of the bytes, slots become pages; where slots are short and pages lie free, pages
become slots. Leaves take their pages and their snapshot along when they go, so what is worth least a byte gives back
both, and whichever of the two is left over finds its way to the other side. Nothing is evicted for a move, and nobody
waits for one: what cannot go yet, because a request holds it, is withheld when it comes back.

Moves happen in the scheduler's thread where room is made for an allocation, with the device idle: no step is in
flight then, and the next one is not launched. They depend on the tree, the allocators and the number of requests
alone, so that all ranks move alike.

Cached text above the new end is copied below it: a snapshot by `copy_state`, a page row by row. The tree keeps places
in tensors that are written in place. What a request holds never moves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sglang_dsv4.cache.counters import counters

if TYPE_CHECKING:
    from sglang_dsv4.cache.granules import SplitPlan
    from sglang_dsv4.cache.movable import MovablePages, MovableSlots

LOT, LOT_PART = 16, 32  # slots that move together: so many, or one in so many of those at first if that is less
MOST_LOTS = 8  # at once
SPARE = 4  # slots beside those of running requests that pages do not get: two texts' footholds
FLOOR = 0.1  # part of the bytes that superseded snapshots may keep
PAUSE = 4  # requests between two looks at a move that is not done: each waits for the device
PATIENCE = 64  # requests until a move is given up that a request's slots or pages stand in the way of


class MovingSplit:
    """The split of one tree. `consider` is all that others call."""

    def __init__(self, tree: Any, plan: SplitPlan) -> None:
        self.plan = plan
        self.slots: MovableSlots = tree.req_to_token_pool.mamba_allocator
        self.pages: MovablePages = tree.token_to_kv_pool_allocator
        self.states, self.entries = tree.req_to_token_pool.mamba_pool, tree.token_to_kv_pool_allocator.get_kvcache()
        geometry = self.states.geometry
        self.slot_bytes = geometry.slot_bytes
        spare = plan.budget - plan.slot_stores.nbytes(plan.least_slots + 1)
        self.floor = int(FLOOR * spare / self.slot_bytes)
        self._pages_beside = lru_cache(4096)(plan.pages_beside)
        self._most_slots = plan.most_slots
        self.most_tokens = plan.pages_beside(plan.least_slots + SPARE) * self.pages.page_size
        self.lot = max(1, min(LOT, plan.slots // LOT_PART))
        self.target: int | None = None  # slots after the move that has begun
        self._began = self._again = 0  # when the move began, and when to look again at what stands in its way

    def snapshots(self, tree: Any) -> int:
        return int(tree.mamba_evictable_size() + tree.mamba_protected_size())

    def consider(self, tree: Any, paths: Any, tokens: int, snapshots: int) -> None:
        """So many tokens and slots are missing: move memory if that helps, or go on with the move that has begun."""
        now = paths.order.model.now
        self.yield_to(tokens, snapshots)
        if self.target is None:
            if tokens > 0:
                self._toward_pages(tree, paths, -(-tokens // self.pages.page_size))
            elif snapshots > 0:
                self._toward_slots()
            self._began = self._again = now
        if self.target is not None:
            self._go_on(tree, paths, now)

    def yield_to(self, tokens: int, snapshots: int) -> None:
        """Whoever needs now what a move withholds gets it: the move is given up."""
        if tokens > 0 and self.pages.drain.limit is not None:
            self.pages.cancel_drain()
            self.target = None
        if snapshots > 0 and self.slots.drain.limit is not None:
            self.slots.cancel_drain()
            self.target = None

    def may_trim(self, tree: Any) -> bool:
        """Whether superseded snapshots go before leaves: below the floor, branches are worth more."""
        return self.snapshots(tree) > self.floor

    # Decisions

    def _toward_pages(self, tree: Any, paths: Any, pages: int) -> None:
        """As many lots as the missing pages need and slots are idle or superseded."""
        end, lot = self.slots.drain.end, self.lot
        gain = self._pages_beside(end - lot) - self.pages.drain.end if end > lot else 0
        most = min(MOST_LOTS * lot, end - self.plan.least_slots - SPARE)
        if gain <= 0 or most < lot:
            return
        count = min(most, -(-pages // gain) * lot)
        short = count - self.slots.available_size()
        short -= paths.trim_lone(tree, short) if short > 0 else 0
        if short > 0 and (spare := self.snapshots(tree) - self.floor) > 0:
            paths.trim(tree, min(short, spare))
        count = min(count, self.slots.available_size())
        if count >= lot:
            self.target = end - count
            self.slots.start_drain(count)

    def _toward_slots(self) -> None:
        """A lot, if the pages that it costs are free."""
        end, free = self.slots.drain.end + self.lot, self.pages.available_size() // self.pages.page_size
        if free < self.lot or end > self._most_slots:
            return
        count = self.pages.drain.end - self._pages_beside(end)
        if 0 < count <= free:
            self.target = end
            self.pages.start_drain(count)

    # Moves

    def _go_on(self, tree: Any, paths: Any, now: int) -> None:
        shrinking: Any = self.slots if self.slots.drain.limit is not None else self.pages
        if not shrinking.drain.done and now >= self._again:
            self._again = now + PAUSE
            self._wait()
            if shrinking is self.slots:
                self._move_snapshots(tree, paths)
            else:
                self._move_pages(tree, paths)
        if shrinking.drain.done:
            self._finish(tree, paths)
        elif now - self._began >= PATIENCE or shrinking.drain.limit is None:  # a flush ends a drain
            shrinking.cancel_drain()
            self.target = None

    def _finish(self, tree: Any, paths: Any) -> None:
        slots, pages, target = self.slots, self.pages, self.target
        assert target is not None
        slots_before, pages_before = slots.drain.end, pages.drain.end
        self._wait()
        if target < slots_before:
            slots.drain.finish()
            self.states.store.resize(target + 1)
            count = self._pages_beside(target) - pages_before
            self.entries.store.resize((pages_before + count + 1) * pages.page_size)
            pages.grow(count)
            counters.lots_to_pages += 1
        else:
            pages.drain.finish()
            self.entries.store.resize((pages.drain.end + 1) * pages.page_size)
            self.states.store.resize(target + 1)
            slots.grow(target - slots_before)
            self._raise_snapshots(tree, paths, slots_before + 1)
            counters.lots_to_slots += 1
        self.target = None
        assert self.plan.nbytes(slots.drain.end, pages.drain.end) <= self.plan.budget

    def _wait(self) -> None:
        """No step is in flight afterwards."""
        if torch.device(self.slots.device).type == "cuda":
            torch.cuda.synchronize()

    def _move_snapshots(self, tree: Any, paths: Any) -> None:
        """Those above the limit to free slots below it."""
        if (limit := self.slots.drain.limit) is not None:
            above = [one for one in _located(paths.snapshots_of(tree)) if one[0] > limit]
            self._move(tree, above, self.slots.free_ids())

    def _raise_snapshots(self, tree: Any, paths: Any, first: int) -> None:
        """The lowest ones to free slots from `first` on, so that running requests do not get those."""
        free = [slot for slot in self.slots.free_ids() if slot >= first]
        below = sorted(one for one in _located(paths.snapshots_of(tree)) if one[0] < first)
        self._move(tree, below, free)

    def _move(self, tree: Any, snapshots: list[tuple[int, int, Any]], free: list[int]) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        unlocked = (one for one in snapshots if not _snapshot_locked(tree, one[1]))
        moves = list(zip(free, unlocked, strict=False))
        if not moves:
            return
        device = self.slots.device
        old = torch.tensor([slot for _, (slot, *_) in moves], dtype=torch.int64, device=device)
        self.states.copy_from(old, torch.tensor([to for to, _ in moves], dtype=torch.int64, device=device))
        self.slots.take([to for to, _ in moves])
        for to, (slot, node, value) in moves:
            value.fill_(to)
            held = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
            assert held is not None and int(held[0]) == to
            _tell_audit(tree, "slots", slot, to)
        counters.snapshots_moved += len(moves)
        self.slots.free(old)

    def _move_pages(self, tree: Any, paths: Any) -> None:
        limit, free, size = self.pages.drain.limit, self.pages.free_ids(), self.pages.page_size
        values = paths.pages_of(tree)
        if not values or not free or limit is None:
            return
        ids = (torch.cat([value[::size] for _, value in values]) // size).tolist()
        old: list[int] = []
        places: list[tuple[Any, int]] = []  # value and page in it
        at = 0
        for node, value in values:
            mine = ids[at : at + len(value) // size]
            at += len(mine)
            above = [i for i, page in enumerate(mine) if page > limit]
            if above and len(old) + len(above) <= len(free) and not _pages_locked(tree, node):
                old += [mine[i] for i in above]
                places += [(value, i) for i in above]
        if not old:
            return
        new, device = free[: len(old)], self.pages.device
        self.entries.store.copy_pages(old, new)
        self.pages.take(new)
        inner = torch.arange(size, dtype=torch.int64, device=device)
        for (value, i), page, to in zip(places, old, new, strict=True):
            value[i * size : (i + 1) * size] = to * size + inner
            _tell_audit(tree, "pages", page, to)
        counters.pages_moved += len(old)
        self.pages.give_back(old)


def _located(snapshots: list[tuple[int, Any]]) -> list[tuple[int, int, Any]]:
    """Slot, node and the tree's tensor of each."""
    if not snapshots:
        return []
    slots = torch.cat([value for _, value in snapshots]).tolist()
    return [(slot, node, value) for slot, (node, value) in zip(slots, snapshots, strict=True)]


def _snapshot_locked(tree: Any, node: int) -> bool:
    """Whether a request holds the snapshot at `node`, found out by locking it: one that is held gains no protection."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    before = tree.mamba_evictable_size()
    lock = tree.lock(node, skip_lock_components=(ComponentType.FULL,))
    held = tree.mamba_evictable_size() == before
    tree.unlock(lock)
    return bool(held)


def _pages_locked(tree: Any, node: int) -> bool:
    from sglang_dsv4.cache.order import locked

    return locked(tree, node)


def _tell_audit(tree: Any, kind: str, old: int, new: int) -> None:
    """The checksum goes along: the copy must be what the original was."""
    if (audit := getattr(tree, "_dsv4_audit", None)) is not None:
        known = getattr(audit, kind)
        if (value := known.pop(old, None)) is not None:
            known[new] = value
