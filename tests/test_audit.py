"""The audit notices a changed byte in anything the tree owns, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layers import geometry

from sglang_dsv4.cache.audit import TreeAudit, page_checksum
from sglang_dsv4.cache.handle import EntryStore, SlotStore

PAGE = 128


class Allocator:
    def _release_page_ids(self, *ids):
        pass

    def free(self, slots):
        pass

    def clear(self):
        pass


@pytest.fixture
def tree():
    g = geometry()
    pages, slots = EntryStore(g, 6 * PAGE, "cpu"), SlotStore(g, 6, "cpu")
    allocator = Allocator()
    allocator.get_kvcache = lambda: SimpleNamespace(store=pages)
    pool = SimpleNamespace(mamba_allocator=Allocator(), mamba_pool=SimpleNamespace(store=slots))
    return SimpleNamespace(
        page_size=PAGE,
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=pool,
        pages=pages,
        slots=slots,
        all_values_flatten=lambda: torch.arange(2 * PAGE, 4 * PAGE),
        all_mamba_values_flatten=lambda: torch.tensor([3]),
    )


@pytest.mark.parametrize("pool", ["csa", "keys", "hca"])
def test_a_changed_byte_in_any_row_of_an_owned_page_stops_the_server(tree, pool):
    audit = TreeAudit(tree)
    audit.check()
    audit.check()
    rows = {"csa": 32, "keys": 32, "hca": 1}[pool]
    layout = tree.pages.geometry.index if pool == "keys" else tree.pages.geometry.main
    last = 3 * rows + rows - 1
    getattr(tree.pages, pool)[0].reshape(-1)[layout.scale_offset(last)] ^= 1
    with pytest.raises(RuntimeError, match="page 3 changed"):
        audit.check()


@pytest.mark.parametrize("part", ["windows", "overlaps"])
def test_a_changed_byte_in_a_snapshot_stops_the_server(tree, part):
    audit = TreeAudit(tree)
    audit.check()
    if part == "windows":
        tree.slots.slot_windows[0, 3, -1] ^= 1
    else:
        tree.slots.overlaps[0, 3, 3, 1, -1] += 1
    with pytest.raises(RuntimeError, match="snapshot 3 changed"):
        audit.check()


def test_what_the_tree_does_not_own_may_change(tree):
    audit = TreeAudit(tree)
    audit.check()
    tree.pages.csa[:, 0] ^= 1
    tree.pages.csa[:, 2] ^= 1
    tree.slots.slot_windows[:, [0, 1, 2, 4, 5]] ^= 1
    audit.check()


def test_a_page_or_snapshot_that_was_freed_may_come_back_with_other_bytes(tree):
    audit = TreeAudit(tree)
    audit.check()
    tree.token_to_kv_pool_allocator._release_page_ids(torch.tensor([2]), torch.tensor([3]))
    tree.req_to_token_pool.mamba_allocator.free(torch.tensor([3]))
    tree.pages.csa += 1
    tree.slots.windows += 1
    audit.check()


def test_pages_that_share_a_row_group_have_checksums_of_their_own(tree):
    before = [page_checksum(tree.pages, p) for p in (2, 3)]
    tree.pages.csa[0].reshape(-1)[tree.pages.geometry.main.data_offset(2 * 32)] ^= 1
    after = [page_checksum(tree.pages, p) for p in (2, 3)]
    assert before[0] != after[0] and before[1] == after[1]
