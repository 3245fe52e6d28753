"""The state of an application: of one that runs, that starts, or whose start failed.

`status_of` returns it in the shape of `serve.status()`.

Words, triggers and messages: Ray 2.60.0, _private/common.py and application_state.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ingress.core.base.types import DeploymentID
from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ReplicaDetails,
    ServeStatus,
)
from ingress.serving.control.running import RunningApplication
from ingress.state.deployments import (
    DeploymentSnapshot,
    ReplicaSnapshot,
    deployment_snapshot,
    gravest,
    joined,
    summed,
)
from ingress.telemetry.mistakes import described


@dataclass(slots=True)
class ApplicationSnapshot:
    """One application. `deployed_at_s` is Unix time; the last deployment gets the requests.

    `docs` is the path of its documentation, if it serves one.
    """

    status: str
    message: str
    route_prefix: str | None
    deployed_at_s: float
    deployments: dict[str, DeploymentSnapshot] = field(default_factory=dict)
    docs: str | None = None

    def kept(self) -> ApplicationSnapshot:
        """Return what stays when its process has ended."""
        deployments = {name: each.kept() for name, each in self.deployments.items()}
        return replace(self, status="", message="", deployments=deployments)


def application_snapshot(
    application: RunningApplication, serving: RunningApplication | None, process: str
) -> ApplicationSnapshot:
    """Return the snapshot of an application. Thread-safe.

    `serving` is the application that serves while this one starts, if there is one.
    """
    older = {} if serving is None else dict(serving.deployments)
    deployments = {name: deployment_snapshot(each, None, process) for name, each in older.items()}
    for name, each in dict(application.deployments).items():
        deployments[name] = deployment_snapshot(each, older.get(name), process)
    status, message = application.status.value, application.message
    unhealthy = {name: one for name, one in deployments.items() if one.status == "UNHEALTHY"}
    if status == "DELETING":
        message = ""
        for one in deployments.values():
            one.status, one.status_trigger, one.message = "UPDATING", "DELETING", ""
    elif status == "RUNNING" and unhealthy:
        status = "UNHEALTHY"
        message = message or f"The deployments {[*unhealthy]} are UNHEALTHY."
        for one in unhealthy.values():
            one.status_trigger = "HEALTH_CHECK_FAILED"
    shown = serving or application
    return ApplicationSnapshot(
        status,
        message,
        shown.route_prefix,
        application.deployed_at_s,
        deployments,
        _docs(shown),
    )


def _docs(application: RunningApplication) -> str | None:
    """Return the path of the documentation of an application that serves."""
    prefix = application.route_prefix
    if prefix is None or application.status is ApplicationStatus.DEPLOYING:
        return None
    bound = application.ingress.built.bound_app
    docs = None if bound is None else bound.docs_path
    return None if docs is None else prefix.rstrip("/") + docs


@dataclass(frozen=True, eq=False, slots=True)
class FailedStart:
    """An application whose start failed: its name and prefix stay taken.

    `problems` has the message of each of its deployments, children first. Of the user's objects it
    keeps only `app`, which its module has too.
    """

    name: str
    route_prefix: str | None
    deployed_at_s: float
    message: str
    problems: Mapping[str, str]
    app: Any

    @classmethod
    def of(
        cls, application: RunningApplication, names: Iterable[str], error: Exception
    ) -> FailedStart:
        """Return the record of a start that an error ended, before its replicas are stopped."""
        deployments = application.deployments.items()
        started = {name for name, each in deployments if each.status()[0] == "HEALTHY"}
        problems: dict[str, str] = {}
        culprit = ""
        for name in names:  # they start one after another
            if name in started:
                problems[name] = "stopped, because another deployment failed to start"
            elif not culprit:
                culprit = name
                problems[name] = f"failed to start: {described(error.__cause__ or error)}"
            else:
                problems[name] = f"not started, because {culprit!r} failed to start"
        return cls(
            application.name,
            application.route_prefix,
            application.deployed_at_s,
            str(error),
            problems,
            application.app,
        )

    @property
    def is_answered(self) -> bool:
        """Return whether requests to it get 503: there is a prefix that they can have."""
        return self.route_prefix is not None

    @property
    def ingress(self) -> DeploymentID:
        """The deployment that requests from outside are for."""
        return DeploymentID(list(self.problems)[-1], self.name)

    def has(self, deployment: DeploymentID) -> bool:
        return deployment.app_name == self.name and deployment.name in self.problems

    def snapshot(self, serving: RunningApplication | None, process: str) -> ApplicationSnapshot:
        """Return the snapshot. `serving` is the application that it should have replaced."""
        found = ApplicationSnapshot("", "", None, 0.0)
        if serving is not None:
            found = application_snapshot(serving, None, process)
        found.status, found.message = "DEPLOY_FAILED", self.message
        found.deployed_at_s = self.deployed_at_s
        for name, problem in self.problems.items():
            each = found.deployments.setdefault(name, DeploymentSnapshot("", "", "", 0))
            each.status, each.status_trigger = "DEPLOY_FAILED", "REPLICA_STARTUP_FAILED"
            each.message = problem
        return found


def summed_application(parts: Sequence[ApplicationSnapshot], processes: int) -> ApplicationSnapshot:
    """Return one application in several processes, of so many that serve.

    Its status is the gravest; it is DEPLOYING while not every process has it.
    """
    deployments: dict[str, list[DeploymentSnapshot]] = {}
    for each in parts:
        for name, one in each.deployments.items():
            deployments.setdefault(name, []).append(one)
    present = [each for each in parts if each.status]
    is_everywhere = len(present) in (0, processes)
    return replace(
        parts[0],
        status=gravest([each.status for each in present]) if is_everywhere else "DEPLOYING",
        message=joined(each.message for each in present),
        deployed_at_s=max(each.deployed_at_s for each in parts),
        deployments={name: summed(ones) for name, ones in deployments.items()},
    )


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
