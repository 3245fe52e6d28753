"""One call, from its submission to its one answer.

    resolving its arguments -> waiting in the router -> running on a replica -> settled
                                     `cancel` may come at any point

A call is settled once: the first answer wins. Its slot follows the work, not the answer: it is
released when the work has ended. User code learns from `cancellation()` that it is to stop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence, Set
from contextvars import Context, ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ingress.core.base.types import ReplicaID, RequestMetadata
from ingress.core.calls.deadlocks import NO_NODES, Node, check_deadlock
from ingress.core.calls.loops import Wakeup
from ingress.exceptions import (
    RayServeException,
    RequestCancelledError,
    RequestCycleError,
    RequestTimeoutError,
    is_disconnect,
)

if TYPE_CHECKING:
    from starlette.types import Scope


class Queue(Protocol):
    """The router that a call waits in, as the call sees it."""

    def withdraw(self, call: Call) -> bool: ...

    def holders(self, call: Call) -> frozenset[Call] | None: ...

    def describe_deadlock(self, chain: str) -> str: ...

    def note_expired(self) -> None:
        """Count a call whose deadline has passed. Thread-safe."""


class Runner(Protocol):
    """The replica that a call runs on, as the call and the router see it.

    `is_computing` is true while its worker threads compute, and the GIL is under pressure.
    """

    @property
    def is_computing(self) -> bool: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_ending(self) -> bool: ...

    @property
    def is_to_be_replaced(self) -> bool: ...

    @property
    def replica_id(self) -> ReplicaID: ...

    def make_current(self) -> None:
        """Make code that runs in the current context see this replica as its own."""

    def gone_error(self) -> Exception: ...

    def admit(self, call: Call) -> bool: ...

    async def serve(self, call: Call) -> Any: ...

    def fail(self, call: Call, error: Exception) -> None: ...

    def submit(self, call: Call) -> None: ...

    def cancel(self, call: Call) -> None: ...

    def when_ended(self, call: Call, callback: Callable[[], Any]) -> None: ...

    def release(self, call: Call) -> None: ...


class Work:
    """The code that a call runs on its replica, and what differs by the kind of a call.

    `work(user_code)` is run by the replica, in the call's context. The defaults are those of a call
    by handle; `http.work.HTTPWork` is the work of a request or a WebSocket.

    scope        the ASGI scope of a request; `None` for all other calls
    streamed_at  when the response of a request began to be streamed; 0 if it did not
    answered_at  when the answer to a request with a deadline was sent; 0 if at its work's end
    has_answer   the whole answer was sent, or cut: what still runs is a background task
    is_heard     user code was told that the client is gone
    is_listening user code is to hear from `receive` that its client has left: it has asked, or it
                 is an application that streams in its own way
    ends_with_client
                 it sends a stream of Starlette's or of a method, which ends without being told
    is_unread    the first message of a request is yet to be read, if user code asks for it
    is_bound     its caller chose the replica, so that no other one runs it
    """

    __slots__ = ()
    scope: Scope | None = None
    has_answer: bool = False
    is_heard: bool = False
    is_listening: bool = False
    ends_with_client: bool = False
    is_unread: bool = False
    is_bound: bool = False
    streamed_at: float = 0.0
    answered_at: float = 0.0

    def __call__(self, user_code: Any) -> Awaitable[Any]:
        raise NotImplementedError

    def start(self, call: Call, runner: Runner) -> None:
        """Begin on the replica whose slot the call has. Thread-safe; once for each slot."""
        call.runner = runner
        runner.submit(call)

    def deadline(self, call: Call) -> float | None:
        """Return the deadline of calls that are made in this one."""
        return call.metadata.deadline

    def kind(self, call: Call) -> str:
        """Return the kind of this call; calls of a kind take about as long. "" for none."""
        return call.metadata.method_name

    def title(self, call: Call) -> str:
        """Return the name of this call for people. Thread-safe."""
        return f"{call.metadata.deployment.name}.{call.metadata.method_name}"

    def route(self, call: Call) -> str:
        """Return the route as far as it is known, a template such as "/items/{id}"."""
        return call.metadata.route

    def expire(self, call: Call) -> None:
        """End the call, because its deadline has come. Thread-safe."""
        call.cancel_late()

    def give_up(self, call: Call, error: RayServeException) -> None:
        """End the call with an error, because its replica is stuck. Thread-safe."""
        call.cancel(error)

    def note_answer(self) -> None:
        """Note that the answer is complete, or cut. Called where user code runs."""

    def note_stream(self, *, ends_with_client: bool) -> None:
        """Note whether the stream that begins is one of Starlette's or of a method."""

    def interrupt(self) -> None:
        """Tell the code to stop. Called where it runs, after its task was cancelled."""

    def hear(self, *, is_heard: bool) -> None:
        """Note whether user code in another process was told that the client is gone."""

    def end(self, call: Call, failure: BaseException | None) -> str:
        """Drop what only the run needed, and return the route that the call is counted under."""
        call.release_references()
        return call.metadata.route


EARLY_S = 0.001  # a timer may be this early: uvloop counts in whole ms
NO_WORK = Work()
"""The work of calls that have none yet, or none any more, or that no replica runs."""
NO_CONTEXT = Context()


class Call(Node):
    """One call: a request, a batch, or the load of a model; its state and its answer. Thread-safe.

    work            `work(user_code)` is run by the replica, in `context`
    queue, runner   the router the call waits in, the replica it runs on
    waits_for       the nodes that its user code waits for now, or the calls that it needs to begin
    members         the calls of a batch, which runs as a call of its own; else `None`
    is_interrupted  becomes true when its answer is not wanted any more, or its replica stops
    assigned_at     when it got its slot
    began_at        when its replica began it, before the first line of its user code; 0 till then
    trace_id        of the sampled trace that it belongs to; absent without tracing, see
                    `calls.tracing`
    """

    __slots__ = (
        "_callbacks",
        "_children",
        "_parent",
        "assigned_at",
        "began_at",
        "context",
        "error",
        "is_interrupted",
        "lock",
        "members",
        "metadata",
        "queue",
        "runner",
        "settled",
        "started_at",
        "trace_id",
        "value",
        "work",
    )
    trace_id: str

    def __init__(
        self,
        metadata: RequestMetadata,
        work: Work,
        context: Context,
        members: tuple[Call, ...] | None = None,
        on_settled: Callable[[Call], Any] | None = None,
    ) -> None:
        self.metadata = metadata
        self.members = members
        self.work = work
        self.context = context
        self.queue: Queue | None = None
        self.runner: Runner | None = None
        self.waits_for = NO_NODES
        self.is_awaited = False
        self.is_interrupted = False
        self.settled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.started_at = monotonic()
        self.assigned_at = 0.0
        self.began_at = 0.0
        self.lock = threading.Lock()
        self._callbacks = [] if on_settled is None else [on_settled]
        self._parent: Call | None = None
        self._children: set[Call] | None = None  # not settled yet

    def settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Settle the call with its answer. Returns False if it is settled already."""
        with self.lock:
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
        """Call `callback(call)` once the call is settled, at once if it is. It must not block."""
        with self.lock:
            if not self.settled:
                self._callbacks.append(callback)
                return
        callback(self)

    def _forget(self, callback: Callable[[Call], Any]) -> None:
        with self.lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    @property
    def deadline(self) -> float | None:
        """The deadline of the call's children, in `time.monotonic()` seconds."""
        return self.work.deadline(self)

    def expire(self) -> None:
        """Cancel the call, because its deadline has come. Thread-safe."""
        self._expire_parents()
        self.work.expire(self)

    def cancel_late(self) -> bool:
        """Cancel the call, and count it among those whose deadline has passed.

        Returns False if the call was settled already.
        """
        is_first = self.cancel(self.timeout_error())
        if is_first and self.queue is not None:
            self.queue.note_expired()
        return is_first

    def _expire_parents(self) -> None:
        """Expire the calls that this call was made for, if their deadlines have come too.

        Race with the parents' own timers, which may be on other loops: a parent must expire before
        its child. Else its user code would see a call that failed, and might answer with a 500.
        """
        parent = self._parent
        if parent is not None and self.metadata.deadline is not None:
            for each in (parent,) if parent.members is None else parent.members:
                deadline = each.deadline
                if not each.settled and deadline is not None and deadline <= self.metadata.deadline:
                    each.expire()

    def is_over(self) -> bool:
        """Return whether the call must not begin. Settles it if its deadline has passed."""
        deadline = self.metadata.deadline
        if deadline is not None and not self.settled and monotonic() >= deadline:
            self._expire_parents()
            self.cancel_late()
        return self.settled

    def timeout_error(self) -> RequestTimeoutError:
        assert self.metadata.deadline is not None
        left_s = round(self.metadata.deadline - self.started_at, 6)
        return RequestTimeoutError(self.metadata.request_id, left_s)

    def adopt(self, child: Call) -> None:
        """Have a call that is made in this one cancelled with it. Called before it is submitted.

        A call that is made after this one is settled has no parent: fire and forget, or a call of
        a `finally` block after a cancellation.
        """
        if self.settled:
            return
        if self._children is None:
            with self.lock:  # several worker threads of this call may be here
                if self._children is None:
                    self._children = set()
        child._parent = self
        self._children.add(child)
        # Race with a cancellation in another thread since `settled` was read: it may have gone
        # through the children just before this child was added.
        if self.is_interrupted and self.error is not None:
            child.cancel()

    def cancel(self, error: RayServeException | None = None) -> bool:
        """Settle the call as cancelled, and stop its work and the calls made in it.

        Its caller gets `error`, by default a `RequestCancelledError`. Returns False if the call was
        settled already.
        """
        deadline = self.deadline if error is None else None
        # Race with the timer of this call, for the deadline that it shares with its caller: it was
        # not the caller's decision.
        if deadline is not None and monotonic() >= deadline - EARLY_S:
            return self.cancel_late()
        if not self.settle(error=error or RequestCancelledError(self.metadata.request_id)):
            return False
        self.is_interrupted = True
        # Race with a slot that is being handed over: the replica reads `settled` before it starts
        # the call, so a call that is neither withdrawn from the queue nor cancelled on the replica
        # gives its slot back unused.
        if (self.queue is None or not self.queue.withdraw(self)) and self.runner is not None:
            self.runner.cancel(self)
        return True

    def was_cancelled(self, failure: BaseException | None = None) -> bool:
        """Return whether its caller has cancelled it, or its client has left: no failure.

        `failure` is the error of its work, for a call that is not settled yet. A call that ended at
        its deadline, or because its replica stopped, was not cancelled by its caller.
        """
        if self.settled:
            return type(self.error) is RequestCancelledError or is_disconnect(self.error)
        return is_disconnect(failure)

    def give_up(self, error: RayServeException) -> None:
        """End the call with an error, because its replica is stuck. Thread-safe."""
        self.work.give_up(self, error)

    def family(self) -> set[Call]:
        """Return the calls whose answers hang together with this one's. Thread-safe.

        They are this call, the calls that it was made for, the calls that were made in these and
        have no answer, and the other calls of their batches.
        """
        found: set[Call] = set()
        todo: list[Call | None] = [self]
        while todo:
            each = todo.pop()
            if each is not None and each not in found:
                found.add(each)
                todo += [each._parent, *(each.members or ()), *list(each._children or ())]
        return found

    def interrupt(self) -> None:
        """Tell the work to stop, and cancel the calls made in it.

        Called where the work runs, after its task was cancelled: a child that is settled earlier
        would wake that task with the child's error instead.
        """
        self.is_interrupted = True
        for child in list(self._children or ()):
            child.cancel()
        # Only after the cancellation: user code whose `send` failed earlier would be cleaning up,
        # and the cancellation must not come in the middle of that.
        self.work.interrupt()

    @property
    def app_name(self) -> str:
        """The application that the original request came to."""
        return self.metadata.app_name or self.metadata.deployment.app_name

    @property
    def deployment_name(self) -> str:
        return self.metadata.deployment.name

    def holders(self) -> frozenset[Node] | None:
        """Return the calls with the slots that this call waits for; `None` if it is not queued."""
        return None if self.queue is None else self.queue.holders(self)

    def break_deadlock(self, chain: str, stuck: Set[Node]) -> None:
        if self.queue is not None and self.queue.withdraw(self):
            self.settle(error=RequestCycleError(self.queue.describe_deadlock(chain)))

    def kind(self) -> str:
        """Return the kind of this call; calls of a kind take about as long. "" for none."""
        return self.work.kind(self)

    def title(self) -> str:
        """Return the name of this call for people, also of a request. Thread-safe."""
        return self.work.title(self)

    def current_route(self) -> str:
        """Return the route as far as it is known, a template such as "/items/{id}"."""
        return self.work.route(self)

    def release_references(self) -> None:
        """Drop the references that only the run needed, once it has ended.

        Otherwise, in a chain of calls that each start the next one as their last act, the last
        would keep all earlier calls alive, with their arguments.
        """
        self.work, self.context = NO_WORK, NO_CONTEXT

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
            waiter = begin_wait(self)
            try:
                await wakeup.wait()
            finally:
                end_wait(self, waiter)

    def wait_blocking(self, timeout_s: float | None = None) -> bool:
        """Wait for the answer in a thread without a loop. Returns False after `timeout_s`."""
        if not self.settled:
            event = threading.Event()

            def wake(_: Call) -> None:
                event.set()

            self.when_settled(wake)
            waiter = begin_wait(self)
            try:
                if not event.wait(timeout_s):
                    self._forget(wake)  # repeated waits must not collect callbacks here
                    return False
            finally:
                end_wait(self, waiter)
        return True


def begin_wait(node: Node, waiter: Call | None = None) -> Call | None:
    """Note that `waiter`, by default the current call, waits for a node; return the waiter.

    Raises `RequestCycleError` if the node is a running call that waits for the waiter.
    """
    waiter = waiter or CURRENT_CALL.get(None)
    if waiter is not None:
        with waiter.lock:  # its user code may wait in several threads
            if not isinstance(waiter.waits_for, set):
                waiter.waits_for = set()
            waiter.waits_for.add(node)
        # Race with `Router.assign`, for a call that waits for its arguments: `assign` reads this
        # flag after it has queued the call, so one of the two sees both.
        node.is_awaited = True
        error = check_deadlock(node)
        if error is not None:
            end_wait(node, waiter)
            raise error
    return waiter


def end_wait(node: Node, waiter: Call | None) -> None:
    """Note that `waiter`, from `begin_wait`, waits for the node no longer."""
    if waiter is not None:
        with waiter.lock:
            assert isinstance(waiter.waits_for, set)
            waiter.waits_for.discard(node)
            other = next(iter(waiter.waits_for), None)
        # This node may have been the only one of them that could still end.
        if other is not None:
            check_deadlock(other)


def when_all_settled(calls: Sequence[Call], then: Callable[[], Any]) -> None:
    """Call `then()` once all of the calls, at least one, are settled. It must not block."""
    left = len(calls)
    lock = threading.Lock()  # calls are settled in any thread, even at the same moment

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
    """A view of a request's cancellation, for code that cannot be cancelled from outside.

    Thread-safe: pass it to the thread that does the work.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Call | None) -> None:
        self._call = call

    @property
    def requested(self) -> bool:
        """Return whether to stop: the client left, the caller cancelled, or the replica stops."""
        return self._call is not None and self._call.is_interrupted

    def check(self) -> None:
        """Raise `RequestCancelledError` if `requested`; its cause is the error of the call."""
        if self._call is not None and self._call.is_interrupted:
            raise RequestCancelledError(self._call.metadata.request_id) from self._call.error

    def __repr__(self) -> str:
        return f"Cancellation(requested={self.requested})"


def cancellation() -> Cancellation:
    """Return the cancellation of the request that the running code works for.

    Works in `async def`, `def`, generators, `asyncio.to_thread` and tasks that the request has
    started. Outside of a request, `requested` is never true.
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
    """Return `current_calls()`, and the call of their batch, which may outlive all of them."""
    call = CURRENT_CALL.get(None)
    if call is None:
        return ()
    return (call,) if call.members is None else (*call.members, call)
