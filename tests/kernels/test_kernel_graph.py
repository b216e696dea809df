"""The state kernels in a captured CUDA graph: replayed over 300 steps they leave the bytes of eager calls."""

from __future__ import annotations

import random
from dataclasses import fields

import torch
from kernel_steps import (
    Guarded,
    Numbers,
    Plan,
    csa_buffers,
    entry_groups,
    hca_buffers,
    make_step,
    same_bytes,
    values,
    window_pool,
)

from sglang_dsv4.formats import index_codec, main_codec
from sglang_dsv4.geometry import HEAD_DIM, INDEX_FP4, MAIN_FP8, WINDOW_GROUPS
from sglang_dsv4.ops.append_window import append_window_cuda
from sglang_dsv4.ops.copy_state import copy_state_cuda
from sglang_dsv4.ops.flush import flush_csa_cuda, flush_hca_cuda
from sglang_dsv4.ops.gather import gather_cuda
from sglang_dsv4.ops.meta import StepMeta, Workspace

CODEC, KEYS = main_codec(MAIN_FP8), index_codec(INDEX_FP4)
BATCH, STEPS, SPARE = 8, 300, 24


class Decoder:
    """Pools and static inputs of one decode batch; `launch` issues every state kernel once."""

    def __init__(self, meta: StepMeta, numbers: Numbers, device: torch.device) -> None:
        self.guard = Guarded(device)
        self.meta = meta
        self.csa = csa_buffers(meta, numbers, INDEX_FP4, self.guard, seed=1)
        self.hca = hca_buffers(meta, numbers, self.guard, seed=1)
        self.window = window_pool(numbers, self.guard)
        self.kv = values((BATCH, HEAD_DIM), device, 2)
        self.src = torch.full((BATCH,), -1, dtype=torch.int64, device=device)
        self.dst = self.src.clone()

    def load(self, other: StepMeta, kv, main, index, hca, src, dst) -> None:
        for f in fields(StepMeta):
            mine = getattr(self.meta, f.name)
            if isinstance(mine, torch.Tensor):
                mine.copy_(getattr(other, f.name))
        for mine, new in (
            (self.kv, kv),
            (self.csa.main_kv_score, main),
            (self.csa.index_kv_score, index),
            (self.hca.kv_score, hca),
            (self.src, src),
            (self.dst, dst),
        ):
            mine.copy_(new)

    def launch(self) -> None:
        flush_csa_cuda(*self.csa.arguments(), self.meta, codec=CODEC, index_codec=KEYS)
        flush_hca_cuda(*self.hca.arguments(), self.meta, codec=CODEC)
        append_window_cuda(self.window, self.kv, self.meta, codec=CODEC)
        slots = self.csa.overlap.shape[0]
        windows = self.window.view(1, slots, WINDOW_GROUPS * MAIN_FP8.group_bytes)
        copy_state_cuda(windows, self.csa.overlap[None], self.src, self.dst)

    def state(self) -> list[torch.Tensor]:
        return [*self.csa.written().values(), *self.hca.written().values(), self.window]


def test_replay_over_300_steps_equals_eager(device):
    rng = random.Random(0)
    # Phases of both block kinds; the batch shrinks and grows, the rest of the rows is padding.
    start = [0, 1, 2, 3, 61, 125, 127, 253]
    longest = Plan([(n + STEPS, 1) for n in start], spare_slots=SPARE, seed=3)
    final, numbers = make_step(longest, device)

    def step_meta(at: int) -> tuple[StepMeta, list[bool]]:
        alive = [rng.random() < 0.9 for _ in start]
        meta, _ = make_step(Plan([(n + at, 1) for n in start], spare_slots=SPARE, seed=3), device)
        for field in ("page_table", "slots", "req_rows"):  # a request keeps them for life
            setattr(meta, field, getattr(final, field).clone())
        for i, live in enumerate(alive):
            if not live:
                meta.token_to_req[i] = -1
                meta.positions[i] = 0
                for field in (meta.prefix_lens, meta.seq_lens, meta.slots, meta.req_rows):
                    field[i] = 0
        return meta, alive

    graphed, eager = (Decoder(make_step(longest, device)[0], numbers, device) for _ in range(2))
    captured = torch.cuda.CUDAGraph()
    before = [t.clone() for t in graphed.state()]
    with torch.cuda.graph(captured):
        graphed.launch()
    for tensor, saved in zip(graphed.state(), before, strict=True):
        assert same_bytes(tensor, saved), "capturing must not run anything"
    spare = list(range(numbers.slots - SPARE, numbers.slots))
    for at in range(STEPS):
        meta, alive = step_meta(at)
        src, dst = [-1] * BATCH, [-1] * BATCH
        for i, live in enumerate(alive):
            if live and (start[i] + at + 1) % 128 == 0 and spare:
                src[i], dst[i] = int(meta.slots[i]), spare.pop()
        inputs = [values((BATCH, n), device, 1000 + at) for n in (HEAD_DIM, 4 * HEAD_DIM, 512, 2 * HEAD_DIM)]
        pairs = [torch.tensor(x, dtype=torch.int64, device=device) for x in (src, dst)]
        for decoder in (graphed, eager):
            decoder.load(meta, *inputs, *pairs)
        captured.replay()
        eager.launch()
        if at % 50 == 49 or at < 3:
            for a, b in zip(graphed.state(), eager.state(), strict=True):
                assert same_bytes(a, b), f"step {at}"
    assert len(spare) < SPARE, "no snapshot was due"
    graphed.guard.check()


def test_gather_replays_with_other_lengths(device):
    _, numbers = make_step(Plan([(900, 4), (700, 4)]), device)
    guard = Guarded(device)
    window = window_pool(numbers, guard)
    pool = guard.poison((entry_groups(numbers, 4, 128), MAIN_FP8.group_bytes), torch.uint8)
    for target, seed in ((window, 1), (pool, 2)):
        rows = torch.arange(target.shape[0] * 64, device=device)
        CODEC.scatter(target, rows, values((rows.numel(), HEAD_DIM), device, seed))
    kv = values((8, HEAD_DIM), device, 3)
    static = Workspace.plan([900, 700], [904, 704], 4, device)
    workspace = guard.poison((static.num_rows, HEAD_DIM), torch.bfloat16)
    captured = torch.cuda.CUDAGraph()
    meta = make_step(Plan([(900, 4), (700, 4)]), device)[0]
    gather_cuda(workspace, window, kv, pool, meta, static, ratio=4, codec=CODEC)
    with torch.cuda.graph(captured):
        gather_cuda(workspace, window, kv, pool, meta, static, ratio=4, codec=CODEC)
    for prefix in ([900, 700], [10, 650], [0, 0], [131, 3]):
        lens = [p + 4 for p in prefix]
        plan = Workspace.plan(prefix, lens, 4, device)
        now = make_step(Plan(list(zip(prefix, [4, 4], strict=True))), device)[0]
        for name in ("prefix_lens", "seq_lens", "positions", "slots"):
            getattr(meta, name).copy_(getattr(now, name))
        static.offsets.copy_(plan.offsets)
        static.num_entries.copy_(plan.num_entries)
        workspace.fill_(float("nan"))
        captured.replay()
        want = torch.full_like(workspace, float("nan"))
        gather_cuda(want, window, kv, pool, meta, plan, ratio=4, codec=CODEC)
        assert same_bytes(workspace, want)
    guard.check()


def test_kernels_run_on_the_current_stream(device):
    """A launch on another stream than torch's current one would not wait for the copy before it."""
    meta, numbers = make_step(Plan([(5, 1)]), device)
    guard = Guarded(device)
    window = window_pool(numbers, guard)
    kv = torch.zeros(1, HEAD_DIM, device=device)
    source = values((1, HEAD_DIM), device, 1)
    append_window_cuda(window, source, meta, codec=CODEC)
    want = window.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        kv.copy_(source)
        append_window_cuda(window, kv, meta, codec=CODEC)
        got = window.clone()
    side.synchronize()
    assert same_bytes(got, want)
