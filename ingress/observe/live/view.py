"""The view of a server: what all its processes have told, with the rates of the last minute.

`ingress status`, `ingress top` and the page show this view. It is JSON; the keys are those that the
page reads.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from time import time
from typing import Any, TypedDict

from ingress.core.base.settings import trace_url
from ingress.observe.live.history import (
    NO_RATES,
    Deployment,
    ProcessMemory,
    Rates,
    Recent,
    Route,
    of_replica,
)
from ingress.state.deployments import DeploymentSnapshot
from ingress.state.looking import Look
from ingress.state.running import ReplicaNow
from ingress.state.server import merged_applications

SILENT = "does not answer"
ROUTES = 500
ENDED = 50


class ReplicaOfServer(ReplicaNow):
    """The calls of a replica now. `process` is the id of the server's process that it belongs to.

    `rate`, `errors` and `cancelled` are the calls a second of the last minute, those that failed,
    and those that their callers have cancelled.
    """

    process: int
    rate: float
    errors: float
    cancelled: float


class Problem(TypedDict):
    """A problem in words; `level` is "bad" or "warn", `state` that of its deployment or "".

    `kind` is one word, which stays while the text has other numbers. Source:
    `observe/live/problems`.
    """

    level: str
    kind: str
    application: str
    deployment: str
    text: str
    state: str


class DeploymentView(Rates):
    """A deployment in all processes, with its rates of the last minute.

    `state` is `status`, unless a problem says more. `refused` is a rate, too. A deployment
    `is_bounded` if its queue has a limit. `jobs` has the fields of a `JobsSnapshot`.
    """

    name: str
    status: str
    state: str
    status_trigger: str
    message: str
    replica_states: dict[str, int]
    slots: int
    orphans: int
    queued: int
    ongoing: int
    requests: int
    refused: float
    held_s: float
    is_bounded: bool
    jobs: dict[str, Any] | None
    recent: Recent


class ApplicationView(TypedDict):
    """An application in all processes. `docs` is the path of its documentation."""

    name: str
    route_prefix: str | None
    docs: str | None
    status: str
    message: str
    deployed_at_s: float
    deployments: list[DeploymentView]


class RouteView(Rates):
    """The rates of one route."""

    application: str
    deployment: str
    route: str


class View(TypedDict):
    """The state of a server."""

    at: float
    pid: int
    url: str | None
    workers: list[int]
    silent: list[int]
    span_s: float
    is_healthy: bool
    problems: list[Problem]
    applications: list[ApplicationView]
    routes: list[RouteView]
    replicas: list[ReplicaOfServer]
    trace_url: str
    memory: list[ProcessMemory]
    slowest: list[dict[str, Any]]
    failed: list[dict[str, Any]]


def view_of(
    looks: Sequence[Look],
    absent: Mapping[int, str],
    rates: Mapping[Route, Rates],
    refused: Mapping[Deployment, float],
    span_s: float,
    recent: Mapping[Deployment, Recent],
    memory: Sequence[ProcessMemory],
    url: str | None = None,
) -> View:
    """Return the view of a server from the looks of its processes, without its problems.

    `absent` has the reason for each process without a look, such as `SILENT`, by id.
    """
    snapshots = [each.snapshot for each in looks]
    applications: list[ApplicationView] = [
        {
            "name": app,
            "status": each.status,
            "message": each.message,
            "route_prefix": each.route_prefix,
            "docs": each.docs,
            "deployed_at_s": each.deployed_at_s,
            "deployments": [
                _deployment(
                    name,
                    deployment,
                    rates.get((app, name, ""), NO_RATES),
                    refused.get((app, name), 0.0),
                    recent.get((app, name), {"rate": [], "p99": []}),
                )
                for name, deployment in each.deployments.items()
            ],
        }
        for app, each in merged_applications(snapshots).items()
    ]
    routes: list[RouteView] = [
        {"application": app, "deployment": deployment, "route": route, **each}
        for (app, deployment, route), each in rates.items()
        if route and not route.startswith("#")
    ]
    routes.sort(key=lambda each: -each["rate"])
    slowest = [{**each, "process": look.pid} for look in looks for each in look.slowest]
    slowest.sort(key=lambda each: each["stream_ms"] - each["ms"])
    failed = [{**each, "process": look.pid} for look in looks for each in look.failed]
    failed.sort(key=lambda each: -each["at"])
    return {
        "at": time(),
        "pid": os.getpid(),
        "url": url or next((each.url for each in snapshots if each.url), None),
        "workers": [each.pid for each in snapshots],
        "silent": [pid for pid, reason in absent.items() if reason == SILENT],
        "span_s": round(span_s, 1),
        "is_healthy": True,
        "problems": [],
        "applications": applications,
        "routes": routes[:ROUTES],
        "replicas": [_replica(each, look.pid, rates) for look in looks for each in look.replicas],
        "trace_url": trace_url(),
        "memory": list(memory),
        "slowest": slowest[:ENDED],
        "failed": failed[:ENDED],
    }


def _replica(now: ReplicaNow, pid: int, rates: Mapping[Route, Rates]) -> ReplicaOfServer:
    route = now["application"], now["deployment"], of_replica(pid, now["replica"])
    own = rates.get(route, NO_RATES)
    return {
        **now,
        "process": pid,
        "rate": own["rate"],
        "errors": own["errors"],
        "cancelled": own["cancelled"],
    }


def _deployment(
    name: str, found: DeploymentSnapshot, rates: Rates, refused: float, recent: Recent
) -> DeploymentView:
    return {
        "name": name,
        "status": found.status,
        "state": found.status,
        "status_trigger": found.status_trigger,
        "message": found.message,
        "replica_states": dict(Counter(each.state for each in found.replicas)),
        "slots": sum(each.max_ongoing for each in found.replicas if each.state == "RUNNING"),
        "orphans": found.orphans,
        "queued": found.queued,
        "ongoing": found.ongoing,
        "requests": found.requests,
        "refused": round(refused, 3),
        "held_s": round(found.held_s, 1),
        "is_bounded": found.is_bounded,
        "jobs": None if found.jobs is None else asdict(found.jobs),
        **rates,
        "recent": recent,
    }
