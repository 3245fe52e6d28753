"""`leak_check`: a test must end with the threads, file descriptors, tasks and slots of its start.

thread    of this process
fd        an open file, socket or event loop; where the system lists them (not Windows)
task      on the loops of the running replicas, and on the running loop
slot      a call that runs on a replica, also if its caller has left
queue     a call that waits for a slot
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from time import monotonic, sleep
from types import TracebackType

from ingress.core.calls.loops import EventLoopThread, running_loop
from ingress.engines import local_engine

GRACE_S = 2.0
_PAUSE_S = 0.01
_CONTROL = "ingress-control"
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


@dataclass(eq=False, slots=True)
class LeakCheck:
    """A context manager that keeps the resources at its start, and raises if more are left."""

    _grace_s: float
    _is_off: bool = False
    _before: frozenset[str] = frozenset()

    def forgive(self) -> None:
        """Switch the check off, because the test has failed already."""
        self._is_off = True

    def left(self) -> list[str]:
        """Return the resources that were not there at the start."""
        return sorted(frozenset(_held()) - self._before)

    def __enter__(self) -> LeakCheck:
        if running_loop() is not None:
            raise RuntimeError(
                "a leak check has to let this event loop go on while it waits for tasks to end; "
                "use `async with leak_check():`"
            )
        return self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        deadline = monotonic() + self._grace_s
        while kind is None and self._waits(deadline):
            sleep(_PAUSE_S)

    async def __aenter__(self) -> LeakCheck:
        return self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        deadline = monotonic() + self._grace_s
        while kind is None and self._waits(deadline):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)

    def _begin(self) -> LeakCheck:
        _have_signal_pipe()
        self._before = frozenset(_held())
        return self

    def _waits(self, deadline: float) -> bool:
        """Return whether resources are left that may still end in time.

        Raises `AssertionError` if the time is over. The resources are read before the clock, so
        that a late end still counts.
        """
        if self._is_off or not (left := self.left()):
            return False
        if monotonic() >= deadline:
            raise AssertionError(f"left behind: {left}")
        return True


def leak_check(grace_s: float = GRACE_S) -> LeakCheck:
    """Return a context manager that fails a test which leaves resources behind.

        with leak_check():
            with TestClient(app) as client:
                ...

    New threads, file descriptors, tasks, slots and places in a queue may take `grace_s` to end.
    After that it raises `AssertionError` with a list of them. A body that raises is not checked.
    Use `async with` on a running event loop.
    """
    return LeakCheck(grace_s)


@cache
def _have_signal_pipe() -> None:
    """Open the pipe that libuv keeps from the process's first event loop on: it is not a leak."""
    EventLoopThread("first loop").stop(GRACE_S)


def _held() -> Iterator[str]:
    threads = threading.enumerate()
    if any(each.name == _CONTROL for each in threads):
        # Threads of a pool of the engine, which joins the threads of replicas in them: idle, they
        # end after ten seconds, or with the engine.
        threads = [each for each in threads if not each.name.startswith(f"{_CONTROL}-worker-")]
    yield from (f"thread {each.name} ({each.ident})" for each in threads)
    yield from _descriptors()
    running = running_loop()
    loops = {} if running is None else {running: "this event loop"}
    for deployment, router in list(local_engine().routers.items()):
        yield from (f"slot {number} of {deployment}" for number in range(router.num_ongoing))
        queued = range(router.num_queued)
        yield from (f"place {number} in the queue of {deployment}" for number in queued)
        loops |= {each.loop: str(each.replica_id) for each in list(router.replicas)}
    for loop, name in loops.items():
        for task in asyncio.all_tasks(loop):
            code = getattr(task.get_coro(), "__qualname__", "?")
            yield f"task {task.get_name()} on {name}: {code}"


def _descriptors() -> Iterator[str]:
    try:
        numbers = os.listdir(_DESCRIPTORS)
    except OSError:  # Windows
        return
    for number in numbers:
        try:
            yield f"fd {number} {os.readlink(f'{_DESCRIPTORS}/{number}')}"
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        except OSError:  # macOS: no links, but numbers
            yield f"fd {number}"
