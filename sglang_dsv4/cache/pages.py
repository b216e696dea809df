"""The token-to-KV pool: compressed entries in pages that the radix tree shares. Owns no window and no state."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from sglang_dsv4.cache.backing import Backing
from sglang_dsv4.cache.debug import poison_enabled
from sglang_dsv4.cache.handle import EntryStore
from sglang_dsv4.geometry import Geometry

logger = logging.getLogger(__name__)


class PagePool(KVCache):
    """Entry rows at `full token location // ratio`, so that a page's entries live and die with the page.

    Location 0 .. page_size - 1 is SGLang's padding page; it is allocated like any other.
    """

    def __init__(
        self, geometry: Geometry, size: int, device: str, *, start_layer: int = 0, backing: Backing | None = None
    ) -> None:
        super().__init__(
            size,
            geometry.page_size,
            torch.uint8,
            geometry.num_layers,
            device,
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=geometry.num_layers,
        )
        self.geometry = geometry
        self.store = EntryStore(geometry, size + geometry.page_size, device, backing)
        if poison_enabled():
            self.store.poison()
        self._finalize_allocation_log(size)

    def get_kv_size_bytes(self) -> int:
        return self.store.nbytes

    def get_key_buffer(self, layer_id: int) -> Any:
        raise NotImplementedError(
            "DeepSeek-V4 pages hold packed entries: read them through cache.handle.CacheHandle"
        )

    get_value_buffer = get_key_buffer
    get_kv_buffer = get_key_buffer

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "DeepSeek-V4 entries are written by the flush operation, not token by token"
        )
