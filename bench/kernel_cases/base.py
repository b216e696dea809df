"""One performance case, and how it is timed: CUDA-graph replays over rotated input sets, the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

ROTATED_BYTES = 192 << 20  # input sets together, several times an L2 of 50 MB
MIN_SETS, MAX_SETS = 4, 256


@dataclass
class Case:
    """`run(i)` launches the operation once on input set i (0 <= i < sets), without allocating.

    bytes    that one call must move through device memory, reads and writes
    flops    of one call, for what is bound by arithmetic
    rival    name of what else does the same work, `rival_run` launches it
    limit    the project's bound, as text
    not_run  rivals that belong beside it and why they are missing
    """

    op: str
    shape: str
    bytes: int
    run: Callable[[int], object]
    sets: int
    flops: int = 0
    rival: str | None = None
    rival_run: Callable[[int], object] | None = None
    limit: str = ""
    keep: list = field(default_factory=list)  # what must outlive the graph
    not_run: list[str] = field(default_factory=list)  # "<rival>: <reason>" of those that do not run here


_selected: list[str] = []
_slow_rivals = True


def skip_slow_rivals() -> None:
    """Leaves out rivals that compile for minutes at first use."""
    global _slow_rivals
    _slow_rivals = False


def slow_rivals() -> bool:
    return _slow_rivals


def select(texts: list[str]) -> None:
    """Restricts `wanted` to cases with one of these texts in "op shape"; none of them: all cases."""
    _selected[:] = texts


def wanted(op: str, shape: str) -> bool:
    """Whether a case is asked for: what is expensive to prepare asks first."""
    return not _selected or any(text in f"{op} {shape}" for text in _selected)


OPERATIONS = (
    *("append_window", "flush_csa", "flush_hca", "gather", "copy_state"),
    *("index_query", "score_plan", "index_scores", "index_topk", "sparse_attention", "sparse_prefill"),
)


def op_wanted(*ops: str) -> bool:
    """False where every text asks for another operation by name."""
    return not _selected or any(not text.startswith(OPERATIONS) or text.startswith(ops) for text in _selected)


def first_line(error: Exception) -> str:
    """What an error says, in one short line."""
    return (str(error).strip() or repr(error)).splitlines()[0][:160]


def sets_for(bytes_per_set: int) -> int:
    """How many input sets it takes to exceed the L2 cache."""
    return max(MIN_SETS, min(MAX_SETS, -(-ROTATED_BYTES // max(bytes_per_set, 1))))


class Timer:
    """Times `run(i)` over all sets as one captured graph; `median_us` is per call."""

    def __init__(self, run: Callable[[int], object], sets: int) -> None:
        self.sets = sets
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(min(sets, 3)):
                run(i)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(sets):
                run(i)
        self.graph.replay()
        torch.cuda.synchronize()
        once = self._replay_us(1)
        self.replays = max(3, min(200, int(8_000 / max(once, 1.0))))

    def _replay_us(self, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / count

    def median_us(self) -> float:
        return statistics.median(self._replay_us(1) for _ in range(self.replays)) / self.sets


def warm_up(device: torch.device, seconds: float = 1.0) -> None:
    """Keeps the card busy until its clocks have risen: the first figures are low otherwise."""
    x = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            x.fill_(1)
        torch.cuda.synchronize()


def copy_us(num_bytes: int, device: torch.device) -> float:
    """Microseconds of the fastest copy that moves as many bytes, reads and writes, over rotated buffers.

    The driver's copy and an elementwise kernel are tried: which is faster depends on the size.
    """
    each = max(512, num_bytes // 2 // 512 * 512)
    sets = sets_for(2 * each)
    source = torch.zeros(sets, each // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    by_driver = Timer(lambda i: target[i].copy_(source[i]), sets).median_us()
    by_kernel = Timer(lambda i: torch.bitwise_not(source[i], out=target[i]), sets).median_us()
    return min(by_driver, by_kernel)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    num_bytes = 2 << 30
    return num_bytes / (copy_us(num_bytes, device) * 1e-6)
