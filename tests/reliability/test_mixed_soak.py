"""All kinds of requests at random: each client gets one answer or a cut, and nothing is left.

Streams, WebSockets, batches, models, chains and threads; clients that disconnect by FIN and RST,
callers that cancel, deadlines, full queues, retries, and applications that are replaced meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

import ingress as serve
from ingress.core.calls import deadlines
from ingress.core.execution import threads
from ingress.engines import local_engine
from ingress.exceptions import (
    CALL_ERRORS,
    RayServeException,
    RequestCancelledError,
)
from tests.reliability import soak_app
from tests.reliability.soak_app import ITEMS, Leaf, make_root
from tests.servers import PATIENCE_S, ROUNDS, Answer, bind, get, served, set_flags, wait_until

LASTS_S = 75.0 if ROUNDS else 5.0
AT_ONCE = 40
REPLACED_EVERY_S = 0.8
CALLS = [
    *("sleep", "thread", "chain", "def-chain", "batched", "def-batched"),
    *("model", "model-batched", "background", "upload"),
]
STREAMS = ["items", "def-items", "batched-items"]
BY_HANDLE = ["sleep", "thread", "chain", "def_chain", "batched", "def_batched"]
BY_HANDLE += ["model", "model_batched"]
STREAMS_BY_HANDLE = ["_items", "_def_items"]
UPLOAD = b"x" * 100_000
REFUSALS = (408, 503)


class Soak:
    """The clients of one run, and the outcomes of their requests."""

    def __init__(self, port: int, seed: int, *, has_middleware: bool) -> None:
        self.port = port
        # Behind a middleware every response is a stream, which a deadline may cut.
        self.may_be_cut = [*STREAMS, *CALLS] if has_middleware else STREAMS
        self.dice = random.Random(seed)
        self.became = Counter[str]()
        self.wrong: list[str] = []
        self.keys = itertools.count()
        self.ends_at = time.monotonic() + LASTS_S

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._client())

    async def _client(self) -> None:
        while time.monotonic() < self.ends_at and not self.wrong:
            what = self.dice.choices(
                [self._request, self._leave, self._websocket, self._call], [5, 3, 1, 3]
            )[0]
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await what()
            except TimeoutError:
                self.wrong.append(f"{what.__name__} hangs")

    def _head(self, path: str, key: str) -> bytes:
        lines = [f"{'POST' if path == 'upload' else 'GET'} /{path}?key={key} HTTP/1.1"]
        lines += ["Host: a", "Connection: close"]
        if path == "upload":
            lines.append(f"Content-Length: {len(UPLOAD)}")
        if "model" in path:
            lines.append(f"serve_multiplexed_model_id: {self.dice.choice('abcd')}")
        if self.dice.random() < 0.3:
            lines.append(f"x-request-timeout-seconds: {self.dice.uniform(0.001, 0.03):.4f}")
        return "\r\n".join([*lines, "", ""]).encode()

    async def _request(self) -> None:
        """Make a request and check its one answer."""
        path, key = self.dice.choice(CALLS + STREAMS), f"k{next(self.keys)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(self._head(path, key) + (UPLOAD if path == "upload" else b""))
            raw = await reader.read(-1)
        except ConnectionError:  # the server refused it before the end of its body
            assert path == "upload"
            self.became["refused"] += 1
            return
        finally:
            await close(writer)
        answer = Answer(raw)
        expected = (key + ",") * ITEMS if path in STREAMS else json.dumps(key)
        heads = len(re.findall(rb"HTTP/1\.1 \d", raw))
        if answer.status == 200 and answer.is_complete:
            is_right = answer.body.decode() == expected
            self.became["answered"] += 1
        elif answer.status == 200:
            is_right = path in self.may_be_cut and expected.startswith(answer.body.decode())
            self.became["cut"] += 1
        else:
            is_right = answer.status in REFUSALS and answer.is_complete
            self.became[str(answer.status)] += 1
        if heads != 1 or not is_right:
            self.wrong.append(f"{path} {key}: {raw[:400]!r}")

    async def _leave(self) -> None:
        """Make a request and disconnect in the middle of it."""
        path, key = self.dice.choice([*CALLS, *STREAMS]), f"k{next(self.keys)}"
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = UPLOAD[: self.dice.choice([0, 10, 100_000])] if path == "upload" else b""
        writer.write(self._head(path, key) + body)
        await asyncio.sleep(self.dice.uniform(0, 2 * soak_app.LONGEST_S))
        self.became["left"] += 1
        await close(writer, reset=self.dice.random() < 0.5)

    async def _websocket(self) -> None:
        """Send a few messages over a WebSocket, then close it, or drop the connection."""
        key = f"k{next(self.keys)}"
        headers = {}
        if self.dice.random() < 0.3:
            headers["x-request-timeout-seconds"] = f"{self.dice.uniform(0.001, 0.01):.4f}"
        url = f"ws://127.0.0.1:{self.port}/echo?key={key}"
        how = self.dice.choice(["closes", "FIN", "RST"])
        websocket: ClientConnection | None = None
        try:
            websocket = await connect(url, additional_headers=headers, close_timeout=1)
            for _ in range(self.dice.randrange(4)):
                await websocket.send("say it")
                if self.dice.random() < 0.8 and await websocket.recv() != key:
                    self.wrong.append(f"a WebSocket got another's answer, not {key}")
            self.became["websocket"] += 1
        except (WebSocketException, ConnectionError, EOFError) as error:
            self.became[f"websocket {type(error).__name__}"] += 1
        if websocket is not None:
            if how == "closes":
                await websocket.close()
            else:
                if how == "RST":
                    linger(websocket.transport.get_extra_info("socket"))
                websocket.transport.abort()
            await websocket.wait_closed()

    async def _call(self) -> None:
        """Make a call by handle, and cancel some calls."""
        is_stream = self.dice.random() < 0.3
        method = self.dice.choice(STREAMS_BY_HANDLE if is_stream else BY_HANDLE)
        key = f"k{next(self.keys)}"
        handle = serve.get_app_handle("default").options(
            method_name=method,
            stream=is_stream,
            multiplexed_model_id=self.dice.choice("abcd") if "model" in method else "",
        )
        response = handle.remote(key)

        async def take() -> str:
            if is_stream:
                return "".join([item async for item in response])
            return str(await response)

        task = asyncio.create_task(take())
        how = self.dice.choice(["waits", "cancels", "is cancelled"])
        if how != "waits":
            await asyncio.sleep(self.dice.uniform(0, 2 * soak_app.LONGEST_S))
            if how == "cancels":
                response.cancel()
            else:
                task.cancel()
        try:
            result = await task
        except asyncio.CancelledError:
            self.became["cancelled"] += 1
        except RequestCancelledError as error:
            self.became["cancelled"] += 1
            if how != "cancels":
                self.wrong.append(f"{method} {how}: {error!r}")
        except RayServeException as error:
            self.became[type(error).__name__] += 1
        else:
            self.became["answered by handle"] += 1
            if result != ((key + ",") * ITEMS if is_stream else key):
                self.wrong.append(f"{method} {key}: {result!r}")


async def close(writer: asyncio.StreamWriter, *, reset: bool = False) -> None:
    if reset:
        linger(writer.get_extra_info("socket"))
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


def linger(client: socket.socket) -> None:
    """Make the socket close with RST instead of FIN."""
    try:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    except OSError:
        pass  # the server has closed it already


def pending() -> int:
    return sum(not each.done() for each in gc.get_objects() if type(each) is asyncio.Task)


def workers() -> list[str]:
    return [each.name for each in threading.enumerate() if "-worker-" in each.name]


def left_behind(root: Any) -> dict[str, Any]:
    """Return the state that requests left behind. Reads private attributes."""
    engine = local_engine()
    found: dict[str, Any] = {
        "in flight": set(engine.http.proxy.in_flight.replies),
        "swept": set(engine.http.proxy.in_flight._swept),
        "running": {key: count for key, count in soak_app.running.items() if count},
        "deadlines": [each._calls for each in deadlines._deadlines.values() if each._calls],
    }
    for function in vars(root.func_or_class).values():
        if hasattr(function, "__ingress_batcher__"):
            queues = function.__ingress_batcher__._queues
            found[f"batches of {function.__name__}"] = dict(queues)
    for deployment in engine.applications["default"].deployments.values():
        router, name = deployment.router, deployment.router.deployment_id.name
        waiting = router._waiting._classes[0]
        found[f"queue of {name}"] = [*waiting, *router._resting, *router._holders]
        for replica in deployment.replicas:
            found[f"slots of {replica}"] = replica.ongoing
            found[f"calls of {replica}"] = dict(replica.running)
            found[f"models asked of {replica}"] = dict(replica.slots.requested)
            found[f"models used of {replica}"] = dict(replica.context.models.in_use)
            found[f"batches of {replica}"] = dict(replica.context.batches)
    return {what: there for what, there in found.items() if there}


def is_expected(record: logging.LogRecord) -> bool:
    """Return whether a record is the server's report of a cut answer."""
    error = record.exc_info[1] if record.exc_info else None
    is_cut = record.name == "uvicorn.error" and isinstance(error, CALL_ERRORS)
    is_cancellation = record.name == "ingress" and str(record.msg).endswith("was cut: %s")
    return is_cut or is_cancellation or record.levelno <= logging.INFO


@pytest.fixture
def flagged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_flags(monkeypatch, request.param, sync="1")
    monkeypatch.setattr(threads, "IDLE_S", 0.2)
    soak_app.running.clear()
    soak_app.excesses.clear()
    yield
    serve.shutdown()


@pytest.mark.thorough
@pytest.mark.reliability("E01", "B21")
@pytest.mark.parametrize(
    ("flagged", "has_attempts"),
    list(itertools.product("10", [False, True])) if ROUNDS else [("1", False), ("0", True)],
    ids=lambda param: {"0": "separate0", "1": "separate1", False: "once", True: "attempts"}[param],
    indirect=["flagged"],
)
def test_everything_at_once_leaves_nothing(
    flagged: None, has_attempts: bool, switch_interval: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(has_middleware=has_attempts)

    def application() -> Any:
        return bind(root.options(num_replicas=2), bind(Leaf))

    if has_attempts:
        serve.start({"port": 0, "retry_started_methods": ["GET"], "request_timeout_s": 0.2})
    port = served(application())
    assert get(port, "/sleep?key=a").status == 200
    before = pending()
    soak = Soak(port, seed=round(LASTS_S), has_middleware=has_attempts)
    over = threading.Event()
    failures: list[BaseException] = []

    def replace() -> None:
        try:
            while not over.wait(REPLACED_EVERY_S):
                serve.run(application())
        except BaseException as error:
            failures.append(error)

    replacer = threading.Thread(target=replace)
    replacer.start()
    try:
        asyncio.run(soak.run())
    finally:
        over.set()
        replacer.join()
    print(dict(soak.became))

    assert not soak.wrong
    assert not failures
    assert not soak_app.excesses
    try:
        wait_until(lambda: not left_behind(root), 5)
    except AssertionError:
        assert left_behind(root) == {}
    wait_until(lambda: pending() <= before)
    wait_until(lambda: not workers())
    assert not [
        (each.getMessage(), each.exc_info and repr(each.exc_info[1]))
        for each in caplog.records
        if not is_expected(each)
    ]
    assert min(soak.became[each] for each in ("answered", "left", "cancelled")) > 20
    assert get(port, "/sleep?key=b").status == 200
