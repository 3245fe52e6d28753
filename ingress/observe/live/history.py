"""The rates and latencies of the last 15 minutes, from counters that are read every 5 s.

    add      the counters of now; every 5 s it keeps a point
    window   the rates and percentiles between a point of a minute ago and now
    series   the same for each interval between two points, for a chart

A point has the sums of a route over all replicas that there ever were: a replica that ends takes
nothing away. Points share the sums of routes that nothing has called meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ingress.core.base.counters import LATENCY_BUCKETS_MS
from ingress.observe.live.documents import (
    Counters,
    Deployment,
    Interval,
    Rates,
    Recent,
    Series,
    Sums,
)

STEP_S = 5.0
POINTS = 180
WINDOW_S = 60.0
RECENT = 24  # intervals of a small chart: two minutes
PROCESSES = 1000  # whose last counters are remembered; workers that have ended count too

Route = tuple[str, str, str]
"""An application, one of its deployments, and a route; "" is all routes of the deployment."""

_NONE: Sums = (0, 0, 0.0, (0,) * (len(LATENCY_BUCKETS_MS) + 1))


@dataclass(frozen=True, slots=True)
class Point:
    """The sums of all routes at one time, and the number of calls that waited then."""

    at: float
    sums: dict[Route, Sums] = field(default_factory=dict)
    queued: dict[Deployment, int] = field(default_factory=dict)


class History:
    """The points of the last 15 minutes. Thread-safe."""

    __slots__ = ("_last", "_lock", "_now", "_points", "_recent", "_recent_of", "_sums")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: deque[Point] = deque(maxlen=POINTS + 1)
        self._now = Point(0.0)
        self._recent: dict[Deployment, Recent] = {}
        self._recent_of = self._now
        self._sums: dict[Route, Sums] = {}
        # By process, so that one that is silent for a while is not counted anew.
        self._last: dict[int, dict[tuple[Deployment, str, str], Sums]] = {}

    def add(self, at: float, parts: Iterable[tuple[int, Mapping[Deployment, Counters]]]) -> None:
        """Take the counters of all processes, each with its id. `at` is monotonic."""
        with self._lock:
            queued: dict[Deployment, int] = {}
            for pid, deployments in parts:
                before, seen = self._last.get(pid, {}), {}
                for name, each in deployments.items():
                    queued[name] = queued.get(name, 0) + each["queued"]
                    self._sums.setdefault((*name, ""), _NONE)
                    for (replica, route), sums in each["routes"].items():
                        seen[name, replica, route] = sums
                        self._count(name, route, sums, before.get((name, replica, route)))
                self._last[pid] = seen
                while len(self._last) > PROCESSES:
                    del self._last[next(iter(self._last))]
            self._now = Point(at, self._sums, queued)
            if not self._points or at - self._points[-1].at >= STEP_S * 0.9:
                self._points.append(Point(at, dict(self._sums), queued))

    def _count(self, name: Deployment, route: str, sums: Sums, before: Sums | None) -> None:
        if before is sums or before == sums:
            return
        if before is None or sums[0] < before[0]:
            before = _NONE
        more = _minus(sums, before)
        for key in ((*name, ""), (*name, route or "/")):
            self._sums[key] = _plus(self._sums.get(key, _NONE), more)

    def window(self) -> tuple[dict[Route, Rates], float]:
        """Return the rates of each route over the last minute, and the seconds that they are of."""
        with self._lock:
            now = self._now
            since = next(
                (each for each in self._points if now.at - each.at <= WINDOW_S + STEP_S / 2), None
            )
            if since is None or now.at <= since.at:
                return {}, 0.0
            span_s = now.at - since.at
            rows = {}
            for route, sums in now.sums.items():
                before = since.sums.get(route, _NONE)
                rows[route] = _rates(_minus(sums, before) if before is not sums else _NONE, span_s)
            return rows, span_s

    def recent(self) -> dict[Deployment, Recent]:
        """Return the last intervals of each deployment, for small charts."""
        with self._lock:
            if self._recent_of is not self._points[-1]:
                self._recent_of = self._points[-1]
                points = list(self._points)[-RECENT - 1 :]
                self._recent = {
                    name: _columns([_between(*pair, (*name, "")) for pair in pairwise(points)])
                    for name in self._now.queued
                }
            return self._recent

    def series(self, route: Route) -> Series:
        """Return the intervals of one route. `ago_s` is the age of the end of each."""
        with self._lock:
            points, now = list(self._points), self._now
        rows: list[Interval] = [
            {
                "ago_s": round(now.at - after.at, 1),
                "queued": after.queued.get(route[:2], 0),
                **_between(before, after, route),
            }
            for before, after in pairwise(points)
        ]
        return {"step_s": STEP_S, "points": rows}


def _between(before: Point, after: Point, route: Route) -> Rates:
    more = _minus(after.sums.get(route, _NONE), before.sums.get(route, _NONE))
    return _rates(more, after.at - before.at)


def _columns(rows: list[Rates]) -> Recent:
    return {"rate": [row["rate"] for row in rows], "p99": [row["p99"] for row in rows]}


def _plus(one: Sums, other: Sums) -> Sums:
    buckets = tuple(map(int.__add__, one[3], other[3]))
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], buckets


def _minus(one: Sums, other: Sums) -> Sums:
    buckets = tuple(map(int.__sub__, one[3], other[3]))
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], buckets


def _rates(sums: Sums, span_s: float) -> Rates:
    count, errors, total_ms, buckets = sums
    if not count:
        return {"rate": 0.0, "errors": 0.0, "p50": None, "p95": None, "p99": None, "mean": None}
    return {
        "rate": round(count / span_s, 3),
        "errors": round(errors / span_s, 3),
        "p50": percentile(buckets, 0.5),
        "p95": percentile(buckets, 0.95),
        "p99": percentile(buckets, 0.99),
        "mean": round(total_ms / count, 2),
    }


def percentile(buckets: tuple[int, ...], share: float) -> float | None:
    """Return a percentile of a histogram in ms, as Prometheus' `histogram_quantile` does.

    It lies in the right bucket, and is interpolated there. `None` without a value.
    """
    total = sum(buckets)
    if not total:
        return None
    wanted = share * total
    seen = 0
    for number, count in enumerate(buckets):
        if seen + count >= wanted and count:
            if number == len(LATENCY_BUCKETS_MS):
                break
            low = LATENCY_BUCKETS_MS[number - 1] if number else 0
            high = LATENCY_BUCKETS_MS[number]
            return round(low + (high - low) * (wanted - seen) / count, 2)
        seen += count
    return float(LATENCY_BUCKETS_MS[-1])
