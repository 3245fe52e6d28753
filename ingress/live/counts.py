"""The counters of the replicas that run, as plain values.

They are read from their owners, see `base.counters`. A replica that is replaced begins at 0, so
`history` compares each replica with itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ingress.control.running import RunningApplication

Sums = tuple[int, int, float, tuple[int, ...]]
"""Calls that have ended, those of them that failed, their duration in ms, and its buckets."""

Deployment = tuple[str, str]
"""An application and one of its deployments."""


def counts(applications: Iterable[RunningApplication]) -> dict[Deployment, dict[str, Any]]:
    """Return the counters of each deployment. `routes` is by replica and route."""
    found: dict[Deployment, dict[str, Any]] = {}
    for application in applications:
        for name, deployment in list(application.deployments.items()):
            routes: dict[tuple[str, str], Sums] = {}
            ongoing = 0
            for replica in deployment.replicas:
                ongoing += replica.ongoing
                tag = replica.replica_id.unique_id
                # A copy: the user loop adds a route at any time.
                for route, each in replica.latencies.copy().items():
                    sums = each.count, each.errors, each.total_ms, tuple(each.buckets)
                    routes[tag, route] = sums
            found[application.name, name] = {
                "queued": deployment.router.num_queued,
                "ongoing": ongoing,
                "requests": deployment.router.num_requests,
                "routes": routes,
            }
    return found
