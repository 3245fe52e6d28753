"""Objects that are frozen out of the garbage collector while an application runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.gc_freeze import FROZEN_BY_PYTHON, SETTLE_S
from ingress.core.base.settings import FREEZE_GC
from ingress.engines import local_engine
from tests.servers import PATIENCE_S, set_flags, wait_until

ALIVE: list[weakref.ref[Any]] = []


@pytest.fixture(autouse=True, params=[pytest.param("0", marks=pytest.mark.thorough), "1"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_flags(monkeypatch, request.param)
    ALIVE.clear()
    yield
    serve.shutdown()


class Model:
    """A reference cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.myself = self
        ALIVE.append(weakref.ref(self))

    async def __call__(self) -> int:
        return len(ALIVE)


MODEL = serve.deployment(Model).bind()


def settle() -> None:
    """Wait until live objects are frozen."""
    wait_until(lambda: gc.get_freeze_count() > FROZEN_BY_PYTHON)


def pass_the_time() -> None:
    """Wait until objects would have been frozen: until a timer of the same loop, set later."""
    passed = threading.Event()
    loop = local_engine().threads.control.loop
    loop.call_soon_threadsafe(loop.call_later, SETTLE_S, passed.set)
    assert passed.wait(PATIENCE_S)


def test_the_objects_of_an_application_are_in_no_full_collection_until_it_stops() -> None:
    def looked_at() -> int:
        return sum(type(each) is dict for each in gc.get_objects(generation=2))

    gc.collect()
    before = looked_at()

    serve.run(MODEL, route_prefix=None)
    settle()
    gc.collect()
    meanwhile = looked_at()
    serve.shutdown()
    gc.collect()

    assert gc.get_freeze_count() < FROZEN_BY_PYTHON
    assert meanwhile < before / 10
    assert looked_at() >= before * 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_garbage_of_an_application_that_stopped_is_collected_while_another_runs(how: str) -> None:
    serve.run(MODEL, name="other", route_prefix=None)
    serve.run(MODEL, name="this", route_prefix=None)
    other, this = ALIVE
    settle()

    if how == "deleted":
        serve.delete("this")
    else:
        serve.run(MODEL, name="this", route_prefix=None)
    settle()

    assert this() is None
    assert other() is not None


def test_where_the_collector_is_switched_off_nothing_is_collected() -> None:
    passes: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        passes.append(info["generation"])

    gc.disable()
    gc.callbacks.append(note)
    try:
        serve.run(MODEL, name="this", route_prefix=None)
        pass_the_time()
        serve.delete("this")
    finally:
        gc.callbacks.remove(note)
        gc.enable()

    assert passes == []
    assert gc.get_freeze_count() < FROZEN_BY_PYTHON


def test_objects_that_other_code_has_frozen_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        serve.run(MODEL, name="this", route_prefix=None)
        pass_the_time()
        during = gc.get_freeze_count()
        serve.delete("this")
        assert 0 < gc.get_freeze_count() <= before
        assert during <= before
    finally:
        gc.unfreeze()


def test_objects_that_other_code_freezes_later_stay_frozen() -> None:
    serve.run(MODEL, name="this", route_prefix=None)
    settle()
    mine = [Model() for _ in range(10_000)]
    gc.freeze()
    try:
        serve.delete("this")
        assert gc.get_freeze_count() > len(mine)
    finally:
        gc.unfreeze()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FREEZE_GC, "0")
    serve.run(MODEL, name="this", route_prefix=None)
    pass_the_time()
    switched_off = gc.get_freeze_count()
    serve.shutdown()

    monkeypatch.delenv(FREEZE_GC)
    serve.run(MODEL, name="this", route_prefix=None)
    settle()
    assert switched_off < FROZEN_BY_PYTHON
