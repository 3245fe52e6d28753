"""The state of a server: the parts of its processes together, with the rates of the last minute.

`ingress status`, `ingress top` and the page show this view. It is JSON, apart from the keys of the
parts' counters.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from time import time

from ingress.core.base.settings import trace_url
from ingress.observe.live.documents import (
    ApplicationPart,
    ApplicationView,
    Counters,
    Deployment,
    DeploymentPart,
    DeploymentView,
    Part,
    ProcessMemory,
    Rates,
    Recent,
    ReplicaNow,
    ReplicaOfServer,
    RouteView,
    View,
)
from ingress.observe.live.history import NO_RATES, Route, of_replica
from ingress.observe.live.problems import SILENT, all_healthy, problems_of, state_of

GRAVEST = ("DEPLOY_FAILED", "UNHEALTHY", "DELETING", "DEPLOYING", "UPDATING", "NOT_STARTED")
ROUTES = 500
ENDED = 50


def view_of(
    parts: Sequence[Part],
    absent: Mapping[int, str],
    rates: Mapping[Route, Rates],
    refused: Mapping[Deployment, float],
    span_s: float,
    recent: Mapping[Deployment, Recent],
    memory: Sequence[ProcessMemory],
    url: str | None = None,
) -> View:
    """Return the view of a server from the parts of its processes.

    `absent` has the reason for each process without a part, such as `SILENT`, by id.
    """
    replicas = [_replica(each, part["pid"], rates) for part in parts for each in part["replicas"]]
    applications = [
        _application(name, parts, replicas, rates, refused, recent)
        for name in dict.fromkeys(name for part in parts for name in part["applications"])
    ]
    failed = [{**each, "process": part["pid"]} for part in parts for each in part["failed"]]
    problems = problems_of(absent, applications, replicas, memory, failed)
    for application in applications:
        for each in application["deployments"]:
            each["state"] = state_of(application["name"], each, problems)
    routes: list[RouteView] = [
        {"application": app, "deployment": deployment, "route": route, **each}
        for (app, deployment, route), each in rates.items()
        if route and not route.startswith("#")
    ]
    routes.sort(key=lambda each: -each["rate"])
    slowest = [{**each, "process": part["pid"]} for part in parts for each in part["slowest"]]
    slowest.sort(key=lambda each: each["stream_ms"] - each["ms"])
    failed.sort(key=lambda each: -each["at"])
    statuses = [each["status"] for each in applications]
    of_deployments = [one["status"] for each in applications for one in each["deployments"]]
    return {
        "at": time(),
        "pid": os.getpid(),
        "url": url or next((part["url"] for part in parts if part["url"]), None),
        "workers": [part["pid"] for part in parts],
        "silent": [pid for pid, reason in absent.items() if reason == SILENT],
        "span_s": round(span_s, 1),
        "is_healthy": bool(parts)
        and all_healthy(statuses, of_deployments)
        and all(each["level"] != "bad" for each in problems),
        "problems": problems,
        "applications": applications,
        "routes": routes[:ROUTES],
        "replicas": replicas,
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


def _application(
    name: str,
    parts: Sequence[Part],
    replicas: Sequence[ReplicaNow],
    rates: Mapping[Route, Rates],
    refused: Mapping[Deployment, float],
    recent: Mapping[Deployment, Recent],
) -> ApplicationView:
    found = [part["applications"][name] for part in parts if name in part["applications"]]
    names = dict.fromkeys(each for one in found for each in one["deployments"])
    status = _gravest(found) if len(found) == len(parts) else "DEPLOYING"
    return {
        "name": name,
        "status": status,
        "message": _joined(found),
        "route_prefix": found[0]["route_prefix"],
        "docs": found[0]["docs"],
        "deployed_at_s": max(each["deployed_at_s"] for each in found),
        "deployments": [
            _deployment(
                each,
                [one["deployments"][each] for one in found if each in one["deployments"]],
                [part["counts"][name, each] for part in parts if (name, each) in part["counts"]],
                sum(
                    one["slots"]
                    for one in replicas
                    if (one["application"], one["deployment"], one["state"])
                    == (name, each, "RUNNING")
                ),
                rates.get((name, each, ""), NO_RATES),
                refused.get((name, each), 0.0),
                recent.get((name, each), {"rate": [], "p99": []}),
            )
            for each in names
        ],
    }


def _deployment(
    name: str,
    found: Sequence[DeploymentPart],
    counts: Sequence[Counters],
    slots: int,
    rates: Rates,
    refused: float,
    recent: Recent,
) -> DeploymentView:
    states: Counter[str] = Counter()
    for each in found:
        states.update(each["replica_states"])
    return {
        "name": name,
        "status": (status := _gravest(found)),
        "state": status,
        "status_trigger": found[0]["status_trigger"],
        "message": _joined(found),
        "replica_states": dict(states),
        "slots": slots,
        "orphans": sum(each["orphans"] for each in found),
        "queued": sum(each["queued"] for each in counts),
        "ongoing": sum(each["ongoing"] for each in counts),
        "requests": sum(each["requests"] for each in counts),
        "refused": round(refused, 3),
        "held_s": round(max((each["held_s"] for each in counts), default=0.0), 1),
        "is_bounded": any(each["is_bounded"] for each in found),
        **rates,
        "recent": recent,
    }


def _gravest(found: Sequence[ApplicationPart | DeploymentPart]) -> str:
    statuses = {each["status"] for each in found}
    return next((each for each in GRAVEST if each in statuses), found[0]["status"])


def _joined(found: Sequence[ApplicationPart | DeploymentPart]) -> str:
    return "; ".join(dict.fromkeys(each["message"] for each in found if each["message"]))
