"""`def` dependencies behind `def` endpoints, which deadlock a pool of 40 threads, or of 5."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI

import ingress as serve
from ingress.core.base.settings import USER_CODE_IN_SEPARATE_THREAD

SLOTS = 5


@pytest.mark.reliability("B20")
@pytest.mark.parametrize("separate", ["1", "0"])
@pytest.mark.parametrize("requests", [80, 400])
def test_def_dependencies_never_wait_for_def_endpoints(
    separate: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, separate)
    app = FastAPI()
    running: set[int] = set()
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most
        with lock:
            running.add(threading.get_ident())
            most = max(most, len(running))
        time.sleep(0.001)  # long enough for other requests to need a thread
        with lock:
            running.discard(threading.get_ident())

    def dependency() -> str:
        work()
        return "dependency"

    class Service:
        @app.get("/")
        def endpoint(self, value: str = Depends(dependency)) -> str:
            work()
            return value

    service: Any = serve.ingress(app)(Service)
    application = serve.deployment(max_ongoing_requests=SLOTS)(service).bind()

    async def ask() -> list[str]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answers = await asyncio.gather(*(client.get("/", timeout=60) for _ in range(requests)))
        await application.aclose()
        return [answer.json() for answer in answers]

    assert asyncio.run(ask()) == ["dependency"] * requests
    assert 1 <= most <= SLOTS
