"""Parts of the pure-torch host on their own: batch invariance, rotation, mixing, experts, loading, refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import DenseCore, DenseRequest
from harness import Stage
from torch import Tensor
from torch.nn import functional as F

from sglang_dsv4.attention.layer import SlotRadixAttention
from sglang_dsv4.attention.rope import apply_inverse_rope, apply_rope, inverse_frequencies, rope_table
from sglang_dsv4.formats import hadamard, index_codec, main_codec
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.models import invariant
from sglang_dsv4.models.backbone import SlotModel
from sglang_dsv4.models.invariant import RMSNorm, RowLinear, grid_rows, rms_norm
from sglang_dsv4.models.mhc import HyperConnection, HyperHead
from sglang_dsv4.models.moe import MoE
from sglang_dsv4.tiny import make_weights, tiny_config

ROWS = (*range(1, 71), 300)
DTYPES = (torch.float32, torch.bfloat16)


def tiny(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**(tiny_config() | changes))


def seeded(module: torch.nn.Module, seed: int = 0) -> Any:
    """Every float parameter random, nothing at a neutral value."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
    return module


def assert_rows_do_not_depend_on_the_batch(function: Any, *inputs: Tensor) -> None:
    """`function` maps tensors of 300 rows to a tensor or tuple of such; any run of rows must give the same bits."""

    def results(first: int, count: int) -> tuple[Tensor, ...]:
        out = function(*(x[first : first + count] for x in inputs))
        return out if isinstance(out, tuple) else (out,)

    whole = results(0, 300)
    for count in ROWS:
        first = (count * 37) % (301 - count)
        for part, expected in zip(results(first, count), whole, strict=True):
            assert torch.equal(part, expected[first : first + count]), f"{count} rows from {first}"


# Batch invariance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 1280), (64, 2048), (1024, 64), (512, 24), (100, 7)])
def test_linear_rows_do_not_depend_on_the_batch(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    linear = seeded(RowLinear(inputs, outputs, dtype=dtype))
    x = torch.randn(300, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    # float64 outputs: equal before the rounding that would hide a difference
    assert_rows_do_not_depend_on_the_batch(lambda t: linear(t, torch.float64), x)


def test_grouped_linear_rows_do_not_depend_on_the_batch() -> None:
    linear = seeded(RowLinear(1024, 32, groups=2))
    x = torch.randn(300, 2, 1024, generator=torch.Generator().manual_seed(1))
    assert_rows_do_not_depend_on_the_batch(lambda t: linear(t, torch.float64), x)
    for group in range(2):
        alone = RowLinear(1024, 32)
        alone.weight.data.copy_(linear.weight[group])
        assert torch.equal(alone(x[:, group]), linear(x)[:, group])


def test_linear_does_not_depend_on_the_order_of_its_terms() -> None:
    """What makes the above hold with any BLAS: sums are exact, so any permutation gives the same bits."""
    linear = seeded(RowLinear(512, 64))
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 512)
    shuffled = RowLinear(512, 64)
    for seed in range(5):
        order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        shuffled.weight.data.copy_(linear.weight[:, order])
        shuffled.refresh()
        assert torch.equal(shuffled(x[:, order], torch.float64), linear(x, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["norm", "head norm", "mixing", "head mixing", "hash experts", "experts"])
def test_block_rows_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    config = tiny()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(300, 128, generator=generator).to(dtype)
    heads = torch.randn(300, 4, 512, generator=generator).to(dtype)
    ids = torch.randint(0, config.vocab_size, (300,), generator=generator)
    mixing, head = seeded(HyperConnection(config)), seeded(HyperHead(config))
    moe = seeded(MoE(config, name == "hash experts", dtype))
    norm = seeded(RMSNorm(128, 1e-6))

    def around(streams: Tensor) -> tuple[Tensor, ...]:
        y, post, comb = mixing(streams)
        return y, post, comb, mixing.merge(y, streams, post, comb)

    function, inputs = {
        "norm": (norm, (x,)),
        "head norm": (lambda t: rms_norm(t, None, 1e-6), (heads,)),
        "mixing": (around, (heads[..., :128],)),
        "head mixing": (head, (heads[..., :128],)),
        "hash experts": (moe, (x, ids)),
        "experts": (moe, (x, ids)),
    }[name]
    assert_rows_do_not_depend_on_the_batch(function, *inputs)


def test_functions_do_not_depend_on_the_place_in_the_buffer() -> None:
    """The last few elements of a buffer take a scalar path in vectorised kernels."""
    x = torch.linspace(-30, 30, 301)
    for function in (invariant.exp, invariant.sigmoid, invariant.silu, invariant.softplus):
        whole = function(x)
        for first, count in ((0, 1), (3, 2), (5, 7), (290, 11), (100, 33)):
            assert torch.equal(function(x[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_the_whole_model_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Attention apart (a request's own affair), the model sees rows only."""
    raw = tiny_config()
    model = SlotModel(SimpleNamespace(**raw), length=512, dtype=dtype, core=_RowsOnly)
    model.load_weights(make_weights(raw).items())
    ids = torch.randint(32, 1280, (300,), generator=torch.Generator().manual_seed(3))

    def logits(ids: Tensor, positions: Tensor) -> Tensor:
        return model.logits(model.hidden_states(ids, positions, None))

    whole = logits(ids, torch.arange(300))
    for count in (1, 2, 3, 5, 16, 17, 44, 70):
        first = 7 * count % 200
        part = slice(first, first + count)
        assert torch.equal(logits(ids[part], torch.arange(300)[part]), whole[part])


class _RowsOnly:
    """In place of attention: passes every projection on, so that each reaches the logits."""

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, q: Tensor, kv: Tensor, forward_batch: Any, **extra: Any) -> Tensor:
        out = q + kv.unsqueeze(1)
        for x in (x for x in extra.values() if isinstance(x, Tensor)):
            out = out + x.flatten(1)[:, :1].unsqueeze(-1).to(q.dtype)
        return out


# Attention inside the model


class _Both:
    """The real attention, with the dense reference beside it on the same inputs."""

    def __init__(self, **arguments: Any) -> None:
        self.real, self.dense = SlotRadixAttention(**arguments), DenseCore(**arguments)

    def __call__(self, q: Tensor, kv: Tensor, forward_batch: Any, **extra: Any) -> Tensor:
        out = self.real(q, kv, forward_batch.step, **extra)
        expected = self.dense(q.double(), kv, forward_batch.dense, **extra)
        forward_batch.errors.append((out - expected).abs().max().item())
        return out


@pytest.mark.parametrize(("store", "indexer"), [("fp8", "fp4"), ("fp8", "fp8"), ("fp32", "fp32")])
def test_every_layer_agrees_with_the_dense_reference_in_the_stored_formats(store: str, indexer: str) -> None:
    """Chunks that end inside blocks, then decode, over poisoned pools; the indexer has to choose."""
    raw = tiny_config() | {"index_topk": 16}
    model = SlotModel(SimpleNamespace(**raw), length=256, core=_Both)
    model.load_weights(make_weights(raw).items())
    geometry = Geometry.from_config(raw, page_size=128, store=store, indexer=indexer)
    rows, keys = main_codec(geometry.main), index_codec(geometry.index)
    stage = Stage(geometry, pages=4, slots=2, rows=2)
    request = stage.admit()
    dense = DenseRequest(lambda x: rows.round_trip(x.float()), lambda x: keys.round_trip(hadamard(x.float())))
    ids = torch.randint(32, 1280, (160,), generator=torch.Generator().manual_seed(13))
    errors: list[float] = []
    for count, decode in [(70, False), (59, False), (23, False)] + [(1, True)] * 8:
        first = request.length
        batch = SimpleNamespace(step=stage.step([request], [count], decode=decode), dense=dense, errors=errors)
        model.hidden_states(ids[first : first + count], torch.arange(first, first + count), batch)
    assert max(errors) < 5e-5


# Accuracy


def test_linear_is_at_least_as_accurate_as_float32() -> None:
    generator = torch.Generator().manual_seed(4)
    linear = seeded(RowLinear(2048, 64))
    x = torch.randn(50, 2048, generator=generator)
    exact = x.double() @ linear.weight.double().T
    error = (linear(x, torch.float64) - exact).abs().max()
    assert error < (F.linear(x, linear.weight).double() - exact).abs().max()


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (invariant.exp, torch.exp),
        (invariant.sigmoid, torch.sigmoid),
        (invariant.silu, F.silu),
        (invariant.softplus, lambda x: F.softplus(x, threshold=200)),
    ],
    ids=["exp", "sigmoid", "silu", "softplus"],
)
def test_functions_are_accurate_far_below_float32(function: Any, reference: Any) -> None:
    x = torch.linspace(-80, 80, 20001, dtype=torch.float64)
    torch.testing.assert_close(function(x), reference(x), rtol=1e-9, atol=1e-10)


def test_a_poisoned_row_stays_alone() -> None:
    linear = seeded(RowLinear(128, 64))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(5))
    clean = linear(x)
    for value in (float("nan"), float("inf"), -float("inf")):
        x[2, 17] = value
        got = linear(x)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    x[2] = 0.0
    assert linear(x)[2].eq(0).all()


def test_shared_rows_give_the_bits_of_separate_ones() -> None:
    linear = seeded(RowLinear(128, 64))
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(6))
    assert torch.equal(linear(grid_rows(x)), linear(x))


def test_linear_refuses_what_it_cannot_sum_exactly() -> None:
    with pytest.raises(ValueError, match="40000 terms"):
        RowLinear(40000, 2)(torch.randn(1, 40000))
    with pytest.raises(ValueError, match="do not fit"):
        RowLinear(8, 2)(torch.randn(1, 9))


# Rotation


def test_yarn_ramp_of_the_released_scheme() -> None:
    """Pairs below 15 keep their frequency, pairs from 25 on turn 16 times slower, between them a linear ramp."""
    base = 160000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    ramp = ((torch.arange(32) - 15) / 10).clamp(0, 1)
    expected = base * (1 - ramp) + base / 16 * ramp
    for ratio in (4, 128):
        torch.testing.assert_close(inverse_frequencies(tiny(), ratio).double(), expected, rtol=1e-6, atol=0)
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(inverse_frequencies(tiny(), 0).double(), plain, rtol=1e-6, atol=0)


def test_table_rows_do_not_depend_on_the_served_length() -> None:
    assert torch.equal(rope_table(tiny(), 4, 1000)[:77], rope_table(tiny(), 4, 77))


def test_table_is_right_past_the_original_length_with_angles_formed_in_float32() -> None:
    config = tiny()
    position = 100_003
    angle = (torch.tensor(float(position)) * inverse_frequencies(config, 4)).double()
    row = rope_table(config, 4, position + 1)[position]
    torch.testing.assert_close(row[:32].double(), angle.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(row[32:].double(), angle.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 512), (6, 4, 512), (6, 16, 128)])
def test_rotation_turns_interleaved_pairs_of_the_last_channels(shape: tuple[int, ...]) -> None:
    table, positions = rope_table(tiny(), 4, 400), torch.tensor([0, 1, 2, 130, 131, 399])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    got = apply_rope(x, table, positions)
    assert torch.equal(got[..., :-64], x[..., :-64])
    assert torch.equal(got[0], x[0])
    frequency = inverse_frequencies(tiny(), 4)
    for row, pair in ((3, 0), (5, 31), (4, 12)):
        a, b = x[row, ..., -64 + 2 * pair], x[row, ..., -63 + 2 * pair]
        angle = positions[row].item() * frequency[pair].item()
        expected = a * math.cos(angle) - b * math.sin(angle)
        torch.testing.assert_close(got[row, ..., -64 + 2 * pair], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(apply_inverse_rope(got, table, positions), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "ratio", "message"),
    [
        ({}, 8, "compress ratio 8"),
        ({"rope_scaling": None}, 4, "must describe YaRN"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 128, "must describe YaRN"),
        ({"rope_scaling": {"type": "yarn"}}, 4, "lacks factor, original_max_position_embeddings"),
        ({"qk_rope_head_dim": 32}, 0, "qk_rope_head_dim is 32"),
    ],
)
def test_table_refuses_another_scheme(changes: dict[str, Any], ratio: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_table(tiny(**changes), ratio, 8)


# Mixing and experts


def test_mixing_matches_the_definition() -> None:
    config = tiny()
    mixing = seeded(HyperConnection(config), seed=8)
    streams = torch.randn(20, 4, 128, generator=torch.Generator().manual_seed(9))
    flat = streams.double().flatten(1)
    logits = flat @ mixing.linear.weight.double().T / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    scale = mixing.scale.double().repeat_interleave(torch.tensor([4, 4, 16]))
    pre, post, comb = (logits * scale + mixing.base.double()).split([4, 4, 16], dim=-1)
    comb = comb.reshape(-1, 4, 4).softmax(-1) + 1e-6
    comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    post = 2 * post.sigmoid()
    entering = torch.einsum("nj,njc->nc", pre.sigmoid() + 1e-6, streams.double())
    got = mixing(streams)
    for part, expected in zip(got, (entering, post, comb), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-6, atol=1e-6)
    y = torch.randn(20, 128, generator=torch.Generator().manual_seed(10))
    after = post[..., None] * y[:, None].double() + torch.einsum("njk,njc->nkc", comb, streams.double())
    merged = mixing.merge(y, streams, *got[1:])
    torch.testing.assert_close(merged.double(), after, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("hashed", [False, True])
def test_experts_match_a_loop_over_tokens(hashed: bool) -> None:
    config = tiny(swiglu_limit=0.5)  # low enough to clamp
    moe = seeded(MoE(config, hashed, torch.float32), seed=11)
    weights = {name: w.double() for name, w in moe.named_tensors("m").items()}
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(40, 128, generator=generator)
    ids = torch.randint(0, 1280, (40,), generator=generator)

    def expert(name: str, row: Tensor) -> Tensor:
        gate = (weights[f"m.{name}.w1.weight"] @ row).clamp(max=0.5)
        up = (weights[f"m.{name}.w3.weight"] @ row).clamp(-0.5, 0.5)
        return weights[f"m.{name}.w2.weight"] @ (gate * gate.sigmoid() * up)

    expected = []
    for row, token in zip(x.double(), ids, strict=True):
        score = F.softplus(weights["m.gate.weight"] @ row).sqrt()
        if hashed:
            chosen = weights["m.gate.tid2eid"][token].long()
        else:
            chosen = (score + weights["m.gate.bias"]).topk(2).indices
        share = score[chosen] / score[chosen].sum() * config.routed_scaling_factor
        routed = sum(s * expert(f"experts.{e}", row) for s, e in zip(share, chosen.tolist(), strict=True))
        expected.append(routed + expert("shared_experts", row))
    torch.testing.assert_close(moe(x, ids).double(), torch.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"index_head_dim": 64}, "index_head_dim is 64"),
        ({"o_groups": 3}, "o_groups = 3"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 5 layers"),
    ],
)
def test_model_refuses_another_architecture(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlotModel(tiny(**changes), length=8, core=DenseCore)


def test_model_refuses_float16() -> None:
    with pytest.raises(ValueError, match=r"float16 is not supported: use float32 or bfloat16"):
        SlotModel(tiny(), length=8, dtype=torch.float16, core=DenseCore)


# Loading


def fresh() -> SlotModel:
    return SlotModel(tiny(), length=64, core=DenseCore)


def test_loading_takes_every_weight_and_skips_draft_layers() -> None:
    weights = make_weights(tiny_config())
    model = fresh()
    model.load_weights([*weights.items(), ("mtp.0.norm.weight", torch.ones(3))])
    named = model.named_tensors()
    assert named.keys() == weights.keys()
    assert all(torch.equal(named[name], value) for name, value in weights.items())


def test_loading_again_replaces_what_was_derived() -> None:
    first, second = (make_weights(tiny_config(), seed) for seed in (0, 1))
    ids, positions = torch.arange(40, 60), torch.arange(20)
    model, other = fresh(), fresh()
    model.load_weights(first.items())
    model.hidden_states(ids, positions, DenseRequest())
    model.load_weights(second.items())
    other.load_weights(second.items())
    got, expected = (m.logits(m.hidden_states(ids, positions, DenseRequest())) for m in (model, other))
    assert torch.equal(got, expected)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Also of weights that nobody has set, which may be NaN."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("layers.3.attn.attn_sink"), "1 missing: layers.3.attn.attn_sink"),
        (lambda w: w.update({"layers.0.attn.compressor.ape": torch.ones(4, 4)}), "1 unexpected: layers.0"),
        (lambda w: w.update({"norm.weight": torch.ones(64)}), r"norm.weight \[64\] instead of \[128\]"),
        (lambda w: w.update({"layers.1.attn.wq_a.scale": torch.ones(1, 1)}), "needs float weights"),
        (
            lambda w: w.update({"head.weight": w["head.weight"].to(torch.float8_e4m3fn)}),
            r"head.weight \(torch.float8_e4m3fn\)",
        ),
        (lambda w: [w.pop(n) for n in list(w) if ".ffn.gate." in n], "10 missing: .*, and 6 more"),
        (lambda w: [t.sub_(1) for n, t in w.items() if n.endswith("tid2eid")], "of other experts: .*tid2eid"),
    ],
    ids=["missing", "unexpected", "mis-shaped", "scales", "fp8", "many", "experts"],
)
def test_loading_names_what_does_not_fit(edit: Any, message: str) -> None:
    weights = make_weights(tiny_config())
    edit(weights)
    model = fresh()
    before = {name: bytes_of(tensor).clone() for name, tensor in model.named_tensors().items()}
    with pytest.raises(ValueError, match=f"does not fit this model.*{message}"):
        model.load_weights(weights.items())
    written = [n for n, tensor in model.named_tensors().items() if not torch.equal(bytes_of(tensor), before[n])]
    assert written == []


def test_loading_refuses_a_repeated_name() -> None:
    weights = make_weights(tiny_config())
    with pytest.raises(ValueError, match=r"1 repeated: embed.weight"):
        fresh().load_weights([*weights.items(), ("embed.weight", weights["embed.weight"])])
