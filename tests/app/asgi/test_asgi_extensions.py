"""An extension that changes the user's app changes every replica's, as under plain FastAPI."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import PlainTextResponse
from starlette.datastructures import MutableHeaders
from starlette.routing import Route
from starlette.testclient import TestClient as PlainClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import serve


class Layer:
    """A layer that counts its requests in a header of the response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count += 1
                MutableHeaders(scope=message)["x-count"] = str(self.count)
            await send(message)

        await self.app(scope, receive, send_counted)


def as_a_tracer(app: FastAPI) -> None:
    """As `opentelemetry-instrumentation-fastapi` 0.66 does it."""
    original = app.build_middleware_stack

    def build_middleware_stack(self: FastAPI) -> ASGIApp:
        return Layer(original())

    app.build_middleware_stack = types.MethodType(  # type: ignore[method-assign]
        build_middleware_stack, app
    )


def as_a_function(app: FastAPI) -> None:
    app.build_middleware_stack = lambda: Layer(  # type: ignore[method-assign]
        FastAPI.build_middleware_stack(app)
    )


def as_the_finished_stack(app: FastAPI) -> None:
    app.middleware_stack = Layer(app.build_middleware_stack())


def as_a_router(app: FastAPI) -> None:
    app.router.middleware_stack = Layer(app.router.middleware_stack)


EXTENSIONS = [as_a_tracer, as_a_function, as_the_finished_stack, as_a_router]
SHARED = (as_the_finished_stack, as_a_router)
"""These make one layer, which all replicas share, as they share every object of user code."""


@pytest.mark.parametrize("extend", EXTENSIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("is_first", [False, True], ids=["after the class", "before the class"])
def test_a_layer_that_is_set_on_the_app_serves_the_methods(
    extend: Callable[[FastAPI], None], is_first: bool
) -> None:
    app = FastAPI()
    if is_first:
        extend(app)

    @ingress(app)
    class K:
        @app.get("/")
        def root(self) -> str:
            return type(self).__name__

        @app.get("/openapi-paths")
        def paths(self) -> list[str]:
            return list(app.openapi()["paths"])

    if not is_first:
        extend(app)

    with serve(K, replicas=2) as client:
        answers = [client.get("/") for _ in range(4)]
        assert [each.json() for each in answers] == ["K"] * 4
        counts = ["1", "2", "3", "4"] if extend in SHARED else ["1", "1", "2", "2"]
        assert [each.headers["x-count"] for each in answers] == counts
        assert client.get("/openapi-paths").json() == ["/", "/openapi-paths"]


def test_a_stack_that_hides_its_end_is_refused_at_the_start(app: FastAPI) -> None:
    async def hidden(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("no replica serves it")

    app.middleware_stack = hidden

    with pytest.raises(TypeError, match=r"hidden.* hides the stack.*Use app\.add_middleware"):
        with serve(ingress(app)()):
            pass


def test_start_up_code_changes_the_app_under_its_global_name() -> None:
    made: list[object] = []

    @asynccontextmanager
    async def lifespan(given: FastAPI) -> AsyncIterator[None]:
        app.extra_of_start_up = object()  # type: ignore[attr-defined]
        app.router.routes.append(Route("/late", lambda request: PlainTextResponse("late")))
        app.add_api_route("/later", lambda: "later")
        made.append(given.extra_of_start_up)  # type: ignore[attr-defined]
        yield

    app = FastAPI(lifespan=lifespan)

    @ingress(app)
    class K:
        @app.get("/")
        def root(self, request: Request) -> list[bool]:
            extra: Any = app.extra_of_start_up  # type: ignore[attr-defined]
            return [extra is request.app.extra_of_start_up, extra in made]

    with serve(K, replicas=2) as client:
        for _ in range(2):
            assert client.get("/").json() == [True, True]
        assert [client.get("/late").text for _ in range(2)] == ["late"] * 2
        assert [client.get("/later").json() for _ in range(2)] == ["later"] * 2

    assert len(set(made)) == 2
    assert not hasattr(app, "extra_of_start_up")
    assert [route.path for route in app.routes if isinstance(route, Route)][-1] == "/"


def test_the_users_app_keeps_its_own_attributes_outside_of_replicas() -> None:
    app = FastAPI(title="mine")

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self) -> str:
            app.title = f"{app.title}!"
            return app.title

        @app.get("/dropped")
        async def dropped(self) -> list[bool]:
            del app.note  # type: ignore[attr-defined]
            return [hasattr(app, "note")]

    app.note = "kept"  # type: ignore[attr-defined]
    with serve(K, replicas=2) as client:
        assert [client.get("/").json() for _ in range(4)] == ["mine!", "mine!", "mine!!", "mine!!"]
        assert client.get("/dropped").json() == [False]
        app.title = "new"

    assert (app.title, app.note) == ("new", "kept")  # type: ignore[attr-defined]
    assert isinstance(app, FastAPI)
    with pytest.raises(AttributeError, match="'FastAPI' object has no attribute 'absent'"):
        app.absent  # type: ignore[attr-defined]


def test_overrides_that_a_test_replaces_as_a_whole_reach_all_replicas(app: FastAPI) -> None:
    def number() -> int:
        return 1

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self, value: int = Depends(number)) -> int:
            return value

    with serve(K, replicas=2) as client:
        app.dependency_overrides = {number: lambda: 2}
        assert [client.get("/").json() for _ in range(2)] == [2, 2]
        app.dependency_overrides = {}
        assert [client.get("/").json() for _ in range(2)] == [1, 1]


def by_position(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that looks for the request as that of slowapi 0.1.10 does."""
    index = list(inspect.signature(func).parameters).index("request")

    def limited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        request = kwargs.get("request", args[index] if args else None)
        return isinstance(request, Request) and "limit" in request.query_params

    @wraps(func)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        return "limited" if limited(args, kwargs) else await func(*args, **kwargs)

    @wraps(func)
    def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
        return "limited" if limited(args, kwargs) else func(*args, **kwargs)

    return async_wrapper if inspect.iscoroutinefunction(func) else sync_wrapper


def test_a_decorator_gets_keywords_only_as_fastapi_passes_them(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.name = "served"

        @app.get("/async")
        @by_position
        async def in_the_loop(self, request: Request) -> str:
            return self.name

        @app.get("/sync")
        @by_position
        def in_a_thread(this, request: Request) -> str:
            return this.name

        @by_position
        async def found(self, request: Request) -> str:
            return self.name

        @app.get("/depends")
        async def depends(self, name: str = Depends(found)) -> str:
            return name

        @app.get("/positional-only")
        @only_wrapped
        async def positional_only(self, /, request: Request) -> str:
            return self.name

    with serve(K) as client:
        for path in ("/async", "/sync", "/depends"):
            assert client.get(path).json() == "served"
            assert client.get(path + "?limit").json() == "limited"
        assert client.get("/positional-only").json() == "served"


def hidden_first(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper with a parameter of its own before all others, as those of fasthx have."""

    @wraps(func)
    def wrapper(mine: Annotated[str, Header()], *args: Any, **kwargs: Any) -> Any:
        return [mine, func(*args, **kwargs)]

    signature = inspect.signature(func)
    mine = inspect.signature(wrapper, follow_wrapped=False).parameters["mine"]
    own = mine.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, Header()])
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), own]
    )
    return wrapper


def test_a_decorator_may_have_a_first_parameter_that_fastapi_passes(app: FastAPI) -> None:
    @ingress(app)
    class K:
        name = "served"

        @app.get("/")
        @hidden_first
        def root(self, number: int = 1) -> list[Any]:
            return [self.name, number]

    with serve(K) as client:
        answer = client.get("/?number=2", headers={"mine": "yes"})
        assert answer.json() == ["yes", ["served", 2]]


def in_a_task(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `def` around an `async def` that works only on the event loop."""

    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return asyncio.create_task(func(*args, **kwargs))

    return wrapper


def test_a_def_around_an_async_def_runs_on_the_loop_as_fastapi_runs_it(app: FastAPI) -> None:
    plain = FastAPI()

    @plain.get("/")
    @in_a_task
    async def root(name: str) -> str:
        return name

    @ingress(app)
    class K:
        @in_a_task
        async def found(self, name: str) -> str:
            return name

        @app.get("/")
        @in_a_task
        async def root(self, name: str) -> str:
            return name

        @app.get("/depends")
        def depends(self, name: str = Depends(found)) -> str:
            return name

    assert PlainClient(plain).get("/", params={"name": "n"}).json() == "n"
    with serve(K) as client:
        for path in ("/", "/depends"):
            assert client.get(path, params={"name": "n"}).json() == "n"


def only_wrapped(func: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await func(*args, **kwargs)

    return wrapper
