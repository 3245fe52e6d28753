"""`serve.status()`: applications, their states, and their counters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request

import ingress as serve
from ingress.schema import ApplicationStatus, DeploymentStatus
from ingress.testing import Latch
from tests.servers import PATIENCE_S, bind, get, overview, served, wait_until

pytestmark = pytest.mark.usefixtures("threadpool")


def test_status_has_the_shape_of_ray() -> None:
    @serve.deployment(num_replicas=2)
    class Child:
        async def __call__(self) -> str:
            return "x"

    @serve.deployment
    class Parent:
        def __init__(self, child: Any) -> None: ...

        async def __call__(self) -> str:
            return "x"

    before = time.time()
    status = serve.status()
    assert (status.proxies, status.applications, status.target_capacity) == ({}, {}, None)
    port = served(bind(Parent, bind(Child)))
    status = serve.status()
    application = status.applications["default"]
    child = application.deployments["Child"]

    assert status.proxies == {f"http://127.0.0.1:{port}": "HEALTHY"}
    assert application.status is ApplicationStatus.RUNNING
    assert application.status == "RUNNING"
    assert before <= application.last_deployed_time_s <= time.time()
    assert list(application.deployments) == ["Child", "Parent"]
    assert (child.status, child.status_trigger) == ("HEALTHY", "CONFIG_UPDATE_COMPLETED")
    assert (child.replica_states, child.message) == ({"RUNNING": 2}, "")


def test_what_is_running_queued_and_done_is_counted_exactly() -> None:
    may_end = threading.Event()

    @serve.deployment(num_replicas=2, max_ongoing_requests=2)
    class Held:
        async def __call__(self) -> str:
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
            return "x"

    handle = serve.run(bind(Held), route_prefix=None)
    responses = [handle.remote() for _ in range(7)]
    wait_until(lambda: overview("Held").queued == 3)
    held = overview("Held")

    assert held.requests == 7
    assert sorted(each.ongoing for each in held.replicas) == [2, 2]
    may_end.set()
    assert [each.result(timeout_s=PATIENCE_S) for each in responses] == ["x"] * 7
    wait_until(lambda: sum(each.ongoing for each in overview("Held").replicas) == 0)
    assert (overview("Held").requests, overview("Held").queued) == (7, 0)


def test_processing_time_and_errors_are_counted_by_route() -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Timed:
        @app.get("/items/{number}")
        async def item(self, number: int) -> int:
            if number == 0:
                raise ValueError
            return number

    port = served(bind(Timed), route_prefix="/v1")
    statuses = [get(port, f"/v1/items/{number}").status for number in (1, 2, 0)]

    def found() -> list[tuple[str, Any]]:
        (replica,) = overview("Timed").replicas
        return list(replica.latency_ms.items())

    wait_until(lambda: [each.count for _, each in found()] == [3])  # counted after the answer
    ((route, latency),) = found()

    assert statuses == [200, 200, 500]
    assert route.startswith("/v1")
    assert (latency.count, latency.errors, sum(latency.buckets)) == (3, 1, 3)
    assert latency.total_ms > 0


class Health:
    """The behaviour of a deployment's health checks, and a record of them."""

    def __init__(self) -> None:
        self.asked = 0
        self.at_once = self.most_at_once = 0
        self.error: Exception | None = None
        self.may_answer = Latch()
        self.may_answer.count_down()
        self.threads: set[str] = set()

    def __enter__(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)

    def __exit__(self, *_: object) -> None:
        self.at_once -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def health() -> Iterator[Health]:
    state = Health()
    yield state
    state.may_answer.count_down()


def checked(health: Health, kind: str, timeout_s: float = PATIENCE_S) -> serve.Application:
    class Checked:
        async def __call__(self, request: Request) -> str:
            return "x"

        if kind == "def":

            def check_health(self) -> None:
                with health:
                    health.may_answer.wait()

        else:

            async def check_health(self) -> None:  # type: ignore[misc]
                with health:
                    await health.may_answer

    deployment = serve.deployment(health_check_period_s=0.02, health_check_timeout_s=timeout_s)
    return deployment(Checked).bind()


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_health_is_asked_every_period(health: Health, kind: str, separate: str) -> None:
    served(checked(health, kind))
    wait_until(lambda: health.asked >= 5)

    assert overview("Checked").status is DeploymentStatus.HEALTHY
    assert health.most_at_once == 1
    if kind == "async def":
        assert health.threads == {"Checked#0" if separate == "1" else "ingress-http"}


@pytest.mark.reliability("B10")
@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_failing_health_check_is_in_status_until_it_succeeds(health: Health, kind: str) -> None:
    port = served(checked(health, kind))
    health.error = ValueError("the model is gone")
    wait_until(lambda: overview("Checked").status is DeploymentStatus.UNHEALTHY)

    assert "check_health raised ValueError: the model is gone" in overview("Checked").message
    assert serve.status().applications["default"].status is ApplicationStatus.UNHEALTHY
    assert get(port, "/").status == 200
    health.error = None
    wait_until(lambda: overview("Checked").status is DeploymentStatus.HEALTHY)
    assert overview("Checked").message == ""


@pytest.mark.reliability("B11")
@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_hanging_health_check_is_in_status_and_never_overlaps_itself(
    health: Health, kind: str
) -> None:
    port = served(checked(health, kind, timeout_s=0.1))
    health.may_answer = Latch(timeout_s=PATIENCE_S)
    wait_until(lambda: overview("Checked").status is DeploymentStatus.UNHEALTHY)

    assert "did not answer within 0.1 s" in overview("Checked").message
    assert get(port, "/").status == 200
    wait_until(lambda: len(overview("Checked").replicas) == 2)
    assert health.most_at_once <= 2, "one of this replica, one of the replica that starts"
    health.may_answer.count_down()
    wait_until(lambda: overview("Checked").status is DeploymentStatus.HEALTHY)
    wait_until(lambda: len(overview("Checked").replicas) == 1)
    assert health.most_at_once <= 2


def test_a_first_health_check_that_fails_fails_the_start(health: Health) -> None:
    health.error = ValueError("never was")
    with pytest.raises(RuntimeError, match="'Checked' failed to start: ValueError: never was"):
        served(checked(health, "async def"))
