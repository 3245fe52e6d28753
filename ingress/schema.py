"""What `serve.status()` returns, in the shape of Ray Serve 2.60's `ServeStatus`.

The counts are read from their owners when one asks: `requests` and `queued` from the deployment's
router, `ongoing` and `latency_ms` from its replicas; on Ray, which keeps them elsewhere, they are 0
and empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ingress.base.counters import LaneLoad, Latency
from ingress.base.unsupported import absent_member, teller
from ingress.config import LoggingConfig as LoggingConfig  # there in Ray Serve


class ApplicationStatus(StrEnum):
    """The words of Ray Serve."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"


class DeploymentStatus(StrEnum):
    """The words of Ray Serve."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"


@dataclass(frozen=True, slots=True)
class ReplicaDetails:
    """One replica: its state, what it runs now, and how long its requests took, by route.

    `stall_ms` is how long its event loop stood still, by the method that was in the way. Of the
    `ongoing`, `orphans` have been answered already: their code goes on after its client
    left or its deadline passed. `lanes` has those the deployment declares, and "serial".
    """

    replica_id: str
    state: str
    ongoing: int
    unhealthy_reason: str
    latency_ms: dict[str, Latency]
    orphans: int = 0
    stall_ms: dict[str, Latency] = field(default_factory=dict)
    lanes: dict[str, LaneLoad] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        raise absent_member(self, name)


@dataclass(frozen=True, slots=True)
class DeploymentStatusOverview:
    """One deployment. `requests` were accepted so far; `queued` wait for a slot now."""

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
    """Everything that runs; empty when nothing does.

    `proxies` has the HTTP server's address; on Ray the id of each node that serves HTTP.
    """

    proxies: dict[str, str] = field(default_factory=dict)
    applications: dict[str, ApplicationStatusOverview] = field(default_factory=dict)
    target_capacity: float | None = None


__getattr__ = teller(__name__)
