"""How a request keeps more than one snapshot of one extend step.

SGLang tracks one position per extend and donates it to the tree. The functions here let the policy name several:
the last one takes SGLang's own way, the others get slots of their own, are written by the same step, and enter
the tree first. Publishing is best effort: with no slot to spare a snapshot is dropped and counted, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import Tensor

from sglang_dsv4.cache.interior import InteriorSnapshot
from sglang_dsv4.cache.policy import SnapshotPolicy

logger = logging.getLogger(__name__)


class PublishCounters:
    """What became of the snapshots that the policy wanted."""

    def __init__(self) -> None:
        self.interior_published = 0
        self.interior_refused = 0


counters = PublishCounters()


def plan_snapshots(batch: Any, req: Any) -> _MambaRadixCacheV2TrackEntry:
    """Decide the snapshots of one request's extend step; replaces SGLang's own choice of one position."""
    kv, pool, tree = req.kv, batch.req_to_token_pool, batch.tree_cache
    for stale in pool.interior.take(kv.req_pool_idx):
        pool.mamba_allocator.free(stale.slot)
    policy = SnapshotPolicy(tree.page_size)
    wanted = policy.positions(
        prefix_len=req.prefix_len,
        extend_end=req.extend_end,
        prompt_len=len(req.full_untruncated_fill_ids),
        branch=req.mamba_branching_seqlen,
    )
    track_position = kv.mamba_next_track_idx
    if not wanted:
        return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=track_position, track_seqlen=-1)
    *interior, last = wanted
    if tree.supports_prefix_sharing():
        for length in interior:
            slot = _spare_slot(batch)
            if slot is None:
                counters.interior_refused += 1
            else:
                pool.interior.add(kv.req_pool_idx, InteriorSnapshot(length, slot))
    kv.mamba_last_track_idx = track_position
    kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(track_position)
    kv.mamba_last_track_seqlen = last
    return _MambaRadixCacheV2TrackEntry(track_mask=True, track_position=track_position, track_seqlen=last)


def publish_interior_snapshots(
    insert: Callable[..., None], tree: Any, req: Any, *, up_to: int, **kwargs: Any
) -> None:
    """Put waiting interior snapshots into the tree, shallow first, by the tree's own insert of an unfinished request.

    insert  SGLang's `checkpoint_into_tree`, called once for each; the caller inserts the last position afterwards
    """
    kv, pool = req.kv, tree.req_to_token_pool
    waiting = pool.interior.take(kv.req_pool_idx)
    if not waiting:
        return
    last, previous, reason = kv.mamba_last_track_seqlen, kv.mamba_prev_track_seqlen, req.finished_reason
    # A finished request would hand over its tracking slots with the first insert; it has one more to come.
    req.finished_reason = None
    try:
        for snapshot in waiting:
            if tree.disable or not kv.cache_protected_len < snapshot.length <= up_to:
                pool.mamba_allocator.free(snapshot.slot)
                continue
            kv.mamba_last_track_seqlen = snapshot.length
            with pool.interior.publish(snapshot.slot):
                insert(tree, req, up_to=up_to, **kwargs)
            counters.interior_published += 1
    finally:
        req.finished_reason = reason
        kv.mamba_last_track_seqlen, kv.mamba_prev_track_seqlen = last, previous


def _spare_slot(batch: Any) -> Tensor | None:
    """int64 [1]: a slot that no running request can need before it publishes, or None.

    Every request of the batch may still take one slot when its own snapshot is donated.
    """
    allocator, tree = batch.req_to_token_pool.mamba_allocator, batch.tree_cache
    reserve = len(batch.reqs) + 1
    if allocator.available_size() + tree.mamba_evictable_size() <= reserve:
        return None
    slot = allocator.alloc(1)
    if slot is None:
        tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        slot = allocator.alloc(1)
    return slot
