"""append_window and copy_state on a GPU against their torch references, byte for byte."""

from __future__ import annotations

import pytest
import torch
from kernel_steps import (
    Guarded,
    Plan,
    assert_rows_close,
    make_step,
    meta_to,
    rope_table,
    same_bytes,
    values,
    window_pool,
)

from sglang_dsv4.attention.rope import apply_rope
from sglang_dsv4.formats import main_codec
from sglang_dsv4.geometry import (
    CSA_RATIO,
    CSA_STATE_DIM,
    HEAD_DIM,
    MAIN_FP8,
    STATE_PARTS,
    WINDOW,
    WINDOW_GROUPS,
)
from sglang_dsv4.models.invariant import rms_norm
from sglang_dsv4.ops.append_window import WindowNorm, append_window, append_window_cuda, norm_window_cuda
from sglang_dsv4.ops.copy_state import copy_state, copy_state_cuda

CODEC = main_codec(MAIN_FP8)
SLOT_BYTES = WINDOW_GROUPS * MAIN_FP8.group_bytes

PLANS = {
    "decode at every ring row": Plan([(p, 1) for p in range(130)]),
    "decode of 512": Plan([(7 * p, 1) for p in range(512)]),
    "first tokens": Plan([(0, n) for n in (1, 2, 3, 4, 5, 127, 128, 129)]),
    "chunks longer than the ring": Plan([(0, 300), (5, 257), (127, 128), (200, 129)], seed=1),
    "empty requests between": Plan([(3, 0), (0, 3), (9, 0), (0, 0), (500, 5)], seed=2),
    "padded": Plan([(40, 3), (0, 0), (120, 9)], pad_requests=3, pad_tokens=11, seed=3),
    "only padding": Plan([], pad_requests=4, pad_tokens=4),
    "page of 256": Plan([(250, 20), (255, 1), (256, 300)], page=256, seed=4),
    "snapshots": Plan(
        [(0, 300), (128, 128), (100, 1), (0, 8192)],
        pad_requests=1,
        pad_tokens=2,
        snapshots={0: [(128, 6), (256, 5)], 1: [(256, 7)], 3: [(8064, 8)]},
        seed=5,
    ),
    "long prompt": Plan([(0, 8192)], seed=6),
}


def awkward(x: torch.Tensor) -> torch.Tensor:
    """Rows that try the codec: zeros, signed zeros, subnormals, ties, huge and tiny groups."""
    x = x.clone()
    rows = x.shape[0]
    if rows > 6:
        x[0] = 0.0
        x[1] = -0.0
        x[2] = 1e-30
        x[3, ::3] = 3e38
        x[4] = torch.arange(HEAD_DIM, device=x.device) / 16 - 16  # many ties
        x[5] = 448.0
        x[6, 64:] = 1e-9
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PLANS)
def test_append_window_writes_the_references_bytes(device, name, dtype):
    meta, numbers = make_step(PLANS[name], device)
    guard = Guarded(device)
    kv = guard.copy(awkward(values((meta.num_tokens, HEAD_DIM), device, 1)).to(dtype))
    got = window_pool(numbers, guard)
    want = got.cpu()
    append_window(want, kv.cpu(), meta_to(meta, "cpu"), codec=CODEC)
    append_window_cuda(got, kv, meta, codec=CODEC)
    guard.check()
    assert same_bytes(got.cpu(), want)
    append_window_cuda(got, kv, meta, codec=CODEC)
    assert same_bytes(got.cpu(), want), "a second run changed bytes"


def test_append_window_takes_strided_rows(device):
    meta, numbers = make_step(Plan([(0, 9), (126, 4)]), device)
    guard = Guarded(device)
    wide = values((meta.num_tokens, 3 * HEAD_DIM), device, 2).bfloat16()
    kv = wide[:, HEAD_DIM : 2 * HEAD_DIM]
    got, want = window_pool(numbers, guard), window_pool(numbers, guard)
    append_window_cuda(got, kv, meta, codec=CODEC)
    append_window(want, kv, meta, codec=CODEC)
    assert same_bytes(got, want)


def window_norm(device, weight=torch.bfloat16, positions=8192) -> WindowNorm:
    scale = 1.0 + 0.2 * values((1, HEAD_DIM), device, 9, 0.0)[0]
    return WindowNorm(scale.to(weight), 1e-6, rope_table(positions, device))


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PLANS)
def test_append_window_norms_and_rotates_raw_rows(device, name, dtype, weight):
    """Columns of a wider product in, rows that differ from the reference's at rounding boundaries only."""
    meta, numbers = make_step(PLANS[name], device)
    guard = Guarded(device)
    wide = guard.copy(values((meta.num_tokens, 3 * HEAD_DIM), device, 1).to(dtype))
    kv, norm = wide[:, HEAD_DIM : 2 * HEAD_DIM], window_norm(device, weight)
    if meta.num_tokens > 4:
        kv[1], kv[2], kv[3, ::2] = 0.0, 1e-30, 1e18
    got = window_pool(numbers, guard)
    want = got.cpu()
    on_cpu = WindowNorm(norm.weight.cpu(), norm.eps, norm.rope.cpu())
    append_window(want, kv.cpu(), meta_to(meta, "cpu"), codec=CODEC, norm=on_cpu)
    append_window_cuda(got, kv, meta, codec=CODEC, norm=norm)
    guard.check()
    assert_rows_close(CODEC, got.cpu(), want)
    first = got.clone()
    append_window_cuda(got, kv, meta, codec=CODEC, norm=norm)
    assert same_bytes(got, first), "a second run changed bytes"


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5, 1000])
def test_norm_window_gives_the_rows_that_append_window_stores(device, tokens, dtype, weight):
    """Columns of a wider product in; nothing but the result is written."""
    guard = Guarded(device)
    wide = guard.copy(values((tokens, 3 * HEAD_DIM), device, 3).to(dtype))
    kv, norm = wide[:, HEAD_DIM : 2 * HEAD_DIM], window_norm(device, weight)
    positions = torch.randint(0, 8192, (tokens,), device=device)
    got = norm_window_cuda(kv, norm, positions)
    guard.check()
    want = norm.apply(kv, positions)
    assert got.dtype == torch.float32 and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    if tokens == 1000:
        meta, numbers = make_step(Plan([(0, tokens)]), device)
        one, two = (window_pool(numbers, Guarded(device)) for _ in range(2))
        append_window_cuda(one, kv, meta, codec=CODEC, norm=norm)
        append_window_cuda(two, norm_window_cuda(kv, norm, meta.positions), meta, codec=CODEC)
        assert same_bytes(one, two)


def test_a_normed_row_does_not_depend_on_the_batch(device):
    meta, numbers = make_step(Plan([(40, 60), (3, 1)]), device)
    kv, norm = values((meta.num_tokens, HEAD_DIM), device, 2).bfloat16(), window_norm(device)
    whole, single = (window_pool(numbers, Guarded(device)) for _ in range(2))
    append_window_cuda(whole, kv, meta, codec=CODEC, norm=norm)
    for token in range(meta.num_tokens):
        request = int(meta.token_to_req[token])
        position = int(meta.positions[token])
        alone, _ = make_step(Plan([(position, 1)]), device)
        alone.slots.copy_(meta.slots[request : request + 1])
        append_window_cuda(single, kv[token : token + 1], alone, codec=CODEC, norm=norm)
    assert same_bytes(whole, single)


def test_a_captured_normed_append_equals_an_eager_one(device):
    start = [0, 1, 60, 126, 127, 500]
    numbers = make_step(Plan([(n + 40, 1) for n in start]), device)[1]
    meta = make_step(Plan([(n, 1) for n in start]), device)[0]
    kv, norm = values((len(start), HEAD_DIM), device, 2).bfloat16(), window_norm(device)
    graphed, eager = (window_pool(numbers, Guarded(device)) for _ in range(2))
    append_window_cuda(eager.clone(), kv, meta, codec=CODEC, norm=norm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_window_cuda(graphed, kv, meta, codec=CODEC, norm=norm)
    for at in range(40):
        now = make_step(Plan([(n + at, 1) for n in start]), device)[0]
        for field in ("prefix_lens", "seq_lens", "positions"):
            getattr(meta, field).copy_(getattr(now, field))
        meta.token_to_req.copy_(now.token_to_req)
        if at % 3 == 0:  # one request pauses: a padded row
            meta.token_to_req[2] = -1
            meta.positions[2] = 0
        kv.copy_(values(kv.shape, device, 100 + at))
        graph.replay()
        append_window_cuda(eager, kv, meta, codec=CODEC, norm=norm)
        assert same_bytes(graphed, eager)


def test_append_window_reference_norms_like_the_model():
    """On a CPU: the same bytes as norm and rotation by the model's own functions before it."""
    meta, numbers = make_step(Plan([(0, 9), (126, 4)], pad_tokens=2), torch.device("cpu"))
    kv, norm = values((meta.num_tokens, HEAD_DIM), torch.device("cpu"), 2), window_norm("cpu", torch.float32)
    got, want = (window_pool(numbers, Guarded(torch.device("cpu"))) for _ in range(2))
    append_window(got, kv, meta, codec=CODEC, norm=norm)
    before = apply_rope(rms_norm(kv, norm.weight, norm.eps), norm.rope, meta.positions)
    append_window(want, before, meta, codec=CODEC)
    assert same_bytes(got, want)


def test_append_window_skips_tokens_of_requests_that_do_not_exist(device):
    meta, numbers = make_step(Plan([(5, 1)], pad_requests=1, pad_tokens=3), device)
    meta.token_to_req[1:] = torch.tensor([2, 3, 7], dtype=torch.int32, device=device)
    guard = Guarded(device)
    kv = values((meta.num_tokens, HEAD_DIM), device, 3)
    got = window_pool(numbers, guard)
    append_window_cuda(got, kv, meta, codec=CODEC)
    want = window_pool(numbers, guard)
    meta.token_to_req[1:] = -1
    append_window(want, kv, meta, codec=CODEC)
    assert same_bytes(got, want)
    guard.check()


def test_append_window_beyond_4_gib(device):
    slots = 2**32 // SLOT_BYTES + 40
    window = torch.empty(WINDOW_GROUPS * slots, MAIN_FP8.group_bytes, dtype=torch.uint8, device=device)
    meta, _ = make_step(Plan([(0, 128), (300, 200)]), device)
    meta.slots.copy_(torch.tensor([slots - 2, slots - 1], dtype=torch.int32))
    tail = window[-2 * WINDOW_GROUPS - 2 :]
    tail.fill_(255)
    kv = values((meta.num_tokens, HEAD_DIM), device, 4)
    append_window_cuda(window, kv, meta, codec=CODEC)
    small = torch.full_like(tail, 255)
    meta.slots.copy_(torch.tensor([1, 2], dtype=torch.int32))
    append_window(small, kv, meta, codec=CODEC)
    assert same_bytes(tail, small)


# copy_state


def state_tensors(guard: Guarded, layers: int, csa_layers: int, slots: int):
    windows = guard.empty((layers, slots, SLOT_BYTES), torch.uint8)
    overlaps = guard.empty((csa_layers, slots, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM), torch.float32)
    generator = torch.Generator(device=guard.device).manual_seed(0)
    for t in (windows, overlaps.view(torch.uint8)):
        t.random_(0, 256, generator=generator)
    return windows, overlaps


PAIRS = {
    "none": [],
    "none due": [(-1, -1)] * 9,
    "one": [(1, 2)],
    "half masked": [(1, -1), (-1, 3), (2, 9), (4, 5), (-1, -1)],
    "one source for many": [(3, 4), (3, 5), (3, 6)],
    "many": [(i, 400 + i) if i % 3 else (-1, 400 + i) for i in range(1, 400)],
    "more than a thread block lists": [(1 + i % 7, 100 + i) if i > 590 else (-1, -1) for i in range(600)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_copy_state_copies_the_references_bytes(device, name):
    pairs = PAIRS[name]
    slots = 1 + max([12, *(max(p) for p in pairs)])
    layers, csa_layers = (1, 1) if slots > 100 else (5, 2)
    guard = Guarded(device)
    windows, overlaps = state_tensors(guard, layers, csa_layers, slots)
    want = windows.clone(), overlaps.clone()
    src, dst = (torch.tensor([p[i] for p in pairs], dtype=torch.int64, device=device) for i in (0, 1))
    copy_state(*want, src, dst)
    for _ in range(2):
        copy_state_cuda(windows, overlaps, src, dst)
        assert same_bytes(windows, want[0])
        assert same_bytes(overlaps, want[1])
    guard.check()


def test_copy_state_without_csa_layers(device):
    guard = Guarded(device)
    windows, overlaps = state_tensors(guard, 2, 0, 4)
    src, dst = torch.tensor([1], device=device), torch.tensor([3], device=device)
    copy_state_cuda(windows, overlaps, src, dst)
    assert same_bytes(windows[:, 1], windows[:, 3])
    assert not same_bytes(windows[:, 1], windows[:, 2])


def test_copy_state_skips_slots_outside_the_pool(device):
    guard = Guarded(device)
    windows, overlaps = state_tensors(guard, 2, 1, 4)
    before = windows.clone(), overlaps.clone()
    src, dst = torch.tensor([1, 4, 2**40], device=device), torch.tensor([4, 2, 3], device=device)
    copy_state_cuda(windows, overlaps, src, dst)
    assert same_bytes(windows, before[0]) and same_bytes(overlaps, before[1])
    guard.check()


def test_copy_state_beyond_4_gib(device):
    slots = 2**32 // SLOT_BYTES + 40
    windows = torch.empty(1, slots, SLOT_BYTES, dtype=torch.uint8, device=device)
    overlaps = torch.zeros(1, slots, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM, device=device)
    windows[0, 5].random_(0, 256)
    windows[0, -3:] = 0
    overlaps[0, 5].normal_()
    last = torch.tensor([slots - 2], device=device)
    copy_state_cuda(windows, overlaps, torch.tensor([5], device=device), last)
    assert same_bytes(windows[0, -2], windows[0, 5]) and same_bytes(overlaps[0, -2], overlaps[0, 5])
    assert not windows[0, -1].any() and not windows[0, -3].any()
    back = torch.tensor([6], device=device)
    copy_state_cuda(windows, overlaps, last, back)
    assert same_bytes(windows[0, 6], windows[0, 5])


def test_a_ring_row_is_position_modulo_128(device):
    meta, numbers = make_step(Plan([(1000, 1)]), device)
    guard = Guarded(device)
    pool = window_pool(numbers, guard)
    append_window_cuda(pool, values((1, HEAD_DIM), device, 0), meta, codec=CODEC)
    rows = CODEC.rows_of(pool)[0].flatten(0, 1)
    written = (rows != 255).any(dim=1).nonzero().flatten().tolist()
    assert written == [int(meta.slots[0]) * WINDOW + 1000 % WINDOW]
