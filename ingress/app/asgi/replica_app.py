"""The ASGI app of one replica, and FastAPI's layers around its routes.

    ServerErrorMiddleware, OutermostGuard, the user's, ExceptionMiddleware, AsyncExitStackMiddleware

Without middleware of the user's, these layers answer errors, and fill the scope for user code. So a
compiled route that shows its scope to no user code begins without them, and enters them only for an
error. They are a fifth of the cost of a simple request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.app.asgi.apps import BoundRoutes
from ingress.app.asgi.bad_results import endpoint_of, explain
from ingress.app.asgi.compat import (
    EXIT_STACK_LAYER,
    LAYERS,
    TELEMETRY,
    is_original,
    native_telemetry,
)
from ingress.app.asgi.compiled import CompiledRoute
from ingress.app.asgi.guard import ANSWER, Answer, OutermostGuard
from ingress.app.asgi.lifespan import Lifespan
from ingress.app.asgi.methods import Target
from ingress.app.asgi.route_index import FOUND, RouteIndex
from ingress.app.asgi.routes import check_added
from ingress.app.asgi.users_app import has_ended, serves
from ingress.context import ReplicaRuntime
from ingress.core.base.foreign import advisory
from ingress.core.execution.execution import ExecutionPlan, Role, contain

ASGI = {"version": "3.0", "spec_version": "2.4"}
BUILDER_METHOD = "__serve_build_asgi_app__"
CHECK_EVERY_S = 1.0  # the state of the layers

_ROUTES = attrgetter("routes")


@dataclass(slots=True, eq=False)
class _Plans(dict[Target, ExecutionPlan]):
    """The plans of a replica. An override or a later route has none, and gets one for each call."""

    _make: Callable[[Target], ExecutionPlan]

    def __missing__(self, target: Target) -> ExecutionPlan:
        return self._make(target)


MakePlan = Callable[[Callable[..., Any], Role], ExecutionPlan]


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


class ReplicaApp:
    """The ASGI app of one replica. Owned by the user loop.

    Order of events: made, the constructor runs, `attach`, `lifespan.startup`, requests,
    `lifespan.shutdown`.
    """

    __slots__ = (
        "_builder",
        "_cloned",
        "_cls",
        "_context",
        "_instance",
        "_layers",
        "_make_plan",
        "_next_look",
        "_routes",
        "lifespan",
    )

    def __init__(
        self,
        cls: type,
        builder: Callable[[], ASGIApp] | None,
        routes: BoundRoutes | None,
        context: ReplicaRuntime,
        make_plan: MakePlan,
    ) -> None:
        self._cls = cls
        self._builder = builder
        self._routes = routes
        self._context = context
        self._make_plan = make_plan
        self.lifespan = context.lifespan = Lifespan(context)
        self._layers = Layers()
        self._next_look = 0.0
        self._instance: Any = None
        self._cloned: list[BaseRoute] = []
        context.plans = _Plans(self._plan)
        if routes is not None:
            # Before the constructor, so that `app.state` is the replica's inside it.
            self._clone(routes)

    async def attach(self, instance: Any) -> None:
        """Bind the endpoints to the instance; first build an app that is built per replica."""
        if self._routes is None:
            self._clone(BoundRoutes(await self._build(instance), self._cls))
        self._instance = instance
        self._make_plans()
        cloned = set(map(id, self._cloned))
        for route in getattr(self._context.asgi_app, "routes", ()):
            if id(route) not in cloned:
                check_added(route)

    async def shutdown(self) -> None:
        """Run the app's shutdown. Raises its error."""
        try:
            await self.lifespan.shutdown()
        finally:
            has_ended(self._context)

    def _clone(self, routes: BoundRoutes) -> None:
        self._routes = routes
        clone = self._context.asgi_app = routes.clone()
        self._context.dependencies = routes.dependencies
        serves(self._context)
        self._cloned = list(getattr(clone, "routes", ()))

    def _make_plans(self) -> None:
        assert self._routes is not None  # set by now
        self._next_look = 0.0
        plans = self._context.plans
        for target in self._routes.targets:
            if target not in plans:
                plans[target] = self._plan(target)

    def _plan(self, target: Target) -> ExecutionPlan:
        return self._make_plan(target.bound_to(self._instance), Role.ENDPOINT)

    def _renew(self, before: BoundRoutes) -> None:
        """Serve the routes that the user's app has got since."""
        self._routes = routes = before.current()
        if routes is before:
            return
        clone, cloned = self._context.asgi_app, set(map(id, self._cloned))
        added = [each for each in clone.routes if id(each) not in cloned]
        routes.equip(clone, added)
        self._cloned = clone.routes[: len(clone.routes) - len(added)]
        self._make_plans()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket.

        `REPLICA` must be set. `send` raises an `OSError` once the client has gone, as ASGI 2.4
        promises. Starlette then streams without a second task, from which a `SystemExit` could
        reach the loop. Raises the exception of the app, and `UserCodeExit` if that is not an
        `Exception`.
        """
        routes = self._routes
        assert routes is not None  # set by `attach`
        is_due = (now := monotonic()) >= self._next_look
        # Faster than a comparison of all parts, which finds also what is equal to what it replaces.
        if list(map(_ROUTES, routes.routers)) != routes.seen or (
            is_due and not routes.is_current()
        ):
            self._renew(routes)
        app = self._context.asgi_app
        if is_due:
            self._layers = Layers.of(app)
            self._next_look = now + CHECK_EVERY_S
        telemetry_is_off, stack, index = self._layers
        if telemetry_is_off:
            scope.setdefault(TELEMETRY, None)  # a parent app may have set its own
        scope["asgi"] = ASGI
        if self.lifespan.state:
            scope["state"] = {**scope.get("state", {}), **self.lifespan.state}
        found: ASGIApp | None = None
        try:
            if (
                index is not None
                and scope["type"] == "http"
                and app.middleware_stack is stack
                and app.router.middleware_stack is index
            ):
                if app.root_path:
                    scope["root_path"] = app.root_path
                found = index.find(scope)
                if type(found) is CompiledRoute:
                    return await found.answer(scope, receive, send, self._in_layers)
            await self._in_layers(found, scope, receive, send)
        except BaseException as error:
            with advisory("the explanation of an error"):
                explain(error, endpoint_of(scope))
            contain(error, "the ASGI app")
            raise

    async def _in_layers(
        self, found: ASGIApp | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the app that was found inside of the layers; they find one themselves for `None`."""
        answer = Answer(send)
        scope[ANSWER], scope[FOUND] = answer, found
        try:
            # A WebSocket has no response that could be cut off in the middle.
            watched = send if scope["type"] == "websocket" else answer.send
            await self._context.asgi_app(scope, receive, watched)
        finally:
            del scope[ANSWER]  # breaks a reference cycle with the scope
        if answer.failure is not None:
            raise answer.failure

    async def _build(self, instance: Any) -> ASGIApp:
        build = getattr(instance, BUILDER_METHOD, self._builder)
        assert build is not None  # the decorator checks it
        app: ASGIApp | None = await self._make_plan(build, Role.LIFECYCLE).run()
        if not callable(app):
            name = getattr(build, "__name__", repr(build))
            raise TypeError(f"`{name}` must return an ASGI app. It returned {app!r}.")
        return app


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
