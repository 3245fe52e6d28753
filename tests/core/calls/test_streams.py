"""Streams from user code to a consumer: their thread, how far they run ahead, and their end."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.core.calls.channel import MAX_BYTES, RESPONSE_BYTES
from ingress.core.calls.loops import EventLoopThread, run_blocking
from tests.conformance.observe import Gate, here
from tests.servers import (
    PATIENCE_S,
    ROUNDS,
    Connection,
    bind,
    get,
    ongoing,
    served,
    steady,
    until,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("shutdown")

sse = pytest.importorskip("fastapi.sse", reason="this FastAPI has no streaming endpoints")


def http_scope(path: str) -> dict[str, Any]:
    """Return the ASGI scope of a GET request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [],
    }


def asking(left: asyncio.Event | None = None) -> Callable[[], Any]:
    """Return the `receive` of a request without a body, whose client stays until it has left."""
    messages: list[Any] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    return receive


# Sync iterators, in every way they reach Starlette.

WHO: ContextVar[str] = ContextVar("who", default="unset")


class Events(StreamingResponse):
    """A response class as libraries define them: a media type, and the same constructor."""

    media_type = "text/event-stream"


def over_http(shape: str, make: Callable[[], Any]) -> serve.Application:
    """Return an application that answers `/{shape}` with `make()`, a sync iterator."""
    if shape == "call":

        @serve.deployment
        class Plain:
            async def __call__(self, request: Request) -> Response:
                return StreamingResponse(make())

        return bind(Plain)
    if shape == "function":

        @serve.deployment
        async def function(request: Request) -> Response:
            return StreamingResponse(make())

        return function.bind()

    app = FastAPI()
    if shape == "middleware":

        @app.middleware("http")
        async def middleware(request: Request, call_next: Any) -> Any:
            return await call_next(request)

    @serve.deployment
    @serve.ingress(app)
    class Endpoints:
        @app.get("/def")
        def sync(self) -> Response:
            return StreamingResponse(make())

        @app.get("/subclass")
        async def events(self) -> Response:
            return Events(make())

        @app.get("/lines")
        def lines(self) -> Iterator[str]:
            yield from make()

        @app.get("/lines-dependency")
        def more_lines(self, given: int = Depends(dependency)) -> Iterator[str]:
            yield from make()

        @app.get("/raw", response_class=StreamingResponse)
        def raw(self) -> Iterator[str]:
            yield from make()

        @app.get("/sse", response_class=sse.EventSourceResponse)
        def sse(self) -> Iterator[str]:
            yield from make()

        @app.get("/async")
        @app.get("/middleware")
        async def on_loop(self) -> Response:
            return StreamingResponse(make())

    return bind(Endpoints)


def dependency() -> Iterator[int]:
    yield 1


RESPONSES = ["call", "function", "async", "def", "middleware", "subclass"]
GENERATORS = ["lines", "lines-dependency", "raw", "sse"]


def in_shapes(*shapes: str) -> pytest.MarkDecorator:
    """Run a test for each shape, and for one response and one generator on the server's loop."""
    alone = [each for each in ("async", "lines") if each in shapes]
    cases = [*((each, "1") for each in shapes), *((each, "0") for each in alone)]
    return pytest.mark.parametrize(("shape", "separate"), cases, indirect=["separate"])


all_shapes, all_generators = in_shapes(*RESPONSES, *GENERATORS), in_shapes(*GENERATORS)


@all_shapes
@pytest.mark.usefixtures("separate")
def test_a_sync_generator_keeps_one_worker_and_one_context_until_it_is_closed_there(
    shape: str,
) -> None:
    places: list[str] = []
    contexts: list[tuple[str, str]] = []

    def items() -> Iterator[str]:
        WHO.set("mine")
        try:
            for number in range(100):
                places.append(threading.current_thread().name)
                replica = serve.get_replica_context().replica_id
                contexts.append((WHO.get(), str(replica.deployment_id.name)))
                yield f"{number}\n"
        finally:
            places.append(threading.current_thread().name)

    port = served(over_http(shape, items))
    body = httpx.get(f"http://127.0.0.1:{port}/{shape}").text

    for number in range(100):
        assert f"{number}" in body
    assert places == [places[0]] * 101
    assert "#0-worker-" in places[0]
    assert contexts == [("mine", contexts[0][1])] * 100


@all_shapes
@pytest.mark.usefixtures("separate")
def test_the_first_chunk_has_left_before_the_second_is_made(shape: str) -> None:
    gate = Gate()

    def items() -> Iterator[str]:
        yield "first"
        gate.wait()
        yield "second"

    with Connection(served(over_http(shape, items))) as connection:
        connection.request(f"/{shape}")
        connection.receive_until(b"first")
        gate.wait_for(1)
        assert b"second" not in connection.received
        gate.open()
        assert b"second" in connection.receive_all()


def chunks_of(raw: bytes) -> list[bytes]:
    """Return the chunks of a response, without the last, empty one."""
    rest = raw.partition(b"\r\n\r\n")[2]
    found = []
    while size := int((line := rest.partition(b"\r\n"))[0], 16):
        found.append(line[2][:size])
        rest = line[2][size + 2 :]
    return found


@all_shapes
@pytest.mark.usefixtures("separate")
def test_each_item_is_a_chunk_of_its_own(shape: str) -> None:
    with Connection(served(over_http(shape, lambda: (f"<{n}>" for n in range(50))))) as connection:
        connection.request(f"/{shape}")
        chunks = chunks_of(connection.receive_all())

    assert [re.findall(rb"<(\d+)>", each) for each in chunks] == [[b"%d" % n] for n in range(50)]


@all_generators
@pytest.mark.usefixtures("separate")
def test_a_client_that_leaves_closes_a_generator_endpoint_in_its_thread(shape: str) -> None:
    places: list[str] = []
    closed = threading.Event()

    def items() -> Iterator[str]:
        places.append(here())
        try:
            for number in itertools.count():
                yield f"{number} xxx\n"
        finally:
            places.append(here())
            closed.set()

    with Connection(served(over_http(shape, items)), receive_buffer=4096) as connection:
        connection.request(f"/{shape}")
        connection.receive_until(b"xxx")
        assert not closed.is_set()

    assert closed.wait(PATIENCE_S)
    assert places == [places[0]] * 2
    wait_until(lambda: ongoing() == 0)


@pytest.mark.usefixtures("separate")
def test_what_is_no_generator_streams_from_a_worker_too_and_a_file_stays_open() -> None:
    file = io.BytesIO(b"one\ntwo\n")
    places: list[str] = []

    def noting(item: str) -> str:
        places.append(here())
        return item

    class Iterators:
        async def __call__(self, request: Request) -> Response:
            match request.url.path:
                case "/list":
                    return StreamingResponse(iter(["one\n", "two\n"]))
                case "/iterable":
                    return StreamingResponse(["one\n", "two\n"])
                case "/map":
                    return StreamingResponse(map(noting, ["one\n", "two\n"]))
            return StreamingResponse(file)

    port = served(bind(serve.deployment(Iterators)))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for path in ("/list", "/iterable", "/map", "/file"):
            assert client.get(path).text == "one\ntwo\n"
    assert set(places) == {"thread Iterators#0-worker"}
    assert not file.closed


@pytest.mark.usefixtures("separate")
def test_a_started_iterator_and_an_async_iterator_are_left_alone() -> None:
    class AsyncItems:
        def __init__(self) -> None:
            self.left = ["one\n", "two\n"]

        def __aiter__(self) -> AsyncItems:
            return self

        async def __anext__(self) -> str:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    @serve.deployment
    class Left:
        async def __call__(self, request: Request) -> Response:
            if request.url.path == "/async":
                return StreamingResponse(AsyncItems())
            response = StreamingResponse(iter(["zero\n", "one\n", "two\n"]))
            body: Any = response.body_iterator
            assert await anext(body) == "zero\n"
            return response

    port = served(bind(Left))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/async").text == "one\ntwo\n"
        assert client.get("/begun").text == "one\ntwo\n"


@all_shapes
@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_generator_that_fails_half_way_cuts_the_stream(
    shape: str, error: type[BaseException]
) -> None:
    def items() -> Iterator[str]:
        yield "first"
        raise error

    port = served(over_http(shape, items))
    for _ in range(2):  # and the server goes on
        with Connection(port) as connection:
            connection.request(f"/{shape}")
            answer = connection.answer()
        assert b"first" in answer.body or not answer.body
        assert not answer.is_complete


@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize("shape", ["async", "lines"])
def test_a_response_that_is_never_begun_leaves_its_generator_closed(shape: str) -> None:
    made: list[Any] = []

    def items() -> Iterator[str]:
        yield "first"

    def make() -> Iterator[str]:
        made.append(items())
        return made[-1]  # type: ignore[no-any-return]

    application = over_http(shape, make)

    async def send(message: Any) -> None:
        raise ConnectionResetError

    asyncio.run(application(http_scope(f"/{shape}"), asking(), send))

    # The endpoint of `lines` is a generator itself, which may not have begun when the send fails.
    assert len(made) == 1 or (shape == "lines" and not made)
    wait_until(lambda: all(each.gi_frame is None for each in made))
    wait_until(lambda: ongoing() == 0)


@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize("shape", ["async", "lines"])
def test_what_a_generator_raises_when_it_is_closed_is_in_the_log(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    def items() -> Iterator[str]:
        try:
            for number in itertools.count():
                yield f"{number} xxx\n"
        finally:
            raise ValueError("from the finally")

    with Connection(served(over_http(shape, items)), receive_buffer=4096) as connection:
        connection.request(f"/{shape}")
        connection.receive_until(b"xxx")

    def logged() -> list[logging.LogRecord]:
        return [each for each in caplog.records if each.name == "ingress" and each.exc_info]

    wait_until(logged)
    assert "from the finally" in str(logged()[0].exc_info)
    wait_until(lambda: ongoing() == 0)


@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize("shape", ["raw", "response", "lines", "events"])
def test_an_async_generator_that_never_awaits_blocks_no_request_and_ends_with_its_client(
    shape: str,
) -> None:
    closed = threading.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield "xxx"
        finally:
            closed.set()

    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Endless:
        @app.get("/ok")
        async def ok(self) -> str:
            return "ok"

        @app.get("/response")
        async def response(self) -> Response:
            return StreamingResponse(endless())

        @app.get("/lines")
        @app.get("/events", response_class=sse.EventSourceResponse)
        @app.get("/raw", response_class=StreamingResponse)
        async def items(self) -> AsyncIterator[str]:
            async for item in endless():
                yield item

    port = served(bind(Endless))
    reading = threading.Event()
    with Connection(port) as connection:
        connection.request(f"/{shape}")

        def read() -> None:
            try:
                while connection.socket.recv(65536):
                    reading.set()
            except OSError:
                pass

        reader = threading.Thread(target=read)
        reader.start()
        assert reading.wait(PATIENCE_S)
        for _ in range(5):
            assert get(port, "/ok").body == b'"ok"'
        connection.socket.shutdown(socket.SHUT_RDWR)
        reader.join(PATIENCE_S)

    assert closed.wait(PATIENCE_S), "the generator is still open"
    assert get(port, "/ok").body == b'"ok"'
    wait_until(lambda: ongoing() == 0)


def test_an_async_def_that_returns_a_sync_generator_has_it_iterated_on_the_loop(
    flags: Settings,
) -> None:
    def items() -> Iterator[str]:
        for _ in range(40):
            yield here()

    @serve.deployment
    class Returns:
        async def __call__(self) -> Iterator[str]:
            return items()

    port = served(bind(Returns))
    over = httpx.get(f"http://127.0.0.1:{port}/").text
    by_handle = set(serve.get_app_handle("default").options(stream=True).remote())
    serve.shutdown()

    assert len(by_handle) == 1
    assert over == by_handle.copy().pop() * 40
    assert over.startswith("loop ")


# Through a chain of handles.


class Producer:
    """An endless stream that records its thread, its items and its end."""

    def __init__(self) -> None:
        self.made = 0
        self.places: list[str] = []
        self.closed = threading.Event()

    def numbers(self) -> Generator[int]:
        self.places.append(here())
        try:
            for number in itertools.count():
                self.made += 1
                yield number
        finally:
            self.places.append(here())
            self.closed.set()


def chain(first: Producer, kind: str) -> serve.Application:
    """Return three deployments: the last produces a stream, the other two pass it on."""

    class SyncLast:
        def __call__(self) -> Iterator[int]:
            yield from first.numbers()

    class AsyncLast:
        async def __call__(self) -> AsyncIterator[int]:
            with closing(first.numbers()) as numbers:
                for number in numbers:
                    yield number

    class Passes:
        def __init__(self, child: serve.DeploymentHandle) -> None:
            self.child = child.options(stream=True)

        async def __call__(self) -> AsyncIterator[int]:
            async for number in self.child.remote():
                yield number

    last: Any = serve.deployment(name="Last")(AsyncLast if kind == "async" else SyncLast)
    middle: Any = serve.deployment(name="Middle")(Passes)
    top: Any = serve.deployment(name="Top")(Passes)
    return top.bind(middle.bind(last.bind()))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("end", ["cancel", "abandon"])
def test_a_chain_of_three_is_suspended_by_its_last_consumer_and_ends_with_it(
    flags: Settings, kind: str, end: str
) -> None:
    first = Producer()
    handle = serve.run(chain(first, kind), route_prefix=None).options(stream=True)

    stream = handle.remote()
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    # Each of three deployments buffers at most one channel, a worker thread one more.
    assert steady(lambda: first.made, 0.05) <= 4 * 17 + 3
    assert [next(stream) for _ in range(500)] == list(range(3, 503))
    assert steady(lambda: first.made, 0.05) <= 4 * 17 + 503
    assert not first.closed.is_set()
    if end == "cancel":
        stream.cancel()
    else:
        del stream
        gc.collect()

    assert first.closed.wait(PATIENCE_S), "the producer is still open"
    assert first.places == [first.places[0]] * 2


@pytest.mark.usefixtures("separate")
def test_two_who_wait_for_the_next_item_of_one_stream_is_an_error_and_taking_turns_is_not() -> None:
    gate = Gate()

    @serve.deployment
    class Slow:
        async def __call__(self) -> AsyncIterator[int]:
            yield 0
            yield 1
            await gate.wait_async()
            yield 2

    handle = serve.run(bind(Slow), route_prefix=None).options(stream=True)

    async def main() -> None:
        stream = handle.remote()
        assert [await anext(stream), await asyncio.create_task(anext(stream))] == [0, 1]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # the task begins to wait
        with pytest.raises(RuntimeError, match="another consumer waits for the next item"):
            await anext(stream)
        gate.open()
        assert await waiting == 2
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


@pytest.mark.usefixtures("separate")
def test_a_turn_that_would_wait_for_its_own_call_is_given_back() -> None:
    class Box:
        def __init__(self) -> None:
            self.waits = asyncio.Event()
            self.response: Any = None

    @serve.deployment(max_ongoing_requests=10)
    class Both:
        async def outer(self, box: Box) -> list[str]:
            items = serve.get_deployment_handle("Both", "default").options(stream=True).items
            stream = items.remote(box)
            await box.waits.wait()  # the stream waits for this call
            names = []
            for _ in range(2):
                try:
                    await anext(stream)
                except Exception as error:
                    names.append(type(error).__name__)
            stream.cancel()
            return names

        async def items(self, box: Box) -> AsyncIterator[int]:
            await until(lambda: box.response is not None)
            box.waits.set()
            yield await box.response

    handle = serve.run(bind(Both), route_prefix=None)
    box = Box()
    box.response = handle.outer.remote(box)
    assert box.response.result(timeout_s=PATIENCE_S) == ["RequestCycleError"] * 2


# Random streams.


class Plan:
    """The producer of one example, and its record."""

    def __init__(self, sizes: list[int], raises_at: int | None) -> None:
        self.sizes = sizes
        self.raises_at = raises_at
        self.made = 0
        self.received = 0
        self.furthest = 0
        self.began: list[str] = []
        self.closed: list[str] = []

    def chunk(self, number: int) -> bytes:
        if number == self.raises_at:
            raise ZeroDivisionError
        size = self.sizes[number]
        self.furthest = max(self.furthest, self.made - self.received)
        self.made += size
        return bytes([number % 256]) * size

    def sync(self) -> Generator[bytes]:
        self.began.append(threading.current_thread().name)
        try:
            for number in range(len(self.sizes)):
                yield self.chunk(number)
        finally:
            self.closed.append(threading.current_thread().name)

    async def on_loop(self) -> AsyncIterator[bytes]:
        with closing(self.sync()) as chunks:
            for chunk in chunks:
                yield chunk


CURRENT: list[Plan] = []


@serve.deployment
class Streaming:
    async def __call__(self, request: Request) -> Response:
        (plan,) = CURRENT
        return StreamingResponse(plan.sync() if request.url.path == "/sync" else plan.on_loop())


APPLICATION = bind(Streaming)


@pytest.fixture(scope="module")
def client() -> Iterator[EventLoopThread]:
    """The server loop of the examples; the application has answered one request."""
    home = EventLoopThread("client")
    CURRENT[:] = [Plan([1], None)]

    async def send(message: Any) -> None:
        pass

    run_blocking(home.loop, APPLICATION(http_scope("/sync"), asking(), send), PATIENCE_S)
    yield home
    serve.shutdown()
    assert home.stop(PATIENCE_S)


@pytest.mark.reliability("D06")
@given(
    sizes=st.lists(st.integers(0, 3_000) | st.integers(0, 1 << 20), max_size=25),
    is_sync=st.booleans(),
    raises_at=st.none() | st.integers(0, 25),
    leaves_after=st.none() | st.integers(0, 1 << 21),
    pauses=st.sets(st.integers(0, 12), max_size=3),
)
@examples(max_examples=1000 if ROUNDS else 100, deadline=None)
def test_a_stream_is_a_prefix_whole_unless_cut_bounded_and_closed_once_where_it_ran(
    client: EventLoopThread,
    sizes: list[int],
    is_sync: bool,
    raises_at: int | None,
    leaves_after: int | None,
    pauses: set[int],
) -> None:
    plan = Plan(sizes, raises_at)
    CURRENT[:] = [plan]
    body = bytearray()
    is_complete = False

    async def exchange() -> None:
        left = asyncio.Event()
        received = 0

        async def send(message: Any) -> None:
            nonlocal is_complete, received
            if message["type"] != "http.response.body":
                return
            if received in pauses:
                await asyncio.sleep(0.002)
            received += 1
            body.extend(message["body"])
            plan.received = len(body)
            is_complete = not message.get("more_body")
            if leaves_after is not None and len(body) > leaves_after and not is_complete:
                left.set()
                await asyncio.sleep(0.002)

        try:
            await APPLICATION(http_scope("/sync" if is_sync else "/async"), asking(left), send)
        except ZeroDivisionError:
            assert raises_at is not None

    run_blocking(client.loop, exchange(), PATIENCE_S)
    wait_until(lambda: ongoing() == 0)

    whole = b"".join(bytes([number % 256]) * size for number, size in enumerate(sizes))
    has_left = leaves_after is not None and leaves_after < len(body)
    fails = raises_at is not None and raises_at < len(sizes)
    assert whole.startswith(body)
    if not has_left and not fails:
        assert (is_complete, len(body)) == (True, len(whole))
    if fails:
        assert not is_complete
    largest = max(sizes, default=0)
    # The buffers between the generator and the server; a `def` has one of its own.
    room = RESPONSE_BYTES + largest + (MAX_BYTES + largest if is_sync else 0)
    assert plan.furthest <= room + largest
    assert plan.closed == plan.began
    assert len(plan.began) <= 1
    for place in plan.began:
        assert ("-worker-" in place) == is_sync


def test_a_stream_that_asks_for_its_client_ends_itself_when_its_application_stops(
    separate: str,
) -> None:
    app = FastAPI()

    @app.get("/")
    async def numbers(request: Request) -> StreamingResponse:
        async def lines() -> AsyncIterator[bytes]:
            while not await request.is_disconnected():
                yield b"more\n"
                await asyncio.sleep(0.01)
            yield b"the end"

        return StreamingResponse(lines())

    port = served(bind(serve.deployment(name="Numbers")(serve.ingress(app)())))
    with Connection(port) as client:
        client.request("/")
        client.receive_until(b"more")
        serve.shutdown()  # cuts the streams that are left

        assert client.answer().body.endswith(b"more\nthe end")
