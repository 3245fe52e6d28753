"""Combinations of features: batches, models, streams, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse

import ingress as serve
from ingress.engines import local_engine
from ingress.exceptions import RequestCancelledError
from ingress.testing import Latch
from tests.servers import PATIENCE_S, Connection, bind, served, set_flags, until, wait_until

pytestmark = pytest.mark.usefixtures("separate")
LONG_S = 30.0
TIMEOUT_S = 0.2


def asking(timeout_s: float | None) -> str:
    return "" if timeout_s is None else f"x-request-timeout-seconds: {timeout_s}\r\n"


def replica(name: str = "default") -> Any:
    """Return the one replica of an application, of which the status shows too little."""
    (deployment,) = local_engine().applications[name].deployments.values()
    (found,) = deployment.replicas
    return found


# Batches, deadlines and cancellation


@pytest.mark.parametrize("other_s", [TIMEOUT_S, LONG_S, None], ids=["both", "later", "none"])
def test_a_batchs_calls_have_its_latest_deadline(other_s: float | None) -> None:
    deadlines: list[float | None] = []
    outcomes: list[BaseException | str] = []
    asked, release = Latch(), Latch()

    @serve.deployment
    class Child:
        async def __call__(self) -> str:
            deadlines.append(serve.get_request_context().deadline)
            asked.count_down()
            await release
            return "child"

    @serve.deployment
    class Parent:
        def __init__(self, child: Any) -> None:
            self.child = child

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def __call__(self, requests: list[Request]) -> list[Any]:
            try:
                outcomes.append(await self.child.remote())
            except BaseException as error:
                outcomes.append(error)
                raise
            return ["done"] * len(requests)

    port = served(bind(Parent, bind(Child)))
    began = time.monotonic()
    with Connection(port) as first, Connection(port) as second:
        first.request("/", headers=asking(TIMEOUT_S) + "Connection: close\r\n")
        second.request("/", headers=asking(other_s) + "Connection: close\r\n")
        assert first.answer().status == 408
        if other_s == TIMEOUT_S:
            assert second.answer().status == 408
        else:
            asked.wait()
            release.count_down()
            assert second.answer().status == 200
    wait_until(lambda: outcomes)
    (deadline,) = deadlines
    if other_s is None:
        assert (deadline, outcomes) == (None, ["child"])
    else:
        assert deadline is not None
        assert other_s <= deadline - began < other_s + PATIENCE_S
        if other_s == TIMEOUT_S:
            assert isinstance(outcomes[0], RequestCancelledError)
        else:
            assert outcomes == ["child"]


@pytest.mark.parametrize("how", ["cancelled", "timed out", "stopped"])
@pytest.mark.parametrize("written", ["def", "async def"])
def test_a_batch_whose_requests_are_over_and_its_children_are_told(how: str, written: str) -> None:
    told: list[str] = []
    began, child_began, child_ended = (threading.Event() for _ in range(3))

    class Child:
        async def __call__(self) -> None:
            child_began.set()
            try:
                await asyncio.Event().wait()
            finally:
                child_ended.set()

    class Both:
        def __init__(self, child: Any) -> None:
            self.child = child

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def in_loop(self, xs: list[int]) -> list[int]:
            cancellation = serve.cancellation()
            self.child.remote()
            await until(child_began.is_set)
            began.set()
            try:
                await until(lambda: cancellation.requested)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                told.append(f"cancelled, {cancellation.requested}")
                raise
            told.append("True")
            return xs

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        def in_thread(self, xs: list[int]) -> list[int]:
            cancellation = serve.cancellation()
            self.child.remote()
            assert child_began.wait(PATIENCE_S)
            began.set()
            wait_until(lambda: cancellation.requested)
            told.append("True")
            return xs

        async def __call__(self, request: Request) -> Any:
            return await (self.in_thread if written == "def" else self.in_loop)(1)

    child = bind(serve.deployment(Child).options(graceful_shutdown_timeout_s=0.1))
    port = served(bind(serve.deployment(Both).options(graceful_shutdown_timeout_s=0.1), child))
    timeout_s = TIMEOUT_S if how == "timed out" else None
    with Connection(port) as first, Connection(port) as second:
        for each in (first, second):
            each.request("/", headers=asking(timeout_s) + "Connection: close\r\n")
        assert began.wait(PATIENCE_S)
        if how == "cancelled":
            first.reset()
            assert not serve.cancellation().requested
            second.reset()
        elif how == "timed out":
            assert first.answer().status == second.answer().status == 408
        else:
            serve.delete("default")
            assert first.answer().status == second.answer().status == 503
        wait_until(lambda: told)
        assert child_ended.wait(PATIENCE_S)
    # A stop ends the requests first: the batch may see that before its own cancellation.
    assert told in (["True"], ["cancelled, True"])


def test_a_batch_on_a_loop_of_the_users_is_told_of_a_stop_and_not_touched(
    monkeypatch: pytest.MonkeyPatch, separate: str
) -> None:
    set_flags(monkeypatch, separate, sync="1")
    began = threading.Event()
    told: list[bool] = []

    class Foreign:
        @serve.batch
        async def batched(self, xs: list[int]) -> list[int]:
            began.set()
            cancellation = serve.cancellation()
            await until(lambda: cancellation.requested)
            told.append(True)
            return xs

        def __call__(self) -> Any:
            return asyncio.run(self.batched(1))

    foreign: Any = serve.deployment(graceful_shutdown_timeout_s=0.5)(Foreign)
    response = serve.run(bind(foreign), route_prefix=None).remote()
    assert began.wait(PATIENCE_S)
    serve.delete("default")
    assert told == [True]
    with pytest.raises(serve.exceptions.ReplicaUnavailableError):
        response.result(timeout_s=PATIENCE_S)


def test_a_batch_whose_requests_are_not_all_over_is_not_told() -> None:
    began, told = Latch(), Latch()
    cancellations: list[Any] = []

    @serve.deployment
    class Batched:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def __call__(self, xs: list[int]) -> list[int]:
            cancellations.append(serve.cancellation())
            began.count_down()
            await told
            return xs

    handle = serve.run(bind(Batched), route_prefix=None)
    first, second = handle.remote(1), handle.remote(2)
    began.wait()
    first.cancel()
    wait_until(lambda: replica().ongoing == 1)
    assert not cancellations[0].requested
    told.count_down()
    assert second.result(timeout_s=PATIENCE_S) == 2
    assert not cancellations[0].requested


@pytest.mark.parametrize("written", ["def", "async def", "a generator"])
def test_what_a_batch_raises_when_all_its_requests_have_left_is_logged_once(
    written: str, caplog: pytest.LogCaptureFixture
) -> None:
    began = threading.Event()

    class Failing:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def in_loop(self, xs: list[int]) -> list[int]:
            began.set()
            cancellation = serve.cancellation()
            await until(lambda: cancellation.requested)
            raise ValueError("too late")

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        def in_thread(self, xs: list[int]) -> list[int]:
            began.set()
            cancellation = serve.cancellation()
            wait_until(lambda: cancellation.requested)
            raise ValueError("too late")

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def items(self, xs: list[int]) -> AsyncIterator[list[int]]:
            began.set()
            try:
                await asyncio.Event().wait()
                yield xs
            finally:
                raise ValueError("too late")

        async def call(self, x: int) -> Any:
            if written == "a generator":
                return [item async for item in self.items(x)]
            return await (self.in_thread if written == "def" else self.in_loop)(x)

    handle = serve.run(bind(serve.deployment(Failing)), route_prefix=None)
    responses = [handle.call.remote(x) for x in range(2)]
    assert began.wait(PATIENCE_S)
    for response in responses:
        response.cancel()
    wait_until(lambda: caplog.records)
    serve.shutdown()
    (record,) = caplog.records
    assert "failed after all requests of its batch were cancelled" in record.message
    assert all(response.request_id in record.message for response in responses)
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "too late"


def test_an_error_of_an_item_whose_request_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    began, release = Latch(), Latch()

    @serve.deployment
    class Failing:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S, per_item_errors=True)
        async def __call__(self, xs: list[int]) -> list[Any]:
            began.count_down()
            await release
            return [ValueError(x) for x in xs]

    handle = serve.run(bind(Failing), route_prefix=None)
    left, stayed = handle.remote(1), handle.remote(2)
    began.wait()
    left.cancel()
    wait_until(lambda: replica().ongoing == 1)
    release.count_down()
    with pytest.raises(ValueError, match="2"):
        stayed.result(timeout_s=PATIENCE_S)
    (record,) = caplog.records
    assert left.request_id in record.message
    assert stayed.request_id not in record.message


def test_a_batch_that_takes_whichever_comes_first_is_no_cycle() -> None:
    release = Latch()

    @serve.deployment
    class Leaf:
        async def __call__(self) -> str:
            await release
            return "leaf"

    @serve.deployment(max_ongoing_requests=2)
    class K:
        def __init__(self, leaf: Any) -> None:
            self.leaf = leaf

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def outer(self, xs: list[int]) -> list[Any]:
            never = serve.get_app_handle("default").inner.remote()  # its callers hold all slots
            asked = [asyncio.ensure_future(each._wait()) for each in (self.leaf.remote(), never)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            never.cancel()  # unless the cycle is detected already
            await asyncio.gather(*asked, return_exceptions=True)
            return [asked[0].result()] * len(xs)

        async def inner(self) -> None:
            raise AssertionError("there was no slot for it")

    handle = serve.run(bind(K, bind(Leaf)), route_prefix=None)
    responses = [handle.outer.remote(x) for x in range(2)]
    wait_until(lambda: serve.status().applications["default"].deployments["K"].queued == 1)
    release.count_down()
    assert [each.result(timeout_s=PATIENCE_S) for each in responses] == ["leaf"] * 2


# Children and deadlines


@pytest.mark.parametrize("by", ["itself", "a batch"])
def test_a_request_is_told_of_its_deadline_before_its_children(by: str) -> None:
    """The timers of the request and its children are on different loops, in no fixed order."""
    app = FastAPI()
    asked: list[Any] = []

    @serve.deployment
    class Child:
        async def __call__(self) -> None:
            await asyncio.Event().wait()

    @serve.deployment
    @serve.ingress(app)
    class Parent:
        def __init__(self, child: Any) -> None:
            self.child = child

        @serve.batch
        async def batched(self, xs: list[int]) -> Any:
            return await self.ask()

        async def ask(self) -> Any:
            response = self.child.remote()
            asked.append(response)
            return await response

        @app.get("/")
        async def route(self) -> Any:
            return await (self.ask() if by == "itself" else self.batched(1))

    with Connection(served(bind(Parent, bind(Child)))) as client:
        client.request("/", headers=asking(LONG_S) + "Connection: close\r\n")
        wait_until(lambda: asked)
        asked[0]._call.expire()
        assert client.answer().status == 408


def test_a_deadline_between_the_start_of_a_response_and_its_body_is_a_408() -> None:
    app = FastAPI()
    began = threading.Event()

    async def slow_body(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        began.set()
        await asyncio.Event().wait()

    app.mount("/slow", slow_body)

    @serve.deployment
    @serve.ingress(app)
    class Slow:
        pass

    with Connection(served(bind(Slow))) as client:
        client.request("/slow/", headers=asking(TIMEOUT_S) + "Connection: close\r\n")
        assert began.wait(PATIENCE_S)
        assert client.answer().status == 408


# Batches and models


def test_a_model_is_not_evicted_under_a_batch_that_all_have_left() -> None:
    unloaded: list[str] = []
    began, release = Latch(), Latch()
    at_the_end: list[list[str]] = []

    class Model:
        def __init__(self, model_id: str) -> None:
            self.model_id = model_id

        def __del__(self) -> None:
            unloaded.append(self.model_id)

    @serve.deployment
    class Models:
        @serve.multiplexed(max_num_models_per_replica=1)
        async def load(self, model_id: str) -> Model:
            return Model(model_id)

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def batched(self, xs: list[int]) -> list[int]:
            await self.load("a")
            began.count_down()
            await release
            at_the_end.append(list(unloaded))
            return xs

        async def other(self) -> str:
            return str((await self.load("b")).model_id)

    handle = serve.run(bind(Models), route_prefix=None)
    responses = [handle.batched.remote(x) for x in range(2)]
    began.wait()
    for response in responses:
        response.cancel()
    wait_until(lambda: replica().ongoing == 0)
    other = handle.other.remote()
    with pytest.raises(TimeoutError):
        other.result(timeout_s=0.1)
    release.count_down()
    assert other.result(timeout_s=PATIENCE_S) == "b"
    assert at_the_end == [[]]
    assert unloaded == ["a"]
    wait_until(lambda: not replica().context.models.in_use)


# Errors after the client left


@pytest.mark.parametrize("written", ["async def", "def"])
@pytest.mark.parametrize("sync", ["0", "1"], ids=["loop", "pool"])
@pytest.mark.parametrize("how", ["returned", "response"])
def test_what_a_generator_raises_after_its_client_left_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    separate: str,
    written: str,
    sync: str,
    how: str,
) -> None:
    set_flags(monkeypatch, separate, sync)

    async def items() -> AsyncIterator[bytes]:
        try:
            yield b"item"
            await asyncio.Event().wait()
        finally:
            raise ValueError("too late")

    def def_items() -> Iterator[bytes]:
        try:
            while True:
                yield b"item"
        finally:
            raise ValueError("too late")

    def of(kind: str) -> Any:
        made: Any = def_items() if kind == "def" else items()
        return StreamingResponse(made) if how == "response" else made

    @serve.deployment
    async def in_loop(request: Request) -> Any:
        return of(written)

    @serve.deployment
    def in_thread(request: Request) -> Any:
        return of(written)

    target = in_thread if written == "def" and how == "returned" else in_loop
    with caplog.at_level(logging.WARNING, "ingress"), Connection(served(bind(target))) as client:
        client.request("/")
        client.receive_until(b"item")
        client.reset()
        wait_until(lambda: any(each.exc_info for each in caplog.records))
        wait_until(lambda: replica().ongoing == 0)
        serve.shutdown()
    late = [each for each in caplog.records if each.exc_info]
    assert len(late) == 1
    assert "too late" in str(late[0].exc_info and late[0].exc_info[1])
