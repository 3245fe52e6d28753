"""`ingress run` and `ingress openapi`: their output, and one clear line for each mistake."""

from __future__ import annotations

import json
import socket
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD
from tests.servers import (
    environment,
    get,
    ingress_run,
    invoke,
    run_ingress,
    run_python,
    wait_until,
    write_module,
)

APP = """
from fastapi import FastAPI, WebSocket
import ingress as serve
app = FastAPI()

@serve.deployment(num_replicas=2, max_ongoing_requests=7, max_queued_requests=9)
@serve.ingress(app)
class Hello:
    @app.get("/sync")
    def sync_endpoint(self, name: str = "you"): return f"hi {name}"
    @app.post("/async")
    async def async_endpoint(self): return "hi"
    @app.websocket("/ws")
    async def chat(self, websocket: WebSocket): ...

hello = Hello.bind()

@serve.deployment
class Plain:
    def __call__(self): return "x"

plain = Plain.bind()

class Undecorated: ...
undecorated = Undecorated()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    write_module(
        tmp_path,
        "misfit",
        "import ingress as serve\n@serve.deployment(user_config={'a': 1})\nclass F: ...\n"
        "misfit = F.bind()\n",
    )
    return tmp_path


def told(result: Any) -> str:
    """Return the one line with which a command failed."""
    (line,) = result.stderr.splitlines()
    assert (result.exit_code if hasattr(result, "exit_code") else result.returncode) == 1
    return str(line)


def test_run_starts_and_prints_where_everything_is(folder: Path) -> None:
    began = time.monotonic()
    with ingress_run(folder, "app:hello") as run:
        run.wait_for("Application 'default' is ready at http://127.0.0.1")
        print(f"\nstarted in {time.monotonic() - began:.2f} s")
        lines = [line.split() for line in run.output.splitlines()]

        assert ["Hello", "2", "7", "9"] in lines
        rows = {line[0] + " " + line[1]: " ".join(line[2:]) for line in lines if len(line) > 3}
        assert rows["GET /sync"] == "Hello.sync_endpoint def threadpool"
        assert rows["POST /async"] == "Hello.async_endpoint async def event loop"
        assert rows["WS /ws"] == "Hello.chat async def event loop"
        assert get(run.port, "/sync").body == b'"hi you"'
        run.signal()
        assert run.wait() == 0


@pytest.mark.parametrize(
    ("sync", "where"),
    [pytest.param("0", "event loop", marks=pytest.mark.thorough), ("1", "threadpool")],
)
def test_run_says_where_a_plain_def_runs_by_the_flag(folder: Path, sync: str, where: str) -> None:
    with ingress_run(folder, "app:plain", environ=environment(folder, sync=sync)) as run:
        run.wait_for("is ready")

        assert f"Plain.__call__  def      {where}" in run.output
        assert f"RAY_SERVE_RUN_SYNC_IN_THREADPOOL={sync}, as set" in run.output


MISTAKES = {
    "no-colon": ("app", "is not of the form MODULE:APP"),
    "a-file": ("app.py:hello", "it is main:hello"),
    "a-path": ("./app:hello", "is not of the form MODULE:APP"),
    "no-attribute-given": ("app:", "is not of the form MODULE:APP"),
    "no-module": ("nothing:hello", "there is no module 'nothing' in"),
    "no-attribute": ("app:helo", "has no attribute 'helo'; it has hello, plain"),
    "unbound": ("app:Hello", "is a deployment; bind it: app = Hello.bind(...)"),
    "fastapi": ("app:app", "is a FastAPI object, not a bound application; did you mean app:hello"),
    "class": ("app:Undecorated", "decorate its class with @serve.deployment and bind it"),
    "instance": ("app:undecorated", "is an Undecorated object, not a bound application"),
    "no-reconfigure": ("misfit:misfit", "reconfigure"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_target_is_one_line_with_the_fix(folder: Path, target: str, message: str) -> None:
    line = told(run_ingress(folder, "run", target, "--port", "0"))
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize("text", [":x:", "[red]b[/red]", "[/b]", ":smile:/[link=x]"])
def test_an_error_has_the_users_text_as_it_is(folder: Path, text: str) -> None:
    assert f"'http://{text}' is not of the form" in told(
        invoke(folder, "explain", f"http://{text}")
    )


LONG = """
import ingress as serve
from fastapi import FastAPI
app = FastAPI()

@serve.deployment(name=":x:" + "long_" * 20, autoscaling_config={"min_replicas": 0})
@serve.ingress(app)
class Api:
    @app.get("/" + "long/" * 20)
    async def get(self): ...

api = Api.bind()
"""


def test_in_a_pipe_each_row_is_a_whole_line_and_says_what_the_status_says(folder: Path) -> None:
    write_module(folder, "long", LONG)
    name, environ = ":x:" + "long_" * 20, {**environment(folder), "COLUMNS": "80"}
    with ingress_run(folder, "long:api", environ=environ) as run:
        run.wait_for("is ready")
        status = run_ingress(folder, "status", "--pid", str(run.process.pid), COLUMNS="80")

        assert f"{name}  0         100          no limit" in run.output
        assert f"GET /{'long/' * 20}  Api.get  async def" in run.output
        assert [line.split()[:3] for line in status.stdout.splitlines() if name in line] == [
            [name, "HEALTHY", "0"]
        ]
    assert f"{name}  0 replicas x 100" in invoke(folder, "explain", "long:api", COLUMNS="80").stdout


TESTED = """
from fastapi.testclient import TestClient
from app import hello
with TestClient(hello) as client:
    print(client.get("/sync").json(), client.post("/async").json())
"""
ALONE = """
import ingress as serve

@serve.deployment(isolation="process")
class Alone:
    def __call__(self): return "alone"

alone = Alone.bind()
"""


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_another_system_has_all_that_needs_no_part_of_unix(folder: Path, system: str) -> None:
    write_module(folder, "sitecustomize", "import tests.simulated_system")
    write_module(folder, "tested", TESTED)
    write_module(folder, "alone", ALONE)
    environ = {**environment(folder), "SIMULATED_SYSTEM": system}

    def said(*arguments: str) -> str:
        result = run_ingress(folder, *arguments, SIMULATED_SYSTEM=system)
        return f"{result.returncode}\n{result.stdout}{result.stderr}"

    client = run_python("tested.py", folder=folder, SIMULATED_SYSTEM=system)
    assert (client.stdout, client.stderr) == ("hi you hi\n", "")
    for command in ("explain", "check"):
        assert said(command, "app:hello").startswith("0\n")
    with ingress_run(folder, "app:hello", environ=environ) as run:
        run.wait_for("is ready at http://127.0.0.1")
        assert get(run.port, "/sync").body == b'"hi you"'
        run.signal()
        assert run.wait() == 0
    assert "Traceback" not in run.output
    if system == "win32":
        assert "there are no control sockets on Windows" in said("status")
        assert "has no Unix domain sockets" in said("run", "app:hello", "--uds", "s")
        assert "which Windows does not support" in said("run", "alone:alone")
    else:
        with ingress_run(folder, "alone:alone", environ=environ) as run:
            run.wait_for("is ready at http://127.0.0.1")
            assert get(run.port, "/").body == b"alone"


def test_a_busy_port_is_one_line_with_the_fix(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = told(run_ingress(folder, "run", "app:hello", "--port", str(port)))

    assert f"Error: Failed to bind to address '127.0.0.1:{port}'" in line
    assert "choose another port" in line


def test_a_bad_host_is_one_line(folder: Path) -> None:
    options = ("--host", "no.such.host.invalid", "--port", "0")
    line = told(run_ingress(folder, "run", "app:hello", *options))
    assert "Failed to bind to address 'no.such.host.invalid:0'" in line


@pytest.mark.parametrize(("option", "value"), [("--port", "99999"), ("--workers", "0")])
def test_a_number_out_of_range_is_refused_by_name(folder: Path, option: str, value: str) -> None:
    result = invoke(folder, "run", "app:hello", option, value)

    assert f"Invalid value for '{option}': {value} is not in the range" in result.stderr
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "command",
    [
        "run app:hello --drain-delay",
        "run app:hello --min-body-rate",
        "memory --seconds",
        "profile --seconds",
        "stop --wait --timeout",
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_not_finite_is_refused_by_name(
    folder: Path, command: str, value: str
) -> None:
    result = invoke(folder, *command.split(), value)

    assert f"Invalid value for '{command.split()[-1]}': {value} is not" in result.stderr
    assert result.exit_code == 2


NO_FLAG = "must be 0 or 1, got 'yes'; set it to 0 or 1, or unset it"
NO_ENGINE = "must be local or ray, got 'yes'; set it to one of these, or unset it"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (SYNC_IN_THREADPOOL, NO_FLAG),
        (USER_CODE_IN_SEPARATE_THREAD, NO_FLAG),
        ("INGRESS_ENGINE", NO_ENGINE),
    ],
)
@pytest.mark.parametrize("extra", [[], ["--workers", "2"]], ids=["one", "workers"])
def test_a_bad_variable_is_one_line_that_names_it(
    folder: Path, name: str, problem: str, extra: list[str]
) -> None:
    ran = run_ingress(folder, "run", "app:hello", "--port", "0", *extra, **{name: "yes"})
    assert told(ran) == f"Error: {name} {problem}"


def test_app_dir_is_where_the_module_is_looked_for(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with ingress_run(elsewhere, "app:hello", "--app-dir", str(folder)) as run:
        assert get(run.port, "/sync").status == 200

    assert "is a file" in run_ingress(folder, "run", "app:hello", "--app-dir", "app.py").stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["openapi", "--help"], []]
)
def test_help_tells_what_there_is(folder: Path, arguments: list[str]) -> None:
    result = invoke(folder, *arguments)

    text = result.stdout + result.stderr
    assert "Usage" in text
    options = {
        "run": ["--host", "--port", "--reload", "--workers", "--app-dir"],
        "check": ["--migrate", "--format", "--app-dir"],
    }
    for word in options.get(arguments[0] if len(arguments) == 2 else "", []):
        assert word in text


@pytest.mark.parametrize(
    "command",
    ["run", "check", "explain", "status", "top", "reload", "scale", "stop", "memory", "trace"],
)
def test_the_help_names_options_whole_on_80_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(folder, command, "--help").stdout

    assert max(map(len, text.splitlines())) == 80
    assert "…" not in text
    prose = [line.rstrip() for line in text.partition("╭")[0].splitlines()]
    for line, following in pairwise(prose):
        ends = not line or line.endswith((".", ":")) or not following
        assert ends or "  " in line.strip() or " ingress " in line or len(line) > 60, line


@pytest.mark.parametrize("arguments", [["-h"], ["run", "-h"], ["explain", "-h"]])
def test_h_is_help(folder: Path, arguments: list[str]) -> None:
    result = invoke(folder, *arguments)

    assert "Usage: ingress" in result.stdout
    assert result.exit_code == 0


def test_the_version_is_printed_as_that_of_the_package(folder: Path) -> None:
    assert invoke(folder, "--version").stdout == f"ingress {serve.__version__}\n"


@pytest.mark.thorough
def test_a_shell_completes_the_commands_and_their_options(folder: Path) -> None:
    shown = run_ingress(folder, "--show-completion", "bash")
    assert "_INGRESS_COMPLETE=complete_bash" in shown.stdout

    def completions(words: str) -> list[str]:
        number = str(len(words.split(" ")) - 1)
        asked = {"_INGRESS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
        return run_ingress(folder, **asked).stdout.split()

    assert completions("ingress ex") == ["explain"]
    assert completions("ingress run --rel") == ["--reload"]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["explain", "check"])
def test_json_is_asked_for_by_the_same_option(folder: Path, command: str) -> None:
    assert "findings" in json.loads(run_ingress(folder, command, "app:hello", "--json").stdout)


def test_build_prints_what_it_writes_to_a_file(folder: Path) -> None:
    printed = invoke(folder, "build", "app:hello")
    written = invoke(folder, "build", "app:hello", "-o", "serve.yaml")

    assert (folder / "serve.yaml").read_text() == printed.stdout
    (application,) = yaml.safe_load(printed.stdout)["applications"]
    assert application["args"] == {"target": "app:hello"}
    assert (printed.exit_code, written.exit_code, written.stdout) == (0, 0, "")


def test_openapi_writes_the_schema_and_starts_nothing(folder: Path) -> None:
    printed = invoke(folder, "openapi", "app:hello")
    written = invoke(folder, "openapi", "app:hello", "-o", "schema.json")

    schema = json.loads(printed.stdout)
    assert list(schema["paths"]) == ["/sync", "/async"]
    assert json.loads((folder / "schema.json").read_text()) == schema
    assert (printed.exit_code, written.exit_code, written.stdout) == (0, 0, "")


FILE = """
applications:
- {name: one, route_prefix: /one, import_path: app:hello}
- {name: two, route_prefix: /two, import_path: app:hello}
"""


def test_check_explain_and_openapi_take_a_file(folder: Path) -> None:
    (folder / "serve.yaml").write_text(FILE)
    explained = invoke(folder, "explain", "serve.yaml", "--json")
    checked = invoke(folder, "check", "serve.yaml", "--json")
    schema = invoke(folder, "openapi", "serve.yaml", "--name", "two")
    several = invoke(folder, "openapi", "serve.yaml")

    alone = json.loads(invoke(folder, "explain", "app:hello", "--json").stdout)
    assert json.loads(explained.stdout) == {"applications": {"one": alone, "two": alone}}
    assert (checked.exit_code, json.loads(checked.stdout)["findings"]) == (0, [])
    assert list(json.loads(schema.stdout)["paths"]) == ["/sync", "/async"]
    assert "choose one application with --name: one, two" in told(several)


@pytest.mark.parametrize("command", ["check", "explain"])
def test_an_error_is_one_object_of_json_too(folder: Path, command: str) -> None:
    (folder / "serve.yaml").write_text("applications: 1")
    result = invoke(folder, command, "serve.yaml", "--json")

    assert "applications" in json.loads(result.stdout)["error"]
    assert result.exit_code != 0


def test_a_file_that_cannot_be_parsed_is_not_without_findings(folder: Path) -> None:
    (folder / "broken.py").write_text("def (")
    result = invoke(folder, "check", "broken.py")

    assert (result.exit_code, "Python cannot parse broken.py" in result.stderr) == (2, True)


def test_a_notebook_is_not_without_findings(folder: Path) -> None:
    (folder / "notebook.ipynb").write_text('{"cells": []}')  # an expression of Python
    result = invoke(folder, "check", "notebook.ipynb")

    assert "'notebook.ipynb' is a notebook, which is not read; name a .py file" in result.stderr
    assert result.exit_code == 2


def test_openapi_of_a_plain_deployment_is_one_line(folder: Path) -> None:
    assert "'Plain' has no OpenAPI schema" in told(invoke(folder, "openapi", "app:plain"))


def test_openapi_to_a_folder_that_is_not_there_is_one_line(folder: Path) -> None:
    result = invoke(folder, "openapi", "app:hello", "-o", "no/such/folder/schema.json")
    assert told(result).startswith("Error: ")
    assert told(result).endswith("; give another path")


def test_run_shows_a_deprecated_option_once_with_its_line(tmp_path: Path) -> None:
    source = """
import ingress as serve

@serve.deployment(max_concurrent_queries=8)
def old():
    return "ok"

app = old.bind()
"""
    write_module(tmp_path, "older", source)
    with ingress_run(tmp_path, "older:app") as server:
        wait_until(lambda: "is ready at" in server.output)

    assert server.output.count("older.py:4: DeprecationWarning: max_concurrent_queries is") == 1


WRAPPED = """
import functools
from types import SimpleNamespace
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount
import ingress as serve

app = FastAPI()

class Named(BaseHTTPMiddleware):
    def __init__(self, app):
        super().__init__(app)
        self.outermost = self  # a way back, and settings that are never called
        self.settings = SimpleNamespace(app=app)

    async def dispatch(self, request, call_next):
        response = await call_next(request)
        response.headers["x-path"] = request.url.path
        return response

class Pure:
    __slots__ = ("inner",)
    def __init__(self, inner): self.inner = inner
    async def __call__(self, scope, receive, send): await self.inner(scope, receive, send)

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Large:
    @app.get("/large")
    async def large(self): return "x" * 2000

bound = Large.bind()
wrapped = CORSMiddleware(GZipMiddleware(Named(Pure(bound))), allow_origins=["https://a.example"])

@serve.deployment
class Plain:
    def __call__(self): return "x"

plain = Pure(Plain.bind())

class Itself(Pure):
    __slots__ = ("call",)
    def __init__(self, inner):
        super().__init__(inner)
        self.call = self.run
    async def run(self, scope, receive, send): await self.inner(scope, receive, send)
    async def __call__(self, scope, receive, send): await self.call(scope, receive, send)

itself = Itself(bound)

def outer(inner):
    async def call(scope, receive, send): await inner(scope, receive, send)
    return call

closed = outer(bound)
async def by_name(scope, receive, send): await bound(scope, receive, send)
part = functools.partial(Pure.__call__, Pure(bound))
mounted = Starlette(routes=[Mount("/api", bound)])
"""

TWICE = """
applications:
  - {name: one, route_prefix: /one, import_path: "app:wrapped"}
  - {name: two, route_prefix: /two, import_path: "app:bound"}
"""


def test_an_application_that_middleware_is_around_is_served_with_it(tmp_path: Path) -> None:
    write_module(tmp_path, "app", WRAPPED)
    with ingress_run(tmp_path, "app:wrapped") as server:
        origin = {"origin": "https://a.example"}
        answer = httpx.get(f"{server.url}/large", headers=origin)
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["x-path"] == "/large"
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        preflight = httpx.options(
            f"{server.url}/large", headers=origin | {"access-control-request-method": "GET"}
        )
        assert preflight.status_code == 200
        assert "x-path" not in preflight.headers


@pytest.mark.parametrize("name", ["plain", "itself", "closed", "by_name", "part", "mounted"])
def test_middleware_that_cannot_be_a_layer_of_an_app_is_refused_with_the_way_to_write_it(
    tmp_path: Path, name: str
) -> None:
    write_module(tmp_path, f"app_{name}", WRAPPED)
    line = " ".join(told(invoke(tmp_path, "explain", f"app_{name}:{name}")).split())
    way = "give the path of its mount by --route-prefix"
    if name != "mounted":
        way = "give the middleware to the FastAPI app, app.add_middleware("
    assert f"what is around this application is not served: {way}" in line
    assert f"or serve both by uvicorn app_{name}:{name}" in line


def test_middleware_around_one_application_is_not_around_another_of_its_app(
    tmp_path: Path,
) -> None:
    write_module(tmp_path, "app", WRAPPED)
    (tmp_path / "serve.yaml").write_text(TWICE)
    ran = run_ingress(tmp_path, "explain", "serve.yaml")
    assert ran.returncode
    assert "named twice, with different middleware around it" in " ".join(told(ran).split())
