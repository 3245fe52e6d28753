"""Calls of replicas in processes at their edges: several senders, early ends, errors that cross."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import ingress as serve
from ingress import testing
from ingress.core.base.settings import ADAPT_SWITCH_INTERVAL, MAX_RETRIES, START_METHOD
from ingress.core.base.types import DeploymentID, ReplicaID
from ingress.engines import local_engine
from ingress.exceptions import RayServeException, ReplicaUnavailableError, UserCodeExit
from ingress.serving.processes.frames import HEAD, Frames
from ingress.serving.processes.link import Link
from ingress.serving.processes.messages import Frame
from tests.large_app import holdings
from tests.process_app import pids
from tests.process_calls_app import LINE, Bomb, Exit, in_isolation, limit_descriptors
from tests.servers import (
    PATIENCE_S,
    Connection,
    forking,
    result,
    served,
    set_flags,
    steady,
    turns,
    wait_until,
    with_gil,
)

LINES = 100  # of each client that talks: more than the buffers of a client that does not read

in_both_places = pytest.mark.parametrize("isolation", ["thread", "process"])

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and uses memfd")


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    """Keep the fork server of the module that all these children import."""
    with testing.leak_check() as check:
        with forking(in_isolation("Facts", "process")):
            yield
        wait_until(lambda: all("pytest_timeout" in each for each in check.left()))
        check.forgive()


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Check nothing: what the tests leave is checked once, when the last application has ended."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    limit_descriptors(None)
    serve.delete("default")


# A stream with several senders.


def _small_socket(port: int) -> socket.socket:
    """Return a connection that buffers little, so that a client is soon too slow."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    connection.connect(("127.0.0.1", port))
    return connection


class Member:
    """A client of the chat, which counts in a thread the lines of each client."""

    def __init__(self, port: int, name: str, *, reads: bool = True) -> None:
        self.name = name
        self.lines: dict[str, int] = {}
        self._stack = ExitStack()
        options: dict[str, Any] = {"compression": None, "close_timeout": 1, "max_queue": 1}
        self.socket: ClientConnection = self._stack.enter_context(
            connect("ws://127.0.0.1/chat", sock=_small_socket(port), ping_interval=None, **options)
        )
        self._thread = threading.Thread(target=self._read)
        if reads:
            self.read()

    def read(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                text = str(self.socket.recv(timeout=PATIENCE_S))
                name = text.removesuffix(LINE)
                self.lines[name] = self.lines.get(name, 0) + 1
        except (ConnectionClosed, TimeoutError):
            return

    def talk(self) -> None:
        for _ in range(LINES):
            self.socket.send(self.name)

    def leave(self) -> None:
        self._stack.close()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)


@in_both_places
@pytest.mark.parametrize("end", ["reads", "leaves"])
def test_handlers_that_wait_for_one_slow_client_all_go_on(isolation: str, end: str) -> None:
    port = served(in_isolation("Chat", isolation))

    def counts() -> Any:
        return httpx.get(f"http://127.0.0.1:{port}/counts").json()

    slow = Member(port, "slow", reads=False)
    talkers = [Member(port, name) for name in "ab"]
    wait_until(lambda: counts()[2] == 3)
    for each in talkers:
        each.talk()
    # Until each handler waits for the slow client.
    wait_until(lambda: steady(lambda: counts()[0]) and counts()[1] == 2)

    if end == "reads":
        slow.read()
    else:
        slow.leave()

    expected = {"a": LINES, "b": LINES}
    wait_until(lambda: all(each.lines == expected for each in talkers))
    if end == "reads":
        wait_until(lambda: slow.lines == expected)
    for each in (*talkers, slow):
        each.leave()


# The end of a request.


@in_both_places
@pytest.mark.parametrize("path", ["whole", "stream"])
def test_a_task_that_waits_for_the_disconnect_hears_of_it_once_the_response_is_complete(
    isolation: str, path: str
) -> None:
    port = served(in_isolation("Mounted", isolation))
    router = local_engine().routers[DeploymentID("Mounted", "default")]
    with httpx.Client() as client:  # keeps its connection
        for _ in range(3):
            assert client.get(f"http://127.0.0.1:{port}/raw/{path}").text == "ok"

        wait_until(lambda: router.num_ongoing == 0)


def test_code_that_has_read_a_large_body_hears_of_the_disconnect() -> None:
    port = served(in_isolation("Mounted", "process"))

    def ended() -> str:
        return httpx.get(f"http://127.0.0.1:{port}/two/ended").text

    with Connection(port) as client:
        client.send(b"POST /reads/x HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        client.send(bytes(3_000_000))
        wait_until(lambda: ended() == "1")
    wait_until(lambda: ended() == "2")


# Arguments and results that do harm where they arrive.


def test_an_argument_that_ends_the_process_ends_one_replica_only() -> None:
    handle = serve.run(in_isolation("Echo", "process"), route_prefix=None)
    before = pids("Echo")

    with pytest.raises(ReplicaUnavailableError, match="ended with exit code 3"):
        handle.remote(Bomb()).result(timeout_s=PATIENCE_S)

    assert handle.remote(7).result(timeout_s=PATIENCE_S) == 7
    assert set(before) & set(pids("Echo"))


def test_a_value_whose_arrival_exits_fails_its_call_only() -> None:
    handle = serve.run(in_isolation("Echo", "process"), route_prefix=None)
    before = pids("Echo")

    with pytest.raises(UserCodeExit, match="SystemExit"):
        handle.remote(Exit()).result(timeout_s=PATIENCE_S)
    with pytest.raises(RayServeException, match="SystemExit"):
        handle.exit.remote().result(timeout_s=PATIENCE_S)

    assert handle.remote(7).result(timeout_s=PATIENCE_S) == 7
    assert pids("Echo") == before


# The numbers of calls.


def test_calls_go_on_after_four_thousand_million_of_them() -> None:
    handle = serve.run(in_isolation("Outer", "process"), route_prefix=None)
    (replica,) = local_engine().routers[DeploymentID("Outer", "default")].replicas
    link: Link = replica.host.link  # type: ignore[attr-defined]
    for last in (2**31 - 2, 2**32 - 2):
        link._last = last  # to count that far takes days

        answers = [handle.remote(number).result(timeout_s=PATIENCE_S) for number in range(4)]

        assert answers == list(range(4))


# Calls that a process had not begun when it ended.


def stopped(name: str) -> list[Any]:
    """Return the replicas of a deployment, whose processes stand still from now on."""
    replicas = list(local_engine().routers[DeploymentID(name, "default")].replicas)
    for each in replicas:
        stop(each.host.pid)  # type: ignore[attr-defined]
    return replicas


def stop(pid: int) -> None:
    """Stop a process, and return once all its threads stand still: each stops by itself."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        files = Path(f"/proc/{pid}/task").glob("*/stat")
        return {each.read_text().rpartition(")")[2].split()[0] for each in files}

    wait_until(lambda: states() == {"T"})


@on_linux
def test_a_call_that_goes_to_another_replica_is_no_error_of_its_route() -> None:
    handle = serve.run(in_isolation("Echo", "process"), route_prefix=None)
    one, two = stopped("Echo")
    responses = [handle.remote(number) for number in range(6)]
    wait_until(lambda: one.ongoing and two.ongoing)

    os.kill(one.host.pid, signal.SIGKILL)
    os.kill(two.host.pid, signal.SIGCONT)

    assert [each.result(timeout_s=PATIENCE_S) for each in responses] == list(range(6))
    assert [sum(each.errors.values()) for each in (one, two)] == [0, 0]


def test_calls_that_meet_a_replica_that_has_just_ended_go_to_another() -> None:
    handle = serve.run(in_isolation("Echo", "process"), route_prefix=None)
    later: list[Any] = []
    response = handle.remote(Bomb())
    # At this moment the router does not know that the replica is gone.
    response._call.when_settled(lambda _: later.extend(handle.remote(each) for each in range(6)))

    with pytest.raises(ReplicaUnavailableError):
        response.result(timeout_s=PATIENCE_S)

    wait_until(lambda: len(later) == 6)
    assert [each.result(timeout_s=PATIENCE_S) for each in later] == list(range(6))


# The options of calls that a process makes.


@in_both_places
def test_the_options_of_a_call_that_a_replica_makes_have_their_effect(isolation: str) -> None:
    asker = serve.run(in_isolation("Asker", isolation), route_prefix=None)

    def asked(handle: Any, options: dict[str, Any]) -> Any:
        return handle.ask.remote(options).result(timeout_s=PATIENCE_S)[1:3]

    assert asked(asker, {}) == ("", 0)
    assert asked(asker, {"session_id": "s", "priority": "high"}) == ("s", 1)
    low = asker.options(priority="low", session_id="t")
    assert asked(low, {}) == ("", -1)  # a priority is passed on, a session id is not
    assert asked(low, {"priority": "normal"}) == ("", 0)


@in_both_places
def test_a_call_that_is_made_for_no_request_has_one_request_id(isolation: str) -> None:
    asker = serve.run(in_isolation("Asker", isolation), route_prefix=None)

    request_id, facts = asker.ask_alone.remote().result(timeout_s=PATIENCE_S)

    assert tuple(facts) == (request_id, "", 0, False)


# The end of calls where something fails.


@in_both_places
def test_a_generator_that_goes_on_after_its_cancellation_frees_its_slot(isolation: str) -> None:
    handle = serve.run(in_isolation("Large", isolation), route_prefix=None)
    router = local_engine().routers[DeploymentID("Large", "default")]
    items = handle.options(stream=True).stubborn.remote()
    assert next(iter(items)) == 0

    items.cancel()

    wait_until(lambda: router.num_ongoing == 0)


@pytest.mark.parametrize(
    ("method", "how"), [("wait", "cancel"), ("items", "cancel"), ("items", "abandon")]
)
def test_a_call_that_a_child_leaves_ends_where_it_runs(method: str, how: str) -> None:
    outer = serve.run(in_isolation("Outer", "process"), route_prefix=None)
    router = local_engine().routers[DeploymentID("Echo", "default")]
    outer.begin.remote(method).result(timeout_s=PATIENCE_S)
    wait_until(lambda: router.num_ongoing == 1)

    outer.leave.remote(how).result(timeout_s=PATIENCE_S)

    wait_until(lambda: router.num_ongoing == 0)


@in_both_places
@pytest.mark.parametrize("ends", ["call", "argument"])
def test_a_call_that_ends_before_it_is_sent_is_forgotten(isolation: str, ends: str) -> None:
    outer = serve.run(in_isolation("Outer", isolation), route_prefix=None)

    outer.unsent.remote(5, ends).result(timeout_s=PATIENCE_S)

    wait_until(lambda: result(outer.number_of_calls.remote("never")) == 0)


@on_linux
def test_a_result_that_cannot_be_sent_for_lack_of_descriptors_names_that() -> None:
    handle = serve.run(in_isolation("Large", "process"), route_prefix=None)
    handle.take_descriptors.remote().result(timeout_s=PATIENCE_S)

    with pytest.raises(RayServeException, match="Too many open files") as caught:
        handle.result.remote(1_000_000).result(timeout_s=PATIENCE_S)

    assert "plain data" not in str(caught.value)
    assert handle.result.remote(10).result(timeout_s=PATIENCE_S) == bytes(10)


@on_linux
def test_a_call_that_could_not_be_sent_leaves_nothing_for_the_end_of_the_process() -> None:
    handle = serve.run(in_isolation("Large", "process"), route_prefix=None)
    (pid,) = pids("Large")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    stop(pid)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # all new ones are refused
        with pytest.raises(OSError, match="Too many open files"):
            handle.same.remote(np.zeros(1_000_000, np.uint8)).result(timeout_s=PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    after = handle.same.remote(b"x")

    os.kill(pid, signal.SIGKILL)

    assert after.result(timeout_s=PATIENCE_S) == b"x"  # by the replacement


# Frames.


def in_two_turns(post: Callable[[Frames], None]) -> tuple[bytes, bytes]:
    """Return the bytes that arrive in the turn in which frames are posted, and after it."""

    async def scenario() -> tuple[bytes, bytes]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        frames = Frames(ours, lambda *_: None, lambda: None)
        post(frames)
        now = theirs.recv(1 << 16)
        await turns()
        rest = theirs.recv(1 << 16)
        frames.close()
        theirs.close()
        return now, rest

    return asyncio.run(scenario())


def test_the_other_process_has_frames_before_the_turn_that_posts_them_ends() -> None:
    """Else two processes would work by turns: neither while the other one does."""

    def post(frames: Frames) -> None:
        for number in range(10):
            frames.post(1, number, b"frame")

    now, rest = in_two_turns(post)
    size = HEAD.size + len(b"frame")
    assert (len(now), len(rest)) == (8 * size, 2 * size)


def test_a_frame_that_is_sent_at_once_is_there_now_behind_those_before_it() -> None:
    def post(frames: Frames) -> None:
        frames.post(1, 1, b"first")
        frames.post(1, 2, b"second", at_once=True)
        frames.post(1, 3, b"third")

    now, rest = in_two_turns(post)
    assert (now[-6:], now.count(b"first"), rest[-5:]) == (b"second", 1, b"third")
    assert len(now) == 2 * HEAD.size + 11


def test_only_the_call_that_is_alone_in_a_child_is_sent_at_once() -> None:
    def ask_twice(frames: Frames) -> None:
        no: Any = lambda *_: None  # noqa: E731
        replica_id = ReplicaID("0", DeploymentID("Alone"))
        link = Link(replica_id, __name__, no, on_report=no, on_end=no, on_lost=no)
        link._frames = frames
        for _ in range(2):
            link.send(Frame.ASK, b"content")

    now, rest = in_two_turns(ask_twice)
    assert len(now) == len(rest) == HEAD.size + len(b"content")


# Large contents, which cross in shared memory, for which a process has no descriptor left.

LARGE = bytes(1_000_000)


def lowest_free() -> int:
    """Return the number that this process's next descriptor would have."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def same(handle: Any, value: bytes) -> Any:
    return result(handle.same.remote(value))


@on_linux
def test_an_argument_for_which_a_child_has_no_descriptor_fails_its_call_only() -> None:
    handle = serve.run(in_isolation("Large", "process"), route_prefix=None)
    (pid,) = pids("Large")
    before = holdings()
    in_flight = iter(handle.options(stream=True).stubborn.remote())
    assert next(in_flight) == 0
    handle.take_descriptors.remote().result(timeout_s=PATIENCE_S)

    for _ in range(3):
        with pytest.raises(RayServeException, match=rf"open files in process {pid}; have its code"):
            same(handle, LARGE)

    assert same(handle, b"x") == b"x"
    handle.give_descriptors.remote().result(timeout_s=PATIENCE_S)
    assert same(handle, LARGE) == LARGE
    assert pids("Large") == [pid]
    wait_until(lambda: holdings() == before)  # nothing of the contents that did not arrive


@on_linux
@pytest.mark.parametrize("room", [0, 1], ids=["for-none", "for-the-first-of-two"])
def test_a_result_for_which_the_server_has_no_descriptor_fails_its_call_only(room: int) -> None:
    handle = serve.run(in_isolation("Large", "process"), route_prefix=None)
    before = pids("Large")
    assert same(handle, b"x") == b"x"
    limit_descriptors(lowest_free() + room)  # a segment that is mapped has a second one

    with pytest.raises(RayServeException, match=r"the result cannot be read: .*Too many open fi"):
        handle.result.remote(len(LARGE)).result(timeout_s=PATIENCE_S)

    assert same(handle, b"x") == b"x"
    limit_descriptors(None)
    assert same(handle, LARGE) == LARGE
    assert pids("Large") == before


@on_linux
def test_messages_of_clients_for_which_a_child_has_no_descriptor_fail_their_requests_only() -> None:
    port = served(in_isolation("Bodies", "process"), name="default", route_prefix="/")
    before = pids("Bodies")
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
        connect(f"ws://127.0.0.1:{port}/echo", compression=None) as other,
        connect(f"ws://127.0.0.1:{port}/echo", compression=None) as websocket,
    ):
        client.post("/limit/3")

        websocket.send(LINE)
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(PATIENCE_S)
        answers = [client.post("/size", content=each) for each in (LARGE, b"small")]
        other.send("small")

        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert [each.status_code for each in answers] == [500, 200]
        assert other.recv(PATIENCE_S) == "small"
        client.post("/limit/0")
        assert client.post("/size", content=LARGE).json() == len(LARGE)
    assert pids("Bodies") == before


@on_linux
def test_requests_and_responses_for_which_the_server_has_no_descriptor_fail_alone() -> None:
    port = served(in_isolation("Bodies", "process"), name="default", route_prefix="/")
    before = pids("Bodies")
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as other,
        connect(f"ws://127.0.0.1:{port}/echo", compression=None) as websocket,
    ):
        for each in (client, other):  # no more connections can be made later
            each.post("/size", content=b"")
        limit_descriptors(3)

        websocket.send(LINE)
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(PATIENCE_S)
        answers = [client.get("/large"), other.post("/size", content=LARGE)]
        answers += [client.post("/size", content=b"small")]
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/stream")

        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert [each.status_code for each in answers] == [500, 500, 200]
        limit_descriptors(None)
        assert client.get("/large").text == LINE
        assert client.get("/stream").text == LINE + "y" * len(LINE) + "z"
    assert pids("Bodies") == before


# The environment, which is read when the first application starts.


@pytest.fixture
def anew() -> None:
    """End all applications of this module."""
    serve.shutdown()


@on_linux
@in_both_places
def test_a_call_whose_own_call_no_replica_began_is_not_made_again(
    isolation: str, anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_RETRIES, "1")
    monkeypatch.setenv(START_METHOD, "spawn")  # the replacements come too late
    outer = serve.run(in_isolation("Outer", isolation), route_prefix=None)
    left = stopped("Echo")
    response = outer.remote(1)
    while left:
        wait_until(lambda: any(each.ongoing for each in left))
        (victim,) = (each for each in left if each.ongoing)
        left.remove(victim)
        os.kill(victim.host.pid, signal.SIGKILL)

    with pytest.raises(ReplicaUnavailableError, match="was killed by SIGKILL") as caught:
        response.result(timeout_s=PATIENCE_S)

    assert caught.type is ReplicaUnavailableError
    assert outer.count.remote().result(timeout_s=PATIENCE_S) == 1


@with_gil
@pytest.mark.parametrize("adapts", ["1", "0"])
def test_threads_of_a_child_that_compute_have_shorter_turns_unless_it_is_told_not_to(
    adapts: str, anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADAPT_SWITCH_INTERVAL, adapts)
    set_flags(monkeypatch, separate="1", sync="1")
    handle = serve.run(in_isolation("Spinning", "process"), route_prefix=None)
    given = sys.getswitchinterval()
    seconds = PATIENCE_S if adapts == "1" else 1.0

    calls = [handle.shortest_turn.remote(given, seconds) for _ in range(8)]
    shortest = min(call.result(timeout_s=2 * PATIENCE_S) for call in calls)

    assert (shortest < given) is (adapts == "1")
