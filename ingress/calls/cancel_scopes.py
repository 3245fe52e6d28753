"""Cancelling a task once, where AnyIO would do it repeatedly, or not at all.

AnyIO cancels the code in a cancelled scope at every turn of the loop, unless an inner scope shields
it: AnyIO shields its waits for threads, and user code may shield, too. `Task.cancel` comes once,
and goes through a shield: a thread then runs on while no task waits for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ingress.calls.compat import CancelScope, task_states


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
        inner: CancelScope | None = task_states[task].cancel_scope
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
    state = task_states.get(task)
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
