"""The private names of FastAPI and Starlette; no other module uses one.

    missing, and needed for a right answer   `UnsupportedVersionError`, at import
    an unknown kind of route                 the same, when an app is bound
    missing, and needed by `compiled` only   no route is compiled, `CompiledRoutesOffWarning`
    a FastAPI newer than the newest known    the same

Some names are there since a version of FastAPI: an older one does without.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import fastapi
import fastapi.routing
from starlette.routing import BaseRoute

from ingress.base.private_names import (
    UnsupportedVersionError,
    find,
    require,
    unsupported,
)
from ingress.exceptions import CompiledRoutesOffWarning

SUPPORTED = ">=0.133.0"
SUPPORTED_STARLETTE = ">=1.3.1,<2"
NEWEST_KNOWN = (0, 165)
"""The FastAPI version last compared with `compiled`. With a newer one no route is compiled."""

require(
    "starlette",
    SUPPORTED_STARLETTE,
    (
        "starlette._exception_handler:wrap_app_handling_exceptions",
        "starlette._utils:get_route_path",
    ),
)

from starlette._exception_handler import wrap_app_handling_exceptions  # noqa: E402
from starlette._utils import get_route_path  # noqa: E402

__all__ = [
    "NEWEST_KNOWN",
    "IncludedRouter",
    "check_kind",
    "endpoint_context",
    "endpoint_contexts",
    "get_cache_key",
    "get_route_path",
    "is_original",
    "normalize_non_finite_floats",
    "ping_interval_s",
    "routing",
    "warn_if_not_compiled",
    "why_not_compiled",
    "wrap_app_handling_exceptions",
]

routing: Any = fastapi.routing
"""FastAPI's module, without types: `compiled` calls functions in it that tracers may replace."""


def _version() -> tuple[int, ...]:
    return tuple(map(int, fastapi.__version__.split(".")[:2]))


def _since(version: tuple[int, int], path: str) -> Any:
    """Return a private name of FastAPI, `None` if it is missing; noted if it should be there."""
    found = find(path)
    if found is None and version <= _version():
        _missing.append(path)
    return found


_missing: list[str] = []

# A router in the route tree. An older FastAPI copies its routes into the tree.
IncludedRouter: Any = _since((0, 137), "fastapi.routing:_IncludedRouter")
if _missing:  # without it included routes would keep their unbound endpoints, and answer 422
    raise unsupported("fastapi", SUPPORTED, _missing)

endpoint_contexts: Any = _since((0, 133), "fastapi.routing:_endpoint_context_cache")
endpoint_context: Any = _since((0, 133), "fastapi.routing:_extract_endpoint_context")
_since((0, 135), "fastapi.routing:_PING_INTERVAL")
get_cache_key: Any = _since((0, 140), "fastapi.dependencies.models:_get_cache_key")
normalize_non_finite_floats: Any = _since((0, 145), "fastapi.routing:_normalize_non_finite_floats")


def ping_interval_s() -> float:
    """Return the seconds between two comments of an idle event stream; FastAPI reads it late."""
    seconds: float = routing._PING_INTERVAL
    return seconds


def why_not_compiled() -> str:
    """Return why no route is compiled, "" if routes are."""
    if _version() > NEWEST_KNOWN:
        newest = ".".join(map(str, NEWEST_KNOWN))
        return f"it is newer than {newest}, the newest version that ingress was compared with"
    if _missing:
        return f"it lacks {', '.join(_missing)}"
    return ""


def warn_if_not_compiled(routes: int) -> None:
    """Warn, once in a process, if an app with routes is bound and none is compiled."""
    global _has_warned
    why = why_not_compiled()
    if why and routes and not _has_warned:
        _has_warned = True
        warnings.warn(
            f"FastAPI {fastapi.__version__}: {why}. Its own handlers answer all routes, at plain "
            "FastAPI's speed. Upgrade fastapi-ingress, or install a FastAPI that it knows.",
            CompiledRoutesOffWarning,
            stacklevel=2,
        )


_has_warned = False


def is_original(func: object) -> bool:
    """Return whether a function is FastAPI's or Starlette's, and not one that replaced theirs."""
    return type(func) is FunctionType and func.__globals__["__name__"].startswith(
        ("fastapi.", "starlette.")
    )


def check_kind(route: BaseRoute) -> None:
    """Raise `UnsupportedVersionError` for a route of a kind of FastAPI's that is not known here.

    Its endpoints would be called without their instance.
    """
    kind = type(route)
    if kind.__module__.startswith("fastapi.") and kind not in (*_known_kinds(),):
        raise UnsupportedVersionError(
            f"FastAPI {fastapi.__version__} makes routes of a kind that ingress does not know, "
            f"{kind.__module__}.{kind.__name__}; install a supported version: "
            f'python -m pip install "fastapi{SUPPORTED}"'
        )


def _known_kinds() -> Iterator[type]:
    yield fastapi.routing.APIRoute
    yield fastapi.routing.APIWebSocketRoute
    if IncludedRouter is not None:
        yield IncludedRouter
