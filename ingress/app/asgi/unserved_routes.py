"""Routes that no deployment serves: the warnings that name them, and their answers.

They would vanish without a word:

the route is                                           the warning says
a method of a class that no deployment serves          decorate the class, or move the method
a method of the class, on an app or router that        serve that app, or include the router
  the deployment does not serve
none at all                                            add one, or give the right app
none, and no app or `__call__` either                  define one of them

`uvicorn hello:app` and `fastapi dev hello.py` find the app, not the application that `.bind()`
made. Its methods have no instance there: FastAPI would ask the client for the parameter `self`. So
they are refused.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeGuard
from weakref import WeakSet

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.app.asgi.compat import ServedRoute
from ingress.app.asgi.dependencies import nodes_of_route
from ingress.app.asgi.methods import Methods, classes_of
from ingress.app.asgi.routes import RouteTree, served_routes
from ingress.core.base.foreign import dict_of
from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import code_of, name_of
from ingress.exceptions import RouteNotServedWarning
from ingress.telemetry.logs import logger


def warn_of_routes_not_served(app: Starlette | Router, cls: type, tree: RouteTree) -> None:
    """Warn of each route that `tree`, which `cls` serves for `app`, leaves out by mistake."""
    for func in tree.foreign:
        if not _is_served(func, app):
            _warn(
                f"is a route of the app of {name_of(cls)}, but no deployment serves its class: "
                "its requests are answered with 404. Move the method to "
                f"{name_of(cls)}, or put @serve.ingress(...) on its own class.",
                func,
            )
    elsewhere = list(_elsewhere(app, cls, tree))
    for name, other, func in elsewhere:
        including = f", or app.include_router({name})" if isinstance(other, Router) else ""
        _warn(
            f"is a route of `{name}`, which {name_of(cls)} does not serve: its requests are "
            f"answered with 404. Write @serve.ingress({name}){including}.",
            func,
        )
    if not elsewhere:
        _warn_if_no_route(app, cls)


def _elsewhere(
    app: Starlette | Router, cls: type, tree: RouteTree
) -> Iterator[tuple[str, Starlette | Router, Callable[..., object]]]:
    """Yield methods of the class that are routes of other apps only, after names and apps."""
    for name, other in _apps_beside(cls):
        for served in served_routes(other.routes) if other is not app else ():
            func = getattr(served, "endpoint", None)
            if (
                func is not None
                and id(func) not in tree.endpoints
                and tree.methods.owns(func)
                and not _is_served(func, other)
            ):
                yield name, other, func


def _warn_if_no_route(app: Starlette | Router, cls: type) -> None:
    """Log, once, a class that has methods and whose app has no route but FastAPI's documentation.

    Not a warning: handles may call the methods.
    """
    methods = [value for name, value in vars(cls).items() if _is_public_method(name, value)]
    endpoints = [getattr(route, "endpoint", None) for route in app.routes]
    is_empty = all(getattr(each, "__module__", "") == "fastapi.applications" for each in endpoints)
    if methods and is_empty and methods[0] not in _logged:
        _logged.add(methods[0])
        logger.warning(
            "%s is a method of %s, whose app has no route: all HTTP requests are answered with "
            "404. Give the method a route, for example @app.get('/')",
            _named(methods[0]),
            name_of(cls),
        )


def log_if_not_callable(target: object) -> None:
    """Log, once, a class that is served by HTTP and has no app and no `__call__`.

    Not by `serve.run`, where handles may call its methods.
    """
    if (
        inspect.isclass(target)
        and not hasattr(target, "__ingress_spec__")
        and not any("__call__" in vars(base) for base in target.__mro__)
        and target not in _logged
    ):
        _logged.add(target)
        logger.warning(
            "%s.%s has no `__call__` and no routes: all HTTP requests are answered with 500. "
            "Define `__call__`, or use @serve.ingress(app) and routes",
            target.__module__,
            name_of(target),
        )


def _is_public_method(name: str, value: object) -> TypeGuard[FunctionType]:
    return type(value) is FunctionType and not name.startswith("_") and name not in _CALLED


_CALLED = ("reconfigure", "check_health")
"""Methods that a replica calls itself."""


_APPS = (Starlette, Router)


def _is_served(func: Callable[..., object], app: object) -> bool:
    """Return whether a deployment with this app has the method."""
    return any(Methods(cls).owns(func) for cls in classes_of(app))


def _apps_beside(cls: type) -> Iterator[tuple[str, Starlette | Router]]:
    """Yield the apps and routers, with their names, of the modules of a class and its bases."""
    for module in dict.fromkeys(base.__module__ for base in cls.__mro__):
        named: list[tuple[str, Any]] = list(dict_of(sys.modules.get(module)).items())
        yield from ((name, app) for name, app in named if issubclass(type(app), _APPS))


def _warn(text: str, func: Callable[..., object]) -> None:
    warnings.warn_explicit(
        f"{_named(func)} {text}", RouteNotServedWarning, *_place(func), registry=_said
    )


def _named(func: Callable[..., object]) -> str:
    file, line = _place(func)
    return f"{name_of(func)} ({file}:{line})"


def _place(func: Callable[..., object]) -> tuple[str, int]:
    code = code_of(func)
    return (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)


_said: dict[str | tuple[str, type[Warning], int], int] = {}
"""Warnings that were given: a deployment is bound again by `ingress explain` and `openapi()`."""

_logged: WeakSet[FunctionType | type] = WeakSet()
"""The methods and classes that the log has named."""


_INTERNAL_ERROR = 1011  # RFC 6455's registry of close codes
_LONGEST_REASON = 123  # bytes, RFC 6455


def refusal(app: Any, scope: Scope) -> ASGIApp | None:
    """Return an app that refuses the connection, `None` unless a method would have to answer it.

    Logs the reason, at the start-up of the app already.
    """
    classes = list(map(Methods, classes_of(app)))
    is_start = scope["type"] == "lifespan"
    for served in served_routes(app.routes) if classes else ():
        calls = [_endpoint(served), *(node.call for node in nodes_of_route(served))]
        owner = next((each.cls for each in classes if any(map(each.takes_self, calls))), None)
        if owner is not None and (is_start or served.matches(scope)[0] is Match.FULL):
            told = _told(app, owner)
            logger.error("%s", told)
            return None if is_start else _answering(told)
    return None


def hide_self(app: Starlette, cls: type) -> None:
    """Take `self` out of the query parameters of the class's methods in the user's app.

    Extensions make clients, tools and documents from `app.routes`, long before there is a replica.
    """
    methods = Methods(cls)
    for served in served_routes(app.routes):
        dependant = getattr(served, "dependant", None)
        if dependant is not None and methods.takes_self(_endpoint(served)):
            name = next(iter(signature_of(served.endpoint).parameters), None)
            dependant.query_params[:] = [
                field for field in dependant.query_params if field.name != name
            ]


def _endpoint(served: ServedRoute) -> Callable[..., object] | None:
    return getattr(served, "endpoint", None)


def _answering(told: str) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            reason = told.encode()[:_LONGEST_REASON].decode(errors="ignore")
            await receive()
            await send({"type": "websocket.close", "code": _INTERNAL_ERROR, "reason": reason})
        else:
            await PlainTextResponse(told, status_code=500)(scope, receive, send)

    return answer


def _told(app: Starlette, cls: type) -> str:
    names = (cls.__module__, *sys.modules)
    modules = [each for each in map(sys.modules.get, names) if each is not None]
    this = _name(modules, lambda value: value is app) or "This app"
    target = _name(modules, lambda value: _is_application_of(value, cls))
    fix = (
        f"Serve {target}: `ingress run {target}`, `uvicorn {target}` or `fastapi run -e {target}`."
        if target
        else f"Bind the deployment, application = {cls.__name__}.bind(), and serve application."
    )
    return f"{this} is served without its deployment {cls.__name__}, which has its methods. {fix}"


def _name(modules: Iterable[ModuleType], is_it: Callable[[object], bool]) -> str | None:
    """Return MODULE:NAME of the first value that `is_it` accepts."""
    found = (
        f"{module.__name__}:{name}"
        for module in modules
        for name, value in list(getattr(module, "__dict__", {}).items())
        if is_it(value)
    )
    return next(found, None)


def _is_application_of(value: Any, cls: type) -> bool:
    # By its name: declarations stand above this module. Not by its attributes, because those of a
    # lazy module may import it.
    kind = type(value)
    is_application = kind.__name__ == "Application" and kind.__module__.startswith("ingress.")
    return is_application and value.deployment.func_or_class is cls
