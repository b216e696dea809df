"""How memory moves between slots and pages while a server runs.

Pages and slots have one number of bytes (`granules.SplitPlan`). Where pages are short and slots lie idle, or hold
superseded snapshots beyond a tenth of the bytes, slots become pages; where slots are short and pages lie free, pages
become slots. Leaves take their pages and their snapshot along when they go, so what is worth least a byte gives back
both, and whichever of the two is left over finds its way to the other side. Nothing is evicted for a move, and nobody
waits for one: what cannot go yet, because a request holds it, goes when it comes back.

Moves happen in the scheduler's thread where room is made for an allocation, with the device idle: no step is in
flight then, and the next one is not launched. Between them nothing waits for the device: what requests give back is
looked at once it could be all that is missing, once a request at most. Moves depend on the tree, the allocators and
the number of requests alone, so that all ranks move alike.

Cached text above the new end is copied below it: a snapshot by `copy_state`, a page row by row. What it belongs to is
noted in `whereabouts.py` and compared with the tree, which keeps places in tensors that are written in place. One look
moves no more than so many pages or snapshots, and the next request's goes on from there. What a request holds never
moves.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.whereabouts import PageNodes, SlotNodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_dsv4.cache.granules import SplitPlan
    from sglang_dsv4.cache.movable import MovablePages, MovableSlots

LOT, LOT_PART = 16, 32  # slots that move together: so many, or one in so many of those at first if that is less
MOST_LOTS = 8  # at once
SPARE = 4  # slots beside those of running requests that pages do not get: two texts' footholds
FLOOR = 0.1  # part of the bytes that superseded snapshots may keep
PAUSE = 4  # requests between two looks at a move that is not done: each waits for the device
PAGES_A_LOOK, SNAPSHOTS_A_LOOK = 64, 32  # places looked at before the next request's turn: a few ms
PATIENCE = 64  # requests until a move is given up that a request's slots or pages stand in the way of


class MovingSplit:
    """The split of one tree. `consider` decides and moves; what enters and leaves the tree is told to the others."""

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
        self._settled = 0  # when pages that came back were last looked at without a look at what stands in the way
        self._from = 0  # place at which the next look begins
        self._page_nodes = PageNodes(plan.page_stores.most, self.pages.device)
        self._slot_nodes = SlotNodes(plan.slot_stores.most, self.slots.device)

    # What the tree holds

    def entered(self, tree: Any, req: Any, protected: int) -> None:
        """The request's text stands in the tree; so far it stood there for `protected` tokens."""
        size, end = self.pages.page_size, req.kv.cache_protected_len
        if end > protected:
            tokens = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, protected:end:size]
            self._page_nodes.entered(tokens // size, protected // size, req.last_node)

    def snapshot_entered(self, tree: Any, node: int) -> None:
        """There is a snapshot at `node`."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        if (value := _value(tree, node, ComponentType.MAMBA)) is not None:
            self._slot_nodes.entered(value, node)

    def went(self, leaf: int, parent: int, start: int) -> None:
        """The leaf, which began at token `start`, left the tree."""
        self._page_nodes.went(leaf, parent, start // self.pages.page_size)

    def clear(self) -> None:
        """The tree was flushed."""
        self.target = None  # the allocators were flushed, too
        self._page_nodes.clear()
        self._slot_nodes.clear()

    def snapshots(self, tree: Any) -> int:
        return int(tree.mamba_evictable_size() + tree.mamba_protected_size())

    def consider(self, tree: Any, paths: Any, tokens: int, snapshots: int) -> None:
        """So many tokens and slots are missing after `yield_to`: move memory if that helps, or go on with a move."""
        now = paths.order.model.now
        if self.target is None:
            if tokens > 0:
                self._toward_pages(tree, paths, -(-tokens // self.pages.page_size))
            elif snapshots > 0:
                self._toward_slots()
            self._began = self._again = now
            self._from = 0
        if self.target is not None:
            self._go_on(tree, paths, now)

    def yield_to(self, tokens: int, snapshots: int) -> tuple[int, int]:
        """Whoever needs now what a move withholds gets it: the move is given up. Tokens and slots that came back."""
        pages = slots = 0
        if tokens > 0 and self.pages.drain.limit is not None:
            pages -= self.pages.available_size()
            self.pages.cancel_drain()
            pages += self.pages.available_size()
            self.target = None
        if snapshots > 0 and self.slots.drain.limit is not None:
            slots -= self.slots.available_size()
            self.slots.cancel_drain()
            slots += self.slots.available_size()
            self.target = None
        return pages, slots

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
        if shrinking is self.slots:
            self.slots.settle()
        elif self.pages.may_be_done and now > self._settled:
            self._settled = now
            self.pages.settle()
        if not shrinking.drain.done and now >= self._again:
            self._wait()
            move = self._move_snapshots if shrinking is self.slots else self._move_pages
            self._again = now + (1 if move(tree) else PAUSE)
        if shrinking.drain.done:
            self._finish(tree)
        elif shrinking.drain.limit is None:  # a flush ended the drain
            self.target = None
        else:
            self.expire(now)

    def expire(self, now: int) -> None:
        """Give up a move that has lasted too long, also where nobody is short any more and so asks for it."""
        if self.target is not None and now - self._began >= PATIENCE:
            self.slots.cancel_drain()
            self.pages.cancel_drain()
            self.target = None

    def _finish(self, tree: Any) -> None:
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
            self._raise_snapshots(tree, slots_before + 1)
            counters.lots_to_slots += 1
        self.target = None
        assert self.plan.nbytes(slots.drain.end, pages.drain.end) <= self.plan.budget

    def _wait(self) -> None:
        """No step is in flight afterwards."""
        if torch.device(self.slots.device).type == "cuda":
            torch.cuda.synchronize()

    def _look(self, allocator: Any, most: int) -> list[int]:
        """The next places above the limit that are not withheld yet, `most` at most. After the last one the next look
        begins anew."""
        drain = allocator.drain
        if drain.limit is None:
            return []
        going = range(max(drain.limit + 1, self._from), drain.end + 1)
        found = [place for place in going if place not in drain.withheld]
        self._from = found[most] if len(found) > most else 0
        return found[:most]

    def _move_snapshots(self, tree: Any) -> bool:
        """Some of those above the limit to free slots below it; whether there are more to look at."""
        self.slots.settle()
        if slots := self._look(self.slots, SNAPSHOTS_A_LOOK):
            self._move(tree, self._snapshots_in(tree, slots), self.slots.free_ids())
        return self._from > 0

    def _raise_snapshots(self, tree: Any, first: int) -> None:
        """The lowest ones to free slots from `first` on, so that running requests do not get those."""
        free = self.slots.free_ids()
        held, free = sorted(set(range(1, first)).difference(free)), [slot for slot in free if slot >= first]
        for at in range(0, len(held), SNAPSHOTS_A_LOOK):
            if not free:  # after a lot: few of the lowest are running requests' own or held by them
                return
            moved = self._move(tree, self._snapshots_in(tree, held[at : at + SNAPSHOTS_A_LOOK]), free)
            free = free[moved:]

    def _snapshots_in(self, tree: Any, slots: Sequence[int]) -> list[tuple[int, int, Any]]:
        """Those of the slots that hold a snapshot: slot, node and the tree's tensor."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        noted = zip(slots, self._slot_nodes.read(slots), strict=True)
        found = [(slot, node, _value(tree, node, ComponentType.MAMBA)) for slot, node in noted if node]
        found = [one for one in found if one[2] is not None]
        held = torch.cat([value for *_, value in found]).tolist() if found else []
        return [one for one, slot in zip(found, held, strict=True) if one[0] == slot]

    def _move(self, tree: Any, snapshots: list[tuple[int, int, Any]], free: list[int]) -> int:
        """Those that no request holds to the first of the free slots; returns how many."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        unlocked = (one for one in snapshots if not _snapshot_locked(tree, one[1]))
        moves = list(zip(free, unlocked, strict=False))
        if not moves:
            return 0
        device = self.slots.device
        old = torch.tensor([slot for _, (slot, *_) in moves], dtype=torch.int64, device=device)
        new = torch.tensor([to for to, _ in moves], dtype=torch.int64, device=device)
        self.states.copy_from(old, new)
        self.slots.take([to for to, _ in moves])
        for to, (slot, node, value) in moves:
            value.fill_(to)
            held = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
            assert held is not None and held.data_ptr() == value.data_ptr(), "the tree keeps its places elsewhere"
            _tell_audit(tree, "slots", slot, to)
        self._slot_nodes.moved(old, new)
        counters.snapshots_moved += len(moves)
        self.slots.give_back([slot for _, (slot, *_) in moves])
        return len(moves)

    def _move_pages(self, tree: Any) -> bool:
        """Some of the cached ones above the limit to free pages below it; whether there are more to look at."""
        self.pages.settle()
        pages, size = self._look(self.pages, PAGES_A_LOOK), self.pages.page_size
        free = self.pages.free_ids(len(pages))
        if not pages or not free:
            return self._from > 0
        held: dict[int, bool] = {}
        moves: list[tuple[int, Any]] = []  # page and the tree's tensor of its tokens
        for page, node, tokens in self._pages_in(tree, pages):
            if node not in held:
                held[node] = _pages_locked(tree, node)
            if not held[node] and len(moves) < len(free):
                moves.append((page, tokens))
        if moves:
            old, new = [page for page, _ in moves], free[: len(moves)]
            self.entries.store.copy_pages(old, new)
            self.pages.take(new)
            device = self.pages.device
            inner = torch.arange(size, dtype=torch.int64, device=device)
            targets = torch.tensor(new, dtype=torch.int64, device=device)
            written = targets[:, None] * size + inner
            for (page, tokens), row, to in zip(moves, written, new, strict=True):
                tokens.copy_(row)
                _tell_audit(tree, "pages", page, to)
            self._page_nodes.moved(torch.tensor(old, dtype=torch.int64, device=device), targets)
            counters.pages_moved += len(old)
            self.pages.give_back(old)
        return self._from > 0

    def _pages_in(self, tree: Any, pages: Sequence[int]) -> list[tuple[int, int, Any]]:
        """Those of the pages that are cached: page, the node that it is in and the tree's tensor of its tokens."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        size, full = self.pages.page_size, ComponentType.FULL
        values: dict[int, Any] = {}

        def value_of(node: int) -> Any:
            if node not in values:
                values[node] = _value(tree, node, full)
            return values[node]

        found: list[tuple[int, int, Any]] = []
        above: list[tuple[int, int, int]] = []  # page, its token from the root and node: it is above the node itself
        for page, (depth, node, end) in zip(pages, self._page_nodes.read(pages), strict=True):
            if (value := value_of(node)) is None or depth >= end:
                continue
            if (at := len(value) - (end - depth) * size) >= 0:
                found.append((page, node, value[at:][:size]))
            else:
                above.append((page, depth * size, node))
        below = list(dict.fromkeys(node for *_, node in above))
        paths = dict(zip(below, tree.tree_core.collect_path_info(below), strict=True))
        for page, token, node in above:
            if path := paths[node]:
                one = path[bisect_right(path, token, key=lambda one: one.path_start) - 1]
                value = value_of(one.node_id)
                if value is not None and token < one.path_end <= one.path_start + len(value):
                    found.append((page, one.node_id, value[token - one.path_start :][:size]))
        first = torch.stack([tokens[0] for *_, tokens in found]).tolist() if found else []
        return [one for one, token in zip(found, first, strict=True) if token == one[0] * size]


def _value(tree: Any, node: int, component: Any) -> Any:
    """The tree's own tensor, None if there is none."""
    try:
        return tree.tree_core.get_component_device_value(node, component)
    except KeyError:
        return None


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
