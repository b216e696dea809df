"""Sizes against numbers worked out by hand, and refusal of everything the pools cannot hold."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from sglang_dsv4 import geometry
from sglang_dsv4.geometry import (
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP32,
    MAIN_FP8,
    MAIN_FP32,
    Geometry,
    LayerKind,
    RowLayout,
)

CONFIGS = Path(__file__).parent.parent / "configs"
MIB = 1024 * 1024


def load(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def make(name: str, **kwargs) -> Geometry:
    return Geometry.from_config(load(name), **kwargs)


# Layers


@pytest.mark.parametrize(
    "name, layers, window, csa, hca, first_csa",
    [("v4_flash", 43, 2, 21, 20, 2), ("v4_pro", 61, 0, 30, 31, 2), ("tiny", 5, 1, 2, 2, 1)],
)
def test_layer_kinds_follow_compress_ratios(name, layers, window, csa, hca, first_csa):
    g = make(name)
    assert g.num_layers == layers
    assert [len(g.layers_of(r)) for r in (0, 4, 128)] == [window, csa, hca]
    assert g.layers_of(4)[0] == first_csa
    assert sorted(g.layers_of(0) + g.layers_of(4) + g.layers_of(128)) == list(range(layers))
    for ratio in (0, 4, 128):
        assert all(g.kind(layer).ratio == ratio for layer in g.layers_of(ratio))


def test_csa_layers_are_the_even_ones_of_both_released_models():
    assert make("v4_flash").layers_of(4) == tuple(range(2, 43, 2))
    assert make("v4_pro").layers_of(4) == tuple(range(2, 61, 2))


def test_layer_kind_is_found_by_ratio():
    assert [LayerKind(r) for r in (0, 4, 128)] == [LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA]


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_draft_layers_do_not_change_the_backbone(drafts):
    config = load("v4_flash")
    config["compress_ratios"] = config["compress_ratios"][:43] + [0] * drafts
    assert Geometry.from_config(config) == make("v4_flash")


def test_model_dimensions_are_read_from_the_config():
    flash, pro = make("v4_flash"), make("v4_pro")
    assert (flash.num_heads, flash.hidden_size, flash.index_heads, flash.index_topk) == (64, 4096, 64, 512)
    assert (pro.num_heads, pro.hidden_size, pro.index_heads, pro.index_topk) == (128, 7168, 64, 1024)


# Rows


def test_row_bytes_of_every_layout():
    assert [x.row_bytes for x in (MAIN_FP8, MAIN_FP32)] == [584, 2048]
    assert [x.row_bytes for x in (INDEX_FP4, INDEX_FP8, INDEX_FP32)] == [68, 132, 512]


def test_main_row_is_its_parts():
    assert geometry.NOPE_DIM + 2 * geometry.ROPE_DIM == MAIN_FP8.data_bytes == 576
    assert geometry.NOPE_DIM // geometry.FP8_QUANT + 1 == MAIN_FP8.scale_bytes == 8
    assert geometry.INDEX_DIM // 2 == INDEX_FP4.data_bytes
    assert geometry.INDEX_DIM // geometry.FP4_QUANT == INDEX_FP4.scale_bytes


@pytest.mark.parametrize("rows, plain, padded", [(64, 37376, 37440), (256, 149504, 149760), (2, 1168, 1728)])
def test_main_rows_stored_together_are_rounded_up_to_576(rows, plain, padded):
    assert rows * MAIN_FP8.row_bytes == plain
    assert MAIN_FP8.padded_bytes(rows) == padded


@pytest.mark.parametrize(
    "layout, group",
    [(MAIN_FP8, 37440), (MAIN_FP32, 131072), (INDEX_FP4, 4352), (INDEX_FP8, 8448), (INDEX_FP32, 32768)],
)
def test_group_stride(layout, group):
    assert layout.group_bytes == group


def test_row_offsets_inside_and_across_groups():
    assert MAIN_FP8.data_offset(0) == 0
    assert MAIN_FP8.scale_offset(0) == 36864
    assert MAIN_FP8.data_offset(63) + 576 == MAIN_FP8.scale_offset(0)
    assert MAIN_FP8.data_offset(65) == 37440 + 576
    assert MAIN_FP8.scale_offset(65) == 37440 + 64 * 576 + 8
    assert INDEX_FP4.data_offset(130) == 2 * 4352 + 2 * 64
    assert INDEX_FP4.scale_offset(130) == 2 * 4352 + 4096 + 2 * 4
    assert INDEX_FP8.scale_offset(63) + 4 == 8448


@pytest.mark.parametrize("layout", [MAIN_FP8, MAIN_FP32, INDEX_FP4, INDEX_FP8, INDEX_FP32])
def test_rows_of_a_pool_never_share_a_byte(layout):
    owner = [None] * (3 * layout.group_bytes)
    for row in range(3 * 64):
        data, scale = layout.data_offset(row), layout.scale_offset(row)
        for byte in (*range(data, data + layout.data_bytes), *range(scale, scale + layout.scale_bytes)):
            assert owner[byte] is None
            owner[byte] = row


def test_layout_with_a_wrong_stride_is_refused():
    with pytest.raises(ValueError, match="correct the layout"):
        RowLayout("fp8", 576, 8, 37376, align=576)


# Pages


@pytest.mark.parametrize(
    "name, indexer, token, page",
    [
        ("v4_flash", "fp4", Fraction("3514.25"), 449824),
        ("v4_flash", "fp8", Fraction("3850.25"), 492832),
        ("v4_pro", "fp4", Fraction("5031.4375"), 644024),
        ("v4_pro", "fp8", Fraction("5511.4375"), 705464),
    ],
)
def test_spec_bytes_per_token_and_page(name, indexer, token, page):
    g = make(name, indexer=indexer)
    assert g.token_bytes == token
    assert g.page_bytes == page == 128 * token
    assert make(name, indexer=indexer, page_size=256).page_bytes == 2 * page


@pytest.mark.parametrize("name, gib", [("v4_flash", 3.43), ("v4_pro", 4.91)])
def test_spec_bytes_of_a_million_tokens(name, gib):
    assert round(float(make(name).token_bytes) / 1024, 2) == gib


@pytest.mark.parametrize("name, unquantised", [("v4_flash", 6880), ("v4_pro", 9848)])
def test_formula_holds_for_bf16_rows_too(name, unquantised):
    bf16 = replace(make(name), main=RowLayout("bf16", 1024, 0, 65536), index=RowLayout("bf16", 256, 0, 16384))
    assert bf16.token_bytes == unquantised


def test_allocated_bytes_per_token():
    assert make("v4_flash").token_alloc_bytes == Fraction("3519.65625")
    assert make("v4_pro").token_alloc_bytes == Fraction("5039.1796875")
    assert make("v4_flash", indexer="fp8").token_alloc_bytes == Fraction("3855.65625")


@pytest.mark.parametrize(
    "name, indexer, in_tree",
    [
        ("v4_flash", "fp4", 3563.25),
        ("v4_flash", "fp8", 3899.25),
        ("v4_pro", "fp4", 5106.75),
        ("v4_pro", "fp8", 5586.75),
    ],
)
def test_groups_waste_less_than_pages_of_256_padded_per_layer(name, indexer, in_tree):
    g = make(name, indexer=indexer)
    csa, hca = len(g.layers_of(4)), len(g.layers_of(128))
    per_page = csa * (g.main.padded_bytes(64) + g.index.padded_bytes(64)) + hca * g.main.padded_bytes(2)
    assert per_page / 256 == in_tree
    assert g.token_bytes < g.token_alloc_bytes < in_tree


def test_entries_per_page():
    for page in (128, 256):
        g = make("v4_flash", page_size=page)
        assert [g.entries_per_page(r) for r in (0, 4, 128)] == [0, page // 4, page // 128]


@pytest.mark.parametrize(
    "tokens, ratio, groups",
    [
        (0, 4, 0),
        (128, 4, 1),
        (256, 4, 1),
        (384, 4, 2),
        (128, 128, 1),
        (8192, 128, 1),
        (8320, 128, 2),
        (8192, 0, 0),
    ],
)
def test_entry_groups_are_rounded_up(tokens, ratio, groups):
    assert make("v4_flash").entry_groups(tokens, ratio) == groups


@pytest.mark.parametrize("name", ["v4_flash", "v4_pro", "tiny"])
@pytest.mark.parametrize("store, indexer", [("fp8", "fp4"), ("fp8", "fp8"), ("fp32", "fp32")])
@pytest.mark.parametrize("tokens", [128, 8192, 300032, 1048576])
def test_pool_bytes_are_the_sum_of_the_pool_shapes(name, store, indexer, tokens):
    g = make(name, store=store, indexer=indexer)
    total = 0
    for ratio in g.ratios:
        if ratio:
            groups, stride = g.entry_pool_shape(tokens, ratio)
            assert groups * 64 * ratio >= tokens
            total += groups * stride
        if ratio == 4:
            groups, stride = g.key_pool_shape(tokens)
            total += groups * stride
    assert g.page_pool_bytes(tokens) == total
    assert total >= tokens * g.token_alloc_bytes
    if tokens % 8192 == 0:
        assert total == tokens * g.token_alloc_bytes


# Slots and tails


@pytest.mark.parametrize(
    "name, window, overlap, spec, allocated, csa_tail, hca_tail",
    [
        ("v4_flash", 3214336, 430080, 3644416, 3649920, 860160, 10485760),
        ("v4_pro", 4559872, 614400, 5174272, 5182080, 1228800, 16252928),
    ],
)
def test_state_bytes(name, window, overlap, spec, allocated, csa_tail, hca_tail):
    g = make(name)
    assert g.overlap_bytes == overlap
    assert g.slot_spec_bytes == window + overlap == spec
    assert g.slot_bytes == 74880 * g.num_layers + overlap == allocated
    assert (g.csa_tail_bytes, g.hca_tail_bytes) == (csa_tail, hca_tail)
    assert g.slot_pool_bytes(1281) == 1281 * allocated
    assert g.tail_bytes(257) == 257 * (csa_tail + hca_tail)


@pytest.mark.parametrize("name", ["v4_flash", "v4_pro", "tiny"])
@pytest.mark.parametrize("store, indexer", [("fp8", "fp4"), ("fp32", "fp32")])
def test_state_bytes_are_the_sum_of_the_state_shapes(name, store, indexer):
    def size(shape, itemsize):
        for n in shape:
            itemsize *= n
        return itemsize

    g = make(name, store=store, indexer=indexer)
    slots, rows = 7, 5
    slot_total = sum(size(g.window_pool_shape(slots), 1) for _ in g.ratios)
    slot_total += sum(size(g.overlap_shape(slots), 4) for _ in g.layers_of(4))
    assert g.slot_pool_bytes(slots) == slot_total
    tails = sum(size(g.csa_tail_shape(rows), 4) for _ in g.layers_of(4))
    tails += sum(size(g.hca_tail_shape(rows), 4) for _ in g.layers_of(128))
    assert g.tail_bytes(rows) == tails


@pytest.mark.parametrize(
    "name, official_csa, mib, every_token",
    [("v4_flash", 1720320, 14.7, 25112), ("v4_pro", 2457600, 22.2, 35624)],
)
def test_state_is_three_quarters_of_the_official_csa_buffer(name, official_csa, mib, every_token):
    """The official buffer holds both halves of 8 tokens; here both of 4 tokens and the overlap of 4 more."""
    g = make(name)
    assert (g.csa_tail_bytes + g.overlap_bytes) * 4 == official_csa * 3
    window = g.slot_spec_bytes - g.overlap_bytes
    assert round((window + official_csa + g.hca_tail_bytes) / MIB, 1) == mib
    assert window == 128 * every_token
    assert round(float(every_token / g.token_bytes), 1) == 7.1


def test_snapshot_costs_what_1037_tokens_cost():
    g = make("v4_flash")
    assert round(float(g.slot_spec_bytes / g.token_bytes)) == 1037
    assert round(float(g.slot_bytes / g.token_alloc_bytes)) == 1037


def test_layer_state_shapes():
    g = make("v4_flash")
    assert g.window_pool_shape(9) == (18, 37440)
    assert g.overlap_shape(9) == (9, 4, 2, 640)
    assert g.csa_tail_shape(3) == (3, 4, 2, 2, 640)
    assert g.hca_tail_shape(3) == (3, 128, 2, 512)


# Refusals


@pytest.mark.parametrize(
    "change, words",
    [
        ({"compress_ratios": None}, ["compress_ratios is missing", "released config.json"]),
        ({"compress_ratios": []}, ["compress_ratios is missing"]),
        ({"compress_ratios": [0, 4, 64, 4, 128]}, ["compress_ratios[2] is 64", "0, 4 or 128"]),
        ({"compress_ratios": [0, 4, -4, 4, 128]}, ["compress_ratios[2] is -4"]),
        ({"compress_ratios": [0, 4, 128.0, 4, 128]}, ["compress_ratios[2] is 128.0"]),
        ({"compress_ratios": [0, 4, True, 4, 128]}, ["compress_ratios[2] is True"]),
        ({"compress_ratios": [0, 4, "4", 4, 128]}, ["compress_ratios[2] is '4'"]),
        ({"compress_ratios": [0, 1, 4, 4, 128]}, ["compress_ratios[1] is 1", "DeepSeek-V4.1"]),
        ({"compress_ratios": [0, 4, 128, 4, 2]}, ["compress_ratios[4] is 2", "DeepSeek-V4.1"]),
        ({"compress_ratios": [0, 4, 128, 4, 128, 2]}, ["compress_ratios[5] is 2", "DeepSeek-V4.1"]),
        ({"kv_source_layer_ids": [2, 8]}, ["kv_source_layer_ids", "DeepSeek-V4.1"]),
        ({"model_type": "deepseek_v41_text"}, ["deepseek_v41_text", "DeepSeek-V4.1"]),
        ({"compress_ratios": [0, 4, 128, 4]}, ["4 entries", "num_hidden_layers is 5"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "positive"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers is None"]),
        ({"head_dim": 576}, ["head_dim is 576", "512"]),
        ({"head_dim": None}, ["head_dim is None"]),
        ({"qk_rope_head_dim": 32}, ["qk_rope_head_dim is 32", "64"]),
        ({"sliding_window": 256}, ["sliding_window is 256", "128"]),
        ({"index_head_dim": 64}, ["index_head_dim is 64", "128"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0"]),
        ({"hidden_size": "128"}, ["hidden_size is '128'"]),
        ({"index_n_heads": None}, ["index_n_heads is None"]),
        ({"index_topk": -1}, ["index_topk is -1"]),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_config_that_cannot_be_served_is_refused_in_one_line(change, words):
    config = load("tiny")
    for field, value in change.items():
        if value is None:
            config.pop(field, None)
        else:
            config[field] = value
    with pytest.raises(ValueError) as error:
        Geometry.from_config(config)
    message = str(error.value)
    assert all(word in message for word in words), message
    what, why, remedy = message.partition(": ")[0], *message.partition(": ")[2].split("; ")
    assert "\n" not in message and what and why and remedy, message


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"page_size": 64}, ["page_size is 64", "--page-size 128"]),
        ({"page_size": 1}, ["page_size is 1"]),
        ({"page_size": 384}, ["page_size is 384"]),
        ({"store": "bf16"}, ["store is 'bf16'", "fp8, fp32"]),
        ({"indexer": "nvfp4"}, ["indexer is 'nvfp4'", "fp4, fp8, fp32"]),
    ],
)
def test_flag_that_cannot_be_served_is_refused_in_one_line(flags, words):
    with pytest.raises(ValueError) as error:
        make("tiny", **flags)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_empty_kv_source_layer_ids_are_no_v41():
    assert Geometry.from_config({**load("tiny"), "kv_source_layer_ids": []}) == make("tiny")


# The module and the configurations


def test_geometry_imports_nothing_but_the_standard_library():
    tree = ast.parse(Path(geometry.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "collections.abc", "dataclasses", "enum", "fractions", "typing"}


def test_released_configs_hold_the_published_values():
    flash, pro = load("v4_flash"), load("v4_pro")
    assert flash["compress_ratios"] == [0, 0] + [4, 128] * 20 + [4] + [0]
    assert pro["compress_ratios"] == [128, 128] + [4, 128] * 29 + [4] + [0]
    for config in (flash, pro):
        layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
        assert len(config["compress_ratios"]) == layers
        assert (config["rope_theta"], config["compress_rope_theta"]) == (10000, 160000)
        assert config["rope_scaling"] == {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        }
        assert (config["hc_mult"], config["hc_sinkhorn_iters"], config["hc_eps"]) == (4, 20, 1e-6)
        assert config["swiglu_limit"] == 10.0 and config["num_hash_layers"] == 3
        assert config["max_position_embeddings"] == 1048576 and config["vocab_size"] == 129280
    assert (flash["q_lora_rank"], flash["o_groups"], flash["o_lora_rank"]) == (1024, 8, 1024)
    assert (pro["q_lora_rank"], pro["o_groups"], pro["o_lora_rank"]) == (1536, 16, 1024)
    assert (flash["n_routed_experts"], flash["moe_intermediate_size"]) == (256, 2048)
    assert (pro["n_routed_experts"], pro["moe_intermediate_size"]) == (384, 3072)
    assert (flash["routed_scaling_factor"], pro["routed_scaling_factor"]) == (1.5, 2.5)


@pytest.mark.parametrize("name", ["v4_flash", "v4_pro", "tiny"])
def test_configs_share_one_set_of_fields_and_carry_no_quantisation(name):
    config = load(name)
    assert set(config) == set(load("v4_flash"))
    assert config["model_type"] == "deepseek_v4" and config["architectures"] == ["DeepseekV4ForCausalLM"]
    assert "quantization_config" not in config


def test_tiny_config_keeps_the_released_attention_geometry():
    tiny, flash = load("tiny"), load("v4_flash")
    for field in ("head_dim", "qk_rope_head_dim", "sliding_window", "index_head_dim", "rope_scaling"):
        assert tiny[field] == flash[field]
    assert tiny["num_attention_heads"] % tiny["o_groups"] == 0
