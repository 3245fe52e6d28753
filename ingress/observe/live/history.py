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
from math import inf

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
DIGITS = 6  # of rates, whose shares are told to a tenth of a percent
RECENT = 24  # intervals of a small chart: two minutes
PROCESSES = 1000  # whose last counters are remembered; workers that have ended count too

Route = tuple[str, str, str]
"""An application, one of its deployments, and a route; "" is all routes of the deployment.

`of_replica` is all calls of one replica.
"""

_NONE: Sums = (0, 0, 0, 0.0, (0,) * (len(LATENCY_BUCKETS_MS) + 1))


def of_replica(pid: int, tag: str) -> str:
    """Return the name of a replica of a process in the place of a route."""
    return f"#{pid}/{tag}"


@dataclass(frozen=True, slots=True)
class Point:
    """The sums of all routes at one time, and the numbers of calls that waited, or were refused."""

    at: float
    sums: dict[Route, Sums] = field(default_factory=dict)
    queued: dict[Deployment, int] = field(default_factory=dict)
    refused: dict[Deployment, int] = field(default_factory=dict)


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
            refused: dict[Deployment, int] = {}
            replicas: dict[Route, Sums] = {}
            for pid, deployments in parts:
                before, seen = self._last.get(pid, {}), {}
                for name, each in deployments.items():
                    queued[name] = queued.get(name, 0) + each["queued"]
                    refused[name] = refused.get(name, 0) + each["refused"]
                    self._sums.setdefault((*name, ""), _NONE)
                    for (replica, route), sums in each["routes"].items():
                        seen[name, replica, route] = sums
                        self._count(name, route, sums, before.get((name, replica, route)))
                    for tag, sums in each["replicas"].items():
                        replicas[*name, of_replica(pid, tag)] = sums
                self._last[pid] = seen
                while len(self._last) > PROCESSES:
                    del self._last[next(iter(self._last))]
            self._now = Point(at, {**self._sums, **replicas}, queued, refused)
            if not self._points or at - self._points[-1].at >= STEP_S * 0.9:
                self._points.append(self._now)

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
            since, span_s = self._minute_ago()
            rows: dict[Route, Rates] = {}
            for route, sums in self._now.sums.items() if span_s else ():
                before = since.sums.get(route, _NONE)
                rows[route] = _rates(_minus(sums, before) if before is not sums else _NONE, span_s)
            return rows, span_s

    def _minute_ago(self) -> tuple[Point, float]:
        """Return the point of a minute ago, and the seconds since then."""
        now = self._now
        recent = (each for each in self._points if now.at - each.at <= WINDOW_S + STEP_S / 2)
        since = next(recent, now)
        return since, now.at - since.at

    def refused(self) -> dict[Deployment, float]:
        """Return the calls a second that each deployment has refused in the last minute."""
        with self._lock:
            since, span_s = self._minute_ago()
            return {
                name: max(0, count - since.refused.get(name, 0)) / span_s
                for name, count in self._now.refused.items()
                if span_s
            }

    def has_trouble(self) -> bool:
        """Return whether calls fail, wait or are refused."""
        rates, _ = self.window()
        return (
            any(each["errors"] for each in rates.values())
            or any(self._now.queued.values())
            or any(self.refused().values())
        )

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
    buckets = tuple(map(int.__add__, one[4], other[4]))
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3], buckets


def _minus(one: Sums, other: Sums) -> Sums:
    buckets = tuple(map(int.__sub__, one[4], other[4]))
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3], buckets


NO_RATES: Rates = {
    "rate": 0.0,
    "errors": 0.0,
    "cancelled": 0.0,
    "left": 0.0,
    "p50": None,
    "p95": None,
    "p99": None,
    "mean": None,
}


def _rates(sums: Sums, span_s: float) -> Rates:
    count, errors, cancelled, total_ms, buckets = sums
    if count <= 0:
        return {**NO_RATES}
    answered = sum(buckets)
    return {
        "rate": round(count / span_s, DIGITS),
        "errors": round(errors / span_s, DIGITS),
        "cancelled": round(cancelled / span_s, DIGITS),
        "left": round((count - answered) / span_s, DIGITS),
        "p50": percentile(buckets, 0.5, total_ms),
        "p95": percentile(buckets, 0.95, total_ms),
        "p99": percentile(buckets, 0.99, total_ms),
        "mean": round(total_ms / answered, 2) if answered else None,
    }


def percentile(buckets: tuple[int, ...], share: float, total: float = inf) -> float | None:
    """Return a percentile of a histogram in ms, as Prometheus' `histogram_quantile` does.

    It lies in the right bucket, and is interpolated there. No value is greater than the sum of all
    without the least that the others can be: of one request of 5.1 s this is 5.1 s, not 9.9 s.
    `None` without a value.
    """
    count = sum(buckets)
    if not count:
        return None
    lows = (0.0, *LATENCY_BUCKETS_MS)
    spare = total - sum(map(float.__mul__, lows, map(float, buckets)))
    wanted = share * count
    seen = 0
    for number, here in enumerate(buckets):
        if seen + here >= wanted and here:
            low = lows[number]
            high = LATENCY_BUCKETS_MS[number] if number < len(LATENCY_BUCKETS_MS) else low
            most = max(low, min(high, low + spare))
            return round(low + (most - low) * (wanted - seen) / here, 2)
        seen += here
    return float(LATENCY_BUCKETS_MS[-1])
