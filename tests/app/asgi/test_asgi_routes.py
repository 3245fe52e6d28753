"""Routes of deployments: the class of each route, the code it runs, and its thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from ingress.app.asgi.routes import RouteInfo
from ingress.app.asgi.spec import ingress
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestTimeoutError,
)
from tests.asgi_helpers import WORKER, bound, json_of, serve

F = TypeVar("F", bound=Callable[..., Any])


def thread() -> str:
    return threading.current_thread().name


def test_def_endpoints_run_in_the_replicas_workers_and_async_ones_on_its_loop(app: FastAPI) -> None:
    class Callable_:
        def __call__(self) -> str:
            return thread()

    @ingress(app)
    class K:
        @app.get("/def")
        def sync(self) -> str:
            return thread()

        @app.get("/async")
        async def on_loop(self) -> str:
            return thread()

    app.get("/free")(thread)
    app.get("/partial")(partial(thread))
    app.get("/object")(Callable_())
    app.get("/bound")(Callable_().__call__)

    with serve(K) as client:
        for path in ("/def", "/free", "/partial", "/object", "/bound"):
            assert client.get(path).json().startswith(WORKER), path
        assert "worker" not in client.get("/async").json()


def test_a_sync_decorator_over_an_async_method_is_awaited_on_the_loop(app: FastAPI) -> None:
    def logged(func: F) -> F:
        @wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    @ingress(app)
    class K:
        name = "k"

        @app.get("/")
        @logged
        async def root(self, request: Request, suffix: str) -> str:
            assert request.scope["endpoint"] is K.root  # as in a function on plain FastAPI
            return self.name + suffix

    with serve(K) as client:
        assert client.get("/?suffix=x").json() == "kx"
        assert client.get("/").status_code == 422


def test_an_endpoint_without_a_hash_is_served(app: FastAPI) -> None:
    @dataclass
    class Greeting:
        text: str

        def __call__(self, name: str) -> str:
            return self.text + name

    app.get("/")(Greeting("hello "))

    assert json_of(ingress(app)(), "/?name=x") == "hello x"


def test_an_override_runs_without_being_decorated_again(app: FastAPI) -> None:
    class Base:
        @app.get("/name")
        def name(self, n: int = 1) -> str:
            return f"base{n}"

        @app.get("/other")
        def other(self) -> str:
            return "other"

    class Middle(Base):
        def name(self, n: int = 1) -> str:
            return "middle of " + super().name(n)

    @ingress(app)
    class K(Middle):
        async def other(self) -> str:  # type: ignore[override]
            return "async " + super().other()

    with serve(K) as client:
        assert client.get("/name?n=2").json() == "middle of base2"
        assert client.get("/other").json() == "async other"


@pytest.mark.parametrize("override", [lambda self, m=1: "", lambda self: "", None, 3])
def test_an_override_with_other_parameters_is_refused_with_both_signatures(override: Any) -> None:
    app = FastAPI()

    @ingress(app)
    class Base:
        @app.get("/name")
        def name(self, n: int = 1) -> str:
            return ""

    sub = type("Sub", (Base,), {"name": override})

    with pytest.raises(TypeError, match=r"Sub\.name.* overrides the route .*Base\.name\(self, n"):
        bound(sub)


def test_two_methods_of_one_name_each_serve_their_own_route(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/first")
        def name(self) -> str:
            return "first"

        @app.get("/second")  # type: ignore[no-redef]
        def name(self) -> str:  # noqa: F811
            return "second"

    with serve(K) as client:
        assert client.get("/first").json() == "first"
        assert client.get("/second").json() == "second"


def test_a_decorator_above_the_route_does_not_run_as_in_fastapi(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @cached_property
        @app.get("/")
        def root(self) -> str:
            return "plain"

    assert json_of(K, "/") == "plain"


def test_private_static_and_class_methods_are_served(app: FastAPI) -> None:
    @ingress(app)
    class K:
        name = "k"

        @app.get("/private")
        def __private(self) -> str:
            return self.name

        @staticmethod
        @app.get("/static")
        def static(n: int) -> int:
            return n

        @app.get("/static-below")
        @staticmethod
        def static_below(n: int) -> int:
            return n

        @classmethod
        @app.get("/class")
        def of_class(cls, n: int) -> str:
            return cls.name * n

    with serve(K) as client:
        assert client.get("/private").json() == "k"
        assert client.get("/static?n=2").json() == 2
        assert client.get("/static-below?n=3").json() == 3
        assert client.get("/class?n=2").json() == "kk"


@pytest.mark.parametrize("first", ["A", "B"])
def test_classes_that_share_an_app_serve_their_own_methods_and_the_functions(first: str) -> None:
    app = FastAPI()

    class A:
        @app.get("/a")
        def a(self) -> str:
            return "a"

    class B:
        @app.get("/b")
        def b(self) -> str:
            return "b"

        @staticmethod
        @app.get("/static")
        def static(n: int = 1) -> int:
            return n

    @app.get("/free")
    def free() -> str:
        return "free"

    paths = ["/a", "/b", "/free", "/static"]
    for cls in (A, B) if first == "A" else (B, A):
        ingress(app)(cls)

    with serve(A) as a, serve(B) as b:
        for client, status in ((a, [200, 404, 200, 200]), (b, [404, 200, 200, 200])):
            assert [client.get(path).status_code for path in paths] == status
        assert list(a.get("/openapi.json").json()["paths"]) == ["/a", "/static", "/free"]


def test_a_class_renamed_after_its_body_still_owns_its_methods(app: FastAPI) -> None:
    class K:
        @app.get("/")
        def root(self) -> str:
            return "root"

    K.__qualname__ = "Renamed"
    ingress(app)(K)

    assert json_of(K, "/") == "root"


def test_a_custom_route_class_and_marks_on_endpoint_and_route_survive(app: FastAPI) -> None:
    class Timed(APIRoute):
        def get_route_handler(self) -> Callable[..., Any]:
            handler = super().get_route_handler()

            async def timed(request: Request) -> Response:
                response: Response = await handler(request)
                response.headers["x-mark"] = getattr(self.endpoint, "mark", "") + vars(self)["note"]
                return response

            return timed

    app.router.route_class = Timed

    def marked(func: F) -> F:
        func.mark = "marked"  # type: ignore[attr-defined]
        return func

    @ingress(app)
    class K:
        @app.get("/")
        @marked
        def root(self) -> str:
            return "root"

    vars(app.routes[-1])["note"] = "!"

    with serve(K) as client:
        assert client.get("/").headers["x-mark"] == "marked!"


def test_a_validation_error_names_the_users_file_and_method(app: FastAPI) -> None:
    seen: list[str] = []

    @app.exception_handler(RequestValidationError)
    async def note(request: Request, error: RequestValidationError) -> Response:
        seen.append(str(error))
        return PlainTextResponse("", status_code=422)

    @ingress(app)
    class K:
        @app.get("/")
        def root(self, n: int) -> None: ...

        @app.get("/bad", response_model=int)
        async def bad(self) -> str:
            return "x"

    with serve(K) as client:
        client.get("/?n=x")
        with pytest.raises(ResponseValidationError) as caught:
            client.get("/bad")

    for text, name in ((seen[0], "root"), (str(caught.value), "bad")):
        assert __file__ in text
        assert f"in {name}" in text


def test_mounted_apps_are_served_as_they_are() -> None:
    app, mounted = FastAPI(), FastAPI()
    app.mount("/sub", mounted)

    @mounted.get("/free")
    def free() -> str:
        return "free"

    with serve(ingress(app)()) as client:
        assert client.get("/sub/free").json() == "free"
        assert list(client.get("/sub/openapi.json").json()["paths"]) == ["/free"]


def test_custom_openapi_sees_the_bound_routes_and_leaves_the_users_app_alone() -> None:
    app = FastAPI()
    made = 0

    def custom() -> dict[str, Any]:
        nonlocal made
        if app.openapi_schema is None:
            made += 1
            app.openapi_schema = FastAPI.openapi(app) | {"x-custom": len(app.routes)}
        return app.openapi_schema

    app.openapi = custom  # type: ignore[method-assign]

    @ingress(app)
    class K:
        @app.get("/{name}")
        def root(self, name: str) -> str:
            return name

        @app.post("/later")
        async def later(self) -> None:
            app.add_api_route("/added", lambda: "added")
            app.openapi_schema = None

    deployment = bound(K)
    with serve(K) as client:
        served = client.get("/openapi.json").json()
        assert client.get("/openapi.json").json() == served
        assert made == 1
        assert deployment.openapi() == served
        client.post("/later")
        assert client.get("/openapi.json").json()["paths"].keys() - served["paths"] == {"/added"}

    assert [each["name"] for each in served["paths"]["/{name}"]["get"]["parameters"]] == ["name"]
    assert served["x-custom"] == len(app.routes)
    assert app.openapi_schema is None


def test_a_callback_that_is_a_method_is_in_the_schema_without_self() -> None:
    app, partner = FastAPI(), APIRouter()

    @ingress(app)
    class K:
        @partner.post("{$callback_url}/done")
        def done(self, number: int) -> None: ...

        @app.get("/", callbacks=partner.routes)
        def root(self) -> None: ...

    with serve(K) as client:
        served = client.get("/openapi.json").json()["paths"]["/"]["get"]["callbacks"]["done"]
    (callback,) = served.values()
    assert [each["name"] for each in callback["post"]["parameters"]] == ["number"]


def test_an_overridden_openapi_method_is_used() -> None:
    class Described(FastAPI):
        def openapi(self) -> dict[str, Any]:
            return {"title": "mine", "paths": len(self.routes)}

    app = Described()

    @ingress(app)
    class K:
        @app.get("/")
        def root(self) -> None: ...

    assert bound(K).openapi() == {"title": "mine", "paths": len(app.routes)}


def test_docs_stay_where_they_were_declared_or_away() -> None:
    app = FastAPI(docs_url=None, redoc_url="/re")

    @app.get("/{anything}")
    def anything(anything: str) -> str:
        return "anything"

    cls = ingress(app)()

    with serve(cls) as client:
        assert client.get("/docs").json() == "anything"
        assert "ReDoc" in client.get("/re").text
    assert bound(cls).docs_path is None


def test_an_app_other_than_fastapi_has_no_schema() -> None:
    @ingress(lambda *args: None)
    class Plain:
        pass

    @ingress(lambda: FastAPI())
    class Built:
        pass

    for cls in (Plain, Built):
        with pytest.raises(TypeError, match="OpenAPI schema"):
            bound(cls).openapi()
        assert bound(cls).routes() == []
        assert bound(cls).docs_path is None


def test_routes_are_listed_in_order_as_they_are_served() -> None:
    app, router = FastAPI(), APIRouter(prefix="/r")

    class K:
        @router.get("/sync")
        def sync(self) -> None: ...

        @app.api_route("/many", methods=["PUT", "GET"])
        async def many(self) -> None: ...

        @router.websocket("/ws")
        async def ws(self) -> None: ...

    ingress(app)(K)
    app.include_router(router, prefix="/v1")
    deployment = bound(K)

    assert deployment.docs_path == "/docs"
    assert deployment.routes() == [
        RouteInfo("/many", False, K.many),
        RouteInfo("/v1/r/sync", False, K.sync),
        RouteInfo("/v1/r/ws", True, K.ws),
    ]


ERRORS = [
    BackPressureError(2, 1, "Child"),
    BackPressureError(2, 1, "Child", status_code=429, retry_after_s=1.5),
    DeploymentUnavailableError("Child is gone"),
    ReplicaUnavailableError("the replica of Child died"),
    RequestTimeoutError("mine", 1.5),
]
STATUSES = [503, 429, 503, 503, 408]


@pytest.mark.parametrize(("error", "status"), list(zip(ERRORS, STATUSES, strict=True)))
def test_a_child_that_cannot_answer_is_its_errors_status_and_message(
    error: RayServeException, status: int
) -> None:
    app = FastAPI()

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self) -> None:
            raise error

    with serve(K) as client:
        response = client.get("/")

    assert (response.status_code, response.text) == (status, error.message)
    assert response.headers.get("retry-after") == (None if status != 429 else "2")


@pytest.mark.parametrize(
    ("handled", "error"),
    [
        (BackPressureError, ERRORS[0]),
        (RayServeException, ERRORS[0]),
        (RequestCancelledError, ERRORS[-1]),
        (Exception, ERRORS[0]),
        (500, ERRORS[-1]),
    ],
)
def test_the_users_handler_for_it_is_kept(handled: Any, error: Exception, app: FastAPI) -> None:
    @app.exception_handler(handled)
    async def mine(request: Request, error: Exception) -> Response:
        return PlainTextResponse("mine", status_code=418)

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self) -> None:
            raise error

    with serve(K, raise_server_exceptions=False) as client:
        assert client.get("/").status_code == 418


def test_a_websocket_behind_a_busy_child_is_told_to_try_again_later(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.websocket("/")
        async def root(self, socket: WebSocket) -> None:
            await socket.accept()
            raise ERRORS[0]

    with serve(K) as client, client.websocket_connect("/") as socket:
        with pytest.raises(WebSocketDisconnect) as caught:
            socket.receive_text()
    assert caught.value.code == 1013


def test_an_app_that_was_served_without_a_class_is_bound_all_the_same(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/")
        def root(self) -> str:
            return "root"

    with TestClient(app) as plain:
        assert plain.get("/").status_code == 500
        assert plain.get("/openapi.json").status_code == 200
    with serve(K) as client:
        assert client.get("/").json() == "root"
        assert "parameters" not in client.get("/openapi.json").json()["paths"]["/"]["get"]
        assert client.get("/docs").status_code == 200


def test_routes_a_starlette_adds_in_its_lifespan_are_its_replicas_own() -> None:
    counts: list[int] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.add_route("/", lambda request: PlainTextResponse(""))
        counts.append(len(app.routes))
        yield

    app = Starlette(lifespan=lifespan)

    with serve(ingress(app)(), replicas=2):
        assert counts == [1, 1]
    assert app.routes == []


def test_routes_a_replica_adds_in_its_lifespan_are_its_own() -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.get("/extra")(thread)
        yield

    app = FastAPI(lifespan=lifespan)

    cls = ingress(app)()

    with serve(cls) as client:
        assert client.get("/extra").status_code == 200
        assert "/extra" in client.get("/openapi.json").json()["paths"]
    with serve(cls) as client:
        assert list(client.get("/openapi.json").json()["paths"]) == ["/extra"]
    assert TestClient(app).get("/openapi.json").json()["paths"] == {}
