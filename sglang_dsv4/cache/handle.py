"""One layer's view of the pools; what the attention module sees instead of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_dsv4.cache.debug import poison_enabled
from sglang_dsv4.formats import RowCodec, index_codec, main_codec
from sglang_dsv4.geometry import CSA_RATIO, GROUP_ROWS, HCA_RATIO, WINDOW_GROUPS, Geometry

if TYPE_CHECKING:
    from sglang_dsv4.cache.backing import Backing

# A byte of all ones is NaN in every format that the pools hold: e4m3, bfloat16, float32.
POISON_BYTE = 0xFF


@dataclass(frozen=True)
class LayerCache:
    """Pools of one layer.

    ratio       0, 4 or 128
    window      uint8 [2 * slots, group bytes]
    entries     uint8 [groups, group bytes], None for ratio 0
    index_keys  uint8 [groups, group bytes], CSA only
    overlap     float32 [slots, 4, 2, 640], CSA only
    tail        float32 [rows, ...], CSA or HCA
    """

    ratio: int
    window: Tensor
    entries: Tensor | None
    index_keys: Tensor | None
    overlap: Tensor | None
    tail: Tensor | None
    codec: RowCodec
    index_codec: RowCodec


class EntryStore:
    """Entry and key pools of all layers, layer-major; page p of `page_size` tokens owns rows p * page // ratio on.

    With a `backing` the tensors are as long as they can ever be, with memory behind the first `num_tokens` only.
    """

    def __init__(
        self, geometry: Geometry, num_tokens: int, device: str | torch.device, backing: Backing | None = None
    ) -> None:
        csa, hca = len(geometry.layers_of(CSA_RATIO)), len(geometry.layers_of(HCA_RATIO))
        self.geometry = geometry
        self.num_tokens = num_tokens
        self.backing = backing
        if backing is not None:
            backing.resize(num_tokens // geometry.page_size)
            self.csa, self.keys, self.hca = (backing.tensor(name) for name in ("csa", "keys", "hca"))
            return
        self.csa = _bytes((csa, *geometry.entry_pool_shape(num_tokens, CSA_RATIO)), device)
        self.keys = _bytes((csa, *geometry.key_pool_shape(num_tokens)), device)
        self.hca = _bytes((hca, *geometry.entry_pool_shape(num_tokens, HCA_RATIO)), device)

    @property
    def nbytes(self) -> int:
        if self.backing is not None:
            return self.backing.nbytes
        return self.csa.nbytes + self.keys.nbytes + self.hca.nbytes

    def resize(self, num_tokens: int) -> None:
        """Have memory for so many tokens, whole pages. Needs a backing."""
        assert self.backing is not None
        before, self.num_tokens = self.num_tokens, num_tokens
        self.backing.resize(num_tokens // self.geometry.page_size)
        if num_tokens > before and poison_enabled():
            self.poison(before)

    def poison(self, first: int = 0) -> None:
        """Fill every row from token `first` on with NaN; a debugging aid."""
        for pool, ratio in ((self.csa, CSA_RATIO), (self.keys, CSA_RATIO), (self.hca, HCA_RATIO)):
            begin = self.geometry.entry_groups(first, ratio)  # a group that holds older rows stays
            pool[:, begin : self.geometry.entry_groups(self.num_tokens, ratio)] = POISON_BYTE

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, all rows in all layers."""
        if self.csa.is_meta:
            return
        geometry = self.geometry
        old, new = (torch.tensor(ids, dtype=torch.int64, device=self.csa.device) for ids in (sources, targets))
        for pool, layout, ratio in (
            (self.csa, geometry.main, CSA_RATIO),
            (self.keys, geometry.index, CSA_RATIO),
            (self.hca, geometry.main, HCA_RATIO),
        ):
            rows = geometry.entries_per_page(ratio)  # of a group, whose size is a multiple
            parts, data = GROUP_ROWS // rows, GROUP_ROWS * layout.data_bytes
            for first, row_bytes in ((0, layout.data_bytes), (data, layout.scale_bytes)):
                if pool.shape[0] and row_bytes:
                    pages = pool[:, :, first : first + GROUP_ROWS * row_bytes].unflatten(2, (parts, rows * row_bytes))
                    pages[:, new // parts, new % parts] = pages[:, old // parts, old % parts]


class SlotStore:
    """Windows and overlap rows of all slots, layer-major; slot 0 is the dummy of padded rows.

    windows   uint8 [layers, 2 * slots, group bytes]
    overlaps  float32 [CSA layers, slots, 4, 2, 640]

    With a `backing` the tensors are as long as they can ever be, with memory behind the first `num_slots` only.
    """

    def __init__(
        self, geometry: Geometry, num_slots: int, device: str | torch.device, backing: Backing | None = None
    ) -> None:
        self.geometry = geometry
        self.num_slots = num_slots
        self.backing = backing
        if backing is not None:
            backing.resize(num_slots)
            self.windows, overlaps = backing.tensor("windows"), backing.tensor("overlaps").view(torch.float32)
            self.overlaps = overlaps.view(len(overlaps), *geometry.overlap_shape(backing.group.most))
            return
        self.windows = _bytes((geometry.num_layers, *geometry.window_pool_shape(num_slots)), device)
        csa = len(geometry.layers_of(CSA_RATIO))
        self.overlaps = torch.zeros(
            (csa, *geometry.overlap_shape(num_slots)), dtype=torch.float32, device=device
        )

    @property
    def nbytes(self) -> int:
        return self.windows.nbytes + self.overlaps.nbytes if self.backing is None else self.backing.nbytes

    def resize(self, num_slots: int) -> None:
        """Have memory for so many slots, the dummy included. Needs a backing."""
        assert self.backing is not None
        before, self.num_slots = self.num_slots, num_slots
        self.backing.resize(num_slots)
        if num_slots > before and poison_enabled():
            self.poison(torch.arange(before, num_slots, device=self.windows.device))

    @property
    def slot_windows(self) -> Tensor:
        """uint8 [layers, slots, 2 * group bytes]: the windows, one row a slot."""
        layers, groups, size = self.windows.shape
        return self.windows.view(layers, groups // WINDOW_GROUPS, WINDOW_GROUPS * size)

    def poison(self, slots: Tensor | None = None) -> None:
        """Fill the given slots, int64 [n], or all of them with NaN; a debugging aid."""
        if slots is None:
            slots = torch.arange(self.num_slots, device=self.windows.device)
        self.slot_windows[:, slots] = POISON_BYTE
        self.overlaps[:, slots] = float("nan")


class TailStore:
    """Unfinished compression blocks of the running requests, by request row; row 0 is the dummy of padded rows."""

    def __init__(self, geometry: Geometry, num_rows: int, device: str | torch.device) -> None:
        csa, hca = len(geometry.layers_of(CSA_RATIO)), len(geometry.layers_of(HCA_RATIO))
        self.num_rows = num_rows
        self.csa = torch.zeros((csa, *geometry.csa_tail_shape(num_rows)), dtype=torch.float32, device=device)
        self.hca = torch.zeros((hca, *geometry.hca_tail_shape(num_rows)), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.csa.nbytes + self.hca.nbytes

    def poison(self, rows: Tensor | None = None) -> None:
        """Fill the given rows, int64 [n], or all of them with NaN; a debugging aid."""
        for tail in (self.csa, self.hca):
            tail[:, slice(None) if rows is None else rows] = float("nan")


class CacheHandle:
    """The three stores as one thing per layer."""

    def __init__(self, geometry: Geometry, entries: EntryStore, slots: SlotStore, tails: TailStore) -> None:
        self.geometry = geometry
        self.entries = entries
        self.slots = slots
        self.tails = tails
        codec, keys = main_codec(geometry.main), index_codec(geometry.index)
        self._layers = [self._layer(layer, codec, keys) for layer in range(geometry.num_layers)]

    def layer(self, layer_id: int) -> LayerCache:
        return self._layers[layer_id]

    def _layer(self, layer: int, codec: RowCodec, keys: RowCodec) -> LayerCache:
        ratio = self.geometry.ratios[layer]
        window = self.slots.windows[layer]
        if ratio == CSA_RATIO:
            i = self.geometry.layers_of(CSA_RATIO).index(layer)
            return LayerCache(
                ratio,
                window,
                self.entries.csa[i],
                self.entries.keys[i],
                self.slots.overlaps[i],
                self.tails.csa[i],
                codec,
                keys,
            )
        if ratio == HCA_RATIO:
            i = self.geometry.layers_of(HCA_RATIO).index(layer)
            return LayerCache(ratio, window, self.entries.hca[i], None, None, self.tails.hca[i], codec, keys)
        return LayerCache(ratio, window, None, None, None, None, codec, keys)


def _bytes(shape: tuple[int, ...], device: str | torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device)
