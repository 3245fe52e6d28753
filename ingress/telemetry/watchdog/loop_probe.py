"""One event loop that is watched: its heartbeats, its samples and the cause of its stall."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextvars import Context
from dataclasses import dataclass
from time import monotonic, time
from types import CodeType, FrameType
from typing import Protocol

from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base import gil
from ingress.core.base.counters import Latency
from ingress.core.base.libraries import is_ours
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.loops import mailbox_of, running_loop
from ingress.telemetry.watchdog import stacks
from ingress.telemetry.watchdog.clocks import ProcessorWait
from ingress.telemetry.watchdog.records import Holder, Stall, StallReason
from ingress.telemetry.watchdog.stacks import Stack


class Watched(Protocol):
    """A replica as the watchdog sees it: its context, its requests and its counts of stalls."""

    context: ReplicaRuntime
    stalls: dict[str, Latency]

    @property
    def num_calls(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the thread of a stalled loop. `context` is a copy made at that moment."""

    stack: Stack = stacks.EMPTY
    task: int = 0
    context: Context | None = None
    is_idle: bool = False

    @property
    def key(self) -> object:
        """The vote of this sample: a user function, or else a task."""
        place = self.stack.place
        return (place.file, place.function) if self.stack.is_users else self.task

    @property
    def call(self) -> Call | None:
        return stacks.value_in(self.context, CURRENT_CALL)

    @property
    def method(self) -> str:
        """The deployment's method that runs; in ingress's own code, the method of the request."""
        if self.stack.method or self.call is None:
            return self.stack.method
        is_http = self.call.metadata.is_http_request
        return self.call.current_route() if is_http else self.call.metadata.method_name

    @property
    def request_ids(self) -> tuple[str, ...]:
        if self.call is None:
            return ()
        calls = (self.call,) if self.call.members is None else self.call.members
        return tuple(each.metadata.request_id for each in calls)


@dataclass(frozen=True, slots=True)
class BusyThread:
    """A thread, its stack, and for how many seconds it ran."""

    ident: int
    ran_s: float
    stack: Stack


class LoopProbe:
    """One watched loop. `_beat` runs on that loop, all else in the watchdog's thread.

    While a heartbeat is unanswered, `asked_at` is the time when it was sent, by `monotonic`, and
    `began_at_s` the same in Unix time. `clocks` are the run times of the threads at that time.
    `samples` and `waited` were collected since. `starved_s` is the time in which the watchdog
    itself waited for the GIL, `scarce_s` that in which it had no processor. `processors` are the
    waits of the loop's thread at the first sample.
    """

    __slots__ = (
        "_mailbox",
        "_waits_in",
        "answered_at",
        "asked_at",
        "beats",
        "began_at_s",
        "clocks",
        "loop",
        "owners",
        "processors",
        "samples",
        "scarce_s",
        "see_at",
        "starved_s",
        "thread_id",
        "waited",
        "was_logged",
        "was_reported",
        "was_traced",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.owners: dict[Watched, None] = {}
        # Known from the start, because the first heartbeat may not be answered.
        self.thread_id = threading.get_ident() if running_loop() is loop else 0
        self.beats = 0  # answered so far
        self.began_at_s = 0.0
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self._mailbox = mailbox_of(loop)
        self._waits_in: CodeType | None = None
        self.begin({})

    @property
    def ongoing(self) -> int:
        """Number of requests in flight."""
        return sum(owner.num_calls for owner in list(self.owners))

    def is_idle(self, frame: FrameType | None) -> bool:
        """Return whether the loop waits for events. `frame` is its thread's."""
        return self.thread_id != 0 and stacks.is_idle(frame, self._waits_in)

    def begin(self, clocks: dict[int, float]) -> None:
        """Forget the samples of the last heartbeat."""
        self.samples: list[Sample] = []
        self.waited = 0
        self.starved_s = self.scarce_s = self.see_at = 0.0
        self.processors: ProcessorWait | None = None
        self.was_reported = self.was_traced = self.was_logged = False
        self.clocks = clocks

    def ask(self) -> None:
        """Send a heartbeat."""
        self.answered_at = None
        self.began_at_s = time()
        self.asked_at = monotonic()
        self._mailbox.post(self._beat)

    def _beat(self) -> None:
        self.thread_id = threading.get_ident()
        self._waits_in = stacks.base_of_loop()
        self.beats += 1
        self.answered_at = monotonic()  # last: the watchdog reads the others after it

    def forgive(self, now: float) -> None:
        """Do not count the time until now as a stall."""
        if self.answered_at is not None:
            self.asked_at = None
        elif self.asked_at is not None:
            self.began_at_s = time()
            self.asked_at = now

    def see(self, frame: FrameType | None) -> None:
        """Sample the loop's thread, and count the requests in flight."""
        self.waited = max(self.waited, self.ongoing)
        if frame is None or self.is_idle(frame):
            self.samples.append(Sample(is_idle=True))
            return
        task, context = stacks.running_task(self.loop, frame)
        self.samples.append(Sample(stacks.read(frame, self.replica_of(context)), task, context))

    def replica_of(self, context: Context | None) -> ReplicaRuntime | None:
        """Return the replica whose code runs in a context, or else the loop's only replica."""
        replica = stacks.value_in(context, REPLICA)
        owners = list(self.owners)
        return owners[0].context if replica is None and len(owners) == 1 else replica

    def _scarcity(self, took_s: float, mine_s: float, native: int | None) -> str:
        """Return why the loop's thread had no processor for most of a stall; "" if it had one.

        Of the time in which it did not run, it was in the system's run queue, and neither waited
        for the GIL nor in user code. The loop's thread ran for `mine_s`.
        """
        before, wait = self.processors, ProcessorWait()
        if before and native and (now := ProcessorWait.read(native)):
            wait = now.since(before)
        if self.starved_s >= took_s / 2:
            return ""  # each wake-up to ask for the GIL may wait for a processor, too
        is_scarce = self.scarce_s >= took_s / 2
        if wait.at:
            is_scarce = is_scarce or wait.waited_s > max(0.0, wait.at - mine_s) / 2
        return str(wait) if is_scarce and mine_s <= took_s / 2 else ""

    def judge(
        self, took_s: float, runners: list[BusyThread], *, is_over: bool = True
    ) -> tuple[Stall | None, Sample | None]:
        """Return the stall and, if code on the loop caused it, the sample that shows it best.

        Both are `None` if no code in particular kept the loop busy, or if no thread of this process
        delayed it because the system ran other processes.
        """
        threads = {each.ident: each for each in threading.enumerate()}
        thread = threads.get(self.thread_id)
        mine_s = sum(each.ran_s for each in runners if each.ident == self.thread_id)
        scarcity = self._scarcity(took_s, mine_s, None if thread is None else thread.native_id)
        if scarcity:
            reason, same, others = StallReason.STARVED, list[Sample](), list[BusyThread]()
        elif (verdict := self._verdict(took_s, runners)) is None:
            return None, None
        else:
            reason, same, others = verdict
        best: Sample | None = None
        stack = others[0].stack if others else stacks.EMPTY
        if same:
            places = Counter(each.stack.place for each in same)
            # Of equal counts the later: the first may be the code that ran just before.
            best = max(reversed(same), key=lambda each: places[each.stack.place])
            stack = best.stack
            if stack.imports:
                reason = StallReason.IMPORT
        replica = self.replica_of(None if best is None else best.context)
        names = {ident: each.name for ident, each in threads.items()}
        name = names.get(self.thread_id, "a thread")
        if replica is not None and name != str(replica.replica_id):
            name = f"{replica.replica_id} ({name})"
        ids = dict.fromkeys(one for each in same for one in each.request_ids)
        stall = Stall(
            began_at_s=time() - took_s if self.asked_at is None else self.began_at_s,
            duration_ms=took_s * 1e3,
            reason=reason,
            loop=name,
            application="" if replica is None else replica.app_name,
            deployment="" if replica is None else replica.deployment,
            replica="" if replica is None else replica.replica_tag,
            method=stack.method if best is None else best.method,
            request_ids=tuple(ids),
            place=stack.place,
            waited=max(0, self.waited - bool(ids)),
            calls=len({each.task for each in same} - {0}) or 1,
            holders=tuple(
                Holder(names.get(each.ident, "a thread"), each.stack.place) for each in others
            ),
            imports=stack.imports if reason is StallReason.IMPORT else "",
            stack=stack.lines,
            is_over=is_over,
            scarcity=scarcity,
        )
        return stall, best

    def _verdict(
        self, took_s: float, runners: list[BusyThread]
    ) -> tuple[StallReason, list[Sample], list[BusyThread]] | None:
        """Return the stall's reason, its samples, and the other threads that delayed the loop."""
        busy = [each for each in self.samples if not each.is_idle]
        is_busy = bool(busy) and len(busy) * 2 >= len(self.samples)
        key, votes = Counter(each.key for each in busy).most_common(1)[0] if busy else (None, 0)
        same = [each for each in busy if each.key == key]
        mine_s = sum(each.ran_s for each in runners if each.ident == self.thread_id)
        # Without the GIL, other threads delay a loop only if there are more of them than cores.
        others = [each for each in runners if gil.is_on() and each.ident != self.thread_id]
        others_s = sum(each.ran_s for each in others)
        is_starved = self.starved_s >= took_s / 2
        is_shared = is_starved or others_s >= took_s / 2
        # If the watchdog was starved for most of the time, the samples show where the loop lost the
        # GIL. And code that is not the user's is not expected to block.
        is_users = any(each.stack.is_users for each in same)
        is_innocent = is_shared and others_s > 2 * mine_s and (is_starved or not is_users)
        # Ours does not wait on a loop: if it has not run either, it has had no processor.
        is_own = all(is_ours(each.stack.place.file) for each in same)
        is_innocent = is_innocent or (is_own and not is_users and mine_s <= took_s / 2)
        if is_busy and votes * 2 >= len(busy) and not is_innocent:
            may_wait = is_shared and mine_s <= took_s / 2
            return StallReason.BLOCKED, same, others if may_wait else []
        if others and others_s >= mine_s and (is_innocent or is_starved or not is_busy):
            return StallReason.GIL, [], others
        if mine_s > took_s / 2 and not is_busy:
            return StallReason.UNKNOWN, [], []
        return None
