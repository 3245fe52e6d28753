"""`ingress.handle`: calling a deployment from every kind of code, at every flag value."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestCycleError,
    UnknownMethodError,
)
from ingress.handle import DeploymentHandle, DeploymentResponse
from ingress.testing import Latch
from tests.fakes import bind
from tests.servers import PATIENCE_S, result, turns, until

pytestmark = pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")


class Latches:
    """The latches that user code waits for, and those it sets."""

    def __init__(self) -> None:
        self.started = Latch()
        self.leave = Latch()
        self.ended = Latch()
        self.met = Latch(2)


latches = Latches()


@serve.deployment(max_ongoing_requests=50)
class Child:
    async def __call__(self, value: Any = "called") -> Any:
        return value

    def sync(self, value: Any) -> Any:
        return value

    async def wait(self) -> str:
        try:
            latches.started.count_down()
            await latches.leave
            return "waited"
        finally:
            latches.ended.count_down()

    async def meet(self) -> str:
        latches.met.count_down()
        await latches.met
        return "met"

    async def fail(self) -> None:
        raise KeyError("mine")

    async def items(self, count: int) -> AsyncIterator[int]:
        try:
            for number in range(count):
                yield number
        finally:
            latches.ended.count_down()

    def sync_items(self, count: int) -> Iterator[int]:
        try:
            yield from range(count)
        finally:
            latches.ended.count_down()

    async def failing_items(self) -> AsyncIterator[int]:
        yield 1
        raise KeyError("mine")

    async def model(self) -> str:
        return "one"


@serve.deployment(max_ongoing_requests=50)
class Parent:
    """Calls its child from every kind of method and thread."""

    def __init__(self, child: DeploymentHandle) -> None:
        self.child = child

    async def from_loop(self) -> Any:
        return await self.child.remote("loop")

    async def from_to_thread(self) -> Any:
        return await asyncio.to_thread(lambda: self.child.remote("thread").result())

    async def from_another_loop(self) -> Any:
        async def main() -> Any:
            return await self.child.remote("another loop")

        return await asyncio.to_thread(asyncio.run, main())

    def from_def(self) -> Any:
        """Call the child from a worker thread at flag 1, from the event loop at flag 0."""
        response = self.child.remote("def")
        try:
            return response.result(timeout_s=PATIENCE_S)
        except RuntimeError as error:
            return str(error)

    async def stream(self) -> list[int]:
        return [item async for item in self.child.options(stream=True).items.remote(3)]


@pytest.fixture
def parent(flags: Settings) -> Iterator[DeploymentHandle]:
    latches.__init__()  # type: ignore[misc]
    yield serve.run(bind(Parent, bind(Child)), route_prefix=None)
    latches.leave.count_down()
    serve.shutdown()


@pytest.fixture
def child() -> Iterator[DeploymentHandle]:
    latches.__init__()  # type: ignore[misc]
    yield serve.run(bind(Child), route_prefix=None)
    latches.leave.count_down()
    serve.shutdown()


@pytest.mark.reliability("B34")
def test_a_handle_works_from_everywhere_at_every_flag_value(
    parent: DeploymentHandle, flags: Settings
) -> None:
    child = serve.get_deployment_handle("Child", "default")

    async def two() -> list[Any]:
        response = child.remote("main loop")
        return [await response, await response]

    assert result(child.remote("main thread")) == "main thread"
    assert asyncio.run(two()) == ["main loop", "main loop"], "awaiting twice is fine"
    assert result(parent.from_loop.remote()) == "loop"
    assert result(parent.from_to_thread.remote()) == "thread"
    assert result(parent.from_another_loop.remote()) == "another loop"
    from_def = result(parent.from_def.remote())
    if flags.run_sync_in_threadpool:
        assert from_def == "def"
    else:
        assert "Sync methods should not be called from within an `asyncio` event loop" in from_def
    assert result(parent.stream.remote()) == [0, 1, 2]
    assert list(child.options(stream=True).sync_items.remote(3)) == [0, 1, 2]
    assert result(child.remote(child.remote("argument"))) == "argument"


@pytest.mark.reliability("B34")
def test_one_handle_serves_several_loops_and_threads_at_once(
    parent: DeploymentHandle, switch_interval: None
) -> None:
    child = serve.get_deployment_handle("Child", "default")

    def on_a_loop(base: int) -> list[int]:
        async def main() -> list[int]:
            return [*await asyncio.gather(*(child.remote(base + each) for each in range(40)))]

        return asyncio.run(main())

    def in_a_thread(base: int) -> list[int]:
        return [child.sync.remote(base + number).result() for number in range(40)]

    with ThreadPoolExecutor(6) as threads:
        targets = [on_a_loop, in_a_thread] * 3
        jobs = [threads.submit(target, base) for base, target in enumerate(targets)]
        for base, job in enumerate(jobs):
            assert job.result(30) == [base + number for number in range(40)]


def test_a_result_that_does_not_come_in_time_is_not_cancelled(child: DeploymentHandle) -> None:
    response = child.wait.remote()
    latches.started.wait()
    with pytest.raises(TimeoutError):
        response.result(timeout_s=0.01)
    assert "pending" in repr(response)

    latches.leave.count_down()
    assert result(response) == "waited"
    assert "done" in repr(response)


@pytest.mark.reliability("B34")
def test_an_answer_outlives_the_loop_that_asked(child: DeploymentHandle) -> None:
    async def ask() -> Any:
        return child.remote("asked"), child.remote(child.remote("as an argument"))

    one, other = asyncio.run(ask())

    assert result(one) == "asked"
    assert result(other) == "as an argument"


@pytest.mark.anyio
async def test_result_and_for_in_a_loop_are_an_error_with_the_fix(child: DeploymentHandle) -> None:
    with pytest.raises(RuntimeError, match="Use `await response`"):
        child.remote().result()
    with pytest.raises(RuntimeError, match="async for"):
        next(child.options(stream=True).items.remote(1))


@pytest.mark.anyio
async def test_what_user_code_raises_is_raised_at_each_ask(child: DeploymentHandle) -> None:
    response = child.fail.remote()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            await response
    assert "failed" in repr(response)


# Responses as arguments.


def test_responses_as_arguments_are_resolved_by_place_and_by_name(child: DeploymentHandle) -> None:
    assert result(child.remote(child.remote(1))) == 1
    assert result(child.remote(value=child.remote(2))) == 2
    assert result(child.remote(child.remote(child.remote(3)))) == 3

    @serve.deployment
    class Pair:
        async def __call__(self, one: str, *, other: str) -> list[str]:
            return [one, other]

    pair = serve.run(bind(Pair), name="pair", route_prefix=None)
    # Each call returns only when both run.
    assert result(pair.remote(child.meet.remote(), other=child.meet.remote())) == ["met", "met"]


def test_an_argument_that_failed_fails_the_call_that_needs_it(child: DeploymentHandle) -> None:
    with pytest.raises(KeyError, match="mine"):
        result(child.remote(child.fail.remote()))
    cancelled = child.wait.remote()
    waiting = child.remote(cancelled)
    cancelled.cancel()
    with pytest.raises(RequestCancelledError):
        result(waiting)


@pytest.mark.anyio
async def test_a_response_inside_a_list_arrives_as_it_is(child: DeploymentHandle) -> None:
    """Only a response that is itself an argument is resolved; the user awaits the others."""
    (inner,) = await child.remote([child.remote("inner")])

    assert isinstance(inner, DeploymentResponse)
    assert await inner == "inner"


def test_a_stream_is_no_argument(child: DeploymentHandle) -> None:
    stream = child.options(stream=True).items.remote(1)
    with pytest.raises(RuntimeError, match="cannot be passed"):
        child.remote(stream)
    assert list(stream) == [0]


# Generators.


@pytest.mark.parametrize("method", ["items", "sync_items"])
@pytest.mark.parametrize("flag", ["0", "1"])
def test_generators_by_for_and_by_async_for(
    method: str, flag: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", flag)
    remote = getattr(request.getfixturevalue("child").options(stream=True), method).remote

    async def main() -> list[int]:
        return [item async for item in remote(100)]

    assert asyncio.run(main()) == list(range(100))
    assert list(remote(100)) == list(range(100))
    stream = remote(0)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)


def test_a_stream_that_fails_gives_its_items_first(child: DeploymentHandle) -> None:
    stream = child.options(stream=True).failing_items.remote()
    assert next(stream) == 1
    with pytest.raises(KeyError, match="mine"):
        next(stream)


@pytest.mark.parametrize(
    ("method", "flag"), [("items", "0"), ("sync_items", "0"), ("sync_items", "1")]
)
@pytest.mark.parametrize("how", ["cancel", "aclose", "abandon", "task"])
def test_a_stream_that_is_left_early_closes_its_producer(
    method: str,
    how: str,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", flag)
    child = request.getfixturevalue("child")
    stream = getattr(child.options(stream=True), method).remote(1_000_000)
    assert next(stream) == 0
    if how == "cancel":
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            next(stream)
        assert stream.cancelled()
    elif how == "aclose":
        asyncio.run(stream.aclose())
    elif how == "abandon":
        del stream
        gc.collect()
    else:

        async def main() -> None:
            began = asyncio.Event()

            async def consume() -> None:
                async for _ in stream:
                    began.set()

            task = asyncio.ensure_future(consume())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())

    latches.ended.wait()
    assert result(child.remote("next")) == "next"
    assert [each.message for each in caplog.records if "failed after" in each.message] == []


def test_a_stream_has_no_single_result(child: DeploymentHandle) -> None:
    stream = child.options(stream=True).items.remote(1)
    with pytest.raises(TypeError, match="no single result"):
        stream.result()

    async def main() -> None:
        with pytest.raises(TypeError, match="cannot be awaited"):
            await stream

    asyncio.run(main())
    assert list(stream) == [0]


# The handle itself.


def test_a_name_the_deployment_lacks_is_an_attribute_error_that_lists_its_methods(
    child: DeploymentHandle,
) -> None:
    with pytest.raises(
        AttributeError, match=r"no method 'predict'\. Available methods: \[.*'items'"
    ):
        child.predict
    with pytest.raises(RayServeException, match="no method 'predict'"):
        child.predict
    names = ("predict", "__x__", "_private", "__getstate__x__")
    assert not any(hasattr(child, name) for name in names)
    with pytest.raises(RayServeException, match=r"predict.*does not exist"):
        result(child.options(method_name="predict").remote())


@pytest.mark.usefixtures("shutdown")
def test_a_function_that_the_instance_alone_has_is_a_method_too() -> None:
    @serve.deployment
    class Assembled:
        def __init__(self) -> None:
            self.double = lambda number: 2 * number
            self.factor = 2

        async def __call__(self) -> None: ...

    handle = serve.run(bind(Assembled), route_prefix=None)

    assert handle.double.remote(21).result() == 42
    with pytest.raises(AttributeError, match=r"no method 'factor'\. Available methods: .*'double'"):
        _ = handle.factor


def test_options_make_another_handle_and_leave_this_one_alone(child: DeploymentHandle) -> None:
    other = child.options(method_name="sync")
    assert other is not child
    assert result(other.remote(1)) == 1
    assert result(child.remote()) == "called"
    assert result(child.options(method_name="model", multiplexed_model_id="m").remote()) == "one"
    with pytest.raises(TypeError):
        child.options(unknown=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stream": "yes"}, "stream must be True or False, got 'yes'"),
        ({"method_name": 5}, "method_name must be a string, got 5"),
        ({"multiplexed_model_id": 5}, "multiplexed_model_id must be a string, got 5"),
    ],
    ids=lambda value: str(value),
)
def test_an_option_of_another_type_is_refused_by_name(
    child: DeploymentHandle, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        child.options(**options)


@pytest.mark.parametrize("timeout_s", ["1", True, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused_by_name(child: DeploymentHandle, timeout_s: Any) -> None:
    with pytest.raises(TypeError, match="timeout_s must be a number of seconds, got"):
        child.remote().result(timeout_s=timeout_s)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_handle_is_the_same(child: DeploymentHandle, copied: Callable[[Any], Any]) -> None:
    assert copied([child])[0] is child
    assert (child.deployment_name, child.app_name) == ("Child", "default")
    assert "Child" in repr(child)


def test_handles_of_one_deployment_with_the_same_options_are_equal(child: DeploymentHandle) -> None:
    assert serve.get_app_handle("default") == serve.get_app_handle("default") == child
    assert {child, serve.get_deployment_handle("Child", "default")} == {child}
    assert child.items == child.options(method_name="items") != child
    assert child != "Child"


def test_the_shutdown_of_a_handle_is_a_warning_and_it_goes_on(child: DeploymentHandle) -> None:
    with pytest.warns(UserWarning, match=r"handle.shutdown\(\) has no effect") as told:
        child.shutdown()
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="shutdown_async"):
        asyncio.run(child.shutdown_async())
    assert result(child.remote(1)) == 1


def test_arguments_and_results_pass_by_reference(child: DeploymentHandle) -> None:
    value = object()

    assert result(child.remote(value)) is value


@serve.deployment(num_replicas=2, max_ongoing_requests=1)
class Pair:
    def __init__(self) -> None:
        self.values: list[Any] = []

    async def add(self, value: Any) -> list[Any]:
        self.values.append(value)
        return self.values

    async def fails_in_one(self) -> str:
        if serve.get_replica_context().rank.rank:
            raise KeyError("mine")
        return "fine"

    async def wait(self) -> str:
        try:
            latches.started.count_down()
            await latches.leave
            return serve.get_replica_context().replica_tag
        finally:
            latches.ended.count_down()

    async def items(self, count: int) -> AsyncIterator[str]:
        for _ in range(count):
            yield serve.get_replica_context().replica_tag

    async def broadcast(self, value: str) -> str:
        return f"the user's {value}"

    async def to_all(self) -> Any:
        return await serve.get_app_handle("default").broadcast("add", 1).results_async()


@pytest.fixture
def pair(shutdown: None) -> DeploymentHandle:
    global latches
    latches = Latches()
    return serve.run(bind(Pair), route_prefix=None)


def test_a_broadcast_is_a_call_of_each_replica(pair: DeploymentHandle) -> None:
    first = pair.add.remote("argument")
    response = pair.broadcast("add", first)
    assert sorted(map(len, response.results(timeout_s=PATIENCE_S))) == [1, 2]
    assert response.results() == asyncio.run(response.results_async())


def test_an_error_of_a_replica_is_raised_or_in_the_list(pair: DeploymentHandle) -> None:
    response = pair.broadcast("fails_in_one")
    found = response.results(return_exceptions=True)
    assert sorted(map(str, found)) == ["'mine'", "fine"]
    with pytest.raises(KeyError, match="mine"):
        response.results()
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(response.results_async())
    assert "fine" in asyncio.run(response.results_async(return_exceptions=True))


def test_on_a_full_replica_a_broadcast_is_next_and_alone(pair: DeploymentHandle) -> None:
    latches.started = Latch(2)
    holding = [pair.wait.remote() for _ in range(2)]
    latches.started.wait()
    waiting = [pair.add.remote("queued") for _ in range(2)]
    response = pair.broadcast("add", "first")
    with pytest.raises(TimeoutError, match="Timed out waiting for broadcast results"):
        response.results(timeout_s=0.01)
    latches.leave.count_down()
    assert {result(each) for each in holding} == {"0", "1"}
    assert {each[0] for each in response.results(timeout_s=PATIENCE_S)} == {"first"}
    assert all(result(each)[0] == "first" for each in waiting)


def test_a_broadcast_whose_task_is_cancelled_is_cancelled(pair: DeploymentHandle) -> None:
    latches.started, latches.ended = Latch(2), Latch(2)

    async def main() -> None:
        task = asyncio.create_task(pair.broadcast("wait").results_async())
        await latches.started
        waiting = pair.broadcast("wait")  # has no slot
        other = asyncio.create_task(waiting.results_async())
        await asyncio.sleep(0)
        other.cancel()
        task.cancel()
        await asyncio.wait([task, other])
        assert task.cancelled()
        assert other.cancelled()
        await latches.ended

    asyncio.run(main())
    assert len(pair.broadcast("add", 1).results(timeout_s=PATIENCE_S)) == 2


def test_a_broadcast_to_the_own_replica_without_a_slot_is_an_error(pair: DeploymentHandle) -> None:
    with pytest.raises(RequestCycleError, match="can never start"):
        result(pair.to_all.remote())


def test_a_broadcast_without_replicas_is_unavailable(shutdown: None) -> None:
    none = Pair.options(num_replicas=None, autoscaling_config={"min_replicas": 0})
    handle = serve.run(bind(none), route_prefix=None)
    with pytest.raises(DeploymentUnavailableError, match="no replicas"):
        handle.broadcast("add", 1).results(timeout_s=PATIENCE_S)


def test_a_broadcast_refuses_what_it_cannot_do(pair: DeploymentHandle) -> None:
    response = pair.broadcast("add", 1)
    with pytest.raises(ValueError, match="timeout_s must be None or non-negative, got -1"):
        response.results(timeout_s=-1)

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"await response\.results_async\(\)"):
            response.results()
        with pytest.raises(TypeError, match="results_async"):
            await response

    asyncio.run(main())
    response.results(timeout_s=PATIENCE_S)


def test_a_method_of_the_user_keeps_its_name_beside_those_of_handles(
    pair: DeploymentHandle,
) -> None:
    assert result(pair.broadcast.remote("own")) == "the user's own"  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_a_chosen_replica_runs_the_call_in_its_slot(pair: DeploymentHandle) -> None:
    handle = pair.options(method_name="wait")
    async with handle.choose_replica() as one, handle.choose_replica() as other:
        assert {one.replica_id, other.replica_id} == {"0", "1"}
        third = asyncio.create_task(pair.add.remote("waits")._wait())
        await turns()
        latches.leave.count_down()
        assert await pair.dispatch(one) == one.replica_id
        await third
        with pytest.raises(RuntimeError, match="already been dispatched"):
            pair.dispatch(one)
    assert len(await pair.broadcast("add", 1).results_async()) == 2  # both slots are free


@pytest.mark.anyio
async def test_a_stream_is_dispatched_to_a_chosen_replica(pair: DeploymentHandle) -> None:
    handle = pair.options(method_name="items", stream=True)
    async with handle.choose_replica() as chosen:
        assert [each async for each in handle.dispatch(chosen, 2)] == [chosen.replica_id] * 2


@pytest.mark.anyio
async def test_a_slot_is_given_back_once_however_its_selection_ends(pair: DeploymentHandle) -> None:
    for _ in range(3):
        async with pair.add.choose_replica(1) as unused:
            pass
    with pytest.raises(RuntimeError, match="given back at the end of `async with"):
        await pair.dispatch(unused, 1)
    for _ in range(3):
        async with pair.add.choose_replica() as chosen:
            with pytest.raises(UnknownMethodError):
                await pair.dispatch(chosen, pair.options(method_name="fail_not_there").remote())
    with pytest.raises(ZeroDivisionError):
        async with pair.add.choose_replica():
            raise ZeroDivisionError
    async with pair.add.choose_replica(), pair.add.choose_replica():
        waiting = [asyncio.create_task(_chosen(pair)) for _ in range(3)]
        await turns()
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert all(each.cancelled() for each in waiting)
    assert len(await pair.broadcast("add", 1).results_async(timeout_s=PATIENCE_S)) == 2


async def _chosen(handle: DeploymentHandle) -> None:
    async with handle.choose_replica():
        raise AssertionError("there was no slot")


@pytest.mark.anyio
async def test_a_selection_is_no_replica_of_another_deployment(pair: DeploymentHandle) -> None:
    other = await asyncio.to_thread(serve.run, bind(Child), name="other", route_prefix=None)
    async with pair.choose_replica() as chosen:
        with pytest.raises(ValueError, match="for a different deployment"):
            other.dispatch(chosen)


@pytest.mark.anyio
async def test_a_chosen_replica_that_has_left_is_unavailable(pair: DeploymentHandle) -> None:
    async with pair.add.choose_replica() as one, pair.add.choose_replica() as other:
        last = one if one.replica_id == "1" else other
        update = Pair.options(num_replicas=1, graceful_shutdown_timeout_s=0)
        scaled = asyncio.create_task(asyncio.to_thread(serve.run, bind(update), route_prefix=None))
        router: Any = pair._directory.router(pair.deployment_id)
        await until(lambda: len(router.replicas) == 1)
        with pytest.raises(ReplicaUnavailableError, match=r"Pair#\d is no longer available"):
            await pair.dispatch(last, 1)
    await scaled
