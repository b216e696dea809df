"""Which node of the tree a page or a slot belongs to, so that what lies in the way of a move is found without a walk.

The tree knows where its texts lie, not what lies in a place. So a place's node is noted on the device when a request's
text enters the tree, and read for the few places above a new end, in one copy.

For a page it is a node whose path leads over the page, where that path ends, and how deep the page is. Numbers of nodes
are never used twice, and a split leaves the old one with the lower part, and so with the end. When a leaf goes, what
stays above it lies on its parent's path.
Entries of what is not in the tree any more stay: whoever reads one compares the tree's own record before use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOST_GONE = 1024  # leaves that went, remembered on the host until the entries are brought up to date


class PageNodes:
    """For every page its number from the root, a node at or below it, 0 if none was noted, and where that ends."""

    def __init__(self, most: int, device: str | torch.device) -> None:
        """most  pages there can ever be, the padding page included"""
        self._noted = torch.zeros((3, most), dtype=torch.int64, device=device)
        self._heirs: dict[int, tuple[int, int]] = {}  # leaf that went -> its parent, and where that ends

    def clear(self) -> None:
        self._noted.zero_()
        self._heirs.clear()

    def entered(self, pages: Tensor, first: int, node: int) -> None:
        """`pages`, int [n], are the path to `node` from its page number `first` on. Does not wait for the device."""
        pages, end = pages.long(), first + len(pages)
        self._noted[0, pages] = torch.arange(first, end, dtype=torch.int64, device=pages.device)
        self._noted[1].index_fill_(0, pages, node)
        self._noted[2].index_fill_(0, pages, end)

    def went(self, leaf: int, parent: int, end: int) -> None:
        """`leaf` is not in the tree any more; its parent's path ends before page number `end`."""
        self._heirs[leaf] = parent, end
        if len(self._heirs) >= MOST_GONE:
            self._settle()

    def moved(self, old: Tensor, new: Tensor) -> None:
        """What lay in the pages `old`, int64 [n], lies in the pages `new`."""
        self._noted[:, new] = self._noted[:, old]

    def read(self, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        """Number from the root, node, and number at its end, of each page. Waits for the device, once."""
        found = self._noted[:, torch.tensor(pages, device=self._noted.device)].tolist()
        return [(depth, *self._standing(node, end)) for depth, node, end in zip(*found, strict=True)]

    def _standing(self, node: int, end: int) -> tuple[int, int]:
        while (heir := self._heirs.get(node)) is not None:
            node, end = heir
        return node, end

    def _settle(self) -> None:
        """Write the nodes that stand into the entries of those that went. Does not wait for the device."""
        from sglang.srt.utils.common import async_h2d

        heirs: dict[int, tuple[int, int]] = {}
        for node, parent in reversed(self._heirs.items()):  # a parent goes after its children
            heirs[node] = heirs.get(parent[0], parent)
        gone, nodes = sorted(heirs), self._noted[1]
        old = async_h2d(gone, dtype=torch.int64, device=nodes.device)
        new = async_h2d([heirs[node] for node in gone], dtype=torch.int64, device=nodes.device).T
        place = torch.searchsorted(old, nodes).clamp_(max=len(gone) - 1)
        self._noted[1:] = torch.where(old[place] == nodes, new[:, place], self._noted[1:])
        self._heirs.clear()


class SlotNodes:
    """For every slot the node of the snapshot that it held last, 0 if none was noted."""

    def __init__(self, most: int, device: str | torch.device) -> None:
        """most  slots there can ever be, the dummy included"""
        self._noted = torch.zeros(most, dtype=torch.int64, device=device)

    def clear(self) -> None:
        self._noted.zero_()

    def entered(self, slot: Tensor, node: int) -> None:
        """The snapshot at `node` is in `slot`, int64 [1]. Does not wait for the device."""
        self._noted.index_fill_(0, slot, node)

    def moved(self, old: Tensor, new: Tensor) -> None:
        """What was in the slots `old`, int64 [n], is in the slots `new`."""
        self._noted[new] = self._noted[old]

    def read(self, slots: Sequence[int]) -> list[int]:
        """Node of each slot. Waits for the device, once."""
        found: list[int] = self._noted[torch.tensor(slots, device=self._noted.device)].tolist()
        return found
