"""The ASGI app of one replica, its lifespan, and FastAPI's layers around its routes.

    ServerErrorMiddleware, OutermostGuard, the user's, ExceptionMiddleware, AsyncExitStackMiddleware

Without middleware of the user's, these layers answer errors, and fill the scope for user code. So a
compiled route that shows its scope to no user code begins without them, and enters them only for an
error. They are a fifth of the cost of a simple request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from time import monotonic
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from ingress.app.asgi.methods import Target
from ingress.app.asgi.route_index import FOUND, RouteIndex
from ingress.app.asgi.routes import check_added
from ingress.app.asgi.users_app import has_ended, serves
from ingress.context import ReplicaRuntime
from ingress.core.execution.execution import ExecutionPlan, Role, contain, contained
from ingress.exceptions import RayServeException
from ingress.telemetry.logs import logger


@dataclass(eq=False, slots=True)
class Lifespan:
    """The lifespan of one app. Owned by the user loop.

    Start-up and shutdown run in one task, because a lifespan is one context manager: a task group
    or context variable must be closed in the task that opened it. `state` is the yielded state;
    each request gets a copy. `shutdown_error` is the error of the shutdown. A server reads both
    from its own loop, after start-up and after the stop.
    """

    _context: ReplicaRuntime
    state: dict[str, object] = field(default_factory=dict)
    shutdown_error: Exception | None = None
    _task: asyncio.Task[None] | None = None
    _messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    _answered: asyncio.Future[None] | None = None
    _error: BaseException | None = None
    _failed: str | None = None
    _is_up: bool = False
    _shared: dict[str, object] = field(default_factory=dict)

    def share(self, state: dict[str, object]) -> None:
        """Put the yielded state into `state`, until the shutdown."""
        state.update(self.state)
        self._shared = state

    def leave_shared(self) -> None:
        """Let the caller keep the state after the shutdown: its application stops as a whole."""
        self._shared = {}

    async def startup(self) -> None:
        """Run the app's start-up; `REPLICA` must be set. Raises the error of the start-up."""
        app = self._context.asgi_app
        self._answered = asyncio.get_running_loop().create_future()
        self._messages.put_nowait({"type": "lifespan.startup"})
        self._task = asyncio.create_task(self._run(app), name="lifespan")
        try:
            await self._answered
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._is_up:
            return
        # A Starlette whose middleware could not be built.
        is_unfinished = isinstance(app, Starlette) and app.middleware_stack is None
        if self._failed is not None or (self._error is not None and is_unfinished):
            raise self._failure("start-up")
        if self._error is not None and isinstance(app, Starlette):
            logger.warning(
                "a middleware of %r raises %r for the lifespan, so that the app is served without "
                "start-up and shutdown, as uvicorn serves it; let the middleware pass on scopes "
                "whose type is 'lifespan'",
                app,
                self._error,
            )
        else:
            logger.debug("%r does not support lifespan and is served without", app)

    async def shutdown(self) -> None:
        """Run the app's shutdown, once, if it has started up. Raises the error of the shutdown."""
        if self._task is None or not self._is_up:
            return
        self._is_up = False
        if self._task.cancelled():  # its loop ends: the cancellation has run the shutdown
            return
        # A server that runs on would keep the objects of a replica that has been replaced. Race
        # with `share`: a replica that ends while its server starts may leave its objects there.
        for key, value in self.state.items():
            if self._shared.get(key) is value:
                del self._shared[key]
        self._messages.put_nowait({"type": "lifespan.shutdown"})
        await self._task
        if self._failed is not None or self._error is not None:
            failure = self._failure("shutdown")
            if isinstance(failure, Exception):
                self.shutdown_error = failure
            raise failure

    async def _run(self, app: ASGIApp) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
        }
        try:
            await app(scope, self._messages.get, self._send)
        except BaseException as error:
            self._error = contained(error, "the lifespan")  # a `SystemExit` would end the loop
            if not isinstance(self._error, Exception):
                raise
        finally:
            self._answer()

    async def _send(self, message: Message) -> None:
        match message["type"]:
            case "lifespan.startup.complete":
                self._is_up = True
                self._answer()
            case "lifespan.startup.failed" | "lifespan.shutdown.failed":
                # Starlette raises the error next; a raw app may just return.
                self._failed = message.get("message", "")

    def _answer(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _failure(self, phase: str) -> BaseException:
        if self._error is not None:
            return self._error
        return RayServeException(f"The ASGI app's lifespan {phase} failed: {self._failed}")


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
