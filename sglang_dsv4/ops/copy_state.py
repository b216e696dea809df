"""Copy resumable state between slots: snapshot to slot at a hit, slot to snapshot in decode."""

from __future__ import annotations

from torch import Tensor


def copy_state(windows: Tensor, overlaps: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slot src[i] to slot dst[i] in every layer; pairs with a negative member are skipped.

    windows   uint8 [layers, slots, 2 * group bytes], written in place
    overlaps  float32 [CSA layers, slots, 4, 2, 640], written in place
    src, dst  int64 [P]; destinations are distinct and no source is also a destination
    """
    due = (src >= 0) & (dst >= 0)
    src, dst = src[due].long(), dst[due].long()
    windows[:, dst] = windows[:, src]
    overlaps[:, dst] = overlaps[:, src]
