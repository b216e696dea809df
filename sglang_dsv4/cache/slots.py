"""Per-request state: slots (window and overlap rows, also the form of a snapshot) and tails by request row.

SGLang calls a slot a mamba slot; its allocator, ping-pong tracking slots and tree component stay as they are.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from torch import Tensor

from sglang_dsv4.cache.backing import Moving
from sglang_dsv4.cache.debug import poison_enabled
from sglang_dsv4.cache.handle import SlotStore, TailStore
from sglang_dsv4.cache.interior import InteriorSnapshots
from sglang_dsv4.cache.movable import MovableSlots
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.ops.dispatch import operations

if TYPE_CHECKING:
    from collections.abc import Iterator

_geometry: ContextVar[Geometry] = ContextVar("geometry of the pools under construction")
_store_device: ContextVar[str | None] = ContextVar("device of their stores", default=None)
_moving: ContextVar[Moving | None] = ContextVar("the memory that moves between them", default=None)


@contextmanager
def building(
    geometry: Geometry, *, store_device: str | None = None, moving: Moving | None = None
) -> Iterator[None]:
    """SGLang constructs the request pool with its own arguments; this hands our constructors the geometry.

    store_device  where the bytes go if not to the pool's device: "meta" for bookkeeping without bytes
    moving        if memory moves between slots and pages
    """
    tokens = _geometry.set(geometry), _store_device.set(store_device), _moving.set(moving)
    try:
        yield
    finally:
        _geometry.reset(tokens[0])
        _store_device.reset(tokens[1])
        _moving.reset(tokens[2])


class SlotPool(MambaPool):
    """Slots 1 .. size and the dummy slot 0. `MambaPool.__init__` is skipped: its shapes are not ours."""

    def __init__(self, *, size: int, mamba_layer_ids: list[int], device: str, **_: Any) -> None:
        geometry, moving = _geometry.get(), _moving.get()
        self._size = size
        self.allocator: MovableSlots | None = None
        self.moving = moving
        self.device = device
        self.geometry = geometry
        self.mamba_layer_ids = list(mamba_layer_ids)
        self.num_mamba_layers = len(mamba_layer_ids)
        where = _store_device.get() or device
        self.store = SlotStore(geometry, size + 1, where, None if moving is None else moving.slots)
        # What SGLang looks up on a state pool; none of these features apply.
        self.debug_memory_pool = False
        self.enable_linear_replayssm = False
        self.enable_linear_replayssm_spec = False
        self.replayssm_write_pos = None
        self.replayssm_cache_base = None
        self.replayssm_is_flush = None
        self.replayssm_spec_write_pos = None
        self.mem_usage = self.store.nbytes / (1 << 30)
        self._ops = operations(torch.device(device).type)
        if poison_enabled():
            self.store.poison()

    @property
    def size(self) -> int:
        """Slots that there are: what SGLang's statistics and leak checks ask for."""
        return self._size if self.allocator is None else self.allocator.size

    def clear_slots(self, indices: Tensor) -> None:
        """Nothing to clear: every read of a slot is bounded by the request's positions, never by its content."""
        if poison_enabled():
            self.store.poison(indices.long())

    def copy_from(self, src_indices: Tensor, dst_indices: Tensor) -> None:
        """Copy whole slots, all layers in one operation (a snapshot into a request's slot at a hit)."""
        self._ops.copy_state(self.store.slot_windows, self.store.overlaps, src_indices.long(), dst_indices.long())

    def get_cpu_copy(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.slot_windows[:, indices].cpu(), self.store.overlaps[:, indices].cpu()

    def load_cpu_copy(self, mamba_cache_cpu: tuple[Tensor, Tensor], indices: Tensor) -> None:
        windows, overlaps = mamba_cache_cpu
        self.store.slot_windows[:, indices] = windows.to(self.device)
        self.store.overlaps[:, indices] = overlaps.to(self.device)


class SlotReqToTokenPool(HybridReqToTokenPool):
    """Request rows with their tails. Row 0 pads; a tail is empty at every page boundary, so no snapshot holds one."""

    mamba_pool_cls = SlotPool
    mamba_allocator: MambaSlotAllocator

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        moving = _moving.get()
        self.split_plan = None if moving is None else moving.plan
        if self.split_plan is not None:
            old = self.mamba_allocator
            self.mamba_allocator = self.mamba_pool.allocator = MovableSlots(old.size, old.device)
        self.interior = InteriorSnapshots()
        self.user_token: int | None = None  # id of the token that begins a user's message; -1 if there is none
        device = _store_device.get() or kwargs["device"]
        self.tails = TailStore(_geometry.get(), self.req_to_token.shape[0], device)
        if poison_enabled():
            self.tails.poison()

    def alloc(self, reqs: list[Any]) -> list[int] | None:
        fresh = [req.kv.req_pool_idx is None for req in reqs]
        rows = super().alloc(reqs)
        if rows is not None and poison_enabled():
            new = [row for row, is_new in zip(rows, fresh, strict=True) if is_new]
            if new:
                self.tails.poison(torch.tensor(new, device=self.device))
        return rows

    def donate_mamba_ping_pong_slot(self, req: Any, new_slot: Tensor) -> Tensor:
        """int64 [1]: the slot that goes to the tree: an interior snapshot if one is being published."""
        interior = self.interior.publishing
        if interior is None:
            return super().donate_mamba_ping_pong_slot(req, new_slot)
        self.mamba_allocator.free(new_slot)
        return interior

    def free_mamba_cache(self, req: Any, mamba_ping_pong_track_buffer_to_keep: int | None = None) -> None:
        """Also returns the slots of interior snapshots that were taken but will not be published."""
        for snapshot in self.interior.take(req.kv.req_pool_idx):
            self.mamba_allocator.free(snapshot.slot)
        super().free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep)

    def clear(self) -> None:
        super().clear()
        self.interior.clear()
