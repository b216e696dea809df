"""Proof that the ranks of tensor parallelism read the same rows and choose the same entries: checksums of every step.

On only under SGLANG_DSV4_CHECK_RANKS=1 with several ranks. Each rank holds all rows and a tree of its own, and nothing
else would tell if one of them allocated, evicted or chose differently. Reads a step's tensors; one all-gather ahead of
the layers and one behind them, for which the host waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_dsv4.ops.meta import StepMeta
from sglang_dsv4.switches import CHECK_RANKS, switched_on

logger = logging.getLogger(__name__)

_TELL = 50  # steps a line of the log
# Odd constants of a 64-bit mixer; products wrap around.
_PLACE, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


class RankError(RuntimeError):
    """Two ranks differ. One line: in what, and the checksums of all ranks."""


class Group(Protocol):
    """The part of SGLang's GroupCoordinator that is used."""

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor: ...


def checksum(values: Tensor) -> Tensor:
    """int64 scalar on the values' device: of the shape and of every integer with its place; sums wrap around."""
    flat = values.reshape(-1).long()
    place = torch.arange(1, flat.numel() + 1, device=flat.device)
    mixed = (flat + place * _PLACE) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _PLACE
    shape = sum((size + 1) * (_MIX >> (8 * axis)) for axis, size in enumerate(values.shape))
    # Into the range of int64, where Python's integers do not wrap.
    return mixed.sum() + ((shape + (1 << 63)) % (1 << 64) - (1 << 63))


class RankAgreement:
    """Compares the ranks of one group, step by step.

    `layers` are the ids of the CSA layers: all ranks gather the same number of values, whatever they computed.
    """

    def __init__(self, group: Group, layers: Sequence[int]) -> None:
        self.group = group
        self.layers = tuple(layers)
        self.steps = 0
        self._chosen: dict[int, Tensor] = {}

    @classmethod
    def of_server(cls, layers: Sequence[int]) -> RankAgreement | None:
        """That of this process's tensor parallel group; None where it is not asked for or there is one rank."""
        if not switched_on(CHECK_RANKS):
            return None
        from sglang.srt.distributed.parallel_state import get_tp_group

        group: Any = get_tp_group()
        if group.world_size == 1:
            return None
        logger.info("sglang-dsv4: %d ranks are compared in every step", group.world_size)
        return cls(group, layers)

    def start(self, meta: StepMeta, snapshots: Sequence[Tensor]) -> None:
        """Compare what a step reads and where it writes. Raises RankError."""
        self._chosen.clear()
        self._none = torch.zeros((), dtype=torch.int64, device=meta.device)
        self.steps += 1
        # What stands behind a request's last page, and in padded tokens, is never read and may differ.
        first = torch.arange(meta.page_table.shape[1], device=meta.device) * meta.page_size
        pages = meta.page_table.masked_fill(first >= meta.seq_lens[:, None], -1)
        named = {
            "lengths": meta.seq_lens,
            "page table": pages,
            "window slots": meta.slots,
            "positions": meta.positions.masked_fill(~meta.valid_tokens(), -1),
        }
        named |= {f"snapshot destinations ({i})": tensor for i, tensor in enumerate(snapshots)}
        self._compare(list(named), [checksum(tensor) for tensor in named.values()])

    def chose(self, layer: int, entries: Tensor) -> None:
        """Take note of a CSA layer's chosen entries, int [N, k]; their order counts, too."""
        self._chosen[layer] = checksum(entries)

    def finish(self) -> None:
        """Compare the chosen entries of all CSA layers of the step. Raises RankError."""
        sums = [self._chosen.get(layer, self._none) for layer in self.layers]
        self._compare([f"chosen entries of layer {layer}" for layer in self.layers], sums)
        if self.steps % _TELL == 0:
            logger.info("sglang-dsv4: ranks agreed in %d steps", self.steps)

    def _compare(self, names: Sequence[str], sums: Sequence[Tensor]) -> None:
        if not names:
            return
        gathered = self.group.all_gather(torch.stack(list(sums))[None], dim=0).tolist()
        for name, *of_ranks in zip(names, *gathered, strict=True):
            if len(set(of_ranks)) > 1:
                told = ", ".join(f"rank {rank} {value % (1 << 64):016x}" for rank, value in enumerate(of_ranks))
                raise RankError(f"ranks differ in step {self.steps}: {name}: {told}")
