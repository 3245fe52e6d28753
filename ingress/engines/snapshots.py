"""The snapshot of this process: see `ingress.core.base.snapshot`."""

from __future__ import annotations

import os
from time import time
from typing import TYPE_CHECKING

from ingress.core.base.snapshot import Snapshot, StallSnapshot, UserMetric
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.serving.control.snapshots import (
    application_snapshot,
    child_processes,
    http_counts,
    process_snapshot,
)
from ingress.telemetry.metrics import series
from ingress.telemetry.watchdog import WATCHDOG, Stall

if TYPE_CHECKING:
    from ingress.engines.local import LocalEngine

STALLS = 20


def snapshot_of(engine: LocalEngine) -> Snapshot:
    """Return the state of this process now. Thread-safe; it reads `/proc`, so it blocks."""
    pid = os.getpid()
    found = Snapshot(time(), pid, engine.url(), workers=[pid])
    name = engine.http.command_line.process
    found.processes.append(process_snapshot(name, pid))
    found.processes[0].gil_wait_s = GIL_PRESSURE.waited_s
    found.processes[0].processor_wait_s = WATCHDOG.processor_wait_s
    running = dict(engine.applications)
    for each, overview in engine.apps.overviews().items():
        start = engine.apps.starting.get(each)
        application = running.get(each) or (start.application if start else None)
        found.applications[each] = application_snapshot(overview, application, name)
        if application is not None:
            found.processes += child_processes(each, application, name)
    found.metrics = _metrics(found)
    for proxy in dict.fromkeys(engine.proxies()):
        found.unrouted += http_counts(proxy.unrouted)
    found.stalls = [_stall(each) for each in WATCHDOG.stalls()[-STALLS:]]
    return found


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


def _stall(stall: Stall) -> StallSnapshot:
    return StallSnapshot(
        stall.began_at_s,
        stall.duration_ms,
        stall.reason.value,
        stall.loop,
        stall.application,
        stall.deployment,
        stall.replica,
        stall.method,
        list(stall.request_ids),
        stall.place.file,
        stall.place.line,
        stall.is_over,
        str(stall),
    )
