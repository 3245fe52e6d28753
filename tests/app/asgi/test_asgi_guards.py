"""A guard is never open: what a function of a class gets, and the starts that are refused."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import fastapi.routing
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, WebSocket, params
from fastapi.dependencies.utils import get_dependant, get_parameterless_sub_dependant
from fastapi.routing import APIRoute
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import BaseRoute, Match, request_response
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from typing_extensions import TypeAliasType

from ingress import deployment
from ingress.app.asgi.compat import IncludedRouter, effective_context, iter_route_contexts
from ingress.app.asgi.spec import ingress
from ingress.exceptions import RayServeException
from tests.asgi_helpers import bound, json_of, serve
from tests.servers import wait_until

TOKEN = {"x-token": "t"}
Token = Annotated[str, Header(alias="x-token")]


def refuse(token: Token = "") -> str:
    if not token:
        raise HTTPException(401)
    return token


Refused = TypeAliasType("Refused", Annotated[str, Depends(refuse)])


def statuses(cls: type, *paths: str, **options: Any) -> list[int]:
    with serve(cls, raise_server_exceptions=False) as client:
        return [client.get(path, **options).status_code for path in paths]


# The rule for `self`.


def compiled(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the names of another, in code of its own, as dishka's."""
    names: dict[str, Any] = {"func": func}
    exec(
        compile("def made(*args, **values): return func(*args, **values)", "<made>", "exec"), names
    )
    made: Callable[..., Any] = names["made"]
    made.__name__, made.__qualname__, made.__module__ = func.__name__, func.__qualname__, __name__
    made.__signature__ = inspect.signature(func)  # type: ignore[attr-defined]
    return made


def test_a_function_that_a_decorator_has_compiled_gets_the_instance(app: FastAPI) -> None:
    @ingress(app)
    class K:
        name = "K"

        @app.get("/below")
        @compiled
        def below(self, user: str = Depends(refuse)) -> str:
            return self.name

        @compiled
        @app.get("/above")
        def above(self) -> str:
            return self.name

        def of(self) -> str:
            return self.name

        @app.get("/needs")
        def needs(self, name: str = Depends(compiled(of))) -> str:
            return name

    assert statuses(K, "/below") == [401]
    for path in ("/below", "/above", "/needs"):
        assert json_of(K, path, TOKEN) == "K"


def test_a_function_of_the_class_without_self_runs_as_it_is_written(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def need(token: Token = "") -> str:  # type: ignore[misc]
            return refuse(token)

        def asked(request: Request) -> str:  # type: ignore[misc]
            return request.url.path

        @app.get("/need", dependencies=[Depends(need), Depends(lambda: None)])
        async def guarded(self, token: Annotated[str, Depends(need)]) -> str:
            return token

        @app.get("/asked")
        async def where(self, path: Annotated[str, Depends(asked)]) -> str:
            return path

    with serve(K) as client:
        for overrides in ({}, {print: refuse}):
            app.dependency_overrides = overrides
            assert client.get("/need").status_code == 401
            assert client.get("/need", headers=TOKEN).json() == "t"
            assert client.get("/asked").json() == "/asked"


def test_a_function_of_the_module_that_the_class_also_has_is_not_its_method(app: FastAPI) -> None:
    class Guards:
        need = refuse

    @ingress(app)
    class K(Guards):
        also = refuse

    app.get("/", dependencies=[Depends(Guards.need), Depends(K.also)])(lambda: "through")
    assert statuses(K, "/", "/?self=x") == [401, 401]


@pytest.mark.parametrize("form", ["endpoint", "dependency"])
def test_where_the_first_parameter_may_be_either_the_start_is_refused(
    form: str, app: FastAPI
) -> None:
    class K:
        def need(token: str) -> str:  # type: ignore[misc]
            return token

        def page(limit: int = 3) -> int:  # type: ignore[misc]
            return limit

    if form == "endpoint":
        app.get("/")(K.page)
    else:
        app.get("/", dependencies=[Depends(K.need)])(lambda: None)
    with pytest.raises((TypeError, RayServeException)) as caught:
        bound(ingress(app)(K))

    told = str(caught.value)
    assert f"K.{'page' if form == 'endpoint' else 'need'}" in told
    assert "test_asgi_guards.py:" in told
    assert "`self` as its first parameter" in told
    assert "@staticmethod" in told


@pytest.mark.parametrize("form", ["default", "annotated", "unread", "base", "read", "header"])
def test_a_guard_declared_as_an_attribute_is_refused_because_it_would_never_run(
    form: str, app: FastAPI
) -> None:
    class Base:
        if form == "base":
            user: str = Depends(refuse)

    class K(Base):
        if form == "default":
            user: str = Depends(refuse)
        elif form == "annotated":
            user: Refused  # type: ignore[no-redef]
        elif form == "unread":
            user: Annotated[NoSuchName, Depends(refuse)]  # type: ignore[no-redef,name-defined]  # noqa: F821
        elif form == "read":
            user = Depends(refuse)
        elif form == "header":
            user: str = Header()  # type: ignore[no-redef]

        @app.get("/")
        def whoami(self) -> str:
            return str(self.user)

    with pytest.raises(TypeError, match=r"\.user is declared as a dependency or a parameter"):
        ingress(app)(K)


def test_a_guard_of_a_function_that_fastapi_does_not_call_is_refused(app: FastAPI) -> None:
    class Made:
        def __init__(self, user: str = Depends(refuse)) -> None:
            self.user = user

        @app.get("/")
        def whoami(self) -> str:
            return self.user

    class Called:
        async def __call__(self, request: Request, user: Refused = "nobody") -> str:
            return user

    async def function(request: Request, token: str = Header("")) -> str:
        return token

    given: Any = deployment(ingress(app)(Made))
    for each in (given, deployment(Called), deployment(function)):
        with pytest.raises(TypeError, match="FastAPI does not call this function"):
            each.bind()
    with TestClient(given.bind(user="given")) as client:
        assert client.get("/").json() == "given"


def test_an_attribute_that_is_an_alias_of_a_dependency_is_served(app: FastAPI) -> None:
    @ingress(app)
    class K:
        need = Depends(refuse)
        shared: ClassVar[Any] = Depends(refuse)
        typed: params.Depends = Depends(refuse)
        User = Annotated[str, need]
        limit: NoSuchName = 3  # type: ignore[name-defined]  # noqa: F821

        @app.get("/default")
        def default(self, user: str = need) -> str:
            return user

        @app.get("/annotated")
        def annotated(self, user: User) -> str:
            return user

        @app.get("/route", dependencies=[shared, typed])
        def route(self) -> str:
            return "t"

    paths = "/default", "/annotated", "/route"
    assert statuses(K, *paths) == [401, 401, 401]
    assert statuses(K, *paths, headers=TOKEN) == [200, 200, 200]


def test_the_name_of_the_instance_is_that_of_the_constructor_or_self_or_this(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def __init__(me) -> None:
            me.name = "K"

        def own(me, self: str = "asked") -> list[str]:
            return [me.name, self]

        @app.get("/")
        async def root(this, own: Annotated[list[str], Depends(own)]) -> list[str]:
            return [this.name, *own]

    assert json_of(K, "/?self=client") == ["K", "K", "client"]


def test_methods_of_two_classes_with_the_same_names_are_told_apart() -> None:
    app = FastAPI()

    def made(name: str) -> type:
        @ingress(app)
        class K:
            label = name

            @app.get(f"/{name}")
            def root(self) -> str:
                return self.label

        return K

    first, second = made("first"), made("second")
    assert statuses(first, "/first", "/second") == [200, 404]
    assert statuses(second, "/first", "/second") == [404, 200]


def test_an_override_of_a_subclass_must_take_the_instance_too(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def guard(self) -> None:
            raise HTTPException(401)

        @app.get("/", dependencies=[Depends(guard)])
        def root(self) -> None: ...

    class Sub(K):
        def guard(token: str = "") -> str:  # type: ignore[misc, override]
            return token

    with pytest.raises(TypeError, match=r"Sub\.guard.* must take the same parameters"):
        bound(Sub)


def test_a_redefinition_keeps_the_dependencies_that_it_declares(app: FastAPI) -> None:
    class Base:
        def user(self, token: str = "") -> str:
            return token

        @app.get("/user")
        async def user_of(self, user: str = Depends(user)) -> str:
            return user

        @app.get("/name")
        async def name(self, name: str = "nobody") -> str:
            return name

    @ingress(app)
    class K(Base):
        def user(self, token: str = Depends(refuse)) -> str:
            return token

        async def name(self, name: str = Depends(refuse)) -> str:
            return name

    paths = "/user?token=x", "/name?name=root"
    assert statuses(K, *paths) == [401, 401]
    assert statuses(K, *paths, headers=TOKEN) == [200, 200]


# Decorators on methods.


def test_methods_that_one_function_or_one_loop_made_are_each_served(app: FastAPI) -> None:
    def mixin(name: str) -> type:
        class Mixin:
            def user(self, token: Token = "") -> str:
                return f"{refuse(token)} of {name}"

            @app.get(f"/{name}")
            def read(self, user: str = Depends(user)) -> str:
                return user

        return Mixin

    @ingress(app)
    class K(mixin("a"), mixin("b")):  # type: ignore[misc]
        for name in ("c", "d"):

            @app.get(f"/{name}")
            def each(self, token: str = Depends(refuse)) -> str:
                return token

    paths = [f"/{name}" for name in "abcd"]
    assert statuses(K, *paths) == [401] * 4
    with serve(K) as client:
        answers = [client.get(path, headers=TOKEN).json() for path in paths]
        assert answers == ["t of a", "t of b", "t", "t"]


def test_a_class_that_takes_the_name_of_its_base_redefines_its_guards(app: FastAPI) -> None:
    class K:
        anybody = lambda self, token="": token  # noqa: E731

        def user(self, token: Token = "") -> str:
            return token

        @app.get("/user")
        def root(self, user: str = Depends(user)) -> str:
            return user

        @app.get("/anybody")
        def other(self, user: str = Depends(anybody)) -> str:
            return user

    @wraps(K, updated=())
    class Secured(K):
        def user(self, token: Token = "") -> str:
            return refuse(token)

        def anybody(self, token: str = "") -> str:
            return refuse(token)

    assert statuses(ingress(app)(Secured), "/user", "/anybody") == [401, 401]


def test_the_types_of_a_redefinition_count(app: FastAPI) -> None:
    class Base:
        @app.get("/role")
        def role(self, role: str = "user") -> str:
            return role

        @app.get("/user")
        def user(self, user: str = "nobody") -> str:
            return user

    @ingress(app)
    class K(Base):
        def role(self, role: Literal["user"] = "user") -> str:  # type: ignore[override]
            return role

        def user(self, user: Refused) -> str:  # type: ignore[override]
            return str(user)

    assert statuses(K, "/role", "/role?role=admin", "/user?user=root") == [200, 422, 401]


def test_user_code_finds_its_own_function_as_the_endpoint(app: FastAPI) -> None:
    protected: set[object] = set()

    def guard(request: Request, token: Token = "") -> None:
        if request.scope["endpoint"] in protected:
            refuse(token)

    @app.middleware("http")
    async def also(request: Request, call_next: Any) -> Any:
        routes = [each for each in request.app.routes if isinstance(each, APIRoute)]
        found = [each for each in routes if each.endpoint in protected]
        answer = await call_next(request)
        answer.headers["x-found"] = str(len(found))
        return answer

    router = APIRouter(dependencies=[Depends(guard)])

    @ingress(app)
    class K:
        @router.get("/own")
        def own(self) -> None: ...

        @router.get("/stream", response_model=None)
        def stream(self) -> Any:
            return StreamingResponse(iter(["1"]))

    protected |= {K.own, K.stream}
    app.include_router(router, prefix="/in")
    app.router.routes += router.routes
    paths = ("/own", "/stream", "/in/own", "/in/stream")
    assert statuses(K, *paths) == [401, 401, 401, 401]
    assert statuses(K, *paths, headers=TOKEN) == [200, 200, 200, 200]
    with serve(K) as client:
        assert int(client.get("/own").headers["x-found"]) >= 2


def retried(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that calls through an object whose own parameter is `self`, as tenacity."""

    class Retrying:
        async def __call__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return await func(*args, **kwargs)

    @wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await Retrying()(func, *args, **kwargs)

    return wrapper


def first_argument(func: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f"{args[0].name}: {func(*args, **kwargs)}"

    return wrapper


def by_keyword(func: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f"{kwargs['request'].url.path} {func(*args, **kwargs)}"

    return wrapper


class Cached:
    """A decorator that is an object, as wrapt and async_lru make them."""

    def __init__(self, func: Callable[..., Any]) -> None:
        functools.update_wrapper(self, func)

    def __get__(self, instance: object, owner: type) -> Any:
        return partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def test_a_wrapper_gets_the_instance_as_a_method_call_passes_it(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.name = "K"

        @retried
        async def dependency(self) -> str:
            return self.name

        @functools.lru_cache  # noqa: B019
        def settings(self) -> str:
            return self.name

        @Cached
        def cached(self, n: int = 1) -> str:
            return self.name * n

        @app.get("/retried")
        @retried
        async def root(self, n: int, name: Annotated[str, Depends(dependency)]) -> str:
            return self.name + name * n

        @app.get("/first")
        @first_argument
        def first(self, name: Annotated[str, Depends(settings)]) -> str:
            return name

        @app.get("/cached")
        def of_cached(self, name: Annotated[str, Depends(cached)]) -> str:
            return name

        @app.get("/request")
        @by_keyword
        def asked(self, request: Request) -> str:
            return self.name

    with serve(K) as client:
        assert client.get("/retried?n=2").json() == "KKK"
        assert client.get("/first").json() == "K: K"
        assert client.get("/cached?n=2").json() == "KK"
        assert client.get("/request").json() == "/request K"
        app.dependency_overrides[print] = refuse
        assert client.get("/first").json() == "K: K"


def test_an_object_that_python_would_bind_is_bound(app: FastAPI) -> None:
    class Decorated:
        def __init__(self, func: Callable[..., Any]) -> None:
            self.func, self.__signature__ = func, inspect.signature(func)

        def __get__(self, instance: object, owner: type | None = None) -> Any:
            return self if instance is None else partial(self.func, instance)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.func(*args, **kwargs)

    @ingress(app)
    class K:
        def __init__(this) -> None:
            this.name = "K"

        @Decorated
        def who(this, token: Token = "") -> str:
            return f"{refuse(token)} at {this.name}"

        @app.get("/")
        async def root(this, who: Annotated[str, Depends(who)]) -> str:
            return who

    assert statuses(K, "/?this=x") == [401]
    assert json_of(K, "/?this=x", TOKEN) == "t at K"


def test_a_decorator_that_hides_the_method_is_refused_or_bound(app: FastAPI) -> None:
    class Hiding:
        def __init__(self, func: Callable[..., Any]) -> None:
            functools.update_wrapper(self, func)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("never called")

    @ingress(app)
    class K:
        @Hiding
        def guard(self) -> None: ...

        @app.get("/", dependencies=[Depends(guard)])
        def root(self) -> None: ...

    with pytest.raises(TypeError, match=r"ask the client.*functools\.wraps"):
        bound(K)


# The client never supplies `self`.


def test_a_method_of_the_class_below_a_mounted_app_is_refused() -> None:
    app, sub = FastAPI(), FastAPI()

    class K:
        def guard(self) -> None: ...

    sub.get("/", dependencies=[Depends(K.guard)])(lambda: None)
    app.mount("/sub", sub)
    with pytest.raises(TypeError, match=r"K\.guard is a dependency of .* mounted at '/sub'"):
        bound(ingress(app)(K))


@pytest.mark.parametrize("place", ["guard", "override"])
def test_a_method_of_another_class_is_refused(place: str, app: FastAPI) -> None:
    class Other:
        def guard(self) -> None: ...

    call = Other.guard if place == "guard" else refuse
    app.get("/", dependencies=[Depends(call)])(lambda: None)
    if place == "override":
        app.dependency_overrides[refuse] = Other.guard
    with pytest.raises(TypeError, match=r"Other\.guard\(self\).* ask the client"):
        bound(ingress(app)())


def test_a_route_that_the_constructor_adds_has_its_methods_bound(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.name = "K"
            app.add_api_route("/own", self.own)
            app.add_api_route("/raw", K.raw, dependencies=[Depends(K.guard)])

        def guard(self, token: Token = "") -> str:
            return self.name + refuse(token)

        async def own(self, user: str = Depends(guard)) -> str:
            return user

        def raw(self) -> str:
            return self.name

    with serve(K) as client:
        for query in ("", "?self=client"):
            assert client.get(f"/own{query}").status_code == 401
            assert client.get(f"/own{query}", headers=TOKEN).json() == "Kt"
            assert client.get(f"/raw{query}").status_code == 401
            assert client.get(f"/raw{query}", headers=TOKEN).json() == "K"


def test_a_later_route_that_would_ask_for_self_is_refused_by_name(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    class Other:
        def guard(self) -> None: ...

    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.is_added = False

        @app.get("/add")
        async def add(self) -> None:
            app.add_api_route("/late", lambda: "open", dependencies=[Depends(Other.guard)])

    with serve(K, raise_server_exceptions=False) as client:
        assert client.get("/add").status_code == 200
        with caplog.at_level(logging.ERROR, logger="ingress"):
            assert client.get("/late?self=x").status_code == 500
        assert "Other.guard" in caplog.text

    @ingress(FastAPI())
    class AtStart:
        def __init__(self) -> None:
            router = APIRouter()
            router.add_api_route("/late", lambda: None, dependencies=[Depends(Other.guard)])
            AtStart.__ingress_spec__.app.include_router(router)  # type: ignore[attr-defined]

    with pytest.raises(TypeError, match=r"'/late'.*Other\.guard"), serve(AtStart):
        pass


def test_an_app_that_is_served_without_its_deployment_asks_for_no_self(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def guard(self) -> str:
            return "guard"

    app.get("/")(lambda user=Depends(K.guard): user)
    answer = TestClient(app).get("/?self=client")
    assert answer.status_code == 500
    assert "served without its deployment K" in answer.text


# Annotations that name what the class has.


def guard() -> str:
    """Return the name of the module's own function, as which the classes below have a method."""
    return "of the module"


def test_strings_name_what_the_class_has_so_far(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def list(self, user: Annotated[str, Depends(guard)]) -> list[str]:
            return [user]

        def guard(self, token: Token = "") -> str:
            return refuse(token)

        Guarded = Annotated[str, Depends(guard)]

        @app.get("/alias")
        async def alias(self, user: Guarded = "nobody") -> str:
            return user

        @app.get("/inline")
        async def inline(self, user: Annotated[str, Depends(guard)] = "nobody") -> str:
            return user

        @app.get("/below")
        async def below(
            self,
            users: Annotated[Any, Depends(list)] = None,
        ) -> Any:
            return users

        @app.websocket("/ws")
        async def ws(self, socket: WebSocket, user: Guarded = "nobody") -> None:
            await socket.accept()

    with serve(K) as client:
        for overrides in ({}, {print: refuse}):
            app.dependency_overrides = overrides
            assert [client.get(path).status_code for path in ("/alias", "/inline")] == [401, 401]
            assert client.get("/alias", headers=TOKEN).json() == "t"
            assert client.get("/below").json() == ["of the module"]
            with pytest.raises(WebSocketDisconnect):
                client.websocket_connect("/ws").__enter__()
        assert client.get("/openapi.json").status_code == 200


def test_an_annotation_that_cannot_be_read_is_refused_because_it_may_be_a_guard(
    app: FastAPI,
) -> None:
    @ingress(app)
    class K:
        @app.get("/")
        async def root(self, user: Annotated[str, Depends(nowhere)] = "nobody") -> None: ...  # noqa: F821

    with pytest.raises(TypeError, match=r"annotation 'Annotated.*Depends\(nowhere\).* of 'user'"):
        bound(K)


# Equality and overrides.


class CanRead(NamedTuple):
    area: str

    def __call__(self) -> str:
        return "may read"


class CanWrite(NamedTuple):
    area: str

    def __call__(self, key: str = "") -> str:
        if key != "k":
            raise HTTPException(403)
        return "may write"


def test_equal_callables_of_two_routes_are_two_dependencies_and_endpoints(app: FastAPI) -> None:
    read: Any = CanRead("shop")
    write: Any = CanWrite("shop")
    assert read == write
    app.get("/read", dependencies=[Depends(read)])(lambda: None)
    app.get("/write", dependencies=[Depends(write)])(lambda: None)
    app.get("/reads")(read)
    app.get("/writes")(write)
    paths = "/read", "/write", "/write?key=k", "/reads", "/writes", "/writes?key=k"
    assert statuses(ingress(app)(), *paths) == [200, 403, 200, 200, 403, 200]


def test_the_last_depends_of_an_annotated_counts_with_overrides_too(app: FastAPI) -> None:
    User = Annotated[str, Depends(guard)]
    admin = Annotated[User, Depends(refuse)]
    page: Any = lambda who: who  # noqa: E731
    page.__annotations__ = {"who": admin}
    app.get("/page")(page)
    app.dependency_overrides[print] = guard
    assert statuses(ingress(app)(), "/page") == [401]


def test_an_override_that_depends_on_what_it_overrides_is_refused_by_name(app: FastAPI) -> None:
    def mocked(real: Annotated[str, Depends(guard)]) -> str:
        return real

    app.get("/")(lambda user=Depends(guard): user)
    cls = ingress(app)()
    with serve(cls) as client:
        app.dependency_overrides[guard] = mocked
        with pytest.raises(RuntimeError, match=r"dependency_overrides\[guard\] is .*mocked"):
            client.get("/")
    with pytest.raises(RuntimeError, match=r"depends on guard"):
        bound(cls)


def test_an_override_that_an_earlier_dependency_sets_counts_for_later_ones(app: FastAPI) -> None:
    calls: list[str] = []

    def other() -> str:
        calls.append("other")
        return "other"

    def real() -> str:
        calls.append("real")
        return "real"

    def below(real: str = Depends(real)) -> str:
        calls.append("below")
        return f"below {real}"

    def setting() -> None:
        app.dependency_overrides[real] = fake

    def fake(also: str = Depends(other)) -> Iterator[str]:
        calls.append(f"fake {also}")
        yield "fake"
        calls.append("end of fake")

    @app.get("/")
    async def root(
        number: int,
        first: str = Depends(other),
        _: None = Depends(setting),
        last: str = Depends(below),
    ) -> list[str]:
        calls.append("root")
        return [first, last]

    with serve(ingress(app)()) as client:
        for _round in range(2):  # at the second one it is there from the start
            calls.clear()
            assert client.get("/?number=1").json() == ["other", "below fake"]
            assert calls == ["other", "fake other", "below", "root", "end of fake"]
        app.dependency_overrides.clear()
        assert client.get("/?number=x").json()["detail"][0]["loc"] == ["query", "number"]


# Layers around routes.


class Layer:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (b"x-token", b"t") not in scope["headers"]:
            await PlainTextResponse("no", 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Slotted(Layer):
    __slots__ = ("app",)


def closure(app: ASGIApp) -> ASGIApp:
    async def layer(scope: Scope, receive: Receive, send: Send) -> None:
        await Layer(app)(scope, receive, send)

    return layer


def default(app: ASGIApp) -> ASGIApp:
    async def layer(
        scope: Scope, receive: Receive, send: Send, inner: ASGIApp = app, *, other: Any = None
    ) -> None:
        await Layer(inner)(scope, receive, send)

    return layer


async def checked(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await Layer(app)(scope, receive, send)


async def dispatched(request: Request, call_next: Any) -> Any:
    is_known = request.headers.get("x-token") == "t"
    return await call_next(request) if is_known else PlainTextResponse("no", 401)


def one_route(app: FastAPI) -> tuple[type, Any]:
    """Return a class that needs its instance for its route, and that route."""

    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.name = "K"

        def user(self, token: Token = "nobody") -> str:
            return token

        @app.get("/")
        def root(self, user: str = Depends(user), also: str = "also") -> str:
            return self.name

    (route,) = (each for each in app.routes if isinstance(each, APIRoute))
    return K, route


LAYERS: list[Callable[[ASGIApp], Any]] = [
    Layer, Slotted, closure, default,
    lambda app: partial(checked, app),
    lambda app: BaseHTTPMiddleware(app, dispatch=dispatched),
    lambda app: Layer(closure(app)).__call__,
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
@pytest.mark.parametrize("name", ["app", "handle"])
def test_a_layer_around_a_route_is_kept_and_the_app_inside_is_bound(
    layer: Callable[[ASGIApp], Any], name: str, app: FastAPI
) -> None:
    cls, route = one_route(app)
    setattr(route, name, layer(getattr(route, name)))
    with serve(cls, replicas=2) as client:
        for _ in range(2):
            assert client.get("/").status_code == 401
            assert client.get("/", headers=TOKEN).json() == "K"


class Around(BaseRoute):
    """A route of the user's own kind, around another route."""

    def __init__(self, route: Any) -> None:
        self.route = route

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found: tuple[Match, Scope] = self.route.matches(scope)
        return found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Layer(self.route.handle)(scope, receive, send)


class Group(BaseRoute):
    """One that holds others in a list, and the one that it found by its method."""

    def __init__(self, route: Any) -> None:
        self.routes = [{"route": route}]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        self.found = self.routes[0]["route"].handle
        found: tuple[Match, Scope] = self.routes[0]["route"].matches(scope)
        return found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Layer(self.found)(scope, receive, send)


class Methods(BaseRoute):
    """One that keeps the methods of another only."""

    __slots__ = ("handle", "matches")

    def __init__(self, route: Any) -> None:
        self.matches, self.handle = route.matches, Layer(route.handle).__call__  # type: ignore[method-assign]


def around_the_route(app: FastAPI, kind: Callable[[Any], BaseRoute] = Around) -> None:
    app.router.routes[:] = [
        kind(each) if isinstance(each, APIRoute) else each for each in app.router.routes
    ]


def in_a_list(app: FastAPI) -> None:
    around_the_route(app, Group)


def by_its_methods(app: FastAPI) -> None:
    around_the_route(app, Methods)


def around_the_router(app: FastAPI) -> None:
    router: Any = app.router
    router.app = router.middleware_stack = closure(router.app)


def around_the_stack_of_the_router(app: FastAPI) -> None:
    router: Any = app.router
    router.middleware_stack = closure(router.middleware_stack)


@pytest.mark.parametrize(
    "put",
    [
        around_the_route,
        in_a_list,
        by_its_methods,
        around_the_router,
        around_the_stack_of_the_router,
    ],
)
def test_a_layer_above_a_route_is_kept_and_its_methods_are_bound(
    put: Callable[[FastAPI], None], app: FastAPI
) -> None:
    cls, _ = one_route(app)
    put(app)
    with serve(cls, replicas=2) as client:
        for _ in range(2):
            assert client.get("/?self=x").status_code == 401
            assert client.get("/", headers=TOKEN).json() == "K"


@pytest.mark.skipif(IncludedRouter is None, reason="this FastAPI copies included routes")
@pytest.mark.parametrize("changed", ["app", "dependant"])
def test_what_is_changed_in_the_routes_of_an_included_router_is_kept(
    changed: str, app: FastAPI
) -> None:
    inner, outer = APIRouter(), APIRouter()

    @ingress(app)
    class K:
        @inner.get("/")
        def root(self) -> str:
            return type(self).__name__

    outer.include_router(inner)
    app.include_router(outer, prefix="/in")
    (served,) = (each for each in iter_route_contexts(app.routes) if each.path == "/in/")
    context: Any = effective_context(served)
    if changed == "app" and not hasattr(context, "app"):
        pytest.skip("FastAPI 0.137 keeps no app of an included route")
    if changed == "app":
        context.app = Layer(context.app)
    else:
        node = get_parameterless_sub_dependant(depends=Depends(refuse), path="/in/")
        context.dependant.dependencies.insert(0, node)
    with serve(K) as client:
        assert client.get("/in/").status_code == 401
        assert client.get("/in/", headers=TOKEN).json() == "K"


@pytest.mark.skipif(not hasattr(FastAPI, "frontend"), reason="this FastAPI has no frontends")
@pytest.mark.parametrize("is_included", [False, True])
def test_files_of_a_frontend_are_behind_a_guard_that_is_a_method(
    is_included: bool, app: FastAPI, tmp_path: Path
) -> None:
    (tmp_path / "index.html").write_text("page")
    router = APIRouter() if is_included else app.router

    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.log: list[str] = []

        def guard(self, token: Token = "") -> None:
            self.log.append(refuse(token))

        @app.get("/log")
        def seen(self) -> list[str]:
            return self.log

    if not is_included:
        router.dependencies.append(Depends(K.guard))
    router.frontend("/", directory=tmp_path)
    if is_included:
        app.include_router(router, dependencies=[Depends(K.guard)])
    with serve(K) as client:
        assert [client.get(path).status_code for path in ("/", "/?self=x")] == [401, 401]
        assert client.get("/", headers=TOKEN).text == "page"
        assert client.get("/log", headers=TOKEN).json() == ["t"]


def test_a_layer_that_hides_the_router_is_refused(app: FastAPI) -> None:
    async def hiding(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("never called")

    app.router.app = hiding  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"`app` of .* which hides the method of the router"):
        bound(ingress(app)())


def test_a_route_class_changes_each_endpoint_and_adds_each_dependency_once(app: FastAPI) -> None:
    calls: list[str] = []

    def note() -> None:
        calls.append("note")

    class Wrapping(APIRoute):
        def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
            @wraps(endpoint)
            def wrapper(*args: Any, **kwargs: Any) -> list[Any]:
                return ["wrapped", endpoint(*args, **kwargs)]

            once = Depends(note, use_cache=False)
            options["dependencies"] = [*options["dependencies"], once]
            super().__init__(path, wrapper, **options)
            self.app = Layer(self.app)

    app.router.route_class = Wrapping

    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.name = "K"

        @app.get("/")
        def root(self) -> Any:
            return self.name

    with serve(K) as client:
        assert client.get("/").status_code == 401
        assert client.get("/", headers=TOKEN).json() == ["wrapped", "K"]
    assert calls == ["note"]


def test_an_app_that_replaces_that_of_a_route_is_kept_if_it_needs_no_instance(
    app: FastAPI,
) -> None:
    async def replaced(request: Request) -> PlainTextResponse:
        return PlainTextResponse("replaced")

    @ingress(app)
    class K:
        def root(self) -> None: ...

    app.get("/free")(lambda: "declared")
    for path in ("/free", "/openapi.json", "/docs"):
        route: Any = next(each for each in app.routes if getattr(each, "path", "") == path)
        route.app = request_response(replaced)
    with serve(K) as client:
        assert [client.get(path).text for path in ("/free", "/openapi.json", "/docs")] == [
            "replaced"
        ] * 3

    app.get("/bound")(K.root)
    route = app.routes[-1]
    route.app = request_response(replaced)
    with pytest.raises(TypeError, match=r"`app` of the route '/bound' of K\.root was replaced"):
        bound(K)


class Answering(APIRoute):
    """A route that answers by itself, as those of fastapi-jsonrpc do."""

    async def guarded(self, request: Request) -> PlainTextResponse:
        refuse(request.headers.get("x-token", ""))
        return PlainTextResponse(f"{self.path} by {type(self).__name__}")

    async def guarded_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await request_response(self.guarded)(scope, receive, send)


@pytest.mark.parametrize(
    "handler",
    [
        lambda route: fastapi.routing.request_response(route.guarded),
        lambda route: fastapi.routing.request_response(partial(Answering.guarded, route)),
        lambda route: request_response(route.guarded),
        lambda route: route.guarded_app,
        lambda route: Delegating(route.guarded_app),
    ],
)
def test_a_route_that_answers_by_itself_keeps_its_guard(app: FastAPI, handler: Any) -> None:
    class Own(Answering):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.app = handler(self)

    app.router.route_class = Own

    @app.get("/")
    def never() -> None: ...

    @ingress(app)
    class K: ...

    with serve(K, replicas=2) as client:
        assert client.get("/").status_code == 401
        assert client.get("/", headers=TOKEN).text == "/ by Own"


# What user code changes in finished routes and apps.


def put_first(dependant: Any) -> None:
    node = get_parameterless_sub_dependant(depends=Depends(refuse), path="/")
    dependant.dependencies.insert(0, node)


def put_below(dependant: Any) -> None:
    put_last(dependant.dependencies[0])


def put_last(dependant: Any) -> None:
    dependant.dependencies.append(get_dependant(path="/", call=refuse, name=None))


def put_in_place(dependant: Any) -> None:
    dependant.dependencies[0] = get_dependant(path="/", call=refuse, name="user")


def called_instead(dependant: Any) -> None:
    node = get_dependant(path="/", call=refuse, name="user")
    dependant.dependencies[0].call = node.call
    dependant.dependencies[0].query_params = []
    dependant.dependencies[0].header_params = node.header_params


def for_a_parameter(dependant: Any) -> None:
    dependant.query_params[:] = [each for each in dependant.query_params if each.name != "also"]
    dependant.dependencies.append(get_dependant(path="/", call=refuse, name="also"))


@pytest.mark.parametrize("when", ["before", "at start-up", "while serving"])
@pytest.mark.parametrize(
    "put",
    [put_first, put_last, put_below, put_in_place, called_instead, for_a_parameter],
)
def test_a_dependency_that_is_put_into_a_finished_route_runs(
    put: Callable[[Any], None], when: str, app: FastAPI
) -> None:
    cls, route = one_route(app)

    def change() -> None:
        (served,) = (each for each in app.routes if getattr(each, "path", "") == "/")
        put(served.dependant)  # type: ignore[attr-defined]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        change()
        yield

    if when == "before":
        change()
        assert put is not put_first or route.dependant.dependencies[0].call is refuse
    elif when == "at start-up":
        app.router.lifespan_context = lifespan
    else:
        app.get("/change")(change)
    with serve(cls) as client:
        if when == "while serving":
            assert client.get("/").json() == "K"
            client.get("/change")
        assert client.get("/?self=x").status_code == 401
        assert client.get("/", headers=TOKEN).json() == "K"


def test_a_dependency_that_is_taken_out_of_a_finished_route_does_not_run(app: FastAPI) -> None:
    cls, route = one_route(app)
    app.get("/free", dependencies=[Depends(refuse)])(lambda: "free")
    del route.dependant.dependencies[:]
    app.routes[-1].dependant.dependencies.clear()  # type: ignore[attr-defined]
    assert statuses(cls, "/free") == [200]


def change_route(app: FastAPI, route: Any) -> None:
    route.handle = Layer(route.handle)


def change_equal(app: FastAPI, route: Any) -> None:
    changed = APIRoute("/", route.endpoint, dependencies=[Depends(refuse)])
    app.router.routes[app.router.routes.index(route)] = changed


def change_app(app: FastAPI, route: Any) -> None:
    route.app = Layer(route.app)


@pytest.mark.parametrize("change", [change_route, change_equal, change_app])
def test_a_route_that_is_changed_while_serving_is_served_so_within_a_second(
    change: Callable[[FastAPI, Any], None], app: FastAPI
) -> None:
    cls, route = one_route(app)
    with serve(cls) as client:
        assert client.get("/").json() == "K"
        change(app, route)
        wait_until(lambda: client.get("/").status_code == 401)
        assert client.get("/", headers=TOKEN).json() == "K"


def test_a_handle_that_a_request_replaces_answers_the_next_one(app: FastAPI) -> None:
    cls, _ = one_route(app)

    @app.get("/change")
    async def change() -> None:
        (served,) = (each for each in app.routes if getattr(each, "path", "") == "/")
        change_route(app, served)

    assert statuses(cls, "/", "/change", "/") == [200, 200, 401]


@pytest.mark.parametrize("name", ["app", "handle"])
def test_a_layer_around_the_schema_is_kept(name: str, app: FastAPI) -> None:
    cls, _ = one_route(app)
    (route,) = (each for each in app.routes if getattr(each, "path", "") == "/openapi.json")
    setattr(route, name, Layer(getattr(route, name)))
    assert statuses(cls, "/openapi.json") == [401]
    with serve(cls) as client:
        assert "/" in client.get("/openapi.json", headers=TOKEN).json()["paths"]


def test_a_pattern_that_was_replaced_is_matched(app: FastAPI) -> None:
    cls, _ = one_route(app)
    app.get("/any/{name}")(lambda name: name)
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.path_regex = re.compile(route.path_regex.pattern + "|/Also$", re.IGNORECASE)
    assert statuses(cls, "/", "/ANY/x", "/also", "/other") == [200, 200, 200, 404]


@pytest.mark.parametrize("when", ["at start-up", "in a request"])
@pytest.mark.parametrize("is_mounted", [False, True])
def test_overrides_that_are_replaced_through_the_app_in_hand_are_gone(
    when: str, is_mounted: bool, app: FastAPI
) -> None:
    served = FastAPI() if is_mounted else app
    cls, _ = one_route(app)

    @served.get("/guarded")
    async def guarded(request: Request, token: Annotated[str, Depends(refuse)]) -> Any:
        return token, request.app is served

    @served.get("/clear")
    async def clear(request: Request) -> None:
        request.app.dependency_overrides = {}

    @asynccontextmanager
    async def lifespan(started: FastAPI) -> AsyncIterator[None]:
        started.dependency_overrides = {}
        yield

    served.dependency_overrides[refuse] = lambda: "open"
    where = "/in" if is_mounted else ""
    if is_mounted:
        app.mount(where, served)
    elif when == "at start-up":
        app.router.lifespan_context = lifespan
    with serve(cls, replicas=2) as client:
        if is_mounted or when == "in a request":
            assert client.get(f"{where}/guarded").json() == ["open", is_mounted]
            client.get(f"{where}/clear")
        for _ in range(2):
            assert client.get(f"{where}/guarded").status_code == 401
        assert served.dependency_overrides == {}


def test_a_mounted_app_gets_middleware_and_guarded_routes_at_start_up(app: FastAPI) -> None:
    cls, _ = one_route(app)
    inner = FastAPI()
    inner.get("/")(lambda: "inner")
    app.mount("/in", inner)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        inner.add_middleware(Layer)
        inner.get("/late", dependencies=[Depends(refuse)])(lambda: "late")
        yield

    app.router.lifespan_context = lifespan
    with serve(cls) as client:
        assert [client.get(path).status_code for path in ("/in/", "/in/late")] == [401, 401]
        assert client.get("/in/late", headers=TOKEN).json() == "late"


@pytest.mark.parametrize("place", ["mount", "default"])
def test_a_method_of_the_class_in_an_app_that_is_no_route_is_refused(
    place: str, app: FastAPI
) -> None:
    inner = FastAPI()
    cls, _ = one_route(inner)
    if place == "mount":
        app.mount("/in", CORSMiddleware(Layer(inner), allow_origins=["*"]))
    else:
        app.router.default = inner
    with pytest.raises(TypeError, match=r"K\.root is a route of an app mounted at"):
        bound(ingress(app)(cls))


def test_a_method_that_the_app_calls_without_its_instance_is_refused(app: FastAPI) -> None:
    class Handling:
        @app.exception_handler(KeyError)
        def missing(self, request: Request, error: KeyError) -> None: ...

    with pytest.raises(TypeError, match=r"Handling\.missing is a middleware or an exception"):
        bound(ingress(app)(Handling))
    inner = FastAPI()
    app.mount("/in", inner)

    class Mounted:
        @inner.exception_handler(KeyError)
        def missing(self, request: Request, error: KeyError) -> None: ...

    with pytest.raises(TypeError, match=r"Mounted\.missing is a middleware or an exception"):
        bound(ingress(app)(Mounted))
    inner = FastAPI()
    cls, _ = one_route(inner)
    layered: Any = CORSMiddleware(inner, allow_origins=["*"])
    with pytest.raises(TypeError, match=r"K\.root is a route of an app that is in a layer"):
        bound(ingress(layered)(cls))


@pytest.mark.filterwarnings("ignore:[^a-z]*on_event is deprecated:DeprecationWarning")
@pytest.mark.parametrize("event", ["startup", "shutdown"])
@pytest.mark.parametrize("owner", [APIRouter, FastAPI])
def test_a_method_that_the_app_calls_at_its_start_or_end_is_refused(
    owner: type[APIRouter | FastAPI], event: str, app: FastAPI
) -> None:
    owned = app if owner is FastAPI else APIRouter()

    class Handling:
        @owned.on_event(event)
        async def handle(self) -> None: ...

    if isinstance(owned, APIRouter):
        app.include_router(owned)
    with pytest.raises(TypeError, match=r"Handling\.handle is an event handler.* __init__\(self\)"):
        bound(ingress(app)(Handling))


def test_a_method_as_the_lifespan_of_the_app_is_refused(app: FastAPI) -> None:
    router: Any = app.router

    class Handling:
        @asynccontextmanager
        async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
            yield

        router.lifespan_context = lifespan

    with pytest.raises(TypeError, match=r"Handling\.lifespan is .* the lifespan of the app"):
        bound(ingress(app)(Handling))


class Delegating(Layer):
    """A layer that has the attributes of the app inside: its copy has none, for a while."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)


class Switch(Layer):
    is_open = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app if self.is_open else PlainTextResponse("no", 401))(scope, receive, send)


@pytest.mark.parametrize("place", ["app", "handle", "mount", "stack"])
def test_what_is_set_on_a_layer_of_the_users_counts_in_all_replicas(
    place: str, app: FastAPI
) -> None:
    cls, route = one_route(app)
    path = "/"
    if place in ("app", "handle"):
        switch = Switch(getattr(route, place))
        setattr(route, place, switch)
    elif place == "mount":
        inner, path = FastAPI(), "/in/"
        inner.get("/")(lambda: "K")
        app.mount("/in", inner)
        mount: Any = app.routes[-1]
        mount.app = switch = Switch(mount.app)
    else:
        app.middleware_stack = switch = Switch(app.build_middleware_stack())
    with serve(cls, replicas=2) as client:
        assert [client.get(path).json() for _ in range(2)] == ["K", "K"]
        switch.is_open = False
        assert [client.get(path).status_code for _ in range(2)] == [401, 401]


def test_a_class_of_the_users_hears_of_no_subclass(app: FastAPI) -> None:
    class Final(FastAPI):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

        def setup(self) -> None:
            assert not hasattr(self, "is_set_up")
            self.is_set_up = True
            super().setup()

    app = Final()
    cls, route = one_route(app)
    route.app = Switch(route.app)
    with serve(cls) as client:
        assert client.get("/").json() == "K"
        assert client.get("/openapi.json").status_code == 200


def test_a_layer_around_the_handler_of_a_route_class_stays_there(app: FastAPI) -> None:
    class Timed(APIRoute):
        def get_route_handler(self) -> Any:
            handler = super().get_route_handler()
            if inspect.iscoroutinefunction(self.endpoint):
                return handler

            async def timed(request: Request) -> Any:
                return await handler(request)

            return timed

    app.router.route_class = Timed
    cls, route = one_route(app)
    route.app = Delegating(route.app)
    assert statuses(cls, "/") == [401]
    assert json_of(cls, "/", TOKEN) == "K"


def test_a_method_where_nobody_looks_never_runs_with_a_self_of_the_clients(app: FastAPI) -> None:
    cls, route = one_route(app)

    class Registry:
        """No layer, so nobody looks for routes in it."""

        found = route

    class Hidden(BaseRoute):
        registry = Registry()

        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            found: tuple[Match, Scope] = self.registry.found.matches(scope)
            return found

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self.registry.found.handle(scope, receive, send)

    app.router.routes[:] = [Hidden()]
    with serve(cls) as client, pytest.raises(TypeError, match="asks the client for `self`"):
        client.get("/?self=x")


def wrap_each_def(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have FastAPI wrap the function of each `def` endpoint, as integrations for tracing do."""
    make, ran = fastapi.routing.get_request_handler, []

    def wrapped(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def traced(*args: Any, **values: Any) -> Any:
            ran.append(func.__name__)
            return func(*args, **values)

        return traced

    def get_request_handler(*args: Any, **options: Any) -> Any:
        dependant = options["dependant"]
        if not inspect.iscoroutinefunction(dependant.call):
            dependant.call = wrapped(dependant.call)
        return make(*args, **options)

    monkeypatch.setattr(fastapi.routing, "get_request_handler", get_request_handler)
    return ran


def test_what_an_integration_puts_around_each_def_runs_with_the_instance(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = wrap_each_def(monkeypatch)
    router = APIRouter()

    class Base:
        name = "Base"

        @app.get("/here")
        def here(self, user: str = Depends(refuse)) -> str:
            return f"{user} {self.name}"

        @app.get("/again")
        def again(self) -> str:
            return "Base's"

        @app.get("/awaited")
        async def awaited(self) -> str:
            return self.name

    @ingress(app)
    class K(Base):
        name = "K"

        def again(self) -> str:
            return f"{self.name}'s"

        @router.get("/there")
        def there(self) -> str:
            return self.name

        @router.websocket("/socket")
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text(self.name)

        @app.get("/function")
        @staticmethod
        def function() -> str:
            return "no instance"

    app.include_router(router, prefix="/in")
    list(iter_route_contexts(app.routes))  # FastAPI makes the included routes
    with serve(K) as client:
        with client.websocket_connect("/in/socket") as websocket:
            assert websocket.receive_text() == "K"
        assert client.get("/here").status_code == 401
        assert client.get("/here", headers=TOKEN).json() == "t K"
        answers = [client.get(f"/{each}").text for each in ("again", "awaited", "function")]
        assert answers == ['"K\'s"', '"K"', '"no instance"']
        assert client.get("/in/there").json() == "K"
    assert ran == ["here", "again", "function", "there"]


def test_a_guard_around_the_function_of_a_finished_route_is_kept(app: FastAPI) -> None:
    cls, route = one_route(app)
    inner = route.dependant.call

    def guard(*args: Any, **values: Any) -> Any:
        if values["also"] != "also":
            raise HTTPException(403)
        return inner(*args, **values)

    route.dependant.call = guard
    assert statuses(cls, "/", "/?also=x") == [200, 403]


def only(role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that lets a user of a role pass."""

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def guarded(*args: Any, user: str, **values: Any) -> Any:
            if role not in user:
                raise HTTPException(403, role)
            return func(*args, user=user, **values)

        return guarded

    return decorate


def test_a_guard_that_a_finished_route_gets_a_second_time_is_kept(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/")
        @only("user")
        def root(self, user: str) -> str:
            return user

    (route,) = (each for each in app.routes if isinstance(each, APIRoute))
    route.dependant.call = only("admin")(route.endpoint)
    assert statuses(K, "/?user=admin,user", "/?user=user", "/?user=admin") == [200, 403, 403]


def test_a_guard_around_the_function_of_an_included_route_is_kept_in_each_include(
    app: FastAPI,
) -> None:
    router = APIRouter()

    @ingress(app)
    class K:
        @router.get("/")
        @only("user")
        def root(self, user: str) -> str:
            return user

    for role in ("admin", "root"):
        app.include_router(router, prefix=f"/{role}")
        route: Any = [*iter_route_contexts(app.routes)][-1]
        route = effective_context(route) or route
        route.dependant.call = only(role)(route.endpoint)
    paths = ("/admin/?user=admin,user", "/root/?user=root,user", "/admin/?user=user")
    assert statuses(K, *paths) == [200, 200, 403]
    assert statuses(K, "/root/?user=user", "/root/?user=admin,user") == [403, 403]


def test_an_endpoint_that_is_replaced_in_a_finished_route_is_refused(app: FastAPI) -> None:
    app.get("/")(lambda: "declared")
    (route,) = (each for each in app.routes if isinstance(each, APIRoute))
    route.dependant.call = lambda: "replaced"
    with pytest.raises(TypeError, match=r"route '/'.* was replaced after the route was made"):
        bound(ingress(app)())


def test_nothing_of_a_request_stays_in_a_replica_with_overrides(app: FastAPI) -> None:
    app.get("/")(lambda user=Depends(guard): user)
    with ExitStack() as stack, serve(ingress(app)()) as client:
        stack.callback(app.dependency_overrides.clear)
        replica: Any = client.app.replicas[0]  # type: ignore[attr-defined]
        before = len(replica.context.plans)
        for number in range(20):
            app.dependency_overrides[guard] = partial(lambda n: str(n), number)
            assert client.get("/").json() == str(number)
        assert len(replica.context.plans) == before
