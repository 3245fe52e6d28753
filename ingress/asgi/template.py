"""The path template of the route that a request was given to."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope


def route_template(scope: Scope) -> str | None:
    """Return the template as declared, such as "/items/{id}"; `None` before the route is found.

    It begins behind the application's prefix. `None` too where the path has parameters that no
    template shows, those of a mount: a label must not be one of endlessly many.
    """
    route = scope.get("route")
    if route is None:
        return None
    # Since FastAPI 0.137 an included route does not know where it was included.
    fastapi_scope: Any = scope.get("fastapi") or {}
    included = fastapi_scope.get("effective_route_context")
    if getattr(included, "original_route", None) is route:
        route = included
    template: str = getattr(route, "path", "")
    if "app_root_path" in scope:
        template = scope["root_path"].removeprefix(scope["app_root_path"]) + template
    shown = all("{" + name in template for name in scope.get("path_params", ()))
    return template if shown else None
