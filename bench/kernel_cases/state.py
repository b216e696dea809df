"""Cases of the kernels that write and copy state: append_window, flush_csa, flush_hca, gather, copy_state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_cases import in_tree
from kernel_cases.base import Case, op_wanted, sets_for, wanted
from sglang_dsv4.formats import index_codec, main_codec
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
    WINDOW,
    WINDOW_GROUPS,
)
from sglang_dsv4.ops.append_window import WindowNorm, append_window_cuda
from sglang_dsv4.ops.copy_state import copy_state_cuda
from sglang_dsv4.ops.flush import CompressorParams, flush_csa_cuda, flush_hca_cuda
from sglang_dsv4.ops.gather import gather_cuda
from sglang_dsv4.ops.meta import StepMeta, Workspace

CODEC, KEYS = main_codec(MAIN_FP8), index_codec(INDEX_FP4)
PAGE = 128
ROW, KEY_ROW = MAIN_FP8.row_bytes, INDEX_FP4.row_bytes
BATCHES = (1, 16, 64, 256)
MODELS = {"Flash": (43, 21), "Pro": (61, 30)}  # layers, CSA layers
CSA_TOKEN = 4 * (HEAD_DIM + INDEX_DIM) * 4  # bytes of one token's CSA projections, float32
HCA_TOKEN = 2 * HEAD_DIM * 4
RAW_COLUMNS = HEAD_DIM + 1024  # of the product that holds a layer's raw window rows and its low-rank queries


def make_meta(spans: list[tuple[int, int]], pages: list[int], device: torch.device, *, slot0: int = 1) -> StepMeta:
    """A step of (prefix, count) requests; `pages` is popped for their pages, slots and rows count up from slot0."""
    lens = [prefix + count for prefix, count in spans]
    needed = [-(-n // PAGE) for n in lens]
    columns = max(needed)
    table = [[pages.pop() for _ in range(n)] + [0] * (columns - n) for n in needed]
    offsets = [0]
    for _, count in spans:
        offsets.append(offsets[-1] + count)
    batch = len(spans)

    def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepMeta(
        req_rows=ints(list(range(slot0, slot0 + batch))),
        slots=ints(list(range(slot0, slot0 + batch))),
        prefix_lens=ints([prefix for prefix, _ in spans]),
        seq_lens=ints(lens),
        token_offsets=ints(offsets),
        token_to_req=ints([i for i, (_, count) in enumerate(spans) for _ in range(count)]),
        positions=ints([p for a, n in spans for p in range(a, a + n)], torch.int64),
        page_table=ints(table),
        snapshot_slots=torch.full((batch, 1), -1, dtype=torch.int32, device=device),
        snapshot_lens=torch.full((batch, 1), -1, dtype=torch.int32, device=device),
        page_size=PAGE,
    )


def rope_table(positions: int, device: torch.device) -> Tensor:
    angle = torch.rand(positions, ROPE_DIM // 2, device=device) * 6.28
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def compressor(ratio: int, width: int, rope: Tensor) -> CompressorParams:
    halves = 2 if ratio == CSA_RATIO else 1
    ape = torch.randn(ratio, halves * width, device=rope.device)
    return CompressorParams(ape, torch.ones(width, dtype=torch.bfloat16, device=rope.device), 1e-6, rope)


@dataclass
class Layers:
    """What a step of `spans` needs, `sets` times over: metadata, inputs and pools."""

    spans: list[tuple[int, int]]
    sets: int
    device: torch.device

    def __post_init__(self) -> None:
        tokens = sum(count for _, count in self.spans)
        pages_each = sum(-(-(a + n) // PAGE) for a, n in self.spans)
        total = pages_each * self.sets + 1
        pages = list(range(1, total))
        random.Random(0).shuffle(pages)
        batch = len(self.spans)
        self.metas = [make_meta(self.spans, pages, self.device, slot0=1 + i * batch) for i in range(self.sets)]
        self.tokens, self.slots = tokens, 1 + self.sets * batch
        self.pages = total + 1
        self.rope = rope_table(max(a + n for a, n in self.spans) + 1, self.device)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def rows(self, layout_bytes: int, ratio: int) -> Tensor:
        groups = -(-self.pages * PAGE // (ratio * 64))
        return torch.zeros(groups, layout_bytes, dtype=torch.uint8, device=self.device)

    def append(self) -> Callable[[int], object]:
        window = torch.zeros(WINDOW_GROUPS * self.slots, MAIN_FP8.group_bytes, dtype=torch.uint8, device=self.device)
        kv = self.randn(self.sets, self.tokens, HEAD_DIM, dtype=torch.bfloat16)
        return lambda i: append_window_cuda(window, kv[i], self.metas[i], codec=CODEC)

    def append_raw(self) -> tuple[Callable[[int], object], Callable[[int], object] | None]:
        """Raw projections, columns of a wider product; and the in-tree kernel on the same rows."""
        window = torch.zeros(WINDOW_GROUPS * self.slots, MAIN_FP8.group_bytes, dtype=torch.uint8, device=self.device)
        wide = self.randn(self.sets, self.tokens, RAW_COLUMNS, dtype=torch.bfloat16)
        weight = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device=self.device)
        norm = WindowNorm(weight, 1e-6, self.rope)

        def run(i: int) -> None:
            append_window_cuda(window, wide[i, :, :HEAD_DIM], self.metas[i], codec=CODEC, norm=norm)

        return run, in_tree.store_raw(wide[:, :, :HEAD_DIM], weight, [m.positions for m in self.metas], self.device)

    def csa(self) -> Callable[[int], object]:
        main, index = compressor(CSA_RATIO, HEAD_DIM, self.rope), compressor(CSA_RATIO, INDEX_DIM, self.rope)
        x = self.randn(self.sets, self.tokens, 4 * HEAD_DIM)
        y = self.randn(self.sets, self.tokens, 4 * INDEX_DIM)
        overlap = self.randn(self.slots, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM)
        tail = self.randn(self.slots, CSA_RATIO, 2, STATE_PARTS, CSA_STATE_DIM)
        entries, keys = self.rows(MAIN_FP8.group_bytes, CSA_RATIO), self.rows(INDEX_FP4.group_bytes, CSA_RATIO)

        def run(i: int) -> None:
            flush_csa_cuda(
                main, x[i], index, y[i], overlap, tail, entries, keys, self.metas[i], codec=CODEC, index_codec=KEYS
            )

        return run

    def hca(self) -> Callable[[int], object]:
        params = compressor(HCA_RATIO, HEAD_DIM, self.rope)
        x = self.randn(self.sets, self.tokens, 2 * HEAD_DIM)
        tail = self.randn(self.slots, HCA_RATIO, STATE_PARTS, HEAD_DIM)
        entries = self.rows(MAIN_FP8.group_bytes, HCA_RATIO)
        return lambda i: flush_hca_cuda(params, x[i], tail, entries, self.metas[i], codec=CODEC)


def csa_bytes(spans: list[tuple[int, int]]) -> int:
    """Projections read once, state rows read and written, entries and keys written."""
    total = 0
    for prefix, count in spans:
        end = prefix + count
        entries = end // CSA_RATIO - prefix // CSA_RATIO
        half = CSA_STATE_DIM * STATE_PARTS * 4
        kept = min(count, CSA_RATIO + end % CSA_RATIO)
        read = (CSA_RATIO + 2 * (prefix % CSA_RATIO)) * half if entries and prefix else 0
        total += count * CSA_TOKEN + entries * (ROW + KEY_ROW) + read
        total += (kept + min(count, end % CSA_RATIO)) * half
    return total


def hca_bytes(spans: list[tuple[int, int]]) -> int:
    total = 0
    for prefix, count in spans:
        end = prefix + count
        entries = end // HCA_RATIO - prefix // HCA_RATIO
        read = prefix % HCA_RATIO * HCA_TOKEN if entries else 0
        total += count * HCA_TOKEN + entries * ROW + read + min(count, end % HCA_RATIO) * HCA_TOKEN
    return total


def append_bytes(spans: list[tuple[int, int]]) -> int:
    return sum(min(count, WINDOW) * (2 * HEAD_DIM + ROW) for _, count in spans)


DECODE_OPS = ("append_window", "append_window, raw", "append_window + flush_csa", "flush_csa", "flush_hca")


def decode_cases(device: torch.device) -> Iterator[Case]:
    for batch in BATCHES:
        # Staggered: a quarter of the requests completes a CSA block, one in 128 an HCA block.
        staggered = [(4096 + 37 * i, 1) for i in range(batch)]
        together = [(4095 + 128 * (i % 8), 1) for i in range(batch)]
        for name, spans in (("staggered", staggered), ("all complete", together)):
            shape = f"decode, batch {batch}, {name}"
            if not any(wanted(op, shape) for op in DECODE_OPS):
                continue
            sets = sets_for(batch * (CSA_TOKEN + ROW + 3 * 4 * STATE_PARTS * CSA_STATE_DIM * 4))
            layers = Layers(spans, min(sets, 64), device)
            if name == "staggered":
                append = layers.append()
                yield Case("append_window", shape, append_bytes(spans), append, layers.sets)
                raw, rival = layers.append_raw()
                rival_name = "SGLang 0.5.23 fused_k_norm_rope_flashmla" if rival else None
                moved = append_bytes(spans) + batch * ROPE_DIM * 4
                yield Case("append_window, raw", shape, moved, raw, layers.sets, rival=rival_name, rival_run=rival)
                csa = layers.csa()

                def both(i: int, append: Callable[[int], object] = append, csa: Callable[[int], object] = csa) -> None:
                    csa(i)
                    append(i)

                total = append_bytes(spans) + csa_bytes(spans)
                rival = in_tree.decode_layer([a for a, _ in spans], layers.sets, device)
                rival_name = in_tree.NAME if rival else None
                limit = "1.02 of the rival" if batch == 64 else ""
                yield Case(
                    "append_window + flush_csa",
                    shape,
                    total,
                    both,
                    layers.sets,
                    rival=rival_name,
                    rival_run=rival,
                    limit=limit,
                )
            else:
                csa = layers.csa()
            yield Case("flush_csa", shape, csa_bytes(spans), csa, layers.sets)
            del csa
            small = Layers(spans, 8 if batch >= 64 else 32, device)
            yield Case("flush_hca", shape, hca_bytes(spans), small.hca(), small.sets)


def prefill_cases(device: torch.device) -> Iterator[Case]:
    for spans, shape in (
        ([(0, 8192)], "prefill, 1 x 8192"),
        ([(32768, 8192)], "prefill, 8192 at 32K"),
        ([(1000 + 3 * i, 1024) for i in range(8)], "prefill, 8 x 1024 unaligned"),
    ):
        layers = Layers(spans, 4, device)
        yield Case("append_window", shape, append_bytes(spans), layers.append(), 4)
        yield Case("flush_csa", shape, csa_bytes(spans), layers.csa(), 4, limit="70 % of copy bandwidth")
        yield Case("flush_hca", shape, hca_bytes(spans), layers.hca(), 4, limit="70 % of copy bandwidth")


def gather_cases(device: torch.device) -> Iterator[Case]:
    """One request at each context, alone in its step with a long or a short chunk; then a step of eight."""
    for context in (8192, 32768, 131072, 1048576):
        for ratio, chunk in ((CSA_RATIO, 8192), (CSA_RATIO, 256), (HCA_RATIO, 8192)):
            shape = f"ratio {ratio}, context {context // 1024}K, chunk {chunk}"
            yield gather_case(shape, [(context - chunk, chunk)], ratio, 4 if context < 1 << 20 else 2, device)
    for context in (8192, 32768):
        spans = [(context - 1024, 1024)] * 8
        yield gather_case(f"ratio 4, context 8 x {context // 1024}K, chunk 1024", spans, CSA_RATIO, 4, device)


def gather_case(shape: str, spans: list[tuple[int, int]], ratio: int, sets: int, device: torch.device) -> Case:
    layers = Layers(spans, sets, device)
    window = torch.zeros(WINDOW_GROUPS * layers.slots, MAIN_FP8.group_bytes, dtype=torch.uint8, device=device)
    entries = layers.rows(MAIN_FP8.group_bytes, ratio)
    entries.random_(0, 120)  # finite codes and scales
    plan = Workspace.plan([a for a, _ in spans], [a + n for a, n in spans], ratio, device)
    kv = layers.randn(layers.sets, layers.tokens, HEAD_DIM, dtype=torch.bfloat16)
    workspace = torch.empty(layers.sets, plan.num_rows, HEAD_DIM, dtype=torch.bfloat16, device=device)
    stored = sum((a + n) // ratio + min(a, WINDOW) for a, n in spans)
    moved = stored * (ROW + 2 * HEAD_DIM) + layers.tokens * 4 * HEAD_DIM

    def run(i: int) -> None:
        gather_cuda(workspace[i], window, kv[i], entries, layers.metas[i], plan, ratio=ratio, codec=CODEC)

    return Case("gather", shape, moved, run, layers.sets, limit="85 % of copy bandwidth")


def copy_cases(device: torch.device) -> Iterator[Case]:
    for model, (layers, csa_layers) in MODELS.items():
        slots = 1 + 4 * 64
        windows = torch.empty(
            layers, slots, WINDOW_GROUPS * MAIN_FP8.group_bytes, dtype=torch.uint8, device=device
        ).random_(0, 256)
        overlaps = torch.randn(csa_layers, slots, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM, device=device)
        slot_bytes = windows[:, 0].nbytes + overlaps[:, 0].nbytes
        order = torch.randperm(slots - 1, device=device).reshape(4, 64) + 1
        for pairs in (1, 32):
            src, dst = order[:, :pairs].contiguous(), order[:, 32 : 32 + pairs].contiguous()

            def run(i: int, w: Tensor = windows, o: Tensor = overlaps, s: Tensor = src, d: Tensor = dst) -> None:
                copy_state_cuda(w, o, s[i], d[i])

            def indexed(i: int, w: Tensor = windows, o: Tensor = overlaps, s: Tensor = src, d: Tensor = dst) -> None:
                w[:, d[i]] = w[:, s[i]]
                o[:, d[i]] = o[:, s[i]]

            limit = "80 % of copy bandwidth" if pairs == 32 else ""
            shape = f"{model}, {pairs} snapshot{'s' if pairs > 1 else ''}"
            moved = 2 * pairs * slot_bytes
            yield Case("copy_state", shape, moved, run, 4, rival="torch indexing", rival_run=indexed, limit=limit)
        none = torch.full((4, 256), -1, dtype=torch.int64, device=device)

        def nothing(i: int, w: Tensor = windows, o: Tensor = overlaps, n: Tensor = none) -> None:
            copy_state_cuda(w, o, n[i], n[i])

        yield Case("copy_state", f"{model}, batch 256, nothing due", 256 * 16, nothing, 4, limit="5 us")
        del windows, overlaps


def cases(device: torch.device) -> Iterator[Case]:
    """All cases, built one after another: hold no more than one."""
    flushes = ("append_window", "flush_csa", "flush_hca")
    if op_wanted(*flushes):
        yield from prefill_cases(device)
        yield from decode_cases(device)
    if op_wanted("gather"):
        yield from gather_cases(device)
    if op_wanted("copy_state"):
        yield from copy_cases(device)
