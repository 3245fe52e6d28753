"""Serves an application for a test, and observes the places and times of its code.

here()      the thread of this line, and whether it runs on an event loop
Gate        holds user code inside until the test opens it
served()    the application behind an HTTP client and a handle, and its places
online()    the same on a real port, for streams
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.schema import DeploymentStatusOverview
from ingress.testing import Latch
from tests.servers import wait_until

TIMEOUT_S = 60.0
"""Bound on every wait; only a failing test waits that long."""

ANYIO_WORKER = "thread AnyIO worker thread"
"""The thread pool that Starlette itself uses."""


def here() -> str:
    """Return the place of this line: "loop" or "thread", and the thread's name without its number.

    A worker thread has no running event loop.
    """
    thread = threading.current_thread().name
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return "thread " + re.sub(r"-worker-\d+$", "-worker", thread)
    return f"loop {thread}"


async def here_async() -> str:
    return here()


def flag_values(*, sync: str = "01", user: str = "01", router: str = "01") -> list[Any]:
    """Return some of the eight combinations, for `parametrize("flags", ..., indirect=True)`."""
    return [
        pytest.param(values, id="sync{}-user{}-router{}".format(*values))
        for values in itertools.product(sync, user, router)
    ]


FEW_FLAGS = pytest.mark.parametrize("flags", flag_values(router="1"), indirect=True)
"""Without the router's flag, which moves no user code: one table is seen at all eight values."""


class Gate:
    """A gate in user code: calls wait in front of it until the test opens it. Thread-safe."""

    def __init__(self) -> None:
        self.inside = 0
        self.most_inside = 0
        self.passed = 0
        self._lock = threading.Lock()
        self._opened = Latch(timeout_s=TIMEOUT_S)

    def open(self) -> None:
        self._opened.count_down()

    def wait(self) -> None:
        """Wait at the gate, blocking the thread."""
        self._enter()
        try:
            self._opened.wait()
        except TimeoutError:
            self._give_up()
        finally:
            self._leave()

    async def wait_async(self) -> None:
        """Wait at the gate, leaving the event loop free."""
        self._enter()
        try:
            await self._opened
        except TimeoutError:
            self._give_up()
        finally:
            self._leave()

    def wait_for(self, count: int) -> None:
        """Return once `count` calls wait at the gate together; for the test."""
        wait_until(lambda: self.inside == count)

    def _give_up(self) -> NoReturn:
        self._opened.count_down()  # the test has failed: release all waiting calls
        raise AssertionError("the gate was not opened")

    def _enter(self) -> None:
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)

    def _leave(self) -> None:
        with self._lock:
            self.inside -= 1
            self.passed += 1


def results(responses: list[Any]) -> list[Any]:
    """Return the results of calls by handle."""
    return [response.result(timeout_s=TIMEOUT_S) for response in responses]


@dataclass(frozen=True, slots=True)
class Served:
    """A served application. `loop`, `worker` and `executor` are the values of `here()` in it."""

    client: httpx.Client | TestClient
    handle: serve.DeploymentHandle
    loop: str
    worker: str
    executor: str
    _pool: ThreadPoolExecutor

    def get(self, path: str = "/") -> Any:
        """Return the response to a request."""
        return self.client.get(path)

    def send(self, path: str = "/", count: int = 1) -> list[Future[Any]]:
        """Send requests at the same time and return without waiting for the answers."""
        return [self._pool.submit(self.client.get, path) for _ in range(count)]

    def status(self, deployment: str = "") -> DeploymentStatusOverview:
        """Return the status of a deployment, by default the deployment of `handle`."""
        deployments = serve.status().applications[self.handle.app_name].deployments
        return deployments[deployment or self.handle.deployment_name]

    def ongoing(self) -> int:
        return sum(replica.ongoing for replica in self.status().replicas)


@contextmanager
def served(application: serve.Application, settings: Settings | None = None) -> Iterator[Served]:
    """Serve an application on a test client's loop."""
    settings = settings or Settings.from_environment()
    serving: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        serving.append(threading.current_thread().name)
        await application(scope, receive, send)

    with TestClient(app, raise_server_exceptions=False) as client, ThreadPoolExecutor(40) as pool:
        handle = serve.get_app_handle("default")
        yield _served(client, handle, serving[0], settings, pool)


@contextmanager
def online(application: serve.Application, settings: Settings | None = None) -> Iterator[Served]:
    """Serve an application on a free port."""
    settings = settings or Settings.from_environment()
    serve.start(serve.HTTPOptions(port=0))
    try:
        handle = serve.run(application)
        url = next(iter(serve.status().proxies))
        with (
            httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client,
            ThreadPoolExecutor(40) as pool,
        ):
            yield _served(client, handle, "ingress-http", settings, pool)
    finally:
        serve.shutdown()


def _served(
    client: httpx.Client | TestClient,
    handle: serve.DeploymentHandle,
    serving: str,
    settings: Settings,
    pool: ThreadPoolExecutor,
) -> Served:
    replica = f"{handle.deployment_name}#0"
    separate = settings.run_user_code_in_separate_thread
    return Served(
        client,
        handle,
        f"loop {replica if separate else serving}",
        f"thread {replica}-worker",
        f"thread {f'{replica}-executor' if separate else 'ingress-executor'}-worker",
        pool,
    )
