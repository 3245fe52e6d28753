"""The seam for observers: the engine makes the parts of applications with their factories."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import ingress as serve
from ingress.engines import local_engine
from ingress.observe.timeline.instrumentation import record
from ingress.observe.timeline.recorder import Recorder
from ingress.serving.control.factories import Factories
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router
from ingress.testing import TestClient, VirtualClock
from tests.servers import bind, set_flags

pytestmark = pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")


@serve.deployment
class Counter:
    def __init__(self) -> None:
        self.n = 0

    def count(self) -> int:
        self.n += 1
        return self.n

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0)
    def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    async def doubled(self, number: int) -> int:
        return await self.double(number)

    def __call__(self) -> str:
        return "hello"


def recording() -> AbstractContextManager[None]:
    return local_engine().instrumented(partial(record, Recorder()))


OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "recording": recording,
    "clock": VirtualClock,
}


def code_of_ingress() -> dict[str, Any]:
    """Return the functions and classes that the modules and classes of ingress have, by place."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "ingress":
            continue
        owners = {name: module} | {
            f"{name}.{cls.__qualname__}": cls
            for cls in vars(module).values()
            if inspect.isclass(cls) and cls.__module__ == name
        }
        for place, owner in owners.items():
            for attribute, value in list(vars(owner).items()):
                if callable(value) or hasattr(type(value), "__get__"):
                    found[f"{place}.{attribute}"] = value
    return found


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags(monkeypatch, "1")


def make_requests() -> None:
    with TestClient(bind(Counter)) as client:
        assert client.get("/").text == "hello"
        assert client.handle.count.remote().result() == 1


def test_observers_replace_no_function_and_no_class_of_ingress() -> None:
    make_requests()  # imports all modules
    before = code_of_ingress()

    with ExitStack() as in_use:
        for observe in OBSERVERS.values():
            in_use.enter_context(observe())
        make_requests()
        after = code_of_ingress()

    assert [place for place in before if after.get(place) is not before[place]] == []


@pytest.mark.parametrize("is_recorded_first", [True, False], ids=["record-first", "record-last"])
def test_observers_work_together(is_recorded_first: bool) -> None:
    recorder, clock = Recorder(), VirtualClock()
    recorded = local_engine().instrumented(partial(record, recorder))
    observers: list[AbstractContextManager[Any]] = [recorded, clock]
    with recorder, ExitStack() as in_use:
        for each in observers if is_recorded_first else reversed(observers):
            in_use.enter_context(each)
        with TestClient(bind(Counter)) as client:
            assert client.handle.count.remote().result() == 1
            assert client.handle.doubled.remote(4).result() == 8
            clock.advance(60)

    names = [each.name for each in recorder.timeline().journeys]
    assert names == ["Counter.count", "Counter.doubled", "Counter.double x 1"]


@pytest.mark.parametrize("observe", OBSERVERS.values(), ids=OBSERVERS)
def test_afterwards_the_engine_makes_its_own_parts(
    observe: Callable[[], AbstractContextManager[Any]],
) -> None:
    before = local_engine().factories

    with observe():
        assert local_engine().factories != before

    assert local_engine().factories == before == Factories()


def test_instruments_may_leave_in_any_order() -> None:
    class ReplicaA(Replica):
        __slots__ = ()

    class RouterB(Router):
        __slots__ = ()

    engine = local_engine()
    first = engine.instrumented(lambda factories: replace(factories, replica=ReplicaA))
    second = engine.instrumented(lambda factories: replace(factories, router=RouterB))
    first.__enter__()
    second.__enter__()
    assert engine.factories == Factories(replica=ReplicaA, router=RouterB)

    first.__exit__(None, None, None)
    assert engine.factories == Factories(router=RouterB)
    second.__exit__(None, None, None)
    assert engine.factories == Factories()


def test_an_instrument_sees_the_factories_of_the_instruments_before_it() -> None:
    made: list[Factories] = []

    def look(factories: Factories) -> Factories:
        made.append(factories)
        return factories

    class ReplicaA(Replica):
        __slots__ = ()

    engine = local_engine()
    with (
        engine.instrumented(lambda factories: replace(factories, replica=ReplicaA)),
        engine.instrumented(look),
    ):
        pass

    assert made[0] == Factories(replica=ReplicaA)
