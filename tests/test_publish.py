"""Interior snapshots: taken where a slot can be spared, published shallow first, never lost, never freed twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.cache import publish
from sglang_dsv4.cache.habits import ANSWER, PROMPT, ResumeHabits
from sglang_dsv4.cache.interior import InteriorSnapshot, InteriorSnapshots
from sglang_dsv4.cache.superseded import paths_of

USER = -5  # of a prompt that holds none


class Allocator:
    def __init__(self, free):
        self.free_slots = list(free)

    def available_size(self):
        return len(self.free_slots)

    def alloc(self, count):
        if len(self.free_slots) < count:
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken)

    def free(self, slots):
        assert not set(slots.tolist()) & set(self.free_slots), "freed twice"
        self.free_slots += slots.tolist()


class Tree:
    """As much of the radix tree as publishing touches; evicts snapshots back into the allocator."""

    page_size, disable = 128, False

    def __init__(self, pool, evictable=()):
        self.req_to_token_pool, self.evictable = pool, list(evictable)
        self.inserted = []
        self.token_to_kv_pool_allocator = SimpleNamespace(size=64 * self.page_size)
        self.tree_core = self

    def root_node_handle(self):
        return 0

    def collect_path_info(self, nodes):
        return [[SimpleNamespace(node_id=node, path_end=self.page_size, num_children=0)] for node in nodes]

    def supports_prefix_sharing(self):
        return not self.disable

    def mamba_evictable_size(self):
        return len(self.evictable)

    def evict_for_alloc(self, params):
        for _ in range(min(params.mamba_num, len(self.evictable))):
            self.req_to_token_pool.mamba_allocator.free(torch.tensor([self.evictable.pop(0)]))

    def insert(self, req, *, up_to):
        slot = self.req_to_token_pool.interior.publishing
        self.inserted.append(
            (req.kv.mamba_last_track_seqlen, None if slot is None else slot.tolist(), req.finished_reason)
        )
        req.kv.cache_protected_len = req.kv.mamba_last_track_seqlen
        req.kv.mamba_last_track_seqlen = None


def setup(free, evictable=(), requests=1):
    allocator = Allocator(free)
    pool = SimpleNamespace(
        mamba_allocator=allocator,
        interior=InteriorSnapshots(),
        user_token=USER,
        get_mamba_ping_pong_other_idx=lambda i: 1 - i,
    )
    tree = Tree(pool, evictable)
    reqs = [request(row) for row in range(1, requests + 1)]
    return SimpleNamespace(req_to_token_pool=pool, tree_cache=tree, reqs=reqs), pool, tree


def request(row, *, prefix=0, end=1340, prompt=1340, branch=640):
    kv = SimpleNamespace(
        req_pool_idx=row,
        mamba_next_track_idx=0,
        mamba_last_track_idx=1,
        mamba_last_track_seqlen=None,
        mamba_prev_track_seqlen=None,
        cache_protected_len=prefix,
    )
    return SimpleNamespace(
        kv=kv,
        prefix_len=prefix,
        extend_end=end,
        full_untruncated_fill_ids=range(prompt),
        origin_input_ids=list(range(prompt)),
        last_node=7,
        mamba_branching_seqlen=branch,
        finished_reason=None,
    )


def finishing(req):
    req.finished = lambda: False
    return req


def checkpoint(tree, req):
    publish.publish_interior_snapshots(lambda t, r, **kw: t.insert(r, **kw), tree, req, up_to=req.extend_end)


def test_a_branch_and_the_prompt_end_are_both_kept_and_published_shallow_first():
    batch, pool, tree = setup(range(10, 20))
    req = batch.reqs[0]
    entry = publish.plan_snapshots(batch, req)
    assert (entry.track_mask, entry.track_seqlen, entry.track_position) == (True, 1280, 0)
    assert [s.length for s in pool.interior.waiting(1)] == [640]
    checkpoint(tree, req)
    assert tree.inserted == [(640, [10], None)]
    assert req.kv.mamba_last_track_seqlen == 1280
    assert pool.interior.waiting(1) == []


def test_a_finished_request_is_whole_again_after_its_interior_snapshots():
    batch, _, tree = setup(range(10, 20))
    req = batch.reqs[0]
    publish.plan_snapshots(batch, req)
    req.finished_reason = "length"
    checkpoint(tree, req)
    assert tree.inserted == [(640, [10], None)]
    assert req.finished_reason == "length" and req.kv.mamba_last_track_seqlen == 1280


def test_without_a_slot_to_spare_the_interior_snapshot_is_dropped_and_counted():
    batch, pool, tree = setup([10], requests=3)
    before = publish.counters.interior_refused
    for req in batch.reqs:
        assert publish.plan_snapshots(batch, req).track_mask
    assert publish.counters.interior_refused == before + 3
    assert pool.mamba_allocator.free_slots == [10]
    checkpoint(tree, batch.reqs[0])
    assert tree.inserted == []


def test_a_burst_of_publishes_leaves_a_slot_for_every_running_request():
    batch, pool, _ = setup(range(100, 110), evictable=range(200, 206), requests=8)
    for req in batch.reqs:
        publish.plan_snapshots(batch, req)
    left = pool.mamba_allocator.available_size() + batch.tree_cache.mamba_evictable_size()
    assert left >= len(batch.reqs)


@pytest.fixture
def ahead(monkeypatch):
    """Rows of the requests that are put into the tree before their result comes."""
    rows: list[int] = []
    monkeypatch.setattr(publish, "checkpoint_kv_cache", lambda req, tree: rows.append(req.kv.req_pool_idx))
    return rows


def in_flight(row, ids, *, known=0, **fields):
    req = request(row, prefix=known, end=len(ids))
    req.origin_input_ids = ids
    state = {"is_retracted": False, "discard_output_reason": None, "finished": lambda: False, "extra_key": None}
    vars(req).update(state | fields)
    return req


def of(*ids, extra_key=None):
    return SimpleNamespace(origin_input_ids=list(ids), extra_key=extra_key)


TEXT = list(range(600))


def test_a_prompt_in_flight_is_published_ahead_where_a_waiting_one_shares_a_page_that_the_tree_lacks(ahead):
    _, _, tree = setup([])
    reqs = [in_flight(1, TEXT, known=256), in_flight(2, TEXT[:300], known=256), in_flight(3, TEXT, known=512)]
    for waiting, published in [
        ([], []),
        ([of(*TEXT[:383], -1, -1)], []),  # parts within the page
        ([of(*TEXT[:384])], []),  # a match is capped one token short
        ([of(-1, *TEXT[1:])], []),  # another text
        ([of(*TEXT, extra_key="another")], []),  # the same text where no match looks for it
        ([of(7), of(*TEXT[:384], -1)], [1]),
    ]:
        publish.publish_ahead(tree, reqs, waiting)
        assert ahead == published


def test_only_as_many_waiting_prompts_are_looked_at_as_a_step_can_take(ahead):
    _, _, tree = setup([])
    publish.publish_ahead(tree, [in_flight(1, TEXT)], [of(7)] * 64 + [of(*TEXT)])
    assert ahead == []


@pytest.mark.parametrize(
    "fields",
    [
        {"finished": lambda: True},
        {"is_retracted": True},
        {"discard_output_reason": "its pages did not load"},
        {"prefix_len": 600},  # the result came already: no overlap scheduling
    ],
    ids=["finished", "retracted", "discarded", "published"],
)
def test_a_request_that_has_nothing_to_publish_is_left_alone(ahead, fields):
    _, _, tree = setup([])
    publish.publish_ahead(tree, [in_flight(1, TEXT, **fields), in_flight(2, TEXT)], [of(*TEXT)])
    assert ahead == [2]


def test_planning_again_returns_the_slots_of_snapshots_that_were_never_published():
    batch, pool, _ = setup(range(10, 20))
    for _ in range(5):
        publish.plan_snapshots(batch, batch.reqs[0])
    assert pool.mamba_allocator.available_size() == 9
    assert len(pool.interior.waiting(1)) == 1


@pytest.mark.parametrize("protected", [640, 1000])
def test_a_position_that_the_tree_already_covers_gives_its_slot_back(protected):
    batch, pool, tree = setup(range(10, 20))
    req = batch.reqs[0]
    publish.plan_snapshots(batch, req)
    req.kv.cache_protected_len = protected
    checkpoint(tree, req)
    assert tree.inserted == [] and pool.mamba_allocator.available_size() == 10


def test_a_cache_that_is_off_keeps_nothing():
    batch, pool, tree = setup(range(10, 20))
    tree.disable = True
    publish.plan_snapshots(batch, batch.reqs[0])
    assert pool.interior.waiting(1) == [] and pool.mamba_allocator.available_size() == 10


def test_waiting_snapshots_belong_to_their_row_only():
    waiting = InteriorSnapshots()
    waiting.add(3, InteriorSnapshot(128, torch.tensor([7])))
    assert waiting.take(4) == [] and waiting.take(None) == []
    assert [s.length for s in waiting.take(3)] == [128]
    assert waiting.take(3) == []


def test_the_end_of_the_system_prompt_is_taken_at_once_and_known_as_shared():
    batch, pool, _ = setup(range(10, 20))
    batch.reqs[0].origin_input_ids[700] = USER
    batch.reqs[0].mamba_branching_seqlen = None
    publish.plan_snapshots(batch, batch.reqs[0])
    assert [(s.length, s.kept) for s in pool.interior.waiting(1)] == [(640, True)]


def test_a_system_prompt_that_ends_with_a_chunk_is_known_as_shared():
    batch, _, tree = setup(range(10, 20))
    batch.reqs[0] = request(1, end=512, prompt=1340, branch=None)
    batch.reqs[0].origin_input_ids[512] = USER
    assert publish.plan_snapshots(batch, batch.reqs[0]).track_seqlen == 512
    publish.checkpoint(lambda t, r, **kw: t.insert(r, **kw), tree, finishing(batch.reqs[0]), up_to=512)
    assert paths_of(tree).kept_above(batch.reqs[0].last_node) == (batch.reqs[0].last_node,)


@pytest.mark.parametrize("prompt, kept", [(65_536, [2048, 4096]), (65_535, [])])
def test_a_long_prompt_keeps_rungs_at_doubling_distances(prompt, kept):
    batch, pool, _ = setup(range(10, 40))
    pool.mamba_allocator.size = 40
    batch.reqs[0] = request(1, end=8192, prompt=prompt, branch=None)
    assert publish.plan_snapshots(batch, batch.reqs[0]).track_seqlen == 8192
    assert [s.length for s in pool.interior.waiting(1)] == [2048, 4096, 6144]
    assert [s.length for s in pool.interior.waiting(1) if s.kept] == kept
    assert batch.reqs[0]._dsv4_keeps_last == bool(kept)


def test_footholds_displace_superseded_snapshots_while_slots_are_scarce_and_other_fine_rungs_do_not():
    batch, pool, _ = setup(range(10, 16))
    pool.mamba_allocator.size = 100
    batch.reqs[0] = request(1, end=8192, prompt=70_000, branch=None)
    publish.plan_snapshots(batch, batch.reqs[0])
    assert [s.length for s in pool.interior.waiting(1)] == [2048, 4096]


def test_the_foothold_of_a_lone_text_takes_a_snapshots_place_like_a_prompts_end():
    batch, pool, tree = setup([], evictable=range(200, 206))
    pool.mamba_allocator.size, publish.paths_of(tree).split = 40, SimpleNamespace(most_tokens=130_000)
    batch.reqs[0] = request(1, prefix=8192, end=16384, prompt=100_000, branch=None)
    entry = publish.plan_snapshots(batch, batch.reqs[0])
    assert entry.track_seqlen == 11_776 and batch.reqs[0]._dsv4_keeps_last and batch.reqs[0]._dsv4_lone
    batch.reqs[0] = request(1, prefix=8192, end=32768, prompt=100_000, branch=None)
    assert publish.plan_snapshots(batch, batch.reqs[0]).track_seqlen == 23_680
    assert [(s.length, s.kept) for s in pool.interior.waiting(1)] == [(11_776, True)] and len(tree.evictable) == 5
    publish.paths_of(tree).split, tree.token_to_kv_pool_allocator.size = None, 130_000
    publish.plan_snapshots(batch, batch.reqs[0])
    assert not batch.reqs[0]._dsv4_lone  # memory that does not move


def test_a_chunks_end_is_no_snapshot_where_it_would_push_out_one_that_others_use():
    batch, pool, tree = setup([10, 11], evictable=range(200, 206))
    batch.reqs[0] = request(1, end=512, prompt=9000, branch=None)
    entry = publish.plan_snapshots(batch, batch.reqs[0])
    assert not entry.track_mask and batch.reqs[0].kv.mamba_last_track_seqlen is None
    assert pool.mamba_allocator.free_slots == [10, 11] and len(tree.evictable) == 6
    pool.mamba_allocator.free_slots += [12, 13]
    assert publish.plan_snapshots(batch, batch.reqs[0]).track_seqlen == 512


def test_where_no_answers_end_is_ever_resumed_most_of_them_are_not_published():
    habits = ResumeHabits()
    for node in range(40):
        habits.published(node, PROMPT)
        habits.published(1000 + node, ANSWER, behind=node)
    assert all(habits.keep_answer_end() for _ in range(20))
    for node in range(40):
        habits.resumed(node)
    assert sum(habits.keep_answer_end() for _ in range(32)) == 4
    assert not habits.prompt_ends_are_spent()


def test_prompt_ends_are_spent_only_while_conversations_resume_at_answers():
    habits = ResumeHabits()
    for node in range(300):
        habits.published(node, PROMPT)
        habits.published(1000 + node, ANSWER, behind=node)
    assert not habits.prompt_ends_are_spent()
    for node in range(40):
        habits.resumed(1000 + node)
    assert habits.prompt_ends_are_spent() and habits.keep_answer_end()
    for node in range(100, 120):
        habits.resumed(node)
    assert not habits.prompt_ends_are_spent()
