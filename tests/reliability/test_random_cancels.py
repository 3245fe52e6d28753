"""A thousand cancellations, of every kind and at any moment, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import ingress as serve
from ingress.exceptions import RequestCancelledError
from ingress.execution import threads
from ingress.handle import DeploymentHandle
from tests.reliability.soak_app import LONGEST_S, work, work_in_thread
from tests.servers import PATIENCE_S, ROUNDS, bind, get, served, set_flags, wait_until

CANCELS = 1_000 if ROUNDS else 400
AT_ONCE = 40
SLOTS = 8

now = Counter[str]()
most = Counter[str]()
lock = threading.Lock()


class Slot:
    """Counts the calls that run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        with lock:
            now[self.name] += 1
            most[self.name] = max(most[self.name], now[self.name])

    def __exit__(self, *_: object) -> None:
        with lock:
            now[self.name] -= 1


@serve.deployment(max_ongoing_requests=SLOTS // 2)
class Leaf:
    async def __call__(self) -> str:
        with Slot("leaf"):
            await work()
        return "leaf"

    async def items(self) -> AsyncIterator[str]:
        with Slot("leaf"):
            for _ in range(3):
                yield "leaf"
                await work(3)


def make_root(*, has_middleware: bool) -> type:
    app = FastAPI()
    if has_middleware:

        @app.middleware("http")
        async def middleware(request: Request, call_next: Any) -> Any:
            return await call_next(request)

    @serve.ingress(app)
    class Root:
        def __init__(self, leaf: Any) -> None:
            self.leaf = leaf

        @app.get("/quick")
        async def quick(self) -> str:
            return "quick"

        @app.get("/sleep")
        async def sleep(self) -> str:
            with Slot("root"):
                await work()
            return "slept"

        @app.get("/thread")
        def thread(self) -> str:
            with Slot("root"):
                work_in_thread()
                serve.cancellation().check()
            return "slept"

        @app.get("/chain")
        async def chain(self) -> str:
            with Slot("root"):
                return str(await self.leaf.remote())

        @app.get("/gather")
        async def gather(self) -> list[str]:
            with Slot("root"):
                return list(await asyncio.gather(*(self.leaf.remote() for _ in range(3))))

        @app.get("/def-chain")
        def def_chain(self) -> str:
            with Slot("root"):
                return str(self.leaf.remote().result())

        async def items(self) -> AsyncIterator[str]:
            with Slot("root"):
                async for item in self.leaf.options(method_name="items", stream=True).remote():
                    yield item

        def def_items(self) -> Iterator[str]:
            with Slot("root"):
                for _ in range(3):
                    yield "x"
                    work_in_thread(3)

        @app.get("/items")
        async def stream(self) -> Response:
            return StreamingResponse(self.items())

        @app.get("/def_items")
        async def def_stream(self) -> Response:
            return StreamingResponse(self.def_items())

    return Root


CALLS = ["sleep", "thread", "chain", "gather", "def_chain"]
STREAMS = ["items", "def_items"]


async def leave(port: int, path: str, delay_s: float, how: str) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    await asyncio.sleep(delay_s)
    if how == "RST":
        client: socket.socket = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


async def call(handle: DeploymentHandle, method: str, delay_s: float, how: str) -> str:
    """Cancel one call; return its outcome."""
    is_stream = method in STREAMS
    response = handle.options(method_name=method, stream=is_stream).remote()

    async def take() -> None:
        if is_stream:
            async for _ in response:
                pass
        else:
            await response

    task = asyncio.ensure_future(take())
    await asyncio.sleep(delay_s)
    if how == "cancel":
        response.cancel()
    else:
        task.cancel()
    try:
        await task
    except (RequestCancelledError, asyncio.CancelledError):
        return "cancelled"
    return "answered"


def pending() -> int:
    """Return the number of tasks on all loops."""
    return sum(not each.done() for each in gc.get_objects() if type(each) is asyncio.Task)


def workers() -> list[str]:
    return [each.name for each in threading.enumerate() if "-worker-" in each.name]


def is_idle() -> bool:
    return not any(
        deployment.queued or any(replica.ongoing for replica in deployment.replicas)
        for deployment in serve.status().applications["default"].deployments.values()
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that it closes nothing."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.thorough
@pytest.mark.reliability("B14")
@pytest.mark.parametrize("seed", range(ROUNDS or 1))
@pytest.mark.parametrize("has_middleware", [False, True], ids=["plain", "middleware"])
@pytest.mark.parametrize("separate", ["0", "1"], ids=["separate0", "separate1"])
def test_a_thousand_random_cancels_leave_nothing(
    separate: str,
    has_middleware: bool,
    seed: int,
    no_collector: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_flags(monkeypatch, separate, sync="1")
    monkeypatch.setattr(threads, "IDLE_S", 0.2)
    dice = random.Random(seed)
    became = Counter[str]()
    most.clear()

    async def some(handle: DeploymentHandle, port: int, count: int) -> None:
        for _ in range(count):
            delay_s = dice.uniform(0, LONGEST_S)
            how = dice.choice(["FIN", "RST", "cancel", "awaiter"])
            method = dice.choice(CALLS + STREAMS)
            if how in ("FIN", "RST"):
                await leave(port, method.replace("f_c", "f-c"), delay_s, how)
                became["left"] += 1
            else:
                became[await call(handle, method, delay_s, how)] += 1

    async def all_of_them(handle: DeploymentHandle, port: int) -> None:
        each = CANCELS // AT_ONCE
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(some(handle, port, each) for _ in range(AT_ONCE)))

    root = serve.deployment(max_ongoing_requests=SLOTS)(make_root(has_middleware=has_middleware))
    port = served(bind(root, bind(Leaf)))
    handle = serve.get_app_handle("default")
    try:
        assert get(port, "/quick").status == 200
        before = pending()
        asyncio.run(all_of_them(handle, port))
        wait_until(is_idle)

        assert sum(became.values()) == CANCELS
        assert min(became["left"], became["cancelled"]) > CANCELS / 10, became
        assert now["root"] == now["leaf"] == 0, "what runs and holds no slot"
        assert most["root"] <= SLOTS
        assert most["leaf"] <= SLOTS // 2
        wait_until(lambda: pending() <= before)
        wait_until(lambda: not workers())
        assert not caplog.records, "a client that leaves is no news"
        for path in ("quick", "sleep", "thread", "chain", "items"):
            assert get(port, f"/{path}").status == 200
    finally:
        serve.shutdown()
