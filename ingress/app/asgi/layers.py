"""FastAPI's layers around an app's routes, and whether a request needs them.

    ServerErrorMiddleware, OutermostGuard, the user's, ExceptionMiddleware, AsyncExitStackMiddleware

Without middleware of the user's, these layers answer errors, and fill the scope for user code. So a
compiled route that shows its scope to no user code begins without them, and enters them only for an
error. They are a fifth of the cost of a simple request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.routing import Mount

from ingress.app.asgi.compat import EXIT_STACK_LAYER, LAYERS, is_original, native_telemetry
from ingress.app.asgi.guard import OutermostGuard
from ingress.app.asgi.route_index import RouteIndex

CHECK_EVERY_S = 1.0


class Layers(NamedTuple):
    """The state of an app's layers, looked at once a second and not at every request.

    FastAPI (0.142 and newer) checks at every request for a configured OpenTelemetry provider. That
    reads the environment six times: a tenth of the cost of a simple request. A provider that is
    configured later is found within a second, and so is a tracer that replaces a layer's function.

    `telemetry_is_off` is false also if the app has no telemetry. `stack` has all layers, and
    `routes` is the index inside of it, if requests may begin there; otherwise both are `None`.
    """

    telemetry_is_off: bool = False
    stack: Any = None
    routes: RouteIndex | None = None

    @classmethod
    def of(cls, app: Any) -> Layers:
        native = native_telemetry(app)
        is_off = (
            native is not None
            and not native()
            # Mounted apps may have providers of their own.
            and not any(isinstance(route, Mount) for route in app.routes)
        )
        if (native is None or is_off) and _only_handle_errors(app):
            return cls(is_off, app.middleware_stack, app.router.middleware_stack)
        return cls(is_off)


def _only_handle_errors(app: Any) -> bool:
    """Return whether the app's layers are FastAPI's own, without a limit for bodies."""
    layer: Any = getattr(app, "middleware_stack", None)
    kinds: list[Any] = []
    while type(layer) in LAYERS or type(layer) is OutermostGuard:
        kinds.append(type(layer))
        layer = layer.app
    return (
        kinds[-1:] == [EXIT_STACK_LAYER]
        and layer is app.router
        and isinstance(layer.middleware_stack, RouteIndex)
        and all(
            is_original(kind.__call__)
            for kind in (type(app), Starlette, type(layer), *kinds)
            if kind is not OutermostGuard
        )
    )
