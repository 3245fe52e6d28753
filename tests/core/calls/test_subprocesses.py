"""Processes that user code starts with asyncio and AnyIO on several event loops of one process.

A fork is held by one of Python's hooks for it, which runs within uvloop's own: there another loop
that forks has failed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import PIPE
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI

import ingress as serve
from ingress.testing import Latch
from tests.servers import bind, served, steady, uvicorn_in_a_thread, wait_until

uvloop = pytest.importorskip("uvloop")
pytestmark = [
    pytest.mark.usefixtures("shutdown"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

_before_fork: list[Callable[[], object]] = []
os.register_at_fork(before=lambda: [each() for each in _before_fork])

app = FastAPI()
seen: list[str] = []


@app.get("/exec")
async def by_exec() -> int | None:
    seen.append("exec")
    return await (await asyncio.create_subprocess_exec("true")).wait()


async def by_shell() -> int | None:
    process = await asyncio.create_subprocess_shell("cat", stdin=PIPE, stdout=PIPE)
    output, _ = await process.communicate(b"through pipes")
    return process.returncode if output == b"through pipes" else None


async def by_anyio() -> int:
    async with await anyio.open_process(["true"]) as process:
        return await process.wait()


async def by_run() -> int:
    return (await anyio.run_process(["echo", "run"])).returncode


@app.get("/ping")
async def ping() -> list[str]:
    return seen


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(app)
class Api:
    async def all(self) -> list[int | None]:
        return [*await asyncio.gather(by_exec(), by_shell(), by_anyio(), by_run())]

    async def many(self) -> None:
        await asyncio.gather(*(by_anyio() for _ in range(60)))
        seen.append("many")

    async def cancelled_before(self) -> None:
        seen.append("asks")
        try:
            await asyncio.create_subprocess_exec("sleep", "60")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def cancelled_after(self) -> None:
        """Cancel a start after the fork: its end is what asyncio waits for then."""
        starting = asyncio.create_task(asyncio.create_subprocess_exec("sleep", "60", stdout=PIPE))
        await asyncio.sleep(0)
        assert children()
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting


def children() -> str:
    """Return the ids of the child processes that the event loops of this process have started."""
    found = ""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += file.read()
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Held:
    """A fork that has begun, and waits for `go`."""

    def __init__(self) -> None:
        self.began, self.go = Latch(), Latch()

    def __call__(self) -> None:
        if not self.began.is_open:  # the first fork
            self.began.count_down()
            self.go.wait()


@pytest.fixture
def held() -> Iterator[Held]:
    seen.clear()
    held = Held()
    _before_fork.append(held)
    yield held
    held.go.count_down()
    _before_fork.clear()


def starts_in_turn(held: Held, first: str, second: str) -> None:
    """Start processes by two URLs, and prove that the second waits, while its loop serves."""
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(httpx.get, f"{first}/exec", timeout=30)]
        held.began.wait()
        answers.append(pool.submit(httpx.get, f"{second}/exec", timeout=30))
        wait_until(lambda: httpx.get(f"{second}/ping").json() == ["exec", "exec"])
        held.go.count_down()
        assert [each.result().json() for each in answers] == [0, 0]


def test_a_process_starts_after_that_of_another_loop_which_serves_meanwhile(held: Held) -> None:
    url = f"http://127.0.0.1:{served(bind(Api), 'a', '/a')}"
    served(bind(Api), "b", "/b")

    starts_in_turn(held, f"{url}/a", f"{url}/b")


def test_the_loop_of_a_server_takes_turns_with_those_of_replicas(held: Held) -> None:
    parent = FastAPI()
    parent.get("/exec")(by_exec)
    parent.get("/ping")(ping)
    parent.mount("/in", bind(Api))
    with uvicorn_in_a_thread(parent, {"loop": "uvloop"}) as port:
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/in/ping").json() == []  # the application starts

        starts_in_turn(held, f"{url}/in", url)


def test_a_loop_that_starts_many_processes_lets_others_start_theirs(held: Held) -> None:
    handle: Any = serve.run(bind(Api), name="a", route_prefix=None)
    other: Any = serve.run(bind(Api), name="b", route_prefix=None)
    many = handle.many.remote()
    held.began.wait()
    one = other.all.remote()
    wait_until(lambda: seen == ["exec"])
    held.go.count_down()

    assert one.result() == [0, 0, 0, 0]
    assert "many" not in seen
    many.result()


def test_a_process_that_is_cancelled_before_its_turn_leaves_nothing(held: Held) -> None:
    url = f"http://127.0.0.1:{served(bind(Api), 'a', '/a')}"
    served(bind(Api), "b", "/b")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.get, f"{url}/a/exec", timeout=30)
        held.began.wait()
        before = steady(descriptors)
        response = serve.get_app_handle("b").cancelled_before.remote()
        wait_until(lambda: "asks" in seen)

        response.cancel()

        wait_until(lambda: "cancelled" in seen)
        assert steady(descriptors) == before
        held.go.count_down()
        assert answer.result().json() == 0
    assert httpx.get(f"{url}/b/exec").json() == 0
    wait_until(lambda: not children())


def test_a_process_that_is_cancelled_after_its_fork_is_ended() -> None:
    handle: Any = serve.run(bind(Api), route_prefix=None)
    handle.all.remote().result()
    before = steady(descriptors)

    handle.cancelled_after.remote().result()

    wait_until(lambda: not children())
    assert steady(descriptors) == before
    assert handle.all.remote().result() == [0, 0, 0, 0]


def test_processes_of_two_replicas_all_start(separate: str, switch_interval: None) -> None:
    handle: Any = serve.run(bind(Api.options(num_replicas=2)), route_prefix=None)
    [each.result() for each in [handle.all.remote() for _ in range(4)]]
    before = steady(descriptors)

    answers = [each.result() for each in [handle.all.remote() for _ in range(12)]]

    assert answers == [[0, 0, 0, 0]] * 12
    wait_until(lambda: not children())
    assert steady(descriptors) == before
