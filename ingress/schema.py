"""The result of `serve.status()`, in the shape of Ray Serve 2.60's `ServeStatus`.

`serve.status()` reads the counts from their owners: `requests` and `queued` from the deployment's
router, `ongoing` and `latency_ms` from its replicas. On Ray, which keeps them elsewhere, they are 0
and empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingress._unsupported import absent_member, teller
from ingress.config import LoggingConfig as LoggingConfig  # Ray Serve has it here
from ingress.core.base.counters import LaneLoad, Latency
from ingress.core.base.types import ReplicaRank as ReplicaRank  # Ray Serve has it here

if TYPE_CHECKING:  # loaded by those who use them: `__getattr__`
    from ingress.core.base.task_models import CeleryAdapterConfig as CeleryAdapterConfig
    from ingress.core.base.task_models import SQLiteAdapterConfig as SQLiteAdapterConfig
    from ingress.core.base.task_models import TaskProcessorAdapter as TaskProcessorAdapter
    from ingress.core.base.task_models import TaskProcessorConfig as TaskProcessorConfig
    from ingress.core.base.task_models import TaskResult as TaskResult


class ApplicationStatus(StrEnum):
    """The status of an application, in Ray Serve's words."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"


class DeploymentStatus(StrEnum):
    """The status of a deployment, in Ray Serve's words."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"


@dataclass(frozen=True, slots=True)
class ReplicaDetails:
    """One replica: its state, the number of its running calls, and their latency by route.

    `stall_ms` is the duration of its event loop's stalls, by the method that blocked the loop.
    `orphans` of the `ongoing` calls have been answered already: their code still runs although the
    client disconnected or the deadline passed. `lanes` has the declared lanes, and "serial".
    """

    replica_id: str
    state: str
    ongoing: int
    unhealthy_reason: str
    latency_ms: dict[str, Latency]
    orphans: int = 0
    stall_ms: dict[str, Latency] = field(default_factory=dict)
    lanes: dict[str, LaneLoad] = field(default_factory=dict)
    failed_health_checks: int = 0

    def __getattr__(self, name: str) -> Any:
        raise absent_member(self, name)


@dataclass(frozen=True, slots=True)
class DeploymentStatusOverview:
    """One deployment. `requests` is the number accepted so far; `queued` wait for a slot now."""

    status: DeploymentStatus
    status_trigger: str
    replica_states: dict[str, int]
    message: str
    requests: int = 0
    queued: int = 0
    replicas: list[ReplicaDetails] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ApplicationStatusOverview:
    """One application. `last_deployed_time_s` is Unix time."""

    status: ApplicationStatus
    message: str
    last_deployed_time_s: float
    deployments: dict[str, DeploymentStatusOverview]


@dataclass(frozen=True, slots=True)
class ServeStatus:
    """The status of everything that runs; empty if nothing runs.

    `proxies` has the address of the HTTP server; on Ray, the id of each node that serves HTTP.
    """

    proxies: dict[str, str] = field(default_factory=dict)
    applications: dict[str, ApplicationStatusOverview] = field(default_factory=dict)
    target_capacity: float | None = None


_absent = teller(__name__)
OF_JOBS = frozenset({
    "CeleryAdapterConfig", "SQLiteAdapterConfig", "TaskProcessorAdapter", "TaskProcessorConfig",
    "TaskResult",
})  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in OF_JOBS:
        return getattr(import_module("ingress.core.base.task_models"), name)
    return _absent(name)
