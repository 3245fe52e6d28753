"""Mistakes are refused at once, with the right error and a message that says what to do.

A message contains the words a user would search for. Cases with the same number are one
mistake.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.requests import Request

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL
from ingress.exceptions import RayServeException
from tests.programs import INGRESS, environment, process, said_by, write_module
from tests.servers import bind, get, result

pytestmark = pytest.mark.usefixtures("shutdown")

SOON_S = 1.0
MOST_LINES = 3


class Model:
    def __init__(self, size: int = 1) -> None:
        self.size = size

    async def __call__(self, request: Request) -> str:
        return "answered"

    async def items(self) -> Any:
        yield "item"


class Empty: ...


class TakesAll:
    def __init__(self, *arguments: Any) -> None: ...


async def function(request: Request) -> str:
    return "answered"


OLDER = "get_deployment"


def deploy(**options: Any) -> Any:
    return serve.deployment(**options)(Model)


def run(target: Any, **options: Any) -> Any:
    return serve.run(target, **{"route_prefix": None, **options})


def with_route() -> Any:
    app = FastAPI()

    class Routed:
        @app.get("/")
        async def route(self) -> None: ...

    return app, Routed


def call_and_route() -> Any:
    app, routed = with_route()
    return serve.ingress(app)(type("Both", (routed,), {"__call__": function}))


def route_without_self() -> Any:
    app = FastAPI()

    class Routed:
        @app.get("/")
        async def route() -> None: ...  # type: ignore[misc]

    return serve.ingress(app)(Routed)


def swapped() -> Any:
    app, routed = with_route()
    deployment: Any = serve.deployment(routed)
    return serve.ingress(app)(deployment)


def batch_over_route() -> Any:
    app = FastAPI()

    class Routed:
        @serve.batch
        @app.get("/")
        async def route(self, items: list[int]) -> list[int]:
            return items

    return serve.ingress(app)(Routed)


def subclass() -> Any:
    deployment: Any = serve.deployment(Model)

    class Other(deployment): ...  # type: ignore[misc]


def both_limits() -> Any:
    return deploy(max_ongoing_requests=1, max_concurrent_queries=1)


def two_with_one_prefix() -> None:
    run(deploy().bind(), name="one", route_prefix="/same")
    run(deploy().bind(), name="two", route_prefix="/same")


def result_in_a_loop() -> None:
    handle = running()

    async def ask() -> None:
        handle.remote(None).result()

    asyncio.run(ask())


def running() -> Any:
    """Return a handle of a deployment that runs."""
    return run(deploy().bind())


def misspelt_handle_option() -> None:
    running().options(method="items")


def bind_in_a_cycle() -> None:
    arguments: list[Any] = []
    first = serve.deployment(name="First")(TakesAll).bind(arguments)
    arguments.append(serve.deployment(name="Second")(TakesAll).bind(first))
    run(first)


def busy_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        serve.start({"port": busy.getsockname()[1]})


def bad_host() -> None:
    serve.start({"host": "256.0.0.1", "port": 0})


def batch_of(results: Any) -> Callable[[], None]:
    """Return the mistake of a batch handler that returns these results for two items."""

    def mistake() -> None:
        class Batched:
            @serve.batch(max_batch_size=2, batch_wait_timeout_s=5)
            async def __call__(self, items: list[int]) -> Any:
                return results

        handle = run(serve.deployment(Batched).bind())
        both = [handle.remote(1), handle.remote(2)]
        for each in both:
            with pytest.raises(Exception):  # noqa: B017
                result(each)
        result(both[0])

    return mistake


def wrong_batch(**options: Any) -> Callable[[], Any]:
    return lambda: serve.batch(**options)(lambda items: items)


Mistake = Callable[[], Any]
EITHER = (ValueError, TypeError)
CASES: list[tuple[int, Mistake, Any, list[str]]] = [
    (
        1,
        lambda: serve.ingress(FastAPI())(cast(Any, function)),
        ValueError,
        ["must be used with a class"],
    ),
    (2, call_and_route, ValueError, ["__call__"]),
    (3, swapped, TypeError, ["@serve.deployment above @serve.ingress"]),
    (4, lambda: serve.ingress(Model), TypeError, ["@serve.ingress(app)"]),
    (5, lambda: serve.ingress(None)(Empty), ValueError, ["Empty", "__serve_build_asgi_app__"]),
    (6, lambda: serve.ingress("app")(Model), TypeError, ["str", "FastAPI"]),
    (7, route_without_self, RayServeException, ["self", "route"]),
    (8, lambda: serve.deployment(Model()), TypeError, ["class or function"]),
    (9, lambda: deploy()(), RuntimeError, ["bind("]),
    (10, lambda: run(deploy()), TypeError, ["bind()"]),
    *(
        (11, lambda n=n: deploy(num_replicas=n), EITHER, ["num_replicas", repr(n)])
        for n in (0, -1, 1.5, True, "many")
    ),
    (
        12,
        lambda: deploy(num_replicas=1, autoscaling_config={"min_replicas": 1}),
        ValueError,
        ["Manually setting num_replicas is not allowed"],
    ),
    (13, lambda: deploy(max_ongoing_requests=None), ValueError, ["null"]),
    *(
        (13, lambda n=n: deploy(max_ongoing_requests=n), EITHER, ["max_ongoing_requests", repr(n)])
        for n in (0, -1, "5", True, float("nan"))
    ),
    *(
        (
            14,
            lambda n=n: deploy(max_queued_requests=n),
            EITHER,
            ["max_queued_requests", repr(n), "-1"],
        )
        for n in (0, -2, 1.5)
    ),
    (15, lambda: deploy(max_ongoing_request=1), TypeError, ["max_ongoing_requests"]),
    (15, both_limits, EITHER, ["max_concurrent_queries"]),
    (
        16,
        lambda: deploy(autoscaling_config={"min_replicas": 3, "max_replicas": 2}),
        ValueError,
        ["3", "2"],
    ),
    *((17, lambda n=n: deploy(name=n), EITHER, ["name", repr(n)]) for n in ("a#b", "", 7)),
    *(
        (18, lambda p=p: run(deploy().bind(), route_prefix=p), ValueError, ["route_prefix"])
        for p in ("api", "/api/", "/{x}")
    ),
    (19, two_with_one_prefix, RayServeException, ["one", "/same"]),
    (20, lambda: serve.deployment(function).bind(1), ValueError, ["function deployments"]),  # type: ignore[call-arg]
    (21, lambda: deploy().bind(1, 2, 3), TypeError, ["size"]),
    (22, lambda: run(deploy(user_config={}).bind()), ValueError, ["Model", "reconfigure"]),
    (23, lambda: deploy(user_config={"a": [object()]}), ValueError, ["a"]),
    (24, lambda: serve.batch(cast(Any, 7)), TypeError, ["7"]),
    *(
        (25, wrong_batch(max_batch_size=n), EITHER, ["max_batch_size", repr(n)])
        for n in (0, 1.5, "8")
    ),
    *(
        (25, wrong_batch(batch_wait_timeout_s=n), EITHER, ["batch_wait_timeout_s", repr(n)])
        for n in (-1, float("nan"))
    ),
    (25, wrong_batch(max_concurrent_batches=0), EITHER, ["max_concurrent_batches"]),
    *(
        (26, batch_of(results), Exception, ["batch"])
        for results in ([1], [1, 2, 3], None, {"a": 1}, (x for x in "ab"))
    ),
    (28, batch_over_route, TypeError, ["route"]),
    (29, result_in_a_loop, RuntimeError, ["asyncio", "await"]),
    (30, lambda: result(running().items.remote()), TypeError, ["stream=True"]),
    (30, lambda: [*running().options(stream=True).remote(None)], TypeError, ["stream"]),
    (31, lambda: running().itemz.remote(), AttributeError, ["itemz", "items"]),
    (31, lambda: running()._items.remote(), AttributeError, ["options(method_name='_items')"]),
    (32, serve.get_replica_context, RayServeException, ["may only be called from within"]),
    (36, busy_port, RuntimeError, ["Failed to bind to address", "127.0.0.1"]),
    (36, bad_host, RuntimeError, ["host must be an address of this machine", "256.0.0.1"]),
    (37, lambda: deploy().remote(1), AttributeError, ["serve.run(Name.bind())"]),
    (37, lambda: deploy().deploy(), AttributeError, ["serve.run(Name.bind(...)) starts it"]),
    (37, lambda: deploy().get_handle(), AttributeError, ["returns its handle"]),
    (37, lambda: getattr(serve, OLDER), AttributeError, ["get_deployment_handle("]),
    (37, lambda: serve.delete(cast(Any, ["a"])), TypeError, ["name of one application", "['a']"]),
    (38, lambda: deploy().bind().bind(), AttributeError, ["it is bound already"]),
    (38, lambda: deploy().bind().remote(1), AttributeError, ["handle = serve.run(app)"]),
    (39, lambda: running()(1), TypeError, ["'Model'", "not callable", "handle.remote(...)"]),
    (39, lambda: running().items(1), TypeError, ["handle.items.remote(...)"]),
    (40, wrong_batch(batch_size=8), TypeError, ["'batch_size'", "did you mean max_batch_size?"]),
    (41, misspelt_handle_option, TypeError, ["'method'", "did you mean method_name?"]),
    (
        42,
        lambda: serve.LoggingConfig(log_level="nope"),
        ValueError,
        ["log_level must be DEBUG, INFO", "'nope'"],
    ),
    (43, bind_in_a_cycle, ValueError, ["First -> Second -> First", "get_deployment_handle"]),
    (45, subclass, TypeError, ["func_or_class"]),
]


@pytest.mark.reliability("C09")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("mistake", "types", "parts"), [pytest.param(*case, id=f"{number}") for number, *case in CASES]
)
def test_a_mistake_is_refused_where_it_is_made(
    mistake: Mistake, types: Any, parts: list[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(types) as refused:
        mistake()

    assert time.monotonic() - began < SOON_S
    said = str(refused.value)
    assert [part for part in parts if part not in said] == [], said
    assert len(said.splitlines()) <= MOST_LINES


@pytest.mark.reliability("C09")
def test_a_flag_that_is_neither_0_nor_1_is_refused_when_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "yes")
    with pytest.raises(ValueError, match=re.escape("0 or 1, got 'yes'")):
        run(bind(serve.deployment(Model)))


# At the command line: the user's line and one last line, of a module that begins with HEAD.

HEAD = """\
import sys
from fastapi import FastAPI, UploadFile
import ingress as serve

@serve.deployment
class A:
    def __init__(self, *children):
        self.children = children

app = FastAPI()
"""

NO_MULTIPART = """\
sys.modules['python_multipart'] = sys.modules['multipart'] = None
@app.post('/upload')
def upload(file: UploadFile): ...
"""

# The line with the mistake, the words of the last line, and the lines that are said.
MODULES: dict[str, tuple[str, list[str], int]] = {
    "option": (
        "serve.deployment(num_replica=2)(A.func_or_class)",
        ["TypeError: unexpected keyword argument 'num_replica'; did you mean num_replicas?"],
        3,
    ),
    "value": ("serve.deployment(num_replicas=0)", ["num_replicas must be", "got 0"], 3),
    "remote": ("A.remote()", ["serve.run(Name.bind())"], 3),
    "bound-twice": ("A.bind().bind()", ["it is bound already"], 3),
    "batch": ("serve.batch(batch_size=3)", ["did you mean max_batch_size?"], 3),
    "batch-in-a-class": (
        "class B:\n    @serve.batch(max_batch_size=0)\n    async def __call__(self, all): ...",
        ["ValueError: max_batch_size must be an integer >= 1, got 0"],
        3,
    ),
    "models": (
        "class B:\n    @serve.multiplexed(max_models=2)\n    async def load(self, name): ...",
        ["keyword argument 'max_models'; did you mean max_num_models_per_replica?"],
        3,
    ),
    "logging": ("serve.LoggingConfig(log_level='nope')", ["DEBUG, INFO, WARNING", "'nope'"], 3),
    "llm": ("from ingress.llm import LLMConfig", ["ingress has no 'llm'; write a deployment"], 3),
    "syntax": ("class B", ["SyntaxError: expected ':'"], 3),
    "library": ("import json; json.loads('{')", ["JSONDecodeError: Expecting property name"], 3),
    "name": ("bound = a.bind()", ["NameError: name 'a' is not defined. Did you mean: 'A'?"], 3),
    "attribute": (
        "serve.deploymnt(A)",
        ["no attribute 'deploymnt'. Did you mean: 'deployment'?"],
        3,
    ),
    "module": ("import no_such_module", ["No module named 'no_such_module'"], 3),
    "exit": ("B = A.func_or_class(1).child", ["has no attribute 'child'"], 3),
    "multipart": (
        NO_MULTIPART,
        ["Error: ", ".py:12: forms and uploads need python-multipart", "pip install"],
        1,
    ),
    "cycle": (
        "bound = A.bind([]); bound.init_args[0].append(A.options(name='B').bind(bound))",
        ["Error: bind() makes a cycle: A -> B -> A"],
        1,
    ),
    "two-apps": (
        "from a_module_with_a_typo import *",
        ["No module named 'a_module_with_a_typo'"],
        3,
    ),
    "constructor": (
        "class Bad:\n    def __init__(self): self.n = 1 / 0\nbound = serve.deployment(Bad).bind()",
        ["Deploying application 'default' failed: deployment 'Bad'", "ZeroDivisionError"],
        3,
    ),
    "no-method": (
        "@serve.deployment\nclass B:\n    def __init__(self, a): a.run()\nbound = B.bind(A.bind())",
        ["deployment 'A' has no method 'run'. Its one call is handle.remote(...)"],
        3,
    ),
    "handle": (
        "class Bad:\n    def __init__(self, a): a(1)\nbound = serve.deployment(Bad).bind(A.bind())",
        ["deployment 'Bad' failed to start: TypeError: a handle of deployment 'A' is not callable"],
        3,
    ),
}


def said_of(folder: Path, *sources: str) -> list[tuple[int, list[str]]]:
    """Return the exit code and the lines that `ingress run` prints, for each of these modules."""
    for number, source in enumerate(sources):
        write_module(folder, f"mistaken{number}", source)
    words = [["run", f"mistaken{each}:bound", "--port", "0"] for each in range(len(sources))]
    return [(code, lines) for code, _, lines in said_by(folder, *words)]


def test_a_mistake_in_a_module_is_the_users_line_and_one_last_line(tmp_path: Path) -> None:
    said = said_of(tmp_path, *(HEAD + mistake for mistake, *_ in MODULES.values()))

    wrong = {}
    for number, ((code, lines), name) in enumerate(zip(said, MODULES, strict=True)):
        mistake, parts, count = MODULES[name]
        print(f"{mistake}\n  " + "\n  ".join(lines) + "\n")
        is_placed = count == 1 or (
            lines[0].startswith(f'  File "{tmp_path}/mistaken{number}.py", line ')
            and lines[1].strip() in mistake
        )
        is_said = bool(lines) and all(part in lines[-1] for part in parts)
        if not (code == 1 and len(lines) == count <= MOST_LINES and is_placed and is_said):
            wrong[name] = code, lines
    assert wrong == {}


BROKEN = """
import asyncio, os, sys
import ingress as serve

@serve.deployment(isolation="{isolation}")
class Bad:
    async def __init__(self):
        {line}

bound = Bad.bind()
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_failing_constructor_is_told_with_all_its_lines_and_causes(
    tmp_path: Path, isolation: str
) -> None:
    lines = (
        "raise ValueError('no model:\\n  at /a')",
        "raise ValueError('no model') from KeyError('/a')",
        "await asyncio.wait_for(asyncio.gather(asyncio.to_thread(int, 'a')), 9)",
        "raise ExceptionGroup('several', [ValueError('no model'), KeyError('/a')])",
        *(
            ["print('last', 'words', sep=os.linesep, file=sys.stderr); os._exit(3)"]
            * (isolation[0] == "p")
        ),
    )
    said = said_of(tmp_path, *(BROKEN.format(isolation=isolation, line=line) for line in lines))

    failed = (
        "RuntimeError: Deploying application 'default' failed: deployment 'Bad' failed to start:"
    )
    assert all(code == 1 for code, _ in said)
    several, caused, library, group, *ended = [told for _, told in said]
    assert several[-2:] == [f"{failed} ValueError: no model:", "  at /a"]
    assert caused[:2] == ["KeyError: '/a'", "which caused:"]
    assert caused[-1] == f"{failed} ValueError: no model"
    assert library[1].strip() in lines[2]
    assert {"    | ValueError: no model", "    | KeyError: '/a'"} <= {*group}
    assert group[-1] == f"{failed} ExceptionGroup: several (2 sub-exceptions)"
    for told in ended:
        assert told[-3:] == ["The last lines of its output:", "last", "words"]


def test_an_error_has_its_cause_and_only_the_frames_of_the_user(tmp_path: Path) -> None:
    source = """
import json
def read(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise RuntimeError("no settings") from error
read("{")
"""
    ((code, lines),) = said_of(tmp_path, source)

    assert code == 1
    file = f'  File "{tmp_path}/mistaken0.py", line '
    assert lines == [
        f"{file}5, in read",
        "    return json.loads(text)",
        lines[2],
        "which caused:",
        f"{file}8, in <module>",
        '    read("{")',
        f"{file}7, in read",
        '    raise RuntimeError("no settings") from error',
        "RuntimeError: no settings",
    ]
    assert lines[2].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_ctrl_c_while_a_module_is_imported_is_one_line(tmp_path: Path) -> None:
    source = "import threading\nprint('imports', flush=True)\nthreading.Event().wait()\n"
    write_module(tmp_path, "slow", source)
    with process([*INGRESS, "run", "slow:app"], tmp_path, environment(tmp_path)) as server:
        server.wait_for("imports")
        server.signal(signal.SIGINT)

        assert server.wait() == 130
    _, line = server.output.splitlines()
    assert line == f"Error: interrupted while 'slow' was imported, at {tmp_path}/slow.py:3"


UNUSED = """
import ingress as serve

@serve.deployment(ray_actor_options={"num_gpus": 1})
class Idle:
    def __call__(self, request): return "idle"

idle = Idle.bind()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ["explain", "unused:idle"],
        ["run", "unused:idle", "--port", "0"],
        ["run", "unused:idle", "--port", "0", "--workers", "2"],
    ],
    ids=["explain", "run", "workers"],
)
def test_a_warning_is_said_once_at_the_users_line(tmp_path: Path, command: list[str]) -> None:
    write_module(tmp_path, "unused", UNUSED)
    unused = {"RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S": "9", "RAY_SERVE_KV_TIMEOUT_S": "5"}
    misspelt = {"INGRESS_TRASE": "x", "RAY_SERVE_RUN_SYNC_IN_THREADPOL": "1"}
    environ = {**environment(tmp_path), **unused, **misspelt}
    with process([*INGRESS, *command], tmp_path, environ) as server:
        if command[0] == "run":
            server.wait_for("is ready")
            assert get(server.port, "/").body == b"idle"
            server.signal()
        assert server.wait() == 0
        output = server.output

    warning = f"{tmp_path}/unused.py:4: OptionNotActedOnWarning: deployment 'Idle' has options"
    assert output.count(warning) == 1
    assert output.count("OptionNotActedOnWarning") == 1
    assert output.count("INGRESS_TRASE has no effect; did you mean INGRESS_TRACE?") == 1
    meant = "RAY_SERVE_RUN_SYNC_IN_THREADPOL has no effect; did you mean RAY_SERVE_RUN_SYNC_IN_T"
    assert output.count(meant) == 1
    lines = [line for line in output.splitlines() if "KEEP_ALIVE_TIMEOUT_S" in line]
    assert len(lines) == (command[0] == "run")
    for line in lines:
        assert "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S (give " in line
        assert ", RAY_SERVE_KV_TIMEOUT_S have " in line
        assert "have no effect in this process; on Ray, Ray Serve's own variables have one" in line
    blocking = f"{tmp_path}/unused.py:6: SyncMethodOnEventLoopWarning: RAY_SERVE_RUN_SYNC"
    assert output.count(blocking) == (command[0] == "run")
    assert output.count("Calling sync method") == (command[0] == "run")
