"""Replicas in processes that reach a limit of their life: another takes the place of each.

No application runs when a test begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import ingress as serve
from tests.process_app import Api, Model, pids
from tests.servers import forking, overview, served, wait_until


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


def with_limit(deployment: Any, **options: Any) -> Any:
    return deployment.options(graceful_shutdown_timeout_s=60, **options).bind()


@pytest.mark.reliability("P06")
def test_no_request_is_lost_while_replicas_retire() -> None:
    url = f"http://127.0.0.1:{served(with_limit(Api, num_replicas=1, max_requests_per_replica=40))}"
    before, seen, is_over = set(pids("Api")), set[int](), threading.Event()

    def ask_on() -> int:
        with httpx.Client(timeout=60) as client:
            count = 0
            while not is_over.is_set():
                answer = client.get(f"{url}/pid")
                assert answer.status_code == 200, answer.text
                seen.add(answer.json())
                count += 1
            return count

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_on) for _ in range(2)]
        try:
            wait_until(lambda: len(seen - before) >= 2 or any(each.done() for each in asking))
        finally:
            is_over.set()
        assert sum(each.result() for each in asking) >= 40 * 2

    assert len(seen - before) >= 2


@pytest.mark.skipif("sys.platform != 'linux'", reason="it reads /proc")
def test_a_child_that_has_grown_is_replaced_after_its_requests() -> None:
    handle = serve.run(with_limit(Model, max_memory_mb=250), route_prefix=None)
    before = handle.pid.remote().result()
    items = handle.options(stream=True).count.remote(3)
    assert next(items) == 0

    handle.grow.remote(300_000_000).result()

    wait_until(lambda: before not in pids("Model"))
    assert handle.remote(3).result() == 3
    assert list(items) == [1, 2]


@pytest.mark.skipif("sys.platform != 'linux'", reason="it reads /proc")
def test_children_that_are_too_large_from_the_start_are_replaced_ever_more_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "ingress"):
        handle = serve.run(with_limit(Model, max_memory_mb=1), route_prefix=None)

        wait_until(lambda: "the next retires in 1 s at the earliest" in caplog.text)

    assert "the next retires in 0.5 s at the earliest" in caplog.text
    assert handle.remote(3).result() == 3
    message = overview("Model").message
    assert "MB (max_memory_mb=1) within 10 s of its start; raise max_memory_mb" in message
    assert overview("Model").status == "HEALTHY"
