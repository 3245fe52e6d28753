"""The executor of `asyncio.to_thread` and `run_in_executor(None, ...)` on a user loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from ingress.core.execution.threads import IDLE_S, MakeThreads, WorkerThreads

T = TypeVar("T")


class LoopExecutor(ThreadPoolExecutor):
    """The default executor of a user loop.

    The guides recommend `asyncio.to_thread` and `run_in_executor(None, ...)`. The interpreter joins
    the standard executor's threads at exit, so one stuck call would keep the process alive. Here
    `run_in_executor` gets a copy of the current context, too. The standard class is the base only
    because asyncio requires it.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        loop: asyncio.AbstractEventLoop,
        make_threads: MakeThreads = WorkerThreads,
    ) -> None:
        self._ingress_threads = make_threads(name, limit, loop, IDLE_S)

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        future: Future[T] = Future()
        context = copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(fn, *args, **kwargs)
            except StopIteration as error:
                # asyncio cannot pass it to the awaiting task, which would then wait for ever.
                stopped = RuntimeError("a call in a thread raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:  # as `concurrent.futures`: the awaiting task gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._ingress_threads.submit(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls. Never waits: `asyncio.run` would wait for a stuck call."""
        self._ingress_threads.close()

    @property
    def is_alive(self) -> bool:
        """Return whether one of its threads is alive, also after `shutdown`."""
        return self._ingress_threads.are_alive

    def retire_idle(self) -> None:
        """Make idle threads end now."""
        self._ingress_threads.retire_idle()

    def join(self, timeout_s: float) -> bool:
        return self._ingress_threads.join(timeout_s)


_lent: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopExecutor]] = (
    weakref.WeakKeyDictionary()
)
_lent_lock = threading.Lock()


def lend_executor(loop: asyncio.AbstractEventLoop) -> LoopExecutor:
    """Make a `LoopExecutor` the default executor of a borrowed loop, once, for the loop's life.

    The loop keeps the executor. When the framework stops using the loop, only idle threads end.
    """
    with _lent_lock:
        lent = _lent.get(loop)
        executor = lent() if lent is not None else None
        if executor is None:
            executor = LoopExecutor("ingress-executor", 32, loop)
            loop.set_default_executor(executor)
            _lent[loop] = weakref.ref(executor)
        return executor
