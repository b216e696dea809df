"""flush on a GPU: state bytes equal the torch reference's, entries lie within one quantisation step of them.

The reference pools in float64, the kernels in float32: a value next to a rounding boundary may take the other code,
and nothing else may differ.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_steps import (
    POISON_BYTE,
    Guarded,
    Numbers,
    Plan,
    assert_rows_close,
    csa_buffers,
    hca_buffers,
    make_step,
    same_bytes,
)

from sglang_dsv4.formats import index_codec, main_codec
from sglang_dsv4.geometry import INDEX_FP4, INDEX_FP8, MAIN_FP8, RowLayout
from sglang_dsv4.ops.flush import flush_csa, flush_csa_cuda, flush_hca, flush_hca_cuda

CODEC = main_codec(MAIN_FP8)
LAYOUTS = {"mxfp4 keys": INDEX_FP4, "fp8 keys": INDEX_FP8}

CSA_PLANS = {
    "every phase and count": Plan([(p, n) for p in range(18) for n in range(1, 14)]),
    "page edges": Plan([(p, n) for p in (123, 124, 127, 128, 129, 131, 255) for n in (1, 4, 5, 130)], seed=1),
    "page of 256": Plan([(250, 20), (255, 1), (256, 300), (0, 513)], page=256, seed=2),
    "decode of 512": Plan([(i, 1) for i in range(512)], seed=3),
    "empty and padded": Plan([(3, 0), (3, 1), (0, 0), (7, 1)], pad_requests=3, pad_tokens=9, seed=4),
    "only padding": Plan([], pad_requests=2, pad_tokens=4),
    "nothing completes": Plan([(0, 1), (4, 2), (9, 1), (128, 3)], seed=5),
    "snapshots": Plan(
        [(0, 300), (256, 128), (100, 1), (0, 8192)],
        pad_requests=1,
        pad_tokens=2,
        snapshots={0: [(128, 6), (256, 5)], 1: [(384, 7)], 3: [(8064, 8)]},
        seed=6,
    ),
}
HCA_PLANS = {
    "every phase": Plan(
        [(p, n) for p in (0, 1, 3, 63, 126, 127, 128, 129, 200, 255) for n in (1, 2, 5, 127, 128, 129, 257)]
    ),
    "page of 256": Plan([(250, 20), (255, 1), (256, 300), (0, 513)], page=256, seed=2),
    "decode of 512": Plan([(i, 1) for i in range(512)], seed=3),
    "all complete at once": Plan([(127 + 128 * (i % 3), 1) for i in range(300)], seed=7),
    "empty and padded": Plan([(127, 0), (127, 1), (0, 0), (7, 1)], pad_requests=3, pad_tokens=9, seed=4),
    "only padding": Plan([], pad_requests=2, pad_tokens=4),
    "long prompts": Plan([(0, 4100), (77, 4000)], seed=8),
}


def run_csa(plan: Plan, layout: RowLayout, device: torch.device, dtype: torch.dtype = torch.float32):
    meta, numbers = make_step(plan, device)
    guard = Guarded(device)
    got = csa_buffers(meta, numbers, layout, guard, seed=plan.seed)
    got.main_kv_score, got.index_kv_score = got.main_kv_score.to(dtype), got.index_kv_score.to(dtype)
    want = got.copy(guard)
    codecs = {"codec": CODEC, "index_codec": index_codec(layout)}
    flush_csa(*want.arguments(), meta, **codecs)
    flush_csa_cuda(*got.arguments(), meta, **codecs)
    guard.check()
    return got, want, codecs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CSA_PLANS)
def test_flush_csa_agrees_with_the_reference(device, name, layout):
    got, want, codecs = run_csa(CSA_PLANS[name], LAYOUTS[layout], device)
    assert same_bytes(got.overlap, want.overlap)
    assert same_bytes(got.tail, want.tail)
    assert_rows_close(CODEC, got.entries, want.entries)
    assert_rows_close(codecs["index_codec"], got.index_keys, want.index_keys)


def test_flush_csa_takes_bfloat16_projections(device):
    got, want, codecs = run_csa(CSA_PLANS["every phase and count"], INDEX_FP4, device, torch.bfloat16)
    assert same_bytes(got.tail, want.tail) and same_bytes(got.overlap, want.overlap)
    assert_rows_close(CODEC, got.entries, want.entries)
    assert_rows_close(codecs["index_codec"], got.index_keys, want.index_keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_may_be_columns_of_one_product(device, dtype):
    """kv, queries and both compressors' projections stand in one row of a GEMM's result."""
    meta, numbers = make_step(Plan([(p, n) for p in range(6) for n in (1, 5, 140)], pad_tokens=3), device)
    results = []
    for sliced in (False, True):
        guard = Guarded(device)
        csa = csa_buffers(meta, numbers, INDEX_FP4, guard)
        hca = hca_buffers(meta, numbers, guard)
        parts = [csa.main_kv_score.to(dtype), csa.index_kv_score.to(dtype), hca.kv_score.to(dtype)]
        if sliced:
            columns = 32 + sum(p.shape[1] for p in parts)
            wide = torch.full((meta.num_tokens, columns), torch.nan, device=device, dtype=dtype)
            at = 8
            for i, part in enumerate(parts):
                wide[:, at : at + part.shape[1]] = part
                parts[i] = wide[:, at : at + part.shape[1]]
                at += part.shape[1] + 8
            assert not parts[0].is_contiguous()
        csa.main_kv_score, csa.index_kv_score, hca.kv_score = parts
        flush_csa_cuda(*csa.arguments(), meta, codec=CODEC, index_codec=index_codec(INDEX_FP4))
        flush_hca_cuda(*hca.arguments(), meta, codec=CODEC)
        guard.check()
        results.append([*csa.written().values(), *hca.written().values()])
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HCA_PLANS)
def test_flush_hca_agrees_with_the_reference(device, name, dtype):
    plan = HCA_PLANS[name]
    meta, numbers = make_step(plan, device)
    guard = Guarded(device)
    got = hca_buffers(meta, numbers, guard, seed=plan.seed)
    got.kv_score = got.kv_score.to(dtype)
    want = got.copy(guard)
    flush_hca(*want.arguments(), meta, codec=CODEC)
    flush_hca_cuda(*got.arguments(), meta, codec=CODEC)
    guard.check()
    assert same_bytes(got.tail, want.tail)
    assert_rows_close(CODEC, got.entries, want.entries)


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(p, 1) for p in range(260)], id="one token in every phase"),
        pytest.param([(0, n) for n in range(1, 400, 7)], id="first chunks of any length"),
        pytest.param([(4 * b, n) for b in range(70) for n in (1, 2, 3)], id="inside a block"),
    ],
)
def test_a_step_run_twice_writes_the_same_bytes(device, requests):
    """A decode step and a first chunk overwrite no state row that they read."""
    meta, numbers = make_step(Plan(requests), device)
    guard = Guarded(device)
    csa, hca = csa_buffers(meta, numbers, INDEX_FP4, guard), hca_buffers(meta, numbers, guard)
    seen = []
    for _ in range(2):
        flush_csa_cuda(*csa.arguments(), meta, codec=CODEC, index_codec=index_codec(INDEX_FP4))
        flush_hca_cuda(*hca.arguments(), meta, codec=CODEC)
        seen.append([v.clone() for v in (*csa.written().values(), *hca.written().values())])
    assert all(same_bytes(a, b) for a, b in zip(*seen, strict=True))


def csa_sequence(cuts, device, total=701, seed=0):
    """Entries, keys and state of one request whose `total` tokens arrive in steps that end at `cuts`."""
    guard = Guarded(device)
    whole, numbers = make_step(Plan([(0, total)], seed=seed), device)
    buffers = csa_buffers(whole, numbers, INDEX_FP4, guard, seed=seed, poison=True)
    tail = hca_buffers(whole, numbers, guard, seed=seed, poison=True)
    start = 0
    for end in [*cuts, total]:
        meta, _ = make_step(Plan([(start, end - start)], pad_requests=1, pad_tokens=2, seed=seed), device)
        meta.page_table[:1] = whole.page_table[:, : meta.page_table.shape[1]]
        inputs = [torch.cat([x[start:end], x[:2]]) for x in (buffers.main_kv_score, buffers.index_kv_score)]
        step = replace(buffers, main_kv_score=inputs[0], index_kv_score=inputs[1])
        flush_csa_cuda(*step.arguments(), meta, codec=CODEC, index_codec=index_codec(INDEX_FP4))
        kv_score = torch.cat([tail.kv_score[start:end], tail.kv_score[:2]])
        flush_hca_cuda(tail.params, kv_score, tail.tail, tail.entries, meta, codec=CODEC)
        start = end
    guard.check()
    return buffers, tail


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129, 256, "random"])
def test_entries_do_not_depend_on_how_the_prompt_was_cut(device, chunk):
    """From NaN-poisoned state: nothing stale is read, and every stored byte equals that of one long step."""
    total = 701
    rng = random.Random(5)
    cuts, at = [], 0
    while True:
        at += rng.randint(1, 40) if chunk == "random" else chunk
        if at >= total:
            break
        cuts.append(at)
    csa, hca = csa_sequence(cuts, device, total)
    whole_csa, whole_hca = csa_sequence([], device, total)
    assert same_bytes(csa.entries, whole_csa.entries)
    assert same_bytes(csa.index_keys, whole_csa.index_keys)
    assert same_bytes(hca.entries, whole_hca.entries)
    rows = (CODEC.rows_of(csa.entries)[0] != POISON_BYTE).any(-1)
    assert int(rows.sum()) == total // 4
    assert torch.isfinite(CODEC.decode(*(t[rows] for t in CODEC.rows_of(csa.entries)))).all()


def behind(x: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor that ends with `x` after `count` rows that nothing looks at."""
    big = torch.empty(count + x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
    big[count:] = x
    return big


def rows_in_4_gib(x: torch.Tensor) -> int:
    return 2**32 // (x[0].numel() * x.element_size()) + 1


def shifted_step(plan: Plan, device: torch.device, *, pages: int, slots: int, rows: int):
    meta, _ = make_step(plan, device)
    meta.page_table += torch.where(meta.page_table < 1 << 20, pages, 0).int()
    meta.slots += slots
    meta.req_rows += rows
    return meta


def test_flush_csa_beyond_4_gib(device):
    """State rows, slots, request rows and pages whose byte offsets pass 2^32."""
    plan = Plan([(126, 5), (3, 1), (130, 200)], seed=9)
    meta, numbers = make_step(plan, device)
    near = csa_buffers(meta, numbers, INDEX_FP4, Guarded(device))
    groups = rows_in_4_gib(near.index_keys)
    slots, rows = rows_in_4_gib(near.overlap), rows_in_4_gib(near.tail)
    far = replace(
        near,
        overlap=behind(near.overlap, slots),
        tail=behind(near.tail, rows),
        entries=behind(near.entries, groups),
        index_keys=behind(near.index_keys, groups),
    )
    codecs = {"codec": CODEC, "index_codec": index_codec(INDEX_FP4)}
    flush_csa_cuda(*near.arguments(), meta, **codecs)
    shifted = shifted_step(plan, device, pages=2 * groups, slots=slots, rows=rows)
    flush_csa_cuda(*far.arguments(), shifted, **codecs)
    for name, value in near.written().items():
        assert same_bytes(far.written()[name][-value.shape[0] :], value), name


def test_flush_hca_beyond_4_gib(device):
    plan = Plan([(126, 5), (3, 1), (130, 200)], seed=9)
    meta, numbers = make_step(plan, device)
    near = hca_buffers(meta, numbers, Guarded(device))
    groups, rows = rows_in_4_gib(near.entries), rows_in_4_gib(near.tail)
    far = replace(near, tail=behind(near.tail, rows), entries=behind(near.entries, groups))
    flush_hca_cuda(*near.arguments(), meta, codec=CODEC)
    shifted = shifted_step(plan, device, pages=64 * groups, slots=0, rows=rows)
    flush_hca_cuda(*far.arguments(), shifted, codec=CODEC)
    for name, value in near.written().items():
        assert same_bytes(far.written()[name][-value.shape[0] :], value), name


def test_a_page_that_the_pool_does_not_have_is_not_written(device):
    meta, numbers = make_step(Plan([(3, 1), (7, 1)]), device)
    guard = Guarded(device)
    buffers = csa_buffers(meta, numbers, INDEX_FP4, guard)
    meta.page_table[0] = 1 << 20
    meta.page_table[1] = -1
    before = buffers.entries.clone(), buffers.index_keys.clone()
    flush_csa_cuda(*buffers.arguments(), meta, codec=CODEC, index_codec=index_codec(INDEX_FP4))
    assert same_bytes(buffers.entries, before[0]) and same_bytes(buffers.index_keys, before[1])
    guard.check()


def test_garbage_lengths_of_padded_requests_write_nothing(device):
    meta, numbers = make_step(Plan([(3, 1)], pad_requests=3, pad_tokens=5), device)
    guard = Guarded(device)
    csa = csa_buffers(meta, numbers, INDEX_FP4, guard)
    hca = hca_buffers(meta, Numbers(numbers.slots, numbers.rows, numbers.pages), guard)
    want_csa, want_hca = csa.copy(guard), hca.copy(guard)
    codecs = {"codec": CODEC, "index_codec": index_codec(INDEX_FP4)}
    flush_csa_cuda(*want_csa.arguments(), meta, **codecs)
    flush_hca_cuda(*want_hca.arguments(), meta, codec=CODEC)
    meta.seq_lens[1:] = 2**31 - 1
    meta.token_to_req[1:] = torch.tensor([4, 5, 6, 7, -1], dtype=torch.int32, device=device)
    flush_csa_cuda(*csa.arguments(), meta, **codecs)
    flush_hca_cuda(*hca.arguments(), meta, codec=CODEC)
    for got, want in ((csa, want_csa), (hca, want_hca)):
        assert all(same_bytes(v, want.written()[k]) for k, v in got.written().items())
    guard.check()
