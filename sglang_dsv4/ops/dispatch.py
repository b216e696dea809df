"""Which implementation serves which device: the one place that decides.

`operations(device)` is resolved once by the attention backend; nothing is chosen per call. The environment
variable SGLANG_DSV4_REFERENCE=1 forces the torch reference on every device; without it a CUDA device that the
kernels cannot be built for is an error, never a silent fall back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from sglang_dsv4.ops import jit
from sglang_dsv4.ops.append_window import append_window, append_window_cuda, norm_window, norm_window_cuda
from sglang_dsv4.ops.copy_state import copy_state, copy_state_cuda
from sglang_dsv4.ops.decode_rows import decode_rows, decode_rows_cuda
from sglang_dsv4.ops.flush import flush_csa, flush_csa_cuda, flush_hca, flush_hca_cuda
from sglang_dsv4.ops.gather import gather, gather_cuda
from sglang_dsv4.ops.index_query import index_query, index_query_cuda
from sglang_dsv4.ops.index_scores import index_scores, index_scores_cuda
from sglang_dsv4.ops.index_topk import index_topk, index_topk_cuda
from sglang_dsv4.ops.score_plan import score_plan, score_plan_cuda
from sglang_dsv4.ops.sparse_attention import sparse_attention, sparse_attention_cuda
from sglang_dsv4.ops.sparse_prefill import sparse_prefill, sparse_prefill_cuda
from sglang_dsv4.switches import REFERENCE, switched_on


@dataclass(frozen=True)
class Operations:
    """The operations bound to one device; signatures are those of the modules of the same name."""

    decode_rows: Callable[..., Any] = decode_rows
    score_plan: Callable[..., Any] = score_plan
    append_window: Callable[..., Any] = append_window
    norm_window: Callable[..., Any] = norm_window
    flush_csa: Callable[..., Any] = flush_csa
    flush_hca: Callable[..., Any] = flush_hca
    index_query: Callable[..., Any] = index_query
    index_scores: Callable[..., Any] = index_scores
    index_topk: Callable[..., Any] = index_topk
    gather: Callable[..., Any] = gather
    sparse_prefill: Callable[..., Any] = sparse_prefill
    sparse_attention: Callable[..., Any] = sparse_attention
    copy_state: Callable[..., Any] = copy_state

    def describe(self) -> dict[str, str]:
        """Operation name to the dotted name of what implements it."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: f"{fn.__module__}.{fn.__qualname__}" for name, fn in chosen.items()}


def reference_forced() -> bool:
    return switched_on(REFERENCE)


# What replaces the reference on a CUDA device.
CUDA_FACES: dict[str, Callable[..., Any]] = {
    "decode_rows": decode_rows_cuda,
    "score_plan": score_plan_cuda,
    "append_window": append_window_cuda,
    "norm_window": norm_window_cuda,
    "flush_csa": flush_csa_cuda,
    "flush_hca": flush_hca_cuda,
    "index_query": index_query_cuda,
    "index_scores": index_scores_cuda,
    "index_topk": index_topk_cuda,
    "gather": gather_cuda,
    "sparse_prefill": sparse_prefill_cuda,
    "sparse_attention": sparse_attention_cuda,
    "copy_state": copy_state_cuda,
}


@functools.cache
def operations(device_type: str) -> Operations:
    """The operations for a torch device type ("cpu", "cuda").

    Raises jit.KernelBuildError where a CUDA device is asked for and no compiler is found.
    """
    if torch.device(device_type).type != "cuda" or reference_forced():
        return Operations()
    jit.find_nvcc()
    return Operations(**CUDA_FACES)
