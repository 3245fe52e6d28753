"""A route's `app`, compiled: what answers most requests in place of FastAPI's own handler.

FastAPI finds out at every request what its endpoint needs: exit stacks, a span, a response that
dependencies may write to, the headers and cookies, the media type of a body. For most endpoints
that never changes, so it is found out once, when the app is bound:

    read     path, query, header and cookie parameters, a JSON body     nothing of the user's runs
    call     dependencies, innermost first, then the endpoint
    render   to JSON

Everything out of the ordinary is FastAPI's: a route that is unfit keeps its `app`, and a request
that does not validate is given to it whole, since nothing has happened yet. So every refusal is
FastAPI's own. What validates a value and renders a model are FastAPI's own fields, too.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import fastapi.routing
from fastapi import params
from fastapi.datastructures import DefaultPlaceholder
from fastapi.dependencies.models import Dependant
from fastapi.encoders import jsonable_encoder
from fastapi.routing import APIRoute, serialize_response
from starlette._exception_handler import wrap_app_handling_exceptions
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.asgi.steps import JSON_SCALARS, Step, Unfit, add_steps, read_parameters, require
from ingress.asgi.telemetry import TELEMETRY

NEWEST_KNOWN = (0, 165)
"""The FastAPI whose handler this was last compared with. With a newer one no route is fit."""


def compiled_app(route: Any) -> ASGIApp:
    """Return what stands in for the `app` of an `APIRoute`, or of one as it was included.

    That is `route.app` itself if the route is unfit.
    """
    try:
        return _compiled(route)
    except Unfit:
        full: ASGIApp = route.app
        return full


def _compiled(route: Any) -> ASGIApp:
    _check(route)
    full: ASGIApp = route.app
    overridden: Any = route.dependency_overrides_provider or _NEVER_OVERRIDDEN
    steps: list[Step] = []
    add_steps(route.dependant, steps)
    takes_request = any(step.request_names for step in steps)
    body = _body_field(route)
    render = _renderer(route)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if overridden.dependency_overrides or scope.get(TELEMETRY) is not None:
            return await full(scope, receive, send)
        request: Request | None = None
        first: Message = {}
        again = receive
        started = False
        answer: ASGIApp
        try:
            given = read_parameters(scope, steps)
            if body is not None and given is not None:
                first, again = await _first_message(scope, receive)
                if not _read_body(body, first, given[-1]):
                    given = None
            if given is not None:
                if takes_request:
                    request = _request(scope, receive, send, first)
                    for step, values in zip(steps, given, strict=True):
                        for name in step.request_names:
                            values[name] = request
                for step, values in zip(steps, given, strict=True):
                    result = await step.func(**values)
                    if step.name is not None:
                        given[step.parent][step.name] = result
                answer = result if isinstance(result, Response) else await render(scope, result)
                if type(answer) is bytes:
                    started = True
                    await send(_json_start(answer))
                    return await send({"type": "http.response.body", "body": answer})
        except Exception as error:
            answer = _raising(error, started=started)
        else:
            if given is None:
                return await full(scope, again, send)
        # The user's exception handlers. For a response that has started they come too late.
        request = request or _request(scope, receive, send, first)
        sent = _discard if started else send
        return await wrap_app_handling_exceptions(answer, request)(scope, receive, sent)

    return app


def _check(route: Any) -> None:
    original = getattr(route, "original_route", route)
    require(tuple(map(int, fastapi.__version__.split(".")[:2])) <= NEWEST_KNOWN)
    # Not a class of the user's, which may have put something before its app, or in its place.
    require(type(original).__init__ is APIRoute.__init__)
    require(type(original).get_route_handler is APIRoute.get_route_handler)
    require(getattr(route, "max_body_size", None) is None)
    require(not getattr(route, "is_json_stream", False))
    status = route.status_code
    require(status is None or (status >= 200 and status not in (204, 205, 304)))


def _request(scope: Scope, receive: Receive, send: Send, first: Message) -> Request:
    request = Request(scope, receive, send)
    if first:
        request._body = first.get("body", b"")  # where it keeps what it has read
    return request


def _raising(error: Exception, *, started: bool) -> ASGIApp:
    """Return an app that fails as one that has failed did."""

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


def _body_field(route: Any) -> Any:
    """Return the field of the endpoint's JSON body, `None` if it has no body."""
    if route.body_field is None:
        return None
    fields = route.dependant.body_params
    require(len(fields) == 1 and not route._embed_body_fields)
    require(type(fields[0].field_info) is params.Body)
    require(not any(each.body_params for each in _below(route.dependant)))
    return fields[0]


def _below(dependant: Dependant) -> Iterator[Dependant]:
    for each in dependant.dependencies:
        yield each
        yield from _below(each)


async def _first_message(scope: Scope, receive: Receive) -> tuple[Message, Receive]:
    """Return the first message of a JSON body, and a `receive` that begins with it once more.

    An empty message stands for what FastAPI must look at: another media type may be JSON, too.
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


def _read_body(field: Any, message: Message, values: dict[str, Any]) -> bool:
    """Add the body to the values. Returns False if it is not there as a whole, or not valid."""
    if message.get("type") != "http.request" or message.get("more_body"):
        return False
    try:
        value = json.loads(message.get("body", b""))
    except Exception:
        return False
    values[field.name], errors = field.validate(value, {}, loc=())
    return not errors


def _again(receive: Receive, first: Message | Exception) -> Receive:
    """Return a `receive` that begins with what `receive` has just returned or raised."""
    left = [first]

    async def receive_again() -> Message:
        if not left:
            return await receive()
        outcome = left.pop()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return receive_again


# Rendering.


def _renderer(route: Any) -> Callable[[Scope, Any], Awaitable[Any]]:
    """Return what makes a response of the endpoint's result: bytes stand for JSON with a 200."""
    field, response_class, status = route.response_field, route.response_class, route.status_code
    is_default = isinstance(response_class, DefaultPlaceholder)
    if is_default:
        response_class = response_class.value
    options = {name: getattr(route, f"response_model_{name}") for name in _MODEL_OPTIONS}
    status_code = {} if status is None else {"status_code": status}

    async def by_field(scope: Scope, result: Any) -> Any:
        value, errors = field.validate(result, {}, loc=())
        if errors:
            return await by_fastapi(scope, result)  # which raises
        return field.serialize_json(value, **options)

    async def by_encoder(scope: Scope, result: Any) -> Any:
        return _encode(result if _is_json(result) else jsonable_encoder(result)).encode()

    async def by_fastapi(scope: Scope, result: Any) -> Any:
        context = fastapi.routing._extract_endpoint_context(route.dependant.call)
        if route.dependant.path:
            prefix = scope.get("root_path", "").rstrip("/")
            context["path"] = f"{scope['method']} {prefix}{route.dependant.path}"
        dump_json = field is not None and is_default
        content = await serialize_response(
            field=field,
            response_content=result,
            endpoint_ctx=context,
            dump_json=dump_json,
            **options,
        )
        if dump_json:
            return Response(content, media_type="application/json", **status_code)
        return response_class(content, **status_code)

    if field is not None and is_default and status in (None, 200):
        return by_field
    if field is None and response_class is JSONResponse and status in (None, 200):
        return by_encoder
    return by_fastapi


def _is_json(value: Any, depth: int = 0) -> bool:
    """Whether `jsonable_encoder` would return an equal value."""
    kind = type(value)
    if kind in JSON_SCALARS:
        return True
    if depth > 16:  # where it gives up is the encoder's to say
        return False
    if kind is dict:
        return all(
            type(key) is str and not key.startswith("_sa") and _is_json(each, depth + 1)
            for key, each in value.items()
        )
    return kind is list and all(_is_json(each, depth + 1) for each in value)


# As `JSONResponse`, which makes a new encoder for each response.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class _NeverOverridden:
    dependency_overrides: Mapping[Any, Any] = {}


_NEVER_OVERRIDDEN = _NeverOverridden()
_MODEL_OPTIONS = (
    "include", "exclude", "by_alias", "exclude_unset", "exclude_defaults", "exclude_none",
)  # fmt: skip
