"""Cases of the kernels that prepare and pick: index_query, index_topk; and of scores of requests that share pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernel_cases import in_tree
from kernel_cases.attend import (
    BATCHES,
    CONTEXTS,
    INDEX_HEADS,
    PAGE,
    PAGED_LOGITS,
    fastest,
    importable,
    key_pool,
    paged_logits,
    queries,
    step,
)
from kernel_cases.base import Case, first_line, op_wanted, sets_for, slow_rivals, wanted
from sglang_dsv4.formats import index_codec
from sglang_dsv4.geometry import CSA_RATIO, GROUP_ROWS, INDEX_DIM, INDEX_FP4, INDEX_FP8, ROPE_DIM, RowLayout
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.index_query import index_query_cuda
from sglang_dsv4.ops.index_scores import index_scores_cuda
from sglang_dsv4.ops.index_topk import index_topk_cuda
from sglang_dsv4.ops.meta import StepMeta
from sglang_dsv4.ops.score_plan import ScorePlan, score_plan_cuda

# index_query


def query_cases(device: torch.device) -> Iterator[Case]:
    in_tree.load()
    module, reason = importable("sglang.kernels.ops.attention.dsv4.norm_rope")
    for layout in (INDEX_FP4, INDEX_FP8):
        for tokens in (*BATCHES, 8192) if layout is INDEX_FP4 else (64, 8192):
            if wanted("index_query", _query_shape(layout, tokens)):
                yield from _query(layout, tokens, device, module, reason)


def _query_shape(layout: RowLayout, tokens: int) -> str:
    return f"{layout.name} {f'batch {tokens}' if tokens < 8192 else 'chunk of 8192'}"


def _query(layout: RowLayout, tokens: int, device: torch.device, module: Any, reason: str) -> Iterator[Case]:
    # On Hopper it writes operands of index_scores instead of numbers.
    size = 1 if jit.architecture(device.index or 0) == "90a" else 2 if layout is INDEX_FP4 else 4
    num_bytes = tokens * INDEX_HEADS * (INDEX_DIM * (2 + size) + 6)
    sets = min(sets_for(num_bytes), 64)
    q = torch.randn(sets, tokens, INDEX_HEADS, INDEX_DIM, device=device, dtype=torch.bfloat16)
    weights = torch.randn(sets, tokens, INDEX_HEADS, device=device, dtype=torch.bfloat16)
    angle = torch.rand(CONTEXTS["32K"], ROPE_DIM // 2, device=device) * 6.28
    rope = torch.cat([angle.cos(), angle.sin()], dim=1)
    positions = torch.randint(0, CONTEXTS["32K"], (tokens,), device=device)
    codec = index_codec(layout)

    def run(i: int) -> object:
        return index_query_cuda(q[i], weights[i], rope, positions, codec=codec, scale=0.01)

    rivals: dict[str, Callable[[int], object]] = {}
    not_run: list[str] = []
    if module is None:
        not_run.append(f"in-tree fused_q_indexer_rope_hadamard: {reason}")
    else:
        freqs, kind = torch.polar(torch.ones_like(angle), angle), "fp4_quant" if layout is INDEX_FP4 else "quant"
        fused, narrow = getattr(module, f"fused_q_indexer_rope_hadamard_{kind}"), positions.int()
        rivals[f"in-tree fused_q_indexer_rope_hadamard_{kind}"] = lambda i: fused(q[i], weights[i], 0.01, freqs, narrow)
    shape = _query_shape(layout, tokens)
    print(f"index_query {shape}", flush=True)
    rival, rival_run = fastest(rivals, sets, not_run)
    yield Case("index_query", shape, num_bytes, run, sets, 0, rival, rival_run, not_run=not_run)


# index_topk


def topk_cases(device: torch.device) -> Iterator[Case]:
    in_tree.load()
    modules = {
        "in-tree top-k": importable("sglang.kernels.ops.attention.dsv4.topk"),
        "flashinfer.top_k_page_table_transform": importable("flashinfer") if slow_rivals() else (None, "slow"),
    }
    shapes = [(b, c) for b in BATCHES for c in ("2K", "4K", "16K", "32K", "128K")] + [(1, "1M"), (16, "1M"), (64, "1M")]
    for topk in (512, 1024):
        for batch, name in shapes:
            if CONTEXTS[name] // CSA_RATIO < topk or (topk != 512 and name != "32K"):
                continue
            if wanted("index_topk", _topk_shape(topk, batch, name)):
                yield _topk(topk, batch, name, device, modules)


WIDE_COLUMNS = CONTEXTS["1M"] // CSA_RATIO


def wide_cases(device: torch.device) -> Iterator[Case]:
    """Decode in a captured graph: rows of any length in a buffer as wide as the longest context.

    Scores are drawn from a normal distribution, or bunch: 40 values side by side, and one far above.
    """
    in_tree.load()
    module, reason = importable("sglang.kernels.ops.attention.dsv4.topk")
    for batch in (1, 16, 64):
        for visible in (1024, 8192, 32768, 32800):
            for spread in ("", ", bunched") if visible > 8192 else ("",):
                shape = f"k 512 batch {batch} visible {visible} in {WIDE_COLUMNS} columns{spread}"
                if wanted("index_topk", shape):
                    yield _wide(512, batch, visible, shape, device, module, reason)


def _bunch(scores: torch.Tensor) -> None:
    scores.copy_(1.0 + torch.randint(0, 40, scores.shape, device=scores.device) * 2.0**-20)
    scores[:, 7] = 1e9


def _wide(topk: int, batch: int, visible: int, shape: str, device: torch.device, module: Any, reason: str) -> Case:
    num_bytes = batch * 4 * (visible + topk)
    sets = max(4, min(16, sets_for(num_bytes), (4 << 30) // (batch * 4 * WIDE_COLUMNS)))
    meta = step(batch, visible * CSA_RATIO, device)
    scores = [torch.randn(batch, WIDE_COLUMNS, device=device) for _ in range(sets)]
    if shape.endswith("bunched"):
        for each in scores:
            _bunch(each)
    lens = torch.full((batch,), visible, dtype=torch.int32, device=device)
    out = torch.empty(batch, topk, dtype=torch.int32, device=device)
    rival, rival_run, not_run = None, None, []
    if module is None:
        not_run.append(f"in-tree top-k v2: {reason}")
    else:
        try:
            plan = module.plan_topk_v2(lens)
        except Exception as error:
            not_run.append(f"in-tree top-k v2: {first_line(error)}")
        else:
            rival = "in-tree top-k v2"

            def rival_run(i: int) -> object:
                return module.topk_transform_paged_v2(scores[i], lens, meta.page_table, out, PAGE // CSA_RATIO, plan)

    def run(i: int) -> torch.Tensor:
        return index_topk_cuda(scores[i], meta, topk=topk, physical=True)

    return Case("index_topk", shape, num_bytes, run, sets, 0, rival, rival_run, not_run=not_run)


# A chunk's k, context in K tokens and spread of scores.
CHUNKS = [(512, 32, ""), (1024, 32, ""), (512, 32, ", bunched"), (512, 16, ""), (512, 64, "")]


def chunk_cases(device: torch.device) -> Iterator[Case]:
    """The last 8,192 tokens of a prompt; of 32,768: rows of 6,144 to 8,192 scores."""
    in_tree.load()
    module, reason = importable("sglang.kernels.ops.attention.dsv4.topk")
    for topk, context, spread in CHUNKS:
        shape = f"k {topk} chunk of 8192 at {context}K{spread}"
        if wanted("index_topk", shape):
            yield _chunk(topk, context << 10, shape, device, module, reason)


def _chunk(topk: int, context: int, shape: str, device: torch.device, module: Any, reason: str) -> Case:
    tokens, sets = 8192, 2
    meta, width = step(1, context, device, tokens), context // CSA_RATIO
    scores = [torch.randn(tokens, width, device=device) for _ in range(sets)]
    if shape.endswith("bunched"):
        for each in scores:
            _bunch(each)
    lens = ((meta.positions + 1) // CSA_RATIO).int()
    rival, rival_run, not_run = None, None, []
    if module is None:
        not_run.append(f"in-tree top-k v2: {reason}")
    else:
        plan, table = module.plan_topk_v2(lens), meta.page_table.expand(tokens, -1).contiguous()
        out = torch.empty(tokens, topk, dtype=torch.int32, device=device)
        rival = "in-tree top-k v2"

        def rival_run(i: int) -> object:
            return module.topk_transform_paged_v2(scores[i], lens, table, out, PAGE // CSA_RATIO, plan)

    def run(i: int) -> torch.Tensor:
        return index_topk_cuda(scores[i], meta, topk=topk, physical=False)

    num_bytes = 4 * (int(lens.sum()) + tokens * topk)
    return Case("index_topk", shape, num_bytes, run, sets, 0, rival, rival_run, not_run=not_run)


def _topk_shape(topk: int, batch: int, name: str) -> str:
    return f"k {topk} batch {batch} at {name}"


def _topk(topk: int, batch: int, name: str, device: torch.device, modules: dict[str, tuple[Any, str]]) -> Case:
    width = CONTEXTS[name] // CSA_RATIO
    num_bytes = batch * 4 * (width + topk)
    sets = min(sets_for(num_bytes), 32)
    meta = step(batch, CONTEXTS[name], device)
    scores = [torch.randn(batch, width, device=device) for _ in range(sets)]
    lens = torch.full((batch,), width, dtype=torch.int32, device=device)
    per_page = PAGE // CSA_RATIO
    out = torch.empty(batch, topk, dtype=torch.int32, device=device)
    rivals: dict[str, Callable[[int], object]] = {
        "torch.topk": lambda i: torch.topk(scores[i], topk, dim=1, sorted=False)
    }
    not_run = [f"{name}: {reason}" for name, (module, reason) in modules.items() if module is None]
    topk_module, flashinfer = (module for module, _ in modules.values())
    if topk_module is not None:
        if topk == 512:
            rivals["in-tree top-k v1"] = lambda i: topk_module.topk_transform_paged(
                scores[i], lens, meta.page_table, out, per_page
            )
        try:
            plan = topk_module.plan_topk_v2(lens)
        except Exception as error:
            not_run.append(f"in-tree top-k v2: {first_line(error)}")
        else:
            rivals["in-tree top-k v2"] = lambda i: topk_module.topk_transform_paged_v2(
                scores[i], lens, meta.page_table, out, per_page, plan
            )
    if flashinfer is not None:
        # As SGLang calls it, any of several equal scores and in any order; then with ties as ours: to the lower id.
        def by_flashinfer(i: int, ties: int) -> object:
            return flashinfer.top_k_page_table_transform(
                scores[i],
                meta.page_table,
                lens,
                topk,
                deterministic=bool(ties),
                tie_break=ties,
                dsa_graph_safe=True,
                page_size=per_page,
                out=out,
            )

        for label, ties in (("", 0), (", ties to the lower", 1)):
            rivals[f"flashinfer.top_k_page_table_transform{label}"] = functools.partial(by_flashinfer, ties=ties)
    shape = _topk_shape(topk, batch, name)
    print(f"index_topk {shape}", flush=True)
    rival, rival_run = fastest(rivals, sets, not_run)

    def run(i: int) -> torch.Tensor:
        return index_topk_cuda(scores[i], meta, topk=topk, physical=True)

    return Case("index_topk", shape, num_bytes, run, sets, 0, rival, rival_run, not_run=not_run)


# index_scores of requests that share pages, and the plan that it takes

PLANNED = [(2, "128K"), (4, "128K"), (16, "128K"), (64, "32K"), (64, "128K")]


def planned_cases(device: torch.device) -> Iterator[Case]:
    """Requests of one table; and, with a plan that finds nothing, requests of different pages."""
    deep_gemm = importable("deep_gemm")
    for layout in (INDEX_FP4, INDEX_FP8):
        for shared in (True, False):
            for batch, name in PLANNED if shared else [(1, "128K"), (64, "32K"), (64, "128K")]:
                shape = f"{layout.name} batch {batch} at {name} {'shared' if shared else 'planned'}"
                if wanted("index_scores", shape):
                    yield _planned(layout, batch, name, shared, shape, device, deep_gemm)


def _table_of_all(meta: StepMeta) -> StepMeta:
    """Every request reads the pages of the first."""
    meta.page_table = torch.randperm(meta.page_table.shape[1], device=meta.device).int().repeat(meta.num_requests, 1)
    return meta


def _planned(
    layout: RowLayout, batch: int, name: str, shared: bool, shape: str, device: torch.device, deep_gemm: tuple[Any, str]
) -> Case:
    entries, codec = CONTEXTS[name] // CSA_RATIO, index_codec(layout)
    pools_of = 1 if shared else batch
    num_bytes = pools_of * entries * layout.row_bytes + batch * (entries * 4 + INDEX_HEADS * (INDEX_DIM + 4))
    sets = min(16, sets_for(num_bytes))
    metas = [step(batch, CONTEXTS[name], device) for _ in range(sets)]
    if shared:
        metas = [_table_of_all(meta) for meta in metas]
    pools = [key_pool(layout, -(-pools_of * entries // GROUP_ROWS), device) for _ in range(sets)]
    operands, numbers = queries(layout, batch, sets, device)
    plans = [ScorePlan.allocate(batch, device) for _ in range(sets)]
    for plan, meta in zip(plans, metas, strict=True):
        score_plan_cuda(plan, meta)

    def run(i: int) -> torch.Tensor:
        return index_scores_cuda(*operands[i], pools[i], metas[i], codec=codec, max_entries=entries, plan=plans[i])

    not_run: list[str] = []
    q, weights = zip(*numbers, strict=True)
    rival_run = paged_logits(*deep_gemm, layout, pools, q, weights, entries, shared, not_run)
    flops = 2 * batch * entries * INDEX_HEADS * INDEX_DIM
    return Case("index_scores", shape, num_bytes, run, sets, flops, PAGED_LOGITS, rival_run, not_run=not_run)


def plan_cases(device: torch.device) -> Iterator[Case]:
    """The plan of one step: all requests of one table, and all of different ones."""
    for batch, name in ((1, "128K"), (64, "128K"), (256, "1M")):
        for shared in (True, False):
            shape = f"batch {batch} at {name}, {'shared' if shared else 'distinct'}"
            if wanted("score_plan", shape):
                yield _plan(batch, name, shared, shape, device)


def _plan(batch: int, name: str, shared: bool, shape: str, device: torch.device) -> Case:
    metas = [step(batch, CONTEXTS[name], device) for _ in range(8)]
    if shared:
        metas = [_table_of_all(meta) for meta in metas]
    plan = ScorePlan.allocate(batch, device)
    num_bytes = metas[0].page_table.numel() * 4 if shared else batch * 4
    return Case("score_plan", shape, num_bytes, lambda i: score_plan_cuda(plan, metas[i]), len(metas))


def cases(device: torch.device) -> Iterator[Case]:
    if op_wanted("index_query"):
        yield from query_cases(device)
    if op_wanted("index_scores"):
        yield from planned_cases(device)
    if op_wanted("score_plan"):
        yield from plan_cases(device)
    if op_wanted("index_topk"):
        yield from wide_cases(device)
        yield from chunk_cases(device)
        yield from topk_cases(device)
