"""`ingress run --http-threads N`: several loops that read and write HTTP, on one address."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingress as serve
from ingress.config import RequestRouterConfig
from ingress.core.base import gil
from ingress.engines import local_engine
from ingress.request_router import PendingRequest, RunningReplica, SyncRequestRouter
from ingress.serving.http.server_options import ServerOptions
from tests.fakes import Ledger
from tests.programs import run_ingress
from tests.servers import (
    INGRESS,
    PATIENCE_S,
    Connection,
    environment,
    process,
    wait_until,
    write_module,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="one socket for each loop")

CLIENTS = 40  # so many have the same loop once in 2 ** 39 runs
THREADS = {"ingress-http", "ingress-http-2"}
APP = """
import ingress as serve

@serve.deployment
def here(request): return "here"

app = here.bind()
"""

routed: set[str] = set()


class Noting(SyncRequestRouter):
    """Notes the thread that routes a request: that of the loop which has read it."""

    def rank(self, candidates: list[RunningReplica], request: PendingRequest) -> Any:
        routed.add(threading.current_thread().name)
        return [candidates]


@pytest.fixture
def two_loops() -> Iterator[None]:
    """Have `serve.run` serve with two loops, as the command does."""
    engine = local_engine()
    before = engine.http.command_line
    engine.use(ServerOptions(http_threads=2, http={"port": 0, "limit_connections": CLIENTS}))
    routed.clear()
    yield
    serve.shutdown()
    engine.use(before)


def port_of() -> int:
    (url,) = serve.status().proxies
    return int(url.rpartition(":")[2])


@contextmanager
def held() -> Iterator[tuple[int, list[Connection], Ledger]]:
    """Serve a deployment in which a request of each client waits for `ledger.leave`."""
    ledger = Ledger()

    @serve.deployment(
        max_ongoing_requests=CLIENTS,
        request_router_config=RequestRouterConfig(request_router_class=Noting),
    )
    class Held:
        async def __call__(self) -> str:
            ledger.enter()
            await ledger.leave
            return "served"

    serve.run(Held.bind())
    port = port_of()
    with ExitStack() as stack:
        clients = [stack.enter_context(Connection(port)) for _ in range(CLIENTS)]
        for each in clients:
            each.request("/")
        wait_until(lambda: ledger.running == CLIENTS)
        yield port, clients, ledger


def test_two_loops_serve_one_address_before_one_router(two_loops: None) -> None:
    with held() as (port, clients, ledger):
        assert routed == THREADS
        # The limit counts the connections of both loops.
        with Connection(port) as one_more:
            assert one_more.answer().status == 503
        ledger.leave.count_down()
        assert [each.answer().body for each in clients] == [b"served"] * CLIENTS


def test_a_stop_waits_for_the_requests_of_both_loops_and_leaves_nothing(two_loops: None) -> None:
    with held() as (port, clients, ledger):
        stopping = threading.Thread(target=serve.shutdown)
        stopping.start()
        ledger.leave.count_down()
        assert [each.answer().body for each in clients] == [b"served"] * CLIENTS
        stopping.join(PATIENCE_S)
    assert not THREADS & {each.name for each in threading.enumerate()}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_where_several_threads_cannot_serve_the_start_says_what_to_do(tmp_path: Path) -> None:
    write_module(tmp_path, "app", APP)
    wrong: list[tuple[list[str], str]] = [([], "has the GIL")]
    if not gil.is_on():
        wrong = [
            (["--workers", "2"], "is for a server that is one process"),
            (["--uds", "s"], "needs a socket for each thread: give --host and --port"),
        ]
    for words, told in wrong:
        ended = run_ingress(tmp_path, "run", "app:app", "--http-threads", "2", *words)
        assert ended.returncode == 1
        assert told in ended.stderr
        assert "--uds" in words or "serve with --workers 2" in ended.stderr


@pytest.mark.skipif(gil.is_on(), reason="for Python without the GIL")
def test_the_command_serves_with_threads(tmp_path: Path) -> None:
    write_module(tmp_path, "app", APP)
    command = [*INGRESS, "run", "app:app", "--port", "0", "--http-threads", "2"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client()) for _ in range(CLIENTS)]
            assert {each.get(server.url).text for each in clients} == {"here"}
        # Python 3.14 gives its threads' names to the system.
        tasks = Path(f"/proc/{server.process.pid}/task")
        names = {(each / "comm").read_text().strip() for each in tasks.iterdir()}
        assert names >= THREADS
