"""The rules for the name and the route prefix of an application."""

from __future__ import annotations

from ingress.exceptions import RayServeException


def check_names(name: object, prefix: object) -> None:
    """Raise `RayServeException` or `ValueError`, with Ray's message, for invalid names."""
    if not isinstance(name, str) or not name:
        raise RayServeException(f"Application name must a non-empty string, got {name!r}.")
    check_prefix(prefix)


def check_prefix(prefix: object) -> str | None:
    """Return a route prefix. Raises `ValueError`, with Ray's message, for an invalid one."""
    if prefix is None:
        return None
    if not isinstance(prefix, str) or not prefix.startswith("/"):
        raise ValueError(f"Invalid route_prefix {prefix!r}, must start with a forward slash ('/').")
    if prefix != "/" and prefix.endswith("/"):
        raise ValueError(f"Invalid route_prefix {prefix!r}, may not end with a trailing '/'.")
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"Invalid route_prefix {prefix!r}, may not contain wildcards.")
    return prefix
