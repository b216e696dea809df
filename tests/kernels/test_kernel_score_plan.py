"""Which requests are scored together: the plan's reference against what it must hold, its kernel against the reference,
and scores with a plan against scores without, bit for bit."""

from __future__ import annotations

import random
import re

import pytest
import torch
from kernel_steps import Guarded, Plan, entry_groups, make_step, meta_to, rope_table, values
from torch import Tensor

from sglang_dsv4.formats import hadamard, index_codec
from sglang_dsv4.geometry import CSA_RATIO, INDEX_DIM, INDEX_FP4, INDEX_FP8
from sglang_dsv4.ops import jit
from sglang_dsv4.ops import score_plan as module
from sglang_dsv4.ops.index_query import index_query_cuda
from sglang_dsv4.ops.index_scores import index_scores_cuda
from sglang_dsv4.ops.meta import StepMeta
from sglang_dsv4.ops.score_plan import (
    GROUP_MEMBERS,
    LEAST_SHARED,
    LEAST_TILES,
    PLAN_REQUESTS,
    SCORE_TILE,
    ScorePlan,
    score_plan,
    score_plan_cuda,
    tile_cost,
)

CPU = torch.device("cpu")
LEAST_TOKENS = LEAST_SHARED * SCORE_TILE * CSA_RATIO


def step(lengths: list[int], shares: dict[int, tuple[int, int]], page: int = 128, pad: int = 0, seed: int = 0):
    """A decode step on the CPU, one token a request, and how large the pools are.

    `shares` gives requests the first pages of another: {request: (that one, pages)}, in this order.
    """
    plan = Plan([(n - 1, 1) for n in lengths], pad_requests=pad, pad_tokens=pad, page=page, seed=seed)
    meta, numbers = make_step(plan, CPU)
    for request, (other, pages) in shares.items():
        meta.page_table[request, :pages] = meta.page_table[other, :pages]
    return meta, numbers


def random_step(requests: int, page: int, seed: int, longest: int = 3 * LEAST_TOKENS):
    """Families of random size whose members share pages with its first: some too few, some a first page
    alone, some the pages around one that differs; with padding in between and behind."""
    rng = random.Random(seed)
    lengths = [
        rng.randrange(1, longest) if rng.random() < 0.3 else longest - rng.randrange(900) for _ in range(requests)
    ]
    shares = {}
    for request in range(1, requests):
        other = rng.randrange(min(request, 1 + requests // 9))
        most = min(lengths[request], lengths[other]) // page
        kind = rng.random()
        pages = 0 if kind < 0.1 else min(1, most) if kind < 0.15 else most if kind < 0.4 else rng.randrange(most + 1)
        shares[request] = (other, pages)
    meta, numbers = step(lengths, shares, page, pad=rng.randrange(3), seed=seed)
    for request in range(requests):
        if rng.random() < 0.05:
            meta.page_table[request, rng.randrange(-(-lengths[request] // page))] = 1
        if rng.random() < 0.05:
            meta.token_to_req[request], meta.positions[request], meta.seq_lens[request] = -1, 0, 0
    return meta, numbers


BATCHES = [(1, 128), (2, 128), (8, 256), (9, 128), (17, 256), (64, 128), (256, 128)]


def made(meta: StepMeta, least_tiles: int = 0) -> ScorePlan:
    plan = ScorePlan.allocate(meta.num_requests, CPU)
    score_plan(plan, meta, least_tiles=least_tiles)
    return plan


def items_of(plan: ScorePlan, meta: StepMeta, head: int) -> list[tuple[list[int], int, int]]:
    """A group's work in order: the requests that a tile is scored for, the tile, its cost."""
    tiles = [-(-n // SCORE_TILE) for n in meta.visible_entries(CSA_RATIO).tolist()]
    members = [m for m in plan.members[head].tolist() if m >= 0]
    shared = int(plan.shared[head])
    items = [(members, tile, tile_cost(len(members))) for tile in range(shared)]
    return items + [([m], tile, tile_cost(1)) for m in members for tile in range(shared, tiles[m])]


@pytest.mark.parametrize("requests,page", BATCHES)
def test_every_tile_is_scored_once_from_pages_that_its_requests_share(requests, page):
    for seed in range(3):
        meta, _ = random_step(requests, page, seed)
        plan = made(meta)
        visible = meta.visible_entries(CSA_RATIO).tolist()
        done, cost = set(), 0
        for head in range(meta.num_requests):
            assert int(plan.cost_before[head]) == cost
            members, shared = [m for m in plan.members[head].tolist() if m >= 0], int(plan.shared[head])
            assert shared == 0 or (shared >= LEAST_SHARED and len(members) > 1 and members[0] == head)
            assert members == sorted(members)
            entries = shared * SCORE_TILE
            ids = torch.arange(entries)
            rows = [meta.entry_rows(torch.full_like(ids, m), ids, CSA_RATIO) for m in members]
            assert all(visible[m] >= entries and torch.equal(r, rows[0]) for m, r in zip(members, rows, strict=True))
            for owners, tile, each in items_of(plan, meta, head):
                cost += each
                for owner in owners:
                    assert (owner, tile) not in done
                    done.add((owner, tile))
        assert int(plan.cost_before[-1]) == cost
        assert done == {(r, t) for r, n in enumerate(visible) for t in range(-(-n // SCORE_TILE))}


def blocks_of(plan: ScorePlan, meta: StepMeta, blocks: int) -> list[list[tuple[int, int]]]:
    """(head, item) of each block when blocks take equal shares of the cost: items that start within the share."""
    ends = [int(plan.cost_before[-1]) * b // blocks for b in range(blocks + 1)]
    taken: list[list[tuple[int, int]]] = [[] for _ in range(blocks)]
    block = 0
    for head in range(meta.num_requests):
        at = int(plan.cost_before[head])
        for i, (_, _, each) in enumerate(items_of(plan, meta, head)):
            while at >= ends[block + 1]:
                block += 1
            taken[block].append((head, i))
            at += each
    return taken


def kernel_blocks(plan: ScorePlan, meta: StepMeta, blocks: int, limit: int = 512) -> list[list[tuple[int, int]]]:
    """The same by the arithmetic of `next_pass` in scores_shared.cuh."""
    before, shared = plan.cost_before.tolist(), plan.shared.tolist()
    total, one, taken = before[-1], tile_cost(1), []
    for b in range(blocks):
        at, end, mine = total * b // blocks, total * (b + 1) // blocks, []
        while at < end:
            low, high = 0, meta.num_requests
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if before[middle] <= at else (low, middle)
            start, after = before[low], min(end, before[low + 1])
            members = sum(m >= 0 for m in plan.members[low].tolist())
            each, most = (tile_cost(members), shared[low]) if shared[low] else (one, 0)
            count = len(items_of(plan, meta, low))

            def item(cost: int, each=each, most=most, count=count) -> int:
                together = most * each
                up = -(-cost // each) if cost <= together else most + -(-(cost - together) // one)
                return min(up, count)

            first, until = item(at - start), item(after - start)
            last = min(until, first + limit)
            mine += [(low, i) for i in range(first, last)]
            at = start + min(last, most) * each + max(last - most, 0) * one if last < until else after
        taken.append(mine)
    return taken


@pytest.mark.parametrize("blocks", [1, 7, 128, 132])
def test_blocks_that_take_equal_costs_take_every_item_once(blocks):
    for requests, page, seed in ((1, 128, 0), (9, 256, 1), (64, 128, 2)):
        meta, _ = random_step(requests, page, seed)
        plan = made(meta)
        want = blocks_of(plan, meta, blocks)
        assert kernel_blocks(plan, meta, blocks) == want
        assert kernel_blocks(plan, meta, blocks, limit=5) == want


def test_groups_are_cut_from_classes_in_order():
    pages = LEAST_TOKENS // 128
    lengths = [2 * LEAST_TOKENS] * 12
    meta, _ = step(lengths, {r: (0, pages + r) for r in range(1, 12)})
    plan = made(meta)
    assert plan.members[0].tolist() == list(range(8)) and plan.members[8].tolist() == [8, 9, 10, 11] + [-1] * 4
    assert int(plan.shared[0]) == (pages + 1) // 2 and int(plan.shared[8]) == (pages + 8) // 2
    assert (plan.members[1:8] == -1).all() and int(plan.shared.count_nonzero()) == 2


@pytest.mark.parametrize("pages", [0, 1, LEAST_TOKENS // 128 - 1])
def test_requests_that_share_little_are_alone(pages):
    meta, _ = step([2 * LEAST_TOKENS] * 9, dict.fromkeys(range(1, 9), (0, pages)))
    plan = made(meta)
    assert not plan.shared.any() and plan.members[:, 0].tolist() == list(range(9)) and (plan.members[:, 1:] == -1).all()


def test_a_short_step_has_no_groups():
    tiles = LEAST_TILES // 8
    for count, grouped in ((tiles, True), (tiles - 1, False)):
        meta, _ = step([count * SCORE_TILE * CSA_RATIO] * 8, dict.fromkeys(range(1, 8), (0, 100)))
        assert bool(made(meta, LEAST_TILES).shared.any()) == grouped


def test_an_equal_page_behind_different_ones_is_not_shared():
    meta, _ = step([2 * LEAST_TOKENS] * 3, {1: (0, 150), 2: (0, 150)})
    meta.page_table[1, 5] = 1
    assert not made(meta).shared.any()


def test_constants_are_those_of_the_kernels():
    text = (jit.kernels_dir() / "include" / "dsv4" / "score_plan.cuh").read_text()
    names = {"kScoreTile": SCORE_TILE, "kPlanRequests": PLAN_REQUESTS, "kGroupMembers": GROUP_MEMBERS}
    names |= {"kLeastShared": LEAST_SHARED, "kLeastTiles": LEAST_TILES, "kKeyCost": module.KEY_COST}
    for name, value in names.items():
        assert re.search(rf"constexpr int {name} = {value};", text), name


def guarded_plan(guard: Guarded, requests: int) -> ScorePlan:
    plan = ScorePlan.allocate(requests, CPU)
    return ScorePlan(
        *(guard.copy(torch.full_like(x, -77)) for x in (plan.cost_before, plan.shared, plan.members, plan.scratch))
    )


def assert_same(got: ScorePlan, want: ScorePlan) -> None:
    for name in ("cost_before", "shared", "members"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize("requests,page", [*BATCHES, (1000, 128)])
def test_the_kernel_plans_as_the_reference(requests, page, device):
    for seed in range(2):
        meta, _ = random_step(requests, page, seed)
        guard = Guarded(device)
        plan = guarded_plan(guard, meta.num_requests)
        for least in (0, 1 << 14):
            score_plan_cuda(plan, meta_to(meta, device), least_tiles=least)
            assert_same(plan, made(meta, least))
        guard.check()


class Shared:
    """Queries, weights and keys of a decode step whose requests share pages; NaN in every key that no request sees."""

    def __init__(
        self, meta: StepMeta, numbers, layout, device, *, heads: int = 64, dtype=torch.float32, width: int = 0
    ):
        self.codec, self.guard = index_codec(layout), Guarded(device)
        self.meta = meta_to(meta, device)
        visible = self.meta.visible_entries(CSA_RATIO)
        self.width = width or max(1, int(visible.max()))
        groups = entry_groups(numbers, CSA_RATIO, meta.page_size)
        self.keys = self.guard.poison((groups, layout.group_bytes), torch.uint8)
        requests = meta.num_requests
        for request in range(requests):
            ids = torch.arange(int(visible[request]), device=device)
            rows = self.meta.entry_rows(torch.full_like(ids, request), ids, CSA_RATIO)
            if len(ids):
                self.codec.scatter(self.keys, rows, hadamard(values((len(ids), INDEX_DIM), device, request)))
        q = self.codec.round_trip(hadamard(values((requests, heads, INDEX_DIM), device, 2)))
        self.q = self.guard.copy(q.to(dtype))
        self.weights = self.guard.copy(values((requests, heads), device, 3))
        self.plan = ScorePlan.allocate(requests, device)

    def run(self, plan: ScorePlan | None) -> Tensor:
        return index_scores_cuda(
            self.q, self.weights, self.keys, self.meta, codec=self.codec, max_entries=self.width, plan=plan
        )

    def seen(self) -> Tensor:
        ids = torch.arange(self.width, device=self.q.device)
        return ids < self.meta.visible_entries(CSA_RATIO)[:, None]

    def check(self) -> None:
        """Planned here and now, scores are those without a plan."""
        score_plan_cuda(self.plan, self.meta, least_tiles=0)
        got, want, seen = self.run(self.plan), self.run(None), self.seen()
        assert not want[seen].isnan().any()
        wrong = ((got.view(torch.int32) != want.view(torch.int32)) & seen).nonzero()
        assert not len(wrong), f"{len(wrong)} scores differ, the first at {wrong[0].tolist()}"
        self.guard.check()


PAGES = LEAST_TOKENS // 128
CASES = {
    "all of one prefix": ([LEAST_TOKENS + 700 + 90 * r for r in range(8)], dict.fromkeys(range(1, 8), (0, PAGES + 3))),
    "three and two, one alone": (
        [20_000, 19_999, 16_000, 15_000, 20_000, 3],
        {2: (0, PAGES), 4: (0, PAGES + 11), 3: (1, PAGES + 20)},
    ),
    "eight and one": ([LEAST_TOKENS + 4 * r for r in range(9)], dict.fromkeys(range(1, 9), (0, PAGES))),
    "nothing of their own": ([LEAST_TOKENS + 128] * 4, dict.fromkeys(range(1, 4), (0, PAGES + 1))),
    "long tails": ([LEAST_TOKENS + 9000 * (r + 1) for r in range(3)], dict.fromkeys(range(1, 3), (0, PAGES))),
}


@pytest.mark.parametrize("layout", [INDEX_FP4, INDEX_FP8], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", CASES)
def test_scores_with_a_plan_are_those_without(device, name, layout):
    meta, numbers = step(*CASES[name], pad=1)
    Shared(meta, numbers, layout, device).check()


@pytest.mark.parametrize("layout", [INDEX_FP4, INDEX_FP8], ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    "page,heads,dtype", [(256, 64, torch.bfloat16), (128, 8, torch.float32), (256, 33, torch.float32)]
)
def test_scores_of_random_groups(device, layout, page, heads, dtype):
    meta, numbers = random_step(21, page, seed=heads, longest=20_000)
    Shared(meta, numbers, layout, device, heads=heads, dtype=dtype).check()


@pytest.mark.parametrize("layout", [INDEX_FP4, INDEX_FP8], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [64, 40])
def test_operands_made_with_the_query_give_the_same_scores(device, layout, heads):
    """As a layer of a server's decode step runs: index_query, then scores with the step's plan."""
    meta, numbers = random_step(21, 128, seed=5, longest=20_000)
    scored = Shared(meta, numbers, layout, device, heads=heads)
    q = values((meta.num_requests, heads, INDEX_DIM), device, 7).bfloat16()
    inputs = (q, scored.weights, rope_table(20_000, device), scored.meta.positions)
    score_plan_cuda(scored.plan, scored.meta, least_tiles=0)
    got = []
    for portable, plan in ((True, None), (False, scored.plan), (False, None)):
        scored.q, scored.weights = index_query_cuda(*inputs, codec=scored.codec, scale=0.1, portable=portable)
        got.append(scored.run(plan).view(torch.int32)[scored.seen()])
    assert torch.equal(got[1], got[0]) and torch.equal(got[2], got[0])
    scored.guard.check()


@pytest.mark.parametrize("layout", [INDEX_FP4, INDEX_FP8], ids=lambda layout: layout.name)
def test_more_items_than_a_block_looks_up_at_a_time(device, layout):
    """Of 32 groups of 2,300 tiles each a block of an H200 takes 557."""
    length, requests = 4 * 64 * 2300, 256
    meta, numbers = step([length], {}, seed=4)
    spread = {f: getattr(meta, f) for f in ("req_rows", "slots", "prefix_lens", "seq_lens", "positions", "page_table")}
    for field, value in spread.items():
        setattr(meta, field, value.repeat_interleave(requests, 0))
    meta.token_offsets, meta.token_to_req = torch.arange(requests + 1).int(), torch.arange(requests).int()
    meta.snapshot_slots = meta.snapshot_lens = torch.zeros(requests, 0, dtype=torch.int32)
    scored = Shared(meta_of_one(meta), numbers, layout, device)
    scored.meta = meta_to(meta, device)
    scored.q = scored.q.repeat(requests, 1, 1) * (1 + torch.arange(requests, device=device) % 2)[:, None, None]
    scored.weights = values((requests, 64), device, 5)
    scored.plan = ScorePlan.allocate(requests, device)
    scored.check()


def meta_of_one(meta: StepMeta) -> StepMeta:
    """The first request of a step alone."""
    fields = {k: v[:1] for k, v in vars(meta).items() if isinstance(v, Tensor)}
    return StepMeta(**fields | {"token_offsets": meta.token_offsets[:2], "page_size": meta.page_size})


def test_a_replay_follows_the_groups_of_its_step(device):
    """Plan and scores captured once; columns behind a request's entries keep what they held."""
    meta, numbers = step(*CASES["all of one prefix"])
    others = [step([20_000 + r for r in range(8)], {r: (r // 3 * 3, PAGES + 2 * r) for r in range(8)}, seed=1)[0]]
    others.append(step([16_000 - 1900 * r for r in range(8)], {1: (0, 100), 2: (0, 96), 5: (4, 30)}, seed=2)[0])
    wide = max(m.page_table.shape[1] for m in (meta, *others))
    for m in (meta, *others):
        m.page_table = torch.nn.functional.pad(m.page_table, (0, wide - m.page_table.shape[1]), value=1 << 24)
    numbers.pages = 8 * wide + 2
    held = Shared(meta, numbers, INDEX_FP4, device, width=6000)
    held.keys.copy_(torch.randint(0, 120, held.keys.shape, device=device).byte())
    score_plan_cuda(held.plan, held.meta, least_tiles=0)
    held.run(held.plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        score_plan_cuda(held.plan, held.meta, least_tiles=0)
        out = held.run(held.plan)
    for now in (meta, *others, meta):
        for name in ("positions", "seq_lens", "prefix_lens", "page_table"):
            getattr(held.meta, name).copy_(getattr(now, name))
        out.fill_(-12345.0)
        graph.replay()
        assert_same(held.plan, made(now))
        seen = held.seen()
        assert torch.equal(out[seen], held.run(None)[seen]) and (out[~seen] == -12345.0).all()


def arguments():
    meta, _ = step([300, 5], {})
    return ScorePlan.allocate(2, CPU), meta


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda out, meta: setattr(out, "shared", out.shared.long()), "out.shared is int64"),
        (lambda out, meta: setattr(out, "members", out.members[:, :4]), "out.members is int32"),
        (lambda out, meta: setattr(out, "cost_before", out.cost_before[1:]), "out.cost_before is int32"),
        (lambda out, meta: setattr(out, "scratch", out.scratch[:1]), "out.scratch is int32"),
        (lambda out, meta: setattr(meta, "positions", meta.positions.int()), "meta.positions is int32"),
        (lambda out, meta: None, "device is cpu"),
    ],
)
def test_bad_input_is_named(change, message):
    out, meta = arguments()
    change(out, meta)
    with pytest.raises(ValueError, match=f"score_plan: {message}"):
        score_plan_cuda(out, meta)


def test_a_negative_bound_is_named():
    with pytest.raises(ValueError, match="score_plan: least_tiles is -1, must be a number of tiles"):
        score_plan_cuda(*arguments(), least_tiles=-1)


def test_a_plan_is_for_one_token_a_request():
    meta, _ = make_step(Plan([(30, 2), (9, 1)]), CPU)
    with pytest.raises(ValueError, match="score_plan: meta is of 3 tokens, must be of one for each of 2 requests"):
        score_plan_cuda(ScorePlan.allocate(2, CPU), meta)


def test_a_plan_of_another_batch_is_named():
    meta, _ = step([300, 5], {})
    q, keys = torch.zeros(2, 64, INDEX_DIM), torch.zeros(4, INDEX_FP4.group_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"index_scores: plan.cost_before is int32 \[4\]"):
        index_scores_cuda(
            q,
            torch.zeros(2, 64),
            keys,
            meta,
            codec=index_codec(INDEX_FP4),
            max_entries=75,
            plan=ScorePlan.allocate(3, CPU),
        )
