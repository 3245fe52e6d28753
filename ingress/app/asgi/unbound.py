"""The answer of a FastAPI app that a server serves by itself, without its deployment.

`uvicorn hello:app` and `fastapi dev hello.py` find the app, not the application that `.bind()`
made. Its methods have no instance there: FastAPI would ask the client for the parameter `self`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.app.asgi.compat import ServedRoute
from ingress.app.asgi.dependencies import nodes_of_route
from ingress.app.asgi.methods import Methods, classes_of
from ingress.app.asgi.routes import served_routes
from ingress.core.base.signatures import signature_of

logger = logging.getLogger("ingress")

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
