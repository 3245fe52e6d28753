"""The counterparts of Ray Serve's names, looked up in ingress itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import ingress
from ingress import _unsupported
from ingress.migrate import advice

MODULES = (
    *("api", "autoscaling_policy", "batching", "config", "context", "exceptions"),
    *("handle", "metrics", "request_router", "schema"),
)
"""The modules that Ray Serve and ingress both have."""


def target(module: Sequence[str], name: str) -> str | None:
    """Return the module of ingress to import a name of `ray.serve.<module>` from."""
    if not module:
        return "ingress" if name in MODULES or name in ingress.__all__ else None
    if len(module) == 1 and module[0] in MODULES and _is_in(module[0], name):
        return f"ingress.{module[0]}"
    is_public = not any(part.startswith("_") for part in module)
    return "ingress" if is_public and name in ingress.__all__ else None


def is_module(path: Sequence[str]) -> bool:
    """Return whether ingress has the module `ray.serve.<path>`."""
    return not path or (len(path) == 1 and path[0] in MODULES)


def lack(path: Sequence[str]) -> str:
    """Return the sentence for `ray.serve.<path>`, "" if ingress has that name at the same place."""
    if not path:
        return ""
    first, *rest = path
    if first in MODULES:
        return "" if not rest or _is_in(first, rest[0]) else remedy(path[:2])
    return "" if first in ingress.__all__ else remedy(path)


def remedy(path: Sequence[str]) -> str:
    """Return the sentence for a name of `ray.serve` that ingress does not have."""
    first, last = path[0], path[-1]
    known = (
        _unsupported.MEMBERS.get(first, {}).get(last)
        or advice.OLDER.get(last)
        or _unsupported.NAMES.get(last)
        or _unsupported.NAMES.get(first)
    )
    if known:
        return known
    if last in ingress.__all__:
        return f"use serve.{last}"
    if _is_in("request_router", last):
        return f"use {last} of ingress.request_router"
    if any(part.startswith("_") for part in path):
        return advice.PRIVATE
    return "ingress has no such name; docs/compatibility.md lists all"


def _is_in(module: str, name: str) -> bool:
    """Return whether a name is public in a module; those that it only imports are not."""
    found: Any = import_module(f"ingress.{module}")
    if name in getattr(found, "__all__", ()):
        return True
    value = vars(found).get(name)
    if value is None or name.startswith("_"):
        return False
    is_own = getattr(value, "__module__", "") == found.__name__
    return is_own or vars(ingress).get(name) is value or (module, name) == ("schema", "ReplicaRank")
