"""The file that `ingress build` writes, for `ingress run` and for Ray's `serve deploy`.

Does not import Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ingress.app.config_file.models import RAY_BUILDER
from ingress.app.declaration.build import BuiltApplication
from ingress.config import HTTPOptions
from ingress.core.base.settings import Settings
from ingress.engines.ray.lowering import (
    environment_for_workers,
    http_options_for_ray,
    options_for_ray,
)

EVERY_ADDRESS = "0.0.0.0"

HEADER = """\
# For `serve deploy`, or `ingress run`: {target}
# A cluster's Python needs ingress and the application's modules; if they are not installed there,
# give --working-dir, the address of a zip file.
# {host}
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
