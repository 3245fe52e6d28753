"""A limit on the routes that `/metrics` names; without it, 500 routes on 8 replicas are 12 MB.

The busiest routes of an application are named, and all others are one, `other`. A route keeps the
name that it got when it was first seen, its own or `other`: no counter decreases.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from threading import Lock

from ingress.state.applications import ApplicationSnapshot
from ingress.state.deployments import DeploymentSnapshot, HTTPCount, summed_http
from ingress.state.server import Snapshot

OTHER = "other"  # no template: those begin with a slash


@dataclass(eq=False, slots=True)
class RouteLimit:
    """The routes that are named: the busiest `most` of each application; `None` for all of them.

    Thread-safe: two scrapes may meet.
    """

    most: int | None
    # By application: the name that each route has got, its own or `OTHER`.
    _names: dict[str, dict[str, str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def limited(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the names that its routes have got."""
        if self.most is None:
            return snapshot
        applications = {}
        for name, application in snapshot.applications.items():
            with self._lock:
                names = self._names.setdefault(name, {"": ""})
                _name_new(names, _requests(application), self.most)
            deployments = {
                each: _renamed(deployment, names)
                for each, deployment in application.deployments.items()
            }
            applications[name] = replace(application, deployments=deployments)
        return replace(snapshot, applications=applications)


def _requests(application: ApplicationSnapshot) -> Counter[str]:
    """Return the requests of each route, as often as deployments have served them."""
    found: Counter[str] = Counter()
    for deployment in application.deployments.values():
        for http in deployment.http:
            found[http.route] += http.latency.count
        running = (each.counts for each in deployment.replicas)
        for counts in (*deployment.ended.values(), *running):
            for route, latency in counts.routes.items():
                found[route] += latency.count
            found.update(dict.fromkeys(counts.errors, 0))
    return found


def _name_new(names: dict[str, str], requests: Counter[str], most: int) -> None:
    named = sum(name != OTHER for route, name in names.items() if route)
    for route, _ in requests.most_common():
        if route not in names:
            names[route] = route if named < most else OTHER
            named += named < most


def _renamed(deployment: DeploymentSnapshot, names: dict[str, str]) -> DeploymentSnapshot:
    http = [HTTPCount(names[e.route], e.method, e.status, e.latency) for e in deployment.http]
    return replace(
        deployment,
        http=summed_http([http]),
        replicas=[replace(e, counts=e.counts.renamed(names)) for e in deployment.replicas],
        ended={name: each.renamed(names) for name, each in deployment.ended.items()},
    )
