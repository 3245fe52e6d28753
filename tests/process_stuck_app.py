"""The deployment of `test_stuck` whose replicas are processes: its children import it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, WebSocket
from starlette.responses import StreamingResponse

import ingress as serve

app = FastAPI()


@serve.deployment(isolation="process", max_ongoing_requests=200, graceful_shutdown_timeout_s=0.5)
@serve.ingress(app)
class Holding:
    """A replica that can be held, and writes a line to `begun` for each call that it notes."""

    def __init__(self, folder: Path) -> None:
        self.tag = serve.get_replica_context().replica_tag
        self.folder = folder

    def note(self, text: object) -> None:
        with (self.folder / "begun").open("a") as file:
            file.write(f"{text}\n")

    async def hold(self) -> None:
        self.note("hold")
        threading.Event().wait()  # until the process is killed

    async def where(self) -> str:
        return self.tag

    async def count(self, number: int) -> str:
        self.note(number)
        await asyncio.sleep(0)
        return self.tag

    async def wait(self) -> str:
        if self.tag == "0":
            self.note("wait")
            await asyncio.Event().wait()
        return self.tag

    async def items(self) -> AsyncIterator[str]:
        yield self.tag
        await self.wait()

    @app.get("/where")
    async def get_where(self) -> str:
        return self.tag

    @app.post("/where")
    async def post_where(self, body: dict[str, int]) -> str:
        return f"{self.tag} {body}"

    @app.get("/wait")
    async def get_wait(self) -> str:
        return await self.wait()

    @app.get("/stream")
    async def get_stream(self) -> StreamingResponse:
        return StreamingResponse(self.items())

    @app.websocket("/socket")
    async def socket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(self.tag)
        self.note("socket")
        await websocket.receive_text()
