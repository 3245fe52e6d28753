"""The ASGI app of one replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic
from typing import Any

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.app.asgi.apps import BoundRoutes
from ingress.app.asgi.bad_results import endpoint_of, explain
from ingress.app.asgi.compat import TELEMETRY
from ingress.app.asgi.compiled import CompiledRoute
from ingress.app.asgi.guard import ANSWER, Answer
from ingress.app.asgi.layers import CHECK_EVERY_S, Layers
from ingress.app.asgi.lifespan import Lifespan
from ingress.app.asgi.methods import Target
from ingress.app.asgi.route_index import FOUND
from ingress.app.asgi.routes import check_added
from ingress.context import ReplicaRuntime
from ingress.core.base.foreign import advisory
from ingress.core.execution.execution import ExecutionPlan, Role, contain

ASGI = {"version": "3.0", "spec_version": "2.4"}
BUILDER_METHOD = "__serve_build_asgi_app__"

_ROUTES = attrgetter("routes")


@dataclass(slots=True, eq=False)
class _Plans(dict[Target, ExecutionPlan]):
    """The plans of a replica. An override or a later route has none, and gets one for each call."""

    _make: Callable[[Target], ExecutionPlan]

    def __missing__(self, target: Target) -> ExecutionPlan:
        return self._make(target)


MakePlan = Callable[[Callable[..., Any], Role], ExecutionPlan]


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

    def _clone(self, routes: BoundRoutes) -> None:
        self._routes = routes
        clone = self._context.asgi_app = routes.clone()
        self._context.dependencies = routes.dependencies
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
