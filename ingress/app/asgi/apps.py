"""An app bound to a class, and its clones, one for each replica."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from itertools import chain
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from ingress.app.asgi.dependencies import Dependencies, nodes_of_route
from ingress.app.asgi.guard import Guard, guarded
from ingress.app.asgi.methods import Methods, Target, classes_of
from ingress.app.asgi.parts import Part, app_parts
from ingress.app.asgi.responses import error_response, refusal
from ingress.app.asgi.route_index import RouteIndex, RouteList
from ingress.app.asgi.routes import (
    RouteInfo,
    RouteTree,
    check_layers,
    check_routes,
    route_infos,
    routers,
)
from ingress.app.asgi.unserved_routes import warn_of_routes_not_served
from ingress.app.asgi.users_app import APPS_LOCK, mark_clone, show_clones, showing
from ingress.app.asgi.wrapped import rebased, take_methods
from ingress.core.base.foreign import advisory, copied
from ingress.core.execution.errors import is_noted, note_other_loop
from ingress.exceptions import CALL_ERRORS, RayServeException
from ingress.telemetry.logs import logger

TRY_AGAIN_LATER = 1013  # RFC 6455's registry of close codes


class BoundRoutes:
    """An app with its routes bound to a class. Thread-safe: immutable once made.

    `targets` are the functions that a replica makes plans for, `infos` the routes, for display.
    `routers` are those of the user's app, `seen` the routes that each had. `declared` is the router
    that the user gave in place of an app.
    """

    __slots__ = (
        "_cls",
        "_declared",
        "_next",
        "_parts",
        "_router",
        "_webhooks",
        "app",
        "dependencies",
        "infos",
        "routers",
        "seen",
        "targets",
    )

    def __init__(self, app: ASGIApp, cls: type, declared: APIRouter | None = None) -> None:
        self.app = app
        self.targets: list[Target] = []
        self.dependencies: Dependencies | None = None
        self.infos: list[RouteInfo] = []
        self._cls = cls
        self._declared = declared
        self._router: Any = None
        self.routers: list[Router] = []
        self.seen: list[list[BaseRoute]] = []
        self._parts: list[object] = []
        self._next: BoundRoutes | None = None
        if not isinstance(app, Starlette):
            check_layers(app, Methods(cls))
            return
        classes = classes_of(app if declared is None else declared)
        methods = Methods(cls, classes)
        tree = RouteTree(methods, classes)
        with APPS_LOCK:
            # Before the routes are cloned: a route that comes meanwhile is then found later.
            self.routers = routers(app.router)
            self._see()
            methods.check_fields()
            check_layers(app, methods)
            check_routes(app, methods)
            show_clones(app)
            self._router = tree.clone(app.router)
            if isinstance(app, FastAPI):
                self._webhooks = tree.clone(app.webhooks)
            with advisory("the search for routes that are not served"):
                warn_of_routes_not_served(app if declared is None else declared, cls, tree)
        self.targets, self.dependencies = tree.targets, tree.dependencies
        self.infos = list(route_infos(self._router.routes))

    def is_current(self) -> bool:
        """Return whether no route was added, replaced, wrapped, or given other dependencies."""
        now = list(_parts_of_routes(self.routers))
        return len(now) == len(self._parts) and all(map(operator.is_, now, self._parts))

    def _see(self) -> None:
        self.seen = [list(each.routes) for each in self.routers]
        self._parts = list(_parts_of_routes(self.routers))

    def current(self) -> BoundRoutes:
        """Return the routes of the user's app as it is now: these, if it has not changed since.

        An app may get routes while it runs, as under FastAPI. If new routes cannot be bound, that
        is logged once, and the app is served without them.
        """
        if self.is_current():
            return self
        # Race of two replicas that see the change: the second one gets the routes of the first.
        with APPS_LOCK:
            if self._next is None:
                try:
                    # Outside of the replica, where the app shows its own routes, not the clone's.
                    self._next = Context().run(BoundRoutes, self.app, self._cls, self._declared)
                except Exception:
                    logger.exception("the new routes of %r cannot be served", self.app)
                    self._see()
                    return self
        return self._next.current()

    def clone(self) -> Any:
        """Return the app of one replica; it shares the bound routes, and no mutable object."""
        app = self.app
        if not isinstance(app, Starlette):
            return Guard(app)
        clone: Any = copied(app)
        mark_clone(clone, app)
        clone.router = copied(self._router)
        clone.router.middleware_stack = rebased(
            self._router.middleware_stack, self._router.app, RouteIndex(clone.router)
        )
        take_methods(self._router, clone.router)
        own = vars(app)  # not the attributes of a replica that this may be called in
        clone.state = State({name: own["state"][name] for name in own["state"]})
        clone.middleware_stack = None
        if _is_wrapped(own["middleware_stack"]):
            rest = clone.build_middleware_stack
            clone.build_middleware_stack = lambda: _wrapped(own["middleware_stack"], rest())
        clone.user_middleware = guarded(own["user_middleware"])
        clone.exception_handlers = _with_our_handlers(own["exception_handlers"])
        self.equip(clone)
        return clone

    def equip(self, clone: Any, added: Sequence[BaseRoute] = ()) -> None:
        """Give a clone these routes, before those that user code has added to it in its replica."""
        clone.router.routes = list(self._router.routes)
        if isinstance(self.app, FastAPI):
            clone.webhooks = self._webhooks
            clone.openapi_schema = None
            if "openapi" in vars(self.app):
                clone.openapi = vars(self.app)["openapi"]  # which finds the clone as its app
        clone.router.routes = RouteList([*clone.router.routes, *added])

    def parts(self) -> list[Part]:
        """Return the user's callables in the app, with their roles in `execution`."""
        return app_parts(self.app, self._router)

    def openapi(self) -> dict[str, Any]:
        """Return the schema. Raises `TypeError` if the app is not a FastAPI."""
        if not isinstance(self.app, FastAPI):
            raise TypeError(
                "Only a FastAPI app has an OpenAPI schema; this app's type is "
                f"{type(self.app).__name__}."
            )
        clone: Any = self.clone()
        with showing(clone):
            schema: dict[str, Any] = clone.openapi()
        return schema


async def answer_unavailable(connection: Request | WebSocket, error: Exception) -> Response | None:
    """Answer a request that fails because a called deployment could not answer."""
    assert isinstance(error, RayServeException)
    if isinstance(connection, WebSocket):
        await connection.close(TRY_AGAIN_LATER, reason=error.message[:100])
        return None
    return refusal(error)


async def answer_failure(request: Request, error: Exception) -> Response:
    """Answer a request whose error no handler of the user's takes, as Starlette does by default.

    The answer to an error about another event loop says what to do.
    """
    note_other_loop(error)
    if is_noted(error):
        return error_response(error)
    return PlainTextResponse("Internal Server Error", status_code=500)


def _parts_of_routes(routers: Sequence[Router]) -> Iterator[object]:
    """Yield what user code may replace in routes. An equal route may have other dependencies."""
    for route in chain.from_iterable(each.routes for each in routers):
        own = vars(route)
        yield from (route, own.get("app"), own.get("handle"), own.get("matches"))
        for node in nodes_of_route(route, with_endpoint=True):
            yield from (node, node.call)


def _is_wrapped(stack: Any) -> bool:
    """Return whether a user has put layers around the middleware stack that Starlette builds."""
    return stack is not None and not isinstance(stack, ServerErrorMiddleware)


def _wrapped(layers: Any, stack: ASGIApp) -> ASGIApp:
    """Return copies of the user's layers around another stack.

    Raises `TypeError` for a layer that does not have the next one as its `app`.
    """
    inner = layers
    while _is_wrapped(inner):
        inner = getattr(inner, "app", None)
    if inner is None:
        raise TypeError(
            f"app.middleware_stack is {layers!r}, which hides the stack that it wraps, so no "
            "replica can put its own routes there. Use app.add_middleware(...), or a class that "
            "keeps the wrapped stack as `self.app`."
        )
    wrapped: ASGIApp = rebased(layers, inner, stack)
    return wrapped


def _with_our_handlers(handlers: dict[Any, Any]) -> dict[Any, Callable[..., Any]]:
    """Return the user's exception handlers, plus defaults for errors that have none there.

    A handler of the user's for all errors is among them, as in FastAPI.
    """
    if not handlers.keys().isdisjoint((500, Exception)):
        return dict(handlers)  # a replica may add its own
    ours: dict[Any, Callable[..., Any]] = {
        error: answer_unavailable
        for error in CALL_ERRORS
        if handlers.keys().isdisjoint(error.__mro__)
    }
    return {**handlers, **ours, Exception: answer_failure}  # Starlette raises the error after that
