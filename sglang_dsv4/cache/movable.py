"""SGLang's allocators of slots and pages, made to grow and shrink at their upper end.

To shrink, the upper end is drained: what is free there is withheld at once, what comes back later then, and `size`
goes down with it, so SGLang's sum of free, cached and held holds at every moment. All that looks at a pool's size
asks the allocator: SGLang's statistics and leak checks (`pool_stats_observer`, `invariant_checker`) read
`token_to_kv_pool_allocator.size` and `mamba_pool.size`, which for our pool is the allocator's. What SGLang copies at
start-up, `max_total_num_tokens` and with it the longest request, is the start's; pages never fall below what the
longest request needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class Drain:
    """Items above `limit` are going. `end` is the highest there is, `withheld` those that nobody holds any more."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.limit: int | None = None
        self.withheld: set[int] = set()

    @property
    def size(self) -> int:
        return self.end - len(self.withheld)

    @property
    def done(self) -> bool:
        return self.limit is not None and len(self.withheld) == self.end - self.limit

    def sweep(self, free: Tensor) -> Tensor:
        """What stays free of `free`. Waits for the device, but only while there is something to drain."""
        if self.limit is None:
            return free
        going = free > self.limit
        ids = free[going].tolist()
        if not ids:
            return free
        self.withheld.update(ids)
        return free[~going]

    def finish(self) -> None:
        assert self.done and self.limit is not None
        self.end, self.limit = self.limit, None
        self.withheld.clear()

    def cancel(self) -> list[int]:
        """What was withheld, ascending: it is free again."""
        back = sorted(self.withheld)
        self.limit = None
        self.withheld.clear()
        return back


class MovableSlots(MambaSlotAllocator):
    """Slots 1 .. size, the lowest handed out first: those of running requests gather at the lower end."""

    def __init__(self, size: int, device: str) -> None:
        self.drain = Drain(size)
        super().__init__(size, device)

    @property
    def size(self) -> int:
        return self.drain.size

    @size.setter
    def size(self, value: int) -> None:
        assert value == self.drain.size, "slots move by `grow` and `start_drain` only"

    def free(self, free_index: Tensor) -> None:
        super().free(free_index)
        self._settle()

    def clear(self) -> None:
        self.drain.cancel()
        self.free_slots = torch.arange(1, self.drain.end + 1, dtype=torch.int64, device=self.device)

    def grow(self, count: int) -> None:
        end = self.drain.end
        new = torch.arange(end + 1, end + count + 1, dtype=torch.int64, device=self.device)
        self.drain.end += count
        self.free_slots = torch.cat((self.free_slots, new))

    def start_drain(self, count: int) -> None:
        self.drain.limit = self.drain.end - count
        self._settle()

    def cancel_drain(self) -> None:
        self.give_back(self.drain.cancel())

    def give_back(self, ids: Sequence[int]) -> None:
        self.free_slots = torch.cat((self.free_slots, torch.tensor(ids, dtype=torch.int64, device=self.device)))
        self._settle()

    def free_ids(self) -> list[int]:
        return [int(one) for one in self.free_slots.tolist()]

    def take(self, ids: list[int]) -> None:
        """Those are free no more."""
        self.free_slots = _without(self.free_slots, ids)

    def _settle(self) -> None:
        self.free_slots = self.drain.sweep(torch.sort(self.free_slots)[0])


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
        self.drain.limit = self.drain.end - count
        self._settle()

    def cancel_drain(self) -> None:
        back = torch.tensor(self.drain.cancel(), dtype=torch.int64, device=self.device)
        self.free_pages = torch.cat((self.free_pages, back))

    def free_ids(self, most: int | None = None) -> list[int]:
        """All, or the first `most`: the lowest ones during a drain."""
        self._gather()
        return [int(one) for one in self.free_pages[:most].tolist()]

    def take(self, ids: list[int]) -> None:
        """Those are free no more."""
        self._gather()
        self.free_pages = _without(self.free_pages, ids)

    def give_back(self, ids: Sequence[int]) -> None:
        self._release_page_ids(torch.tensor(ids, dtype=torch.int64, device=self.device))

    def _release_page_ids(self, *page_ids: Tensor) -> None:
        super()._release_page_ids(*page_ids)
        if self.drain.limit is not None:
            self._settle()

    def _gather(self) -> None:
        self.free_pages = self.get_all_free_pages()
        self.staged_pages, self.num_staged_pages = [], 0

    def _settle(self) -> None:
        self._gather()
        self.free_pages = self.drain.sweep(torch.sort(self.free_pages)[0])


def _without(free: Tensor, ids: list[int]) -> Tensor:
    return free[~torch.isin(free, torch.tensor(ids, dtype=free.dtype, device=free.device))]
