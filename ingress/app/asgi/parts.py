"""The user's callables in an app, as its replicas serve it, for `ingress explain`.

    route, WebSocket                     ENDPOINT if it is bound, else FRAMEWORK
    dependency, its teardown             ENDPOINT if a replica plans it, else FRAMEWORK; once an app
    exception handler                    FRAMEWORK
    the routes of a mounted app          FRAMEWORK: no replica binds them
    an app, middleware, start-up         ASGI

No part is called: the parts are read from the objects that answer requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Host, Mount, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ingress.app.asgi.compat import Dependant, ServedRoute, base_app
from ingress.app.asgi.compiled import CompiledRoute
from ingress.app.asgi.dependencies import Lifted, Planned, nodes_of_route, original_of, target_of
from ingress.app.asgi.methods import GENERATORS
from ingress.app.asgi.routes import api_route, served_routes
from ingress.core.execution.execution import (
    Role,
    kind,
    kind_for_fastapi,
    name_of,
    without_partials,
)

_FRAMEWORKS = ("fastapi", "starlette", "ingress")


@dataclass(frozen=True, slots=True)
class Part:
    """One callable of the user's: its description, and its role in `execution`.

    `at_once` is the number of its concurrent calls, if something other than threads limits it.
    `is_compiled` says of a FastAPI route whether it is compiled; `None` for all other callables.
    `guards` are the names of its dependencies, in the order in which FastAPI calls them.
    """

    what: str
    func: Callable[..., object]
    role: Role
    at_once: int | None = None
    is_compiled: bool | None = None
    guards: tuple[str, ...] = ()


def app_parts(app: ASGIApp, router: Router) -> list[Part]:
    """Return the parts of an app whose routes are bound in `router`, in the order of a request."""
    if not isinstance(app, Starlette):
        return [Part("ASGI app", app, Role.ASGI)]
    lifespan = dict.fromkeys(_lifespan_parts(app.router.lifespan_context))
    return [*lifespan, *_Routes().parts(app, router.routes)]


class _Routes:
    """One walk over the routes of an app and of its mounts."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, bool]] = set()

    def parts(
        self, app: Starlette | Router, routes: Sequence[BaseRoute], prefix: str = ""
    ) -> Iterator[Part]:
        """Yield all parts but the lifespan, which Starlette does not run for a mounted app."""
        for middleware in getattr(app, "user_middleware", ()):
            yield from _middleware_parts(middleware)
        for served in served_routes(routes):
            yield from self._route(served, prefix)
        handlers = dict.fromkeys(getattr(app, "exception_handlers", {}).values())
        users = (each for each in handlers if not _is_frameworks(each))
        yield from (Part("error handler", each, Role.FRAMEWORK) for each in users)

    def _route(self, served: ServedRoute, prefix: str) -> Iterator[Part]:
        original = getattr(served, "original_route", served)
        if isinstance(original, (Mount, Host)):
            yield from self._mounted(original, prefix)
            return
        endpoint = getattr(served, "endpoint", None)
        if endpoint is None or getattr(endpoint, "__module__", None) == "fastapi.applications":
            return  # FastAPI's documentation
        path = prefix + served.path
        methods = " ".join(sorted(getattr(served, "methods", None) or ())) or "any"
        what = f"{'WS' if isinstance(original, WebSocketRoute) else methods} {path}"
        route = api_route(served)
        compiled = None if route is None else isinstance(getattr(route, "app", None), CompiledRoute)
        nodes = tuple(nodes_of_route(served))
        guards = tuple(name_of(original_of(each.call)) for each in nodes)
        target = target_of(served)
        if target is not None:
            yield Part(what, target.func, Role.ENDPOINT, is_compiled=compiled, guards=guards)
        elif inspect.isclass(endpoint) and issubclass(endpoint, HTTPEndpoint):
            for name in ("get", "head", "post", "put", "patch", "delete", "options"):
                if hasattr(endpoint, name):
                    yield Part(f"{name.upper()} {path}", getattr(endpoint, name), Role.FRAMEWORK)
        else:
            called = getattr(endpoint, "dispatch", endpoint)  # of Starlette's `WebSocketEndpoint`
            yield Part(what, called, Role.FRAMEWORK, is_compiled=compiled, guards=guards)
        yield from self._dependencies(nodes)

    def _dependencies(self, nodes: Iterable[Dependant]) -> Iterator[Part]:
        """Yield the dependencies in the order of their calls, innermost first, each once an app."""
        for each in nodes:
            call: Any = each.call
            is_lifted = isinstance(call, Lifted)
            # A mounted app calls the original of a lifted dependency.
            key = (id(original_of(call)), is_lifted)
            if key in self._seen:
                continue
            self._seen.add(key)
            func = call.target.func if is_lifted else call
            is_planned = isinstance(call, Planned)
            if not is_planned and kind_for_fastapi(func) is not kind(func):
                # FastAPI looks at the wrapped function.
                func = inspect.unwrap(without_partials(func))
            role = Role.ENDPOINT if is_planned else Role.FRAMEWORK
            at_once = getattr(getattr(each, "concurrency", None), "max_concurrency", None)
            yield Part("dependency", func, role, at_once)
            if kind(func) in GENERATORS:
                yield Part("teardown", func, role)

    def _mounted(self, mount: Mount | Host, prefix: str) -> Iterator[Part]:
        where = prefix + getattr(mount, "path", "") + getattr(mount, "host", "")
        app = base_app(mount) if isinstance(mount, Mount) else mount.app
        if isinstance(app, (Starlette, Router)):
            yield from self.parts(app, app.routes, where)
        elif isinstance(app, StaticFiles):
            yield Part(f"files {where}", app.lookup_path, Role.FRAMEWORK)
        else:
            yield Part(f"mount {where}", app, Role.ASGI)


def _middleware_parts(middleware: Middleware) -> Iterator[Part]:
    cls: Any = middleware.cls
    func: Any = middleware.kwargs.get("dispatch") or getattr(cls, "dispatch", None)
    if func is None:  # a middleware class, or a factory
        func = cls.__call__ if inspect.isclass(cls) else cls
    if not _is_frameworks(func):
        yield Part("middleware", func, Role.ASGI)


def _lifespan_parts(context: Callable[..., object]) -> Iterator[Part]:
    """Yield the parts of a lifespan; FastAPI nests those of included routers in its own."""
    func = inspect.unwrap(context)
    if not _is_frameworks(func) and not _is_frameworks(type(context)):
        yield Part("lifespan", func, Role.ASGI)
    elif inspect.isfunction(func):
        for cell in func.__closure__ or ():
            yield from _lifespan_parts(cell.cell_contents)
    else:
        routers = [
            each for each in getattr(context, "__dict__", {}).values() if isinstance(each, Router)
        ]
        for what in ("startup", "shutdown"):
            handlers = (each for router in routers for each in getattr(router, f"on_{what}", ()))
            yield from (Part(what, each, Role.ASGI) for each in handlers)


def _is_frameworks(value: object) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in _FRAMEWORKS
