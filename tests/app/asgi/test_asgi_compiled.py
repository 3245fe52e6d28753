"""`ingress.app.asgi.compiled`: compiled routes answer, and run user code, as FastAPI does.

Each shape of `tests.shapes` is served by plain FastAPI and by a deployment; both are given the same
ASGI messages, and all their observable effects must be the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

import fastapi
import fastapi.dependencies.utils
import fastapi.routing
import pytest
from anyio import BrokenResourceError
from fastapi import (
    APIRouter,
    Body,
    Cookie,
    Depends,
    FastAPI,
    File,
    Header,
    HTTPException,
    Path,
    UploadFile,
)
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingress.app.asgi import compiled, rendering
from ingress.app.asgi.apps import BoundRoutes
from ingress.app.asgi.messages import parts_of
from ingress.app.asgi.replica_app import ASGI
from ingress.app.asgi.routes import served_routes
from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import Deployment, bound, json_of, serve
from tests.servers import ROUNDS
from tests.shapes import (
    INCLUDED,
    KINDS,
    SHAPES,
    Color,
    Level,
    Text,
    deployment_of,
    events,
    plain_app,
)

App = Callable[[Scope, Receive, Send], Any]

# Requests.

NAMES = ["q", "n", "x", "limit", "Limit", "flag", "tags", "name", "item", "price", "kind", "Note"]
TEXTS = ["", "0", "1", "7", "x", "a", "true", "red", "teapot", "[1]", '["a"]', "2020-01-02", "1.5"]
CONTENT_TYPES = [
    b"application/json; charset=utf-8", b"Application/JSON", b"application/problem+json",
    b"text/plain", b"application/x-www-form-urlencoded", b"application/json,text/plain", b"", b"x",
]  # fmt: skip
HEADERS = [
    b"x-token", b"user-agent", b"q", b"under_score", b"under-score", b"x-number", b"X-Token",
    b"authorization",
]  # fmt: skip

texts = st.sampled_from(TEXTS) | st.text(max_size=4)
raw_headers = st.sampled_from([b"Bearer t", b"Basic dTpw", b"bearer", b"x", b"1", b"\xff", b""])
cookies = st.sampled_from(
    [b"q=1", b"n=2; q=x", b'n="3"', b"q", b"n=\xff", b"q=teapot; q=2", b"n=x", b";="]
)
queries = st.one_of(
    st.lists(st.tuples(st.sampled_from(NAMES), texts), max_size=4).map(urlencode),
    st.sampled_from(KINDS).map(lambda kind: urlencode({"kind": kind})),
    st.text("qnx=&%;+4a\xff", max_size=8),
).map(lambda query: query.encode("latin-1"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=6,
)
checked = st.fixed_dictionaries({}, optional={"name": texts, "q": st.integers() | texts})
documents = st.one_of(
    values,
    checked,
    st.dictionaries(st.sampled_from(NAMES), checked | texts | st.integers(), max_size=5),
)
encodings = st.sampled_from(["utf-8"] * 5 + ["utf-8-sig", "utf-16", "utf-32-le", "latin-1"])
bodies = st.one_of(
    st.builds(
        lambda value, encoding: json.dumps(value, ensure_ascii=False).encode(encoding, "replace"),
        documents,
        encodings,
    ),
    st.sampled_from([b"", b" ", b"{", b"nul", b'{"name":}', b"\xff", b"1" * 5000, b"[" * 3000]),
    st.binary(max_size=6),
)


@st.composite
def chunks(draw: st.DrawFn, body: bytes) -> list[Any]:
    """Return the messages of the body: mostly whole, else in pieces, or cut off."""
    whole = {"type": "http.request", "body": body, "more_body": False}
    middle = len(body) // 2
    one = {"type": "http.request", "body": body[:middle], "more_body": True}
    two = {"type": "http.request", "body": body[middle:], "more_body": False}
    end = {"type": "http.request"}
    gone = {"type": "http.disconnect"}
    mutable = {"type": "http.request", "body": bytearray(body)}
    shapes: list[list[Any]] = [[whole]] * 6
    shapes += [[one, two], [{**whole, "more_body": True}, end], [end], [mutable]]
    shapes += [[one, gone], [gone], [one, OSError("reset")], [RuntimeError("receive")]]
    return draw(st.sampled_from(shapes))


@dataclass
class Sent:
    """A request: the scope, and the result or error of each `receive`."""

    scope: dict[str, Any]
    messages: list[Any]


def valid(name: str) -> Sent:
    """Return a valid request for the shape."""
    shape = SHAPES[name]
    path = shape.served_at + ("1" if "{" in shape.path else "")
    query, body = shape.query.encode(), json.dumps(shape.body).encode()
    headers = [(b"content-type", b"application/json"), shape.header]
    if shape.body is None:
        body, headers = b"", [shape.header]
    scope = {"path": path, "query_string": query, "method": shape.method, "headers": headers}
    return Sent(scope, [{"type": "http.request", "body": body, "more_body": False}])


@st.composite
def requests(draw: st.DrawFn, name: str) -> Sent:
    """Return a request for the shape; about half of its parts are those of a valid one."""
    shape, base = SHAPES[name], valid(name)
    path = base.scope["path"]
    if "{" in shape.path and draw(st.booleans()):
        path = shape.served_at + draw(texts | st.sampled_from(["12", "-1", "1e3", "a/b", "\xff"]))
    query = draw(st.just(base.scope["query_string"]) | queries)
    body = draw(st.just(base.messages[0]["body"]) | bodies)
    headers = draw(st.lists(st.tuples(st.sampled_from(HEADERS), raw_headers), max_size=3))
    headers += [(b"cookie", draw(cookies)) for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        headers += base.scope["headers"]
    else:
        kinds = draw(st.lists(st.sampled_from([b"application/json", *CONTENT_TYPES]), max_size=2))
        headers = [*((b"content-type", kind) for kind in kinds), *headers]
    scope = {**base.scope, "path": path, "query_string": query, "headers": headers}
    if draw(st.booleans()):
        scope["root_path"] = draw(st.sampled_from(["", "/root", "/root/"]))
    return Sent(scope, draw(chunks(body)))


# Answers.


@dataclass
class Did:
    """All observable effects of an app, each chunk of a body as a message."""

    messages: list[Any]
    error: Any
    events: list[Any]
    received: int


async def outcome(app: App, sent: Sent, *, fails_at: str | None = None) -> Did:
    """Send the request to the app. `fails_at` is the type of message whose `send` raises."""
    left, answer = list(sent.messages), []
    received = 0
    events.clear()
    scope: Scope = {
        "type": "http",
        "asgi": ASGI,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("client", 1),
        **sent.scope,
        "headers": list(sent.scope["headers"]),
    }

    async def receive() -> Any:
        nonlocal received
        received += 1
        message = left.pop(0) if left else {"type": "http.disconnect"}
        if isinstance(message, Exception):
            raise message
        return dict(message)

    async def send(message: Any) -> None:
        answer.append(message)
        if message["type"] == fails_at:
            if message.get("more_body"):  # the size of each part is undefined
                answer[-1] = {**message, "body": b""}
            raise ConnectionResetError("the client has gone")

    error: BaseException | None = None
    try:
        await app(scope, receive, send)
    except Exception as raised:
        error = raised
    while isinstance(error, ExceptionGroup):  # raised by the tasks in which FastAPI makes events
        error = next(each for each in error.exceptions if type(each) is not BrokenResourceError)
    chain = []
    while error is not None:
        chain.append((type(error), text_of(error)))
        error = error.__cause__
    apart = [each for message in answer for each in chunk_by_chunk(message)]
    return Did(apart, chain, list(events), received)


def chunk_by_chunk(message: Any) -> list[Any]:
    """Return a message for each chunk of a message, as a server sends them."""
    if not message.get("more_body"):
        return [message]
    return [{**message, "body": part} for part in parts_of(message["body"])]


def text_of(error: BaseException) -> str:
    try:
        return re.sub(" at 0x[0-9a-f]+", "", str(error))
    except ValueError:  # an integer with too many digits to print
        return "unprintable"


@contextmanager
def both(plain: FastAPI, cls: type) -> Iterator[Callable[..., tuple[Did, Did]]]:
    """Yield a function that sends a request to the plain app and to one replica of the class."""
    deployment = Deployment(cls)

    async def outcomes(sent: Sent, **options: Any) -> tuple[Did, Did]:
        return await outcome(plain, sent, **options), await outcome(deployment, sent, **options)

    with asyncio.Runner() as runner:
        running = deployment.running()
        runner.run(running.__aenter__())
        try:
            yield lambda sent, **options: runner.run(outcomes(sent, **options))
        finally:
            runner.run(running.__aexit__(None, None, None))


FAILURES = ("http.response.start", "http.response.body")
EXAMPLES = 100 if ROUNDS else 25
"""The requests for each shape."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_answers_and_runs_user_code_as_under_fastapi(name: str) -> None:
    shapes = [SHAPES[name]]
    with both(plain_app(shapes), deployment_of(shapes)) as outcomes:
        expected, actual = outcomes(valid(name))
        assert actual == expected
        assert expected.messages[0]["status"] < 400  # so that not only refusals are compared

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(requests(name), st.sampled_from([None] * 8 + [*FAILURES]))
        def check(sent: Sent, fails_at: str | None) -> None:
            expected, actual = outcomes(sent, fails_at=fails_at)
            assert actual == expected

        check()


# With middleware, all of a request runs inside of FastAPI's layers.
@pytest.mark.parametrize("has_middleware", [False, True])
def test_whatever_an_endpoint_does_is_answered_as_under_fastapi(*, has_middleware: bool) -> None:
    shapes = [each for each in SHAPES.values() if each.takes_kind]
    plain, cls = plain_app(shapes), deployment_of(shapes)
    if has_middleware:
        for app in (plain, cls.__ingress_spec__.app):  # type: ignore[attr-defined]
            app.add_middleware(GZipMiddleware, minimum_size=1_000_000)
    with both(plain, cls) as outcomes:
        for each in shapes:
            for kind in KINDS:
                sent = valid(each.name)
                sent.scope["query_string"] = urlencode({"kind": kind}).encode()
                expected, actual = outcomes(sent)
                assert actual == expected, (each.name, kind)


def is_compiled(route: Any) -> bool:
    """Return whether the compiled code of `ingress` answers for a route as served."""
    served = getattr(route, "_route_context", None) or getattr(route, "route", route)
    return getattr(getattr(served, "app", None), "__module__", "") == compiled.__name__


def fits(app: FastAPI, cls: type) -> dict[str, bool]:
    """Return which routes of the class are compiled, by their names."""
    routes: Any = BoundRoutes(app, cls).clone()
    return {
        route.name: is_compiled(route)
        for route in served_routes(routes.router.routes)
        if isinstance(getattr(route, "original_route", route), APIRoute)
    }


def test_the_shapes_are_compiled_that_say_so_and_no_others() -> None:
    cls = deployment_of(SHAPES.values())
    expected = {each.name: each.fit for each in SHAPES.values()}
    if ANEW_AT_EACH_REQUEST:
        expected |= dict.fromkeys({*INCLUDED} & {*SHAPES}, False)
    assert fits(cls.__ingress_spec__.app, cls) == expected  # type: ignore[attr-defined]


def test_the_schema_of_the_shapes_is_that_of_fastapi() -> None:
    # FastAPI describes no response class that takes its status in keywords.
    shapes = [each for each in SHAPES.values() if each.name != "as_loud"]
    assert bound(deployment_of(shapes)).openapi() == plain_app(shapes).openapi()


ANEW_AT_EACH_REQUEST = hasattr(fastapi.routing, "_EffectiveRouteContext") and "app" not in {
    each.name for each in dataclasses.fields(fastapi.routing._EffectiveRouteContext)
}
"""True if this FastAPI makes the `app` of an included route at each request."""


# Traps.


def pair(declare: Callable[[FastAPI], Any], **options: Any) -> tuple[FastAPI, type, FastAPI]:
    """Return plain FastAPI, a deployment of the same functions, and the latter's app."""
    # FastAPI caches the file and line of an endpoint by `id`, which Python reuses.
    fastapi.routing._endpoint_context_cache.clear()
    plain, app = FastAPI(**options), FastAPI(**options)
    declare(plain)
    declare(app)
    cls: type = ingress(app)(type("K", (), {}))
    return plain, cls, app


def alike(
    declare: Callable[[FastAPI], Any], *sents: Sent, is_compiled: bool | None = None, **options: Any
) -> list[Did]:
    """Send requests to both; assert that they do the same, and return what they did."""
    plain, cls, app = pair(declare)
    if is_compiled is not None:
        assert fits(app, cls) == {"endpoint": is_compiled}
    with both(plain, cls) as outcomes:
        did = [outcomes(sent, **options) for sent in sents]
    for expected, actual in did:
        assert actual == expected
    return [actual for _, actual in did]


def get(path: str, query: str = "", **scope: Any) -> Sent:
    base = {"path": path, "query_string": query.encode(), "method": "GET", "headers": []}
    return Sent(base | scope, [{"type": "http.request"}])


def post(path: str, body: bytes, *headers: tuple[bytes, bytes], query: str = "") -> Sent:
    given = [(b"content-type", b"application/json"), *headers]
    sent = get(path, query, method="POST", headers=given)
    return Sent(sent.scope, [{"type": "http.request", "body": body}])


def test_a_validator_does_not_run_for_a_request_that_a_dependency_refuses() -> None:
    shapes = [SHAPES["after_auth"]]
    with both(plain_app(shapes), deployment_of(shapes)) as outcomes:
        for body in (b'{"name": "teapot"}', b'{"name": "1"}', b'{"name": []}', b"{}"):
            for query in ("q=x", "q=a", ""):
                sent = post("/after_auth", body, (b"x-token", b"x"), query=query)
                expected, actual = outcomes(sent)
                assert actual == expected
                assert actual.messages[0]["status"] == 401
                assert actual.events == [("auth", "x")]


def test_a_validator_runs_once_whether_its_request_is_valid_or_not() -> None:
    shapes = [SHAPES["after_auth"]]
    with both(plain_app(shapes), deployment_of(shapes)) as outcomes:
        for query, status in (("q=a", 200), ("q=x", 422), ("", 422)):
            expected, actual = outcomes(post("/after_auth", b'{"name": "b"}', query=query))
            assert actual == expected
            assert actual.messages[0]["status"] == status
            assert actual.events.count(("validator", "b")) == 1


@pytest.mark.parametrize("fails_at", FAILURES)
def test_a_handler_comes_too_late_for_a_response_that_could_not_be_sent(fails_at: str) -> None:
    def declare(app: FastAPI) -> None:
        @app.get("/")
        async def endpoint() -> str:
            return "text"

        @app.exception_handler(OSError)
        async def handler(request: Request, error: OSError) -> JSONResponse:
            return JSONResponse("never")

    [did] = alike(declare, get("/"), is_compiled=True, fails_at=fails_at)
    assert did.error[0][0] is RuntimeError


def test_a_context_variable_is_seen_where_it_is_under_fastapi() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    async def sets(q: str = "") -> None:
        variable.set(q)

    def declare(app: FastAPI) -> None:
        @app.get("/", dependencies=[Depends(sets)])
        async def endpoint() -> str:
            before = variable.get()
            variable.set("endpoint")
            return before

        @app.middleware("http")
        async def middleware(request: Request, call_next: Any) -> Any:
            response = await call_next(request)
            events.append(variable.get())
            return response

    alike(declare, *(get("/", query) for query in ("q=a", "q=b", "")))


def test_a_middleware_that_puts_its_own_receive_and_send_in_place_is_heard() -> None:
    class Replacing:
        def __init__(self, app: App) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await self.app(scope, receive, send)
                return

            async def other_receive() -> Any:
                message = await receive()
                if scope["query_string"] == b"teapot":
                    raise HTTPException(418)
                return {**message, "body": bytearray(message["body"])}

            async def other_send(message: Any) -> None:
                events.append(message["type"])
                await send(message)

            await self.app(scope, other_receive, other_send)

    def declare(app: FastAPI) -> None:
        @app.post("/")
        async def endpoint(request: Request, value: Annotated[list[int], Body()]) -> Any:
            return [value, type(await request.body()).__name__]

        @app.middleware("http")
        async def reads_the_body(request: Request, call_next: Any) -> Any:
            if request.url.query == "read":
                events.append(await request.body())
            return await call_next(request)

        app.add_middleware(Replacing)

    alike(declare, *(post("/", b"[1]", query=query) for query in ("", "read", "teapot")))


def test_an_override_counts_from_when_it_is_set_until_it_is_removed() -> None:
    async def original(q: str = "original") -> str:
        return q

    async def other(n: int) -> str:
        return f"other{n}"

    def declare(app: FastAPI) -> None:
        @app.get("/")
        async def endpoint(value: str = Depends(original)) -> str:
            return value

    plain, cls, app = pair(declare)
    assert fits(app, cls) == {"endpoint": True}
    with both(plain, cls) as outcomes:
        for override in ({}, {original: other}, {}):
            plain.dependency_overrides = app.dependency_overrides = override
            for query in ("", "n=1", "q=2"):
                expected, actual = outcomes(get("/", query))
                assert actual == expected


def noting(func: Callable[..., Any]) -> Any:
    """Record the arguments of a function, in their order."""

    @functools.wraps(func)
    async def noted(*args: Any, **kwargs: Any) -> Any:
        events.append((args, [key for key in kwargs if key != "request"], list(kwargs)))
        result = func(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return noted


def passing(func: Callable[..., Any]) -> Any:
    """Return a `def` around an `async def`, which FastAPI unwraps."""

    @functools.wraps(func)
    def passed(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return passed


async def plainly(q: str = "") -> str:
    return q


def in_a_thread(q: str = "") -> str:
    return q


async def everything(
    response: Response,
    request: Request,
    x: Annotated[int, Path()],
    user_agent: Annotated[str, Header()] = "",
    n: Annotated[int, Cookie()] = 0,
    q: str = "",
    one: Annotated[str, Depends(plainly)] = "",
) -> list[Any]:
    return [x, user_agent, n, q, one]


class Odd:
    async def __call__(self, q: str = "") -> str:
        return q

    @staticmethod
    async def static(q: str = "") -> str:
        return q

    @classmethod
    async def of_class(cls, q: str = "") -> str:
        return q + cls.__name__

    async def method(self, q: str = "") -> str:
        return q


@pytest.mark.parametrize(
    "depends_on",
    [
        *(functools.partial(plainly), functools.partial(in_a_thread), passing(plainly)),
        *(noting(plainly), noting(in_a_thread), noting(everything), functools.partial(Odd())),
        *(Odd(), Odd().method, Odd.static, Odd.of_class, passing(noting(everything))),
    ],
)
def test_whatever_a_dependency_is_it_is_called_as_by_fastapi(depends_on: Any) -> None:
    def declare(app: FastAPI) -> None:
        @app.get("/{x}")
        @noting
        async def endpoint(x: int, value: Any = Depends(depends_on), q: int = 0) -> Any:
            return [x, value, q]

    headers = [(b"cookie", b"n=2"), (b"user-agent", b"a")]
    alike(declare, *(get("/7", query, headers=headers) for query in ("", "q=1", "q=x")))


def test_a_dependency_that_is_added_to_a_served_route_is_called(app: FastAPI) -> None:
    async def added() -> None:
        events.append("added")

    @ingress(app)
    class Service:
        @app.get("/")
        async def endpoint(self, request: Request) -> str:
            for route in request.app.routes:
                if isinstance(route, APIRoute) and not route.dependant.dependencies:
                    depends = get_parameterless_sub_dependant(depends=Depends(added), path="/")
                    route.dependant.dependencies.append(depends)
            return "ok"

    events.clear()
    with serve(Service) as client:
        for expected in ([], ["added"], ["added", "added"]):
            assert client.get("/").json() == "ok"
            assert events == expected


def test_a_tracer_in_the_place_of_a_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fastapi.routing.run_endpoint_function

    @functools.wraps(original)
    async def traced(**values: Any) -> Any:
        events.append("traced")
        return await original(**values)

    def declare(app: FastAPI) -> None:
        @app.get("/")
        async def endpoint() -> str:
            return "ok"

    monkeypatch.setattr(fastapi.routing, "run_endpoint_function", traced)
    [did] = alike(declare, get("/"), is_compiled=False)
    assert did.events == ["traced"]


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("Request", type("Noting", (Request,), {"method": "noted"})),
        ("Request.body", lambda self: asyncio.sleep(0, b'{"a": "noted"}')),
        ("Request.json", lambda self: asyncio.sleep(0, {"a": "noted"})),
        ("JSONResponse.render", lambda self, content: b"noted"),
        ("Response.init_headers", lambda self, headers: setattr(self, "raw_headers", [])),
    ],
)
def test_a_part_of_starlette_that_the_user_has_replaced_is_used(
    name: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declare(app: FastAPI) -> None:
        @app.post("/")
        async def endpoint(item: dict[str, str], request: Request):  # type: ignore[no-untyped-def]
            return {**item, "method": request.method}

    owner, _, attribute = name.rpartition(".")
    holder = getattr(fastapi.routing, owner) if owner else fastapi.routing
    [usual] = alike(declare, post("/", b'{"a": "b"}'), is_compiled=True)
    monkeypatch.setattr(holder, attribute, replacement)
    [did] = alike(declare, post("/", b'{"a": "b"}'), is_compiled=False)
    assert did != usual


@pytest.mark.parametrize("name", ["request_params_to_args", "request_body_to_args"])
def test_a_reader_of_parameters_that_the_user_has_replaced_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declare(app: FastAPI) -> None:
        @app.post("/")
        async def endpoint(item: dict[str, str], q: str = "") -> str:
            return "ok"

    original = getattr(fastapi.dependencies.utils, name)

    def noting(*args: Any, **options: Any) -> Any:
        events.append("replaced")
        return original(*args, **options)

    monkeypatch.setattr(fastapi.dependencies.utils, name, noting)
    [did] = alike(declare, post("/", b"{}"), is_compiled=False)
    assert "replaced" in did.events


def test_a_call_of_responses_that_the_user_has_replaced_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Response.__call__

    async def noting(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        events.append("replaced")
        await original(response, scope, receive, send)

    def declare(app: FastAPI) -> None:
        @app.get("/")
        async def endpoint() -> str:
            return "ok"

    monkeypatch.setattr(Response, "__call__", noting)
    [did] = alike(declare, get("/"))
    assert did.events == ["replaced"]


def test_an_error_of_a_body_parser_is_answered_as_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    def declare(app: FastAPI) -> None:
        @app.post("/")
        async def endpoint(item: dict[str, str]) -> str:
            raise AssertionError("the body was not parsed")

    def no_memory(text: Any, **options: Any) -> Any:
        raise MemoryError

    plain, cls, app = pair(declare)
    assert fits(app, cls) == {"endpoint": True}
    monkeypatch.setattr("json.loads", no_memory)
    with both(plain, cls) as outcomes:
        expected, actual = outcomes(post("/", b"{}"))
        assert actual == expected
        assert "There was an error parsing the body" in str(actual)


def test_a_handler_of_a_route_class_of_the_users_is_called() -> None:
    class Noting(APIRoute):
        def get_route_handler(self) -> Any:
            inner = super().get_route_handler()

            async def handler(request: Request) -> Any:
                events.append("handler")
                return await inner(request)

            return handler

    def declare(app: FastAPI) -> None:
        app.router.route_class = Noting

        @app.get("/")
        async def endpoint() -> str:
            return "ok"

    [did] = alike(declare, get("/"), is_compiled=False)
    assert did.events == ["handler"]


@pytest.mark.parametrize("level", ["app", "router", "include", "route"])
def test_a_body_that_is_too_large_is_refused_at_every_level(level: str) -> None:
    def limit(at: str) -> dict[str, Any]:
        return {"max_body_size": 8} if at == level else {}

    def declare(app: FastAPI) -> None:
        router = APIRouter(**limit("router"))

        @router.post("/", **limit("route"))
        async def endpoint(value: Annotated[list[int], Body()]) -> Any:
            return value

        app.include_router(router, prefix="/in", **limit("include"))
        app.post("/direct")(endpoint)

    if "max_body_size" not in inspect.signature(APIRouter).parameters:
        pytest.skip("this FastAPI limits no bodies")
    plain, cls, _ = pair(declare, **limit("app"))
    with both(plain, cls) as outcomes:
        for path in ("/in/", "/direct"):
            for body, status in ((b"[1]", 200), (b"[1,2,3,4,5]", 413)):
                expected, actual = outcomes(post(path, body))
                assert actual == expected
                assert path == "/direct" or actual.messages[0]["status"] == status


def test_a_dependency_that_runs_a_few_times_at_once_is_fastapis() -> None:
    if "max_concurrency" not in inspect.signature(Depends).parameters:
        pytest.skip("this FastAPI limits no dependencies")

    async def limited() -> str:
        return "limited"

    def declare(app: FastAPI) -> None:
        depends: Any = functools.partial(Depends, max_concurrency=1)

        @app.get("/")
        async def endpoint(value: str = depends(limited)) -> str:
            return value

    alike(declare, get("/"), is_compiled=False)


def test_a_route_without_the_middleware_of_a_fastapi_app_fails_as_under_fastapi() -> None:
    # Starlette serves the routes: FastAPI's handler misses the exit stack of FastAPI's app.
    plain, _, app = pair(lambda app: app.get("/")(json_endpoint))
    bare: Any = Starlette(routes=list(app.routes))
    cls: type = ingress(bare)(type("K", (), {}))
    with both(Starlette(routes=list(plain.routes)), cls) as outcomes:  # type: ignore[arg-type]
        expected, actual = outcomes(get("/"))
        assert actual == expected
        assert actual.error[0][0] is AssertionError


async def json_endpoint() -> dict[str, int]:
    return {"a": 1}


@pytest.mark.parametrize("is_mounted", [False, True])
def test_telemetry_sees_what_it_sees_under_fastapi(is_mounted: bool) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    pytest.importorskip("fastapi.telemetry")

    class Noting(trace.TracerProvider):  # type: ignore[misc, name-defined]
        def get_tracer(self, *args: Any, **kwargs: Any) -> Any:
            return NotingTracer()

    class NotingTracer(trace.NoOpTracer):  # type: ignore[misc, name-defined]
        def start_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return super().start_span(name, *args, **kwargs)

        def start_as_current_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return super().start_as_current_span(name, *args, **kwargs)

    telemetry: Any = {"telemetry": {"tracer_provider": Noting()}}
    plain, cls, app = pair(
        lambda app: app.get("/")(json_endpoint), **({} if is_mounted else telemetry)
    )
    assert fits(app, cls) == {"json_endpoint": True}
    deployment = Deployment(cls)
    ours: Any = deployment
    if is_mounted:
        above = FastAPI(**telemetry), FastAPI(**telemetry)
        above[0].mount("/m", plain)
        above[1].mount("/m", deployment)
        plain, ours = above

    async def check() -> None:
        async with deployment.running():
            sent = get("/m/" if is_mounted else "/")
            expected = await outcome(plain, sent)
            assert await outcome(ours, sent) == expected
            assert "fastapi.endpoint" in expected.events

    asyncio.run(check())


# Results that are JSON already.

jsonable = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        st.sampled_from(["\ud800", b"x", Text("sub"), Color.RED, Level.LOW, (1,)]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["_sa", "_sa_x", "s", 1, None, Color.RED]),
            inner,
            max_size=4,
        ),
    ),
)


@settings(max_examples=300, deadline=None)
@given(jsonable)
def test_what_is_taken_for_json_is_encoded_as_fastapi_encodes_it(value: Any) -> None:
    def attempt(encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except Exception as error:
            return type(error), str(error)

    if rendering.is_json(value):
        ours = attempt(lambda: rendering.encode(value).encode())
        assert ours == attempt(lambda: JSONResponse(jsonable_encoder(value)).body)


def test_what_python_takes_for_json_and_fastapi_changes_is_not_taken_for_json() -> None:
    circular: list[Any] = []
    circular.append(circular)
    for value in (
        Text("a"),
        Level.LOW,
        b"",
        {1: 1},
        {"_sa": 1},
        (1,),
        [(1,)],
        {"a": b""},
        circular,
    ):
        assert not rendering.is_json(value)


# Behaviour that fewer exit stacks must not change.


def test_what_a_route_class_puts_before_its_app_stays_there(app: FastAPI) -> None:
    class Marked(APIRoute):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            inner = self.app

            async def marked(scope: Scope, receive: Receive, send: Send) -> None:
                scope["mark"] = "here"
                await inner(scope, receive, send)

            self.app = marked

    app.router.route_class = Marked

    @ingress(app)
    class Service:
        @app.get("/")
        async def endpoint(self, request: Request) -> str:
            return str(request.scope["mark"])

    assert json_of(Service, "/") == "here"


def test_an_override_with_yield_ends_before_the_response_is_complete_as_in_fastapi() -> None:
    events: list[str] = []
    app = FastAPI()

    def plain() -> str:
        return "plain"

    async def yielding() -> AsyncIterator[str]:
        events.append("enter")
        yield "override"
        events.append("exit")

    @ingress(app)
    class Service:
        @app.get("/")
        async def endpoint(self, value: str = Depends(plain)) -> str:
            events.append("endpoint")
            return value

    with serve(Service) as client:
        assert client.get("/").json() == "plain"
        app.dependency_overrides[plain] = yielding
        assert client.get("/").json() == "override"

    assert events == ["endpoint", "enter", "endpoint", "exit"]


def test_an_uploaded_file_is_closed_after_the_request(app: FastAPI) -> None:
    files: list[UploadFile] = []

    @ingress(app)
    class Service:
        @app.post("/")
        async def endpoint(self, file: Annotated[UploadFile, File()]) -> bool:
            files.append(file)
            return file.file.closed

    with serve(Service) as client:
        assert client.post("/", files={"file": ("name", b"x")}).json() is False

    assert files[0].file.closed
