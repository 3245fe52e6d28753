"""Worker processes that die, or seem to be dead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.open_loop import Load, Stream, load
from tests.programs import INGRESS, ServerProcess, environment, process, write_module
from tests.reliability.figures import Figures
from tests.servers import get, wait_until

pytestmark = pytest.mark.slow

APP = """
import asyncio, ctypes, os
import ingress as serve

@serve.deployment
class Workers:
    async def __call__(self, request):
        if request.url.path == "/hold":
            ctypes.PyDLL(None).sleep(8)
        elif request.url.path == "/sleep":
            await asyncio.sleep(0.05)
        return str(os.getpid())

app = Workers.bind()
"""
IN_FLIGHT = 2  # 40 a second, 50 ms each
BACK_S = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    write_module(tmp_path, "workers", APP)
    command = [*INGRESS, "run", "workers:app", "--port", "0", "--workers", "2"]
    with process(command, tmp_path, environment(tmp_path)) as running:
        wait_until(lambda: len(pids(running)) == 2)
        yield running


def pids(server: ServerProcess) -> set[int]:
    """Return the pids of the processes that answer; the kernel chooses one for each request."""
    try:
        return {int(get(server.port, "/pid").body) for _ in range(20)}
    except (ConnectionError, ValueError):
        return set()


@pytest.mark.reliability("B23")
def test_a_worker_that_is_killed_takes_its_own_requests_with_it_and_comes_back(
    figures: Figures, server: ServerProcess
) -> None:
    stream = Stream("/sleep", rate=40, seconds=20)
    found: list[Load] = []
    asking = threading.Thread(target=lambda: found.extend(load(server.port, stream)))
    asking.start()
    time.sleep(6)
    before = pids(server)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: len(pids(server) - {killed}) == 2)
    back_s = time.monotonic() - began
    asking.join()

    (became,) = found
    figures.note("requests", len(became.sent))
    failed = len(became.sent) - became.statuses[200]
    figures.at_most("failed, of what was in flight", failed, IN_FLIGHT)
    figures.at_most("back after, s", back_s, BACK_S)
    later = [each for each in became.sent if each.due_s > 6 + BACK_S + 1]
    figures.at_most("failed later", sum(each.status != 200 for each in later), 0)


@pytest.mark.reliability("B25")
def test_a_worker_that_holds_the_gil_is_left_alive(figures: Figures, server: ServerProcess) -> None:
    before = pids(server)
    began = time.monotonic()
    held = get(server.port, "/hold")
    figures.at_least("held the GIL, s", time.monotonic() - began, 8)

    assert int(held.body) in before
    assert pids(server) == before
