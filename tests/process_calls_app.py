"""The applications of `test_process_calls`: its children import them."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

import ingress as serve
from ingress.core.calls.call import CURRENT_CALL, Call

INNER = {"Outer": ("Echo", "process"), "Asker": ("Facts", "thread")}
LINE = "x" * 100_000  # more than fits into a frame: it crosses in shared memory

chat = FastAPI()


@serve.deployment
@serve.ingress(chat)
class Chat:
    """A chat of which each handler sends to all clients."""

    def __init__(self) -> None:
        self.members: list[WebSocket] = []
        self.sent = 0
        self.sending = 0

    @chat.websocket("/chat")
    async def join(self, websocket: WebSocket) -> None:
        await websocket.accept()
        self.members.append(websocket)
        try:
            async for text in websocket.iter_text():
                for member in list(self.members):
                    await self._tell(member, text)
        finally:
            self.members.remove(websocket)

    async def _tell(self, member: WebSocket, text: str) -> None:
        self.sending += 1
        try:
            await member.send_text(text + LINE)
        except Exception:  # that one has left
            return
        finally:
            self.sending -= 1
        self.sent += 1

    @chat.get("/counts")
    async def counts(self) -> tuple[int, int, int]:
        return self.sent, self.sending, len(self.members)


async def awaits_the_end(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and return once a task of the request has heard that it is over."""

    async def hear() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    hearing = asyncio.create_task(hear())
    await asyncio.sleep(0)
    length = [] if scope["path"].endswith("stream") else [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"ok"})
    await hearing


ENDED: list[str] = []


async def two_receivers(scope: Scope, receive: Receive, send: Send) -> None:
    """Have two tasks of one request wait for its messages at once; "/ended" tells of the ends."""

    answers: Iterator[Message]

    async def two_messages() -> list[Message]:
        waiting = [asyncio.ensure_future(receive()) for _ in range(2)]
        await asyncio.sleep(0)
        await send(next(answers))
        return [await each for each in waiting]

    if scope["type"] == "websocket":
        answers = iter([{"type": "websocket.send", "text": text} for text in ("two", "again")])
        await receive()
        await send({"type": "websocket.accept"})
        texts = sorted(each["text"] for each in await two_messages())
        await send({"type": "websocket.send", "text": " ".join(texts)})
    else:
        body = str(len(ENDED)).encode()
        last: Message = {"type": "http.response.body", "body": body}
        answers = iter([last])
        await receive()
        head = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
    if scope["path"].endswith("/ended"):
        await send(next(answers))
        return
    for each in await two_messages():
        assert each["type"].endswith(".disconnect"), each
    ENDED.append(scope["type"])


async def reads_and_waits(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, and wait for the disconnect; "/two/ended" tells of both."""
    while (await receive()).get("more_body"):
        pass
    ENDED.append("the body")
    assert (await receive())["type"] == "http.disconnect"
    ENDED.append("the client")


mounted = FastAPI()
mounted.mount("/raw", awaits_the_end)
mounted.mount("/reads", reads_and_waits)
mounted.mount("/two", two_receivers)


@serve.deployment
@serve.ingress(mounted)
class Mounted:
    """An application with an ASGI application in it."""


def in_isolation(name: str, isolation: str) -> Any:
    inner = [in_isolation(*INNER[name])] if name in INNER else []
    return globals()[name].options(isolation=isolation).bind(*inner)


def limit_descriptors(number: int | None) -> None:
    """Limit the descriptors of this process; with `None` to as many as it may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if number is None else number, hard))


bodies = FastAPI()


@serve.deployment
@serve.ingress(bodies)
class Bodies:
    """Large bodies and messages, and a limit on the descriptors of the replica's process."""

    @bodies.post("/limit/{number}")
    async def limit(self, number: int) -> None:
        limit_descriptors(number or None)

    @bodies.post("/size")
    async def size(self, request: Request) -> int:
        return len(await request.body())

    @bodies.get("/large")
    async def large(self) -> Response:
        return Response(LINE)

    @bodies.get("/stream")
    async def stream(self) -> StreamingResponse:
        return StreamingResponse(iter([LINE, "y" * len(LINE), "z"]))

    @bodies.websocket("/echo")
    async def echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)


class Bomb:
    """An argument whose arrival ends the process."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


class Exit:
    """A value whose arrival raises `SystemExit`."""

    def __reduce__(self) -> Any:
        return sys.exit, (4,)


@serve.deployment(num_replicas=2)
class Echo:
    async def __call__(self, value: Any) -> Any:
        return value

    async def exit(self) -> Exit:
        return Exit()

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def items(self) -> AsyncIterator[int]:
        yield 0
        await self.wait()


@serve.deployment
class Outer:
    """A deployment that calls another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.runs = 0
        self.left: list[Any] = []

    async def __call__(self, value: Any) -> Any:
        self.runs += 1
        return await self.inner.remote(value)

    async def count(self) -> int:
        return self.runs

    async def begin(self, method: str) -> None:
        inner = self.inner.options(method_name=method, stream=method == "items")
        self.left.append(inner.remote())

    async def leave(self, how: str) -> None:
        if how == "cancel":
            self.left.pop().cancel()
        self.left.clear()
        gc.collect()

    async def unsent(self, times: int, ends: str) -> None:
        """Wait for calls that end while their argument is awaited."""
        for _ in range(times):
            argument = self.inner.wait.remote()
            calls = {
                "argument": argument,
                "call": self.inner.options(method_name="never").remote(argument),
            }
            waiting = asyncio.ensure_future(calls["call"])
            await asyncio.sleep(0)
            calls[ends].cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            argument.cancel()

    async def number_of_calls(self, method: str) -> int:
        """Return the number of calls of a method that this process still knows of."""
        gc.collect()
        # By its type: `isinstance` would ask a weak proxy, which may be dead.
        calls = [each for each in gc.get_objects() if issubclass(type(each), Call)]
        return [each.metadata.method_name for each in calls].count(method)


@serve.deployment
class Facts:
    """A deployment that answers with the metadata of its call."""

    async def __call__(self) -> tuple[str, str, int, bool]:
        metadata = CURRENT_CALL.get().metadata
        has_deadline = metadata.deadline is not None
        return metadata.request_id, metadata.session_id, metadata.priority, has_deadline


@serve.deployment
class Asker:
    """A deployment that calls `Facts`, with options and in a thread that works for no request."""

    def __init__(self, facts: Any) -> None:
        self.facts = facts

    async def ask(self, options: dict[str, Any]) -> Any:
        return await self.facts.options(**options).remote()

    @serve.method(execution="threadpool")
    def ask_alone(self) -> tuple[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            response = pool.submit(self.facts.remote).result()
            return response.request_id, response.result(timeout_s=20)


@serve.deployment
class Large:
    """A deployment with large results, and with a generator that does not end."""

    async def same(self, value: bytes) -> bytes:
        return value

    async def take_descriptors(self) -> None:
        """Have the system refuse all new descriptors."""
        limit_descriptors(3)

    async def give_descriptors(self) -> None:
        limit_descriptors(None)

    async def result(self, size: int) -> bytes:
        return bytes(size)

    async def stubborn(self) -> AsyncIterator[int]:
        """Swallow the cancellation, and go on."""
        try:
            yield 0
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        for number in range(100):
            yield number


@serve.deployment(max_ongoing_requests=8)
class Spinning:
    """Threads that compute until one of them sees shorter turns of the GIL."""

    def shortest_turn(self, limit_s: float, seconds: float) -> float:
        end = time.monotonic() + seconds
        while (found := sys.getswitchinterval()) >= limit_s and time.monotonic() < end:
            pass
        return found
