"""What the ranks of one server agree on while their pools are built. Afterwards they do alike by construction."""

from __future__ import annotations

import torch


def least(value: int, ranks: int) -> int:
    """The least of what the ranks say. All of them have to ask."""
    if ranks == 1:
        return value
    from sglang.srt.runtime_context import get_parallel

    told = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MIN, group=get_parallel().world_group.cpu_group)
    return int(told)
