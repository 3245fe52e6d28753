"""The user's code in an app, as its replicas serve it: what `explain` asks `execution` about.

    route, WebSocket                     ENDPOINT if it is bound, else FRAMEWORK
    dependency                           ENDPOINT if it was lifted, else FRAMEWORK; once an app
    teardown of one with `yield`         FRAMEWORK
    middleware, exception handler        FRAMEWORK
    start-up, shutdown, lifespan         LIFECYCLE
    what is mounted                      FRAMEWORK: no replica binds it

Nothing is called: a part is read off the very objects that answer requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.routing import BaseRoute, Host, Mount, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles

from ingress.asgi.dependencies import Lifted, LiftedFunction
from ingress.asgi.methods import GENERATORS, kind_for_fastapi
from ingress.asgi.routes import served_routes
from ingress.execution import Role, kind

_FRAMEWORKS = ("fastapi", "starlette", "ingress")


@dataclass(frozen=True, slots=True)
class Part:
    """One callable of the user's: what it is to them, and what it is to `execution`.

    `at_once` is how many calls of it run at a time, if something other than threads says so.
    """

    what: str
    func: Callable[..., Any]
    role: Role
    at_once: int | None = None


def app_parts(app: Any, router: Router) -> Iterator[Part]:
    """Yield the parts of an app whose routes are bound in `router`, in the order of a request."""
    if not isinstance(app, Starlette):
        yield Part("ASGI app", app, Role.FRAMEWORK)
        return
    yield from dict.fromkeys(_lifespan_parts(app.router.lifespan_context))
    yield from _inner_parts(app, router.routes, "", set())


def _inner_parts(app: Any, routes: Sequence[BaseRoute], prefix: str, seen: set[Any]) -> Any:
    """Yield all but the lifespan, which Starlette does not run for an app that is mounted."""
    for middleware in getattr(app, "user_middleware", ()):
        cls: Any = middleware.cls
        func = middleware.kwargs.get("dispatch") or getattr(cls, "dispatch", None)
        role = Role.FRAMEWORK
        if func is None and inspect.isclass(cls):
            func = cls.__call__
        elif func is None:  # it makes one, when the app is built
            func, role = cls, Role.LIFECYCLE
        if not _is_frameworks(func):
            yield Part("middleware", func, role)
    for served in served_routes(routes):
        yield from _route_parts(served, prefix, seen)
    for handler in dict.fromkeys(getattr(app, "exception_handlers", {}).values()):
        if not _is_frameworks(handler):
            yield Part("error handler", handler, Role.FRAMEWORK)


def _route_parts(served: Any, prefix: str, seen: set[Any]) -> Iterator[Part]:
    original = getattr(served, "original_route", served)
    if isinstance(original, (Mount, Host)):
        yield from _mounted_parts(original, prefix, seen)
        return
    endpoint = getattr(served, "endpoint", None)
    if endpoint is None or getattr(endpoint, "__module__", None) == "fastapi.applications":
        return  # FastAPI's documentation
    path = prefix + served.path
    if isinstance(original, WebSocketRoute):
        methods = "WS"
    else:
        methods = " ".join(sorted(getattr(served, "methods", None) or ())) or "any"
    func = getattr(endpoint, "__ingress_func__", None)
    if func is not None:
        yield Part(f"{methods} {path}", func, Role.ENDPOINT)
    elif inspect.isclass(endpoint) and issubclass(endpoint, HTTPEndpoint):
        for name in ("get", "head", "post", "put", "patch", "delete", "options"):
            if hasattr(endpoint, name):
                yield Part(f"{name.upper()} {path}", getattr(endpoint, name), Role.FRAMEWORK)
    else:
        called = getattr(endpoint, "dispatch", endpoint)  # of Starlette's `WebSocketEndpoint`
        yield Part(f"{methods} {path}", called, Role.FRAMEWORK)
    if (dependant := getattr(served, "dependant", None)) is not None:
        yield from _dependency_parts(dependant, seen)


def _dependency_parts(dependant: Any, seen: set[Any]) -> Iterator[Part]:
    """Yield the dependencies, innermost first as they are called, each once an app."""
    for each in dependant.dependencies:
        yield from _dependency_parts(each, seen)
        call = each.call
        # By identity as well: a mounted app calls the original of what is lifted here.
        key = (
            call if getattr(type(call), "__hash__", None) else id(call),
            isinstance(call, Lifted),
        )
        if key in seen:
            continue
        seen.add(key)
        func = call._func if isinstance(call, Lifted) else call
        at_once = getattr(getattr(each, "concurrency", None), "max_concurrency", None)
        if isinstance(call, LiftedFunction):
            yield Part("dependency", func, Role.ENDPOINT, at_once)
            continue
        if kind_for_fastapi(func) is not kind(func):
            func = inspect.unwrap(func)  # FastAPI looks at what is wrapped
        yield Part("dependency", func, Role.FRAMEWORK, at_once)
        if kind(func) in GENERATORS:
            yield Part("teardown", func, Role.FRAMEWORK)


def _mounted_parts(mount: Any, prefix: str, seen: set[Any]) -> Iterator[Part]:
    where = prefix + getattr(mount, "path", "") + getattr(mount, "host", "")
    app = getattr(mount, "_base_app", mount.app)
    if isinstance(app, (Starlette, Router)):
        yield from _inner_parts(app, app.routes, where, seen)
    elif isinstance(app, StaticFiles):
        yield Part(f"files {where}", app.lookup_path, Role.FRAMEWORK)
    else:
        yield Part(f"mount {where}", app, Role.FRAMEWORK)


def _lifespan_parts(context: Any) -> Iterator[Part]:
    """Yield what a lifespan runs; FastAPI nests those of included routers in one of its own."""
    func = inspect.unwrap(context)
    if not _is_frameworks(func) and not _is_frameworks(type(context)):
        yield Part("lifespan", func, Role.LIFECYCLE)
    elif inspect.isfunction(func):
        for cell in func.__closure__ or ():
            yield from _lifespan_parts(cell.cell_contents)
    else:
        router = getattr(context, "_router", None)
        for what in ("startup", "shutdown"):
            for handler in getattr(router, f"on_{what}", ()):
                yield Part(what, handler, Role.LIFECYCLE)


def _is_frameworks(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in _FRAMEWORKS
