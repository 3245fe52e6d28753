"""Two replicas answer 50 clients that share objects of asyncio and of packages built on it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

import ingress as serve
from tests.ecosystem.document import version_of
from tests.loop_apps import WITH_ASYNCIO_ALONE, WITH_PACKAGES, fresh
from tests.servers import PATIENCE_S, served

CLIENTS = 50
ROUNDS = 3
LOST_S = 2.0
"""Less than the time of a wake-up that is lost: such a waiter went on after 4 to 10 s."""

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(version_of("slowapi") == "", reason="make test-ecosystem"),
]


async def rounds(port: int, module: Any) -> float:
    """Return the time of the fastest round."""
    took = []
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    url = f"http://127.0.0.1:{port}"
    for _ in range(ROUNDS):
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            began = time.monotonic()
            await asyncio.wait_for(module.load(client, CLIENTS), PATIENCE_S)
            took.append(time.monotonic() - began)
    return min(took)


def fastest(name: str, replicas: int, loop: str | None = None) -> float:
    application, module = fresh(name, replicas, loop)
    try:
        return asyncio.run(rounds(served(application), module))
    finally:
        serve.shutdown()


@pytest.mark.parametrize("name", [*WITH_ASYNCIO_ALONE, *WITH_PACKAGES])
def test_two_replicas_lose_no_request_and_take_less_than_twice_the_time_of_one(name: str) -> None:
    one = fastest(name, 1)

    assert fastest(name, 2) < 2 * one + 0.1


@pytest.mark.parametrize("name", ["broadcast", "socketio_global", "socketio_mounted"])
def test_replicas_with_own_loops_wake_each_other(name: str) -> None:
    one = fastest(name, 1)

    assert fastest(name, 2, "own") < 2 * one + LOST_S
