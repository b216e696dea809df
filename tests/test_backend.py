"""The backend's translation of SGLang's batches, and the static tensors of captured decode steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layers import RATIOS, geometry, inputs, layer, part

from sglang_dsv4.attention.backend import SlotAttentionBackend
from sglang_dsv4.cache.handle import TailStore
from sglang_dsv4.cache.interior import InteriorSnapshot, InteriorSnapshots
from sglang_dsv4.cache.pages import PagePool
from sglang_dsv4.cache.slots import SlotPool, SlotReqToTokenPool, building

PAGE, CONTEXT = 128, 1024


class Mode:
    def __init__(self, name):
        self.name = name

    def is_decode(self):
        return self.name == "decode"

    def is_idle(self):
        return self.name == "idle"


class Served:
    """A backend over real pools with two requests whose pages lie in no order."""

    def __init__(self, context=CONTEXT):
        g = geometry()
        pool = SlotReqToTokenPool.__new__(SlotReqToTokenPool)
        pool.req_to_token = torch.zeros(4, CONTEXT, dtype=torch.int32)
        pool.req_index_to_mamba_index_mapping = torch.tensor([0, 5, 3, 0], dtype=torch.int32)
        pool.interior = InteriorSnapshots()
        pool.tails = TailStore(g, 4, "cpu")
        with building(g):
            pool.mamba_pool = SlotPool(size=8, mamba_layer_ids=list(range(len(RATIOS))), device="cpu")
        pages = PagePool(g, 16 * PAGE, "cpu")
        for store in (pool.tails, pool.mamba_pool.store, pages.store):
            store.poison()
        for row, order in ((1, (7, 2, 9)), (2, (4, 11, 1))):
            for i, page in enumerate(order):
                pool.req_to_token[row, i * PAGE : (i + 1) * PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
        self.pool = pool
        config = SimpleNamespace(context_len=context)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=pages, model_config=config)
        self.backend = SlotAttentionBackend(runner)
        self.params = [layer(r) for r in RATIOS]

    def layers(self, x):
        return [
            self.backend.forward(None, None, None, SimpleNamespace(params=p, layer_id=p.layer_id), None, inputs=x[i])
            for i, p in enumerate(self.params)
        ]

    def extend(self, rows, spans, **extra):
        fb = SimpleNamespace(
            forward_mode=Mode("extend"),
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            req_pool_indices_cpu=torch.tensor(rows),
            extend_prefix_lens_cpu=[a for a, _ in spans],
            extend_seq_lens_cpu=[b - a for a, b in spans],
            positions=torch.cat([torch.arange(a, b) for a, b in spans]),
            mamba_track_mask=None,
            mamba_track_indices=None,
            mamba_track_seqlens=None,
        )
        fb.__dict__.update(extra)
        self.backend.init_forward_metadata(fb)
        return fb


def decode_batch(rows, lens, track=None):
    return SimpleNamespace(
        forward_mode=Mode("decode"),
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        positions=torch.tensor(lens) - 1,
        mamba_track_mask=None if track is None else torch.tensor([t > 0 for t in track]),
        mamba_track_indices=None if track is None else torch.tensor(track),
    )


def tokens(x, *positions):
    """One token of each request, NaN for a padded row."""
    spans = [(p, p + 1) for p in positions]
    return [type(i)(*(_at(getattr(i, f), spans) for f in i.__dataclass_fields__)) for i in x]


def _at(t, spans):
    if not isinstance(t, torch.Tensor):
        return t
    return torch.cat([t[a:b] if a >= 0 else torch.full_like(t[:1], float("nan")) for a, b in spans])


def test_captured_decode_steps_equal_eager_ones_in_every_phase():
    x = [inputs(r, 400) for r in RATIOS]
    eager, static = Served(), Served()
    for served in (eager, static):
        served.extend([1, 2], [(0, 120), (0, 61)])
        served.layers([part(i, (0, 120), (0, 61)) for i in x])
    static.backend.init_cuda_graph_state(3, 3)
    static.backend.init_forward_metadata_out_graph(decode_batch([0, 0, 0], [1, 1, 1]), in_capture=True)
    captured = static.backend._step
    for step in range(75):
        lens = [121 + step, 62 + step]
        track = [6 if lens[0] == 128 else 0, 7 if lens[1] == 128 else 0]
        eager.backend.init_forward_metadata(decode_batch([1, 2], lens, track))
        expected = eager.layers(tokens(x, lens[0] - 1, lens[1] - 1))
        padded = decode_batch([1, 2, 0], [*lens, 1], [*track, 0])
        view = SimpleNamespace(**vars(padded))
        del view.mamba_track_mask  # SGLang's view of a replay lacks it
        static.backend.init_forward_metadata_out_graph(view)
        assert static.backend._step is captured
        static.backend.init_forward_metadata_in_graph(padded)  # a replay runs what was recorded here
        got = static.layers(tokens(x, lens[0] - 1, lens[1] - 1, -1))
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b[:2])
    for slot in (6, 7):
        a, b = eager.pool.mamba_pool.store, static.pool.mamba_pool.store
        assert torch.equal(a.slot_windows[:, slot], b.slot_windows[:, slot])
        assert torch.isfinite(b.overlaps[:, slot]).all()


def test_static_tensors_keep_their_addresses():
    served = Served()
    served.backend.init_cuda_graph_state(2, 2)
    served.backend.init_forward_metadata_out_graph(decode_batch([0, 0], [1, 1]), in_capture=True)
    meta = served.backend._step.meta
    before = {n: getattr(meta, n).data_ptr() for n in ("slots", "seq_lens", "page_table", "positions", "token_to_req")}
    served.backend.init_forward_metadata_out_graph(decode_batch([2, 1], [300, 7]))
    assert {n: getattr(served.backend._step.meta, n).data_ptr() for n in before} == before
    assert meta.slots.tolist() == [3, 5] and meta.seq_lens.tolist() == [300, 7]
    assert meta.page_table[0, :3].tolist() == [4, 11, 1]


@pytest.mark.parametrize("context,tokens", [(512, 512), (1 << 20, 16 * PAGE)])
def test_captured_steps_are_as_wide_as_the_longest_request_that_fits(context, tokens):
    served = Served(context)
    served.backend.init_cuda_graph_state(2, 2)
    served.backend.init_forward_metadata_out_graph(decode_batch([0, 0], [1, 1]), in_capture=True)
    step = served.backend._step
    assert step.max_seq_len == tokens
    assert step.meta.page_table.shape[1] == tokens // PAGE + 1


def test_rows_that_pad_a_decode_batch_belong_to_no_request():
    served = Served()
    served.backend.init_forward_metadata(decode_batch([1, 0], [5, 1], [3, 4]))
    step, (_, target) = served.backend._step, served.backend._snapshots
    assert step.meta.token_to_req.tolist() == [0, -1] and step.meta.seq_lens.tolist() == [5, 0]
    assert target.tolist() == [3, -1]


def test_interior_snapshots_join_the_last_one_and_absent_ones_are_masked():
    served = Served()
    served.pool.interior.add(2, InteriorSnapshot(128, torch.tensor([8])))
    served.extend(
        [1, 2],
        [(0, 130), (0, 300)],
        mamba_track_mask=torch.tensor([False, True]),
        mamba_track_indices=torch.tensor([4, 7]),
        mamba_track_seqlens=torch.tensor([-1, 256]),
    )
    meta = served.backend._step.meta
    assert meta.snapshot_slots.tolist() == [[-1, -1], [7, 8]]
    assert meta.snapshot_lens.tolist() == [[-1, -1], [256, 128]]


def test_a_padded_extend_batch_has_tokens_of_no_request():
    served = Served()
    served.extend([1], [(0, 6)], positions=torch.arange(10))
    assert served.backend._step.meta.token_to_req.tolist() == [0] * 6 + [-1] * 4


def test_an_idle_step_returns_zeros_and_writes_nothing():
    served = Served()
    x = [inputs(r, 2) for r in RATIOS]
    before = served.pool.mamba_pool.store.windows.clone()
    served.backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode("idle")))
    assert all((out == 0).all() for out in served.layers(x))
    assert torch.equal(before, served.pool.mamba_pool.store.windows)


@pytest.mark.parametrize("lens", [[1], [129], [1023]])
def test_decode_page_tables_cover_the_longest_request(lens):
    served = Served()
    served.backend.init_forward_metadata(decode_batch([1], lens))
    assert served.backend._step.meta.page_table.shape[1] == -(-lens[0] // PAGE)
