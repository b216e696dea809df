"""Which requests of a decode step share leading pages, so that `index_scores` reads the keys of these once for all.

Made once a step for all its layers. Reads owners and positions of tokens and the page table; writes a `ScorePlan` only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.geometry import CSA_RATIO
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import Check
from sglang_dsv4.ops.meta import StepMeta

# As in kernels/include/dsv4/score_plan.cuh.
SCORE_TILE = 64  # keys
PLAN_REQUESTS = 1024
GROUP_MEMBERS = 8
LEAST_SHARED = 48  # tiles of a group
LEAST_TILES = 1536  # of a step
KEY_COST = 2


def tile_cost(members: int) -> int:
    """What a tile of keys costs that is multiplied with the queries of so many requests."""
    return KEY_COST + members


@dataclass
class ScorePlan:
    """Groups of at most 8 of M requests, one token each. A captured graph keeps the tensors' addresses.

    A group stands at its first member; a request alone is a group of one. Its work is `shared` tiles of 64 keys, each
    multiplied with the queries of all members, and behind them the tiles that each member has left, member by member.

    cost_before  int32 [M + 1], cost of the groups before each request's; that of all at the end
    shared       int32 [M], shared tiles of the group; 0 for a request alone and for one that is not its group's first
    members      int32 [M, 8], requests of the group, ascending, -1 behind; -1 for one that is not its group's first
    scratch      int32 [M, 3], of no meaning to others
    """

    cost_before: Tensor
    shared: Tensor
    members: Tensor
    scratch: Tensor

    @classmethod
    def allocate(cls, requests: int, device: torch.device) -> ScorePlan:
        """For at most `requests` requests, and at most 1,024 of them: more are scored as a prefill is."""
        requests = min(requests, PLAN_REQUESTS)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(ints(requests + 1), ints(requests), ints(requests, GROUP_MEMBERS), ints(requests, 3))

    @staticmethod
    @functools.cache
    def none(device: torch.device) -> ScorePlan:
        """What stands for no plan in a kernel's arguments."""
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return ScorePlan(empty, empty, empty, empty)

    def first(self, requests: int) -> ScorePlan | None:
        """Views of the first `requests` of them; None for more than there are."""
        if requests > self.shared.shape[0]:
            return None
        part = slice(requests)
        return ScorePlan(self.cost_before[: requests + 1], self.shared[part], self.members[part], self.scratch[part])


def score_plan(out: ScorePlan, meta: StepMeta, *, least_tiles: int = LEAST_TILES) -> None:
    """Fill `out` for a decode step of as many requests as it holds, one token each.

    Requests with the same page in the column in which `LEAST_SHARED` tiles end are a class; of its requests, in order,
    each 8 are a group. It shares the whole tiles of the leading pages that all of them have in common with the class's
    first, as far as all see them whole; with fewer than `LEAST_SHARED` of them each of its requests is alone. So is
    every request of a step of fewer than `least_tiles` tiles.
    """
    requests, device = meta.num_requests, meta.device
    index = torch.arange(requests, device=device)
    per_page = meta.page_size // CSA_RATIO
    least = LEAST_SHARED * SCORE_TILE // per_page
    visible = meta.visible_entries(CSA_RATIO)
    tiles = (visible + SCORE_TILE - 1) // SCORE_TILE
    columns = meta.page_table.shape[1]
    full = (visible // per_page).clamp(max=columns)
    able = full >= least

    key = meta.page_table[:, min(least, columns) - 1]
    same = (key[:, None] == key) & able[:, None] & able
    rank = (same & (index < index[:, None])).sum(1)
    start = rank // GROUP_MEMBERS * GROUP_MEMBERS
    class_first = torch.where(able, same.int().argmax(1), index)
    head = torch.where(able, (same & (rank == start[:, None])).int().argmax(1), index)
    place = rank - start
    equal = meta.page_table == meta.page_table[class_first]
    equal &= torch.arange(columns, device=device) < torch.minimum(full, full[class_first])[:, None]
    common = torch.where(able, equal.int().cumprod(1).sum(1), 0)

    grid = torch.full((requests, GROUP_MEMBERS), -1, dtype=torch.int64, device=device)
    grid[head, place] = index
    count = (grid >= 0).sum(1)
    pages = torch.where(grid >= 0, common[grid.clamp(min=0)], columns).amin(1)
    shared = pages * per_page // SCORE_TILE
    worthwhile = (count > 1) & (shared >= LEAST_SHARED) & (tiles.sum() >= least_tiles)
    shared = torch.where(worthwhile, shared, 0)

    together = shared[head] > 0
    rest = torch.where(grid >= 0, tiles[grid.clamp(min=0)] - shared[:, None], 0).sum(1)
    of_group = torch.where(head == index, shared * (KEY_COST + count) + rest * tile_cost(1), 0)
    cost = torch.where(together, of_group, tiles * tile_cost(1))
    alone = torch.full_like(grid, -1)
    alone[:, 0] = index
    members = torch.where((head == index)[:, None], grid, -1)
    out.cost_before[0] = 0
    out.cost_before[1:] = cost.cumsum(0)
    out.shared.copy_(shared)
    out.members.copy_(torch.where(together[:, None], members, alone))


def score_plan_cuda(out: ScorePlan, meta: StepMeta, *, least_tiles: int = LEAST_TILES) -> None:
    """CUDA face of `score_plan`: two launches.

    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("score_plan")
    fields = check.meta(meta)
    values = plan_tensors(check, "out", out, meta)
    if meta.num_requests > PLAN_REQUESTS:
        raise check.fail("meta", f"of {meta.num_requests} requests", f"of at most {PLAN_REQUESTS} requests")
    if not 0 <= least_tiles < 2**31:
        raise check.fail("least_tiles", repr(least_tiles), "a number of tiles below 2^31")
    if meta.page_table.shape[1] == 0:
        raise check.fail("meta.page_table", "without columns", "of at least one column")
    scratch = check.tensor("out.scratch", out.scratch, torch.int32, ("requests", 3))
    device = check.cuda()
    if meta.num_requests:
        jit.function("score_plan", "score_plan", device)(*values, scratch, least_tiles, *fields)


def plan_tensors(check: Check, argument: str, plan: ScorePlan, meta: StepMeta) -> tuple[Tensor, ...]:
    """Check a plan against the step that it is for; its tensors in the order of the kernels' parameters."""
    if meta.num_tokens != meta.num_requests:
        raise check.fail("meta", f"of {meta.num_tokens} tokens", f"of one for each of {meta.num_requests} requests")
    costs = check.tensor(f"{argument}.cost_before", plan.cost_before, torch.int32, (meta.num_requests + 1,))
    shared = check.tensor(f"{argument}.shared", plan.shared, torch.int32, ("requests",))
    return costs, shared, check.tensor(f"{argument}.members", plan.members, torch.int32, ("requests", GROUP_MEMBERS))
