"""Objects that several threads write have all attributes from the start: docs/concurrency.md."""

from __future__ import annotations

import asyncio
import gc
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any

import pytest
from fastapi import Depends, FastAPI, WebSocket
from starlette.requests import Request
from starlette.responses import StreamingResponse
from websockets.sync.client import connect

import ingress as serve
from ingress.core.calls.call import Call
from ingress.engines import local_engine
from ingress.observe.timeline.instrumentation import record
from ingress.observe.timeline.recorder import Recorder
from ingress.testing import Latch
from tests.forced_race import FIELDS
from tests.servers import PATIENCE_S, Connection, bind, run_python, served, set_flags, wait_until

MAY_HAVE_A_DICT = {
    "Options": "pydantic's models have one; frozen",
    "BuiltDeployment": "its one cached property is asked for before there is a replica",
    "LoopExecutor": "asyncio insists on its base, of which it uses nothing",
    "RequestFilter": "logging's filters have one; it sets nothing",
    "StreamingRoute": "FastAPI's routes have one; it is not changed once it is bound",
    "Lifted": "FastAPI reads a function's attributes of it; they are set when it is made",
    "_LineStream": "Starlette's responses have one; the task of one request",
    "_EventStream": "the same",
    "Chunks": "bytes take no slots; its one name is set before another thread sees it",
    "Connections": "the server's loop",
    "Guarded": "uvicorn's protocols have one; the server's loop",
    "UvicornServer": "uvicorn's server has one; its loop, and signals set what is there",
    "ThreadAware": "asyncio's loops have one; the thread that runs the loop",
    "_CallSoon": "a dict for each thread",
}
"""Classes of `ingress` that live requests hold and that may have a dict, with the reason.

Subclasses are included. No dict gets a new name while requests run.
"""

LATE = "x-request-timeout-seconds: 30\r\n"
"""A deadline that never passes."""

BEGUN = {
    *("wait", "attempt", "thread", "lane", "body", "stream", "lines", "call", "queued", "items"),
    *("batch", "model", "socket"),
}
"""The requests and calls that wait for the latch once all have begun."""

KINDS = {
    *("Reply", "Attempts", "WebSocketReply", "HTTPWork", "Call", "Invocation"),
    *("DeploymentResponse", "DeploymentResponseGenerator"),
    *("BatchQueue", "Batcher", "Item", "Models", "_Cache", "_Model"),
    *("Channel", "Client", "Deadlines", "Wakeup", "Mailbox", "Router", "Replica", "UserCode"),
    *("WorkerPool", "WorkerThreads", "Work", "LanePool", "_LaneWork", "_Turn"),
    *("HTTPProxy", "InFlight"),
    *("ReplicaRuntime", "ReplicaApp", "RouteIndex", "Lifted", "EventLoopThread", "LocalEngine"),
}
"""Classes that the walk must find; otherwise it sees too little."""


@pytest.mark.parametrize("kind", FIELDS)
def test_two_threads_that_write_one_request_do_not_end_the_process(kind: str) -> None:
    """On CPython 3.11 they ended it with a segmentation fault, or lost an attribute."""
    ran = run_python("-m", "tests.forced_race", kind)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "survived" in ran.stdout


class Everything:
    """An application with requests of every kind, all of which wait until `go` is open."""

    def __init__(self) -> None:
        self.go = Latch(timeout_s=PATIENCE_S)
        self.begun: set[str] = set()

    async def wait(self, what: str) -> str:
        self.begun.add(what)
        await self.go
        return what

    def wait_blocking(self, what: str) -> str:
        self.begun.add(what)
        self.go.wait()
        return what

    async def items(self, what: str) -> AsyncIterator[str]:
        yield "first "
        yield await self.wait(what)

    def application(self) -> Any:
        everything, app = self, FastAPI()

        @serve.deployment(max_ongoing_requests=10)
        class Leaf:
            async def wait(self, what: str) -> str:
                return await everything.wait(what)

            async def items(self, what: str) -> AsyncIterator[str]:
                async for item in everything.items(what):
                    yield item

        @serve.deployment(max_ongoing_requests=1)
        class Narrow:
            async def wait(self, what: str) -> str:
                return await everything.wait(what)

        @serve.deployment(num_replicas=2, lanes={"one": 1})
        @serve.ingress(app)
        class Root:
            def __init__(self, leaf: Any, narrow: Any) -> None:
                self.leaf, self.narrow = leaf, narrow

            def number(self) -> int:
                return 1

            @app.get("/wait")
            async def wait(self, number: int = Depends(number)) -> str:
                return await everything.wait("wait")

            @app.put("/attempt")
            async def attempt(self) -> str:
                return await everything.wait("attempt")

            @app.get("/thread")
            def thread(self) -> str:
                return everything.wait_blocking("thread")

            @app.get("/lane")
            @serve.method(lane="one")
            def lane(self) -> str:
                return everything.wait_blocking("lane")

            @app.post("/body")
            async def body(self, request: Request) -> str:
                everything.begun.add("body")
                return str(len(await request.body()))

            @app.get("/stream")
            async def stream(self) -> StreamingResponse:
                return StreamingResponse(everything.items("stream"))

            @app.get("/lines")
            def lines(self) -> Iterator[str]:
                yield "first"
                yield everything.wait_blocking("lines")

            @app.get("/call")
            async def call(self) -> Any:
                return await self.leaf.wait.remote("call")

            @app.get("/queued")
            async def queued(self) -> Any:
                both = self.narrow.wait.remote("queued"), self.narrow.wait.remote("queued")
                return await asyncio.gather(*both)

            @app.get("/items")
            async def items(self) -> Any:
                stream = self.leaf.items.options(stream=True).remote("items")
                return [item async for item in stream]

            @app.get("/batch")
            async def batch(self) -> Any:
                return await self._batch("batch")

            @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.01)
            async def _batch(self, items: list[str]) -> list[str]:
                return [await everything.wait(item) for item in items]

            @serve.multiplexed
            async def load(self, model_id: str) -> str:
                return await everything.wait(model_id)

            @app.get("/model")
            async def model(self) -> Any:
                return await self.load("model")

            @app.websocket("/socket")
            async def socket(self, websocket: WebSocket) -> None:
                await websocket.accept()
                await websocket.receive_text()
                await websocket.send_text(await everything.wait("socket"))

        return bind(Root, bind(Leaf), bind(Narrow))

    def requests(self, port: int) -> list[Callable[[], bool]]:
        """Return functions that make one request each and return whether its answer was right."""

        def ask(path: str, method: str = "GET") -> bool:
            with Connection(port) as connection:
                connection.request(path, method=method, headers=LATE + "Connection: close\r\n")
                return connection.answer().status == 200

        def upload() -> bool:
            with Connection(port) as connection:
                size = "Content-Length: 100000\r\nConnection: close\r\n"
                connection.request("/body", method="POST", headers=LATE + size)
                connection.send(b"x" * 99_999)
                self.go.wait()
                connection.send(b"x")
                return connection.answer().status == 200

        def talk() -> bool:
            with connect(f"ws://127.0.0.1:{port}/socket", proxy=None) as client:
                client.send("hello")
                return client.recv(timeout=PATIENCE_S) == "socket"

        def call() -> bool:
            return bool(serve.get_app_handle("default").wait.remote().result() == "wait")

        paths = ["wait", "thread", "stream", "lines", "call", "queued", "items", "batch", "model"]
        paths += ["lane"] * 4  # at least two on a replica: one waits for the thread of the other
        asks = [lambda path=path: ask(f"/{path}") for path in paths]
        return [*asks, lambda: ask("/attempt", "PUT"), upload, talk, call]


def referents(thing: Any) -> list[Any]:
    """Return the objects that `thing` refers to, except its module."""
    if isinstance(thing, types.FunctionType):
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
    if isinstance(thing, types.FrameType):
        return [thing.f_back, dict(thing.f_locals)]
    return gc.get_referents(thing)


def held_by_requests() -> list[Any]:
    """Return the objects of `ingress` that requests in flight and their threads refer to."""
    gc.unfreeze()
    # `isinstance` would raise for a weak proxy whose referent is gone.
    calls = [each for each in gc.get_objects() if issubclass(type(each), Call)]
    frames = [frame for frame in sys._current_frames().values() if frame is not sys._getframe()]
    seen: dict[int, Any] = {}
    todo: list[Any] = [*(call for call in calls if not call.settled), *frames]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen and not isinstance(thing, type | types.ModuleType):
            seen[id(thing)] = thing
            todo += referents(thing)
    return [each for each in seen.values() if is_ours(type(each))]


def is_ours(cls: type) -> bool:
    name = cls.__module__
    is_testing = name.startswith("ingress.testing")  # no server has it
    return name.startswith("ingress.") and not is_testing


def may_have_a_dict(cls: type) -> bool:
    # Exceptions have a dict; the main thread refers to enums and errors that are test parameters.
    return issubclass(cls, Enum | BaseException) or any(
        each.__name__ in MAY_HAVE_A_DICT for each in cls.__mro__ if is_ours(each)
    )


@pytest.mark.parametrize(
    ("separate", "is_recorded"),
    [("1", False), ("1", True), ("0", False)],
    ids=["separate1", "recorded", "separate0"],
)
def test_what_requests_in_flight_share_has_no_dict(
    separate: str, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, separate)
    everything = Everything()
    recording = ExitStack()
    if is_recorded:
        recorder = recording.enter_context(Recorder())
        recording.enter_context(local_engine().instrumented(partial(record, recorder)))
    try:
        port = served(everything.application(), retry_started_methods=["PUT"])
        requests = everything.requests(port)
        with ThreadPoolExecutor(len(requests)) as pool:
            try:
                answers = [pool.submit(request) for request in requests]
                wait_until(lambda: everything.begun == BEGUN)
                in_flight = local_engine().http.proxy.in_flight
                wait_until(lambda: len(in_flight.replies) == len(requests) - 1)
                held = held_by_requests()
                before = [(each, set(vars(each))) for each in held if may_have_a_dict(type(each))]
            finally:
                everything.go.count_down()
            answered = [answer.result(PATIENCE_S) for answer in answers]
        got_late = {type(each).__name__ for each, names in before if set(vars(each)) != names}
    finally:
        serve.shutdown()
        recording.close()

    assert all(answered)
    kinds = {each.__name__ for thing in held for each in type(thing).__mro__}
    assert kinds >= KINDS
    with_dict = {type(each) for each in held if type(each).__dictoffset__}
    assert sorted(each.__name__ for each in with_dict if not may_have_a_dict(each)) == []
    assert got_late == set()
