"""Copy resumable state between slots: snapshot to slot at a hit, slot to snapshot in decode."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.geometry import CSA_RATIO, CSA_STATE_DIM, MAIN_FP8, STATE_PARTS, WINDOW_GROUPS
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import Check


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


def copy_state_cuda(windows: Tensor, overlaps: Tensor, src: Tensor, dst: Tensor) -> None:
    """CUDA face of `copy_state`: one launch for all layers and pairs, slots of FP8 rows.

    Pairs that name a slot outside the pool are skipped too. Raises ValueError for an argument that the kernel
    cannot take.
    """
    check = Check("copy_state")
    slot_bytes = WINDOW_GROUPS * MAIN_FP8.group_bytes
    check.tensor("windows", windows, torch.uint8, ("layers", "slots", slot_bytes), strided=2, align=16)
    overlap_shape = ("CSA layers", "slots", CSA_RATIO, STATE_PARTS, CSA_STATE_DIM)
    check.tensor("overlaps", overlaps, torch.float32, overlap_shape, strided=2, align=16)
    check.tensor("src", src, torch.int64, ("pairs",))
    check.tensor("dst", dst, torch.int64, ("pairs",))
    jit.function("copy_state", "copy_state", check.cuda())(windows, overlaps, src, dst)
