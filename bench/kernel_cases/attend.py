"""Cases of the kernels that read the cache: index_scores, sparse_attention, sparse_prefill."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_cases.base import Case, Timer, first_line, op_wanted, sets_for, wanted
from sglang_dsv4.formats import index_codec, main_codec
from sglang_dsv4.geometry import (
    CSA_RATIO,
    GROUP_ROWS,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP8,
    NOPE_DIM,
    ROPE_DIM,
    WINDOW,
    RowLayout,
)
from sglang_dsv4.ops import flash_mla, jit
from sglang_dsv4.ops.index_query import index_query_cuda
from sglang_dsv4.ops.index_scores import index_scores_cuda
from sglang_dsv4.ops.meta import StepMeta
from sglang_dsv4.ops.sparse_attention import sparse_attention_cuda
from sglang_dsv4.ops.sparse_prefill import sparse_prefill_cuda

INDEX_HEADS = 64
SCALE = HEAD_DIM**-0.5
CONTEXTS = {"2K": 2048, "4K": 4096, "16K": 16384, "32K": 32768, "128K": 131072, "1M": 1 << 20}
BATCHES = (1, 16, 64, 256)
GEOMETRY = {"Flash": (64, 512), "Pro": (128, 1024)}  # heads, entries that CSA selects
PAGE = 128
IN_TREE_GROUP = 256  # rows of the in-tree window page


def step(batch: int, context: int, device: torch.device, tokens: int = 1) -> StepMeta:
    """Requests of one length, their pages in random order over a pool of just as many."""
    pages = -(-context // PAGE)
    table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
    rows = torch.arange(batch, device=device, dtype=torch.int32)
    empty = torch.zeros(batch, 0, dtype=torch.int32, device=device)
    return StepMeta(
        req_rows=rows,
        slots=rows,
        prefix_lens=torch.full_like(rows, context - tokens),
        seq_lens=torch.full_like(rows, context),
        token_offsets=torch.arange(batch + 1, device=device, dtype=torch.int32) * tokens,
        token_to_req=rows.repeat_interleave(tokens),
        positions=(torch.arange(tokens, device=device) + context - tokens).repeat(batch),
        page_table=table,
        snapshot_slots=empty,
        snapshot_lens=empty,
        page_size=PAGE,
    )


def key_pool(layout: RowLayout, groups: int, device: torch.device) -> Tensor:
    """Indexer keys of random codes with scales as keys have them."""
    pool = torch.randint(0, 256, (groups, layout.group_bytes), dtype=torch.uint8, device=device)
    start = GROUP_ROWS * layout.data_bytes
    if layout is INDEX_FP4:
        pool[:, start:] = torch.randint(118, 123, (groups, 4 * GROUP_ROWS), device=device).byte()
    else:
        pool[:, :start] &= 0xF7  # no NaN
        pool[:, start:] = torch.rand(groups, GROUP_ROWS, device=device).view(torch.uint8)
    return pool


def row_pool(groups: int, device: torch.device) -> Tensor:
    """Packed main rows of random numbers."""
    pool = torch.randint(0, 256, (groups, MAIN_FP8.group_bytes), dtype=torch.uint8, device=device)
    data = pool[:, : GROUP_ROWS * MAIN_FP8.data_bytes].view(groups, GROUP_ROWS, MAIN_FP8.data_bytes)
    data[..., :NOPE_DIM] &= 0xF7
    data[..., NOPE_DIM:] = torch.randn(groups, GROUP_ROWS, ROPE_DIM, device=device).bfloat16().view(torch.uint8)
    scales = pool[:, GROUP_ROWS * MAIN_FP8.data_bytes :]
    scales[:] = torch.randint(118, 121, scales.shape, device=device).byte()
    return pool


def importable(name: str) -> tuple[Any, str]:
    """A rival's module and "", or None and why it is no rival here."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, f"cannot be imported: {first_line(error)}"


def fastest(rivals: dict[str, Callable[[int], object]], sets: int, not_run: list[str]) -> tuple[str | None, Any]:
    """Name and launcher of the fastest rival that runs here; prints all, and adds to `not_run` those that fail."""
    best: tuple[float, str | None, Any] = (float("inf"), None, None)
    for name, run in rivals.items():
        try:
            us = Timer(run, sets).median_us()
        except Exception as error:
            not_run.append(f"{name}: {first_line(error)}")
            continue
        print(f"  rival {name}: {us:.2f} us", flush=True)
        best = min(best, (us, name, run), key=lambda b: b[0])
    return best[1], best[2]


# index_scores


def score_cases(device: torch.device) -> Iterator[Case]:
    deep_gemm, reason = importable("deep_gemm")
    shapes = [(b, c) for b in BATCHES for c in ("4K", "32K", "128K")] + [(1, "1M"), (16, "1M")]
    for layout in (INDEX_FP4, INDEX_FP8):
        for batch, name in shapes:
            if (batch, name) != (256, "128K") and wanted("index_scores", _scores_shape(layout, batch, name)):
                yield _scores(layout, batch, name, device, deep_gemm, reason)
    for name in ("32K", "128K"):
        if wanted("index_scores", _chunk_shape(name)):
            yield from _prefill_scores(name, device, deep_gemm, reason)


def _chunk_shape(name: str) -> str:
    return f"mxfp4 chunk of 8192 at {name}"


def _scores_shape(layout: RowLayout, batch: int, name: str) -> str:
    return f"{layout.name} batch {batch} at {name}"


def _scores(layout: RowLayout, batch: int, name: str, device: torch.device, deep_gemm: Any, reason: str) -> Case:
    context = CONTEXTS[name]
    entries, codec = context // CSA_RATIO, index_codec(layout)
    num_bytes = batch * (entries * (layout.row_bytes + 4) + INDEX_HEADS * (INDEX_DIM + 4))
    sets = min(8, sets_for(num_bytes)) if batch * entries > 1 << 18 else sets_for(num_bytes)
    sets = min(sets, 64)
    metas = [step(batch, context, device) for _ in range(sets)]
    pools = [key_pool(layout, -(-batch * entries // GROUP_ROWS), device) for _ in range(sets)]
    operands, numbers = queries(layout, batch, sets, device)

    def run(i: int) -> Tensor:
        return index_scores_cuda(*operands[i], pools[i], metas[i], codec=codec, max_entries=entries)

    not_run: list[str] = []
    q, weights = zip(*numbers, strict=True)
    rival_run = paged_logits(deep_gemm, reason, layout, pools, q, weights, entries, False, not_run)
    flops = 2 * batch * entries * INDEX_HEADS * INDEX_DIM
    shape = _scores_shape(layout, batch, name)
    return Case("index_scores", shape, num_bytes, run, sets, flops, PAGED_LOGITS, rival_run, not_run=not_run)


def queries(
    layout: RowLayout, batch: int, sets: int, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Queries and weights of decode steps, as `index_query` hands them over, and as numbers."""
    operands, numbers = [], []
    for _ in range(sets):
        raw = torch.randn(batch, INDEX_HEADS, INDEX_DIM, device=device).bfloat16()
        weights = torch.randn(batch, INDEX_HEADS, device=device)
        rope, positions = torch.randn(1, ROPE_DIM, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
        turn = functools.partial(index_query_cuda, codec=index_codec(layout), scale=1.0)
        operands.append(turn(raw, weights, rope, positions))
        numbers.append(turn(raw, weights, rope, positions, portable=True))
    return operands, numbers


PAGED_LOGITS = "deep_gemm.fp8_paged_mqa_logits"


def paged_logits(
    deep_gemm: Any,
    reason: str,
    layout: RowLayout,
    pools: list[Tensor],
    q: Sequence[Tensor],
    weights: Sequence[Tensor],
    entries: int,
    shared: bool,
    not_run: list[str],
) -> Callable[[int], Tensor] | None:
    """The in-tree scoring: FP8 keys in blocks of 64 rows, each request's own or (`shared`) the same for all.

    On MXFP4 keys it is given as many FP8 ones. What a step's layers share, its plan, is made outside. None where it
    does not run; `not_run` then says why.
    """
    batch, device = q[0].shape[0], q[0].device
    try:
        if deep_gemm is None:
            raise ImportError(reason)
        fp8 = pools if layout is INDEX_FP8 else [key_pool(INDEX_FP8, p.shape[0], device) for p in pools]
        caches = [p.view(p.shape[0], GROUP_ROWS, 1, INDEX_FP8.row_bytes) for p in fp8]
        blocks, tables_of = -(-entries // GROUP_ROWS), 1 if shared else batch
        tables = [torch.randperm(tables_of * blocks, device=device).int().view(tables_of, blocks) for _ in pools]
        tables = [table.expand(batch, -1).contiguous() for table in tables]
        q8 = [x.to(torch.float8_e4m3fn).view(batch, 1, INDEX_HEADS, INDEX_DIM) for x in q]
        lens = torch.full((batch, 1), entries, dtype=torch.int32, device=device)
        plan = deep_gemm.get_paged_mqa_logits_metadata(lens, GROUP_ROWS, deep_gemm.get_num_sms())
    except Exception as error:
        not_run.append(f"{PAGED_LOGITS}: {first_line(error)}")
        return None

    def run(i: int) -> Tensor:
        return deep_gemm.fp8_paged_mqa_logits(
            q8[i], caches[i], weights[i], lens, tables[i], plan, entries, clean_logits=False
        )

    return run


def _prefill_scores(name: str, device: torch.device, deep_gemm: Any, reason: str) -> Iterator[Case]:
    """The last 8,192 tokens of a context: from numbers, and from the operands that `index_query` makes."""
    tokens, context = 8192, CONTEXTS[name]
    entries, codec = context // CSA_RATIO, index_codec(INDEX_FP4)
    meta, pool = step(1, context, device, tokens), key_pool(INDEX_FP4, entries // GROUP_ROWS, device)
    raw = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device=device).bfloat16()
    weights = torch.randn(tokens, INDEX_HEADS, device=device)
    rope = torch.randn(1, ROPE_DIM, device=device)
    pairs = sum((p + 1) // CSA_RATIO for p in range(context - tokens, context))
    for label, numbers in (("", True), (", operands given", False)):
        q, w = index_query_cuda(raw, weights, rope, meta.positions, codec=codec, scale=1.0, many=True, portable=numbers)
        not_run: list[str] = []
        rival, rival_run = None, None
        if not numbers:
            rival = RAGGED_LOGITS
            rival_run = _ragged_logits(deep_gemm, reason, raw, weights, meta.positions, entries, not_run)

        def run(_: int, q: Tensor = q, w: Tensor = w) -> Tensor:
            return index_scores_cuda(q, w, pool, meta, codec=codec, max_entries=entries)

        num_bytes, flops = 4 * pairs + q.numel() * q.element_size() + pool.numel(), 2 * pairs * INDEX_HEADS * INDEX_DIM
        shape = _chunk_shape(name) + label
        yield Case("index_scores", shape, num_bytes, run, 1, flops, rival, rival_run, not_run=not_run)


RAGGED_LOGITS = "deep_gemm.fp8_mqa_logits"


def _ragged_logits(
    deep_gemm: Any, reason: str, raw: Tensor, weights: Tensor, positions: Tensor, entries: int, not_run: list[str]
) -> Callable[[int], Tensor] | None:
    """The in-tree scoring of a chunk over FP8 keys, which are gathered beforehand; see `paged_logits` for None."""
    try:
        if deep_gemm is None:
            raise ImportError(reason)
        q8 = raw.to(torch.float8_e4m3fn)
        keys = torch.randn(entries, INDEX_DIM, device=raw.device).to(torch.float8_e4m3fn)
        scales = torch.rand(entries, device=raw.device) + 0.5
        ends = ((positions + 1) // CSA_RATIO).int()
        starts = torch.zeros_like(ends)
        logits: Callable[..., Tensor] = deep_gemm.fp8_mqa_logits
    except Exception as error:
        not_run.append(f"{RAGGED_LOGITS}: {first_line(error)}")
        return None
    return lambda _: logits(q8, (keys, scales), weights, starts, ends, clean_logits=False, max_seqlen_k=entries)


# sparse_attention


def attention_cases(device: torch.device) -> Iterator[Case]:
    """CSA of both models; HCA (all entries of a context) of Flash. The default kernel, then our own."""
    shapes = [(f"{model} CSA", heads, k, b) for model, (heads, k) in GEOMETRY.items() for b in BATCHES]
    shapes += [(f"Flash HCA at {c}", 64, CONTEXTS[c] // 128, b) for c in ("32K", "128K") for b in (16, 64)]
    shapes += [("Flash HCA at 1M", 64, CONTEXTS["1M"] // 128, b) for b in (1, 16)]
    shapes += [("Flash window", 64, 0, 64), ("Flash CSA, 8 heads", 8, 512, 64)]
    for name, heads, width, batch in shapes:
        yield from _attention(name, heads, width, batch, device)


class _Decode:
    """Rotated inputs of one decode shape."""

    def __init__(self, heads: int, width: int, batch: int, sets: int, device: torch.device) -> None:
        rows = min(max(2 * batch * max(width, GROUP_ROWS), 1 << 16), 1 << 20)
        self.window = [row_pool(2 * (batch + 2), device) for _ in range(sets)]
        slots = torch.arange(1, batch + 1, device=device, dtype=torch.int32)[:, None] * WINDOW
        self.window_rows = slots + torch.arange(WINDOW, device=device, dtype=torch.int32)
        self.entries = [row_pool(rows // GROUP_ROWS, device) if width else None for _ in range(sets)]
        # HCA layers of a step share their rows, CSA layers each bring their own.
        picked = [torch.randint(0, rows, (batch, width), device=device).int() for _ in range(sets)]
        self.entry_rows = [(picked[0] if width > 1024 else x) if width else None for x in picked]
        self.entry_lens = torch.full((batch,), max(width, 1), dtype=torch.int32, device=device)
        self.q = [torch.randn(batch, heads, HEAD_DIM, device=device).bfloat16() for _ in range(sets)]
        self.sink = torch.randn(heads, device=device)
        self.rope = torch.randn(4096, ROPE_DIM, device=device)
        self.positions = torch.randint(0, 4096, (batch,), device=device)

    def run(self, i: int, kernel: str) -> Tensor:
        return sparse_attention_cuda(
            self.q[i], self.window[i], self.window_rows, self.entries[i], self.entry_rows[i], self.sink, self.rope,
            self.positions, scale=SCALE, codec=main_codec(MAIN_FP8), entry_lens=self.entry_lens, kernel=kernel,
        )  # fmt: skip


def _attention(name: str, heads: int, width: int, batch: int, device: torch.device) -> Iterator[Case]:
    num_bytes = batch * ((WINDOW + width) * MAIN_FP8.row_bytes + 4 * heads * HEAD_DIM)
    sets = min(sets_for(num_bytes), 8)
    x = _Decode(heads, width, batch, sets, device)
    flops = 4 * batch * heads * (WINDOW + width) * HEAD_DIM
    rival = rival_run = None
    if flash_mla.serves(heads, "90a"):
        rival, rival_run = "in-tree FlashMLA call, de-rotated", _in_tree_attention(x, width, batch, device)
    shape = f"{name} batch {batch}"
    for kernel in ("auto", "hopper", "portable"):
        if kernel != "portable" or batch in (1, 64):
            label = shape if kernel == "auto" else f"{shape}, {kernel}"
            run = functools.partial(x.run, kernel=kernel)
            yield Case("sparse_attention", label, num_bytes, run, sets, flops, rival, rival_run)


def _in_tree_attention(x: _Decode, width: int, batch: int, device: torch.device) -> Callable[[int], object]:
    """FlashMLA as the in-tree backend calls it: pages of 256 window rows, lengths, one schedule for all layers."""
    row = MAIN_FP8.row_bytes
    stride = -(-IN_TREE_GROUP * row // MAIN_FP8.align) * MAIN_FP8.align
    pages = batch + 1
    window = row_pool(-(-pages * stride // MAIN_FP8.group_bytes) + 1, device).flatten()
    # Any bytes do for timing; NaN would not: the pool has none.
    cache = window.as_strided((pages, IN_TREE_GROUP, 1, row), (stride, row, row, 1))
    starts = torch.arange(batch, device=device, dtype=torch.int32)[:, None] * IN_TREE_GROUP
    indices = (starts + torch.arange(WINDOW, device=device, dtype=torch.int32)).unsqueeze(1)
    lens = torch.full((batch,), WINDOW, dtype=torch.int32, device=device)
    module = flash_mla.module()
    schedule = module.get_mla_metadata()[0]
    derotate = jit.function("sparse_attention", "derotate", device.index or 0)

    def run(i: int) -> object:
        extra: dict[str, Any] = {}
        entries, rows = x.entries[i], x.entry_rows[i]
        if entries is not None and rows is not None:
            extra = {
                "extra_k_cache": flash_mla._cache(entries),
                "extra_indices_in_kvcache": rows.unsqueeze(1),
                "extra_topk_length": x.entry_lens,
            }
        out, _ = module.flash_mla_with_kvcache(
            q=x.q[i].unsqueeze(1), k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=HEAD_DIM,
            tile_scheduler_metadata=schedule, softmax_scale=SCALE, is_fp8_kvcache=True, indices=indices,
            attn_sink=x.sink, topk_length=lens, use_legacy=True, **extra,
        )  # fmt: skip
        out = out.squeeze(1)
        derotate(out, x.rope, x.positions)
        return out

    run(0)
    return run


# sparse_prefill


def prefill_cases(device: torch.device) -> Iterator[Case]:
    """A chunk at 32K: 8,192 queries over 128 window rows and the selected entries."""
    for model, (heads, width) in GEOMETRY.items():
        yield from _prefill(model, heads, WINDOW + width, device)


def _prefill(model: str, heads: int, width: int, device: torch.device) -> Iterator[Case]:
    tokens, entries = 8192, CONTEXTS["32K"] // CSA_RATIO
    rows = WINDOW + tokens + entries
    workspace = torch.randn(rows, HEAD_DIM, device=device).bfloat16()
    window = torch.arange(tokens, device=device)[:, None] + torch.arange(1, WINDOW + 1, device=device)
    picked = torch.rand(tokens, entries, device=device).topk(width - WINDOW, dim=1).indices + WINDOW + tokens
    indices = torch.cat([window, picked], dim=1).int()
    q = torch.randn(tokens, heads, HEAD_DIM, device=device).bfloat16()
    sink, rope = torch.randn(heads, device=device), torch.randn(CONTEXTS["32K"], ROPE_DIM, device=device)
    positions = torch.arange(tokens, device=device) + CONTEXTS["32K"] - tokens
    flops = 4 * tokens * heads * width * HEAD_DIM
    num_bytes = 2 * q.numel() * 2 + indices.numel() * 4 + workspace.numel() * 2
    rival = rival_run = None
    if flash_mla.serves(heads, "90a"):
        module, lens = flash_mla.module(), torch.full((tokens,), width, dtype=torch.int32, device=device)
        derotate = jit.function("sparse_attention", "derotate", device.index or 0)
        rival = "in-tree FlashMLA sparse prefill, de-rotated"

        def rival_run(_: int) -> object:
            out = module.flash_mla_sparse_fwd(
                q, workspace.unsqueeze(1), indices.unsqueeze(1), SCALE, HEAD_DIM, sink, lens, use_legacy=True,
                return_log2_lse=True,
            )[0]  # fmt: skip
            derotate(out, rope, positions)
            return out

    for kernel in ("auto", "hopper"):

        def run(_: int, kernel: str = kernel) -> Tensor:
            return sparse_prefill_cuda(q, workspace, indices, sink, rope, positions, scale=SCALE, kernel=kernel)

        label = f"{model} chunk of 8192 at 32K" + ("" if kernel == "auto" else f", {kernel}")
        yield Case("sparse_prefill", label, num_bytes, run, 1, flops, rival, rival_run)


def cases(device: torch.device) -> Iterator[Case]:
    if op_wanted("index_scores"):
        yield from score_cases(device)
    if op_wanted("sparse_attention"):
        yield from attention_cases(device)
    if op_wanted("sparse_prefill"):
        yield from prefill_cases(device)
