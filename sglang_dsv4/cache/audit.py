"""Proof that what the tree owns never changes: checksums of snapshots and pages, compared at every insert.

On only under SGLANG_DSV4_AUDIT=1. Reads the pools and the tree; a changed byte raises and so stops the server.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sglang_dsv4.cache.handle import EntryStore, SlotStore
from sglang_dsv4.geometry import CSA_RATIO, GROUP_ROWS, HCA_RATIO, Geometry, RowLayout


def page_checksum(store: EntryStore, page: int) -> int:
    """CRC-32 over all rows that one page owns, in all layers."""
    geometry, value = store.geometry, 0
    for pool, layout, ratio in (
        (store.csa, geometry.main, CSA_RATIO),
        (store.keys, geometry.index, CSA_RATIO),
        (store.hca, geometry.main, HCA_RATIO),
    ):
        for part in _page_parts(pool, layout, geometry, page, ratio):
            value = zlib.crc32(part.contiguous().cpu().numpy().tobytes(), value)
    return value


def slot_checksum(store: SlotStore, slot: int) -> int:
    """CRC-32 over a slot's windows and overlap rows, in all layers."""
    value = zlib.crc32(store.slot_windows[:, slot].contiguous().cpu().numpy().tobytes())
    return zlib.crc32(store.overlaps[:, slot].contiguous().cpu().numpy().tobytes(), value)


def _page_parts(
    pool: Tensor, layout: RowLayout, geometry: Geometry, page: int, ratio: int
) -> Iterator[Tensor]:
    rows = geometry.entries_per_page(ratio)
    first = page * rows
    for start in range(first, first + rows, GROUP_ROWS):
        group, index = divmod(start, GROUP_ROWS)
        count = min(rows, GROUP_ROWS - index)
        yield pool[:, group, index * layout.data_bytes : (index + count) * layout.data_bytes]
        base = GROUP_ROWS * layout.data_bytes
        yield pool[:, group, base + index * layout.scale_bytes : base + (index + count) * layout.scale_bytes]


class TreeAudit:
    """Checksums of one tree's snapshots and pages. What the allocators take back is forgotten."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.pages: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.checked = 0
        self._page_size = tree.page_size
        _watch(tree.token_to_kv_pool_allocator, "_release_page_ids", self._pages_freed)
        _watch(tree.token_to_kv_pool_allocator, "clear", lambda: self.pages.clear())
        _watch(tree.req_to_token_pool.mamba_allocator, "free", self._slots_freed)
        _watch(tree.req_to_token_pool.mamba_allocator, "clear", lambda: self.slots.clear())

    def check(self) -> None:
        """Compare everything known and take up what is new. Raises RuntimeError, one line, at a difference."""
        store = self.tree.token_to_kv_pool_allocator.get_kvcache().store
        slots = self.tree.req_to_token_pool.mamba_pool.store
        owned_pages = set((self.tree.all_values_flatten() // self._page_size).tolist())
        owned_slots = set(self.tree.all_mamba_values_flatten().tolist())
        self._compare("page", self.pages, owned_pages, lambda page: page_checksum(store, page))
        self._compare("snapshot", self.slots, owned_slots, lambda slot: slot_checksum(slots, slot))
        self.checked += 1

    def _compare(
        self, kind: str, known: dict[int, int], owned: set[int], checksum: Callable[[int], int]
    ) -> None:
        for gone in known.keys() - owned:
            del known[gone]
        for item in owned:
            value = checksum(item)
            if known.setdefault(item, value) != value:
                raise RuntimeError(f"audit: {kind} {item} changed after the tree took it over")

    def _pages_freed(self, *page_ids: Tensor) -> None:
        for ids in page_ids:
            for page in ids.tolist():
                self.pages.pop(page, None)

    def _slots_freed(self, indices: Tensor, *_: Any) -> None:
        for slot in indices.reshape(-1).tolist():
            self.slots.pop(slot, None)


def audit(tree: Any) -> None:
    """Check one tree, with the audit that belongs to it."""
    existing = getattr(tree, "_dsv4_audit", None)
    if existing is None:
        existing = tree._dsv4_audit = TreeAudit(tree)
    existing.check()


def _watch(owner: Any, name: str, seen: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)
