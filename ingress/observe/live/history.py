"""The rates and latencies of the last 15 minutes, from snapshots; and the growth of the memory.

    History.add      the counters of now; every 5 s it keeps a point
    History.window   the rates and percentiles between a point of a minute ago and now
    History.series   the same for each interval between two points, for a chart
    Growth           the resident memory of each process in the last hour, from a look every minute

A deployment that gets HTTP requests has those of its router, from the arrival to the last byte;
another one those of its replicas. A replica that is replaced begins at 0, so each is compared with
itself.

A point has the sums of a route over all replicas that there ever were: a replica that ends takes
nothing away. Points share the sums of routes that nothing has called meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TypedDict

from ingress.core.base.counters import CLIENT_LEFT, LATENCY_BUCKETS_MS, Latency
from ingress.state.deployments import DeploymentSnapshot
from ingress.state.server import Snapshot

Sums = tuple[int, int, int, float, tuple[int, ...]]
"""Calls that have ended, those of them that failed, those that their callers have cancelled; the
duration in ms, and its buckets, of all but those whose client left before the answer.
"""

Deployment = tuple[str, str]
"""An application and one of its deployments."""

STEP_S = 5.0
POINTS = 180
WINDOW_S = 60.0
DIGITS = 6  # of rates, whose shares are told to a tenth of a percent
MEMORY_STEP_S = 60.0
MEMORY_POINTS = 61
MEMORY_LEAST_S = 90.0
"""Seconds before which nothing is said about growth: a server that starts grows."""
RECENT = 24  # intervals of a small chart: two minutes
PROCESSES = 1000  # whose last counters are remembered; workers that have ended count too

Route = tuple[str, str, str]
"""An application, one of its deployments, and a route; "" is all routes of the deployment.

`of_replica` is all calls of one replica.
"""


class Rates(TypedDict):
    """Rates a second, and latencies of answers in ms, or `None`.

    `cancelled` are the requests whose callers cancelled them or left, no errors; `left` are those
    of them whose clients left before the answer began, which are in no latency.
    """

    rate: float
    errors: float
    cancelled: float
    left: float
    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None


class Interval(Rates):
    """The rates of one interval of a chart. `ago_s` is the age of its end."""

    ago_s: float
    queued: int


class Series(TypedDict):
    """A chart of the last 15 minutes."""

    step_s: float
    points: list[Interval]


class Recent(TypedDict):
    """The last intervals of a deployment, for a small chart."""

    rate: list[float]
    p99: list[float | None]


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

    def add(self, at: float, parts: Iterable[Snapshot]) -> None:
        """Take the counters of all processes. `at` is monotonic."""
        with self._lock:
            queued: dict[Deployment, int] = {}
            refused: dict[Deployment, int] = {}
            replicas: dict[Route, Sums] = {}
            for part in parts:
                before, seen = self._last.get(part.pid, {}), {}
                for name, each in deployments_of(part):
                    queued[name] = queued.get(name, 0) + each.queued
                    refused[name] = refused.get(name, 0) + each.rejected + each.shed
                    self._sums.setdefault((*name, ""), _NONE)
                    for (source, route), sums in (_of_requests(each) or _of_calls(each)).items():
                        seen[name, source, route] = sums
                        self._count(name, route, sums, before.get((name, source, route)))
                    for replica in each.replicas if len(each.replicas) > 1 else ():
                        route = of_replica(part.pid, replica.replica_id)
                        replicas[*name, route] = _sum_of(replica.counts.routes.values())
                self._last[part.pid] = seen
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


def deployments_of(part: Snapshot) -> Iterator[tuple[Deployment, DeploymentSnapshot]]:
    """Yield the deployments of a process, each with the name of its application and its own."""
    for app, application in part.applications.items():
        for name, deployment in application.deployments.items():
            yield (app, name), deployment


def _of_requests(deployment: DeploymentSnapshot) -> dict[tuple[str, str], Sums]:
    """Return the HTTP requests: their whole times, and as errors those answered 5xx.

    Without WebSockets, which last as long as their clients like.
    """
    found: dict[tuple[str, str], Sums] = {}
    for each in deployment.http:
        if each.method != "WS":
            latency, count = each.latency, each.latency.count
            sums = count, 0, count, 0.0, _NONE[-1]  # its time is the client's, not an answer's
            if each.status != CLIENT_LEFT:
                errors = count if each.status >= 500 else 0
                buckets = tuple(latency.buckets)
                sums = count, errors, latency.cancelled, latency.total_ms, buckets
            found[f"{each.method} {each.status}", each.route] = sums
    return found


def _of_calls(deployment: DeploymentSnapshot) -> dict[tuple[str, str], Sums]:
    """Return the calls by handle: the times that they ran."""
    return {
        (each.replica_id, route): _sum_of([latency])
        for each in deployment.replicas
        for route, latency in each.counts.routes.items()
    }


def _sum_of(latencies: Iterable[Latency]) -> Sums:
    every = Latency()
    for each in latencies:
        every.merge(each)
    buckets = tuple(every.buckets)
    return sum(buckets), every.errors, every.cancelled, every.total_ms, buckets


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


class ProcessMemory(TypedDict):
    """The resident memory of a process, and its growth by the hour; `None` until it is known."""

    process: str
    rss_bytes: int
    bytes_per_h: float | None


@dataclass(eq=False, slots=True)
class Growth:
    """The resident memory of processes in the last hour, in bytes, by name. Of one thread."""

    _points: deque[tuple[float, Mapping[str, int]]] = field(
        default_factory=lambda: deque(maxlen=MEMORY_POINTS)
    )

    def add(self, at: float, parts: Iterable[Snapshot]) -> list[ProcessMemory]:
        """Take the memory of now, and return it with its growth by the hour.

        `at` is monotonic. The growth is that since the first look at a process, or an hour ago.
        """
        found = {each.name: each.rss_bytes for part in parts for each in part.processes}
        if not self._points or at - self._points[-1][0] >= MEMORY_STEP_S:
            self._points.append((at, dict(found)))
        return [
            {"process": name, "rss_bytes": rss, "bytes_per_h": self._by_hour(name, at, rss)}
            for name, rss in found.items()
        ]

    def _by_hour(self, name: str, now: float, rss: int) -> float | None:
        first = next(((at, seen[name]) for at, seen in self._points if name in seen), None)
        # Not from the first look: imports and caches fill then.
        if first is None or now - first[0] < MEMORY_LEAST_S:
            return None
        later = next(
            (
                (at, seen[name])
                for at, seen in self._points
                if name in seen and at - first[0] >= MEMORY_STEP_S
            ),
            first,  # it did not answer since
        )
        span_s = now - later[0]
        return None if span_s < MEMORY_STEP_S / 2 else (rss - later[1]) / span_s * 3600.0
