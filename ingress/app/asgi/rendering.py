"""The rendering of an endpoint's result to a response, as FastAPI does it.

A generator is a stream: JSON lines or server-sent events.

    def         in one worker thread: items -> bytes -> Channel -> a message of all waiting items
    async def   in the request's task: an item -> bytes -> a message
    events      a timer, and a task only when it is due: the comment that keeps an idle stream alive

FastAPI takes each item of a `def` in another thread, and passes each event, of `def` and
`async def`, through two tasks and two queues, one of which serves only the comment. FastAPI's own
functions validate the items and format the events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, closing
from functools import cache, partial
from itertools import repeat
from typing import Any

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import ResponseValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Scope, Send

from ingress.app.asgi.compat import (
    STACKS,
    DefaultPlaceholder,
    get_dependant,
    is_body_allowed_for_status_code,
    normalize_non_finite_floats,
    ping_interval_s,
    routing,
    serialize_response,
)
from ingress.app.asgi.messages import Chunks
from ingress.app.asgi.methods import GENERATORS
from ingress.app.asgi.responses import WITHOUT_SCOPE
from ingress.app.asgi.steps import JSON_SCALARS, Shared, Steps, Unfit, require
from ingress.context import REPLICA
from ingress.core.execution.execution import ExecutionMode, ExecutionPlan, kind

Encoder = Callable[[Scope, Any], bytes]


def encoder(route: Any, steps: Steps) -> Encoder | None:
    """Return a function from a result to the JSON of a 200; `None` if it needs `renderer`."""

    def by_encoder(scope: Scope, result: Any) -> bytes:
        return encode(result if is_json(result) else jsonable_encoder(result)).encode()

    # A response of a class whose `__call__` the user has replaced must be made.
    if route.status_code not in (None, 200) or JSONResponse.__call__ not in WITHOUT_SCOPE:
        return None
    if (field := route.response_field) is not None:
        is_default = isinstance(route.response_class, DefaultPlaceholder)
        return field_encoder(field, route, steps) if is_default else None
    return by_encoder if response_class_of(route) is JSONResponse else None


def field_encoder(field: Any, route: Any, steps: Steps) -> Encoder:
    """Return a function that validates a value with the field and makes its JSON."""
    validate, serialize, options = field.validate, field.serialize_json, _options(route)

    def by_field(scope: Scope, result: Any) -> bytes:
        value, errors = validate(result, {}, loc=("response",))
        if errors:
            context = steps.endpoint_context(scope)
            raise ResponseValidationError(errors=errors, body=result, endpoint_ctx=context)
        encoded: bytes = serialize(value, **options)
        return encoded

    return by_field


def renderer(route: Any, steps: Steps) -> Any:
    """Return a function from an endpoint's result to a response, as FastAPI makes it."""
    field, status_code, options = route.response_field, route.status_code, _options(route)
    response_class = response_class_of(route)
    dump_json = field is not None and isinstance(route.response_class, DefaultPlaceholder)

    async def render(scope: Scope, result: Any, shared: Shared | None) -> Response:
        if isinstance(result, Response):
            if result.background is None and shared is not None:
                result.background = shared.background
            return result
        given = response_arguments(shared, status_code)
        content = await serialize_response(
            field=field,
            response_content=result,
            endpoint_ctx=steps.endpoint_context(scope),
            dump_json=dump_json,
            **options,
        )
        response: Response = (
            Response(content=content, media_type="application/json", **given)
            if dump_json
            else response_class(content, **given)
        )
        if not is_body_allowed_for_status_code(response.status_code):
            response.body = b""
        add_written_headers(response, shared)
        return response

    return render


def response_arguments(shared: Shared | None, status_code: int | None) -> dict[str, Any]:
    """Return the arguments that FastAPI passes to a response class besides the content."""
    given: dict[str, Any] = {"background": shared and shared.background}
    status = shared and shared.response and shared.response.status_code
    if (status := status or status_code or status) is not None:
        given["status_code"] = status
    return given


def add_written_headers(response: Response, shared: Shared | None) -> None:
    """Add the headers that user code wrote into the response it was given."""
    if shared is not None and shared.response is not None:
        response.headers.raw.extend(shared.response.headers.raw)


def is_json(value: Any, depth: int = 0) -> bool:
    """Return whether `jsonable_encoder` would return an equal value."""
    kind = type(value)
    if kind in JSON_SCALARS:
        return True
    if depth > 16:  # the encoder decides on deeper values
        return False
    if kind is dict:
        for key, each in value.items():  # `all()` of a generator would enter a frame for each
            if type(key) is not str or key.startswith("_sa") or not is_json(each, depth + 1):
                return False
        return True
    return kind is list and all(map(is_json, value, repeat(depth + 1)))


# As in `JSONResponse`, which makes a new encoder for each response.
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def response_class_of(route: Any) -> Any:
    given = route.response_class
    return given.value if isinstance(given, DefaultPlaceholder) else given


def makes_events(route: Any) -> bool:
    """Return whether FastAPI makes server-sent events of the result, generator or not."""
    events = getattr(routing, "EventSourceResponse", None)
    given = response_class_of(route)
    return events is not None and isinstance(given, type) and issubclass(given, events)


def _options(route: Any) -> dict[str, Any]:
    return {name: getattr(route, f"response_model_{name}") for name in _MODEL_OPTIONS}


_MODEL_OPTIONS = (
    "include", "exclude", "by_alias", "exclude_unset", "exclude_defaults", "exclude_none",
)  # fmt: skip


def is_stream(route: Any) -> bool:
    """Return whether FastAPI streams the items of a route's endpoint as JSON lines or events."""
    return getattr(route, "is_sse_stream", False) or getattr(route, "is_json_stream", False)


async def values_for_stream(**values: object) -> dict[str, object]:
    """Return the endpoint's arguments: the last step of a stream, whose response calls it."""
    return values


def stream_renderer(
    route: Any, steps: Steps
) -> Callable[[Scope, dict[str, object], Shared | None], Awaitable[Response]]:
    """Return a function from an endpoint's arguments to its response, as FastAPI makes it."""
    target: Any = getattr(route.dependant.call, "__ingress_target__", None)
    # Not a `def` that returns a generator: FastAPI calls it before there is a response.
    require(target is not None and kind(target.func) in GENERATORS)
    is_events = makes_events(route)
    response_class = _EventStream if is_events else _LineStream
    has_status = _has_status()
    encode = _event_encoder(route, steps) if is_events else _line_encoder(route, steps)

    async def render(scope: Scope, values: dict[str, object], shared: Shared | None) -> Response:
        given = response_arguments(shared, route.status_code)
        if not has_status:
            given.pop("status_code", None)
        chunks = _chunks(REPLICA.get().plans[target], values, partial(encode, scope))
        response = response_class(chunks, **given)
        add_written_headers(response, shared)
        return response

    return render


async def _chunks(
    plan: ExecutionPlan, values: dict[str, object], encode: Callable[[Any], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the items of an endpoint as bytes; close the generator where it ran."""
    if plan.mode is ExecutionMode.EVENT_LOOP:
        async with aclosing(plan.stream(**values)) as items:
            async for item in items:
                yield encode(item)
    else:
        async with aclosing(plan.pool.batches(_encoded(plan.items(**values), encode))) as batches:
            async for batch in batches:
                yield Chunks.of(batch)


def _encoded(items: Any, encode: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Yield encoded items, in the worker thread, so that the channel's limit in bytes applies."""
    with closing(items):
        yield from map(encode, items)


# Responses.


# Both close their iterator, which Starlette leaves to the garbage collector.


class _LineStream(StreamingResponse):
    media_type = "application/jsonl"

    async def stream_response(self, send: Send) -> None:
        chunks: Any = self.body_iterator
        async with aclosing(chunks):
            await super().stream_response(send)


class _EventStream(StreamingResponse):
    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], **given: Any) -> None:
        super().__init__(_failing_as_tasks(chunks), **given)
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"

    async def stream_response(self, send: Send) -> None:
        chunks: Any = self.body_iterator
        async with aclosing(chunks), _KeepAlive(send, ping_interval_s()) as alive:
            await super().stream_response(alive.send)


async def _failing_as_tasks(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the chunks; raise their errors in a group, as FastAPI's tasks do.

    So a `TimeoutError` of the generator is not taken for a disconnected client, as it is for lines.
    """
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [error]) from None


class _KeepAlive:
    """A sender of a comment each time that no message has been sent for `idle_s`.

    Belongs to the loop of the response. A comment has a task of its own, because the response waits
    for the generator, which must not be disturbed.
    """

    __slots__ = ("_comment", "_idle_s", "_is_sending", "_last", "_loop", "_send", "_timer")

    def __init__(self, send: Send, idle_s: float) -> None:
        self._send = send
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._is_sending = False
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(idle_s, self._look)

    async def __aenter__(self) -> _KeepAlive:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    async def send(self, message: Message) -> None:
        # Race with a comment that waits for room: `_send` takes one message at a time. A comment
        # that failed is still set, and its error becomes the response's.
        if self._comment is not None:
            await self._comment
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        self._last = self._loop.time()

    def _look(self) -> None:
        # A timer for every message would cost more than reading the time of the last one.
        left_s = self._last + self._idle_s - self._loop.time()
        if left_s <= 0 and not self._is_sending and self._comment is None:
            self._comment = self._loop.create_task(self._send_comment())
        self._timer = self._loop.call_later(left_s if left_s > 0 else self._idle_s, self._look)

    async def _send_comment(self) -> None:
        comment = routing.KEEPALIVE_COMMENT
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})
        self._last = self._loop.time()
        self._comment = None


# Bytes.


def _line_encoder(route: Any, steps: Steps) -> Encoder:
    to_json = _json_encoder(route, steps)
    return lambda scope, item: to_json(scope, item) + b"\n"


def _event_encoder(route: Any, steps: Steps) -> Encoder:
    to_json = _json_encoder(route, steps)
    event_class = routing.ServerSentEvent
    to_event: Callable[..., bytes] = routing.format_sse_event

    def encode(scope: Scope, item: object) -> bytes:
        if not isinstance(item, event_class):
            return to_event(data_str=to_json(scope, item).decode())
        data = item.raw_data
        if data is None and item.data is not None:
            is_model = hasattr(item.data, "model_dump_json")
            data = item.data.model_dump_json() if is_model else _to_json(item.data)
        return to_event(
            data_str=data, event=item.event, id=item.id, retry=item.retry, comment=item.comment
        )

    return encode


def _json_encoder(route: Any, steps: Steps) -> Encoder:
    if route.stream_item_field:
        return field_encoder(route.stream_item_field, route, steps)
    return lambda scope, item: _to_json(item).encode()


def _to_json(value: object) -> str:
    data = value if is_json(value) else jsonable_encoder(value)
    return json.dumps(data if _finite is None else _finite(data))


_finite = normalize_non_finite_floats
"""Replaces numbers that JSON lacks by `null`. An older FastAPI writes them as they are."""


@cache
def _has_status() -> bool:
    """Return whether FastAPI gives a stream the route's status. An older FastAPI does not."""

    async def items() -> AsyncIterator[None]:
        yield

    dependant = get_dependant(path="/", call=items)
    handler = routing.get_request_handler(dependant, status_code=201, is_json_stream=True)
    stacks = dict.fromkeys(STACKS, AsyncExitStack())
    scope = {"type": "http", "method": "GET", "query_string": b"", "headers": [], **stacks}
    try:
        handler(Request(scope)).send(None)
    except StopIteration as end:
        return bool(end.value.status_code == 201)
    raise Unfit  # pragma: no cover - a FastAPI whose handler awaits something
