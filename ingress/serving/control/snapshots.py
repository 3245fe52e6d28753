"""The snapshots of running applications, which any thread may make."""

from __future__ import annotations

import os

from ingress.core.base.counters import HTTPCounts
from ingress.core.base.process import process_facts
from ingress.core.base.snapshot import (
    ApplicationSnapshot,
    DeploymentSnapshot,
    HTTPCount,
    ProcessSnapshot,
    ReplicaSnapshot,
)
from ingress.schema import ApplicationStatusOverview, DeploymentStatusOverview
from ingress.serving.control.running import Member, RunningApplication, RunningDeployment
from ingress.serving.replicas.router import Router


def application_snapshot(
    overview: ApplicationStatusOverview, application: RunningApplication | None, process: str
) -> ApplicationSnapshot:
    """Return the snapshot of an application with this status; it may not run."""
    running = {} if application is None else dict(application.deployments)
    return ApplicationSnapshot(
        overview.status.value,
        overview.message,
        None if application is None else application.route_prefix,
        overview.last_deployed_time_s,
        {
            name: _deployment_snapshot(each, running.get(name), process)
            for name, each in overview.deployments.items()
        },
    )


def _deployment_snapshot(
    overview: DeploymentStatusOverview, deployment: RunningDeployment | None, process: str
) -> DeploymentSnapshot:
    found = DeploymentSnapshot(
        overview.status.value, overview.status_trigger, overview.message, target_replicas=0
    )
    if deployment is None:
        return found
    router = deployment.router
    found.target_replicas = deployment.desired.count
    found.losses = deployment.setbacks.losses
    found.failed_starts = deployment.setbacks.failed_starts
    _add_router(found, router)
    members = list(deployment.members)
    found.replicas = [_replica_snapshot(each, process) for each in members]
    there = {each.replica_id for each in found.replicas}
    # Race with the end of a replica, which is kept before it is removed: it counts once.
    found.ended = {
        name: deployment.ended[name] for name in list(deployment.ended) if name not in there
    }
    return found


def _add_router(found: DeploymentSnapshot, router: Router) -> None:
    found.queued, found.requests = router.num_queued, router.num_requests
    found.rejected, found.shed = router.num_rejected, router.num_shed
    found.retries, found.expired = router.num_retries, router.num_expired
    found.http = http_counts(router.http)
    found.held_s = router.held_s()


def http_counts(counts: HTTPCounts) -> list[HTTPCount]:
    """Return copies of counts that HTTP loops write."""
    return [HTTPCount(*key, latency) for key, latency in counts.summed().items()]


def _replica_snapshot(member: Member, process: str) -> ReplicaSnapshot:
    replica, host = member.replica, member.replica.host
    inside = host.counts()
    return ReplicaSnapshot(
        replica.replica_id.unique_id,
        process,
        host.pid,
        replica.state.value,
        replica.ongoing,
        replica.slots.max_ongoing,
        replica.orphans,
        replica.unhealthy_reason or member.stuck,
        member.failed_checks,
        inside.lanes,
        sorted(replica.model_ids),
        inside.batch_queues,
        replica.counts(),
    )


def process_snapshot(name: str, pid: int) -> ProcessSnapshot:
    """Return the snapshot of one process."""
    return ProcessSnapshot(name, pid, *process_facts(pid))


def child_processes(
    name: str, application: RunningApplication, process: str
) -> list[ProcessSnapshot]:
    """Return the snapshots of the processes of an application's replicas.

    Their names begin with that of the server's process: each worker has a Model#0.
    """
    return [
        process_snapshot(f"{process}/{name}/{replica.replica_id}", replica.host.pid)
        for deployment in list(application.deployments.values())
        for replica in deployment.replicas
        if replica.host.pid not in (0, os.getpid())
    ]
