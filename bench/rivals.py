"""The two servers that the GPU benchmarks compare, and how their memory is made equal. Touches no device itself."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dsv4.cache.sizing import fit_tokens, plan_slots
from sglang_dsv4.geometry import INDEX_LAYOUTS, Geometry
from sglang_dsv4.serving import Launch, Words

# SGLang 0.5.23's own cache: bytes it reports per token of its full pool at window ratio 0.1, and per request row.
IN_TREE_PAGE = 256
START_TIMEOUT_S = 560.0


@dataclass(frozen=True)
class GpuLaunch(Launch):
    """A server on a CUDA device, without tokenizer.

    max_batch  largest captured decode batch
    """

    device: str = "cuda"
    max_batch: int = 64
    chunked_prefill_size: int = 8192
    max_running_requests: int = 64

    def command(self, port: int) -> list[str]:
        return [
            *super().command(port),
            *("--skip-tokenizer-init", "--grammar-backend", "none", "--moe-runner-backend", "triton"),
            *("--disable-flashinfer-autotune", "--disable-prefill-cuda-graph"),
            *("--cuda-graph-max-bs-decode", str(self.max_batch)),
            "--enable-metrics",
        ]

    def check(self) -> None:
        """Nothing of a CPU server's needs."""


@dataclass(frozen=True)
class Pools:
    """Tokens and slots of ours that fill a number of bytes."""

    tokens: int
    slots: int
    bytes: int


def geometry(model: Path, indexer: str = "fp4") -> Geometry:
    raw: dict[str, Any] = json.loads((model / "config.json").read_text())
    made = Geometry.from_config(raw, page_size=128, store="fp8", indexer=indexer)
    assert made.index is INDEX_LAYOUTS[indexer]
    return made


def pools_for(model: Path, budget: int, running: int) -> Pools:
    """What our own sizing makes of `budget` bytes for `running` requests: slots, snapshots, tails and pages."""
    g = geometry(model)
    plan = plan_slots(g, budget, running)
    fixed = g.slot_bytes * (plan.slots + 1) + g.tail_bytes(running + 1)
    tokens = fit_tokens(g, budget - fixed)
    return Pools(tokens, plan.slots, fixed + g.page_pool_bytes(tokens + g.page_size))


def text(name: str, count: int, vocabulary: int) -> list[int]:
    """`count` ordinary token ids, always the same ones for a name."""
    return Words(tuple(range(min(1000, vocabulary // 2), vocabulary))).draw(name, count)


def card() -> str:
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
