"""The options of a deployment, the flags and `HTTPOptions`, translated to Ray Serve's options.

    option                                   on Ray
    name, num_replicas, max_ongoing_requests always given: both engines have the same defaults
    those marked `ON_RAY`                    given to Ray if the user gave them
    ray_actor_options                        the same, with the flags in its environment
    lanes, user_config                       used by ingress's runtime in the replica
    request_router_class of ingress          refused: the router there is Ray's
    max_requests_per_replica, max_memory_mb  no effect: Ray retires no replica
    loop, isolation                          no effect: each replica has a process
    retry_started_methods (`HTTPOptions`)    refused: the proxies there are Ray's
    the limits of `HTTPLimits`               refused too
    jobs in the embedded store               refused: nodes share no file
    fairness_key, fairness_config            refused: the queue there is Ray's

Source of Ray's names: Ray 2.60.0, serve/config.py. Does not import Ray.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ingress.app.declaration.build import BuiltDeployment
from ingress.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ingress.core.base.options import NOT_ON_RAY, ON_RAY, Options
from ingress.core.base.settings import (
    ENGINE,
    ROUTER_IN_SEPARATE_LOOP,
    STALL_THRESHOLD_MS,
    SYNC_IN_THREADPOOL,
    TRACING,
    USER_CODE_IN_SEPARATE_THREAD,
    HTTPLimits,
    Settings,
)
from ingress.serving.control.consumers import consumer_of


def options_for_ray(
    built: BuiltDeployment, environment: Mapping[str, str], *, default_cpus: float | None = None
) -> dict[str, Any]:
    """Return the keywords of Ray's `@serve.deployment`.

    `environment` is for the replicas' processes. A replica without `num_cpus` reserves
    `default_cpus`. Raises `ValueError` for an option that has no effect on Ray.
    """
    config = built.deployment.config
    given = config.model_fields_set
    consumer = consumer_of(built.deployment.func_or_class)
    if consumer is not None and consumer.is_of_one_machine:
        raise ValueError(
            f"the jobs of deployment {built.name!r} are in a file of one machine, which the nodes "
            "of a Ray cluster do not share; give TaskProcessorConfig(adapter_config="
            "CeleryAdapterConfig(broker_url=..., backend_url=...)), or run it with --engine local"
        )
    for name in sorted(config.marked(NOT_ON_RAY) & config.changed().keys()):
        raise ValueError(
            f"{name} of deployment {built.name!r} cannot be set on Ray, whose routers know no keys "
            "of calls; leave it out there, or run it with --engine local"
        )
    options: dict[str, object] = {
        "name": built.name,
        "max_ongoing_requests": config.max_ongoing_requests,
    }
    if "num_replicas" in given or config.autoscaling_config is None:
        options["num_replicas"] = config.num_replicas
    for name in config.marked(ON_RAY) & given:
        if (value := getattr(config, name)) is not None:
            options[name] = _plain(value, f"deployment {built.name!r}")
    actor: dict[str, Any] = dict(config.ray_actor_options)
    if default_cpus is not None:
        actor.setdefault("num_cpus", default_cpus)
    runtime_env = dict(actor.get("runtime_env") or {})
    runtime_env["env_vars"] = {**environment, **(runtime_env.get("env_vars") or {})}
    options["ray_actor_options"] = {**actor, "runtime_env": runtime_env}
    return options


def environment_for_workers(settings: Settings, folders: Sequence[str] = ()) -> dict[str, str]:
    """Return the flags and the import folders as environment variables."""
    threshold_s = settings.stall_threshold_s
    environment = {
        ENGINE: "ray",
        SYNC_IN_THREADPOOL: str(int(settings.run_sync_in_threadpool)),
        USER_CODE_IN_SEPARATE_THREAD: str(int(settings.run_user_code_in_separate_thread)),
        ROUTER_IN_SEPARATE_LOOP: str(int(settings.run_router_in_separate_loop)),
        STALL_THRESHOLD_MS: f"{0 if threshold_s is None else threshold_s * 1e3:g}",
    }
    if settings.tracing:
        environment[TRACING] = "1"
    if folders:
        # Ray inserts the variable's value on the worker's node.
        environment["PYTHONPATH"] = os.pathsep.join([*folders, "${PYTHONPATH}"])
    return environment


def import_folders() -> list[str]:
    """Return the folders that this process imports modules from, without those of its Python.

    Workers on the same machine find the application's module there, as Ray's users expect. On
    another machine the folders do not exist, and `--working-dir` sends the module.
    """
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    found: dict[str, None] = {}
    for entry in sys.path:
        path = os.path.realpath(entry or os.getcwd())
        is_pythons = any(path == each or path.startswith(each + os.sep) for each in installed)
        if os.path.isdir(path) and not is_pythons:
            found[path] = None
    return list(found)


def http_options_for_ray(options: HTTPOptions, settings: Settings) -> dict[str, Any]:
    """Return the keywords of Ray's `HTTPOptions`. Raises `ValueError` for what Ray cannot do."""
    if options.retry_started_methods:
        raise ValueError(
            f"retry_started_methods={options.retry_started_methods!r} has no effect on Ray, whose "
            "proxies retry no request that may have reached user code; leave it out"
        )
    given = options.model_fields_set
    if limits := sorted(given & {each.name for each in fields(HTTPLimits)}):
        raise ValueError(
            f"{' and '.join(limits)} cannot be set on Ray, where the proxies are Ray's; leave "
            "these limits of the local engine out"
        )
    lowered = {
        name: getattr(options, name)
        for name in HTTPOptions.model_fields
        if name in given and name not in ("retry_started_methods", "request_timeout_s")
    }
    lowered.setdefault("host", settings.http_host)
    lowered.setdefault("port", options.port)
    lowered["request_timeout_s"] = request_timeout_s(options, settings)
    if "keep_alive_timeout_s" in lowered:
        lowered["keep_alive_timeout_s"] = int(lowered["keep_alive_timeout_s"])
    return lowered


def request_timeout_s(options: HTTPOptions, settings: Settings) -> float | None:
    """Return the timeout of an HTTP request; code beats environment."""
    is_given = "request_timeout_s" in options.model_fields_set
    return options.request_timeout_s if is_given else settings.request_timeout_s


def _plain(value: object, where: str) -> object:
    """Return an option without ingress's classes: their given fields as dictionaries."""
    if isinstance(value, RequestRouterConfig):
        _check_router(value, where)
    if not isinstance(value, Options):
        return value
    plain = {name: _plain(getattr(value, name), where) for name in value.model_fields_set}
    if isinstance(value, AutoscalingConfig):
        _check_policy(value, where)
    return plain


def _check_router(config: RequestRouterConfig, where: str) -> None:
    router = config.request_router_class
    if "request_router_class" not in config.model_fields_set or not _is_ours(router):
        return
    raise ValueError(
        f"request_router_class={_name(router)!r} of {where} cannot run on Ray, where routing is "
        "Ray's; leave it out there, or give a ray.serve.request_router.RequestRouter"
    )


def _check_policy(config: AutoscalingConfig, where: str) -> None:
    policy = config.policy.policy_function
    if "policy" in config.model_fields_set and _is_ours(policy):
        raise ValueError(
            f"policy_function={_name(policy)!r} of {where} cannot run on Ray, where scaling is "
            "Ray's; leave it out there, or give a function of ray.serve.autoscaling_policy"
        )


def _is_ours(target: str | Callable[..., object]) -> bool:
    return _name(target).partition(":")[0].split(".")[0] == "ingress"


def _name(target: str | Callable[..., object]) -> str:
    if isinstance(target, str):
        return target
    return f"{target.__module__}:{getattr(target, '__qualname__', target)}"
