"""The two servers that the GPU benchmarks compare, and how their memory is made equal. Touches no device itself."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sglang_dsv4.cache.sizing import fit_tokens, plan_slots
from sglang_dsv4.geometry import INDEX_LAYOUTS, Geometry
from sglang_dsv4.serving import Launch, Server, ServerError, Words

IN_TREE_PAGE = 256
DEFAULT_RATIO = 0.1  # of window tokens to full tokens, SGLang's own for this model
FULL_TOKENS = 300_000  # the in-tree pool whose bytes both get
START_TIMEOUT_S = 560.0
NO_GPU = "no GPU"
KERNEL_FIELDS = ("moe_runner_backend", "fp8_gemm_runner_backend", "tp_size")
LOG_INTERVAL = 32  # decode steps a line of the server's log

# What the in-tree pools of V4-Flash take: bytes per token of the full pool and of the window pool, and per request row
# (SGLang 0.5.23 reports the sum of the first two at its window ratio 0.1: 7,086.75).
IN_TREE_FULL, IN_TREE_WINDOW, IN_TREE_ROW = 3899.25, 31875.0, 10_485_760


@dataclass(frozen=True)
class GpuLaunch(Launch):
    """A server on a CUDA device, without tokenizer if it is not asked for.

    max_batch   largest captured decode batch
    mem_share   --mem-fraction-static: only has to leave room, the pools' sizes are always given
    moe         --moe-runner-backend
    graphs      False runs decode steps eagerly, which starts faster
    tokenizer   the checkpoint's own
    tp          tensor parallel ranks, each on a GPU of its own
    """

    device: str = "cuda"
    max_batch: int = 64
    mem_share: float = 0.6
    moe: str = "triton"
    graphs: bool = True
    tokenizer: bool = False
    tp: int = 1
    chunked_prefill_size: int = 8192
    max_running_requests: int = 64

    def command(self, port: int, group_port: int) -> list[str]:
        return [
            *super().command(port, group_port),
            *(() if self.tokenizer else ("--skip-tokenizer-init",)),
            *("--grammar-backend", "none", "--moe-runner-backend", self.moe),
            *("--disable-flashinfer-autotune", "--disable-prefill-cuda-graph"),
            *self._graph_flags(),
            *self._rank_flags(),
            *("--mem-fraction-static", str(self.mem_share)),
            *("--decode-log-interval", str(LOG_INTERVAL)),
            "--enable-metrics",
        ]

    def _graph_flags(self) -> list[str]:
        if not self.graphs:
            return ["--disable-cuda-graph"]
        return ["--cuda-graph-bs-decode", *(str(size) for size in graph_sizes(self.max_batch))]

    def _rank_flags(self) -> list[str]:
        """Both servers reduce through NCCL alone: SGLang would fuse reductions for the in-tree model's name only, and
        its own all-reduce maps NVLink multicast memory, which not every virtual machine lets a program do."""
        if self.tp == 1:
            return []
        quiet = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
        return ["--tp-size", str(self.tp), *quiet]

    def over(self, pools: Pools, running: int) -> Self:
        """Ours, over pools of that size, for so many requests at a time."""
        return replace(
            self,
            max_total_tokens=pools.tokens,
            max_mamba_cache_size=pools.slots,
            max_running_requests=running,
            max_batch=running,
        )

    def in_tree(self, tokens: int, ratio: float, running: int) -> Self:
        """SGLang's own cache, with so many full tokens and `ratio` times as many window tokens."""
        launch = self.over(Pools(tokens, 0, 0), running)
        return replace(launch, plugin=False, extra_args=(*self.extra_args, "--swa-full-tokens-ratio", str(ratio)))

    def check(self) -> None:
        """Raises ServerError where there is no GPU: SGLang would say so a minute later, in other words."""
        if card() == NO_GPU:
            raise ServerError("no CUDA device: this benchmark needs a GPU")


def graph_sizes(largest: int) -> list[int]:
    """Captured decode batches: powers of two up to `largest`, and itself."""
    return sorted({largest, *(1 << i for i in range(largest.bit_length()) if 1 << i <= largest)})


@dataclass(frozen=True)
class Pools:
    """Tokens and slots of ours that fill a number of bytes."""

    tokens: int
    slots: int
    bytes: int


def geometry(config: Path, indexer: str = "fp4") -> Geometry:
    """Of a checkpoint folder or a config.json."""
    file = config / "config.json" if config.is_dir() else config
    made = Geometry.from_config(json.loads(file.read_text()), page_size=128, store="fp8", indexer=indexer)
    assert made.index is INDEX_LAYOUTS[indexer]
    return made


def pools_for(g: Geometry, budget: int, running: int) -> Pools:
    """What our own sizing makes of `budget` bytes for `running` requests: slots, snapshots, tails and pages."""
    plan = plan_slots(g, budget, running)
    fixed = g.slot_bytes * (plan.slots + 1) + g.tail_bytes(running + 1)
    tokens = fit_tokens(g, budget - fixed)
    return Pools(tokens, plan.slots, fixed + g.page_pool_bytes(tokens + g.page_size))


def in_tree_bytes(tokens: int, ratio: float, running: int) -> int:
    """KV bytes that the in-tree pools of a V4-Flash geometry take."""
    return int(tokens * IN_TREE_FULL + tokens * ratio * IN_TREE_WINDOW + running * IN_TREE_ROW)


def in_tree_tokens(budget: int, ratio: float, running: int) -> int:
    """Tokens of the full pool, whole pages, that `budget` bytes hold at a window ratio."""
    per_token = IN_TREE_FULL + ratio * IN_TREE_WINDOW
    return int((budget - running * IN_TREE_ROW) / per_token) // IN_TREE_PAGE * IN_TREE_PAGE


@contextmanager
def together(launches: Mapping[str, Launch], logs: Path, waits: dict[str, float]) -> Iterator[dict[str, Server]]:
    """All servers, started at the same time on the same device; `waits` gets each one's seconds to readiness.

    Raises ServerError of the first that does not start, after stopping the others. An exception meanwhile, such as that
    of a signal, stops all of them.
    """
    ending = threading.Event()

    def go_on(_: float) -> None:
        if ending.is_set():
            raise _Ended("stopped")

    def start(name: str) -> Server:
        began = time.monotonic()
        log = logs / f"{name.replace(' ', '_').replace(',', '')}.log"
        try:
            server = Server(launches[name], log, timeout=START_TIMEOUT_S, waiting=go_on)
        except BaseException:
            ending.set()  # nobody waits a minute for servers that are not going to be used
            raise
        stack.push(server)
        waits[name] = round(time.monotonic() - began, 1)
        print(f"{name}: ready after {waits[name]} s", flush=True)
        return server

    with ExitStack() as stack:
        with ThreadPoolExecutor(len(launches)) as pool:
            try:
                futures = {name: pool.submit(start, name) for name in launches}
                failures = [error for future in futures.values() if (error := future.exception())]
            except BaseException:
                ending.set()
                raise
        if failures:
            raise next((error for error in failures if not isinstance(error, _Ended)), failures[0])
        yield {name: future.result() for name, future in futures.items()}


class _Ended(ServerError):
    """A start that was given up because of something else."""


def same_kernels(servers: Mapping[str, Server]) -> dict[str, Any]:
    """The kernels outside attention that SGLang chose, by the names of its arguments.

    Raises ServerError where the servers do not agree: they would then differ in more than what is compared.
    """
    settings = {name: server.client.settings() for name, server in servers.items()}
    agreed: dict[str, Any] = {}
    for field in KERNEL_FIELDS:
        values = {name: of_server.get(field) for name, of_server in settings.items()}
        if len(set(values.values())) > 1:
            raise ServerError(f"servers differ in {field}: {values}; name one for all")
        agreed[field] = next(iter(values.values()))
    return agreed


def text(name: str, count: int, vocabulary: int) -> list[int]:
    """`count` ordinary token ids, always the same ones for a name."""
    return Words(tuple(range(min(1000, vocabulary // 2), vocabulary))).draw(name, count)


def config_of(model: Path) -> dict[str, Any]:
    """A checkpoint folder's config.json. Raises ServerError where there is none."""
    try:
        raw: dict[str, Any] = json.loads((model / "config.json").read_text())
        int(raw["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{model} is no checkpoint folder ({type(error).__name__}: {error})") from None
    return raw


def vocabulary_of(model: Path) -> int:
    return int(config_of(model)["vocab_size"])


def card() -> str:
    """The first GPU's name, or NO_GPU."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")
    except OSError:
        return NO_GPU
    return found[0].strip() or NO_GPU
