"""WebSockets over real sockets: bounds, close codes, and misbehaving handlers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import FastAPI, HTTPException, WebSocket, WebSocketDisconnect
from starlette.responses import PlainTextResponse
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import ingress as serve
from ingress.app.asgi.messages import WEBSOCKET_BYTES, WEBSOCKET_MESSAGES
from ingress.serving.http.reply import HEARING_S
from ingress.testing import Latch
from tests.programs import UVICORN, environment, process, write_module
from tests.servers import PATIENCE_S, bind, ongoing, served, steady, uvicorn_in_a_thread, wait_until

pytestmark = pytest.mark.usefixtures("separate")


def open_socket(port: int, path: str) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{port}{path}", proxy=None, close_timeout=1)


def close_code(client: ClientConnection) -> int:
    """Read to the end and return the server's close code; 1006 if there is none."""
    try:
        while True:
            client.recv(timeout=PATIENCE_S)
    except ConnectionClosed as ended:
        return 1006 if ended.rcvd is None else ended.rcvd.code


class Handlers:
    """WebSocket handlers; `seen` and `done` are for the test."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.done = threading.Event()

    async def returns(self, websocket: WebSocket) -> None:
        await websocket.accept()

    async def raises(self, websocket: WebSocket) -> None:
        await websocket.accept()
        raise ValueError("no good")

    async def raises_for_http(self, websocket: WebSocket) -> None:
        await websocket.accept()
        raise HTTPException(401)

    async def exits(self, websocket: WebSocket) -> None:
        await websocket.accept()
        raise SystemExit

    async def raises_at_once(self, websocket: WebSocket) -> None:
        raise ValueError("no good")

    async def never_accepts(self, websocket: WebSocket) -> None:
        pass

    async def refuses(self, websocket: WebSocket) -> None:
        await websocket.close(1008)

    async def denies(self, websocket: WebSocket) -> None:
        await websocket.send_denial_response(PlainTextResponse("not you", 401))

    async def waits(self, websocket: WebSocket) -> None:
        """Accept, and neither receive nor send."""
        await websocket.accept()
        await asyncio.Event().wait()

    async def cleans_up(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await websocket.receive_text()
        except WebSocketDisconnect as gone:
            self.seen.append(gone.code)
            await asyncio.sleep(2 * HEARING_S)
            self.seen.append("cleaned up")

    async def swallows(self, websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            try:
                await websocket.receive_text()
            except (WebSocketDisconnect, RuntimeError):
                await asyncio.sleep(0.01)

    async def sends(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.send_text("x")
                await asyncio.sleep(0.01)
        except WebSocketDisconnect as gone:
            self.seen.append(gone.code)
            raise

    async def cleans_up_after_a_send(self, websocket: WebSocket) -> None:
        try:
            await self.sends(websocket)
        finally:
            await asyncio.sleep(2 * HEARING_S)
            self.seen.append("cleaned up")

    async def listens_in_a_group(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(websocket.receive_text)
                await anyio.sleep_forever()
        except BaseException as error:
            self.seen.append(type(error))
            raise

    async def hears(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await websocket.receive_text()
        except WebSocketDisconnect as gone:
            self.seen.append(gone.code)


def application(handlers: Handlers, replicas: int = 1, **options: Any) -> serve.Application:
    app = FastAPI()

    @serve.deployment(num_replicas=replicas, **options)
    @serve.ingress(app)
    class Sockets:
        @app.websocket("/{name}")
        async def socket(self, websocket: WebSocket, name: str) -> None:
            try:
                await getattr(handlers, name)(websocket)
            except asyncio.CancelledError:
                handlers.seen.append("cancelled")
                raise
            finally:
                handlers.done.set()

    return bind(Sockets)


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def port(separate: str, handlers: Handlers) -> int:
    return served(application(handlers))


# Close codes for the client.


@pytest.mark.parametrize(
    ("path", "code"),
    [("/returns", 1000), ("/raises", 1011), ("/raises_for_http", 1011), ("/exits", 1011)],
)
def test_a_handler_that_ends_without_closing_is_closed_for(
    path: str, code: int, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with open_socket(port, path) as client:
        assert close_code(client) == code

    wait_until(lambda: ongoing() == 0)
    logged = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert len(logged) == (code != 1000), "what it raised is in the server's log, once"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/raises_at_once", 500), ("/never_accepts", 500), ("/refuses", 403), ("/denies", 401)],
)
def test_a_handler_that_does_not_accept_is_a_refused_handshake(
    path: str, status: int, port: int
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(port, path).close()

    assert refused.value.response.status_code == status
    wait_until(lambda: ongoing() == 0)


def test_a_handshake_at_a_full_queue_is_told_when_to_come_again(handlers: Handlers) -> None:
    limits = {"max_ongoing_requests": 1, "max_queued_requests": 1}
    port = served(application(handlers, **limits, backpressure_config={"retry_after_s": 3}))

    def come_and_go() -> None:
        with open_socket(port, "/hears"):
            pass

    with ThreadPoolExecutor() as threads, open_socket(port, "/hears"):
        others = [threads.submit(come_and_go) for _ in range(2)]
        refused = next(as_completed(others, PATIENCE_S)).exception()

    assert isinstance(refused, InvalidStatus)
    assert refused.response.status_code == 503, "a client would not try again after 403"
    assert refused.response.headers["retry-after"] == "3"


ENDS: dict[str, tuple[Any, int]] = {
    "replaced": (lambda: serve.run(application(Handlers())), 1012),  # its client may come back
    "shutdown": (serve.shutdown, 1001),
    "delete": (lambda: serve.delete("default"), 1001),
}


@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS)
def test_a_handler_and_its_client_are_told_that_its_application_ends(
    end: Any, code: int, handlers: Handlers, port: int
) -> None:
    with open_socket(port, "/hears") as client:
        wait_until(lambda: ongoing() == 1)
        end()

        assert close_code(client) == code
        assert handlers.seen == [code]


# Events for the handler.


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/cleans_up", [1000, "cleaned up"]),
        ("/sends", [1006]),
        ("/cleans_up_after_a_send", [1006, "cleaned up"]),
        ("/listens_in_a_group", [ExceptionGroup]),
        ("/waits", ["cancelled"]),
        ("/swallows", ["cancelled"]),
    ],
    ids=[
        "cleans up",
        "sends",
        "cleans up after a send",
        "listens in a group",
        "does not listen",
        "swallows",
    ],
)
def test_a_handler_ends_as_it_likes_after_its_client_has_left_or_is_cancelled(
    path: str, seen: list[Any], handlers: Handlers, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with open_socket(port, path):
        wait_until(lambda: ongoing() == 1)

    assert handlers.done.wait(PATIENCE_S / 2)
    assert handlers.seen == seen
    wait_until(lambda: ongoing() == 0)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


# Bounds, tested by an ASGI server in the test.

SCOPE = {
    "type": "websocket",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "path": "/socket",
    "raw_path": b"/socket",
    "query_string": b"",
    "headers": [],
    "subprotocols": [],
    "scheme": "ws",
    "root_path": "",
}


@pytest.mark.parametrize(
    ("size", "kind"), [(1, "text"), (WEBSOCKET_BYTES // 4, "bytes")], ids=["small", "large"]
)
def test_the_socket_is_not_read_while_the_handler_does_not_receive(size: int, kind: str) -> None:
    may_receive = Latch()
    got: list[int] = []

    class Slow(Handlers):
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await may_receive
            while len(got) < 100:
                got.append(len((await websocket.receive())[kind]))

    async def main() -> None:
        read = 0

        async def receive() -> Any:
            nonlocal read
            read += 1
            if read == 1:
                return {"type": "websocket.connect"}
            content: Any = "x" * size if kind == "text" else b"x" * size
            return {"type": "websocket.receive", kind: content}

        async def send(message: Any) -> None:
            pass

        serving = asyncio.ensure_future(application(Slow())(SCOPE, receive, send))
        # `connect`, the messages in the queue, and one that waits for room in it.
        room = WEBSOCKET_MESSAGES if size == 1 else 4
        assert 1 < await asyncio.to_thread(steady, lambda: read) <= 1 + room + 1
        may_receive.count_down()
        await serving

    asyncio.run(main())

    assert got == [size] * 100


either_implementation = pytest.mark.parametrize(
    ("implementation", "separate"),
    [("websockets-sansio", "1"), ("wsproto", "0")],
    indirect=["separate"],
)


@either_implementation
def test_a_flood_of_messages_waits_at_the_client_and_arrives_in_order(implementation: str) -> None:
    may_receive = Latch(timeout_s=PATIENCE_S)
    sent, got = [0], list[int]()
    padding = "x" * 10_000

    class Slow(Handlers):
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text("ready")
            await may_receive
            async for text in websocket.iter_text():
                got.append(int(text.split()[0]))
                if len(got) % 100 == 0:
                    await websocket.send_text(text)

    def flood(client: ClientConnection) -> None:
        for number in range(3_000):  # more than the kernel holds for a connection
            client.send(f"{number} {padding}")
            sent[0] += 1

    with uvicorn_in_a_thread(application(Slow()), {"ws": implementation}) as port:
        # Without compression, which leaves nothing of them.
        with connect(f"ws://127.0.0.1:{port}/socket", proxy=None, compression=None) as client:
            assert client.recv(timeout=PATIENCE_S) == "ready"
            flooding = threading.Thread(target=flood, args=(client,))
            flooding.start()
            assert steady(lambda: sent[0], pause_s=0.3) < 2_500
            may_receive.count_down()
            for number in range(99, 3_000, 100):
                assert str(client.recv(timeout=PATIENCE_S)).split()[0] == str(number)
            flooding.join(PATIENCE_S)
        wait_until(lambda: ongoing() == 0)

    assert got == list(range(3_000))


@either_implementation
def test_messages_arrive_in_order_at_a_client_that_reads_now_and_then(
    implementation: str, switch_interval: None
) -> None:
    class Numbers(Handlers):
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            for number in range(3_000):  # some alone, some together, some more than a buffer holds
                if number % 7 == 0:
                    await asyncio.sleep(0)
                padding = b"x" * (100_000 if number % 50 == 0 else 10)
                await websocket.send_bytes(b"%d %b" % (number, padding))

    with (
        uvicorn_in_a_thread(application(Numbers()), {"ws": implementation}) as port,
        connect(
            f"ws://127.0.0.1:{port}/socket", proxy=None, compression=None, max_queue=1
        ) as client,
    ):
        for number in range(3_000):
            if number % 500 == 0:
                time.sleep(0.05)  # for the server to fill the buffers of the connection
            message = client.recv(timeout=PATIENCE_S)
            assert isinstance(message, bytes)
            assert int(message.split()[0]) == number
        assert close_code(client) == 1000


def test_a_message_that_the_server_cannot_send_ends_the_connection_after_those_before_it() -> None:
    class Careless(Handlers):
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            for content in ("one", "two", 3, "four"):
                await websocket.send({"type": "websocket.send", "text": content})
            await asyncio.sleep(PATIENCE_S)

    with open_socket(served(application(Careless())), "/socket") as client:
        assert client.recv(timeout=PATIENCE_S) == "one"
        assert client.recv(timeout=PATIENCE_S) == "two"
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=PATIENCE_S)
    wait_until(lambda: ongoing() == 0)


@pytest.mark.parametrize("size", [1, WEBSOCKET_BYTES // 4], ids=["small", "large"])
def test_send_waits_while_the_client_does_not_read(size: int) -> None:
    sent = 0

    class Fast(Handlers):
        async def socket(self, websocket: WebSocket) -> None:
            nonlocal sent
            await websocket.accept()
            for _ in range(100):
                await websocket.send_bytes(b"x" * size)
                sent += 1

    async def main() -> list[Any]:
        may_send = asyncio.Event()
        messages: list[Any] = []
        connected = False

        async def receive() -> Any:
            nonlocal connected
            if not connected:
                connected = True
                return {"type": "websocket.connect"}
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "websocket.send":
                await may_send.wait()
            messages.append(message)

        serving = asyncio.ensure_future(application(Fast())(SCOPE, receive, send))
        room = WEBSOCKET_MESSAGES if size == 1 else 4
        assert await asyncio.to_thread(steady, lambda: sent) <= room
        may_send.set()
        await serving
        return messages

    kinds = [each["type"] for each in asyncio.run(main())]
    assert kinds == ["websocket.accept", *["websocket.send"] * 100, "websocket.close"]


def test_a_connection_stays_on_the_replica_it_was_opened_on() -> None:
    class Which(Handlers):
        async def which(self, websocket: WebSocket) -> None:
            await websocket.accept()
            async for _ in websocket.iter_text():
                await websocket.send_text(serve.get_replica_context().replica_id.unique_id)

    port = served(application(Which(), replicas=3))
    with ExitStack() as stack:
        clients = [stack.enter_context(open_socket(port, "/which")) for _ in range(12)]
        seen: list[set[str]] = [set() for _ in clients]
        for _ in range(20):
            for client in clients:
                client.send("?")
            for client, names in zip(clients, seen, strict=True):
                names.add(str(client.recv(timeout=PATIENCE_S)))

    assert all(len(names) == 1 for names in seen)
    assert len(set.union(*seen)) > 1, "they are not all on one"


# The implementations a server may use.

SOURCE = """
import ingress as serve
from fastapi import FastAPI, HTTPException, WebSocket, WebSocketDisconnect

api = FastAPI()


@serve.deployment
@serve.ingress(api)
class Sockets:
    @api.websocket("/echo")
    async def echo(self, websocket: WebSocket):
        await websocket.accept()
        try:
            while True:
                await websocket.send_text(await websocket.receive_text())
        except WebSocketDisconnect as gone:
            print("disconnected with", gone.code)

    @api.websocket("/returns")
    async def returns(self, websocket: WebSocket):
        await websocket.accept()

    @api.websocket("/raises")
    async def raises(self, websocket: WebSocket):
        await websocket.accept()
        raise ValueError("no good")


app = Sockets.bind()
"""


@pytest.mark.thorough
@pytest.mark.reliability("F08")
@pytest.mark.parametrize("implementation", ["websockets-sansio", "wsproto"])
def test_every_implementation_echoes_and_closes_alike(
    implementation: str, separate: str, tmp_path: Path
) -> None:
    write_module(tmp_path, "sockets", SOURCE)
    command = [*UVICORN, "--ws", implementation, "sockets:app"]
    with process(command, tmp_path, environment(tmp_path, separate=separate)) as server:
        with open_socket(server.port, "/echo") as client:
            for number in range(100):
                client.send(str(number))
                assert client.recv(timeout=PATIENCE_S) == str(number)
            client.close(4000)
        server.wait_for("disconnected with 4000")
        for path, code in (("/returns", 1000), ("/raises", 1011)):
            with open_socket(server.port, path) as client:
                assert close_code(client) == code
        with open_socket(server.port, "/echo") as client:
            client.send("hello")
            assert client.recv(timeout=PATIENCE_S) == "hello"
            server.signal(signal.SIGTERM)
            assert close_code(client) == 1012
        server.wait_for("disconnected with 1012")
        assert server.wait() == -signal.SIGTERM
