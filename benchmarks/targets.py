"""The requirement and the goal of each row. They are reported, not asserted.

A benchmark does not fail if a requirement is not met; it prints that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import Result

AT_LEAST, AT_MOST = "≥", "≤"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the median of one figure of one result."""

    row: str
    load: str
    setup: str
    figure: str
    relation: str
    required: float
    reach_for: float | None = None

    def is_met(self, result: Result) -> bool:
        median = result.figures[self.figure].median
        return median >= self.required if self.relation is AT_LEAST else median <= self.required


def rate(row: str, required: float, reach_for: float | None = None, setup: str = "") -> Target:
    load = "32 connections"
    return Target(row, load, setup, "requests_per_s_ratio", AT_LEAST, required, reach_for)


def p99(row: str) -> Target:
    return Target(row, "32 connections", "", "p99_ms_ratio", AT_MOST, 1.2, 1.0)


def added(row: str, required: float, reach_for: float) -> Target:
    return Target(row, "1 connection", "", "p50_ms_added", AT_MOST, required, reach_for)


def peer(name: str, required: float) -> Target:
    return Target(
        f"no-op on {name}", "32 connections", "", "requests_per_s_ratio", AT_LEAST, required
    )


def in_processes(row: str, required: float, alone: float | None = None) -> list[Target]:
    """Return the targets of a row with 32 connections, and with one."""
    figure = "requests_per_s_ratio"
    found = [Target(row, "32 connections", "", figure, AT_LEAST, required)]
    if alone is not None:
        found.append(Target(row, "1 connection", "", figure, AT_LEAST, alone))
    return found


def batches(arrivals: str) -> Iterator[Target]:
    """Yield the targets of both models: against the best fixed setting, the default and BentoML."""
    for row in ("batches, growing cost", "batches, fixed cost"):
        others = [("", 0.95), (", default", 1.5)]
        for end, required in [*others, (", BentoML", 1.2)] if arrivals == "steady" else others:
            yield Target(row + end, arrivals, "", "requests_per_s_ratio", AT_LEAST, required)


def without_gil(row: str, required: float, load: str = "8 connections") -> Target:
    return Target(row, load, "", "requests_per_s_ratio", AT_LEAST, required)


TARGETS = (
    rate("async", 0.92, 1.0),
    rate("async-query", 0.95, 1.0),
    rate("model", 0.97, 1.0),
    rate("async", 1.0, 1.2, "both 0"),
    rate("async-query", 1.0, 1.2, "both 0"),
    rate("model", 1.0, 1.2, "both 0"),
    rate("def", 1.5, 2.0),
    rate("def-depends", 1.3, 2.0),
    rate("call", 0.85, 1.0),
    added("async", 0.08, 0.05),
    added("def", 0.02, 0.0),
    *map(p99, ("async", "async-query", "model", "def", "def-depends")),
    rate("replicas-8", 0.75, 0.85),
    Target("websocket", "32 connections", "", "messages_per_s_ratio", AT_LEAST, 0.7),
    rate("watchdog", 0.99),
    rate("workers-2", 1.8),
    Target("import", "fresh process", "", "import_ms_ratio", AT_MOST, 1.25, 1.1),
    Target("start", "fresh process", "", "first_answer_s", AT_MOST, 1.0, 0.6),
    Target("memory", "fresh process", "", "rss_mb_added", AT_MOST, 12, 6),
    Target("call", "32 in flight", "", "calls_per_s", AT_LEAST, 20_000, 50_000),
    Target("call", "one at a time", "", "call_ms", AT_MOST, 0.12, 0.06),
    Target("1,000 replicas", "32 in flight", "", "calls_per_s_ratio", AT_LEAST, 0.4, 0.6),
    Target("1,000 replicas", "start", "", "start_s", AT_MOST, 10, 3),
    Target("1,000 replicas", "memory each", "", "rss_mb", AT_MOST, 1, 0.4),
    rate("process", 1.1, 1.4),
    added("process", 0.12, 0.06),
    rate("process-thread", 0.9, 1.2),
    rate("process-compute-2", 1.85, 1.95),
    Target("process-stream", "4 connections", "", "requests_per_s_ratio", AT_LEAST, 0.7, 1.0),
    Target("health", "1 connection", "", "p99_ms", AT_MOST, 20, 5),
    Target("process call", "32 in flight", "", "calls_per_s", AT_LEAST, 15_000, 40_000),
    Target("process call", "one at a time", "", "call_ms", AT_MOST, 0.2, 0.08),
    Target("array", "10 MB there and back", "", "call_ms", AT_MOST, 12, 5),
    Target("child", "fresh process", "", "start_s", AT_MOST, 1, 0.3),
    Target("child", "fresh process", "", "rss_mb", AT_MOST, 70, 25),
    without_gil("def, 10 ms", 1.85),
    without_gil("async def, 10 ms, 2 replicas", 1.85),
    without_gil("def, 1.3 ms", 1.75),
    without_gil("async def, 1.3 ms, 2 replicas", 1.75),
    without_gil("def, 10 ms, against 2 processes", 1.0),
    without_gil("def, 1.3 ms, against 2 processes", 1.0),
    without_gil("no-op", 0.95, "32 connections"),
    without_gil("def + dependency", 1.3, "32 connections"),
    Target("no-op", "1 connection", "", "p50_ms_ratio", AT_MOST, 1.0),
    Target("recursive", "4 clients", "", "errors", AT_MOST, 0),
    *batches("steady"),
    *batches("bursts of 20"),
    Target("batches, growing cost", "10 a second", "", "p50_ms_added", AT_MOST, 2),
    Target("batches, fixed cost", "10 a second", "", "p50_ms_added", AT_MOST, 2),
    peer("Ray Serve", 12),
    peer("LitServe", 4),
    peer("BentoML", 8),
    *in_processes("no-op in 1 process on mosec", 1.2, alone=0.7),
    *in_processes("computing in 2 processes on mosec", 1.0),
    *in_processes("no-op in 2 processes on LitServe", 4),
    *in_processes("computing in 2 processes on LitServe", 1.0),
    *in_processes("no-op in 2 processes on BentoML", 6),
    *in_processes("computing in 2 processes on BentoML", 1.0),
    Target("ensemble on Ray Serve", "4 clients", "", "requests_per_s_ratio", AT_LEAST, 30, 100),
)


def of(result: Result) -> list[Target]:
    """Return the requirements of a result; most results have none, some have two."""
    place = (result.row, result.load, result.setup)
    return [each for each in TARGETS if (each.row, each.load, each.setup) == place]
