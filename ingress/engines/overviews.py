"""The status of each application: of those that run, that start, and whose start failed.

Words, triggers and messages: Ray 2.60.0, _private/common.py and application_state.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ingress.core.base.types import DeploymentID
from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
)
from ingress.serving.control.running import RunningApplication
from ingress.telemetry.mistakes import described


@dataclass(frozen=True, eq=False, slots=True)
class FailedStart:
    """An application whose start failed: its name and prefix stay taken. Keeps no user object.

    `problems` has the message of each of its deployments, children first.
    """

    name: str
    route_prefix: str | None
    deployed_at_s: float
    message: str
    problems: Mapping[str, str]

    @classmethod
    def of(
        cls, application: RunningApplication, names: Iterable[str], error: Exception
    ) -> FailedStart:
        """Return the record of a start that an error ended, before its replicas are stopped."""
        known = application.overview().deployments
        started = {name for name, each in known.items() if each.status is DeploymentStatus.HEALTHY}
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

    def overview(self, serving: RunningApplication | None) -> ApplicationStatusOverview:
        """Return the status. `serving` is the application that it should have replaced."""
        deployments = {} if serving is None else dict(serving.overview().deployments)
        for name, problem in self.problems.items():
            deployments[name] = replace(
                deployments.get(name, _NOTHING),
                status=DeploymentStatus.DEPLOY_FAILED,
                status_trigger="REPLICA_STARTUP_FAILED",
                message=problem,
            )
        return ApplicationStatusOverview(
            ApplicationStatus.DEPLOY_FAILED, self.message, self.deployed_at_s, deployments
        )


_NOTHING = DeploymentStatusOverview(DeploymentStatus.DEPLOY_FAILED, "", {}, "")


def overview_of(application: RunningApplication) -> ApplicationStatusOverview:
    """Return the status of a running application; it may be unhealthy, or be deleted."""
    seen = application.overview()
    if seen.status is ApplicationStatus.DELETING:
        deployments = {
            name: replace(
                each, status=DeploymentStatus.UPDATING, status_trigger="DELETING", message=""
            )
            for name, each in seen.deployments.items()
        }
        return replace(seen, message="", deployments=deployments)
    unhealthy = {
        name: replace(each, status_trigger="HEALTH_CHECK_FAILED")
        for name, each in seen.deployments.items()
        if each.status is DeploymentStatus.UNHEALTHY
    }
    if seen.status is not ApplicationStatus.UNHEALTHY or not unhealthy:
        return seen
    message = seen.message or f"The deployments {[*unhealthy]} are UNHEALTHY."
    return replace(seen, message=message, deployments={**seen.deployments, **unhealthy})
