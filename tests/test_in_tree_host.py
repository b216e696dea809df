"""The host around SGLang's in-tree model, as far as it can be seen without a GPU: what it hands to the attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
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
    layers = [
        SimpleNamespace(freqs_cis=torch.polar(torch.ones_like(angle), angle * base), rope_kwargs={"base": base})
        for base in (1, 1, 2)
    ]
    first, second, third = map(in_tree_host.rope_rows, layers)
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
    rows = projections.window()
    raw, norm = projections.raw_window()
    for made in (rows, norm.apply(raw, positions)):
        assert made.dtype == torch.float32
        assert (made - expected).abs().max() < 3e-6
