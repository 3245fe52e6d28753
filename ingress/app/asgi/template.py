"""The path template of the route that answers, or will answer, a request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from starlette.routing import compile_path
from starlette.types import Scope

from ingress.app.asgi.compat import FASTAPI_SCOPE, effective_route, get_route_path

TEMPLATES = "ingress.templates"
"""The key of a scope for the `RouteTemplates` of an app that runs in another process."""

MAX_LABELS = 10_000  # in the cache, in case an app makes routes while it runs


def route_template(scope: Scope) -> str | None:
    """Return the template as declared, such as "/items/{id}"; `None` before the route is found.

    The template does not include the application's prefix. Also `None` if the path has parameters
    of a mount, which no template shows: the number of labels must be bounded.
    """
    route = scope.get("route")
    if route is None:
        templates = scope.get(TEMPLATES)  # the route is found in another process
        return None if templates is None else templates.find(scope) or None
    if FASTAPI_SCOPE in scope:
        route = effective_route(scope, route)
        if route is None:
            return None
    template: str = getattr(route, "path", "")
    if "app_root_path" in scope:
        template = scope["root_path"].removeprefix(scope["app_root_path"]) + template
    for name in scope.get("path_params", ()):
        if "{" + name not in template:
            return None
    return template


def route_below(prefix: str, scope: Scope) -> str:
    """Return the prefix and the template; "" before the route is found."""
    path = route_template(scope)
    return "" if path is None else prefix.rstrip("/") + path


class RouteTemplates:
    """The path templates of an app, for lookups before a request is routed, and afterwards.

    `body_reads` says for a template and a method whether FastAPI reads the body, or nothing does.
    Immutable but for `_labels`, the labels of one prefix by path: it is replaced as a whole, and
    every thread puts the same value in, in one step.
    """

    __slots__ = ("_body_reads", "_labels", "_paths", "_patterns")

    def __init__(
        self,
        templates: Iterable[str] = (),
        body_reads: Mapping[tuple[str, str], bool] = MappingProxyType({}),
    ) -> None:
        self._body_reads = body_reads
        self._paths: set[str] = set()
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._labels: tuple[str, dict[str, str]] = ("", {})
        for template in templates:
            if "{" in template:
                self._patterns.setdefault(template, compile_path(template)[0])
            else:
                self._paths.add(template)

    def find(self, scope: Scope) -> str:
        """Return the first template that matches the path; "" if none does."""
        if not self._paths and not self._patterns:
            return ""
        path = get_route_path(scope)
        if path in self._paths:
            return path
        return next((each for each, known in self._patterns.items() if known.match(path)), "")

    def may_leave_body(self, scope: Scope, *, is_large: bool) -> bool:
        """Return whether a request may be answered without its body.

        It is, unless a middleware reads it, if nothing else does. If the user's code does, only a
        large one is left to it: the request would hold its slot while most of that comes anyway.
        """
        is_read = self._body_reads.get((self.find(scope), scope["method"]))
        return is_large if is_read is None else not is_read

    def label(self, scope: Scope, prefix: str) -> str:
        """Return the prefix with the template of the route that has answered a request.

        The prefix alone if no route has: the number of labels is that of the declared routes.
        """
        route = scope.get("route")
        if route is None:
            return _join(prefix, self.find(scope)) if self._paths or self._patterns else prefix
        if "app_root_path" in scope:  # of a mount
            return _join(prefix, route_template(scope) or "")
        if FASTAPI_SCOPE in scope:
            route = effective_route(scope, route)
            if route is None:
                return _join(prefix, self.find(scope))
        path: str = getattr(route, "path", "")
        of_prefix, labels = self._labels
        label = labels.get(path) if prefix == of_prefix else None
        if label is None:
            if prefix != of_prefix or len(labels) >= MAX_LABELS:
                self._labels = prefix, (labels := {})
            label = labels[path] = _join(prefix, path)
        return label


def _join(prefix: str, template: str) -> str:
    return prefix.rstrip("/") + template if template else prefix
