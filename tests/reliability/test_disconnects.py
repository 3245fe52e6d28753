"""Client disconnects at every stage of a request: the work that stops, and how soon.

Each test is one cell: a stage, a kind of application, a way to disconnect, an HTTP parser, and the
SEPARATE flags. In a cell several clients reach the same stage and disconnect at once.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from uvicorn.config import HTTP_PROTOCOLS

import ingress as serve
from ingress.engines import local_engine
from tests.reliability.disconnect_app import BATCH, Plain, PlainDef, fastapi_class, ledger
from tests.servers import (
    ROUNDS,
    UPGRADE,
    Answer,
    Connection,
    bind,
    get,
    set_flags,
    steady,
    wait_until,
)

pytestmark = pytest.mark.reliability("B14")

CLIENTS = 3  # number of clients at once in a cell
PROMPT_S = 0.1
SOON_S = 0.5
NOISE_S = 0.2
"""Delay that a busy machine may add to a figure: clients and server share one process here."""

KINDS = ["plain", "fastapi", "middleware"]
TIMES = range(ROUNDS or 1)
MEGABYTE = 2**20
BUFFER_BYTES = serve.HTTPOptions().body_buffer_bytes

MESSAGE = b"\x82\xfe\x04\x00" + bytes(4 + 1024)
"""A binary frame of 1 KiB; its mask is zero."""


# Server and clients.


# The parser and the flag; `make test-reliability` runs the other two pairs too.
SERVERS = [("httptools", "1"), ("h11", "0")] + [("httptools", "0"), ("h11", "1")] * bool(ROUNDS)


@pytest.fixture(scope="module", autouse=True)
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that it closes nothing."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Check nothing: the server's own fixture checks for leaks after its end."""


@pytest.fixture(
    scope="module",
    params=[(http, separate, "1") for http, separate in SERVERS],
    ids=lambda param: "{}-separate{}-sync{}".format(*param),
)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """Serve each kind of application; the port, and whether user code has its own thread."""
    http, separate, sync = request.param
    with pytest.MonkeyPatch.context() as patch:
        before = threads()
        patch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS[http])
        set_flags(patch, separate, sync)
        serve.start({"port": 0})
        try:
            deploy("plain", Plain)
            deploy("plain-def", PlainDef)
            for kind in ("fastapi", "middleware"):
                stages = fastapi_class(has_middleware=kind == "middleware")
                deploy(kind, serve.deployment(stages))
            (url,) = serve.status().proxies
            yield int(url.rpartition(":")[2]), separate == "1"
        finally:
            serve.shutdown()
        wait_until(lambda: threads() <= before)


def threads() -> set[threading.Thread]:
    """Return all threads except the timers of test timeouts."""
    return {each for each in threading.enumerate() if not isinstance(each, threading.Timer)}


def deploy(name: str, deployment: Any) -> None:
    """Serve a deployment twice: with 100 slots, and as `{name}-1` with one."""
    for suffix, slots in (("", 100), ("-1", 1)):
        application = bind(deployment.options(max_ongoing_requests=slots))
        serve.run(application, name=name + suffix, route_prefix=f"/{name}{suffix}")


def in_flight() -> int:
    """Return the number of requests that the proxy still handles; not those of clients known to
    have disconnected.

    It reads private state, as a cancellation before the first line is not visible outside.
    """
    return len(local_engine().http.proxy.in_flight.replies)


def unread() -> int:
    """Return the number of clients whose reading is paused because user code does not read."""
    clients = [each._client for each in list(local_engine().http.proxy.in_flight.replies)]
    inbound = [each._inbound for each in clients if each is not None]
    return sum(bool(each._wake_producers) for each in inbound)


class Client:
    """One connection at one stage, and its key in the ledger."""

    _count = 0

    def __init__(self, port: int, path: str, **request: Any) -> None:
        Client._count += 1
        self.key = str(Client._count)
        buffer = request.pop("receive_buffer", None)
        body = request.pop("body", None)
        self.connection = Connection(port, receive_buffer=buffer)
        self.connection.request(f"{path}?key={self.key}", **request)
        if body is not None:
            self.connection.send(body)

    def leave(self, how: str) -> float:
        """Close the connection, and return the time."""
        if how == "RST":
            self.connection.reset()
        else:
            self.connection.socket.shutdown(socket.SHUT_WR)
            self.connection.socket.close()
        return time.monotonic()


class Cell:
    """One cell: makes clients, and checks the events of their requests."""

    def __init__(self, port: int, name: str, how: str, *, is_separate: bool) -> None:
        self.port = port
        self.name = name
        self.how = how
        self.is_separate = is_separate

    def ongoing(self) -> int:
        """Return the number of requests that hold a slot."""
        (deployment,) = serve.status().applications[self.name].deployments.values()
        return sum(replica.ongoing for replica in deployment.replicas)

    def queued(self) -> int:
        (deployment,) = serve.status().applications[self.name].deployments.values()
        return deployment.queued

    def clients(self, stage: str, count: int = CLIENTS, /, **request: Any) -> list[Client]:
        return [Client(self.port, f"/{self.name}/{stage}", **request) for _ in range(count)]

    def began(self, clients: list[Client]) -> None:
        for client in clients:
            ledger.wait(client.key, "began")

    def leave(self, clients: list[Client]) -> float:
        return max([client.leave(self.how) for client in clients])

    def happened(self, clients: list[Client], what: str, left: float, within_s: float) -> None:
        """Fail unless the event came for all clients within a time after they disconnected."""
        for client in clients:
            took_s = ledger.wait(client.key, what) - left
            figures[what, within_s].append(took_s)
            assert took_s <= within_s + NOISE_S, (what, ledger.of(client.key))

    def leave_and_see(
        self, clients: list[Client], *events: str, within_s: float = PROMPT_S
    ) -> None:
        """Disconnect clients. Fail unless these events come for all of them soon afterwards."""
        left = self.leave(clients)
        for what in events:
            self.happened(clients, what, left, within_s)

    def leave_until(
        self, clients: list[Client], what: str, condition: Callable[[], object]
    ) -> None:
        """Disconnect clients. Fail unless a condition holds soon afterwards."""
        left = self.leave(clients)
        wait_until(condition)
        took_s = time.monotonic() - left
        figures[what, PROMPT_S].append(took_s)
        assert took_s <= PROMPT_S + NOISE_S

    def is_over(self) -> None:
        """Wait until every slot is free, and check that the next request gets one."""
        wait_until(lambda: self.ongoing() == 0)
        assert get(self.port, f"/{self.name}/quick?key=next").status == 200
        # The answer precedes the end of the request, whose loop the next round may block.
        wait_until(lambda: self.ongoing() == 0)


figures: defaultdict[tuple[str, float], list[float]] = defaultdict(list)


@pytest.fixture(scope="module", autouse=True)
def print_figures() -> Iterator[None]:
    yield
    for (what, within_s), took_s in sorted(figures.items()):
        took_ms = sorted(each * 1e3 for each in took_s)
        print(
            f"{what:28} <= {within_s * 1e3:.0f} ms: {len(took_ms):6} times, median "
            f"{took_ms[len(took_ms) // 2]:.1f} ms, slowest {took_ms[-1]:.1f} ms"
        )


@pytest.fixture(params=["FIN", "RST"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind() -> str:
    return "plain-def"


@pytest.fixture
def cell(server: tuple[int, bool], kind: str, how: str) -> Cell:
    port, is_separate = server
    return Cell(port, kind, how, is_separate=is_separate)


kinds = pytest.mark.parametrize("kind", KINDS)
on_loop = pytest.mark.parametrize(
    "server",
    [(http, separate, "0") for http, separate in SERVERS],
    ids=lambda param: "{}-separate{}-sync{}".format(*param),
    indirect=True,
)
fastapi_kinds = pytest.mark.parametrize("kind", KINDS[1:])


@fastapi_kinds
@pytest.mark.parametrize("size", [3, BUFFER_BYTES], ids=["fits", "flows"])
@pytest.mark.parametrize("stage", ["parameter", "def-parameter"])
def test_an_endpoint_whose_body_never_came_whole_is_not_called(
    cell: Cell, stage: str, size: int
) -> None:
    for _ in TIMES:
        length, body = f"Content-Length: {size + 10}\r\n", (b"[" + b"1," * size)[:size]
        clients = cell.clients(stage, method="POST", headers=length, body=body)
        wait_until(lambda: in_flight() == CLIENTS)
        if size < BUFFER_BYTES:
            assert cell.ongoing() == 0, "what waits for a small body holds no slot"
        else:
            wait_until(lambda: cell.ongoing() == CLIENTS)
        cell.leave_until(clients, "slot freed", lambda: in_flight() == cell.ongoing() == 0)
        cell.is_over()
        assert [ledger.of(client.key) for client in clients] == [[]] * CLIENTS


@kinds
def test_code_that_reads_the_body_is_told_that_it_ended_early(cell: Cell) -> None:
    for _ in TIMES:
        length = f"Content-Length: {BUFFER_BYTES + 10}\r\n"
        clients = cell.clients("upload", method="POST", headers=length, body=bytes(BUFFER_BYTES))
        cell.began(clients)
        cell.leave_and_see(clients, "gone", "finally")
        cell.is_over()
        assert all(ledger.of(each.key) == ["began", "gone", "finally"] for each in clients)


@kinds
def test_a_disconnect_behind_an_unread_body_is_seen(cell: Cell) -> None:
    for _ in TIMES:
        length = f"Content-Length: {4 * MEGABYTE}\r\n"
        clients = cell.clients("unread", method="POST", headers=length, body=bytes(MEGABYTE // 2))
        cell.began(clients)
        cell.leave_and_see(clients, "cancelled, requested=True", "finally")
        cell.is_over()


@kinds
def test_a_request_that_left_the_queue_never_reaches_a_replica(cell: Cell) -> None:
    cell.name += "-1"
    for _ in TIMES:
        occupants = cell.clients("hold", 1)
        cell.began(occupants)
        clients = cell.clients("quick")
        wait_until(lambda: cell.queued() == CLIENTS)
        cell.leave_until(clients, "left the queue", lambda: cell.queued() == 0)
        finish(occupants, 200)
        cell.is_over()
        assert [ledger.of(client.key) for client in clients] == [[]] * CLIENTS


def finish(clients: list[Client], status: int) -> None:
    """Let the clients that stayed receive their answers."""
    for client in clients:
        ledger.gate(client.key).count_down()
        answer = client.connection.receive_until(b"\r\n\r\n")
        assert Answer(answer).status == status
        client.connection.socket.close()


@fastapi_kinds
def test_a_request_that_left_with_a_slot_before_its_start_never_starts(cell: Cell) -> None:
    if not cell.is_separate:
        pytest.skip("there, what has a slot has started")
    for _ in TIMES:
        occupants = cell.clients("block", 1)
        cell.began(occupants)
        clients = cell.clients("quick")
        wait_until(lambda: cell.ongoing() == 1 + CLIENTS)
        cell.leave(clients)
        wait_until(lambda: in_flight() == 1)
        finish(occupants, 200)
        cell.is_over()
        assert [ledger.of(client.key) for client in clients] == [[]] * CLIENTS


@kinds
def test_running_async_code_is_cancelled_once_and_its_finally_runs(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("running")
        cell.began(clients)
        cell.leave_and_see(clients, "cancelled, requested=True", "finally")
        cell.is_over()
        once = ["began", "cancelled, requested=True", "finally"]
        assert [ledger.of(client.key) for client in clients] == [once] * CLIENTS


@kinds
def test_code_that_swallows_its_cancellation_gets_one_and_keeps_its_slot(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("swallowing")
        cell.began(clients)
        cell.leave_and_see(clients, "cancelled")
        for client in clients:
            ledger.wait(client.key, "ten turns later")
        assert cell.ongoing() == CLIENTS
        for client in clients:
            ledger.gate(client.key).count_down()
        cell.is_over()
        once = ["began", "cancelled", "ten turns later", "ended"]
        assert [ledger.of(client.key) for client in clients] == [once] * CLIENTS


@pytest.mark.parametrize("kind", ["plain-def", "fastapi", "middleware"])
def test_def_in_a_thread_sees_it_and_keeps_its_slot_until_it_returns(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("def")
        cell.began(clients)
        cell.leave_and_see(clients, "requested=True")
        for number, client in enumerate(clients):
            assert cell.ongoing() == CLIENTS - number
            ledger.gate(client.key).count_down()
            wait_until(lambda n=number: cell.ongoing() == CLIENTS - n - 1)  # type: ignore[misc]
            assert ledger.of(client.key)[-1] == "ended"
        cell.is_over()


@fastapi_kinds
def test_a_dependency_in_a_thread_keeps_the_slot_until_it_returns_and_is_torn_down(
    cell: Cell,
) -> None:
    for _ in TIMES:
        clients = cell.clients("def-dependency")
        cell.began(clients)
        cell.leave_and_see(clients, "requested=True")
        if cell.is_separate:  # else the server's own task waits for the thread
            wait_until(lambda: in_flight() == 0)
        assert cell.ongoing() == CLIENTS
        for client in clients:
            ledger.gate(client.key).count_down()
        cell.is_over()
        whole = ["began", "requested=True", "ended", "closed"]
        assert [ledger.of(client.key) for client in clients] == [whole] * CLIENTS


@on_loop
def test_def_on_the_loop_runs_to_its_end_and_then_frees_its_slot(cell: Cell) -> None:
    for _ in TIMES:
        for _ in range(CLIENTS):  # one after the other: each blocks the loop
            (client,) = clients = cell.clients("def", 1)
            cell.began(clients)
            left = cell.leave(clients)
            if cell.is_separate:  # else the server's own loop is blocked
                cell.happened(clients, "requested=True", left, PROMPT_S)
                assert cell.ongoing() == 1
            ledger.gate(client.key).count_down()
            cell.is_over()
            assert ledger.of(client.key)[-1] == "ended"


RESPONSES = ["response-items", "response-def-items"]
STREAMS = [
    ("plain", "items"),
    ("plain-def", "def-items"),
    *((kind, stage) for kind in KINDS for stage in RESPONSES),
]
BLOCKED = [
    ("plain", "items-blocked"),
    ("plain-def", "def-items-blocked"),
    *((kind, f"{stage}-blocked") for kind in KINDS[1:] for stage in RESPONSES),
]


@pytest.mark.parametrize(("kind", "stage"), STREAMS)
def test_a_stream_is_closed_between_two_items(cell: Cell, stage: str) -> None:
    for _ in TIMES:
        clients = cell.clients(stage)
        for client in clients:
            client.connection.receive_until(b"xxx")
        cell.leave_and_see(clients, "closed", within_s=SOON_S)
        cell.is_over()
        assert all(ledger.of(client.key).count("closed") == 1 for client in clients)


@on_loop
def test_a_generator_on_the_loop_is_closed_between_two_items(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("def-items")
        for client in clients:
            client.connection.receive_until(b"xxx")
        cell.leave_and_see(clients, "closed", within_s=SOON_S)
        cell.is_over()


def stalled(clients: list[Client]) -> None:
    """Wait until the streams produce nothing more.

    The kernel's buffers may still take some bytes, so this waits for a pause.
    """
    steady(lambda: sum(len(ledger.of(client.key)) for client in clients), 0.03)


@pytest.mark.parametrize(("kind", "stage"), BLOCKED)
def test_a_stream_that_waits_for_its_client_is_freed_and_closed(cell: Cell, stage: str) -> None:
    for _ in TIMES:
        clients = cell.clients(stage, receive_buffer=4096)
        for client in clients:
            client.connection.receive_until(b"xxx")
        stalled(clients)
        cell.leave_and_see(clients, "closed", within_s=SOON_S)
        cell.is_over()


BATCHES = ["batched", "def-batched"]
IN_BATCH = f"batch of {BATCH}, requested="


@kinds
@pytest.mark.parametrize("stage", BATCHES)
def test_a_request_that_left_before_its_batch_takes_no_place_in_it(cell: Cell, stage: str) -> None:
    for _ in TIMES:
        stayers, leavers = cell.clients(stage, 1), cell.clients(stage, BATCH - 2)
        cell.began(stayers + leavers)
        cell.leave_until(leavers, "left a batch that waits", lambda: cell.ongoing() == 1)
        stayers += cell.clients(stage, BATCH - 1)
        for client in stayers:
            ledger.wait(client.key, IN_BATCH + "False")
        finish(stayers, 200)
        cell.is_over()
        assert [ledger.of(client.key) for client in leavers] == [["began"]] * len(leavers)


@kinds
@pytest.mark.parametrize("stage", BATCHES)
def test_a_batch_goes_on_without_those_who_left_and_is_told_when_all_have(
    cell: Cell, stage: str
) -> None:
    for _ in TIMES:
        leaver, *stayers = clients = cell.clients(stage, BATCH)
        for client in clients:
            ledger.wait(client.key, IN_BATCH + "False")
        cell.leave_until([leaver], "left a batch that runs", lambda: cell.ongoing() == BATCH - 1)
        finish(stayers, 200)
        cell.is_over()
        whole = ["began", IN_BATCH + "False", "ended"]
        assert [ledger.of(client.key) for client in clients] == [whole] * BATCH

        clients = cell.clients(stage, BATCH)
        for client in clients:
            ledger.wait(client.key, IN_BATCH + "False")
        cell.leave_and_see(clients, IN_BATCH + "True")
        cell.is_over()
        assert all("ended" not in ledger.of(client.key) for client in clients)
        for client in clients:
            ledger.gate(client.key).count_down()
        for client in clients:
            ledger.wait(client.key, "ended")


@fastapi_kinds
def test_an_idle_websocket_is_told(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("idle", headers=UPGRADE)
        cell.began(clients)
        for client in clients:
            client.connection.receive_until(b"101 Switching Protocols")
        cell.leave_and_see(clients, "closed", within_s=SOON_S)
        cell.is_over()
        for client in clients:
            began, told, closed = ledger.of(client.key)
            assert (began, closed) == ("began", "closed")
            assert told in ("disconnect 1005", "disconnect 1006")


@fastapi_kinds
def test_a_websocket_that_reads_no_more_and_says_nothing_is_freed(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("deaf", headers=UPGRADE)
        cell.began(clients)
        for client in clients:
            client.connection.receive_until(b"101 Switching Protocols")
            for _ in range(100):
                client.connection.send(MESSAGE)
        wait_until(lambda: unread() == CLIENTS)
        cell.leave_and_see(clients, "closed", within_s=SOON_S)
        cell.is_over()


@fastapi_kinds
def test_a_websocket_that_waits_for_its_client_is_freed(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("sending", headers=UPGRADE, receive_buffer=4096)
        for client in clients:
            client.connection.receive_until(b"xxx")
        stalled(clients)
        cell.leave_and_see(clients, "closed", within_s=SOON_S)
        cell.is_over()


@kinds
def test_a_background_task_after_the_whole_answer_runs_to_its_end(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("background")
        for client in clients:
            client.connection.receive_until(b"\r\n\r\nok")
        cell.leave(clients)
        for client in clients:
            ledger.gate(client.key).count_down()
        for client in clients:
            ledger.wait(client.key, "ended")
        cell.is_over()
        assert [ledger.of(client.key) for client in clients] == [["ended"]] * CLIENTS


@fastapi_kinds
def test_yield_dependencies_are_torn_down_from_the_inside_out(cell: Cell) -> None:
    for _ in TIMES:
        clients = cell.clients("dependencies")
        cell.began(clients)
        cell.leave_and_see(clients, "outer closed", within_s=SOON_S)
        cell.is_over()
        for client in clients:
            assert ledger.of(client.key) == [
                "began",
                "cancelled, requested=True",
                "finally",
                "inner closed",
                "middle closed",
                "outer closed",
            ]
