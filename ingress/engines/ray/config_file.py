"""The files that `ingress build` writes: for `ingress run` and Ray's `serve deploy`, and KubeRay.

The RayService manifest of `--kuberay`, for the operator:

    serveConfigV2       the file for `serve deploy`
    headGroupSpec       a pod without replicas
    workerGroupSpecs    a group of pods for the replicas without a GPU, one for those with GPUs

Does not import Ray. Source of the manifest: the custom resource `ray.io/v1`, KubeRay 1.4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, TypedDict

import yaml

from ingress.app.config_file.models import RAY_BUILDER
from ingress.app.declaration.build import BuiltApplication, BuiltDeployment
from ingress.config import HTTPOptions
from ingress.core.base.settings import Settings
from ingress.engines.ray import SUPPORTED
from ingress.engines.ray.lowering import (
    environment_for_workers,
    http_options_for_ray,
    options_for_ray,
)

EVERY_ADDRESS = "0.0.0.0"
IMAGE = f"rayproject/ray:{SUPPORTED}.0"
POD_CPUS = 4
GIB = 2**30
MEMORY_PER_CPU = 2 * GIB
HEAD = {"cpu": "2", "memory": "4Gi"}

HEADER = """\
# For `serve deploy`, or `ingress run`: {target}
# A cluster's Python needs ingress and the application's modules; if they are not installed there,
# give --working-dir, the address of a zip file.
# {host}
"""
_MANIFEST = """\
# For `kubectl apply`, with the KubeRay operator: {target}
# The image needs Ray {version}, ingress and the application's modules. Adapt it, and the sizes of
# the pods. The proxies listen on {host}, because Kubernetes reaches them at the addresses of their
# pods; a NetworkPolicy says which other pods may. For a token and TLS see docs/cluster.md.
"""
_ONE_MACHINE = "The proxies answer their own machine only; --host 0.0.0.0 serves others."
_ALL = "The proxies answer every machine that reaches theirs."


class ApplicationDocument(TypedDict):
    """One application in it."""

    name: str
    route_prefix: str
    import_path: str
    args: dict[str, object]
    runtime_env: dict[str, Any]
    deployments: list[dict[str, Any]]


class ServeDocument(TypedDict):
    """A file for Ray's `serve deploy`."""

    proxy_location: str
    http_options: dict[str, Any]
    applications: list[ApplicationDocument]


def header(config: ServeDocument, targets: Sequence[str]) -> str:
    """Return the comment at the head of the file, which says who can reach the proxies."""
    host = config["http_options"]["host"]
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    return HEADER.format(target=", ".join(targets), host=_ONE_MACHINE if is_local else _ALL)


def config_of(
    applications: Mapping[str, BuiltApplication],
    settings: Settings,
    *,
    route_prefix: str | None = None,
    host: str | None = None,
    working_dir: str | None = None,
) -> ServeDocument:
    """Return the configuration for `serve deploy`. Raises `ValueError` for what Ray cannot do.

    The keys are MODULE:APP. One application is served at "/", each of several under its name.
    `host` is by default `RAY_SERVE_DEFAULT_HTTP_HOST`, else 127.0.0.1. Users may edit
    `deployments`: its options override those in the code.
    """
    if working_dir is not None:
        _check_working_dir(working_dir)
    http = http_options_for_ray(HTTPOptions(), settings)
    sent = {} if working_dir is None else {"working_dir": working_dir}
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": host or settings.http_host,
            **{name: value for name, value in http.items() if name != "host" and value is not None},
        },
        "applications": [
            {
                "name": built.name,
                "route_prefix": route_prefix
                or ("/" if len(applications) == 1 else f"/{built.name}"),
                "import_path": RAY_BUILDER,
                "args": _arguments(target, built.name, settings),
                "runtime_env": {**sent, "env_vars": environment_for_workers(settings)},
                "deployments": [_options(options_for_ray(each, {})) for each in built.deployments],
            }
            for target, built in applications.items()
        ],
    }


def _check_working_dir(address: str) -> None:
    """Raise `ValueError` for a folder: the nodes of a cluster download the code."""
    scheme, separator, _ = address.partition("://")
    if not separator or scheme == "file":
        raise ValueError(
            f"--working-dir {address!r} is no address that the nodes of a cluster can download; "
            "give that of a zip file (https://, s3://, gs://), or put the modules into the image"
        )


def _arguments(target: str, name: str, settings: Settings) -> dict[str, object]:
    args: dict[str, object] = {"target": target}
    if name != "default":
        args["name"] = name
    if settings.request_timeout_s is not None:
        args["request_timeout_s"] = settings.request_timeout_s
    return args


def _options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of a deployment that a file can hold: plain values that are not empty."""
    plain = {}
    for name, value in options.items():
        if name == "ray_actor_options" and isinstance(value, dict):
            value = {key: each for key, each in value.items() if key != "runtime_env"}
        if value is not None and value != {} and _is_plain(value):
            plain[name] = value
    return plain


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, str | int | float)


# The manifest.


@dataclass(frozen=True, slots=True)
class Group:
    """Pods of one kind. `least` and `most` are their numbers."""

    name: str
    cpus: int
    gpus: int
    memory: int
    resources: dict[str, float]
    least: int
    most: int


def manifest(
    applications: Sequence[BuiltApplication], config: ServeDocument, image: str
) -> dict[str, object]:
    """Return the manifest for applications and their configuration for `serve deploy`."""
    port = config["http_options"]["port"]
    name = re.sub(r"[^a-z0-9]+", "-", applications[0].name.lower()).strip("-")[:40] or "ingress"
    groups = _groups([each for built in applications for each in built.deployments])
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name},
        "spec": {
            "serveConfigV2": Block(yaml.safe_dump(config, sort_keys=False)),
            "rayClusterConfig": {
                "rayVersion": f"{SUPPORTED}.0",
                "enableInTreeAutoscaling": any(each.most > each.least for each in groups),
                "headGroupSpec": {
                    # No replicas there: without the head's pod the cluster cannot be repaired.
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod("ray-head", image, HEAD, port),
                },
                "workerGroupSpecs": [_worker_group(each, image, port) for each in groups],
            },
        },
    }


def text_of(document: dict[str, object], targets: Sequence[str]) -> str:
    """Return the file of a manifest, with a comment at its head."""
    header = _MANIFEST.format(target=", ".join(targets), version=SUPPORTED, host=EVERY_ADDRESS)
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False)
    return header + text


class Block(str):
    """A text of several lines, which YAML shows as such."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """A dumper for this module's documents."""


_Dumper.add_representer(
    Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def _groups(deployments: Sequence[BuiltDeployment]) -> list[Group]:
    with_gpu = [each for each in deployments if _actor(each).get("num_gpus")]
    without = [each for each in deployments if each not in with_gpu]
    found = [("workers", without), ("gpu-workers", with_gpu)]
    return [_group(name, members) for name, members in found if members]


def _group(name: str, members: Sequence[BuiltDeployment]) -> Group:
    """Return pods that hold the largest replica, as many as all replicas need together."""
    cpus = max(POD_CPUS, *(ceil(each.deployment.config.num_cpus) for each in members))
    gpus = max(ceil(_actor(each).get("num_gpus") or 0) for each in members)
    memory = max(cpus * MEMORY_PER_CPU, *(int(_actor(each).get("memory") or 0) for each in members))
    custom: dict[str, float] = {}
    for each in members:
        for kind, amount in (_actor(each).get("resources") or {}).items():
            custom[kind] = max(custom.get(kind, 0), amount)

    there = {"num_cpus": cpus, "num_gpus": gpus, "memory": memory, **custom}

    def share(each: BuiltDeployment) -> float:
        """Return the part of a pod that a replica takes: no replica is split between two pods."""
        needs = {kind: _amount(each, kind) for kind in there}
        return max(
            (1 / floor(there[kind] / need) for kind, need in needs.items() if need), default=0
        )

    def pods(counts: Sequence[int]) -> int:
        taken = sum(count * share(each) for count, each in zip(counts, members, strict=True))
        return max(1, ceil(round(taken, 6)))

    least, most = zip(*(_counts(each) for each in members), strict=True)
    return Group(name, cpus, gpus, memory, custom, pods(least), pods(most))


def _counts(built: BuiltDeployment) -> tuple[int, int]:
    config = built.deployment.config
    scaling = config.autoscaling_config
    if scaling is None:
        return config.replica_count, config.replica_count
    return max(1, scaling.min_replicas), scaling.max_replicas


def _actor(built: BuiltDeployment) -> dict[str, Any]:
    return dict(built.deployment.config.ray_actor_options)


def _amount(built: BuiltDeployment, kind: str) -> float:
    if kind == "num_cpus":
        return built.deployment.config.num_cpus
    options = _actor(built)
    return float({**options, **(options.get("resources") or {})}.get(kind) or 0)


def _worker_group(group: Group, image: str, port: int) -> dict[str, object]:
    limits = {"cpu": str(group.cpus), "memory": f"{ceil(group.memory / GIB)}Gi"}
    if group.gpus:
        limits["nvidia.com/gpu"] = str(group.gpus)
    custom = {"resources": json.dumps(json.dumps(group.resources))} if group.resources else {}
    return {
        "groupName": group.name,
        "replicas": group.least,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "rayStartParams": custom,
        "template": _pod("ray-worker", image, limits, port),
    }


def _pod(name: str, image: str, limits: dict[str, str], port: int) -> dict[str, object]:
    container: dict[str, object] = {
        "name": name,
        "image": image,
        "resources": {"limits": limits, "requests": dict(limits)},
        "ports": [{"containerPort": port, "name": "serve"}],
        "livenessProbe": _probe(_RAYLET, failures=120),
    }
    if name == "ray-worker":
        # A worker's pod gets requests while it has a proxy, and that has replicas.
        proxy = f"wget -T 2 -q -O- http://localhost:{port}/-/healthz | grep success"
        container["readinessProbe"] = _probe(f"{_RAYLET} && {proxy}", failures=1)
    return {"spec": {"containers": [container]}}


_RAYLET = "wget -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"


def _probe(command: str, failures: int) -> dict[str, object]:
    return {
        "exec": {"command": ["bash", "-c", command]},
        "initialDelaySeconds": 10,
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
