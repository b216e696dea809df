"""index_scores and index_topk on a GPU against their torch references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_steps import Guarded, Plan, entry_groups, make_step, rope_table, same_bytes, values
from torch import Tensor

from sglang_dsv4.formats import hadamard, index_codec
from sglang_dsv4.geometry import CSA_RATIO, GROUP_ROWS, INDEX_DIM, INDEX_FP4, INDEX_FP8
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.index_query import index_query_cuda
from sglang_dsv4.ops.index_scores import index_scores_cuda
from sglang_dsv4.ops.index_topk import index_topk, index_topk_cuda
from sglang_dsv4.ops.meta import StepMeta

HEADS = 64
LAYOUTS = [INDEX_FP4, INDEX_FP8]
POISON = 2**30

PLANS = {
    "no entry yet": Plan([(0, 1), (0, 2), (2, 1)]),
    "first entries": Plan([(n - 1, 1) for n in (4, 5, 8, 252, 256, 257, 260)], seed=1),
    "mixed lengths, padded": Plan([(2999, 1), (3, 1), (9000, 1), (640, 1)], pad_requests=2, pad_tokens=2, seed=2),
    "several tokens a request": Plan([(1300, 5), (0, 3), (77, 6)], seed=3),
    "prefill": Plan([(0, 300), (1000, 77), (5, 1)], seed=4),
    "prefill, padded, page of 256": Plan([(0, 0), (511, 260), (4000, 64)], pad_requests=1, pad_tokens=5, page=256),
    "batch of 512": Plan([(37 * i % 900, 1) for i in range(512)], seed=6),
    "long": Plan([(100_000, 1)], seed=7),
    # On Hopper a block's four teams take tiles of 64 entries in turn, each through a ring of eight stages (FP8: five).
    "a tile a request": Plan([(3 + 89 * i % 252, 1) for i in range(300)], seed=8),
    "fewer tiles than teams, page of 256": Plan([(257 * i % 770, 1) for i in range(400)], page=256, seed=9),
    "rings that go round": Plan([(60_000 + 1237 * i, 1) for i in range(16)], seed=10),
    "rings that go round, page of 256": Plan([(90_000 - 4099 * i, 1) for i in range(12)], page=256, seed=11),
    # Prefill on Hopper: images come through a ring of eight stages, and a multiprocessor is dealt several blocks.
    "long chunks": Plan([(30_000, 700), (9000, 333), (5, 20)], seed=13),
    "long chunks, padded, page of 256": Plan([(17_003, 601)], pad_requests=1, pad_tokens=3, page=256, seed=14),
    "long and short requests in a block": Plan([(40_000, 1), (5, 1), (700, 1), (2, 1)] * 12, pad_tokens=1, seed=12),
}


def on_hopper(device: torch.device) -> bool:
    return jit.architecture(device.index or 0) == "90a"


class Scored:
    """A step's queries, weights and keys, and its scores in float64."""

    def __init__(self, plan: Plan, layout, device, *, heads: int = HEADS, dtype=torch.float32, spread: float = 3.0):
        self.codec = index_codec(layout)
        self.meta, numbers = make_step(plan, device)
        guard = self.guard = Guarded(device)
        groups = entry_groups(numbers, CSA_RATIO, self.meta.page_size)
        self.keys = guard.poison((groups, layout.group_bytes), torch.uint8)
        tokens = self.meta.num_tokens
        self.visible = self.meta.visible_entries(CSA_RATIO)
        self.width = max(1, int(self.visible.max()))
        # Only entries that some token sees are written; the others stay NaN.
        requests = self.meta.num_requests
        ids = torch.arange(self.width, device=device).expand(requests, -1)
        seen = ids < (self.meta.seq_lens[:, None] // CSA_RATIO)
        owner = torch.arange(requests, device=device)[:, None].expand_as(ids)
        rows = self.meta.entry_rows(owner, torch.where(seen, ids, -torch.ones_like(ids)), CSA_RATIO)
        raw = hadamard(values((requests * self.width, INDEX_DIM), device, 1, spread))
        self.codec.scatter(self.keys, rows.flatten(), raw)
        decoded = self.codec.gather(self.keys, rows.flatten()).view(requests, self.width, INDEX_DIM).double()
        q = self.codec.round_trip(hadamard(values((tokens, heads, INDEX_DIM), device, 2)))
        self.q = guard.copy(q.to(dtype))
        self.weights = guard.copy(values((tokens, heads), device, 3))
        self.want = torch.full((tokens, self.width), float("-inf"), dtype=torch.float64, device=device)
        self.magnitude = torch.zeros_like(self.want)
        for token in range(tokens):
            request, count = int(self.meta.token_to_req[token]), int(self.visible[token])
            if count:
                key, query, weight = decoded[request, :count], self.q[token].double(), self.weights[token].double()
                self.want[token, :count] = ((key @ query.T).relu() * weight).sum(1)
                self.magnitude[token, :count] = ((key.abs() @ query.abs().T) * weight.abs()).sum(1)

    def run(self, **options) -> Tensor:
        return index_scores_cuda(
            self.q, self.weights, self.keys, self.meta, codec=self.codec, max_entries=self.width, **options
        )

    def check(self, got: Tensor, tolerance: float) -> None:
        seen = torch.arange(self.width, device=got.device) < self.visible[:, None]
        error = (got.double() - self.want).abs()[seen]
        assert (error <= tolerance * self.magnitude[seen]).all(), float((error / self.magnitude[seen]).max())
        self.guard.check()


# Relative to the sum of all products' magnitudes: e4m3 products on Hopper's tensor cores, bf16 ones in float32.
TOLERANCE = {False: 2.0**-11, True: 2.0**-18}


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", PLANS)
def test_scores_are_the_references(device, name, layout, portable):
    scored = Scored(PLANS[name], layout, device)
    scored.check(scored.run(portable=portable), TOLERANCE[portable])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_scores_of_a_chunk_come_out_the_same_every_time(device, layout):
    """Blocks on a multiprocessor run in another order each time, and their teams at their own pace."""
    scored = Scored(PLANS["long chunks"], layout, device)
    seen = torch.arange(scored.width, device=device) < scored.visible[:, None]
    first = scored.run()[seen]
    for _ in range(20):
        assert torch.equal(scored.run()[seen], first)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("heads", [1, 8, 32])
def test_scores_of_fewer_heads(device, heads, portable):
    for plan in (PLANS["mixed lengths, padded"], PLANS["prefill"]):
        scored = Scored(plan, INDEX_FP4, device, heads=heads)
        scored.check(scored.run(portable=portable), TOLERANCE[portable])


@pytest.mark.parametrize("portable", [False, True])
def test_scores_of_bf16_queries(device, portable):
    scored = Scored(PLANS["several tokens a request"], INDEX_FP4, device, dtype=torch.bfloat16)
    scored.check(scored.run(portable=portable), TOLERANCE[portable])


@pytest.mark.parametrize("portable", [False, True])
def test_scores_of_keys_whose_scales_lie_far_apart(device, portable):
    """A block of channels 2^20 below its neighbours: rounded on Hopper, never wrong by more than the tolerance."""
    scored = Scored(PLANS["first entries"], INDEX_FP4, device)
    view = scored.keys[:, GROUP_ROWS * 64 : GROUP_ROWS * 68].view(-1, GROUP_ROWS, 4)
    factors = torch.tensor([0, 3, 11, 20], device=device, dtype=torch.uint8)
    written = view != 255
    lowered = torch.where(written, (view - factors).clamp(min=1), view)
    view.copy_(lowered)
    reference = scored.codec
    for token in range(scored.meta.num_tokens):
        count, request = int(scored.visible[token]), scored.meta.token_to_req[token].long()
        ids = torch.arange(count, device=device)
        rows = scored.meta.entry_rows(request.expand(count), ids, CSA_RATIO)
        key, query = reference.gather(scored.keys, rows).double(), scored.q[token].double()
        weight = scored.weights[token].double()
        scored.want[token, :count] = ((key @ query.T).relu() * weight).sum(1)
        scored.magnitude[token, :count] = ((key.abs() @ query.abs().T) * weight.abs()).sum(1)
    scored.check(scored.run(portable=portable), TOLERANCE[portable])


def test_scores_do_not_depend_on_what_stands_beside_a_query(device):
    """The same request alone and in a batch: equal bits, as every key is summed in one order."""
    alone = Scored(Plan([(5000, 1)], seed=11), INDEX_FP4, device)
    again = alone.run()
    meta = alone.meta
    doubled = type(meta)(
        **{
            f: torch.cat([v, v]) if f != "token_offsets" else torch.tensor([0, 1, 2], dtype=v.dtype, device=device)
            for f, v in vars(meta).items()
            if isinstance(v, Tensor)
        }
        | {"page_size": meta.page_size}
    )
    doubled.token_to_req[1] = 1
    both = index_scores_cuda(
        torch.cat([alone.q, alone.q]),
        torch.cat([alone.weights, alone.weights]),
        alone.keys,
        doubled,
        codec=alone.codec,
        max_entries=alone.width,
    )
    assert torch.equal(both[0], again[0]) and torch.equal(both[1], again[0])


@pytest.mark.parametrize("heads", [64, 24])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_operands_made_with_the_query_give_the_same_scores(device, layout, heads):
    """Prefill: index_query writes what the kernel multiplies. Whole or in parts, the bits are those of its numbers."""
    scored = Scored(PLANS["prefill, padded, page of 256"], layout, device, heads=heads)
    meta, codec = scored.meta, scored.codec
    q = values((meta.num_tokens, heads, INDEX_DIM), device, 5).bfloat16()
    inputs = (q, values((meta.num_tokens, heads), device, 6), rope_table(5000, device), meta.positions)
    plain = index_query_cuda(*inputs, codec=codec, scale=0.1, portable=True)
    made = index_query_cuda(*inputs, codec=codec, scale=0.1, many=True)
    assert (made[0].dtype == torch.uint8) == on_hopper(device)
    seen = torch.arange(scored.width, device=device) < scored.visible[:, None]

    def scores(query, weights, of):
        return index_scores_cuda(query, weights, scored.keys, of, codec=codec, max_entries=scored.width)

    want = scores(*plain, meta)
    assert same_bytes(scores(*made, meta)[seen], want[seen])
    if on_hopper(device):
        for start, stop in ((0, 7), (7, 300), (300, meta.num_tokens)):
            part = scores(made[0][start:stop], made[1][start:stop], meta.tokens(start, stop))
            assert same_bytes(part[seen[start:stop]], want[start:stop][seen[start:stop]])
    scored.guard.check()


@pytest.mark.parametrize("heads", [64, 24])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    "name", ["mixed lengths, padded", "several tokens a request", "batch of 512", "long and short requests in a block"]
)
def test_operands_of_few_queries_give_the_same_scores(device, name, layout, heads):
    """Decode: the same, and nothing of an image is left of the query that a block met before."""
    scored = Scored(PLANS[name], layout, device, heads=heads)
    meta, codec = scored.meta, scored.codec
    q = values((meta.num_tokens, heads, INDEX_DIM), device, 5).bfloat16()
    inputs = (q, values((meta.num_tokens, heads), device, 6), rope_table(60_000, device), meta.positions)
    plain = index_query_cuda(*inputs, codec=codec, scale=0.1, portable=True)
    made = index_query_cuda(*inputs, codec=codec, scale=0.1)
    assert made[0].shape[1:] == (64 if on_hopper(device) else heads, INDEX_DIM)
    scores = [
        index_scores_cuda(*operands, scored.keys, meta, codec=codec, max_entries=scored.width)
        for operands in (plain, made)
    ]
    seen = torch.arange(scored.width, device=device) < scored.visible[:, None]
    assert same_bytes(scores[1][seen], scores[0][seen])
    scored.guard.check()


def test_images_are_not_taken_by_the_portable_kernel(device):
    scored = Scored(PLANS["first entries"], INDEX_FP4, device)
    scored.q = torch.zeros(scored.meta.num_tokens, HEADS, INDEX_DIM, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="index_scores: q is images of e4m3"):
        scored.run(portable=True)


def one_request(meta: StepMeta, request: int) -> StepMeta:
    """The part of a decode step that is one request's."""
    rows = {
        f: v[request : request + 1] for f, v in vars(meta).items() if isinstance(v, Tensor) and f != "token_offsets"
    }
    rows["token_to_req"] = torch.zeros_like(rows["token_to_req"])
    return replace(meta, **rows, token_offsets=meta.token_offsets[:2].clone())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("page", [128, 256])
def test_scores_of_a_batch_are_those_of_its_requests_alone(device, layout, page):
    """Blocks that meet several requests, teams without tiles, rings that go round: equal bits."""
    lengths = [50_000, 3, 999, 40_001, 255, 256, 257, 1, 12_345] * 8
    batch = Scored(Plan([(n, 1) for n in lengths], page=page, seed=13), layout, device)
    together = batch.run()
    for request in range(batch.meta.num_requests):
        row = slice(request, request + 1)
        alone = index_scores_cuda(
            batch.q[row],
            batch.weights[row],
            batch.keys,
            one_request(batch.meta, request),
            codec=batch.codec,
            max_entries=batch.width,
        )
        count = int(batch.visible[request])
        assert torch.equal(alone[0, :count], together[request, :count]), request


@pytest.mark.parametrize("spread", [-9, -8, -7, 0])
def test_scores_of_mxfp4_keys_at_both_ends_of_the_conversion(device, spread):
    """Scales 2^7 apart within 16 keys, where codes are first subnormal, and scales near 2^-127, whose factors are."""
    for lowest in (0, 1, 2, 3, 4, 120):
        scored = Scored(Plan([(700, 1), (90, 1)], seed=14), INDEX_FP4, device)
        view = scored.keys[:, GROUP_ROWS * 64 : GROUP_ROWS * 68].view(-1, GROUP_ROWS, 4)
        scales = torch.full_like(view, lowest - spread)
        scales[:, ::5, 1] = lowest
        scales[:, 3::16] = lowest
        view.copy_(torch.where(view != 255, scales, view))
        first = scored.run()
        halved = scored.keys.clone()
        below = halved[:, GROUP_ROWS * 64 : GROUP_ROWS * 68].view(-1, GROUP_ROWS, 4)
        below.copy_(torch.where(view != 255, scales + 60, view))
        second = index_scores_cuda(
            scored.q, scored.weights, halved, scored.meta, codec=scored.codec, max_entries=scored.width
        )
        for token in range(scored.meta.num_tokens):
            count = int(scored.visible[token])
            # A power of two in all scales is one in all scores, where these are normal numbers.
            want = second[token, :count].double() * 2.0**-60
            normal = want.abs() > 2.0**-125
            assert torch.equal(first[token, :count].double()[normal], want[normal])


# Top-k


def topk_meta(visible: list[int], device, page: int = 128):
    """One query a request; request i sees visible[i] entries."""
    return make_step(Plan([(max(4 * n - 1, 0), 1) for n in visible], page=page, seed=len(visible)), device)[0]


def run_topk(scores: Tensor, meta, topk: int, physical: bool) -> Tensor:
    """The kernel's answer, compared with the reference."""
    want = index_topk(scores, meta, topk=topk, physical=physical)
    got = index_topk_cuda(scores, meta, topk=topk, physical=physical)
    assert got.dtype == torch.int32
    wrong = (got != want).any(1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong[:8]} of {got.shape[0]}"
    return got


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("physical", [False, True])
def test_topk_sets_around_k(device, topk, physical):
    """vl#50576: widths around k and 2 k, and everything behind a row's visible entries is NaN."""
    visible = [1, 2, 3, topk - 1, topk, topk + 1, 2 * topk - 1, 2 * topk, 2 * topk + 1, 5000, 8191, 8192]
    meta = topk_meta(visible, device)
    scores = values((len(visible), 8192), device, 5)
    scores[torch.arange(8192, device=device) >= meta.visible_entries(CSA_RATIO)[:, None]] = float("nan")
    run_topk(scores, meta, topk, physical)


@pytest.mark.parametrize("visible", [[0, 3, 511, 512, 513, 2000], [3000, 9000, 33_000]])
def test_topk_writes_workspace_rows_into_columns_of_a_wider_tensor(device, visible):
    """Prefill: what a layer chooses stands behind the window in the index rows; nothing beside it is written."""
    meta, guard = topk_meta(visible, device), Guarded(device)
    scores = values((len(visible), max(visible)), device, 5)
    first = torch.arange(len(visible), device=device, dtype=torch.int32) * 100_000 + 7
    wide = guard.poison((len(visible), 128 + 512 + 128), torch.int32)
    before = wide.clone()
    got = index_topk_cuda(scores, meta, topk=512, physical=False, first=first, out=wide[:, 128:640])
    want = index_topk(scores, meta, topk=512, physical=False)
    assert torch.equal(got, torch.where(want >= 0, want + first[:, None], want))
    assert got.data_ptr() == wide[:, 128:].data_ptr()
    assert torch.equal(wide[:, :128], before[:, :128]) and torch.equal(wide[:, 640:], before[:, 640:])
    guard.check()


def distributions(rows: int, width: int, device, seed: int) -> dict[str, Tensor]:
    """Scores that spread well, that bunch together behind a few others, and that equal one another."""
    generator = torch.Generator(device=device).manual_seed(seed)
    normal = torch.randn(rows, width, generator=generator, device=device)
    whole = torch.randint(0, 40, (rows, width), generator=generator, device=device).float()
    outlier, ends, tail = normal.clone(), normal.clone(), normal.sign() * torch.exp(9 * normal.abs())
    outlier[:, width // 3] = 1e9
    bunched = 1.0 + whole * 2.0**-23
    bunched[:, width // 3] = 1e20
    ends[:, 0], ends[:, 1:40], ends[:, -1] = torch.inf, torch.nan, -torch.inf
    return {
        "normal": normal,
        "ascending": torch.arange(width, device=device).float().expand(rows, -1).clone(),
        "descending": -torch.arange(width, device=device).float().expand(rows, -1).clone(),
        "whole numbers": whole,
        "mostly zero": torch.where(whole < 38, torch.zeros_like(whole), whole),
        "mostly the highest": torch.where(whole < 38, torch.full_like(whole, 50.0), whole),
        "signed zeros": torch.where(normal > 0, torch.zeros_like(normal), -torch.zeros_like(normal)),
        "one value": torch.full_like(normal, -3.25),
        "an outlier": outlier,
        "bunched": bunched,
        "an outlier over equals": torch.where(outlier == 1e9, outlier, whole),
        "a few over equals": torch.where(normal > 2.9, normal, torch.zeros_like(normal)),
        "infinities and NaN": ends,
        "heavy tail": tail,
        "huge range": normal * 2e38,
        "subnormal": normal * 1e-42,
        "bf16": normal.bfloat16().float(),
    }


@pytest.mark.parametrize("topk", [24, 512, 1024, 2048])
@pytest.mark.parametrize("width", [513, 1000, 2048, 2049, 4095, 4096, 4099, 8192, 8193])
def test_topk_of_short_rows_around_the_bounds(device, width, topk):
    """Every length near a bound of the kernels, in a buffer that fits and in a wide one; NaN behind the row."""
    visible = sorted({n for n in (topk, topk + 1, width // 2, 2047, 2048, 4096, 4097, width - 1, width) if n <= width})
    for columns in (width, 20_000):
        check_distributions(visible, width, columns, topk, device)


def check_distributions(visible: list[int], width: int, columns: int, topk: int, device) -> None:
    """All distributions over rows of `visible` scores in a buffer of `columns`, NaN behind the rows."""
    meta = topk_meta(visible, device)
    seen = meta.visible_entries(CSA_RATIO)[:, None]
    for name, scores in distributions(len(visible), width, device, width + topk).items():
        wide = torch.full((len(visible), columns), torch.nan, device=device)
        wide[:, :width] = scores
        wide[torch.arange(columns, device=device) >= seen] = torch.nan
        if name == "infinities and NaN":  # the reference has another order for NaN: lowest here
            wide[:, :width] = torch.where(scores.isnan() & (torch.arange(width, device=device) < seen),
                                          -torch.inf, wide[:, :width])  # fmt: skip
        run_topk(wide, meta, topk, columns == width)


@pytest.mark.parametrize("rows", [1, 9, 40, 140])
@pytest.mark.parametrize("width", [16_400, 20_480, 32_768, 33_001, 40_960, 40_961, 140_001])
def test_topk_of_long_rows_however_scores_are_spread(device, width, rows):
    """Rows that a block holds, that a cluster of 8 or 2 blocks shares, and that are loaded again in each pass."""
    visible = [width - 1013 * i % (width // 3) for i in range(rows)]
    check_distributions(visible, width, width + 3, 512, device)


def test_topk_of_nan_ranks_it_lowest(device):
    meta = topk_meta([1000, 1000], device)
    scores = values((2, 1000), device, 5)
    scores[0, :300] = torch.nan
    scores[1, 100:] = torch.nan
    got = index_topk_cuda(scores, meta, topk=512, physical=False)
    assert int(got[0].min()) >= 300
    assert torch.equal(got[1], torch.arange(512, device=device).int())


def test_topk_of_many_short_rows(device):
    """More rows than multiprocessors, pages of 256, every row another length."""
    visible = [1 + 29 * i % 4096 for i in range(400)]
    meta = topk_meta(visible, device, page=256)
    for width in (4096, 9000):
        for scores in (values((400, width), device, 1), torch.randint(0, 9, (400, width), device=device).float()):
            run_topk(scores, meta, 512, True)


@pytest.mark.parametrize("width", [16384, 32768, 65536, 100_003, 262_144])
@pytest.mark.parametrize("rows", [1, 70])
def test_topk_of_long_rows(device, width, rows):
    visible = [width - 17 * i % (width // 2) for i in range(rows)]
    meta = topk_meta(visible, device)
    scores = values((rows, width), device, width)
    for topk in (512, 1024):
        run_topk(scores, meta, topk, True)


def test_topk_of_short_rows_in_a_wide_buffer(device):
    """The width of a captured graph is its longest context."""
    meta = topk_meta([600, 20_000, 0, 131_072, 16_385, 16_384], device)
    run_topk(values((6, 262_144), device, 8), meta, 512, True)


@pytest.mark.parametrize("width", [3000, 40_000, 262_144])
def test_topk_gives_ties_to_the_lower_id(device, width):
    meta = topk_meta([width] * 5, device)
    scores = torch.zeros(5, width, device=device)
    scores[1] = torch.randint(0, 3, (width,), device=device).float()
    scores[2] = (torch.arange(width, device=device) % 700).float()
    scores[3, ::2] = -0.0  # equals zero
    scores[4] = torch.randn(width, device=device).bfloat16().float()
    for topk in (512, 1024):
        run_topk(scores, meta, topk, False)


def test_topk_of_infinities_and_tiny_ranges(device):
    width = 6000
    meta = topk_meta([width] * 4, device)
    scores = values((4, width), device, 9)
    scores[0, 100] = float("inf")
    scores[1, 4000:] = float("-inf")
    scores[2] = 1.0 + torch.randint(0, 4, (width,), device=device) * 2.0**-23
    scores[3] *= 1e38
    run_topk(scores, meta, 512, False)


def test_topk_of_a_prefill(device):
    meta, _ = make_step(Plan([(3000, 700), (9, 20)], pad_requests=1, pad_tokens=3, seed=3), device)
    width = int(meta.visible_entries(CSA_RATIO).max())
    scores = values((meta.num_tokens, width), device, 4)
    for physical in (False, True):
        run_topk(scores, meta, 512, physical)
    unaligned = values((meta.num_tokens, width + 1), device, 4)[:, 1:]
    run_topk(unaligned, meta, 512, False)


def test_topk_writes_every_slot(device):
    """tonyd2wild#2: a reused buffer must not show through."""
    meta = topk_meta([3, 0, 700], device)
    scores = values((3, 700), device, 5)
    stale = torch.full((3, 512), POISON, dtype=torch.int32, device=device)
    del stale
    got = run_topk(scores, meta, 512, False)
    assert (got[0, 3:] == -1).all() and (got[1] == -1).all() and int(got.max()) < 700


def test_select_in_a_captured_graph_equals_eager(device):
    """Scores and top-k of a decode batch, captured once and replayed for requests in other phases."""
    plans = [Plan([((311 * i + 97 * step) % 4000, 1) for i in range(8)], seed=9) for step in range(300)]
    longest = Plan([(4000, 1)] * 8, seed=9)
    held = Scored(longest, INDEX_FP4, device)
    meta = held.meta

    def select() -> Tensor:
        scores = index_scores_cuda(held.q, held.weights, held.keys, meta, codec=held.codec, max_entries=1000 + 24)
        return index_topk_cuda(scores, meta, topk=512, physical=True)

    select()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = select()
    for plan in plans:
        positions = torch.tensor([p for p, _ in plan.requests], device=device)
        meta.positions.copy_(positions)
        meta.seq_lens.copy_(positions + 1)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, select())
