"""`telemetry.watchdog`: a stalled loop is reported with the line that blocks it, and no other is.

Code blocks until the watchdog has noticed. Each test has a separate file for its user code, because
a line is logged once a minute.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from starlette.testclient import TestClient

import ingress as serve
from ingress.context import ReplicaRuntime
from ingress.core.base import gil
from ingress.core.base.counters import Latency
from ingress.core.base.settings import STALL_THRESHOLD_MS
from ingress.core.base.types import DeploymentID, ReplicaID
from ingress.core.calls.loops import EventLoopThread
from ingress.telemetry.watchdog import WATCHDOG, Stall, StallReason
from ingress.telemetry.watchdog.loop_probe import BusyThread, LoopProbe, Sample
from ingress.telemetry.watchdog.records import StallLog, WorstStalls
from ingress.telemetry.watchdog.sampler import Sampler
from ingress.telemetry.watchdog.stacks import CodeLine, Stack, context_of
from tests.fakes import together
from tests.programs import INGRESS, UVICORN, environment, process, write_module
from tests.servers import PATIENCE_S, get, overview, set_flags, wait_until, with_gil

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::ingress.exceptions.SyncMethodOnEventLoopWarning",
        "ignore:max_concurrent_queries is deprecated:DeprecationWarning",
    ),
    pytest.mark.usefixtures("shutdown"),
]

THREAD = "ingress-watchdog"
UVLOOP: dict[str, Any] = {"use_uvloop": True}
ASYNCIO: dict[str, Any] = {"use_uvloop": False}


class Records(logging.Handler):
    """The watchdog's log records."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "stall") or "watchdog" in record.getMessage():
            self.all.append(record)


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logger = logging.getLogger("ingress")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def stalls_are_quiet() -> None:
    """Do not silence the watchdog in this module."""


class Gate:
    """A gate for user code; it sees the `serve.stalls()` since its creation."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._before = {*serve.stalls()}

    def standing(self) -> list[serve.Stall]:
        return [each for each in serve.stalls() if not each.is_over]

    def over(self) -> list[serve.Stall]:
        return [each for each in serve.stalls() if each.is_over and each not in self._before]

    def open_when_noticed(self) -> serve.Stall:
        wait_until(self.standing)
        (stall,) = self.standing()
        self.opened.set()
        wait_until(self.over)
        return stall


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


Load = Callable[..., ModuleType]


@pytest.fixture
def user_module(tmp_path: Path) -> Iterator[Load]:
    """Import source as a user's file; keyword arguments become its globals."""
    names: list[str] = []

    def load(source: str, folder: str = "", **given: Any) -> ModuleType:
        name = f"users_{len(names)}"
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        path = tmp_path / folder / f"{name}.py"
        path.write_text(source)
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        names.append(name)
        vars(module).update(given)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


@pytest.fixture
def blocking(user_module: Load, gate: Gate) -> ModuleType:
    return user_module(BLOCKING, gate=gate)


def line_of(module: ModuleType, text: str) -> tuple[str, int]:
    """Return the number of the one line that contains a text."""
    assert module.__file__ is not None
    lines = Path(module.__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return module.__file__, number


def watchdogs() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


BLOCKING = """
import asyncio
import ingress as serve
from fastapi import FastAPI
from tests.servers import until

app = FastAPI()

def helper(gate):
    gate.opened.wait(20)  # here
    return "x"

@serve.deployment
@serve.ingress(app)
class Model:
    @app.get("/blocking")
    async def blocking(self) -> str:
        return helper(gate)

    @app.get("/free")
    async def free(self) -> str:
        return "x"

    @app.get("/waiting")
    async def waiting(self) -> str:
        await until(gate.opened.is_set)
        return "x"

    def plain(self) -> str:
        return helper(gate)

    def making(self, kind: type) -> object:
        helper(gate)
        return kind()

    def streaming(self):
        yield helper(gate)

    async def spawning(self) -> str:
        async def later():
            helper(gate)
        await asyncio.gather(later(), asyncio.sleep(0))
        return "x"

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=60)
    async def batched(self, items: list[int]) -> list[str]:
        return [helper(gate) for item in items]

model = Model.bind()
"""


@pytest.mark.reliability("B07")
@pytest.mark.parametrize("backend", [UVLOOP, ASYNCIO], ids=["uvloop", "asyncio"])
def test_a_call_that_blocks_is_reported_with_its_line(
    separate: str, backend: dict[str, Any], blocking: ModuleType, gate: Gate, records: Records
) -> None:
    with (
        TestClient(blocking.model, backend_options=backend) as client,
        ThreadPoolExecutor() as threads,
    ):
        request = threads.submit(client.get, "/blocking", headers={"x-request-id": "mine"})
        standing = gate.open_when_noticed()
        assert request.result().json() == "x"
        (replica,) = overview("Model").replicas

    (stall,) = gate.over()
    for each in (standing, stall):
        assert (each.reason, each.method) == (StallReason.BLOCKED, "Model.blocking")
        assert (each.place.file, each.place.line) == line_of(blocking, "# here")
        assert (each.application, each.deployment, each.replica) == ("default", "Model", "0")
        assert (each.request_ids, each.waited, each.calls) == (("mine",), 0, 1)
    assert stall.duration_ms >= standing.duration_ms >= 100
    (record,) = records.all
    assert record.levelno == logging.WARNING
    assert (record.request_id, record.deployment, record.replica) == ("mine", "Model", "0")  # type: ignore[attr-defined]
    text = record.getMessage()
    assert f"in Model.blocking (request mine), at {stall.place}: `gate.opened.wait(20)" in text
    assert f"for {stall.duration_ms:.0f} ms" in text
    assert sum(replica.stall_ms["Model.blocking"].buckets) == 1


IMPORTING = """
import ingress as serve

@serve.deployment
class Model:
    def lazy(self) -> str:
        import users_slow  # here
        return users_slow.ANSWER

    async def through_a_library(self) -> str:
        from importlib import import_module
        return import_module("users_slow").ANSWER  # there

model = Model.bind()
"""

SLOW = """
from users_gate import gate

def wait():
    gate.opened.wait(20)

wait()
ANSWER = "imported"
"""


@pytest.mark.parametrize(("method", "mark"), [("lazy", "# here"), ("through_a_library", "# there")])
def test_an_import_in_a_request_is_told_in_its_own_words_and_is_no_warning(
    user_module: Load,
    gate: Gate,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    method: str,
    mark: str,
) -> None:
    caplog.set_level(logging.INFO, "ingress")
    module = user_module(IMPORTING)
    handing_over = ModuleType("users_gate")
    vars(handing_over)["gate"] = gate
    monkeypatch.setitem(sys.modules, "users_gate", handing_over)
    write_module(tmp_path, "users_slow", SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    handle = run(module)
    response = getattr(handle, method).remote()
    gate.open_when_noticed()
    assert response.result() == "imported"
    del sys.modules["users_slow"]

    (stall,) = gate.over()
    assert (stall.reason, stall.imports) == (StallReason.IMPORT, "users_slow")
    assert (stall.place.file, stall.place.line) == line_of(module, mark)
    assert stall.method == f"Model.{method}"
    wait_until(lambda: records.all)
    (record,) = records.all
    assert record.levelno == logging.INFO
    assert f"in Model.{method} (request {response.request_id}), importing users_slow at " in (
        record.getMessage()
    )
    assert "import it at the top of your module, or in the constructor" in record.getMessage()


def run(module: ModuleType) -> serve.DeploymentHandle:
    return serve.run(module.model, route_prefix=None)


@pytest.mark.parametrize(
    ("method", "named"),
    [("plain", "Model.plain"), ("streaming", "Model.streaming"), ("spawning", "later")],
)
def test_a_def_a_generator_and_a_task_of_the_users_own_are_named_by_what_we_called(
    blocking: ModuleType, gate: Gate, records: Records, method: str, named: str
) -> None:
    is_stream = method == "streaming"
    response = getattr(run(blocking).options(stream=is_stream), method).remote()
    stall = gate.open_when_noticed()
    assert (next(response) if is_stream else response.result(timeout_s=PATIENCE_S)) == "x"

    assert stall.request_ids == (response.request_id,)
    assert stall.method == named
    assert (stall.place.file, stall.place.line) == line_of(blocking, "# here")
    wait_until(lambda: records.all)
    assert [each.request_id for each in records.all] == [response.request_id]  # type: ignore[attr-defined]


def test_a_batch_is_reported_with_all_its_requests(blocking: ModuleType, gate: Gate) -> None:
    batched = run(blocking).batched
    responses = [batched.remote(number) for number in range(2)]
    stall = gate.open_when_noticed()
    assert [each.result(timeout_s=PATIENCE_S) for each in responses] == ["x", "x"]

    assert stall.method == "Model.batched"
    assert sorted(stall.request_ids) == sorted(each.request_id for each in responses)


def test_the_requests_that_waited_are_counted(
    blocking: ModuleType, gate: Gate, records: Records
) -> None:
    handle = run(blocking)
    first = handle.plain.remote()
    wait_until(gate.standing)
    others = [handle.waiting.remote() for _ in range(3)]
    wait_until(lambda: [each.waited for each in gate.standing()] == [3])
    gate.opened.set()
    for each in (first, *others):
        assert each.result(timeout_s=PATIENCE_S) == "x"

    wait_until(gate.over)
    (stall,) = gate.over()
    assert stall.waited == 3
    assert "Meanwhile 3 other requests waited" in records.all[0].getMessage()


def test_a_request_that_waits_without_blocking_is_not_reported(
    blocking: ModuleType, gate: Gate, records: Records
) -> None:
    waits = serve.run(blocking.model, name="waits", route_prefix=None)
    blocks = serve.run(blocking.model, name="blocks", route_prefix=None)
    responses = [waits.waiting.remote() for _ in range(20)]
    responses.append(blocks.plain.remote())
    gate.open_when_noticed()  # long enough for each response
    for each in responses:
        assert each.result(timeout_s=PATIENCE_S) == "x"

    wait_until(lambda: records.all)
    assert {each.application for each in gate.over()} == {"blocks"}
    assert {each.application for each in records.all} == {"blocks"}  # type: ignore[attr-defined]


def test_a_line_is_logged_once_a_minute_and_counted_each_time(
    blocking: ModuleType, records: Records
) -> None:
    handle = run(blocking)
    gates = [Gate() for _ in range(3)]
    for number, gate in enumerate(gates, 1):
        vars(blocking)["gate"] = gate
        response = handle.plain.remote()
        wait_until(gate.standing)
        gate.opened.set()
        assert response.result(timeout_s=PATIENCE_S) == "x"
        wait_until(lambda number=number: len(gates[0].over()) == number)  # type: ignore[misc]

    assert overview("Model").replicas[0].stall_ms["Model.plain"].count == 3
    assert len(records.all) == 1


@pytest.mark.reliability("B07")
def test_a_stall_that_does_not_end_is_logged_before_it_does(
    blocking: ModuleType, gate: Gate, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STALL_THRESHOLD_MS, "10")
    response = run(blocking).plain.remote()
    wait_until(lambda: records.all)
    assert "has been stalled for" in records.all[0].getMessage()
    gate.opened.set()
    assert response.result(timeout_s=PATIENCE_S) == "x"

    wait_until(lambda: len(records.all) == 2)
    assert "loop of Model#0 stalled for" in records.all[1].getMessage()
    assert [each.is_over for each in gate.over()] == [True]


def test_a_replica_that_is_left_behind_blocked_is_reported(
    blocking: ModuleType, gate: Gate, records: Records
) -> None:
    deployment = blocking.Model.options(graceful_shutdown_timeout_s=0.1)
    response = serve.run(deployment.bind(), route_prefix=None).plain.remote()
    wait_until(gate.standing)
    serve.shutdown()
    with pytest.raises(serve.exceptions.RayServeException):
        response.result(timeout_s=PATIENCE_S)

    wait_until(lambda: records.all)
    (stall,) = gate.over()
    assert (stall.deployment, stall.method) == ("Model", "Model.plain")
    wait_until(lambda: not watchdogs())


class Result: ...


def test_nothing_of_a_request_is_kept_for_having_been_seen(
    blocking: ModuleType, gate: Gate
) -> None:
    response = run(blocking).making.remote(Result)
    gate.open_when_noticed()
    result = weakref.ref(response.result(timeout_s=PATIENCE_S))
    del response

    def is_gone() -> bool:
        gc.collect()
        return result() is None

    wait_until(is_gone)


CRUNCHING = """
import asyncio
import ctypes
import re
import time
import ingress as serve
from tests.servers import until

@serve.deployment
class Crunch:
    def hold(self) -> None:
        length = 20
        while not gate.opened.is_set():
            began = time.monotonic()
            if sleeps:
                ctypes.PyDLL(None).usleep(200_000)
            else:
                re.match("(a+)+$", "a" * length + "b")
            # A match of one letter more takes twice as long.
            length += time.monotonic() - began < 0.2

@serve.deployment
class Waits:
    async def wait(self) -> str:
        await until(gate.opened.is_set)
        return "x"

@serve.deployment
class Both:
    def __init__(self, crunch, waits):
        self.crunch, self.waits = crunch, waits

    async def __call__(self) -> None:
        await asyncio.gather(self.crunch.hold.remote(), self.waits.wait.remote())

model = Both.bind(Crunch.bind(), Waits.bind())
"""


@with_gil
@pytest.mark.parametrize("sleeps", [False, True], ids=["computes", "sleeps"])
def test_a_worker_thread_that_keeps_the_gil_is_named(
    user_module: Load, gate: Gate, records: Records, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    set_flags(monkeypatch, "1", sync="1")
    module = user_module(CRUNCHING, gate=gate, sleeps=sleeps)
    response = run(module).remote()

    def starved() -> list[serve.Stall]:
        wanted = ("Waits", StallReason.GIL)
        return [each for each in gate.over() if (each.deployment, each.reason) == wanted]

    wait_until(starved)
    gate.opened.set()
    response.result(timeout_s=PATIENCE_S)

    stall = starved()[0]
    holder = next(each for each in stall.holders if each.thread.startswith("Crunch#0-worker-"))
    # If the thread slept too, each thread in user code is named, including this test's.
    assert sleeps or (stall.holders[0] is holder and stall.method == "Crunch.hold")
    assert (holder.place.file, holder.place.function) == (module.__file__, "Crunch.hold")
    wait_until(lambda: [each for each in records.all if str(holder) in each.getMessage()])
    assert "waiting for the GIL while other threads were at work: " in str(stall)


DEBUGGED = """
import io
import pdb
import ingress as serve

@serve.deployment
class Model:
    async def __call__(self) -> str:
        pdb.Pdb(stdin=stdin, stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
        return "x"

model = Model.bind()
"""


def test_a_stall_in_a_debugger_is_not_logged(
    user_module: Load, gate: Gate, records: Records
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w") as prompt:
        response = run(user_module(DEBUGGED, stdin=stdin)).remote()
        wait_until(gate.standing)
        prompt.write("continue\n")
        prompt.flush()
        assert response.result(timeout_s=PATIENCE_S) == "x"
        wait_until(gate.over)

    assert records.all == []


STARTING = """
import ingress as serve

@serve.deployment
class Child:
    async def __call__(self) -> None: ...

@serve.deployment
class Parent:
    def __init__(self, child):
        gate.opened.wait(20)

model = Parent.bind(Child.bind())
"""


@pytest.mark.skipif(not gil.is_on(), reason="only loops with requests are watched")
def test_a_constructor_on_the_servers_loop_is_not_logged(
    user_module: Load, gate: Gate, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, "0")
    module = user_module(STARTING, gate=gate)
    starting = threading.Thread(target=run, args=(module,))
    starting.start()
    stall = gate.open_when_noticed()
    starting.join(PATIENCE_S)

    assert (stall.method, stall.deployment) == ("Parent", "Parent")
    assert records.all == []


def test_an_installed_package_of_the_users_is_the_users(user_module: Load, gate: Gate) -> None:
    module = user_module(BLOCKING, folder="site-packages", gate=gate)
    response = run(module).plain.remote()
    stall = gate.open_when_noticed()
    response.result(timeout_s=PATIENCE_S)
    assert (stall.place.file, stall.place.line) == line_of(module, "# here")


def test_the_thread_lives_from_the_first_application_to_the_last(blocking: ModuleType) -> None:
    for name in ("a", "b"):
        serve.run(blocking.model, name=name, route_prefix=None)
        assert len(watchdogs()) == 1
    serve.delete("a")
    assert len(watchdogs()) == 1
    serve.delete("b")
    assert watchdogs() == []


def test_it_can_be_switched_off(blocking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STALL_THRESHOLD_MS, "0")
    run(blocking)
    assert watchdogs() == []


def test_a_signal_handler_of_the_users_is_kept(blocking: ModuleType) -> None:
    def mine(*_: object) -> None: ...

    run(blocking)
    for handler in (mine, signal.SIG_IGN, signal.SIG_DFL):
        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            with WATCHDOG.reporting_on_signal():
                meanwhile = signal.getsignal(signal.SIGUSR1)
            assert (meanwhile is handler) == (handler is not signal.SIG_DFL)
            assert signal.getsignal(signal.SIGUSR1) is handler
        finally:
            signal.signal(signal.SIGUSR1, previous)


class Watched:
    """A replica, as the watchdog sees it."""

    def __init__(self, name: str) -> None:
        self.context = ReplicaRuntime(ReplicaID("0", DeploymentID(name)))
        self.num_calls = 1
        self.stalls: dict[str, Latency] = {}


@pytest.mark.usefixtures("switch_interval")
def test_loops_come_and_go_in_many_threads_and_one_thread_watches_them(gate: Gate) -> None:
    loops = [EventLoopThread(f"loop-{number}") for number in range(4)]

    def come_and_go(home: EventLoopThread) -> None:
        owner = Watched(home.name)
        for _ in range(50):
            WATCHDOG.watch(home.loop, owner, 0.01)
            WATCHDOG.unwatch(home.loop, owner)

    together(*[partial(come_and_go, home) for home in loops])
    wait_until(lambda: not watchdogs())
    owner = Watched("last")
    loops[0].mailbox.post(WATCHDOG.watch, loops[0].loop, owner, 0.01)  # the watchdog still works
    loops[0].mailbox.post(gate.opened.wait, PATIENCE_S)
    stall = gate.open_when_noticed()
    WATCHDOG.unwatch(loops[0].loop, owner)
    for home in loops:
        home.stop(PATIENCE_S)

    assert stall.deployment == "last"
    wait_until(lambda: not watchdogs())


def test_a_loop_that_is_closed_without_a_word_is_let_go_of() -> None:
    home = EventLoopThread("closed")
    WATCHDOG.watch(home.loop, Watched("closed"), 0.01)
    assert watchdogs()
    home.stop(PATIENCE_S)

    wait_until(lambda: not watchdogs())


@pytest.mark.skipif(not gil.is_on(), reason="frames are read only of a loop that stands")
@pytest.mark.usefixtures("switch_interval")
def test_every_request_is_answered_while_their_frames_are_read(
    blocking: ModuleType, gate: Gate, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, "1", sync="1")
    monkeypatch.setenv(STALL_THRESHOLD_MS, "0.001")  # whenever a heartbeat is not answered at once
    gate.opened.set()
    handle = run(blocking)
    methods = (handle.plain, handle.free, handle.waiting, handle.spawning)

    def many_stood_still() -> bool:
        responses = [method.remote() for _ in range(20) for method in methods]
        assert {each.result(timeout_s=PATIENCE_S) for each in responses} == {"x"}
        return len(gate.over()) >= 20

    wait_until(many_stood_still)
    assert [each.getMessage() for each in records.all if not hasattr(each, "stall")] == []


def test_a_look_leaves_no_frames_to_the_garbage_collector() -> None:
    def frames() -> int:
        return sum(type(each) is FrameType for each in gc.get_objects())

    patrol = Sampler(0.1, StallLog())
    patrol.look([])
    gc.collect()
    gc.disable()
    try:
        before = frames()
        for _ in range(50):
            patrol.look([])
        assert frames() - before < 25
    finally:
        gc.enable()


def seen(loop: LoopProbe, *places: CodeLine | None) -> None:
    """Add samples to a loop: a place in user code, or `None` for idle."""
    for number, place in enumerate(places, 1):
        stack = Stack((), place or CodeLine("", 0, ""), "M.m", is_users=place is not None)
        loop.samples.append(Sample(stack, number, None, is_idle=place is None))


def test_a_loop_that_is_busy_with_nothing_in_particular_does_not_stand_still() -> None:
    with asyncio.Runner() as runner:
        loop = LoopProbe(runner.get_loop())
        seen(loop, *(CodeLine("users.py", number, f"M.m{number}") for number in range(5)))
        assert loop.judge(1.0, []) == (None, None)
        seen(loop, *(CodeLine("users.py", 7, "M.m7") for _ in range(6)))  # one more than all others
        stall, _ = loop.judge(1.0, [])

    assert stall is not None
    assert (stall.place.line, stall.calls) == (7, 6)


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_a_context_is_copied_whole_while_its_thread_sets_variables(count: int) -> None:
    variables: list[ContextVar[tuple[int, list[int]]]] = [
        ContextVar(f"variable{number}") for number in range(count)
    ]
    is_over, has_begun = threading.Event(), threading.Event()

    async def churn() -> None:
        tasks.append(asyncio.current_task())
        turn = 0
        while not is_over.is_set():
            for number, each in enumerate(variables):
                each.set((number, [turn]))
            turn += 1
            has_begun.set()

    tasks: list[Any] = []
    thread = threading.Thread(target=lambda: asyncio.run(churn()))
    thread.start()
    try:
        assert has_begun.wait(PATIENCE_S)
        for _ in range(1_000):
            copy = context_of(tasks[0])
            assert copy is not None
            assert [copy[each][0] for each in variables] == list(range(count))
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("ran_s", [0.0, 0.9])
def test_code_of_ours_is_to_blame_only_if_it_has_run(ran_s: float) -> None:
    with asyncio.Runner() as runner:
        loop = LoopProbe(runner.get_loop())
        loop.thread_id = 1
        place = CodeLine(LoopProbe.judge.__code__.co_filename, 9, "LoopProbe.judge")
        loop.samples.append(Sample(Stack((place,), place), 1))
        runners = [BusyThread(ident=1, ran_s=ran_s, stack=Stack((place,), place))]
        stall, _ = loop.judge(1.0, runners if ran_s else [])

    assert (stall is not None) is (ran_s > 0)


CRUNCH = CodeLine("users.py", 1, "M.crunch")
COMPUTED = BusyThread(ident=1, ran_s=0.9, stack=Stack((CRUNCH,), CRUNCH, "M.crunch", is_users=True))


@with_gil
def test_a_waiting_loop_is_reported_only_if_another_thread_computes() -> None:
    with asyncio.Runner() as runner:
        loop = LoopProbe(runner.get_loop())
        seen(loop, None, None, None, CRUNCH)
        assert loop.judge(1.0, []) == (None, None)
        stall, _ = loop.judge(1.0, [COMPUTED])

    assert stall is not None
    assert (stall.reason, stall.place) == (StallReason.GIL, CRUNCH)


@with_gil
def test_a_loop_that_lost_the_gil_in_the_middle_of_its_work_is_not_to_blame() -> None:
    with asyncio.Runner() as runner:
        loop = LoopProbe(runner.get_loop())
        seen(loop, CodeLine("users.py", 9, "M.innocent"))
        blamed, _ = loop.judge(1.0, [COMPUTED])
        loop.starved_s = 0.9
        cleared, _ = loop.judge(1.0, [COMPUTED])

    assert blamed is not None
    assert (blamed.reason, blamed.place.line) == (StallReason.BLOCKED, 9)
    assert cleared is not None
    assert (cleared.reason, cleared.place) == (StallReason.GIL, CRUNCH)


# In separate processes.

APPLICATION = """
import time
import ingress as serve
from fastapi import FastAPI

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Model:
    @app.get("/blocking")
    async def blocking(self) -> str:
        time.sleep(0.3)  # here
        return "x"

    @app.get("/free")
    async def free(self) -> str:
        return "x"

model = Model.bind()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("separate", ["0", "1"])
@pytest.mark.parametrize("command", ["uvicorn", "ingress run"])
def test_sigusr1_logs_the_recent_stalls(tmp_path: Path, command: str, separate: str) -> None:
    write_module(tmp_path, "users", APPLICATION)
    uvicorn = [*UVICORN, "--loop", "asyncio", "users:model"]
    line = uvicorn if command == "uvicorn" else [*INGRESS, "run", "users:model", "--port", "0"]
    with process(line, tmp_path, environment(tmp_path, separate=separate)) as server:
        assert get(server.port, "/free").status == 200
        server.signal(signal.SIGUSR1)
        server.wait_for("no recent stalls of event loops")
        assert get(server.port, "/blocking").status == 200
        server.wait_for(r" stalled for \d+ ms in Model.blocking")
        server.signal(signal.SIGUSR1)
        server.wait_for(r"recent stalls of .*:\n.*in Model.blocking .*users.py:13: `time.sleep")
        assert get(server.port, "/free").status == 200


def test_a_process_that_was_stopped_and_goes_on_reports_nothing(tmp_path: Path) -> None:
    write_module(tmp_path, "users", APPLICATION)
    with process([*UVICORN, "users:model"], tmp_path, environment(tmp_path)) as server:
        port = server.port
        for _ in range(3):
            assert get(port, "/free").status == 200
            server.signal(signal.SIGSTOP)
            stat = Path(f"/proc/{server.process.pid}/stat")
            wait_until(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "T")  # type: ignore[misc]
            time.sleep(0.3)  # three times the threshold
            server.signal(signal.SIGCONT)
        assert get(port, "/blocking").status == 200
        server.wait_for("in Model.blocking")

        assert server.output.count(" stalled for") == 1


FORKING = """
import os, threading
import ingress as serve
from users import model
from ingress.core.calls.call import Call
from ingress.core.calls.loops import EventLoopThread
from ingress.telemetry.watchdog import WATCHDOG
from tests.servers import wait_until
from tests.telemetry.test_watchdog import Watched

serve.run(model, route_prefix=None)
child = os.fork()
if child == 0:
    home = EventLoopThread("childs")
    home.mailbox.post(WATCHDOG.watch, home.loop, Watched("Child"), 0.01)
    home.mailbox.post(threading.Event().wait)
    wait_until(lambda: [stall for stall in serve.stalls() if stall.deployment == "Child"])
    print("the child's loop is watched", flush=True)
    os._exit(0)
print("exit code", os.waitpid(child, 0)[1])
"""


@pytest.mark.reliability("B32")
def test_a_child_of_a_fork_watches_its_own_loops(tmp_path: Path) -> None:
    write_module(tmp_path, "users", APPLICATION)
    write_module(tmp_path, "forking", FORKING)
    with process([sys.executable, "forking.py"], tmp_path, environment(tmp_path)) as child:
        assert child.wait() == 0
        assert child.output.splitlines()[-2:] == ["the child's loop is watched", "exit code 0"]


WITHOUT_UVLOOP = """
import sys
sys.modules["uvloop"] = None
import ingress as serve
from users import model

print(serve.run(model, route_prefix=None).blocking.remote().result())
serve.shutdown()
(stall,) = serve.stalls()
print(stall.method, stall.place.line)
"""


def test_loops_of_asyncio_in_threads_of_ours_are_watched(tmp_path: Path) -> None:
    write_module(tmp_path, "users", APPLICATION)
    write_module(tmp_path, "without", WITHOUT_UVLOOP)
    with process([sys.executable, "without.py"], tmp_path, environment(tmp_path)) as child:
        assert child.wait() == 0
        assert child.output.splitlines()[-1] == "Model.blocking 13"


NAPPING = """
import asyncio
import time
import ingress as serve

@serve.deployment
class Model:
    async def nap(self) -> list[serve.Stall]:
        time.sleep(0.2)  # the nap
        for _ in range(3):  # turns of the loop, in less time than the watchdog's next look
            await asyncio.sleep(0)
        return [stall for stall in serve.stalls() if stall.method == "Model.nap"]

model = Model.bind()
"""


def test_a_stall_is_there_when_its_loop_has_just_turned_again(user_module: Load) -> None:
    """It is counted once, before the watchdog has judged it and after that."""
    module = user_module(NAPPING)
    handle = serve.run(module.model, route_prefix=None)

    for number in range(1, 6):
        stalls = handle.nap.remote().result()
        assert [stall.place.line for stall in stalls] == [line_of(module, "the nap")[1]] * number
        assert len({stall.began_at_s for stall in stalls}) == number


STARTS_AND_LOOKS = """
import gc, sys, threading, time
from ingress.telemetry.watchdog.stacks import current_frames

class Garbage:
    def __init__(self):
        self.myself = self
    def __del__(self):
        for _ in range(50):  # others get the GIL
            time.sleep(0)

def nap():  # in a new frame each time, which to look at makes an object
    time.sleep(0.001)

def take_naps():
    while not is_over.is_set():
        nap()

def start_threads():
    while not is_over.is_set():
        thread = threading.Thread(target=nap)
        thread.start()
        thread.join()

is_over = threading.Event()
threads = [threading.Thread(target=take_naps) for _ in range(20)]
threads += [threading.Thread(target=start_threads) for _ in range(2)]
for thread in threads:
    thread.start()
gc.set_threshold(18)  # more than the garbage, less than that and the objects of the frames
for _ in range(100):
    garbage = [Garbage() for _ in range(4)]
    del garbage
    current_frames()
is_over.set()
for thread in threads:
    thread.join()
print("over", gc.isenabled())
"""


def test_looking_at_threads_never_waits_for_one_that_starts_another() -> None:
    command = [sys.executable, "-c", STARTS_AND_LOOKS]
    assert subprocess.check_output(command, timeout=PATIENCE_S) == b"over True\n"


STARVING = """
import os, subprocess, sys, time
import ingress as serve

@serve.deployment
class Api:
    async def __call__(self) -> None:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass

    async def naps(self) -> None:
        time.sleep(0.3)  # the nap

handle = serve.run(Api.bind(), route_prefix=None)
handle.remote().result()
every = os.sched_getaffinity(0)
only = {min(every)}
code = f"import os; os.sched_setaffinity(0, {only}); print(1, flush=True)\\nwhile True: pass"
others = [
    subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(16)
]
for each in others:
    each.stdout.readline()
threads = [int(each) for each in os.listdir("/proc/self/task")]
for thread in threads:
    os.sched_setaffinity(thread, only)
handle.remote().result()
for each in others:
    each.kill()
    each.wait()
    each.stdout.close()
for thread in threads:
    os.sched_setaffinity(thread, every)
found = serve.stalls()
print(len(found), {str(each.reason) for each in found}, {each.place.line for each in found})
handle.naps.remote().result()
last = found[-1]
while last == found[-1] or not last.is_over:
    time.sleep(0.01)
    last = serve.stalls()[-1]
print(last.reason, last.place.function)
serve.shutdown()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the wait for a processor")
def test_a_loop_without_a_processor_is_starved_and_its_line_is_not_to_blame(tmp_path: Path) -> None:
    write_module(tmp_path, "starving", STARVING)
    with process([sys.executable, "starving.py"], tmp_path, environment(tmp_path)) as child:
        assert child.wait() == 0
    first, last = [line for line in child.output.splitlines() if not line.startswith("The event")]

    assert int(first.split()[0]) >= 1
    assert first.endswith("{'starved'} {0}")
    assert last == "blocked Api.naps"
    assert "it was ready to run and had no processor, as other processes had the" in child.output


def test_the_worst_stall_of_a_line_is_kept_with_how_often_it_stalled() -> None:
    def stall(at_s: float, ms: float, line: int = 7, waited: int = 1) -> Stall:
        names = "Loop", "app", "Api", "0", "Api.naps"
        place = CodeLine("users.py", line, "Api.naps")
        return Stall(at_s, ms, StallReason.BLOCKED, *names, (), place, waited)

    worst, now = WorstStalls(), 10_000.0
    worst.add(stall(now - 1_000, 60_000.0))  # more than a quarter of an hour ago
    worst.add(stall(now - 300, 5_000.0, waited=40))
    for _ in range(6):
        worst.add(stall(now - 5, 300.0))
    worst.add(stall(now - 5, 400.0, line=8))

    [longest, other] = worst.since(now - 900)
    assert (longest.times, longest.longest.duration_ms, longest.waited) == (7, 5_000.0, 40)
    assert (other.times, other.longest.place.line) == (1, 8)
    minute = {each.longest.place.line: each for each in worst.since(now - 60)}
    assert (minute[7].times, minute[7].longest.duration_ms, minute[7].waited) == (6, 300.0, 1)


def test_stalls_of_several_processes_are_counted_once_each(switch_interval: None) -> None:
    worst = WorstStalls()
    names = "Loop", "app", "Api", "0", "Api.naps"

    def add(number: int) -> None:
        for _ in range(200):
            place = CodeLine("users.py", 7, "Api.naps")
            worst.add(Stall(10_000.0, 1.0, StallReason.BLOCKED, *names, (), place, number))

    together(*(partial(add, number) for number in range(4)))
    [found] = worst.since(9_000.0)
    assert (found.times, found.waited) == (800, 3)
