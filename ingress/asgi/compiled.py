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
from contextlib import AsyncExitStack
from typing import Any

from fastapi import params
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.asgi.compat import (
    FILE_STACK,
    FUNCTION_STACK,
    REQUEST_STACK,
    TELEMETRY,
    embeds_body,
    is_original,
    request_with_body,
    routing,
    why_not_compiled,
    wrap_app_handling_exceptions,
)
from ingress.asgi.rendering import encoder, makes_events, renderer
from ingress.asgi.steps import Shared, Steps, Unfit, require
from ingress.asgi.streams import is_stream, stream_renderer, values_for_stream

_ABSENT = object()


def compiled_app(route: Any) -> ASGIApp:
    """Return the compiled `app` of an `APIRoute`, or of an included one.

    Returns `route.app` itself if the route is unfit.
    """
    try:
        return _compiled(route)
    except Unfit:
        full: ASGIApp = route.app
        return full


def is_compiled(app: ASGIApp | None) -> bool:
    """Return whether this is the compiled `app` of a route."""
    return getattr(app, "__module__", None) == __name__


def _compiled(route: Any) -> ASGIApp:
    _check(route)
    full: ASGIApp = route.app
    overridden: Any = route.dependency_overrides_provider or _NeverOverridden
    streams = is_stream(route)
    steps = Steps(
        route.dependant,
        embeds_body=embeds_body(route),
        endpoint=values_for_stream if streams else None,
    )
    bare = steps.bare
    reads_body = route.body_field is not None
    render = stream_renderer(route, steps) if streams else renderer(route, steps)
    encode = None if steps.takes_shared or streams else encoder(route, steps)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if (
            overridden.dependency_overrides
            or scope.get(TELEMETRY) is not None
            or FILE_STACK not in scope
            or not steps.are_current()
        ):
            return await full(scope, receive, send)
        first: Message = {}
        body: Any = None
        if reads_body:
            first, again = await _first_message(scope, receive)
            body = _json(first)
            if body is _ABSENT:
                return await full(scope, again, send)
        if steps.takes_request:
            request = _request(scope, receive, send, first, body)
            answer = in_stacks(request, body)
            return await wrap_app_handling_exceptions(answer, request)(scope, receive, send)
        started = False
        try:
            shared = Shared(None) if steps.takes_shared else None
            result = await (steps.run(scope, body, shared) if bare is None else bare())
            if encode is None or isinstance(result, Response):
                answer = await render(scope, result, shared)
            else:
                content = encode(scope, result)
                started = True
                await send(_json_start(content))
                return await send({"type": "http.response.body", "body": content})
        except Exception as error:
            answer = _raising(error, started=started)
        # Runs the user's exception handlers. They cannot answer once the response has started.
        request = _request(scope, receive, send, first, body)
        sent = _discard if started else send
        return await wrap_app_handling_exceptions(answer, request)(scope, receive, sent)

    def in_stacks(request: Request, body: Any) -> ASGIApp:
        # User code that gets the request may use FastAPI's exit stacks in its scope.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with AsyncExitStack() as scope[REQUEST_STACK]:
                async with AsyncExitStack() as scope[FUNCTION_STACK]:
                    shared = Shared(request)
                    response = await render(scope, await steps.run(scope, body, shared), shared)
                await response(scope, receive, send)

        return answer

    return app


def _check(route: Any) -> None:
    original = getattr(route, "original_route", route)
    require(not why_not_compiled())
    # Not a class of the user's, which may have wrapped or replaced its app.
    require(type(original).__init__ is APIRoute.__init__)
    cls = getattr(original, "__ingress_base__", type(original))
    require(cls.get_route_handler is APIRoute.get_route_handler)
    # Nor functions of FastAPI that a tracer has replaced.
    require(all(map(_is_fastapi_s, _REPLACED)))
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


def _raising(error: Exception, *, started: bool) -> ASGIApp:
    """Return an app that raises `error`, after the start of its response if `started`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send({"type": "http.response.start"})
        raise error

    return app


async def _discard(message: Message) -> None:
    pass


def _json_start(body: bytes) -> Message:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


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
            except Exception as error:
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
    except Exception:  # FastAPI parses it again, and answers any error
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


class _NeverOverridden:
    dependency_overrides: Any = None


_REPLACED = (
    "APIRoute.get_route_handler", "get_request_handler", "request_response", "solve_dependencies",
    "run_endpoint_function", "serialize_response", "jsonable_encoder",
)  # fmt: skip
