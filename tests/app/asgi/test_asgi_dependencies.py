"""`Depends`: threads of dependencies, their instance, and overrides."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache, partial, wraps
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.openapi.models import APIKey, APIKeyIn
from fastapi.security.base import SecurityBase

from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import WORKER, bound, json_of, serve


def thread() -> str:
    return threading.current_thread().name


def fake() -> str:
    return "fake"


class Params:
    def __init__(self, q: str = "") -> None:
        self.q, self.thread = q, thread()


class Lookup:
    def __init__(self, table: str) -> None:
        self.table = table

    def __call__(self, key: str = "k") -> list[str]:
        return [self.table, key, thread()]


@lru_cache
def settings() -> str:
    return thread()


def test_def_dependencies_of_every_shape_run_in_the_replicas_workers(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/")
        async def root(
            self,
            plain: Annotated[str, Depends(thread)],
            params: Annotated[Params, Depends()],
            lookup: Annotated[list[str], Depends(Lookup("users"))],
            part: Annotated[str, Depends(partial(thread))],
            cached: Annotated[str, Depends(settings)],
        ) -> list[Any]:
            return [plain, part, cached, params.thread, *reversed(lookup), params.q]

    with serve(K) as client:
        *threads, key, table, q = client.get("/?q=x&key=y").json()

    assert [key, table, q] == ["y", "users", "x"]
    assert len(threads) == 5
    assert all(name.startswith(WORKER) for name in threads)


def test_dependencies_of_dependencies_routers_and_websockets_are_lifted_too() -> None:
    seen: list[str] = []

    def note() -> None:
        seen.append(thread())

    async def middle(inner: Annotated[None, Depends(note)]) -> None:
        seen.append("loop")

    def closing(inner: Annotated[None, Depends(note)]) -> Iterator[None]:
        yield

    app = FastAPI(dependencies=[Depends(note)])
    router = APIRouter(dependencies=[Depends(note, use_cache=False)])

    @ingress(app)
    class K:
        @router.get("/", dependencies=[Depends(middle), Depends(closing)])
        async def root(self) -> None: ...

        @router.websocket("/ws")
        async def ws(self, socket: WebSocket) -> None:
            await socket.accept()
            await socket.close()

    app.include_router(router, dependencies=[Depends(note, use_cache=False)])

    with serve(K) as client:
        client.get("/")
        http, seen[:] = list(seen), []
        with client.websocket_connect("/ws"):
            pass

    assert [name.startswith(WORKER) for name in http if name != "loop"] == [True] * (len(http) - 1)
    assert seen
    assert all(name.startswith(WORKER) for name in seen)


def test_use_cache_calls_a_dependency_once_for_each_request(app: FastAPI) -> None:
    calls: list[str] = []

    def one() -> int:
        calls.append("one")
        return len(calls)

    def two(one: Annotated[int, Depends(one)]) -> int:
        return one

    @ingress(app)
    class K:
        @app.get("/")
        def root(
            self,
            a: Annotated[int, Depends(one)],
            b: Annotated[int, Depends(two)],
            c: Annotated[int, Depends(one, use_cache=False)],
        ) -> list[int]:
            return [a, b, c]

    with serve(K) as client:
        assert client.get("/").json() == [1, 1, 2]
        app.dependency_overrides[fake] = fake  # FastAPI now analyses it at each request
        assert client.get("/").json() == [3, 3, 4]


@pytest.mark.parametrize("included", [False, True], ids=["on-app", "on-included-router"])
def test_overrides_have_the_original_as_key_and_work_live(included: bool, app: FastAPI) -> None:
    def real() -> str:
        return "real"

    def outer(inner: Annotated[str, Depends(real)]) -> str:
        return f"outer {inner}"

    router = APIRouter() if included else app.router

    @ingress(app)
    class K:
        @router.get("/")
        def root(
            self, outer: Annotated[str, Depends(outer)], real: Annotated[str, Depends(real)]
        ) -> list[str]:
            return [outer, real]

        @router.websocket("/ws")
        async def ws(self, socket: WebSocket, real: Annotated[str, Depends(real)]) -> None:
            await socket.accept()
            await socket.send_text(real)
            await socket.close()

    if included:
        app.include_router(router)

    with serve(K) as client:
        assert client.get("/").json() == ["outer real", "real"]
        app.dependency_overrides[real] = fake
        assert client.get("/").json() == ["outer fake", "fake"]
        with client.websocket_connect("/ws") as socket:
            assert socket.receive_text() == "fake"
        app.dependency_overrides = {outer: fake}
        assert client.get("/").json() == ["fake", "real"]
        app.dependency_overrides.clear()
        assert client.get("/").json() == ["outer real", "real"]


def test_overrides_of_a_class_an_object_and_a_partial_work(app: FastAPI) -> None:
    lookup, part = Lookup("users"), partial(thread)

    @ingress(app)
    class K:
        @app.get("/")
        def root(
            self,
            params: Annotated[Any, Depends(Params)],
            rows: Annotated[Any, Depends(lookup)],
            part: Annotated[Any, Depends(part)],
        ) -> list[Any]:
            return [params, rows, part]

    app.dependency_overrides = dict.fromkeys([Params, lookup, part], fake)
    assert json_of(K, "/") == ["fake", "fake", "fake"]


def test_lifted_dependencies_stay_in_the_workers_while_others_are_overridden(app: FastAPI) -> None:
    def outer(inner: Annotated[str, Depends(thread)]) -> list[str]:
        return [inner, thread()]

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self, names: Annotated[list[str], Depends(outer)]) -> list[str]:
            return names

    app.dependency_overrides[fake] = fake
    with serve(K) as client:
        assert all(name.startswith(WORKER) for name in client.get("/").json())


class Methods:
    """Every kind of method as a dependency, declared on the app of the test."""

    log: list[str]

    def __init__(self) -> None:
        self.log = []
        self.table = {"t": "user"}

    def user(self, token: str) -> str:
        if token not in self.table:
            raise HTTPException(401)
        return self.table[token]

    async def upper(self, user: Annotated[str, Depends(user)]) -> str:
        return user.upper()

    def session(self, user: Annotated[str, Depends(user)]) -> Iterator[str]:
        try:
            yield "session of " + user
        except LookupError:
            self.log.append("rolled back")
            raise
        finally:
            self.log.append("closed")

    async def transaction(self, session: Annotated[str, Depends(session)]) -> AsyncIterator[str]:
        try:
            yield "transaction in " + session
        finally:
            self.log.append("ended")


def methods_app() -> tuple[FastAPI, type]:
    app = FastAPI()

    @ingress(app)
    class K(Methods):
        @app.get("/")
        def root(
            self,
            upper: Annotated[str, Depends(Methods.upper)],
            transaction: Annotated[str, Depends(Methods.transaction)],
            fail: bool = False,
        ) -> list[str]:
            if fail:
                raise LookupError
            return [upper, transaction]

        @app.get("/log")
        def get_log(self) -> list[str]:
            return self.log

    return app, K


def test_a_method_of_the_class_is_a_dependency_bound_to_the_instance() -> None:
    _, cls = methods_app()

    with serve(cls) as client:
        assert client.get("/?token=t").json() == ["USER", "transaction in session of user"]
        assert client.get("/log").json() == ["ended", "closed"]
        assert client.get("/?token=x").status_code == 401
        assert client.get("/").json()["detail"][0]["loc"] == ["query", "token"]
        with pytest.raises(LookupError):
            client.get("/?token=t&fail=1")
        assert client.get("/log").json()[2:] == ["ended", "rolled back", "closed"]

    parameters = bound(cls).openapi()["paths"]["/"]["get"]["parameters"]
    assert [each["name"] for each in parameters] == ["fail", "token"]


def test_methods_as_dependencies_can_be_overridden_and_work_beside_overrides() -> None:
    app, cls = methods_app()

    with serve(cls) as client:
        app.dependency_overrides = {fake: fake}
        assert client.get("/?token=t").json() == ["USER", "transaction in session of user"]
        app.dependency_overrides = {Methods.user: fake}
        assert client.get("/").json() == ["FAKE", "transaction in session of fake"]
        app.dependency_overrides = {Methods.transaction: fake}
        assert client.get("/?token=t").json() == ["USER", "fake"]


def test_a_subclass_overrides_a_method_that_is_a_dependency() -> None:
    _, cls = methods_app()

    class Sub(cls):  # type: ignore[misc, valid-type]
        def user(self, token: str) -> str:
            return f"sub {super().user(token)}"

    with serve(Sub) as client:
        assert client.get("/?token=t").json()[0] == "SUB USER"


def test_a_sync_decorator_over_a_dependency_is_seen_through_as_fastapi_does(app: FastAPI) -> None:
    log: list[str] = []

    def logged(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        return wrapper

    @logged
    def session(name: str = "n") -> Iterator[str]:
        yield name
        log.append("closed")

    @logged
    async def on_loop() -> str:
        return thread()

    @ingress(app)
    class K:
        @app.get("/")
        def root(
            self, a: Annotated[str, Depends(session)], b: Annotated[str, Depends(on_loop)]
        ) -> list[str]:
            return [a, b]

    with serve(K) as client:
        name, on = client.get("/").json()

    assert name == "n"
    assert "worker" not in on
    assert log == ["closed"]


def test_security_schemes_keep_their_place_in_the_schema(app: FastAPI) -> None:
    class Header(SecurityBase):
        def __init__(self) -> None:
            self.model = APIKey.model_validate({"in": APIKeyIn.header, "name": "x-key"})
            self.scheme_name = "Header"

        def __call__(self, request: Request) -> str:
            return request.headers["x-key"]

    @ingress(app)
    class K:
        @app.get("/")
        def root(self, key: Annotated[str, Depends(Header())]) -> str:
            return key

    with serve(K) as client:
        assert client.get("/", headers={"x-key": "k"}).json() == "k"
    assert "Header" in bound(K).openapi()["components"]["securitySchemes"]
