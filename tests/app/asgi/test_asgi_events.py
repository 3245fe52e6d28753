"""`ingress.app.asgi.rendering`: pauses, errors and disconnects between the items of a generator.

`test_asgi_compiled` compares the bytes with FastAPI's, for each shape of `tests.shapes`. Here a
stream waits, fails half-way, is read slowly, or loses its client.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import fastapi.routing
import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException
from pydantic import BaseModel
from starlette.types import Message

from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import WORKER, Deployment

sse = pytest.importorskip("fastapi.sse", reason="this FastAPI has no streaming endpoints")

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
PING = b": ping\n\n"
WHO: ContextVar[str] = ContextVar("who", default="unset")

Send = Callable[[Message], Awaitable[None]]
SHAPES = ["lines", "lines-def", "events", "events-def"]
EVENTS = ["events", "events-def"]


class Item(BaseModel):
    n: int


class Waiting:
    """An event for generators of both kinds, set from the loop."""

    def __init__(self) -> None:
        self._in_thread = threading.Event()
        self._on_loop = asyncio.Event()

    def set(self) -> None:
        self._in_thread.set()
        self._on_loop.set()

    def wait(self) -> None:
        assert self._in_thread.wait(PATIENCE_S)

    async def wait_on_loop(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._on_loop.wait()


def app_of(shape: str, steps: list[Any], closed: list[Any] | None = None) -> FastAPI:
    """Return an app whose `/` streams the steps: items, `Waiting`s, errors to raise, callables."""
    app = FastAPI()
    options = {"response_class": sse.EventSourceResponse} if shape in EVENTS else {}
    seen = [] if closed is None else closed

    def at() -> tuple[str, str]:
        who, _ = WHO.get(), WHO.set("mine")
        return threading.current_thread().name, who

    if shape.endswith("-def"):

        @app.get("/", **options)
        def in_thread(tasks: BackgroundTasks) -> Iterator[Item]:
            tasks.add_task(seen.append, "background")
            seen.append(at())
            try:
                for step in steps:
                    if isinstance(step, Waiting):
                        step.wait()
                    elif isinstance(step, Exception):
                        raise step
                    else:
                        yield step() if callable(step) else step
            finally:
                seen.append(at())

    else:

        @app.get("/", **options)
        async def on_loop(tasks: BackgroundTasks) -> AsyncIterator[Item]:
            tasks.add_task(seen.append, "background")
            seen.append(at())
            try:
                for step in steps:
                    if isinstance(step, Waiting):
                        await step.wait_on_loop()
                    elif isinstance(step, Exception):
                        raise step
                    else:
                        yield step() if callable(step) else step
            finally:
                seen.append(at())

    return app


def deployment_of(*args: Any) -> Deployment:
    return Deployment(ingress(app_of(*args))(type("K", (), {})))


async def body_of(app: Any, on_message: Send | None = None) -> tuple[bytes, bool, Any]:
    """Return the body of the answer, whether it is complete, and the error of the app."""
    body, is_complete, error = b"", False, None
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "server": ("test", 80),
    }

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        nonlocal body, is_complete
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            body += message["body"]
            is_complete = not message.get("more_body")
        if on_message is not None:
            await on_message(message)

    try:
        await app(scope, receive, send)
    except Exception as raised:
        error = raised
    return body, is_complete, error


async def streamed(
    shape: str, steps: list[Any], on_message: Send | None = None, seen: list[Any] | None = None
) -> tuple[bytes, bool, Any]:
    """Return the same of a deployment whose `/` streams the steps."""
    deployment = deployment_of(shape, steps, seen)
    async with deployment.running():
        return await body_of(deployment, on_message)


def text_of(shape: str, *numbers: int) -> bytes:
    form = b'data: {"n":%d}\n\n' if shape in EVENTS else b'{"n":%d}\n'
    return b"".join([form % number for number in numbers])


# Keeping alive.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_ours", [False, True])
async def test_events_are_kept_alive_while_nothing_comes_and_lines_are_not(
    shape: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.02)
    first, second = Waiting(), Waiting()
    pings = 0

    async def on_message(message: Message) -> None:
        nonlocal pings
        pings += message.get("body") == PING
        if pings == 2 or shape not in EVENTS:
            first.set()
        if pings >= 4 or shape not in EVENTS:
            second.set()

    steps = [first, Item(n=1), second, Item(n=2)]
    deployment = deployment_of(shape, steps)
    async with deployment.running():
        app = deployment if is_ours else app_of(shape, steps)
        body, is_complete, error = await body_of(app, on_message)

    assert is_complete, error
    one, two = re.escape(text_of(shape, 1)), re.escape(text_of(shape, 2))
    some = b"(: ping\n\n){2,}" if shape in EVENTS else b""
    assert re.fullmatch(some + one + some.replace(b"2", b"1") + two + b"(: ping\n\n)*", body), body


@pytest.mark.parametrize("shape", EVENTS)
async def test_an_item_waits_for_the_comment_that_is_being_sent(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.02)
    waiting, made = Waiting(), Waiting()
    sending = 0

    async def on_message(message: Message) -> None:
        nonlocal sending
        assert not sending, "two messages at once"
        sending += 1
        if message.get("body") == PING:
            waiting.set()
            await made.wait_on_loop()
            for _ in range(100):  # loop iterations until the item arrives
                await asyncio.sleep(0)
        sending -= 1

    loop = asyncio.get_running_loop()

    def make() -> Item:
        loop.call_soon_threadsafe(made.set)
        return Item(n=1)

    body, is_complete, error = await streamed(shape, [waiting, make], on_message)

    assert is_complete, error
    assert body.startswith(PING)
    assert body.replace(PING, b"") == text_of(shape, 1)


@pytest.mark.parametrize("shape", EVENTS)
async def test_no_comment_is_sent_while_an_item_waits_for_room(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.005)
    sending = 0

    async def on_message(message: Message) -> None:
        nonlocal sending
        assert not sending, "two messages at once"
        sending += 1
        if text_of(shape, 1) in message.get("body", b""):
            await asyncio.sleep(0.05)  # ten keep-alive messages are due in this time
        sending -= 1

    body, is_complete, error = await streamed(shape, [Item(n=1)], on_message)

    assert is_complete, error
    assert body.replace(PING, b"") == text_of(shape, 1)


@pytest.mark.parametrize("shape", EVENTS)
async def test_a_comment_that_cannot_be_sent_ends_the_stream_with_the_next_item(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.02)
    waiting = Waiting()
    seen: list[Any] = []

    async def on_message(message: Message) -> None:
        if message.get("body") == PING:
            waiting.set()
            raise ConnectionResetError("the client has gone")

    body, is_complete, error = await streamed(
        shape, [waiting, *[Item(n=n) for n in range(100)]], on_message, seen
    )

    assert (body, is_complete, type(error).__name__) == (PING, False, "ClientDisconnect")
    assert len(seen) == 2  # started and closed; no background task


# Failing.

FAILURES: dict[str, Any] = {
    "error": LookupError("no handler for it"),
    "http": HTTPException(409, "too late"),
    "timeout": TimeoutError("the generator's own"),
    "invalid": {"n": "x"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("after", [0, 1, 40])
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failed_stream_is_cut_after_its_items(shape: str, after: int, failure: str) -> None:
    steps = [*[Item(n=n) for n in range(after)], FAILURES[failure], Item(n=99)]
    seen: list[Any] = []
    ours, is_complete, error = await streamed(shape, steps, seen=seen)
    assert len(seen) == 2
    plain, is_plain_complete, expected = await body_of(app_of(shape, steps))

    assert (ours, is_complete) == (text_of(shape, *range(after)), False)
    assert told_by(error) == told_by(expected)
    if shape in EVENTS:  # FastAPI drops its queues when a generator fails
        assert ours.startswith(plain)
    else:
        assert (ours, is_complete) == (plain, is_plain_complete)


def told_by(error: Any) -> Any:
    """Return the type and content of an error, without its place, which a loop does not read."""
    if isinstance(error, ExceptionGroup):
        return type(error), error.message, list(map(told_by, error.exceptions))
    return type(error), error.errors() if hasattr(error, "errors") else str(error)


# Bounds and ends.


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_generator_is_at_most_sixteen_items_ahead_of_what_was_sent(shape: str) -> None:
    made = sent = furthest = 0

    def make() -> Item:
        nonlocal made, furthest
        made += 1
        furthest = max(furthest, made - sent)
        return Item(n=1)

    async def on_message(message: Message) -> None:
        nonlocal sent
        await asyncio.sleep(0)
        sent += message.get("body", b"").count(b"\n") // text_of(shape, 1).count(b"\n")

    body, is_complete, _ = await streamed(shape, [make] * 300, on_message)

    assert (is_complete, body) == (True, text_of(shape, *[1] * 300))
    assert furthest <= 17  # one more item waits for room


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_first_item_has_left_before_the_second_is_made(shape: str) -> None:
    waiting = Waiting()

    async def on_message(message: Message) -> None:
        if message.get("body") == text_of(shape, 1):
            waiting.set()

    body, is_complete, _ = await streamed(shape, [Item(n=1), waiting, Item(n=2)], on_message)

    assert (is_complete, body) == (True, text_of(shape, 1, 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("waits_in", ["generator", "send"])
async def test_a_cancelled_stream_has_been_closed_where_it_ran(shape: str, waits_in: str) -> None:
    WHO.set("unset")  # the tests share a context
    seen: list[Any] = []
    begun, waiting = asyncio.Event(), Waiting()

    async def on_message(message: Message) -> None:
        if message["type"] == "http.response.body":
            begun.set()
            if waits_in == "send":
                await asyncio.Event().wait()

    steps = [Item(n=1), waiting, Item(n=2)] if waits_in == "generator" else [Item(n=1)] * 1000
    deployment = deployment_of(shape, steps, seen)
    async with deployment.running():
        task = asyncio.create_task(body_of(deployment, on_message))
        await begun.wait()
        task.cancel()
        if shape.endswith("-def"):  # a thread cannot be stopped
            await asyncio.sleep(0)
            waiting.set()
        with pytest.raises(asyncio.CancelledError):
            await task

        (place, who), (last_place, last_who) = seen
        assert place == last_place
        assert place.startswith(WORKER if shape.endswith("-def") else "MainThread")
        assert (who, last_who) == ("unset", "mine")


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_stream_whose_start_is_not_sent_runs_nothing_of_its_generator(shape: str) -> None:
    seen: list[Any] = []

    async def on_message(message: Message) -> None:
        raise ConnectionResetError("the client has gone")

    _, is_complete, error = await streamed(shape, [Item(n=1)], on_message, seen)

    assert (is_complete, type(error).__name__, seen) == (False, "ClientDisconnect", [])


@pytest.mark.parametrize("shape", SHAPES)
async def test_background_tasks_run_once_the_stream_has_ended(shape: str) -> None:
    seen: list[Any] = []
    await streamed(shape, [Item(n=1)], seen=seen)
    assert len(seen) == 3
    assert seen[-1] == "background"
