"""Several tasks of one request that are in `receive()` at once, as in Starlette on uvicorn."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from websockets.sync.client import connect

import ingress as serve
from tests.process_calls_app import in_isolation, mounted
from tests.servers import PATIENCE_S, served, set_flags, uvicorn_in_a_thread, wait_until


@pytest.fixture(params=["plain", "shared-loop", "own-loop", "process"])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of the application, alone on uvicorn or as a deployment."""
    if request.param == "plain":
        with uvicorn_in_a_thread(mounted, {"ws": "websockets-sansio"}) as port:
            yield port
    else:
        set_flags(monkeypatch, "0" if request.param == "shared-loop" else "1")
        isolation = "process" if request.param == "process" else "thread"
        yield served(in_isolation("Mounted", isolation))
    serve.shutdown()


def number_ended(port: int) -> int:
    return int(httpx.get(f"http://127.0.0.1:{port}/two/ended", timeout=PATIENCE_S).text)


def test_both_tasks_of_a_request_hear_that_it_is_over(port: int) -> None:
    before = number_ended(port)

    assert httpx.get(f"http://127.0.0.1:{port}/two/http", timeout=PATIENCE_S).text == str(before)

    wait_until(lambda: number_ended(port) == before + 1)


def test_each_task_of_a_websocket_gets_a_message_and_both_hear_that_its_client_has_left(
    port: int,
) -> None:
    before = number_ended(port)

    with connect(f"ws://127.0.0.1:{port}/two/websocket", proxy=None) as client:
        assert client.recv(PATIENCE_S) == "two"
        client.send("a")
        client.send("b")
        assert client.recv(PATIENCE_S) == "a b"
        assert client.recv(PATIENCE_S) == "again"

    wait_until(lambda: number_ended(port) == before + 1)
