"""The file that `ingress build` writes, for `ingress run` and for Ray's `serve deploy`.

Does not import Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingress.base.settings import Settings
from ingress.config import HTTPOptions
from ingress.config_file.models import RAY_BUILDER
from ingress.declaration.build import BuiltApplication
from ingress.engines.ray.lowering import (
    environment_for_workers,
    http_options_for_ray,
    options_for_ray,
)

HOST = "0.0.0.0"  # a cluster serves other machines; Ray's own files have the same host

HEADER = """\
# For `serve deploy`, `ingress run`, or serveConfigV2 of a KubeRay RayService: {target}
# A cluster's Python needs ingress and the application's modules; add runtime_env.working_dir,
# an address of a zip file, if they are not installed there.
"""


def config_of(applications: Mapping[str, BuiltApplication], settings: Settings) -> dict[str, Any]:
    """Return the configuration for `serve deploy`. Raises `ValueError` for what Ray cannot do.

    The keys are MODULE:APP. One application is served at "/", each of several under its name.
    Users may edit `deployments`: its options override those in the code.
    """
    http = http_options_for_ray(HTTPOptions(), settings)
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": HOST,
            **{name: value for name, value in http.items() if name != "host" and value is not None},
        },
        "applications": [
            {
                "name": built.name,
                "route_prefix": "/" if len(applications) == 1 else f"/{built.name}",
                "import_path": RAY_BUILDER,
                "args": _arguments(target, settings),
                "runtime_env": {"env_vars": environment_for_workers(settings)},
                "deployments": [_options(options_for_ray(each, {})) for each in built.deployments],
            }
            for target, built in applications.items()
        ],
    }


def _arguments(target: str, settings: Settings) -> dict[str, Any]:
    args: dict[str, Any] = {"target": target}
    if settings.request_timeout_s is not None:
        args["request_timeout_s"] = settings.request_timeout_s
    return args


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a deployment that a file can hold: plain values that are not empty."""
    plain = {}
    for name, value in options.items():
        if name == "ray_actor_options":
            value = {key: each for key, each in value.items() if key != "runtime_env"}
        if value is not None and value != {} and _is_plain(value):
            plain[name] = value
    return plain


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, str | int | float)
