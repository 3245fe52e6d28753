"""`ingress.app.asgi.responses`: HTTP answers for the values and errors of a plain deployment."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy
import pytest
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

import ingress as serve
from tests.servers import PATIENCE_S, Connection, bind, get, overview, served, set_flags, wait_until


@pytest.fixture(
    autouse=True, params=["01", "10"], ids=lambda flags: f"sync{flags[0]}-separate{flags[1]}"
)
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sync, separate = request.param
    set_flags(monkeypatch, separate, sync)
    yield
    serve.shutdown()


class Item(BaseModel):
    name: str
    price: float = 1.5


@dataclasses.dataclass
class Point:
    x: int
    y: int


JSON = "application/json"
RETURNED: dict[str, tuple[Any, str | None, bytes]] = {
    "none": (None, "text/plain", b""),
    "bytes": (b"\x00\xff", "text/plain", b"\x00\xff"),
    "str": ("grüß", "text/plain; charset=utf-8", "grüß".encode()),
    "empty-str": ("", "text/plain; charset=utf-8", b""),
    "int": (7, JSON, b"7"),
    "bool": (True, JSON, b"true"),
    "dict": ({"a": 1, "b": [1, 2]}, JSON, b'{"a":1,"b":[1,2]}'),
    "not-ascii": ({"a": "ü"}, JSON, b'{"a":"\\u00fc"}'),
    "nan": (float("nan"), JSON, b"NaN"),
    "tuple": ((1, 2), JSON, b"[1,2]"),
    "set": ({1}, JSON, b"[1]"),
    "model": (Item(name="x"), JSON, b'{"name":"x","price":1.5}'),
    "dataclass": (Point(1, 2), JSON, b'{"x":1,"y":2}'),
    "exception": (ValueError("x"), JSON, b'"x"'),
    "array": (numpy.arange(3), JSON, b"[0,1,2]"),
    "number": (numpy.float32(0.5), JSON, b"0.5"),
}


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
def test_a_return_value_has_the_content_type_ray_gives_it_and_a_length() -> None:
    values = {name: value for name, (value, _, _) in RETURNED.items()}

    @serve.deployment
    class Returns:
        def __call__(self, request: Request) -> Any:
            return values[request.url.path[1:]]

    port = served(bind(Returns))
    for name, (_, content_type, body) in RETURNED.items():
        answer = get(port, f"/{name}")
        seen = answer.status, answer.headers.get("content-type"), answer.body
        assert seen == (200, content_type, body), name
        assert answer.headers["content-length"] == str(len(body)), name
        assert answer.is_complete


def test_a_starlette_response_is_sent_as_it_is() -> None:
    responses = {
        "/html": HTMLResponse("<b>", 201, {"x-own": "1"}),
        "/redirect": RedirectResponse("/html"),
        "/empty": Response(status_code=204),
    }

    @serve.deployment
    async def returns(request: Request) -> Response:
        return responses[request.url.path]

    port = served(returns.bind())
    html, redirect, empty = (get(port, path) for path in responses)

    assert (html.status, html.body, html.headers["x-own"]) == (201, b"<b>", "1")
    assert (redirect.status, redirect.headers["location"]) == (307, "/html")
    assert (empty.status, empty.body) == (204, b"")


@pytest.mark.parametrize("value", [object(), bytearray(b"x"), memoryview(b"x")])
def test_what_cannot_be_json_is_a_500(value: Any) -> None:
    @serve.deployment
    async def returns(request: Request) -> Any:
        return value

    answer = get(served(returns.bind()), "/")

    assert (answer.status, answer.body) == (500, b"Internal Server Error")


def test_a_method_without_parameters_is_called_without_the_request() -> None:
    @serve.deployment
    class Bare:
        async def __call__(self) -> str:
            return "no request"

    assert get(served(bind(Bare)), "/").body == b"no request"


def test_an_http_exception_keeps_its_status_headers_and_detail() -> None:
    @serve.deployment
    async def raises(request: Request) -> None:
        code = int(request.query_params["code"])
        raise HTTPException(code, {"why": "so"}, {"x-own": "1"})

    port = served(raises.bind())
    teapot, not_modified = get(port, "/?code=418"), get(port, "/?code=304")

    assert (teapot.status, teapot.body) == (418, b'{"detail":{"why":"so"}}')
    assert teapot.headers["x-own"] == "1"
    assert (not_modified.status, not_modified.body) == (304, b"")


def items_of(kind: str, items: list[Any], failing: bool = False) -> Any:
    """Return a deployment whose call yields these items, written in one of four ways."""

    def sync() -> Iterator[Any]:
        yield from items
        if failing:
            raise ValueError("enough")

    async def asynchronous() -> AsyncIterator[Any]:
        for item in sync():
            yield item

    class Generates:
        def __call__(self, request: Request) -> Iterator[Any]:
            yield from sync()

    class GeneratesAsync:
        async def __call__(self, request: Request) -> AsyncIterator[Any]:
            async for item in asynchronous():
                yield item

    class Returns:
        def __call__(self, request: Request) -> Any:
            return sync()

    class ReturnsAsync:
        async def __call__(self, request: Request) -> Any:
            return asynchronous()

    classes = dict(zip(KINDS, (Generates, GeneratesAsync, Returns, ReturnsAsync), strict=True))
    return serve.deployment(classes[kind]).bind()


KINDS = ["def-generator", "async-generator", "returns-generator", "async-returns-generator"]
GENERATED: list[tuple[list[Any], str, bytes]] = [
    (["a", "b"], "text/plain; charset=utf-8", b"ab"),
    ([b"a", "ü"], "text/plain; charset=utf-8", "aü".encode()),
    ([{"n": 1}, "two", 3], "application/jsonl", b'{"n":1}\n"two"\n3\n'),
    ([None], "application/jsonl", b"null\n"),
    ([], "text/plain; charset=utf-8", b""),
]


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_streams_text_or_json_lines_as_its_first_item_says(kind: str) -> None:
    for items, content_type, body in GENERATED:
        answer = get(served(items_of(kind, items)), "/")
        assert answer.status == 200
        assert answer.headers["content-type"] == content_type
        assert (answer.body, answer.is_complete) == (body, True)
        assert answer.headers["transfer-encoding"] == "chunked"


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_fails_is_a_500_before_its_first_item_and_cut_after(kind: str) -> None:
    before = get(served(items_of(kind, [], failing=True)), "/")
    after = get(served(items_of(kind, ["a"], failing=True)), "/")

    assert (before.status, before.body) == (500, b"Internal Server Error")
    assert (after.status, after.body, after.is_complete) == (200, b"a", False)


@pytest.mark.parametrize("items", [["a", 1], [b"a", None]])
def test_text_that_goes_on_with_something_else_is_cut(items: list[Any]) -> None:
    answer = get(served(items_of("async-generator", items)), "/")

    assert (answer.body, answer.is_complete) == (b"a", False)


@pytest.mark.parametrize("kind", ["def", "async-def"])
def test_the_first_chunk_is_there_before_the_second_is_made(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    if kind == "def":
        monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")

        @serve.deployment
        def generate(request: Request) -> Iterator[str]:
            yield "first"
            assert may_go_on.wait(PATIENCE_S)
            yield "second"

    else:

        @serve.deployment
        async def generate(request: Request) -> AsyncIterator[str]:
            yield "first"
            assert await asyncio.to_thread(may_go_on.wait, PATIENCE_S)
            yield "second"

    with Connection(served(generate.bind())) as connection:
        connection.request("/")
        assert b"second" not in connection.receive_until(b"first")
        may_go_on.set()
        answer = connection.answer()

    assert (answer.body, answer.is_complete) == (b"firstsecond", True)


def test_a_head_request_has_the_headers_and_no_body() -> None:
    @serve.deployment
    async def returns(request: Request) -> str:
        return request.method

    answer = httpx.head(f"http://127.0.0.1:{served(returns.bind())}/")

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "4"


@pytest.mark.parametrize(
    ("backpressure", "status", "retry_after"),
    [
        (None, 503, None),
        ({"status_code": 429}, 429, None),
        ({"retry_after_s": 0}, 503, "0"),
        ({"status_code": 429, "retry_after_s": 1.2}, 429, "2"),  # `Retry-After` is in whole seconds
    ],
)
def test_back_pressure_names_the_option_to_raise_and_is_answered_as_configured(
    backpressure: dict[str, Any] | None, status: int, retry_after: str | None
) -> None:
    may_end = threading.Event()
    running = threading.Semaphore(0)

    @serve.deployment(
        max_ongoing_requests=1, max_queued_requests=1, backpressure_config=backpressure
    )
    async def slow(request: Request) -> str:
        running.release()
        await asyncio.to_thread(may_end.wait, PATIENCE_S)
        return "done"

    port = served(slow.bind())
    with Connection(port) as first, Connection(port) as second:
        first.request("/")
        assert running.acquire(timeout=PATIENCE_S)
        second.request("/")
        wait_until(lambda: overview("slow").queued == 1)
        refused = get(port, "/")
        may_end.set()
        assert [first.answer().body, second.answer().body] == [b"done", b"done"]

    assert (refused.status, refused.headers.get("retry-after")) == (status, retry_after)
    assert refused.headers["content-type"].startswith("text/plain")
    assert b"max_queued_requests=1) on 'slow'; raise it or add replicas" in refused.body


@pytest.mark.parametrize("parent", ["plain", "fastapi"])
def test_back_pressure_of_a_child_is_that_of_its_parent(parent: str) -> None:
    running, may_end = threading.Event(), threading.Event()

    @serve.deployment(
        max_ongoing_requests=1,
        max_queued_requests=1,
        backpressure_config={"status_code": 429, "retry_after_s": 1.2},
    )
    class Child:
        async def __call__(self) -> str:
            running.set()
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
            return "done"

    app = FastAPI()

    class Parent:
        def __init__(self, child: Any) -> None:
            self.child = child

        async def __call__(self, request: Request) -> Any:
            return await self.child.remote()

    class FastParent:
        def __init__(self, child: Any) -> None:
            self.child = child

        @app.get("/")
        async def root(self) -> Any:
            return await self.child.remote()

    cls: Any = Parent if parent == "plain" else serve.ingress(app)(FastParent)
    port = served(serve.deployment(cls).bind(bind(Child)))
    child = serve.get_deployment_handle("Child", "default")
    held = child.remote()
    assert running.wait(PATIENCE_S)
    queued = child.remote()
    refused = get(port, "/")
    may_end.set()
    assert [held.result(timeout_s=PATIENCE_S), queued.result(timeout_s=PATIENCE_S)] == ["done"] * 2

    assert (refused.status, refused.headers.get("retry-after")) == (429, "2")
    assert b"max_queued_requests=1" in refused.body
    assert get(port, "/").status == 200


def test_a_plain_response_class_may_be_returned_by_a_def(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")

    @serve.deployment
    def returns() -> Response:
        return PlainTextResponse("made in a thread")

    assert get(served(returns.bind()), "/").body == b"made in a thread"
