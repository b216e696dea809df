"""Snapshots that a conversation has left behind go first.

SGLang evicts the snapshot that was not used for longest, whoever owns it. A conversation that goes on leaves
snapshots behind that only a branch could use, yet they are younger than the one snapshot that a quieter conversation
needs. SGLang can bound the snapshots of a path (`--mamba-max-states-per-path`): beyond the bound the shallow ones
that stand at no fork are dropped at every insert, needed or not. Here the bound is 1, and it is applied when a slot is
needed, to the path that was extended longest ago first. When no path is over it, leaves go (`order.py`).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from sglang_dsv4.cache.causes import LEAST_REMEMBERED
from sglang_dsv4.cache.counters import counters
from sglang_dsv4.cache.habits import ANSWER, ResumeHabits
from sglang_dsv4.cache.order import EvictionOrder
from sglang_dsv4.cache.split import MovingSplit

_REMEMBERED = 1 << 16  # nodes of which anything is known; the oldest are forgotten


class SupersededPaths:
    """Ends of paths that hold more snapshots than they need, the one extended longest ago first.

    Above the end of a prompt everything is superseded but ends of system prompts, forks and the footholds of long
    paths. Above the end of an answer the prompt's end is too, where conversations resume at answers.
    What a lone text (`policy.is_lone`) leaves behind goes first: its bytes are room for what takes turns with it.
    """

    def __init__(self, pages: int = 0) -> None:
        """pages  of the pool"""
        self.habits = ResumeHabits()
        self.order = EvictionOrder(max(2 * pages, LEAST_REMEMBERED))
        self.root: int | None = None  # of the tree, another one after a flush
        self.kind: str | None = None  # of the snapshot that is being inserted
        self.behind: int | None = None  # end of the prompt whose answer's end is being inserted
        self.kept: tuple[int, ...] = ()  # nodes above it whose snapshots are not superseded
        self.lone = False  # whether the text that is being inserted takes more than half of the pool
        self.split: MovingSplit | None = None
        self._kept_above: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._prompts: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._answers: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._lone: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts) + len(self._answers) + len(self._lone)

    def room(self, tree: Any) -> int:
        """Tokens of pages that there can be."""
        return int(tree.token_to_kv_pool_allocator.size) if self.split is None else self.split.most_tokens

    def extended(self, tail: int) -> None:
        """A snapshot was inserted at node `tail`."""
        if self.kind is None:
            return
        self.habits.published(tail, self.kind, self.behind)
        if self.kept:
            self._remember(tail, self.kept)
        group = self._answers if self.kind == ANSWER else self._lone if self.lone else self._prompts
        group[tail] = self.kept
        group.move_to_end(tail)
        if len(group) > _REMEMBERED:
            group.popitem(last=False)

    def keep(self, node: int, above: tuple[int, ...]) -> tuple[int, ...]:
        """The snapshot at `node` stays when its path goes on, like those `above` it; returns all of them."""
        kept = (*above, node)
        self._remember(node, kept)
        return kept

    def _remember(self, node: int, kept: tuple[int, ...]) -> None:
        self._kept_above[node] = kept
        while len(self._kept_above) > _REMEMBERED:
            self._kept_above.popitem(last=False)

    def kept_above(self, node: int) -> tuple[int, ...]:
        """The snapshots to keep above `node`, and itself if it is one."""
        return self._kept_above.get(node, ())

    def clear(self) -> None:
        self._kept_above.clear()
        self._prompts.clear()
        self._answers.clear()
        self._lone.clear()
        self.habits.clear()
        self.order.clear()
        if self.split is not None:
            self.split.clear()

    def trim(self, tree: Any, count: int) -> int:
        """Drop superseded snapshots until `count` are gone or none is left; returns how many went."""
        gone = self._trim(tree, self._lone, count)
        gone += self._trim(tree, self._prompts, count - gone)
        if gone < count and self.habits.prompt_ends_are_spent():
            gone += self._trim(tree, self._answers, count - gone)
        counters.superseded += gone
        return gone

    def trim_lone(self, tree: Any, count: int) -> int:
        """The same on the paths of texts of which only one fits."""
        gone = self._trim(tree, self._lone, count)
        counters.superseded += gone
        return gone

    def _trim(self, tree: Any, tails: OrderedDict[int, tuple[int, ...]], count: int) -> int:
        gone = 0
        while gone < count and tails:
            tail, kept = tails.popitem(last=False)
            locks = [lock for node in kept if (lock := _lock(tree, node)) is not None]
            try:
                went = _trim_path(tree, tail)
            finally:
                for lock in locks:
                    tree.unlock(lock)
            if went:
                gone += went
                self.order.trimmed(tree, tail)
        return gone


def _lock(tree: Any, node: int) -> Any:
    """A lock on the snapshot at `node`, None if it is gone."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    try:
        return tree.lock(node, skip_lock_components=(ComponentType.FULL,))
    except KeyError:
        return None


def _trim_path(tree: Any, tail: int) -> int:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import BaseEvictionResult

    before = tree.mamba_evictable_size()
    result = BaseEvictionResult()
    try:
        tree.tree_core.evict_excess_path_states(tail, result.device_frees, result.host_frees, result.cache_actions)
    except KeyError:  # the node itself was evicted meanwhile
        return 0
    finally:
        tree._apply_eviction_result(result)
    return int(before - tree.mamba_evictable_size())


def paths_of(tree: Any) -> SupersededPaths:
    """The tree's own record, which a flush of the tree empties."""
    paths: SupersededPaths | None = getattr(tree, "_dsv4_paths", None)
    root = tree.tree_core.root_node_handle()
    if paths is None:
        paths = tree._dsv4_paths = SupersededPaths(tree.token_to_kv_pool_allocator.size // tree.page_size)
        if (plan := getattr(tree.req_to_token_pool, "split_plan", None)) is not None and not tree.disable:
            geometry = tree.req_to_token_pool.mamba_pool.geometry
            paths.split = MovingSplit(tree, plan)
            paths.order.moves(float(geometry.slot_bytes / (geometry.token_alloc_bytes * geometry.page_size)))
    elif root != paths.root:
        paths.clear()
    paths.root = root
    return paths


def defer(tree: Any, action: Any) -> bool:
    """Whether `action` is SGLang's bound for a path, which is then remembered instead of applied now."""
    from sglang.srt.mem_cache.unified_cache.cache_action import MambaEvictExcessPathStates

    if not isinstance(action, MambaEvictExcessPathStates):
        return False
    counters.published += 1
    paths = paths_of(tree)
    if paths.split is not None:
        paths.split.snapshot_entered(tree, action.tail_node_id)
    paths.extended(action.tail_node_id)
    return True


def evict_leaf(original: Callable[..., Any], tree: Any, node: int, *args: Any) -> Any:
    """Whoever evicts the leaf `node`: what stays above it is found by its parent from now on, where memory moves."""
    split = paths_of(tree).split
    path = tree.tree_core.collect_path_info([node])[0] if split is not None else ()
    result = original(tree, node, *args)
    if split is not None and path:
        split.went(node, path[-1].parent_id, path[-1].path_start)
    return result


def evict_for_alloc(original: Callable[..., Any], tree: Any, params: Any, **kwargs: Any) -> Any:
    """Room for an allocation: superseded snapshots go first, then the leaves worth least, then what SGLang chooses."""
    pages = snapshots = superseded = 0
    back = (0, 0)
    if (split := paths_of(tree).split) is not None:
        back = split.yield_to(params.num_tokens, params.mamba_num)
    if not kwargs and not tree.disable:
        superseded, pages, snapshots, params = _make_room(tree, params, *back)
    result = original(tree, params, **kwargs)
    result.num_tokens_evicted += pages
    result.mamba_num_evicted += snapshots
    counters.snapshots_evicted += result.mamba_num_evicted
    counters.pages_evicted += result.num_tokens_evicted // tree.page_size
    result.mamba_num_evicted += superseded
    return result


def _make_room(tree: Any, params: Any, tokens_back: int, slots_back: int) -> tuple[int, int, int, Any]:
    """Superseded snapshots, tokens and snapshots that went, and what of `params` is still wanted.

    So many tokens and slots of it a move gave back. It was short of them all the same: `consider` is told.
    """
    paths, allocator = paths_of(tree), tree.token_to_kv_pool_allocator
    goal, moved = allocator.available_size() + max(0, params.num_tokens - tokens_back), slots_back
    trims = params.mamba_num > 0
    if paths.split is not None:
        slots = tree.req_to_token_pool.mamba_allocator
        before = slots.available_size()
        paths.split.consider(tree, paths, params.num_tokens, params.mamba_num)
        moved += slots.available_size() - before
        trims = params.mamba_num > moved and paths.split.may_trim(tree)
    superseded = paths.trim_lone(tree, params.mamba_num - moved) if params.mamba_num > moved else 0
    superseded += paths.trim(tree, params.mamba_num - moved - superseded) if trims else 0
    wanted = max(0, params.mamba_num - moved - superseded)
    needed = max(0, goal - allocator.available_size()) if params.num_tokens > 0 else 0
    tokens, snapshots = paths.order.evict(tree, needed, wanted)
    short = max(0, goal - allocator.available_size()) if params.num_tokens > 0 else 0
    left = dataclasses.replace(params, num_tokens=short, mamba_num=max(0, wanted - snapshots))
    return superseded, tokens, snapshots, left
