"""The guide "Performance Tuning": a model without batching, debugging, async methods.

Each test stands under the sentences it proves.
"""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from starlette.requests import Request

import ingress as serve
from ingress.exceptions import OptionNotActedOnWarning
from tests.conformance.observe import Gate, results, served
from tests.servers import wait_until


# "serve_num_router_requests staying constant while your load increases"
# "serve_deployment_processing_latency_ms spiking up as queries queue up in the background"
def test_status_counts_requests_what_queues_and_how_long_they_took() -> None:
    gate = Gate()

    class K:
        async def __call__(self, request: Request) -> None:
            await gate.wait_async()

    with served(serve.deployment(max_ongoing_requests=2)(K).bind()) as it:
        assert (it.status().requests, it.status().queued) == (0, 0)
        responses = it.send(count=5)
        gate.wait_for(2)
        wait_until(lambda: it.status().requests == 5)
        assert it.status().queued == 3
        assert it.ongoing() == 2

        gate.open()
        assert {response.result().status_code for response in responses} == {200}
        wait_until(lambda: it.ongoing() == 0)
        [replica] = it.status().replicas
        [latency] = replica.latency_ms.values()
        assert latency.count == 5
        assert latency.total_ms > 0
        assert it.status().queued == 0


# "Are you reserving one or more cores for your deployment replicas using ray_actor_options (e.g.
# ray_actor_options={"num_cpus": 2})?"
@pytest.mark.parametrize(("options", "threads"), [({}, 5), ({"num_cpus": 2}, 6)])
def test_the_cores_of_a_replica_size_the_threads_that_calls_are_offloaded_to(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], threads: int
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "1")
    gate = Gate()

    class K:
        async def __call__(self) -> None:
            await asyncio.to_thread(gate.wait)

    with served(serve.deployment(ray_actor_options=options)(K).bind()) as it:
        responses = [it.handle.remote() for _ in range(10)]
        gate.wait_for(threads)
        gate.open()
        results(responses)

    assert gate.most_inside == threads


# "Are you reserving GPUs for your deployment replicas using ray_actor_options (e.g.
# ray_actor_options={"num_gpus": 1})?"
def test_reserved_gpus_are_accepted_and_said_to_have_no_effect() -> None:
    class K:
        async def __call__(self) -> str:
            return "ok"

    application = serve.deployment(ray_actor_options={"num_gpus": 1})(K).bind()
    with pytest.warns(OptionNotActedOnWarning, match="num_gpus"), served(application) as it:
        assert it.get().text == "ok"


# "def endpoint functions will be called in a separate threadpool, so you might observe many
# requests running at the same time inside one replica"
# "In this case, you can try to use async def to control the workload performance."
def test_many_def_endpoints_run_at_once_in_a_replica_and_async_ones_between_awaits() -> None:
    app = FastAPI()
    many, single = Gate(), Gate()

    class K:
        @app.get("/def")
        def many(self) -> None:
            many.wait()

        @app.get("/async")
        async def one(self) -> None:
            single.wait()

    with served(serve.deployment(serve.ingress(app)(K)).bind()) as it:
        responses = it.send("/def", count=30)
        many.wait_for(30)
        many.open()
        assert {response.result().status_code for response in responses} == {200}

        responses = it.send("/async", count=5)
        # A replica that is late because 30 threads want the GIL is given one at a time.
        wait_until(lambda: it.ongoing() + it.status().queued == 5)
        single.open()
        assert {response.result().status_code for response in responses} == {200}
        assert single.most_inside == 1


# "Up to 100 requests can be in-flight per replica."
# "While one request is waiting, the event loop can work on others."
# "Serve sets a low number (100) by default so the client gets proper backpressure."
def test_by_default_a_hundred_requests_are_ongoing_and_the_next_queues() -> None:
    gate = Gate()

    class K:
        async def __call__(self) -> None:
            await gate.wait_async()

    with served(serve.deployment(K).bind()) as it:
        responses = [it.handle.remote() for _ in range(101)]
        gate.wait_for(100)
        assert it.status().queued == 1
        gate.open()
        results(responses)

    assert gate.most_inside == 100


# "By default, Serve lets client HTTP requests run to completion no matter how long they take."
# holds for every test here that keeps a request at a gate: no timeout is set.
