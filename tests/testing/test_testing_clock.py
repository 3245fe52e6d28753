"""`ingress.testing.VirtualClock`: replica loops whose time the test sets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import FastAPI

import ingress as serve
from ingress.testing import AsyncClient, Latch, TestClient, VirtualClock
from tests.servers import bind, set_flags

HOUR_S = 3600.0


class Sleeper:
    """User code that waits for hours."""

    async def sleep(self, seconds: float) -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time() - began

    async def limit(self) -> str:
        try:
            async with asyncio.timeout(HOUR_S):
                await self.sleep(2 * HOUR_S)
        except TimeoutError:
            return "too late"
        return "in time"

    async def every_minute(self, times: int) -> list[float]:
        loop = asyncio.get_running_loop()
        began, rang = loop.time(), []
        for _ in range(times):
            await self.sleep(60)
            rang.append(loop.time() - began)
        return rang

    async def for_a_day(self) -> None:
        await self.sleep(30 * HOUR_S)

    async def blocks(self, began: Latch, go: Latch) -> None:
        began.count_down()
        go.wait()

    async def in_thread(self, began: Latch, go: Latch) -> float:
        loop = asyncio.get_running_loop()

        def work() -> None:
            began.count_down()
            go.wait()

        before = loop.time()
        await asyncio.to_thread(work)
        return loop.time() - before


@pytest.fixture(autouse=True)
def separate(monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags(monkeypatch, "1")


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Iterator[VirtualClock]:
    with VirtualClock(timeout_s=getattr(request, "param", 10)) as clock:
        yield clock


@pytest.fixture
def client(clock: VirtualClock) -> Iterator[TestClient]:
    with TestClient(bind(serve.deployment(num_replicas=2)(Sleeper))) as client:
        yield client


def test_hours_pass_when_the_test_says_so_and_only_then(
    clock: VirtualClock, client: TestClient
) -> None:
    began = time.monotonic()
    answer = client.handle.sleep.remote(HOUR_S)
    clock.wait_for_timers()

    clock.advance(HOUR_S - 1)
    assert not answer._call.settled
    clock.advance(1)
    assert answer.result() == pytest.approx(HOUR_S)
    assert clock.elapsed_s == HOUR_S
    assert time.monotonic() - began < HOUR_S / 10


def test_hours_pass_for_a_client_on_the_loop_of_the_test(clock: VirtualClock) -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Api:
        @app.get("/")
        async def root(self) -> str:
            await asyncio.sleep(HOUR_S)
            return "late"

    async def ask() -> str:
        async with AsyncClient(bind(Api)) as client:
            asked = asyncio.create_task(client.get("/"))
            await asyncio.to_thread(clock.wait_for_timers)
            await asyncio.to_thread(clock.advance, HOUR_S)
            answer: str = (await asked).json()
            return answer

    assert asyncio.run(ask()) == "late"


def test_each_timer_on_the_way_rings_at_its_time(clock: VirtualClock, client: TestClient) -> None:
    answers = [client.handle.every_minute.remote(3), client.handle.every_minute.remote(3)]
    clock.wait_for_timers(2)

    clock.advance(HOUR_S)

    assert [answer.result() for answer in answers] == 2 * [pytest.approx([60, 120, 180])]


def test_a_timeout_comes_before_the_sleep_it_cuts_short(
    clock: VirtualClock, client: TestClient
) -> None:
    answer = client.handle.limit.remote()
    clock.wait_for_timers(2)

    clock.advance(3 * HOUR_S)

    assert answer.result() == "too late"


def test_more_than_a_day_passes_at_once(clock: VirtualClock, client: TestClient) -> None:
    """One wait of asyncio is at most a day."""
    answer = client.handle.for_a_day.remote()
    clock.wait_for_timers()

    clock.advance(30 * HOUR_S)

    answer.result()


@pytest.mark.usefixtures("switch_interval")
def test_what_other_threads_post_is_never_overtaken_by_the_clock(
    clock: VirtualClock, client: TestClient
) -> None:
    """A loop counts as busy from the moment work is posted, not from when it wakes up."""
    for number in range(1, 50):
        answer = client.handle.sleep.remote(number)
        clock.wait_for_timers()
        clock.advance(number)
        assert answer.result() == pytest.approx(number)


def test_a_batch_waits_for_the_clock(clock: VirtualClock) -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Batches:
        @serve.batch(max_batch_size=100, batch_wait_timeout_s=60)
        async def together(self, numbers: list[int]) -> list[int]:
            return [len(numbers)] * len(numbers)

        @app.get("/")
        async def get(self) -> int:
            return await self.together(1)

    with TestClient(bind(Batches)) as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.get, "/")
        clock.wait_for_timers()
        clock.advance(59)
        assert not answer.done()
        clock.advance(1)
        assert answer.result().json() == 1


def test_a_thread_at_work_does_not_keep_the_clock_and_is_not_moved_by_it(
    clock: VirtualClock, client: TestClient
) -> None:
    began, go = Latch(), Latch()
    answer = client.handle.in_thread.remote(began, go)
    began.wait()

    clock.advance(HOUR_S)
    go.count_down()

    assert answer.result() == pytest.approx(HOUR_S)


@pytest.mark.parametrize("clock", [0.05], indirect=True)
def test_a_loop_that_is_blocked_is_told_of(clock: VirtualClock, client: TestClient) -> None:
    began, go = Latch(), Latch()
    answer = client.handle.blocks.remote(began, go)
    began.wait()

    with pytest.raises(TimeoutError, match=r"become idle.*at work"):
        clock.advance(1)
    go.count_down()
    answer.result()


@pytest.mark.parametrize("clock", [0.05], indirect=True)
def test_waiting_for_timers_that_are_never_set_raises_a_timeout_error(
    clock: VirtualClock, client: TestClient
) -> None:
    with pytest.raises(TimeoutError, match="have 3 timers"):
        clock.wait_for_timers(3)


def test_the_clock_moves_no_other_loop(clock: VirtualClock, client: TestClient) -> None:
    async def real() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        clock.advance(HOUR_S)
        return loop.time() - before

    assert asyncio.run(real()) < HOUR_S / 10


def test_what_sleeps_when_the_application_stops_does_not_hold_it_up(clock: VirtualClock) -> None:
    class Stubborn:
        async def __call__(self) -> None:
            try:
                await asyncio.sleep(HOUR_S)
            finally:
                await asyncio.sleep(0.01)  # in real time: the clock no longer controls the loop

    deployment = serve.deployment(graceful_shutdown_timeout_s=0.05)
    with TestClient(bind(deployment(Stubborn))) as client:
        answer = client.handle.remote()
        clock.wait_for_timers()

    with pytest.raises(serve.exceptions.RayServeException):
        answer.result()


def test_loops_that_outlive_the_clock_go_on_in_real_time() -> None:
    with VirtualClock() as clock:
        client = TestClient(bind(serve.deployment(Sleeper)))
        client.__enter__()
        answer = client.handle.sleep.remote(HOUR_S)
        clock.wait_for_timers()
        clock.advance(HOUR_S - 0.02)

    assert answer.result() == pytest.approx(HOUR_S, abs=10)
    client.__exit__()


# Unsupported uses are refused.


def test_replicas_without_loops_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags(monkeypatch, "0")

    with pytest.raises(RuntimeError, match="RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0"):
        VirtualClock().__enter__()


def test_an_application_that_runs_already_is_refused() -> None:
    with TestClient(bind(serve.deployment(Sleeper))):
        with pytest.raises(RuntimeError, match=r"\['default'\] runs already"):
            VirtualClock().__enter__()


def test_a_clock_with_nothing_to_move_is_refused(clock: VirtualClock) -> None:
    with pytest.raises(RuntimeError, match="no event loop to move"):
        clock.advance(1)


def test_a_second_clock_is_refused(clock: VirtualClock) -> None:
    with pytest.raises(RuntimeError, match="one VirtualClock at a time"):
        VirtualClock().__enter__()


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_time_that_does_not_move_forward_is_refused(
    clock: VirtualClock, client: TestClient, seconds: float
) -> None:
    with pytest.raises(ValueError, match="time moves forward"):
        clock.advance(seconds)


def test_a_handler_cannot_wait_for_itself_to_be_idle(clock: VirtualClock) -> None:
    class Moves:
        async def __call__(self) -> None:
            clock.advance(1)

    with TestClient(bind(serve.deployment(Moves))) as client:
        with pytest.raises(RuntimeError, match="call it in the test"):
            client.handle.remote().result()


def test_afterwards_replicas_have_real_loops_again() -> None:
    with VirtualClock():
        pass

    with TestClient(bind(serve.deployment(Sleeper))) as client:
        assert client.handle.sleep.remote(0.01).result() >= 0.009
        assert "Sleeper#0" in {thread.name for thread in threading.enumerate()}
