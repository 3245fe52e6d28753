"""One request, from its submission to its one answer.

    resolving its arguments -> waiting in the router -> running on a replica -> settled
                                     `cancel` may come at any point

Whoever settles it first wins; the slot is another matter and follows the work, not the answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from time import monotonic
from typing import Any, Protocol

from ingress.exceptions import RequestCancelledError
from ingress.loops import Wakeup
from ingress.types import RequestMetadata


class Queue(Protocol):
    """What a call needs of the router it waits in."""

    def withdraw(self, call: Call) -> bool: ...

    def check_cycle(self, call: Call) -> None: ...


class Runner(Protocol):
    """What a call needs of the replica it runs on."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    async def serve(self, call: Call) -> Any: ...

    def submit(self, call: Call) -> None: ...

    def cancel(self, call: Call) -> None: ...

    def release(self, call: Call) -> None: ...


class Call:
    """Thread-safe.

    `work(user_code)` is what the replica runs, in `context`. `parent` is the call whose user code
    made this one. `queue` and `runner` say where it is; `holds_slot` is written under the router's
    lock. `is_awaited` becomes true when somebody waits for the answer.
    """

    __slots__ = (
        "_callbacks",
        "_lock",
        "context",
        "error",
        "holds_slot",
        "is_awaited",
        "metadata",
        "parent",
        "queue",
        "route",
        "runner",
        "settled",
        "started_at",
        "task",
        "value",
        "work",
    )

    def __init__(
        self,
        metadata: RequestMetadata,
        work: Callable[[Any], Awaitable[Any]] | None,
        context: Context,
        parent: Call | None = None,
    ) -> None:
        self.metadata = metadata
        self.route = metadata.route
        self.work = work
        self.context = context
        self.parent = parent
        self.queue: Queue | None = None
        self.runner: Runner | None = None
        self.task: asyncio.Task[Any] | None = None
        self.holds_slot = False
        self.is_awaited = False
        self.settled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.started_at = monotonic()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Call], Any]] = []

    def start(self, runner: Runner) -> None:
        """Begin on the replica whose slot it was given. Called once, in any thread."""
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

    def cancel(self) -> bool:
        """Settle as cancelled and stop the work where it is. Returns False if it was settled."""
        if not self.settle(error=RequestCancelledError(self.metadata.request_id)):
            return False
        # Race with a slot that is being handed over: the replica looks at `settled` before it
        # starts, so a call that is neither withdrawn here nor cancelled there gives its slot back
        # unused.
        if (self.queue is None or not self.queue.withdraw(self)) and self.runner is not None:
            self.runner.cancel(self)
        return True

    def outcome(self) -> Any:
        """Return or raise the answer."""
        if self.error is not None:
            raise self.error
        return self.value

    async def wait(self) -> None:
        """Wait for the answer on the running loop."""
        if not self.settled:
            self._about_to_wait()
            wakeup = Wakeup(asyncio.get_running_loop())
            self.when_settled(wakeup.wake)
            await wakeup.wait()

    def wait_blocking(self, timeout_s: float | None = None) -> bool:
        """Wait for the answer in a thread without a loop. Returns False after `timeout_s`."""
        if not self.settled:
            self._about_to_wait()
            event = threading.Event()
            self.when_settled(lambda _: event.set())
            return event.wait(timeout_s)
        return True

    def _about_to_wait(self) -> None:
        self.is_awaited = True
        if self.parent is not None and self.queue is not None:
            self.queue.check_cycle(self)


CURRENT_CALL: ContextVar[Call] = ContextVar("ingress_call")
