"""The watchdog's thread. It runs from the first watched loop to the last."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from time import localtime, monotonic, strftime
from types import FrameType

from ingress.core.base.signals import handling
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.telemetry.watchdog import stacks
from ingress.telemetry.watchdog.loop_probe import LoopProbe, Watched
from ingress.telemetry.watchdog.records import QUIET_S, Stall, StallLog, Stalls
from ingress.telemetry.watchdog.sampler import Sampler
from ingress.telemetry.watchdog.stacks import Stack

logger = logging.getLogger("ingress")


class Watchdog:
    """The thread that watches event loops. One per process. Thread-safe."""

    __slots__ = (
        "_is_asked",
        "_is_stopping",
        "_lock",
        "_log",
        "_loops",
        "_running",
        "_thread",
        "_threshold_s",
        "_told",
    )

    def __init__(self) -> None:
        self._log = StallLog()
        self._told: deque[Stall] = deque(maxlen=self._log.recent.maxlen)
        self._forget_threads()
        if hasattr(os, "register_at_fork"):
            # The child has none of the parent's threads, and its copy of the lock may be held
            # forever.
            os.register_at_fork(after_in_child=self._forget_threads)

    def _forget_threads(self) -> None:
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, LoopProbe] = {}
        self._thread: threading.Thread | None = None
        self._running = threading.Lock()
        self._is_stopping = False
        self._threshold_s = 0.0
        self._is_asked = False

    def watch(self, loop: asyncio.AbstractEventLoop, owner: Watched, threshold_s: float) -> None:
        """Watch the loop of `owner`. Call this on that loop, so that its thread is known.

        The threshold of the first loop holds for all.
        """
        with self._lock:
            if (probe := self._loops.get(loop)) is None:
                probe = self._loops[loop] = LoopProbe(loop)
            probe.owners[owner] = None
            if self._thread is None or self._is_stopping:
                # Held until the thread must stop. A wait for a lock costs half as much as a wait
                # for an `Event`, and these waits are most of the watchdog's cost.
                self._running = threading.Lock()
                self._running.acquire()
                self._is_stopping = False
                self._threshold_s = threshold_s
                self._thread = threading.Thread(
                    target=self._main,
                    args=(self._running, self._thread, threshold_s),
                    name="ingress-watchdog",
                    daemon=True,
                )
                Context().run(self._thread.start)

    def unwatch(self, loop: asyncio.AbstractEventLoop, owner: Watched) -> None:
        """Stop watching a loop, unless it has other owners. No effect if it is not watched."""
        with self._lock:
            if (probe := self._loops.get(loop)) is None or owner not in probe.owners:
                return
            if len(probe.owners) > 1:
                del probe.owners[owner]
            else:  # the probe keeps its last owner: a current stall must still be reported
                self._stop_watching(loop)

    def _stop_watching(self, loop: asyncio.AbstractEventLoop) -> None:
        del self._loops[loop]
        if not self._loops:
            self._is_stopping = True
            self._running.release()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, if no loop is watched any more."""
        with self._lock:
            ending = self._thread if self._is_stopping else None
        if ending is not None:
            ending.join(timeout_s)

    def stalls(self) -> list[Stall]:
        """Return the recent stalls, the latest last, and after them the current stalls."""
        told = [*self._told.copy()]  # `list(deque)` is not one step without the GIL
        stalls = self.own_stalls()
        if not told:
            return stalls
        over = [each for each in stalls if each.is_over] + told
        over.sort(key=lambda each: each.began_at_s + each.duration_ms / 1e3)
        return over + [each for each in stalls if not each.is_over]

    def own_stalls(self) -> list[Stall]:
        """Return those of this process: no stalls of replicas in child processes."""
        current = []
        for probe in list(self._loops.values()):
            # Race with the watchdog, which keeps a stall before it clears `asked_at`: this looks at
            # the loop first, at the kept stalls then, and drops what it has seen twice. A stall
            # whose loop has answered counts here as current, until the watchdog has judged it.
            asked_at, answered_at = probe.asked_at, probe.answered_at
            if asked_at is None:
                continue
            stood_s = (monotonic() if answered_at is None else answered_at) - asked_at
            if stood_s >= self._threshold_s:
                stall, _ = probe.judge(stood_s, [], is_over=False)
                if stall is not None and probe.asked_at == asked_at:
                    current.append(stall)
        found = [*self._log.recent.copy()]
        kept = {each.began_at_s for each in found}
        return found + [each for each in current if each.began_at_s not in kept]

    def note(self, stalls: list[Stall]) -> None:
        """Add stalls of another process, which has logged them. Thread-safe."""
        self._told.extend(stalls)
        for each in stalls:
            self._log.worst.add(each)

    def worst(self, at_s: float) -> list[Stalls]:
        """Return the stalls since a moment in Unix time, by replica and line, the longest first.

        At most 15 minutes back, and without those that go on. Thread-safe.
        """
        return self._log.worst.since(at_s)

    @property
    def processor_wait_s(self) -> float:
        """The seconds for which its thread was ready to run and had no processor. Thread-safe."""
        return self._log.processor_wait_s

    def thread_of(self, loop: asyncio.AbstractEventLoop) -> int:
        """Return the ident of the thread of a watched loop; 0 if it is not known."""
        probe = self._loops.get(loop)
        return 0 if probe is None else probe.thread_id

    def standing(self, loop: asyncio.AbstractEventLoop) -> tuple[int, Stack] | None:
        """Return the heartbeats that a loop has answered, and its stack, while one has no answer.

        `None` for a loop that turns, waits for events, or is not watched. A loop that stands still
        has answered as many heartbeats each time.
        """
        probe = self._loops.get(loop)
        # Race with the watchdog, which clears `answered_at` before it sets `asked_at`, and with the
        # loop, which answers: an answer in between only makes this `None`, or the count grow.
        if probe is None or probe.asked_at is None or probe.answered_at is not None:
            return None
        seen = [each.stack for each in list(probe.samples) if not each.is_idle]
        return probe.beats, seen[-1] if seen else stacks.EMPTY

    def reporting_on_signal(self) -> AbstractContextManager[None]:
        """Make SIGUSR1 log the stalls, unless it has a handler or this is not the main thread."""
        return handling("SIGUSR1", self._on_signal) if self._loops else nullcontext()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only set a flag: the line that the signal interrupts may hold any lock.
        self._is_asked = True

    def _main(
        self, running: threading.Lock, previous: threading.Thread | None, threshold_s: float
    ) -> None:
        if previous is not None:
            previous.join()  # it may be in the middle of its last look
        sampler = Sampler(threshold_s, self._log)
        GIL_PRESSURE.begin()
        pause_s = 0.0
        while not running.acquire(timeout=pause_s):
            try:
                pause_s = sampler.look(self._open_loops())
                if self._is_asked:
                    self._is_asked = False
                    logger.warning("%s", self._report())
            except Exception:
                logger.exception("the watchdog of event loops failed; it resumes in a minute")
                pause_s = QUIET_S
        sampler.look([])  # reports current stalls, whose loops are no longer watched
        GIL_PRESSURE.end()

    def _open_loops(self) -> list[LoopProbe]:
        for loop in list(self._loops):
            if loop.is_closed():  # its owner closed it without `unwatch`
                with self._lock:
                    if loop in self._loops:
                        self._stop_watching(loop)
        return list(self._loops.values())

    def _report(self) -> str:
        lines = ["recent stalls of event loops:"]
        for stall in self.stalls():
            lines.append(f"{strftime('%H:%M:%S', localtime(stall.began_at_s))} {stall}")
            if not stall.is_over:
                lines += [f"    {place}" for place in stall.stack]
        return "\n".join(lines) if len(lines) > 1 else "no recent stalls of event loops"
