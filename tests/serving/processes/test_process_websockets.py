"""WebSockets in a child process, as in a thread: each test runs in both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Literal, TypeAlias

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

import ingress as serve
from tests.servers import PATIENCE_S, bind, forking, served, wait_until

app = FastAPI()
Frame: TypeAlias = Literal["thread", "process"]
KINDS: tuple[Frame, ...] = ("thread", "process")


@serve.deployment
@serve.ingress(app)
class Api:
    def __init__(self) -> None:
        self.seen: list[str] = []

    @app.get("/seen")
    async def what_was_seen(self) -> list[str]:
        return self.seen

    @app.websocket("/denies")
    async def denies(self, websocket: WebSocket) -> None:
        await websocket.send_denial_response(JSONResponse({"why": "full"}, 429))

    @app.websocket("/sends")
    async def sends(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.send_text("more")
                await asyncio.sleep(0)
        except BaseException as error:
            self.seen.append(type(error).__name__)
        for _ in range(2):
            try:
                await websocket._send({"type": "websocket.send", "text": "late"})
                self.seen.append("sent")
            except Exception as error:
                self.seen.append(type(error).__name__)

    @app.websocket("/idles")
    async def idles(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append("cancelled")

    @app.websocket("/cleans")
    async def cleans(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive()
        self.seen.append("heard")
        await asyncio.sleep(0.4)  # longer than an idle handler has
        self.seen.append("cleaned")

    @app.websocket("/parts")
    async def parts(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("begun")
        message = await websocket.receive()
        await websocket.send_text(f"closing with {message['code']}")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with forking():
        for kind in KINDS:
            found = served(bind(Api.options(isolation=kind)), kind, f"/{kind}")
        yield found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Frame:
    found: Frame = request.param
    return found


def open_socket(port: int, path: str) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{port}/{path}", proxy=None, close_timeout=1)


def seen(port: int, kind: Frame) -> list[str]:
    found: list[str] = httpx.get(f"http://127.0.0.1:{port}/{kind}/seen").json()
    return found


def test_a_websocket_is_refused_with_the_users_response(port: int, kind: Frame) -> None:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(port, f"{kind}/denies")

    assert refused.value.response.status_code == 429
    assert refused.value.response.body == b'{"why":"full"}'


def test_a_handler_that_only_sends_is_told_by_send(port: int, kind: Frame) -> None:
    before = len(seen(port, kind))
    with open_socket(port, f"{kind}/sends") as client:
        client.recv(timeout=PATIENCE_S)

    wait_until(lambda: len(seen(port, kind)) == before + 3)

    told = ["WebSocketDisconnect", "StreamClosedError", "StreamClosedError"]
    assert seen(port, kind)[before:] == told


def test_a_handler_that_neither_sends_nor_receives_is_cancelled(port: int, kind: Frame) -> None:
    before = len(seen(port, kind))
    with open_socket(port, f"{kind}/idles"):
        pass

    # A handler that has heard has 5 s.
    wait_until(lambda: seen(port, kind)[before:] == ["cancelled"], timeout_s=3)


def test_a_handler_that_has_heard_may_clean_up(port: int, kind: Frame) -> None:
    before = len(seen(port, kind))
    with open_socket(port, f"{kind}/cleans"):
        pass

    wait_until(lambda: seen(port, kind)[before:] == ["heard", "cleaned"])


@pytest.mark.usefixtures("port")
def test_a_handler_may_send_while_its_application_stops(kind: Frame) -> None:
    port = served(bind(Api.options(isolation=kind)), "stopping", "/stopping")
    with open_socket(port, "stopping/parts") as client:
        assert client.recv(timeout=PATIENCE_S) == "begun"
        stopping = threading.Thread(target=serve.delete, args=("stopping",))
        stopping.start()
        assert client.recv(timeout=PATIENCE_S) == "closing with 1001"
    stopping.join()
