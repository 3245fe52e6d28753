"""The routes of the user's app, cloned for one deployment.

The user's app keeps its routes. The clone has them in declared order, without the methods of other
classes. Each endpoint is replaced by a wrapper, which runs the current replica's plan for it.
FastAPI analyses the wrapper as it would analyse the original.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Host, Mount, Route, Router, WebSocketRoute
from starlette.types import ASGIApp

from ingress.app.asgi.compat import (
    CompilableRoute,
    Default,
    Included,
    IncludedRouter,
    ServedRoute,
    base_app,
    check_kind,
    effective_context,
    endpoint_context,
    endpoint_contexts,
    get_typed_return_annotation,
    get_typed_signature,
    iter_route_contexts,
    request_stack,
    warn_if_not_compiled,
    with_base_app,
)
from ingress.app.asgi.compiled import CompiledRoute
from ingress.app.asgi.dependencies import Dependencies
from ingress.app.asgi.guard import Guard, guard_below, guarded
from ingress.app.asgi.methods import GENERATORS, Methods, Target, kind_for_fastapi
from ingress.app.asgi.responses import take_over_stream
from ingress.app.asgi.steps import Unfit
from ingress.context import REPLICA
from ingress.core.base.signatures import signature_of
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.calls.tracing import TRACING, trace_begin
from ingress.core.execution.execution import Kind, kind, name_of, override_of, stays_on_loop

R = TypeVar("R", bound=APIRoute | APIWebSocketRoute)


@dataclass(frozen=True, slots=True)
class RouteInfo:
    """One route. `func` is the user's function."""

    path: str
    is_websocket: bool
    func: Callable[..., object]


class RouteTree:
    """The cloned routers of one deployment.

    `targets` are the functions that a replica must make plans for, `foreign` the methods of other
    classes, `endpoints` the ids of the endpoints that were wrapped. Used by one thread; its results
    are immutable, and all replicas may share them.
    """

    def __init__(self, methods: Methods) -> None:
        self.methods = methods
        self.foreign: list[Callable[..., object]] = []
        self.endpoints: set[int] = set()
        self._dependencies = Dependencies(methods)
        self._routers: dict[int, Router] = {}
        self._targets: dict[Callable[..., object], Target] = {}

    @property
    def targets(self) -> list[Target]:
        return [*self._targets.values(), *self._dependencies.targets]

    def clone(self, router: Router) -> Router:
        """Return the router with its endpoints wrapped and its dependencies lifted."""
        warn_if_not_compiled(len(router.routes))
        cloned = self._router(router)
        # This also fills FastAPI's caches of the included routes. FastAPI 0.137 fills them without
        # a lock, so the replicas' threads would race, and undo the lifting.
        for served in served_routes(cloned.routes):
            if (dependant := getattr(served, "dependant", None)) is not None:
                self._dependencies.lift(dependant)
            route = api_route(served)
            if route is not None and getattr(route, "app", None) is not None:
                with suppress(Unfit):
                    route.app = CompiledRoute(route)
        return cloned

    def _router(self, router: Router) -> Router:
        # By identity: a router that is included twice has two nodes and one clone.
        known = self._routers.get(id(router))
        if known is None:
            known = self._routers[id(router)] = copy.copy(router)
            routes = (self._route(route, router) for route in router.routes)
            known.routes = [route for route in routes if route is not None]
            known.middleware_stack = rebased(router.middleware_stack, router.app, known.app)
        return known

    def _route(self, route: BaseRoute, router: Router) -> BaseRoute | None:
        if IncludedRouter is not None and isinstance(route, IncludedRouter):
            inner = self._router(route.original_router)
            context = dataclasses.replace(route.include_context, included_router=inner)
            node: BaseRoute = IncludedRouter(original_router=inner, include_context=context)
            return node
        if isinstance(route, Mount):
            return guarded_mount(route)
        if not isinstance(route, (APIRoute, APIWebSocketRoute)):
            return route
        if self.methods.is_foreign(route.endpoint):
            self.foreign.append(route.endpoint)
            return None
        self.endpoints.add(id(route.endpoint))
        if getattr(route.endpoint, "__hash__", None) is None:
            return route  # not hashable, so it can have no plan: FastAPI runs it
        target = self.methods.target(route.endpoint)
        self._targets[target.func] = target
        if isinstance(route, APIWebSocketRoute):
            # The router, not the route, keeps the provider of dependency overrides.
            provider = getattr(router, "dependency_overrides_provider", None)
            endpoint = wrapper(route.endpoint, target, None)
            return rebuilt(route, endpoint, dependency_overrides_provider=provider)
        return rebuilt(route, wrapper(route.endpoint, target, _streams(route, target.func)))


def wrapper(original: Callable[..., object], target: Target, streams: Kind | None) -> Any:
    """Return the endpoint that FastAPI sees in place of `original`; a generator if it `streams`.

    The endpoint has no `__wrapped__`, because FastAPI would use the wrapped function instead.
    """
    func = target.func  # the hot path: one lookup, one call

    if streams is Kind.GENERATOR:

        def endpoint(**values: Any) -> Iterator[Any]:
            # Runs in the worker thread of `take_over_stream`.
            items = REPLICA.get().plans[func].items(**values)
            _OPENED.get().append(items)
            # Not `yield from`, which closes them too: the thread that made this generator may
            # finalize it (free-threaded Python) while the worker is closing them.
            for item in items:  # noqa: UP028
                yield item

    elif streams is Kind.ASYNC_GENERATOR:

        async def endpoint(**values: Any) -> AsyncGenerator[Any, None]:  # type: ignore[misc]
            async with aclosing(REPLICA.get().plans[func].stream(**values)) as items:
                _OPENED.get().append(items)
                async for item in items:
                    yield item

    else:

        async def endpoint(**values: Any) -> Any:  # type: ignore[misc]
            plan = REPLICA.get().plans[func]
            if TRACING.tracer is not None:
                trace_begin(CURRENT_CALL.get())
            result = await plan.run(**values)
            if isinstance(result, Response):
                take_over_stream(result, plan.pool)
            return result

    endpoint.__dict__.update(getattr(original, "__dict__", {}))  # marks of libraries
    for name in ("__wrapped__", "__signature__"):
        endpoint.__dict__.pop(name, None)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(endpoint, name, getattr(original, name, getattr(endpoint, name)))
    marked: Any = endpoint
    marked.__ingress_func__ = func
    marked.__signature__ = signature(original, takes_self=target.takes_self)
    _point_errors_at(endpoint, original)
    return endpoint


def signature(original: Callable[..., object], *, takes_self: bool) -> inspect.Signature:
    """Return the signature as FastAPI finds it, with the annotations resolved."""
    parameters = list(get_typed_signature(original).parameters.values())
    returned = signature_of(original).return_annotation
    if returned is not inspect.Signature.empty:
        returned = get_typed_return_annotation(original)
    return inspect.Signature(parameters[1 if takes_self else 0 :], return_annotation=returned)


def rebuilt(route: R, endpoint: Callable[..., object], **given: Any) -> R:
    """Return a route of the same class and configuration with another endpoint.

    A route keeps each parameter of its constructor in an attribute of the same name.
    """
    base = APIRoute if isinstance(route, APIRoute) else APIWebSocketRoute
    configured = vars(route)
    options = {name: configured[name] for name in _options(base) if name in configured} | given
    if isinstance(route, APIRoute):
        unique_id = route.unique_id
        # The id names the models of body and response in the schema. It is kept from the declared
        # route; made again it could differ, because a set of methods has no order.
        options |= {"operation_id": None, "generate_unique_id_function": lambda _: unique_id}
        if not configured.get("form_limits"):
            options.pop("form_limits", None)  # as in FastAPI: a custom route class may lack it
        if configured.get("stream_item_type") is not None:
            # FastAPI finds the type of the items again, but only without a response model.
            options["response_model"] = Default(None)
    cls: Any = type(route)
    if kind(endpoint) in GENERATORS:
        cls = _closing(cls)
    clone: R = cls(route.path, endpoint, **options)
    for name in ("methods", "operation_id", "generate_unique_id_function"):
        if name in configured:
            setattr(clone, name, configured[name])
    for name, value in configured.items():  # attributes that the user added
        vars(clone).setdefault(name, value)
    return clone


def rebased(stack: Any, end: ASGIApp, new_end: ASGIApp) -> Any:
    """Return a copy of a chain of middlewares with another end and guards in between."""
    if stack == end:
        return new_end
    if not hasattr(stack, "app"):
        return stack  # not a chain
    layer, inner = copy.copy(stack), rebased(stack.app, end, new_end)
    if not isinstance(layer, Guard) and not isinstance(inner, Guard):
        inner = guard_below(type(layer))(inner)
    layer.app = inner
    return layer


def guarded_mount(mount: Mount) -> Mount:
    """Return the mount with guards between the middlewares of the mounted app.

    The replicas share that app. Two replicas may build its middleware stack at the same time, and
    either stack is right.
    """
    app = base_app(mount)
    if isinstance(app, Starlette):
        app = copy.copy(app)
        app.user_middleware = guarded(app.user_middleware)
        app.middleware_stack = None
        router = app.router
        app.router = copy.copy(router)
        app.router.middleware_stack = rebased(router.middleware_stack, router.app, app.router.app)
        app.router.routes = [
            guarded_mount(route) if isinstance(route, Mount) else route for route in router.routes
        ]
    clone = with_base_app(mount, app)
    clone.app = rebased(mount.app, base_app(mount), app)
    return clone


def routers(router: Router, known: dict[int, Router] | None = None) -> list[Router]:
    """Return a router, and those that it includes or mounts with an app, each once."""
    found = {} if known is None else known
    if id(router) not in found:
        found[id(router)] = router
        for route in list(router.routes):
            if IncludedRouter is not None and isinstance(route, IncludedRouter):
                included: Included = route
                routers(included.original_router, found)
            elif isinstance(route, Mount) and isinstance(app := base_app(route), Starlette):
                routers(app.router, found)
    return list(found.values())


def served_routes(routes: Sequence[BaseRoute]) -> Iterator[ServedRoute]:
    """Yield the routes as served, with the prefix and dependencies of each include applied."""
    for served in iter_route_contexts(routes):
        # FastAPI 0.137 wraps an included route that is not an `APIRoute` once more.
        yield getattr(served, "starlette_route", None) or served


def api_route(served: ServedRoute) -> CompilableRoute | None:
    """Return the object whose `app` answers an `APIRoute`; `None` for another kind of route.

    FastAPI keeps the app of an included route apart from the route.
    """
    route: Any = effective_context(served) or getattr(served, "route", served)
    return route if isinstance(getattr(route, "original_route", route), APIRoute) else None


def route_infos(routes: Sequence[BaseRoute]) -> Iterator[RouteInfo]:
    """Yield the routes of a clone, without FastAPI's documentation routes."""
    for served in served_routes(routes):
        endpoint = getattr(served, "endpoint", None)
        if endpoint is None or getattr(endpoint, "__module__", None) == "fastapi.applications":
            continue
        yield RouteInfo(
            served.path,
            isinstance(getattr(served, "original_route", served), WebSocketRoute),
            getattr(endpoint, "__ingress_func__", endpoint),
        )


def check_routes(routes: Sequence[BaseRoute], methods: Methods, *, mounted_at: str = "") -> None:
    """Raise `TypeError` or `RayServeException`, with the fix, for routes that can never run."""
    for route in routes:
        check_kind(route)
        if IncludedRouter is not None and isinstance(route, IncludedRouter):
            included: Included = route
            check_routes(included.original_router.routes, methods, mounted_at=mounted_at)
        elif isinstance(route, (Mount, Host)):
            where = mounted_at + getattr(route, "path", getattr(route, "host", ""))
            check_routes(route.routes or [], methods, mounted_at=where)
        elif not isinstance(route, (Route, WebSocketRoute)):
            continue
        elif getattr(route.endpoint, "__ingress_batched__", None) is route.endpoint:
            raise TypeError(
                f"@serve.batch above the route {route.endpoint.__qualname__} would have no effect: "
                "FastAPI calls the function below it. Decorate an inner method and await it from "
                "the route."
            )
        elif hasattr(route.endpoint, "__ingress_batcher__"):
            raise TypeError(
                f"{route.endpoint.__qualname__} is a route and a @serve.batch: FastAPI would read "
                "its lists from one request. Decorate an inner method and await it from the route."
            )
        elif (override := override_of(route.endpoint)) is not None and (
            mounted_at or not isinstance(route, (APIRoute, APIWebSocketRoute))
        ):
            raise TypeError(
                f"{override} has no effect on {name_of(route.endpoint)}: Starlette runs the routes "
                "of a mounted app, and those of `add_route`. Use @app.get on the app itself, or "
                "include a router."
            )
        elif methods.owns(route.endpoint):
            name = route.endpoint.__qualname__
            if mounted_at:
                raise TypeError(
                    f"{name} is a route of an app mounted at '{mounted_at}', which is never bound "
                    f"to {methods.cls.__qualname__}. Declare it on an APIRouter and include that: "
                    f"app.include_router(router, prefix='{mounted_at}')."
                )
            if not isinstance(route, (APIRoute, APIWebSocketRoute)):
                raise TypeError(
                    f"{name} was added with Starlette's `add_route`, which calls it with the "
                    "request and without `self`. Use @app.get, @app.api_route or @app.websocket."
                )
            methods.check(route.endpoint)


def _streams(route: APIRoute, func: Callable[..., object]) -> Kind | None:
    """Return the kind of generator that FastAPI is to see, `None` for an ordinary endpoint."""
    # A FastAPI without streaming endpoints takes the generator for an ordinary result.
    if not hasattr(route, "is_json_stream") or kind_for_fastapi(func) not in GENERATORS:
        return None
    # FastAPI iterates server-sent events before there is a response with an iterator.
    is_taken_over = not getattr(route, "is_sse_stream", False) and not stays_on_loop(func)
    if kind(func) is Kind.GENERATOR and is_taken_over:
        return Kind.GENERATOR
    return Kind.ASYNC_GENERATOR


_OPENED: ContextVar[list[Any]] = ContextVar("ingress_opened")
"""The endpoint streams that the current request has begun."""


@cache
def _closing(base: Any) -> type[APIRoute]:
    """Return a route class that closes the generator of its endpoint when the request ends.

    FastAPI leaves the generator to the garbage collector, between two generators or tasks of its
    own. A class, because FastAPI calls `get_route_handler` again wherever a route is included.
    """

    class StreamingRoute(base):  # type: ignore[misc]
        __ingress_base__ = base

        def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
            handler = super().get_route_handler()
            func = self.endpoint.__ingress_func__

            async def handle(request: Request) -> Response:
                opened: list[Any] = []
                _OPENED.set(opened)
                # Pushed first, so it runs last: FastAPI's tasks, which iterate, have ended by then.
                if (stack := request_stack(request.scope)) is not None:
                    stack.push_async_callback(_close, opened)
                response: Response = await handler(request)
                take_over_stream(response, REPLICA.get().plans[func].pool, opened)
                return response

            return handle

    return StreamingRoute


async def _close(streams: Sequence[object]) -> None:
    for stream in streams:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


def _options(base: type) -> list[str]:
    parameters = inspect.signature(base).parameters
    return [name for name in parameters if name not in ("path", "endpoint")]


def _point_errors_at(endpoint: Callable[..., object], original: Callable[..., object]) -> None:
    """Make FastAPI's validation errors name the user's file and line, not the wrapper's.

    FastAPI caches the context of an endpoint by its `id`, even after the endpoint is gone. So the
    entry under the original's `id` may belong to another function, and is dropped.
    """
    known = endpoint_contexts
    if known is not None and endpoint_context is not None:
        known.pop(id(original), None)
        known[id(endpoint)] = dict(endpoint_context(original))
        weakref.finalize(endpoint, known.pop, id(endpoint), None).atexit = False
