"""Which node of the tree a page or a slot belongs to, so that what lies in the way of a move is found without a walk.

The tree knows where its texts lie, not what lies in a place. So a place's node is noted on the device when a request's
text enters the tree, and read for the few places above a new end, in one copy.

For a page it is a node whose path leads over the page, and how deep the page is. Numbers of nodes are never used twice,
a split leaves the old one with the lower part, and when a leaf goes, what stays above it lies on its parent's path.
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
    """For every page a node at or below it, 0 if none was noted, and the page's number from the root."""

    def __init__(self, most: int, device: str | torch.device) -> None:
        """most  pages there can ever be, the padding page included"""
        self._noted = torch.zeros((2, most), dtype=torch.int64, device=device)
        self._heirs: dict[int, int] = {}  # leaf that went -> its parent

    def clear(self) -> None:
        self._noted.zero_()
        self._heirs.clear()

    def entered(self, pages: Tensor, first: int, node: int) -> None:
        """`pages`, int [n], are the path to `node` from its page number `first` on. Does not wait for the device."""
        pages = pages.long()
        self._noted[0].index_fill_(0, pages, node)
        self._noted[1, pages] = torch.arange(first, first + len(pages), dtype=torch.int64, device=pages.device)

    def went(self, leaf: int, parent: int) -> None:
        """`leaf` is not in the tree any more."""
        self._heirs[leaf] = parent
        if len(self._heirs) >= MOST_GONE:
            self._settle()

    def moved(self, old: Tensor, new: Tensor) -> None:
        """What lay in the pages `old`, int64 [n], lies in the pages `new`."""
        self._noted[:, new] = self._noted[:, old]

    def read(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """Node and number from the root of each page. Waits for the device, once."""
        nodes, depths = self._noted[:, torch.tensor(pages, device=self._noted.device)].tolist()
        return [(self._standing(node), depth) for node, depth in zip(nodes, depths, strict=True)]

    def _standing(self, node: int) -> int:
        while (heir := self._heirs.get(node)) is not None:
            node = heir
        return node

    def _settle(self) -> None:
        """Write the nodes that stand into the entries of those that went."""
        heirs: dict[int, int] = {}
        for node, parent in reversed(self._heirs.items()):  # a parent goes after its children
            heirs[node] = heirs.get(parent, parent)
        gone, device = sorted(heirs), self._noted.device
        old = torch.tensor(gone, dtype=torch.int64, device=device)
        new = torch.tensor([heirs[node] for node in gone], dtype=torch.int64, device=device)
        place = torch.searchsorted(old, self._noted[0]).clamp_(max=len(gone) - 1)
        self._noted[0] = torch.where(old[place] == self._noted[0], new[place], self._noted[0])
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
