"""Unhandled errors of user code: the answer, the connection and the log."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

import ingress as serve
from ingress.telemetry.mistakes import last_line, users_frames
from ingress.telemetry.tracebacks import format_error
from tests.containment_app import HOSTILE
from tests.servers import (
    INGRESS,
    UVICORN,
    Answer,
    Connection,
    ServerProcess,
    bind,
    environment,
    forking,
    get,
    ingress_run,
    process,
    records_of,
    served,
    set_flags,
    wait_until,
    write_module,
)

pytestmark = pytest.mark.usefixtures("shutdown")

FAILING = """
import asyncio
from collections.abc import AsyncIterator

from fastapi import BackgroundTasks, FastAPI, Response
from fastapi.responses import StreamingResponse

import ingress as serve

api = FastAPI()


def fail() -> None:
    raise ValueError("it failed")


@serve.deployment
@serve.ingress(api)
class Failing:
    @api.get("/ok")
    async def ok(self) -> str:
        return "ok"

    @api.api_route("/boom/{number}", methods=["GET", "HEAD", "POST"])
    async def boom(self, number: int) -> None:
        try:
            fail()
        except ValueError as error:
            raise LookupError(number) from error

    @api.get("/def")
    def in_thread(self) -> None:
        fail()

    @api.get("/late")
    async def late(self, tasks: BackgroundTasks) -> str:
        tasks.add_task(fail)
        return "answered"

    @api.get("/empty", status_code=204)
    async def empty(self, tasks: BackgroundTasks) -> None:
        tasks.add_task(fail)

    @api.get("/stream")
    async def stream(self) -> Response:
        async def items() -> AsyncIterator[str]:
            yield "begun"
            await asyncio.sleep(0)
            fail()

        return StreamingResponse(items())


app = Failing.bind()


class Watching:
    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        try:
            await self.app(scope, receive, send)
        except LookupError as error:
            print(f"the middleware saw {error!r}")
            raise


watched = Watching(app)
"""

RUN = [*INGRESS, "run", "failing:app", "--port", "0"]
BARE = [*UVICORN, "failing:app"]
COMMANDS = {
    "run": RUN,
    "uvicorn": BARE,
    "uvicorn-h11": [*BARE, "--http", "h11"],
    "uvicorn-no-proxy-headers": [*BARE, "--no-proxy-headers"],
}


@pytest.fixture(scope="module", params=COMMANDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("failing")
    write_module(folder, "failing", FAILING)
    with process(COMMANDS[request.param], folder, environment(folder)) as running:
        assert get(running.port, "/ok").status == 200
        yield running


def ask(
    connection: Connection, path: str, *, method: str = "GET", headers: str = "", body: bytes = b""
) -> Answer:
    """Send a request over a keep-alive connection, and return its answer by `content-length`."""
    if body:
        headers += f"Content-Length: {len(body)}\r\n"
    connection.request(path, method=method, headers=headers)
    connection.send(body)
    head = connection.receive_until(b"\r\n\r\n").partition(b"\r\n\r\n")[0]
    length = re.search(rb"content-length: (\d+)", head)
    end = len(head) + 4 + (int(length[1]) if length and method != "HEAD" else 0)
    while len(connection.received) < end:
        connection.received += connection.socket.recv(65536)
    raw, connection.received = connection.received[:end], connection.received[end:]
    return Answer(raw)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/boom/1", "GET", 500),
        ("/boom/1", "HEAD", 500),
        ("/boom/1", "POST", 500),
        ("/def", "GET", 500),
        ("/late", "GET", 200),
        ("/empty", "GET", 204),
    ],
)
def test_a_connection_goes_on_after_an_answer_that_was_sent_whole(
    server: ServerProcess, path: str, method: str, status: int
) -> None:
    body = b"12345" if method == "POST" else b""  # a body that user code does not read
    with Connection(server.port) as connection:
        for _ in range(3):
            answer = ask(connection, path, method=method, body=body)
            assert answer.status == status
            assert answer.headers.get("connection") != "close"
        assert ask(connection, "/ok").body == b'"ok"'


def test_what_was_asked_for_behind_a_failure_is_answered(server: ServerProcess) -> None:
    request = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\n{}\r\n"
    paths = ["/boom/1", "/ok", "/boom/2"]
    asked = "".join(request.format(path, "") for path in paths)
    with Connection(server.port) as connection:
        connection.send((asked + request.format("/ok", "Connection: close\r\n")).encode())
        statuses = re.findall(rb"HTTP/1.1 (\d+)", connection.receive_all())

    assert statuses == [b"500", b"200", b"500", b"200"]


@pytest.mark.parametrize("close", ["HTTP/1.1\r\nConnection: close", "HTTP/1.0"])
def test_a_connection_that_is_to_be_closed_is_closed(server: ServerProcess, close: str) -> None:
    with Connection(server.port) as connection:
        connection.send(f"GET /boom/1 {close}\r\nHost: 127.0.0.1\r\n\r\n".encode())
        answer = connection.answer()

    assert (answer.status, answer.body, answer.is_complete) == (500, b"Internal Server Error", True)


def test_a_stream_that_fails_is_cut(server: ServerProcess) -> None:
    with Connection(server.port) as connection:
        connection.request("/stream", headers="X-Request-Id: the-stream\r\n")
        answer = connection.answer()

    assert (answer.status, answer.body, answer.is_complete) == (200, b"begun", False)
    assert len(records(server, "the-stream to /stream")) == 1


def records(server: ServerProcess, text: str) -> list[str]:
    """Return the log records with a text in their first line, with all their lines."""
    server.wait_for(re.compile(f"^[A-Z]+: .*{re.escape(text)}", re.MULTILINE))
    assert get(server.port, "/ok").status == 200  # its access-log line follows the records
    output = re.sub(r"^\{.*\n", "", server.output, flags=re.MULTILINE)  # without the access log
    found = re.split(r"^(?=(?:INFO|WARNING|ERROR): )", output, flags=re.MULTILINE)
    return [each for each in found if text in each.partition("\n")[0]]


def test_a_failure_is_logged_once_with_owner_and_the_users_frames(server: ServerProcess) -> None:
    get(server.port, "/boom/7", "X-Request-Id: the-seventh\r\n")
    (record,) = records(server, "the-seventh")
    lines = record.splitlines()

    assert lines[0] == (
        "ERROR:    Exception in ASGI application: request the-seventh to /boom/{number}, "
        "replica Failing#0"
    )
    assert [line for line in lines[1:] if not re.match(r"\s+(\^|~|File)", line)] == [
        "Traceback (most recent call last):",
        "    fail()",
        '    raise ValueError("it failed")',
        "ValueError: it failed",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "    raise LookupError(number) from error",
        "LookupError: 7",
    ]
    assert re.findall(r'failing.py", line \d+, in (\w+)', record) == ["boom", "fail", "boom"]


def test_worker_processes_keep_the_connection_too(tmp_path: Path) -> None:
    write_module(tmp_path, "failing", FAILING)
    with ingress_run(tmp_path, "failing:app", "--workers", "2") as server:
        server.wait_for("is ready at")
        with Connection(server.port) as connection:
            statuses = [ask(connection, path).status for path in ("/boom/1", "/ok", "/boom/2")]

    assert statuses == [500, 200, 500]


def test_a_middleware_around_the_application_sees_the_error(tmp_path: Path) -> None:
    write_module(tmp_path, "failing", FAILING)
    with process([*UVICORN, "failing:watched"], tmp_path, environment(tmp_path)) as server:
        assert get(server.port, "/boom/7").status == 500
        server.wait_for(r"the middleware saw LookupError\(7\)")
        server.wait_for("Exception in ASGI application\n")  # uvicorn's own record


# In this process.


def failing() -> serve.Application:
    api = FastAPI()

    @serve.deployment
    @serve.ingress(api)
    class Failing:
        @api.get("/boom/{number}")
        async def boom(self, number: int) -> None:
            raise LookupError(number)

    return bind(Failing)


def test_a_test_client_raises_the_error_or_shows_the_answer() -> None:
    with TestClient(failing()) as client, pytest.raises(LookupError):
        client.get("/boom/1")
    with TestClient(failing(), raise_server_exceptions=False) as client:
        answer = client.get("/boom/1")

    assert (answer.status_code, answer.text) == (500, "Internal Server Error")


@pytest.mark.anyio
async def test_a_client_in_the_same_process_gets_the_error() -> None:
    application = failing()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        with pytest.raises(LookupError):
            await client.get("/boom/1")
    await application.aclose()


@pytest.mark.parametrize("separate", ["0", "1"])
def test_a_handler_gets_the_error_and_owner(monkeypatch: pytest.MonkeyPatch, separate: str) -> None:
    set_flags(monkeypatch, separate)
    with records_of("uvicorn.error") as kept:
        port = served(failing(), "library", "/library")
        get(port, "/library/boom/1", "X-Request-Id: the-first\r\n")
        wait_until(lambda: kept)  # it is logged when the answer is on its way
    (record,) = kept

    assert record.levelno == logging.ERROR
    assert (record.request_id, record.route) == ("the-first", "/library/boom/{number}")
    assert (record.application, record.deployment) == ("library", "Failing")
    assert record.exc_info[0] is LookupError
    assert len(traceback.extract_tb(record.exc_info[2])) > 5  # all of it


def cut_off(isolation: Literal["thread", "process"]) -> serve.Application:
    api = FastAPI()

    @serve.deployment(isolation=isolation)
    @serve.ingress(api)
    class CutOff:
        @api.get("/response")
        async def response(self) -> StreamingResponse:
            return StreamingResponse(self.items())

        @api.get("/items")
        async def items(self) -> AsyncIterator[str]:
            yield "first"
            raise HTTPException(418, "too late")

    return bind(CutOff)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("path", ["/response", "/items"])
def test_an_http_exception_in_a_stream_is_logged_with_the_users_frame_only(
    isolation: Literal["thread", "process"], path: str
) -> None:
    with records_of("uvicorn.error") as kept, forking():
        port = served(cut_off(isolation))
        get(port, path)
        wait_until(lambda: kept)
    (record,) = kept

    lines = record.exc_text.splitlines()
    assert len(lines) <= 8
    assert lines[1].endswith(", in items")
    assert lines[-1] == "RuntimeError: Caught handled exception, but response already started."


# Tracebacks.


def raised(make: Callable[[], Exception]) -> Exception:
    try:
        raise make()
    except Exception as error:
        return error


def check(error: BaseException) -> None:
    """Assert that an error is shown as Python shows it."""
    assert format_error(error) == "".join(traceback.format_exception(error)).rstrip("\n")


def test_a_group_is_shown_with_its_members_as_python_shows_it() -> None:
    inner = ExceptionGroup("inner", [TypeError("second"), raised(lambda: KeyError("third"))])
    caused = raised(lambda: ExceptionGroup("in the middle", [ValueError("fourth")]))
    caused.__cause__ = raised(lambda: OSError("a cause"))
    for members in ([raised(lambda: ValueError("first")), inner], [inner, caused], [inner]):
        check(raised(lambda: ExceptionGroup("outer", members)))  # noqa: B023
    error = ValueError("after a group")
    error.__context__ = caused
    check(error)


def test_a_cause_that_is_false_is_shown() -> None:
    class EmptyError(Exception):
        def __len__(self) -> int:
            return 0

    error = ValueError("after it")
    error.__cause__ = raised(EmptyError)
    check(error)


def noted() -> Exception:
    error = ValueError("noted")
    error.add_note("one")
    error.add_note("two")
    return error


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("text"),
        lambda: ValueError("two\nlines"),
        KeyError,
        noted,
        lambda: SyntaxError("bad", ("file.py", 1, 3, "a b", 1, 4)),
        lambda: NameError("name 'prnit' is not defined", name="prnit"),
        lambda: RecursionError("deep"),
    ],
)
def test_an_error_is_shown_as_python_shows_it(make: Callable[[], Exception]) -> None:
    check(raised(make))


def test_an_endless_recursion_is_shown_in_short() -> None:
    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError) as failed:
        recurse()
    check(failed.value)


def through_two(number: int) -> None:
    """Raise after so many calls of two functions in turn."""
    if not number:
        raise ValueError("the text")
    through(number - 1)


def through(number: int) -> None:
    through_two(number)


def deep() -> None:
    through(300)


def in_a_library() -> None:
    re.compile("(" * 40 + "the text")


def many_members() -> None:
    raise ExceptionGroup("the text", [raised(lambda: ValueError(n)) for n in range(50)])  # noqa: B023


def nested_groups() -> None:
    error: Exception = ValueError("inner")
    for number in range(60):
        error = ExceptionGroup("the text", [error, KeyError(number)])
    raise error


def many_causes() -> None:
    error: Exception | None = None
    for number in range(60):
        try:
            raise KeyError(number) from error
        except KeyError as caught:
            error = caught
    raise ValueError("the text") from error


def many_contexts(number: int = 60) -> None:
    try:
        if number:
            many_contexts(number - 1)
    finally:
        raise ValueError("the text" if number == 60 else number)


def long_line() -> None:
    raise ValueError("the text" * 100_000)


def many_lines() -> None:
    raise ValueError("the text\n" * 1_000)


def many_notes() -> None:
    error = ValueError("the text")
    for number in range(1_000):
        error.add_note(f"note {number}\n")
    raise error


LARGE = (deep, in_a_library, many_members, nested_groups, many_causes, many_contexts, long_line,
         many_lines, many_notes)  # fmt: skip


@pytest.mark.parametrize("fail", LARGE)
def test_the_text_of_any_error_is_short_and_has_the_users_frame_and_the_error(
    fail: Callable[[], None],
) -> None:
    with pytest.raises(Exception) as failed:
        fail()

    text = format_error(failed.value)

    assert len(text.splitlines()) <= 38
    assert len(text) < 8_000
    assert f"in {fail.__name__}\n" in text
    assert "the text" in text
    if fail in (many_causes, many_contexts):
        first = "KeyError: 0" if fail is many_causes else "ValueError: 0"
        assert first in text  # to which all others are due


@pytest.mark.parametrize("fail", LARGE)
def test_the_one_line_of_any_error_is_short(fail: Callable[[], None]) -> None:
    with pytest.raises(Exception) as failed:
        fail()

    assert len(last_line(failed.value)) < 8_000
    assert len(users_frames(failed.value).splitlines()) <= 24


@pytest.mark.parametrize("name", HOSTILE)
def test_no_error_fails_what_shows_it(name: str) -> None:
    try:
        raise HOSTILE[name]()
    except BaseException as error:
        text = format_error(error)

    assert "in test_no_error_fails_what_shows_it" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_no_error_fails_the_logging_of_what_contains_it(name: str) -> None:
    @serve.deployment
    class Failing:
        async def __call__(self) -> None:
            raise HOSTILE[name]()

    handle = serve.run(bind(Failing), route_prefix=None)
    with pytest.raises(Exception) as failed:
        handle.remote().result(timeout_s=20)

    assert "in __call__" in "".join(traceback.format_exception(failed.value))


def test_a_mistake_outside_of_the_users_files_is_shown_by_its_last_frame() -> None:
    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(json.loads, "{").exception()
    assert error is not None
    place, _ = users_frames(error).splitlines()
    assert place.endswith("in raw_decode")
