"""Which prefix leaves the tree first: whole leaves, pages and snapshot together, the one worth least.

SGLang evicts the leaf that was not used for longest when pages run out, and the snapshot that was not used for longest
when slots do. That loses everything on traffic that comes around in turn, and takes snapshots from pages that stay.
Here leaves are ordered by what keeping them is worth (`reuse.py`), and go through the tree's own eviction of one leaf.
A leaf takes its snapshot along, and then the pages above it that no snapshot makes usable.

The tree is not asked for its leaves, which would cost as much as there are. Every node that a request left is offered
as a leaf, and so is a node whose last child was evicted; what became of it meanwhile is looked up when it is to go.
"""

from __future__ import annotations

import time
import zlib
from array import array
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cache.causes import LEAST_REMEMBERED, NEW, SeenPages, page_misses
from sglang_dsv4.cache.habits import INNER
from sglang_dsv4.cache.reuse import Arrival, Mark, ReuseModel, extend_chain

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

_GONE: tuple[TreePathNodeInfo, ...] = ()


class EvictionOrder:
    """The leaves of one tree. `room` is how many pages are known after they have gone."""

    def __init__(self, room: int = LEAST_REMEMBERED) -> None:
        self.model, self.seen = ReuseModel(), SeenPages(room)
        self.snapshot_pages: float | None = None  # that a snapshot costs, where memory moves between the two

    def clear(self) -> None:
        """Forget everything. What waiting requests bring along of it counts no more."""
        self.model, self.seen = ReuseModel(self.snapshot_pages), SeenPages(self.seen.room)

    def moves(self, snapshot_pages: float) -> None:
        """Memory moves between pages and snapshots: what counts is a leaf's worth a byte."""
        self.snapshot_pages = self.model.snapshot_pages = snapshot_pages

    def arrives(self, tree: Any, req: Any) -> None:
        """A request is prepared for the first time."""
        chain: array[int] = array("q")
        extend_chain(chain, _text(req.origin_input_ids), tree.page_size, _seed(req))
        req._dsv4_arrival = self.model.arrives(chain)

    def missed(self, tree: Any, req: Any) -> dict[str, int]:
        """Tokens of the request's prompt that it did not find, by cause. To be asked once, after `arrives`."""
        page, prompt, cached = tree.page_size, len(req.origin_input_ids), req.prefix_len
        chain = req._dsv4_arrival.chain
        known = self.seen.walk(chain, page, prompt - 1)
        self.seen.passed(chain)
        # SGLang reports pages beyond the snapshot as the place where the request branches off.
        standing = req.mamba_branching_seqlen or cached
        reusable = max(known.tokens, cached)
        found = page_misses(cached=cached, reusable=reusable, pages_hit=standing, best_snapshot=known.snapshot)
        return {NEW: prompt - reusable, **found}

    def ended(self, tree: Any, req: Any) -> None:
        """The request has its whole answer."""
        if (arrival := getattr(req, "_dsv4_arrival", None)) is not None:
            _extend(arrival, req, tree.page_size)
            self.seen.passed(arrival.chain)

    def stands(self, tree: Any, req: Any, kind: str, *, snapshot: bool) -> None:
        """The request's text stands in the tree as far as its `last_node`, a place of that kind."""
        arrival: Arrival | None = getattr(req, "_dsv4_arrival", None)
        pages = req.kv.cache_protected_len // tree.page_size
        if arrival is None or tree.disable or not pages:
            return
        if arrival.model is not self.model:  # it was retracted, and then the tree was flushed
            arrival = req._dsv4_arrival = self.model.arrives(arrival.chain)
        if pages > len(arrival.chain):
            _extend(arrival, req, tree.page_size)
        if snapshot:
            self.seen.snapshot(arrival.chain[pages - 1])
        span = _span(tree, _path(tree, req.last_node))
        self.model.stands(arrival, pages, kind, req.last_node, span)

    def trimmed(self, tree: Any, node: int) -> None:
        """Snapshots above `node` are gone, so more is lost with it."""
        mark = self.model.end_of(node)
        if mark is not None and mark.chain is not None and (path := _path(tree, node)):
            self.model.offer(mark, node, _span(tree, path), mark.chain)

    def evict(self, tree: Any, tokens: int, snapshots: int) -> tuple[int, int]:
        """Evict leaves until so many tokens and snapshots went or none is left; returns how many did."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        full, state = ComponentType.FULL, ComponentType.MAMBA
        started, gone = time.perf_counter(), dict.fromkeys(tree.tree_components, 0)
        tried = False  # held leaves, of which one must be free by now
        while gone[full] < tokens or gone[state] < snapshots:
            mark = self.model.worst(by_span=gone[full] >= tokens)
            if mark is None and not tried and tree.full_evictable_size():
                tried = True
                self.model.try_held()
                mark = self.model.worst(by_span=gone[full] >= tokens)
            if mark is None or mark.node is None or mark.chain is None:
                break
            node, chain, path = mark.node, mark.chain, _path(tree, mark.node)
            leaf = bool(path) and not path[-1].num_children
            if leaf and locked(tree, node):
                self.model.hold(mark)
                continue
            self.model.withdraw(mark)
            if not leaf:
                continue
            tree._evict_device_leaf(node, gone)
            self._uncover(tree, path[:-1], mark, chain, gone)
        tree.update_eviction_metrics(gone[full], started)
        return gone[full], gone[state]

    def _uncover(self, tree: Any, above: Any, mark: Mark, chain: array[int], gone: dict[Any, int]) -> None:
        """A leaf below `above` went: its parent may be a leaf now. Without a snapshot it goes, too."""
        while above and (path := _path(tree, above[-1].node_id)) and not path[-1].num_children:
            node = path[-1].node_id
            if _has_snapshot(tree, node) or locked(tree, node):
                parent = self.model.mark(chain[path[-1].path_end // tree.page_size - 1], INNER, mark.cls.turn)
                self.model.offer(parent, node, _span(tree, path), chain)
                return
            tree._evict_device_leaf(node, gone)
            above = path[:-1]


def _extend(arrival: Arrival, req: Any, page: int) -> None:
    """Hash the pages of the request's text, prompt and answer, that were not hashed yet."""
    extend_chain(arrival.chain, _text(req.full_untruncated_fill_ids), page, _seed(req))


def _text(tokens: Any) -> array[int]:
    return tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)


def _seed(req: Any) -> int:
    """What keeps equal texts of different namespaces apart: the same in every rank, as Python's own hash is not."""
    return zlib.crc32(repr((getattr(req, "extra_key", None), getattr(req, "cache_salt", None))).encode())


def _path(tree: Any, node: int) -> tuple[TreePathNodeInfo, ...]:
    """Root to `node`; empty if it is gone."""
    try:
        path: tuple[TreePathNodeInfo, ...] = tree.tree_core.collect_path_info([node])[0]
    except KeyError:
        return _GONE
    return path


def _has_snapshot(tree: Any, node: int) -> bool:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return tree.tree_core.get_component_device_value(node, ComponentType.MAMBA) is not None


def _span(tree: Any, path: tuple[TreePathNodeInfo, ...]) -> int:
    """Pages from the nearest snapshot above the end of `path` to the end."""
    start = next((one.path_end for one in reversed(path[:-1]) if _has_snapshot(tree, one.node_id)), 0)
    return int(path[-1].path_end - start) // int(tree.page_size)


def locked(tree: Any, node: int) -> bool:
    """Whether a request holds the pages of the leaf `node`, found out by locking: a held path gains no protection."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    result = tree.inc_lock_ref(node, (ComponentType.MAMBA,))
    tree.dec_lock_ref(node, result.to_dec_params())
    return not result.delta
