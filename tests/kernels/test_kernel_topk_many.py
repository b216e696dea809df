"""index_topk of more than two rows a multiprocessor, which stand in shared memory, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from kernel_steps import Guarded, Plan, make_step, values
from test_kernel_index import POISON, check_distributions, run_topk, topk_meta
from torch import Tensor

from sglang_dsv4.geometry import CSA_RATIO
from sglang_dsv4.ops.index_topk import index_topk, index_topk_cuda


def many(device: torch.device) -> int:
    """So many rows that no two a multiprocessor would take them all."""
    return torch.cuda.get_device_properties(device).multi_processor_count * 2 + 9


def lengths(device: torch.device, *some: int, most: int) -> list[int]:
    """These first, then lengths up to `most`."""
    chosen = [n for n in some if n <= most]
    return chosen + [most - 37 * i % max(most // 3, 1) for i in range(many(device) - len(chosen))]


@pytest.mark.parametrize("topk", [1, 24, 512, 1000, 1024])
@pytest.mark.parametrize("width", [400, 1025, 2048, 2049, 4099, 6145, 8189, 8192, 8193, 16_384])
def test_many_rows_however_scores_are_spread(device, width, topk):
    """Lengths around k, the list and whole runs of threads, in buffers of both alignments; rows shorter than k."""
    around = (1023, 1024, 1025, 1536, 1537, 2047, 2048, 2049, 3072, 3073)
    visible = lengths(device, 0, 1, 3, topk - 1, topk, topk + 1, *around, most=width)
    for columns in (width, width + 4):
        check_distributions(visible, width, columns, topk, device)


def in_unaligned_rows(scores: Tensor, offset: int) -> Tensor:
    """The same scores in rows that begin at all places of a 16-byte unit, among NaN."""
    rows, width = scores.shape
    wide = torch.full((rows, width + 4 + (width + 1) % 2), torch.nan, device=scores.device)
    view = wide[:, offset : offset + width]
    view.copy_(scores)
    assert view.stride(0) % 2 == 1
    return view


@pytest.mark.parametrize("width", [700, 2050, 5001, 8189, 16_381])
def test_many_rows_that_begin_between_units(device, width):
    visible = lengths(device, 0, 2, 511, 513, 2045, 2046, 2047, 2048, 2049, most=width)
    meta = topk_meta(visible, device)
    for offset in range(4):
        normal = values((len(visible), width), device, width + offset)
        for scores in (normal, torch.randint(0, 40, normal.shape, device=device).float(), normal.bfloat16().float()):
            for topk in (512, 1024):
                run_topk(in_unaligned_rows(scores, offset), meta, topk, offset % 2 == 0)


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("width", [3000, 8192, 16_384])
def test_many_rows_with_ties_across_the_cut(device, width, topk):
    """More scores than the list holds equal the k-th, a few of them are wanted; and ties that the list holds."""
    rows = many(device)
    meta = topk_meta([width - i % 97 for i in range(rows)], device)
    spread = torch.rand(rows, width, generator=torch.Generator(device=device).manual_seed(width), device=device)
    above = torch.arange(rows, device=device)[:, None] * 9 % (topk + 20) / width  # share of scores above the tie
    for equal in (0.0, -0.0, 1.5, -torch.inf, 3e-42):
        high = max(equal, 1.0) * 3 + spread
        run_topk(torch.where(spread < above, high, equal), meta, topk, False)
        # Half of the others are below.
        below = -torch.inf if equal != -torch.inf else torch.nan
        mixed = torch.where(spread < above, high, torch.where(spread > 0.5, equal, below))
        run_topk_with_nan(mixed, meta, topk)
    for kept in (0.04, 0.2):  # of as many as the list can hold
        run_topk(torch.where(spread < kept, torch.full_like(spread, 7.0), spread), meta, topk, False)


def run_topk_with_nan(scores: Tensor, meta, topk: int) -> None:
    """NaN is as low as -inf: what the reference makes of scores where -inf stands instead."""
    want = index_topk(torch.where(scores.isnan(), -torch.inf, scores), meta, topk=topk, physical=False)
    assert torch.equal(index_topk_cuda(scores, meta, topk=topk, physical=False), want)


@pytest.mark.parametrize("width", [1500, 5000, 8192])
def test_many_rows_of_nan_and_infinities(device, width):
    rows = many(device)
    meta = topk_meta([width - i for i in range(rows)], device)
    scores = values((rows, width), device, 3)
    scores[: rows // 2, ::2] = torch.nan
    scores[3:, ::3] = -torch.inf
    scores[5::4, 100:] = torch.nan
    scores[6::4, 10:] = -torch.inf
    scores[7::4] = torch.nan
    scores[8::4, 5::2] = torch.inf
    for topk in (512, 1024):
        run_topk_with_nan(scores, meta, topk)


@pytest.mark.parametrize("period", [2, 8, 16, 64, 256])
def test_many_rows_whose_scores_repeat(device, period):
    """The highest scores lie at one place of each period, or everywhere else, which even steps could miss."""
    width, rows = 8192, many(device)
    meta = topk_meta([width - 8 * i for i in range(rows)], device)
    phase = (torch.arange(width, device=device) + torch.arange(rows, device=device)[:, None]) % period == 0
    scores = values((rows, width), device, period)
    for apart in (50.0, -50.0, 1e-3):
        for topk in (512, 1024):
            run_topk(scores + apart * phase, meta, topk, False)


def looked_at(width: int, every: int, device: torch.device) -> Tensor:
    """Positions of the sample: one of `every`, at a place that depends on a lane."""
    ids = torch.arange(width, device=device)
    return ids % (32 * every) - (ids // every % 32) * every == (ids // every % 32) // 4


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("width", [2049, 6144, 8192, 16_384])
def test_many_rows_that_deceive_the_sample(device, width, topk):
    """High scores exactly where the sample looks, or nowhere there: its bound is far off in both cases."""
    rows = many(device)
    meta = topk_meta([width] * rows, device)
    seen = looked_at(width, 8 if width <= 8192 else 16, device)
    scores = values((rows, width), device, 6)
    for apart in (50.0, -50.0, 1e30, -1e30):
        run_topk(scores + apart * seen, meta, topk, False)
    bunched = 1.0 + torch.randint(0, 40, (rows, width), device=device) * 2.0**-23
    run_topk(torch.where(seen, 5.0, bunched), meta, topk, False)
    run_topk(torch.where(seen, -5.0, bunched), meta, topk, False)


def test_many_rows_of_a_prefill_with_padding(device):
    """Two prompts, padded requests and tokens, into columns of a wider tensor; nothing beside them is written."""
    guard = Guarded(device)
    meta, _ = make_step(Plan([(20_000, 400), (0, 9), (2043, 300)], pad_requests=1, pad_tokens=7, seed=3), device)
    width = int(meta.visible_entries(CSA_RATIO).max())
    scores = values((meta.num_tokens, width + 1), device, 4)[:, :width]
    first = torch.arange(meta.num_tokens, device=device, dtype=torch.int32) * 10_000 + 7
    wide = guard.poison((meta.num_tokens, 128 + 512 + 128), torch.int32)
    before = wide.clone()
    got = index_topk_cuda(scores, meta, topk=512, physical=False, first=first, out=wide[:, 128:640])
    want = index_topk(scores, meta, topk=512, physical=False)
    assert torch.equal(got, torch.where(want >= 0, want + first[:, None], want))
    assert torch.equal(wide[:, :128], before[:, :128]) and torch.equal(wide[:, 640:], before[:, 640:])
    guard.check()
    run_topk(scores, meta, 1024, True)


def test_a_row_gives_the_same_alone_and_among_many(device):
    """Few rows are selected by another kernel."""
    width, rows = 8192, many(device)
    meta = topk_meta([width - 11 * i for i in range(rows)], device)
    scores = values((rows, width), device, 12).bfloat16().float()
    together = index_topk_cuda(scores, meta, topk=512, physical=False)
    for start in range(0, rows, 50):
        part = meta.tokens(start, min(start + 50, rows))
        alone = index_topk_cuda(scores[start : start + 50], part, topk=512, physical=False)
        assert torch.equal(alone, together[start : start + 50])


@pytest.mark.parametrize("width", [2000, 8192, 16_384])
def test_many_rows_in_a_captured_graph_equal_eager(device, width):
    """Captured once, replayed for other lengths and scores; every slot is written."""
    rows = many(device)
    meta = topk_meta([width] * rows, device)
    scores = values((rows, width), device, 7)
    index_topk_cuda(scores, meta, topk=512, physical=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index_topk_cuda(scores, meta, topk=512, physical=True)
    for step in range(20):
        meta.positions.copy_(torch.tensor([4 * (1 + (97 * i + 411 * step) % width) - 1 for i in range(rows)]))
        scores.copy_(values((rows, width), device, 100 + step))
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, index_topk(scores, meta, topk=512, physical=True))
