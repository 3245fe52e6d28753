"""The state of this process: a part of the view of a server, which may have several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from ingress.core.base.settings import Settings
from ingress.core.calls.notable import NOTABLE
from ingress.observe.live import children
from ingress.observe.live.configuration import HTTPSide, configuration_of
from ingress.observe.live.counts import counts
from ingress.observe.live.documents import (
    ConfigurationPart,
    CountPart,
    LinesPart,
    Links,
    MemoryPart,
    Part,
    Progress,
    Recording,
)
from ingress.observe.live.memory import memory, rss_of
from ingress.observe.live.running import RUNNING
from ingress.observe.timeline.sampling import record
from ingress.schema import ServeStatus
from ingress.serving.control.running import RunningApplication
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.logs.last_lines import LAST_LINES


class Server(Protocol):
    """The engine of this process, as its observer sees it."""

    @property
    def applications(self) -> Mapping[str, RunningApplication]: ...

    def url(self) -> str | None: ...

    def status(self) -> ServeStatus: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def http(self) -> HTTPSide: ...


def parts_of(
    server: Server, what: str, argument: float = 0.0
) -> tuple[list[Mapping[str, object]], dict[int, str]]:
    """Return the state of this process as its `Observer` asks for it: no process is absent."""
    return [WHAT[what](server, argument)], {}


def count_part(server: Server, argument: float = 0.0) -> CountPart:
    """Return the counters of this process, and nothing else: cheap."""
    running = dict(server.applications)
    return {
        "pid": os.getpid(),
        "counts": counts(running.values()),
        "memory": rss_of(server.http.command_line.process, _replicas(running)),
    }


def part(server: Server, argument: float = 0.0) -> Part:
    """Return the state of this process. Callable in any thread."""
    running = dict(server.applications)
    replicas = _replicas(running)
    slowest, failed = NOTABLE.recent()
    answers = children.ask(replicas)
    seen = RUNNING.look(replicas, {name: each.deployed_at_s for name, each in running.items()})
    children.add(seen, answers)
    return {
        **count_part(server),
        "url": server.url(),
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
                        "is_bounded": _is_bounded(running.get(name), deployment),
                    }
                    for deployment, one in each.deployments.items()
                },
            }
            for name, each in server.status().applications.items()
        },
        "replicas": seen,
        "slowest": [each.as_json() for each in slowest],
        "failed": [each.as_json() for each in failed],
    }


def configuration(server: Server, argument: float = 0.0) -> ConfigurationPart:
    """Return the options of this process, and the callables that the flag would move."""
    applications = list(server.applications.values())
    return {"pid": os.getpid(), **configuration_of(applications, server.settings, server.http)}


def last_lines(server: Server, argument: float = 0.0) -> LinesPart:
    """Return the last log lines of the replicas of this process."""
    return {
        "pid": os.getpid(),
        "replicas": [
            {
                "application": application,
                "deployment": deployment,
                "replica": replica,
                "lines": lines,
            }
            for (application, deployment, replica), lines in LAST_LINES.all().items()
        ],
    }


def recording(server: Server, seconds: float) -> Recording:
    """Return a recording of some seconds. It blocks."""
    return {"pid": os.getpid(), "trace": record(_replicas(dict(server.applications)), seconds)}


def memory_part(server: Server, seconds: float) -> MemoryPart:
    """Return what grows in some seconds. It blocks."""
    return memory(server.http.command_line.process, _replicas(dict(server.applications)), seconds)


def _replicas(running: Mapping[str, RunningApplication]) -> list[Replica]:
    return [
        replica
        for application in running.values()
        for deployment in list(application.deployments.values())
        for replica in deployment.replicas
    ]


def _is_bounded(application: RunningApplication | None, name: str) -> bool:
    """Return whether the queue of a deployment has a limit."""
    deployment = None if application is None else application.deployments.get(name)
    return deployment is not None and deployment.router.max_queued_requests >= 0


def _links(application: RunningApplication | None) -> Links:
    """Return the route prefix of an application, and the path of its documentation."""
    if application is None or application.route_prefix is None:
        return {"route_prefix": None, "docs": None}
    bound = application.ingress.built.bound_app
    docs = None if bound is None else bound.docs_path
    prefix = application.route_prefix
    return {"route_prefix": prefix, "docs": None if docs is None else prefix.rstrip("/") + docs}


def progress(server: Server, argument: float = 0.0) -> Progress:
    """Return whether the replicas are as wanted. Callable in any thread."""
    return {
        "pid": os.getpid(),
        "deployments": [
            {
                "pid": os.getpid(),
                "application": application.name,
                "deployment": name,
                "is_settled": each.is_settled(),
                "has_failed": each.setbacks.failed is not None,
                "rejected": each.rejected
                or ("" if each.setbacks.failed is None else each.setbacks.problem),
                "problem": each.status().message,
                "replicas": {
                    one.replica.replica_id.unique_id: one.replica.state.value
                    for one in list(each.members)
                },
            }
            for application in list(server.applications.values())
            for name, each in list(application.deployments.items())
        ],
    }


WHAT: Mapping[str, Callable[[Server, float], Mapping[str, object]]] = {
    "part": part,
    "counts": count_part,
    "progress": progress,
    "configuration": configuration,
    "lines": last_lines,
    "memory": memory_part,
    "record": recording,
}
"""The questions of an observer."""
