"""Steps, pools and guarded buffers for kernel tests: requests in any phase, pages, slots and rows in random order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import (
    CSA_RATIO,
    CSA_STATE_DIM,
    HCA_RATIO,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_FP4,
    MAIN_FP8,
    ROPE_DIM,
    STATE_PARTS,
    WINDOW_GROUPS,
    RowLayout,
)
from sglang_dsv4.ops.flush import CompressorParams
from sglang_dsv4.ops.meta import StepMeta

GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF  # NaN as e4m3, bf16, float32 and ue8m0


class Guarded:
    """Allocates tensors between guard bytes; `check` finds a write outside them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = dtype.itemsize
        for size in shape:
            count *= size
        buffer = torch.full((count + 2 * GUARD_BYTES,), GUARD_BYTE, dtype=torch.uint8, device=self.device)
        self.buffers.append(buffer)
        inner = buffer[GUARD_BYTES : GUARD_BYTES + count]
        return inner.view(dtype).view(*shape)

    def copy(self, x: Tensor) -> Tensor:
        y = self.empty(x.shape, x.dtype)
        return y.copy_(x)

    def poison(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        y = self.empty(shape, dtype)
        y.view(torch.uint8).fill_(POISON_BYTE)
        return y

    def check(self) -> None:
        for buffer in self.buffers:
            assert bool((buffer[:GUARD_BYTES] == GUARD_BYTE).all()), "bytes before a buffer were written"
            assert bool((buffer[-GUARD_BYTES:] == GUARD_BYTE).all()), "bytes behind a buffer were written"


@dataclass
class Plan:
    """What a step does: (prefix, count) per request, padding, snapshots as {request: [(length, slot)]}."""

    requests: list[tuple[int, int]]
    pad_requests: int = 0
    pad_tokens: int = 0
    snapshots: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    page: int = 128
    seed: int = 0
    spare_slots: int = 4


@dataclass
class Numbers:
    """How large the pools are that a plan's step addresses."""

    slots: int
    rows: int
    pages: int


def make_step(plan: Plan, device: torch.device) -> tuple[StepMeta, Numbers]:
    """The step's metadata. Slots and rows run over 1 .. n in random order, 0 is the padding's; pages likewise.

    The last `spare_slots` slots belong to no request: snapshots name them as num_slots - 1, num_slots - 2 ...
    Page table columns that no token uses hold a page that does not exist.
    """
    rng = random.Random(plan.seed)
    live, total = len(plan.requests), len(plan.requests) + plan.pad_requests
    lens = [prefix + count for prefix, count in plan.requests]
    needed = [-(-length // plan.page) for length in lens]
    columns = max([1, *needed]) + 1
    pages = list(range(1, sum(needed) + 2))
    rng.shuffle(pages)
    table = [[pages.pop() for _ in range(n)] + [1 << 24] * (columns - n) for n in needed]
    table += [[0] * columns] * plan.pad_requests
    slots, rows = list(range(1, live + 1)), list(range(1, live + 1))
    rng.shuffle(slots)
    rng.shuffle(rows)
    numbers = Numbers(live + 1 + plan.spare_slots, live + 1, sum(needed) + 2)

    owner = [i for i, (_, count) in enumerate(plan.requests) for _ in range(count)] + [-1] * plan.pad_tokens
    positions = [p for prefix, count in plan.requests for p in range(prefix, prefix + count)]
    positions += [0] * plan.pad_tokens
    offsets = [0]
    for _, count in plan.requests:
        offsets.append(offsets[-1] + count)
    offsets += [offsets[-1]] * plan.pad_requests
    width = max((len(v) for v in plan.snapshots.values()), default=0)
    due = [(plan.snapshots.get(i, []) + [(-1, -1)] * width)[:width] for i in range(total)]
    zero = [0] * plan.pad_requests

    def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    meta = StepMeta(
        req_rows=ints(rows + zero),
        slots=ints(slots + zero),
        prefix_lens=ints([prefix for prefix, _ in plan.requests] + zero),
        seq_lens=ints(lens + zero),
        token_offsets=ints(offsets),
        token_to_req=ints(owner),
        positions=ints(positions, torch.int64),
        page_table=ints(table).reshape(total, columns),
        snapshot_slots=ints([[s for _, s in row] for row in due]).reshape(total, width),
        snapshot_lens=ints([[n for n, _ in row] for row in due]).reshape(total, width),
        page_size=plan.page,
    )
    return meta, numbers


def meta_to(meta: StepMeta, device: torch.device | str) -> StepMeta:
    """A copy of the metadata on another device."""
    moved = {f.name: getattr(meta, f.name) for f in fields(meta)}
    return replace(meta, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


def entry_groups(numbers: Numbers, ratio: int, page: int) -> int:
    return -(-numbers.pages * page // (ratio * 64))


def values(shape: Sequence[int], device: torch.device, seed: int, spread: float = 3.0) -> Tensor:
    """float32 with magnitudes over several powers of ten per row, as activations have."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=device)
    scale = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator, device=device)
    return x * torch.exp(scale * spread / 3.0)


def rope_table(positions: int, device: torch.device) -> Tensor:
    """float32 [positions, 64]: cos of 32 pairs, then sin."""
    angle = torch.arange(positions, device=device, dtype=torch.float64)[:, None]
    angle = angle * 1e4 ** (-torch.arange(ROPE_DIM // 2, device=device, dtype=torch.float64) / (ROPE_DIM // 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def compressor(ratio: int, width: int, device: torch.device, positions: int, seed: int) -> CompressorParams:
    halves = 2 if ratio == CSA_RATIO else 1
    weight = 1.0 + 0.1 * values((1, width), device, seed + 1, 0.0)[0]
    ape = values((ratio, halves * width), device, seed, 0.0)
    return CompressorParams(ape, weight.bfloat16(), 1e-6, rope_table(positions, device))


@dataclass
class CsaBuffers:
    """Inputs, state and pools of one `flush_csa`; `arguments` are in the order of its signature."""

    main: CompressorParams
    main_kv_score: Tensor
    index: CompressorParams
    index_kv_score: Tensor
    overlap: Tensor
    tail: Tensor
    entries: Tensor
    index_keys: Tensor

    def arguments(self) -> tuple:
        return tuple(getattr(self, f.name) for f in fields(self))

    def written(self) -> dict[str, Tensor]:
        return {k: getattr(self, k) for k in ("overlap", "tail", "entries", "index_keys")}

    def copy(self, guard: Guarded) -> CsaBuffers:
        return replace(self, **{k: guard.copy(v) for k, v in self.written().items()})


def csa_buffers(
    meta: StepMeta, numbers: Numbers, index: RowLayout, guard: Guarded, seed: int = 0, poison: bool = False
) -> CsaBuffers:
    """`poison` leaves the state NaN, otherwise it holds random rows as if earlier steps had run."""
    device, longest = guard.device, int(meta.seq_lens.max()) + 1
    overlap = guard.poison((numbers.slots, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM), torch.float32)
    tail = guard.poison((numbers.rows, CSA_RATIO, 2, STATE_PARTS, CSA_STATE_DIM), torch.float32)
    if not poison:
        overlap.copy_(values(overlap.shape, device, seed + 7))
        tail.copy_(values(tail.shape, device, seed + 8))
    groups = entry_groups(numbers, CSA_RATIO, meta.page_size)
    return CsaBuffers(
        compressor(CSA_RATIO, HEAD_DIM, device, longest, seed),
        values((meta.num_tokens, 4 * HEAD_DIM), device, seed + 3),
        compressor(CSA_RATIO, INDEX_DIM, device, longest, seed + 10),
        values((meta.num_tokens, 4 * INDEX_DIM), device, seed + 4),
        overlap,
        tail,
        guard.poison((groups, MAIN_FP8.group_bytes), torch.uint8),
        guard.poison((groups, index.group_bytes), torch.uint8),
    )


@dataclass
class HcaBuffers:
    """Inputs, tail and pool of one `flush_hca`; `arguments` are in the order of its signature."""

    params: CompressorParams
    kv_score: Tensor
    tail: Tensor
    entries: Tensor

    def arguments(self) -> tuple:
        return tuple(getattr(self, f.name) for f in fields(self))

    def written(self) -> dict[str, Tensor]:
        return {k: getattr(self, k) for k in ("tail", "entries")}

    def copy(self, guard: Guarded) -> HcaBuffers:
        return replace(self, **{k: guard.copy(v) for k, v in self.written().items()})


def hca_buffers(meta: StepMeta, numbers: Numbers, guard: Guarded, seed: int = 0, poison: bool = False) -> HcaBuffers:
    device, longest = guard.device, int(meta.seq_lens.max()) + 1
    tail = guard.poison((numbers.rows, HCA_RATIO, STATE_PARTS, HEAD_DIM), torch.float32)
    if not poison:
        tail.copy_(values(tail.shape, device, seed + 8))
    groups = entry_groups(numbers, HCA_RATIO, meta.page_size)
    return HcaBuffers(
        compressor(HCA_RATIO, HEAD_DIM, device, longest, seed),
        values((meta.num_tokens, 2 * HEAD_DIM), device, seed + 3),
        tail,
        guard.poison((groups, MAIN_FP8.group_bytes), torch.uint8),
    )


def window_pool(numbers: Numbers, guard: Guarded) -> Tensor:
    return guard.poison((WINDOW_GROUPS * numbers.slots, MAIN_FP8.group_bytes), torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_rows_close(codec: RowCodec, got: torch.Tensor, want: torch.Tensor, untouched_byte: int = POISON_BYTE):
    """The same rows written, unwritten bytes equal, and written values within a step of the codec."""
    data, scale = codec.rows_of(got)
    want_data, want_scale = codec.rows_of(want)
    written = (want_data != untouched_byte).any(-1)
    assert torch.equal((data != untouched_byte).any(-1), written)
    assert same_bytes(data[~written], want_data[~written])
    assert same_bytes(scale[~written], want_scale[~written])
    if not written.any():
        return
    x, y = (codec.decode(d[written], s[written]) for d, s in ((data, scale), (want_data, want_scale)))
    assert torch.isfinite(x).all()
    # e4m3 steps are an eighth of the value, MXFP4 steps half of it; near zero a step is a fraction of the scale.
    relative = 0.5 if codec.layout == INDEX_FP4 else 0.13
    floor = (y.abs().amax(-1, keepdim=True) / (8 if codec.layout == INDEX_FP4 else 448)).clamp(min=1e-6)
    assert ((x - y).abs() <= relative * torch.maximum(x.abs(), y.abs()) + floor).all()
    # A float32 scale may differ in its last bit, which moves all values: what counts are the codes.
    other = (data[written] != want_data[written]).float().mean()
    assert other < 5e-3, f"{other:.2%} of the codes differ, more than rounding explains"
