"""The state of a server in numbers and words: one snapshot of each process, summed by the parent.

    snapshot_of(server)         made by each process of itself, when asked
    merged(snapshots)           of all workers, in the supervisor: counters and gauges are sums
    kept(snapshot)              the counters that a process leaves behind

The counters are copies of ints and floats that the request path writes, each in one thread. The
JSON form, `/api/snapshot`, has the names of the fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import time
from typing import Any, Protocol

from ingress.config import HTTPOptions
from ingress.core.base.counters import UserMetric, merged_metrics
from ingress.core.base.process import process_facts
from ingress.core.base.settings import Settings
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.serving.control.running import RunningApplication
from ingress.serving.http.proxy import HTTPProxy
from ingress.serving.http.server_options import ServerOptions
from ingress.state.applications import ApplicationSnapshot, summed_application
from ingress.state.deployments import HTTPCount, http_counts, summed_http
from ingress.telemetry.metrics import series
from ingress.telemetry.watchdog import WATCHDOG, Stall

STALLS = 20


class HTTPSide(Protocol):
    """The options of HTTP of an engine; those of its command line are in both."""

    @property
    def command_line(self) -> ServerOptions: ...

    @property
    def options(self) -> HTTPOptions: ...


class Server(Protocol):
    """The engine of this process, as the documents of its state need it."""

    @property
    def applications(self) -> Mapping[str, RunningApplication]: ...

    def application_snapshots(self) -> dict[str, ApplicationSnapshot]: ...

    def proxies(self) -> list[HTTPProxy]: ...

    def url(self) -> str | None: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def http(self) -> HTTPSide: ...


@dataclass(slots=True)
class ProcessSnapshot:
    """One process of the server; a figure that the system does not give is 0.

    name        "server", "worker-1", or that with the replica whose process it is, such as
                "worker-1/default/Model#0"
    cpu_s       seconds of CPU time so far
    gil_wait_s  seconds by which the watchdog woke late because other threads held the GIL
    processor_wait_s  seconds for which the watchdog was ready to run and had no processor
    """

    name: str
    pid: int
    rss_bytes: int = 0
    cpu_s: float = 0.0
    threads: int = 0
    gil_wait_s: float = 0.0
    processor_wait_s: float = 0.0


def process_snapshot(name: str, pid: int) -> ProcessSnapshot:
    return ProcessSnapshot(name, pid, *process_facts(pid))


def _stall(stall: Stall) -> dict[str, Any]:
    """Return a stall of an event loop, see `watchdog.Stall`. `text` is its log record."""
    return {
        "began_at_s": stall.began_at_s,
        "duration_ms": stall.duration_ms,
        "reason": stall.reason.value,
        "loop": stall.loop,
        "application": stall.application,
        "deployment": stall.deployment,
        "replica": stall.replica,
        "method": stall.method,
        "request_ids": list(stall.request_ids),
        "file": stall.place.file,
        "line": stall.place.line,
        "is_over": stall.is_over,
        "text": str(stall),
    }


@dataclass(slots=True)
class Snapshot:
    """The state of a server at `made_at_s`, in Unix time.

    `workers` are the process ids of the workers that answered, `silent` of those that did not.
    `unrouted` are requests that no application's route matched, or that came while none served.
    """

    made_at_s: float
    pid: int
    url: str | None = None
    workers: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    processes: list[ProcessSnapshot] = field(default_factory=list)
    applications: dict[str, ApplicationSnapshot] = field(default_factory=dict)
    unrouted: list[HTTPCount] = field(default_factory=list)
    stalls: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[UserMetric] = field(default_factory=list)


def snapshot_of(server: Server) -> Snapshot:
    """Return the state of this process now. Thread-safe; it reads `/proc`, so it blocks."""
    pid = os.getpid()
    found = Snapshot(time(), pid, server.url(), workers=[pid])
    name = server.http.command_line.process
    here = process_snapshot(name, pid)
    here.gil_wait_s, here.processor_wait_s = GIL_PRESSURE.waited_s, WATCHDOG.processor_wait_s
    found.applications = server.application_snapshots()
    found.processes = [here, *_child_processes(name, found.applications)]
    found.metrics = _metrics(found)
    for proxy in dict.fromkeys(server.proxies()):
        found.unrouted += http_counts(proxy.unrouted)
    found.stalls = [_stall(each) for each in WATCHDOG.stalls()[-STALLS:]]
    return found


def _child_processes(
    name: str, applications: Mapping[str, ApplicationSnapshot]
) -> list[ProcessSnapshot]:
    """Return the snapshots of the processes of replicas.

    Their names begin with that of the server's process: each worker has a Model#0.
    """
    return [
        process_snapshot(f"{name}/{app}/{deployment}#{replica.replica_id}", replica.pid)
        for app, application in applications.items()
        for deployment, each in application.deployments.items()
        for replica in each.replicas
        if replica.pid not in (0, os.getpid())
    ]


def _metrics(found: Snapshot) -> list[UserMetric]:
    """Return the users' metrics, without the gauges of replicas that have ended."""
    live = {
        (app, name, replica.replica_id)
        for app, application in found.applications.items()
        for name, deployment in application.deployments.items()
        for replica in deployment.replicas
    }
    metrics = series.collected()
    for each in metrics:
        if each.kind == "gauge":
            each.series = [
                one for one in each.series if not one.labels[2] or tuple(one.labels[:3]) in live
            ]
    return metrics


def merged(parts: Sequence[Snapshot], left: Snapshot | None = None) -> Snapshot:
    """Return the sum of the snapshots of several workers; `left` is of those that have ended."""
    newest = max(parts, key=lambda each: each.made_at_s)
    everything = [*parts, left] if left is not None else list(parts)
    return Snapshot(
        newest.made_at_s,
        newest.pid,
        newest.url,
        [pid for part in parts for pid in part.workers],
        [pid for part in parts for pid in part.silent],
        [process for part in parts for process in part.processes],
        merged_applications(parts, left),
        summed_http(part.unrouted for part in everything),
        sorted(
            (each for part in parts for each in part.stalls), key=lambda each: each["began_at_s"]
        ),
        merged_metrics(each.metrics for each in everything),
    )


def merged_applications(
    parts: Sequence[Snapshot], left: Snapshot | None = None
) -> dict[str, ApplicationSnapshot]:
    """Return the applications of several workers, and the counters of those that have ended."""
    everything = [*parts, left] if left is not None else list(parts)
    return {
        name: summed_application(
            [part.applications[name] for part in everything if name in part.applications],
            len(parts),
        )
        for name in dict.fromkeys(name for part in parts for name in part.applications)
    }


def kept(snapshot: Snapshot) -> Snapshot:
    """Return what stays of a process that has ended: its counters, and no status or gauge."""
    return replace(
        snapshot,
        workers=[],
        processes=[],
        stalls=[],
        applications={name: each.kept() for name, each in snapshot.applications.items()},
        metrics=[each for each in snapshot.metrics if each.kind != "gauge"],
    )


def both_kept(one: Snapshot | None, other: Snapshot) -> Snapshot:
    """Return the counters that two ended processes leave behind."""
    other = kept(other)
    return other if one is None else merged([one, other])
