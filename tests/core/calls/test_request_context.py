"""`ingress.request_context`: the facts about its request that running code can read."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.handle import DeploymentHandle
from tests.fakes import bind
from tests.servers import PATIENCE_S, get, served

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.usefixtures("shutdown"),
]


def context() -> dict[str, Any]:
    return dataclasses.asdict(serve.get_request_context())


# Calls by handle.


@serve.deployment
class Child:
    async def __call__(self) -> dict[str, Any]:
        return context()

    async def grandchild(self) -> dict[str, Any]:
        return dict(await serve.get_deployment_handle("Child").remote())


@serve.deployment
class Parent:
    def __init__(self, child: DeploymentHandle) -> None:
        self.child = child
        self.in_constructor = context()

    async def constructed(self) -> dict[str, Any]:
        return self.in_constructor

    async def everywhere(self) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        return [
            context(),
            await asyncio.create_task(self.again()),
            await asyncio.to_thread(context),
            await loop.run_in_executor(None, context),
        ]

    async def again(self) -> dict[str, Any]:
        return context()

    def in_def(self) -> dict[str, Any]:
        return context()

    def in_generator(self) -> Iterator[dict[str, Any]]:
        yield context()
        yield context()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=PATIENCE_S)
    async def together(self, numbers: list[int]) -> list[Any]:
        said = [
            [each.request_id for each in serve.get_batch_request_contexts()],
            serve.get_multiplexed_model_id(),
            serve.get_request_context().multiplexed_model_id,
            await asyncio.to_thread(lambda: len(serve.get_batch_request_contexts())),
            (await self.child.remote())["multiplexed_model_id"],
        ]
        return [said] * len(numbers)

    async def batch(self) -> list[Any]:
        return list(await self.together(1))


@pytest.fixture
def parent(flags: Settings) -> DeploymentHandle:
    return serve.run(bind(Parent, bind(Child)), name="app", route_prefix=None)


def test_a_call_knows_itself_wherever_it_goes(parent: DeploymentHandle) -> None:
    response = parent.options(multiplexed_model_id="m").everywhere.remote()

    expected = {
        "request_id": response.request_id,
        "route": "",
        "app_name": "app",
        "deployment": "Parent",
        "replica": "0",
        "method_name": "everywhere",
        "multiplexed_model_id": "m",
        "deadline": None,
        "is_http_request": False,
    }
    assert response.result(timeout_s=PATIENCE_S) == [expected] * 4


def test_def_and_generators_know_it_too(parent: DeploymentHandle) -> None:
    response = parent.in_def.remote()
    assert response.result(timeout_s=PATIENCE_S)["request_id"] == response.request_id

    stream = parent.options(stream=True).in_generator.remote()
    assert [each["request_id"] for each in stream] == [stream.request_id] * 2


def test_outside_of_a_request_it_is_empty_and_never_none(parent: DeploymentHandle) -> None:
    assert serve.get_request_context() == serve.RequestContext()
    assert serve.get_batch_request_contexts() == []
    constructed = parent.constructed.remote().result(timeout_s=PATIENCE_S)
    expected = serve.RequestContext(app_name="app", deployment="Parent", replica="0")
    assert constructed == dataclasses.asdict(expected)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        serve.get_request_context().route = "/other"  # type: ignore[misc]


def test_a_batch_knows_the_requests_of_all_its_items(parent: DeploymentHandle) -> None:
    handle = parent.options(multiplexed_model_id="m")
    responses = [handle.batch.remote(), handle.batch.remote()]
    one, other = (response.result(timeout_s=PATIENCE_S) for response in responses)

    assert one == other
    ids, model_id, of_batch, in_thread, of_child = one
    assert ids == [response.request_id for response in responses]
    assert (model_id, of_batch, in_thread) == ("m", "m", 2)
    assert of_child == "", "a call that the batch makes is none of its items"


# HTTP.


api = FastAPI()
inner = APIRouter(prefix="/inner")
mounted = FastAPI()
seen: dict[str, Any] = {}


def dependency() -> str:
    return serve.get_request_context().route


async def async_dependency() -> str:
    return serve.get_request_context().route


@inner.get("/{name}")
async def free(name: str) -> dict[str, Any]:
    return context()


@mounted.get("/leaf/{name}")
async def leaf(name: str) -> dict[str, Any]:
    return context()


@api.middleware("http")
async def middleware(request: Request, call_next: Any) -> Any:
    before = serve.get_request_context().route
    response = await call_next(request)
    response.headers["x-before"] = before
    response.headers["x-after"] = serve.get_request_context().route
    return response


@serve.deployment
@serve.ingress(api)
class Web:
    def __init__(self, child: DeploymentHandle) -> None:
        self.child = child

    @api.get("/items/{item_id}")
    async def on_loop(
        self, item_id: int, one: str = Depends(dependency), other: str = Depends(async_dependency)
    ) -> dict[str, Any]:
        return {**context(), "dependencies": [one, other]}

    @api.get("/threads/{item_id}/end")
    def in_thread(self, item_id: int) -> dict[str, Any]:
        return context()

    @api.get("/logs/{number}")
    async def logs(self, number: int) -> None:
        logging.getLogger("ingress").warning("said")

    @api.get("/children/{number}")
    async def children(self, number: int) -> list[dict[str, Any]]:
        return [await self.child.remote(), await self.child.grandchild.remote()]

    @api.get("/later/{number}")
    async def later(self, number: int, tasks: BackgroundTasks) -> None:
        tasks.add_task(lambda: seen.update(route=serve.get_request_context().route))

    @api.websocket("/socket/{name}")
    async def socket(self, socket: WebSocket, name: str) -> None:
        await socket.accept()
        await socket.send_json(context())
        await socket.close()


api.include_router(inner, prefix="/outer/{part}")
api.mount("/mounted", mounted)
api.mount("/mount-{which}", mounted)


@pytest.fixture
def client(flags: Settings) -> Iterator[TestClient]:
    with TestClient(bind(Web, bind(Child))) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/items/3", "/items/{item_id}"),
        ("/threads/3/end", "/threads/{item_id}/end"),
        ("/outer/a/inner/b", "/outer/{part}/inner/{name}"),
        ("/mounted/leaf/b", "/mounted/leaf/{name}"),
        ("/mount-7/leaf/b", "/"),
    ],
    ids=["method", "def", "included", "mounted", "mount with a parameter"],
)
def test_the_route_is_the_template_as_declared(client: TestClient, path: str, route: str) -> None:
    response = client.get(path, headers={"x-request-id": "mine"})

    said = response.json()
    assert (said["route"], said["request_id"]) == (route, "mine")
    assert said["is_http_request"] is True
    assert (said["app_name"], said["deployment"]) == ("default", "Web")
    assert said.get("dependencies", [route] * 2) == [route] * 2
    assert response.headers["x-before"] == "/", "before a route was found it is the prefix"
    assert response.headers["x-after"] == route


def test_a_log_record_of_an_endpoint_has_its_route(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.get("/logs/3", headers={"x-request-id": "mine"}).status_code == 200

    (record,) = (vars(record) for record in caplog.records if record.message == "said")
    assert (record["route"], record["request_id"]) == ("/logs/{number}", "mine")
    assert (record["application"], record["deployment"]) == ("default", "Web")


def test_where_no_route_is_found_it_is_the_prefix(client: TestClient) -> None:
    response = client.get("/nothing/here")

    assert response.status_code == 404
    assert response.headers["x-after"] == "/"


def test_children_have_request_id_route_and_application_of_the_request(client: TestClient) -> None:
    headers = {"x-request-id": "mine", "serve_multiplexed_model_id": "m"}
    child, grandchild = client.get("/children/3", headers=headers).json()
    assert child == {
        "request_id": "mine",
        "route": "/children/{number}",
        "app_name": "default",
        "deployment": "Child",
        "replica": "0",
        "method_name": "__call__",
        "multiplexed_model_id": "",
        "deadline": None,
        "is_http_request": False,
    }
    assert grandchild == child


def test_a_background_task_and_a_websocket_know_it(client: TestClient) -> None:
    assert client.get("/later/3").status_code == 200
    assert seen.pop("route") == "/later/{number}"
    with client.websocket_connect("/socket/a") as socket:
        assert socket.receive_json()["route"] == "/socket/{name}"


async def homepage(request: Request) -> JSONResponse:
    return JSONResponse(context())


@serve.deployment
@serve.ingress(Starlette(routes=[Route("/starlette/{name}", homepage)]))
class StarletteApp:
    pass


def test_a_starlette_route_has_a_template_too(flags: Settings) -> None:
    with TestClient(bind(StarletteApp)) as client:
        assert client.get("/starlette/a").json()["route"] == "/starlette/{name}"


@serve.deployment
class Plain:
    async def __call__(self, request: Request) -> dict[str, Any]:
        return context()


def test_the_prefix_of_the_application_is_part_of_it(flags: Settings) -> None:
    port = served(bind(Web, bind(Child)), name="web", route_prefix="/api")
    serve.run(bind(Plain), name="plain", route_prefix="/plain")
    assert b'"route":"/api/items/{item_id}","app_name":"web"' in get(port, "/api/items/3").body
    assert b'"route":"/plain","app_name":"plain"' in get(port, "/plain/any/path").body


@serve.deployment
class Entrance:
    """Calls another application."""

    async def __call__(self, request: Request) -> dict[str, Any]:
        return dict(await serve.get_app_handle("other").remote())


def test_in_another_application_it_still_names_the_one_that_was_asked(flags: Settings) -> None:
    serve.run(bind(Child), name="other", route_prefix=None)
    port = served(bind(Entrance), name="asked", route_prefix="/asked")
    answer = get(port, "/asked")
    assert b'"route":"/asked","app_name":"asked","deployment":"Child"' in answer.body


class Ballast:
    """An object that a framework may keep in a scope."""


def test_what_a_request_keeps_alive_is_gone_after_it(flags: Settings) -> None:
    """A context that outlives the request still has its call, but no scope."""
    kept: list[contextvars.Context] = []
    ballast: list[weakref.ref[Ballast]] = []

    @serve.deployment
    class Keeps:
        async def __call__(self, request: Request) -> PlainTextResponse:
            request.scope["ballast"] = Ballast()
            ballast.append(weakref.ref(request.scope["ballast"]))
            kept.append(contextvars.copy_context())
            return PlainTextResponse(serve.get_request_context().route)

    with TestClient(bind(Keeps)) as client:
        assert client.get("/").text == "/"
        gc.collect()
        assert kept[0].run(lambda: serve.get_request_context().route) == "/"
        assert [each() for each in ballast] == [None]


@pytest.mark.reliability("F05", "F06")
def test_eight_replicas_never_mix_up_their_requests(flags: Settings, switch_interval: None) -> None:
    @serve.deployment(num_replicas=8)
    class Mixed:
        async def on_loop(self) -> list[Any]:
            before = serve.get_request_context()
            await asyncio.sleep(0)
            here = serve.get_replica_context()
            return [before, await asyncio.to_thread(serve.get_request_context), here.replica_tag]

        def in_def(self) -> list[Any]:
            here = serve.get_replica_context()
            first, thread = serve.get_request_context(), threading.get_ident()
            assert thread == threading.get_ident()
            return [first, serve.get_request_context(), here.replica_tag]

        def items(self) -> Iterator[list[Any]]:
            yield self.in_def()

    handle = serve.run(bind(Mixed), route_prefix=None)
    sent = []
    for number in range(600):
        method = ("on_loop", "in_def", "items")[number % 3]
        named = handle.options(method_name=method, multiplexed_model_id=str(number))
        sent.append((str(number), method, named.options(stream=method == "items").remote()))
    for model_id, method, response in sent:
        (found,) = response if method == "items" else [response.result(timeout_s=PATIENCE_S)]
        first, second, tag = found
        assert first == second
        assert (first.multiplexed_model_id, first.method_name) == (model_id, method)
        assert (first.request_id, first.replica) == (response.request_id, tag)


def test_the_deadline_is_the_clients_and_the_same_for_who_is_called() -> None:
    later: list[float | None] = []

    @serve.deployment
    class Front:
        def __init__(self, child: DeploymentHandle) -> None:
            self.child = child

        async def __call__(self, request: Request) -> JSONResponse:
            own = serve.get_request_context().deadline
            childs = (await self.child.remote())["deadline"]
            background = BackgroundTasks()
            background.add_task(self.after)
            return JSONResponse([own, childs], background=background)

        async def after(self) -> None:
            later.append(serve.get_request_context().deadline)

    with TestClient(bind(Front, bind(Child))) as client:
        assert client.get("/").json() == [None, None]
        before = time.monotonic()
        own, childs = client.get("/", headers={"x-request-timeout-seconds": "60"}).json()
        assert before + 60 <= own <= time.monotonic() + 60
        assert childs == own
    assert later == [None, None]  # a background task runs after the answer
