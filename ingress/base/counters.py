"""The counters of replicas: plain ints, each with one owner.

`status` and `/metrics` read these counters; no other code counts again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Ray 2.60.0's default latency buckets, upper bounds in ms.
LATENCY_BUCKETS_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 1000, 2000, 5000,
    10_000, 60_000, 120_000, 300_000, 600_000,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The load of one lane of a replica: calls that run in its threads, and calls that wait."""

    limit: int
    ongoing: int
    queued: int


@dataclass(slots=True)
class BatchCount:
    """The batches of one function of a replica that were run, and the calls in them."""

    batches: int = 0
    calls: int = 0


@dataclass(slots=True)
class Latency:
    """The latencies of one route's requests: `serve_deployment_processing_latency_ms`."""

    count: int = 0
    errors: int = 0
    total_ms: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_MS) + 1))

    def add(self, latency_ms: float, *, is_error: bool) -> None:
        self.count += 1
        self.errors += is_error
        self.total_ms += latency_ms
        self.buckets[bisect_left(LATENCY_BUCKETS_MS, latency_ms)] += 1
