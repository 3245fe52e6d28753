"""The private names of other libraries: what is missing is named, or is slower and says so."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import fastapi
import pytest
import starlette
from starlette.types import Message

from ingress.app.asgi.compat import FILE, STOOD_IN_FOR, fingerprint
from ingress.serving.http.uvicorn_connection import send_chunks, shorten
from tests.servers import ROOT

# Libraries in which patterns are replaced, also as `inspect.getsource` shows them.
REWRITTEN = """
import linecache, re
from importlib.machinery import SourceFileLoader

get_code = SourceFileLoader.get_code

def rewritten(loader, module):
    patterns = PATTERNS.get(module.partition(".")[0])
    if patterns is None:
        return get_code(loader, module)
    source = text = loader.get_data(loader.path).decode()
    for pattern, replacement in patterns.items():
        text = re.sub(pattern, replacement, text)
    if text == source:
        return get_code(loader, module)
    linecache.cache[loader.path] = (len(text), None, text.splitlines(keepends=True), loader.path)
    return compile(text, loader.path, "exec", dont_inherit=True)

SourceFileLoader.get_code = rewritten
"""

SERVED = """
import importlib.util
import ingress as serve
from fastapi import APIRouter, Depends, FastAPI, Form, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

class Item(BaseModel):
    price: int

def path_of(request: Request):
    return request.url.path

router = APIRouter()
app = FastAPI()
app.state.tax = 3

@serve.deployment
@serve.ingress(app)
class Shop:
    def __init__(self):
        self.price = 7

    def owner(self):
        return "owner" + str(self.price)

    @app.get("/items/{number}")
    async def item(self, request: Request, number: int, tax: int = 0):
        return number * self.price + tax + request.app.state.tax

    @app.post("/items", response_model=Item)
    async def add(self, item: Item, request: Request):
        assert (await request.json()) == {"price": item.price} == item.model_dump()
        return item

    @app.post("/names")
    async def name(self, name: str = Form()):
        return name

    @router.get("/owners/{number}")
    async def owned(self, number: int, path: str = Depends(path_of), owner: str = Depends(owner)):
        return [number, path, owner]

    if importlib.util.find_spec("fastapi.sse"):  # an older FastAPI may not stream endpoints

        @app.get("/lines")
        async def lines(self):
            for number in range(3):
                yield number

    else:

        @app.get("/lines")
        async def lines(self):
            return PlainTextResponse("0 1 2")

    @app.get("/chunks")
    def chunks(self):
        return StreamingResponse(str(number) for number in range(3))

async def hello(request):
    return PlainTextResponse("hello")

app.include_router(router, prefix="/v1")
app.mount("/sub", Starlette(routes=[Route("/hello", hello)]))

with TestClient(Shop.bind()) as client:
    for method, path, body in (
        ("GET", "/items/3?tax=2", {}), ("GET", "/items/x", {}), ("PUT", "/items/3", {}),
        ("POST", "/items", {"json": {"price": 5}}), ("POST", "/items", {"json": {}}),
        ("POST", "/items", {"content": "{"}), ("POST", "/names", {"data": {"name": "n"}}),
        ("GET", "/v1/owners/4", {}), ("GET", "/v1/owners/x", {}), ("GET", "/v1/nowhere", {}),
        ("GET", "/lines", {}), ("GET", "/chunks", {}), ("GET", "/sub/hello", {}),
    ):
        response = client.request(method, path, **body)
        print(response.status_code, response.text.replace("\\n", " "))
"""

NEEDED = [
    ("anyio", "_deliver_cancellation", "CancelScope._deliver_cancellation"),
    ("anyio", "_host_task", "CancelScope._host_task"),
    ("anyio", "_report_result", "WorkerThread._report_result"),
    ("anyio", "_task_states", "anyio._backends._asyncio:_task_states"),
    ("anyio", "claim_worker_thread", "anyio._core._eventloop:claim_worker_thread"),
    ("anyio", "threadlocals", "anyio._core._eventloop:threadlocals"),
    ("starlette", "_base_app", "starlette.routing:Mount._base_app"),
    ("starlette", "get_route_path", "starlette._utils:get_route_path"),
    (
        "starlette",
        "wrap_app_handling_exceptions",
        "starlette._exception_handler:wrap_app_handling_exceptions",
    ),
    ("fastapi", "_IncludedRouter", "fastapi.routing:_IncludedRouter"),
    ("fastapi", "get_dependant", "fastapi.dependencies.utils:get_dependant(get_dependant)"),
    ("fastapi", "get_typed_signature", "fastapi.dependencies.utils:get_typed_signature"),
    ("fastapi", "include_context", "fastapi.routing:_IncludedRouter.include_context"),
    ("fastapi", "included_router", "fastapi.routing:_RouterIncludeContext.included_router"),
    ("fastapi", "is_json_stream", "fastapi.routing:APIRoute.get_route_handler(is_json_stream)"),
    ("fastapi", "iter_route_contexts", "fastapi.routing:iter_route_contexts"),
    ("fastapi", "original_router", "fastapi.routing:_IncludedRouter.original_router"),
    ("fastapi", "request_params_to_args", "fastapi.dependencies.utils:request_params_to_args"),
    ("fastapi", "starlette_route", "fastapi.routing:_EffectiveRouteContext.starlette_route"),
]
UVICORN = [
    pytest.param(*each, marks=() if each[0] == "capture_signals" else pytest.mark.thorough)
    for each in [
        ("capture_signals", "uvicorn:Server.capture_signals"),
        ("encoded_headers", "uvicorn:Config.load(encoded_headers)"),
        ("_should_upgrade", "uvicorn.protocols.http.h11_impl:H11Protocol._should_upgrade"),
        (
            "on_headers_complete",
            "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_headers_complete",
        ),
    ]
]
SLOWER = [
    ("starlette", "_body"),
    ("starlette", "_json"),
    ("fastapi", "_effective_candidates"),
    ("fastapi", "_embed_body_fields"),
    ("fastapi", "_endpoint_context_cache"),
    ("fastapi", "_extract_endpoint_context"),
    ("fastapi", "_FASTAPI_SCOPE_KEY"),
    ("fastapi", "_get_cache_key"),
    ("fastapi", "_get_scope_effective_route_context"),
    ("fastapi", "_native_telemetry"),
    ("fastapi", "_normalize_non_finite_floats"),
    ("fastapi", "_PING_INTERVAL"),
    ("fastapi", "_route_context"),
    ("fastapi", "body_field"),
    ("fastapi", "effective_candidates"),
    ("fastapi", "effective_low_priority_routes"),
    ("fastapi", 'fastapi.telemetry"'),
    ("fastapi", "fastapi_function_astack"),
    ("fastapi", "fastapi_inner_astack"),
    ("fastapi", "fastapi_middleware_astack"),
    ("fastapi", "is_body_allowed_for_status_code"),
    ("fastapi", "request_body_to_args"),
    ("fastapi", "security_scopes_param_name"),
    ("fastapi", "serialize_json"),
    ("fastapi", "serialize_response"),
]
UNNOTICED = [("starlette", "_state"), ("starlette", "as_iterator"), ("starlette", "iterator")]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def rewritten(**patterns: dict[str, str]) -> str:
    return REWRITTEN.replace("PATTERNS", repr(patterns))


def renamed(*names: tuple[str, str]) -> str:
    patterns: dict[str, dict[str, str]] = {}
    for library, name in names:
        pattern = rf"(?<!\w){re.escape(name)}(?!\w)"
        for each in (library, "fastapi") if library == "starlette" else (library,):
            patterns.setdefault(each, {})[pattern] = f"renamed_{name}"
    return rewritten(**patterns)


def skip_unless_there(library: str, name: str) -> None:
    folder = Path(importlib.import_module(library).__file__ or "").parent
    if not any(name in path.read_text() for path in folder.rglob("*.py")):
        pytest.skip(f"{library} {version(library)} never had it")


@pytest.fixture(scope="module")
def answers() -> str:
    result = run(SERVED)
    assert result.stderr == ""
    return result.stdout


def warning_in(result: subprocess.CompletedProcess[str]) -> str:
    (warned,) = [line for line in result.stderr.splitlines() if "CompiledRoutesOffWarning:" in line]
    return warned


def test_answers_are_those_of_an_application(answers: str) -> None:
    statuses = [line.partition(" ")[0] for line in answers.splitlines()]

    assert " ".join(statuses) == "200 422 405 200 422 422 200 200 422 404 200 200 200"


@pytest.mark.thorough
@pytest.mark.parametrize(("library", "name", "told"), NEEDED)
def test_a_name_that_is_needed_and_missing_is_named(library: str, name: str, told: str) -> None:
    skip_unless_there(library, name)
    result = run(renamed((library, name)) + SERVED)

    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert f"UnsupportedVersionError: {library} {version(library)} lacks" in last
    assert told in last
    assert f'install a supported version: python -m pip install "{library}>=' in last


@pytest.mark.parametrize(("name", "told"), UVICORN)
def test_a_name_of_uvicorn_that_is_missing_is_named(name: str, told: str) -> None:
    result = run(renamed(("uvicorn", name)) + "import ingress.serving.http.connections")

    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert told in last
    assert "which ingress needs; install a supported version" in last


def test_without_all_that_compiled_routes_need_fastapi_answers(answers: str) -> None:
    result = run(renamed(*SLOWER) + SERVED)

    assert result.stdout == answers, result.stderr
    assert "it lacks " in warning_in(result)


@pytest.mark.thorough
@pytest.mark.parametrize(("library", "name"), SLOWER)
def test_without_a_name_that_compiled_routes_need_fastapi_answers(
    library: str, name: str, answers: str
) -> None:
    skip_unless_there(library, name)
    result = run(renamed((library, name)) + SERVED)

    assert result.stdout == answers, result.stderr
    assert name.strip('"') in warning_in(result)


def test_names_that_have_a_public_way_are_not_missed(answers: str) -> None:
    result = run(renamed(*UNNOTICED) + SERVED)

    assert (result.stdout, result.stderr) == (answers, "")


# FastAPI's releases.


KNOWN = json.loads(FILE.read_text())
NEWER = {r'(?m)^__version__ = ".*"': '__version__ = "0.9999.0"'}
is_newest = pytest.mark.skipif(
    fastapi.__version__ != KNOWN["versions"]["fastapi"][-1]
    or starlette.__version__ != KNOWN["versions"]["starlette"][-1],
    reason="newer versions are compared with the newest that is known",
)


def test_the_installed_versions_have_been_compared_with() -> None:
    """If this fails, see CONTRIBUTING.md, "A new FastAPI"."""
    assert fastapi.__version__ in KNOWN["versions"]["fastapi"]
    assert starlette.__version__ in KNOWN["versions"]["starlette"]


@is_newest
def test_the_table_has_the_functions_of_the_newest_versions() -> None:
    assert {path: fingerprint(path) for path in STOOD_IN_FOR} == KNOWN["functions"]


@is_newest
def test_a_newer_version_with_the_same_functions_is_known(answers: str) -> None:
    same = {
        r"(?m)^( +)(?=errors: list\[Any\] = \[\]$)": r"\1# Comments do not count.\n\1",
        r"body: Any = Undefined": r"body: object = Undefined",
    }
    result = run(rewritten(fastapi=NEWER | same, starlette=NEWER) + SERVED)

    assert (result.stdout, result.stderr) == (answers, "")


@is_newest
@pytest.mark.parametrize(
    ("library", "pattern", "replacement", "told"),
    [
        (
            "fastapi",
            r"if dependency_cache is None:",
            r"if not dependency_cache and dependency_cache is None:",
            "fastapi.dependencies.utils:solve_dependencies",
        ),
        pytest.param(
            "starlette",
            r"match = self\.path_regex\.match\(route_path\)",
            r"match = self.path_regex.fullmatch(route_path)",
            "starlette.routing:Route.matches",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_newer_version_with_a_changed_function_is_not_compiled(
    library: str, pattern: str, replacement: str, told: str, answers: str
) -> None:
    result = run(rewritten(**{library: NEWER | {pattern: replacement}}) + SERVED)

    assert result.stdout == answers, result.stderr
    warned = warning_in(result)
    assert "0.9999.0" in warned
    assert f"others of its functions: {told}. FastAPI's own handlers answer" in warned


UNKNOWN = """
import fastapi.routing
from starlette.routing import BaseRoute

class Tree(BaseRoute):
    pass

Tree.__module__ = "fastapi.routing"
import ingress as serve
from fastapi import FastAPI

app = FastAPI()
app.router.routes.append(Tree())

@serve.deployment
@serve.ingress(app)
class Shop:
    pass
"""


def test_an_unknown_kind_of_route_is_an_error_when_the_app_is_bound() -> None:
    result = run(UNKNOWN)

    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "routes of a kind that ingress does not know, fastapi.routing.Tree" in last


@pytest.mark.parametrize("missing", ["chunked_encoding", "disconnected", "flow", "scope"])
def test_chunks_are_messages_on_a_uvicorn_that_has_renamed_what_frames_them(missing: str) -> None:
    sent: list[bytes] = []

    class Cycle:
        chunked_encoding, disconnected, scope = True, False, {"method": "GET"}
        flow = transport = None

        async def send(self, message: Message) -> None:
            sent.append(message["body"])

    Cycle.__module__ = "uvicorn.protocols.http.httptools_impl"
    delattr(Cycle, missing)
    asyncio.run(send_chunks(Cycle().send, [b"one", b"two"]))

    assert sent == [b"one", b"two"]


@pytest.mark.parametrize("missing", ["queue", "read_paused", "transport"])
def test_messages_of_a_websocket_go_by_receive_on_a_uvicorn_that_has_renamed_what_passes_them_on(
    missing: str,
) -> None:
    class Protocol:
        read_paused = False
        transport = None

        def __init__(self) -> None:
            self.queue: asyncio.Queue[Message] = asyncio.Queue()

        async def receive(self) -> Message:
            return await self.queue.get()

    Protocol.__module__ = "uvicorn.protocols.websockets.websockets_sansio_impl"
    protocol = Protocol()
    queue = protocol.queue
    delattr(protocol if missing == "queue" else Protocol, missing)
    before = dict(protocol.__dict__)
    shorten(protocol.receive, lambda message: True)

    assert protocol.__dict__ == before
    assert queue.empty()
