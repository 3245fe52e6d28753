"""`ingress.core.calls.call`: one answer per call, under every race and at every stage."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.exceptions import RequestCancelledError
from ingress.handle import Invocation
from ingress.serving.replicas.router import Router
from tests.fakes import FakeReplica, make_call, together

PATIENCE_S = 60.0


def test_the_first_answer_counts() -> None:
    call = make_call()

    assert call.settle(1)
    assert not call.settle(2)
    assert not call.settle(error=ValueError())
    assert not call.cancel()
    assert call.outcome() == 1


def test_of_many_answers_at_once_exactly_one_counts(switch_interval: None) -> None:
    for _ in range(100):
        call = make_call()
        won: list[int] = []
        told: list[object] = []
        call.when_settled(lambda each: told.append(each.value))  # noqa: B023

        def settle(number: int, call: Call = call, won: list[int] = won) -> None:
            if call.settle(number):
                won.append(number)

        together(*(lambda number=number: settle(number) for number in range(5)))

        assert len(won) == 1
        assert call.outcome() == won[0]
        assert told == won


def test_a_callback_added_while_the_answer_comes_is_called_once(switch_interval: None) -> None:
    for _ in range(200):
        call = make_call()
        told: list[Call] = []
        together(lambda: call.settle(1), lambda: call.when_settled(told.append))  # noqa: B023

        assert told == [call]


def test_a_call_that_is_made_while_its_caller_is_cancelled_is_cancelled_too() -> None:
    caller, call = make_call(), make_call()

    def cancel() -> None:
        caller.cancel()
        caller.interrupt()

    class Late(set[Call]):
        """A set of children: another thread cancels the caller just before a child is added."""

        def add(self, each: Call) -> None:
            together(cancel)
            super().add(each)

    caller._children = Late()
    caller.adopt(call)

    assert caller.settled
    assert isinstance(call.error, RequestCancelledError)


def test_waiting_in_threads_and_on_loops_at_once(switch_interval: None) -> None:
    call = make_call()
    got: list[object] = []

    async def on_loop() -> None:
        await asyncio.gather(*(call.wait() for _ in range(10)))
        got.append(call.outcome())

    def in_thread() -> None:
        assert call.wait_blocking(PATIENCE_S)
        got.append(call.outcome())

    together(*[lambda: asyncio.run(on_loop())] * 3, *[in_thread] * 3, lambda: call.settle("answer"))

    assert got == ["answer"] * 6


def test_asking_again_and_again_leaves_no_trail() -> None:
    call = make_call()
    for _ in range(50):
        assert not call.wait_blocking(0.0)

    assert len(call._callbacks) == 0
    call.settle(1)
    assert call.wait_blocking(0.0)


@pytest.mark.parametrize("stage", ["new", "queued", "running", "settled"])
def test_cancel_at_every_stage(stage: str) -> None:
    router = Router(DeploymentID("D"))
    replica = FakeReplica(router, 1)
    router.add(replica)
    first, call = make_call(), make_call()
    if stage == "queued":
        router.assign(first)
    if stage != "new":
        router.assign(call)
    if stage == "settled":
        replica.finish(call, "answer")

    assert call.cancel() == (stage != "settled")
    assert not call.cancel()

    if stage == "new":
        router.assign(call)
        assert replica.skipped == [call]
    if stage == "queued":
        assert router.num_queued == 0
        replica.finish(first)
        assert replica.started == [first]
    if stage == "running":
        assert replica.cancelled == [call]
        assert replica.ongoing == 1, "the slot follows the work, not the answer"
        assert replica.finish(call, "too late") is False
    if stage == "settled":
        assert call.outcome() == "answer"
    else:
        with pytest.raises(RequestCancelledError, match=call.metadata.request_id):
            call.outcome()
    assert replica.ongoing == 0


def test_cancelling_while_it_is_assigned_costs_no_slot(switch_interval: None) -> None:
    for free in [True, False] * 150:
        router = Router(DeploymentID("D"))
        replica = FakeReplica(router, 1)
        router.add(replica)
        first, call = make_call(), make_call()
        if not free:
            router.assign(first)

        together(lambda: router.assign(call), call.cancel)  # noqa: B023

        if not free:
            replica.finish(first)
        if call in replica.running:
            assert replica.cancelled == [call]
            replica.finish(call)
        assert (replica.ongoing, router.num_queued) == (0, 0)
        assert isinstance(call.error, RequestCancelledError)


def test_a_call_notes_the_calls_it_waits_for_while_it_waits() -> None:
    waiter, call = make_call(), make_call()

    def wait() -> None:
        CURRENT_CALL.set(waiter)
        call.wait_blocking(PATIENCE_S)

    thread = threading.Thread(target=wait)
    thread.start()
    while call not in waiter.waits_for:
        thread.join(0.001)
    call.settle(1)
    thread.join(PATIENCE_S)

    assert waiter.waits_for == frozenset()


def test_an_ended_call_keeps_nothing_of_the_call_that_started_it() -> None:
    """The next call must not keep alive the call that started it as its last act."""

    class Argument:
        pass

    argument = Argument()
    alive = weakref.ref(argument)
    call = make_call()
    call.work = Invocation("m", [argument], {}, None)
    call.context.run(lambda: CURRENT_CALL.set(make_call()))
    call.release_references()
    del argument
    gc.collect()

    assert alive() is None
    assert CURRENT_CALL not in call.context
