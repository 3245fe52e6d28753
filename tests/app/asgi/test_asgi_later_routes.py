"""Routes that an app gets while it is served: they are served and documented, as under FastAPI."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from ingress import deployment
from ingress.app.asgi.compat import IncludedRouter
from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import serve

is_live = pytest.mark.skipif(IncludedRouter is None, reason="this FastAPI copies included routes")


def to_the_app(app: FastAPI, router: APIRouter, mounted: FastAPI) -> Any:
    return app.get


def to_its_router(app: FastAPI, router: APIRouter, mounted: FastAPI) -> Any:
    return app.router.get


def to_an_included_router(app: FastAPI, router: APIRouter, mounted: FastAPI) -> Any:
    return router.get


def to_a_mounted_app(app: FastAPI, router: APIRouter, mounted: FastAPI) -> Any:
    return mounted.get


def later(value: str = Depends(lambda: "depends")) -> str:
    return f"later {value}"


@pytest.mark.parametrize(
    ("get", "prefix"),
    [
        (to_the_app, ""),
        (to_its_router, ""),
        pytest.param(to_an_included_router, "/in", marks=is_live),
        (to_a_mounted_app, "/sub"),
    ],
)
def test_each_replica_serves_and_documents_a_route_that_comes_after_the_first_request(
    get: Callable[..., Any], prefix: str
) -> None:
    app, router, mounted = FastAPI(), APIRouter(), FastAPI()

    @ingress(app)
    class K:
        @app.get("/first")
        def first(self) -> str:
            return "first"

    @router.get("/old")
    def old() -> str:
        return "old"

    app.include_router(router, prefix="/in")
    app.mount("/sub", mounted)
    documents = f"{prefix}/openapi.json" if prefix == "/sub" else "/openapi.json"
    path = "/later" if prefix == "/sub" else f"{prefix}/later"

    with serve(K, replicas=2) as client:
        for _ in range(2):
            assert client.get("/first").json() == "first"
            assert client.get(f"{prefix}/later").status_code == 404
            if prefix != "/sub":  # an older FastAPI keeps the first schema of an app
                assert path not in client.get(documents).json()["paths"]

        get(app, router, mounted)("/later")(later)

        for _ in range(2):
            assert client.get(f"{prefix}/later").json() == "later depends"
            assert path in client.get(documents).json()["paths"]
            assert client.get("/first").json() == "first"
            assert client.get("/in/old").json() == "old"


@pytest.mark.usefixtures("switch_interval")
def test_replicas_on_loops_of_their_own_find_each_route_at_once_while_others_ask() -> None:
    app = FastAPI()
    app.get("/0")(later)
    application = deployment(num_replicas=2)(ingress(app)()).bind()
    is_over = threading.Event()

    def ask(client: TestClient) -> set[int]:
        statuses = set()
        while not is_over.is_set():
            statuses.add(client.get("/0").status_code)
        return statuses

    with TestClient(application) as client, ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask, client) for _ in range(2)]
        for number in range(1, 11):
            app.get(f"/{number}")(later)
            assert [client.get(f"/{number}").status_code for _ in range(4)] == [200] * 4
        is_over.set()
        assert [each.result() for each in asking] == [{200}] * 2


def test_a_method_that_becomes_a_route_later_is_bound_to_the_instance(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.name = "K"

        def later(self) -> str:
            return self.name

    with serve(K) as client:
        assert client.get("/later").status_code == 404
        app.add_api_route("/later", K.later)
        assert client.get("/later").json() == "K"


def test_an_endpoint_that_the_constructor_adds_and_that_asks_for_self_is_refused() -> None:
    app = FastAPI()

    @ingress(app)
    class K:
        def __init__(self) -> None:
            app.get("/own")(lambda self: self)

    with pytest.raises(TypeError, match="would ask the client"), serve(K):
        pass


def test_a_route_that_is_taken_away_is_gone_and_one_that_a_replica_added_stays() -> None:
    app = FastAPI()

    def own() -> str:
        return "own"

    @ingress(app)
    class K:
        def __init__(self) -> None:
            app.add_api_route("/own", own)

        @app.get("/first")
        def first(self) -> str:
            return "first"

    with serve(K) as client:
        assert client.get("/first").json() == "first"
        assert client.get("/own").json() == "own"
        routes = app.router.routes
        routes[:] = [each for each in routes if getattr(each, "path", "") != "/first"]
        assert client.get("/first").status_code == 404
        assert client.get("/own").json() == "own"


def test_a_route_that_cannot_be_served_is_logged_once_and_the_others_serve_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = FastAPI()

    class Broken(APIRoute):
        def get_route_handler(self) -> Any:
            if self.endpoint is not broken:  # the replica's endpoint is another function
                raise LookupError("no such endpoint")
            return super().get_route_handler()

    def broken() -> None:
        pass

    @ingress(app)
    class K:
        @app.get("/first")
        def first(self) -> str:
            return "first"

    with serve(K) as client, caplog.at_level(logging.ERROR, "ingress"):
        assert client.get("/first").json() == "first"
        app.router.routes.append(Broken("/broken", broken))
        assert client.get("/first").json() == "first"
        assert client.get("/broken").status_code == 404

    assert [each.message.split(" of ")[0] for each in caplog.records] == ["the new routes"]
