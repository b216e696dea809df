"""The operations against a whole-sequence oracle, and against themselves however a prompt is cut.

Everything runs over poisoned stores: NaN in any row that no token wrote would show in an output.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from harness import Stage
from layers import RATIOS, geometry, inputs, layer, part, run
from oracle import attention

from sglang_dsv4.geometry import WINDOW

TENSORS = ("q", "kv", "kv_score", "index_kv_score", "index_q", "index_weights")  # inputs of a CSA layer


def prefill_then_decode(ratio, tokens, cuts, *, store="fp8", page=128, seed=0):
    """Outputs of tokens fed as prefill chunks that end at `cuts`, then one by one."""
    stage = Stage(geometry(store=store, page=page), seed=seed)
    params, x = layer(ratio), inputs(ratio, tokens)
    request, outs, start = stage.admit(), [], 0
    for end in [*cuts, *range((cuts[-1] if cuts else 0) + 1, tokens + 1)]:
        step = stage.step([request], [end - start], decode=end - start == 1)
        outs.append(run(params, part(x, (start, end)), step))
        start = end
    return stage, request, torch.cat(outs)


def entry_bytes(stage, request, ratio):
    """Stored rows of all complete entries (and indexer keys) of a request, in order."""
    cache = stage.cache.layer(RATIOS.index(ratio))
    ids = torch.arange(request.length // ratio)
    step = stage.step([request], [0])
    rows = step.meta.entry_rows(torch.zeros_like(ids), ids, ratio)
    parts = [cache.codec.rows_of(cache.entries)[0][rows // 64, rows % 64]]
    parts.append(cache.codec.rows_of(cache.entries)[1][rows // 64, rows % 64])
    if ratio == 4:
        parts += [t[rows // 64, rows % 64] for t in cache.index_codec.rows_of(cache.index_keys)]
    return torch.cat([p.flatten(1) for p in parts], 1)


@pytest.mark.parametrize("store", ["fp32", "fp8"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_prefill_matches_the_whole_sequence_oracle(ratio, store):
    params, x = layer(ratio), inputs(ratio, 300)
    stage, request, out = prefill_then_decode(ratio, 300, [300], store=store)
    cache = stage.cache.layer(params.layer_id)
    expected = attention(params, x, cache.codec, cache.index_codec)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), expected.out, atol=2e-4, rtol=2e-4)
    if ratio:
        ids = torch.arange(300 // ratio)
        rows = stage.step([request], [0]).meta.entry_rows(torch.zeros_like(ids), ids, ratio)
        stored = cache.codec.gather(cache.entries, rows).double()
        torch.testing.assert_close(stored, expected.entries, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", RATIOS)
def test_decode_from_the_first_token_equals_one_prefill_bit_for_bit(ratio):
    _, _, whole = prefill_then_decode(ratio, 270, [270])
    stage, request, single = prefill_then_decode(ratio, 270, [])
    assert torch.equal(whole, single)
    if ratio:
        once, other, _ = prefill_then_decode(ratio, 270, [270])
        assert torch.equal(entry_bytes(stage, request, ratio), entry_bytes(once, other, ratio))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13])
def test_short_prompts_compress_their_first_blocks(ratio, length):
    params, x = layer(ratio), inputs(ratio, length)
    stage, _, out = prefill_then_decode(ratio, length, [length])
    cache = stage.cache.layer(params.layer_id)
    torch.testing.assert_close(
        out.double(), attention(params, x, cache.codec, cache.index_codec).out, atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129, 256])
def test_every_chunk_size_gives_the_same_rows_and_outputs(ratio, chunk):
    tokens = 20 if chunk == 1 else 520
    cuts = [*range(chunk, tokens, chunk), tokens]
    stage, request, out = prefill_then_decode(ratio, tokens, cuts)
    whole, other, expected = prefill_then_decode(ratio, tokens, [tokens])
    assert torch.equal(out, expected)
    if ratio:
        assert torch.equal(entry_bytes(stage, request, ratio), entry_bytes(whole, other, ratio))


@pytest.mark.parametrize("position", [126, 127, 128, 129, 255, 256, 257])
def test_window_spans_exactly_128_positions_including_the_query(position):
    stage = Stage(geometry())
    request = stage.admit()
    params, x = layer(0), inputs(0, position + 1)
    run(params, part(x, (0, position)), stage.step([request], [position]))
    changed = inputs(0, position + 1)
    outside = position - WINDOW
    if outside >= 0:
        changed.kv[outside] += 1000.0
    out = run(params, part(x, (position, position + 1)), stage.step([request], [1], decode=True))
    other = Stage(geometry())
    request = other.admit()
    run(params, part(changed, (0, position)), other.step([request], [position]))
    assert torch.equal(
        out, run(params, part(changed, (position, position + 1)), other.step([request], [1], decode=True))
    )
    changed.kv[max(0, outside + 1)] += 1000.0
    third = Stage(geometry())
    request = third.admit()
    run(params, part(changed, (0, position)), third.step([request], [position]))
    moved = run(params, part(changed, (position, position + 1)), third.step([request], [1], decode=True))
    assert not torch.equal(out, moved)


@pytest.mark.parametrize(
    "ratio, seen", [(4, {2: 0, 3: 1, 4: 1, 126: 31, 127: 32, 128: 32}), (128, {126: 0, 127: 1, 255: 2})]
)
def test_a_token_sees_complete_blocks_only_and_its_own_once_complete(ratio, seen):
    stage = Stage(geometry())
    step = stage.step([stage.admit()], [max(seen) + 1])
    visible = step.meta.visible_entries(ratio)
    assert {t: int(visible[t]) for t in seen} == seen


@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("ratio", RATIOS)
def test_resume_from_a_prefill_snapshot_is_bit_identical(ratio, page):
    tokens, at = 600, 256
    params, x = layer(ratio), inputs(ratio, tokens)
    _, _, cold = prefill_then_decode(ratio, tokens, [tokens], page=page)
    stage = Stage(geometry(page=page))
    first = stage.admit()
    slot = stage.new_slot()
    step = stage.step([first], [400], snapshots={0: [(at, slot)]})
    run(params, part(x, (0, 400)), step)
    pages = first.pages[: at // page]
    stage.retire(first)
    second = stage.admit(pages=pages, snapshot=slot, length=at)
    outs = [run(params, part(x, (at, 512)), stage.step([second], [512 - at]))]
    outs += [run(params, part(x, (t, t + 1)), stage.step([second], [1], decode=True)) for t in range(512, tokens)]
    assert torch.equal(torch.cat(outs), cold[at:])


@pytest.mark.parametrize("ratio", RATIOS)
def test_resume_from_a_decode_snapshot_is_bit_identical(ratio):
    tokens, params, x = 420, layer(ratio), inputs(ratio, 420)
    _, _, cold = prefill_then_decode(ratio, tokens, [tokens])
    stage = Stage(geometry())
    first = stage.admit()
    run(params, part(x, (0, 200)), stage.step([first], [200]))
    slot = None
    for t in range(200, 300):
        run(params, part(x, (t, t + 1)), stage.step([first], [1], decode=True))
        if first.length == 256:
            slot = stage.snapshot(first)
    second = stage.admit(pages=first.pages[:2], snapshot=slot, length=256)
    out = run(params, part(x, (256, tokens)), stage.step([second], [tokens - 256]))
    assert torch.equal(out, cold[256:])


@pytest.mark.parametrize("extra", [1, 2, 3, 4, 127, 128])
def test_a_fork_never_changes_the_snapshot_it_started_from(extra):
    params, x = layer(4), inputs(4, 256 + extra)
    stage = Stage(geometry())
    first, slot = stage.admit(), stage.new_slot()
    run(params, part(x, (0, 256)), stage.step([first], [256], snapshots={0: [(256, slot)]}))
    before = stage.slots.slot_windows[:, slot].clone(), stage.slots.overlaps[:, slot].clone()
    second = stage.admit(pages=first.pages[:2], snapshot=slot, length=256)
    run(params, part(x, (256, 256 + extra)), stage.step([second], [extra]))
    assert torch.equal(before[0], stage.slots.slot_windows[:, slot])
    assert torch.equal(before[1].view(torch.int32), stage.slots.overlaps[:, slot].view(torch.int32))


def test_dropping_the_overlap_rows_of_a_snapshot_would_change_the_next_entry():
    params, x = layer(4), inputs(4, 300)
    stage = Stage(geometry())
    first, slot = stage.admit(), stage.new_slot()
    run(params, part(x, (0, 256)), stage.step([first], [256], snapshots={0: [(256, slot)]}))
    outs = []
    for broken in (False, True):
        if broken:
            stage.slots.overlaps[:, slot] = 0.0
        fork = stage.admit(pages=first.pages[:2], snapshot=slot, length=256)
        outs.append(run(params, part(x, (256, 300)), stage.step([fork], [44])))
    assert not torch.equal(*outs)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_ragged_batch_with_padding_equals_each_request_alone(ratio):
    params = layer(ratio)
    lengths, counts = [0, 130, 5, 256], [300, 1, 7, 129]
    xs = [inputs(ratio, a + n, seed=i + 1) for i, (a, n) in enumerate(zip(lengths, counts, strict=True))]

    def prepared(stage, which):
        request = stage.admit()
        if lengths[which]:
            run(params, part(xs[which], (0, lengths[which])), stage.step([request], [lengths[which]]))
        return request

    together = Stage(geometry(), seed=3)
    requests = [prepared(together, i) for i in range(4)]
    step = together.step(requests, counts, padding=3)
    spans = [part(x, (a, a + n)) for x, a, n in zip(xs, lengths, counts, strict=True)]
    joined = type(spans[0])(
        *(
            getattr(spans[0], f)
            if not isinstance(getattr(spans[0], f), torch.Tensor)
            else torch.cat(
                [getattr(s, f) for s in spans] + [torch.full((3, *getattr(spans[0], f).shape[1:]), torch.nan)]
            )
            for f in spans[0].__dataclass_fields__
        )
    )
    out = run(params, joined, step)[: sum(counts)].split(counts)
    for i in range(4):
        alone = Stage(geometry(), seed=5)
        request = prepared(alone, i)
        assert torch.equal(out[i], run(params, spans[i], alone.step([request], [counts[i]])))


@pytest.mark.parametrize("ratio", RATIOS)
def test_padded_tokens_leave_every_byte_unchanged(ratio):
    stage = Stage(geometry())
    params = layer(ratio)
    cache = stage.cache.layer(params.layer_id)
    pools = [t for t in (cache.window, cache.entries, cache.index_keys, cache.overlap, cache.tail) if t is not None]
    before = [p.clone().view(torch.uint8) for p in pools]
    idle = stage.admit()
    for decode in (False, True):
        run(
            params,
            part(inputs(ratio, 1), (0, 0), padding=5),
            stage.step([idle], [0], padding=5, decode=decode),
        )
    for old, pool in zip(before, pools, strict=True):
        assert torch.equal(old, pool.view(torch.uint8))


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_same_step_twice_writes_the_same_bytes(ratio):
    stage = Stage(geometry())
    params, x = layer(ratio), inputs(ratio, 300)
    cache = stage.cache.layer(params.layer_id)
    request = stage.admit()
    run(params, part(x, (0, 121)), stage.step([request], [121]))
    for t in range(121, 300):
        step = stage.step([request], [1], decode=True)
        first = run(params, part(x, (t, t + 1)), step)
        pools = [t for t in (cache.window, cache.entries, cache.index_keys, cache.overlap, cache.tail) if t is not None]
        before = [p.clone().view(torch.uint8) for p in pools]
        assert torch.equal(first, run(params, part(x, (t, t + 1)), step))
        for old, pool in zip(before, pools, strict=True):
            assert torch.equal(old, pool.view(torch.uint8))


def test_requests_that_diverge_inside_a_block_share_earlier_entries_only():
    params, shared = layer(4), 258
    x, y = inputs(4, 300), inputs(4, 300)
    other = inputs(4, 300, seed=9)
    for f in TENSORS:
        getattr(y, f)[shared:] = getattr(other, f)[shared:]
    stage = Stage(geometry())
    first, slot = stage.admit(), stage.new_slot()
    run(params, part(x, (0, 300)), stage.step([first], [300], snapshots={0: [(256, slot)]}))
    rows_of_first = entry_bytes(stage, first, 4)
    second = stage.admit(pages=first.pages[:2], snapshot=slot, length=256)
    run(params, part(y, (256, 300)), stage.step([second], [44]))
    after, forked = entry_bytes(stage, first, 4), entry_bytes(stage, second, 4)
    assert torch.equal(rows_of_first, after)
    assert torch.equal(after[:64], forked[:64])
    assert not torch.equal(after[64], forked[64])


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_block_completed_across_a_page_boundary_lands_once_in_the_last_row_of_the_old_page(ratio):
    params, x = layer(ratio), inputs(ratio, 258)
    stage = Stage(geometry())
    request = stage.admit()
    cache = stage.cache.layer(params.layer_id)
    run(params, part(x, (0, 126)), stage.step([request], [126]))
    written = []
    for t in range(126, 258):
        before = cache.entries.clone()
        run(params, part(x, (t, t + 1)), stage.step([request], [1], decode=True))
        if not torch.equal(before, cache.entries):
            written.append(t)
    assert written == [t for t in range(126, 258) if (t + 1) % ratio == 0]


def test_running_requests_never_share_state():
    params = layer(4)
    a, b = inputs(4, 300, seed=1), inputs(4, 300, seed=2)
    stage = Stage(geometry())
    first, slot = stage.admit(), stage.new_slot()
    run(params, part(a, (0, 256)), stage.step([first], [256], snapshots={0: [(256, slot)]}))
    forks = [stage.admit(pages=first.pages[:2], snapshot=slot, length=256) for _ in range(2)]
    outs = [[], []]
    for t in range(256, 300):
        step = stage.step(forks, [1, 1], decode=True)
        x = replace(a, **{f: torch.cat([getattr(s, f)[t : t + 1] for s in (a, b)]) for f in TENSORS})
        for collected, row in zip(outs, run(params, x, step), strict=True):
            collected.append(row)
    alone = Stage(geometry())
    request = alone.admit()
    run(params, part(a, (0, 256)), alone.step([request], [256]))
    for x, got in ((a, outs[0]),):
        expected = [
            run(params, part(x, (t, t + 1)), alone.step([request], [1], decode=True))[0] for t in range(256, 300)
        ]
        assert torch.equal(torch.stack(got), torch.stack(expected))


@pytest.mark.parametrize("sink", [float("inf"), float("-inf"), 0.0])
def test_sink_of_any_size_leaves_finite_outputs(sink):
    stage = Stage(geometry())
    params, x = layer(0), inputs(0, 5)
    params.sink = torch.full_like(params.sink, sink)
    out = run(params, x, stage.step([stage.admit()], [5]))
    assert torch.isfinite(out).all()
    assert bool((out == 0).all()) == (sink == float("inf"))


@pytest.mark.parametrize("entries", [23, 24, 25, 47, 48, 49])
def test_topk_equals_a_stable_sort_around_every_bound(entries):
    stage, topk = Stage(geometry()), 24
    step = stage.step([stage.admit()], [entries * 4])
    g = torch.Generator().manual_seed(entries)
    scores = torch.randint(0, 9, (entries * 4, entries), generator=g).float()
    got = stage.ops.index_topk(scores, step.meta, topk=topk, physical=False)
    for t in random.Random(0).sample(range(entries * 4), 40):
        visible = (t + 1) // 4
        best = sorted(range(visible), key=lambda i: (-float(scores[t, i]), i))[:topk]
        assert got[t].tolist() == sorted(best) + [-1] * (topk - len(best))


def test_topk_of_workspace_rows_adds_where_a_requests_entries_begin_and_writes_in_place():
    stage = Stage(geometry())
    step = stage.step([stage.admit(), stage.admit()], [40, 24])
    scores = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    want = stage.ops.index_topk(scores, step.meta, topk=4, physical=False)
    first = torch.tensor([300] * 40 + [900] * 24, dtype=torch.int32)
    wide = torch.full((64, 12), 77, dtype=torch.int32)
    got = stage.ops.index_topk(scores, step.meta, topk=4, physical=False, first=first, out=wide[:, 5:9])
    assert got.data_ptr() == wide[:, 5:].data_ptr()
    assert torch.equal(got, torch.where(want >= 0, want + first[:, None], want))
    assert bool((wide[:, :5] == 77).all()) and bool((wide[:, 9:] == 77).all())


@pytest.mark.parametrize("room", [0, 24, 128])
def test_index_rows_are_padded_to_what_the_prefill_kernel_takes(room):
    """Otherwise every layer copies them."""
    stage = Stage(geometry())
    step = stage.step([stage.admit(), stage.admit()], [40, 24])
    plan = step.plan(4)
    indices = plan.indices(step.meta, room=room)
    assert indices.shape[1] % 128 == 0 and indices.shape[1] >= 128 + room and indices.dtype == torch.int32
    assert torch.equal(indices[:, :128], plan.window_indices(step.meta))
    assert bool((indices[:, 128:] == -1).all())
    ids = torch.arange(10, dtype=torch.int32).expand(64, 10)
    entries = plan.indices(step.meta, ids)
    assert torch.equal(entries[:, 128:138], plan.first_entries(step.meta)[:, None] + ids)
    assert entries.shape[1] == 256 and bool((entries[:, 138:] == -1).all())


def test_topk_never_reads_scores_of_invisible_entries():
    stage = Stage(geometry())
    step = stage.step([stage.admit()], [40])
    scores = torch.zeros(40, 10)
    visible = step.meta.visible_entries(4)
    scores[torch.arange(10) >= visible[:, None]] = float("nan")
    got = stage.ops.index_topk(scores, step.meta, topk=24, physical=False)
    assert all(row.tolist() == list(range(int(v))) + [-1] * (24 - int(v)) for row, v in zip(got, visible, strict=True))


def test_index_keys_of_two_layers_keep_their_own_scales():
    stage = Stage(geometry())
    codec = stage.cache.layer(1).index_codec
    other = torch.zeros_like(stage.entries.keys[0])
    rows = torch.arange(3)
    codec.scatter(stage.entries.keys[0], rows, torch.randn(3, 128))
    codec.scatter(other, rows, 1000 * torch.randn(3, 128))
    assert codec.gather(other, rows).abs().max() > 50 * codec.gather(stage.entries.keys[0], rows).abs().max()


def test_restoring_one_request_leaves_every_other_request_as_it_was():
    params, x = layer(4), inputs(4, 400)
    stage = Stage(geometry())
    first, slot = stage.admit(), stage.new_slot()
    run(params, part(x, (0, 256)), stage.step([first], [256], snapshots={0: [(256, slot)]}))
    live = stage.admit()
    run(params, part(x, (0, 261)), stage.step([live], [261]))
    expected = Stage(geometry())
    twin = expected.admit()
    run(params, part(x, (0, 261)), expected.step([twin], [261]))
    stage.admit(pages=first.pages[:2], snapshot=slot, length=256)
    for t in range(261, 280):
        token = part(x, (t, t + 1))
        out = run(params, token, stage.step([live], [1], decode=True))
        assert torch.equal(out, run(params, token, expected.step([twin], [1], decode=True)))


@pytest.mark.parametrize("ratio, kept", [(4, 64), (128, 2)])
def test_resuming_from_an_earlier_snapshot_hides_entries_that_were_computed_beyond_it(ratio, kept):
    params, x, other = layer(ratio), inputs(ratio, 700), inputs(ratio, 300, seed=5)
    stage = Stage(geometry())
    first, slot = stage.admit(), stage.new_slot()
    run(params, part(x, (0, 700)), stage.step([first], [700], snapshots={0: [(256, slot)]}))
    fork = stage.admit(pages=list(first.pages), snapshot=slot, length=256)
    for f in x.__dataclass_fields__:
        if isinstance(getattr(x, f), torch.Tensor):
            getattr(other, f)[:256] = getattr(x, f)[:256]
    step = stage.step([fork], [1])
    assert int(step.meta.visible_entries(ratio)[0]) == kept
    fork.length, fork.pages = 256, first.pages[:2]
    out = run(params, part(other, (256, 300)), stage.step([fork], [44]))
    alone = Stage(geometry())
    whole = run(params, part(other, (0, 300)), alone.step([alone.admit()], [300]))
    assert torch.equal(out, whole[256:])


def test_a_context_shorter_than_the_window_already_has_its_entries():
    stage, request, _ = prefill_then_decode(4, 31, [31])
    assert entry_bytes(stage, request, 4).shape[0] == 7
    cache = stage.cache.layer(RATIOS.index(4))
    rows = stage.step([request], [0]).meta.entry_rows(torch.zeros(7).long(), torch.arange(7), 4)
    assert torch.isfinite(cache.codec.gather(cache.entries, rows)).all()


def test_scattering_a_sentinel_row_leaves_the_last_row_of_a_pool_alone():
    stage = Stage(geometry())
    cache = stage.cache.layer(0)
    before = cache.window.clone()
    cache.codec.scatter(cache.window, torch.tensor([-1]), torch.randn(1, 512))
    assert torch.equal(before, cache.window)
