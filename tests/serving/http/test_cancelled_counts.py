"""Requests that their callers cancel, or whose clients leave: counted apart, and no failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from websockets.sync.client import connect

import ingress as serve
from ingress.engines import local_engine
from ingress.observe.admin.exposition import exposition
from ingress.observe.live.observer import Observer, parts_of
from ingress.state.server import snapshot_of
from tests.observe.test_metrics import samples
from tests.servers import Connection, bind, get, served, set_flags, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")


class Model:
    async def tokens(self) -> AsyncIterator[str]:
        for number in itertools.count():
            yield f"{number} "
            await asyncio.sleep(0)

    def parts(self) -> Iterator[str]:
        for number in itertools.count():
            yield f"{number} "

    async def fast(self) -> str:
        return "x"

    async def never(self) -> None:
        await asyncio.Event().wait()

    async def breaks(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("of the clean-up")

    async def fails(self) -> None:
        raise ValueError("of the model")

    @serve.batch(max_batch_size=1)
    async def batch(self, numbers: list[int]) -> list[int]:
        await asyncio.Event().wait()
        return numbers


app = FastAPI()


class Api:
    def __init__(self, model: Any) -> None:
        self.model, self.streams = model, model.options(stream=True)

    async def _leave(self, slow: Any) -> str:
        """Cancel a task that waits for a call, once that call has begun, as a timeout does."""

        async def wait() -> None:
            await slow

        task = asyncio.ensure_future(wait())
        await self.model.fast.remote()  # which begins later
        task.cancel()
        return "x"

    @app.get("/chat")
    async def chat(self) -> StreamingResponse:
        return StreamingResponse(self.streams.tokens.remote())

    @app.get("/first")
    async def first(self) -> str:
        async for token in self.streams.tokens.remote():
            return str(token)
        return ""

    @app.get("/first-of-def")
    async def first_of_def(self) -> str:
        async for part in self.streams.parts.remote():
            return str(part)
        return ""

    @app.get("/hedge")
    async def hedge(self) -> str:
        slow = self.model.never.remote()
        answer = await self.model.fast.remote()
        slow.cancel()
        return str(answer)

    @app.get("/task")
    async def task(self) -> str:
        return await self._leave(self.model.never.remote())

    @app.get("/clean-up")
    async def clean_up(self) -> str:
        return await self._leave(self.model.breaks.remote())

    @app.get("/batch")
    async def batch(self) -> str:
        return await self._leave(self.model.batch.remote(1))

    @app.get("/never")
    async def never(self) -> None:
        await self.model.never.remote()

    @app.get("/fails")
    async def fails(self) -> None:
        await self.model.fails.remote()

    @app.websocket("/echo")
    async def echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())


@pytest.fixture
def observer() -> Observer:
    return Observer(partial(parts_of, local_engine()))


def application(isolation: Any = "thread") -> serve.Application:
    isolated = serve.deployment(isolation=isolation, graceful_shutdown_timeout_s=0.1)
    return bind(serve.deployment(serve.ingress(app)(Api)), isolated(Model).bind())


def counted(metric: str) -> dict[str, float]:
    """Return a counter by deployment, without those that are 0."""
    found: dict[str, float] = {}
    text = exposition(snapshot_of(local_engine())).decode()
    for (name, labels), number in samples(text).items():
        if name == metric and number:
            deployment = dict(labels)["deployment"]
            found[deployment] = found.get(deployment, 0) + number
    return found


cancelled = partial(counted, "ingress_requests_cancelled_total")
failed = partial(counted, "ray_serve_deployment_error_counter_total")


def told(observer: Observer) -> list[str]:
    """Return the words about calls that failed or were cancelled."""
    problems = observer.look()["problems"]
    return [each["text"] for each in problems if each["kind"] in ("errors", "left", "replica")]


def deployment(observer: Observer, name: str) -> Any:
    [one] = observer.look()["applications"]
    return next(each for each in one["deployments"] if each["name"] == name)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_calls_that_their_callers_cancel_are_counted_apart_and_hide_no_failure(
    observer: Observer, isolation: str
) -> None:
    port = served(application(isolation))
    observer.look()
    paths = ("/first", "/first-of-def", "/hedge", "/task", "/clean-up", "/batch")
    for path in paths:
        assert get(port, path).status == 200
    with Connection(port) as client:
        client.request("/chat")
        client.receive_until(b"1 ")
    wait_until(lambda: cancelled() == {"Model": len(paths) + 1, "Api": 1})

    assert (failed(), told(observer)) == ({}, [])
    model, api = deployment(observer, "Model"), deployment(observer, "Api")
    assert model["cancelled"] > 0 == model["errors"]
    assert api["cancelled"] > 0 == api["left"]  # it has the begin of an answer
    assert (model["state"], api["state"]) == ("HEALTHY", "HEALTHY")

    get(port, "/fails")  # 4 others were answered
    wait_until(lambda: failed().get("Model") == 1)
    assert told(observer)[0].startswith("20.0% of its requests failed in the last minute")
    assert deployment(observer, "Model")["state"] == "FAILING"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_call_that_ends_at_the_deadline_has_failed(observer: Observer, isolation: str) -> None:
    port = served(application(isolation))
    observer.look()
    assert get(port, "/never", "X-Request-Timeout-Seconds: 0.05\r\n").status == 408

    wait_until(lambda: failed().get("Model") == 1)
    assert cancelled() == {}
    assert deployment(observer, "Model")["state"] == "FAILING"


@pytest.mark.parametrize("separate", ["1", "0"])
def test_a_websocket_handler_that_does_not_catch_its_clients_disconnect_has_not_failed(
    observer: Observer, monkeypatch: pytest.MonkeyPatch, separate: str
) -> None:
    set_flags(monkeypatch, separate)
    port = served(application())
    observer.look()
    with connect(f"ws://127.0.0.1:{port}/echo") as client:
        client.send("x")
        client.recv()

    wait_until(lambda: cancelled() == {"Api": 1})
    assert (failed(), told(observer)) == ({}, [])


def test_a_share_of_failures_that_rounds_to_nothing_is_not_told(observer: Observer) -> None:
    @serve.deployment
    class Rare:
        async def __call__(self, number: int) -> int:
            return 1 // number

    handle = serve.run(Rare.bind(), route_prefix=None)
    observer.look()
    calls = [handle.remote(number) for number in range(2100)]
    with pytest.raises(ZeroDivisionError):
        calls[0].result()
    assert [each.result() for each in calls[1:3]] == [1, 0]
    wait_until(lambda: counted("ray_serve_deployment_request_counter_total") == {"Rare": 2099})

    assert deployment(observer, "Rare")["errors"] > 0
    assert told(observer) == []
