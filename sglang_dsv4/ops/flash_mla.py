"""FlashMLA on our rows: `sparse_attention` and `sparse_prefill` through SGLang's own dependency on Hopper.

A pool of row groups is FlashMLA's paged cache as it stands: uint8 [groups, 64, 1, 584] with a stride of 37,440 bytes
between groups (kernels/flash_mla.md says what was proved on a card). What FlashMLA leaves to its caller is done
here: heads must be 64 or 128, index rows a multiple of 64 wide, and the output is de-rotated by a kernel of ours.

Its split schedule depends on shapes and lengths. Without lengths it is made once per shape and kept; a wide index row
(HCA at long contexts) passes its lengths, and the schedule is made once per step, for the first layer that brings
the row. In a captured graph it is made by the captured launches.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.geometry import GROUP_ROWS, HEAD_DIM, MAIN_FP8
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.meta import INDEX_MULTIPLE

HEADS = (64, 128)
DECODE_MULTIPLE = 64
# Wider index rows are worth their lengths: the narrow ones of CSA are full once a context passes a few pages.
FULL_WIDTH = 1024


@functools.cache
def module() -> Any:
    """The `flash_mla` package with the kernels of DeepSeek-V4's rows, or None where it cannot be loaded."""
    try:
        import flash_mla
        from flash_mla._loader import has_legacy
    except Exception:  # absent, or built for another torch
        return None
    return flash_mla if has_legacy() else None


def serves(heads: int, arch: str) -> bool:
    """Whether FlashMLA can take this many heads on this target."""
    return arch == "90a" and heads in HEADS and module() is not None


def _cache(pool: Tensor) -> Tensor:
    stride = pool.stride(0)
    row = MAIN_FP8.row_bytes
    return pool.as_strided((pool.shape[0], GROUP_ROWS, 1, row), (stride, row, row, 1))


def _padded(rows: Tensor, multiple: int = DECODE_MULTIPLE) -> Tensor:
    """int32 [N, 1, K'] of int [N, K]: K' is a multiple of `multiple`, -1 behind."""
    rows = rows.int()
    short = -rows.shape[1] % multiple
    if short:
        rows = torch.nn.functional.pad(rows, (0, short), value=-1)
    return rows.contiguous().unsqueeze(1)


class _Prepared:
    """What was made of an index tensor, kept with it: one step passes the same tensor to many layers.

    It holds for the tensor's version and, while a graph is captured, for that capture alone: a replay makes it anew.
    """

    def __init__(self, rows: Tensor, state: tuple[int, int]) -> None:
        self.state = state
        self.indices = _padded(rows)
        self.lengths: Tensor | None = None
        self.schedules: dict[tuple[int, ...], Any] = {}


def _prepared(rows: Tensor) -> _Prepared:
    state = (rows._version, jit.function("sparse_attention", "capture_id", rows.device.index or 0)(rows))
    kept = rows.__dict__.get("_flash_mla")
    if kept is None or kept.state != state:
        kept = rows.__dict__["_flash_mla"] = _Prepared(rows, state)
    return kept


_schedules: dict[tuple[Any, ...], Any] = {}


def _schedule(device: torch.device, shape: tuple[int, ...]) -> Any:
    """The schedule of full index rows, which shapes alone decide. One made while a graph is captured is not kept."""
    made = _schedules.get((device, *shape))
    if made is None:
        made = module().get_mla_metadata()[0]
        if not torch.cuda.is_current_stream_capturing():
            _schedules[(device, *shape)] = made
    return made


def decode(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    sink: Tensor,
    rope: Tensor,
    positions: Tensor,
    scale: float,
    entry_lens: Tensor | None = None,
) -> Tensor:
    """`sparse_attention` of checked arguments. Rows must lie in their pools: FlashMLA checks none but -1."""
    tokens, heads, _ = q.shape
    first = _prepared(window_rows)
    extra: dict[str, Any] = {}
    width = 0
    schedule = None
    if entries is not None and entry_rows is not None and entry_rows.shape[1]:
        second = _prepared(entry_rows)
        width = second.indices.shape[2]
        extra = {"extra_k_cache": _cache(entries), "extra_indices_in_kvcache": second.indices}
        if width > FULL_WIDTH:
            if entry_lens is not None:
                second.lengths = entry_lens
            elif second.lengths is None:
                last = torch.arange(1, entry_rows.shape[1] + 1, device=q.device, dtype=torch.int32)
                second.lengths = torch.where(entry_rows >= 0, last, 0).amax(1).clamp(min=1).int()
            extra["extra_topk_length"] = second.lengths
            schedule = second.schedules.get((tokens, heads))
            if schedule is None:
                schedule = second.schedules[(tokens, heads)] = module().get_mla_metadata()[0]
    if schedule is None:
        schedule = _schedule(q.device, (tokens, heads, width))
    out, _ = module().flash_mla_with_kvcache(
        q=q.unsqueeze(1),
        k_cache=_cache(window),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=HEAD_DIM,
        tile_scheduler_metadata=schedule,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=first.indices,
        attn_sink=sink,
        use_legacy=True,
        **extra,
    )
    out = out.squeeze(1)
    jit.function("sparse_attention", "derotate", q.device.index or 0)(out, rope, positions)
    return out


def prefill(
    q: Tensor, workspace: Tensor, indices: Tensor, sink: Tensor, rope: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """`sparse_prefill` of checked arguments."""
    out = module().flash_mla_sparse_fwd(
        q,
        workspace.unsqueeze(1),
        _padded(indices, INDEX_MULTIPLE),
        scale,
        HEAD_DIM,
        sink,
        None,
        use_legacy=True,
        return_log2_lse=False,
    )[0]
    jit.function("sparse_attention", "derotate", q.device.index or 0)(out, rope, positions)
    return out
