"""The watchdog's look at every loop, and the state that it keeps until the next look.

A watchdog that wakes late waited for the GIL, and so did every loop: the threads that ran meanwhile
are the cause. Or the process was stopped, or the machine slept; then no thread is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from math import inf
from threading import get_native_id
from time import monotonic, thread_time
from types import FrameType

from ingress.context import REPLICA
from ingress.core.base import gil
from ingress.core.base.counters import Latency
from ingress.core.calls.tracing import TRACING, note_stall
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.telemetry.watchdog import stacks
from ingress.telemetry.watchdog.clocks import (
    ENOUGH_WAITS,
    GILWait,
    ProcessorWait,
    ThreadClocks,
    processor_wait_s,
)
from ingress.telemetry.watchdog.loop_probe import BusyThread, LoopProbe
from ingress.telemetry.watchdog.records import StallLog, StallReason
from ingress.telemetry.watchdog.stacks import Stack

_LONG = 50  # times the threshold; then a stall is logged while it lasts, and again at its end
_LOOKS = 4  # per threshold while requests are in flight; else half as many
_SHORTEST_PAUSE_S = 0.005
_LONGEST_LOOK_S = 0.005  # CPU time that is counted; more than that is not the look's own
_SAMPLE_S = 0.01  # between samples of a stalled loop, or a twentieth of the stall if longer
_SHARE = 0.01  # of one processor, at most, for any number of threads
_AVERAGE = 16  # looks
_MANY = 100  # threads; above, only the clocks of threads that seem to run are read
_SCARCE_S = 0.001  # that a look waits for a processor: others compete for them
_HOLDS = 0.1  # share of a stall that all runners need, and each of the longest runner's time

ThreadFrames = Mapping[int, FrameType]


class Sampler:
    """The watchdog's looks at its loops. Owned by the watchdog's thread."""

    __slots__ = (
        "_clocks", "_cost_s", "_due", "_gil", "_log", "_look_s", "_looked_at", "_loops", "_native",
        "_scarce_until", "_standing", "_threads", "_threshold_s", "_waited_s",
    )  # fmt: skip

    def __init__(self, threshold_s: float, log: StallLog) -> None:
        self._threshold_s = threshold_s
        self._look_s = max(threshold_s / _LOOKS, _SHORTEST_PAUSE_S)
        self._log = log
        self._threads = ThreadClocks()
        self._clocks: dict[int, float] = {}
        self._gil = GILWait()
        self._native = get_native_id()
        self._waited_s = processor_wait_s(self._native) or 0.0
        self._scarce_until = 0.0
        self._due = inf
        self._looked_at = 0.0
        self._cost_s = 0.0
        self._standing: set[LoopProbe] = set()
        self._loops: list[LoopProbe] = []

    def look(self, loops: list[LoopProbe]) -> float:
        """Look at each loop. Returns how many seconds to wait until the next look."""
        self._loops = loops
        cost_s = thread_time()
        now = monotonic()
        late_s = now - self._due
        frames = self._frames(now)
        before, self._clocks = self._clocks, self._read_clocks(frames)
        waits = self._gil.since_last()
        took_s, self._looked_at = now - self._looked_at, now
        if waits > 1 or GIL_PRESSURE.is_high:
            # Before `note`: a replica that sees high pressure then finds the shares of that look.
            ran = self._ran_since(before, took_s)
            GIL_PRESSURE.shares = {ident: ran_s / took_s for ident, ran_s in ran.items()}
        GIL_PRESSURE.note(waits, late_s, now)
        waited_for_gil = waits >= ENOUGH_WAITS
        if waited_for_gil and late_s >= self._look_s:  # longer than one turn
            for each in loops:
                each.starved_s += late_s
        waited_s = processor_wait_s(self._native) or 0.0
        scarce_s, self._waited_s = waited_s - self._waited_s, waited_s
        self._log.processor_wait_s = waited_s
        if scarce_s >= _SCARCE_S:
            self._scarce_until = now + 1.0
        for each in loops:
            each.scarce_s += scarce_s
        if late_s >= self._threshold_s:
            if waited_for_gil:
                self._all_stood(frames, before, late_s)
            elif scarce_s < late_s / 2:
                for each in loops:
                    each.forgive(now)
        for each in loops:
            self._look_at(each, frames)
        for each in self._standing.difference(loops):  # unwatched in the middle of a stall
            if each.asked_at is None:  # its answer was forgiven
                self._standing.discard(each)
            else:
                self._end(each, frames, monotonic())
        now = monotonic()
        # An average, because one look may have to log, or to run the garbage collector.
        cost_s = min(thread_time() - cost_s, _LONGEST_LOOK_S)
        self._cost_s += (cost_s - self._cost_s) / _AVERAGE
        pause_s = max(self._pause_s(now), self._cost_s / _SHARE)
        self._due = now + pause_s
        return pause_s

    def _frames(self, now: float) -> ThreadFrames:
        """Return the frames of all threads; without the GIL, only if a sample of a loop is due.

        Python stops all threads to read them, and a thread in a long C call stops late.
        """
        if gil.is_on() or any(
            each.asked_at is not None
            and each.answered_at is None
            and now - each.asked_at >= self._threshold_s / 2
            and now >= each.see_at
            for each in self._loops
        ):
            return stacks.current_frames()
        return {}

    def _ran_since(self, before: Mapping[int, float], took_s: float) -> dict[int, float]:
        """Return how long each thread has run; one that was not known before, perhaps all along."""
        return {
            ident: ran_s - before[ident] if ident in before else min(ran_s, took_s)
            for ident, ran_s in self._clocks.items()
        }

    def _pause_s(self, now: float) -> float:
        if not self._standing:
            return self._look_s if any(each.ongoing for each in self._loops) else 2 * self._look_s
        next_s = min(each.see_at for each in self._standing) - now
        return min(max(next_s, _SHORTEST_PAUSE_S), self._look_s)

    def _look_at(self, loop: LoopProbe, frames: ThreadFrames) -> None:
        now = monotonic()
        if loop.asked_at is not None:
            answered_at = loop.answered_at  # read once: the answer may come at any time
            if answered_at is None and loop.loop.is_running():
                stood_s = now - loop.asked_at
                if loop.processors is None:
                    self._read_processors(loop)
                if now >= loop.see_at and (frames or gil.is_on()):
                    loop.see(frames.get(loop.thread_id))
                    apart_s = max(_SAMPLE_S, stood_s / 20)
                    loop.see_at = now + (apart_s if gil.is_on() else max(apart_s, stood_s))
                self._standing.add(loop)
                is_stall = stood_s >= self._threshold_s
                if is_stall and TRACING.tracer is not None and not loop.was_traced:
                    loop.was_traced = True
                    self._trace(loop, frames, stood_s)
                if stood_s >= _LONG * self._threshold_s and not loop.was_reported:
                    loop.was_reported = True
                    self._report(loop, frames, stood_s, is_over=False)
                return
            self._end(loop, frames, answered_at or now)
        # A loop that waits is not woken: it could run a new callback at once. Without the GIL its
        # frame is not read, so each loop with a request is woken.
        waits = loop.is_idle(frames.get(loop.thread_id)) if gil.is_on() else not loop.ongoing
        if loop.loop.is_running() and not waits:
            loop.begin(self._clocks)
            if now < self._scarce_until:  # else it costs too much for each heartbeat
                self._read_processors(loop)
            loop.ask()

    def _read_processors(self, loop: LoopProbe) -> None:
        if native := self._threads.native(loop.thread_id):
            loop.processors = ProcessorWait.read(native)

    def _trace(self, loop: LoopProbe, frames: ThreadFrames, stood_s: float) -> None:
        """Tell the span of the request that blocks the loop of that: later, the span has ended."""
        stall, best = loop.judge(stood_s, self._runners(frames, loop.clocks, stood_s))
        if stall is not None and best is not None and best.context is not None:
            best.context.run(note_stall, stall.place.file, stall.place.line, str(stall.reason))

    def _end(self, loop: LoopProbe, frames: ThreadFrames, until: float) -> None:
        """End a heartbeat that was answered, or never will be."""
        self._standing.discard(loop)
        assert loop.asked_at is not None
        if until - loop.asked_at >= self._threshold_s:
            self._report(loop, frames, until - loop.asked_at)
        loop.asked_at = None
        loop.samples = []  # they keep the contexts of requests alive, and all that these refer to

    def _all_stood(self, frames: ThreadFrames, before: dict[int, float], late_s: float) -> None:
        """Conclude a stall of every loop: a C call held the GIL, or a few threads took turns."""
        runners = self._runners(frames, before, late_s) or self._at_work(frames)
        first = runners[0].ident if runners else 0
        # The loop whose own code stalled it comes first, so that it is the one that is logged.
        for each in sorted(self._loops, key=lambda each: each.thread_id != first):
            if each.asked_at is None and each.thread_id:
                each.begin(before)
                each.starved_s = late_s
                if each.thread_id == first:
                    each.see(frames.get(first))  # it has just released the GIL
                each.waited = max(each.waited, each.ongoing)
                if each.waited:
                    self._conclude(each, runners, late_s)
                each.samples = []

    def _report(
        self, loop: LoopProbe, frames: ThreadFrames, took_s: float, *, is_over: bool = True
    ) -> None:
        runners = self._runners(frames, loop.clocks, took_s)
        if not runners and loop.starved_s >= took_s / 2:
            runners = self._at_work(frames)
        if loop.starved_s:  # no sample counted the waiting requests meanwhile, see `_all_stood`
            loop.waited = max(loop.waited, loop.ongoing)
        if not loop.samples and runners and runners[0].ident == loop.thread_id:
            loop.see(frames.get(loop.thread_id))
        self._conclude(loop, runners, took_s, is_over=is_over)

    def _conclude(
        self, loop: LoopProbe, runners: list[BusyThread], took_s: float, *, is_over: bool = True
    ) -> None:
        """Record, count and log a stall."""
        stall, best = loop.judge(took_s, runners, is_over=is_over)
        if stall is None:
            return
        context = None if best is None else best.context
        replica = loop.replica_of(context)
        if is_over:
            self._log.keep(stall)
            for owner in list(loop.owners):
                if owner.context is replica and stall.reason is not StallReason.STARVED:
                    owner.stalls.setdefault(stall.method, Latency()).add(stall.duration_ms)
        # Stalls that delay no request are not logged, such as a task at start-up; nor are stalls in
        # a debugger.
        is_of_interest = stall.waited or stall.request_ids
        if not is_of_interest or (best is not None and best.stack.is_debugged):
            return
        if context is None:
            context = Context()
            if replica is not None:
                context.run(REPLICA.set, replica)
        loop.was_logged = self._log.log(stall, context, follows=loop.was_logged)

    def _read_clocks(self, frames: ThreadFrames) -> dict[int, float]:
        """Return the run times of the threads that may be running now.

        Without the GIL, those of the loops: other threads are not asked for the cause.
        """
        if not gil.is_on():
            return self._threads.read([each.thread_id for each in self._loops])
        if len(frames) <= _MANY:
            return self._threads.read(frames)
        idle = {each.thread_id for each in self._loops if each.is_idle(frames.get(each.thread_id))}
        return self._threads.read(
            ident
            for ident, frame in frames.items()
            if ident not in idle and not stacks.is_idle_worker(frame)
        )

    def _runners(
        self, frames: ThreadFrames, before: dict[int, float], took_s: float
    ) -> list[BusyThread]:
        """Return the threads that ran user code meanwhile, the longest run first.

        The list is empty if all threads together did not run for long.
        """
        runners = []
        loops = {each.thread_id: each for each in self._loops}
        ran = self._ran_since(before, took_s)
        if sum(ran.values()) < took_s * _HOLDS:
            return []
        least_s = max(ran.values()) * _HOLDS
        for ident, ran_s in ran.items():
            if (frame := frames.get(ident)) is None or ran_s < least_s:
                continue
            is_loop = ident in loops
            if stacks.is_idle_worker(frame) or (is_loop and loops[ident].is_idle(frame)):
                runners.append(BusyThread(ident, ran_s, stacks.EMPTY))  # its work has ended
            else:
                stack = _read(frame)
                if stack.is_users or is_loop:
                    runners.append(BusyThread(ident, ran_s, stack))
        return sorted(runners, key=lambda each: -each.ran_s)

    def _at_work(self, frames: ThreadFrames) -> list[BusyThread]:
        """Return the threads that are in user code now, threads with a loop first.

        One of them slept with the GIL, or the system has no clocks of threads.
        """
        loops = {each.thread_id for each in self._loops}
        found = [BusyThread(ident, 0.0, _read(frame)) for ident, frame in frames.items()]
        return sorted(
            (each for each in found if each.stack.is_users),
            key=lambda each: each.ident not in loops,
        )


def _read(frame: FrameType) -> Stack:
    return stacks.read(frame, stacks.value_in(stacks.worker_context(frame), REPLICA))
