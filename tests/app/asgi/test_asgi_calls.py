"""An ASGI call that its server cancels. The test is the server: its loop is the HTTP loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, Request
from starlette.types import Message

import ingress as serve
from ingress.testing import Latch
from tests.servers import bind, scope_of, set_flags, until, wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True, params=["0", "1"], ids=["separate0", "separate1"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_flags(monkeypatch, request.param)
    yield
    serve.shutdown()


@pytest.mark.parametrize("how", ["async", "def", "background"])
async def test_a_cancelled_asgi_call_returns_after_the_clean_up(how: str) -> None:
    seen: list[str] = []
    began = threading.Event()
    may_end = Latch()
    app = FastAPI()

    async def exits() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0.01)
            seen.append("exit")

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    @app.get("/async", dependencies=[Depends(exits)])
    async def in_async() -> None:
        await wait()

    @app.get("/def", dependencies=[Depends(exits)])
    def in_def() -> None:
        began.set()
        cancellation = serve.cancellation()
        wait_until(lambda: cancellation.requested or may_end.is_open)

    @app.get("/background", dependencies=[Depends(exits)])
    async def in_background(tasks: BackgroundTasks) -> None:
        tasks.add_task(wait)

    @serve.deployment
    @serve.ingress(app)
    class Api:
        pass

    application = bind(Api)
    task = asyncio.create_task(call(application, f"/{how}"))
    await until(began.is_set)
    may_end.count_down()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["exit"]
    await application.aclose()


async def call(application: Any, path: str) -> None:
    sent_request = False

    async def receive() -> Message:
        nonlocal sent_request
        if sent_request:
            await asyncio.Event().wait()
        sent_request = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None: ...

    await application(scope_of(path), receive, send)


async def test_a_cancelled_asgi_call_waits_for_the_clean_up_no_longer_than_a_stop_does() -> None:
    began, may_end = threading.Event(), Latch()

    @serve.deployment(graceful_shutdown_timeout_s=0.05)
    class Stubborn:
        async def __call__(self, request: Request) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await may_end

    application = bind(Stubborn)
    task = asyncio.create_task(call(application, "/"))
    await until(began.is_set)
    task.cancel()
    if is_separate():  # else the clean-up runs in the cancelled task
        with pytest.raises(asyncio.CancelledError):
            await task
    may_end.count_down()
    await asyncio.wait([task])
    await application.aclose()


def is_separate() -> bool:
    return os.environ["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "1"
