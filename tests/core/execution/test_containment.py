"""An error of user code, of any type and in any place, fails only its own request.

Each cell of the matrix is one request to a real server, and a second one that must be served.
By default all flags are 0 or all are 1; `make test-reliability` goes through all eight.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI
from starlette.requests import Request
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.settings import USER_CODE_IN_SEPARATE_THREAD
from ingress.schema import ApplicationStatus
from tests.containment_app import ALL, ERRORS, HOSTILE, boom
from tests.reliability.figures import Figures
from tests.servers import (
    PATIENCE_S,
    ROUNDS,
    Answer,
    ServerProcess,
    bind,
    environment,
    get,
    process,
    served,
)

MAPPED = {"HTTPException": 418, "BackPressureError": 503}
APPS = ["plain", "middleware"]
ENDPOINTS = [
    "async_endpoint",
    "def_endpoint",
    "def_dependency",
    "yield_dependency",
    "exception_handler",
]
FEW = ("getattribute", "class-exits", "cause", "behind-another")
KINDS = ALL if ROUNDS else ERRORS | {name: HOSTILE[name] for name in FEW}
"""The errors; of those that raise when they are inspected, the default run has a few."""
FAILED = {name: (MAPPED.get(name, 500), "complete") for name in KINDS}

FLAGS = [*itertools.product("01", repeat=3)]
"""The flags: sync methods in a threadpool, user code in its own thread, router in its own loop."""

MATRIX = {
    "async": "async/",
    "def-pool": "sync/",  # with the first flag at 1
    "def-on-loop": "sync/",  # with the first flag at 0
    "async gen": "agen/",
    "sync gen": "gen/",
    "batch": "batch/",
    "dependency": "plain/def_dependency",
    "exception handler": "plain/exception_handler",
    "background task": "plain/background_task",
    "websocket": "plain/websocket",
}
"""The places of user code, and the path that runs each."""

UNSENT = ["async/", "sync/", "batch/", "sync_batch/"]
UNSENT += [f"{app}/{e}" for app in APPS for e in ENDPOINTS]
STREAMS = ["agen/", "gen/", "batch_gen/"]
STREAMS += [f"{app}/{e}" for app in APPS for e in ("async_stream", "sync_stream")]
AFTERWARDS = [f"{a}/{e}" for a in APPS for e in ("background_task", "yield_dependency_teardown")]


@pytest.fixture(
    scope="module",
    params=[("thread", *flags) for flags in FLAGS if ROUNDS or len({*flags}) == 1]
    + [("process", sync, "1", "1") for sync in ("01" if ROUNDS else "1")],
    ids=lambda each: "{}-sync{}-user{}-router{}".format(*each),
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    isolation, sync, separate, router = request.param
    folder = tmp_path_factory.mktemp("containment")
    command = [sys.executable, "-m", "tests.containment_app", isolation]
    environ = environment(folder, sync=sync, separate=separate, router=router)
    environ["A_SECRET"] = "an-environment-secret"
    with process(command, folder, environ) as running:
        yield running
        assert running.process.poll() is None, running.output


def outcomes(server: ServerProcess, path: str, parameter: str = "e") -> dict[str, Any]:
    """Send a request for each error, then one that must be served; return the answers."""
    port = server.port
    found: dict[str, Any] = {}
    joint = "&" if "?" in path else "?"
    for name in KINDS:
        answer = get(port, f"/{path}{joint}{parameter}={name}")
        found[name] = (answer.status, "complete" if answer.is_complete else "cut")
        tells_nothing(answer, name)
        following = get(port, f"/{path}{joint}{parameter}=nothing")
        assert (following.status, following.is_complete) == (200, True), name
    return found


_INSIDE = re.compile(
    rb"Traceback|\bFile \"|\.py\b|/(tmp|home|root|usr|opt|work)/|site-packages|0x[0-9a-f]{6,}"
    rb"|a-local-secret|an-environment-secret|raise \w+\(|python|fastapi|starlette|\d+\.\d+\.\d+",
    re.IGNORECASE,
)
"""File paths, source lines, representations of locals, the environment, and versions."""


def tells_nothing(answer: Answer, name: str) -> None:
    """Fail if body, headers or status line of an answer show internals."""
    _tells_nothing(answer.raw.partition(b" ")[2], name)  # all but HTTP/1.1


def _tells_nothing(raw: bytes, name: str) -> None:
    found = _INSIDE.search(raw)
    assert found is None, (name, found, raw)


@pytest.mark.reliability("B06")
def test_the_matrix_is_complete(figures: Figures) -> None:
    assert set(MATRIX.values()) <= {*UNSENT, *STREAMS, *AFTERWARDS, "plain/websocket"}
    assert len(ALL) == 34
    figures.note("cells, each with every combination of flags", len(MATRIX) * len(ALL))


@pytest.mark.reliability("B06", "S08")
@pytest.mark.parametrize("path", UNSENT)
def test_an_error_before_the_first_byte_is_a_500_or_the_status_it_stands_for(
    server: ServerProcess, path: str
) -> None:
    assert outcomes(server, path) == FAILED


@pytest.mark.reliability("B06", "S08")
@pytest.mark.parametrize("path", ["agen/?e=nothing", "gen/?e=nothing", "batch_gen/?e=nothing"])
def test_a_generator_that_fails_before_its_first_item_is_a_500(
    server: ServerProcess, path: str
) -> None:
    assert outcomes(server, path, "first") == FAILED


@pytest.mark.reliability("B06", "S08")
def test_an_error_of_a_middleware_is_a_500_as_in_starlette(server: ServerProcess) -> None:
    found = outcomes(server, "middleware/in_middleware", "middleware")
    assert found == dict.fromkeys(KINDS, (500, "complete"))


@pytest.mark.reliability("B06", "S08")
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_fails_after_its_first_byte_is_cut_and_never_ended(
    server: ServerProcess, path: str
) -> None:
    assert outcomes(server, path) == dict.fromkeys(KINDS, (200, "cut"))


@pytest.mark.reliability("B06", "S08")
@pytest.mark.parametrize("path", AFTERWARDS)
def test_an_error_after_the_answer_leaves_the_answer_complete(
    server: ServerProcess, path: str
) -> None:
    assert outcomes(server, path) == dict.fromkeys(KINDS, (200, "complete"))


def websocket(server: ServerProcess, path: str) -> int:
    """Open a WebSocket and send a message; return its close code, or the status of its refusal."""
    try:
        with connect(
            f"ws://127.0.0.1:{server.port}/{path}", open_timeout=PATIENCE_S, proxy=None
        ) as client:
            client.send("hello")
            assert client.recv(timeout=PATIENCE_S) == "hello"
            client.recv(timeout=PATIENCE_S)
    except InvalidStatus as refused:
        _tells_nothing(bytes(refused.response.body or b""), path)
        return refused.response.status_code
    except ConnectionClosed as closed:
        _tells_nothing(closed.rcvd.reason.encode() if closed.rcvd is not None else b"", path)
        return 1006 if closed.rcvd is None else closed.rcvd.code
    raise AssertionError("it was not closed")


@pytest.mark.reliability("B06", "S08")
@pytest.mark.parametrize("app", APPS)
def test_a_websocket_that_fails_is_closed_as_failed(server: ServerProcess, app: str) -> None:
    codes = {}
    for name in KINDS:
        codes[name] = websocket(server, f"{app}/websocket?e={name}")
        assert websocket(server, f"{app}/websocket?e=nothing") == 1000

    assert codes.pop("BackPressureError") == 1013  # 1013: try again later
    assert set(codes.values()) <= {1006, 1011}, codes


@pytest.mark.reliability("B06", "S08")
@pytest.mark.parametrize("app", APPS)
def test_a_websocket_that_fails_before_it_is_accepted_is_refused(
    server: ServerProcess, app: str
) -> None:
    statuses = {name: websocket(server, f"{app}/websocket_early?e={name}") for name in KINDS}

    assert set(statuses.values()) <= {403, 418, 500, 503}, statuses
    assert websocket(server, f"{app}/websocket?e=nothing") == 1000


# In this process.


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


@pytest.mark.reliability("B01", "B03")
@pytest.mark.parametrize(
    ("separate", "is_async"),
    [("0", False), ("1", True)],
    ids=["def", "async"],
    indirect=["separate"],
)
@pytest.mark.parametrize("name", KINDS)
def test_a_constructor_that_raises_fails_the_start_and_leaves_nothing(
    separate: str, name: str, is_async: bool
) -> None:
    class Def:
        def __init__(self) -> None:
            boom(name)

    class AsyncDef:
        async def __init__(self) -> None:  # type: ignore[misc]
            boom(name)

    broken = serve.deployment(name="Broken", num_replicas=2)(AsyncDef if is_async else Def)
    before = threads()
    with pytest.raises(RuntimeError, match="deployment 'Broken' failed to start") as failed:
        serve.run(broken.bind(), route_prefix=None)

    lines = "".join(traceback.format_exception(failed.value.__cause__))
    assert "in boom" in lines
    assert "containment_app.py" in lines
    assert serve.status().applications["default"].status is ApplicationStatus.DEPLOY_FAILED
    assert threads() <= before


def test_a_constructor_that_raises_takes_its_applications_children_with_it(separate: str) -> None:
    deleted = threading.Event()

    @serve.deployment
    class Child:
        def __del__(self) -> None:
            deleted.set()

        async def __call__(self) -> None: ...

    @serve.deployment
    class Parent:
        def __init__(self, child: Any) -> None:
            raise ValueError("no parent")

    before = threads()
    with pytest.raises(RuntimeError, match="'Parent' failed to start: ValueError: no parent"):
        serve.run(bind(Parent, bind(Child)), route_prefix=None)

    assert deleted.is_set()
    assert threads() <= before


@pytest.fixture
def user_threads(monkeypatch: pytest.MonkeyPatch, shutdown: None) -> None:
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, "1")


@pytest.mark.reliability("B29")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_of_the_users_own_that_exits_does_not_end_the_loop(
    user_threads: None, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    @serve.deployment
    class Spawner:
        async def __call__(self) -> None:
            async def leave() -> None:
                raise error

            self.task = asyncio.get_running_loop().create_task(leave())

        async def gone(self) -> bool:
            await asyncio.wait([self.task])
            return isinstance(self.task.exception(), error)

    handle = serve.run(bind(Spawner), route_prefix=None)
    with caplog.at_level(logging.ERROR, "ingress"):
        handle.remote().result(timeout_s=PATIENCE_S)
        assert handle.gone.remote().result(timeout_s=PATIENCE_S)

    assert "user code ended the event loop of Spawner#0; the loop is restarted" in caplog.text


@pytest.mark.reliability("B29")
def test_a_method_that_stops_its_own_loop_does_not_end_it(
    user_threads: None, caplog: pytest.LogCaptureFixture
) -> None:
    @serve.deployment
    class Stopper:
        async def __call__(self) -> str:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
            return "still here"

    handle = serve.run(bind(Stopper), route_prefix=None)
    with caplog.at_level(logging.ERROR, "ingress"):
        answers = [handle.remote().result(timeout_s=PATIENCE_S) for _ in range(3)]

    assert answers == ["still here"] * 3
    assert "user code stopped the event loop of Stopper#0; the loop is restarted" in caplog.text


@pytest.mark.reliability("S08")
@pytest.mark.parametrize("place", ["background task", "yield dependency", "exception handler"])
def test_a_thread_of_anyios_that_fails_gives_the_slot_of_its_request_back(
    separate: str, place: str
) -> None:
    app = FastAPI()

    class Handled(Exception):
        pass

    def dependency() -> Iterator[None]:
        if place == "yield dependency":
            boom("getattribute")
        yield

    @app.exception_handler(Handled)
    def handler(request: Request, error: Handled) -> None:
        boom("class-exits")

    @serve.deployment(max_ongoing_requests=1)
    @serve.ingress(app)
    class Failing:
        @app.get("/failing")
        async def failing(self, tasks: BackgroundTasks, _: None = Depends(dependency)) -> None:
            if place == "background task":
                tasks.add_task(boom, "getattribute")
            else:
                raise Handled

        @app.get("/fine")
        async def fine(self) -> None: ...

    port = served(bind(Failing))
    expected = 200 if place == "background task" else 500

    assert [get(port, "/failing").status for _ in range(3)] == [expected] * 3
    assert get(port, "/fine").status == 200


def test_the_client_of_an_error_sees_nothing_of_its_inside(separate: str) -> None:
    @serve.deployment
    class Secretive:
        async def __call__(self) -> None:
            raise ValueError("the secret")

    answer = get(served(bind(Secretive)), "/")

    assert (answer.status, answer.body) == (500, b"Internal Server Error")
    assert "content-type" not in answer.headers
