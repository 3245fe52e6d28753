"""User code that fills one buffer again and again: a client gets what was there at each `send`."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response, WebSocket
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from websockets.sync.client import connect

import ingress as serve
from tests.servers import bind, forking, served

PARTS = [b"%07d," % number for number in range(64)]
app = FastAPI()


def views() -> Iterator[memoryview]:
    buffer = bytearray(8)
    for part in PARTS:
        buffer[:] = part
        yield memoryview(buffer)


async def async_views() -> AsyncIterator[memoryview]:
    for view in views():
        yield view


class Streaming(StreamingResponse):
    """A response that sends any buffer, unlike Starlette's."""

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})


class Array:
    """An object that is pickled as an array of NumPy is: its buffer is not copied."""

    def __init__(self) -> None:
        self.buffer = bytearray(8)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return bytes, (pickle.PickleBuffer(self.buffer),)


@serve.deployment
@serve.ingress(app)
class Api:
    @app.get("/async")
    async def async_stream(self) -> StreamingResponse:
        return StreamingResponse(async_views())

    @app.get("/sync")
    async def sync_stream(self) -> StreamingResponse:
        return StreamingResponse(views())

    @app.get("/bytearray")
    def bytearray_stream(self) -> StreamingResponse:
        buffers: Any = (view.obj for view in views())
        return Streaming(buffers)

    @app.get("/complete")
    async def complete(self) -> Response:
        buffer = bytearray().join(PARTS)

        def overwrite() -> None:
            buffer[:] = bytes(len(buffer))

        return Response(memoryview(buffer), background=BackgroundTask(overwrite))

    @app.websocket("/")
    async def messages(self, websocket: WebSocket) -> None:
        await websocket.accept()
        for number, view in enumerate(views()):
            await websocket.send_bytes(view if number % 2 else view.obj)  # type: ignore[arg-type]

    async def arrays(self) -> AsyncIterator[Array]:
        array = Array()
        for part in PARTS:
            array.buffer[:] = part
            yield array


async def raw(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with one message and one buffer, which are used for all chunks."""
    message: dict[str, Any] = {"type": "http.response.body", "more_body": True}
    headers = [(b"content-length", b"512")] if scope["path"].endswith("known") else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, view in enumerate(views()):
        message["body"] = bytes(view) if number % 2 else view.obj
        await send(message)
    message["more_body"] = False
    await send(message | {"body": b""})


@serve.deployment
@serve.ingress(raw)
class Raw:
    pass


PATHS = ("/async", "/sync", "/bytearray", "/complete", "/raw/known", "/raw/unknown")


def answers(**options: Any) -> dict[str, bytes]:
    """Return the client's view of each way to answer, all of which send the same parts."""
    port = served(bind(Api.options(**options)))
    served(bind(Raw.options(**options)), "raw", "/raw")
    found = {path: httpx.get(f"http://127.0.0.1:{port}{path}").content for path in PATHS}
    with connect(f"ws://127.0.0.1:{port}/") as client:
        found["websocket"] = b"".join(client)  # type: ignore[arg-type]
    return found


EXPECTED = dict.fromkeys((*PATHS, "websocket"), b"".join(PARTS))


def test_a_buffer_that_is_used_again_is_sent_as_it_was(separate: str) -> None:
    assert answers() == EXPECTED


def test_a_buffer_that_is_used_again_crosses_from_a_process_as_it_was() -> None:
    with forking():
        assert answers(isolation="process") == EXPECTED

        handle = serve.get_app_handle("default").options(stream=True)
        assert list(handle.arrays.remote()) == PARTS


def test_items_of_a_handle_are_the_objects_that_user_code_made(separate: str) -> None:
    serve.run(bind(Api), route_prefix=None)

    items = list(serve.get_app_handle("default").options(stream=True).arrays.remote())

    assert all(first is second for first, second in itertools.pairwise(items))


@pytest.mark.parametrize("body", [5, "text"])
def test_a_body_that_is_no_buffer_is_an_error_of_user_code(separate: str, body: object) -> None:
    async def odd(scope: Scope, receive: Receive, send: Send) -> None:
        length = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})

    @serve.deployment
    @serve.ingress(odd)
    class Odd:
        pass

    assert httpx.get(f"http://127.0.0.1:{served(bind(Odd))}/").status_code == 500
