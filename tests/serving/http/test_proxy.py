"""`http.proxy`: the application of a path, and the proxy's own answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.serving.http.proxy import RouteTable
from ingress.serving.replicas.router import Router
from tests.asgi_helpers import request
from tests.servers import UPGRADE, Connection, bind, get, served

pytestmark = pytest.mark.usefixtures("shutdown")


def named(text: str) -> serve.Application:
    @serve.deployment
    async def name(request: Request) -> dict[str, str]:
        return {"app": text, "path": request.url.path, "root_path": request.scope["root_path"]}

    return name.bind()


def paths_app() -> serve.Application:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Paths:
        @app.get("/items/{number}", name="item")
        async def item(self, request: Request, number: int) -> str:
            return str(request.url_for("item", number=number))

        @app.get("/")
        async def root(self, request: Request) -> str:
            return str(request.scope["root_path"])

    return bind(Paths)


# Routes.


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/", "/"),
        ("/x", "/"),
        ("/b", "/b"),
        ("/b/", "/b"),
        ("/b/c", "/b/c"),
        ("/b/c/d", "/b/c"),
        ("/b/cd", "/b"),
        ("/bx", "/"),
        ("/B", "/"),
        ("", "/"),
    ],
)
def test_the_longest_prefix_that_ends_at_a_slash_wins(path: str, prefix: str) -> None:
    table = RouteTable({each: Router(DeploymentID(each)) for each in ("/b", "/", "/b/c")})

    route = table.match(path)

    assert route is not None
    assert route.prefix == prefix


def test_applications_are_told_apart_by_their_prefix() -> None:
    for name, prefix in (("root", "/"), ("b", "/b"), ("bc", "/b/c")):
        port = served(named(name), name, prefix)

    expected = {"/bx": "root", "/b/x": "b", "/b/cd": "b", "/b/c/d?q=/b": "bc"}
    assert {path: json.loads(get(port, path).body)["app"] for path in expected} == expected


def test_a_path_of_no_application_is_a_404_that_says_where_to_look() -> None:
    port = served(named("b"), "b", "/b")
    answer = get(port, "/bx")

    assert answer.status == 404
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body == (b"Path '/bx' not found. Ping http://.../-/routes for available routes.")


def test_an_application_without_a_prefix_is_not_served_over_http() -> None:
    port = served(named("b"), "b", "/b")
    serve.run(named("hidden"), name="hidden", route_prefix=None)

    assert json.loads(get(port, "/-/routes").body) == {"/b": "b"}


def test_a_deleted_application_is_a_404_and_the_others_stay() -> None:
    port = served(named("a"), "a", "/a")
    served(named("b"), "b", "/b")
    serve.delete("a")

    assert get(port, "/a").status == 404
    assert get(port, "/b").status == 200


def test_links_and_docs_stand_under_the_prefix() -> None:
    port = served(paths_app(), "paths", "/v1")
    base = f"http://127.0.0.1:{port}/v1"

    assert httpx.get(f"{base}/items/3").json() == f"{base}/items/3"
    assert httpx.get(f"{base}/").json() == "/v1"
    assert "/v1/openapi.json" in httpx.get(f"{base}/docs").text
    schema = httpx.get(f"{base}/openapi.json").json()
    assert list(schema["paths"]) == ["/items/{number}", "/"]
    assert schema["servers"] == [{"url": "/v1"}]


@pytest.mark.parametrize(
    ("path", "status"), [("/api/items/3", 200), ("/items/3", 200), ("/apix", 404)]
)
def test_the_servers_root_path_is_taken_off_where_it_ends(path: str, status: int) -> None:
    with TestClient(paths_app(), root_path="/api") as client:
        assert client.get(path).status_code == status


def test_a_root_path_and_a_prefix_add_up() -> None:
    serve.start({"port": 0, "root_path": "/api"})
    port = served(paths_app(), "paths", "/v1")
    answer = httpx.get(f"http://127.0.0.1:{port}/v1/items/3")

    assert answer.json() == f"http://127.0.0.1:{port}/api/v1/items/3"


# The proxy's own answers.


def test_healthz_says_success_and_before_there_is_anything_503() -> None:
    serve.start({"port": 0})
    (url,) = serve.status().proxies
    before = httpx.get(f"{url}/-/healthz")
    serve.run(named("a"))
    after = httpx.post(f"{url}/-/healthz")

    assert (before.status_code, before.text) == (503, "Route table is not populated yet.")
    assert (after.status_code, after.text) == (200, "success")
    assert "x-request-id" in after.headers


HOSTS = {
    "127.0.0.1": 200,
    "127.0.0.1:8000": 200,
    "localhost": 200,
    "LocalHost:80": 200,
    "[::1]:8000": 200,
    "evil.example": 404,
    "evil.example:8000": 404,
    "localhost.evil.example": 404,
    "127.0.0.1.evil.example": 404,
    "": 404,
    "192.168.1.2": 404,
    "testserver": 404,  # the test client's host; it uses no socket
}


@pytest.mark.reliability("S02")
def test_routes_are_told_to_a_loopback_host_only() -> None:
    url = f"http://127.0.0.1:{served(named('b'), 'b', '/b')}/-/routes"
    answers = {host: httpx.get(url, headers={"host": host}) for host in HOSTS}

    assert {host: answer.status_code for host, answer in answers.items()} == HOSTS
    assert answers["localhost"].json() == {"/b": "b"}


@pytest.mark.parametrize(
    "header",
    [
        "Forwarded: for=192.0.2.60",
        "Via: 1.1 gateway",
        "X-Forwarded-For: 192.0.2.60",
        "X-Forwarded-For: 127.0.0.1",
        "X-FORWARDED-HOST: localhost",
        "X-Forwarded-Proto: https",
        "X-Forwarded-Anything:",
        "X-Real-IP: 192.0.2.60",
    ],
)
@pytest.mark.reliability("S02")
def test_routes_are_not_told_through_a_proxy(header: str) -> None:
    port = served(named("b"), "b", "/b")

    assert get(port, "/-/routes").status == 200
    assert get(port, "/-/routes", f"{header}\r\n").status == 404
    assert get(port, "/-/healthz", f"{header}\r\n").status == 200


# A URL as the target precedes the Host field: RFC 9112, 3.2.2.
TARGETS = {
    "http://localhost:8000/-/routes": 200,
    "http://127.0.0.1/-/routes": 200,
    "http://evil.example/-/routes": 404,
    "http://localhost@evil.example/-/routes": 404,
    "//evil.example/-/routes": 404,
}


@pytest.mark.reliability("S02")
def test_routes_are_told_by_a_loopback_url_only() -> None:
    port = served(named("b"), "b", "/b")
    statuses = {}
    for target in TARGETS:
        with Connection(port) as connection:
            connection.request(target)
            statuses[target] = connection.answer().status
    assert statuses == TARGETS

    with Connection(port) as connection:  # the server reads the second before it answers the first
        first = b"GET http://evil.example/-/routes HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = b"GET /-/livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.send(first + last)
        answers = connection.receive_all()
    assert answers.startswith(b"HTTP/1.1 404 ")
    assert answers.endswith(b"alive")


def test_routes_are_for_get_and_head() -> None:
    url = f"http://127.0.0.1:{served(named('b'), 'b', '/b')}/-/routes"
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = httpx.request(method, url)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert httpx.head(url).status_code == httpx.get(url).status_code == 200
    elsewhere = httpx.post(url, headers={"host": "evil.example"})
    assert (elsewhere.status_code, "allow" in elsewhere.headers) == (404, False)


@pytest.mark.anyio
async def test_routes_are_told_to_clients_of_the_same_process() -> None:
    application = named("a")
    with TestClient(application) as client:
        assert client.get("/-/routes").json() == {"/": "default"}
        passed_on = client.get("/-/routes", headers={"via": "1.1 gateway"})
        assert passed_on.json()["path"] == "/-/routes"  # the application's route then
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as other:
        assert (await other.get("/-/routes")).json() == {"/": "default"}
    await application.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("server", "is_told"),
    [
        (("127.0.0.1", 80), True),
        (("::1", 80), True),
        (("/tmp/server.sock", None), True),
        (("192.168.1.2", 80), False),
        (("0.0.0.0", 80), False),
    ],
)
async def test_routes_are_told_by_a_loopback_server_only(
    server: tuple[str, int | None], is_told: bool
) -> None:
    application = named("a")
    scope = {"server": server, "headers": [(b"host", b"localhost")], "root_path": ""}
    answer, _ = await request(application, "/-/routes", **scope)
    await application.aclose()

    assert (json.loads(answer[1]["body"]) == {"/": "default"}) == is_told


# The request's id.


@pytest.fixture
def id_port(separate: str) -> int:
    """Serve an application that answers with its request id, and one that fails in every way."""
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Ids:
        @app.get("/seen")
        async def seen(self, request: Request) -> list[str]:
            return request.headers.getlist("x-request-id")

        @app.get("/boom")
        async def boom(self) -> None:
            raise ValueError

        @app.get("/own")
        async def own(self) -> Response:
            return PlainTextResponse("x", headers={"X-Request-ID": "mine"})

        @app.get("/stream")
        async def stream(self) -> Response:
            async def items() -> AsyncIterator[str]:
                yield "x"

            return StreamingResponse(items())

    @serve.deployment
    async def plain(request: Request) -> str:
        if "boom" in request.url.path:
            raise ValueError
        return request.headers["x-request-id"]

    served(plain.bind(), "plain", "/plain")
    return served(bind(Ids), "ids", "/ids")


PATHS = [f"/ids/{name}" for name in ("seen", "boom", "missing", "stream")]
PATHS += ["/plain", "/plain/boom", "/absent", "/-/healthz", "/-/routes"]


def test_a_request_id_comes_back_with_every_answer(id_port: int) -> None:
    for path in PATHS:
        answer = get(id_port, path, "X-Request-Id: abc-1.2_3\r\n")
        assert answer.raw.lower().count(b"x-request-id: abc-1.2_3\r\n") == 1, path


def test_without_one_every_answer_has_a_new_request_id(id_port: int) -> None:
    ids = {get(id_port, path).headers["x-request-id"] for path in PATHS * 2}

    assert len(ids) == len(PATHS) * 2
    assert all(uuid.UUID(each).version == 4 for each in ids)


@pytest.mark.reliability("C08")
def test_an_unfit_request_id_is_replaced_also_for_user_code(id_port: int) -> None:
    for value in ("", "a b", "x" * 129, "{}", "\xe9", "a;b", "../x"):
        answer = get(id_port, "/ids/seen", f"X-Request-Id: {value}\r\n")
        (seen,) = json.loads(answer.body)
        assert answer.headers["x-request-id"] == seen
        assert uuid.UUID(seen).version == 4


def test_of_several_request_ids_user_code_and_client_see_the_same_one(id_port: int) -> None:
    for sent in (["a b", "fine"], ["fine", "a b"], ["fine", "other"]):
        lines = "".join(f"X-Request-Id: {each}\r\n" for each in sent)
        answer = get(id_port, "/ids/seen", lines)
        assert json.loads(answer.body) == [answer.headers["x-request-id"]] == ["fine"]


def test_an_id_of_the_users_own_is_not_added_to(id_port: int) -> None:
    answer = get(id_port, "/ids/own", "X-Request-Id: sent\r\n")

    assert answer.raw.lower().count(b"x-request-id") == 1
    assert answer.headers["x-request-id"] == "mine"


# An application behind another.


@pytest.mark.parametrize("has_lifespan", [False, True])
def test_a_mounted_application_is_found_under_its_mount(separate: str, has_lifespan: bool) -> None:
    application, other = paths_app(), named("other")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with application.lifespan(app), other.lifespan(app):
            yield

    parent = FastAPI(lifespan=lifespan if has_lifespan else None)
    parent.mount("/v1", application)
    parent.mount("/v2/deep", other)
    with TestClient(parent) as client:
        assert client.get("/v1/items/3").json() == "http://testserver/v1/items/3"
        assert client.get("/v1/").json() == "/v1"
        assert client.get("/v2/deep/x").json()["root_path"] == "/v2/deep"
        assert client.get("/v3").status_code == 404
        names = set(serve.status().applications)

    assert names == {"default", "default_1"}
    assert set(serve.status().applications) == (set() if has_lifespan else names)


def test_a_websocket_to_no_application_is_refused() -> None:
    port = served(named("b"), "b", "/b")
    for path in ("/absent", "/-/livez", "/b"):  # a plain deployment accepts none either
        with Connection(port) as connection:
            connection.request(path, headers=UPGRADE)
            assert connection.receive_until(b"\r\n").startswith(b"HTTP/1.1 403")
