"""The user's layers for CORS around an answer that the server makes in the app's place.

A browser hides an answer without CORS headers from its page, the status too. So such an answer
passes the `CORSMiddleware` that the request would have passed in the app, the outermost first:

    of the app              `app.add_middleware`, or around `app.middleware_stack`
    around the app          `@serve.ingress(CORSMiddleware(app, ...))`, below other layers too
    of the request's route  a mounted app's, or that of a router, a mount, a route

Starlette's own code computes the headers, or that of a subclass; other middleware does not run. A
preflight gets the answer of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Scope

from ingress.app.asgi.layer import Layer
from ingress.core.base.foreign import sharing
from ingress.core.execution.execution import call_inline
from ingress.telemetry.logs import logger

_Layer = Callable[[ASGIApp], ASGIApp]


def has_origin(scope: Scope) -> bool:
    """Return whether the request is a browser's, for a page: only then CORS plays a role."""
    return scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"])


def allowing_origin(app: Any, prefix: str, scope: Scope, response: Response) -> Response:
    """Return a response as it leaves the app's layers for CORS; without any, the same.

    `scope` is the server's, `prefix` that of the application.
    """
    if app is None or not has_origin(scope):
        return response
    root_path = scope.get("root_path", "") + prefix.rstrip("/")
    if scope["path"].startswith(root_path):  # on Ray the scope has the prefix already
        scope = {**scope, "root_path": root_path}
    try:
        return call_inline(_allowed, app, scope, response)
    except Exception:  # of a user's subclass
        logger.debug("the layers for CORS of %r failed for a refusal", app, exc_info=True)
        return response


def _allowed(app: Any, scope: Scope, response: Response) -> Response:
    whole: ASGIApp = response
    for layer in reversed(list(_layers(app, {**scope}))):
        whole = layer(whole)
    if whole is response:
        return response
    sent: list[Message] = []

    async def run() -> None:
        await whole(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    # In one step: the answer waits for nothing, and a subclass that waits does not get its replica.
    running = run()
    try:
        running.send(None)
    except StopIteration:
        pass
    else:
        running.close()
        raise RuntimeError("it waits, and a refusal cannot")
    start, *rest = sent
    made = Response(b"".join(each.get("body", b"") for each in rest), start["status"])
    made.raw_headers = list(start["headers"])
    return made


def _layers(app: Any, scope: Scope) -> Iterator[_Layer]:
    """Yield the layers on the way of a request, the outermost first."""
    if isinstance(app, CORSMiddleware):
        yield partial(_copy, app)
    if isinstance(app, Starlette):
        own = vars(app)
        if (stack := own["middleware_stack"]) is not None:
            yield from _layers(stack, scope)
            return
        for each in own["user_middleware"]:
            if isinstance(each.cls, type) and issubclass(each.cls, CORSMiddleware):
                yield partial(_make, each)
            elif each.cls is Layer and isinstance(each.kwargs["around"], CORSMiddleware):
                yield partial(_copy, each.kwargs["around"])
        yield from _layers(own["router"], scope)
    elif isinstance(app, Router):
        yield from _layers(app.middleware_stack, scope)
        for route in list(app.routes):
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                yield from _layers(getattr(route, "app", None), scope)
                return
    elif (inner := getattr(app, "app", None)) is not None:
        yield from _layers(inner, scope)


def _make(middleware: Middleware, inner: ASGIApp) -> ASGIApp:
    made: ASGIApp = middleware.cls(inner, *middleware.args, **middleware.kwargs)
    return made


def _copy(layer: CORSMiddleware, inner: ASGIApp) -> ASGIApp:
    made: ASGIApp = sharing(layer, {"app": inner})
    return made
