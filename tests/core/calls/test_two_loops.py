"""Objects of asyncio that requests to two replicas share, and loops that other threads call."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingress as serve
from ingress.core.calls.loops import (
    EventLoopThread,
    ThreadAware,
    loop_class,
    new_event_loop,
    run_blocking,
    start_on,
)
from tests.loop_apps import WITH_ASYNCIO_ALONE, fresh
from tests.programs import INGRESS, UVICORN, environment, process, write_module
from tests.servers import PATIENCE_S, bind, get, result, served, turns, wait_until

CLIENTS = 12


class AsyncioLoop(ThreadAware, asyncio.SelectorEventLoop):
    """A loop as of an installation without uvloop."""


async def visit(port: int, module: Any) -> None:
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        await asyncio.wait_for(module.load(client, CLIENTS), PATIENCE_S)


@pytest.mark.parametrize("name", WITH_ASYNCIO_ALONE)
def test_no_request_to_two_replicas_is_lost(name: str, shutdown: None) -> None:
    application, module = fresh(name, 2)

    asyncio.run(visit(served(application), module))


def test_a_broadcast_to_replicas_with_own_loops_wakes_them_and_is_reported_once(
    shutdown: None, caplog: pytest.LogCaptureFixture
) -> None:
    application, module = fresh("broadcast", 2, "own")

    asyncio.run(visit(served(application), module))

    (line,) = reports(caplog)
    assert "broadcast.py:31: queue (asyncio.Queue) belongs to the event loop Api#" in line
    assert '@serve.deployment(loop="shared")' in line


def test_a_def_that_sets_an_event_of_the_loop_is_reported(
    threadpool: str, caplog: pytest.LogCaptureFixture
) -> None:
    @serve.deployment(max_ongoing_requests=2)
    class Gate:
        def __init__(self) -> None:
            self.event, self.waits = asyncio.Event(), threading.Event()

        async def wait(self) -> str:
            asyncio.get_running_loop().call_soon(self.waits.set)
            await self.event.wait()
            return "set"

        def set(self) -> None:
            assert self.waits.wait(PATIENCE_S)
            self.event.set()

    handle: Any = serve.run(bind(Gate), route_prefix=None)
    wait = handle.wait.remote()
    result(handle.set.remote())

    assert result(wait) == "set"
    (line,) = reports(caplog)
    assert "asyncio.Event" in line
    assert "loop.call_soon_threadsafe" in line


def test_the_loop_of_the_command_line_reports_too_where_user_code_runs_on_it(
    tmp_path: Path,
) -> None:
    write_module(tmp_path, "gate", GATE)
    environ = environment(tmp_path, separate="0", sync="1")

    with process([*INGRESS, "run", "gate:app", "--port", "0"], tmp_path, environ) as server:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(get, server.port, "/wait")
            wait_until(lambda: get(server.port, "/waits").body == b"1")
            get(server.port, "/set")
            assert waiting.result(PATIENCE_S).status == 200
        server.wait_for(r"gate.py:\d+: event \(asyncio.Event\) belongs to the event loop")


GATE = """
import asyncio
import ingress as serve
from fastapi import FastAPI

app, event, waits = FastAPI(), asyncio.Event(), []

@app.get("/wait")
async def wait():
    waits.append(1)
    await event.wait()

@app.get("/waits")
async def count():
    return len(waits)

@app.get("/set")
def set():
    event.set()

app = serve.deployment(serve.ingress(app)(type("Gate", (), {}))).bind()
"""


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [each for each in lines if "woken that loop" in each]


@pytest.fixture(params=[new_event_loop, AsyncioLoop], ids=["uvloop", "asyncio"])
def home(request: pytest.FixtureRequest) -> Iterator[EventLoopThread]:
    home = EventLoopThread(f"home of {request.node.name}", new_loop=request.param)
    yield home
    home.stop(PATIENCE_S)


@pytest.fixture
def other() -> Iterator[EventLoopThread]:
    other = EventLoopThread("other")
    yield other
    other.stop(PATIENCE_S)


async def made(make: Callable[[], Any]) -> Any:
    return make()


async def notified(condition: asyncio.Condition) -> None:
    async with condition:
        await condition.wait()


async def notify(condition: asyncio.Condition) -> None:
    async with condition:
        condition.notify_all()


async def acquired(lock: asyncio.Lock) -> None:
    await lock.acquire()


def loops_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def ended(future: asyncio.Future[Any]) -> None:
    await asyncio.wait([future])


async def set_future(future: asyncio.Future[Any]) -> None:
    future.set_result(1)


async def set_event(event: asyncio.Event) -> None:
    event.set()


async def put(queue: asyncio.Queue[int]) -> None:
    queue.put_nowait(1)


async def release(lock: asyncio.Lock) -> None:
    lock.release()


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


def held_lock() -> asyncio.Lock:
    lock = asyncio.Lock()
    asyncio.get_running_loop().create_task(lock.acquire())
    return lock


def sleeper() -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(asyncio.sleep(10 * PATIENCE_S))


Step = Callable[[Any], Coroutine[Any, Any, Any]]
# Object -> the function that makes it, the wait for it, the step that ends the wait.
STEPS: dict[str, tuple[Callable[[], Any], Step, Step]] = {
    "asyncio.Future": (loops_future, ended, set_future),
    "asyncio.Event": (asyncio.Event, lambda event: event.wait(), set_event),
    "asyncio.Queue": (asyncio.Queue, lambda queue: queue.get(), put),
    "asyncio.Condition": (asyncio.Condition, notified, notify),
    "asyncio.Lock": (held_lock, acquired, release),
    "asyncio.Task": (sleeper, ended, cancel),
}


def waiting(home: EventLoopThread, kind: str) -> tuple[Any, Future[Any]]:
    """Return an object, and the wait for it, which has begun: the loop has nothing else to do."""
    make, wait, _ = STEPS[kind]
    value = run_blocking(home.loop, made(make))
    future = start_on(home.loop, wait(value))
    run_blocking(home.loop, turns(3))
    return value, future


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_on_another_loop_wakes_the_loop_that_waits_and_is_reported(
    kind: str, home: EventLoopThread, other: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    value, future = waiting(home, kind)

    run_blocking(other.loop, STEPS[kind][2](value))

    future.result(PATIENCE_S)
    (line,) = reports(caplog)
    code: Any = inspect.unwrap(STEPS[kind][2]).__code__
    where = line.partition(": ")[0].rpartition(":")
    assert where[0] == __file__
    assert code.co_firstlineno < int(where[2]) <= code.co_firstlineno + 2
    # Python's own code ends a task's wait by the future that the task waits for.
    assert kind in line or kind == "asyncio.Task"
    assert f"belongs to the event loop {home.name}, and was used on the event loop other" in line


def test_a_thread_that_starts_a_task_wakes_the_loop(
    home: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    ran = threading.Event()

    task = home.loop.create_task(made(ran.set))

    assert ran.wait(PATIENCE_S)
    assert f"asyncio.Task belongs to the event loop {home.name}" in reports(caplog)[0]
    run_blocking(home.loop, ended(task))


def test_each_line_is_reported_once(
    home: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    ran = threading.Semaphore(0)
    for _ in range(5):
        home.loop.call_soon(ran.release)
    home.loop.call_soon(ran.release)

    assert all(ran.acquire(timeout=PATIENCE_S) for _ in range(6))
    assert len(reports(caplog)) == 2


def test_the_thread_of_a_loop_and_a_loop_that_does_not_run_have_no_report(
    home: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    value, future = waiting(home, "asyncio.Event")
    run_blocking(home.loop, set_event(value))
    future.result(PATIENCE_S)
    loop = new_event_loop()
    task = loop.create_task(made(lambda: "ran"))

    ended_in = threading.Thread(target=loop.run_until_complete, args=(task,))
    ended_in.start()
    ended_in.join(PATIENCE_S)
    loop.close()

    assert task.result() == "ran"
    assert reports(caplog) == []


def test_no_step_of_another_loop_is_lost(
    home: EventLoopThread, other: EventLoopThread, switch_interval: None
) -> None:
    async def rounds() -> int:
        for count in range(300):
            future = loops_future()
            other.mailbox.post(future.set_result, count)
            assert await future == count
        return count

    assert start_on(home.loop, rounds()).result(PATIENCE_S) == 299


def test_a_step_with_many_waiters_ends_before_they_do(
    home: EventLoopThread, other: EventLoopThread, switch_interval: None
) -> None:
    """`Event.set` goes through its waiters, and fails if one of them leaves meanwhile."""
    for _ in range(10):
        event, first = waiting(home, "asyncio.Event")
        waits = [first, *(start_on(home.loop, event.wait()) for _ in range(50))]
        run_blocking(home.loop, turns(3))

        run_blocking(other.loop, set_event(event))

        assert all(each.result(PATIENCE_S) for each in waits)


def test_a_callback_that_is_cancelled_does_not_run(
    home: EventLoopThread, other: EventLoopThread
) -> None:
    ran: list[str] = []

    async def call() -> None:
        home.loop.call_soon(ran.append, "cancelled").cancel()
        home.loop.call_soon(ran.append, "run")

    run_blocking(other.loop, call())
    wait_until(lambda: ran)

    assert ran == ["run"]


def test_a_closed_loop_refuses_a_call_from_another_thread() -> None:
    home = EventLoopThread("closed")
    home.stop(PATIENCE_S)

    with pytest.raises(RuntimeError, match="Event loop is closed"):
        home.loop.call_soon(print)


def test_a_loop_that_has_ended_is_gone_without_the_garbage_collector(home: EventLoopThread) -> None:
    ended_loop = EventLoopThread("ended")
    wait_started = threading.Event()
    ended_loop.loop.call_soon(wait_started.set)
    assert wait_started.wait(PATIENCE_S)
    gone = weakref.ref(ended_loop.loop)
    gc.collect()
    gc.disable()
    try:
        ended_loop.stop(PATIENCE_S)
        del ended_loop
        assert gone() is None
    finally:
        gc.enable()


# `INGRESS_EVENT_LOOP`, which `ingress run --loop` sets.


class OfTheUser(asyncio.SelectorEventLoop):
    pass


def make_loop() -> asyncio.AbstractEventLoop:
    return OfTheUser()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("asyncio", asyncio.SelectorEventLoop),
        (f"{__name__}:OfTheUser", OfTheUser),
        (f"{__name__}:make_loop", OfTheUser),
    ],
)
def test_a_loop_is_of_the_kind_that_was_chosen_and_aware_of_threads(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type
) -> None:
    monkeypatch.setenv("INGRESS_EVENT_LOOP", name)
    loop = new_event_loop()
    try:
        assert isinstance(loop, kind)
        assert isinstance(loop, ThreadAware)
    finally:
        loop.close()


def test_a_library_may_replace_the_methods_of_one_loops_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INGRESS_EVENT_LOOP", "asyncio")
    patched, other = new_event_loop(), new_event_loop()
    try:
        # As nest_asyncio does: from then on `ThreadAware` does not hear of the loop's thread.
        type(patched).run_forever = asyncio.SelectorEventLoop.run_forever  # type: ignore[assignment,method-assign]
        assert "run_forever" not in vars(type(other))
        assert patched.run_until_complete(asyncio.sleep(0, "done")) == "done"
    finally:
        patched.close()
        other.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bogus", "must be auto, asyncio, uvloop, or MODULE:NAME"),
        ("nowhere:Loop", "cannot be imported"),
        ("json:loads", "makes no loop"),
        ("pathlib:Path", "no event loop"),
    ],
)
def test_a_kind_that_does_not_exist_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        loop_class(name)


KIND = """
import asyncio, os
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

class Loop(asyncio.SelectorEventLoop): ...

def make(): return Loop()

@serve.deployment
@serve.ingress(app)
class Api:
    @app.get("/")
    async def root(self):
        return [each.__name__ for each in type(asyncio.get_running_loop()).__mro__]

    @app.get("/process")
    async def process(self): return os.getpid()

api = Api.bind()
isolated = Api.options(isolation="process").bind()
"""


@pytest.mark.parametrize(
    "command", [UVICORN, [*INGRESS, "run", "--port", "0"]], ids=["uvicorn", "ingress"]
)
def test_the_loop_of_the_command_line_is_that_of_replicas(
    tmp_path: Path, command: list[str]
) -> None:
    write_module(tmp_path, "kinds", KIND)
    environ = environment(tmp_path)
    with process([*command, "kinds:api", "--loop", "asyncio"], tmp_path, environ) as server:
        classes = get(server.port, "/").body
        assert b'"BaseEventLoop"' in classes


@pytest.mark.parametrize("kind", ["kinds:Loop", "kinds:make"])
def test_the_loop_of_the_command_line_is_that_of_replicas_in_processes(
    tmp_path: Path, kind: str
) -> None:
    write_module(tmp_path, "kinds", KIND)
    command = [*INGRESS, "run", "--port", "0", "kinds:isolated", "--loop", kind]
    with process(command, tmp_path, environment(tmp_path)) as server:
        assert get(server.port, "/process").body != b"%d" % server.process.pid
        assert b'"Loop"' in get(server.port, "/").body
