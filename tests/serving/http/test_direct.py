"""Requests that a connection drives without a task answer as those that a task serves."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Body, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, StreamingResponse

import ingress as serve
from ingress.core.base.settings import HTTPLimits
from ingress.engines import local_engine
from ingress.serving.http.connections import Connections
from ingress.serving.http.reply import Reply
from ingress.state.server import snapshot_of
from tests.servers import (
    PATIENCE_S,
    UPGRADE,
    Connection,
    ongoing,
    records_of,
    served,
    steady,
    uvicorn_in_a_thread,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("shutdown")

app = FastAPI()
BODY = b'{"text": "hello"}'
POST = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
LAST = b"GET /plain?last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
LIMITS: dict[str, Any] = {"max_body_size": 1000}
did: list[str] = []
gate = threading.Event()
variable: ContextVar[str] = ContextVar("variable", default="unset")


def note(what: str) -> None:
    did.append(what)
    if what == "fail":
        raise ValueError("in the background")


@serve.deployment(max_ongoing_requests=3)
@serve.ingress(app)
class Endpoints:
    @app.get("/plain")
    async def plain(self, request: Request, last: str = "") -> dict[str, Any]:
        state = dict(request.state._state)
        request.state.mine = "mine"
        client = None if request.client is None else request.client.host
        return {"state": state, "client": client, "scheme": request.url.scheme}

    @app.head("/plain")
    async def head(self) -> Response:
        return Response(headers={"content-length": "7"})

    @app.get("/def")
    def sync(self) -> str:
        return "def"

    @app.post("/body")
    async def body(self, request: Request) -> Any:
        return await request.json()

    @app.post("/late-body")
    async def late_body(self, request: Request) -> Any:
        parts = [part async for part in request.stream()]
        return [len(part) for part in parts if part]

    @app.get("/variable")
    async def variable_of_the_server(self) -> str:
        return variable.get()

    @app.get("/waits")
    def waits(self) -> str:
        assert gate.wait(PATIENCE_S)
        return "waited"

    @app.get("/status/{status}")
    async def status(self, status: int) -> Response:
        return Response(status_code=status)

    @app.get("/redirect")
    async def redirect(self) -> Response:
        return RedirectResponse("/plain")

    @app.get("/stream")
    async def stream(self) -> Response:
        return StreamingResponse(iter([b"a", b"bc"]))

    @app.get("/large")
    async def large(self) -> Response:
        return PlainTextResponse("x" * 1_000_000)

    @app.get("/file")
    async def file(self) -> Response:
        return FileResponse(__file__)

    @app.get("/lengths/{lengths}")
    async def lengths(self, lengths: str) -> Response:
        response = Response(b"hello")
        response.raw_headers = [(b"content-length", each.encode()) for each in lengths.split("-")]
        return response

    @app.head("/lengths/{lengths}")
    async def head_lengths(self, lengths: str) -> Response:
        return await self.lengths(lengths)

    @app.post("/background/{what}")
    async def background_of_a_body(
        self, what: str, tasks: BackgroundTasks, text: Annotated[Any, Body()]
    ) -> Any:
        tasks.add_task(note, what)
        return text

    @app.get("/cookies")
    async def cookies(self, response: Response) -> str:
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        response.headers["X-Upper"] = "Yes"
        return "cookies"

    @app.get("/closes")
    async def closes(self, response: Response) -> str:
        response.headers["connection"] = "close"
        return "closes"

    @app.get("/own-id")
    async def own_id(self, response: Response) -> str:
        response.headers["x-request-id"] = "own"
        return "own"

    @app.get("/fails")
    async def fails(self) -> None:
        raise ValueError("of user code")

    @app.get("/raises/{status}")
    async def raises(self, status: int) -> None:
        raise HTTPException(status, "raised", {"x-why": "asked"})

    @app.get("/bad-header")
    async def bad_header(self, response: Response) -> str:
        response.raw_headers.append((b"x-bad", b"a\r\nb"))
        return "bad"

    @app.get("/bad-length/{length}")
    async def bad_length(self, length: int) -> Response:
        return Response(b"hello", headers={"content-length": str(length)})

    @app.get("/background/{what}")
    async def background(self, what: str, tasks: BackgroundTasks) -> str:
        tasks.add_task(note, what)
        return what


def get(path: str, headers: str = "", method: str = "GET", version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: a\r\n{headers}\r\n".encode("latin-1")


FORWARDED = "X-Forwarded-Proto: https\r\nX-Forwarded-For: 1.2.3.4\r\n"
REQUESTS: dict[str, list[bytes]] = {
    "plain": [get("/plain")],
    "def": [get("/def")],
    "head": [get("/plain", method="HEAD")],
    "options": [get("/plain", method="OPTIONS")],
    "http 1.0": [get("/plain", version="1.0")],
    "client closes": [get("/plain", "Connection: close\r\n")],
    "application closes": [get("/closes")],
    "own id": [get("/own-id")],
    "clients id": [get("/plain", "X-Request-ID: mine\r\n")],
    "forwarded": [get("/plain", FORWARDED)],
    "forwarded, then not": [get("/plain", FORWARDED) + get("/plain")],
    "not forwarded, then so": [get("/plain") + get("/plain", FORWARDED)],
    "forwarded with nonsense": [get("/plain", "X-Forwarded-Proto: \xff\r\nX-Forwarded-For: ,\r\n")],
    "head in two parts": [b"GET /plain HTTP/1.1\r\nHo", b"st: a\r\n\r\n"],
    "three at once": [get("/plain") * 3],
    "refused after one": [get("/plain") + b"nonsense\r\n\r\n"],
    "body": [POST + b"Content-Length: 17\r\n\r\n" + BODY],
    "body in two parts": [POST + b"Content-Length: 17\r\n\r\n" + BODY[:5], BODY[5:]],
    "body in chunks": [
        POST + b"Transfer-Encoding: chunked\r\n\r\n11\r\n" + BODY + b"\r\n0\r\n\r\n"
    ],
    "too large": [POST + b"Content-Length: 2000\r\n\r\n" + b"x" * 2000],
    "too large in chunks": [
        POST + b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n"
    ],
    "a body that fails": [POST + b"Content-Length: 5\r\n\r\nhello"],
    "failing background of a body": [
        POST.replace(b"/body", b"/background/fail") + b"Content-Length: 17\r\n\r\n" + BODY
    ],
    **{
        f"{method} with the lengths {lengths}": [get(f"/lengths/{lengths}", method=method)]
        for method in ("GET", "HEAD")
        for lengths in ("-5", "5-5", "abc", "05", "+5")
    },
    "no body": [POST + b"Content-Length: 0\r\n\r\n"],
    "expects": [POST + b"Expect: 100-continue\r\nContent-Length: 17\r\n\r\n", BODY],
    "read by user code": [
        b"POST /late-body HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n", b"ab", b"cd"
    ],
    "204": [get("/status/204")],
    "304": [get("/status/304")],
    "200 without a body": [get("/status/200")],
    "a status of its own": [get("/status/299")],
    "redirect": [get("/redirect")],
    "stream": [get("/stream")],
    "large": [get("/large")],
    "file": [get("/file")],
    "range": [get("/file", "Range: bytes=3-9\r\n")],
    "cookies": [get("/cookies")],
    "fails": [get("/fails")],
    "401": [get("/raises/401")],
    "503": [get("/raises/503")],
    "404": [get("/nothing")],
    "405": [get("/plain", method="DELETE")],
    "no such path of the server": [get("/-/nothing")],
    "health": [get("/-/healthz")],
    "a header that is not one": [get("/bad-header")],
    "too long": [get("/bad-length/2")],
    "too short": [get("/bad-length/9")],
    "background": [get("/background/works")],
    "failing background": [get("/background/fail")],
    "deadline": [get("/plain", "X-Request-Timeout-Seconds: 60\r\n")],
    "many fields": [get("/plain", "a: b\r\n" * 200)],
    "two hosts": [get("/plain", "Host: b\r\n")],
    "escaped": [get("/status/%320%30?a=%20")],
}  # fmt: skip


@contextmanager
def serving(driver: str, *, logs: bool = False) -> Iterator[int]:
    """Serve by connections that drive requests, or by a task for each; return the port."""
    config = {"enable_access_log": logs}
    serve.start({"port": 0} if driver == "connection" else {"host": None}, logging_config=config)
    if driver == "connection":
        yield served(Endpoints.bind(), **LIMITS)
    else:
        # It calls an `Application`, not the proxy that a connection can drive requests for.
        limits = HTTPLimits(max_body_size=LIMITS["max_body_size"])
        options = Connections(limits).options()
        with uvicorn_in_a_thread(Endpoints.bind(), options, **LIMITS) as port:
            yield port
    serve.shutdown()


def ask(port: int, pieces: list[bytes]) -> bytes:
    """Return all that a connection gets, with another request at its end."""
    with Connection(port) as connection:
        connection.send(pieces[0])
        connection.send_slowly(*pieces[1:])
        try:
            connection.receive_until(b"\r\n\r\n")
            connection.send(LAST)
            connection.receive_all()
        except (AssertionError, OSError):
            pass  # it was closed
        received = connection.received
    received = re.sub(rb"\r\ndate: [^\r]*", b"\r\ndate: now", received)
    return re.sub(rb"x-request-id: [\w-]{20,}", b"x-request-id: made", received)


def lines_of(records: list[Any]) -> list[list[str]]:
    names = ("method", "status", "route", "path", "deployment", "application")
    return sorted([str(getattr(each, name, "")) for name in names] for each in records)


def counted() -> dict[tuple[str, str, int], int]:
    """Return the number of requests by route, method and status."""
    found = snapshot_of(local_engine()).applications["default"].deployments["Endpoints"].http
    return {(each.route, each.method, each.status): each.latency.count for each in found}


@pytest.mark.parametrize("logs", [False, True], ids=["", "logged"])
def test_a_connection_answers_counts_and_logs_as_a_task_does(
    logs: bool,
) -> None:
    found = {}
    for driver in ("task", "connection"):
        did.clear()
        with serving(driver, logs=logs) as port, records_of("ingress.access") as records:
            answers = {name: ask(port, pieces) for name, pieces in REQUESTS.items()}
            steady(lambda: ongoing() + len(records) + sum(counted().values()))
            found[driver] = answers, counted(), lines_of(records), did.copy()

    of_tasks, of_connections = found["task"][0], found["connection"][0]
    for name in REQUESTS:
        assert of_connections[name] == of_tasks[name], name
    assert found["connection"][1:] == found["task"][1:]
    assert bool(found["task"][2]) == logs


@pytest.mark.parametrize("end", [b"", get("/plain"), get("/ws", UPGRADE)])
def test_nothing_is_left_of_a_client_that_leaves_with_several_requests_open(end: bytes) -> None:
    """uvicorn tells only the last request of a connection that its client has left."""
    with serving("connection") as port:
        for _ in range(5):
            gate.clear()
            with Connection(port) as connection:
                connection.send(get("/waits") + end)
                wait_until(lambda: ongoing() == 1)
            gate.set()
            wait_until(lambda: ongoing() == 0)
        wait_until(lambda: not local_engine().http.proxy.in_flight.replies)


@pytest.mark.parametrize("name", ["ingress.access", "uvicorn.access"])
def test_a_filter_of_the_access_log_that_fails_changes_no_answer(name: str) -> None:
    def fails(record: logging.LogRecord) -> bool:
        raise ValueError("of the filter")

    logger = logging.getLogger(name)
    with serving("connection", logs=True) as port, records_of("ingress") as records:
        logger.addFilter(fails)
        try:
            assert ask(port, [get("/plain")]).count(b"HTTP/1.1 200 OK") == 2
        finally:
            logger.removeFilter(fails)
    assert [each.levelname for each in records if each.exc_info] == ["WARNING"] * 2


@pytest.mark.parametrize("driver", ["task", "connection"])
def test_a_filter_of_uvicorns_access_log_holds_for_that_of_ingress(driver: str) -> None:
    seen: list[object] = []

    def leaves_out_probes(record: logging.LogRecord) -> bool:
        assert isinstance(record.args, tuple)
        seen.append(record.args[1:])
        return record.args[2] != "/plain?probe" and "/a%20b" not in record.getMessage()

    logger = logging.getLogger("uvicorn.access")
    with serving(driver, logs=True) as port, records_of("ingress.access") as records:
        logger.addFilter(leaves_out_probes)
        try:
            for path in ("/plain?probe", "/a%20b", "/plain"):
                ask(port, [get(path)])
            wait_until(lambda: len(seen) == 6)
            steady(lambda: len(records))
        finally:
            logger.removeFilter(leaves_out_probes)

    assert seen[:2] == [("GET", "/plain?probe", "1.1", 200), ("GET", "/plain?last", "1.1", 200)]
    assert len(records) == 4, "three of the end of a connection, and one"


def test_a_pipelined_request_has_the_variables_of_its_server() -> None:
    variable.set("set")
    with serving("connection") as port, Connection(port) as connection:
        connection.send(get("/variable") * 2 + get("/variable", "Connection: close\r\n"))
        assert connection.receive_all().count(b'"set"') == 3


def test_a_request_with_a_background_task_leaves_no_garbage() -> None:
    def replies() -> int:
        return sum(type(each) is Reply for each in gc.get_objects())

    with serving("connection") as port:
        ask(port, [get("/background/works")])
        gc.collect()
        gc.disable()
        try:
            before = replies()
            for _ in range(5):
                ask(port, [get("/background/works")])
            wait_until(lambda: replies() <= before)
        finally:
            gc.enable()


def test_an_application_that_answers_twice_is_told() -> None:
    told: list[str] = []

    @serve.deployment
    class Twice:
        async def __call__(self, request: Request) -> None:
            for _ in range(2):
                head = {"type": "http.response.start", "status": 200}
                await request._send({**head, "headers": [(b"content-length", b"2")]})
                await request._send({"type": "http.response.body", "body": b"ok"})
            try:
                await asyncio.Event().wait()
            finally:
                told.append("told")

    port = served(Twice.bind())
    with Connection(port) as connection:
        connection.send(get("/", "Connection: close\r\n"))
        assert connection.receive_all().endswith(b"ok")
    wait_until(lambda: told == ["told"])


def tasks_of_requests() -> list[Any]:
    """Return the tasks in which uvicorn serves requests now."""
    tasks = [each for each in gc.get_objects() if type(each) is asyncio.Task]
    running = [each for each in tasks if not each.done() and each.get_loop().is_running()]
    return [each for each in running if "run_asgi" in repr(each)]


@pytest.mark.parametrize("driver", ["task", "connection"])
def test_a_connection_has_no_task_for_a_request(driver: str) -> None:
    with serving(driver) as port, Connection(port) as connection:
        gate.clear()
        connection.request("/waits")
        wait_until(lambda: ongoing() == 1)
        count = len(tasks_of_requests())
        gate.set()
        assert count == (driver == "task")
        assert connection.receive_all().endswith(b'"waited"')
