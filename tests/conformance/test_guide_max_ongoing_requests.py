"""The guide "Asyncio and concurrency best practices": max_ongoing_requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from tests.conformance.observe import TIMEOUT_S, Gate, Served, flag_values, results, served
from tests.servers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")


def async_def(gate: Gate) -> type:
    class K:
        async def __call__(self, request: Request) -> None:
            await gate.wait_async()

    return K


def def_in_thread(gate: Gate) -> type:
    class K:
        def __call__(self, request: Request) -> None:
            gate.wait()

    return K


def generator_in_thread(gate: Gate) -> type:
    class K:
        def __call__(self, request: Request) -> Iterator[str]:
            gate.wait()
            yield "item"

    return K


def fastapi_def(gate: Gate) -> type:
    app = FastAPI()

    class K:
        @app.get("/")
        def endpoint(self) -> None:
            gate.wait()

    return serve.ingress(app)(K)


# A `def` handler on the loop has no concurrency to limit: see the tests below.
KINDS_THAT_OVERLAP = [
    pytest.param(*flags.values, kind, id=f"{kind.__name__}-{flags.id}")
    for kind, combinations in {
        async_def: flag_values(),
        fastapi_def: flag_values(router="1"),
        def_in_thread: flag_values(sync="1", router="1"),
        generator_in_thread: flag_values(sync="1", router="1"),
    }.items()
    for flags in combinations
]


def all_answered(responses: list[Any], status: int = 200) -> bool:
    return {response.result().status_code for response in responses} == {status}


def full(it: Served, gate: Gate, inside: int, queued: int) -> None:
    """Wait until so many calls are inside and so many queue, and check that no more enter."""
    gate.wait_for(inside)
    wait_until(lambda: it.status().queued == queued)
    assert gate.most_inside == inside


# "Each deployment has a max_ongoing_requests configuration that controls how many in-flight
# requests a replica handles at once."
# "Ray Serve uses an internal semaphore to limit concurrent in-flight requests per replica to
# max_ongoing_requests."
# "Requests beyond that limit queue in the router or handle until capacity becomes available"
# "With an async def handler that spends most of its time awaiting I/O, max_ongoing_requests
# directly controls concurrency"
# "If you enable the sync-in-threadpool behavior, each in-flight request can run in a thread"
@pytest.mark.parametrize(("flags", "kind"), KINDS_THAT_OVERLAP, indirect=["flags"])
def test_a_replica_runs_as_many_as_that_and_the_others_queue(
    flags: Settings, kind: Callable[[Gate], type]
) -> None:
    gate = Gate()
    with served(serve.deployment(max_ongoing_requests=3)(kind(gate)).bind(), flags) as it:
        responses = it.send(count=5)
        full(it, gate, inside=3, queued=2)
        gate.open()

        assert all_answered(responses)
        assert gate.passed == 5
        assert gate.most_inside <= 3


def test_the_limit_is_per_replica() -> None:
    gate = Gate()
    deployment = serve.deployment(max_ongoing_requests=2, num_replicas=2)(async_def(gate))
    with served(deployment.bind()) as it:
        responses = it.send(count=5)
        full(it, gate, inside=4, queued=1)
        assert [replica.ongoing for replica in it.status().replicas] == [2, 2]
        gate.open()
        assert all_answered(responses)


# "... or they fail with backpressure depending on configuration."
def test_beyond_the_queue_requests_fail_with_backpressure() -> None:
    gate = Gate()
    deployment = serve.deployment(max_ongoing_requests=1, max_queued_requests=2)(async_def(gate))
    with served(deployment.bind()) as it:
        responses = it.send(count=3)
        full(it, gate, inside=1, queued=2)

        refused = it.get()
        assert refused.status_code == 503
        assert "max_queued_requests=2" in refused.text

        gate.open()
        assert all_answered(responses)


# "With a blocking def handler that runs on the event loop (threadpool disabled),
# max_ongoing_requests doesn't give you the concurrency you expect"
# "The event loop can only run one handler at a time."
# "Even though max_ongoing_requests=100, the replica effectively processes requests serially."
# "Use max_ongoing_requests to bound concurrency per replica, but remember that blocking def
# handlers can still serialize work if they run on the event loop."
@pytest.mark.parametrize("kind", [def_in_thread, generator_in_thread])
def test_def_handlers_on_the_loop_run_one_after_another(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[Gate], type]
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "0")
    gate = Gate()
    with served(serve.deployment(max_ongoing_requests=100)(kind(gate)).bind()) as it:
        responses = it.send(count=5)
        wait_until(lambda: it.ongoing() == 5)
        gate.open()

        assert all_answered(responses)
        assert gate.passed == 5
        assert gate.most_inside == 1


# "Up to max_ongoing_requests calls can be running at once."
# "Real throughput depends on: How many threads the threadpool uses."
@pytest.mark.reliability("F02")
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_the_threadpool_has_a_thread_for_each_ongoing_request(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    gate = Gate()
    deployment = serve.deployment(max_ongoing_requests=limit)(def_in_thread(gate))
    with served(deployment.bind()) as it:
        responses = [it.handle.remote(None) for _ in range(limit + 1)]
        full(it, gate, inside=limit, queued=1)
        gate.open()
        assert results(responses) == [None] * (limit + 1)


def test_a_cancelled_call_holds_its_slot_until_its_thread_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    gate = Gate()
    deployment = serve.deployment(max_ongoing_requests=1)(def_in_thread(gate))
    with served(deployment.bind()) as it:
        cancelled = it.handle.remote(None)
        gate.wait_for(1)
        cancelled.cancel()
        following = it.handle.remote(None)
        full(it, gate, inside=1, queued=1)
        gate.open()

        following.result(timeout_s=TIMEOUT_S)
        assert cancelled.cancelled()
        assert gate.most_inside == 1
