"""The counters of the deployments that run, as plain values.

They are read from their owners, see `base.counters`. A deployment that gets HTTP requests has those
of its router, from the arrival to the last byte; another one those of its replicas. A replica that
is replaced begins at 0, so `history` compares each replica with itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingress.observe.live.documents import Counters, Deployment, Sums
from ingress.serving.control.running import RunningApplication
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router


def _of_requests(router: Router) -> dict[tuple[str, str], Sums]:
    """Return the HTTP requests: their whole times, and as errors those answered 5xx.

    Without WebSockets, which last as long as their clients like.
    """
    found: dict[tuple[str, str], Sums] = {}
    for (route, method, status), each in router.http.summed().items():
        if method != "WS":
            buckets = tuple(each.buckets)
            errors = sum(buckets) if status >= 500 else 0
            found[f"{method} {status}", route] = sum(buckets), errors, each.total_ms, buckets
    return found


def _of_calls(replicas: Iterable[Replica]) -> dict[tuple[str, str], Sums]:
    """Return the calls by handle: the times that they ran."""
    found: dict[tuple[str, str], Sums] = {}
    for replica in replicas:
        # A copy: the user loop adds a route at any time.
        for route, each in replica.latencies.copy().items():
            buckets, key = tuple(each.buckets), (replica.replica_id.unique_id, route)
            found[key] = sum(buckets), each.errors, each.total_ms, buckets
    return found


def counts(applications: Iterable[RunningApplication]) -> dict[Deployment, Counters]:
    """Return the counters of each deployment. `routes` is by source and route."""
    found: dict[Deployment, Counters] = {}
    for application in applications:
        for name, deployment in list(application.deployments.items()):
            replicas = deployment.replicas
            found[application.name, name] = {
                "queued": deployment.router.num_queued,
                "ongoing": sum(each.ongoing for each in replicas),
                "requests": deployment.router.num_requests,
                "routes": _of_requests(deployment.router) or _of_calls(replicas),
            }
    return found
