"""`@serve.method` on endpoints and dependencies of a FastAPI app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.applications import Starlette

import ingress as serve
from tests.conformance.observe import here, served
from tests.servers import wait_until

LOOP = "loop Api#0"
POOL = "thread Api#0-worker"
DB = "thread Api#0-db-worker"
SERIAL = "thread Api#0-serial-worker"
PLACES = pytest.mark.parametrize(
    ("options", "place"),
    [({"lane": "db"}, DB), ({"execution": "serial"}, SERIAL), ({"execution": "event_loop"}, LOOP)],
    ids=["lane", "serial", "event_loop"],
)


class OwnRoute(APIRoute):
    """A route that is not compiled, because it overrides the handler."""

    def get_route_handler(self) -> Any:
        return super().get_route_handler()


@contextmanager
def run(app: FastAPI, cls: type) -> Iterator[Any]:
    with served(serve.deployment(lanes={"db": 2})(serve.ingress(app)(cls)).bind()) as it:
        yield it


def test_endpoints_and_dependencies_run_where_they_say() -> None:
    app, router = FastAPI(), APIRouter()

    @serve.method(execution="serial")
    def setting() -> str:
        return here()

    class Api:
        @app.get("/below")
        @serve.method(lane="db")
        def below(self) -> str:
            return here()

        @serve.method(lane="db")
        @app.get("/above")
        def above(self, name: str = "") -> str:
            return here()

        @app.get("/loop")
        @serve.method(execution="event_loop")
        def on_loop(self) -> str:
            return here()

        @app.get("/serial")
        @serve.method(execution="serial")
        def in_serial(self, request: Request) -> str:
            return here()

        @app.get("/pool")
        def in_pool(self) -> str:
            return here()

        @app.get("/text")
        @serve.method(execution="serial")
        def text(self) -> StreamingResponse:
            return StreamingResponse(here() for _ in range(1))

        @app.get("/dependency")
        async def dependency(self, place: str = Depends(setting)) -> str:
            return place

    @router.get("/free")
    @serve.method(lane="db")
    def free() -> str:
        return here()

    app.include_router(router)
    paths = ("/below", "/above", "/loop", "/serial", "/pool", "/text", "/dependency", "/free")
    with run(app, Api) as it:
        places = {path: it.get(path).text.strip('"') for path in paths}

    assert places == {
        "/below": DB,
        "/above": DB,
        "/loop": LOOP,
        "/serial": SERIAL,
        "/pool": POOL,
        "/text": SERIAL,
        "/dependency": SERIAL,
        "/free": DB,
    }


def test_an_override_runs_where_it_says_and_not_where_its_base_did(app: FastAPI) -> None:
    class Base:
        @app.get("/placed")
        def placed(self) -> str:
            return here()

        @app.get("/unplaced")
        @serve.method(lane="db")
        def unplaced(self) -> str:
            return here()

    class Api(Base):
        @serve.method(lane="db")
        def placed(self) -> str:
            return here()

        def unplaced(self) -> str:
            return here()

    with run(app, Api) as it:
        assert (it.get("/placed").json(), it.get("/unplaced").json()) == (DB, POOL)


@pytest.mark.skipif(
    not hasattr(APIRoute("/", here), "is_json_stream"),
    reason="this FastAPI has no streaming endpoints",
)
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "fastapi"])
@PLACES
def test_a_generator_is_iterated_where_it_says(options: Any, place: str, is_compiled: bool) -> None:
    app = FastAPI()
    app.router.route_class = APIRoute if is_compiled else OwnRoute
    closed: list[str] = []

    class Api:
        @app.get("/lines")
        @serve.method(**options)
        def lines(self) -> Iterator[str]:
            try:
                yield here()
                yield here()
            finally:
                closed.append(here())

    with run(app, Api) as it:
        assert it.get("/lines").text == f'"{place}"\n"{place}"\n'
    assert closed == [place]


# Dependencies with `yield`.


def connection(**options: Any) -> tuple[Callable[[], Iterator[str]], list[str]]:
    events: list[str] = []

    @serve.method(**options)
    def connect() -> Iterator[str]:
        try:
            yield here()
        except ValueError as error:
            events.append(f"{error} in {here()}")
            raise
        except LookupError:
            raise HTTPException(404, f"not found, in {here()}") from None
        finally:
            events.append(f"left in {here()}")

    return connect, events


@PLACES
def test_both_halves_of_a_yield_dependency_run_where_it_says(options: Any, place: str) -> None:
    app = FastAPI()
    connect, events = connection(**options)

    class Api:
        @app.get("/")
        async def use(self, entered: str = Depends(connect)) -> str:
            return entered

        @app.get("/fails")
        async def fail(self, entered: str = Depends(connect)) -> str:
            raise ValueError("a value")

        @app.get("/lacks")
        async def lack(self, entered: str = Depends(connect)) -> str:
            raise LookupError

        @app.get("/waits")
        async def wait(self, entered: str = Depends(connect)) -> None:
            await asyncio.Event().wait()

    with run(app, Api) as it:
        assert it.get("/").json() == place
        assert events == [f"left in {place}"]
        assert it.get("/fails").status_code == 500
        assert events[1:] == [f"a value in {place}", f"left in {place}"]
        lacking = it.get("/lacks")
        assert (lacking.status_code, lacking.json()["detail"]) == (404, f"not found, in {place}")
        left = len(events)
        late = it.client.get("/waits", headers={"x-request-timeout-seconds": "0.5"})
        assert late.status_code == 408
        wait_until(lambda: events[left:] == [f"left in {place}"])


def test_a_dependency_of_the_class_with_yield_runs_where_it_says(app: FastAPI) -> None:
    left: list[str] = []

    class Api:
        @serve.method(lane="db")
        def connect(self) -> Iterator[str]:
            yield f"{here()} {self is serve.get_replica_context().servable_object}"
            left.append(here())

        @app.get("/")
        async def use(self, entered: str = Depends(connect)) -> str:
            return entered

    with run(app, Api) as it:
        assert it.get("/").json() == f"{DB} True"
    assert left == [DB]


# Routes that cannot be in a lane.


def marked() -> Any:
    @serve.method(lane="db")
    def report(request: Request) -> Any: ...

    return report


@pytest.mark.parametrize("kind", ["mounted", "starlette"])
def test_a_route_that_starlette_runs_itself_is_refused(kind: str) -> None:
    app, report = FastAPI(), marked()
    if kind == "mounted":
        inner = FastAPI()
        inner.get("/report")(report)
        app.mount("/inner", inner)
    else:
        app.add_route("/report", report)

    class Api: ...

    with pytest.raises(TypeError, match=r"@serve.method\(lane='db'\) has no effect on report"):
        serve.ingress(app)(Api)


def test_a_starlette_app_may_not_be_asked_for_a_place() -> None:
    app = Starlette()
    app.add_route("/", marked())

    class Api: ...

    with pytest.raises(TypeError, match="has no effect on"):
        serve.ingress(app)(Api)
