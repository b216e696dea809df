"""SGLang's attention backend: turns a ForwardBatch into a `core.Step` and runs the layers on it.

Everything that a step reads from SGLang's own tensors (request table, slot mapping, lengths) is read in
`init_forward_metadata_out_graph`, before the layers run; a captured decode graph reads static copies only.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from torch import Tensor

from sglang_dsv4.attention.agreement import RankAgreement
from sglang_dsv4.attention.core import Projections, Step, attend
from sglang_dsv4.attention.lanes import Lanes, NoLanes
from sglang_dsv4.cache.handle import CacheHandle
from sglang_dsv4.cache.pages import PagePool
from sglang_dsv4.cache.slots import SlotReqToTokenPool
from sglang_dsv4.geometry import CSA_RATIO
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.decode_rows import DecodeRows
from sglang_dsv4.ops.dispatch import operations, reference_forced
from sglang_dsv4.ops.meta import StepMeta, from_host
from sglang_dsv4.ops.score_plan import ScorePlan
from sglang_dsv4.refusals import Refused

logger = logging.getLogger(__name__)

# Above this batch a decode step fills the card without side streams; the in-tree model's limit on Hopper.
LANES_LIMIT = 64


class SlotAttentionBackend(AttentionBackend):
    """Attention over `PagePool` and `SlotReqToTokenPool`. Refuses to exist over any other pools."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = torch.device(runner.device)
        self.requests = _expect(
            runner.req_to_token_pool, SlotReqToTokenPool, "KVCacheConfigurator._build_hybrid_req_pool"
        )
        self.pages = _expect(runner.token_to_kv_pool, PagePool, "KVCacheConfigurator._build_token_to_kv_pool")
        self.geometry = self.pages.geometry
        self.page_size = self.geometry.page_size
        # No request outgrows the pool: captured steps are as wide as the longest one that there can be.
        self.longest = min(runner.model_config.context_len, self.pages.size)
        self.slots = self.requests.mamba_pool.store
        self.cache = CacheHandle(self.geometry, self.pages.store, self.slots, self.requests.tails)
        self.ops = operations(self.device.type)
        _compile(self.device)
        self._last_layer = self.geometry.num_layers - 1
        self._agreement = RankAgreement.of_server(self.geometry.layers_of(CSA_RATIO))
        self._static: DecodeRows | None = None
        self._scoring: ScorePlan | None = None
        self._captured: dict[int, Step] = {}
        self._step: Step | None = None
        self._snapshots: tuple[Tensor, Tensor] | None = None
        self._lanes: Lanes | NoLanes = NoLanes()

    # Metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager steps: tensors of their own."""
        mode = forward_batch.forward_mode
        self._step, self._snapshots = None, None
        if mode.is_decode():
            self._step = self._decode_step(forward_batch)
            self._snapshots = self._due_snapshots(forward_batch, self._step.meta)
        elif not mode.is_idle():
            self._step = self._extend_step(forward_batch)
        if self._agreement is not None and self._step is not None:
            self._step.chose = self._agreement.chose
            meta = self._step.meta
            self._agreement.start(meta, self._snapshots or (meta.snapshot_slots, meta.snapshot_lens))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Captured decode steps: fills the static tensors that the graph of this batch size reads."""
        if self._static is None or not forward_batch.forward_mode.is_decode():
            self.init_forward_metadata(forward_batch)
            return
        size = forward_batch.batch_size
        if in_capture:
            lanes = self._lanes if size <= LANES_LIMIT else NoLanes()
            assert self._scoring is not None
            rows, scoring = self._static.first(size), self._scoring.first(size)
            self._captured[size] = Step(
                rows.meta(), self.cache, self.ops, True, self.longest, lanes=lanes, rows=rows, scoring=scoring
            )
        self._step = self._captured[size]
        self._fill(self._step, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The snapshots of a captured step: recorded here, run by every replay ahead of the first layer."""
        step = self._step
        if step is None or step is not self._captured.get(forward_batch.batch_size):
            return
        # The view that SGLang gives before a replay lacks the mask: it is read here, from the runner's own buffers.
        self._snapshots = self._due_snapshots(forward_batch, step.meta)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Decode: what SGLang's scheduler may overwrite (request table, slot mapping, lengths) is copied into static
        tensors before the replay, and layers read those."""
        return SharedReadEnds.PRE_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the static tensors of captured decode steps."""
        # One page more: SGLang may run a request a few positions past its last token before it stops it.
        tokens = self.longest + self.page_size
        self._static = DecodeRows.allocate(max_bs, tokens, self.page_size, self.device)
        self._scoring = ScorePlan.allocate(max_bs, self.device)
        if self.device.type == "cuda":
            self._lanes = Lanes(self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return self.device.type != "cpu"

    def _decode_step(self, fb: Any) -> Step:
        longest = self.longest if fb.seq_lens_cpu is None else int(fb.seq_lens_cpu.max())
        requests = fb.req_pool_indices.shape[0]
        rows = DecodeRows.allocate(requests, longest, self.page_size, self.device)
        scoring = ScorePlan.allocate(requests, self.device).first(requests)
        step = Step(rows.meta(), self.cache, self.ops, True, longest, rows=rows, scoring=scoring)
        self._fill(step, fb)
        return step

    def _fill(self, step: Step, fb: Any) -> None:
        table, slots = self.requests.req_to_token, self.requests.req_index_to_mamba_index_mapping
        self.ops.decode_rows(step.rows, fb.req_pool_indices.long(), fb.seq_lens, fb.positions.long(), table, slots)
        if step.scoring is not None:
            self.ops.score_plan(step.scoring, step.meta)

    def _due_snapshots(self, fb: Any, meta: StepMeta) -> tuple[Tensor, Tensor]:
        """(source, destination) int64 [B] of decode snapshots, -1 where none is due."""
        if fb.mamba_track_mask is None or fb.mamba_track_indices is None:
            none = torch.full_like(meta.slots, -1).long()
            return none, none
        target = fb.mamba_track_indices.long()
        due = fb.mamba_track_mask & (meta.req_rows > 0)
        return meta.slots.long(), torch.where(due, target, torch.full_like(target, -1))

    def _extend_step(self, fb: Any) -> Step:
        rows = fb.req_pool_indices.long()
        prefix = [int(n) for n in fb.extend_prefix_lens_cpu]
        extent = [int(n) for n in fb.extend_seq_lens_cpu]
        lens = [p + n for p, n in zip(prefix, extent, strict=True)]
        offsets = [0]
        for n in extent:
            offsets.append(offsets[-1] + n)
        tokens = fb.positions.shape[0]
        owner = torch.full((tokens,), -1, dtype=torch.int32)
        owner[: offsets[-1]] = torch.repeat_interleave(
            torch.arange(len(extent), dtype=torch.int32), torch.tensor(extent)
        )
        snapshot_slots, snapshot_lens = self._extend_snapshots(fb)
        meta = StepMeta(
            req_rows=rows.int(),
            slots=self.requests.get_mamba_indices(rows).int(),
            prefix_lens=from_host(prefix, torch.int32, self.device),
            seq_lens=from_host(lens, torch.int32, self.device),
            token_offsets=from_host(offsets, torch.int32, self.device),
            token_to_req=from_host(owner, torch.int32, self.device),
            positions=fb.positions.long(),
            page_table=self._page_table(rows, max(lens)),
            snapshot_slots=snapshot_slots,
            snapshot_lens=snapshot_lens,
            page_size=self.page_size,
        )
        return Step(meta, self.cache, self.ops, False, max(lens), prefix, lens)

    def _extend_snapshots(self, fb: Any) -> tuple[Tensor, Tensor]:
        """int32 [B, S] slots and lengths; column 0 is SGLang's own, further ones are interior snapshots."""
        if fb.mamba_track_mask is None or fb.mamba_track_indices is None or fb.mamba_track_seqlens is None:
            none = torch.empty((fb.batch_size, 0), dtype=torch.int32, device=self.device)
            return none, none
        own_slots, own_lens = fb.mamba_track_indices, fb.mamba_track_seqlens
        due = fb.mamba_track_mask & (own_lens > 0) & (own_slots >= 0)
        none = torch.full_like(own_slots, -1)
        slots = torch.where(due, own_slots, none)[:, None].int()
        lens = torch.where(due, own_lens, none)[:, None].int()
        interior = [self.requests.interior.waiting(row) for row in fb.req_pool_indices_cpu.tolist()]
        width = max(len(snapshots) for snapshots in interior)
        if width:
            more_slots = torch.full((len(interior), width), -1, dtype=torch.int32, device=self.device)
            more_lens = torch.full((len(interior), width), -1, dtype=torch.int32)
            for i, snapshots in enumerate(interior):
                for j, snapshot in enumerate(snapshots):
                    more_slots[i, j] = snapshot.slot[0]
                    more_lens[i, j] = snapshot.length
            slots = torch.cat([slots, more_slots], dim=1)
            lens = torch.cat([lens, from_host(more_lens, torch.int32, self.device)], dim=1)
        return slots, lens

    def _page_table(self, rows: Tensor, length: int) -> Tensor:
        columns = torch.arange(0, length, self.page_size, device=self.device)
        return self.requests.req_to_token[rows[:, None], columns] // self.page_size

    # Layers

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        inputs: Projections,
    ) -> Tensor:
        """float [N, H, 512]: `core.attend` of one layer; after the last layer of a decode step, its snapshots.

        Raises RankError after the last layer where ranks are compared and differ.
        """
        if self._step is None:
            inputs.prepare()
            return torch.zeros_like(inputs.query())
        out = attend(layer.params, inputs, self._step)
        if layer.layer_id == self._last_layer and self._snapshots is not None:
            self.ops.copy_state(self.slots.slot_windows, self.slots.overlaps, *self._snapshots)
        if layer.layer_id == self._last_layer and self._agreement is not None:
            self._agreement.finish()
        return out


def _compile(device: torch.device) -> None:
    """Every kernel of this device, before the first request instead of during it."""
    if device.type != "cuda" or reference_forced():
        return
    started = time.perf_counter()
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        jit.build_all(jit.architecture(index))
    except jit.KernelBuildError as error:
        raise Refused(str(error)) from None
    logger.info("sglang-dsv4: kernels ready after %.1f s", time.perf_counter() - started)


def _expect(pool: Any, kind: type, hook: str) -> Any:
    if not isinstance(pool, kind):
        raise Refused(
            f"the pool is {type(pool).__name__}, not {kind.__name__}: the hook on {hook} did not take effect; "
            f"run `sglang-dsv4 check`"
        )
    return pool
