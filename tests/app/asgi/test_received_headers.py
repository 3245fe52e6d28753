"""`asgi.received_headers`: parameters are read from the headers that came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Form, Header, Request, WebSocket
from pydantic import BaseModel, ConfigDict
from websockets.sync.client import connect

import ingress as serve
from tests.servers import bind, get, served, set_flags


class Only(BaseModel):
    """A model of headers that forbids all others."""

    model_config = ConfigDict(extra="forbid")
    host: str
    connection: str
    x_token: str = ""


class Needs(BaseModel):
    x_token: str


RequestId = Annotated[str | None, Header(alias="x-request-id")]

app = FastAPI()
mounted = FastAPI()
app.mount("/mounted", mounted)


def seen(request: Request, given: str | None) -> list[str | None]:
    return [given, request.headers["x-request-id"]]


async def as_dependency(request: Request, x_request_id: RequestId = None) -> list[str | None]:
    return seen(request, x_request_id)


@mounted.get("/only")
async def only_mounted(headers: Annotated[Only, Header()]) -> Only:
    return headers


@mounted.get("/needs")
async def needs_mounted(headers: Annotated[Needs, Header()]) -> None: ...


@mounted.get("/id")
async def id_mounted(request: Request, x_request_id: RequestId = None) -> Any:
    return seen(request, x_request_id)


@serve.deployment
@serve.ingress(app)
class Headers:
    @app.get("/compiled/only")
    async def only(self, headers: Annotated[Only, Header()]) -> Only:
        return headers

    @app.get("/compiled/needs")
    async def needs(self, headers: Annotated[Needs, Header()]) -> None: ...

    @app.get("/compiled/id")
    async def id(self, request: Request, x_request_id: RequestId = None) -> Any:
        return seen(request, x_request_id)

    @app.get("/dependency/id")
    async def dependency(self, found: Annotated[Any, Depends(as_dependency)]) -> Any:
        return found

    # FastAPI's own handler answers routes with forms.

    @app.get("/form/only")
    async def form_only(
        self, headers: Annotated[Only, Header()], a: Annotated[str, Form()] = ""
    ) -> Only:
        return headers

    @app.get("/form/needs")
    async def form_needs(
        self, headers: Annotated[Needs, Header()], a: Annotated[str, Form()] = ""
    ) -> None: ...

    @app.get("/form/id")
    async def form_id(
        self, request: Request, x_request_id: RequestId = None, a: Annotated[str, Form()] = ""
    ) -> Any:
        return seen(request, x_request_id)

    @app.websocket("/websocket")
    async def websocket(self, socket: WebSocket, x_request_id: RequestId = None) -> None:
        await socket.accept()
        await socket.send_json([x_request_id, socket.headers["x-request-id"]])


@pytest.fixture(scope="module", params=["thread", "process", "borrowed"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    isolation = "process" if request.param == "process" else "thread"
    with pytest.MonkeyPatch.context() as patch:
        set_flags(patch, "0" if request.param == "borrowed" else "1")
        headers: Any = Headers
        yield served(bind(headers.options(isolation=isolation)))
        serve.shutdown()


WAYS = ["compiled", "form", "mounted"]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_forbids_others_does_not_see_the_added_id(port: int, way: str) -> None:
    assert get(port, f"/{way}/only").status == 200

    refused = get(port, f"/{way}/only", "x-request-id: mine\r\n")  # the client's own
    assert refused.status == 422
    assert json.loads(refused.body)["detail"][0]["loc"] == ["header", "x-request-id"]


@pytest.mark.parametrize("way", WAYS)
def test_a_refusal_shows_only_headers_that_came(port: int, way: str) -> None:
    refused = get(port, f"/{way}/needs")

    assert refused.status == 422
    assert json.loads(refused.body)["detail"][0]["input"].keys() == {"host", "connection"}
    assert refused.headers["x-request-id"]


@pytest.mark.parametrize("way", [*WAYS, "dependency"])
@pytest.mark.parametrize(
    ("sent", "parameter", "in_request"),
    [
        ("", None, "the answer's"),
        ("x-request-id: mine\r\n", "mine", "mine"),
        ("x-request-id: my/own\r\n", "my/own", "the answer's"),  # unfit as an id, so replaced
        ("x-request-id: my/own\r\nx-request-id: mine\r\n", "my/own", "mine"),
    ],
    ids=["none", "fit", "unfit", "two"],
)
def test_a_parameter_gets_what_came_and_the_request_has_its_id(
    port: int, way: str, sent: str, parameter: str | None, in_request: str
) -> None:
    answer = get(port, f"/{way}/id", sent)

    given_id = answer.headers["x-request-id"]
    expected = given_id if in_request == "the answer's" else in_request
    assert json.loads(answer.body) == [parameter, expected]
    assert given_id == expected


def test_a_parameter_of_a_websocket_gets_what_came(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}/websocket") as socket:
        given, in_request = json.loads(socket.recv())
    assert given is None
    assert in_request
