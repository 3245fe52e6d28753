"""The cost of a request, step by step: `python -m benchmarks.steps`.

Requests go through uvicorn's own HTTP protocol (httptools) in this process, with a transport that
discards all output, so that the figures include neither the kernel nor a client. Each connection
sends its next request after each answer. A figure is the processor time of all threads per request,
in us: the median of the runs, which take the apps in turn.

    uvicorn           an ASGI function that sends "hello"
    Starlette route   the same by a route, one of ten
    n routes          the last of n routes, each with a path parameter

`both 0` runs user code on the server's loop, `default` on a separate loop and thread. The other
apps are those of `python -m benchmarks`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from statistics import median
from time import process_time
from typing import Any

import uvloop
from fastapi import FastAPI
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

import ingress as serve
from benchmarks import command
from benchmarks.results import FOLDER, machine
from benchmarks.servers import ROOT

RESULTS = FOLDER / "steps.json"
IN_FLIGHT = (32, 1)
REQUESTS = 2_000  # per run
WARM_UP = 200
ROUTES = (10, 100, 1000)
FLAGS = {
    "plain": {},
    "both 0": {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    },
    "default": {},
}
STEPS = {
    "uvicorn": "/",
    "Starlette route": "/",
    "async __call__": "/",
    "async": "/async",
    "path and query": "/async/7?name=me",
    "def": "/def",
    "def and def dependency": "/def-depends?name=me",
    **{f"{count} routes": f"/{count - 1}/7" for count in ROUTES},
}


async def bare(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"5"), (b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


class Load:
    """Connections that each send a request after each answer, until enough are sent."""

    def __init__(self, request: bytes, count: int) -> None:
        self.request = request
        self.left = count
        self.open = 0
        self.is_done = asyncio.get_running_loop().create_future()

    def next(self, protocol: HttpToolsProtocol) -> None:
        if self.left:
            self.left -= 1
            protocol.data_received(self.request)
        else:
            self.open -= 1
            if not self.open:
                self.is_done.set_result(None)


class Client(asyncio.Transport):
    """The client's end of one connection: uvicorn writes the head of an answer, then its body."""

    def __init__(self, load: Load, protocol: HttpToolsProtocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8000)})
        self.load = load
        self.protocol = protocol
        self.has_head = self.is_chunked = False

    def write(self, data: Any) -> None:
        if not self.has_head:
            if not data.startswith(b"HTTP/1.1 200"):
                raise AssertionError(bytes(data))
            self.has_head, self.is_chunked = True, b"transfer-encoding: chunked" in data
        elif not self.is_chunked or data.endswith(b"0\r\n\r\n"):
            self.has_head = False
            asyncio.get_running_loop().call_soon(self.load.next, self.protocol)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def cost_us(config: Config, target: str, in_flight: int, count: int) -> float:
    load = Load(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(), count)
    state = ServerState()
    protocols = []
    for _ in range(in_flight):
        protocol = HttpToolsProtocol(config, state, app_state={})
        protocol.connection_made(Client(load, protocol))
        protocols.append(protocol)
    load.open = in_flight
    begin = process_time()
    for protocol in protocols:
        load.next(protocol)
    await load.is_done
    took_s = process_time() - begin
    for protocol in protocols:
        protocol.connection_lost(None)
    return took_s / count * 1e6


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[None]:
    """Run an app's lifespan around a `with` block."""
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
    task = asyncio.create_task(app(scope, inbox.get, outbox.put))
    for event in ("startup", "shutdown"):
        inbox.put_nowait({"type": f"lifespan.{event}"})
        answer = await outbox.get()
        if answer["type"] != f"lifespan.{event}.complete":
            raise RuntimeError(answer)
        if event == "startup":
            yield
    await task


def app_of(name: str, *, is_plain: bool) -> Any:
    """Return the app that answers a step, `None` if this side has none."""
    if name.endswith("routes"):
        count = int(name.split()[0])
        return plain_routes(count) if is_plain else ingress_routes(count)
    if is_plain:
        from benchmarks.apps import plain

        names = {"uvicorn": bare, "Starlette route": plain.starlette_app, "async __call__": None}
        return names.get(name, plain.fastapi_app)
    from benchmarks.apps import ours

    names = {"uvicorn": None, "Starlette route": None, "async __call__": ours.call}
    return names.get(name, ours.methods)


def plain_routes(count: int) -> Any:
    app = FastAPI()

    async def endpoint(item_id: int) -> str:
        return "hello"

    for number in range(count):
        app.get(f"/{number}/{{item_id}}", response_model=None)(endpoint)
    return app


def ingress_routes(count: int) -> Any:
    app = FastAPI()

    class Routes:
        async def endpoint(self, item_id: int) -> str:
            return "hello"

        for number in range(count):
            app.get(f"/{number}/{{item_id}}", response_model=None)(endpoint)

    return serve.deployment(name=f"Routes{count}")(serve.ingress(app)(Routes)).bind()


async def measure(side: str, runs: int) -> dict[str, dict[str, float]]:
    """Return the cost of each step, by the number of requests in flight."""
    named = {name: app_of(name, is_plain=side == "plain") for name in STEPS}
    there = {name: app for name, app in named.items() if app is not None}
    costs: dict[str, dict[str, list[float]]] = {name: {} for name in there}
    async with AsyncExitStack() as stack:
        if side != "plain":
            for app in dict.fromkeys(there.values()):
                await stack.enter_async_context(started(app))
        configs = {}
        for name, app in there.items():
            configs[name] = Config(app, http="httptools", lifespan="off", access_log=False)
            configs[name].load()
        for run in range(runs + 1):  # the first run is for warm-up
            for name, in_flight in product(there, IN_FLIGHT):
                count = REQUESTS if run else WARM_UP
                us = await cost_us(configs[name], STEPS[name], in_flight, count)
                if run:
                    costs[name].setdefault(str(in_flight), []).append(us)
    return {name: {many: median(us) for many, us in each.items()} for name, each in costs.items()}


def in_child(side: str, runs: int) -> dict[str, dict[str, float]]:
    """Measure in a separate process, because an application reads its flags once."""
    command = [sys.executable, "-m", "benchmarks.steps", "--runs", str(runs), "--side", side]
    env = {**os.environ, **FLAGS[side]}
    ran = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, float]] = json.loads(ran.stdout)
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    made = Table(title=f"us of processor time a request, {machine()}", box=SIMPLE_HEAD)
    made.add_column("step", no_wrap=True)
    for side, many in product(FLAGS, IN_FLIGHT):
        made.add_column(f"{side}\n{many} in flight", justify="right")
    for name in STEPS:
        costs = [
            found[side].get(name, {}).get(str(many)) for side, many in product(FLAGS, IN_FLIGHT)
        ]
        made.add_row(name, *("" if cost is None else f"{cost:.1f}" for cost in costs))
    return made


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.steps",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=command.pairs, default=7, help="of each step")
    parser.add_argument("--side", choices=list(FLAGS), help="measure one only, print JSON")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(uvloop.run(measure(options.side, options.runs))))
        return 0
    found = {side: in_child(side, options.runs) for side in FLAGS}
    console = Console(highlight=False)
    console.print(table(found))
    document = {"machine": machine(), "runs": options.runs, "us": found}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written to {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
