"""Applications that start: answers meanwhile, and no operation that waits for a constructor."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import ingress as serve
from ingress.engines import local_engine
from ingress.exceptions import DeploymentUnavailableError, RayServeException
from ingress.schema import ApplicationStatus, DeploymentStatus
from ingress.testing import Latch
from tests.asgi_helpers import under_server
from tests.fakes import bind, together
from tests.programs import INGRESS, UVICORN, environment, free_port, process, write_module
from tests.servers import PATIENCE_S, ROUNDS, get, overview, served, set_flags, wait_until

BOUND_S = 4.0
"""Bound on operations that abandon a stuck constructor: 1 s, plus time for a busy machine."""


pytestmark = pytest.mark.usefixtures("shutdown")


class Doors:
    """Latches of a constructor: it has entered, and it may leave."""

    def __init__(self, count: int = 1) -> None:
        self.entered = Latch(count)
        self.leave = Latch(timeout_s=PATIENCE_S)


@pytest.fixture
def doors() -> Iterator[Doors]:
    doors = Doors()
    yield doors
    doors.leave.count_down()  # an abandoned thread ends before the leak check


def fine(answer: str = "fine", **options: Any) -> Any:
    @serve.deployment(name="Model", **options)
    class Fine:
        async def __call__(self) -> str:
            return answer

    return bind(Fine)


def slow(doors: Doors, kind: str = "def", **options: Any) -> Any:
    """Return an application whose constructor, of a given kind, waits at the doors."""
    deployment = serve.deployment(name="Model", **options)

    class Blocks:
        def __init__(self) -> None:
            doors.entered.count_down()
            doors.leave.wait()

    class Awaits:
        async def __init__(self) -> None:  # type: ignore[misc]
            doors.entered.count_down()
            await doors.leave

    async def call(self: Any) -> str:
        return "slow"

    @serve.method(execution="serial")
    def call_in_thread(self: Any) -> str:
        return "slow"

    if kind in ("def", "async def", "serial"):
        cls: Any = Awaits if kind == "async def" else Blocks
        cls.__call__ = call_in_thread if kind == "serial" else call
        return bind(deployment(cls))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        doors.entered.count_down()
        await doors.leave
        yield

    app = FastAPI(lifespan=lifespan)

    @deployment
    @serve.ingress(app)
    class StartsUp:
        @app.get("/")
        async def root(self) -> str:
            return "slow"

    return bind(StartsUp)


RUN = [*INGRESS, "run", "app:model", "--port"]
KINDS = ["def", "async def", "serial", "lifespan"]


class Running:
    """A `serve.run` in a thread, and its outcome."""

    def __init__(self, application: Any, **options: Any) -> None:
        self.error: BaseException | None = None
        self.handle: Any = None
        self._thread = threading.Thread(target=self._run, args=(application,), kwargs=options)
        self._thread.start()

    def _run(self, application: Any, **options: Any) -> None:
        try:
            self.handle = serve.run(application, **options)
        except BaseException as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> Running:
        self._thread.join(PATIENCE_S)
        assert self.is_over
        return self


def in_time(operation: Callable[[], Any]) -> Any:
    """Return the result of an operation. Fails if it exceeds the bound."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(operation()), daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive(), f"blocks for more than {BOUND_S} s"
    return results[0]


def starting_port(application: Any, doors: Doors, **options: Any) -> tuple[int, Running]:
    """Serve an application whose constructor waits, and return the port."""
    serve.start({"port": 0})
    (url,) = serve.status().proxies
    running = Running(application, **options)
    doors.entered.wait()
    return int(url.rpartition(":")[2]), running


# Answers meanwhile.


@pytest.mark.parametrize("kind", KINDS)
def test_what_starts_answers_503_and_to_come_back_in_a_second(doors: Doors, kind: str) -> None:
    port, running = starting_port(slow(doors, kind), doors)

    for path in ("/", "/any/path", "/-/healthz"):
        answer = get(port, path)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1"), path
        assert b"starting" in answer.body
        assert answer.headers["x-request-id"] or path == "/-/healthz"
    assert get(port, "/-/routes").body == b"{}"

    doors.leave.count_down()
    assert running.join().error is None
    assert get(port, "/").status == get(port, "/-/healthz").status == 200


def test_503_is_for_the_prefix_of_what_starts_and_the_rest_is_served(doors: Doors) -> None:
    port = served(fine("rest"), "rest", "/")
    running = Running(slow(doors), name="slow", route_prefix="/slow")
    doors.entered.wait()

    paths = {"/": 200, "/slower": 200, "/slow": 503, "/slow/": 503, "/slow/x": 503}
    assert {path: get(port, path).status for path in paths} == paths
    assert get(port, "/-/healthz").status == 200, "an application is ready"
    doors.leave.count_down()
    running.join()
    assert get(port, "/slow").body == b"slow"


def test_an_application_serves_on_until_what_replaces_it_is_ready(doors: Doors) -> None:
    port = served(fine("old", num_replicas=2))
    running = Running(slow(doors))
    doors.entered.wait()

    assert get(port, "/").body == b"old"
    assert get(port, "/-/healthz").status == 200
    application = serve.status().applications["default"]
    assert application.status is ApplicationStatus.DEPLOYING
    model = application.deployments["Model"]
    assert model.status is DeploymentStatus.UPDATING
    assert model.replica_states == {"RUNNING": 2, "STARTING": 1}
    assert model.requests == 1
    assert serve.get_app_handle("default").remote().result(timeout_s=PATIENCE_S) == "old"

    doors.leave.count_down()
    assert running.join().error is None
    assert get(port, "/").body == b"slow"
    assert overview("Model").replica_states == {"RUNNING": 1}


def test_a_websocket_to_what_starts_is_refused_with_503(doors: Doors) -> None:
    port, running = starting_port(slow(doors), doors)

    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{port}/ws").close()

    response = refused.value.response
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    # A server that can only close.
    scope = {"type": "websocket", "path": "/", "headers": [], "extensions": {}}
    asyncio.run(local_engine().http.proxy(scope, receive, send))
    assert [(each["type"], each["code"]) for each in sent] == [("websocket.close", 1013)]
    assert "starting" in sent[0]["reason"]
    doors.leave.count_down()
    running.join()


def test_status_shows_what_starts_and_what_is_yet_to_start(doors: Doors) -> None:
    @serve.deployment(name="Parent")
    class Parent:
        def __init__(self, child: Any) -> None:
            self.child = child

    running = Running(bind(Parent, slow(doors, num_replicas=3)), route_prefix=None)
    doors.entered.wait()

    application = serve.status().applications["default"]
    assert application.status is ApplicationStatus.DEPLOYING
    child, parent = application.deployments["Model"], application.deployments["Parent"]
    assert (child.status, child.replica_states) == (DeploymentStatus.UPDATING, {"STARTING": 3})
    assert (parent.status, parent.replica_states) == (DeploymentStatus.UPDATING, {})
    doors.leave.count_down()
    running.join()
    application = serve.status().applications["default"]
    assert application.status is ApplicationStatus.RUNNING
    assert {each.status for each in application.deployments.values()} == {DeploymentStatus.HEALTHY}


# After a start that failed.


class Refuses:
    """A deployment whose constructor raises."""

    def __init__(self, child: Any = None) -> None:
        raise ValueError("no weights")


def failing(child: Any = None) -> Any:
    return bind(serve.deployment(name="Main")(Refuses), child)


def test_what_failed_is_listed_and_answers_503_until_it_is_deleted() -> None:
    port = served(fine("rest"), "rest", "/rest")
    with pytest.raises(RuntimeError, match="no weights"):
        serve.run(failing(fine()), name="bad", route_prefix="/bad")

    seen = serve.status().applications["bad"]
    assert seen.status is ApplicationStatus.DEPLOY_FAILED
    assert "deployment 'Main' failed to start: ValueError: no weights" in seen.message
    main, model = seen.deployments["Main"], seen.deployments["Model"]
    assert {main.status, model.status} == {DeploymentStatus.DEPLOY_FAILED}
    assert (main.status_trigger, main.replica_states) == ("REPLICA_STARTUP_FAILED", {})
    assert "ValueError: no weights" in main.message
    assert "another deployment failed to start" in model.message
    answer = get(port, "/bad/x")
    assert (answer.status, answer.headers.get("retry-after")) == (503, None)
    assert answer.body == b"Application 'bad' is unavailable because it failed to deploy."
    for handle in (serve.get_app_handle("bad"), serve.get_deployment_handle("Model", "bad")):
        with pytest.raises(DeploymentUnavailableError, match="it failed to deploy"):
            handle.remote()
    with pytest.raises(RayServeException, match='used by application "bad"'):
        serve.run(fine(), name="other", route_prefix="/bad")
    assert get(port, "/rest").body == b"rest"
    assert get(port, "/-/routes").body == b'{"/rest": "rest"}'

    serve.delete("bad")
    assert [*serve.status().applications] == ["rest"]
    assert get(port, "/bad/x").status == 404


def test_a_deployment_that_follows_the_failed_one_is_listed_with_its_name() -> None:
    outer = serve.deployment(name="Outer")(Refuses)
    with pytest.raises(RuntimeError, match="no weights"):
        serve.run(bind(outer, failing()), name="bad", route_prefix="/bad")

    seen = serve.status().applications["bad"].deployments
    assert "ValueError: no weights" in seen["Main"].message
    assert "not started, because 'Main' failed to start" in seen["Outer"].message


def test_the_server_goes_on_after_the_only_start_failed_until_a_shutdown() -> None:
    serve.start({"port": 0})
    (url,) = serve.status().proxies
    port = int(url.rpartition(":")[2])
    threads = threading.active_count()
    for _ in range(2):  # a second failure replaces the first
        with pytest.raises(RuntimeError, match="no weights"):
            serve.run(failing())
    assert (get(port, "/").status, get(port, "/-/healthz").body) == (503, b"failed to deploy")

    served(fine("mended"))
    assert serve.status().applications["default"].status is ApplicationStatus.RUNNING
    assert (get(port, "/").body, get(port, "/-/healthz").status) == (b"mended", 200)
    with pytest.raises(RuntimeError, match="no weights"):
        serve.run(failing(), name="bad", route_prefix=None)
    serve.shutdown()
    assert (serve.status().applications, threading.active_count() < threads) == ({}, True)


def test_what_is_being_deleted_is_listed_as_deleting(doors: Doors) -> None:
    @serve.deployment(name="Model")
    class Held:
        async def __call__(self) -> str:
            doors.entered.count_down()
            await doors.leave
            return "held"

    handle = serve.run(bind(Held), route_prefix=None)
    response = handle.remote()
    doors.entered.wait()
    deleting = threading.Thread(target=serve.delete, args=("default",))
    deleting.start()

    def status() -> Any:
        return serve.status().applications["default"].status

    wait_until(lambda: status() is ApplicationStatus.DELETING)
    model = overview("Model")
    assert (model.status, model.status_trigger) == (DeploymentStatus.UPDATING, "DELETING")
    doors.leave.count_down()
    assert response.result(timeout_s=PATIENCE_S) == "held"
    deleting.join(PATIENCE_S)
    assert serve.status().applications == {}


@pytest.mark.usefixtures("switch_interval")
@pytest.mark.parametrize("ending", ["delete", "shutdown", "run"])
def test_a_failed_start_is_ended_once_whatever_ends_it(ending: str) -> None:
    """Race of the failure, on the control loop, with an operation of another thread."""

    def start() -> None:
        with suppress(RuntimeError):
            served(failing())

    def end() -> None:
        if ending == "run":
            start()
        else:
            getattr(serve, ending)(*["default"] * (ending == "delete"))

    served(fine("rest"), name="rest", route_prefix="/rest")
    threads = threading.active_count()
    for _ in range(5 + ROUNDS):
        together(start, end)
        serve.delete("default")
        assert [*serve.status().applications] == ["rest"] * (ending != "shutdown")
    if ending != "shutdown":
        wait_until(lambda: threading.active_count() <= threads)
    serve.shutdown()
    assert local_engine().is_running is False


# No operation waits for a constructor.


@pytest.mark.reliability("B04")
@pytest.mark.parametrize(
    ("kind", "separate"), [*((kind, "1") for kind in KINDS), ("async def", "0")]
)
def test_a_constructor_that_hangs_holds_up_no_other_application(
    doors: Doors, kind: str, separate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, separate)
    port, running = starting_port(slow(doors, kind), doors, name="slow", route_prefix="/slow")

    handle = in_time(lambda: serve.run(fine(), name="other", route_prefix="/other"))
    assert handle.remote().result(timeout_s=PATIENCE_S) == "fine"
    assert (get(port, "/other").status, get(port, "/slow").status) == (200, 503)
    assert set(in_time(serve.status).applications) == {"slow", "other"}
    in_time(lambda: serve.start({"request_timeout_s": 5}))
    in_time(lambda: serve.delete("other"))
    assert get(port, "/other").status == 404
    assert not running.is_over

    in_time(lambda: serve.delete("slow"))
    error = running.join().error
    assert isinstance(error, RuntimeError)
    assert "'slow' failed: it was deleted while it started" in str(error)
    assert serve.status().applications == {}
    assert get(port, "/slow").status == 404
    assert in_time(lambda: serve.run(fine(), name="slow", route_prefix="/slow")) is not None
    assert get(port, "/slow").body == b"fine"


@pytest.mark.parametrize(("kind", "is_kept"), [*((each, False) for each in KINDS), ("def", True)])
def test_shutdown_ends_what_starts_and_leaves_nothing(
    doors: Doors, kind: str, is_kept: bool
) -> None:
    serve.start({"port": 0} if is_kept else {"host": None})
    running = Running(slow(doors, kind, num_replicas=2))
    doors.entered.wait()

    in_time(serve.shutdown)

    error = running.join().error
    assert isinstance(error, RuntimeError)
    assert "everything was shut down while it started" in str(error)
    assert (serve.status().proxies, serve.status().applications) == ({}, {})
    assert not local_engine().is_running
    names = {each.name for each in threading.enumerate() if each.name.startswith("ingress-")}
    assert names <= {"ingress-watchdog"}


def test_the_prefix_and_the_name_of_what_starts_are_taken(doors: Doors) -> None:
    _, running = starting_port(slow(doors), doors, name="slow", route_prefix="/slow")

    says = 'Prefix /slow is being used by application "slow"'
    with pytest.raises(RayServeException, match=says):
        serve.run(fine(), name="other", route_prefix="/slow")
    assert not running.is_over, "what was refused is no reason to end it"
    doors.leave.count_down()
    assert running.join().error is None


def test_of_two_runs_of_a_name_the_later_one_stays(doors: Doors) -> None:
    port, earlier = starting_port(slow(doors), doors)

    later = in_time(lambda: serve.run(fine("later")))

    error = earlier.join().error
    assert isinstance(error, RuntimeError)
    assert "another application of its name was run while it started" in str(error)
    assert later.remote().result(timeout_s=PATIENCE_S) == "later"
    assert get(port, "/").body == b"later"


def test_a_later_run_that_fails_leaves_what_served_before_both(doors: Doors) -> None:
    class Broken:
        def __init__(self) -> None:
            raise LookupError("no model here")

    port = served(fine("first"))
    earlier = Running(slow(doors))
    doors.entered.wait()
    with pytest.raises(RuntimeError, match="no model here"):
        serve.run(bind(serve.deployment(name="Model")(Broken)))

    assert isinstance(earlier.join().error, RuntimeError)
    assert get(port, "/").body == b"first"
    assert serve.get_app_handle("default").remote().result(timeout_s=PATIENCE_S) == "first"
    assert serve.status().applications["default"].status is ApplicationStatus.DEPLOY_FAILED


def test_a_replacement_that_is_ended_gives_the_children_back(doors: Doors) -> None:
    class Parent:
        def __init__(self, child: Any, waits: bool = False) -> None:
            self.child = child
            if waits:
                doors.entered.count_down()
                doors.leave.wait()

        async def __call__(self) -> Any:
            return await self.child.remote()

    parent = serve.deployment(name="Parent", graceful_shutdown_timeout_s=1.0)(Parent)
    serve.run(bind(parent, fine("old child")), route_prefix=None)
    replacing = Running(bind(parent, fine("new child"), waits=True), route_prefix=None)
    doors.entered.wait()
    earlier = Running(fine(), route_prefix=None)  # with other deployments, ready at once
    assert earlier.join().error is None
    assert isinstance(replacing.join().error, RuntimeError)
    handle = serve.get_app_handle("default")
    assert handle.remote().result(timeout_s=PATIENCE_S) == "fine"
    with pytest.raises(KeyError):
        serve.get_deployment_handle("Parent", "default")


def test_a_replica_that_fails_is_told_though_another_one_hangs(doors: Doors) -> None:
    class Torn:
        def __init__(self) -> None:
            if serve.get_replica_context().replica_tag == "1":
                doors.entered.wait()
                raise LookupError("no model here")
            doors.entered.count_down()
            doors.leave.wait()

    running = Running(bind(serve.deployment(num_replicas=2)(Torn)), route_prefix=None)

    error = in_time(running.join).error
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, LookupError)
    assert serve.status().applications["default"].status is ApplicationStatus.DEPLOY_FAILED


def test_a_constructor_may_run_another_application(doors: Doors) -> None:
    class Outer:
        def __init__(self) -> None:
            serve.run(fine("inner"), name="inner", route_prefix=None)

        async def __call__(self) -> Any:
            return await serve.get_app_handle("inner").remote()

    handle = in_time(lambda: serve.run(bind(serve.deployment(Outer)), route_prefix=None))
    assert handle.remote().result(timeout_s=PATIENCE_S) == "inner"


def test_ctrl_c_ends_a_run_that_waits_and_leaves_nothing(doors: Doors) -> None:
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        doors.entered.wait()
        signal.pthread_kill(main, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            serve.run(slow(doors), route_prefix=None)
    finally:
        pressing.join()
        signal.signal(signal.SIGINT, before)
    assert serve.status().applications == {}
    assert not local_engine().is_running


# Race of the end of an application with its last replica that becomes ready.


ENDS: dict[str, Callable[[], object]] = {
    "delete": lambda: serve.delete("default"),
    "shutdown": serve.shutdown,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_end_and_the_last_replica_that_is_ready_agree(
    end: str, kind: str, switch_interval: None
) -> None:
    for _ in range(10 + ROUNDS):
        doors = Doors(2)
        running = Running(slow(doors, kind, num_replicas=2), route_prefix=None)
        doors.entered.wait()
        together(doors.leave.count_down, ENDS[end], lambda: serve.status())

        running.join()
        assert serve.status().applications == {}, "it was ready first, and then stopped"
        assert local_engine().routers == {}
        assert (running.handle is None) == isinstance(running.error, RuntimeError)
        assert not local_engine().is_running


def test_two_runs_of_a_name_at_once_leave_one_of_them(switch_interval: None) -> None:
    for _ in range(10 + ROUNDS):
        runs = [Running(fine(answer), route_prefix=None) for answer in ("one", "two", "three")]
        for each in runs:
            each.join()

        errors = [each.error for each in runs if each.error is not None]
        assert all("another application of its name" in str(each) for each in errors)
        assert len(errors) < len(runs)
        assert list(serve.status().applications) == ["default"]
        (model,) = serve.status().applications["default"].deployments.values()
        assert model.replica_states == {"RUNNING": 1}
        answer = serve.get_app_handle("default").remote().result(timeout_s=PATIENCE_S)
        assert answer in ("one", "two", "three")
        serve.shutdown()
        assert not local_engine().is_running


def test_starts_and_shutdowns_at_once_leave_nothing(switch_interval: None) -> None:
    for _ in range(5 + ROUNDS):
        serve.start({"port": 0})
        runs = [Running(fine(), name=str(number), route_prefix=f"/{number}") for number in range(3)]
        serve.shutdown()
        for each in runs:
            each.join()
            assert each.error is None or "shut down" in str(each.error)
        serve.shutdown()
        assert (serve.status().proxies, serve.status().applications) == ({}, {})
        assert local_engine().routers == {}
        assert not local_engine().is_running


# Under another ASGI server.


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["closed", "shut down"])
async def test_the_end_of_an_application_ends_a_start_by_a_first_request(
    doors: Doors, end: str
) -> None:
    application = slow(doors)
    transport = httpx.ASGITransport(under_server(application))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        first = asyncio.ensure_future(client.get("/"))
        await asyncio.to_thread(doors.entered.wait)
        ended = application.aclose() if end == "closed" else serve.shutdown_async()
        await asyncio.wait_for(ended, BOUND_S)
        with pytest.raises(RuntimeError, match=f"{end} while it started"):
            await first
    assert not local_engine().is_running


HANG = "threading.Event().wait()"
HANGS = f"""
import threading
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Model:
    def __init__(self):
        print("constructing", flush=True)
        {HANG}

    @app.get("/")
    async def root(self): return "here"

model = Model.bind()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_uvicorn_ends_at_a_signal_while_a_constructor_hangs(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_module(tmp_path, "app", HANGS)
    with process([*UVICORN, "app:model"], tmp_path, environment(tmp_path)) as server:
        server.wait_for("constructing")
        server.signal(number)
        server.wait(BOUND_S)
    assert "interrupted while it started" in server.output


def test_from_the_moment_it_listens_no_path_of_what_starts_is_a_404(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")  # to open it for reading waits for a writer
    write_module(tmp_path, "app", HANGS.replace(HANG, 'open("gate").close()'))
    port = free_port()
    answers: list[int] = []
    with process([*RUN, str(port)], tmp_path, environment(tmp_path)), httpx.Client() as client:

        def ask() -> set[int]:
            try:
                answers.append(client.get(f"http://127.0.0.1:{port}/").status_code)
            except httpx.ConnectError:
                pass
            return {*answers}

        wait_until(ask)
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        try:
            wait_until(lambda: 200 in ask())
        finally:
            os.close(gate)
    assert {*answers} == {200, 503}


# Progress messages.


ONE_IS_SLOW = HANGS.replace(HANG, f"serve.get_replica_context().replica_tag == '0' or {HANG}")


def test_what_starts_is_told_in_lines_when_there_is_news(tmp_path: Path) -> None:
    write_module(tmp_path, "app", ONE_IS_SLOW)
    with process([*RUN, "0"], tmp_path, environment(tmp_path)) as server:
        server.wait_for(r"starting Model \(1 of 2 replicas\) \.\.\. \d+\.\d s\n")
        time.sleep(1.0)
        assert server.output.count("starting Model (1 of 2") == 1, "that is no news"


def test_what_starts_is_told_on_a_terminal_in_one_line_with_the_time(tmp_path: Path) -> None:
    write_module(tmp_path, "app", ONE_IS_SLOW)
    terminal, theirs = os.openpty()
    environ = {**environment(tmp_path), "TERM": "xterm"}
    server = subprocess.Popen(
        [*RUN, "0"], cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        shown = ""
        line = re.compile(r"starting Model \(1 of 2 replicas\) \.\.\. (\d+\.\d) s\r")
        deadline = time.monotonic() + PATIENCE_S
        while len(set(line.findall(shown))) < 3:
            assert time.monotonic() < deadline, shown
            shown += os.read(terminal, 4096).decode()
        live = shown[shown.index("starting Model") : shown.rindex("starting Model")]
        assert "\n" not in live, "it stays on its line"
    finally:
        server.kill()
        server.wait()
        os.close(terminal)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such file here")
def test_a_start_goes_on_where_nothing_can_be_printed(tmp_path: Path) -> None:
    write_module(tmp_path, "app", ONE_IS_SLOW.replace('print("constructing", flush=True)', "pass"))
    port = free_port()
    command, environ = [*RUN, str(port)], environment(tmp_path)
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=full, stderr=full) as server,
    ):
        try:
            wait_until(lambda: answers(port) == 503)
            time.sleep(1.5)  # a message would have come by now
            assert (server.poll(), answers(port)) == (None, 503)
        finally:
            server.kill()


def answers(port: int) -> int:
    try:
        return get(port, "/").status
    except OSError:
        return 0


AWAITED = (
    HANGS.replace("import threading", "import asyncio")
    .replace("    def __init__", "    async def __init__")
    .replace(HANG, f"serve.get_replica_context().replica_tag == '0' or await {HANG}")
    .replace("threading.Event", "asyncio.Event")
)


@pytest.mark.skipif(not ROUNDS, reason="takes ten seconds")
@pytest.mark.parametrize("source", [ONE_IS_SLOW, AWAITED], ids=["stands", "awaits"])
def test_after_ten_seconds_what_still_constructs_is_named_with_its_line(
    tmp_path: Path, source: str
) -> None:
    write_module(tmp_path, "app", source)
    line = 1 + ONE_IS_SLOW.split(HANG)[0].count("\n")
    with process([*RUN, "0"], tmp_path, environment(tmp_path)) as server:
        wait_until(lambda: "still starting" in server.output, 45)
        says = r"application 'default' is still starting after 10 s: Model#1 at \S*app.py"
        assert re.search(rf"{says}:{line} in Model", server.output), server.output
