"""Priorities of calls: `handle.options(priority=...)`, and a header that is off by default."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import httpx
import pytest

import ingress as serve
from ingress.core.base.settings import PRIORITY_HEADER
from ingress.core.base.types import PRIORITIES
from ingress.core.calls.call import Call
from ingress.serving.replicas.overload import HEAD_START_S, UsualTimes, WaitingCalls
from ingress.testing import Latch
from tests.fakes import make_call, together
from tests.servers import bind, served, set_flags, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")


def call_of(name: str) -> Call:
    call = make_call()
    call.metadata = call.metadata._replace(priority=PRIORITIES[name])
    return call


def order(*added: tuple[str, float], now: float) -> list[int]:
    """Return the numbers of calls, which came at these times, in the order of their turns."""
    queue = WaitingCalls(UsualTimes())
    calls = [call_of(name) for name, _ in added]
    for call, (_, since) in zip(calls, added, strict=True):
        queue.add(call, since)
    found = []
    while (following := queue.next(now, [])) is not None:
        found.append(calls.index(following))
    assert len(queue) == 0
    return found


def test_high_goes_before_normal_before_low_and_each_in_order_of_arrival() -> None:
    names = ["low", "normal", "high", "low", "normal", "high"]

    assert order(*((name, 0.0) for name in names), now=1.0) == [2, 5, 1, 4, 0, 3]


def test_a_call_overtakes_calls_of_the_next_class_that_came_a_head_start_later() -> None:
    late = HEAD_START_S + 1
    added = ("low", 0.0), ("normal", late), ("high", late), ("normal", late), ("low", late)

    assert order(*added, now=late + 1) == [2, 0, 1, 3, 4]


def test_the_queue_counts_forgets_and_returns_calls_of_each_class() -> None:
    queue = WaitingCalls(UsualTimes())
    calls = [call_of(name) for name in ("low", "normal", "high", "high")]
    for call in calls:
        queue.add(call, 0.0)

    assert len(queue) == 4
    assert queue.discard(calls[2])
    assert not queue.discard(calls[2])
    assert [call in queue for call in calls] == [True, True, False, True]
    queue.add_first(calls[2], 0.0)
    assert queue.clear() == [calls[2], calls[3], calls[1], calls[0]]
    assert len(queue) == 0


@serve.deployment(max_ongoing_requests=1)
class Model:
    def __init__(self) -> None:
        self.latch = Latch()
        self.begun: list[str] = []

    async def hold(self) -> None:
        await self.latch

    async def note(self, name: str) -> None:
        self.begun.append(name)

    async def __call__(self, request: Any) -> str:
        self.begun.append(request.query_params["name"])
        return "done"


@serve.deployment
class Front:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def note(self, name: str) -> None:
        await self.model.note.remote(name)


def model_of(name: str = "default") -> Model:
    from ingress.engines import local_engine

    deployed = local_engine().apps.running[name].deployments["Model"]
    (replica,) = deployed.replicas
    model: Model = replica.context.servable_object
    return model


def queued() -> int:
    model = serve.status().applications["default"].deployments["Model"]
    return model.queued


def wait_until_queued(count: int) -> None:
    wait_until(lambda: queued() == count)


@pytest.mark.parametrize("separate", ["0", "1"])
def test_calls_of_a_handle_and_calls_made_in_them_leave_the_queue_by_priority(
    monkeypatch: pytest.MonkeyPatch, separate: str
) -> None:
    set_flags(monkeypatch, separate)
    front = serve.run(bind(Front, bind(Model)), route_prefix=None)
    model = serve.get_deployment_handle("Model", "default")
    holding = model.hold.remote()
    responses = []
    for number, (handle, name) in enumerate(
        [(model, "low"), (front, "normal"), (front, "low"), (model, "high"), (front, "high")]
    ):
        responses.append(handle.options(priority=name).note.remote(f"{number} {name}"))
        wait_until_queued(number + 1)

    latch, begun = model_of().latch, model_of().begun
    latch.count_down()
    for each in (holding, *responses):
        each.result()

    assert begun == ["3 high", "4 high", "1 normal", "0 low", "2 low"]


@pytest.mark.parametrize("is_on", [False, True])
def test_a_header_gives_the_priority_once_its_name_is_set(
    monkeypatch: pytest.MonkeyPatch, *, is_on: bool
) -> None:
    if is_on:
        monkeypatch.setenv(PRIORITY_HEADER, "X-Priority")
    url = f"http://127.0.0.1:{served(bind(Model))}/"
    model = serve.get_deployment_handle("Model", "default")
    holding = model.hold.remote()

    def ask(name: str) -> None:
        httpx.get(url, params={"name": name}, headers={"x-priority": name}, timeout=60)

    threads = []
    for number, name in enumerate(["low", "nonsense", "high"]):
        threads.append(threading.Thread(target=ask, args=(name,)))
        threads[-1].start()
        wait_until_queued(number + 1)
    begun = model_of().begun
    model_of().latch.count_down()
    holding.result()
    for each in threads:
        each.join()

    assert begun == (["high", "nonsense", "low"] if is_on else ["low", "nonsense", "high"])


@pytest.mark.parametrize("priority", ["urgent", 1, True, b"high"])
def test_an_unknown_priority_is_refused_where_it_is_written(priority: Any) -> None:
    handle = serve.run(bind(Model), route_prefix=None)

    with pytest.raises(ValueError, match="priority must be 'high', 'normal' or 'low', got"):
        handle.options(priority=priority)


def test_each_call_leaves_the_queue_once_while_threads_add_and_withdraw_them(
    switch_interval: None,
) -> None:
    handle = serve.run(bind(Model), route_prefix=None)
    names = list(PRIORITIES)

    def call_many(number: int) -> None:
        for index in range(100):
            name = names[(number + index) % 3]
            response = handle.options(priority=name).note.remote("x")
            if index % 5 == 0:
                response.cancel()
            else:
                response.result()

    together(*[partial(call_many, number) for number in range(4)])

    assert queued() == 0
    wait_until(lambda: handle.note.remote("last").result() is None)
    assert len(model_of().begun) >= 320 + 1
