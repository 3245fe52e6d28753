"""ASGI conversations, between the server and `ingress`, and between `ingress` and user apps.

A recorder checks each side, while clients do everything a client can do to a conversation.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.reliability.figures import Figures
from tests.servers import UVICORN, Connection, environment, get, process, wait_until, write_module

APP = """
import asyncio
from fastapi import FastAPI, Request, WebSocket
from starlette.responses import StreamingResponse
import ingress as serve

wrong, counts = [], {"server": 0, "user": 0, "lifespan": 0}

class Recorder:
    '''Stands before an ASGI app and notes whatever is against the specification.'''

    def __init__(self, app, side):
        self.app, self.side = app, side

    async def __call__(self, scope, receive, send):
        counts["lifespan" if (self.side, scope["type"]) == ("user", "lifespan") else self.side] += 1
        is_http, state, is_gone = scope["type"] == "http", "new", False

        async def heard():
            nonlocal is_gone
            message = await receive()
            kind = message["type"]
            if is_gone and kind not in ("http.disconnect", "websocket.disconnect"):
                wrong.append(f"{self.side}: {kind} after the disconnect")
            is_gone = is_gone or kind.endswith(".disconnect")
            if not kind.startswith(scope["type"]):
                wrong.append(f"{self.side}: {kind} in {scope['type']}")
            return message

        async def said(message):
            nonlocal state
            if is_http:
                kind, more = message["type"], message.get("more_body", False)
                expected = {"new": "http.response.start", "begun": "http.response.body"}.get(state)
                if kind != expected:
                    wrong.append(f"{self.side}: {kind}, which is {state}")
                state = "begun" if kind == "http.response.start" or more else "over"
            await send(message)

        await self.app(scope, heard, said)

api = FastAPI()

@api.get("/quick")
async def quick(): return "quick"

@api.post("/body")
async def body(request: Request): return len(await request.body())

@api.get("/fails")
async def fails(): raise ValueError("it fails")

@api.get("/items")
async def items():
    async def make():
        for _ in range(50):
            yield b"x" * 1000
            await asyncio.sleep(0.001)
    return StreamingResponse(make())

@api.get("/cut")
async def cut():
    async def make():
        yield b"x"
        raise ValueError("it fails")
    return StreamingResponse(make())

@api.get("/slow")
async def slow(): await asyncio.sleep(0.05)

@api.get("/seen")
async def seen(): return {"wrong": wrong, **counts}

@api.websocket("/ws")
async def ws(websocket: WebSocket):
    await websocket.accept()
    while True:
        await websocket.send_text(await websocket.receive_text())

@api.websocket("/refused")
async def refused(websocket: WebSocket): await websocket.close()

@serve.deployment(num_replicas=2)
@serve.ingress(Recorder(api, "user"))
class App: ...

app = Recorder(App.bind(), "server")
"""

UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.reliability("D10")
@pytest.mark.parametrize("separate", ["1", "0"], ids=["separate1", "separate0"])
def test_every_conversation_is_correct(figures: Figures, tmp_path: Path, separate: str) -> None:
    write_module(tmp_path, "recorded", APP)
    environ = environment(tmp_path, separate=separate)
    with process([*UVICORN, "recorded:app"], tmp_path, environ) as server:
        port = server.port
        for path in ("/quick", "/fails", "/items", "/cut", "/slow", "/nowhere", "/-/healthz"):
            get(port, path)
            with Connection(port) as connection:
                connection.request(path, method="HEAD")
                connection.receive_all()
            with Connection(port) as connection:
                connection.request(path)  # and leave
            connection = Connection(port)
            connection.request(path)
            connection.reset()
        for size in (0, 10, 100_000):
            with Connection(port) as connection:
                connection.request("/body", method="POST", headers="Content-Length: 100000\r\n")
                connection.send(b"x" * size)
                if size == 100_000:
                    connection.receive_until(b"100000")
        with connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as websocket:
            websocket.send("hello")
            assert websocket.recv(timeout=5) == "hello"
        leaving = Connection(port)
        leaving.request("/ws", headers=UPGRADE)
        leaving.receive_until(b"\r\n\r\n")
        leaving.reset()
        with pytest.raises(Exception, match="403"):
            connect(f"ws://127.0.0.1:{port}/refused", proxy=None)
        wait_until(lambda: b'"wrong":' in get(port, "/seen").body)
        seen = json.loads(get(port, "/seen").body)

    figures.note("conversations with the server", seen["server"])
    figures.note("conversations with the user's app", seen["user"])
    figures.at_most("messages against the specification", len(seen["wrong"]), 0)
    assert seen["wrong"] == []
    assert seen["lifespan"] == 2, "once for each replica"
