"""The routes of the user's app, cloned for one deployment.

The user's app keeps its routes. The clone has them in declared order, without the methods of other
classes. Each endpoint is replaced by a wrapper, which runs the current replica's plan for it.
FastAPI analyses the wrapper as it would analyse the original.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from itertools import chain
from types import FunctionType
from typing import Any, ForwardRef, cast

from fastapi.routing import APIRoute, APIRouter, APIWebSocketRoute
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Host, Mount, Route, Router, WebSocketRoute
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.compat import (
    Default,
    IncludedRouter,
    ServedRoute,
    built_candidates,
    check_kind,
    effective_context,
    endpoint_context,
    endpoint_contexts,
    fill_low_priority,
    get_typed_return_annotation,
    is_included,
    iter_route_contexts,
    request_stack,
    take_frontends,
    warn_if_not_compiled,
)
from ingress.app.asgi.compiled import CompiledRoute
from ingress.app.asgi.dependencies import (
    Dependencies,
    Lifted,
    Planned,
    nodes_of,
    nodes_of_route,
    original_of,
    take_changes,
    target_of,
)
from ingress.app.asgi.methods import (
    GENERATORS,
    Methods,
    Target,
    asks_for_self,
    refuse_self_from_client,
)
from ingress.app.asgi.responses import take_over_stream
from ingress.app.asgi.steps import Unfit
from ingress.app.asgi.wrapped import (
    found_inside,
    guard_mounted,
    is_alike,
    is_fastapis,
    put_around,
    put_inside,
    rebased,
    take_layers,
    take_methods,
    twin_of,
)
from ingress.context import REPLICA
from ingress.core.base.foreign import copied, stored
from ingress.core.base.signatures import signature_of
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.calls.tracing import TRACING, trace_begin
from ingress.core.execution.execution import (
    Kind,
    kind,
    kind_for_fastapi,
    name_of,
    override_of,
    stays_on_loop,
)
from ingress.telemetry.logs import logger


@dataclass(frozen=True, slots=True)
class RouteInfo:
    """One route. `func` is the user's function.

    `body_reads` says for its methods whether FastAPI reads the body of a request before any code of
    the user runs, or nothing does. A method that it does not have leaves that to the user.
    """

    path: str
    is_websocket: bool
    func: Callable[..., object]
    body_reads: Mapping[str, bool] = field(default_factory=dict, compare=False)


class RouteTree:
    """The cloned routers of one deployment.

    `targets` are the functions that a replica must make plans for, `foreign` the methods of other
    classes, `endpoints` the ids of the endpoints that were wrapped. Used by one thread; its results
    are immutable, and all replicas may share them.
    """

    def __init__(self, methods: Methods, classes: Sequence[type] = ()) -> None:
        self.methods = methods
        self.foreign: list[Callable[..., object]] = []
        self.endpoints: set[int] = set()
        self.dependencies = Dependencies(methods)
        self._others = [Methods(cls) for cls in classes if cls is not methods.cls]
        self._routers: dict[int, Router] = {}
        self._clones: dict[int, object] = {}
        self.targets: list[Target] = []

    def clone(self, router: Router) -> Router:
        """Return the router with its endpoints wrapped and its dependencies lifted."""
        warn_if_not_compiled(has_routes=bool(router.routes))
        with self.dependencies.reading():
            cloned = self._router(router)
            # This also fills FastAPI's caches of the included routes. Filled later, they would have
            # the user's callables.
            for served in served_routes(cloned.routes):
                calls = [node.call for node in nodes_of_route(served)]
                self.targets += [call.target for call in calls if isinstance(call, Planned)]
                route = api_route(served)
                if route is not None and getattr(route, "app", None) is not None:
                    with suppress(Unfit):
                        route.app = CompiledRoute(route)
            self.dependencies.check_overrides()
        return cloned

    def _router(self, router: Router) -> Router:
        # By identity: a router that is included twice has two nodes and one clone.
        known = self._routers.get(id(router))
        if known is None:
            known = self._routers[id(router)] = copied(router)
            if isinstance(known, APIRouter):
                provider = known.dependency_overrides_provider
                known.dependency_overrides_provider = self.dependencies.overrides(provider)
                take_frontends(router, known, self.dependencies.overrides)
            routes = (self._route(route, router) for route in router.routes)
            known.routes = [route for route in routes if route is not None]
            known.middleware_stack = rebased(router.middleware_stack, router.app, known.app)
            take_methods(router, known)
        return known

    def _route(self, route: BaseRoute, router: Router) -> BaseRoute | None:
        if is_included(route):
            inner, given = self._router(route.original_router), route.include_context
            provider = self.dependencies.overrides(given.dependency_overrides_provider)
            context = dataclasses.replace(
                given, included_router=inner, dependency_overrides_provider=provider
            )
            node: BaseRoute = IncludedRouter(original_router=inner, include_context=context)
            self._keep_included(route, node)
            fill_low_priority(node)
            return node
        if isinstance(route, (Mount, Host)):
            mount = copied(route)
            guard_mounted(mount)
            return mount
        if type(route) in (Route, WebSocketRoute):
            return route
        if not isinstance(route, (APIRoute, APIWebSocketRoute)):
            return self._around_routes(route, router)
        if self._is_foreign(route.endpoint):
            self.foreign.append(route.endpoint)
            return None
        self.endpoints.add(id(route.endpoint))
        target = self.methods.target(route.endpoint, is_endpoint=True)
        # For a WebSocket the router, not the route, keeps the provider of dependency overrides.
        keeper = route if isinstance(route, APIRoute) else router
        provider = getattr(keeper, "dependency_overrides_provider", None)
        options: dict[str, Any] = {
            "dependency_overrides_provider": self.dependencies.overrides(provider)
        }
        if callbacks := getattr(route, "callbacks", None):  # their methods are in the schema
            routes = (self._route(each, router) for each in callbacks)
            options["callbacks"] = [each for each in routes if each is not None]
        endpoint = wrapper(route.endpoint, target, _streams(route, target.func))
        self.dependencies.endpoints[id(route.endpoint)] = endpoint
        clone: Any = rebuilt(route, endpoint, **options)
        self._keep_changes(route, clone)
        if clone._ingress_target is not target:  # it is wrapped, and so in the routes of an include
            self.dependencies.endpoints[id(route.endpoint)] = clone.dependant.call
        self.targets.append(clone._ingress_target)
        clone.endpoint = route.endpoint  # user code compares it, and looks for its own marks
        self._clones[id(route)] = clone
        return cast(BaseRoute, clone)

    def _around_routes(self, route: BaseRoute, router: Router) -> BaseRoute | None:
        """Return a route of a class of the user's with the routes in it cloned.

        `None` if one of these is of another class.
        """
        inner: list[BaseRoute | None] = []

        def swap(value: Any) -> Any:
            if not issubclass(type(value), BaseRoute) or value is route:
                return None
            inner.append(self._route(value, router))
            return inner[-1]

        around: BaseRoute = put_inside(route, swap)
        return None if any(each is None for each in inner) else around

    def _is_foreign(self, endpoint: Callable[..., object]) -> bool:
        """Return whether only another class can run an endpoint."""
        is_theirs = any(other.takes_self(endpoint) for other in self._others)
        return not self.methods.owns(endpoint) and (is_theirs or asks_for_self(endpoint))

    def _keep_changes(self, route: Any, clone: Any) -> None:
        """Put the layers that user code has put around the app of a route around the clone's.

        Raises `TypeError` if the replica's instance would not reach an endpoint in such a layer.
        """
        made = getattr(clone, "app", None)  # FastAPI 0.137 keeps none of an included route

        def twin(value: Any) -> Any:
            if is_fastapis(value, route.dependant):
                return twin_of(value, made)
            return made if is_alike(value, made) else None

        hidden = take_layers(
            route,
            clone,
            [name for name in _LAYERED if callable(vars(route).get(name))],
            twin,
        )
        if hidden and _is_bound(clone):
            raise TypeError(
                f"`{hidden[0]}` of the route '{route.path}' of {name_of(route.endpoint)} was "
                "replaced, and no replica finds FastAPI's own in it, so it would run without "
                "its instance. Use app.add_middleware(...), Depends(...), a route class, or a "
                "layer that keeps what it wraps as `self.app` or in its closure."
            )
        call, own = route.dependant.call, clone.dependant.call
        # Not if a replica made the route, or an integration wraps all, and so the clone's as well.
        is_wrapped = call is not route.endpoint and not hasattr(call, "__ingress_target__")
        if is_wrapped and own in self.dependencies.endpoints.values():
            target = _as_wrapped(route, self.methods.target(route.endpoint, is_endpoint=True))
            clone.dependant.call = wrapper(call, target, _streams(route, target.func))
            getattr(clone, "original_route", clone)._ingress_target = target
        take_changes(route.dependant, clone.dependant)

    def _keep_included(self, was: Any, node: Any) -> None:
        """Put what user code has changed in the routes of an included router into those of `node`.

        FastAPI builds them when they are first looked at; before that there is nothing to change.
        """
        built = built_candidates(was)
        made = node.effective_candidates() if built else ()
        inner = filter(is_included, made)
        clones = {id(each.original_route): each for each in made if hasattr(each, "original_route")}
        for each in built:
            if is_included(each):
                self._keep_included(each, next(inner))
            elif clone := clones.get(id(self._clones.get(id(each.original_route)))):
                self._keep_changes(each.starlette_route or each, clone.starlette_route or clone)


def _as_wrapped(route: Any, target: Target) -> Target:
    """Return the target in the function that wraps the endpoint of a finished route.

    Integrations such as that of Sentry put one around each `def`. Raises `TypeError` for a function
    in which the endpoint is not found.
    """
    func, endpoint = route.dependant.call, route.endpoint
    is_around = inspect.unwrap(func, stop=lambda each: each is endpoint) is endpoint
    if not is_around or target.func is not endpoint:
        func = put_around(func, lambda value: target.func if value is endpoint else None)
    if type(func) is not FunctionType:
        raise TypeError(
            f"The endpoint of the route '{route.path}', {name_of(endpoint)}, was replaced after "
            "the route was made, and is not found in its replacement. Decorate it below the route."
        )
    is_class_method = isinstance(target.descriptor, classmethod)
    descriptor: Any = classmethod(func) if is_class_method else func
    is_bound = target.descriptor is not None
    return dataclasses.replace(target, func=func, descriptor=descriptor if is_bound else None)


_LAYERED = ("app", "handle", "matches", "get_route_handler", "__call__")


def _is_bound(clone: Any) -> bool:
    """Return whether a route needs the instance."""
    calls: list[Any] = [node.call for node in nodes_of(clone.dependant)]
    targets = [each.target for each in calls if isinstance(each, Lifted)]
    return any(each and each.descriptor is not None for each in (*targets, target_of(clone)))


def wrapper(original: Callable[..., object], target: Target, streams: Kind | None) -> Any:
    """Return the endpoint that FastAPI sees in place of `original`; a generator if it `streams`.

    The endpoint has no `__wrapped__`, because FastAPI would use the wrapped function instead.
    """
    if streams is Kind.GENERATOR:

        def endpoint(**values: Any) -> Iterator[Any]:
            # Runs in the worker thread of `take_over_stream`.
            items = REPLICA.get().plans[target].items(**values)
            _OPENED.get().append(items)
            # Not `yield from`, which closes them too: the thread that made this generator may
            # finalize it (free-threaded Python) while the worker is closing them.
            for item in items:  # noqa: UP028
                yield item

    elif streams is Kind.ASYNC_GENERATOR:

        async def endpoint(**values: Any) -> AsyncGenerator[Any, None]:  # type: ignore[misc]
            async with aclosing(REPLICA.get().plans[target].stream(**values)) as items:
                _OPENED.get().append(items)
                async for item in items:
                    yield item

    else:

        async def endpoint(**values: Any) -> Any:  # type: ignore[misc]
            plan = REPLICA.get().plans[target]
            if TRACING.tracer is not None:
                trace_begin(CURRENT_CALL.get())
            result = await plan.run(**values)
            if isinstance(result, Response):
                take_over_stream(result, plan.pool)
            return result

    # With the marks of libraries.
    marked: Any = update_wrapper(endpoint, original, _COPIED)
    del marked.__wrapped__
    marked.__ingress_target__ = target
    marked.__signature__ = target.signature
    _point_errors_at(endpoint, original)
    return endpoint


_COPIED = ("__module__", "__name__", "__qualname__", "__doc__")


def rebuilt(route: Any, endpoint: Callable[..., object], **given: Any) -> Any:
    """Return a route of the same class and configuration with another endpoint.

    A route keeps each parameter of its constructor in an attribute of the same name.
    """
    base: Any = APIRoute if isinstance(route, APIRoute) else APIWebSocketRoute
    names = inspect.signature(base).parameters.keys() & vars(route).keys() - {"path", "endpoint"}
    options = {name: vars(route)[name] for name in names} | given
    if base is APIRoute:
        # The id names the models of body and response in the schema. It is kept from the declared
        # route; made again it could differ, because a set of methods has no order.
        options |= {"operation_id": None, "generate_unique_id_function": lambda _: route.unique_id}
        # FastAPI finds the type of the items again, but only without a response model.
        if getattr(route, "stream_item_type", None) is not None or _is_inferred(route):
            options["response_model"] = Default(None)
    clone = copied(route)
    clone._ingress_target = endpoint.__ingress_target__  # type: ignore[attr-defined]
    if kind(endpoint) in GENERATORS:
        clone.__class__ = _closing(route.__class__)
    # Not the constructor of a user's class: its changes are in the attributes already.
    base.__init__(clone, route.path, endpoint, **options)
    vars(clone).update({name: vars(route)[name] for name in _AS_CONFIGURED if name in vars(route)})
    return clone


_AS_CONFIGURED = (
    "dependencies", "methods", "operation_id", "generate_unique_id_function",
    "path_regex", "path_format", "param_convertors",
)  # fmt: skip


def _is_inferred(route: APIRoute) -> bool:
    """Return whether FastAPI took the response model from an annotation that it reads anew."""
    model, annotation = route.response_model, signature_of(route.endpoint).return_annotation
    return isinstance(annotation, str) and (
        isinstance(model, ForwardRef) or model == get_typed_return_annotation(route.endpoint)
    )


def routers(router: Router) -> list[Router]:
    """Return a router and those that it includes, each once."""
    included = [route.original_router for route in list(router.routes) if is_included(route)]
    found = {id(each): each for each in chain([router], *map(routers, included))}
    return list(found.values())


def served_routes(routes: Sequence[BaseRoute]) -> Iterator[ServedRoute]:
    """Yield the routes as served, with the prefix and dependencies of each include applied."""
    for served in iter_route_contexts(routes):
        # FastAPI 0.137 wraps an included route that is not an `APIRoute` once more.
        yield getattr(served, "starlette_route", None) or served


def api_route(served: ServedRoute) -> Any:
    """Return the object whose `app` answers an `APIRoute`; `None` for another kind of route.

    FastAPI keeps the app of an included route apart from the route.
    """
    route: Any = effective_context(served) or getattr(served, "route", served)
    return route if isinstance(getattr(route, "original_route", route), APIRoute) else None


def route_infos(routes: Sequence[BaseRoute]) -> Iterator[RouteInfo]:
    """Yield the routes of a clone, without FastAPI's documentation routes."""
    for served in served_routes(routes):
        endpoint = getattr(served, "endpoint", None)
        if endpoint is not None and getattr(endpoint, "__module__", "") != "fastapi.applications":
            is_websocket = isinstance(getattr(served, "original_route", served), WebSocketRoute)
            target = target_of(served)
            func = target.func if target else endpoint
            yield RouteInfo(served.path, is_websocket, func, _body_reads(api_route(served)))


def _body_reads(route: Any) -> dict[str, bool]:
    kind_of_route = type(getattr(route, "original_route", route))
    if stored(kind_of_route, "get_route_handler") is not APIRoute.get_route_handler:
        return {}
    if getattr(route, "body_field", route) is not None:  # of another FastAPI, maybe
        return dict.fromkeys(route.methods or (), True)
    takes_request = any(
        getattr(node, "request_param_name", "") is not None and not _reads_headers_only(node.call)
        for node in nodes_of_route(route, with_endpoint=True)
    )
    return {} if takes_request else dict.fromkeys(route.methods or (), False)


def _reads_headers_only(call: object) -> bool:
    """Return whether a dependency is one of FastAPI's own security schemes."""
    return str(stored(type(call), "__module__")).startswith("fastapi.security.")


def check_added(route: BaseRoute) -> None:
    """Raise `TypeError` for a route for which FastAPI would ask the client for `self`."""
    for served in served_routes([route]):
        for node in nodes_of_route(served, with_endpoint=True):
            if not isinstance(node.call, Lifted):
                refuse_self_from_client(node.call, f"the route '{served.path}'")
        if isinstance(inner := getattr(served, "original_route", served), (Mount, Host)):
            for each in inner.routes or []:
                check_added(each)


def refuse_added(route: Any) -> None:
    """Have a route that a replica added fail with its error, if it may not be served."""
    try:
        check_added(route)
    except TypeError as error:
        told = error
        logger.error("%s", told)

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            raise TypeError(str(told))

        route.app = route.handle = refuse


def check_routes(app: Router | Starlette, methods: Methods, *, mounted_at: str = "") -> None:
    """Raise `TypeError` or `RayServeException`, with the fix, for routes that can never run."""
    router: Any = getattr(app, "router", app)
    _check_handlers(app, methods)
    for inner in found_inside(router.default, _APPS):
        if inner is not router:
            check_routes(inner, methods, mounted_at=mounted_at or "router.default")
    for route in app.routes:
        check_kind(route)
        if is_included(route):
            check_routes(route.original_router, methods, mounted_at=mounted_at)
        elif not isinstance(route, (Route, WebSocketRoute)):
            where = mounted_at + getattr(route, "path", getattr(route, "host", ""))
            for inner in found_inside(route, _APPS):
                check_routes(inner, methods, mounted_at=where or type(route).__name__)
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
        else:
            _check_owned(route, methods, mounted_at)


_APPS = (Starlette, Router)


def check_layers(app: Any, methods: Methods) -> None:
    """Raise `TypeError` for routes of the class in an app that is in a layer."""
    for inner in found_inside(app, _APPS) if not isinstance(app, _APPS) else ():
        for served in served_routes(inner.routes):
            if methods.owns(getattr(served, "endpoint", None)):
                raise TypeError(
                    f"{name_of(served.endpoint)} is a route of an app that is in a layer, "
                    f"{type(app).__name__}, so it is never bound to {methods.cls.__qualname__}. "
                    "Give @serve.ingress the app itself, and put the layer into it with "
                    "app.add_middleware(...)."
                )


def _check_handlers(app: Any, methods: Methods) -> None:
    layers = [each.kwargs.get("dispatch") for each in getattr(app, "user_middleware", ())]
    for func in (*layers, *getattr(app, "exception_handlers", {}).values()):
        if func is not None and methods.takes_self(func):
            raise TypeError(
                f"{name_of(func)} is a middleware or an exception handler of the app, which calls "
                "it without an instance. Write it outside of the class; it finds the replica's "
                "state in request.app.state."
            )
    router = getattr(app, "router", app)
    events = [*getattr(router, "on_startup", ()), *getattr(router, "on_shutdown", ())]
    for func in (*events, getattr(router, "lifespan_context", None)):
        if func is not None and methods.takes_self(func):
            raise TypeError(
                f"{name_of(func)} is an event handler or the lifespan of the app, which calls it "
                "without an instance. Use `async def __init__(self)` and `async def __del__(self)`,"
                " or write it outside of the class."
            )


def _check_owned(route: Any, methods: Methods, mounted_at: str) -> None:
    name, is_owned = name_of(route.endpoint), methods.owns(route.endpoint)
    if is_owned and mounted_at:
        raise TypeError(
            f"{name} is a route of an app mounted at '{mounted_at}', which is never bound "
            f"to {methods.cls.__qualname__}. Declare it on an APIRouter and include that: "
            f"app.include_router(router, prefix='{mounted_at}')."
        )
    if is_owned and not isinstance(route, (APIRoute, APIWebSocketRoute)):
        raise TypeError(
            f"{name} was added with Starlette's `add_route`, which calls it with the "
            "request and without `self`. Use @app.get, @app.api_route or @app.websocket."
        )
    methods.check(route.endpoint)
    for node in nodes_of_route(route) if mounted_at else ():
        where = f"a route of the app mounted at '{mounted_at}'"
        if methods.takes_self(node.call):
            raise TypeError(
                f"{name_of(original_of(node.call))} is a dependency of {where}, which is never "
                f"bound to {methods.cls.__qualname__}, so the client would be asked for its `self`."
                f" Include a router instead: app.include_router(router, prefix='{mounted_at}')."
            )
        refuse_self_from_client(node.call, where)


def _streams(route: Any, func: Callable[..., object]) -> Kind | None:
    """Return the kind of generator that FastAPI is to see, `None` for an ordinary endpoint."""
    # A FastAPI without streaming endpoints takes the generator for an ordinary result, as do all
    # for a WebSocket.
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
            target = target_of(self)

            async def handle(request: Request) -> Response:
                opened: list[Any] = []
                _OPENED.set(opened)
                # Pushed first, so it runs last: FastAPI's tasks, which iterate, have ended by then.
                if (stack := request_stack(request.scope)) is not None:
                    stack.push_async_callback(_close, opened)
                response: Response = await handler(request)
                take_over_stream(response, REPLICA.get().plans[target].pool, opened)
                return response

            return handle

    return StreamingRoute


async def _close(streams: Sequence[object]) -> None:
    for stream in streams:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


def _point_errors_at(endpoint: Callable[..., object], original: Callable[..., object]) -> None:
    """Make FastAPI's validation errors name the user's file and line, not the wrapper's.

    FastAPI caches the context of an endpoint by its `id`, even after the endpoint is gone. So the
    entry under the original's `id` may belong to another function, and is dropped.
    """
    if endpoint_contexts is not None and endpoint_context is not None:
        endpoint_contexts.pop(id(original), None)
        endpoint_contexts[id(endpoint)] = dict(endpoint_context(original))
        weakref.finalize(endpoint, endpoint_contexts.pop, id(endpoint), None).atexit = False
