"""One request, from its submission to its one answer.

    resolving its arguments -> waiting in the router -> running on a replica -> settled
                                     `cancel` may come at any point

Whoever settles it first wins; the slot is another matter and follows the work, not the answer.
`cancellation()` is how the work itself sees that its answer is not wanted any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence, Set
from contextvars import Context, ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ingress.base.types import RequestMetadata
from ingress.calls.loops import Wakeup
from ingress.exceptions import RayServeException, RequestCancelledError, RequestTimeoutError

if TYPE_CHECKING:
    from ingress.context import ReplicaContext


class Queue(Protocol):
    """What a call needs of the router it waits in."""

    def withdraw(self, call: Call) -> bool: ...

    def holders(self, call: Call) -> frozenset[Call] | None: ...

    def check_deadlock(self, call: Call) -> None: ...

    def describe_deadlock(self, call: Call, chain: str) -> str: ...


class Runner(Protocol):
    """What a call needs of the replica it runs on."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_ending(self) -> bool: ...

    @property
    def context(self) -> ReplicaContext: ...

    def gone_error(self) -> Exception: ...

    def admit(self, call: Call) -> bool: ...

    async def serve(self, call: Call) -> Any: ...

    def fail(self, call: Call, error: Exception) -> None: ...

    def submit(self, call: Call) -> None: ...

    def cancel(self, call: Call) -> None: ...

    def release(self, call: Call) -> None: ...


class Call:
    """Thread-safe.

    `work(user_code)` is what the replica runs, in `context`. `queue` and `runner` say where it is.
    `waits_for` are the calls whose answers its user code waits for now, or it itself needs before
    it can begin; `is_awaited` becomes true when the user code of a call waits for it. `members` are
    the calls of a batch, which runs as a call of its own; `None` if this is no batch. `retries` is
    how often it was sent on from a replica that went before it began. `is_interrupted` becomes true
    when nobody wants the answer any more, or its replica stops. `assigned_at` is when it got its
    slot, and `has_begun` becomes true before the first line of its user code; `answered_at` is when
    the answer to a request with a deadline was sent, 0 if that is when its work ends.
    """

    __slots__ = (
        "_callbacks",
        "_children",
        "_lock",
        "_parent",
        "answered_at",
        "assigned_at",
        "context",
        "error",
        "has_begun",
        "is_awaited",
        "is_interrupted",
        "members",
        "metadata",
        "queue",
        "retries",
        "route",
        "runner",
        "settled",
        "started_at",
        "value",
        "waits_for",
        "work",
    )

    def __init__(
        self,
        metadata: RequestMetadata,
        work: Callable[[Any], Awaitable[Any]] | None,
        context: Context,
        members: tuple[Call, ...] | None = None,
    ) -> None:
        self.metadata = metadata
        self.members = members
        self.route = metadata.route
        self.work = work
        self.context = context
        self.queue: Queue | None = None
        self.runner: Runner | None = None
        self.waits_for: Set[Call] = _NOBODY
        self.is_awaited = False
        self.retries = 0
        self.is_interrupted = False
        self.settled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.started_at = monotonic()
        self.assigned_at = 0.0
        self.answered_at = 0.0
        self.has_begun = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Call], Any]] = []
        self._parent: Call | None = None
        self._children: set[Call] | None = None  # not settled yet

    def start(self, runner: Runner) -> None:
        """Begin on the replica whose slot it was given. Thread-safe; once for each slot."""
        self.runner = runner
        runner.submit(self)

    def settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Give the answer. Returns False if there already is one."""
        with self._lock:
            if self.settled:
                return False
            self.value, self.error = value, error
            self.settled = True
            callbacks, self._callbacks = self._callbacks, []
        parent, self._parent = self._parent, None
        if parent is not None and parent._children is not None:
            parent._children.discard(self)
        for callback in callbacks:
            callback(self)
        return True

    def when_settled(self, callback: Callable[[Call], Any]) -> None:
        """Have `callback(call)` called once, at once if there is an answer; it must not block."""
        with self._lock:
            if not self.settled:
                self._callbacks.append(callback)
                return
        callback(self)

    def _forget(self, callback: Callable[[Call], Any]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    @property
    def deadline(self) -> float | None:
        """When it has to be answered, in `time.monotonic()` seconds; its children too."""
        return self.metadata.deadline

    def expire(self) -> None:
        """Cancel it because its deadline has come. Thread-safe."""
        self._expire_parents()
        self.cancel(self._timeout())

    def _expire_parents(self) -> None:
        """Expire those it was made for whose time is up with its own.

        Race with their own timers, which may be on other loops: theirs has to come first, or they
        would be told that a call of theirs failed, and make something of that, a 500 perhaps.
        """
        parent = self._parent
        if parent is not None and self.metadata.deadline is not None:
            for each in (parent,) if parent.members is None else parent.members:
                deadline = each.deadline
                if not each.settled and deadline is not None and deadline <= self.metadata.deadline:
                    each.expire()

    def is_over(self) -> bool:
        """Whether it must not begin: it has an answer, or its deadline has passed, which is one."""
        deadline = self.metadata.deadline
        if deadline is not None and not self.settled and monotonic() >= deadline:
            self._expire_parents()
            self.cancel(self._timeout())
        return self.settled

    def _timeout(self) -> RequestTimeoutError:
        assert self.metadata.deadline is not None
        left_s = round(self.metadata.deadline - self.started_at, 6)
        return RequestTimeoutError(self.metadata.request_id, left_s)

    def adopt(self, child: Call) -> None:
        """Have a call that is made in this one, and has not been submitted yet, cancelled with it.

        What is made once this one is settled is on its own: fire and forget, or what a `finally`
        block does after a cancellation.
        """
        if self.settled:
            return
        if self._children is None:
            with self._lock:  # its worker threads may be here at the same time
                if self._children is None:
                    self._children = set()
        child._parent = self
        self._children.add(child)
        # Race with a cancellation in another thread since we looked: it may have gone through the
        # children just before this one was among them.
        if self.is_interrupted and self.error is not None:
            child.cancel()

    def cancel(self, error: RayServeException | None = None) -> bool:
        """Settle as cancelled and stop the work where it is, with the calls made in it.

        `error` is what its caller gets instead of a plain `RequestCancelledError`. Returns False if
        it was settled.
        """
        if not self.settle(error=error or RequestCancelledError(self.metadata.request_id)):
            return False
        self.is_interrupted = True
        # Race with a slot that is being handed over: the replica looks at `settled` before it
        # starts, so a call that is neither withdrawn here nor cancelled there gives its slot back
        # unused.
        if (self.queue is None or not self.queue.withdraw(self)) and self.runner is not None:
            self.runner.cancel(self)
        return True

    def interrupt(self) -> None:
        """Tell the work that it is to stop, and cancel the calls made in it.

        Called where the work runs, after its task was cancelled: a child that is settled before
        would wake that task with an error of its own instead.
        """
        self.is_interrupted = True
        for child in list(self._children or ()):
            child.cancel()

    @property
    def app_name(self) -> str:
        """The application the request came to that this call is made for."""
        return self.metadata.app_name or self.metadata.deployment.app_name

    def kind(self) -> str:
        """Return what calls that take about as long have in common; "" for none."""
        return self.metadata.method_name

    def current_route(self) -> str:
        """Return the route as far as it is known by now, a template such as "/items/{id}"."""
        return self.metadata.route

    def release_references(self) -> None:
        """Forget what only the run needed, once it has ended.

        Otherwise a call that starts another as its last act, and that one the next, would keep all
        who came before alive, with their arguments.
        """
        self.work = None
        self.context = _NO_CONTEXT

    def outcome(self) -> Any:
        """Return or raise the answer."""
        if self.error is not None:
            raise self.error
        return self.value

    async def wait(self) -> None:
        """Wait for the answer on the running loop."""
        if not self.settled:
            wakeup = Wakeup(asyncio.get_running_loop())
            self.when_settled(wakeup.wake)
            waiter = self.begin_wait()
            try:
                await wakeup.wait()
            finally:
                self.end_wait(waiter)

    def wait_blocking(self, timeout_s: float | None = None) -> bool:
        """Wait for the answer in a thread without a loop. Returns False after `timeout_s`."""
        if not self.settled:
            event = threading.Event()

            def wake(_: Call) -> None:
                event.set()

            self.when_settled(wake)
            waiter = self.begin_wait()
            try:
                if not event.wait(timeout_s):
                    self._forget(wake)  # who asks again and again must not leave a trail here
                    return False
            finally:
                self.end_wait(waiter)
        return True

    def begin_wait(self, waiter: Call | None = None) -> Call | None:
        """Note that a call, by default the one this is in, goes on only after this one."""
        waiter = waiter or CURRENT_CALL.get(None)
        if waiter is not None:
            with waiter._lock:  # its user code may wait in several threads
                if not isinstance(waiter.waits_for, set):
                    waiter.waits_for = set()
                waiter.waits_for.add(self)
            # Race with `Router.assign`, for a call that waits for its arguments: it looks at this
            # after it has queued the call, so one of the two sees both.
            self.is_awaited = True
            if self.queue is not None:
                self.queue.check_deadlock(self)
        return waiter

    def end_wait(self, waiter: Call | None) -> None:
        if waiter is not None:
            with waiter._lock:
                assert isinstance(waiter.waits_for, set)
                waiter.waits_for.discard(self)
                other = next(iter(waiter.waits_for), None)
            # This may have been the one that could still be answered.
            if other is not None and other.queue is not None:
                other.queue.check_deadlock(other)


def when_all_settled(calls: Sequence[Call], then: Callable[[], Any]) -> None:
    """Have `then()` called once all of them, one at least, have an answer; it must not block."""
    left = len(calls)
    lock = threading.Lock()  # they are settled in any thread, even at the same moment

    def settled(_: Call) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        then()

    for call in calls:
        call.when_settled(settled)


class Cancellation:
    """Whether the answer to a request is still wanted, for code that no one can cancel.

    Thread-safe: hand it to whatever does the work.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Call | None) -> None:
        self._call = call

    @property
    def requested(self) -> bool:
        """Whether to stop: the client left, the caller cancelled, or the replica is stopping."""
        return self._call is not None and self._call.is_interrupted

    def check(self) -> None:
        """Raise `RequestCancelledError` if `requested`, from the reason if there is another."""
        if self._call is not None and self._call.is_interrupted:
            raise RequestCancelledError(self._call.metadata.request_id) from self._call.error

    def __repr__(self) -> str:
        return f"Cancellation(requested={self.requested})"


def cancellation() -> Cancellation:
    """Return the cancellation of the request that the caller works for.

    In `async def`, `def`, generators, `asyncio.to_thread` and the tasks the request has started;
    outside of a request it is never requested.
    """
    return Cancellation(CURRENT_CALL.get(None))


CURRENT_CALL: ContextVar[Call] = ContextVar("ingress_call")


def current_calls() -> tuple[Call, ...]:
    """Return the calls the running code works for: one, those of its batch in order, or none."""
    call = CURRENT_CALL.get(None)
    if call is None:
        return ()
    return (call,) if call.members is None else call.members


def current_users() -> tuple[Call, ...]:
    """Return the calls that need what the running code asks for: those, and their batch.

    That one may outlive them all.
    """
    call = CURRENT_CALL.get(None)
    if call is None:
        return ()
    return (call,) if call.members is None else (*call.members, call)


_NO_CONTEXT = Context()
_NOBODY: frozenset[Call] = frozenset()
