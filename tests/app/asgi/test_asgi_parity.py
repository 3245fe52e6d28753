"""A class-based app has the answers and the schema of the same endpoints as functions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    File,
    Form,
    Header,
    HTTPException,
    Query,
    Request,
    Response,
    Security,
    UploadFile,
    WebSocket,
)
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import OAuth2PasswordBearer, SecurityScopes
from pydantic import BaseModel
from starlette.testclient import TestClient

from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import bound, serve

# FastAPI makes one id for all methods of a route, and warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:Duplicate Operation ID many:UserWarning")


class Item(BaseModel):
    name: str
    price: float = 1.0


def guard(authorization: Annotated[str | None, Header()] = None) -> None:
    if authorization != "ok":
        raise HTTPException(401, "no")


def database(name: str = "real") -> str:
    return name


class Page:
    def __init__(self, limit: int = 10, offset: int = 0) -> None:
        self.limit, self.offset = limit, offset


scheme = OAuth2PasswordBearer(tokenUrl="token", scopes={"read": "Read."})


def scoped(scopes: SecurityScopes, token: Annotated[str, Depends(scheme)]) -> list[str]:
    return [token, *scopes.scopes]


class Endpoints:
    """Endpoints, written once: methods for `ingress`, bound methods for plain FastAPI."""

    def secret(self) -> str:
        "Docs."
        return "s"

    async def deep(self, n: int, q: Annotated[int, Query(ge=0)] = 3) -> list[int]:
        return [n, q]

    async def special(self) -> str:
        return "special"

    async def create(self, item: Item, q: int = 3) -> Item:
        return item

    def put(self, item: Item, other: Annotated[Item, Body()], response: Response) -> list[Item]:
        response.headers["x-put"] = "1"
        return [item, other]

    async def multi(self, request: Request, tasks: BackgroundTasks) -> str:
        return request.url.path

    async def many(self, request: Request) -> str:
        return request.method

    def form(self, a: Annotated[str, Form()], f: Annotated[UploadFile, File()]) -> dict[str, Any]:
        return {"a": a, "n": f.filename}

    async def ws(self, sock: WebSocket, db: Annotated[str, Depends(database)]) -> None:
        await sock.accept()
        await sock.send_text(await sock.receive_text() + db)
        await sock.close()

    def db(
        self, db: Annotated[str, Depends(database)], page: Annotated[Page, Depends()]
    ) -> list[Any]:
        return [db, page.limit, page.offset]

    def read(self, user: Annotated[list[str], Security(scoped, scopes=["read"])]) -> list[str]:
        return user

    async def unsafe(self) -> Any:
        return [{"name": "x", "zzz": 1}]

    def numbers(self, n: int = 2):  # type: ignore[no-untyped-def]
        yield from range(n)

    def text(self) -> str:
        return "text"

    def hook(self, item: Item) -> None: ...


def app_of(methods: Any) -> FastAPI:
    """Return an app with the endpoints, a free function, the includes, and a late route."""
    app = FastAPI(title="T")
    router, inner = APIRouter(prefix="/r", tags=["r"]), APIRouter(prefix="/in")
    router.get("/secret")(methods.secret)
    inner.get("/deep/{n}")(methods.deep)
    app.get("/items/special")(methods.special)
    app.post("/items", response_model=Item, status_code=201)(methods.create)
    app.put("/items")(methods.put)
    app.get("/three", tags=["x"])(methods.multi)
    app.get("/two")(methods.multi)
    app.api_route("/any", methods=["GET", "PUT", "DELETE", "PATCH"])(methods.many)
    app.post("/form")(methods.form)
    app.websocket("/ws")(methods.ws)
    app.get("/db")(methods.db)
    app.get("/scoped")(methods.read)
    app.get("/unsafe", response_model=list[Item], response_model_exclude_defaults=True)(
        methods.unsafe
    )
    app.get("/numbers")(methods.numbers)
    app.get("/text", response_class=PlainTextResponse, deprecated=True)(methods.text)
    app.webhooks.post("hook")(methods.hook)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.name == "put":
            route.operation_id = "renamed"

    @app.get("/items/{x}")
    async def free(x: str) -> dict[str, str]:
        return {"x": x}

    router.include_router(inner, prefix="/nest", dependencies=[Depends(guard)])
    app.include_router(router, dependencies=[Depends(guard)], prefix="/one")
    app.include_router(router, prefix="/two", tags=["second"])

    @app.get("/late", operation_id="too_late")
    def late() -> str:
        return "late"

    return app


OK = {"authorization": "ok"}

REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/one/r/secret", {}),
    ("GET", "/one/r/secret", {"headers": OK}),
    ("GET", "/two/r/secret", {}),
    ("GET", "/two/r/nest/in/deep/3", {}),
    ("GET", "/two/r/nest/in/deep/3", {"headers": OK}),
    ("GET", "/two/r/nest/in/deep/3?q=-1", {"headers": OK}),
    ("GET", "/items/special", {}),
    ("GET", "/items/abc", {}),
    ("GET", "/items/", {}),
    ("POST", "/items", {"json": {"name": "a"}}),
    ("POST", "/items", {"json": {"price": "x"}}),
    ("POST", "/items?q=z", {"json": {"name": "a"}}),
    ("POST", "/items", {"content": b"{", "headers": {"content-type": "application/json"}}),
    ("PUT", "/items", {"json": {"item": {"name": "a"}, "other": {"name": "b"}}}),
    ("DELETE", "/items", {}),
    ("GET", "/nope", {}),
    ("GET", "/two", {}),
    ("GET", "/three", {}),
    ("PATCH", "/any", {}),
    ("POST", "/form", {"data": {"a": "1"}, "files": {"f": ("n.txt", b"x")}}),
    ("POST", "/form", {"data": {"a": "1"}}),
    ("GET", "/db?limit=3&name=x", {}),
    ("GET", "/db?limit=x", {}),
    ("GET", "/scoped", {}),
    ("GET", "/scoped", {"headers": {"authorization": "Bearer t"}}),
    ("GET", "/unsafe", {}),
    ("GET", "/numbers?n=3", {}),
    ("GET", "/text", {}),
    ("HEAD", "/text", {}),
    ("GET", "/late", {}),
    ("GET", "/docs", {}),
    ("GET", "/redoc", {}),
    ("GET", "/openapi.json", {}),
]


ClassApp = tuple[FastAPI, type]


@pytest.fixture(scope="module")
def class_app() -> ClassApp:
    app = app_of(Endpoints)
    return app, ingress(app)(type("K", (Endpoints,), {}))


@pytest.fixture(scope="module")
def function_app() -> FastAPI:
    return app_of(Endpoints())


@pytest.mark.reliability("F01")
@pytest.mark.parametrize(("method", "path", "options"), REQUESTS)
def test_the_answer_is_the_same(
    method: str, path: str, options: Any, class_app: ClassApp, function_app: FastAPI
) -> None:
    with serve(class_app[1]) as served, TestClient(function_app) as plain:
        ours = served.request(method, path, **options)
        theirs = plain.request(method, path, **options)

    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    assert sorted(ours.headers.items()) == sorted(theirs.headers.items())


@pytest.mark.reliability("F01")
def test_the_schema_is_the_same_byte_for_byte_without_a_replica(
    class_app: ClassApp, function_app: FastAPI
) -> None:
    assert json.dumps(bound(class_app[1]).openapi()) == json.dumps(function_app.openapi())


@pytest.mark.reliability("F01")
def test_a_websocket_answers_the_same(class_app: ClassApp) -> None:
    with serve(class_app[1]) as client, client.websocket_connect("/ws") as socket:
        socket.send_text("x")

        assert socket.receive_text() == "xreal"


def test_the_users_app_keeps_its_routes(class_app: ClassApp) -> None:
    app, cls = class_app
    routes = list(app.routes)

    bound(cls)

    assert app.routes == routes
    assert all(mine is theirs for mine, theirs in zip(app.routes, routes, strict=True))
