"""Attention of decode queries over packed window rows and packed entries, one softmax with the sink.

Reads the window pool and the entry pages; writes nothing but its result.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import GROUP_ROWS, HEAD_DIM, MAIN_FP8, ROPE_DIM, WINDOW
from sglang_dsv4.ops import flash_mla, jit
from sglang_dsv4.ops.checks import Check
from sglang_dsv4.ops.exact_attention import attend

# Queries are processed in slices of bounded memory: a slice holds this many decoded rows.
ROW_BUDGET = 1 << 15
# The Hopper kernel: heads of a block, blocks of a cluster.
BLOCK_HEADS = 64
CLUSTERS = (1, 2, 4, 8)
MAX_SPLITS = 32
KERNELS = ("auto", "flash_mla", "hopper", "portable")


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    sink: Tensor,
    rope: Tensor,
    positions: Tensor,
    *,
    scale: float,
    codec: RowCodec,
    entry_lens: Tensor | None = None,
) -> Tensor:
    """float [N, H, 512] in q's dtype: softmax(q . K * scale) K over window and entries, de-rotated at the query.

    q            float [N, H, 512], rotated at its position
    window       uint8 [2 * slots, group bytes], this step's rows already appended
    window_rows  int [N, 128] rows of `window`, -1 masked
    entries      uint8 [groups, group bytes] or None; entry_rows int [N, K] rows of it, -1 masked, or None
    sink         float32 [H], a logit whose value is zero
    rope         float32 [positions, 64]; positions int64 [N]
    entry_lens   int32 [N], at least 1: behind so many of its entry rows a query has none; spares finding that out
    A query without any valid row returns zeros. Rows behind -1 are never read as numbers: they may hold NaN.
    """
    out = torch.empty_like(q)
    width = window_rows.shape[1] + (entry_rows.shape[1] if entry_rows is not None else 0)
    step = max(1, ROW_BUDGET // max(1, width))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        keys, valid = [codec.gather(window, window_rows[part].long())], [window_rows[part] >= 0]
        if entries is not None and entry_rows is not None:
            keys.append(codec.gather(entries, entry_rows[part].long()))
            valid.append(entry_rows[part] >= 0)
        out[part] = attend(q[part], torch.cat(keys, 1), torch.cat(valid, 1), sink, rope[positions[part]], scale=scale)
    return out


def choose(kernel: str, heads: int, arch: str, check: Check) -> str:
    """The kernel that serves a decode step. "auto" takes what was fastest on Hopper cards (kernels/flash_mla.md)."""
    if kernel not in KERNELS:
        raise check.fail("kernel", repr(kernel), "one of " + ", ".join(KERNELS))
    if kernel == "hopper" and arch != "90a":
        raise check.fail("kernel", "hopper", f"portable or auto on sm_{arch}")
    if kernel == "flash_mla" and not flash_mla.serves(heads, arch):
        must = "another: FlashMLA is absent or does not serve"
        raise check.fail("kernel", "flash_mla", f"{must} {heads} heads on sm_{arch}")
    if kernel != "auto":
        return kernel
    if flash_mla.serves(heads, arch) and (heads, arch) != (BLOCK_HEADS, "90a"):
        return "flash_mla"
    return "hopper" if arch == "90a" else "portable"


@functools.cache
def split_hopper(tokens: int, heads: int, columns: int, at_once: tuple[int, ...]) -> tuple[int, int]:
    """Blocks of a cluster and clusters that share a query's tiles of 64 columns, decided by shapes alone.

    `at_once` are the clusters that a device runs at a time, for each of CLUSTERS. Costs are in tiles: a block starts up
    for about one and a half, a cluster exchanges for about one.
    """
    blocks = tokens * -(-heads // BLOCK_HEADS)
    tiles = -(-columns // GROUP_ROWS)
    room = dict(zip(CLUSTERS, at_once, strict=True))

    def cost(parts: int) -> float:
        return -(-blocks // room[parts]) * (-(-tiles // parts) + 1.5 + (parts > 1))

    parts = min((p for p in CLUSTERS if room[p]), key=cost)
    groups = 1
    if parts == CLUSTERS[-1]:
        groups = max(1, min(room[parts] // blocks, tiles // (4 * parts), MAX_SPLITS))
    return parts, groups


@functools.cache
def split_portable(tokens: int, heads: int, columns: int, multiprocessors: int) -> int:
    """Blocks that share a query's tiles of 64 columns."""
    blocks = tokens * -(-heads // (BLOCK_HEADS // 2))
    return max(1, min(2 * multiprocessors // max(blocks, 1), -(-columns // GROUP_ROWS), MAX_SPLITS))


def sparse_attention_cuda(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    sink: Tensor,
    rope: Tensor,
    positions: Tensor,
    *,
    scale: float,
    codec: RowCodec,
    entry_lens: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """CUDA face of `sparse_attention`: bfloat16 queries, FP8 rows, `scale` positive.

    `kernel` is what `choose` decides unless it is named:
    flash_mla  FlashMLA, then a launch that de-rotates; 64 or 128 heads. Rows must lie in their pools.
    hopper     our own: one launch without workspace, unless few queries attend to very many columns: then clusters
               leave partial results (2,056 B a query, head and cluster) that a second launch combines.
    portable   our own for every device since compute capability 8.0; splits that way at every small batch.
    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("sparse_attention")
    check.codec("codec", codec, (MAIN_FP8,))
    check.tensor("q", q, torch.bfloat16, ("tokens", "heads", HEAD_DIM), strided=1, align=16)
    check.pool("window", window, MAIN_FP8)
    check.tensor("window_rows", window_rows, (torch.int32, torch.int64), ("tokens", WINDOW), strided=1)
    if (entries is None) != (entry_rows is None):
        raise check.fail("entry_rows", "None" if entry_rows is None else "given", "given exactly with entries")
    if entries is None or entry_rows is None:
        entries, entry_rows = window, q.new_empty((q.shape[0], 0), dtype=torch.int32)
    check.pool("entries", entries, MAIN_FP8)
    check.tensor("entry_rows", entry_rows, torch.int32, ("tokens", None), strided=1)
    check.tensor("sink", sink, torch.float32, ("heads",))
    check.tensor("rope", rope, torch.float32, (None, ROPE_DIM), align=16)
    check.tensor("positions", positions, torch.int64, ("tokens",))
    if entry_lens is not None:
        check.tensor("entry_lens", entry_lens, torch.int32, ("tokens",))
    if not scale > 0:
        raise check.fail("scale", repr(scale), "positive")
    device = check.cuda()
    tokens, heads = q.shape[:2]
    if not q.numel():
        return q.new_empty(q.shape)
    kernel = choose(kernel, heads, jit.architecture(device), check)
    if kernel == "flash_mla":
        return flash_mla.decode(q, window, window_rows, entries, entry_rows, sink, rope, positions, scale, entry_lens)
    out = q.new_empty(q.shape)
    shape = (tokens, heads, WINDOW + entry_rows.shape[1])
    if kernel == "hopper":
        parts, splits = split_hopper(*shape, clusters_at_once(device))
    else:
        parts, splits = 0, split_portable(*shape, _multiprocessors(device))
    room = splits if splits > 1 else 0
    partial = q.new_empty((tokens, heads, room, HEAD_DIM), dtype=torch.float32)
    partial_stat = q.new_empty((tokens, heads, room, 2), dtype=torch.float32)
    lens = entry_lens if entry_lens is not None else q.new_empty(0, dtype=torch.int32)
    run = jit.function("sparse_attention", "sparse_attention", device)
    run(
        q, window, window_rows, entries, entry_rows, lens, sink, rope, positions, out, partial, partial_stat,
        scale, parts, splits,
    )  # fmt: skip
    return out


@functools.cache
def clusters_at_once(device: int) -> tuple[int, ...]:
    """Clusters of the Hopper kernel that a device runs at a time, for each of CLUSTERS."""
    count = jit.function("sparse_attention", "hopper_clusters", device)
    anchor = torch.empty(0, device=torch.device("cuda", device))
    return tuple(count(anchor, parts) for parts in CLUSTERS)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
