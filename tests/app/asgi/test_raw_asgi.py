"""Requests of servers other than uvicorn: raw ASGI, which promises no header about the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import product
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

import ingress as serve
from tests.servers import PATIENCE_S, bind, forking, turns, until

pytestmark = pytest.mark.anyio

PARTS: dict[str, list[bytes]] = {
    "none": [b""],
    "whole": [b'{"a":1}'],
    "in parts": [b"", b'{"a"', b":1}", b""],
}
HEADERS: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "its length": [(b"content-length", b"7")],
    "length 0": [(b"content-length", b"0")],
    "chunked": [(b"transfer-encoding", b"chunked")],
}


def scope_of(path: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "GET",
        "http_version": "1.1",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1), "headers": [],
        **more,
    }  # fmt: skip


@pytest.fixture
async def asgi(separate: str) -> AsyncIterator[serve.Application]:
    app = FastAPI()

    @serve.deployment(max_ongoing_requests=1)
    @serve.ingress(app)
    class Bodies:
        @app.api_route("/raw", methods=["GET", "POST", "DELETE"])
        async def raw(self, request: Request) -> str:
            return (await request.body()).decode()

        @app.get("/stream")
        async def stream(self) -> StreamingResponse:
            async def items() -> AsyncIterator[bytes]:
                yield b"item"

            return StreamingResponse(items())

        @app.post("/json")
        async def json(self, value: dict[str, int]) -> dict[str, int]:
            return value

    application = bind(Bodies)
    async with application.lifespan(app):
        yield application


async def ask(app: Any, path: str, parts: Iterator[bytes] | list[bytes], **scope: Any) -> Any:
    """Send one request with that body; return the status and the body of the answer."""
    left = list(parts)
    answer: list[Message] = []

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        answer.append(message)

    async with asyncio.timeout(PATIENCE_S):
        await app(scope_of(path, **scope), receive, send)
    body = b"".join(each.get("body", b"") for each in answer[1:])
    return answer[0]["status"], json.loads(body) if answer[0]["status"] == 200 else body


async def test_a_body_is_what_the_messages_say_whatever_the_headers_say(
    asgi: serve.Application,
) -> None:
    for version, method, headers, parts in product(
        ("1.0", "1.1", "2"), ("GET", "POST", "DELETE"), HEADERS.values(), PARTS.values()
    ):
        scope = {"http_version": version, "method": method, "headers": headers}
        assert await ask(asgi, "/raw", parts, **scope) == (200, b"".join(parts).decode()), scope


@pytest.mark.parametrize("parts", ["whole", "in parts"])
async def test_a_model_is_read_from_a_body_without_a_length(
    asgi: serve.Application, parts: str
) -> None:
    headers = [(b"content-type", b"application/json")]
    given: dict[str, Any] = {"http_version": "2", "method": "POST", "headers": headers}

    assert await ask(asgi, "/json", PARTS[parts], **given) == (200, {"a": 1})


async def test_a_request_whose_first_message_is_awaited_holds_no_slot(
    asgi: serve.Application,
) -> None:
    """The only slot stays free for another request."""
    arrives, has_asked = asyncio.Event(), asyncio.Event()
    first: list[Message] = []

    async def receive() -> Message:
        has_asked.set()
        await arrives.wait()
        return {"type": "http.request", "body": b"late", "more_body": False}

    async def send(message: Message) -> None:
        first.append(message)

    upload = scope_of("/raw", http_version="2", method="POST")
    slow = asyncio.create_task(asgi(upload, receive, send))
    await has_asked.wait()
    assert await ask(asgi, "/raw", [b""]) == (200, "")
    await turns()
    assert not first

    arrives.set()
    await slow
    assert json.loads(first[1]["body"]) == "late"


@pytest.mark.parametrize("deadline", [[], [(b"x-request-timeout-seconds", b"30")]])
@pytest.mark.parametrize("path", ["/raw", "/stream"])
async def test_a_server_that_cannot_send_any_more_is_no_fault_of_user_code(
    asgi: serve.Application,
    path: str,
    deadline: list[tuple[bytes, bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ASGI 2.4: `send` raises an `OSError` once the client has left."""

    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise BrokenPipeError("the client has left")

    spec = {"version": "3.0", "spec_version": "2.4"}
    await asgi(scope_of(path, asgi=spec, headers=deadline), receive, send)

    assert not caplog.records

    def is_idle() -> bool:
        (deployment,) = serve.status().applications["default"].deployments.values()
        return not any(each.ongoing for each in deployment.replicas)

    await until(is_idle)


# Extensions of ASGI.


async def extended(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the names of the extensions, after a hint and before trailers."""
    await send({"type": "http.response.early_hint", "links": [b"</style.css>"]})
    headers = [(b"content-length", b"2")]
    start = {"type": "http.response.start", "status": 200, "headers": headers, "trailers": True}
    await send(start)
    await send({"type": "http.response.body", "body": b"ok"})
    names = sorted(scope.get("extensions", ["none"]))
    trailers = [(b"x-names", " ".join(names).encode())]
    await send({"type": "http.response.trailers", "headers": trailers})


@serve.deployment
@serve.ingress(extended)
class Extended:
    pass


KEPT = ["http.response.early_hint", "http.response.trailers", "tls"]
ONLY_HERE = ["http.response.debug", "http.response.pathsend", "http.response.zerocopysend"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("names", [None, [*KEPT, *ONLY_HERE]], ids=["none", "all"])
@pytest.mark.usefixtures("separate")
async def test_extensions_that_can_be_honoured_cross(
    isolation: Any, names: list[str] | None
) -> None:
    scope = scope_of("/")
    if names is not None:
        scope["extensions"] = {name: {} for name in names}
    sent: list[Message] = []

    asked: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return asked.pop() if asked else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    with forking():
        await bind(Extended.options(isolation=isolation))(scope, receive, send)

    kinds = ["early_hint", "start", "body", "trailers"]
    assert [each["type"] for each in sent] == [f"http.response.{each}" for each in kinds]
    crossing = names if names is None or isolation == "thread" else [n for n in names if n in KEPT]
    expected = "none" if crossing is None else " ".join(sorted(crossing))
    assert sent[1]["trailers"] is True
    assert sent[3]["headers"] == [(b"x-names", expected.encode())]
