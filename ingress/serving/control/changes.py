"""Changes of a running deployment's options, in place: which are possible, and what they do.

    num_replicas, autoscaling_config,      replicas are added, or drain
    max_replicas_per_node
    user_config                            `reconfigure`, one replica after another: it gets no new
                                           calls, its calls end, it is reconfigured, it is back
    max_ongoing_requests                   slots and threads of each replica
    max_queued_requests, backpressure,     the queue
    fairness
    health, shutdown, retries, updates,    apply from the next time that they are used
    limits of a replica's life

All other options say how a replica is made: they need new replicas, and so a new `serve.run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ingress.app.declaration.cluster_options import check_count
from ingress.autoscaling_policy import bounded
from ingress.config import DeploymentConfig
from ingress.core.base.options import IN_PLACE
from ingress.serving.control.running import RunningDeployment, Version
from ingress.serving.control.scaling import scaler_of
from ingress.serving.replicas.fairness import fairness_of

if TYPE_CHECKING:  # it imports this module
    from ingress.serving.control.reconciler import Reconciler
    from ingress.serving.control.running import RunningApplication

_NUMBERS = frozenset({"num_replicas", "autoscaling_config", "max_replicas_per_node"})


@dataclass(frozen=True, slots=True)
class Change:
    """One option of one deployment that was changed."""

    deployment: str
    option: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.deployment}: {self.option} {self.before!r} -> {self.after!r}"


def differences(
    before: DeploymentConfig, after: DeploymentConfig
) -> dict[str, tuple[object, object]]:
    """Return the options that differ, each with the values before and after."""
    values = (
        (name, getattr(before, name), getattr(after, name)) for name in type(after).model_fields
    )
    return {name: (old, new) for name, old, new in values if old != new}


def checked(
    running: RunningApplication,
    options: Mapping[str, Mapping[str, object] | DeploymentConfig],
    origin: str = "",
) -> dict[str, DeploymentConfig]:
    """Return the new config of each deployment that is named. Changes nothing.

    `origin` is that of the changed options, "" for code.

    Raises `ValueError` for an unknown deployment, a bad value, an option that needs new replicas,
    and a `user_config` without `reconfigure`; `TypeError` for an unknown option.
    """
    configs = {}
    for name, given in options.items():
        deployment = running.deployments.get(name)
        if deployment is None:
            known = ", ".join(map(repr, running.deployments))
            raise ValueError(
                f"application {running.name!r} has no deployment {name!r}; its deployments: {known}"
            )
        before = deployment.config
        if isinstance(given, DeploymentConfig):
            after = given
        else:
            after = before.with_options(**given)
            after = after.with_origins(dict.fromkeys(given, origin) if origin else {})
        fixed = sorted(differences(before, after).keys() - before.marked(IN_PLACE))
        if fixed:
            raise ValueError(
                f"{', '.join(fixed)} of deployment {name!r} cannot be changed while its replicas "
                "run; run the application again, with serve.run, for replicas with other options"
            )
        target = deployment.built.deployment.func_or_class
        if after.user_config is not None and not hasattr(target, "reconfigure"):
            raise ValueError(
                f"user_config is set but deployment {name!r} has no reconfigure method; define "
                "`def reconfigure(self, user_config)` or leave user_config out"
            )
        check_count(name, after)
        scaler_of(after)  # its policy can be imported
        fairness_of(after)
        configs[name] = after
    return configs


def apply(
    reconciler: Reconciler, deployment: RunningDeployment, config: DeploymentConfig
) -> list[Change]:
    """Change a deployment's options to those of a checked config. On the control loop."""
    found = differences(deployment.config, config)
    if "user_config" in found:
        deployment.change_user_config(config)
    deployment.using = replace(deployment.using, config=config)
    deployment.router.limit(
        config.max_queued_requests, config.backpressure_config, fairness_of(config)
    )
    deployment.router.graceful_shutdown_timeout_s = config.graceful_shutdown_timeout_s
    if found.keys() & _NUMBERS:
        deployment.using = replace(deployment.using, scaler=scaler_of(config))
        deployment.desire(count=count_for(config, deployment.desired.count))
    else:
        deployment.desire()  # the options of updates may be others
    # Race with an update that fails afterwards: the version before returns with the change.
    if deployment.previous is not None:
        deployment.previous = _changed(deployment.previous, found.keys(), config)
    if "max_ongoing_requests" in found:
        reconciler.resize(deployment)
    reconciler.look(deployment)
    return [Change(deployment.built.name, name, *values) for name, values in found.items()]


def count_for(config: DeploymentConfig, count: int) -> int:
    """Return the number of replicas with a new config, given the number so far."""
    scaling = config.autoscaling
    if scaling is None or scaling.initial_replicas is not None:
        return config.first_count
    return bounded(count, scaling)


def _changed(version: Version, names: Iterable[str], config: DeploymentConfig) -> Version:
    """Return a version with options of another config, or as it is if it cannot have them.

    A version in threads cannot have a limit of processes. A `user_config` belongs to its code.
    """
    given = (set(names) & config.model_fields_set) - {"user_config"}
    try:
        after = version.config.with_options(**{name: getattr(config, name) for name in given})
        after = after.with_origins(config.origins_without(config.model_fields_set - given))
        check_count(version.built.name, after)
    except ValueError:
        return version
    if not given & _NUMBERS:
        return replace(version, config=after)
    count = count_for(after, version.count)
    return replace(version, config=after, scaler=scaler_of(after), count=count)
