"""How a request keeps more than one snapshot of one extend step.

SGLang tracks one position per extend and donates it to the tree. The functions here let the policy name several:
the last one takes SGLang's own way, the others get slots of their own, are written by the same step, and enter
the tree first. Publishing is best effort: with no slot to spare a snapshot is dropped and counted, never a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from torch import Tensor

from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.habits import ANSWER, INNER, PROMPT
from sglang_dsv4.cache.interior import InteriorSnapshot
from sglang_dsv4.cache.policy import COARSE, SnapshotPolicy, footholds, is_lone
from sglang_dsv4.cache.superseded import paths_of

USER_TOKEN = "<｜User｜>"
_LOOK_AHEAD = 64  # waiting requests: of a page each, as many as fit into a step


def plan_snapshots(batch: Any, req: Any) -> _MambaRadixCacheV2TrackEntry:
    """Decide the snapshots of one request's extend step; replaces SGLang's own choice of one position."""
    kv, pool, tree = req.kv, batch.req_to_token_pool, batch.tree_cache
    for stale in pool.interior.take(kv.req_pool_idx):
        pool.mamba_allocator.free(stale.slot)
    track_position, prompt = kv.mamba_next_track_idx, len(req.full_untruncated_fill_ids)
    shared = tree.supports_prefix_sharing()
    if shared:
        _note_resume(tree, req)
    system_end = _system_end(pool, req)
    room = paths_of(tree).room(tree) if shared else 0
    # Where memory does not move, snapshots cost no pages, and the footholds of all long texts are as good.
    req._dsv4_lone = shared and paths_of(tree).split is not None and is_lone(prompt, room)
    standing = footholds(prompt, room, tree.page_size, lone=req._dsv4_lone)
    wanted = SnapshotPolicy(tree.page_size).positions(
        prefix_len=req.prefix_len,
        extend_end=req.extend_end,
        prompt_len=prompt,
        branch=req.mamba_branching_seqlen,
        system_end=system_end,
        footholds=standing if req._dsv4_lone else (),
    )
    shared_end = None if system_end is None else system_end // tree.page_size * tree.page_size

    def kept(length: int) -> bool:
        return length == shared_end or length in standing

    last = wanted.last
    if last in wanted.rungs and not (shared and _room_for_rung(batch)):
        last = max(wanted.needed, default=None)
    if shared:
        row = kv.req_pool_idx
        for length in wanted.needed:
            if length != last:
                _take_interior(batch, row, length, _spare_slot, kept=kept(length))
        for length in wanted.rungs:
            if length < (last or 0):
                coarse = kept(length) or not length % COARSE
                _take_interior(batch, row, length, _rung_slot if coarse else _fine_slot, kept=kept(length))
    req._dsv4_keeps_last = last is not None and kept(last)
    if last is None:
        kv.mamba_last_track_seqlen = None  # the step before may have left one that was published since
        return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=track_position, track_seqlen=-1)
    kv.mamba_last_track_idx = track_position
    kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(track_position)
    kv.mamba_last_track_seqlen = last
    return _MambaRadixCacheV2TrackEntry(track_mask=True, track_position=track_position, track_seqlen=last)


def checkpoint(insert: Callable[..., None], tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    """Hand a request's snapshots to the tree: the interior ones, then the last.

    insert  SGLang's `checkpoint_into_tree`
    """
    paths, protected = paths_of(tree), req.kv.cache_protected_len
    publish_interior_snapshots(insert, tree, req, up_to=up_to, **kwargs)
    prompt = len(req.origin_input_ids)
    answered = req.finished() and (req.kv.mamba_last_track_seqlen or 0) > prompt
    if answered and _slots_are_scarce(tree.req_to_token_pool, 1) and not paths.habits.keep_answer_end():
        req.kv.mamba_last_track_seqlen = None
        counters.skipped += 1
    paths.kind = ANSWER if answered else PROMPT if up_to >= prompt else INNER
    paths.behind = getattr(req, "_dsv4_prompt_end", None) if answered else None
    paths.kept, paths.lone = getattr(req, "_dsv4_kept", ()), getattr(req, "_dsv4_lone", False)
    offered = 1 if req.kv.mamba_last_track_seqlen and not tree.disable else 0
    before = counters.published
    try:
        insert(tree, req, up_to=up_to, **kwargs)
    finally:
        kind, paths.kind, paths.behind, paths.kept = paths.kind, None, None, ()
    if paths.split is not None and not tree.disable:
        paths.split.entered(tree, req, protected)
        paths.split.expire(paths.order.model.now)
    counters.duplicates += max(0, offered - (counters.published - before))
    if offered and getattr(req, "_dsv4_keeps_last", False):
        req._dsv4_keeps_last = False
        req._dsv4_kept = paths.keep(req.last_node, getattr(req, "_dsv4_kept", ()))
    if req.finished():
        paths.order.ended(tree, req)
    paths.order.stands(tree, req, kind, snapshot=bool(offered))
    if kind == PROMPT:
        req._dsv4_prompt_end = req.last_node


def publish_ahead(tree: Any, reqs: Iterable[Any], waiting: Sequence[Any]) -> None:
    """Put prompts that the step in flight completes into the tree where a waiting request goes on from what they add.

    SGLang prepares a prefill step before it processes the result of the one in flight, and publishes beforehand only a
    chunk whose prompt goes on. But a prompt's pages and snapshots do not hang on the result, and whoever reads them
    runs behind the step that writes them. When the result comes, nothing is left to be put into the tree.
    Where nobody asks for it, it waits: its snapshot takes a slot, perhaps that of what a waiting request would find.
    """
    for req in reqs:
        known = req.extend_end <= req.prefix_len
        if known or req.finished() or req.is_retracted or req.discard_output_reason is not None:
            continue
        if any(_shares_new_page(tree, req, other) for other in waiting[:_LOOK_AHEAD]):
            checkpoint_kv_cache(req, tree)


def _shares_new_page(tree: Any, req: Any, other: Any) -> bool:
    """Whether the other's prompt begins with the request's as far as the tree has it, and a page more."""
    end = req.kv.cache_protected_len + tree.page_size
    ours, theirs = req.origin_input_ids, other.origin_input_ids
    # A match stays within one namespace, and is capped one token short of the prompt.
    if req.extra_key != other.extra_key or not end <= len(ours) or not end < len(theirs):
        return False
    last = end - tree.page_size  # its page first: comparing 131,072 tokens takes a millisecond
    return bool(ours[last:end] == theirs[last:end] and ours[:last] == theirs[:last])


def publish_interior_snapshots(insert: Callable[..., None], tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
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
    paths = paths_of(tree)
    try:
        for snapshot in waiting:
            if tree.disable or not kv.cache_protected_len < snapshot.length <= up_to:
                pool.mamba_allocator.free(snapshot.slot)
                continue
            kv.mamba_last_track_seqlen, paths.kind = snapshot.length, INNER
            paths.kept, paths.lone = getattr(req, "_dsv4_kept", ()), getattr(req, "_dsv4_lone", False)
            with pool.interior.publish(snapshot.slot):
                insert(tree, req, up_to=up_to, **kwargs)
            counters.interior_published += 1
            paths.order.stands(tree, req, INNER, snapshot=True)
            if snapshot.kept:
                req._dsv4_kept = paths.keep(req.last_node, paths.kept)
    finally:
        req.finished_reason, paths.kind, paths.kept = reason, None, ()
        kv.mamba_last_track_seqlen, kv.mamba_prev_track_seqlen = last, previous


def _note_resume(tree: Any, req: Any) -> None:
    """Count where the request resumed and what it missed, once."""
    if not getattr(req, "_dsv4_counted", False):
        req._dsv4_counted = True
        kind, paths = "nowhere", paths_of(tree)
        paths.order.arrives(tree, req)
        if req.prefix_len:
            kind = paths.habits.resumed(req.last_node)
            req._dsv4_kept = paths.kept_above(req.last_node)
        counters.hits[kind] += 1
        counters.hit_tokens[kind] += req.prefix_len
        counters.missed_tokens.update(paths.order.missed(tree, req))


def _system_end(pool: Any, req: Any) -> int | None:
    """Tokens before the first user message, if this step computes them; None where there is no telling."""
    if pool.user_token is None:
        tokenizer = getattr(req, "tokenizer", None)
        found = tokenizer.convert_tokens_to_ids(USER_TOKEN) if tokenizer is not None else None
        unknown = getattr(tokenizer, "unk_token_id", None)
        pool.user_token = -1 if found is None or found == unknown else int(found)
    try:
        end: int = req.origin_input_ids.index(pool.user_token, 0, req.extend_end + 1)
    except ValueError:
        return None
    return end


def _take_interior(batch: Any, row: int, length: int, take: Callable[[Any], Tensor | None], *, kept: bool) -> None:
    slot = take(batch)
    if slot is None:
        counters.interior_refused += 1
    else:
        batch.req_to_token_pool.interior.add(row, InteriorSnapshot(length, slot, kept))


def _spare_slot(batch: Any) -> Tensor | None:
    """int64 [1]: a slot that no running request can need before it publishes, or None.

    Every request of the batch may still take one slot when its own snapshot is donated.
    """
    allocator, tree = batch.req_to_token_pool.mamba_allocator, batch.tree_cache
    reserve = len(batch.reqs) + 1
    if allocator.available_size() + tree.mamba_evictable_size() <= reserve:
        return None
    slot: Tensor | None = allocator.alloc(1)
    if slot is None:
        tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        slot = allocator.alloc(1)
    return slot


def _room_for_rung(batch: Any) -> bool:
    """Whether a slot is free that nobody wants, if need be after a superseded snapshot has gone."""
    allocator, tree = batch.req_to_token_pool.mamba_allocator, batch.tree_cache
    short = len(batch.reqs) + 2 - int(allocator.available_size())
    return short <= 0 or paths_of(tree).trim(tree, short) >= short


def _rung_slot(batch: Any) -> Tensor | None:
    """int64 [1]: a slot for a rung, which displaces superseded snapshots only."""
    return batch.req_to_token_pool.mamba_allocator.alloc(1) if _room_for_rung(batch) else None


def _fine_slot(batch: Any) -> Tensor | None:
    """int64 [1]: a slot for a rung between the coarse ones, while slots are not scarce."""
    pool = batch.req_to_token_pool
    return None if _slots_are_scarce(pool, len(batch.reqs) + 1) else pool.mamba_allocator.alloc(1)


def _slots_are_scarce(pool: Any, reserve: int) -> bool:
    """Whether no more than a quarter of all slots, or no more than `reserve`, are free."""
    allocator = pool.mamba_allocator
    return bool(allocator.available_size() <= max(allocator.size // 4, reserve))
