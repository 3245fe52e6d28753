"""`app.asgi.cors`: answers of the server to pages of another origin, as the application's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

import ingress as serve
from ingress.engines import local_engine
from ingress.testing import Latch
from tests.servers import PATIENCE_S, Connection, bind, served, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")

ORIGIN = {"origin": "http://page.test"}
PREFLIGHT = {**ORIGIN, "access-control-request-method": "PUT"}
SOON = {"x-request-timeout-seconds": "0.05"}
ALL: dict[str, Any] = {"allow_origins": ["*"], "allow_methods": ["*"]}
COOKIES: dict[str, Any] = {**ALL, "allow_credentials": True, "expose_headers": ["retry-after"]}
REGEX: dict[str, Any] = {"allow_origin_regex": r"http://.*\.test", "allow_headers": ["x-key"]}


class OfHosts(CORSMiddleware):
    """A layer with a rule of the user's, and paths that it leaves alone."""

    def is_allowed_origin(self, origin: str) -> bool:
        return origin.endswith(".test")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app if scope["path"] == "/none" else super().__call__)(scope, receive, send)


def app_with(*layers: Middleware) -> FastAPI:
    app = FastAPI(middleware=layers)

    @app.get("/stuck")
    async def stuck() -> None:
        await asyncio.Event().wait()

    return app


def mounted(app: Any) -> FastAPI:
    outer = app_with(Middleware(CORSMiddleware, allow_origins=["http://other.test"]))
    outer.mount("/below", app)
    return outer


def cors(**options: Any) -> Middleware:
    return Middleware(CORSMiddleware, **options)


def layered(app: FastAPI) -> FastAPI:
    app.middleware_stack = CORSMiddleware(app.build_middleware_stack(), **REGEX)
    return app


APPS: dict[str, Callable[[], Any]] = {
    "all": lambda: app_with(cors(**ALL)),
    "credentials": lambda: app_with(cors(**COOKIES)),
    "regex": lambda: app_with(Middleware(GZipMiddleware), cors(**REGEX)),
    "another-origin": lambda: app_with(cors(allow_origins=["http://other.test"])),
    "several": lambda: app_with(cors(**ALL), cors(**REGEX)),
    "subclass": lambda: app_with(Middleware(OfHosts, allow_methods=["PUT"])),
    "around-the-app": lambda: CORSMiddleware(app_with(), **REGEX),
    "around-the-layers": lambda: layered(app_with(Middleware(GZipMiddleware))),
    "mounted": lambda: mounted(app_with(cors(**ALL))),
    "none": lambda: app_with(Middleware(GZipMiddleware)),
}


def cors_of(response: httpx.Response) -> Mapping[str, str]:
    return {
        name: value
        for name, value in response.headers.items()
        if name.startswith("access-control-") or name == "vary"
    }


def client_of(target: Any, prefix: str = "/", **options: Any) -> httpx.Client:
    url = f"http://127.0.0.1:{served(target, route_prefix=prefix, **options)}"
    return httpx.Client(base_url=url, timeout=PATIENCE_S)


def without_gzip(headers: Mapping[str, str]) -> dict[str, str]:
    varies = headers.get("vary", "").replace("Accept-Encoding", "").strip(", ")
    return {**headers, "vary": varies}


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_a_refusal_has_the_headers_that_the_applications_own_answer_has(
    app: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    target = serve.deployment(serve.ingress(app())())
    path = "/v1/below/stuck" if request.node.callspec.id == "mounted" else "/v1/stuck"
    with client_of(bind(target), "/v1") as client:
        refused = client.get(path, headers=ORIGIN | SOON)
        own = client.post(path, headers=ORIGIN)
    assert (refused.status_code, own.status_code) == (408, 405)
    assert without_gzip(cors_of(refused)) == without_gzip(cors_of(own))


def held_app(**options: Any) -> tuple[FastAPI, Any, Latch, Latch]:
    app, began, go = FastAPI(), Latch(), Latch()
    app.add_middleware(CORSMiddleware, **options)

    @serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    @serve.ingress(app)
    class Held:
        @app.get("/")
        async def root(self) -> str:
            began.count_down()
            await go
            return "done"

        @app.put("/")
        async def put(self, request: Request) -> int:
            return len(await request.body())

    return app, Held, began, go


def queued() -> int:
    return local_engine().applications["default"].ingress.router.num_queued


def test_a_full_queue_answers_preflights_and_pages_can_read_its_503() -> None:
    _, held, began, go = held_app(**COOKIES)
    with client_of(bind(held)) as client:
        port = client.base_url.port
        assert port is not None
        preflight = client.options("/", headers=PREFLIGHT)
        with Connection(port) as first, Connection(port) as second:
            first.request("/")
            began.wait()
            second.request("/")
            wait_until(lambda: queued() == 1)
            refused = client.get("/", headers=ORIGIN)
            refused_with_body = client.put("/", headers=ORIGIN, content=b"body")
            refused_preflight = client.options("/", headers=PREFLIGHT)
            elsewhere = client.get("/")
            go.count_down()
            assert first.answer().status == 200
    for each in (refused, refused_with_body):
        assert each.status_code == 503
        assert "max_queued_requests=1" in each.text
        assert each.headers["access-control-allow-origin"] == ORIGIN["origin"]
        assert each.headers["access-control-expose-headers"] == "retry-after"
        assert each.headers["x-request-id"]
    assert (refused_preflight.status_code, refused_preflight.text) == (200, "OK")
    assert cors_of(refused_preflight) == cors_of(preflight)
    assert (elsewhere.status_code, cors_of(elsewhere)) == (503, {})


def test_a_body_that_is_too_large_and_a_head_that_is_too_large_too() -> None:
    _, held, _, _ = held_app(**ALL)
    with client_of(bind(held), max_body_size=10, max_header_bytes=2000) as client:
        body = client.put("/", headers=ORIGIN, content=b"x" * 11)
        head = client.get("/", headers={**ORIGIN, "cookie": "x" * 3000})
    assert (body.status_code, head.status_code) == (413, 431)
    assert cors_of(body)["access-control-allow-origin"] == "*"
    assert cors_of(head)["access-control-allow-origin"] == "*"
    assert head.headers["connection"] == "close"


def test_an_application_that_starts_or_has_failed_says_so_to_pages() -> None:
    app, go = FastAPI(), Latch()
    app.add_middleware(CORSMiddleware, **REGEX)

    @serve.deployment
    @serve.ingress(app)
    class Late:
        async def __init__(self) -> None:  # type: ignore[misc]
            await go
            raise ValueError("no weights")

    serve.start({"port": 0})
    (url,) = serve.status().proxies or ("",)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        starting = asyncio.run(_while_starting(client, bind(Late), go))
        failed = client.get("/", headers=ORIGIN)
    assert (starting.status_code, failed.status_code) == (503, 503)
    assert cors_of(starting) == cors_of(failed)
    assert cors_of(failed)["access-control-allow-origin"] == ORIGIN["origin"]


async def _while_starting(client: httpx.Client, target: Any, go: Latch) -> httpx.Response:
    running = asyncio.create_task(asyncio.to_thread(serve.run, target))
    await asyncio.to_thread(wait_until, lambda: serve.status().applications)
    found = await asyncio.to_thread(client.get, "/", headers=ORIGIN)
    go.count_down()
    with pytest.raises(RuntimeError):
        await running
    return found


stuck_app = app_with(cors(**REGEX))


@serve.deployment(isolation="process")
@serve.ingress(stuck_app)
class InProcess:
    pass


def test_a_replica_in_a_process_has_the_same_headers() -> None:
    with client_of(bind(InProcess)) as client:
        refused = client.get("/stuck", headers=ORIGIN | SOON)
    assert refused.status_code == 408
    assert refused.headers["access-control-allow-origin"] == ORIGIN["origin"]


class Impossible(CORSMiddleware):
    """A layer that waits: only a replica could run it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)
        await super().__call__(scope, receive, send)


class Exiting(CORSMiddleware):
    def is_allowed_origin(self, origin: str) -> bool:
        raise SystemExit(origin)


@pytest.mark.parametrize("kind", [Impossible, Exiting])
def test_a_layer_that_fails_leaves_the_refusal_as_it_is(kind: Any) -> None:
    target = serve.deployment(serve.ingress(app_with(Middleware(kind, **REGEX)))())
    with client_of(bind(target)) as client:
        for _ in range(2):  # the server serves on
            refused = client.get("/stuck", headers=ORIGIN | SOON)
            assert (refused.status_code, cors_of(refused)) == (408, {})
