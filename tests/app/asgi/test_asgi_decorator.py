"""`@serve.ingress`: the classes and apps it accepts, and those it refuses before any start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

import ingress as served_api
from ingress.app.asgi.spec import IngressSpec, ingress
from ingress.exceptions import RayServeException
from tests.asgi_helpers import bound, json_of, serve
from tests.servers import bind, get, served


async def answer_asgi(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await PlainTextResponse("asgi")(scope, receive, send)


class AnswerASGI:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_asgi(scope, receive, send)

    async def method(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_asgi(scope, receive, send)


async def with_prefix(prefix: str, scope: Scope, receive: Receive, send: Send) -> None:
    await answer_asgi(scope, receive, send)


def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("page")


def build() -> ASGIApp:
    return Starlette(routes=[Route("/", page)])


def build_with_options(title: str = "built") -> ASGIApp:
    return build()


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        pytest.param(Starlette(routes=[Route("/", page)]), "page", id="starlette"),
        pytest.param(AnswerASGI(), "asgi", id="asgi-object"),
        pytest.param(AnswerASGI().method, "asgi", id="bound-method"),
        pytest.param(answer_asgi, "asgi", id="async-def-of-three-parameters"),
        pytest.param(lambda s, r, send: answer_asgi(s, r, send), "asgi", id="def-of-three"),
        pytest.param(lambda *args: answer_asgi(*args), "asgi", id="def-of-any-number"),
        pytest.param(partial(with_prefix, "/"), "asgi", id="partial-of-an-app"),
        pytest.param(build, "page", id="builder"),
        pytest.param(build_with_options, "page", id="builder-with-defaults"),
        pytest.param(partial(build_with_options, title="x"), "page", id="partial-of-a-builder"),
        pytest.param(lambda: answer_asgi, "asgi", id="builder-lambda"),
    ],
)
def test_an_app_of_any_kind_is_served(app: Any, expected: str) -> None:
    with serve(ingress(app)()) as client:
        assert client.get("/").text == expected


def test_a_router_is_served_with_what_was_declared_after_the_class() -> None:
    router = APIRouter(prefix="/v1")

    @ingress(router)
    class K:
        name = "k"

        @router.get("/name")
        def get_name(self) -> str:
            return self.name

    @router.get("/late")
    def late() -> str:
        return "late"

    with serve(K) as client:
        assert client.get("/v1/name").json() == "k"
        assert client.get("/v1/late").json() == "late"
        assert client.get("/openapi.json").status_code == 200


def test_a_builder_is_called_once_for_each_replica() -> None:
    apps: list[ASGIApp] = []

    def build() -> ASGIApp:
        apps.append(Starlette())
        return apps[-1]

    assert apps == []
    with serve(ingress(build)(), replicas=3):
        assert len(apps) == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async-def"])
@pytest.mark.parametrize("app", [None, FastAPI(), build], ids=["alone", "beside-app", "or-builder"])
def test_the_builder_method_wins_and_runs_after_the_constructor(app: Any, is_async: bool) -> None:
    def app_of(instance: Any) -> ASGIApp:
        built = FastAPI()
        built.get("/")(instance.get)
        return built

    class Base:
        def __init__(self) -> None:
            self.greeting = "hello"

        def get(self, name: str = "you") -> str:
            return f"{self.greeting} {name}"

    class Async(Base):
        async def __serve_build_asgi_app__(self) -> ASGIApp:
            return app_of(self)

    class Sync(Base):
        def __serve_build_asgi_app__(self) -> ASGIApp:
            return app_of(self)

    with serve(ingress(app)(Async if is_async else Sync)) as client:
        assert client.get("/?name=me").json() == "hello me"


def test_a_builder_that_returns_no_app_fails_the_start() -> None:
    @ingress()
    class K:
        def __serve_build_asgi_app__(self) -> None:
            return None

    with pytest.raises(TypeError, match="`__serve_build_asgi_app__` must return an ASGI app"):
        serve(K).__enter__()


def test_the_class_stays_the_class_and_carries_the_spec(app: FastAPI) -> None:
    class K:
        pass

    assert ingress(app)(K) is K
    assert K.__ingress_spec__ == IngressSpec(app)  # type: ignore[attr-defined]


def test_a_subclass_inherits_the_app(app: FastAPI) -> None:
    @ingress(app)
    class Base:
        name = "base"

        @app.get("/name")
        def get_name(self) -> str:
            return self.name

    class Sub(Base):
        name = "sub"

    assert json_of(Sub, "/name") == "sub"


class FakeDeployment:
    """The attributes by which a deployment is recognised."""

    name = "Hello"
    func_or_class = object


def test_a_class_with_call_is_refused() -> None:
    class K:
        def __call__(self) -> None: ...

    with pytest.raises(ValueError, match="may not have __call__ method") as caught:
        ingress(FastAPI())(K)
    assert "K.__call__" in str(caught.value)
    assert "@app.get" in str(caught.value)


@pytest.mark.parametrize("use", [ingress(FastAPI()), ingress], ids=["with-app", "bare"])
def test_ingress_above_deployment_is_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"put @serve\.deployment above @serve\.ingress") as caught:
        use(FakeDeployment())
    assert "    @serve.deployment\n    @serve.ingress(app)" in str(caught.value)


def test_ingress_without_parentheses_is_refused() -> None:
    with pytest.raises(TypeError, match=r"@serve\.ingress needs an app: @serve\.ingress\(app\)"):

        @ingress
        class K:
            pass


async def async_builder() -> ASGIApp:
    return build()


@pytest.mark.parametrize(
    ("app", "type_name"),
    [("app", "str"), (3, "int"), (lambda one: None, "function"), (async_builder, "function")],
    ids=["string", "number", "one-parameter", "async-builder"],
)
def test_what_is_no_app_is_refused(app: Any, type_name: str) -> None:
    text = f"of type {type_name}; .* FastAPI, APIRouter, ASGI callable or builder function"
    with pytest.raises(TypeError, match=text):
        ingress(app)


def test_a_method_without_self_is_refused(app: FastAPI) -> None:
    with pytest.raises(RayServeException, match="must have ``self`` as their first arg") as caught:

        @ingress(app)
        class K:
            @app.get("/")
            def root() -> None:  # type: ignore[misc]
                ...

    assert "K.root()" in str(caught.value)


def test_a_method_with_only_keyword_parameters_is_refused(app: FastAPI) -> None:
    with pytest.raises(RayServeException, match="must have ``self`` as their first argument"):

        @ingress(app)
        class K:
            @app.get("/")
            def root(*, name: str = "") -> None:  # type: ignore[misc]
                ...


def test_a_positional_only_parameter_is_refused(app: FastAPI) -> None:
    with pytest.raises(TypeError, match="'name' is positional-only"):

        @ingress(app)
        class K:
            @app.get("/")
            def root(self, name: str, /) -> None: ...


def test_a_positional_only_self_is_served(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/")
        def root(self, /, name: str) -> str:
            return name

    assert json_of(K, "/?name=x") == "x"


def test_a_method_given_to_starlettes_add_route_is_refused(app: FastAPI) -> None:
    class K:
        def root(self, request: Request) -> None: ...

    app.add_route("/", K.root)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"K\.root was added with Starlette's `add_route`"):
        ingress(app)(K)


def test_a_method_on_a_route_of_a_starlette_is_refused() -> None:
    class K:
        def root(self, request: Request) -> None: ...

    for route in (Route("/", K.root), WebSocketRoute("/", K.root)):
        with pytest.raises(TypeError, match=r"@app\.get, @app\.api_route or @app\.websocket"):
            ingress(Starlette(routes=[route]))(K)


def test_a_method_on_a_mounted_app_is_refused() -> None:
    app, mounted = FastAPI(), FastAPI()
    app.mount("/sub", mounted)
    with pytest.raises(TypeError, match=r"mounted at '/sub'.*include_router"):

        @ingress(app)
        class K:
            @mounted.get("/")
            def root(self) -> None: ...


def test_a_method_on_an_included_router_is_checked_too() -> None:
    app, router = FastAPI(), APIRouter()

    class K:
        def root(self, request: Request) -> None: ...

    router.add_route("/", K.root)  # type: ignore[arg-type]
    app.include_router(router, prefix="/r")
    app.router.routes.append(Mount("/m", routes=[]))
    with pytest.raises(TypeError, match="add_route"):
        ingress(app)(K)


def test_what_is_declared_after_the_class_is_checked_when_it_is_built(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def root(self, name: str, /) -> None: ...

    app.get("/")(K.root)
    with pytest.raises(TypeError, match="positional-only"):
        bound(K)


# Without a class.


async def ask_child(request: Request) -> PlainTextResponse:
    made = served_api.get_replica_context().servable_object
    (child,) = made.args
    return PlainTextResponse(f"{await child.remote()} {made.kwargs['word']}")


def fastapi_of_functions() -> FastAPI:
    app = FastAPI()
    app.get("/")(ask_child)
    return app


def starlette_of_functions() -> Starlette:
    return Starlette(routes=[Route("/", ask_child)])


def router_of_functions() -> APIRouter:
    router = APIRouter()
    router.get("/")(ask_child)
    return router


FUNCTIONS: dict[str, Any] = {
    "FastAPI": fastapi_of_functions(),
    "Starlette": starlette_of_functions(),
    "APIRouter": router_of_functions(),
    "builder-FastAPI": fastapi_of_functions,
    "builder-Starlette": starlette_of_functions,
}


@pytest.mark.parametrize("app", FUNCTIONS.values(), ids=FUNCTIONS)
def test_without_a_class_an_app_gets_one_that_keeps_the_arguments_of_bind(app: Any) -> None:
    @served_api.deployment
    class Child:
        async def __call__(self) -> str:
            return "child"

    made = ingress(app)()
    target = served_api.deployment(made).bind(bind(Child), word="here")
    try:
        assert get(served(target), "/").body == b"child here"
        assert [*served_api.status().applications["default"].deployments] == ["Child", NO_CLASS]
    finally:
        served_api.shutdown()
    assert (made.__name__, made.__module__) == (NO_CLASS, __name__)


NO_CLASS = "ASGIIngressDeployment"  # Ray's name for it


def test_without_a_class_and_without_an_app_there_is_nothing_to_serve() -> None:
    with pytest.raises(ValueError, match="requires ASGIIngressDeployment to define"):
        ingress()()


def test_an_http_exception_of_static_files_that_are_served_alone_is_an_error_as_under_a_server(
    tmp_path: Path,
) -> None:
    (tmp_path / "page.html").write_text("page")
    app = served_api.deployment(ingress(StaticFiles(directory=tmp_path))()).bind()
    with TestClient(app) as client:
        assert client.get("/page.html").text == "page"
        with pytest.raises(HTTPException, match="404"):
            client.get("/missing")
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/missing").status_code == 500
