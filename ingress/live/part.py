"""The state of this process: a part of the view of a server, which may have several processes."""

from __future__ import annotations

import os
import threading
from typing import Any

from ingress.calls.notable import NOTABLE
from ingress.control.running import RunningApplication
from ingress.engines import local_engine
from ingress.live.counts import counts
from ingress.live.running import Running

_RUNNING = Running()
_LOOKING = threading.Lock()  # `_RUNNING` is for one thread at a time


def count_part() -> dict[str, Any]:
    """Return the counters of this process, and nothing else: cheap."""
    return {"pid": os.getpid(), "counts": counts(list(local_engine().applications.values()))}


def part() -> dict[str, Any]:
    """Return the state of this process. Callable in any thread."""
    engine = local_engine()
    running = dict(engine.applications)
    replicas = [
        replica
        for application in running.values()
        for deployment in list(application.deployments.values())
        for replica in deployment.replicas
    ]
    slowest, failed = NOTABLE.recent()
    with _LOOKING:
        seen = _RUNNING.look(replicas, {name: each.deployed_at_s for name, each in running.items()})
    return {
        **count_part(),
        "url": engine.url(),
        "applications": {
            name: {
                "status": each.status.value,
                "message": each.message,
                "deployed_at_s": each.last_deployed_time_s,
                **_links(running.get(name)),
                "deployments": {
                    deployment: {
                        "status": one.status.value,
                        "status_trigger": one.status_trigger,
                        "message": one.message,
                        "replica_states": one.replica_states,
                        "orphans": sum(replica.orphans for replica in one.replicas),
                    }
                    for deployment, one in each.deployments.items()
                },
            }
            for name, each in engine.apps.overviews().items()
        },
        "replicas": seen,
        "slowest": [each.as_json() for each in slowest],
        "failed": [each.as_json() for each in failed],
    }


def _links(application: RunningApplication | None) -> dict[str, str | None]:
    """Return the route prefix of an application, and the path of its documentation."""
    if application is None or application.route_prefix is None:
        return {"route_prefix": None, "docs": None}
    bound = application.ingress.bound_app
    docs = None if bound is None else bound.docs_path
    prefix = application.route_prefix
    return {
        "route_prefix": prefix,
        "docs": None if docs is None else prefix.rstrip("/") + docs,
    }
