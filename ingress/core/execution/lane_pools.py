"""All worker threads of a replica: those of its lanes, the serial thread, and the others.

    a call of a lane -> inside, if a thread is free -> done, and the first call behind gets inside
                     -> else behind, in order

A cancelled call that has not begun is withdrawn at once: a stuck lane holds only the slots of the
calls inside. A call that is behind waits for its turn, a node of the graph in which `deadlocks`
finds calls that would wait for each other for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Set
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from ingress.core.base.counters import LaneLoad, Latency
from ingress.core.calls.call import CURRENT_CALL, Call, begin_wait, end_wait
from ingress.core.calls.deadlocks import NO_NODES, Node, check_deadlock
from ingress.core.calls.loops import Home
from ingress.core.execution.execution import SERIAL_LANE, Lanes
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.core.execution.threads import (
    IDLE_S,
    MakeThreads,
    ThreadWork,
    WorkerPool,
    WorkerThreads,
)
from ingress.exceptions import RequestCycleError

T = TypeVar("T")
_ABSENT = object()
_END = object()


class ReplicaPools:
    """The pools of one replica. Owned by its user loop. `lanes` has the declaration and pools."""

    __slots__ = ("_all", "_named", "default", "lanes")

    def __init__(
        self, home: Home, declared: Lanes, make_threads: MakeThreads = WorkerThreads
    ) -> None:
        self.default = WorkerPool(home, declared.limit, make_threads=make_threads)
        self._named = {
            name: LanePool(home, limit, name, make_threads=make_threads)
            for name, limit in declared.limits.items()
        }
        self._named[SERIAL_LANE] = SerialPool(home, make_threads)
        self.lanes = replace(declared, pools=self._named)
        self._all = [self.default, *self._named.values()]

    def loads(self) -> dict[str, LaneLoad]:
        """Return the current load of each lane, and of the serial thread if the class uses it.

        Thread-safe.
        """
        has_serial = self.lanes.is_serial
        return {
            name: pool.load()
            for name, pool in self._named.items()
            if has_serial or name != SERIAL_LANE
        }

    def waits(self) -> dict[str, Latency]:
        """Return the waits of calls for a thread, by lane, "" for no lane. Thread-safe."""
        return {
            name: pool.waits.copy() for name, pool in self.by_lane().items() if pool.waits.total_ms
        }

    def by_lane(self) -> dict[str, WorkerPool]:
        """Return the pools by the names of their lanes; that of the other threads by ""."""
        return {"": self.default, **self._named}

    def have_computed(self, share: float) -> bool:
        """Return whether the worker threads had this share of a processor lately. Thread-safe.

        True for any threads where the system has no clocks of threads.
        """
        idents = [ident for pool in self._all for ident in pool.threads.idents]
        shares = GIL_PRESSURE.shares
        return bool(idents) and (
            not shares or sum(shares.get(each, 0.0) for each in idents) >= share
        )

    @property
    def are_alive(self) -> bool:
        """Return whether a thread of one of the pools is alive. Thread-safe."""
        return any(pool.threads.are_alive for pool in self._all)

    def shutdown(self) -> None:
        for pool in self._all:
            pool.shutdown()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end. Returns False if some still run after `timeout_s`."""
        deadline = monotonic() + timeout_s
        return all(pool.join(max(0.0, deadline - monotonic())) for pool in self._all)


class LanePool(WorkerPool):
    """The threads of one lane. Owned by the user loop; turns may be read and broken in any thread.

    The thread of a stream is not counted: a call that waits for it counts as inside, not as
    waiting.
    """

    __slots__ = ("_behind", "_inside", "_lane", "_limit", "_open", "_turns")

    def __init__(
        self,
        home: Home,
        limit: int,
        lane: str,
        *,
        idle_s: float | None = IDLE_S,
        make_threads: MakeThreads = WorkerThreads,
    ) -> None:
        super().__init__(home, limit, lane, idle_s=idle_s, make_threads=make_threads)
        self._lane = lane
        self._limit = limit
        self._inside: dict[_LaneWork, Call | None] = {}
        self._behind: OrderedDict[_LaneWork, None] = OrderedDict()
        # Calls that no thread has begun. Race of a thread with a withdrawal, on the loop or, to
        # break a deadlock, in any thread: the one that pops the call decides.
        self._open: dict[_LaneWork, None] = {}
        # The turns that requests wait for. Race of the loop, which lets a call in, with the thread
        # that breaks a deadlock: the one that pops the turn ends it.
        self._turns: dict[_Turn, None] = {}

    def load(self) -> LaneLoad:
        return LaneLoad(self._limit, len(self._inside), len(self._behind))

    def make_work(self, func: Callable[[], object], *, is_cleanup: bool) -> ThreadWork:
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
        """Return whether the current thread is to run the call. Called in that thread."""
        return self._open.pop(work, _ABSENT) is None

    def take_back(self, work: ThreadWork) -> bool:
        assert isinstance(work, _LaneWork)
        if self._open.pop(work, _ABSENT) is not None:
            return False
        self.leave(work)
        work.release_references()
        return True

    def leave(self, work: _LaneWork) -> None:
        """Remove a call that is done, or will never begin, and let the next calls in."""
        if self._inside.pop(work, _ABSENT) is _ABSENT:
            self._behind.pop(work, None)
        self._end(work.turn)
        work.turn = None
        while self._behind and len(self._inside) < self._limit:
            first, _ = self._behind.popitem(last=False)
            self._inside[first] = first.call
            self._end(first.turn)
        # Race with a call that a thread has begun before it was counted inside here, and that
        # waits by now: a deadlock check in between has not found it inside.
        if self._behind and (turn := next(iter(self._behind)).turn) is not None:
            check_deadlock(turn)

    def _end(self, turn: _Turn | None) -> None:
        if turn is not None and self._turns.pop(turn, _ABSENT) is None:
            turn.end()

    def holders(self, turn: _Turn) -> frozenset[Call] | None:
        """Return the calls inside; `None` if the turn has ended. Thread-safe."""
        if turn not in self._turns:
            return None
        inside = list(self._inside.values())  # a copy, in one step
        # Work for no call, such as a constructor or a health check, ends by itself.
        return frozenset() if None in inside else frozenset(filter(None, inside))

    def break_deadlock(self, turn: _Turn, chain: str) -> None:
        """Fail the call of a turn that can never come. Thread-safe."""
        if self._turns.pop(turn, _ABSENT) is not None:
            return
        if self._open.pop(turn.work, _ABSENT) is not None:
            self.mailbox.post(turn.end)  # a thread has begun it
            return
        error = RequestCycleError(
            f"Lane {self._lane!r} can never run the request: all {self._limit} of its threads are "
            f"held by requests that wait for the lane, in the cycle {chain}. Raise the limit, or "
            "do not wait in a lane for a call that needs the same lane."
        )
        self.mailbox.post(turn.fail, error)


class SerialPool(LanePool):
    """The serial thread of a replica, for code that is not thread-safe. It stays while idle."""

    __slots__ = ()

    def __init__(self, home: Home, make_threads: MakeThreads = WorkerThreads) -> None:
        super().__init__(home, 1, SERIAL_LANE, idle_s=None, make_threads=make_threads)

    async def batches(self, items: Iterable[T]) -> AsyncGenerator[list[T], None]:
        """Yield what an iterable yields, one item at a time; other calls may run in between.

        A stream that kept the thread would make all other calls wait for the stream's client.
        """
        context = copy_context()
        taken = _Taken(items)
        try:
            while (item := await self.run(partial(context.run, taken.next))) is not _END:
                yield [item]
        finally:
            # Waits even if cancelled: the generator's `finally` has run when this returns.
            await self.run(partial(context.run, taken.close), is_cleanup=True)


class _LaneWork(ThreadWork):
    """One call in a thread of a lane. `turn` is set while its request waits for the lane."""

    __slots__ = ("call", "lane", "turn")

    def __init__(self, func: Callable[[], object], lane: LanePool, call: Call | None) -> None:
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

    def fail(self, error: Exception) -> None:
        """End the call, which has not begun, with an error. Called on the loop."""
        self.error = error
        self.finish()
        self.release_references()


class _Turn(Node):
    """The wait of a call that is behind others in a lane. Owned by the user loop.

    The thread that takes it out of `LanePool._turns` ends it.
    """

    __slots__ = ("call", "work")

    def __init__(self, work: _LaneWork, call: Call) -> None:
        self.is_awaited, self.waits_for = False, NO_NODES
        self.work, self.call = work, call

    @property
    def deployment_name(self) -> str:
        return self.call.deployment_name

    def holders(self) -> frozenset[Node] | None:
        return self.work.lane.holders(self)

    def break_deadlock(self, chain: str, stuck: Set[Node]) -> None:
        self.work.lane.break_deadlock(self, chain)

    def begin(self) -> None:
        begin_wait(self, self.call)

    def end(self) -> None:
        """Let the call go on. Called on the loop."""
        end_wait(self, self.call)

    def fail(self, error: Exception) -> None:
        """End the call, which no thread has begun. Called on the loop."""
        self.end()
        self.work.fail(error)


class _Taken(Generic[T]):
    """An iterable that separate calls in one thread iterate and close."""

    __slots__ = ("_items", "_iterator")

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._iterator: Iterator[T] | None = None

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._items)
        return next(self._iterator, _END)

    def close(self) -> None:
        if isinstance(self._items, Generator):  # not a file, which may be wanted again
            self._items.close()
