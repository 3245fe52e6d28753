"""Large arguments, results and bodies cross in shared memory, of which nothing is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import pytest

import ingress as serve
from ingress.exceptions import RayServeException
from ingress.handle import DeploymentHandle
from tests.large_app import api, holdings
from tests.servers import served, wait_until

LARGE = 200_000  # bytes, which cross in shared memory
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = served(api, name="large", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def handle(url: str) -> DeploymentHandle:
    return serve.get_deployment_handle("Large", "large")


@pytest.fixture(autouse=True)
def _segments_are_dropped(handle: DeploymentHandle) -> Iterator[None]:
    yield
    wait_until(lambda: holdings()[1] == 2)  # the page of each child


def array_of(number: int, size: int = LARGE) -> Any:
    return np.full(size, number, np.uint8)


@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_an_array_arrives_read_only_on_both_sides(handle: DeploymentHandle, size: int) -> None:
    array = np.arange(size)

    answer = handle.same.remote({"a": [array, array[:1]]}).result()

    assert np.array_equal(answer["a"][0], array)
    assert not answer["a"][0].flags.writeable
    assert not handle.is_writable.remote(array).result()


def test_bytes_and_many_small_arrays_cross(handle: DeploymentHandle) -> None:
    value = [os.urandom(LARGE), *(array_of(number % 250, 3) for number in range(5000))]

    answer = handle.same.remote(value).result()

    assert answer[0] == value[0]
    assert all(np.array_equal(*pair) for pair in zip(answer[1:], value[1:], strict=True))


def test_a_large_body_crosses_both_ways(url: str) -> None:
    body = b"abcdefgh" * LARGE

    answer = httpx.post(f"{url}/upper", content=body)

    assert answer.content == body.upper()


@pytest.mark.reliability("P05")
def test_an_array_that_is_kept_is_not_overwritten(handle: DeploymentHandle) -> None:
    for number in range(8):
        handle.keep.remote(array_of(number)).result()
    for _ in range(20):
        handle.same.remote(array_of(255)).result()

    assert handle.sums.remote().result() == [number * LARGE for number in range(8)]
    kept = handle.give.remote().result()
    for _ in range(20):
        handle.same.remote(array_of(255)).result()
    assert [int(each.sum()) for each in kept] == [number * LARGE for number in range(8)]


@pytest.mark.reliability("P05")
def test_arrays_that_are_dropped_in_any_thread_are_not_overwritten_before(
    handle: DeploymentHandle, switch_interval: None
) -> None:
    def triple(number: int) -> bool:
        answer = handle.tripled.remote(array_of(number)).result()
        return bool((answer == 3 * number).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(triple, [number % 80 for number in range(200)]))


@pytest.mark.reliability("P05")
def test_nothing_is_left_of_a_thousand_large_messages(handle: DeploymentHandle) -> None:
    handle.pid.remote().result()
    ours, theirs = holdings(), handle.holdings.remote().result()
    array = array_of(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: handle.same.remote(array).result(), range(1000)))

    wait_until(lambda: holdings() == ours)
    wait_until(lambda: handle.holdings.remote().result() == theirs)


def test_a_stream_of_large_items_waits_for_its_reader(handle: DeploymentHandle) -> None:
    begun = handle.number_made.remote().result()
    items = handle.options(stream=True).rows.remote(LARGE)
    next(items)
    before = handle.number_made.remote().result()
    for _ in range(50):
        next(items)

    made = [handle.number_made.remote().result() for _ in range(20)]

    assert before - begun < 24
    assert made[-1] - before < 74
    items.cancel()


def test_a_stream_of_large_items_waits_for_a_reader_in_a_child(handle: DeploymentHandle) -> None:
    reading = serve.get_deployment_handle("Reader", "large")
    begun = handle.number_made.remote().result()

    reading.first.remote(LARGE).result()

    made = [handle.number_made.remote().result() for _ in range(50)]
    assert made[-1] - begun < 48
    reading.close.remote().result()


def test_large_arguments_for_a_child_that_does_not_read_delay_no_other_request(
    url: str, handle: DeploymentHandle
) -> None:
    pid = handle.pid.remote().result()
    os.kill(pid, signal.SIGSTOP)
    try:
        waiting = [handle.same.remote(array_of(number)) for number in range(60)]
        texts = [handle.same.remote(str(number) * 60_000) for number in range(4)]
        for _ in range(20):
            assert httpx.get(f"{url}/-/healthz", timeout=60).status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)

    assert [int(each.result()[0]) for each in waiting] == list(range(60))
    assert [each.result()[0] for each in texts] == ["0", "1", "2", "3"]


def test_an_item_that_cannot_be_read_ends_its_stream_only(handle: DeploymentHandle) -> None:
    pid = handle.pid.remote().result()
    items = handle.options(stream=True).odd_items.remote()
    assert next(items) == 1

    with pytest.raises(RayServeException, match="an item of the stream cannot be read: ValueError"):
        next(items)

    assert handle.pid.remote().result() == pid


def test_views_are_dropped_in_other_threads_while_messages_arrive(
    handle: DeploymentHandle, switch_interval: None
) -> None:
    arrived: SimpleQueue[Any] = SimpleQueue()

    def check_and_drop() -> None:
        while (pair := arrived.get()) is not None:
            assert (pair[1] == pair[0]).all()
            del pair

    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(check_and_drop) for _ in range(2)]
        for number in range(100):
            arrived.put((number, handle.same.remote(array_of(number)).result()))
        for _ in checks:
            arrived.put(None)
        assert [each.result() for each in checks] == [None, None]
