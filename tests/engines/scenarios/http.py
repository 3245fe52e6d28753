"""Plain deployments over HTTP: values, errors, ids, paths, deadlines and clients that leave."""

import asyncio
import dataclasses
import datetime
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from fastapi import HTTPException
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, StreamingResponse

from tests.engines.api import serve
from tests.engines.client import HEALTH_OF_ALL, Client, answer
from tests.engines.probe import hold, note, wait_for_notes
from tests.engines.suite import Deviation, scenario

LENGTH = Deviation("keep-alive clients need no chunking", row="complete return values")
RAW = Deviation("it streams", row="raw generator over HTTP")


class Point(BaseModel):
    x: int = 1
    when: datetime.date = datetime.date(2026, 1, 2)


@dataclasses.dataclass
class Pair:
    left: int = 1
    right: str = "r"


VALUES: dict[str, Any] = {
    "none": None,
    "bytes": b"\x00raw",
    "text": "grün",
    "number": 7,
    "list": [1, "zwei", None],
    "dict": {"b": 1, "a": [1.5]},
    "model": Point(),
    "dataclass": Pair(),
    "set": {1},
    "tuple": (1, 2),
    "nan": float("nan"),
    "unicode": {"ü": "é"},
    "error": ValueError("as a value"),
    "bytearray": bytearray(b"x"),
    "object": object(),
}


class Values:
    async def __call__(self, request: Request) -> Any:
        kind = request.url.path.rpartition("/")[2]
        if kind in VALUES:
            return VALUES[kind]
        found: Any = getattr(self, f"_{kind}")(request)
        return await found if asyncio.iscoroutine(found) else found

    def _json(self, request: Request) -> Any:
        return JSONResponse({"made": 1}, 201, {"x-own": "yes"})

    def _redirect(self, request: Request) -> Any:
        return RedirectResponse("/elsewhere", 307)

    def _numpy(self, request: Request) -> Any:
        import numpy as np

        return {"array": np.arange(3), "scalar": np.float64(1.5)}

    def _raises(self, request: Request) -> Any:
        raise ValueError("secret")

    def _http_exception(self, request: Request) -> Any:
        raise HTTPException(418, "teapot", {"x-tea": "green"})

    def _timeout_error(self, request: Request) -> Any:
        raise TimeoutError("of the user's own")

    async def _echo(self, request: Request) -> Any:
        return {
            "method": request.method,
            "path": request.url.path,
            "query": dict(request.query_params),
            "body": (await request.body()).decode(),
            "header": request.headers.get("x-mine"),
        }

    async def _chunks(self, request: Request) -> Any:
        return [len(chunk) > 0 async for chunk in request.stream()][:1]

    async def _form(self, request: Request) -> Any:
        return (await request.json())["a"]

    def _id(self, request: Request) -> Any:
        return request.headers.get("x-request-id")

    def _own_id(self, request: Request) -> Any:
        return JSONResponse(1, headers={"x-request-id": "of-mine"})

    def _async_stream(self, request: Request) -> Any:
        async def parts() -> AsyncIterator[str]:
            for number in range(3):
                yield f"{number},"

        return StreamingResponse(parts(), media_type="text/plain")

    def _stream(self, request: Request) -> Any:
        return StreamingResponse((f"{number}," for number in range(3)), media_type="text/csv")

    async def _held(self, request: Request) -> Any:
        key = request.query_params["key"]
        try:
            await hold(key)
        except asyncio.CancelledError:
            note(f"{key}-ended", "cancelled")
            raise
        note(f"{key}-ended", "done")
        return "held"

    def _cut(self, request: Request) -> Any:
        async def parts() -> AsyncIterator[str]:
            yield "first,"
            raise ValueError("midway")

        return StreamingResponse(parts(), media_type="text/plain")

    def _endless(self, request: Request) -> Any:
        key = request.query_params["key"]

        async def parts() -> AsyncIterator[str]:
            try:
                while True:
                    yield "x" * 1000
                    await asyncio.sleep(0.01)
            finally:
                note(f"{key}-ended", "closed")

        return StreamingResponse(parts(), media_type="text/plain")


def values() -> Any:
    return serve.deployment(max_ongoing_requests=20)(Values).bind()


@scenario("Plain deployments over HTTP", values)
def text_bytes_and_none_are_plain_text(it: Client) -> Any:
    return [answer(it.get(f"/{kind}")) for kind in ("text", "bytes", "none")]


@scenario("Plain deployments over HTTP", values)
def everything_else_is_json(it: Client) -> Any:
    kinds = ("number", "list", "dict", "set", "tuple", "unicode", "nan")
    return [answer(it.get(f"/{kind}")) for kind in kinds]


@scenario("Plain deployments over HTTP", values)
def models_dataclasses_and_arrays_are_json(it: Client) -> Any:
    return [answer(it.get(f"/{kind}")) for kind in ("model", "dataclass", "numpy")]


@scenario("Plain deployments over HTTP", values)
def an_exception_that_is_returned_is_its_text(it: Client) -> Any:
    return answer(it.get("/error"))


@scenario("Plain deployments over HTTP", values)
def what_json_cannot_hold_is_a_500(it: Client) -> Any:
    return [it.get(f"/{kind}").status_code for kind in ("object", "bytearray")]


@scenario("Plain deployments over HTTP", values)
def a_response_is_sent_as_it_is(it: Client) -> Any:
    response, redirect = it.get("/json"), it.get("/redirect")
    return [
        [*answer(response).values(), response.headers["x-own"]],
        [redirect.status_code, redirect.headers["location"]],
    ]


@scenario("Plain deployments over HTTP", values, LENGTH)
def a_complete_value_says_its_length(it: Client) -> Any:
    headers = it.get("/text").headers
    return [headers.get("content-length"), headers.get("transfer-encoding")]


@scenario("Plain deployments over HTTP", values)
def an_exception_is_a_500_that_tells_nothing(it: Client) -> Any:
    return answer(it.get("/raises"))


@scenario(
    "Plain deployments over HTTP",
    values,
    Deviation("as in FastAPI", row="`HTTPException` from a plain deployment"),
)
def an_http_exception_has_its_status(it: Client) -> Any:
    response = it.get("/http_exception")
    return [response.status_code, response.headers.get("x-tea"), response.text]


@scenario("Request ids, deadlines and clients that leave", values)
def a_timeout_error_of_user_code_is_a_500(it: Client) -> Any:
    return it.get("/timeout_error").status_code


@scenario("Plain deployments over HTTP", values)
def a_handler_gets_method_path_query_body_and_headers(it: Client) -> Any:
    response = it.request("POST", "/echo?a=1&b=2", content=b"body", headers={"x-mine": "m"})
    return response.json()


@scenario("Plain deployments over HTTP", values)
def a_body_is_read_as_a_stream_or_as_json(it: Client) -> Any:
    return [
        it.request("POST", "/chunks", content=b"x" * 200_000).json(),
        it.request("PUT", "/form", json={"a": 5}).json(),
        it.request("DELETE", "/echo").json()["method"],
    ]


@scenario("Plain deployments over HTTP", values)
def a_head_request_reaches_the_handler_and_has_no_body(it: Client) -> Any:
    response = it.request("HEAD", "/text")
    return [response.status_code, response.text]


@scenario("Request ids, deadlines and clients that leave", values)
def a_request_id_is_passed_on_and_comes_back(it: Client) -> Any:
    response = it.get("/id", **{"x-request-id": "mine-1"})
    return [response.text, response.headers.get_list("x-request-id")]


@scenario("Request ids, deadlines and clients that leave", values)
def a_request_without_an_id_gets_one(it: Client) -> Any:
    response = it.get("/id")
    [given] = response.headers.get_list("x-request-id")
    other = it.get("/id").headers["x-request-id"]
    return [response.text == given, len(given) > 20, given != other]


@scenario(
    "Request ids, deadlines and clients that leave",
    values,
    Deviation("one header, the user's", row="`x-request-id`", columns=("local",)),
)
def an_id_that_the_handler_sets_is_kept(it: Client) -> Any:
    return len(it.get("/own_id", **{"x-request-id": "mine-2"}).headers.get_list("x-request-id"))


@scenario(
    "Request ids, deadlines and clients that leave",
    values,
    Deviation("it goes into logs", row="`x-request-id`", columns=("local",)),
)
def an_id_with_odd_characters_is_replaced(it: Client) -> Any:
    return it.get("/id", **{"x-request-id": "a b\tc"}).text == "a b\tc"


@scenario("Plain deployments over HTTP", values)
def a_streaming_response_arrives_whole(it: Client) -> Any:
    return [answer(it.get("/async_stream")), answer(it.get("/stream"))]


@scenario("Plain deployments over HTTP", values)
def a_stream_that_fails_midway_is_cut(it: Client) -> Any:
    try:
        response = it.get("/cut")
    except httpx.RemoteProtocolError:
        return "cut"
    return [response.status_code, response.text]


@scenario("Request ids, deadlines and clients that leave", values)
def a_client_that_leaves_cancels_its_request(it: Client) -> Any:
    host, _, port = it.base_url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"GET {it.prefix}/held?key=left HTTP/1.1\r\nHost: {host}\r\n\r\n"
        connection.sendall(head.encode())
        wait_for_notes("left")
    return wait_for_notes("left-ended")


@scenario("Request ids, deadlines and clients that leave", values)
def a_client_that_leaves_a_stream_closes_its_generator(it: Client) -> Any:
    with it.http.stream("GET", f"{it.prefix}/endless?key=stream-left") as response:
        next(response.iter_raw())
    return wait_for_notes("stream-left-ended")


@scenario("Request ids, deadlines and clients that leave", values)
def a_timeout_in_a_header_is_a_408_and_cancels(it: Client) -> Any:
    headers = {"x-request-timeout-seconds": "2", "x-request-id": "late"}
    response = it.get("/held?key=late", **headers)
    return [answer(response), wait_for_notes("late-ended")]


@scenario("Request ids, deadlines and clients that leave", values)
def a_timeout_that_is_no_number_is_ignored(it: Client) -> Any:
    return it.get("/number", **{"x-request-timeout-seconds": "soon"}).status_code


class NoArguments:
    async def __call__(self) -> str:
        return "no arguments"


def no_arguments() -> Any:
    return serve.deployment(NoArguments).bind()


@scenario("Plain deployments over HTTP", no_arguments)
def a_handler_without_parameters_gets_no_request(it: Client) -> Any:
    return [answer(it.get("/any/path")), it.handle.remote().result()]


class RawStream:
    async def __call__(self, request: Request) -> AsyncIterator[str]:
        for number in range(3):
            yield f"{number},"


def raw_stream() -> Any:
    return serve.deployment(RawStream).bind()


@scenario("Plain deployments over HTTP", raw_stream, RAW)
def an_async_generator_handler_streams(it: Client) -> Any:
    return answer(it.get())


class RawPlain:
    def __call__(self, request: Request) -> Iterator[Any]:
        yield {"line": 1}
        yield {"line": 2}


def raw_plain() -> Any:
    return serve.deployment(RawPlain).bind()


@scenario("Plain deployments over HTTP", raw_plain, RAW)
def a_generator_handler_streams_json_lines(it: Client) -> Any:
    return answer(it.get())


class Paths:
    async def __call__(self, request: Request) -> Any:
        return [request.url.path, request.scope.get("root_path"), request.scope["path"]]


def paths() -> Any:
    return serve.deployment(Paths).bind()


@scenario("Prefixes", paths)
def the_prefix_is_the_root_path(it: Client) -> Any:
    return [it.get("/a/b").json(), it.get("").json()]


@scenario("Request ids, deadlines and clients that leave", paths)
def no_route_is_a_404_that_says_where_to_look(it: Client) -> Any:
    response = it.http.get("/no-such-route")
    return [answer(response), len(response.headers.get_list("x-request-id"))]


@scenario("Prefixes", paths)
def a_prefix_ends_at_a_slash(it: Client) -> Any:
    return [it.http.get(f"{it.prefix}x").status_code, it.http.get(it.prefix.upper()).status_code]


@scenario("Routes and health", paths)
def the_routes_are_listed_with_their_applications(it: Client) -> Any:
    response = it.http.get("/-/routes")
    return [response.status_code, response.json()[it.prefix]]


@scenario("Routes and health", paths)
def health_is_success_for_any_method(it: Client) -> Any:
    with HEALTH_OF_ALL:
        return [answer(it.http.get("/-/healthz")), it.http.post("/-/healthz").status_code]


@scenario("Prefixes", None)
def the_longest_prefix_wins(it: Client) -> Any:
    short, long = f"/long{it.suffix}", f"/long{it.suffix}/er"
    it.deploy(serve.deployment(Paths).bind(), "short", route_prefix=short)
    it.deploy(serve.deployment(Values).bind(), "long", route_prefix=long)
    return [it.http.get(f"{short}/err").json(), it.http.get(f"{long}/number").json()]
