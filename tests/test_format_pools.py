"""Rows in pools: explicit byte offsets, untouched neighbours, masked rows, and no wait for the device."""

from __future__ import annotations

import math

import pytest
import torch
from formats_by_hand import CODECS, IDS, KEY4, MAIN, decode_by_hand, random_rows, raw, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dsv4 import formats
from sglang_dsv4.formats import hadamard


def offsets_by_hand(codec: formats.RowCodec, row: int) -> tuple[int, int]:
    """Byte offsets of a row's data and scales, from the stored numbers of the format."""
    data, scale, stride = {
        "main-fp8": (576, 8, 37440),
        "main-fp32": (2048, 0, 131072),
        "key-fp4": (64, 4, 4352),
        "key-fp8": (128, 4, 8448),
        "key-fp32": (512, 0, 32768),
    }[IDS[CODECS.index(codec)]]
    return row // 64 * stride + row % 64 * data, row // 64 * stride + 64 * data + row % 64 * scale


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_scatter_writes_its_rows_and_no_other_byte(codec):
    layout = codec.layout
    pool = torch.full((3, layout.group_bytes), 0xA5, dtype=torch.uint8)
    expect = bytearray(raw(pool))
    rows = [65, 0, 63, 191, 64, 100]
    x = random_rows(len(rows), codec.width, seed=12)
    codec.scatter(pool, torch.tensor(rows), x)
    data, scale = codec.encode(x)
    for i, row in enumerate(rows):
        at_data, at_scale = offsets_by_hand(codec, row)
        expect[at_data : at_data + layout.data_bytes] = raw(data[i])
        expect[at_scale : at_scale + layout.scale_bytes] = raw(scale[i])
    assert raw(pool) == bytes(expect)


def test_row_65_of_a_main_pool_stands_at_its_documented_bytes():
    pool = torch.zeros(2, 37440, dtype=torch.uint8)
    x = torch.zeros(512)
    x[0], x[64], x[448] = 448.0, -448.0 * 4, 1.0
    MAIN.scatter(pool, torch.tensor([65]), x[None])
    row = pool[1, 576:1152]
    assert (row[0], row[64], row[448], row[449]) == (0x7E, 0xFE, 0x80, 0x3F)
    assert pool[1, 64 * 576 + 8 : 64 * 576 + 16].tolist() == [127, 129, 105, 105, 105, 105, 105, 0]
    assert int((pool != 0).sum()) == 4 + 7


def test_row_65_of_an_fp4_pool_stands_at_its_documented_bytes():
    pool = torch.zeros(2, 4352, dtype=torch.uint8)
    x = torch.zeros(128)
    x[127] = -6.0
    KEY4.scatter(pool, torch.tensor([65]), x[None])
    assert pool[1, 64 + 63] == 0xF0
    assert pool[1, 64 * 64 + 4 : 64 * 64 + 8].tolist() == [1, 1, 1, 127]
    assert int((pool != 0).sum()) == 1 + 4


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pool_rows_decode_by_hand_and_by_gather(codec, dtype):
    pool = torch.randint(
        0, 256, (4, codec.layout.group_bytes), generator=torch.Generator().manual_seed(1)
    ).byte()
    rows = torch.tensor([200, 3, 64, 127, 128], dtype=dtype)
    x = random_rows(5, codec.width, seed=13)
    codec.scatter(pool, rows, x)
    flat = raw(pool)
    for i, row in enumerate(rows.tolist()):
        at_data, at_scale = offsets_by_hand(codec, row)
        data = flat[at_data : at_data + codec.layout.data_bytes]
        scale = flat[at_scale : at_scale + codec.layout.scale_bytes]
        assert same_bits(
            codec.gather(pool, rows[i : i + 1])[0], torch.tensor(decode_by_hand(codec, data, scale))
        )
    assert same_bits(codec.gather(pool, rows), codec.round_trip(x))


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize(
    "rows",
    [[-1, 5, -1, 70], [5, -1, 70, -1], [-1, -1, -1, 5], [0, -1, -1, 1], [-7, 0, -1, 70], [-1, -1, -1, -1]],
    ids=str,
)
def test_masked_rows_leave_every_byte_as_it_was(codec, rows):
    before = torch.randint(
        0, 256, (2, codec.layout.group_bytes), generator=torch.Generator().manual_seed(2)
    ).byte()
    x = random_rows(len(rows), codec.width, seed=14)
    masked = torch.tensor(rows)
    x[masked < 0] = math.nan
    only_valid, pool = before.clone(), before.clone()
    for i, row in enumerate(rows):
        if row >= 0:
            codec.scatter(only_valid, torch.tensor([row]), x[i : i + 1])
    codec.scatter(pool, masked, x)
    assert torch.equal(pool, only_valid)
    assert torch.equal(pool, before) == (max(rows) < 0)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_no_rows_is_no_work(codec):
    pool = torch.full((1, codec.layout.group_bytes), 7, dtype=torch.uint8)
    codec.scatter(pool, torch.empty(0, dtype=torch.int64), torch.empty(0, codec.width))
    assert (pool == 7).all()
    assert codec.gather(pool, torch.empty(3, 0, dtype=torch.int64)).shape == (3, 0, codec.width)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_gather_of_invalid_rows_is_zero_even_over_poison(codec):
    pool = torch.full((2, codec.layout.group_bytes), 0xFF, dtype=torch.uint8)
    assert codec.gather(pool, torch.tensor([0])).isnan().any()
    x = random_rows(2, codec.width, seed=15)
    codec.scatter(pool, torch.tensor([9, 70]), x)
    got = codec.gather(pool, torch.tensor([[-1, 9], [70, -5]]))
    assert got.shape == (2, 2, codec.width)
    assert same_bits(got[0, 0], torch.zeros(codec.width)) and same_bits(got[1, 1], torch.zeros(codec.width))
    assert same_bits(torch.stack((got[0, 1], got[1, 0])), codec.round_trip(x))


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_pool_may_be_one_layer_of_a_larger_buffer(codec):
    """A layer's pool is a view into a buffer of all layers, at an offset that suits no wider type."""
    size = 2 * codec.layout.group_bytes
    buffer = torch.full((size + 2,), 0x5A, dtype=torch.uint8)
    pool = buffer[1:-1].view(2, codec.layout.group_bytes)
    x = random_rows(2, codec.width, seed=16)
    codec.scatter(pool, torch.tensor([1, 127]), x)
    assert same_bits(codec.gather(pool, torch.tensor([1, 127])), codec.round_trip(x))
    data, scale = codec.rows_of(pool)
    assert same_bits(codec.decode(data[1, 63], scale[1, 63]), codec.round_trip(x[1]))
    assert buffer[0] == buffer[-1] == 0x5A


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_row_past_the_pool_is_an_error(codec):
    pool = torch.zeros(1, codec.layout.group_bytes, dtype=torch.uint8)
    with pytest.raises(IndexError):
        codec.gather(pool, torch.tensor([64]))
    with pytest.raises(IndexError):
        codec.scatter(pool, torch.tensor([64]), torch.zeros(1, codec.width))


def test_pool_of_another_layout_is_refused():
    for pool in (torch.zeros(1, 37376, dtype=torch.uint8), torch.zeros(1, 37440), torch.zeros(37440).byte()):
        with pytest.raises(ValueError, match="37440"):
            MAIN.gather(pool, torch.tensor([0]))


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_no_operation_waits_for_the_device(codec):
    """Fake tensors have no values: anything that reads one on the host, or shapes a result by it, raises."""
    with FakeTensorMode():
        pool = torch.empty(3, codec.layout.group_bytes, dtype=torch.uint8)
        rows, x = torch.empty(6, dtype=torch.int64), torch.empty(6, codec.width)
        codec.scatter(pool, rows, x)
        assert codec.gather(pool, rows).shape == x.shape
        assert codec.round_trip(x).shape == x.shape
        hadamard(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_cuda_graph_replays_what_the_cpu_computes(codec):
    layout, device = codec.layout, "cuda"
    pool = torch.zeros(4, layout.group_bytes, dtype=torch.uint8, device=device)
    rows, x = torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(8, codec.width, device=device)
    codec.gather(pool, rows)
    codec.scatter(pool, rows, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.scatter(pool, rows, x)
        out = codec.gather(pool, rows)
    reference = pool.cpu()
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        new_rows = torch.where(torch.rand(8, generator=g) < 0.4, -1, torch.randperm(256, generator=g)[:8])
        new_x = random_rows(8, codec.width, seed=seed)
        rows.copy_(new_rows)
        x.copy_(new_x)
        graph.replay()
        codec.scatter(reference, new_rows, new_x)
        assert torch.equal(pool.cpu(), reference)
        assert same_bits(out.cpu(), codec.gather(reference, new_rows))
