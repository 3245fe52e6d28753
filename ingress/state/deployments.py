"""The state of a deployment and its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ingress.core.base.counters import (
    MAX_ENDED,
    HTTPCounts,
    LaneLoad,
    Latency,
    ReplicaCounts,
    keep,
)
from ingress.serving.control.running import Member, RunningDeployment

MOST_KEYS = 100  # of a deployment that are named: clients choose them
GRAVEST = ("DEPLOY_FAILED", "UNHEALTHY", "DELETING", "DEPLOYING", "UPDATING", "NOT_STARTED")


@dataclass(slots=True)
class ReplicaSnapshot:
    """One replica. `process` is the name of the server process that it belongs to.

    `pid` is the process that its user code runs in, `batch_queues` has the calls that wait for
    their batch, by function.
    """

    replica_id: str
    process: str
    pid: int
    state: str
    ongoing: int
    max_ongoing: int
    orphans: int
    unhealthy_reason: str
    failed_health_checks: int
    lanes: dict[str, LaneLoad]
    models: list[str]
    batch_queues: dict[str, int]
    counts: ReplicaCounts


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
        replica.counts(inside),
    )


@dataclass(slots=True)
class HTTPCount:
    """The HTTP requests of one route template, method and status: their number and times.

    Method "WS" is a WebSocket, status 101 if it was accepted. Status 499: the client left before
    the answer.
    """

    route: str
    method: str
    status: int
    latency: Latency


def http_counts(counts: HTTPCounts) -> list[HTTPCount]:
    """Return copies of counts that HTTP loops write."""
    return [HTTPCount(*key, latency) for key, latency in counts.summed().items()]


def summed_http(parts: Iterable[list[HTTPCount]]) -> list[HTTPCount]:
    """Return the requests of all parts, one count for each route, method and status."""
    found: dict[tuple[str, str, int], HTTPCount] = {}
    for counts in parts:
        for each in counts:
            key = (each.route, each.method, each.status)
            found.setdefault(key, HTTPCount(*key, Latency())).latency.merge(each.latency)
    return list(found.values())


@dataclass(slots=True)
class JobsSnapshot:
    """The jobs of a deployment's queue, as they were at most a second ago.

    The numbers by state are those of the whole queue, which several processes may share. `ended`
    has the attempts that have ended in this server, by the states of their jobs.

    retrying   of those that wait, those that have been tried
    oldest_s   seconds for which the first of them could have begun
    """

    queue: str
    waiting: int = 0
    running: int = 0
    retrying: int = 0
    dead: int = 0
    unreadable: int = 0
    oldest_s: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)


def _jobs_snapshot(deployment: RunningDeployment) -> JobsSnapshot | None:
    if (consumer := deployment.consumer) is None:
        return None
    found = JobsSnapshot(consumer.queue, ended=dict(consumer.ended))
    for name, value in consumer.counts.items():
        if hasattr(found, name):
            setattr(found, name, value)
    return found


def _summed_jobs(parts: Sequence[JobsSnapshot]) -> JobsSnapshot | None:
    """Return the jobs of one queue as several processes see it: one knows the latest numbers."""
    if not parts:
        return None
    latest = max(parts, key=lambda each: each.waiting + each.running + each.dead)
    states = {state for each in parts for state in each.ended}
    sums = {state: sum(each.ended.get(state, 0) for each in parts) for state in states}
    return replace(latest, ended=sums)


@dataclass(slots=True)
class DeploymentSnapshot:
    """One deployment: its status, its router's counters, and its replicas.

    requests   calls that its router accepted
    rejected   calls refused because the queue was full, or because they could not be answered in
               time
    shed       calls that were taken out of the queue, because they could not be answered in time
    retries    calls that were sent to another replica
    expired    calls whose deadline passed
    losses     replicas that ended by themselves, such as a process that was killed
    failed_starts  starts of replicas that failed
    ended      the counters of replicas that have ended, by their ids, at most `MAX_ENDED`
    held_s     seconds for which the same calls have held all slots; 0.0 if one is free
    is_bounded     true if its queue has a limit
    is_settled     true if its replicas are as wanted, or a start or an update was given up
    undone_change  why the last change was given up and the options before are in use, or ""
    jobs           those of its queue, `None` if it has none
    keys           the waiting calls of fairness keys, those with the most, and "other"
    """

    status: str
    status_trigger: str
    message: str
    target_replicas: int
    queued: int = 0
    requests: int = 0
    rejected: int = 0
    shed: int = 0
    retries: int = 0
    expired: int = 0
    losses: int = 0
    failed_starts: int = 0
    http: list[HTTPCount] = field(default_factory=list)
    replicas: list[ReplicaSnapshot] = field(default_factory=list)
    ended: dict[str, ReplicaCounts] = field(default_factory=dict)
    held_s: float = 0.0
    is_bounded: bool = False
    is_settled: bool = True
    undone_change: str = ""
    jobs: JobsSnapshot | None = None
    keys: dict[str, int] = field(default_factory=dict)

    @property
    def ongoing(self) -> int:
        return sum(each.ongoing for each in self.replicas)

    @property
    def orphans(self) -> int:
        return sum(each.orphans for each in self.replicas)

    def counts(self) -> dict[str, ReplicaCounts]:
        """Return the counters of all replicas, by id: of those that run and those that ended."""
        found: dict[str, ReplicaCounts] = {}
        running = [(each.replica_id, each.counts) for each in self.replicas]
        for name, counts in (*self.ended.items(), *running):
            found.setdefault(name, ReplicaCounts(starts=0)).add(counts)
        return found

    def kept(self) -> DeploymentSnapshot:
        """Return what stays when its process has ended: its counters, and no status or gauge."""
        return replace(
            self,
            status="",
            message="",
            target_replicas=0,
            queued=0,
            held_s=0.0,
            keys={},
            replicas=[],
            jobs=self.jobs and JobsSnapshot(self.jobs.queue, ended=self.jobs.ended),
            ended=dict(list(self.counts().items())[-MAX_ENDED:]),
        )


_SUMS = (
    "target_replicas", "queued", "requests", "rejected", "shed", "retries", "expired", "losses",
    "failed_starts",
)  # fmt: skip


def deployment_snapshot(
    deployment: RunningDeployment, serving: RunningDeployment | None, process: str
) -> DeploymentSnapshot:
    """Return the snapshot of a deployment. Thread-safe.

    `serving` is the deployment that it is to replace, whose router is in use; it may be the same,
    if its replicas are replaced one after another.
    """
    status, trigger, message = deployment.status(serving)
    members = list(deployment.members)
    if serving is None or serving is deployment:
        serving = deployment
    else:
        members = [*serving.members, *members]
    router = serving.router
    has_failed = deployment.setbacks.failed is not None
    found = DeploymentSnapshot(
        status.value,
        trigger,
        message,
        serving.desired.count,
        router.num_queued,
        router.num_requests,
        router.num_rejected,
        router.num_shed,
        router.num_retries,
        router.num_expired,
        serving.setbacks.losses,
        serving.setbacks.failed_starts,
        http_counts(router.http),
        [_replica_snapshot(each, process) for each in members],
        held_s=router.held_s(),
        is_bounded=router.max_queued_requests >= 0,
        is_settled=has_failed or deployment.is_settled(),
        undone_change=deployment.rejected or (deployment.setbacks.problem if has_failed else ""),
        jobs=_jobs_snapshot(serving),
        keys=router.queued_by_key(MOST_KEYS),
    )
    there = {each.replica_id for each in found.replicas}
    # Race with the end of a replica, which is kept before it is removed: it counts once.
    ended = serving.ended
    found.ended = {name: ended[name] for name in list(ended) if name not in there}
    return found


def summed(parts: Sequence[DeploymentSnapshot]) -> DeploymentSnapshot:
    """Return one deployment in several processes: counts are sums, the status is the gravest."""
    ended: dict[str, ReplicaCounts] = {}
    for part in parts:
        for name, counts in part.ended.items():
            keep(ended, name, counts)
    present = [each for each in parts if each.status]
    return DeploymentSnapshot(
        gravest([each.status for each in present]),
        parts[0].status_trigger,
        joined(each.message for each in present),
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMS},
        http=summed_http(part.http for part in parts),
        replicas=[replica for part in parts for replica in part.replicas],
        ended=ended,
        held_s=max(part.held_s for part in parts),
        is_bounded=any(part.is_bounded for part in parts),
        is_settled=all(part.is_settled for part in present),
        undone_change=joined(each.undone_change for each in present),
        jobs=_summed_jobs([each.jobs for each in parts if each.jobs is not None]),
        keys=dict(sum((Counter(part.keys) for part in parts), Counter())),
    )


def gravest(statuses: Sequence[str]) -> str:
    """Return the gravest status, "" for none."""
    return next((each for each in GRAVEST if each in statuses), next(iter(statuses), ""))


def joined(texts: Iterable[str]) -> str:
    """Return the texts of several processes as one."""
    return "; ".join(dict.fromkeys(filter(None, texts)))
