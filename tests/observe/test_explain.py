"""`ingress explain`: each row names the thread its code then runs on."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fastapi
import pytest
from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request, Response, WebSocket
from fastapi.responses import StreamingResponse
from fastapi.routing import run_endpoint_function

import ingress as serve
from app_examples import slow_server
from ingress.cli.target import Output
from ingress.core.base import gil
from ingress.core.base.settings import (
    OMP_NUM_THREADS,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
    Settings,
)
from ingress.core.execution.execution import code_of
from ingress.exceptions import CompiledRoutesOffWarning
from ingress.observe.inspection import Explanation, Level, Row, explain
from ingress.observe.inspection.sources import Use, mentions
from ingress.observe.inspection.table import as_json, show
from tests import explain_app
from tests.conformance.observe import TIMEOUT_S, Served, served
from tests.pages.test_app_examples import EXAMPLES, application
from tests.servers import ROOT, bind, invoke, write_module

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.filterwarnings("ignore:max_concurrent_queries is deprecated:DeprecationWarning"),
]


class Watch:
    """Records the threads of code, those started meanwhile included."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._wanted = {code for row in rows if (code := code_of_row(row)) is not None}
        self.seen: dict[CodeType, set[str]] = {code: set() for code in self._wanted}

    def __enter__(self) -> Watch:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in self._wanted:
            is_on_loop = asyncio._get_running_loop() is not None
            thread = re.sub(r"\d+", "N", threading.current_thread().name)
            self.seen[frame.f_code].add(f"{'loop' if is_on_loop else 'thread'} {thread}")


def code_of_row(row: Row) -> CodeType | None:
    func: Any = explain_app.SpyPath.__fspath__ if row.what == "file" else row.func
    return code_of(func) or code_of(getattr(func, "__init__", func))


def check(explanation: Explanation, watch: Watch, serving: str) -> list[str]:
    """Assert that each row names the place of its code; return the rows whose code did not run."""
    flag = explanation.settings.run_sync_in_threadpool
    expected: dict[CodeType, set[str]] = {}
    unseen = []
    for row in explanation.rows:
        code, place = code_of_row(row), row.places[flag]
        if code is None or not watch.seen[code]:
            unseen.append(f"{row.what}: {row.name}")
            continue
        thread = serving if place.thread == "the server's" else f"{place.thread}"
        where = "loop" if place.where == "event loop" else "thread"
        # Two places if a function is used in two ways.
        expected.setdefault(code, set()).add(f"{where} {thread}")
    assert {code: places for code, places in watch.seen.items() if places} == expected
    return unseen


def serving_loop(it: Served) -> str:
    return re.sub(r"\d+", "N", it.loop.removeprefix("loop "))


@pytest.mark.parametrize("user", ["1", "0"], ids=["own loop", "the server's loop"])
@pytest.mark.parametrize("sync", ["0", "1"], ids=["flag 0", "flag 1"])
def test_every_kind_of_row_names_the_thread_it_runs_on(
    sync: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, user)
    explanation = explain(explain_app.app, Settings.from_environment())

    with Watch(explanation.rows) as watch:
        with served(explain_app.app) as it:
            explain_app.call_everything(it)
            serving = serving_loop(it)

    assert check(explanation, watch, serving) == ["background task: task"]


def lane_items() -> Iterator[str]:
    yield "1"


@serve.method(lane="db")
def lane_session() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("sync", ["0", "1"], ids=["flag 0", "flag 1"])
def test_lanes_and_the_serial_thread_are_places(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    app = FastAPI()

    def started() -> None: ...

    app.router.on_startup.append(started)

    @serve.deployment(lanes={"db": 3})
    @serve.ingress(app)
    class Reports:
        def __init__(self) -> None: ...

        @serve.method(lane="db")
        @app.get("/report")
        def report(self, session: int = Depends(lane_session)) -> StreamingResponse:
            return StreamingResponse(lane_items())

        @serve.method(execution="event_loop")
        @app.get("/fast")
        def fast(self) -> None: ...

        @serve.method(execution="serial")
        def serial(self) -> None: ...

        @serve.batch(max_concurrent_batches=2)
        @serve.method(lane="db")
        def batched(self, values: list[int]) -> list[int]:
            return values

    bound = bind(Reports)
    explanation = explain(bound, Settings.from_environment())
    with Watch(explanation.rows) as watch, served(bound) as it:
        assert it.get("/report").text == "1"
        assert it.get("/fast").status_code == 200
        it.handle.serial.remote().result(timeout_s=TIMEOUT_S)
        it.handle.batched.remote(1).result(timeout_s=TIMEOUT_S)

    assert check(explanation, watch, "") == []
    assert {(row.what, row.places[0].where, row.places[0].threads) for row in explanation.rows} == {
        ("constructor", "serial thread", 1),
        ("startup", "event loop", 1),
        ("GET /report", "lane db", 3),
        ("stream", "lane db", 3),
        ("dependency", "lane db", 3),
        ("teardown", "lane db", 3),
        ("GET /fast", "event loop", 1),
        ("method", "serial thread", 1),
        ("method, batch", "lane db", 2),
    }
    assert [row.name for row in explanation.rows if row.findings] == []


def drive(name: str, it: Served) -> None:
    """Send an example the requests that its docstring shows."""
    if name == "websocket_echo":
        assert it.get().status_code == 200
        with it.client.websocket_connect("/echo") as socket:  # type: ignore[union-attr]
            socket.send_text("a")
            assert socket.receive_text() == "1: a"
    elif name == "multiplexed":
        assert it.get("/loaded").status_code == 200
        for model_id in ("de", "en", "fr"):
            headers = {"serve_multiplexed_model_id": model_id}
            assert it.client.get("/greet?name=Ada", headers=headers).status_code == 200
    elif name in ("model", "request_batching"):
        assert it.handle.remote(1).result(timeout_s=TIMEOUT_S) == 2
    else:
        docstring = import_module(f"app_examples.{name}").__doc__ or ""
        for path in re.findall(r"http://127\.0\.0\.1:8000(/[^\s']*)(?<!\.)", docstring):
            assert it.get(path).status_code == 200


@pytest.mark.parametrize("sync", ["0", "1"], ids=["flag 0", "flag 1"])
@pytest.mark.parametrize("name", sorted({*EXAMPLES} - {"slow_server", "ray_parallel"}))
def test_every_row_of_an_example_names_the_thread_it_runs_on(
    name: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    app = application(name)
    explanation = explain(app, Settings.from_environment())
    sleep = asyncio.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, result=None: sleep(0, result))

    with slow_server.running(wait=lambda: None) as slow, Watch(explanation.rows) as watch:
        monkeypatch.setenv("SLOW_SERVER_URL", slow.url)
        with served(app) as it:
            drive(name, it)

    assert check(explanation, watch, "") == IN_CHILDREN.get(name, [])


IN_CHILDREN = {"processes": ["method: Primes.count", "method: Primes.crash"]}
"""The rows of code that runs in other processes, where no thread is watched."""


# No side effects.


def never(*_: Any) -> Any:
    raise AssertionError("explain called it")


@asynccontextmanager
async def never_lifespan(app: FastAPI) -> AsyncIterator[None]:
    never()
    yield


@asynccontextmanager
async def router_lifespan(app: FastAPI) -> AsyncIterator[None]:
    never()
    yield


def test_nothing_of_the_users_is_made_called_or_started() -> None:
    app = FastAPI(lifespan=never_lifespan)
    app.include_router(APIRouter(lifespan=router_lifespan))
    before = threading.enumerate()

    class Meta(type):
        __call__ = never

    class K(metaclass=Meta):
        __init__ = never
        __getattr__ = never

        @property
        def value(self) -> Any:
            return never()

        @app.get("/")
        def endpoint(self, dependency: str = Depends(never)) -> Any:
            return StreamingResponse(never())

        @serve.multiplexed
        async def load(self, model_id: str) -> Any:
            return never()

    rows = explain(bind(serve.deployment(serve.ingress(app)(K))), Settings()).rows

    assert [row.what for row in rows] == [
        "constructor", "lifespan", "lifespan", "GET /", "stream", "dependency", "model loader",
    ]  # fmt: skip
    assert threading.enumerate() == before


def test_an_app_that_each_replica_builds_is_known_by_its_builder() -> None:
    def build_app() -> FastAPI:
        return never()  # type: ignore[no-any-return]

    @serve.ingress(build_app)
    class Built:
        pass

    @serve.ingress(None)
    class BuildsItself:
        async def __serve_build_asgi_app__(self) -> FastAPI:
            return never()  # type: ignore[no-any-return]

    for cls, end in ((Built, "build_app"), (BuildsItself, "BuildsItself.__serve_build_asgi_app__")):
        row = rows_of(cls)["app builder"]
        assert row.name.endswith(end)
        assert row.places[0].where == "event loop"


def test_an_app_that_is_no_starlette_is_one_row() -> None:
    @serve.ingress(never)
    class K:
        pass

    assert list(rows_of(K)) == ["ASGI app"]


# Compiled routes.


def is_run_by_fastapi() -> bool:
    """Return whether FastAPI's own handler runs the endpoint that calls this."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not run_endpoint_function.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.fixture
def mixed() -> Any:
    """Return an application with routes of every kind, most of which tell who ran them."""
    app, router, mounted = FastAPI(), APIRouter(), FastAPI()

    def yields() -> Iterator[int]:
        yield 1

    @mounted.get("/own")
    async def own() -> bool:
        return is_run_by_fastapi()

    async def page(request: Request) -> Response:
        return Response("a page")

    class K:
        @app.get("/plain")
        async def plain(self) -> bool:
            return is_run_by_fastapi()

        @app.get("/teardown")
        async def teardown(self, value: int = Depends(yields)) -> bool:
            return is_run_by_fastapi()

        @router.get("/included")
        async def included(self) -> bool:
            return is_run_by_fastapi()

        @app.websocket("/socket")
        async def socket(self, socket: WebSocket) -> None: ...

    app.include_router(router, prefix="/v1")
    app.mount("/mounted", mounted)
    app.add_route("/page", page)
    return bind(serve.deployment(serve.ingress(app)(K)))


def test_the_column_compiled_says_which_routes_fastapis_own_handler_answers(mixed: Any) -> None:
    explanation = explain(mixed, Settings())
    compiled = {row.what: row.is_compiled for row in explanation.rows}
    answered = ("/plain", "/teardown", "/v1/included", "/mounted/own")

    with served(mixed) as it:
        by_fastapi = {path: it.get(path).json() for path in answered}

    assert by_fastapi == {path: not compiled[f"GET {path}"] for path in answered}
    assert set(by_fastapi.values()) == {True, False}
    assert [compiled[what] for what in ("GET HEAD /page", "WS /socket", "dependency")] == [None] * 3
    table = printed(explanation)
    assert re.search(r"^GET /plain .*K\.plain +async def +yes ", table, re.MULTILINE)
    assert re.search(r"^GET /teardown .*K\.teardown +async def +no ", table, re.MULTILINE)


def test_with_a_fastapi_that_has_changed_the_column_says_that_no_route_is_compiled(
    mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def changed(app: Any, scope: Any, receive: Any, send: Any) -> None:
        pass

    monkeypatch.setattr(fastapi, "__version__", "0.9999.0")
    monkeypatch.setattr(fastapi.FastAPI, "__call__", changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompiledRoutesOffWarning)  # once in a process
        rows = explain(mixed, Settings()).rows

    assert {row.is_compiled for row in rows if row.what.startswith("GET /")} == {False}


# Rows.


def rows_of(cls: Any, settings: Settings | None = None, **options: Any) -> dict[str, Row]:
    """Return the rows of a class by `Row.what`."""
    found = explain(bind(serve.deployment(**options)(cls)), settings or Settings()).rows
    return {row.what: row for row in found}


def findings(row: Row) -> list[tuple[str, str]]:
    return [(each.id, each.level.value) for each in row.findings]


def test_a_def_on_the_loop_is_a_warning_and_what_anyio_runs_a_note(app: FastAPI) -> None:
    def yields() -> Iterator[int]:
        yield 1

    class K:
        async def returns(self) -> Any:
            def items() -> Iterator[int]:
                yield 1

            return items()

        @app.get("/")
        def endpoint(self, value: int = Depends(yields)) -> None: ...

    off, on = (rows_of(serve.ingress(app)(K), Settings(flag)) for flag in (False, True))

    assert findings(off["generator"]) == [("generator-on-loop", "warn")]
    assert findings(on["generator"]) == [("generator-on-loop", "warn")]
    assert findings(off["dependency"]) == [("anyio", "note")]
    assert findings(off["GET /"]) == []

    class Plain:
        def __call__(self) -> None: ...

    assert findings(rows_of(Plain)["any /"]) == [("def-on-loop", "warn")]
    assert findings(rows_of(Plain, Settings(True))["any /"]) == []


@pytest.mark.parametrize("user", ["0", "1"], ids=["the server's loop", "own loop"])
def test_the_limit_of_anyio_is_that_of_the_loop(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, user)
    app = FastAPI()

    @serve.deployment(num_replicas=2, max_ongoing_requests=3)
    class Other:
        pass

    def yields() -> Iterator[int]:
        yield 1

    @serve.deployment(max_ongoing_requests=7)
    @serve.ingress(app)
    class K:
        def __init__(self, other: Any) -> None: ...

        @app.get("/")
        async def limit(self, value: int = Depends(yields)) -> float:
            return current_default_thread_limiter().total_tokens

    bound = bind(K, bind(Other))
    rows = explain(bound, Settings.from_environment()).rows
    (dependency,) = [row for row in rows if row.what == "dependency"]
    (teardown,) = [row for row in rows if row.what == "teardown"]

    with served(bound) as it:
        assert it.get().json() == dependency.places[0].threads
    assert teardown.places[0].threads is None


def test_threads_are_no_more_than_what_else_limits_a_function(app: FastAPI) -> None:
    def slow() -> int:
        return 1

    class K:
        @serve.batch(max_concurrent_batches=2)
        def _batch(self, values: list[int]) -> list[int]:
            return values

        @app.get("/")
        def endpoint(self, value: int = Depends(slow, max_concurrency=3)) -> None: ...

    rows = rows_of(serve.ingress(app)(K), max_ongoing_requests=10)

    assert rows["GET /"].places[0].threads == 14
    assert rows["batch"].places[0].threads == 2
    assert rows["dependency"].places[0].threads == 3


def test_batches_of_each_model_are_limited_by_the_threads_alone() -> None:
    class K:
        @serve.batch(max_concurrent_batches=2, per_model=True)
        def __call__(self, values: list[int]) -> list[int]:
            return values

    (row,) = explain(bind(serve.deployment(K)), Settings()).rows
    assert (row.places[0].threads or 0) > 2


def test_what_several_routes_share_is_one_row() -> None:
    app, router = FastAPI(), APIRouter()

    def shared() -> int:
        return 1

    def task() -> None: ...

    class K:
        @router.get("/a")
        def a(self, tasks: BackgroundTasks, value: int = Depends(shared)) -> None:
            tasks.add_task(task)

        @router.get("/b")
        def b(self, tasks: BackgroundTasks, value: int = Depends(shared)) -> None:
            tasks.add_task(task)

    app.include_router(router)
    app.include_router(router, prefix="/v1")
    bound = bind(serve.deployment(serve.ingress(app)(K)))

    assert sorted(row.what for row in explain(bound, Settings()).rows) == [
        "GET /a", "GET /b", "GET /v1/a", "GET /v1/b", "background task", "dependency",
    ]  # fmt: skip


def test_the_methods_of_a_base_and_of_another_class_are_told_apart(app: FastAPI) -> None:
    class Base:
        @app.get("/")
        def endpoint(self) -> None: ...

        def method(self) -> None: ...

    @serve.ingress(app)
    class Other:
        @app.get("/other")
        def endpoint(self) -> None: ...

    @serve.ingress(app)
    class K(Base):
        async def endpoint(self) -> None:  # type: ignore[override]
            pass

    rows = rows_of(K)

    assert {what: row.name.rpartition(".")[0] for what, row in rows.items()} == {
        "GET /": "K", "method": "Base",
    }  # fmt: skip
    assert rows["GET /"].places[0].where == "event loop"


def test_what_a_class_inherits_from_a_library_is_left_out() -> None:
    class Base:
        def ours(self) -> None: ...

    class K(threading.Thread, Base):
        def run(self) -> None: ...

    rows = explain(bind(serve.deployment(K)), Settings()).rows

    assert [row.name.rpartition(".")[2] for row in rows] == ["__init__", "ours", "run"]


# Functions that pass on code.


def a_task() -> None: ...


def a_generator() -> Iterator[str]:
    yield ""


class Owner:
    @staticmethod
    def static_task() -> None: ...

    def task(self) -> None: ...

    def adds(self, tasks: BackgroundTasks) -> None:
        tasks.add_task(self.task)
        tasks.add_task(self.static_task)
        tasks.add_task(self.made_by_constructor, 1)  # type: ignore[attr-defined]


def adds_named(tasks: BackgroundTasks) -> None:
    tasks.add_task(func=a_task)
    tasks.add_task(explain_app.def_task)
    tasks.add_task(partial(a_task))
    tasks.add_task(lambda: None)


owner = Owner()


def adds_of_object(tasks: BackgroundTasks) -> None:
    tasks.add_task(owner.task)
    tasks.add_task(owner.static_task)


def streams_unknown(items: Any) -> Any:
    return StreamingResponse(items)


def streams_call(items: Any) -> Any:
    return StreamingResponse(content=a_generator())


def hides(tasks: BackgroundTasks) -> Any:
    def inner() -> Any:
        return a_generator()

    return inner


@pytest.mark.parametrize(
    ("func", "found"),
    [
        (Owner.adds, [(Use.TASK, Owner.task), (Use.TASK, Owner.static_task), (Use.TASK, None)]),
        (adds_of_object, [(Use.TASK, Owner.task), (Use.TASK, Owner.static_task)]),
        (streams_unknown, [(Use.STREAM, None)]),
        (streams_call, [(Use.STREAM, a_generator)]),
        (hides, []),
        (len, []),
        (partial(adds_named), []),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_name_is_looked_up_where_the_function_would_find_it(
    func: Callable[..., Any], found: list[tuple[Use, Any]]
) -> None:
    assert [(each.use, each.func) for each in mentions(func, Owner)] == found


def test_a_task_may_be_named_in_several_ways() -> None:
    *named, unnamed = [each.func for each in mentions(adds_named)]

    assert named == [a_task, explain_app.def_task, a_task]
    assert getattr(unnamed, "__name__", "") == "<lambda>"


def test_a_function_without_a_source_hands_over_nothing_that_is_known() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(tasks):\n    tasks.add_task(f)\n", namespace)

    assert list(mentions(namespace["f"])) == []


# The command.

APP = """
import ingress as serve

@serve.deployment
class Model:
    def __call__(self): return 1
    async def predict(self): return 1

model = Model.bind()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


def ingress(folder: Path, *arguments: str, sync: str = "0") -> Any:
    return invoke(folder, "explain", *arguments, **{SYNC_IN_THREADPOOL: sync})


@pytest.mark.parametrize(
    ("sync", "level", "code"), [("0", "warn", 1), ("1", "warn", 0), ("0", "note", 1)]
)
def test_fail_on_is_for_ci(folder: Path, sync: str, level: str, code: int) -> None:
    result = ingress(folder, "app:model", "--fail-on", level, sync=sync)

    assert (result.exit_code, result.stderr) == (code, "")


def test_json_has_each_row(folder: Path) -> None:
    told = json.loads(ingress(folder, "app:model", "--json").stdout)
    call, predict = told["rows"]
    assert told["flags"] == {SYNC_IN_THREADPOOL: 0, USER_CODE_IN_SEPARATE_THREAD: 1}
    deployment = {"name": "Model", "replicas": 1, "max_ongoing_requests": 100, "place": "thread"}
    assert told["deployments"] == [deployment]
    shown = {key: call[key] for key in ("name", "kind", "line", "moves")}
    assert shown == {"name": "Model.__call__", "kind": "def", "line": 6, "moves": True}
    assert call["places"] == {
        "0": {
            "where": "event loop",
            "thread": "Model#N",
            "lane": "",
            "threads": 1,
            "reason": "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=0",
        },
        "1": {
            "where": "threadpool",
            "thread": "Model#N-worker-N",
            "lane": "",
            "threads": 104,
            "reason": "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1",
        },
    }
    assert [each["id"] for each in call["findings"]] == ["def-on-loop"]
    assert (predict["name"], predict["moves"], predict["findings"]) == ("Model.predict", False, [])


@pytest.mark.parametrize("sync", ["0", "1"])
def test_diff_has_only_what_the_flag_moves(folder: Path, sync: str) -> None:
    printed = ingress(folder, "app:model", "--diff", sync=sync).stdout
    told = json.loads(ingress(folder, "app:model", "--diff", "--json", sync=sync).stdout)

    assert [row["name"] for row in told["rows"]] == ["Model.__call__"]
    assert re.search(r"any / +Model.__call__ +def +event loop +threadpool", printed)
    assert "Model.predict" not in printed


def test_what_cannot_be_bound_is_one_line_with_the_fix(folder: Path) -> None:
    write_module(
        folder,
        "misfit",
        "from fastapi import FastAPI\nimport ingress as serve\napp = FastAPI()\n"
        "class A:\n    @app.get('/')\n    def a(self, x: int): ...\n"
        "@serve.deployment\n@serve.ingress(app)\nclass B(A):\n    def a(self): ...\n"
        "misfit = B.bind()\n",
    )
    result = ingress(folder, "misfit:misfit")

    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "must take the same parameters" in line
    assert result.exit_code == 1


def test_help_tells_what_a_row_is(folder: Path) -> None:
    text = ingress(folder, "--help").stdout

    for word in ("--json", "--diff", "--fail-on", "AnyIO thread", "background task"):
        assert word in text


def printed(explanation: Explanation, **options: Any) -> str:
    output = StringIO()
    show(explanation, Output(file=output, width=60, **options))
    return output.getvalue()


def test_a_row_is_a_line_in_a_file_and_fits_a_terminal() -> None:
    explanation = explain(explain_app.app, Settings())

    to_file = printed(explanation).splitlines()
    assert sum(line.startswith("GET /stream ") for line in to_file) == 1
    assert any(len(line) > 100 for line in to_file)
    to_terminal = printed(explanation, force_terminal=True, no_color=True)
    table = re.sub(r"\x1b\[\d*m", "", to_terminal).partition("warn ")[0]
    assert max(map(len, table.splitlines())) <= 60


# Output in the documentation.

BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/explain.md").read_text(), re.MULTILINE | re.DOTALL
)


def without_cores(text: str) -> list[str]:
    """Return the lines, without those about the machine and its Python."""
    of_this_machine = re.compile(r"[\d.]+ cores?: |Python [\d.]+, free-threaded")
    return [line.rstrip() for line in text.splitlines() if not of_this_machine.match(line)]


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    (module,) = [text for language, text in BLOCKS if language == "python"]
    write_module(tmp_path, "shop", module)

    for session in [text for language, text in BLOCKS if language == "console"]:
        command, _, shown = session.partition("\n")
        flag, arguments = re.fullmatch(r"\$ (?:\w+=(\d) )?ingress explain (.*)", command).groups()  # type: ignore[union-attr]
        result = ingress(tmp_path, *arguments.split(), sync=flag or "0")
        assert without_cores(result.stdout) == without_cores(shown), command


def test_the_page_names_each_key_of_the_json() -> None:
    told = as_json(explain(explain_app.app, Settings()))
    text = (ROOT / "docs/explain.md").read_text()
    row = next(row for row in told["rows"] if row["findings"])

    parts = [told, told["deployments"][0], told["native_threads"], told["gil"]]
    for keys in (*parts, row, row["places"]["0"], row["findings"][0]):
        for key in keys:
            assert f"`{key}`" in text


@pytest.mark.skipif(gil.IS_FREE_THREADED, reason="of a Python that always has the GIL")
def test_a_python_that_always_has_the_gil_says_nothing_about_it() -> None:
    assert as_json(explain(explain_app.app, Settings()))["gil"] == {
        "is_on": True,
        "turned_on_by": "",
    }
    assert gil.told() == ""


def test_an_extension_that_turns_the_gil_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython names it in a warning alone; this is its text."""
    text = (
        "The global interpreter lock (GIL) has been enabled to load module 'old.speedups', which "
        "has not declared that it can run safely without the GIL. To override this behavior and "
        "keep the GIL disabled (at your own risk), run with PYTHON_GIL=0 or -Xgil=0."
    )
    shown: dict[Any, Any] = {}
    monkeypatch.setattr(importlib._bootstrap, "__warningregistry__", shown, raising=False)
    assert gil.turned_on_by() == ""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        where = "<frozen importlib._bootstrap>"
        warnings.warn_explicit(text, RuntimeWarning, where, 491, registry=shown)
        assert gil.turned_on_by() == "old.speedups"


def test_the_page_names_each_finding() -> None:
    text = (ROOT / "docs/explain.md").read_text()
    explanation = explain(explain_app.app, Settings(native_threads={OMP_NUM_THREADS: "1000"}))
    found = [*explanation.findings, *(each for row in explanation.rows for each in row.findings)]

    ids = {(each.id, each.level) for each in found}
    assert "oversubscription" in {each.id for each in found}
    assert {level for _, level in ids} == set(Level)
    for id, level in ids:
        assert f"| `{id}` | {level} |" in text
