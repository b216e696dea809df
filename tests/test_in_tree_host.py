"""The host around SGLang's in-tree model, as far as it can be seen without a GPU: what it hands to the attention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import layers
import pytest
import torch
from harness import Stage
from sglang.srt.layers.attention.dsv4.compressor import Compressor

from sglang_dsv4.models import in_tree_host


def compressor(ratio: int, ape: torch.Tensor) -> Compressor:
    """An in-tree compressor with these position biases, loaded as SGLang's loader does."""
    made = Compressor.__new__(Compressor)
    torch.nn.Module.__init__(made)
    made.ratio, made.overlap, made.head_dim = ratio, ratio == 4, 8
    made.ape = torch.nn.Parameter(torch.empty_like(ape), requires_grad=False)
    made.ape_converted = False
    made.load_ape_weight(made.ape, ape)
    return made


@pytest.mark.parametrize("ratio", [4, 128])
def test_position_biases_come_back_in_the_checkpoint_s_order(ratio):
    ape = torch.randn(ratio, 16 if ratio == 4 else 8)
    loaded = compressor(ratio, ape)
    assert ratio != 4 or not torch.equal(loaded.ape, ape)  # the in-tree loader does reorder them
    out = torch.empty_like(ape)
    in_tree_host.plain_ape(loaded, out)
    assert torch.equal(out, ape)


def test_position_biases_that_were_not_reordered_stay_as_they_are():
    ape = torch.randn(4, 16)
    loaded = compressor(4, ape)
    loaded.ape.data.copy_(ape)
    loaded.ape_converted = False
    out = torch.empty_like(ape)
    in_tree_host.plain_ape(loaded, out)
    assert torch.equal(out, ape)


def test_rotation_tables_reach_as_far_as_the_served_context_and_layers_of_a_kind_share_one(monkeypatch):
    monkeypatch.setattr(in_tree_host, "process_model_config", lambda: SimpleNamespace(context_len=300))
    monkeypatch.setattr(in_tree_host, "_rope_tables", {})
    angle = torch.outer(torch.arange(1000.0), torch.arange(1, 33) / 40)
    of_base = [
        SimpleNamespace(freqs_cis=torch.polar(torch.ones_like(angle), angle * base), rope_kwargs={"base": base})
        for base in (1, 1, 2)
    ]
    first, second, third = map(in_tree_host.rope_rows, of_base)
    assert first is second and first is not third
    assert first.shape == (428, 64)
    assert torch.allclose(first, torch.cat([angle.cos(), angle.sin()], 1)[:428], atol=1e-6)
    assert torch.allclose(third[100], torch.cat([(2 * angle[100]).cos(), (2 * angle[100]).sin()]), atol=1e-5)


def test_the_in_tree_module_builds_its_own_layers_again_after_ours():
    own = in_tree_host.in_tree.DeepseekV4DecoderLayer
    with pytest.raises(RuntimeError, match="while building"), in_tree_host._slot_layers():
        assert in_tree_host.in_tree.DeepseekV4DecoderLayer is in_tree_host.SlotDecoderLayer
        raise RuntimeError("while building")
    assert in_tree_host.in_tree.DeepseekV4DecoderLayer is own


def test_window_rows_are_normed_and_rotated_in_float32():
    kv, weight = torch.randn(5, 512).bfloat16(), torch.rand(512) + 0.5
    angle = torch.rand(40, 32)
    layer = SimpleNamespace(
        eps=1e-6,
        kv_norm=SimpleNamespace(weight=weight.bfloat16()),
        attn_mqa=SimpleNamespace(params=SimpleNamespace(rope=torch.cat([angle.cos(), angle.sin()], 1))),
    )
    positions = torch.tensor([0, 3, 39, 7, 7])
    projections = in_tree_host.LayerProjections(layer, None, None, positions)
    projections.kv = kv
    wide = kv.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.bfloat16().double()
    pairs = torch.view_as_complex(expected[:, -64:].reshape(5, 32, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(5, 32).double(), angle[positions].double()))
    expected[:, -64:] = turned.flatten(1)
    raw, norm = projections.raw_window()
    made = norm.apply(raw, positions)
    assert made.dtype == torch.float32
    assert (made - expected).abs().max() < 3e-6


# Two ranks: what in-tree shards (heads, their sinks, output groups) and what each holds whole (indexer, compressors).

HEADS, GROUPS, RANK_COUNT = 4, 2, 2


def of_rank(rank, sink, wo_a, lora):
    """The attributes of an in-tree layer of one of two ranks that the host reads; weights sliced as its loader does."""
    heads, groups = HEADS // RANK_COUNT, GROUPS // RANK_COUNT
    return SimpleNamespace(
        attn_tp_rank=rank,
        n_local_heads=heads,
        n_local_groups=groups,
        o_lora_rank=lora,
        wo_a_fp8=False,
        wo_a=SimpleNamespace(weight=wo_a.chunk(RANK_COUNT)[rank]),
        attn_sink=SimpleNamespace(data=sink),  # whole on every rank
        sink_local=torch.full((heads,), float("nan")),
        compressor=None,
        indexer=None,
    )


def test_each_rank_takes_the_sinks_and_output_groups_of_its_own_heads():
    lora = 3
    sink, wo_a, out = torch.randn(HEADS), torch.randn(GROUPS * lora, HEADS // GROUPS * 512), torch.randn(5, HEADS, 512)
    parts = []
    for rank in range(RANK_COUNT):
        layer = of_rank(rank, sink, wo_a, lora)
        in_tree_host.SlotMQALayer.refresh_attn_sink_cache(layer)
        own = slice(rank * layer.n_local_heads, (rank + 1) * layer.n_local_heads)
        assert torch.equal(layer.sink_local, sink[own])
        parts.append(in_tree_host.SlotMQALayer._project_wo_a(layer, out[:, own].contiguous()))
    whole = torch.einsum("tgd,grd->tgr", out.view(5, GROUPS, -1), wo_a.view(GROUPS, lora, -1))
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ratio", layers.RATIOS)
def test_two_ranks_with_half_the_heads_attend_as_one_rank_with_all_and_store_the_same(ratio):
    """In prefill and decode: index heads and compressors are whole on each rank, so its rows and choices are too."""

    def run(heads):
        stage, outputs, chosen = Stage(layers.geometry()), [], []
        params = layers.layer(ratio)
        params = replace(params, num_heads=len(range(HEADS)[heads]), sink=params.sink[heads].contiguous())
        x = layers.inputs(ratio, 301)
        x = replace(x, q=x.q[:, heads].contiguous())
        request = stage.admit()
        for start, stop in ((0, 300), (300, 301)):
            step = stage.step([request], [stop - start], decode=start > 0)
            step.chose = lambda layer, entries: chosen.append(entries)
            outputs.append(layers.run(params, layers.part(x, (start, stop)), step))
        stores = (stage.entries.csa, stage.entries.hca, stage.entries.keys, stage.slots.windows)
        return outputs, chosen, stores

    whole, *ranks = (run(heads) for heads in (slice(None), slice(0, 2), slice(2, 4)))
    for step in range(2):
        assert torch.equal(whole[0][step], torch.cat([rank[0][step] for rank in ranks], 1))
    assert len(whole[1]) == (2 if ratio == 4 else 0)
    for rank in ranks:
        for i in (1, 2):
            assert all(torch.equal(a, b) for a, b in zip(whole[i], rank[i], strict=True))
