"""What `/metrics` and the log say about pages and snapshots. docs/tuning.md explains every name."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.cache.counters import Counters, counters

logger = logging.getLogger(__name__)

PREFIX = "sglang_dsv4:"
LOG_EVERY_S, UPDATE_EVERY_S = 30.0, 0.5
COUNTED = {
    "published": ("snapshots_published", "Snapshots that the tree took over."),
    "interior_refused": ("snapshots_refused", "Interior snapshots that found no slot to spare."),
    "duplicates": ("snapshots_duplicate", "Snapshots that the tree had already."),
    "skipped": ("snapshots_skipped", "Answers' ends not published because none is resumed."),
    "superseded": ("snapshots_superseded", "Snapshots dropped because their conversation had gone on."),
    "snapshots_evicted": ("snapshots_evicted", "Snapshots dropped with the leaf that was worth least."),
    "pages_evicted": ("pages_evicted", "Pages dropped with the leaf that was worth least."),
    "lots_to_pages": ("lots_to_pages", "Moves of memory from slots to pages."),
    "lots_to_slots": ("lots_to_slots", "Moves of memory from pages to slots."),
    "snapshots_moved": ("snapshots_moved", "Snapshots copied to another slot for a move."),
    "pages_moved": ("pages_moved", "Pages copied to another place for a move."),
}
LABELLED = {  # by the label `at` or `cause`
    "hits": ("hits", "Requests by where they resumed.", "at"),
    "hit_tokens": ("hit_tokens", "Tokens found there.", "at"),
    "missed_tokens": ("missed_tokens", "Tokens of prompts that were not found, by cause.", "cause"),
}


@dataclass(frozen=True)
class Usage:
    """Pages and slots of one server at one moment; bytes are those of the stores."""

    pages_in_use: int
    pages_total: int
    snapshots_in_use: int
    slots_free: int
    slots_total: int
    page_bytes_in_use: int
    snapshot_bytes_in_use: int

    @staticmethod
    def of(tree: Any) -> Usage:
        """Reads counters that the tree and its allocators keep; no tensor is looked into."""
        pages, slots = tree.token_to_kv_pool_allocator, tree.req_to_token_pool.mamba_allocator
        geometry = tree.req_to_token_pool.mamba_pool.geometry
        total = pages.size // tree.page_size
        used = total - int(pages.available_size()) // tree.page_size
        snapshots = int(tree.mamba_evictable_size() + tree.mamba_protected_size())
        return Usage(
            pages_in_use=used,
            pages_total=total,
            snapshots_in_use=snapshots,
            slots_free=int(slots.available_size()),
            slots_total=int(slots.size),
            page_bytes_in_use=int(used * tree.page_size * geometry.token_alloc_bytes),
            snapshot_bytes_in_use=snapshots * geometry.slot_bytes,
        )


def log_line(usage: Usage, counts: Counters) -> str:
    """One line with everything that `/metrics` has."""
    hits = ", ".join(f"{kind} {n} ({counts.hit_tokens[kind]} tokens)" for kind, n in sorted(counts.hits.items()))
    missed = ", ".join(f"{cause} {n}" for cause, n in sorted(counts.missed_tokens.items()) if n)
    return (
        f"DeepSeek-V4 cache: {usage.pages_in_use}/{usage.pages_total} pages in use "
        f"({usage.page_bytes_in_use} bytes), {usage.snapshots_in_use} snapshots ({usage.snapshot_bytes_in_use} bytes) "
        f"and {usage.slots_free} free of {usage.slots_total} slots; snapshots published {counts.published}, "
        f"refused {counts.interior_refused}, duplicate {counts.duplicates}, skipped {counts.skipped}, "
        f"superseded {counts.superseded}, evicted {counts.snapshots_evicted}; pages evicted {counts.pages_evicted}; "
        f"moves to pages {counts.lots_to_pages}, to slots {counts.lots_to_slots}, "
        f"copying {counts.snapshots_moved} snapshots and {counts.pages_moved} pages; "
        f"resumed at: {hits or 'nothing yet'}; missed tokens: {missed or 'none'}"
    )


class CacheMetrics:
    """Prometheus metrics of one scheduler process. To be made after SGLang has set its multi-process folder."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._labels = dict(labels)
        self._gauges = {
            name: Gauge(PREFIX + name, name.replace("_", " "), names, multiprocess_mode="mostrecent")
            for name in Usage.__annotations__
        }
        self._counters = {key: Counter(PREFIX + name, text, names) for key, (name, text) in COUNTED.items()}
        self._labelled = {
            key: (Counter(PREFIX + name, text, [*names, label]), label) for key, (name, text, label) in LABELLED.items()
        }
        self._seen: dict[tuple[str, str], int] = {}

    def update(self, usage: Usage, counts: Counters) -> None:
        for name, gauge in self._gauges.items():
            gauge.labels(**self._labels).set(getattr(usage, name))
        numbers = counts.numbers()
        for key, counter in self._counters.items():
            counter.labels(**self._labels).inc(self._new(key, "", numbers[key]))
        for key, (counter, label) in self._labelled.items():
            for kind, count in getattr(counts, key).items():
                counter.labels(**self._labels, **{label: kind}).inc(self._new(key, kind, count))

    def _new(self, key: str, kind: str, count: int) -> int:
        before = self._seen.get((key, kind), 0)
        self._seen[key, kind] = count
        return count - before


class Reporter:
    """Called after every step's own report. /metrics hears of every new request at once, of the rest every half
    second; the log rarely."""

    def __init__(self, labels: Mapping[str, str] | None) -> None:
        """labels are SGLang's; None where metrics are off."""
        self._metrics = None if labels is None else CacheMetrics(labels)
        self._logged = time.monotonic()
        self._updated, self._requests = 0.0, 0

    def report(self, tree: Any, *, logs: bool) -> None:
        """logs says whether this process writes to the log."""
        now = time.monotonic()
        requests = counters.hits.total()
        if self._metrics is not None and (requests != self._requests or now - self._updated >= UPDATE_EVERY_S):
            self._updated, self._requests = now, requests
            self._metrics.update(Usage.of(tree), counters)
        if logs and now - self._logged >= LOG_EVERY_S:
            self._logged = now
            logger.info(log_line(Usage.of(tree), counters))
