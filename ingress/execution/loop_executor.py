"""What `asyncio.to_thread` and `run_in_executor(None, ...)` use on a user loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from ingress.execution.threads import WorkerThreads

T = TypeVar("T")


class LoopExecutor(ThreadPoolExecutor):
    """The default executor of a user loop.

    `asyncio.to_thread` and `run_in_executor(None, ...)` are what the guides recommend; the
    standard executor's threads are joined by the interpreter at exit, so one stuck call would keep
    the process. `run_in_executor` gets a copy of the current context too. The standard class is
    only the type asyncio insists on.
    """

    def __init__(self, name: str, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        self._ingress_threads = WorkerThreads(name, limit, loop)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        context = copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(fn, *args, **kwargs)
            except StopIteration as error:
                # asyncio cannot carry it to the awaiting task, which would then wait for ever.
                stopped = RuntimeError("a call in a thread raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._ingress_threads.submit(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept nothing more. Never waits: `asyncio.run` would wait for a stuck call."""
        self._ingress_threads.close()

    def retire_idle(self) -> None:
        """Let idle threads end now."""
        self._ingress_threads.retire_idle()

    def join(self, timeout_s: float) -> bool:
        return self._ingress_threads.join(timeout_s)


_lent: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopExecutor]] = (
    weakref.WeakKeyDictionary()
)
_lent_lock = threading.Lock()


def lend_executor(loop: asyncio.AbstractEventLoop) -> LoopExecutor:
    """Make a `LoopExecutor` the default executor of a loop that is not ours, once, for its life.

    The loop keeps it; stopping our use of the loop lets its idle threads go, no more.
    """
    with _lent_lock:
        lent = _lent.get(loop)
        executor = lent() if lent is not None else None
        if executor is None:
            executor = LoopExecutor("ingress-executor", 32, loop)
            loop.set_default_executor(executor)
            _lent[loop] = weakref.ref(executor)
        return executor
