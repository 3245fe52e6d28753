"""The requests of a program and their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.differential.programs import Program

Answers = list[tuple[str, Any]]
Headers = dict[str, str]

QUERIES = ("", "?self=x", "?self=x&n=1&q=2&role=admin&key=k", "?q=wrong&limit=wrong")
HEADERS: tuple[Headers, ...] = (
    {},
    {"x-token": "good"},
    {"x-token": "good", "x-out": "1"},
    {"x-token": "bad"},
)
PATIENCE_S = 30
ASGI = {"version": "3.0", "spec_version": "2.4"}


class Client(Protocol):
    async def http(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> tuple[int, Headers, bytes]: ...

    async def websocket(self, target: str, headers: Headers) -> Any:
        """Return the first message, parsed, or the status of the refusal."""

    async def effects(self) -> Any:
        """Return the effects of the last request, all of which is over."""


async def ask(client: Client, made: Program) -> Answers:
    """Return the answers, each after the request, with the effects that it had, in their order."""
    answers: Answers = []
    rounds = {"while serving": [0, 1, 0], "by one": [0, 0]}.get(made.overrides_at, [-1])
    for on in rounds:
        if on >= 0:
            await client.http("GET", f"/--overrides/{on}", {})
        for verb, path, _ in made.paths:
            for query, headers in _variants(made.seed + on):
                answer = await _one(client, verb, path + query, headers)
                answers.append((f"{on} {verb} {path}{query} {headers}", answer))
    status, _, body = await client.http("GET", "/openapi.json", {})
    answers.append(("schema", json.loads(body) if status == 200 else status))
    return answers


def _variants(seed: int) -> list[tuple[str, Headers]]:
    good = [(query, {"x-token": "good"}) for query in QUERIES]
    return [("", {}), *good, (QUERIES[seed % 4], HEADERS[2]), (QUERIES[1], HEADERS[seed % 4])]


async def _one(client: Client, verb: str, target: str, headers: Headers) -> Any:
    answer: Any
    if verb == "websocket":
        answer = await client.websocket(target, headers)
    else:
        body = b'{"name": "n"}' if verb == "post" else b""
        sent = {**headers, "content-type": "application/json"} if body else headers
        status, got, text = await client.http(verb.upper(), target, sent, body)
        kept = sorted((k, v) for k, v in got.items() if k.startswith(("x-f", "x-e", "content-ty")))
        # The text of a 500 may say where the error is.
        answer = [status, text.decode(), kept] if status != 500 else [500]
    return [answer, await client.effects()]


class Direct:
    """A client that calls an ASGI app on the running loop."""

    def __init__(self, app: Any) -> None:
        self._app = app

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Direct]:
        """Run the lifespan of the app. Raises `RuntimeError` with its error if it cannot start."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        got: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(self._app({"type": "lifespan", "asgi": ASGI}, sent.get, got.put))
        for message in ("startup", "shutdown"):
            sent.put_nowait({"type": f"lifespan.{message}"})
            answer = await asyncio.wait_for(got.get(), PATIENCE_S)
            if answer["type"].endswith("failed"):
                raise RuntimeError(answer.get("message", ""))
            if message == "startup":
                try:
                    yield self
                except BaseException:
                    task.cancel()
                    raise
        await task

    async def http(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> tuple[int, Headers, bytes]:
        messages = await self._call(
            {"type": "http", "method": method}, target, headers,
            {"type": "http.request", "body": body},
        )  # fmt: skip
        start: Any = messages[0]
        got = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], got, b"".join(each.get("body", b"") for each in messages)

    async def websocket(self, target: str, headers: Headers) -> Any:
        messages = await self._call(
            {"type": "websocket"}, target, headers, {"type": "websocket.connect"}
        )
        for each in messages:
            if each["type"] == "websocket.send":
                return json.loads(each["text"])
        # A close before the handshake is a 403, as servers answer it.
        ends = [each.get("status", 403) for each in messages if "body" not in each]
        return ["closed", *ends[:1]]

    async def effects(self) -> Any:
        return json.loads((await self.http("GET", "/--log", {}))[2])

    async def _call(
        self, kind: dict[str, str], target: str, headers: Headers, first: Any
    ) -> list[Any]:
        messages: list[Any] = []
        left = [first]
        path, _, query = target.partition("?")

        async def receive() -> Any:
            return left.pop() if left else await asyncio.Future()

        async def send(message: Any) -> None:
            messages.append(message)

        scope: dict[str, Any] = {
            **kind, "asgi": ASGI, "http_version": "1.1",
            "scheme": "ws" if kind["type"] == "websocket" else "http", "root_path": "",
            "server": ("testserver", 80), "client": ("testclient", 1), "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "subprotocols": [],
            "headers": [(k.encode(), v.encode()) for k, v in {"host": "t", **headers}.items()],
            "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._app(scope, receive, send)
        except TimeoutError:  # said as such, whatever was sent: the machine may be busy
            messages[:] = [{"type": "failed", "status": "no answer in time", "headers": []}]
        except Exception:
            if not messages:
                messages.append({"type": "failed", "status": 500, "headers": []})
        return messages


def answers(app: Any, made: Program) -> Answers:
    """Return the answers of an ASGI app. Raises `RuntimeError` if it cannot start."""

    async def main() -> Answers:
        async with Direct(app).running() as client:
            return await ask(client, made)

    found: Answers = json.loads(json.dumps(asyncio.run(main())))
    return found


class Sockets:
    """A client of a server, with a connection for each request."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def http(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> tuple[int, Headers, bytes]:
        host, _, port = self._host.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = {"host": "t", "connection": "close", "content-length": str(len(body)), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        async with asyncio.timeout(PATIENCE_S):
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        first, *fields = head.decode().split("\r\n")
        got = {name.lower(): value for name, value in (each.split(": ", 1) for each in fields)}
        if got.get("transfer-encoding") == "chunked":
            rest = b"".join(_chunks(rest))
        return int(first.split()[1]), got, rest

    async def websocket(self, target: str, headers: Headers) -> Any:
        try:
            async with connect(f"ws://{self._host}{target}", additional_headers=headers) as socket:
                return json.loads(await socket.recv())
        except InvalidStatus as error:
            return ["closed", error.response.status_code]

    async def effects(self) -> Any:
        """Return the effects until none comes for a while: some come after the answer."""
        found: list[Any] = []
        silent = 0
        while silent < 3:
            new = json.loads((await self.http("GET", "/--log", {}))[2])
            found += new
            silent = 0 if new else silent + 1
            await asyncio.sleep(0.005)
        return found


def _chunks(text: bytes) -> Iterator[bytes]:
    while text:
        size, _, text = text.partition(b"\r\n")
        yield text[: int(size, 16)]
        text = text[int(size, 16) + 2 :]


def over_sockets(host: str, made: Program) -> Answers:
    """Return the answers of a server. Raises `TimeoutError` if it does not listen in time."""

    async def main() -> Answers:
        client = Sockets(host)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(OSError, IndexError):
                    if (await client.http("GET", "/--log", {}))[0] == 200:
                        break
                await asyncio.sleep(0.05)
        return await ask(client, made)

    found: Answers = json.loads(json.dumps(asyncio.run(main())))
    return found
