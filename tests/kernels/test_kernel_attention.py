"""sparse_attention and sparse_prefill on a GPU against attention in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_steps import Guarded, rope_table, values
from torch import Tensor

from sglang_dsv4.formats import main_codec
from sglang_dsv4.geometry import GROUP_ROWS, HEAD_DIM, MAIN_FP8, WINDOW
from sglang_dsv4.ops import flash_mla, jit
from sglang_dsv4.ops.flush import rotate
from sglang_dsv4.ops.sparse_attention import (
    CLUSTERS,
    MAX_SPLITS,
    clusters_at_once,
    sparse_attention_cuda,
    split_hopper,
    split_portable,
)
from sglang_dsv4.ops.sparse_prefill import sparse_prefill_cuda

CODEC = main_codec(MAIN_FP8)
SCALE = HEAD_DIM**-0.5
POSITIONS = 5000
LIMIT = 2e-3  # relative L2
KERNELS = ["flash_mla", "hopper", "portable"]


def need(kernel: str, heads: int = 64) -> None:
    arch = jit.architecture(torch.cuda.current_device())
    if kernel == "hopper" and arch != "90a":
        pytest.skip("the Hopper kernel runs on compute capability 9.0")
    if kernel == "flash_mla" and not flash_mla.serves(heads, arch):
        pytest.skip(f"FlashMLA is not installed here, or does not serve {heads} heads")


def attention(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, rope: Tensor) -> Tensor:
    """float64 [N, H, 512]: q [N, H, 512], keys [N, K, 512], valid [N, K], rope [N, 64]."""
    keys = torch.where(valid[..., None], keys.double(), 0.0)
    logits = (q.double() @ keys.transpose(1, 2)) * SCALE
    logits = logits.masked_fill(~valid[:, None, :], float("-inf"))
    sinks = sink.double()[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([logits, sinks], 2), 2)[..., :-1]
    weights = torch.where(valid[:, None, :] & (sinks != float("inf")), weights, 0.0)
    return rotate(weights @ keys, rope.double()[:, None, :], inverse=True)


def check(got: Tensor, want: Tensor, limit: float = LIMIT) -> None:
    assert torch.isfinite(got).all()
    error = torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want).clamp(min=1e-30)
    assert float(error) < limit, float(error)
    # Also query by query: a wrong one must not hide among many right ones.
    size = torch.linalg.vector_norm(want, dim=(1, 2))
    worst = torch.linalg.vector_norm(got.double() - want, dim=(1, 2)) / size.clamp(min=1e-30)
    assert float(torch.where(size > 0, worst, 0.0).max()) < 2 * limit, worst.tolist()
    assert not got[size == 0].any(), "a query without any valid row must give zeros"


class Decode:
    """Queries, two pools of rows in random order and NaN in every row that no query names."""

    def __init__(self, device, tokens: int, heads: int, counts: list[int], width: int, seed: int = 0):
        guard = self.guard = Guarded(device)
        generator = torch.Generator(device=device).manual_seed(seed)
        self.q = guard.copy(values((tokens, heads, HEAD_DIM), device, seed).bfloat16())
        self.window = guard.poison((2 * (tokens + 1), MAIN_FP8.group_bytes), torch.uint8)
        self.window_rows = torch.full((tokens, WINDOW), -1, dtype=torch.int64, device=device)
        live = [min(WINDOW, (37 * i + 5) % 200 + 1) for i in range(tokens)]
        for token, count in enumerate(live):
            ring = torch.randperm(WINDOW, generator=generator, device=device)[:count]
            self.window_rows[token, WINDOW - count :] = ring + (token + 1) * WINDOW
        total = sum(counts)
        groups = total // GROUP_ROWS + 2
        self.entries = guard.poison((groups, MAIN_FP8.group_bytes), torch.uint8)
        rows = torch.randperm(groups * GROUP_ROWS, generator=generator, device=device)[:total]
        self.entry_rows = torch.full((tokens, width), -1, dtype=torch.int32, device=device)
        start = 0
        for token, count in enumerate(counts):
            self.entry_rows[token, :count] = rows[start : start + count].int()
            start += count
        for pool, named, salt in ((self.window, self.window_rows, 1), (self.entries, self.entry_rows, 2)):
            used = named[named >= 0].long()
            CODEC.scatter(pool, used, values((used.numel(), HEAD_DIM), device, seed + salt))
        self.sink = values((1, heads), device, seed + 3)[0].contiguous()
        self.rope = rope_table(POSITIONS, device)
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=generator, device=device)

    def run(self, **options) -> Tensor:
        return sparse_attention_cuda(
            self.q, self.window, self.window_rows, self.entries, self.entry_rows, self.sink, self.rope,
            self.positions, scale=SCALE, codec=CODEC, **options,
        )  # fmt: skip

    def want(self) -> Tensor:
        out = []
        for i in range(self.q.shape[0]):
            keys = torch.cat(
                [
                    CODEC.gather(self.window, self.window_rows[i : i + 1]),
                    CODEC.gather(self.entries, self.entry_rows[i : i + 1].long()),
                ],
                1,
            )
            valid = torch.cat([self.window_rows[i : i + 1] >= 0, self.entry_rows[i : i + 1] >= 0], 1)
            rope = self.rope[self.positions[i : i + 1]]
            out.append(attention(self.q[i : i + 1], keys, valid, self.sink, rope))
        return torch.cat(out)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("tokens,width", [(1, 512), (5, 1024), (20, 512), (130, 64)])
def test_decode_attention(device, tokens, width, heads, kernel):
    need(kernel, heads)
    counts = [(width * (i + 1)) // tokens for i in range(tokens)]
    case = Decode(device, tokens, heads, counts, width, seed=tokens + heads)
    want = case.want()
    check(case.run(kernel=kernel), want)
    lens = torch.tensor(counts, dtype=torch.int32, device=device).clamp(min=1)
    check(case.run(kernel=kernel, entry_lens=lens), want)
    case.guard.check()


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_decode_attention_takes_no_length_on_trust(device, kernel):
    """Lengths below zero and beyond the columns, as a padded row may have them."""
    need(kernel)
    case = Decode(device, 3, 64, [0, 512, 70], 512, seed=11)
    lens = torch.tensor([-5, 1 << 30, 70], dtype=torch.int32, device=device)
    check(case.run(kernel=kernel, entry_lens=lens), case.want())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_attention_over_8192_entries(device, tokens, kernel):
    """HCA at a million tokens; also a short request in so wide a graph."""
    need(kernel)
    case = Decode(device, tokens, 64, [8192, 5, 4000][:tokens], 8192, seed=4)
    check(case.run(kernel=kernel), case.want())


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_attention_without_entries(device, kernel):
    need(kernel)
    case = Decode(device, 9, 64, [0] * 9, 64)
    want = case.want()
    check(case.run(kernel=kernel), want)
    case.entries = case.entry_rows = None
    check(case.run(kernel=kernel), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_attention_of_masked_columns(device, kernel):
    """-1 anywhere, whole queries without any row, rows that the pool does not contain, int32 window rows."""
    need(kernel)
    case = Decode(device, 7, 64, [500] * 7, 512, seed=2)
    case.entry_rows[0] = -1
    case.window_rows[0] = -1
    case.entry_rows[1, ::3] = -1
    case.window_rows[2] = -1
    case.entry_rows[3, :480] = -1
    want = case.want()
    if kernel != "flash_mla":  # which trusts its caller
        case.entry_rows[4, 505] = case.entries.shape[0] * GROUP_ROWS
    case.window_rows = case.window_rows.int()
    check(case.run(kernel=kernel), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_attention_with_infinite_sinks(device, kernel):
    need(kernel)
    case = Decode(device, 4, 64, [100, 0, 512, 64], 512, seed=5)
    case.sink[::4] = float("inf")
    case.sink[1::4] = float("-inf")
    case.window_rows[1] = -1  # with a sink of -inf nothing at all is left
    check(case.run(kernel=kernel), case.want())
    assert not case.run(kernel=kernel)[:, ::4].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_attention_of_peaked_and_flat_logits(device, kernel):
    """Maxima that grow from tile to tile, and queries of zero."""
    need(kernel)
    case = Decode(device, 6, 64, [512] * 6, 512, seed=6)
    order = torch.linalg.vector_norm(CODEC.gather(case.entries, case.entry_rows[0].long()), dim=1).argsort()
    case.entry_rows[0] = case.entry_rows[0][order]
    case.q[0] *= 20
    case.q[1] = 0
    case.q[2] *= 50
    check(case.run(kernel=kernel), case.want())


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_attention_of_large_scales(device, kernel):
    """Rows whose FP8 scales pass what one bf16 product can restore."""
    need(kernel)
    case = Decode(device, 2, 64, [40, 64], 64, seed=7)
    rows = case.entry_rows[case.entry_rows >= 0].long()
    big = values((rows.numel(), HEAD_DIM), device, 8, 0.0)
    big[:, :64] *= 1e6
    CODEC.scatter(case.entries, rows, big)
    case.q[..., :64] *= 1e-6
    # Few channels decide the norm: weights and output are both rounded to bfloat16, FlashMLA's no less.
    check(case.run(kernel=kernel), case.want(), 2.5e-3)


def test_decode_attention_past_4_gib(device):
    case = Decode(device, 2, 64, [100, 200], 512, seed=9)
    groups = 2**32 // MAIN_FP8.group_bytes + 3
    pool = torch.empty(groups, MAIN_FP8.group_bytes, dtype=torch.uint8, device=device)
    pool[-case.entries.shape[0] :] = case.entries
    want = case.want()
    shift = (groups - case.entries.shape[0]) * GROUP_ROWS
    case.entry_rows = torch.where(case.entry_rows >= 0, case.entry_rows + shift, case.entry_rows)
    case.entries = pool
    for kernel in ("hopper", "portable"):
        check(case.run(kernel=kernel), want)


def test_decode_attention_is_deterministic_and_replays(device):
    case = Decode(device, 16, 64, [512 - 20 * i for i in range(16)], 512, seed=10)
    first = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    full = case.entry_rows.clone()
    for step in range(300):
        count = (step * 37) % 513
        case.entry_rows.copy_(full)
        case.entry_rows[:, count:] = -1
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, case.run())
    case.entry_rows.copy_(full)
    assert torch.equal(case.run(), first)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_prefill_attention(device, heads, kernel):
    need(kernel, heads)
    guard = Guarded(device)
    tokens, rows, width = 70, 900, WINDOW + 512
    workspace = guard.poison((rows, HEAD_DIM), torch.bfloat16)
    workspace[:800] = values((800, HEAD_DIM), device, 1).bfloat16()  # the rest stays NaN
    indices = torch.full((tokens, width), -1, dtype=torch.int32, device=device)
    for i in range(tokens):
        count = (width * i) // tokens
        indices[i, :count] = torch.randperm(800, device=device)[:count].int()
    indices[::7, ::5] = -1
    q = guard.copy(values((tokens, heads, HEAD_DIM), device, 2).bfloat16())
    sink, rope = values((1, heads), device, 3)[0].contiguous(), rope_table(POSITIONS, device)
    positions = torch.randint(0, POSITIONS, (tokens,), device=device)
    got = sparse_prefill_cuda(q, workspace, indices, sink, rope, positions, scale=SCALE, kernel=kernel)
    keys = workspace[indices.clamp(min=0).long()]
    check(got, attention(q, keys, indices >= 0, sink, rope[positions]))
    guard.check()


H200_AT_ONCE = (132, 66, 32, 14)  # clusters of 1, 2, 4 and 8 blocks


def test_work_is_split_within_the_limits():
    for tokens in (1, 2, 16, 64, 256, 512):
        for heads in (4, 64, 128):
            for columns in (128, 640, 1152, 8320):
                parts, groups = split_hopper(tokens, heads, columns, H200_AT_ONCE)
                assert parts in CLUSTERS and 1 <= groups <= MAX_SPLITS and (groups == 1 or parts == CLUSTERS[-1])
                assert 1 <= split_portable(tokens, heads, columns, 132) <= MAX_SPLITS
    assert split_hopper(64, 64, 640, H200_AT_ONCE) == (2, 1)
    assert split_hopper(256, 64, 640, H200_AT_ONCE) == (1, 1)


def test_work_is_split_into_clusters_that_run_at_once():
    """Sixteen clusters of eight would take two turns where fourteen have room, and none where there is none."""
    assert split_hopper(16, 64, 640, H200_AT_ONCE) == (4, 1)
    assert split_hopper(14, 64, 640, H200_AT_ONCE) == (8, 1)
    assert split_hopper(14, 64, 640, (132, 66, 32, 0)) == (4, 1)


def test_a_device_tells_how_many_clusters_run_at_once(device):
    need("hopper")
    at_once = clusters_at_once(torch.cuda.current_device())
    assert len(at_once) == len(CLUSTERS) and at_once[0] >= at_once[1] * 2 >= at_once[2] * 4 >= at_once[3] * 8 > 0
