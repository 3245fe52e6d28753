"""A route's `app`, compiled: it answers most requests in place of FastAPI's own handler.

At every request, FastAPI determines the needs of its endpoint: exit stacks, a span, a response that
dependencies may write to, the headers and cookies, the media type of a body. For most endpoints
this never changes, so it is determined once, when the app is bound:

    body     as JSON, if the endpoint or a dependency has one     no user code runs yet
    steps    read a call's parameters, call it: dependencies, innermost first, then the endpoint
    render   to JSON, by the route's response class, or as a stream of items

FastAPI handles all other cases: an unfit route keeps its `app`, and a request whose body is not
simply JSON is passed to that `app` as a whole, because no user code has run yet. FastAPI's own
fields and functions also validate values, word refusals and render models.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from fastapi import params
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.app.asgi.compat import (
    FILE_STACK,
    FUNCTION_STACK,
    REQUEST_STACK,
    TELEMETRY,
    embeds_body,
    is_original,
    reads_by,
    request_body_to_args,
    request_with_body,
    routing,
    why_not_compiled,
    wrap_app_handling_exceptions,
)
from ingress.app.asgi.received_headers import request_params_to_args
from ingress.app.asgi.rendering import (
    encoder,
    is_stream,
    makes_events,
    renderer,
    stream_renderer,
    values_for_stream,
)
from ingress.app.asgi.responses import WITHOUT_SCOPE
from ingress.app.asgi.steps import Overridden, Progress, Shared, Steps, require
from ingress.app.asgi.wrapped import is_fastapis

_ABSENT = object()
_IS_JSON = (b"content-type", b"application/json")


Enter = Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]]
"""A function that runs an app inside of FastAPI's layers."""


class CompiledRoute:
    """The compiled `app` of an `APIRoute`, or of an included one. Thread-safe: immutable once made.

    Raises `Unfit` if FastAPI must answer the route.
    """

    __slots__ = ("_encode", "_full", "_overridden", "_provider", "_reads_body", "_render", "_steps")

    def __init__(self, route: Any) -> None:
        _check(route)
        streams = is_stream(route)
        self._full: ASGIApp = route.app
        provider: Any = route.dependency_overrides_provider
        self._provider = provider
        self._overridden: Any = getattr(provider, "users", provider)
        self._reads_body = route.body_field is not None
        self._steps = steps = Steps(
            route.dependant,
            embeds_body=embeds_body(route),
            endpoint=values_for_stream if streams else None,
        )
        self._render = stream_renderer(route, steps) if streams else renderer(route, steps)
        self._encode = None if steps.takes_shared or streams else encoder(route, steps)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if FILE_STACK in scope:
            await self.answer(scope, receive, send, _run)
        else:
            await self._full(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send, enter: Enter) -> None:
        """Answer a request, and `enter` FastAPI's layers for all that needs them.

        These are errors, for which the user may have handlers, and user code that gets the scope.
        """
        steps = self._steps
        if (
            (self._overridden is not None and self._overridden.dependency_overrides)
            or scope.get(TELEMETRY) is not None
            or not steps.are_current()
        ):
            return await enter(self._full, scope, receive, send)
        first: Message = {}
        body: Any = None
        if self._reads_body:
            first, again = await _first_message(scope, receive)
            body = _json(first)
            if body is _ABSENT:
                return await enter(self._full, scope, again, send)
        if steps.takes_request:
            return await enter(self._handled(None, first, body), scope, receive, send)
        has_started = False
        shared = Shared(None) if steps.takes_shared else None

        def watched(message: Message) -> Awaitable[None]:
            nonlocal has_started
            has_started = True
            return send(message)

        try:
            result = await (
                steps.bare() if steps.bare else steps.run(scope, body, shared, self._provider)
            )
            if self._encode is not None and not isinstance(result, Response):
                content = self._encode(scope, result)
                headers = [(b"content-length", b"%d" % len(content)), _IS_JSON]
                has_started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                return await send({"type": "http.response.body", "body": content})
            rest: ASGIApp = await self._render(scope, result, shared)
            if type(rest).__call__ in WITHOUT_SCOPE:
                return await rest(scope, receive, watched)
        except Overridden as error:
            rest = self._in_stacks(None, first, body, shared, error.progress)
        except BaseException as error:  # the user's layers get it, as from FastAPI's handler
            rest = _raising(error, has_started=has_started)
        # The user's handlers run after the start of a response, too, but cannot answer any more.
        sent = _discard if has_started else send
        return await enter(self._handled(rest, first, body), scope, receive, sent)

    def _handled(self, rest: ASGIApp | None, first: Message, body: Any) -> ASGIApp:
        """Return an app that runs the rest, by default all, and the user's exception handlers."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            request = _request(scope, receive, send, first, body)
            answer = rest or self._in_stacks(request, first, body)
            await wrap_app_handling_exceptions(answer, request)(scope, receive, send)

        return app

    def _in_stacks(
        self,
        request: Request | None,
        first: Message,
        body: Any,
        begun: Shared | None = None,
        progress: Progress | None = None,
    ) -> ASGIApp:
        # User code that gets the request may use FastAPI's exit stacks in its scope.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with AsyncExitStack() as scope[REQUEST_STACK]:
                async with AsyncExitStack() as scope[FUNCTION_STACK]:
                    shared = begun or Shared(None)
                    shared.request = request or _request(scope, receive, send, first, body)
                    result = await self._run(scope, body, shared, progress)
                    response = await self._render(scope, result, shared)
                await response(scope, receive, send)

        return answer

    async def _run(self, scope: Scope, body: Any, shared: Shared, progress: Progress | None) -> Any:
        try:
            return await self._steps.run(scope, body, shared, self._provider, progress)
        except Overridden as error:
            return await self._steps.run(scope, body, shared, self._provider, error.progress)


def _check(route: Any) -> None:
    original = getattr(route, "original_route", route)
    require(not why_not_compiled())
    # Not a class of the user's, which may have wrapped or replaced its app.
    require(type(original).__init__ is APIRoute.__init__)
    require(is_fastapis(route.app, route.dependant))
    cls = getattr(original, "__ingress_base__", type(original))
    require(cls.get_route_handler is APIRoute.get_route_handler)
    # Nor what a tracer or the user has replaced in FastAPI or Starlette.
    require(routing.Request is Request and all(map(_is_fastapi_s, _REPLACED)))
    require(reads_by(request_params_to_args, request_body_to_args))
    require(getattr(route, "max_body_size", None) is None)
    require(not makes_events(route) or (is_stream(route) and _is_fastapi_s("format_sse_event")))
    require(route.body_field is None or type(route.body_field.field_info) is params.Body)


def _is_fastapi_s(name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    holder = getattr(routing, owner) if owner else routing
    return is_original(getattr(holder, attribute, None))


def _request(scope: Scope, receive: Receive, send: Send, first: Message, body: Any) -> Request:
    if first:
        return request_with_body(scope, receive, send, first.get("body", b""), body)
    return Request(scope, receive, send)


def _raising(error: BaseException, *, has_started: bool) -> ASGIApp:
    """Return an app that raises `error`, after the start of its response if that `has_started`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_started:
            await send({"type": "http.response.start"})
        raise error

    return app


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def _discard(message: Message) -> None:
    pass


# Bodies.


async def _first_message(scope: Scope, receive: Receive) -> tuple[Message, Receive]:
    """Return the first message of a JSON body, and a `receive` that returns that message again.

    Returns an empty message if FastAPI must decide: another media type may be JSON, too.
    """
    for name, value in scope["headers"]:
        if name == b"content-type":
            if value != b"application/json":
                break
            try:
                message = await receive()
            except Exception as error:  # of any server: FastAPI gets it from the `receive`
                return {}, _again(receive, error)
            return message, _again(receive, message)
    return {}, receive


def _json(message: Message) -> Any:
    """Return the parsed body, `_ABSENT` if it is incomplete or not JSON."""
    if message.get("type") != "http.request" or message.get("more_body"):
        return _ABSENT
    body = message.get("body", b"")
    try:
        return json.loads(body) if type(body) is bytes else _ABSENT
    except Exception:  # of any parser: FastAPI parses it again, and answers the error
        return _ABSENT


def _again(receive: Receive, first: Message | Exception) -> Receive:
    """Return a `receive` that returns or raises `first` once, then continues with `receive`."""
    left = [first]

    async def receive_again() -> Message:
        if not left:
            return await receive()
        outcome = left.pop()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return receive_again


_REPLACED = (
    "APIRoute.get_route_handler", "get_request_handler", "request_response", "solve_dependencies",
    "run_endpoint_function", "serialize_response", "jsonable_encoder", "Request.__init__",
    "Request.stream", "Request.body", "Request.json", "Response.__init__", "Response.init_headers",
    "Response.render", "JSONResponse.__init__", "JSONResponse.render",
)  # fmt: skip
