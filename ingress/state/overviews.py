"""The state of the applications as `serve.status()` returns it: in Ray Serve's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ReplicaDetails,
    ServeStatus,
)
from ingress.state.applications import ApplicationSnapshot
from ingress.state.deployments import DeploymentSnapshot, ReplicaSnapshot


def status_of(applications: Mapping[str, ApplicationSnapshot], url: str | None) -> ServeStatus:
    """Return the status of these applications, which are served at a URL, or not over HTTP."""
    return ServeStatus(
        {} if url is None else {url: "HEALTHY"},
        {
            name: ApplicationStatusOverview(
                ApplicationStatus(each.status),
                each.message,
                each.deployed_at_s,
                {one: _overview(deployment) for one, deployment in each.deployments.items()},
            )
            for name, each in applications.items()
        },
    )


def _overview(deployment: DeploymentSnapshot) -> DeploymentStatusOverview:
    return DeploymentStatusOverview(
        DeploymentStatus(deployment.status),
        deployment.status_trigger,
        dict(Counter(each.state for each in deployment.replicas)),
        deployment.message,
        deployment.requests,
        deployment.queued,
        [_details(each) for each in deployment.replicas],
    )


def _details(replica: ReplicaSnapshot) -> ReplicaDetails:
    return ReplicaDetails(
        replica.replica_id,
        replica.state,
        replica.ongoing,
        replica.unhealthy_reason,
        replica.counts.routes,
        replica.orphans,
        replica.counts.stalls,
        replica.lanes,
        replica.failed_health_checks,
    )
