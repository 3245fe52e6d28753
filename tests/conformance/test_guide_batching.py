"""The guides on batching: "Batching", "max_concurrent_batches and event loop yielding" of "Asyncio
and concurrency best practices", and "Request Batching" of "Performance Tuning".

Each test stands under the sentences it proves.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.requests import Request

import ingress as serve
from ingress.core.base.settings import Settings
from tests.conformance.observe import FEW_FLAGS, TIMEOUT_S, Gate, here, results, served
from tests.servers import bind, wait_until

LONG_S = 30.0


# "Serve groups multiple incoming requests together and passes them to your handler as a list."
# "The handler still runs on the user event loop, but each call now processes many requests at once
# instead of just one."
@FEW_FLAGS
def test_requests_come_as_one_list_and_each_client_gets_its_own_result(flags: Settings) -> None:
    batches = []

    class BatchedModel:
        @serve.batch(max_batch_size=32, batch_wait_timeout_s=LONG_S)
        async def __call__(self, requests: list[Request]) -> list[str]:
            batches.append((here(), len(requests)))
            assert all(type(request) is Request for request in requests)
            return [f"result_{request.query_params['i']}" for request in requests]

    with served(bind(serve.deployment(max_ongoing_requests=64)(BatchedModel)), flags) as it:
        answers = [it.send(f"/?i={number}")[0] for number in range(32)]
        found = [answer.result(TIMEOUT_S) for answer in answers]

        assert [each.text for each in found] == [f"result_{number}" for number in range(32)]
        assert batches == [(it.loop, 32)]


# "If that batched work is blocking, it blocks the event loop for all of those requests at the same
# time."
def test_blocking_batched_work_blocks_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "1")
    gate = Gate()
    pings = []

    class BatchedModel:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def __call__(self, requests: list[Any]) -> list[Any]:
            gate.wait()
            return requests

        async def ping(self) -> None:
            pings.append(gate.passed)

    with served(bind(serve.deployment(BatchedModel))) as it:
        responses = [it.handle.remote(1), it.handle.remote(2)]
        gate.wait_for(1)
        ping = it.handle.ping.remote()
        assert pings == []
        gate.open()
        assert results([*responses, ping]) == [1, 2, None]
        assert pings == [1]  # the ping ran after the batch


# "return await loop.run_in_executor(None, run_sync)"
# "This keeps the event loop responsive while the model runs in a thread."
def test_an_offloaded_batch_leaves_the_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "1")
    gate = Gate()

    class BatchedModelOffload:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def __call__(self, requests: list[Any]) -> list[Any]:
            def run_sync() -> list[Any]:
                gate.wait()
                return requests

            return await asyncio.get_running_loop().run_in_executor(None, run_sync)

        async def ping(self) -> str:
            return "pong"

    with served(bind(serve.deployment(BatchedModelOffload))) as it:
        responses = [it.handle.remote(1), it.handle.remote(2)]
        gate.wait_for(1)
        assert results([it.handle.ping.remote()]) == ["pong"]
        gate.open()
        assert results(responses) == [1, 2]


# "this argument only works effectively if your batch handler yields control back to the event loop
# during processing."
# "allows multiple batches to be in flight simultaneously (up to the max_concurrent_batches limit)"
@pytest.mark.parametrize("written", ["async", "offloaded", "def"])
@FEW_FLAGS
def test_batches_that_yield_run_at_once_up_to_the_limit(flags: Settings, written: str) -> None:
    gate = Gate()
    options: Any = {"max_batch_size": 2, "max_concurrent_batches": 3, "batch_wait_timeout_s": 0.01}

    async def awaits(xs: list[int]) -> list[int]:
        await gate.wait_async()
        return xs

    async def offloads(xs: list[int]) -> list[int]:
        await asyncio.to_thread(gate.wait)
        return xs

    def blocks(xs: list[int]) -> list[int]:
        gate.wait()
        return xs

    handler: Any = {"async": awaits, "offloaded": offloads, "def": blocks}[written]
    function: Any = serve.batch(**options)(handler)
    with served(bind(serve.deployment(function)), flags) as it:
        responses = [it.handle.remote(number) for number in range(10)]
        gate.wait_for(3)
        gate.open()
        assert results(responses) == list(range(10))
        assert gate.most_inside == 3


# "If your batch handler blocks the event loop [...] max_concurrent_batches won't provide the
# concurrency you expect. The event loop can only start processing a new batch when the current
# batch yields control."
@FEW_FLAGS
def test_batches_that_block_run_one_after_the_other(flags: Settings) -> None:
    gate = Gate()

    class Blocking:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=10, max_concurrent_batches=3)
        async def __call__(self, xs: list[int]) -> list[int]:
            gate.wait()
            return xs

    with served(bind(serve.deployment(Blocking)), flags) as it:
        responses = [it.handle.remote(number) for number in range(6)]
        gate.wait_for(1)
        gate.open()
        assert results(responses) == list(range(6))
        assert gate.passed == 3
        assert gate.most_inside == 1


# "Once the first request arrives, the batching decorator will wait for a full batch (up to
# max_batch_size) until batch_wait_timeout_s is reached. If the timeout is reached, the batch will
# be sent to the model regardless the batch size."
def test_a_batch_that_does_not_fill_is_sent_regardless_of_its_size() -> None:
    sizes = []

    class Model:
        @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.1)
        async def __call__(self, xs: list[int]) -> list[int]:
            sizes.append(len(xs))
            return xs

    with served(bind(serve.deployment(Model))) as it:
        assert results([it.handle.remote(number) for number in range(11)]) == list(range(11))
    assert sizes == [8, 3]


# "When the first model finishes a full batch of 8, the second model will finish one batch of 6 and
# then to fill the next batch, which will initially only be partially filled with 8 - 6 = 2"
def test_a_downstream_batch_of_another_size_is_filled_only_partly() -> None:
    sizes = []

    @serve.deployment
    class Second:
        @serve.batch(max_batch_size=6, batch_wait_timeout_s=0.05)
        async def __call__(self, xs: list[int]) -> list[int]:
            sizes.append(len(xs))
            return xs

    @serve.deployment
    class First:
        def __init__(self, second: Any) -> None:
            self.second = second

        @serve.batch(max_batch_size=8, batch_wait_timeout_s=LONG_S)
        async def prepare(self, xs: list[int]) -> list[int]:
            return [x + 1 for x in xs]

        async def __call__(self, x: int) -> Any:
            return await self.second.remote(await self.prepare(x))

    with served(bind(First, bind(Second))) as it:
        assert results([it.handle.remote(number) for number in range(8)]) == list(range(1, 9))
    assert sizes == [6, 2]


# "The deployment picks up the batch and evaluates it." - so a replica must admit the calls.
def test_a_batch_is_no_larger_than_what_a_replica_takes_at_once() -> None:
    sizes = []

    class Model:
        @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.05)
        async def __call__(self, xs: list[int]) -> list[int]:
            sizes.append(len(xs))
            return xs

    with served(bind(serve.deployment(max_ongoing_requests=4)(Model))) as it:
        assert results([it.handle.remote(number) for number in range(8)]) == list(range(8))
    assert sizes == [4, 4]


# Beyond the guide: "The method is declared as an async method"; a `def` is allowed, too.
@FEW_FLAGS
def test_a_def_handler_runs_in_a_worker_thread_at_both_values_of_the_flag(flags: Settings) -> None:
    class Model:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        def __call__(self, xs: list[int]) -> list[str]:
            assert serve.get_replica_context().servable_object is self
            return [here()] * len(xs)

    with served(bind(serve.deployment(Model)), flags) as it:
        assert results([it.handle.remote(1), it.handle.remote(2)]) == [it.worker] * 2
        wait_until(lambda: it.ongoing() == 0)
    assert not [t for t in threading.enumerate() if "-batch-worker" in t.name]
