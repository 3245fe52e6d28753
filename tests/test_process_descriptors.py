"""Large contents that cross in shared memory, for which a process has no descriptor left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import ingress as serve
from ingress.exceptions import RayServeException
from tests.large_app import holdings
from tests.process_app import pids
from tests.process_calls_app import LINE, in_isolation, limit_descriptors
from tests.servers import PATIENCE_S, served, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and uses memfd")

LARGE = bytes(1_000_000)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    limit_descriptors(None)
    serve.shutdown()


def lowest_free() -> int:
    """Return the number that this process's next descriptor would have."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def same(handle: Any, value: bytes) -> bytes:
    found: bytes = handle.same.remote(value).result(timeout_s=PATIENCE_S)
    return found


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
        answers = [
            client.get("/large"),
            other.post("/size", content=LARGE),
            client.post("/size", content=b"small"),
        ]
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/stream")

        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert [each.status_code for each in answers] == [500, 500, 200]
        limit_descriptors(None)
        assert client.get("/large").text == LINE
        assert client.get("/stream").text == LINE + "y" * len(LINE) + "z"
    assert pids("Bodies") == before
