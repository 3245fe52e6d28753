"""The private names of AnyIO; no other module uses one. Without them nothing is imported.

AnyIO has no public way to cancel a task once, or to run a thread of our own as one of its worker
threads, from which `anyio.from_thread.run` works.

AnyIO cancels the code in a cancelled scope at every turn of the loop, unless an inner scope shields
it: AnyIO shields its waits for threads, and user code may shield, too. `Task.cancel` comes once,
and goes through a shield: a thread then runs on while no task waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ingress.core.base.private_names import require, unsupported

SUPPORTED = ">=4.11,<5"

require(
    "anyio",
    SUPPORTED,
    (
        "anyio._backends._asyncio:AsyncIOBackend",
        "anyio._backends._asyncio:CancelScope._deliver_cancellation",
        "anyio._backends._asyncio:WorkerThread._report_result",
        "anyio._backends._asyncio:_task_states",
        "anyio._core._eventloop:claim_worker_thread",
        "anyio._core._eventloop:threadlocals",
    ),
)

from anyio._backends._asyncio import (  # noqa: E402 - after the check
    AsyncIOBackend,
    CancelScope,
    WorkerThread,
    _task_states,
)
from anyio._core._eventloop import claim_worker_thread, threadlocals  # noqa: E402

__all__ = [
    "AsyncIOBackend",
    "CancelScope",
    "OnceScope",
    "Visitors",
    "cancel_once",
    "claim_worker_thread",
    "convert_errors",
    "group_of_middleware",
    "threadlocals",
]

_FIELDS = (
    "_cancel_called", "_child_scopes", "_host_task", "_parent_scope", "_pending_uncancellations",
    "_shield", "_tasks",
)  # fmt: skip
_scope = CancelScope()
_missing = [f"CancelScope.{name}" for name in _FIELDS if not hasattr(_scope, name)]
if _missing:
    raise unsupported("anyio", SUPPORTED, _missing)


class OnceScope(CancelScope):
    """A scope that passes its parent's cancellation on to its task once.

    It overrides the methods in which AnyIO delivers and counts cancellations. Without the
    overrides, AnyIO's own behaviour remains.
    """

    __slots__ = ()

    @property
    def is_cancelled(self) -> bool:
        return self.shield  # only `_deliver_cancellation` sets it

    def __exit__(self, *failure: Any) -> bool:
        # Race with the parent task's own cancellation: AnyIO hands the cancellations of this task
        # that an inner scope could not take back on to the outer scope. The parent would subtract
        # them from its own task's count, and lose the sign that its own cancellation was requested.
        # This task ends here anyway.
        self._pending_uncancellations = 0
        return super().__exit__(*failure)

    def _deliver_cancellation(self, origin: CancelScope) -> bool:
        task = self._host_task
        assert task is not None
        inner: CancelScope | None = _task_states[task].cancel_scope
        while inner is not None and inner is not self:
            if inner.shield:
                return False  # AnyIO asks again when that scope ends
            inner = inner._parent_scope
        # First, because in a cancelled scope AnyIO's own functions wait for it to cancel them.
        self._cancel_called = False
        self._shield = True
        # Without AnyIO's message: an inner scope would take this for a cancellation of its own.
        task.cancel()
        return False


def cancel_once(task: asyncio.Task[Any]) -> None:
    """Cancel a task, now or when it leaves its shield. Called on the task's loop."""
    state = _task_states.get(task)
    scope = None if state is None else state.cancel_scope
    is_shielded = False
    outermost: CancelScope | None = None
    while scope is not None:
        is_shielded = is_shielded or scope.shield
        outermost, scope = scope, scope._parent_scope
    if outermost is None or not is_shielded:
        task.cancel()
        return
    # A cancelled scope around all scopes of the task, which AnyIO finds when the shield ends.
    around = OnceScope()
    around._host_task = task
    around._cancel_called = True
    around._child_scopes.add(outermost)
    outermost._parent_scope = around


def group_of_middleware(task: asyncio.Task[Any]) -> CancelScope | None:
    """Return the scope in which another task runs the app below a middleware; `None` without one.

    The `OnceScope` of that other task tells it from a task group of the user's.
    """
    state = _task_states.get(task)
    scope = None if state is None else state.cancel_scope
    while scope is not None and scope._host_task is task:
        inner = [*scope._child_scopes]
        for each in inner:
            if type(each) is OnceScope and each._host_task is not task:
                return scope
            inner += each._child_scopes
        scope = scope._parent_scope
    return None


class Visitors(set["asyncio.Task[Any]"]):
    """The coroutines that a worker thread runs on the loop, with `anyio.from_thread.run`.

    AnyIO adds them to the tasks of the thread's scope, and cancels them with the task inside the
    scope. No task enters the scope of a `Work`, so this set replaces the scope's tasks when the
    scope is cancelled. A coroutine added later would otherwise wait for ever, in AnyIO's functions,
    for its cancellation.
    """

    __slots__ = ("_loop", "_scope")

    def __init__(self, scope: CancelScope, loop: asyncio.AbstractEventLoop) -> None:
        # Not those on a loop of the user's, given with `token=`: that loop is the user's own.
        super().__init__(task for task in list(scope._tasks) if task.get_loop() is loop)
        self._scope = scope
        self._loop = loop
        scope._tasks = self

    def cancel(self) -> None:
        self._scope.cancel()
        self._scope._deliver_cancellation(self._scope)

    def add(self, task: asyncio.Task[Any], /) -> None:
        """Add a task. Called on the task's own loop."""
        if task.get_loop() is self._loop:
            super().add(task)
            self._scope._deliver_cancellation(self._scope)


_report_result = WorkerThread._report_result


def convert_errors(convert: Callable[[BaseException], BaseException]) -> None:
    """Have AnyIO's own threads report `convert(error)` in the place of an error.

    AnyIO reads the error's class first. If that raises, the future is never set, and the code that
    awaits it (a background task, a dependency, an exception handler) holds its slot for ever.
    """

    def report(
        self: WorkerThread, future: asyncio.Future[Any], result: Any, exc: BaseException | None
    ) -> None:
        _report_result(self, future, result, None if exc is None else convert(exc))

    WorkerThread._report_result = report  # type: ignore[method-assign]
