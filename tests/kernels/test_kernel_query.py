"""index_query on a GPU against its torch reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kernel_steps import Guarded, rope_table, same_bytes, values
from torch import Tensor

from sglang_dsv4.formats import hadamard, index_codec
from sglang_dsv4.geometry import INDEX_DIM, INDEX_FP4, INDEX_FP8
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.index_query import index_query, index_query_cuda

LAYOUTS = [INDEX_FP4, INDEX_FP8]
POSITIONS = 5000
SCALE = (INDEX_DIM * 64) ** -0.5


def awkward(x: Tensor) -> Tensor:
    """Queries that try the transform and the rounding: zeros, signed zeros, subnormals, huge and tiny ones, ties."""
    x = x.clone()
    flat = x.view(-1, INDEX_DIM)
    if flat.shape[0] >= 12:
        flat[0] = 0.0
        flat[1] = -0.0
        flat[2] = 1e-38
        flat[3] = 1e-41
        flat[4] = 1e30
        flat[5] = 0.0
        flat[5, 0] = 1.0
        flat[6] = torch.arange(INDEX_DIM, device=x.device) % 2 * 2.0 - 1.0
        flat[7, 32:] = 0.0
        # Transformed they are the middles between two e2m1 numbers, as far as float32 permits.
        middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=x.device).repeat(16)
        flat[8] = hadamard(middles)
        flat[9] = hadamard(-middles * 2.0**-120)
        flat[10, :64], flat[10, 64:] = 1e-20, 1e20
        flat[11] = 6.0 * 2.0**-126
    return x


def step(tokens: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, POSITIONS, (tokens,), generator=generator).to(device)


def check(q: Tensor, weights: Tensor, rope: Tensor, positions: Tensor, layout, scale: float = SCALE) -> None:
    codec = index_codec(layout)
    got, scaled = index_query_cuda(q, weights, rope, positions, codec=codec, scale=scale, portable=True)
    inputs = (x.cpu() for x in (q, weights, rope, positions))
    want, want_scaled = index_query(*inputs, codec=codec, scale=scale)
    assert got.dtype == (torch.bfloat16 if layout == INDEX_FP4 else torch.float32)
    wrong = (got.cpu().float().view(torch.int32) != want.view(torch.int32)).nonzero()
    assert wrong.numel() == 0, f"{len(wrong)} numbers, first at {wrong[0].tolist()}"
    assert same_bytes(scaled.cpu(), want_scaled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("tokens,heads", [(1, 64), (2, 8), (3, 37), (64, 64), (65, 64), (70, 1), (300, 33)])
def test_queries_are_the_references(device, tokens, heads, layout, dtype):
    guard = Guarded(device)
    q = guard.copy(awkward(values((tokens, heads, INDEX_DIM), device, tokens)).to(dtype))
    weights = guard.copy(values((tokens, heads), device, 3).to(dtype))
    rope = guard.copy(rope_table(POSITIONS, device))
    check(q, weights, rope, step(tokens, device), layout)
    guard.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_of_any_float_and_column_slices_of_wider_results(device, dtype):
    for tokens in (5, 100):
        wide = values((tokens, 3 * 64 * INDEX_DIM), device, 1).bfloat16()
        q = wide[:, 64 * INDEX_DIM : 2 * 64 * INDEX_DIM].unflatten(1, (64, INDEX_DIM))
        weights = values((tokens, 200), device, 2).to(dtype)[:, 70:134]
        rope = rope_table(POSITIONS, device)
        check(q, weights, rope, step(tokens, device), INDEX_FP4, 0.123456789)
        heads_first = values((64, tokens, 2 * INDEX_DIM), device, 3).bfloat16()[..., INDEX_DIM:].transpose(0, 1)
        check(heads_first, weights, rope, step(tokens, device), INDEX_FP4)


def image_columns(layout) -> Tensor:
    """Where the channels of a head of even number stand in its row of an image, whose units an odd one XORs."""
    c = torch.arange(INDEX_DIM)
    if layout == INDEX_FP4:
        return 32 * (c % 32 // 8) + 16 * (c // 4 % 2) + 4 * (c // 32) + c % 4
    return 64 * (c // 64) + 32 * (c % 16 // 8) + 16 * (c // 4 % 2) + 4 * (c % 64 // 16) + c % 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("tokens,heads", [(1, 64), (3, 37), (64, 64), (65, 64), (70, 1)])
def test_images_hold_the_numbers(device, tokens, heads, layout, dtype):
    """What index_scores multiplies: a head's codes in its row's order, and half its weight times the codes' scale."""
    if jit.architecture(device.index or 0) != "90a":
        pytest.skip("images are made on Hopper alone")
    guard, codec = Guarded(device), index_codec(layout)
    q = values((tokens, heads, INDEX_DIM), device, tokens).to(dtype)
    q[0, 0] = 0.0
    inputs = (guard.copy(q), torch.ones(tokens, heads, device=device), rope_table(POSITIONS, device))
    positions = step(tokens, device)
    want, _ = index_query_cuda(*inputs, positions, codec=codec, scale=1.0, portable=True)
    images, weights = index_query_cuda(*inputs, positions, codec=codec, scale=1.0)
    flat, same = index_query_cuda(*inputs, positions, codec=codec, scale=1.0, many=True)
    assert images.shape == (tokens, 64, INDEX_DIM) and torch.equal(images.flatten(1), flat)
    assert torch.equal(weights, same) and not images[:, heads:].any() and not weights[:, heads:].any()
    columns = image_columns(layout).expand(64, -1)
    units = columns // 16 ^ torch.arange(64)[:, None] % 8
    at = (16 * units + columns % 16).to(device).expand(tokens, -1, -1)
    codes = images.gather(2, at).view(torch.float8_e4m3fn)[:, :heads].double()
    got, want = codes * 2 * weights[:, :heads, None].double(), want.double()
    # The scale of FP8 queries is found again from what it rounded.
    assert ((got - want).abs() <= (0 if layout == INDEX_FP4 else 2.0**-22) * want.abs()).all()
    guard.check()


@pytest.mark.parametrize("portable", [False, True])
def test_padded_tokens_do_not_touch_the_others(device, portable):
    """NaN at position 0, as captured batches are padded; and rows outside the table are not read."""
    rope, codec = rope_table(64, device), index_codec(INDEX_FP4)
    for tokens in (6, 90):
        q = values((tokens, 64, INDEX_DIM), device, 1).bfloat16()
        weights, positions = values((tokens, 64), device, 2), step(tokens, device) % 64
        want = index_query_cuda(q, weights, rope, positions, codec=codec, scale=1.0, portable=portable)
        q[-3:], weights[-3:], positions[-3:] = torch.nan, torch.nan, 0
        positions[-1] = 1 << 40
        got = index_query_cuda(q, weights, rope, positions, codec=codec, scale=1.0, portable=portable)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[:-3], b[:-3])


def test_no_tokens(device):
    q, weights = torch.zeros(0, 64, INDEX_DIM, device=device), torch.zeros(0, 64, device=device)
    rope, positions = rope_table(4, device), torch.zeros(0, dtype=torch.int64, device=device)
    got, scaled = index_query_cuda(q, weights, rope, positions, codec=index_codec(INDEX_FP4), scale=1.0)
    assert got.shape == (0, 64, INDEX_DIM) and scaled.shape == (0, 64)


def test_a_captured_query_equals_an_eager_one(device):
    codec, rope = index_codec(INDEX_FP4), rope_table(POSITIONS, device)
    q, weights = values((8, 64, INDEX_DIM), device, 1).bfloat16(), values((8, 64), device, 2).bfloat16()
    positions = step(8, device)

    def run() -> tuple[Tensor, Tensor]:
        return index_query_cuda(q, weights, rope, positions, codec=codec, scale=SCALE)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(20):
        q.copy_(values((8, 64, INDEX_DIM), device, 10 + seed))
        weights.copy_(values((8, 64), device, 40 + seed))
        positions.copy_(step(8, device, seed))
        graph.replay()
        for a, b in zip(out, run(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("power", [-130, -126, -60, 0, 60, 120])
def test_bf16_holds_every_rounded_query_of_mxfp4_keys(power):
    x = values((400, 64, INDEX_DIM), torch.device("cpu"), 3) * 2.0**power
    rounded = index_codec(INDEX_FP4).round_trip(hadamard(awkward(x)))
    assert same_bytes(rounded.bfloat16().float(), rounded)


def test_the_reference_rotates_scales_and_rounds():
    x, rope = values((3, 2, INDEX_DIM), torch.device("cpu"), 1), rope_table(POSITIONS, torch.device("cpu"))
    positions, weights = torch.tensor([0, 1, 4999]), torch.tensor([[1.0, -2.0]] * 3, dtype=torch.float64)
    got, scaled = index_query(x, weights, rope, positions, codec=index_codec(INDEX_FP8), scale=0.1)
    pairs = torch.view_as_complex(x[..., 64:].double().unflatten(-1, (32, 2)).contiguous())
    turns = torch.complex(rope[positions, :32].double(), rope[positions, 32:].double())[:, None]
    turned = torch.cat([x[..., :64].double(), torch.view_as_real(pairs * turns).flatten(-2)], dim=-1)
    torch.testing.assert_close(got.double(), hadamard(turned.float()).double(), rtol=2**-4, atol=1e-3)
    assert same_bytes(scaled, torch.tensor([[0.1, -0.2]] * 3))
