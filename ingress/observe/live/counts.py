"""The counters of the deployments that run, as plain values.

They are read from their owners, see `base.counters`. A deployment that gets HTTP requests has those
of its router, from the arrival to the last byte; another one those of its replicas. A replica that
is replaced begins at 0, so `history` compares each replica with itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingress.core.base.counters import CLIENT_LEFT, Latency
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
            count, buckets = each.count, tuple(each.buckets)
            errors = count if status >= 500 else 0
            if status == CLIENT_LEFT:  # its time is the client's, not an answer's
                found[f"{method} {status}", route] = count, 0, count, 0.0, (0,) * len(buckets)
            else:
                sums = count, errors, each.cancelled, each.total_ms, buckets
                found[f"{method} {status}", route] = sums
    return found


def _sums(latency: Latency) -> Sums:
    buckets = tuple(latency.buckets)
    return sum(buckets), latency.errors, latency.cancelled, latency.total_ms, buckets


def _of_replica(replica: Replica) -> Sums:
    """Return all calls of a replica: the times that they ran."""
    every = Latency()
    for each in replica.latencies.copy().values():
        every.merge(each)
    return _sums(every)


def _of_calls(replicas: Iterable[Replica]) -> dict[tuple[str, str], Sums]:
    """Return the calls by handle: the times that they ran."""
    return {
        (replica.replica_id.unique_id, route): _sums(each)
        for replica in replicas
        # A copy: the user loop adds a route at any time.
        for route, each in replica.latencies.copy().items()
    }


def counts(applications: Iterable[RunningApplication]) -> dict[Deployment, Counters]:
    """Return the counters of each deployment. `routes` is by source and route."""
    found: dict[Deployment, Counters] = {}
    for application in applications:
        for name, deployment in list(application.deployments.items()):
            replicas, router = deployment.replicas, deployment.router
            found[application.name, name] = {
                "queued": router.num_queued,
                "ongoing": sum(each.ongoing for each in replicas),
                "requests": router.num_requests,
                "refused": router.num_rejected + router.num_shed,
                "held_s": router.held_s(),
                "routes": _of_requests(router) or _of_calls(replicas),
                "replicas": {each.replica_id.unique_id: _of_replica(each) for each in replicas}
                if len(replicas) > 1
                else {},
            }
    return found
