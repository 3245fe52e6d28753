"""Endpoints of every shape, written once: methods for `ingress`, bound methods for plain FastAPI.

User code (validators, dependencies, endpoints, background tasks) appends to `events`, so that two
runs can be compared by more than their answers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import fastapi.routing
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Cookie,
    Depends,
    FastAPI,
    Form,
    Header,
    HTTPException,
    Path,
    Query,
    Request,
    Response,
    Security,
)
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    StreamingResponse,
)
from fastapi.security import (
    APIKeyHeader,
    HTTPBasic,
    HTTPBearer,
    OAuth2PasswordBearer,
    SecurityScopes,
)
from pydantic import AfterValidator, BaseModel, Field, Json, field_validator
from starlette.requests import HTTPConnection

from ingress.app.asgi.spec import ingress

if hasattr(fastapi.routing, "EventSourceResponse"):
    from fastapi.sse import EventSourceResponse, ServerSentEvent

events: list[Any] = []


class Color(str, Enum):  # noqa: UP042 - what most apps have
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Text(str):
    pass


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Item(BaseModel):
    name: str
    price: float = 1.0
    tags: list[str] = []
    note: str | None = Field(default=None, alias="Note")


class Checked(BaseModel):
    """A model that records its validation; a user's validator may raise any error."""

    name: str = "a"
    q: int = 0

    @field_validator("name")
    @classmethod
    def check(cls, value: str) -> str:
        events.append(("validator", value))
        if value == "x":
            raise ValueError("not x")
        if value == "teapot":
            raise Teapot
        if value == "1":
            raise HTTPException(418, "from a validator")
        return value


class Filters(BaseModel):
    model_config = {"extra": "forbid"}
    limit: int = Field(10, ge=0)
    tags: list[str] = []


class Teapot(Exception):
    pass


def noted(value: Any) -> Any:
    events.append(("noted", value))
    if value == "x":
        raise ValueError("not x")
    return value


Noted = Annotated[str, AfterValidator(noted)]


class Recursive(dict[str, Any]):
    pass


RETURNS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "str": lambda: "text \u20ac",
    "text": lambda: Text("sub"),
    "int": lambda: 10**30,
    "huge": lambda: 10**5000,
    "float": lambda: 1e300,
    "true": lambda: True,
    "nan": lambda: {"a": float("nan")},
    "inf": lambda: [float("inf")],
    "surrogate": lambda: "\ud800",
    "keys": lambda: {1: "a", None: "b", 2.5: "c", False: "d"},
    "sa": lambda: {"_sa_state": 1, "a": {"_sa": 2}},
    "deep": lambda: nested(40),
    "tuple": lambda: (1, [2, (3,)]),
    "set": lambda: {1},
    "deque": lambda: deque([1, None]),
    "generator": lambda: (n for n in range(3)),
    "bytes": lambda: b"bytes",
    "bad bytes": lambda: b"\xff",
    "color": lambda: Color.RED,
    "level": lambda: {"level": Level.LOW, Level.LOW: Color.RED},
    "point": lambda: Point(1),
    "item": lambda: Item(name="n", Note="x"),
    "dict": lambda: {"name": "n", "price": 2, "other": 1},
    "items": lambda: [Item(name="n"), {"name": "m", "tags": ["t"]}],
    "wrong": lambda: {"name": [1]},
    "moment": lambda: [datetime(2020, 1, 2), date(2020, 1, 2), timedelta(1), Decimal("1.5")],
    "uuid": lambda: UUID(int=1),
    "object": lambda: object,
    "class": lambda: Item,
    "response": lambda: Response(b"own", 203, {"x-own": "1"}),
    "json": lambda: JSONResponse({"a": 1}, 202),
    "redirect": lambda: RedirectResponse("/there"),
    "stream": lambda: StreamingResponse(iter_bytes()),
    "big": lambda: [list(range(2000)), {"k" * 100: "v" * 2000}],
}


ITEMS: list[Any] = [
    *(
        None,
        True,
        7,
        1.5,
        "text \u20ac",
        "two\nlines\r\nand\u2028more",
        {},
        {"a": [1, {"b": None}]},
    ),
    *(float("nan"), [float("inf"), {"a": float("-inf")}], {1: "a", None: "b"}, (1, (2,)), {1}),
    *(Color.RED, Point(1), Item(name="n", Note="x"), datetime(2020, 1, 2), b"bytes"),
    {"_sa_state": 1, "a": {"_sa": 2}},
]
"""Items of an untyped stream."""

EVENTS: list[dict[str, Any]] = [
    {},
    {"data": "text"},
    {"data": {"a": float("nan")}, "event": "e", "id": "1", "retry": 0, "comment": "c"},
    {"data": Item(name="n", Note="x"), "id": ""},
    {"data": [Point(1), Color.RED]},
    {"raw_data": "one\ntwo\r\nthree\rfour\u2028five\n\n", "event": ""},
    {"raw_data": ""},
    {"comment": "two\nlines"},
    {"data": 0},
    {"data": False, "retry": 5000},
]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def iter_bytes() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


def what(kind: str = "str") -> Any:
    """Return, or raise, one of the results of endpoints."""
    if kind == "http":
        raise HTTPException(409, {"why": 1}, {"x-why": "2"})
    if kind == "teapot":
        raise Teapot
    if kind == "error":
        raise LookupError("no handler for it")
    return RETURNS[kind]() if kind in RETURNS else kind


KINDS = [*RETURNS, "http", "teapot", "error", "other"]


# Dependencies.


async def first(q: int = 0) -> str:
    events.append(("first", q))
    return f"first{q}"


def second(first: Annotated[str, Depends(first)], limit: Annotated[int, Query(ge=0)] = 3) -> str:
    events.append(("second", first, limit))
    return f"{first}-{limit}"


async def third(
    first: Annotated[str, Depends(first)],
    again: Annotated[str, Depends(first, use_cache=False)],
    second: Annotated[str, Depends(second)],
) -> list[str]:
    events.append(("third", first, again, second))
    return [first, again, second]


async def auth(x_token: Annotated[str | None, Header()] = None) -> str:
    events.append(("auth", x_token))
    if x_token == "x":
        raise HTTPException(401, "no")
    return x_token or "unset"


def not_shared(q: str = "") -> list[str]:
    if q == "teapot":
        raise Teapot
    return [q]


class Page:
    def __init__(self, limit: int = 10, tags: Annotated[list[str], Query()] = []) -> None:  # noqa: B006
        events.append(("page", limit, tags))
        self.values = [limit, *tags]


class Instance:
    async def __call__(self, flag: bool = False) -> bool:
        events.append(("instance", flag))
        return flag


instance = Instance()


async def with_item(item: Annotated[Checked, Body()]) -> str:
    events.append(("with_item", item.name))
    return item.name


async def writes(response: Response, tasks: BackgroundTasks, q: str = "") -> None:
    response.headers["x-dependency"] = "1"
    response.set_cookie("c", "v")
    if q == "1":
        response.status_code = 299
    tasks.add_task(events.append, "task of the dependency")


async def yields() -> AsyncIterator[str]:
    events.append("enter")
    yield "value"
    events.append("exit")


def scoped(scopes: SecurityScopes) -> list[str]:
    return scopes.scopes


class Loud(Response):
    """Records the arguments that FastAPI passes to a response class."""

    media_type = "text/loud"

    def __init__(self, content: Any, **given: Any) -> None:
        events.append(("Loud", sorted(given)))
        super().__init__(repr(content).upper(), **given)


class Gone(JSONResponse):
    def __init__(self, content: Any, status_code: int = 204, background: Any = None) -> None:
        super().__init__(content, status_code, background=background)


# Shapes.


class TextStream(StreamingResponse):
    media_type = "text/plain"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One endpoint. `query`, `body` and `header` make a valid request."""

    name: str
    path: str
    method: str
    fit: bool
    query: str
    body: Any
    header: tuple[bytes, bytes]
    options: dict[str, Any]

    @property
    def served_at(self) -> str:
        """The served path, without the path parameter."""
        return ("/in/r" if self.name in INCLUDED else "") + self.path.split("{")[0]

    @property
    def takes_kind(self) -> bool:
        return "kind" in inspect.signature(vars(Shapes)[self.name]).parameters


SHAPES: dict[str, Shape] = {}


def shape(
    path: str = "",
    *,
    method: str = "GET",
    fit: bool = True,
    query: str = "",
    body: Any = None,
    header: tuple[bytes, bytes] = (b"x-token", b"t"),
    **options: Any,
) -> Callable[[Any], Any]:
    def declare(func: Any) -> Any:
        name = func.__name__
        SHAPES[name] = Shape(name, f"/{name}{path}", method, fit, query, body, header, options)
        return func

    return declare


class Shapes:
    # Parameters.

    @shape()
    async def bare(self) -> str:
        events.append("bare")
        return "hello"

    @shape(response_model=None)
    def bare_def(self) -> str:
        return "hello"

    @shape("/{x}")
    async def path(self, x: int, q: str = "you", n: int | None = None) -> dict[str, Any]:
        return {"x": x, "q": q, "n": n}

    @shape("/{x:path}")
    async def rest(self, x: Annotated[Noted, Path(max_length=5)], q: bool = False) -> list[Any]:
        return [x, q]

    @shape("/{x:float}")
    async def converted(self, x: float, q: float = 1) -> list[Any]:
        return [x, q]

    @shape(query="q=1&n=1&x=red&flag=a")
    async def required(self, q: str, n: int, x: Color, flag: Literal["a", "1"]) -> list[Any]:
        return [q, n, x, flag]

    @shape(query="x=1&flag=aa")
    async def defaults(
        self,
        q: Annotated[int, Query()] = "5",  # type: ignore[assignment]
        n: int = None,  # type: ignore[assignment]  # noqa: RUF013
        x: Annotated[int, Query(le=3)] = 7,
        limit: Annotated[int | None, Query(ge=0, alias="Limit")] = 2,
        flag: Annotated[str, Query(min_length=2)] = "a",
        tags: Annotated[list[str], Query()] = ["d"],  # noqa: B006
        name: Annotated[str, Query(default_factory=lambda: "made")] = ...,  # type: ignore[assignment]
    ) -> list[Any]:
        tags.append("mine")
        return [q, n, x, limit, flag, tags, name]

    @shape()
    async def scalars(
        self,
        q: Decimal | None = None,
        n: UUID | None = None,
        x: datetime | date | int | None = None,
        limit: timedelta = timedelta(1),
        flag: Level = Level.LOW,
        name: Color = Color.RED,
        price: Annotated[Json[int], Query()] = "1",  # type: ignore[assignment]
    ) -> list[Any]:
        return [q, n, x, limit, flag, name, price]

    @shape(query="q=1&q=2&tags=a&tags=b&x=[]")
    async def sequences(
        self,
        q: Annotated[list[int], Query()],
        tags: Annotated[set[str] | None, Query()] = None,
        n: Annotated[tuple[int, ...], Query()] = (),
        x: Annotated[Json[list[str]], Query()] = "[]",  # type: ignore[assignment]
    ) -> list[Any]:
        return [q, sorted(tags or []), n, x]

    @shape()
    async def model(self, filters: Annotated[Filters, Query()]) -> Filters:
        return filters

    @shape()
    async def headers(
        self,
        x_token: Annotated[str, Header()] = "none",
        user_agent: Annotated[Noted | None, Header(max_length=3)] = None,
        q: Annotated[list[str] | None, Header()] = None,
        under_score: Annotated[str | None, Header(convert_underscores=False)] = None,
        name: Annotated[int | None, Header(alias="X-Number")] = None,
    ) -> list[Any]:
        return [x_token, user_agent, q, under_score, name]

    @shape()
    async def cookies(
        self, q: Annotated[str | None, Cookie()] = None, n: Annotated[int, Cookie()] = 1
    ) -> list[Any]:
        return [q, n]

    @shape("/{x}", method="POST", query="q=a", body={})
    async def everything(
        self,
        x: int,
        q: Noted,
        item: Checked,
        x_token: Annotated[Noted, Header()] = "none",
        n: Annotated[Noted, Cookie()] = "none",
    ) -> list[Any]:
        return [x, q, item, x_token, n]

    # Bodies.

    @shape(method="POST", response_model=Item, body={"name": "n"})
    async def item(self, item: Item) -> Any:
        return item

    @shape(method="PUT", status_code=201, body={"name": "n"})
    def item_def(self, item: Item, q: int = 3) -> Item:
        item.tags.append(str(q))
        return item

    @shape(method="POST", body={"name": "n"})
    async def optional(self, item: Item | None = None) -> Item | None:
        return item

    @shape(method="POST", body={"item": {"name": "n"}})
    async def embedded(self, item: Annotated[Item, Body(embed=True)]) -> Item:
        return item

    @shape(method="POST", body={"item": {}, "name": "n"})
    async def several(
        self, item: Checked, name: Annotated[str, Body()], n: Annotated[int, Body()] = 3
    ) -> list[Any]:
        return [item, name, n]

    @shape(method="POST", body=[1])
    async def anything(self, value: Annotated[Any, Body()]) -> Any:
        return {"is": repr(value)}

    @shape(method="POST", body=[1])
    async def any_default(self, value: Annotated[Any, Body()] = {"d": 1}) -> Any:  # noqa: B006
        return value

    @shape(method="POST", body={"a": 1})
    async def mapping(self, value: dict[str, int]) -> dict[str, int]:
        return value

    @shape(method="POST", body=[{"name": "n"}, 1, "a"])
    async def sequence(self, value: list[Item | int | str]) -> Any:
        return value

    @shape(method="POST", body="raw")
    async def raw(self, value: Annotated[bytes, Body()] = b"d") -> Any:
        return repr(value)

    @shape(method="POST", body={"name": "n"})  # on a router that does not ask for a content type
    async def lenient(self, item: Item) -> Any:
        return item

    @shape(method="DELETE", body={})
    async def checked(self, item: Checked, q: Noted = "1") -> Any:
        events.append("endpoint")
        return [item, q]

    @shape(method="POST", dependencies=[Depends(auth)], query="q=a", body={})
    async def after_auth(self, item: Checked, q: Noted) -> Any:
        events.append("endpoint")
        return [item, q]

    @shape(method="POST", body={})
    async def in_dependency(self, name: Annotated[str, Depends(with_item)]) -> str:
        return name

    @shape(method="POST", body={"item": {}})
    async def in_both(self, value: Annotated[str, Depends(with_item)], item: Checked) -> Any:
        return [value, item]

    @shape(method="POST", fit=False)
    async def form(self, q: Annotated[str, Form()] = "none") -> str:
        return q

    # Dependencies.

    @shape(dependencies=[Depends(auth), Depends(first)])
    async def depends(
        self,
        third: Annotated[list[str], Depends(third)],
        page: Annotated[Page, Depends()],
        flag: Annotated[bool, Depends(instance)],
        values: Annotated[list[str], Depends(not_shared)],
        n: int = 1,
    ) -> list[Any]:
        return [third, page.values, flag, values, n]

    @shape()
    def depends_def(
        self,
        one: Annotated[list[str], Depends(not_shared)],
        two: Annotated[list[str], Depends(not_shared)],
        three: Annotated[list[str], Depends(not_shared, use_cache=False)],
    ) -> list[Any]:
        return [one is two, one is three, one]

    @shape(header=(b"authorization", b"Bearer t"))
    async def bearer(self, token: Annotated[Any, Depends(HTTPBearer())]) -> Any:
        return token

    @shape(header=(b"authorization", b"Basic dTpw"))
    async def basic(self, user: Annotated[Any, Depends(HTTPBasic(auto_error=False))]) -> Any:
        return user

    @shape()
    async def key(self, key: Annotated[str, Security(APIKeyHeader(name="X-Token"))]) -> str:
        return key

    @shape(header=(b"authorization", b"Bearer t"))
    async def oauth(
        self, token: Annotated[str, Depends(OAuth2PasswordBearer(tokenUrl="t"))]
    ) -> str:
        return token

    @shape(fit=False)
    async def scopes(self, given: Annotated[list[str], Security(scoped, scopes=["a"])]) -> Any:
        return given

    @shape(fit=False)
    async def with_yield(self, value: Annotated[str, Depends(yields)]) -> str:
        events.append("endpoint")
        return value

    # Dependencies shared within a request.

    @shape(dependencies=[Depends(writes)])
    async def response(self, response: Response, q: str = "", kind: str = "str") -> Any:
        response.headers["x-endpoint"] = q.encode("ascii", "replace").decode()
        if q == "0":
            response.status_code = 0
        return what(kind)

    @shape(status_code=201)
    async def tasks(self, tasks: BackgroundTasks, kind: str = "str") -> Any:
        tasks.add_task(events.append, "task")
        return what(kind)

    @shape(method="POST", body=1)
    async def request(self, request: Request, connection: HTTPConnection, kind: str = "") -> Any:
        read = await request.body()
        stacks = [type(request.scope.get(key)).__name__ for key in STACKS]
        return [read.hex(), request is connection, request.url.path, stacks, what(kind)]

    @shape(method="POST", body=[1])
    async def request_after_body(self, request: Request, value: Annotated[Any, Body()]) -> Any:
        streamed = [chunk async for chunk in request.stream()]
        same = "_json" in vars(request) and await request.json() is value
        return [b"".join(streamed).hex(), type(await request.body()).__name__, same]

    @shape(method="POST", body=1)
    async def request_stream(self, request: Request, q: str = "") -> Any:
        if q == "1":
            return await request.is_disconnected()
        return [chunk.hex() async for chunk in request.stream()]

    # Answers.

    @shape()
    async def returns(self, kind: str = "none") -> Any:
        return what(kind)

    @shape(response_model=None)
    def returns_def(self, kind: str = "none") -> Any:
        return what(kind)

    @shape(response_model=Item, response_model_exclude_none=True, response_model_by_alias=False)
    async def as_item(self, kind: str = "item") -> Any:
        return what(kind)

    @shape(response_model=list[Item], response_model_include={"name"}, status_code=202)
    async def as_items(self, kind: str = "items") -> Any:
        return what(kind)

    @shape(response_model=Item | None, response_model_exclude_unset=True)
    async def as_set(self, kind: str = "item") -> Any:
        return what(kind)

    @shape(response_model=Item, response_model_exclude={"tags"}, response_class=JSONResponse)
    async def as_json(self, kind: str = "item") -> Any:
        return what(kind)

    @shape(response_model=Checked, response_model_exclude_defaults=True)
    async def as_checked(self, kind: str = "dict") -> Any:
        return what(kind)

    @shape(response_class=PlainTextResponse)
    async def as_text(self, kind: str = "str") -> Any:
        return what(kind)

    @shape(response_class=HTMLResponse, response_model=str)
    async def as_html(self, kind: str = "str") -> Any:
        return what(kind)

    @shape(response_class=RedirectResponse, status_code=303)
    async def as_redirect(self, kind: str = "str") -> Any:
        return what(kind)

    @shape(response_class=Loud)
    async def as_loud(self, kind: str = "str") -> Any:
        return what(kind)

    @shape(response_class=Gone)
    async def as_gone(self, kind: str = "str") -> Any:
        return what(kind)

    @shape(status_code=204, response_model=None)
    async def no_content(self, kind: str = "none") -> Any:
        return what(kind)

    @shape(status_code=0, response_model=None)
    async def no_status(self, kind: str = "none") -> Any:
        return what(kind)

    @shape(method="HEAD")
    async def head(self) -> str:
        return "head"

    if hasattr(fastapi.routing, "EventSourceResponse"):  # FastAPI below 0.134 streams no items

        @shape()
        async def lines(self, n: int = 2) -> AsyncIterator[int]:
            for number in range(min(n, 50)):
                yield number

        @shape()
        def lines_def(self, n: int = 2) -> Iterator[int]:
            yield from range(min(n, 50))

        @shape(
            method="POST",
            body={"name": "n"},
            status_code=201,
            response_model_exclude_unset=True,
            dependencies=[Depends(auth)],
        )
        async def lines_of_models(
            self,
            item: Item,
            response: Response,
            tasks: BackgroundTasks,
            one: Annotated[None, Depends(writes)],
        ) -> AsyncIterator[Item]:
            response.headers["x-never"] = "too late"
            yield item
            yield Item(name="second", price=2)

        @shape(
            method="POST",
            body={"name": "n"},
            status_code=201,
            response_model_by_alias=False,
            response_model_exclude={"tags"},
        )
        def lines_of_models_def(
            self, item: Item, one: Annotated[None, Depends(writes)], request: Request
        ) -> Iterator[Item]:
            yield item
            yield {"name": request.url.path, "price": "3", "other": 1}  # type: ignore[misc]

        @shape(response_model=None)
        async def lines_of_anything(self) -> AsyncIterator[Any]:
            for item in ITEMS:
                yield item

        @shape(response_model=None)
        def lines_of_anything_def(self) -> Iterator[Any]:
            yield from ITEMS

        @shape(response_class=EventSourceResponse)
        async def events(self, n: int = 2) -> AsyncIterator[int]:
            for number in range(min(n, 50)):
                yield number

        @shape(response_class=EventSourceResponse)
        def events_def(self, n: int = 2) -> Iterator[int]:
            yield from range(min(n, 50))

        @shape(
            method="POST",
            body={"name": "n"},
            response_class=EventSourceResponse,
            status_code=202,
            response_model_exclude_none=True,
        )
        async def events_of_models(
            self, item: Item, one: Annotated[None, Depends(writes)], request: Request
        ) -> AsyncIterator[Item]:
            path = request.url.path  # raises if the query is not text
            yield item
            yield ServerSentEvent(data=item, event=path)  # type: ignore[misc]

        @shape(
            method="POST",
            body={"name": "n"},
            response_class=EventSourceResponse,
            response_model_include={"name", "note"},
            dependencies=[Depends(writes)],
        )
        def events_of_models_def(self, item: Item, q: str = "") -> Iterator[Item]:
            yield item
            yield {"name": q, "Note": "n"}  # type: ignore[misc]

        @shape(response_class=EventSourceResponse)
        async def events_of_anything(self):  # type: ignore[no-untyped-def]
            for item in ITEMS:
                yield item
            for event in EVENTS:
                yield ServerSentEvent(**event)

        @shape(response_class=EventSourceResponse)
        def events_of_anything_def(self):  # type: ignore[no-untyped-def]
            yield from ITEMS
            yield from [ServerSentEvent(**event) for event in EVENTS]

        @shape(response_class=EventSourceResponse)
        def no_events(self) -> Iterator[ServerSentEvent]:
            yield from ()

        @shape(response_class=EventSourceResponse, fit=False)
        def events_of_a_dependency(
            self, one: Annotated[str, Depends(yields)]
        ) -> Iterator[ServerSentEvent]:
            yield ServerSentEvent(data=one)

        @shape(response_class=StreamingResponse, fit=False)
        def chunks(self) -> Iterator[str]:
            yield "chunk"

        @shape(response_class=TextStream, fit=False)
        def text_chunks(self) -> Iterator[str]:
            yield "text"

        @shape()
        async def included_lines(self) -> AsyncIterator[Item]:
            yield Item(name="n")

    # On a router that is included below.

    @shape("/{x}")
    async def included(self, x: int, one: Annotated[str, Depends(first)]) -> Any:
        return [x, one]


INCLUDED = ("included", "included_lines", "lenient")
STACKS = ("fastapi_inner_astack", "fastapi_function_astack", "fastapi_middleware_astack")


def app_of(shapes: Iterable[Shape], endpoint: Callable[[str], Any]) -> FastAPI:
    """Return an app of these shapes. `endpoint` returns the function for a name."""
    app = FastAPI()
    router = APIRouter(prefix="/r", strict_content_type=False)
    for each in shapes:
        to = router if each.name in INCLUDED else app
        to.add_api_route(each.path, endpoint(each.name), methods=[each.method], **each.options)
    app.include_router(router, prefix="/in", dependencies=[Depends(auth)])

    @app.exception_handler(Teapot)
    async def teapot(request: Request, error: Teapot) -> Response:
        # Reads the rest of the body, or its cached copy.
        return PlainTextResponse(f"teapot {(await request.body())!r}", 418)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        context = getattr(error, "endpoint_ctx", None)
        told = (error.errors(), error.body, str(error), context, request.scope["route"].path)
        return PlainTextResponse(repr(told).encode("utf-8", "backslashreplace"), 422)

    return app


def plain_app(shapes: Iterable[Shape]) -> FastAPI:
    # FastAPI caches the file and line of an endpoint by `id`, which Python reuses.
    fastapi.routing._endpoint_context_cache.clear()
    instance = Shapes()
    return app_of(shapes, lambda name: getattr(instance, name))


def deployment_of(shapes: Iterable[Shape]) -> type:
    """Return a class to deploy, with a new app."""
    app = app_of(shapes, lambda name: vars(Shapes)[name])
    cls: type = ingress(app)(type("Shapes", (Shapes,), {}))
    return cls
