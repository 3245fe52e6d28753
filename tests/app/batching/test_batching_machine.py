"""`@serve.batch` under random orders of events from hypothesis, in virtual time.

Callers come and leave, handlers fail in every way, sizes raise: all other calls are answered, in
order, and nothing is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ingress as serve
from ingress.exceptions import RayServeException, UserCodeExit
from tests.servers import ROUNDS


class Boom(Exception):
    pass


def boom(error: BaseException) -> Any:
    raise error


OUTCOMES: dict[str, tuple[Callable[[list[Any]], Any], type[BaseException] | None]] = {
    "ok": (lambda xs: xs, None),
    "raise": (lambda xs: boom(Boom()), Boom),
    "CancelledError": (lambda xs: boom(asyncio.CancelledError()), UserCodeExit),
    "SystemExit": (lambda xs: boom(SystemExit(1)), UserCodeExit),
    "short": (lambda xs: xs[1:], RayServeException),
    "long": (lambda xs: [*xs, None], RayServeException),
    "None": (lambda xs: None, TypeError),
}
SIZES = {"one": 1, "two": 2, "huge": 99}
REFUSED = {"raise": Boom, "exit": UserCodeExit, "huge": RuntimeError}


@dataclass(eq=False)
class Asked:
    """One call, and its state."""

    number: int
    size: str
    task: asyncio.Task[Any] | None = None
    is_cancelled: bool = False
    started: bool = False

    @property
    def waits(self) -> bool:
        return self.size in ("one", "two") and not self.is_cancelled and not self.started

    @property
    def weight(self) -> int:
        return SIZES[self.size]


@dataclass(eq=False)
class Batch:
    items: list[Asked]
    outcome: asyncio.Future[str] = field(default_factory=asyncio.Future)


class BatchMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.SelectorEventLoop()
        self.now = 0.0
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.asked: list[Asked] = []
        self.running: list[Batch] = []
        self.most_running = 0
        self.forming: tuple[Asked, float] | None = None
        """The call that has waited longest with a permit free, and the start of that wait."""

    @initialize(
        size=st.integers(1, 4),
        wait_s=st.sampled_from([0.0, 1.0]),
        concurrent=st.integers(1, 3),
        sized=st.booleans(),
    )
    def decorate(self, size: int, wait_s: float, concurrent: int, sized: bool) -> None:
        self.size, self.wait_s, self.concurrent, self.sized = size, wait_s, concurrent, sized

        async def handler(xs: list[Asked]) -> Any:
            batch = Batch(xs)
            full = sum(x.weight for x in xs)
            assert 1 <= full <= size
            # FIFO: no waiting call is older than these, and each is in this batch only.
            assert [x.number for x in xs] == sorted(x.number for x in xs)
            for x in xs:
                assert not x.started
                assert not x.is_cancelled
                x.started = True
            left = [each for each in self.asked if each.waits and each.task is not None]
            assert all(each.number > xs[-1].number for each in left)
            # Taken with the permit in hand: it has every waiting call that fits.
            assert full == size or not left or full + left[0].weight > size
            self.running.append(batch)
            self.most_running = max(self.most_running, len(self.running))
            try:
                outcome = await batch.outcome
            finally:
                self.running.remove(batch)
            return OUTCOMES[outcome][0](xs)

        def size_of(xs: list[Asked]) -> int:
            if xs[-1].size == "raise":
                raise Boom
            if xs[-1].size == "exit":
                raise SystemExit(1)
            return sum(x.weight for x in xs)

        options: Any = {"batch_size_fn": size_of} if sized else {}
        self.call = serve.batch(
            max_batch_size=size,
            batch_wait_timeout_s=wait_s,
            max_concurrent_batches=concurrent,
            **options,
        )(handler)

    def run(self, coroutine: Coroutine[Any, Any, None] | None = None) -> None:
        async def turns() -> None:
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(coroutine or turns())
        if coroutine is not None:
            self.loop.run_until_complete(turns())

    @rule(
        sizes=st.lists(
            st.sampled_from([*SIZES, *REFUSED, "one", "one", "two"]), min_size=1, max_size=6
        )
    )
    def submit(self, sizes: list[str]) -> None:
        for size in sizes:
            size = size if self.sized else "one"
            if size == "two" and self.size < 2:
                size = "huge"
            asked = Asked(len(self.asked), size)
            self.asked.append(asked)

            async def ask(asked: Asked = asked) -> Any:
                return await self.call(asked)

            asked.task = self.loop.create_task(ask())
        self.run()

    @precondition(lambda self: any(not each.task.done() for each in self.asked))
    @rule(data=st.data(), turn=st.booleans())
    def cancel(self, data: st.DataObject, turn: bool) -> None:
        pending = [each for each in self.asked if each.task is not None and not each.task.done()]
        asked = data.draw(st.sampled_from(pending))
        assert asked.task is not None
        asked.task.cancel()
        asked.is_cancelled = True
        if turn:
            self.run()

    @rule(seconds=st.sampled_from([0.4, 1.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.run()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(sorted(OUTCOMES)))
    def finish(self, data: st.DataObject, outcome: str) -> None:
        batch = data.draw(st.sampled_from(self.running))
        batch.outcome.set_result(outcome)
        self.run()
        assert batch not in self.running
        expected = OUTCOMES[outcome][1]
        for asked in batch.items:
            assert asked.task is not None
            assert asked.task.done()
            if asked.is_cancelled:
                assert asked.task.cancelled()
            elif expected is None:
                assert asked.task.result() is asked
            else:
                assert type(asked.task.exception()) is expected

    @invariant()
    def no_more_run_than_may(self) -> None:
        if self.asked:
            assert self.most_running <= self.concurrent

    @invariant()
    def who_could_start_does_not_wait_longer_than_it_may(self) -> None:
        if not self.asked:
            return
        self.run()
        waiting = [each for each in self.asked if each.waits]
        if not waiting or len(self.running) == self.concurrent:
            self.forming = None
            return
        if self.forming is None or self.forming[0] is not waiting[0]:
            self.forming = waiting[0], self.now
        assert sum(each.weight for each in waiting) < self.size
        assert self.now - self.forming[1] < self.wait_s

    @invariant()
    def whose_size_cannot_be_told_fails_alone(self) -> None:
        for each in self.asked:
            looked_at = not each.is_cancelled and len(self.running) < self.concurrent
            if each.size in REFUSED and looked_at:
                assert each.task is not None
                assert type(each.task.exception()) is REFUSED[each.size]

    def teardown(self) -> None:
        if self.asked:
            for _ in range(2 * len(self.asked)):
                for batch in list(self.running):
                    batch.outcome.set_result("ok")
                self.now += 1.0
                self.run()
            assert all(each.task is not None and each.task.done() for each in self.asked)
            for each in self.asked:
                assert each.task is not None
                if not each.task.cancelled():
                    each.task.exception()
            assert self.call.__ingress_batcher__._queues == {}
            assert not asyncio.all_tasks(self.loop)
        self.loop.close()


# `BATCH_MACHINE_EXAMPLES=5000 pytest tests/app/batching/test_batching_machine.py` looks further.
EXAMPLES = int(os.environ.get("BATCH_MACHINE_EXAMPLES", "400" if ROUNDS else "100"))
TestBatchMachine = pytest.mark.reliability("D03")(BatchMachine.TestCase)
TestBatchMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)
