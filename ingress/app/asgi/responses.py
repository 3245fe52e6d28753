"""The HTTP response for a plain deployment's return value, or for an exception.

    Response (Starlette)   sent as it is
    None                   200 text/plain, empty
    bytes                  200 text/plain
    str                    200 text/plain; charset=utf-8
    a generator            200, a chunk per item: text if the first is str/bytes, else JSON lines
    anything else          200 application/json, by FastAPI's `jsonable_encoder`

    HTTPException          its status, headers and {"detail": ...}
    RayServeException      its `status_code` and `retry_after_s`, its message as text
    any other              500 "Internal Server Error"

Source: Ray 2.60.0, http_util.py. Different from Ray: complete responses have a content-length,
generators stream, and `HTTPException` keeps its status.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from inspect import isfunction
from math import ceil, inf
from traceback import walk_tb
from typing import Any

from anyio import CancelScope, current_effective_deadline
from fastapi.encoders import jsonable_encoder
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.types import Message, Receive, Scope, Send

from ingress.app.asgi.compat import MIDDLEWARE_RESPONSE, waiting_for_threads
from ingress.core.base.foreign import attempt, stored
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.execution.errors import OTHER_LOOP, is_noted
from ingress.core.execution.execution import ThreadPool, call_inline
from ingress.exceptions import RayServeException, is_disconnect

_TEXT = b"text/plain; charset=utf-8"


async def send_value(
    value: object, pool: ThreadPool, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the response for a complete value. Raises `TypeError` if it cannot be JSON."""
    if isinstance(value, Response):
        take_over_stream(value, pool)
        await value(scope, receive, send)
        return
    match value:
        case str():
            body, content_type = value.encode(), _TEXT
        case None | bytes():
            body, content_type = value or b"", b"text/plain"
        case _:
            body, content_type = _to_json(value).encode(), b"application/json"
    # As messages, because a `Response` object would double the work.
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def take_over_stream(
    response: Any, pool: ThreadPool, opened: Sequence[Generator[object, None, None]] = ()
) -> None:
    """Make a streaming response iterate in one worker thread, and close its iterator.

    Starlette takes each chunk of a sync iterator in another of AnyIO's threads, which costs a
    hundred microseconds. It leaves the generator of a disconnected client to the garbage collector,
    which runs late, because the propagating error holds the generator: its `finally` blocks would
    not run. `opened` will have the generators that the iterator opens and does not close itself.
    """
    if type(response).__call__ not in _FINISHING:
        finish_when_cut(type(response))  # a class of the user's, which sends in its own way
    body = getattr(response, "body_iterator", None)
    items = waiting_for_threads(body)
    if items is not None:
        body = response.body_iterator = pool.stream(_closing(items, opened))
    if body is None or not isinstance(response, StreamingResponse):
        return
    stream_response = response.stream_response

    async def stream_and_close(send: Send) -> None:
        try:
            await stream_response(send)
        finally:
            aclose = getattr(response.body_iterator, "aclose", None)
            if aclose is not None:
                await aclose()
            if isinstance(items, Generator):
                items.close()  # no effect, unless the iteration never began

    response.stream_response = stream_and_close  # type: ignore[method-assign]


def finish_when_cut(kind: type[Response]) -> None:
    """Have the responses of a class run their background task also if they are cut. Thread-safe.

    When the client leaves, uvicorn tells Starlette, which stops sending and runs the task. Here the
    task of the request is cancelled instead, once, and the response ends as if it were complete:
    then the background task runs, and the exits of dependencies see no error.
    """
    with _finishing_lock:
        if kind.__call__ in _FINISHING:
            return
        owner = next(each for each in kind.__mro__ if "__call__" in vars(each))
        owner.__call__ = _finishing(  # type: ignore[method-assign]
            owner.__call__,
            is_stream=issubclass(owner, StreamingResponse | FileResponse)
            and owner is not MIDDLEWARE_RESPONSE,
        )
        _FINISHING.add(owner.__call__)


def _finishing(
    original: Callable[..., Awaitable[None]], *, is_stream: bool
) -> Callable[..., Awaitable[None]]:
    @wraps(original)
    async def finishing(response: Any, scope: Scope, receive: Receive, send: Send) -> None:
        is_sent = False

        def watched(message: Message) -> Awaitable[None]:
            return send_last(message) if _is_last(message) else send(message)

        async def send_last(message: Message) -> None:
            nonlocal is_sent
            await send(message)
            is_sent = True

        # Without a background task, nothing runs after the last message.
        background = getattr(response, "background", None)
        if is_stream and (call := CURRENT_CALL.get(None)) is not None:
            call.work.note_stream(ends_with_client=True)
        try:
            await original(response, scope, receive, send if background is None else watched)
            return
        except (asyncio.CancelledError, OSError, ClientDisconnect, ExceptionGroup) as error:
            call, task = CURRENT_CALL.get(None), asyncio.current_task()
            if call is None or task is None or scope["type"] != "http":
                raise
            if isinstance(error, ExceptionGroup) and not is_disconnect(error):
                raise
            cut: dict[int, _Cut] = scope.setdefault(_CUT, {})
            this = cut.setdefault(id(response), _Cut(response))
            # A `FileResponse` closes its file between its last message and the task.
            if is_sent and _has_begun(background, error):
                this.has_begun = True  # also for a subclass that sends by this one, in a group
            if this.has_begun and not this.has_ended:
                raise  # by the background task
            # Race with a timeout of the user's around the response, whose cancellation may come
            # just before that of the call: they look alike, and the client is gone either way.
            is_cancelled = isinstance(error, asyncio.CancelledError)
            if not (call.is_interrupted or (call.work.is_heard and not is_cancelled)):
                raise
            if is_cancelled and call.work.is_heard and not call.settled:
                raise  # by user code, which was told of the disconnect and ends by itself
            if is_cancelled:
                task.uncancel()
        # From now on a cancellation of the call comes too late: see `Replica._cancel`.
        call.work.note_answer()
        from ingress.core.calls.compat import group_of_middleware  # imports AnyIO's backend

        group = group_of_middleware(task)
        if group is not None:
            group.cancel()  # the app below a middleware that sends this response
        if background is not None and not this.has_begun:
            this.has_begun = True
            # In a cancelled scope AnyIO cancels again at every turn of the loop.
            must_shield = group is not None or current_effective_deadline() == -inf
            with CancelScope(shield=must_shield):
                await background()
            this.has_ended = True

    return finishing


def _has_begun(background: Any, error: BaseException) -> bool:
    """Return whether an error has come through a background task, or may have."""
    runs = background if isfunction(background) else stored(type(background), "__call__")
    code = getattr(runs, "__code__", None)
    return code is None or any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))


@dataclass(eq=False, slots=True)
class _Cut:
    """A response that was cut, and whether its background task has begun, and ended.

    A subclass may send by its base class: then two calls are cut, and the task runs once.
    """

    response: Any  # kept, or another one might get its id
    has_begun: bool = False
    has_ended: bool = False


_CUT = "ingress.cut"
"""The key under which the scope carries the responses of the request that were cut."""


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.pathsend" or (
        message["type"] == "http.response.body" and not message.get("more_body")
    )


_FINISHING: set[Callable[..., Awaitable[None]]] = set()
_finishing_lock = threading.Lock()
for _kind in (Response, StreamingResponse, FileResponse, MIDDLEWARE_RESPONSE):
    finish_when_cut(_kind)

WITHOUT_SCOPE = (Response.__call__, StreamingResponse.__call__)
"""The calls of responses that show the scope to no user code."""


_COPIES: dict[type, Callable[[Any], object]] = {bytearray: bytearray, memoryview: bytes}


def _closing(
    items: Iterable[object], opened: Sequence[Generator[object, None, None]]
) -> Iterator[object]:
    """Yield items, and close at the end, in this thread, the iterator and what it has opened.

    FastAPI's does not close the endpoint's generator. Until Python 3.12 that was dropped when the
    iterator was closed; from 3.13 on, a closed generator keeps what it refers to.
    """
    try:
        for item in items:
            # The generator runs ahead, and may fill its buffer again before the item is sent.
            copy = _COPIES.get(type(item))
            yield item if copy is None else copy(item)
    finally:
        for each in (items, *opened):
            if isinstance(each, Generator):  # not a file, which may be wanted again
                each.close()


async def send_stream(items: AsyncGenerator[object, None], send: Send) -> None:
    """Send each item of a generator as soon as it is yielded, and close the generator.

    An error before the first item is raised before the response starts, so it becomes a 500.
    """
    CURRENT_CALL.get().work.note_stream(ends_with_client=True)
    async with aclosing(items):
        try:
            item = await anext(items)
        except StopAsyncIteration:
            item = b""
        is_text = isinstance(item, str | bytes)
        headers = [(b"content-type", _TEXT if is_text else b"application/jsonl")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_body(_chunk(item, is_text=is_text)))
        async for item in items:
            await send(_body(_chunk(item, is_text=is_text)))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def _chunk(item: object, *, is_text: bool) -> bytes:
    if not is_text:
        return _to_json(item).encode() + b"\n"
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode()
    raise TypeError(
        f"a generator whose first item is text must go on with str or bytes, got "
        f"{type(item).__name__}"
    )


def error_response(error: BaseException, *, of_app: bool = True) -> Response:
    """Return the response to a failed request; it reveals no internals of the error.

    An `HTTPException` of an app, which no handler of the app has answered, is an error like others.
    """
    return attempt(
        lambda: call_inline(lambda: _response_for(error, of_app=of_app)),
        lambda _: Response(b"Internal Server Error", 500),  # of the code of its class
    )


def _response_for(error: BaseException, *, of_app: bool) -> Response:
    if not of_app and isinstance(error, HTTPException):
        if error.status_code in (204, 304):
            return Response(status_code=error.status_code, headers=error.headers)
        return JSONResponse(
            {"detail": error.detail}, status_code=error.status_code, headers=error.headers
        )
    if isinstance(error, RayServeException) and error.status_code != 500:
        return refusal(error)
    if is_noted(error):
        return PlainTextResponse(f"Internal Server Error\n\n{OTHER_LOOP}", 500)
    return Response(b"Internal Server Error", 500)


def refusal_of(error: BaseException) -> str | None:
    """Return the reason to refuse a WebSocket; `None` for an error without its own status."""

    def reason() -> str | None:
        return None if getattr(error, "status_code", 500) == 500 else str(error)[:100]

    return attempt(lambda: call_inline(reason), lambda _: None)  # of the code of its class


def refusal(error: RayServeException) -> Response:
    """Return the response for an error of the framework, with its status and message."""
    after_s = error.retry_after_s
    headers = None if after_s is None else {"retry-after": str(ceil(after_s))}
    return PlainTextResponse(error.message, error.status_code, headers)


async def send_refusal(error: RayServeException, request_id: str, send: Send) -> None:
    """Send the response of `refusal` as messages: a `Response` would double the work."""
    body = error.message.encode()
    headers = [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", _TEXT),
        (b"x-request-id", request_id.encode()),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % ceil(error.retry_after_s)))
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _to_json(value: object) -> str:
    return json.dumps(jsonable_encoder(value, custom_encoder=_encoders()), separators=(",", ":"))


def _encoders() -> dict[type, Callable[[Any], object]]:
    """Return the encoders that Ray adds to FastAPI's, for libraries that are imported already."""
    encoders: dict[type, Callable[[Any], object]] = {Exception: str}
    if numpy := sys.modules.get("numpy"):
        encoders[numpy.ndarray] = encoders[numpy.generic] = lambda array: array.tolist()
    if pandas := sys.modules.get("pandas"):
        encoders[pandas.DataFrame] = lambda frame: frame.to_dict(orient="records")
    return encoders
