"""The frames of a request: the functions of `ingress` that it enters, and in how many modules.

`python -m benchmarks.frames` counts them with `sys.setprofile` in all threads, one request at a
time: over uvicorn's protocol in this process as `benchmarks.steps`, and over a socket of the server
that `ingress run` has, with the server's limits and its own connections. A coroutine that waits is
entered again, and counts again. Functions that fewer than half of the requests enter are left out:
they belong to timers. The stall watchdog is off, because what it does depends on the load.

A climb is a call of a function in a module that the caller's module does not import, directly or by
way of others: the imports are an order of the modules, without circles, and the caller stands
lower. A reader cannot look its name up, but has to know who passed the object in.

    stream of 3    an `async def` endpoint that returns a StreamingResponse of three chunks
    with a handle  an `async def` endpoint that awaits a call of another deployment
    in a process   the frames of `async` on the server's side; `in the child` are those over there
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import uvloop
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from uvicorn.config import Config

import ingress as serve
from benchmarks.servers import ROOT

PACKAGE = str(Path(serve.__file__).parent) + os.sep
REQUESTS = 100
WARM_UP = 2_000  # before that, each request is noted as one of the slowest
FLAGS = {"default": {}, "both 0": {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}, "ingress run": {}}  # fmt: skip
TARGETS = {
    "async": "/async",
    "def": "/def",
    "stream of 3": "/stream",
    "with a handle": "/handle",
    "in a process": "/async",
    "in the child": "/async",
}

app = FastAPI()


class Profile:
    """The functions of `ingress` that were entered, and the calls between its modules."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def clear(self) -> None:
        self.found, self.calls = Counter(), Counter()

    def enter(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            called = code.co_filename.removeprefix(PACKAGE)
            self.found[f"{called}:{code.co_qualname}"] += 1
            above = frame.f_back
            while above is not None and not above.f_code.co_filename.startswith(PACKAGE):
                above = above.f_back
            if above is not None:
                self.calls[above.f_code.co_filename.removeprefix(PACKAGE), called] += 1

    def per_request(self) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
        """Return both without what fewer than half of the requests enter."""
        least = REQUESTS / 2
        functions = {n: t / REQUESTS for n, t in sorted(self.found.items()) if t >= least}
        calls = [(*pair, t / REQUESTS) for pair, t in self.calls.items() if t >= least]
        return functions, [each for each in calls if each[0] != each[1]]


PROFILE = Profile()


async def chunks() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield b"hello"


@serve.deployment
class Leaf:
    async def hello(self) -> str:
        return "hello"


@serve.deployment
@serve.ingress(app)
class Endpoints:
    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf
        sys.setprofile(PROFILE.enter)  # of the user loop, in a child too

    async def profile(self, *, is_new: bool) -> Profile:
        """Return what was counted in this process until now, or since then."""
        if is_new:
            PROFILE.clear()
        return PROFILE

    @app.get("/async", response_model=None)
    async def async_endpoint(self) -> str:
        return "hello"

    @app.get("/def", response_model=None)
    def def_endpoint(self) -> str:
        return "hello"

    @app.get("/stream", response_model=None)
    async def stream(self) -> StreamingResponse:
        return StreamingResponse(chunks())

    @app.get("/handle", response_model=None)
    async def handle(self) -> str:
        answer: str = await self.leaf.hello.remote()
        return answer


@dataclass
class Count:
    """The frames of one request, by function: `module:name`; and its calls between modules."""

    functions: dict[str, float]
    calls: list[tuple[str, str, float]]

    @property
    def frames(self) -> int:
        return round(sum(self.functions.values()))

    @property
    def modules(self) -> int:
        return len({each.partition(":")[0] for each in self.functions})

    def climbs(self) -> dict[tuple[str, str], float]:
        """Return the calls of modules that the caller's module does not import."""
        graph = grimp.build_graph("ingress", exclude_type_checking_imports=True)
        return {
            (caller, called): times
            for caller, called, times in self.calls
            if _dotted(called) not in graph.find_upstream_modules(_dotted(caller))
        }


def _dotted(path: str) -> str:
    module = "ingress." + path.removesuffix(".py").replace("/", ".")
    return module.removesuffix(".__init__")


def count(name: str, flags: str) -> Count:
    """Count the frames in a separate process, because an application reads its flags once."""
    command = [sys.executable, "-m", "benchmarks.frames", "--target", name]
    if flags == "ingress run":
        command.append("--run")
    env = {**os.environ, **FLAGS[flags], "INGRESS_STALL_THRESHOLD_MS": "0"}
    ran = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
    return Count(*json.loads(ran.stdout))


async def _count_here(name: str) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    from benchmarks.steps import cost_us, started

    threading.setprofile(PROFILE.enter)
    sys.setprofile(PROFILE.enter)
    async with AsyncExitStack() as stack:
        isolation: Any = "process" if name in ("in a process", "in the child") else "thread"
        application: Any = Endpoints.options(isolation=isolation).bind(Leaf.bind())
        await stack.enter_async_context(started(application))
        config = Config(application, http="httptools", lifespan="off", access_log=False)
        config.load()
        await cost_us(config, TARGETS[name], 1, WARM_UP)
        handle = serve.get_app_handle("default")
        await handle.profile.remote(is_new=True)
        PROFILE.clear()
        await cost_us(config, TARGETS[name], 1, REQUESTS)
        sys.setprofile(None)
        threading.setprofile(None)
        found = PROFILE.per_request()
        if name == "in the child":
            found = (await handle.profile.remote(is_new=False)).per_request()
    return found


def _count_run(name: str) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """Count over a socket of a server of `serve.run`, which is that of `ingress run`."""
    threading.setprofile(PROFILE.enter)
    isolation: Any = "process" if name in ("in a process", "in the child") else "thread"
    serve.start({"port": 0})
    handle = serve.run(Endpoints.options(isolation=isolation).bind(Leaf.bind()))
    (url,) = serve.status().proxies
    client = HTTPConnection(url.removeprefix("http://"))

    def ask(count: int) -> None:
        for _ in range(count):
            client.request("GET", TARGETS[name])
            if client.getresponse().read() not in (b'"hello"', b"hello" * 3):
                raise AssertionError(name)

    ask(WARM_UP)
    handle.profile.remote(is_new=True).result()
    PROFILE.clear()
    ask(REQUESTS)
    found = PROFILE.per_request()
    if name == "in the child":
        found = handle.profile.remote(is_new=False).result().per_request()
    client.close()
    serve.shutdown()
    return found


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.frames", description=__doc__)
    parser.add_argument("--target", help="count one only, print its functions as JSON")
    parser.add_argument("--run", action="store_true", help="over the server of `ingress run`")
    options = parser.parse_args()
    if options.target:
        found = _count_run(options.target) if options.run else None
        print(json.dumps(found or uvloop.run(_count_here(options.target))))
        return 0
    for name in TARGETS:
        for flags in FLAGS:
            counted = count(name, flags)
            climbs = round(sum(counted.climbs().values()))
            print(
                f"{name}, {flags}: {counted.frames} frames in {counted.modules} modules, "
                f"{climbs} climbs"
            )
    return 0


if __name__ == "__main__":
    from benchmarks import frames  # a child imports the class by its module's name

    sys.exit(frames.main())
