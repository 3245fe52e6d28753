"""Deadlines: 408 on time, slots that stay taken, work that never starts; over real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from fastapi import BackgroundTasks, FastAPI, WebSocket
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.settings import REQUEST_TIMEOUT_S
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.channel import Channel
from ingress.core.calls.deadlines import GRAIN_S, Deadlines, deadlines_of, earlier
from ingress.core.calls.loops import EventLoopThread, mailbox_of, run_blocking
from ingress.exceptions import RequestCancelledError, RequestTimeoutError
from ingress.handle import Invocation
from ingress.schema import ReplicaDetails
from ingress.serving.http.asgi_driver import respond
from ingress.serving.http.reply import Reply
from ingress.serving.http.work import HTTPWork
from ingress.serving.replicas.router import Router
from ingress.testing import Latch
from tests.fakes import FakeReplica, Ledger, make_call, together
from tests.servers import (
    PATIENCE_S,
    Connection,
    asking,
    bind,
    get,
    ongoing,
    served,
    uvicorn_in_a_thread,
    wait_until,
    with_gil,
)

SHORT_S = 0.15


pytestmark = pytest.mark.usefixtures("threadpool")


def replicas() -> list[ReplicaDetails]:
    deployments = serve.status().applications["default"].deployments.values()
    return [replica for each in deployments for replica in each.replicas]


# The answer.


@serve.deployment
async def never(request: Request) -> None:
    await asyncio.Future()


def test_a_request_that_takes_too_long_is_answered_with_408_in_the_words_of_ray() -> None:
    ledger = Ledger()

    @serve.deployment
    async def slow(request: Request) -> None:
        try:
            await asyncio.Future()
        finally:
            ledger.cancelled.set()

    port = served(slow.bind(), request_timeout_s=SHORT_S)
    begin = time.monotonic()
    answer = get(port, "/", "x-request-id: r-1\r\n")

    assert time.monotonic() - begin >= SHORT_S - 0.01
    assert (answer.status, answer.is_complete) == (408, True)
    assert answer.body == f"Request r-1 timed out after {SHORT_S}s.".encode()
    assert answer.headers["x-request-id"] == "r-1"
    assert ledger.cancelled.wait(PATIENCE_S), "async work is cancelled"
    wait_until(lambda: ongoing() == 0)


@pytest.mark.parametrize(
    ("in_code", "in_environment", "limit_s"),
    [
        # The guide: "By default, Serve lets client HTTP requests run to completion no matter how
        # long they take."
        ({}, None, None),
        ({}, "0", None),
        ({}, "7.5", 7.5),
        ({"request_timeout_s": 3}, None, 3),
        ({"request_timeout_s": 3}, "7.5", 3),
        ({"request_timeout_s": None}, "7.5", None),
    ],
    ids=["neither", "0", "environment", "code", "both", "none-in-code"],
)
def test_what_code_says_beats_the_environment(
    in_code: dict[str, Any],
    in_environment: str | None,
    limit_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if in_environment is not None:
        monkeypatch.setenv(REQUEST_TIMEOUT_S, in_environment)

    @serve.deployment
    async def left(request: Request) -> Any:
        deadline = CURRENT_CALL.get().deadline
        return None if deadline is None else deadline - time.monotonic()

    answer = get(served(left.bind(), **in_code), "/")

    if limit_s is None:
        assert answer.body == b""
    else:
        assert limit_s - 2 < float(answer.body) <= limit_s


# The guide: "You can set an end-to-end timeout for HTTP requests by setting the
# RAY_SERVE_REQUEST_PROCESSING_TIMEOUT_S environment variable."
@pytest.mark.parametrize("place", ["environment", "start"])
def test_a_limit_counts_under_a_server_that_is_not_ours(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "environment":
        monkeypatch.setenv(REQUEST_TIMEOUT_S, str(SHORT_S))
    else:
        serve.start({"host": None, "request_timeout_s": SHORT_S})
    with TestClient(never.bind()) as client:
        assert client.get("/").status_code == 408


def test_a_loop_that_user_code_blocks_does_not_hold_the_408_up(separate: str) -> None:
    if separate == "0":
        pytest.skip("the blocked loop is the server's own: nothing of it can be on time")
    ledger = Ledger()

    @serve.deployment
    async def blocking(request: Request) -> None:
        ledger.entered.set()
        ledger.leave.wait()

    port = served(blocking.bind(), request_timeout_s=SHORT_S)
    assert get(port, "/").status == 408
    assert not ledger.leave.is_open
    assert replicas()[0].orphans == 1
    ledger.leave.count_down()
    wait_until(lambda: ongoing() == 0)


# The header.


SHORTER = [b"2", b"0.5", b"1e-3", b" 2 "]
IGNORED = [b"0", b"-1", b"-0.0", b"nan", b"inf", b"-inf", b"1e309", b"", "é".encode(), b"\xff"]
IGNORED += [b"60", b"1, 2", b"?1", b"1" * 1_000_000, b"0." + b"0" * 1_000_000 + b"1"]


@pytest.mark.reliability("C08")
@pytest.mark.parametrize("header", SHORTER + IGNORED)
def test_a_header_may_shorten_a_timeout_and_nothing_else(header: bytes) -> None:
    assert earlier(30.0, header) == (float(header) if header in SHORTER else 30.0)


def test_without_a_limit_of_the_server_the_header_is_the_limit() -> None:
    assert earlier(None, b"60") == 60.0
    assert earlier(None, b"0") is None
    assert earlier(None, b"1e308") == 1e308


@pytest.mark.reliability("C08")
@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_no_value_of_the_header_is_an_error_or_disables_the_limit(http: str) -> None:
    @serve.deployment
    async def slow(request: Request) -> str:
        if request.url.path == "/left":
            deadline = CURRENT_CALL.get().deadline
            assert deadline is not None
            return str(deadline - time.monotonic() > 25)
        await asyncio.Future()
        return "never"

    with uvicorn_in_a_thread(slow.bind(), {"http": http}, request_timeout_s=30) as port:
        for value in IGNORED:
            with Connection(port) as connection:
                connection.send(
                    b"GET /left HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
                    b"x-request-timeout-seconds: " + value + b"\r\n\r\n"
                )
                answer = connection.answer()
            # The server itself may refuse a million characters and invalid headers.
            assert answer.body == b"True" or answer.status in (400, 431), (value[:20], answer.raw)
            assert answer.status != 500
        assert get(port, "/", asking(0.1) + asking(60)).status == 408
        assert get(port, "/", asking(60) + asking(0.1)).status == 408


# The work.


@pytest.mark.reliability("B08")
def test_a_def_that_times_out_keeps_its_slot_until_its_thread_ends() -> None:
    ledger = Ledger()

    @serve.deployment(max_ongoing_requests=1)
    def block(request: Request) -> str:
        ledger.enter(request.url.path)
        ledger.leave.wait()
        ledger.exit()
        return "late"

    port = served(block.bind())
    assert get(port, "/first", asking(SHORT_S)).status == 408
    (replica,) = replicas()
    assert (replica.ongoing, replica.orphans) == (1, 1)

    with Connection(port) as waiting:
        waiting.request("/second")
        assert get(port, "/third", asking(SHORT_S)).status == 408, "in the queue"
        assert ledger.runs == {"/first": 1}
        ledger.leave.count_down()
        assert waiting.answer().body == b"late"
    wait_until(lambda: ongoing() == 0)
    assert replicas()[0].orphans == 0
    assert ledger.runs == {"/first": 1, "/second": 1}
    assert ledger.most_running == 1


@pytest.mark.reliability("B16")
def test_never_more_run_than_there_are_slots_while_timeouts_fire(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request runs five times as long as its client waits, and then fails unheard."""
    ledger = Ledger()

    @serve.deployment(max_ongoing_requests=4)
    def slow(request: Request) -> None:
        name = request.headers["x-request-id"]
        ledger.enter(name)
        time.sleep(0.25)
        ledger.exit()
        raise RuntimeError(f"late {name}")

    port = served(slow.bind(), request_timeout_s=0.05)
    with caplog.at_level(logging.WARNING, "ingress"), ThreadPoolExecutor(16) as clients:
        ask = lambda number: get(port, "/", f"x-request-id: r-{number}\r\n").status  # noqa: E731
        assert set(clients.map(ask, range(120))) == {408}
        wait_until(lambda: ongoing() == 0)

    assert 4 <= sum(ledger.runs.values()) < 120
    assert ledger.most_running == 4
    told = Counter(
        record.getMessage().split("request ")[1].split()[0]
        for record in caplog.records
        if record.exc_info and "late" in str(record.exc_info[1])
    )
    assert told == ledger.runs, "each late exception is logged once, with its request's id"


def test_an_error_after_the_deadline_is_a_408_even_if_the_timer_is_late(
    separate: str, caplog: pytest.LogCaptureFixture
) -> None:
    if separate == "0":
        pytest.skip("the call is settled on the loop with the timer, which rings first")
    is_settled = Latch(timeout_s=PATIENCE_S)

    @serve.deployment
    def slow(request: Request) -> None:
        call = CURRENT_CALL.get()
        assert call.deadline is not None
        # The server's loop stands still until the error has settled the call.
        call.when_settled(lambda _: is_settled.count_down())
        assert isinstance(call.work, HTTPWork)
        call.work.reply.loop.call_soon_threadsafe(is_settled.wait)
        deadline = call.deadline
        wait_until(lambda: time.monotonic() > deadline)
        raise RuntimeError("late")

    with caplog.at_level(logging.WARNING, "ingress"):
        assert get(served(slow.bind(), request_timeout_s=SHORT_S), "/").status == 408
        # The slot is free a moment before the error is logged.
        wait_until(lambda: any(each.exc_info for each in caplog.records))
    assert ongoing() == 0
    assert [str(each.exc_info[1]) for each in caplog.records if each.exc_info] == ["late"]


def test_a_late_result_of_async_code_that_will_not_be_cancelled_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger()

    @serve.deployment
    async def stubborn(request: Request) -> str:
        while not ledger.leave.is_open:
            try:
                await ledger.leave
            except asyncio.CancelledError:
                ledger.cancelled.set()
        return "late"

    with Connection(served(stubborn.bind())) as connection:
        connection.request("/", headers=asking(SHORT_S))
        connection.receive_until(b"timed out after")
        assert ledger.cancelled.wait(PATIENCE_S)
        assert replicas()[0].orphans == 1
        ledger.leave.count_down()
        wait_until(lambda: ongoing() == 0)
        connection.request("/", headers=asking(SHORT_S) + "Connection: close\r\n")
        assert connection.receive_all().count(b"HTTP/1.1") == 2
    assert "failed after" not in caplog.text, "it has not failed"


def test_a_late_stream_is_not_waited_for_by_who_makes_it(caplog: pytest.LogCaptureFixture) -> None:
    """The stream holds more than the buffers of a client that has left."""
    ledger = Ledger()

    async def items() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"late"

    @serve.deployment
    async def stubborn(request: Request) -> StreamingResponse:
        while not ledger.leave.is_open:
            try:
                await ledger.leave
            except asyncio.CancelledError:
                pass
        return StreamingResponse(items())

    assert get(served(stubborn.bind()), "/", asking(SHORT_S)).status == 408
    ledger.leave.count_down()
    wait_until(lambda: ongoing() == 0)
    assert "failed after" not in caplog.text


@pytest.mark.reliability("A09")
def test_work_whose_deadline_passed_in_the_queue_never_starts() -> None:
    """One request keeps the slot until the deadlines of a thousand queued ones have passed."""
    ledger = Ledger()
    count, timeout_s = 1_000, 0.5

    @serve.deployment(max_ongoing_requests=1)
    async def work(request: Request) -> None:
        ledger.enter(request.url.path)
        if request.url.path == "/first":
            await ledger.leave

    port = served(work.bind())
    head = f"GET /queued HTTP/1.1\r\nHost: a\r\n{asking(timeout_s)}Connection: close\r\n\r\n"
    with Connection(port) as first:
        first.request("/first")
        assert ledger.entered.wait(PATIENCE_S)
        statuses: list[bytes] = []
        late_s: list[float] = []

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent_at = time.monotonic()  # before sending: the answer may be quick
            writer.write(head.encode())
            statuses.append(await reader.readline())
            late_s.append(time.monotonic() - sent_at - timeout_s)
            writer.close()
            await writer.wait_closed()

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(count)))

        asyncio.run(clients())
        assert Counter(statuses) == {b"HTTP/1.1 408 Request Timeout\r\n": count}
        assert min(late_s) > -0.01
        ledger.leave.count_down()
        assert first.answer().status == 200
    wait_until(lambda: ongoing() == 0)
    assert ledger.runs == {"/first": 1}


@pytest.mark.reliability("A09")
def test_a_call_whose_deadline_passes_on_the_way_to_its_replica_never_starts() -> None:
    """The timer of the deadline may be late, so the replica checks the clock too."""
    ledger = Ledger()

    class Late:
        async def work(self) -> None:
            ledger.enter()

    call = make_call(left_s=-0.001)
    call.work = Invocation("work", [], {}, None)
    handle = serve.run(bind(serve.deployment(Late)), route_prefix=None)
    handle._directory.router(handle.deployment_id).assign(call)

    assert call.wait_blocking(PATIENCE_S)
    with pytest.raises(RequestTimeoutError):
        call.outcome()
    assert not ledger.runs
    wait_until(lambda: ongoing() == 0)


# Bodies, streams, WebSockets.


@pytest.mark.parametrize("sent", [b"", b"abc"], ids=["nothing", "half"])
def test_a_body_that_is_not_there_by_the_deadline_is_answered_with_408(sent: bytes) -> None:
    ledger = Ledger()

    @serve.deployment
    async def reader(request: Request) -> int:
        ledger.enter()
        return len(await request.body())

    with Connection(served(reader.bind(), request_timeout_s=SHORT_S)) as connection:
        connection.request("/", method="POST", headers="Content-Length: 6\r\n")
        connection.send(sent)
        connection.receive_until(b"timed out after")
        assert not ledger.runs
        # The rest of the body is not parsed as the next request.
        connection.send(b"abcdef"[len(sent) :])
        connection.request("/", method="POST", headers="Connection: close\r\n")
        rest = connection.receive_all()
    assert rest.count(b"HTTP/1.1 408") == 1
    assert rest.count(b"HTTP/1.1 ") == 1 or rest.endswith(b"0")
    wait_until(lambda: ongoing() == 0)


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_cut_at_the_deadline_is_one_line_that_says_what_and_why(
    http: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    ledger = Ledger()

    @serve.deployment
    @serve.ingress(app)
    class Stream:
        @app.get("/items/{number}")
        async def items(self, number: int) -> AsyncIterator[int]:
            try:
                yield number
                await asyncio.Future()
            finally:
                ledger.closed.set()

    with uvicorn_in_a_thread(bind(Stream), {"http": http}) as port:
        answer = get(port, "/items/7", asking(SHORT_S) + "x-request-id: r-1\r\n")
        assert ledger.closed.wait(PATIENCE_S)
        wait_until(lambda: ongoing() == 0)

    assert (answer.status, answer.body, answer.is_complete) == (200, b"7\n", False)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.getMessage() == (
        f"request r-1 to /items/{{number}} was cut: Request r-1 timed out after {SHORT_S}s."
    )
    assert not record.exc_info
    assert (record.__dict__["request_id"], record.__dict__["route"]) == ("r-1", "/items/{number}")


def test_a_stream_whose_thread_is_stuck_is_cut_at_the_deadline_too() -> None:
    ledger = Ledger()

    def items() -> Iterator[bytes]:
        yield b"first"
        ledger.leave.wait()

    @serve.deployment
    def stream(request: Request) -> Any:
        return items()

    answer = get(served(stream.bind(), request_timeout_s=SHORT_S), "/")

    assert (answer.status, answer.body, answer.is_complete) == (200, b"first", False)
    assert replicas()[0].orphans == 1
    ledger.leave.count_down()
    wait_until(lambda: ongoing() == 0)


def test_a_client_that_does_not_read_is_cut_at_the_deadline() -> None:
    @serve.deployment
    async def endless(request: Request) -> StreamingResponse:
        async def items() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65536

        return StreamingResponse(items())

    with Connection(served(endless.bind()), receive_buffer=4096) as connection:
        connection.request("/", headers=asking(SHORT_S))
        wait_until(lambda: replicas()[0].ongoing == 1)
        wait_until(lambda: ongoing() == 0)


@pytest.mark.parametrize("also_by", ["alone", "the-server"])
def test_an_answer_to_a_client_that_does_not_read_is_cut_although_the_work_has_ended(
    also_by: str, separate: str
) -> None:
    if separate == "0":
        pytest.skip("once is enough: the replica is a fake")

    async def scenario() -> None:
        is_sending = asyncio.Event()

        async def send(message: Any) -> None:
            is_sending.set()
            await asyncio.Future()

        class Streaming(FakeReplica):
            def submit(self, call: Any) -> None:
                super().submit(call)
                outbound: Channel[Any] = Channel()
                outbound._try_put({"type": "http.response.start", "status": 200}, 0, None)
                outbound.finish()
                call.work.reply.open(outbound)
                self.finish(call)

        router = Router(DeploymentID("D"))
        router.add(Streaming(router))
        metadata = make_call(left_s=60).metadata
        reply = Reply(metadata, router, {"type": "http"}, send, send)  # type: ignore[arg-type]
        task = asyncio.create_task(respond(reply))
        await is_sending.wait()
        assert reply.call.settled
        reply.call.expire()
        if also_by == "the-server":
            task.cancel()
        await asyncio.wait([task])
        if also_by == "the-server":
            assert task.cancelled(), "another cancellation is not ignored"
        else:
            assert isinstance(task.exception(), RequestTimeoutError)
            assert not task.cancelling()

    asyncio.run(scenario())


def test_a_response_in_time_is_whole_and_its_background_task_has_no_deadline() -> None:
    app = FastAPI()
    ledger = Ledger()
    left: list[float | None] = []

    @serve.deployment
    @serve.ingress(app)
    class Api:
        def __init__(self, child: Any) -> None:
            self.child = child

        @app.get("/")
        async def root(self, tasks: BackgroundTasks) -> str:
            left.append(await self.child.deadline.remote())
            tasks.add_task(self.later)
            return "done"

        async def later(self) -> None:
            try:
                left.append(await self.child.deadline.remote())
                await asyncio.sleep(3 * SHORT_S)
                left.append(await self.child.deadline.remote())
            finally:
                ledger.closed.set()

    port = served(bind(Api, bind(Child, ledger)), request_timeout_s=SHORT_S * 2)

    assert get(port, "/").body == b'"done"'
    assert ledger.closed.wait(PATIENCE_S)
    assert left[0] is not None
    assert left[1:] == [None, None]


def test_a_websocket_has_no_deadline_once_it_is_accepted() -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Sockets:
        @app.websocket("/open")
        async def open(self, socket: WebSocket) -> None:
            await socket.accept()
            assert CURRENT_CALL.get().deadline is None
            await socket.send_text(await socket.receive_text())

    url = f"ws://127.0.0.1:{served(bind(Sockets), request_timeout_s=SHORT_S)}"
    with connect(url + "/open") as socket:
        time.sleep(2 * SHORT_S)
        socket.send("still here")
        assert socket.recv(PATIENCE_S) == "still here"


# Calls by handle.


FORGOTTEN: list[Any] = []


@serve.deployment
class Middle:
    """Forwards its requests to another deployment."""

    def __init__(self, child: Any) -> None:
        self.child = child

    async def __call__(self, request: Request) -> Any:
        match request.url.path:
            case "/wait":
                return await self.child.wait.remote()
            case "/thread":
                return await asyncio.to_thread(self.child.wait.remote().result)
            case "/forget":
                FORGOTTEN.append(self.child.wait.remote())
        return None


@serve.deployment(max_ongoing_requests=1)
class Child:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def deadline(self) -> float | None:
        return CURRENT_CALL.get().deadline

    async def wait(self) -> None:
        self.ledger.enter()
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            self.ledger.cancelled.set()
            raise


def test_a_call_from_outside_of_http_has_no_deadline() -> None:
    served(bind(Middle, bind(Child, Ledger())), request_timeout_s=SHORT_S)
    handle = serve.get_deployment_handle("Child", "default")

    assert handle.deadline.remote().result(timeout_s=PATIENCE_S) is None


@pytest.mark.parametrize("path", ["/wait", "/thread"])
def test_a_child_is_cancelled_at_its_parents_deadline(path: str) -> None:
    ledger = Ledger()
    port = served(bind(Middle, bind(Child, ledger)))

    assert get(port, path, asking(SHORT_S)).status == 408
    assert ledger.cancelled.wait(PATIENCE_S)
    wait_until(lambda: ongoing() == 0)


def test_a_child_that_waits_for_a_slot_is_settled_at_the_deadline_and_never_starts() -> None:
    ledger = Ledger()
    port = served(bind(Middle, bind(Child, ledger)))
    handle = serve.get_deployment_handle("Child", "default")
    first = handle.wait.remote()
    assert ledger.entered.wait(PATIENCE_S)

    assert get(port, "/thread", asking(SHORT_S)).status == 408
    wait_until(lambda: ongoing() == 1)
    first.cancel()
    wait_until(lambda: ongoing() == 0)
    assert sum(ledger.runs.values()) == 1


def test_a_child_that_is_not_awaited_ends_at_the_deadline_of_its_request() -> None:
    ledger = Ledger()
    port = served(bind(Middle, bind(Child, ledger)))

    assert get(port, "/forget", asking(2 * SHORT_S)).status == 200
    response = FORGOTTEN.pop()
    with pytest.raises(RequestTimeoutError, match=f"timed out after {2 * SHORT_S}s"):
        response.result(timeout_s=PATIENCE_S)
    assert response.cancelled()
    assert ledger.cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("way", ["caught", "uncaught", "in a generator"])
def test_code_that_hears_of_the_deadline_by_a_call_first_cannot_answer(way: str) -> None:
    """It blocked the loop until after the deadline, so the refused call is the first to say so."""
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Late:
        def __init__(self, child: Any) -> None:
            self.child = child

        async def call(self) -> Any:
            time.sleep(2 * SHORT_S)
            return await self.child.deadline.remote()

        @app.get("/caught")
        async def caught(self) -> str:
            try:
                await self.call()
            except Exception as error:
                return repr(error)
            return "in time"

        @app.get("/uncaught")
        async def uncaught(self) -> Any:
            return await self.call()

        @app.get("/in a generator")
        async def generator(self) -> StreamingResponse:
            async def late() -> AsyncIterator[str]:
                try:
                    await self.call()
                except RequestTimeoutError:
                    yield "caught"

            return StreamingResponse(late(), headers={"content-length": "6"})

        @app.get("/next")
        async def next(self) -> str:
            return "served"

    with Connection(served(bind(Late, bind(Child, Ledger())))) as connection:
        connection.request(f"/{way.replace(' ', '%20')}", headers=asking(SHORT_S))
        assert connection.receive_until(b"timed out after").startswith(b"HTTP/1.1 408 ")
        connection.receive_until(b"s.")
        connection.request("/next")
        assert connection.receive_all().endswith(b'"served"')
    wait_until(lambda: ongoing() == 0)


def test_a_call_made_after_the_deadline_does_not_begin() -> None:
    ledger = Ledger()
    seen: list[BaseException] = []

    @serve.deployment
    class Slow:
        def __init__(self, child: Any) -> None:
            self.child = child

        def __call__(self, request: Request) -> None:
            ledger.leave.wait()
            try:
                self.child.wait.remote().result(timeout_s=PATIENCE_S)
            except RequestCancelledError as error:
                seen.append(error)
            ledger.closed.set()

    port = served(bind(Slow, bind(Child, ledger)))
    assert get(port, "/", asking(SHORT_S)).status == 408
    ledger.leave.count_down()

    assert ledger.closed.wait(PATIENCE_S)
    assert isinstance(seen[0], RequestTimeoutError)
    assert not ledger.runs


# The timer.


@pytest.fixture
def home(separate: str) -> Iterator[EventLoopThread]:
    if separate == "0":
        pytest.skip("once is enough")
    home = EventLoopThread("deadlines")
    yield home
    assert home.stop(PATIENCE_S)


def timed(deadlines: Deadlines, after_s: float) -> Call:
    """Return a call that the timer settles after this time."""
    call = make_call(left_s=after_s)
    assert call.metadata.deadline is not None
    deadlines.add(call, call.metadata.deadline)
    return call


def test_each_call_expires_at_its_own_time_whatever_the_order_they_come_in(
    home: EventLoopThread,
) -> None:
    deadlines = deadlines_of(home.loop)
    assert deadlines_of(home.loop) is deadlines
    late: list[float] = []
    calls = [timed(deadlines, after_s) for after_s in (0.3, 0.05, 0.2, 0.1, 0.051, 60.0)]
    for call in calls:
        call.when_settled(lambda each: late.append(time.monotonic() - each.metadata.deadline))  # type: ignore[operator]

    for call in calls[:-1]:
        assert call.wait_blocking(PATIENCE_S)
        assert isinstance(call.error, RequestTimeoutError)
    assert all(each > -0.002 for each in late), "never before its time"
    assert not calls[-1].settled
    deadlines.discard(calls[-1])


def test_calls_that_come_and_go_set_a_timer_once_and_not_each(home: EventLoopThread) -> None:
    posted: list[Any] = []
    mailbox = mailbox_of(home.loop)

    class Counting:
        def post(self, callback: Any, *args: Any) -> None:
            posted.append(callback)
            mailbox.post(callback, *args)

    deadlines = Deadlines(Counting())  # type: ignore[arg-type]
    for number in range(1_000):
        call = timed(deadlines, 60 + number)
        if number == 0:
            run_blocking(home.loop, asyncio.sleep(0), PATIENCE_S)
        deadlines.discard(call)

    assert len(posted) == 1


def test_none_is_forgotten_when_many_threads_add_while_the_timer_rings(
    home: EventLoopThread, switch_interval: None
) -> None:
    deadlines = deadlines_of(home.loop)
    calls: list[Any] = []

    def add(first: int) -> None:
        for number in range(first, first + 1_000, 4):
            call = timed(deadlines, number % 7 * GRAIN_S / 3)
            calls.append(call)

    together(*(partial(add, first) for first in range(4)))

    assert len(calls) == 1_000
    for call in calls:
        assert call.wait_blocking(PATIENCE_S)


@with_gil  # without it, no collection begins before a quarter of all objects is new
def test_none_is_forgotten_when_one_is_added_while_the_timer_looks_at_them(
    home: EventLoopThread,
) -> None:
    """On CPython 3.11 an allocation may run the collector, whose callbacks add a deadline."""
    deadlines = deadlines_of(home.loop)
    errors: list[Any] = []
    home.loop.set_exception_handler(lambda loop, context: errors.append(context))
    late = time.monotonic() + 60
    calls, added, kept = [make_call(left_s=0.3) for _ in range(3_000)], [], []

    def add(*_: object) -> None:
        added.append(make_call())
        deadlines.add(added[-1], late)
        if len(added) < 10_000:
            garbage = Garbage()
            garbage.me = garbage  # only the collector finds it
            kept.append(weakref.ref(garbage, add))

    class Garbage:
        me: Garbage

    for call in calls:
        deadlines.add(call, call.metadata.deadline)  # type: ignore[arg-type]
    before = gc.get_threshold()
    try:
        add()
        gc.set_threshold(1)
        assert all(call.wait_blocking(PATIENCE_S) for call in calls)
    finally:
        gc.set_threshold(*before)
    for call in added:
        deadlines.discard(call)

    assert not errors
    assert len(added) > 1, "the collector ran"


def test_one_that_is_added_just_after_the_timer_has_looked_is_not_forgotten(
    home: EventLoopThread,
) -> None:
    deadlines = deadlines_of(home.loop)
    first, second = make_call(), make_call()

    def at(call: Any, after_s: float) -> float:
        deadline: float = time.monotonic() + after_s
        call.metadata = call.metadata._replace(deadline=deadline)
        return deadline

    class Looked(dict[Any, float]):
        """A dict of calls: another thread adds one between its iteration and its use."""

        def __iter__(self) -> Any:
            seen = list(super().__iter__())
            if second.metadata.deadline is None:
                adder = threading.Thread(target=deadlines.add, args=(second, at(second, 0.02)))
                adder.start()
                adder.join(PATIENCE_S)
            return iter(seen)

    deadlines._calls = Looked()
    deadlines.add(first, at(first, 0.01))

    assert first.wait_blocking(PATIENCE_S)
    assert second.wait_blocking(PATIENCE_S)


def test_a_deadline_that_is_further_off_than_a_timer_can_hold_is_kept(
    home: EventLoopThread,
) -> None:
    deadlines = deadlines_of(home.loop)
    far = make_call()
    deadlines.add(far, 1e308)
    near = timed(deadlines, 0.01)

    assert near.wait_blocking(PATIENCE_S)
    assert not far.settled
    deadlines.discard(far)
