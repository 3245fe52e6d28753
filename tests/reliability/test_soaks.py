"""Many repetitions of each kind of request leave nothing behind; memory is measured outside."""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import ingress as serve
from tests.programs import INGRESS, ServerProcess, environment, process, write_module
from tests.reliability.figures import Figures
from tests.reliability.test_input import frame
from tests.servers import UPGRADE, get

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

APP = """
import asyncio, gc, os, threading, time
from fastapi import FastAPI, Request, WebSocket
from starlette.responses import StreamingResponse
import ingress as serve

app = FastAPI()

@serve.deployment
class Leaf:
    async def __call__(self): return "leaf"

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Soak:
    def __init__(self, leaf): self.leaf = leaf

    @app.get("/async")
    async def quick(self): return "quick"

    @app.get("/def")
    def quick_def(self): return "quick"

    @app.get("/chain")
    async def chain(self): return await self.leaf.remote()

    @app.get("/fails")
    async def fails(self): raise ValueError("it fails")

    @app.get("/items")
    async def items(self): return StreamingResponse(self.make())

    async def make(self):
        for _ in range(3):
            yield b"item"

    @app.get("/endless")
    async def endless(self): return StreamingResponse(self.make_endless())

    async def make_endless(self):
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0.01)

    @app.get("/slow")
    async def slow(self): await asyncio.Event().wait()

    @app.post("/upload")
    async def upload(self, request: Request): return len(await request.body())

    @app.get("/any/{rest:path}")
    async def any(self, rest: str): return len(rest)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.001)
    async def batched(self, items): return items

    @app.get("/batched")
    async def in_batch(self): return await self.batched(1)

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: str): return model_id

    @app.get("/model")
    async def with_model(self): return len(await self.model(serve.get_multiplexed_model_id()))

    @app.websocket("/ws")
    async def ws(self, websocket: WebSocket):
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())

    @app.get("/held")
    async def held(self):
        gc.collect()
        deployments = serve.status().applications["default"].deployments.values()
        pages = int(open("/proc/self/statm").read().split()[1])
        return {
            "rss": pages * os.sysconf("SC_PAGE_SIZE"),
            "objects": len(gc.get_objects()),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "ongoing": sum(r.ongoing for d in deployments for r in d.replicas) - 1,
        }

soak = Soak.bind(Leaf.bind())
"""
AT_ONCE = 50
WARM_UP = 10_000


@contextmanager
def serving(folder: Path) -> Iterator[ServerProcess]:
    write_module(folder, "soak", APP)
    environ = environment(folder) | {"MALLOC_ARENA_MAX": "2"}
    command = [*INGRESS, "run", "soak:soak", "--port", "0"]
    with process(command, folder, environ) as server:
        server.wait_for("is ready")
        yield server


def held(server: ServerProcess) -> dict[str, int]:
    found: dict[str, int] = json.loads(get(server.port, "/held").body)
    return found


def held_at_rest(server: ServerProcess) -> dict[str, int]:
    time.sleep(12)  # idle worker threads end after 10 s
    return held(server)


def slope(samples: list[tuple[int, int]]) -> float:
    """Return the median of the slopes between all pairs, which is robust against outliers."""
    return median(
        (there - here) / (later - now)
        for place, (now, here) in enumerate(samples)
        for later, there in samples[place + 1 :]
    )


Kind = Callable[[int], Awaitable[None]]


async def spread(count: int, kind: Kind) -> None:
    """Run `kind` `count` times, `AT_ONCE` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            async with asyncio.timeout(30):
                await kind(number)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def soak(
    figures: Figures, folder: Path, make: Callable[[int], Kind], count: int, what: str
) -> None:
    """Run a kind of request `count` times in ten parts, and compare the memory after each part.

    Before, 10,000 runs allocate everything that is allocated once.
    """
    with serving(folder) as server:
        kind = make(server.port)
        asyncio.run(spread(WARM_UP, kind))
        before = held_at_rest(server)
        samples, p99_s = [], []
        for part in range(1, 11):
            took: list[float] = []
            asyncio.run(spread(count // 10, timed(kind, took)))
            samples.append((part * count // 10, held(server)["rss"]))
            p99_s.append(sorted(took)[int(len(took) * 0.99)])
        after = held_at_rest(server)

    figures.note(what, count)
    figures.at_most("memory, bytes for each", slope(samples), 50)
    for each in ("threads", "descriptors", "ongoing"):
        figures.at_most(f"more {each}", after[each] - before[each], 0)
    # The objects of the application are frozen, so the collector counts few.
    figures.at_most("more objects", after["objects"] - before["objects"], 1_000)
    figures.note("p99 of the last tenth, of the first's", p99_s[-1] / p99_s[0])


def timed(kind: Kind, took: list[float]) -> Kind:
    async def run(number: int) -> None:
        began = time.monotonic()
        await kind(number)
        took.append(time.monotonic() - began)

    return run


async def ask(port: int, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        return await reader.read(-1)
    finally:
        writer.close()


def head(path: str, extra: str = "", method: str = "GET") -> bytes:
    line = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    return f"{line}{extra}\r\n".encode()


@pytest.mark.reliability("E01")
def test_a_hundred_thousand_requests_leave_nothing(figures: Figures, tmp_path: Path) -> None:
    paths = ["/async", "/def", "/chain", "/items", "/batched", "/model", "/upload"]

    def make(port: int) -> Kind:
        async def one(number: int) -> None:
            path = "/fails" if number % 20 == 0 else paths[number % len(paths)]
            extra = "serve_multiplexed_model_id: m\r\n" if path == "/model" else ""
            raw = head(path, extra)
            if path == "/upload":
                raw = head(path, "Content-Length: 1000\r\n", "POST") + b"x" * 1000
            answer = await ask(port, raw)
            assert answer.split()[1] == (b"500" if path == "/fails" else b"200"), answer

        return one

    soak(figures, tmp_path, make, 100_000, "requests")


@pytest.mark.reliability("E02", "B14")
def test_fifty_thousand_clients_that_leave_leave_nothing(figures: Figures, tmp_path: Path) -> None:
    paths = ["/slow", "/endless", "/async", "/def", "/batched", "/upload", "/ws"]
    dice = random.Random(1)

    def make(port: int) -> Kind:
        async def one(number: int) -> None:
            path = paths[number % len(paths)]
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            raw = head(path, UPGRADE if path == "/ws" else "")
            if path == "/upload":
                raw = head(path, "Content-Length: 1000\r\n", "POST") + b"x" * 500
            writer.write(raw[: dice.randrange(len(raw))] if number % 9 == 0 else raw)
            await asyncio.sleep(dice.uniform(0, 0.02))
            if number % 2:
                client = writer.get_extra_info("socket")
                client.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: RST
            writer.close()
            try:
                await writer.wait_closed()
            except ConnectionError:
                pass

        return one

    soak(figures, tmp_path, make, 50_000, "clients that left")


@pytest.mark.reliability("E05")
def test_ten_thousand_websockets_leave_nothing(figures: Figures, tmp_path: Path) -> None:
    def make(port: int) -> Kind:
        async def one(number: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("/ws", UPGRADE).replace(b"Connection: close\r\n", b""))
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(3):
                writer.write(frame(1, b"hello"))
                await reader.readuntil(b"hello")
            if number % 2:
                writer.transport.abort()
            else:
                writer.write(frame(8, struct.pack("!H", 1000)))
                await reader.read(-1)
                writer.close()

        return one

    soak(figures, tmp_path, make, 10_000, "WebSockets")


@pytest.mark.reliability("E07")
def test_a_hundred_thousand_names_leave_nothing(figures: Figures, tmp_path: Path) -> None:
    def make(port: int) -> Kind:
        async def one(number: int) -> None:
            number = random.getrandbits(60)
            path = f"/any/{number}" if number % 2 else f"/nowhere-{number}"
            extra = f"x-request-id: id-{number}\r\nuser-agent: agent-{number}\r\n"
            if number % 5 == 0:
                path, extra = "/model", f"{extra}serve_multiplexed_model_id: m{number}\r\n"
            method = f"M{number % 1000}" if number % 7 == 0 else "GET"
            assert await ask(port, head(path, extra, method))

        return one

    soak(figures, tmp_path, make, 100_000, "names")


@pytest.mark.reliability("E10")
def test_an_idle_server_takes_next_to_no_time(figures: Figures, tmp_path: Path) -> None:
    write_module(
        tmp_path,
        "idle",
        "import ingress as serve\n"
        "@serve.deployment(num_replicas=10)\n"
        "async def idle(request): return 'idle'\n"
        "app = idle.bind()\n",
    )
    lasts_s = 60.0
    command = [*INGRESS, "run", "idle:app", "--port", "0"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        server.wait_for("is ready")
        time.sleep(2)
        before = server.cpu_s
        time.sleep(lasts_s)
        took_s = server.cpu_s - before

    figures.at_most("of one core, %, with 10 replicas", 100 * took_s / lasts_s, 1)


# In this process: applications start and stop.


def opened() -> dict[str, int]:
    return {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}


def no_more_is_open(figures: Figures, before: dict[str, int]) -> None:
    after = opened()
    for name in before:
        figures.at_most(f"more {name}", after[name] - before[name], 0)


@pytest.mark.reliability("E03")
def test_two_hundred_replicas_replaced_leave_nothing(figures: Figures) -> None:
    @serve.deployment(num_replicas=4, graceful_shutdown_timeout_s=1)
    class Replaced:
        async def __call__(self) -> str:
            return "here"

    application: Any = Replaced
    serve.run(application.bind(), route_prefix=None)
    before = opened()
    for _ in range(50):
        handle = serve.run(application.bind(), route_prefix=None)
        assert handle.remote().result(timeout_s=20) == "here"
    ends = time.monotonic() + 20
    while opened() != before and time.monotonic() < ends:
        time.sleep(0.05)
    figures.note("replicas replaced", 200)
    no_more_is_open(figures, before)
    serve.shutdown()


@pytest.mark.reliability("E04")
def test_a_hundred_starts_leave_nothing(figures: Figures) -> None:
    async def here(request: Any) -> str:
        return "here"

    application = serve.deployment(here).bind()

    def start(port: int) -> int:
        serve.start({"port": port})
        serve.run(application)
        (url,) = serve.status().proxies
        assert get(int(url.rpartition(":")[2]), "/").body == b"here"
        serve.shutdown()
        return int(url.rpartition(":")[2])

    port = start(0)
    before = opened()
    for _ in range(100):
        start(port)  # raises if the port is still in use
    figures.note("starts on one port", 100)
    no_more_is_open(figures, before)
