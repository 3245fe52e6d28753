"""The private names of other libraries: what is missing is named, or is slower and says so."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import fastapi
import pytest
from starlette.types import Message

from ingress.http.uvicorn_connection import send_chunks, shorten
from tests.servers import ROOT

# Imported before: the libraries themselves still have the names that they have imported. An older
# FastAPI does not import `starlette.staticfiles`.
RENAMED = """
import fastapi.testclient, importlib, starlette.staticfiles
module, _, path = {path!r}.partition(":")
*owners, name = path.split(".")
owner = importlib.import_module(module)
for each in owners:
    owner = getattr(owner, each)
value = getattr(owner, name)
if {is_module}:
    del owner.__dict__[name]
else:
    delattr(owner, name)
setattr(owner, "renamed_" + name.strip("_"), value)
"""

# FastAPI's own functions still find it, among the globals of their module.
HIDDEN = """
import fastapi.testclient, sys, types

class Hiding(types.ModuleType):
    def __getattribute__(self, name):
        if name == {1!r}:
            raise AttributeError(name)
        return super().__getattribute__(name)

sys.modules[{0!r}].__class__ = Hiding
"""

SERVED = """
import ingress as serve
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

router = APIRouter()
app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Shop:
    def __init__(self):
        self.price = 7

    @app.get("/items/{number}")
    async def item(self, number: int):
        return number * self.price

with TestClient(Shop.bind()) as client:
    print(client.get("/items/3").text, client.get("/items/x").status_code)
"""

NEEDED = [
    "anyio._backends._asyncio:AsyncIOBackend",
    "anyio._backends._asyncio:CancelScope._deliver_cancellation",
    "anyio._backends._asyncio:WorkerThread._report_result",
    "anyio._backends._asyncio:_task_states",
    "anyio._core._eventloop:claim_worker_thread",
    "anyio._core._eventloop:threadlocals",
    "starlette._exception_handler:wrap_app_handling_exceptions",
    "starlette._utils:get_route_path",
    "fastapi.routing:_IncludedRouter",
]
SLOWER = [
    "fastapi.routing:_endpoint_context_cache",
    "fastapi.routing:_extract_endpoint_context",
    "fastapi.routing:_PING_INTERVAL",
    "fastapi.routing:_normalize_non_finite_floats",
    "fastapi.dependencies.models:_get_cache_key",
]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


def renamed(path: str) -> str:
    names = path.partition(":")[2]
    return RENAMED.format(path=path, is_module="." not in names)


def is_there(path: str) -> bool:
    module, _, name = path.partition(":")
    return run(f"import {module}; {module}.{name}").returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize("path", NEEDED)
def test_a_name_that_is_needed_and_missing_is_named_at_import(path: str) -> None:
    if not is_there(path):
        pytest.skip(f"FastAPI {fastapi.__version__} never had it")
    result = run(renamed(path) + "import ingress.engines.local")

    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "UnsupportedVersionError" in last
    assert path in last
    assert 'install a supported version: python -m pip install "' in last


@pytest.mark.parametrize(
    "path",
    [
        "uvicorn:Server.capture_signals",
        "uvicorn.protocols.http.h11_impl:H11Protocol._should_upgrade",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_headers_complete",
    ],
)
def test_a_method_of_uvicorn_that_is_missing_is_named(
    path: str,
) -> None:
    result = run(renamed(path) + "import ingress.http.connections")

    assert result.returncode == 1
    assert f"lacks {path}, which ingress needs" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("path", SLOWER)
def test_a_name_that_only_compiled_routes_need_is_warned_of(path: str) -> None:
    if not is_there(path):
        pytest.skip(f"FastAPI {fastapi.__version__} never had it")
    result = run(HIDDEN.format(*path.split(":")) + SERVED)

    assert result.stdout == "21 422\n", result.stderr
    (warned,) = [line for line in result.stderr.splitlines() if "CompiledRoutesOffWarning:" in line]
    assert f"it lacks {path}" in warned


# With the name whose absence is an error since 0.137.
NEWER = """
import fastapi.routing

fastapi.__version__ = "0.9999.0"
if not hasattr(fastapi.routing, "_IncludedRouter"):
    fastapi.routing._IncludedRouter = type("_IncludedRouter", (), {})
"""


def test_a_fastapi_that_is_newer_is_warned_of_once() -> None:
    result = run(NEWER + SERVED)

    assert result.stdout == "21 422\n", result.stderr
    (warned,) = [line for line in result.stderr.splitlines() if "CompiledRoutesOffWarning:" in line]
    assert "FastAPI 0.9999.0: it is newer than 0.165" in warned


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
