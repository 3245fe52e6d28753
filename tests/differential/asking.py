"""The requests of a program and their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

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


class Client(Protocol):
    async def http(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> tuple[int, Headers, bytes]: ...

    async def websocket(self, target: str, headers: Headers) -> Any:
        """Return the first message, parsed, or the code of the close or refusal."""


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
    return [answer, json.loads((await client.http("GET", "/--log", {}))[2])]


class Direct:
    """A client that calls an ASGI app on the running loop."""

    def __init__(self, app: Any) -> None:
        self._app = app

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Direct]:
        """Run the lifespan of the app. Raises `RuntimeError` with its error if it cannot start."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        got: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(
            self._app({"type": "lifespan", "asgi": {"version": "3.0"}}, sent.get, got.put)
        )
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
        last = messages[-1] if messages else {}
        return ["closed", last.get("code") or last.get("status")]

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
            **kind, "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
            "scheme": "ws" if kind["type"] == "websocket" else "http", "root_path": "",
            "server": ("testserver", 80), "client": ("testclient", 1), "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "subprotocols": [],
            "headers": [(k.encode(), v.encode()) for k, v in {"host": "t", **headers}.items()],
            "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._app(scope, receive, send)
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
