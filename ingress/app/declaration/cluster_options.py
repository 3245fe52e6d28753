"""The options of a deployment that mean something else in one process than on a cluster.

    placement groups, gangs, actors    refused at the start: only a cluster has them
    statistics for a request router    refused: none are collected here
    max_replicas_per_node              a limit: this process is the node

Other engines, `ingress build`, `explain` and `check` take these options as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from ingress.app.declaration.build import BuiltApplication, BuiltDeployment, build, place_of
from ingress.app.declaration.declaration import Application
from ingress.config import DeploymentConfig, RequestRouterConfig

_NO_GROUPS = "this process has no placement groups: replicas share its cores and its memory"

CLUSTER_ONLY: Mapping[str, str] = {
    "deployment_actors": "this process has no actors of Ray: keep the state in a deployment of its "
    "own and pass its handle, Main.bind(State.bind())",
    "gang_scheduling_config": "this process has no gangs: each replica starts and ends by itself",
    **dict.fromkeys(
        (
            "placement_group_bundle_label_selector",
            "placement_group_bundles",
            "placement_group_fallback_strategy",
            "placement_group_strategy",
        ),
        _NO_GROUPS,
    ),
}
"""The options that only a cluster acts on, each with the reason."""

_STATISTICS = ("request_routing_stats_period_s", "request_routing_stats_timeout_s")
_NO_STATISTICS = "this process collects no statistics of replicas"


def build_here(application: Application, name: str) -> BuiltApplication:
    """Flatten an application to run in this process. Raises as `build` and `check_here`."""
    built = build(application, name)
    for each in built.deployments:
        check_here(each)
    return built


def check_here(built: BuiltDeployment) -> None:
    """Raise `ValueError` for options that one process cannot fulfil, all of them in one message."""
    given = for_a_cluster(built.deployment.config)
    if given:
        reasons = dict.fromkeys(reason for _, reason in given.values())
        options = "; ".join(f"{name}={value!r}" for name, (value, _) in given.items())
        file, line = place_of(built.deployment.func_or_class)
        raise ValueError(
            f"deployment {built.name!r} ({file}:{line}) has options for a cluster: {options}. "
            f"They cannot act here: {'; '.join(reasons)}. Leave them out of the "
            "code and give them in the cluster's file, under deployments, or run it with "
            "engine='ray'"
        )
    check_count(built.name, built.deployment.config)


def check_count(name: str, config: DeploymentConfig) -> None:
    """Raise `ValueError` if `max_replicas_per_node` allows fewer replicas than there should be.

    Autoscaling stays within the limit.
    """
    most, count = config.max_replicas_per_node, config.first_count
    if most is None or count <= most:
        return
    source = "num_replicas" if config.autoscaling is None else "autoscaling_config"
    raise ValueError(
        f"deployment {name!r} should have {count} replicas, by its {source}, and "
        f"max_replicas_per_node={most} allows fewer in this process, which is one node; raise or "
        "leave out the limit, take fewer replicas, or run it with engine='ray'"
    )


def for_a_cluster(config: DeploymentConfig) -> dict[str, tuple[object, str]]:
    """Return the options with values that only a cluster acts on: value and reason by name."""
    found = {
        name: (getattr(config, name), reason)
        for name, reason in CLUSTER_ONLY.items()
        if getattr(config, name)
    }
    routing = config.request_router_config
    given = () if routing is None else routing.model_fields_set
    return found | {
        f"request_router_config.{name}": (getattr(routing, name), _NO_STATISTICS)
        for name in _STATISTICS
        if name in given
    }


def without_cluster_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return options of a file as one process takes them: those of `CLUSTER_ONLY` are `None`."""
    taken = {name: None if name in CLUSTER_ONLY else value for name, value in options.items()}
    routing = taken.get("request_router_config")
    if isinstance(routing, RequestRouterConfig):
        kept = routing.model_fields_set - set(_STATISTICS)
        taken["request_router_config"] = RequestRouterConfig(
            **{name: getattr(routing, name) for name in kept}
        )
    return taken
