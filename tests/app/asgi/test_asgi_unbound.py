"""`app.asgi.unserved_routes`: an app that is served without its deployment says what to serve."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from fastapi.openapi.utils import get_openapi
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import ingress as serve
from ingress.app.asgi.compat import IncludedRouter
from ingress.app.declaration.declaration import Application
from tests.asgi_helpers import serve as replicas_of

app, nameless, router = FastAPI(), [FastAPI()], APIRouter()


@app.get("/free")
def free() -> str:
    return "free"


class Hello:
    @app.get("/")
    @app.post("/twice/{n}")
    def root(self, n: int = 0) -> str:
        return f"hello {n}"

    @router.get("/more")
    async def more(self) -> str:
        return "more"

    @app.get("/static")
    @staticmethod
    def static() -> str:
        return "static"

    @app.websocket("/ws")
    async def talk(self, socket: WebSocket) -> None:
        await socket.accept()


app.include_router(router, prefix="/v1")
hello = serve.deployment(serve.ingress(app)(Hello)).bind()
sub = FastAPI()
sub.mount("/sub", app)


@serve.ingress(nameless[0])
class Nameless:
    @nameless[0].get("/")
    def root(self) -> str:
        return "nameless"


TOLD = (
    f"{__name__}:app is served without its deployment Hello, which has its methods. Serve "
    f"{__name__}:hello: `ingress run {__name__}:hello`, `uvicorn {__name__}:hello` or "
    f"`fastapi run -e {__name__}:hello`."
)


def test_fastapi_cli_alone_takes_an_application_for_a_fastapi() -> None:
    names: dict[str, Any] = {"hello": hello, "FastAPI": FastAPI}
    exec("found = isinstance(hello, FastAPI)", {"__name__": "fastapi_cli.discover"}, names)
    assert names["found"]
    assert not isinstance(hello, FastAPI)
    assert hello.__class__ is Application
    assert isinstance(copy.copy(hello), Application)


def test_each_request_for_a_method_is_answered_with_the_name_to_serve() -> None:
    with TestClient(app) as client:
        for method, path in [("GET", "/"), ("POST", "/twice/7"), ("GET", "/v1/more")]:
            answer = client.request(method, path)
            assert (answer.status_code, answer.text) == (500, TOLD)
        with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/ws"):
            raise AssertionError("it is refused")
    assert closed.value.code == 1011
    assert closed.value.reason == TOLD[:123]
    assert TestClient(sub).get("/sub/v1/more").text == TOLD


def test_functions_and_static_methods_need_no_deployment() -> None:
    with TestClient(app) as client:
        assert client.get("/free").json() == "free"
        assert client.get("/static").json() == "static"
        assert client.get("/none").status_code == 404
        assert client.delete("/").status_code == 405


def test_the_app_answers_for_itself_beside_its_only_replica() -> None:
    with replicas_of(Hello) as replica, TestClient(app) as client:
        assert client.get("/free").json() == replica.get("/free").json() == "free"
        assert client.get("/").text == TOLD


def test_the_log_says_it_at_the_start_already(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ingress"), TestClient(app):
        assert caplog.messages == [TOLD]


def test_the_application_is_served_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ingress"), replicas_of(Hello) as client:
        assert client.get("/").json() == "hello 0"
    assert caplog.messages == []


def test_an_application_without_a_name_is_described() -> None:
    assert TestClient(nameless[0]).get("/").text == (
        "This app is served without its deployment Nameless, which has its methods. Bind the "
        "deployment, application = Nameless.bind(), and serve application."
    )


def test_the_schema_of_the_app_itself_has_no_self() -> None:
    app, router = FastAPI(), APIRouter()
    app.include_router(router)

    @serve.ingress(app)
    class K:
        @app.get("/first")
        def first(self, n: int) -> int:
            return n

        @router.get("/second")
        async def second(this, n: int) -> int:
            return n

    paths = get_openapi(title="", version="", routes=app.routes)["paths"]
    # Older FastAPIs copy a router's routes when it is included.
    assert {*paths} == ({"/first"} if IncludedRouter is None else {"/first", "/second"})
    for operations in paths.values():
        assert [each["name"] for each in operations["get"]["parameters"]] == ["n"]
    with replicas_of(K) as client:
        assert [client.get(f"{path}?n=1").json() for path in paths] == [1] * len(paths)
