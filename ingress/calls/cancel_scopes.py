"""Cancelling a task once, where AnyIO would do it again and again, or not at all.

AnyIO cancels what is in a cancelled scope at every turn of the loop, unless a scope inside shields
it: around the threads it waits for, and where users ask for that. `Task.cancel` comes once, and
goes through a shield: a thread then runs on with nobody who waits for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from anyio._backends._asyncio import CancelScope, _task_states


class OnceScope(CancelScope):
    """A scope that passes its parent's cancellation on to its task once.

    Overrides where AnyIO delivers and counts; without it, AnyIO's way is what remains.
    """

    __slots__ = ()

    @property
    def is_cancelled(self) -> bool:
        return self.shield  # nothing else shields it

    def __exit__(self, *failure: Any) -> bool:
        # Race with the parent task's own cancellation: what a scope inside could not take back of
        # our task's cancellations AnyIO hands on outwards, and the parent would take it from its
        # own task's, and with it the sign that somebody asked for that one. Ours ends here anyway.
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
        # First: AnyIO's own functions wait, in a cancelled scope, for it to cancel them.
        self._cancel_called = False
        self._shield = True
        # Not with AnyIO's message: a scope inside would take this for a cancellation of its own.
        task.cancel()
        return False


def cancel_once(task: asyncio.Task[Any]) -> None:
    """Cancel a task, now or when it leaves what shields it. Call it on the task's loop."""
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
    # A cancelled scope round all that it is in, which AnyIO finds when the shield ends.
    around = OnceScope()
    around._host_task = task
    around._cancel_called = True
    around._child_scopes.add(outermost)
    outermost._parent_scope = around
