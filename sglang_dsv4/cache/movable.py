"""SGLang's allocators of slots and pages, made to grow and shrink at their upper end.

To shrink, the upper end is drained: what is free there is withheld, what requests hold there when it comes back, and
`size` goes down with it, so that SGLang's sum of free, cached and held holds at every moment. Numbers of pages and
slots are on the device: whoever looked at them in every free would wait for the step in flight each time. What comes
back is counted only, and `settle` looks at all of it at once:

* slots, of which few come back and every one counts, when somebody next asks how many are free;
* pages, when a move looks or so many came back that the drain could be done. Until then they are free and handed out
  last.

All that looks at a pool's size asks the allocator: SGLang's statistics and leak checks (`pool_stats_observer`,
`invariant_checker`) read `token_to_kv_pool_allocator.size` and `mamba_pool.size`, which for our pool is the
allocator's. What SGLang copies at start-up, `max_total_num_tokens` and with it the longest request, is the start's;
pages never fall below what the longest request needs.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.utils.common import async_h2d
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class Drain:
    """Items above `limit` are going. `end` is the highest there is, `withheld` those that nobody holds any more.

    returned  of the free ones at most so many are above the limit
    """

    def __init__(self, end: int) -> None:
        self.end = end
        self.limit: int | None = None
        self.withheld: set[int] = set()
        self.returned = 0

    @property
    def size(self) -> int:
        return self.end - len(self.withheld)

    @property
    def left(self) -> int:
        """Those above the limit that are not withheld; 0 where nothing is drained."""
        return 0 if self.limit is None else self.end - self.limit - len(self.withheld)

    @property
    def done(self) -> bool:
        return self.limit is not None and not self.left

    def start(self, count: int, free: int) -> None:
        self.limit, self.returned = self.end - count, free

    def sweep(self, free: Tensor) -> Tensor:
        """What stays free of `free`, ascending. Waits for the device, once, if anything came back."""
        most, self.returned = min(self.returned, self.left, len(free)), 0
        if not most:
            return free
        highest = free[-most:].tolist()
        going = highest[bisect_right(highest, self.limit) :]
        self.withheld.update(going)
        return free[: len(free) - len(going)]

    def withhold(self, ids: Sequence[int]) -> list[int]:
        """Ids that nobody holds any more: those that are not going."""
        if self.limit is None:
            return list(ids)
        self.withheld.update(one for one in ids if one > self.limit)
        return [one for one in ids if one <= self.limit]

    def finish(self) -> None:
        assert self.done and self.limit is not None
        self.end, self.limit, self.returned = self.limit, None, 0
        self.withheld.clear()

    def cancel(self) -> list[int]:
        """What was withheld, ascending: it is free again."""
        back = sorted(self.withheld)
        self.limit, self.returned = None, 0
        self.withheld.clear()
        return back


class MovableSlots(MambaSlotAllocator):
    """Slots 1 .. size, the lowest handed out first: those of running requests gather at the lower end."""

    def __init__(self, size: int, device: str) -> None:
        self.drain, self._ascending = Drain(size), True
        super().__init__(size, device)

    @property
    def size(self) -> int:
        self.settle()
        return self.drain.size

    @size.setter
    def size(self, value: int) -> None:
        assert value == self.size, "slots move by `grow` and `start_drain` only"

    def free(self, free_index: Tensor) -> None:
        super().free(free_index)
        self.drain.returned += free_index.numel()
        self._ascending = False

    def available_size(self) -> int:
        self.settle()
        return len(self.free_slots)

    def _do_alloc(self, need_size: int) -> Tensor | None:
        self.settle()
        self._sort()
        return super()._do_alloc(need_size)

    def clear(self) -> None:
        self.drain.cancel()
        self.free_slots = torch.arange(1, self.drain.end + 1, dtype=torch.int64, device=self.device)
        self._ascending = True

    def grow(self, count: int) -> None:
        end = self.drain.end
        new = torch.arange(end + 1, end + count + 1, dtype=torch.int64, device=self.device)
        self.drain.end += count
        self.free_slots = torch.cat((self.free_slots, new))

    def start_drain(self, count: int) -> None:
        self.drain.start(count, len(self.free_slots))
        self.settle()

    def settle(self) -> None:
        """Withhold what came back. Waits for the device, if anything did."""
        if self.drain.returned and self.drain.limit is not None:
            self._sort()
            self.free_slots = self.drain.sweep(self.free_slots)

    def cancel_drain(self) -> None:
        self.give_back(self.drain.cancel())

    def give_back(self, ids: Sequence[int]) -> None:
        """Nobody holds those any more."""
        self.free_slots = torch.cat((self.free_slots, _on_device(self.drain.withhold(ids), self.device)))
        self._ascending = False

    def free_ids(self) -> list[int]:
        """Ascending."""
        self.settle()
        self._sort()
        return [int(one) for one in self.free_slots.tolist()]

    def take(self, ids: list[int]) -> None:
        """Those are free no more."""
        self.free_slots = _without(self.free_slots, ids)

    def _sort(self) -> None:
        if not self._ascending:
            self.free_slots, self._ascending = torch.sort(self.free_slots)[0], True


class MovablePages(PagedTokenToKVPoolAllocator):
    """Pages 1 .. size // page_size."""

    free_pages: Tensor
    staged_pages: list[Tensor]

    def __init__(self, size: int, page_size: int, *args: Any, **kwargs: Any) -> None:
        self.page_size = page_size
        self.drain = Drain(size // page_size)
        super().__init__(size, page_size, *args, **kwargs)

    @property
    def size(self) -> int:
        return self.drain.size * self.page_size

    @size.setter
    def size(self, value: int) -> None:
        assert value == self.size, "pages move by `grow` and `start_drain` only"

    @property
    def num_pages(self) -> int:
        return self.drain.end

    @num_pages.setter
    def num_pages(self, value: int) -> None:
        assert value == self.drain.end, "pages move by `grow` and `start_drain` only"

    def clear(self) -> None:
        self.drain.cancel()
        super().clear()

    def grow(self, count: int) -> None:
        end = self.drain.end
        new = torch.arange(end + 1, end + count + 1, dtype=torch.int64, device=self.device)
        self.drain.end += count
        self.free_pages = torch.cat((self.free_pages, new))

    def start_drain(self, count: int) -> None:
        self._gather()
        self.drain.start(count, len(self.free_pages))
        self._sweep()

    def settle(self) -> None:
        """Withhold what came back. Waits for the device, if anything did."""
        if self.drain.returned:
            self._gather()
            self._sweep()

    @property
    def may_be_done(self) -> bool:
        """Whether a look at what came back could find the drain done. Waits for nothing."""
        free = len(self.free_pages) + self.num_staged_pages
        return self.drain.limit is not None and min(self.drain.returned, free) >= self.drain.left

    def cancel_drain(self) -> None:
        self.give_back(self.drain.cancel())

    def free_ids(self, most: int | None = None) -> list[int]:
        """All, or the first `most`: the lowest ones during a drain that has been settled."""
        self._gather()
        return [int(one) for one in self.free_pages[:most].tolist()]

    def take(self, ids: list[int]) -> None:
        """Those are free no more."""
        self._gather()
        self.free_pages = _without(self.free_pages, ids)

    def give_back(self, ids: Sequence[int]) -> None:
        """Nobody holds those any more."""
        self.free_pages = torch.cat((self.free_pages, _on_device(self.drain.withhold(ids), self.device)))

    def _release_page_ids(self, *page_ids: Tensor) -> None:
        if self.drain.limit is None:
            super()._release_page_ids(*page_ids)
            return
        count = sum(ids.numel() for ids in page_ids)
        self.staged_pages.extend(page_ids)  # SGLang hands those out, sorted, once the others do not suffice
        self.num_staged_pages += count
        self.drain.returned += count

    def _debug_check_no_duplicate_pages(self) -> None:
        """SGLang's, under SGLANG_DEBUG_MEMORY_POOL. What is withheld is free, too, and above the end there is none."""
        free = [*self.get_all_free_pages().tolist(), *self.drain.withheld]
        assert len(set(free)) == len(free) and max(free, default=0) <= self.drain.end

    def _gather(self) -> None:
        self.free_pages = self.get_all_free_pages()
        self.staged_pages, self.num_staged_pages = [], 0

    def _sweep(self) -> None:
        self.free_pages = self.drain.sweep(torch.sort(self.free_pages)[0])


def _on_device(ids: Sequence[int], device: str | torch.device) -> Tensor:
    return async_h2d(list(ids), dtype=torch.int64, device=torch.device(device))


def _without(free: Tensor, ids: list[int]) -> Tensor:
    return free[~torch.isin(free, _on_device(ids, free.device))]
