"""Checkpoints of cut depth: what stands in their files, and that the released formats hold what was drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dsv4 import checkpoint, tiny
from sglang_dsv4.tiny import draw_weights, tiny_config

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code, without the sign
NIBBLES = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])


def flash():
    return json.loads((Path(__file__).parent.parent / "configs" / "v4_flash.json").read_text())


def whole_blocks():
    """The tiny configuration with every linear layer made of whole FP8 blocks."""
    return tiny_config() | {"hidden_size": 128, "q_lora_rank": 128, "o_lora_rank": 128, "moe_intermediate_size": 128}


def scale(ue8m0):
    return torch.exp2(ue8m0.view(torch.uint8).float() - 127)


def test_fp8_blocks_hold_the_weight_to_half_a_step_and_use_their_range():
    weight = torch.randn(256, 384) * torch.logspace(-6, 3, 384)
    codes, scales = checkpoint.to_fp8(weight)
    assert codes.shape == (256, 384) and scales.shape == (2, 3)
    wide = scale(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
    back = codes.float() * wide
    assert ((back - weight).abs() <= weight.abs() / 16 + wide * 2**-10).all()
    largest = codes.float().view(2, 128, 3, 128).abs().amax(dim=(1, 3))
    assert (largest >= 224).all()  # the next smaller scale would not do


def test_fp4_blocks_hold_the_nearest_value_with_the_even_column_in_the_low_half():
    weight = torch.randn(6, 64) * torch.logspace(-3, 3, 6)[:, None]
    packed, scales = checkpoint.to_fp4(weight)
    assert packed.shape == (6, 32) and scales.shape == (6, 2)
    low, high = packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4
    values = torch.stack([NIBBLES[low.long()], NIBBLES[high.long()]], -1).view(6, 64)
    wide = scale(scales).repeat_interleave(32, 1)
    best = (weight[..., None] / wide[..., None] - NIBBLES).abs().amin(-1)
    assert torch.allclose((weight / wide - values).abs(), best)
    assert (values.view(6, 2, 32).abs().amax(-1) >= 3).all()


def test_a_cut_keeps_all_three_kinds_of_layer_or_is_refused():
    raw = checkpoint.cut(flash(), 6, 16)
    assert raw["compress_ratios"] == [0, 0, 4, 128, 4, 128] and raw["n_routed_experts"] == 16
    with pytest.raises(ValueError, match="all three kinds"):
        checkpoint.cut(flash(), 3, 16)
    with pytest.raises(ValueError, match="use 4 to 43"):
        checkpoint.cut(flash(), 44, 16)


def config_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "given.json"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "-3"], "-3 layers do not hold all three kinds: use 4 to"),
        (["--layers", "0"], "0 layers do not hold all three kinds"),
        (["--experts", "1"], "1 experts: use 2, which a token needs, to"),
        (["--experts", "100000"], "100000 experts: use 2"),
        (["--config", "{"], "given.json is not a config.json"),
        (["--config", "5"], "given.json is not a config.json"),
        (["--config", "[]"], "given.json is not a DeepSeek-V4 config.json: it lacks compress_ratios"),
        (["--config", "nowhere"], "nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_cut_is_one_line_and_nothing_is_written(options, says, tmp_path, capsys):
    name, value = options
    if name == "--config":
        given = value if value == "nowhere" else config_file(tmp_path, value)
        options = [name, given]
    else:
        options = ["--config", config_file(tmp_path, json.dumps(tiny_config())), "--layers", "5", name, value]
    with pytest.raises(SystemExit) as ended:
        checkpoint.main([str(tmp_path / "written"), *options])
    told = str(ended.value)
    assert told.startswith("checkpoint: ") and says in told and "\n" not in told
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("main", [checkpoint.main, tiny.main], ids=["checkpoint", "tiny"])
def test_a_folder_that_cannot_be_written_and_a_seed_that_is_none_are_one_line(main, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("")
    small = ["--config", config_file(tmp_path, json.dumps(tiny_config())), "--layers", "5", "--experts", "8"]
    more = [] if main is tiny.main else small
    with pytest.raises(SystemExit, match="taken"):
        main([str(taken), *more])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "new"), "--seed", "-99999999999999999999", *more])
    assert "is not a whole number from 0 to 2^63 - 1" in capsys.readouterr().err


@pytest.mark.parametrize("released", [False, True])
def test_files_hold_every_weight_once_in_the_format_of_the_released_checkpoint(tmp_path, released):
    raw = whole_blocks()
    checkpoint.write(tmp_path, raw, released=released)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / file)
        assert all(index["weight_map"][name] == file for name in part)
        assert not stored.keys() & part.keys()
        stored |= part
    drawn = {name: value for part in draw_weights(raw) for name, value in part.items()}
    assert {name for name in stored if not name.endswith(".scale")} == drawn.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in config) == released
    csa = raw["compress_ratios"].index(4)
    kinds = {
        f"layers.{csa}.attn.wq_b.weight": torch.float8_e4m3fn,
        f"layers.{csa}.ffn.shared_experts.w1.weight": torch.float8_e4m3fn,
        f"layers.{csa}.ffn.experts.0.w2.weight": torch.int8,
        f"layers.{csa}.attn.indexer.wq_b.weight": torch.float8_e4m3fn,
        f"layers.{csa}.attn.compressor.wkv.weight": torch.bfloat16,
        f"layers.{csa}.attn.indexer.weights_proj.weight": torch.bfloat16,
        f"layers.{csa}.attn.compressor.ape": torch.float32,
        "layers.0.attn.attn_sink": torch.float32,
        "embed.weight": torch.bfloat16,
    }
    for name, kind in kinds.items():
        expected = kind if released or kind.itemsize > 1 else torch.bfloat16
        assert stored[name].dtype == expected, name
        assert (f"{name.removesuffix('.weight')}.scale" in stored) == (kind.itemsize == 1 and released)
