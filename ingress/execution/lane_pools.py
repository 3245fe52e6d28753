"""All the worker threads of a replica: those of its lanes, the serial one, and the rest.

    a call of a lane -> inside, if a thread is free for it -> done, and the first of the others in
                     -> behind them, in order

One that has not begun is taken back at once when it is cancelled: a lane that is stuck holds the
slots of those inside, and of nobody else. A lane is also the `call.Queue` that calls stand in, so
`cycles` finds those that would wait for each other for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from ingress.base.counters import LaneLoad
from ingress.calls import deadlocks
from ingress.calls.call import CURRENT_CALL, Call
from ingress.calls.loops import Home
from ingress.execution.execution import SERIAL_LANE, Lanes
from ingress.execution.threads import IDLE_S, Work, WorkerPool

_ABSENT = object()
_END = object()


class ReplicaPools:
    """Owned by the replica's user loop. `lanes` is what was declared, with the pools."""

    __slots__ = ("_all", "_named", "default", "lanes")

    def __init__(self, home: Home, declared: Lanes) -> None:
        self.default = WorkerPool(home, declared.limit)
        self._named = {name: LanePool(home, limit, name) for name, limit in declared.limits.items()}
        self._named[SERIAL_LANE] = SerialPool(home)
        self.lanes = replace(declared, pools=self._named)
        self._all = [self.default, *self._named.values()]

    def loads(self) -> dict[str, LaneLoad]:
        """Return what is in each lane now, and with the serial thread if there is a use for it.

        Thread-safe.
        """
        has_serial = self.lanes.is_serial
        return {
            name: pool.load()
            for name, pool in self._named.items()
            if has_serial or name != SERIAL_LANE
        }

    def shutdown(self) -> None:
        for pool in self._all:
            pool.shutdown()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end. Returns False if some still run after `timeout_s`."""
        deadline = monotonic() + timeout_s
        return all(pool.join(max(0.0, deadline - monotonic())) for pool in self._all)


class LanePool(WorkerPool):
    """The threads of one lane. Owned by the user loop; what a `Queue` is asked is thread-safe.

    The thread of a stream is not counted: who stands behind it is inside, and not known to wait.
    """

    __slots__ = ("_behind", "_inside", "_lane", "_limit", "_open", "_turns")

    def __init__(self, home: Home, limit: int, lane: str, *, idle_s: float | None = IDLE_S) -> None:
        super().__init__(home, limit, lane, idle_s=idle_s)
        self._lane = lane
        self._limit = limit
        self._inside: dict[_LaneWork, Call | None] = {}
        self._behind: OrderedDict[_LaneWork, None] = OrderedDict()
        # What no thread has begun. Race of a thread with who takes it back, on the loop or, to
        # break a cycle, anywhere: whoever pops it decides what becomes of it.
        self._open: dict[_LaneWork, None] = {}
        # What requests wait for. Race of the loop, which lets one in, with who breaks a cycle: the
        # same, because a turn has one end.
        self._turns: dict[_Turn, None] = {}

    def load(self) -> LaneLoad:
        return LaneLoad(self._limit, len(self._inside), len(self._behind))

    def make_work(self, func: Callable[[], Any], *, is_cleanup: bool) -> Work:
        call = CURRENT_CALL.get(None)
        work = _LaneWork(func, self, call)
        self._open[work] = None
        if len(self._inside) < self._limit:
            self._inside[work] = call
        else:
            self._behind[work] = None
            if call is not None and not is_cleanup:
                turn = work.turn = _Turn(work, call)
                self._turns[turn] = None
                turn.begin()
        return work

    def begin(self, work: _LaneWork) -> bool:
        """Whether a thread is to run it now. In that thread."""
        return self._open.pop(work, _ABSENT) is None

    def take_back(self, work: Work) -> bool:
        assert isinstance(work, _LaneWork)
        if self._open.pop(work, _ABSENT) is not None:
            return False
        self.leave(work)
        work.release_references()
        return True

    def leave(self, work: _LaneWork) -> None:
        """Let in who is first behind one that is done, or will never begin."""
        if self._inside.pop(work, _ABSENT) is _ABSENT:
            self._behind.pop(work, None)
        self._end(work.turn)
        work.turn = None
        while self._behind and len(self._inside) < self._limit:
            first, _ = self._behind.popitem(last=False)
            self._inside[first] = first.call
            self._end(first.turn)
        # Race with one that a thread has begun, before we knew of its place, and that waits by now:
        # whoever has looked for a cycle has not found it inside.
        if self._behind and (turn := next(iter(self._behind)).turn) is not None:
            deadlocks.check_deadlock(turn)

    def _end(self, turn: _Turn | None) -> None:
        if turn is not None and self._turns.pop(turn, _ABSENT) is None:
            turn.end()

    # What others see of a call that waits for a thread. Thread-safe.

    def holders(self, call: Call) -> frozenset[Call] | None:
        if call not in self._turns:
            return None
        inside = set(self._inside.values())
        # What runs for no call, a constructor or a health check, ends by itself.
        return frozenset() if None in inside else frozenset(filter(None, inside))

    def withdraw(self, call: Call) -> bool:
        assert isinstance(call, _Turn)
        if self._turns.pop(call, _ABSENT) is not None:
            return False
        if self._open.pop(call.of, _ABSENT) is None:
            return True
        self.mailbox.post(call.end)  # a thread was quicker
        return False

    def check_deadlock(self, call: Call) -> None:
        deadlocks.check_deadlock(call)

    def describe_deadlock(self, call: Call, chain: str) -> str:
        return (
            f"Lane {self._lane!r} can never run the request: its limit of {self._limit} is reached "
            f"by requests that wait for it, in the cycle {chain}. Raise the limit, or do not wait "
            "in a lane for what needs that lane."
        )


class SerialPool(LanePool):
    """The one thread of a replica for what is not to be touched by two. It stays until the end."""

    __slots__ = ()

    def __init__(self, home: Home) -> None:
        super().__init__(home, 1, SERIAL_LANE, idle_s=None)

    async def batches(self, items: Iterable[Any]) -> AsyncGenerator[list[Any], None]:
        """Yield what an iterable yields, one at a time: others may have the thread in between.

        A stream that kept it would have all of them wait for its client.
        """
        context = copy_context()
        taken = _Taken(items)
        try:
            while (item := await self.run(partial(context.run, taken.next))) is not _END:
                yield [item]
        finally:
            # Not the consumer's to skip: the generator's `finally` has run when this returns.
            await self.run(partial(context.run, taken.close), is_cleanup=True)


class _LaneWork(Work):
    """One call in a thread of a lane. `turn` is what its request waits for, if it has to."""

    __slots__ = ("call", "lane", "turn")

    def __init__(self, func: Callable[[], Any], lane: LanePool, call: Call | None) -> None:
        super().__init__(func, lane.loop, lane.mailbox)
        self.lane = lane
        self.call = call
        self.turn: _Turn | None = None

    def __call__(self) -> None:
        if self.lane.begin(self):
            super().__call__()

    def finish(self) -> None:
        super().finish()
        self.lane.leave(self)

    def fail(self, error: BaseException | None) -> None:
        """Be done without having begun. On the loop."""
        self.error = error
        self.finish()
        self.release_references()


class _Turn(Call):
    """What a request waits for that stands behind others in a lane: settled once it is inside."""

    __slots__ = ("of",)

    def __init__(self, work: _LaneWork, call: Call) -> None:
        super().__init__(call.metadata, None, Context())
        self.queue = work.lane
        self.of = work

    def begin(self) -> None:
        self.when_settled(self._told)
        self.begin_wait(self.of.call)

    def end(self) -> None:
        """Let the request go on. On the loop."""
        if self.settle():
            self.end_wait(self.of.call)

    def _told(self, _: Call) -> None:
        """Run where it was settled: anywhere, if that was to break a cycle."""
        if self.error is not None:
            self.of.lane.mailbox.post(self._fail)

    def _fail(self) -> None:
        self.end_wait(self.of.call)
        self.of.fail(self.error)


class _Taken:
    """An iterable that is iterated and closed by calls in one thread."""

    __slots__ = ("_items", "_iterator")

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._items)
        return next(self._iterator, _END)

    def close(self) -> None:
        if isinstance(self._items, Generator):  # not a file, which may be wanted again
            self._items.close()
