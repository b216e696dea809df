"""What a decode step's layers share: the reference against plain loops, the kernel against the reference."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from kernel_steps import Guarded
from torch import Tensor

from sglang_dsv4.ops.decode_rows import DecodeRows, decode_rows, decode_rows_cuda

TABLE_ROWS, CONTEXT = 70, 70_000


def batch(lens: list[int], page: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """rows, seq_lens, positions, req_to_token, slot_of_row: requests in random rows, pages in random order; 0 pads."""
    rng = random.Random(seed)
    rows = rng.sample(range(1, TABLE_ROWS), len(lens))
    table = torch.full((TABLE_ROWS, CONTEXT), -7, dtype=torch.int32)
    for row, length in zip(rows, lens, strict=True):
        pages = -(-length // page)
        order = rng.sample(range(1, 4 * pages + 2), pages)
        tokens = (torch.tensor(order)[:, None] * page + torch.arange(page)).flatten()[:CONTEXT]
        table[row, : len(tokens)] = tokens
    rows = [row if length else 0 for row, length in zip(rows, lens, strict=True)]
    slots = torch.tensor([0, *rng.sample(range(1, 500), TABLE_ROWS - 1)], dtype=torch.int32)
    seq = torch.tensor([max(length, 1) for length in lens])
    return torch.tensor(rows), seq.to(dtype), seq - 1, table, slots


def poisoned(requests: int, page: int, make) -> DecodeRows:
    """Every tensor holds 77 everywhere, but the offsets."""
    out = DecodeRows.allocate(requests, CONTEXT, page, torch.device("cpu"))
    for field in fields(out):
        value = getattr(out, field.name)
        if isinstance(value, Tensor):
            setattr(out, field.name, make(value if field.name == "token_offsets" else torch.full_like(value, 77)))
    return out


LENS = [
    [1],
    [1, 2, 127, 128, 129, 255, 256, 257, 4096, 8191, 65536],
    [0, 300, 0, 0, 128],
    [random.Random(5).randrange(1, CONTEXT) for _ in range(64)],
]


@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("lens", LENS, ids=["one", "edges", "padded", "many"])
def test_the_reference_agrees_with_plain_loops(lens, page):
    rows, seq, positions, table, slots = batch(lens, page, torch.int64)
    out = poisoned(len(lens), page, lambda x: x)
    decode_rows(out, rows, seq, positions, table, slots)
    for b, length in enumerate(lens):
        row = int(rows[b])
        slot = int(slots[row])
        assert out.req_rows[b] == row and out.slots[b] == slot and out.seq_lens[b] == length
        assert out.prefix_lens[b] == max(length - 1, 0) and out.positions[b] == max(length, 1) - 1
        assert out.token_to_req[b] == (b if length else -1)
        pages = [int(table[row, start]) // page for start in range(0, length, page)]
        assert out.page_table[b, : len(pages)].tolist() == pages
        assert (out.page_table[b, len(pages) :] == 77).all()
        ring = [slot * 128 + p % 128 if p >= 0 and length else -1 for p in range(length - 128, length)]
        assert out.window_rows[b].tolist() == ring
        blocks = length // 128
        per_page = page // 128
        entries = [pages[e // per_page] * per_page + e % per_page for e in range(blocks)]
        assert out.hca_rows[b, :blocks].tolist() == entries and (out.hca_rows[b, blocks:] == -1).all()
        assert out.hca_lens[b] == max(blocks, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("lens", LENS, ids=["one", "edges", "padded", "many"])
def test_the_kernel_writes_what_the_reference_writes(lens, page, dtype, device):
    inputs = batch(lens, page, dtype)
    want = poisoned(len(lens), page, lambda x: x)
    decode_rows(want, *inputs)
    guard = Guarded(device)
    got = poisoned(len(lens), page, guard.copy)
    decode_rows_cuda(got, *(x.to(device) for x in inputs))
    for field in fields(want):
        expected = getattr(want, field.name)
        if isinstance(expected, Tensor):
            assert torch.equal(getattr(got, field.name).cpu(), expected), field.name
    guard.check()


def test_a_replayed_launch_reads_the_lengths_of_its_replay(device):
    first, second = (batch([3 + k, 700 * k + 1], 128, torch.int64, seed=k) for k in (1, 2))
    inputs = [x.to(device) for x in first]
    out = DecodeRows.allocate(2, CONTEXT, 128, device)
    decode_rows_cuda(out, *inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_rows_cuda(out, *inputs)
    for held, new in zip(inputs, second, strict=True):
        held.copy_(new)
    graph.replay()
    want = DecodeRows.allocate(2, CONTEXT, 128, device)
    decode_rows_cuda(want, *inputs)
    for name in ("slots", "seq_lens", "window_rows", "hca_rows", "hca_lens"):
        assert torch.equal(getattr(out, name), getattr(want, name)), name


def test_a_row_outside_the_table_counts_as_padding(device):
    rows, *rest = batch([300, 300], 128, torch.int64)
    rows[1] = TABLE_ROWS
    out = DecodeRows.allocate(2, CONTEXT, 128, device)
    decode_rows_cuda(out, rows.to(device), *(x.to(device) for x in rest))
    assert out.token_to_req.tolist() == [0, -1] and out.seq_lens.tolist() == [300, 0]
    assert (out.window_rows[1] == -1).all() and (out.hca_rows[1] == -1).all()


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda out, args: args.__setitem__(0, args[0].int()), "rows is int32"),
        (lambda out, args: args.__setitem__(3, args[3].long()), "req_to_token is int64"),
        (lambda out, args: args.__setitem__(4, args[4][1:]), "slot_of_row is int32"),
        (lambda out, args: setattr(out, "hca_lens", out.hca_lens[1:]), "out.hca_lens is int32"),
        (lambda out, args: setattr(out, "page_size", 64), "out.page_size is 64"),
        (lambda out, args: None, "device is cpu"),
    ],
)
def test_bad_input_is_named(change, message):
    args = list(batch([300, 5], 128, torch.int64))
    out = DecodeRows.allocate(2, CONTEXT, 128, torch.device("cpu"))
    change(out, args)
    with pytest.raises(ValueError, match=f"decode_rows: {message}"):
        decode_rows_cuda(out, *args)
