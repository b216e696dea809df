"""gather on a GPU against its torch reference, value for value (the decoded rows are exact in bfloat16)."""

from __future__ import annotations

import pytest
import torch
from kernel_steps import Guarded, Plan, entry_groups, make_step, same_bytes, values, window_pool

from sglang_dsv4.formats import main_codec
from sglang_dsv4.geometry import CSA_RATIO, HEAD_DIM, MAIN_FP8, WINDOW
from sglang_dsv4.ops.gather import gather, gather_cuda
from sglang_dsv4.ops.meta import StepMeta, Workspace, from_host

CODEC = main_codec(MAIN_FP8)

PLANS = {
    "first chunk": Plan([(0, 1)]),
    "lengths around a block": Plan([(0, n) for n in (3, 4, 5, 7, 8, 9, 127, 128, 129)]),
    "history shorter than the ring": Plan([(p, 2) for p in (1, 4, 63, 64, 127)], seed=1),
    "long context, random pages": Plan([(3000, 77), (1279, 1), (640, 640)], seed=2),
    "empty and padded": Plan([(3, 0), (700, 5), (0, 0), (2, 1)], pad_requests=2, pad_tokens=5, seed=3),
    "page of 256": Plan([(255, 2), (511, 1), (1024, 300)], page=256, seed=4),
    "many requests": Plan([(13 * i % 300, i % 5) for i in range(100)], seed=5),
    "prompt of 8192": Plan([(0, 8192)], seed=6),
    "more rows than a short step": Plan([(30000, 77), (29001, 1), (20000, 640)], pad_tokens=3, seed=7),
}


def host_lengths(meta: StepMeta) -> tuple[list[int], list[int]]:
    return meta.prefix_lens.tolist(), meta.seq_lens.tolist()


def fill(pool: torch.Tensor, seed: int) -> None:
    """Stored rows in every place that a test might read."""
    rows = torch.arange(pool.shape[0] * 64, device=pool.device)
    CODEC.scatter(pool, rows, values((rows.numel(), HEAD_DIM), pool.device, seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("name", PLANS)
def test_gather_fills_the_references_rows(device, name, ratio, dtype):
    meta, numbers = make_step(PLANS[name], device)
    plan = Workspace.plan(*host_lengths(meta), ratio, device)
    guard = Guarded(device)
    window = window_pool(numbers, guard)
    fill(window, 1)
    entries = None
    if ratio:
        entries = guard.poison((entry_groups(numbers, ratio, meta.page_size), MAIN_FP8.group_bytes), torch.uint8)
        fill(entries, 2)
    kv = guard.copy(values((meta.num_tokens, HEAD_DIM), device, 3).to(dtype))
    got = guard.poison((plan.num_rows + 3, HEAD_DIM), torch.bfloat16)
    want = guard.poison((plan.num_rows + 3, HEAD_DIM), torch.bfloat16)
    gather(want, window, kv, entries, meta, plan, ratio=ratio, codec=CODEC)
    gather_cuda(got, window, kv, entries, meta, plan, ratio=ratio, codec=CODEC)
    assert same_bytes(got, want)
    guard.check()


def test_every_valid_index_names_a_row_that_gather_wrote(device):
    meta, numbers = make_step(Plan([(5, 9), (300, 2), (0, 4)], pad_requests=1, pad_tokens=2), device)
    plan = Workspace.plan(*host_lengths(meta), 4, device)
    guard = Guarded(device)
    window = window_pool(numbers, guard)
    entries = guard.poison((entry_groups(numbers, 4, meta.page_size), MAIN_FP8.group_bytes), torch.uint8)
    fill(window, 1)
    fill(entries, 2)
    workspace = guard.poison((plan.num_rows, HEAD_DIM), torch.bfloat16)
    kv = values((meta.num_tokens, HEAD_DIM), device, 3)
    gather_cuda(workspace, window, kv, entries, meta, plan, ratio=4, codec=CODEC)
    indices = plan.window_indices(meta).flatten()
    assert torch.isfinite(workspace[indices[indices >= 0].long()]).all()


def test_gather_beyond_2_to_the_31_elements(device):
    """Window and entry rows past 2^32 bytes, workspace rows past 2^31 elements."""
    groups = 2**32 // MAIN_FP8.group_bytes + 64
    pool = torch.empty(groups, MAIN_FP8.group_bytes, dtype=torch.uint8, device=device)
    pool[-64:].fill_(255)
    fill(pool[-64:], 1)
    meta, _ = make_step(Plan([(200, 60)]), device)
    small = meta.page_table.clone()
    first_row = (groups - 64) * 64
    pages_before = first_row // 32  # 32 entries of ratio 4 a page
    meta.page_table[0, :3] = torch.tensor([4, 9, 2], dtype=torch.int32) + pages_before
    slot_before = (groups - 64) // 2
    meta.slots.fill_(slot_before + 3)
    offset = 2**31 // HEAD_DIM + 1000
    far = Workspace.plan([200], [260], 4, device)
    far.offsets += offset
    far.num_rows += offset
    workspace = torch.empty(far.num_rows, HEAD_DIM, dtype=torch.bfloat16, device=device)
    workspace[offset - 4 :] = float("nan")
    kv = values((meta.num_tokens, HEAD_DIM), device, 3)
    gather_cuda(workspace, pool, kv, pool, meta, far, ratio=4, codec=CODEC)

    meta.page_table.copy_(small)
    meta.page_table[0, :3] = torch.tensor([4, 9, 2], dtype=torch.int32)
    meta.slots.fill_(3)
    near = Workspace.plan([200], [260], 4, device)
    want = torch.full((near.num_rows, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device)
    gather(want, pool[-64:], kv, pool[-64:], meta, near, ratio=4, codec=CODEC)
    assert same_bytes(workspace[offset:], want)
    assert torch.isnan(workspace[offset - 4 : offset]).all()


def test_history_before_the_first_token_is_left_alone(device):
    meta, numbers = make_step(Plan([(2, 1)]), device)
    plan = Workspace.plan(*host_lengths(meta), 0, device)
    guard = Guarded(device)
    window = window_pool(numbers, guard)
    fill(window, 1)
    workspace = guard.poison((plan.num_rows, HEAD_DIM), torch.bfloat16)
    kv = values((1, HEAD_DIM), device, 3)
    gather_cuda(workspace, window, kv, None, meta, plan, ratio=0, codec=CODEC)
    assert torch.isnan(workspace[: WINDOW - 2]).all()
    assert torch.isfinite(workspace[WINDOW - 2 :]).all()


@pytest.mark.parametrize("host", [list, lambda values: torch.tensor(values, dtype=torch.int32)], ids=["list", "tensor"])
def test_what_the_host_knows_of_a_prefill_reaches_the_device_without_waiting(device, host):
    """A copy from memory that is not pinned would wait for the step before."""
    lens = [3077, 1280, 640]
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = Workspace.plan([3000, 1279, 640], lens, CSA_RATIO, device)
        told = from_host(host(lens), torch.int32, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert told.tolist() == lens and plan.num_entries.tolist() == [length // CSA_RATIO for length in lens]
