"""Deployments that hold a request at each of its stages, and a ledger of its events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, WebSocket, WebSocketDisconnect
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

import ingress as serve
from ingress.testing import Latch
from tests.servers import PATIENCE_S, until, wait_until


class Ledger:
    """The events of each request in the server, with their times. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._entries: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        self._gates = defaultdict[str, Latch](partial(Latch, timeout_s=PATIENCE_S))

    def note(self, key: str, what: str) -> None:
        with self._condition:
            self._entries[key].append((what, time.monotonic()))
            self._condition.notify_all()

    def wait(self, key: str, what: str) -> float:
        """Wait until an event has happened, and return its time."""

        def happened() -> float | None:
            return next((when for each, when in self._entries[key] if each == what), None)

        with self._condition:
            assert self._condition.wait_for(happened, PATIENCE_S), (key, what, self._entries[key])
            found = happened()
        assert found is not None
        return found

    def of(self, key: str) -> list[str]:
        with self._condition:
            return [what for what, _ in self._entries[key]]

    def gate(self, key: str) -> Latch:
        """Return the latch that user code of a request waits for."""
        with self._condition:
            return self._gates[key]


ledger = Ledger()


# The stages, as user code. `key` is the request's.


async def clean_up() -> None:
    """Wait in a `finally`: a second cancellation would end it here."""
    for _ in range(3):
        await asyncio.sleep(0.001)


async def quick(key: str) -> str:
    ledger.note(key, "began")
    return "quick"


async def hold(key: str) -> str:
    ledger.note(key, "began")
    await ledger.gate(key)
    return "held"


async def block(key: str) -> str:
    ledger.note(key, "began")
    ledger.gate(key).wait()
    return "blocked"


async def running(key: str) -> str:
    ledger.note(key, "began")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        ledger.note(key, f"cancelled, requested={serve.cancellation().requested}")
        raise
    finally:
        await clean_up()
        ledger.note(key, "finally")
    return "never"


async def swallowing(key: str) -> str:
    ledger.note(key, "began")
    turns = 0
    while turns < 10 or not ledger.gate(key).is_open:
        try:
            await asyncio.sleep(0.005)
            turns += "cancelled" in ledger.of(key)
            if turns == 10:
                ledger.note(key, "ten turns later")
        except asyncio.CancelledError:
            ledger.note(key, "cancelled")
    ledger.note(key, "ended")
    return "swallowed"


def until_told(key: str) -> str:
    ledger.note(key, "began")
    cancellation, gate = serve.cancellation(), ledger.gate(key)
    wait_until(lambda: cancellation.requested or gate.is_open)
    ledger.note(key, f"requested={cancellation.requested}")
    gate.wait()
    ledger.note(key, "ended")
    return "ran on"


BATCH = 3


def note_batch(keys: list[str], what: str) -> bool:
    """Note an event of a batch. Returns whether the batch may end."""
    for key in keys:
        if what not in ledger.of(key):
            ledger.note(key, what)
    return any(ledger.gate(key).is_open for key in keys)


@serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=PATIENCE_S)
async def batched(keys: list[str]) -> list[str]:
    cancellation = serve.cancellation()
    begins = f"batch of {len(keys)}, requested="
    await until(lambda: note_batch(keys, f"{begins}{cancellation.requested}"))
    note_batch(keys, "ended")
    return keys


@serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=PATIENCE_S)
def def_batched(keys: list[str]) -> list[str]:
    cancellation = serve.cancellation()
    begins = f"batch of {len(keys)}, requested="
    wait_until(lambda: note_batch(keys, f"{begins}{cancellation.requested}"))
    note_batch(keys, "ended")
    return keys


async def uploaded(key: str, request: Request) -> str:
    try:
        async for _ in request.stream():
            ledger.note(key, "began")
    except (ClientDisconnect, asyncio.CancelledError):
        ledger.note(key, "gone")
        raise
    finally:
        await clean_up()
        ledger.note(key, "finally")
    return "whole"


async def items(key: str, chunk: bytes, pause_s: float) -> AsyncIterator[bytes]:
    try:
        while True:
            ledger.note(key, "made")
            yield chunk
            if pause_s:
                await asyncio.sleep(pause_s)
    finally:
        await clean_up()
        ledger.note(key, "closed")


def def_items(key: str, chunk: bytes, pause_s: float) -> Iterator[bytes]:
    try:
        while True:
            ledger.note(key, "made")
            yield chunk
            time.sleep(pause_s)
    finally:
        ledger.note(key, "closed")


TRICKLE = b"x" * 100, 0.002
FLOOD = b"x" * 65536, 0.0


async def after(key: str) -> None:
    try:
        await ledger.gate(key)
        for _ in range(20):  # longer than several sweeps
            await asyncio.sleep(0.005)
        ledger.note(key, "ended")
    except asyncio.CancelledError:
        ledger.note(key, "cancelled")
        raise


async def answered(stage: str, key: str) -> Any:
    """Answer a request of either kind of application, which is held at a stage."""
    match stage:
        case "quick":
            return await quick(key)
        case "hold":
            return await hold(key)
        case "block":
            return await block(key)
        case "running" | "unread":
            return await running(key)
        case "swallowing":
            return await swallowing(key)
        case "batched" | "def-batched":
            ledger.note(key, "began")
            return await (batched if stage == "batched" else def_batched)(key)
        case "response-items":
            return StreamingResponse(items(key, *TRICKLE))
        case "response-def-items":
            return StreamingResponse(def_items(key, *TRICKLE))
        case "response-items-blocked":
            return StreamingResponse(items(key, *FLOOD))
        case "response-def-items-blocked":
            return StreamingResponse(def_items(key, *FLOOD))
        case "background":
            return Response("ok", background=BackgroundTask(after, key))
    raise AssertionError(stage)


@serve.deployment
class Plain:
    async def __call__(self, request: Request) -> Any:
        key = request.query_params["key"]
        match request.path_params.get("stage") or request.url.path.rpartition("/")[2]:
            case "upload":
                return await uploaded(key, request)
            case "items":
                return items(key, *TRICKLE)
            case "items-blocked":
                return items(key, *FLOOD)
            case stage:
                return await answered(stage, key)


@serve.deployment
class PlainDef:
    def __call__(self, request: Request) -> Any:
        key = request.query_params["key"]
        match request.url.path.rpartition("/")[2]:
            case "def":
                return until_told(key)
            case "def-items":
                return def_items(key, *TRICKLE)
            case "def-items-blocked":
                return def_items(key, *FLOOD)
        return "quick"


async def outer(key: str) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await clean_up()
        ledger.note(key, "outer closed")


def middle(key: str, _: Annotated[None, Depends(outer)]) -> Iterator[None]:
    try:
        yield
    finally:
        ledger.note(key, "middle closed")


async def inner(key: str, _: Annotated[None, Depends(middle)]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await clean_up()
        ledger.note(key, "inner closed")


def in_dependency(key: str) -> Iterator[None]:
    try:
        until_told(key)
        yield
    finally:
        ledger.note(key, "closed")


def fastapi_class(*, has_middleware: bool) -> type:
    app = FastAPI()
    if has_middleware:

        @app.middleware("http")
        async def middleware(request: Request, call_next: Any) -> Any:
            return await call_next(request)

    @serve.ingress(app)
    class Stages:
        @app.get("/def")
        def until_told(self, key: str) -> str:
            return until_told(key)

        @app.get("/def-dependency")
        async def in_dependency(self, key: str, _: Annotated[None, Depends(in_dependency)]) -> str:
            await asyncio.Event().wait()
            return "never"

        @app.post("/upload")
        async def upload(self, key: str, request: Request) -> str:
            return await uploaded(key, request)

        @app.post("/parameter")
        async def parameter(self, key: str, value: Annotated[list[int], Body()]) -> str:
            ledger.note(key, "began")
            return "called"

        @app.post("/def-parameter")
        def def_parameter(self, key: str, value: Annotated[list[int], Body()]) -> str:
            ledger.note(key, "began")
            return "called"

        @app.get("/dependencies")
        async def dependencies(self, key: str, _: Annotated[None, Depends(inner)]) -> str:
            return await running(key)

        @app.api_route("/{stage}", methods=["GET", "POST"])
        async def stage(self, stage: str, key: str) -> Any:
            return await answered(stage, key)

        @app.websocket("/idle")
        async def idle(self, websocket: WebSocket, key: str) -> None:
            await websocket.accept()
            ledger.note(key, "began")
            try:
                await websocket.receive_text()
            except WebSocketDisconnect as gone:
                ledger.note(key, f"disconnect {gone.code}")
            finally:
                await clean_up()
                ledger.note(key, "closed")

        @app.websocket("/deaf")
        async def deaf(self, websocket: WebSocket, key: str) -> None:
            await websocket.accept()
            ledger.note(key, "began")
            try:
                await asyncio.Event().wait()
            finally:
                ledger.note(key, "closed")

        @app.websocket("/sending")
        async def sending(self, websocket: WebSocket, key: str) -> None:
            await websocket.accept()
            ledger.note(key, "began")
            try:
                while True:
                    await websocket.send_bytes(FLOOD[0])
                    ledger.note(key, "made")
            finally:
                await clean_up()
                ledger.note(key, "closed")

    return Stages
