"""`@serve.batch` inside replicas: its context, cancelled callers, and its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.testclient import TestClient

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL
from ingress.core.calls.call import CURRENT_CALL, current_calls
from ingress.exceptions import RequestCancelledError, RequestCycleError
from ingress.logs import RequestFilter
from ingress.testing import Latch
from tests.fakes import together
from tests.servers import (
    PATIENCE_S,
    Connection,
    bind,
    ongoing,
    records_of,
    served,
    set_flags,
    wait_until,
)

LONG_S = 30.0


def results(responses: list[Any]) -> list[Any]:
    return [response.result(timeout_s=PATIENCE_S) for response in responses]


def run(target: Any, **options: Any) -> Any:
    return serve.run(target, route_prefix=None, **options)


class Hold:
    """Batches two calls; a batch waits until the test releases it."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.ended: list[BaseException | None] = []
        self.release = Latch()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def __call__(self, xs: list[Any]) -> list[Any]:
        self.batches.append(xs)
        try:
            await self.release
        except BaseException as error:
            self.ended.append(error)
            raise
        self.ended.append(None)
        return [str(x) for x in xs]


def hold() -> tuple[Any, list[Any]]:
    """Return a deployment of `Hold` and a list that will contain its instance."""
    made: list[Any] = []

    class Noted(Hold):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    return serve.deployment(max_ongoing_requests=10)(Noted), made


def hold_behind_fastapi(*, middleware: bool) -> tuple[Any, list[Any]]:
    """Return the same as an inner method that a route awaits."""
    made: list[Any] = []
    app = FastAPI()
    if middleware:

        @app.middleware("http")
        async def pass_on(request: Request, call_next: Any) -> Any:
            return await call_next(request)

    @serve.ingress(app)
    class Routed:
        def __init__(self) -> None:
            self.hold: Any = Hold()
            made.append(self.hold)

        @app.get("/{path}")
        async def route(self, request: Request) -> Any:
            return await self.hold.__call__(request)

    return serve.deployment(max_ongoing_requests=10)(Routed), made


HOLDS: dict[str, Any] = {
    "plain": hold,
    "fastapi": partial(hold_behind_fastapi, middleware=False),
    "middleware": partial(hold_behind_fastapi, middleware=True),
}


# Functions and methods that can be batched


@serve.batch(max_batch_size=2, batch_wait_timeout_s=0.1)
async def of_the_module(tags: list[str]) -> list[Any]:
    return [(serve.get_replica_context().replica_tag, tags)] * len(tags)


def test_a_function_deployment_and_a_function_of_the_module_are_batched(separate: str) -> None:
    @serve.deployment
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def function(xs: list[int]) -> list[int]:
        return [sum(xs)] * len(xs)

    handle = run(function.bind())
    assert results([handle.remote(1), handle.remote(2)]) == [3, 3]

    @serve.deployment(num_replicas=2)
    class K:
        async def __call__(self) -> Any:
            return await of_the_module(serve.get_replica_context().replica_tag)

    handle = run(bind(K), name="module")
    found = results([handle.remote() for _ in range(40)])
    # Replicas that share a loop share no batch: each batch ran as its own replica.
    assert all(set(tags) == {tag} for tag, tags in found)
    assert {len(tags) for _, tags in found} <= {1, 2}
    assert ("0", ["0", "0"]) in found


def test_one_application_started_twice_batches_on_both_loops(separate: str) -> None:
    deployment, made = hold()
    app = bind(deployment)
    for _ in range(2):
        with TestClient(app) as client, ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(client.get, "/") for _ in range(2)]
            wait_until(lambda: made and made[-1].batches)
            made[-1].release.count_down()
            assert [answer.result(PATIENCE_S).status_code for answer in answers] == [200, 200]
    assert len(made) == 2


def test_a_loop_that_user_code_makes_for_itself_in_a_replica_works_as_well(
    shutdown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")

    @serve.deployment
    class K:
        @serve.batch(batch_wait_timeout_s=0)
        def double(self, xs: list[int]) -> list[Any]:
            return [(x * 2, serve.get_replica_context().deployment) for x in xs]

        def __call__(self, x: int) -> Any:
            async def main() -> Any:
                loops.append(weakref.ref(asyncio.get_running_loop()))
                return await self.double(x)

            return asyncio.run(main())

    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    assert results([run(bind(K)).remote(2)]) == [(4, "K")]
    wait_until(lambda: gc.collect() >= 0 and loops[0]() is None)


# Context of a batch


def test_a_batch_never_mixes_models_and_knows_its_own(separate: str) -> None:
    batches: list[Any] = []

    class K:
        @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.05)
        async def __call__(self, xs: list[int]) -> list[Any]:
            model = CURRENT_CALL.get().metadata.multiplexed_model_id
            of_each = [call.metadata.multiplexed_model_id for call in current_calls()]
            assert of_each == [model] * len(xs)
            batches.append(xs)
            return [(model, x) for x in xs]

    handle = run(bind(serve.deployment(K)))
    handles = [handle.options(multiplexed_model_id=name) for name in ("a", "b")]
    responses = [handles[x % 2].remote(x) for x in range(12)]

    assert results(responses) == [("ab"[x % 2], x) for x in range(12)]
    assert sorted(len(xs) for xs in batches) == [2, 2, 4, 4]
    for parity in (0, 1):  # in order, for each model
        of_model = [x for xs in batches for x in xs if x % 2 == parity]
        assert of_model == sorted(of_model)


def test_a_batch_knows_its_requests_and_is_none_of_them(separate: str) -> None:
    logger = logging.getLogger("test_batching_replica")

    @serve.deployment
    class Child:
        async def __call__(self) -> str:
            [call] = current_calls()  # its own call, not those of the calling batch
            return call.metadata.request_id

    @serve.deployment
    class K:
        def __init__(self, child: Any) -> None:
            self.child = child

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def __call__(self, xs: list[int]) -> list[Any]:
            logger.warning("in the batch")
            seen = [call.metadata.request_id for call in current_calls()]
            child = await self.child.remote()
            return [(seen, child, serve.get_replica_context().servable_object is self)] * len(xs)

    with records_of(logger.name, RequestFilter()) as records:
        handle = run(bind(K, bind(Child)))
        responses = [handle.remote(1), handle.remote(2)]
        (ids, child_id, is_self), _ = results(responses)

    assert ids == [response.request_id for response in responses]
    assert is_self
    assert child_id not in ("", *ids)  # a call that a batch makes has a new id
    [record] = records
    assert vars(record)["deployment"] == "K"
    assert vars(record)["request_id"] == ",".join(ids)  # a record of a batch has all of them


def test_what_is_set_in_a_replica_holds_for_its_deployment(separate: str) -> None:
    class K:
        def reconfigure(self, config: dict[str, Any]) -> None:
            self.f.set_max_batch_size(config["size"])

        @serve.batch(batch_wait_timeout_s=0.05)
        async def f(self, xs: list[int]) -> list[int]:
            return [len(xs)] * len(xs)

        async def __call__(self) -> Any:
            return self.f._get_max_batch_size(), await self.f(1)

    small, large = (
        run(bind(serve.deployment(user_config={"size": size})(K)), name=name)
        for name, size in (("small", 2), ("large", 3))
    )
    assert results([small.remote() for _ in range(6)]) == [(2, 2)] * 6
    assert results([large.remote() for _ in range(6)]) == [(3, 3)] * 6
    assert K.f._get_max_batch_size() == 10


def test_batches_a_replica_can_never_fill_are_warned_of_once_a_deployment(
    separate: str, caplog: pytest.LogCaptureFixture
) -> None:
    class K:
        @serve.batch(max_batch_size=8, max_concurrent_batches=2)
        async def __call__(self, xs: list[int]) -> list[int]:
            return xs

        @serve.batch(max_batch_size=4)
        async def fits(self, xs: list[int]) -> list[int]:
            return xs

    with caplog.at_level(logging.WARNING, "ingress"):
        run(bind(serve.deployment(max_ongoing_requests=15, num_replicas=2)(K)))
        run(bind(serve.deployment(max_ongoing_requests=16)(K)), name="other")

    [warning] = [each for each in caplog.messages if "max_batch_size" in each]
    assert "`max_batch_size` (8) * `max_concurrent_batches` (2) is larger than" in warning
    assert "`max_ongoing_requests` (15)" in warning
    assert "K.__call__' of deployment 'K'" in warning


# Callers that leave


@pytest.mark.parametrize(
    ("app", "how"), [("plain", "FIN"), ("plain", "RST"), ("fastapi", "FIN"), ("middleware", "RST")]
)
@pytest.mark.parametrize("leaves", ["first", "second"])
def test_a_client_that_leaves_while_its_batch_runs_loses_only_its_own_result(
    separate: str, app: str, leaves: str, how: str
) -> None:
    deployment, made = HOLDS[app]()
    port = served(bind(deployment))
    for _ in range(2):
        del made[0].batches[:]
        made[0].release = Latch()
        first, second = Connection(port), Connection(port)
        with first, second:
            first.request("/first")
            wait_until(lambda: ongoing() == 1)
            second.request("/second")
            wait_until(lambda: made[0].batches)
            leaver, stays = (first, second) if leaves == "first" else (second, first)
            leaver.reset() if how == "RST" else leaver.socket.close()
            wait_until(lambda: ongoing() == 1)
            made[0].release.count_down()
            assert stays.answer().status == 200
    assert made[0].ended == [None] * 2
    wait_until(lambda: ongoing() == 0)


def test_the_request_of_a_client_that_left_can_still_be_asked_for_its_body(separate: str) -> None:
    got: list[Any] = []
    go = Latch()
    entered = threading.Event()

    class K:
        @serve.batch(max_batch_size=1)
        async def __call__(self, requests: list[Request]) -> list[Any]:
            entered.set()
            await go
            try:
                async with asyncio.timeout(PATIENCE_S):
                    got.append(await requests[0].body())
            except ClientDisconnect as error:
                got.append(error)
            return [None]

    with Connection(served(bind(serve.deployment(K)))) as leaver:
        # More bytes than are read before the slot, but fewer than the length.
        leaver.request("/", method="POST", headers="Content-Length: 100000\r\n")
        leaver.send(b"x" * 70_000)
        assert entered.wait(PATIENCE_S)
    wait_until(lambda: ongoing() == 0)
    go.count_down()
    wait_until(lambda: got)
    assert isinstance(got[0], ClientDisconnect)


# The end of a batch


def test_a_replica_that_stops_cancels_its_batches_and_no_caller_hangs(separate: str) -> None:
    deployment, made = hold()
    handle = run(bind(deployment.options(graceful_shutdown_timeout_s=0.1)))
    responses = [handle.remote(number) for number in range(5)]
    wait_until(lambda: made[0].batches)
    serve.delete("default")

    for response in responses:
        with pytest.raises(serve.exceptions.RayServeException) as error:
            response.result(timeout_s=PATIENCE_S)
        assert error.value.status_code == 503
    assert [type(each) for each in made[0].ended] == [asyncio.CancelledError]


@pytest.mark.parametrize("written", ["def", "async def"])
def test_a_handler_that_is_stuck_holds_up_neither_the_stop_nor_its_callers(
    shutdown: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: str
) -> None:
    set_flags(monkeypatch, "1")
    entered, release = threading.Event(), Latch()

    def body(xs: list[int]) -> list[int]:
        entered.set()
        release.wait()
        return xs

    async def on_loop(xs: list[int]) -> list[int]:
        return body(xs)

    function: Any = serve.batch(max_batch_size=2)(body if written == "def" else on_loop)
    handle = run(bind(serve.deployment(graceful_shutdown_timeout_s=0.1)(function)))
    responses = [handle.remote(1), handle.remote(2)]
    assert entered.wait(PATIENCE_S)
    stopped = threading.Event()

    def stop() -> None:
        serve.delete("default")
        stopped.set()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        assert stopped.wait(PATIENCE_S)
        for response in responses:
            with pytest.raises(serve.exceptions.ReplicaUnavailableError):
                response.result(timeout_s=PATIENCE_S)
        assert not release.is_open
    finally:
        release.count_down()
        thread.join()


def test_a_batch_that_waits_for_the_slots_of_its_own_callers_is_a_cycle(separate: str) -> None:
    @serve.deployment(max_ongoing_requests=2)
    class K:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def outer(self, xs: list[int]) -> list[Any]:
            handle = serve.get_app_handle("default")
            return [await handle.inner.remote(x) for x in xs]

        async def inner(self, x: int) -> int:
            return x

    handle = run(bind(K))
    for response in [handle.outer.remote(1), handle.outer.remote(2)]:
        with pytest.raises(RequestCycleError, match="can never start"):
            response.result(timeout_s=PATIENCE_S)


def test_calls_and_cancels_of_threads_leave_nothing(separate: str, switch_interval: None) -> None:
    class K:
        @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.001, max_concurrent_batches=2)
        async def __call__(self, xs: list[int]) -> list[int]:
            await asyncio.sleep(0)
            return xs

    handle = run(bind(serve.deployment(K)))
    wrong: list[Any] = []

    def caller(offset: int) -> None:
        responses = [handle.remote(offset + number) for number in range(100)]
        for response in responses[::3]:
            response.cancel()
        for number, response in enumerate(responses):
            try:
                value = response.result(timeout_s=PATIENCE_S)
            except RequestCancelledError:
                continue
            if value != offset + number:
                wrong.append((value, offset + number))

    together(*(partial(caller, 1000 * each) for each in range(4)))
    assert wrong == []
    wait_until(lambda: ongoing() == 0)
    call: Any = K.__call__
    batcher = call.__ingress_batcher__
    wait_until(lambda: batcher._queues == {})
