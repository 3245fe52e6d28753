"""`@serve.method` and `lanes=`: the thread of each `def`, and the waits between calls."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI

import ingress as serve
from ingress.core.base.counters import LaneLoad
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.core.calls.loops import BorrowedLoop
from ingress.core.execution.execution import ExecutionMode, ExecutionPlan, Role, plan
from ingress.core.execution.lane_pools import LanePool, SerialPool
from ingress.core.execution.lanes import lanes_of
from ingress.core.execution.threads import WorkerPool, WorkerThreads
from tests.conformance.observe import FEW_FLAGS, TIMEOUT_S, Gate, here, results, served
from tests.servers import until, wait_until

LOOP = "loop Api#0"
POOL = "thread Api#0-worker"
DB = "thread Api#0-db-worker"
SERIAL = "thread Api#0-serial-worker"

# Mistakes.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"execution": "thread"},
            ValueError,
            (
                "execution must be one of 'event_loop', 'threadpool', 'serial', got 'thread'; "
                "without @serve.method, the role of the function and the flag decide"
            ),
        ),
        ({"execution": 1}, ValueError, "got 1; without"),
        ({"execution": ["serial"]}, ValueError, "got ['serial']; without"),
        (
            {"lane": "my lane"},
            ValueError,
            (
                "lane must be a name of letters, digits, '_' and '-', other than 'serial' and "
                "'executor', got 'my lane'; give it one of the names in "
                "@serve.deployment(lanes={...})"
            ),
        ),
        ({"lane": ""}, ValueError, "got ''"),
        ({"lane": 8}, ValueError, "got 8"),
        ({"lane": "serial"}, ValueError, "got 'serial'"),
        (
            {"lane": "db", "execution": "serial"},
            ValueError,
            "lane must be left out with execution='serial', got 'db'",
        ),
        ({"lane": "db", "execution": "event_loop"}, ValueError, "execution='event_loop', got 'db'"),
        ({}, TypeError, "@serve.method needs execution= or lane=; write"),
    ],
)
def test_bad_options_are_refused_with_the_fix(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        serve.method(**options)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_bare_decorator_is_refused() -> None:
    bare: Any = serve.method
    with pytest.raises(TypeError, match="needs execution= or lane=, got <function"):
        bare(function)


async def coroutine() -> None: ...


async def async_items() -> Any:
    yield


def function() -> None: ...


@serve.deployment
class SomeDeployment: ...


class Lifecycle:
    def __init__(self) -> None: ...

    def __del__(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (coroutine, ValueError, "coroutine, an `async def`, which runs on the event loop"),
        (async_items, ValueError, "async_items, an `async def generator`"),
        (serve.batch(lambda items: items), TypeError, "above @serve.batch; put it below"),
        (SomeDeployment, TypeError, "decorates a function, got Deployment(name='SomeDeployment')"),
        (Lifecycle, TypeError, "put it on a method of the class"),
        (Lifecycle(), TypeError, "put it next to the `def`"),
        (Lifecycle.__init__, ValueError, "Lifecycle.__init__, which runs on the event loop, or in"),
        (Lifecycle.__del__, ValueError, "is not allowed on Lifecycle.__del__"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_fix(
    target: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        serve.method(lane="db")(target)

    assert message in str(caught.value)
    assert "@serve.method(lane='db')" in str(caught.value)


def test_two_places_for_one_function_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has @serve.method\(lane='a'\) and @serve.method\(exec"):

        @serve.method(execution="serial")
        @serve.method(lane="a")
        def method() -> None: ...


def test_an_async_def_may_be_told_to_stay_where_it_is() -> None:
    assert serve.method(execution="event_loop")(coroutine) is coroutine


def test_a_lane_that_the_deployment_does_not_have_is_refused_when_it_is_bound() -> None:
    class Reports:
        @serve.method(lane="db")
        def report(self) -> None: ...

    api = serve.deployment(lanes={"cpu": 2})(Reports)
    with pytest.raises(ValueError, match=r"Reports.report runs in lane='db'.*has lanes={'cpu': 2}"):
        api.bind()
    api.options(lanes={"db": 8}).bind()


def test_a_lane_of_a_function_of_the_app_is_refused_when_it_is_run(app: FastAPI) -> None:
    @app.get("/report")
    @serve.method(lane="db")
    def report() -> None: ...

    class Api: ...

    api = serve.deployment(serve.ingress(app)(Api))
    with pytest.raises(RuntimeError, match=r"report runs in lane='db'.*@serve.deployment\(lanes="):
        serve.run(api.bind(), route_prefix=None)
    serve.shutdown()


def test_an_async_constructor_beside_a_serial_method_is_refused_when_it_is_bound() -> None:
    class Api:
        async def __init__(self) -> None: ...  # type: ignore[misc]

        @serve.method(execution="serial")
        def work(self) -> None: ...

    with pytest.raises(ValueError, match=r"Api.work has execution='serial', so Api.__init__ must"):
        serve.deployment(Api).bind()


@pytest.mark.parametrize(
    "lanes",
    [{"db": 0}, {"db": True}, {"db": 1.5}, {"a b": 1}, {"serial": 1}, {1: 1}, ["db"], 8, None],
    ids=repr,
)
def test_bad_lanes_are_refused_with_the_default(lanes: Any) -> None:
    with pytest.raises(ValueError, match="lanes must be a dict from lanes") as caught:
        serve.deployment(lanes=lanes)

    assert f"got {lanes!r}; leave it out for the default, {{}}" in str(caught.value)


# The plan.


def planned(role: Role, flag: bool = False, lanes: Any = None, **options: Any) -> ExecutionPlan:
    def func() -> None: ...

    no_pool: Any = None
    marked = serve.method(**options)(func)
    return plan(marked, role, sync_in_threadpool=flag, pool=no_pool, lanes=lanes)


LANES = lanes_of(function, 100, {"db": 8})


@pytest.mark.parametrize("role", [Role.METHOD, Role.ENDPOINT, Role.BATCH])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(
    ("options", "mode", "where", "limit"),
    [
        ({"execution": "event_loop"}, ExecutionMode.EVENT_LOOP, "event loop", None),
        ({"execution": "threadpool"}, ExecutionMode.THREADPOOL, "threadpool", 104),
        ({"lane": "db"}, ExecutionMode.THREADPOOL, "lane db", 8),
        ({"execution": "serial"}, ExecutionMode.SERIAL, "serial thread", 1),
    ],
)
def test_a_method_is_planned_where_it_says_whatever_its_role_and_the_flag(
    options: Any, mode: ExecutionMode, where: str, limit: int | None, role: Role, flag: bool
) -> None:
    made = planned(role, flag, LANES, **options)

    assert (made.mode, made.where, made.limit, made.warns) == (mode, where, limit, False)
    name, value = next(iter(options.items()))
    assert made.reason == f"@serve.method({name}={value!r})"


def test_outside_of_a_deployment_a_plan_has_the_lane_and_no_limit() -> None:
    made = planned(Role.METHOD, lane="db")

    assert (made.where, made.limit) == ("lane db", None)


@pytest.mark.anyio
async def test_a_batch_outside_of_a_deployment_runs_in_threads_of_its_own() -> None:
    @serve.batch(max_batch_size=1)
    @serve.method(execution="serial")
    def batched(numbers: list[int]) -> list[str]:
        return [here() for _ in numbers]

    assert (await batched(1)).startswith("thread ")


@pytest.mark.parametrize("role", [Role.LIFECYCLE, Role.UNLOAD])
def test_roles_that_no_caller_can_call_are_in_no_lane(role: Role) -> None:
    made = planned(role, lanes=LANES, lane="db")

    assert (made.lane, made.mode is ExecutionMode.EVENT_LOOP) == ("", role is Role.LIFECYCLE)


# The thread of a method.


@contextmanager
def run(api: Any, **options: Any) -> Iterator[Any]:
    with served(serve.deployment(api, **options).bind()) as it:
        yield it


@FEW_FLAGS
@pytest.mark.filterwarnings("error::ingress.exceptions.SyncMethodOnEventLoopWarning")
def test_methods_run_where_they_say_at_both_flag_values(flags: Settings) -> None:
    def method(**options: Any) -> Any:
        def place(self: object) -> str:
            return here()

        return serve.method(**options)(place)

    class Api:
        on_loop = method(execution="event_loop")
        in_pool = method(execution="threadpool")
        in_lane = method(lane="db")
        in_serial = method(execution="serial")

        @staticmethod
        @serve.method(lane="db")
        def static_below() -> str:
            return here()

        @serve.method(lane="db")
        @staticmethod
        def static_above() -> str:
            return here()

        @serve.method(lane="db")
        def items(self) -> Iterator[str]:
            yield here()

        @serve.method(execution="event_loop")
        def items_on_loop(self) -> Iterator[str]:
            yield here()

        @serve.batch(max_batch_size=1)
        @serve.method(lane="db")
        def batched(self, numbers: list[int]) -> list[str]:
            return [here() for _ in numbers]

        @serve.batch(max_batch_size=1)
        @serve.method(execution="event_loop")
        def batched_on_loop(self, numbers: list[int]) -> list[str]:
            return [here() for _ in numbers]

    with run(Api, lanes={"db": 2}) as it:
        handle = it.handle
        expected = {"on_loop": it.loop, "in_pool": POOL, "in_lane": DB, "in_serial": SERIAL}
        expected |= {"static_below": DB, "static_above": DB}
        calls = [getattr(handle, name).remote() for name in expected]
        assert dict(zip(expected, results(calls), strict=True)) == expected
        assert list(handle.options(stream=True).items.remote()) == [DB]
        assert list(handle.options(stream=True).items_on_loop.remote()) == [it.loop]
        assert handle.batched.remote(1).result(timeout_s=TIMEOUT_S) == DB
        assert handle.batched_on_loop.remote(1).result(timeout_s=TIMEOUT_S) == it.loop


def test_a_function_deployment_runs_where_it_says() -> None:
    @serve.deployment(name="Api", lanes={"db": 1})
    @serve.method(lane="db")
    def api() -> str:
        return here()

    with served(api.bind()) as it:
        assert it.get().text == DB


# Waits between calls.


def lanes(it: Any) -> dict[str, LaneLoad]:
    (replica,) = it.status().replicas
    return dict(replica.lanes)


def test_health_is_answered_while_160_calls_hold_a_lane_or_wait_for_it() -> None:
    app, gate = FastAPI(), Gate()

    class Api:
        @app.get("/report")
        @serve.method(lane="db")
        def report(self) -> str:
            gate.wait()
            return "report"

        @app.get("/health")
        def health(self) -> str:
            return "ok"

    with run(serve.ingress(app)(Api), lanes={"db": 8}, max_ongoing_requests=200) as it:
        calls = [it.handle.report.remote() for _ in range(160)]
        gate.wait_for(8)
        wait_until(lambda: it.ongoing() == 160)
        began = time.perf_counter()
        assert it.get("/health").text == '"ok"'
        print(f"\n/health took {(time.perf_counter() - began) * 1e3:.1f} ms")
        assert gate.inside == 8, "no other call entered"
        assert lanes(it) == {"db": LaneLoad(limit=8, ongoing=8, queued=152)}
        gate.open()
        assert results(calls) == ["report"] * 160
        assert gate.most_inside == 8
        wait_until(lambda: lanes(it) == {"db": LaneLoad(limit=8, ongoing=0, queued=0)})


def test_one_lane_does_not_wait_for_another() -> None:
    gate = Gate()

    class Api:
        @serve.method(lane="slow")
        def slow(self) -> None:
            gate.wait()

        @serve.method(lane="db")
        def quick(self) -> str:
            return here()

    with run(Api, lanes={"slow": 1, "db": 1}) as it:
        calls = [it.handle.slow.remote() for _ in range(3)]
        gate.wait_for(1)
        assert it.handle.quick.remote().result(timeout_s=TIMEOUT_S) == DB
        gate.open()
        results(calls)
        assert gate.most_inside == 1


def test_each_replica_has_the_threads_of_its_lanes() -> None:
    gate = Gate()

    class Api:
        @serve.method(lane="db")
        def work(self) -> None:
            gate.wait()

    with run(Api, lanes={"db": 2}, num_replicas=3, max_ongoing_requests=4) as it:
        calls = [it.handle.work.remote() for _ in range(12)]
        gate.wait_for(6)
        wait_until(lambda: it.ongoing() == 12)
        assert gate.inside == 6
        gate.open()
        results(calls)


def test_a_lane_that_is_stuck_gives_the_slots_of_those_who_leave_back_at_once() -> None:
    gate, began = Gate(), list[int]()

    class Api:
        @serve.method(lane="db")
        def work(self, number: int) -> None:
            began.append(number)
            gate.wait()

        async def quick(self) -> str:
            return here()

    with run(Api, lanes={"db": 1}, max_ongoing_requests=3) as it:
        calls = [it.handle.work.remote(number) for number in range(3)]
        gate.wait_for(1)
        wait_until(lambda: it.ongoing() == 3)
        behind = it.handle.quick.remote()
        calls[1].cancel()
        assert behind.result(timeout_s=TIMEOUT_S) == LOOP
        assert gate.inside == 1, "the lane has not moved"
        gate.open()
        results([calls[0], calls[2]])
        assert began == [0, 2], "what left never begins"


@pytest.mark.usefixtures("switch_interval")
def test_calls_of_a_lane_run_once_or_never_whenever_they_are_cancelled() -> None:
    ran: Counter[int] = Counter()
    lock = threading.Lock()
    both = threading.Barrier(2)

    class Api:
        @serve.method(lane="db")
        def meet(self) -> None:
            both.wait(TIMEOUT_S)

        @serve.method(lane="db")
        def work(self, number: int) -> int:
            with lock:
                ran[number] += 1
            return number

    with run(Api, lanes={"db": 2}, max_ongoing_requests=50) as it:
        answered = 0
        for begin in range(0, 400, 40):
            calls = {number: it.handle.work.remote(number) for number in range(begin, begin + 40)}
            for number, call in calls.items():
                if number % 3 == 0:
                    call.cancel()
            for number, call in calls.items():
                try:
                    assert call.result(timeout_s=TIMEOUT_S) == number
                    answered += 1
                    assert ran[number] == 1
                except serve.exceptions.RequestCancelledError:
                    assert number % 3 == 0
        wait_until(lambda: it.ongoing() == 0)
        assert answered >= 266
        assert set(ran.values()) == {1}
        results([it.handle.meet.remote() for _ in range(2)])  # both places are free again


@pytest.mark.parametrize(
    ("options", "lanes", "count"),
    [({"execution": "serial"}, {}, 1), ({"lane": "db"}, {"db": 3}, 3)],
    ids=["serial", "lane"],
)
def test_calls_that_wait_in_a_lane_for_that_lane_are_told_so_at_once(
    options: Any, lanes: dict[str, int], count: int
) -> None:
    together = threading.Barrier(count)

    class Api:
        @serve.method(**options)
        def outer(self) -> Any:
            together.wait(TIMEOUT_S)
            handle = serve.get_deployment_handle("Api", "default")
            return handle.inner.remote().result(timeout_s=TIMEOUT_S)

        @serve.method(**options)
        def inner(self) -> str:
            return "inner"

    with run(Api, lanes=lanes) as it:
        calls = [it.handle.outer.remote() for _ in range(count)]
        outcomes = []
        for call in calls:
            try:
                outcomes.append(call.result(timeout_s=TIMEOUT_S))
            except serve.exceptions.RequestCycleError as error:
                outcomes.append(str(error))
        (told,) = set(outcomes) - {"inner"}
        assert "in the cycle Api -> Api. Raise the limit, or do not wait in a lane for" in told
        assert outcomes.count("inner") == count - 1, "the others can go on"
        assert it.handle.inner.remote().result(timeout_s=TIMEOUT_S) == "inner"


@pytest.mark.usefixtures("switch_interval")
def test_calls_that_wait_for_each_other_in_a_lane_all_end_whenever_they_are_cancelled() -> None:
    both = threading.Barrier(2)

    class Api:
        @serve.method(lane="db")
        def outer(self) -> Any:
            handle = serve.get_deployment_handle("Api", "default")
            return handle.inner.remote().result(timeout_s=TIMEOUT_S)

        @serve.method(lane="db")
        def inner(self) -> str:
            return "inner"

        @serve.method(lane="db")
        def meet(self) -> None:
            both.wait(TIMEOUT_S)

    outcomes: Counter[str] = Counter()
    with run(Api, lanes={"db": 2}) as it:
        for _ in range(10):
            calls = [it.handle.outer.remote() for _ in range(12)]
            for call in calls[::4]:
                call.cancel()
            for call in calls:
                try:
                    outcomes[call.result(timeout_s=TIMEOUT_S)] += 1
                except (
                    serve.exceptions.RequestCancelledError,
                    serve.exceptions.RequestCycleError,
                ) as error:
                    outcomes[type(error).__name__] += 1
            wait_until(lambda: it.ongoing() == 0)
        results([it.handle.meet.remote() for _ in range(2)])  # both places are free again
    print(f"\n{dict(outcomes)}")
    assert sum(outcomes.values()) == 120
    assert outcomes["RequestCycleError"]


# The serial thread.


@FEW_FLAGS
def test_one_thread_makes_serves_and_deletes_a_class_with_a_serial_method(flags: Settings) -> None:
    threads: list[tuple[str, int]] = []

    class Api:
        def __init__(self) -> None:
            threads.append((here(), threading.get_ident()))
            assert serve.get_replica_context().deployment == "Api"
            self.connection = sqlite3.connect(":memory:")  # bound to this thread
            self.connection.execute("create table visits (count)")

        def __del__(self) -> None:
            threads.append((here(), threading.get_ident()))
            self.connection.close()

        @serve.method(execution="serial")
        def visit(self) -> int:
            threads.append((here(), threading.get_ident()))
            self.connection.execute("insert into visits values (1)")
            (count,) = self.connection.execute("select count(*) from visits").fetchone()
            return int(count)

    with run(Api) as it:
        assert sorted(results([it.handle.visit.remote() for _ in range(20)])) == list(range(1, 21))
        wait_until(lambda: lanes(it) == {"serial": LaneLoad(limit=1, ongoing=0, queued=0)})

    assert len(threads) == 22
    assert set(threads) == {(SERIAL, threads[0][1])}


@pytest.mark.usefixtures("switch_interval")
@pytest.mark.parametrize("execution", ["serial", "threadpool"])
def test_the_serial_thread_loses_no_update_that_a_threadpool_loses(execution: Any) -> None:
    class Api:
        number = 0

        @serve.method(execution=execution)
        def increment(self) -> None:
            number = self.number
            time.sleep(0.001)
            self.number = number + 1

        async def read(self) -> int:
            return self.number

    with run(Api) as it:
        results([it.handle.increment.remote() for _ in range(50)])
        number = it.handle.read.remote().result(timeout_s=TIMEOUT_S)
        assert (number == 50) == (execution == "serial")


def test_a_stream_of_the_serial_thread_lets_others_in_between_its_items() -> None:
    events: list[tuple[str, int]] = []

    class Api:
        @serve.method(execution="serial")
        def items(self) -> Iterator[int]:
            try:
                for number in range(1000):  # more than a channel holds
                    events.append(("item", threading.get_ident()))
                    yield number
            finally:
                events.append(("closed", threading.get_ident()))

        @serve.method(execution="serial")
        def other(self) -> str:
            return here()

    with run(Api) as it:
        stream = it.handle.options(stream=True).items.remote()
        assert next(stream) == 0
        assert it.handle.other.remote().result(timeout_s=TIMEOUT_S) == SERIAL
        stream.cancel()
        wait_until(lambda: events[-1][0] == "closed")
    assert len(events) < 1000
    assert len({thread for _, thread in events}) == 1


@pytest.mark.anyio
async def test_a_serial_stream_closes_where_it_ran_although_it_is_cancelled_twice() -> None:
    pool = SerialPool(BorrowedLoop("pool", asyncio.get_running_loop()))
    gate, closed = Gate(), list[str]()

    def items() -> Iterator[int]:
        try:
            yield 0
            gate.wait()
        finally:
            closed.append(here())

    async def consume() -> None:
        async for _ in pool.stream(items()):
            pass

    task = asyncio.create_task(consume())
    while not gate.inside:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["thread pool-serial-worker"]
    pool.shutdown()
    assert await asyncio.to_thread(pool.join, TIMEOUT_S)


@pytest.mark.anyio
async def test_a_cleanup_is_run_although_its_task_is_cancelled_before_it_begins() -> None:
    pool = WorkerPool(BorrowedLoop("pool", asyncio.get_running_loop()), 1)
    gate, done = Gate(), list[str]()

    def cleanup(name: str) -> None:
        done.append(name)

    holder = asyncio.create_task(pool.run(gate.wait))
    while not gate.inside:
        await asyncio.sleep(0)
    tasks = [
        asyncio.create_task(pool.run(lambda: cleanup("cleanup"), is_cleanup=True)),
        asyncio.create_task(pool.run(lambda: cleanup("call"))),
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    gate.open()
    await holder
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == ["cleanup"]
    pool.shutdown()
    assert await asyncio.to_thread(pool.join, TIMEOUT_S)


@pytest.mark.anyio
async def test_a_call_that_no_thread_could_be_started_for_takes_no_place_in_its_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = LanePool(BorrowedLoop("pool", asyncio.get_running_loop()), 1, "db")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await pool.run(here)
    first, second = await asyncio.gather(pool.run(here), pool.run(here))
    assert first == second == "thread pool-db-worker"
    pool.shutdown()
    assert await asyncio.to_thread(pool.join, TIMEOUT_S)


@pytest.mark.anyio
async def test_the_serial_thread_stays_where_another_that_is_idle_goes() -> None:
    loop = asyncio.get_running_loop()
    seen: dict[str, int] = {}
    goes, stays = (WorkerThreads(name, 1, loop, s) for name, s in (("goes", 0.01), ("stays", None)))
    for each in (stays, goes):
        each.submit(lambda: seen.update({threading.current_thread().name: threading.get_ident()}))
    await until(lambda: len(seen) == 2 and seen["goes-worker-0"] not in _alive())

    assert seen["stays-worker-0"] in _alive()
    stays.close()
    assert await asyncio.to_thread(stays.join, TIMEOUT_S)


def _alive() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def test_a_replica_whose_serial_thread_is_stuck_stops_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    gate = Gate()

    class Api:
        @serve.method(execution="serial")
        def work(self) -> None:
            gate.wait()

    with run(Api, graceful_shutdown_timeout_s=0.1) as it:
        it.handle.work.remote()
        gate.wait_for(1)
    assert any("Api#0" in record.message for record in caplog.records)
    gate.open()
