"""`serve.cancellation()`, and the children that a cancelled request cancels."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocketDisconnect

import ingress as serve
from ingress.core.calls.call import CURRENT_CALL
from ingress.exceptions import (
    BackPressureError,
    RequestCancelledError,
    RequestTimeoutError,
    StreamClosedError,
)
from ingress.handle import DeploymentHandle, DeploymentResponse
from ingress.testing import Latch
from tests.fakes import bind, make_call, together
from tests.servers import (
    PATIENCE_S,
    Connection,
    get,
    ongoing,
    overview,
    result,
    served,
    set_flags,
    until,
    wait_until,
)


@pytest.fixture(autouse=True, params=["0", "1"], ids=["separate0", "separate1"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_flags(monkeypatch, request.param, sync="1")
    yield
    serve.shutdown()


class Seen:
    """A record of what happened in user code."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.ended: list[str] = []
        self.may_end = Latch()
        self.responses: list[Any] = []

    def wait_for_began(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.began.acquire(timeout=PATIENCE_S)

    def cancel_begun(self, response: Any, count: int = 1) -> None:
        """Cancel a response once this number of calls has begun."""
        self.wait_for_began(count)
        response.cancel()

    def has_ended(self, *expected: str) -> bool:
        return sorted(self.ended) == sorted(expected)


class Child:
    """Runs until it is cancelled or released."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    async def __call__(self, name: str = "child") -> str:
        self.seen.began.release()
        try:
            await self.seen.may_end
        except asyncio.CancelledError:
            self.seen.ended.append(f"{name} cancelled")
            raise
        self.seen.ended.append(f"{name} done")
        return name

    async def items(self, name: str) -> AsyncIterator[str]:
        try:
            while True:
                yield await self(name)
        finally:
            self.seen.ended.append(f"{name} closed")

    def blocking(self, name: str) -> str:
        self.seen.began.release()
        cancellation = serve.cancellation()
        wait_until(lambda: cancellation.requested or self.seen.may_end.is_open)
        self.seen.ended.append(f"{name} {'told' if cancellation.requested else 'done'}")
        cancellation.check()
        return name


# The token.


def test_outside_of_a_request_it_is_never_requested() -> None:
    cancellation = serve.cancellation()

    assert not cancellation.requested
    cancellation.check()
    assert repr(cancellation) == "Cancellation(requested=False)"


def test_check_raises_in_the_name_of_the_request() -> None:
    call = make_call()
    context = contextvars.copy_context()
    context.run(CURRENT_CALL.set, call)
    cancellation = context.run(serve.cancellation)
    cancellation.check()
    call.cancel(RequestTimeoutError(call.metadata.request_id, 1.0))

    assert cancellation.requested
    with pytest.raises(RequestCancelledError, match=call.metadata.request_id) as caught:
        cancellation.check()
    assert isinstance(caught.value.__cause__, RequestTimeoutError)
    assert call.error is caught.value.__cause__


def test_a_request_that_was_answered_is_not_cancelled() -> None:
    call = make_call()
    context = contextvars.copy_context()
    context.run(CURRENT_CALL.set, call)
    call.settle("answer")
    call.cancel()

    assert not context.run(serve.cancellation).requested


class Worker:
    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.began = threading.Event()

    def _work(self) -> None:
        self.began.set()
        cancellation = serve.cancellation()
        wait_until(lambda: cancellation.requested)
        self.told.append(str(cancellation.requested))
        cancellation.check()

    def in_def(self) -> None:
        self._work()

    def in_generator(self) -> Iterator[int]:
        yield 1
        self._work()

    async def in_to_thread(self) -> None:
        await asyncio.to_thread(self._work)

    async def in_executor(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._work)

    async def in_async(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.told.append(str(serve.cancellation().requested))

    async def has_begun(self) -> bool:
        return await asyncio.to_thread(self.began.wait, PATIENCE_S)


@pytest.mark.parametrize("how", ["cancel", "awaiter", "shutdown"])
@pytest.mark.parametrize(
    "method", ["in_def", "in_generator", "in_to_thread", "in_executor", "in_async"]
)
def test_cancellation_is_requested_for_every_kind_of_work_and_every_cause(
    method: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    worker = serve.deployment(graceful_shutdown_timeout_s=0.1)(Worker)
    handle = serve.run(bind(worker, told), route_prefix=None)
    is_stream = method == "in_generator"
    response = handle.options(method_name=method, stream=is_stream).remote()

    async def take() -> None:
        if is_stream:
            async for _ in response:
                pass
        else:
            await response

    async def cancel_awaiter() -> None:
        task = asyncio.create_task(take())
        assert await handle.has_begun.remote()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert response.cancelled()

    if how == "awaiter":
        asyncio.run(cancel_awaiter())
    else:
        assert result(handle.has_begun.remote())
        if how == "cancel":
            response.cancel()
        else:
            serve.shutdown()
    wait_until(lambda: told == ["True"])
    assert "failed after it was cancelled" not in caplog.text


# Children.


class Parent:
    """Calls its child in one of several ways; in some it then waits to be cancelled."""

    def __init__(self, child: Any, seen: Seen) -> None:
        self.child = child
        self.seen = seen

    async def awaits(self) -> Any:
        return await self.child.remote()

    async def gathers(self) -> Any:
        return await asyncio.gather(self.child.remote("a"), self.child.remote("b"))

    async def forgets(self) -> str:
        self.seen.responses.append(self.child.remote())
        return "forgotten"

    async def fails(self) -> str:
        self.seen.responses.append(self.child.remote())
        raise ValueError

    async def keeps(self) -> None:
        self.seen.responses.append(self.child.remote())
        await asyncio.Event().wait()

    async def streams(self) -> list[Any]:
        items = self.child.options(method_name="items", stream=True).remote("child")
        return [item async for item in items]

    async def in_a_task(self) -> None:
        async def call() -> None:
            try:
                await self.child.remote()
            except RequestCancelledError:
                self.seen.ended.append("task told")

        self.task = asyncio.create_task(call())
        await asyncio.Event().wait()

    async def in_a_group(self) -> None:
        async with anyio.create_task_group() as group:
            for name in ("a", "b"):
                group.start_soon(self._take, name)

    async def _take(self, name: str) -> None:
        async for _ in self.child.options(stream=True).items.remote(name):
            pass

    async def in_to_thread(self) -> Any:
        return await asyncio.to_thread(lambda: self.child.remote().result())

    def in_generator(self) -> Iterator[Any]:
        yield from self.child.options(stream=True).items.remote("child")

    def in_checking_generator(self) -> Iterator[int]:
        self.seen.began.release()
        cancellation = serve.cancellation()
        try:
            while True:
                yield 1
                wait_until(lambda: cancellation.requested)
                cancellation.check()
        finally:
            self.seen.ended.append("closed")

    def in_def(self) -> Any:
        try:
            return self.child.remote().result()
        except RequestCancelledError:
            self.seen.ended.append("thread told")
            raise

    async def elsewhere(self) -> None:
        def call() -> None:
            self.seen.responses.append(self.child.remote())

        thread = threading.Thread(target=call)
        contextvars.Context().run(thread.start)  # free-threaded Python copies the context
        thread.join()
        contextvars.Context().run(call)
        await asyncio.Event().wait()

    async def cleans_up(self) -> None:
        self.seen.began.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.may_end.count_down()
            self.seen.ended.append(f"cleaned up with {await self.child.remote()}")

    async def deep(self, depth: int) -> Any:
        if depth == 0:
            return await self.child.remote()
        return await serve.get_deployment_handle("Parent").deep.remote(depth - 1)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def parent(seen: Seen) -> DeploymentHandle:
    child = bind(serve.deployment(Child), seen)
    return serve.run(bind(serve.deployment(Parent), child, seen), route_prefix=None)


CHILDREN: dict[str, tuple[int, list[str]]] = {
    "awaits": (1, ["child cancelled"]),
    "gathers": (2, ["a cancelled", "b cancelled"]),
    "keeps": (1, ["child cancelled"]),
    "streams": (1, ["child cancelled", "child closed"]),
    "in_a_task": (1, ["child cancelled", "task told"]),
    "in_to_thread": (1, ["child cancelled"]),
    "in_def": (1, ["child cancelled", "thread told"]),
}


@pytest.mark.parametrize("how", CHILDREN)
def test_a_cancelled_request_cancels_the_calls_made_in_it(
    parent: DeploymentHandle, seen: Seen, how: str
) -> None:
    count, ended = CHILDREN[how]
    seen.cancel_begun(getattr(parent, how).remote(), count)

    wait_until(lambda: seen.has_ended(*ended))
    wait_until(is_idle)


def test_a_client_that_leaves_cancels_its_request_without_a_word_whatever_it_asked_for(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    with Connection(served(bind(serve.deployment(Child), seen))) as client:
        client.request("/", headers="x-request-disconnect-disabled: ?1\r\n")
        seen.wait_for_began()

    wait_until(lambda: bool(seen.ended))
    [ended] = seen.ended
    assert ended.endswith("cancelled")
    wait_until(is_idle)
    serve.shutdown()
    assert not caplog.records


@pytest.mark.parametrize("told", [ClientDisconnect, StreamClosedError, WebSocketDisconnect])
def test_a_def_that_ends_with_what_it_was_told_is_not_worth_a_record(
    told: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    @serve.deployment
    class Works:
        @serve.method(execution="threadpool")
        def __call__(self) -> None:
            began.set()
            may_end.wait(PATIENCE_S)
            try:
                raise told()
            finally:
                ended.set()

    response = serve.run(bind(Works), route_prefix=None).remote()
    assert began.wait(PATIENCE_S)
    response.cancel()
    with pytest.raises(RequestCancelledError):
        result(response)
    may_end.set()
    assert ended.wait(PATIENCE_S)
    serve.shutdown()
    assert not caplog.records


@pytest.mark.parametrize(
    ("method", "ended"),
    [("in_generator", ["child cancelled", "child closed"]), ("in_checking_generator", ["closed"])],
)
def test_a_generator_in_a_thread_that_ends_with_its_client_is_not_worth_a_record(
    seen: Seen, caplog: pytest.LogCaptureFixture, method: str, ended: list[str]
) -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Streams(Parent):
        @app.get("/")
        def stream(self) -> StreamingResponse:
            return StreamingResponse(str(item) for item in getattr(self, method)())

    with Connection(served(bind(Streams, bind(serve.deployment(Child), seen), seen))) as client:
        client.request("/")
        seen.wait_for_began()
    wait_until(lambda: seen.has_ended(*ended))
    serve.shutdown()
    assert not caplog.records


def test_a_task_group_that_ends_with_its_cancelled_calls_is_not_worth_a_record(
    parent: DeploymentHandle, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    seen.cancel_begun(response := parent.in_a_group.remote(), 2)
    with pytest.raises(RequestCancelledError):
        result(response)
    serve.shutdown()
    assert sorted(seen.ended) == ["a cancelled", "a closed", "b cancelled", "b closed"]
    assert "failed after it was cancelled" not in caplog.text


def test_it_goes_down_a_chain_to_its_end(parent: DeploymentHandle, seen: Seen) -> None:
    seen.cancel_begun(parent.deep.remote(5))

    wait_until(lambda: seen.has_ended("child cancelled"))
    wait_until(is_idle)


def is_idle() -> bool:
    deployments = serve.status().applications["default"].deployments.values()
    return not (ongoing() or any(each.queued for each in deployments))


@pytest.mark.parametrize("how", ["forgets", "fails"])
def test_a_request_that_ends_by_itself_leaves_its_children_running(
    parent: DeploymentHandle, seen: Seen, how: str
) -> None:
    response = getattr(parent, how).remote()
    seen.wait_for_began()
    wait_until(lambda: response._call.settled)
    response.cancel()
    seen.may_end.count_down()

    assert result(seen.responses[0]) == "child"
    assert seen.ended == ["child done"]


def test_calls_from_elsewhere_are_not_cancelled(parent: DeploymentHandle, seen: Seen) -> None:
    seen.cancel_begun(parent.elsewhere.remote(), 2)
    wait_until(lambda: not any(each.ongoing for each in overview("Parent").replicas))
    seen.may_end.count_down()

    assert [result(each) for each in seen.responses] == ["child"] * 2


def test_a_request_cancels_no_children_of_another(parent: DeploymentHandle, seen: Seen) -> None:
    one, other = parent.awaits.remote(), parent.awaits.remote()
    seen.cancel_begun(one, 2)
    wait_until(lambda: seen.has_ended("child cancelled"))
    seen.may_end.count_down()

    assert result(other) == "child"


def test_a_finally_block_may_call_when_cancelled(parent: DeploymentHandle, seen: Seen) -> None:
    seen.cancel_begun(parent.cleans_up.remote())

    wait_until(lambda: "cleaned up with child" in seen.ended)


def test_a_stopped_replica_cancels_the_calls_made_in_it(seen: Seen) -> None:
    serve.run(bind(serve.deployment(Child), seen), name="child", route_prefix=None)

    @serve.deployment(graceful_shutdown_timeout_s=0.1)
    class Caller:
        async def __call__(self) -> None:
            seen.responses.append(serve.get_app_handle("child").remote())
            await asyncio.Event().wait()

    serve.run(bind(Caller), name="caller", route_prefix=None).remote()
    seen.wait_for_began()
    serve.delete("caller")

    with pytest.raises(RequestCancelledError):
        result(seen.responses[0])
    wait_until(lambda: seen.has_ended("child cancelled"))


def test_a_request_keeps_no_call_that_has_ended() -> None:
    left: list[int] = []

    @serve.deployment
    class Echo:
        async def __call__(self, value: int) -> int:
            return value

    @serve.deployment
    class Many:
        def __init__(self, echo: Any) -> None:
            self.echo = echo

        async def __call__(self, count: int) -> int:
            total = 0
            for number in range(count):
                total += await self.echo.remote(number)
            left.append(len(CURRENT_CALL.get()._children or ()))
            return total

    many = serve.run(bind(Many, bind(Echo)), route_prefix=None)

    assert result(many.remote(1_000)) == sum(range(1_000))
    assert left == [0]


def test_a_call_that_could_not_be_made_is_no_child() -> None:
    parent = make_call()

    @serve.deployment
    class Echo:
        async def __call__(self, value: Any) -> None: ...

        async def items(self) -> AsyncIterator[int]:
            yield 1

    handle = serve.run(bind(Echo), route_prefix=None)

    def call() -> None:
        CURRENT_CALL.set(parent)
        items = handle.options(method_name="items", stream=True).remote()
        assert list(items) == [1]
        with pytest.raises(RuntimeError, match="cannot be passed"):
            handle.remote(items)

    contextvars.copy_context().run(call)
    assert not parent._children


def test_children_that_come_and_go_while_their_parent_is_cancelled(switch_interval: None) -> None:
    for _ in range(50):
        parent, children = make_call(), [make_call() for _ in range(20)]

        def adopt(parent: Any = parent, children: Any = children) -> None:
            for child in children:
                parent.adopt(child)

        def settle(children: Any = children) -> None:
            for child in children[::2]:
                child.settle("answer")

        def cancel(parent: Any = parent) -> None:
            parent.cancel()
            parent.interrupt()

        together(adopt, settle, cancel)
        parent.interrupt()
        assert not {child for child in parent._children or () if not child.settled}


# `DeploymentResponse.cancel()`, at each stage.


def cancelled_as_it_should(response: DeploymentResponse) -> None:
    response.cancel()
    response.cancel()  # repeated calls are allowed
    assert response.cancelled()
    with pytest.raises(RequestCancelledError, match=f"{response.request_id} was cancelled"):
        result(response)

    async def wait() -> Any:
        return await response

    with pytest.raises(RequestCancelledError):
        asyncio.run(wait())


@pytest.fixture
def one_slot(seen: Seen) -> DeploymentHandle:
    return serve.run(bind(serve.deployment(max_ongoing_requests=1)(Child), seen), route_prefix=None)


def test_cancel_while_its_arguments_are_awaited(one_slot: DeploymentHandle, seen: Seen) -> None:
    argument = one_slot.remote("argument")
    seen.wait_for_began()
    cancelled_as_it_should(one_slot.remote(argument))
    seen.may_end.count_down()

    assert result(argument) == "argument", "its argument is not cancelled"
    wait_until(is_idle)
    assert seen.ended == ["argument done"]


def test_cancel_while_it_is_queued(one_slot: DeploymentHandle, seen: Seen) -> None:
    first = one_slot.remote("first")
    seen.wait_for_began()
    cancelled_as_it_should(one_slot.remote("queued"))
    seen.may_end.count_down()

    assert result(first) == "first"
    wait_until(is_idle)
    assert seen.ended == ["first done"]


@pytest.mark.parametrize(
    ("how", "ended"), [("__call__", "cancelled"), ("blocking", "told")], ids=["async", "thread"]
)
def test_cancel_while_it_runs(one_slot: DeploymentHandle, seen: Seen, how: str, ended: str) -> None:
    response = one_slot.options(method_name=how).remote("running")
    seen.wait_for_began()
    cancelled_as_it_should(response)

    wait_until(lambda: seen.has_ended(f"running {ended}"))
    wait_until(is_idle)


def test_cancel_after_it_was_answered_is_nothing(one_slot: DeploymentHandle, seen: Seen) -> None:
    seen.may_end.count_down()
    response = one_slot.remote("done")
    assert result(response) == "done"
    response.cancel()

    assert not response.cancelled()
    assert result(response) == "done"


@pytest.mark.parametrize("stage", ["assigned", "queued"])
def test_cancel_before_the_first_line_means_no_line(stage: str, seen: Seen) -> None:
    """The replica's loop is busy, so a call with a slot has not started."""
    gate, entered = threading.Event(), threading.Event()

    @serve.deployment(max_ongoing_requests=2 if stage == "assigned" else 1)
    class Busy:
        async def __call__(self) -> None:
            seen.ended.append("began")

        async def block(self) -> None:
            entered.set()
            assert gate.wait(PATIENCE_S)

    handle = serve.run(bind(Busy), route_prefix=None)
    busy = handle.block.remote()
    assert entered.wait(PATIENCE_S)
    cancelled_as_it_should(handle.remote())
    gate.set()
    result(busy)
    wait_until(is_idle)

    assert seen.ended == []


@pytest.mark.parametrize("how", ["shield", "early", "merge"])
def test_a_task_whose_call_ends_with_its_request_is_not_worth_a_record(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    app = FastAPI()

    @serve.deployment
    class Leaf:
        async def __call__(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def items(self) -> AsyncIterator[str]:
            try:
                while True:
                    yield "item"
                    await asyncio.sleep(0.001)
            finally:
                ended.set()

    @serve.deployment
    @serve.ingress(app)
    class Api:
        def __init__(self, leaf: Any) -> None:
            self.leaf = leaf

        async def ask(self) -> None:
            await self.leaf.remote()

        @app.get("/shield")
        async def shield(self) -> None:
            await asyncio.shield(asyncio.ensure_future(self.ask()))

        @app.get("/early")
        async def early(self) -> None:
            task = asyncio.create_task(self.ask())
            await asyncio.Event().wait()
            await task

        @app.get("/merge")
        async def merge(self) -> StreamingResponse:
            queue: asyncio.Queue[str] = asyncio.Queue()

            async def pump() -> None:
                async for item in self.leaf.options(stream=True).items.remote():
                    queue.put_nowait(item)

            async def body() -> AsyncIterator[str]:
                pumping = asyncio.create_task(pump())
                while not pumping.done():
                    yield await queue.get()

            return StreamingResponse(body())

        @app.get("/fails")
        async def fails(self) -> None:
            async def fail() -> None:
                raise LookupError("the task's own")

            task = asyncio.create_task(fail())
            await asyncio.sleep(0)
            del task

    port = served(bind(Api, bind(Leaf)))
    with Connection(port) as client:
        client.request(f"/{how}")
        if how == "merge":
            client.receive_until(b"item")
        else:
            wait_until(lambda: ongoing() == 2)
    assert ended.wait(PATIENCE_S)
    wait_until(lambda: ongoing() == 0)
    gc.collect()
    assert not caplog.records

    get(port, "/fails")
    gc.collect()
    wait_until(lambda: "Task exception was never retrieved" in caplog.text)


@pytest.mark.parametrize("method", ["alone", "batched", "in_def"])
def test_a_refused_call_of_a_request_that_is_over_is_not_worth_a_record(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """A deadline sheds a call to another deployment, and passes before that error arrives."""
    began, raised = threading.Event(), threading.Event()

    @serve.deployment
    class Refused:
        async def alone(self, x: int) -> None:
            await self._refused()

        @serve.batch(batch_wait_timeout_s=0)
        async def batched(self, xs: list[int]) -> list[int]:
            await self._refused()
            return xs

        def in_def(self, x: int) -> None:
            began.set()
            cancellation = serve.cancellation()
            wait_until(lambda: cancellation.requested)
            raised.set()
            raise BackPressureError(1, 0, "Other")

        async def _refused(self) -> None:
            began.set()
            cancellation = serve.cancellation()
            try:
                await until(lambda: cancellation.requested)
            finally:
                raised.set()
                raise BackPressureError(1, 0, "Other")

    response = serve.run(bind(Refused), route_prefix=None).options(method_name=method).remote(1)
    assert began.wait(PATIENCE_S)
    response.cancel()
    assert raised.wait(PATIENCE_S)
    serve.shutdown()
    assert not caplog.records
