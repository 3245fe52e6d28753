"""Worker processes that share a port, and their supervisor.

if a worker                              the supervisor
ends after it has served                 starts another worker
is silent for `SILENCE_S`                kills it, and starts another worker
cannot start, and none has started yet   stops, with exit code 3, and prints the cause once
fails to start three times in a row      does the same

Not uvicorn's `Multiprocess` (as of 0.54): it waits for one worker's pong after another, for up to
`timeout_worker_healthcheck` each, ends all workers if a later one fails to start, and neither sends
commands to workers nor hears their counters and the causes of their ends.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn

from ingress.app.config_file.loading import ConfigFile
from ingress.cli.control_socket import CommandError
from ingress.cli.sd_notify import notify
from ingress.cli.server_commands import Changes, Failed
from ingress.cli.worker import LAST_WORDS_S, STARTUP_FAILURE, Served, work
from ingress.core.base.settings import watchdog_s
from ingress.core.base.signals import name_of_signal, stop_signals
from ingress.observe.live.observer import WHAT
from ingress.serving.http.address import SharedPort
from ingress.state.server import Snapshot, both_kept

SILENCE_S = 30  # a worker that holds the GIL for some seconds is busy, not dead
FAILURES = 3
LOOK_S = 1.0
LATE_S = 5.0  # five heartbeats: no command is sent to it
LAST_MESSAGES_S = 1.0
MAX_PIDS = 1000

logger = logging.getLogger("uvicorn.error")
info = logging.getLogger("ingress").info  # uvicorn's logger has the level WARNING by default

spawn = multiprocessing.get_context("spawn")


class WorkerStartsError(CommandError):
    """A worker starts, so a command that must reach all workers is sent to none."""


@dataclass(eq=False, slots=True)
class Asked:
    """One command for all workers. `answers` maps process ids to values, or to an error's text.

    Written by the supervisor's thread only, until `is_answered` is set. `is_given_up` is its
    caller's: the supervisor then forgets it, with the answers that came.
    """

    command: str
    arguments: Mapping[str, Any]
    refusal: CommandError | None = None  # if it was sent to no worker
    starting: tuple[int, ...] = ()  # the workers that it was not sent to
    waits_for: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)
    is_answered: threading.Event = field(default_factory=threading.Event)
    is_given_up: bool = False

    def answer(self, pid: int, value: Any) -> None:
        if pid in self.waits_for:
            self.waits_for.discard(pid)
            self.answers[pid] = value
            if not self.waits_for:
                self.is_answered.set()

    def refuse(self, reason: CommandError) -> None:
        """End it without an answer."""
        self.refusal = reason
        self.is_answered.set()


@dataclass(eq=False, slots=True)
class Rolling:
    """The replacement of all workers by workers with another version of the file.

    Written by the supervisor's thread only, until `is_over` is set. `error` says why none, or not
    all, were replaced.
    """

    file: ConfigFile
    port: SharedPort | None
    error: str = ""
    is_begun: bool = False  # a new worker serves: the version is that of later workers too
    is_over: threading.Event = field(default_factory=threading.Event)


class WorkerProcess:
    """One worker, as its supervisor sees it. `failures` counts the failed starts just before it.

    Its `number` is the least that no other worker has: a worker that replaces it has it again.
    A thread reads its messages and calls `wake` for each: a worker that stands still in the middle
    of one holds that thread, and not the supervisor.
    """

    __slots__ = (
        "_reader", "_silence_s", "_told", "_wake", "answers", "cause", "failures",
        "heard_at", "is_ready", "killing_at", "number", "pid", "pipe", "process", "snapshot",
    )  # fmt: skip

    def __init__(
        self,
        config: uvicorn.Config,
        served: Served,
        port: SharedPort,
        wake: Callable[[], None],
        number: int,
        failures: int = 0,
    ) -> None:
        self.number = number
        self.failures = failures
        self.snapshot: Snapshot | None = None  # the last one that it has pushed
        self._silence_s = config.timeout_worker_healthcheck
        self.is_ready = False
        self.cause = ""
        self.killing_at: float | None = None  # once it was told to leave
        # Race of the reader with the supervisor, which writes it after a pause of its own: both
        # write the present time.
        self.heard_at = monotonic()
        self.answers: list[tuple[int, Any]] = []  # to commands: their numbers, and the values
        self._told: SimpleQueue[Any] = SimpleQueue()
        self._wake = wake
        self.pipe, theirs = spawn.Pipe()
        # The name of the process in its snapshots.
        named = replace(served, server=replace(served.server, process=f"worker-{number}"))
        self.process = spawn.Process(target=work, args=(config, named, port, theirs))
        with _signals_blocked():
            self.process.start()
        assert self.process.pid is not None  # it has started
        self.pid = self.process.pid
        theirs.close()  # otherwise the pipe would stay open after the worker's end
        self._reader = threading.Thread(
            target=self._read, name=f"ingress-worker-{number}", daemon=True
        )
        self._reader.start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                told = self.pipe.recv()
                self.heard_at = monotonic()
                self._told.put(told)
                self._wake()

    def hear(self) -> None:
        """Take the messages that have arrived."""
        with suppress(Empty):
            while True:
                told = self._told.get_nowait()
                match told:
                    case tuple():
                        self.answers.append(told)
                    case Snapshot():
                        self.snapshot = told
                    case str():
                        self.cause = told
                    case _:
                        self.is_ready = told

    def hear_the_last(self) -> None:
        """Take the last messages of a worker that has ended, and close its pipe."""
        self._reader.join(LAST_MESSAGES_S)
        self.hear()
        # A process that the worker has forked keeps the pipe open, and the reader waits for it: a
        # pipe that is closed meanwhile would leave it with the descriptor of another file.
        if not self._reader.is_alive():
            self.pipe.close()

    def leave(self, patience_s: float) -> None:
        """Tell the worker to drain and end, within `patience_s`."""
        self.killing_at = monotonic() + patience_s
        self.process.terminate()

    @property
    def is_late(self) -> bool:
        return self.is_ready and monotonic() - self.heard_at > LATE_S

    @property
    def is_silent(self) -> bool:
        return self.is_ready and monotonic() - self.heard_at > self._silence_s


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals, also in a new process until it has handlers that ignore them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


@dataclass(frozen=True, slots=True)
class EndedWorkers:
    """The counters of the workers that have ended, and their pids. Replaced as a whole."""

    snapshot: Snapshot | None = None
    pids: tuple[int, ...] = ()

    def with_worker(self, pid: int, last: Snapshot | None) -> EndedWorkers:
        """Return these with another worker's."""
        snapshot = self.snapshot if last is None else both_kept(self.snapshot, last)
        return EndedWorkers(snapshot, (*self.pids[-MAX_PIDS:], pid))


class Supervisor:
    """The supervisor: it keeps `config.workers` worker processes alive until a signal stops it.

    It calls `when_ready` once, when all of them serve, and `hang_up` at each SIGHUP.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        served: Served,
        port: SharedPort,
        when_ready: Callable[[], None],
        hang_up: Callable[[], None],
    ) -> None:
        self._hang_up = hang_up
        self._config = config
        self._served = served
        self._port = port
        self._when_ready: Callable[[], None] | None = when_ready
        self._workers: list[WorkerProcess] = []
        self._has_served = False
        self._signal: int | None = None
        self._code: int | None = None  # the exit code, once it stops
        self._killing_at = 0.0
        self._watchdog_s, self._feed_at = watchdog_s(), 0.0
        self._looked_at = monotonic()
        self._waking, self._wakes = spawn.Pipe(duplex=False)
        self._posted: SimpleQueue[Asked] = SimpleQueue()
        self._asked: dict[int, Asked] = {}
        self._count = 0
        self._rolling: Rolling | None = None
        self._old: list[WorkerProcess] = []  # the workers that `_rolling` has yet to replace
        self._newcomer: WorkerProcess | None = None
        self._leaving: WorkerProcess | None = None
        self.ended = EndedWorkers()

    def run(self) -> int:
        """Return the exit code: 0 if a signal stopped it, 3 if its workers cannot serve."""
        with self._hearing_signals():
            for _ in range(self._config.workers):
                self._start(self._served, self._port)
            while self._workers:
                self._wait()
                self._send_posted()
                for worker in list(self._workers):
                    self._look_at(worker)
                    self._take_answers(worker)
                self._report_ready()
                self._feed_watchdog()
                self._roll_on()
                self._stop_if_told()
        assert self._code is not None
        return self._code

    def _feed_watchdog(self) -> None:
        """Show systemd that all workers answer: a worker that does not is ended here."""
        now = monotonic()
        if self._watchdog_s is not None and self._when_ready is None and now >= self._feed_at:
            self._feed_at = now + self._watchdog_s / 2 - LOOK_S
            notify("WATCHDOG=1")

    def last_snapshots(self) -> dict[int, Snapshot]:
        """Return the last snapshots that live workers have pushed, by pid. Thread-safe."""
        found = {each.pid: each.snapshot for each in list(self._workers)}
        return {pid: each for pid, each in found.items() if each is not None}

    def ask(self, command: str, arguments: Mapping[str, Any], wait_s: float) -> Asked:
        """Send a command to all workers, and wait for the answers; missing ones are given up then.

        Thread-safe. Raises `CommandError` if it was sent to no worker.
        """
        asked = Asked(command, arguments)
        self._posted.put(asked)
        self._wake()
        asked.is_given_up = not asked.is_answered.wait(wait_s)
        if asked.refusal is not None:
            raise asked.refusal
        return asked

    def remember(self, wanted: Changes) -> None:
        """Start later workers with these options. Thread-safe: the served is replaced."""
        self._served = self._served.changed_by(wanted)

    def remember_file(self, file: ConfigFile) -> None:
        """Start later workers with this version of the file. Thread-safe."""
        self._served = self._served.with_file(file)

    def roll(self, file: ConfigFile, port: SharedPort | None) -> None:
        """Replace all workers, one after another, by those of `port` if it is another one.

        Thread-safe: one caller at a time. Raises `CommandError` with the reason if it ends early.
        """
        rolling = self._rolling = Rolling(file, port)
        self._wake()
        rolling.is_over.wait()
        if rolling.error:
            raise CommandError(rolling.error)

    def _roll_on(self) -> None:
        """Take the next step of a replacement: start a worker, or stop the one that it replaces."""
        if (rolling := self._rolling) is None:
            return
        if self._code is not None:
            self._end_roll("the server stops")
        elif self._newcomer is None and not rolling.is_begun:
            if all(each.is_ready for each in self._workers):
                self._old = list(self._workers)
                served = self._served.with_file(rolling.file)
                self._newcomer = self._start(served, rolling.port or self._port)
        elif self._newcomer is not None and self._newcomer.is_ready:
            if not rolling.is_begun:
                rolling.is_begun = True
                self.remember_file(rolling.file)
                if rolling.port is not None:  # the workers that leave have their own sockets
                    self._port.close()
                    self._port = rolling.port
            self._newcomer = None
            self._leaving = self._old.pop(0)
            self._leaving.leave(self._patience_s())
        elif self._newcomer is None and self._leaving not in self._workers:
            self._old = [each for each in self._old if each in self._workers]  # some have died
            if self._old:
                self._newcomer = self._start(self._served, self._port)
            else:
                self._end_roll()

    def _end_roll(self, error: str = "") -> None:
        assert self._rolling is not None
        rolling, self._rolling = self._rolling, None
        self._newcomer = self._leaving = None
        if rolling.port is not None and not rolling.is_begun:
            rolling.port.close()
        rolling.error = error
        rolling.is_over.set()

    def _patience_s(self) -> float:
        """Return the time in which a worker that was told to stop must end."""
        graceful_s = self._served.server.drain_delay_s
        return graceful_s + (self._config.timeout_graceful_shutdown or 0) + LAST_WORDS_S

    def _is_expected(self, worker: WorkerProcess) -> bool:
        """Return whether a worker that has ended is not to be replaced."""
        if worker is self._newcomer and not worker.is_ready:
            assert self._rolling is not None
            cause = worker.cause or f"a new worker failed to start ({_how(worker.process)})"
            serving = "the other workers" if self._rolling.is_begun else "all workers"
            self._end_roll(f"{cause}; {serving} serve on as before")
            return True
        return worker.killing_at is not None

    def _send_posted(self) -> None:
        while not self._posted.empty():
            asked = self._posted.get()
            starting = [each.pid for each in self._workers if not each.is_ready]
            late = [each.pid for each in self._workers if each.is_late]
            is_question = asked.command in WHAT or asked.command == "retire"
            if asked.command == "snapshot" or (is_question and self._code is None):
                self._send(asked)  # it changes nothing: it goes to the workers that serve
            elif self._code is not None:
                asked.refuse(CommandError("the server stops"))
            elif late:
                text = f"worker {late[0]} does not answer; nothing was changed"
                asked.refuse(CommandError(text))
            elif starting:
                text = f"worker {starting[0]} starts; try again when all workers are ready"
                asked.refuse(WorkerStartsError(text))
            else:
                self._send(asked)

    def _send(self, asked: Asked) -> None:
        self._count += 1
        self._asked[self._count] = asked
        ready = [each.pid for each in self._workers if each.is_ready]
        # Workers share their jobs: by the second one, jobs that have run again and failed meanwhile
        # would run once more.
        asked.waits_for |= set(ready[:1] if asked.command == "jobs" else ready)
        # While the newcomer starts, all others serve.
        starting = [each for each in self._workers if not each.is_ready]
        asked.starting = tuple(each.pid for each in starting if each is not self._newcomer)
        if not asked.waits_for:
            asked.is_answered.set()
        for worker in self._workers:
            # One that does not read could fill its pipe, and block this thread.
            if worker.pid in asked.waits_for and not worker.is_late:
                with suppress(OSError):  # it has just ended, which `_look_at` sees
                    worker.pipe.send((self._count, asked.command, asked.arguments))

    def _take_answers(self, worker: WorkerProcess) -> None:
        answers, worker.answers = worker.answers, []
        for number, value in answers:
            if isinstance(value, Snapshot):
                worker.snapshot = value  # a count that a client has seen must not get less
            if number in self._asked:
                self._asked[number].answer(worker.pid, value)
        if not worker.process.is_alive():
            for asked in self._asked.values():
                asked.answer(worker.pid, Failed(f"worker {worker.pid} ended"))
        self._asked = {
            number: asked
            for number, asked in self._asked.items()
            if not (asked.is_answered.is_set() or asked.is_given_up)
        }

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
        handlers = dict.fromkeys(stop_signals(), self._on_signal)
        if hang_up is not None:
            handlers[hang_up] = lambda number, frame: self._hang_up()
        previous = {number: signal.signal(number, each) for number, each in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # the second signal
            for worker in self._workers:
                worker.process.kill()
            os._exit(128 + number)
        self._signal = number
        self._wake()

    def _start(self, served: Served, port: SharedPort, failures: int = 0) -> WorkerProcess:
        taken = {each.number for each in self._workers}
        number = next(number for number in count(1) if number not in taken)
        worker = WorkerProcess(self._config, served, port, self._wake, number, failures)
        self._workers.append(worker)
        return worker

    def _wake(self) -> None:
        """End the supervisor's wait. Thread-safe, also in signal handlers: it is one write."""
        self._wakes.send_bytes(b"")

    def _wait(self) -> None:
        """Wait until a worker sends a message or ends, or a signal comes."""
        wait([self._waking, *(each.process.sentinel for each in self._workers)], LOOK_S)
        while self._waking.poll():
            self._waking.recv_bytes()
        before, self._looked_at = self._looked_at, monotonic()
        if self._looked_at - before > LATE_S:  # this process was stopped, and its readers with it
            for each in self._workers:
                each.heard_at = self._looked_at

    def _report_ready(self) -> None:
        is_ready = self._code is None and all(each.is_ready for each in self._workers)
        if self._when_ready is not None and is_ready:
            when_ready, self._when_ready = self._when_ready, None
            when_ready()

    def _look_at(self, worker: WorkerProcess) -> None:
        was_ready = worker.is_ready
        worker.hear()
        self._has_served |= worker.is_ready
        if worker.is_ready and not was_ready and self._when_ready is None:
            info("worker %s is ready", worker.pid)
        process = worker.process
        killing_at = worker.killing_at if self._code is None else self._killing_at
        is_late = killing_at is not None and monotonic() > killing_at
        if process.is_alive():
            if worker.is_silent or is_late:
                logger.error("worker %s does not answer; it is killed", process.pid)
                process.kill()
            return
        process.join()
        worker.hear_the_last()
        self.ended = self.ended.with_worker(worker.pid, worker.snapshot)
        self._workers.remove(worker)
        if self._code is not None or self._is_expected(worker):
            return
        failures = 0 if worker.is_ready else worker.failures + 1
        if worker.is_ready:
            logger.warning("worker %s ended (%s); another one starts", process.pid, _how(process))
        elif (process.exitcode == STARTUP_FAILURE and not self._has_served) or failures == FAILURES:
            self._fail(worker)
            return
        else:
            logger.warning(
                "worker %s ended before it served (%s); try %d of %d follows",
                process.pid,
                _how(process),
                failures + 1,
                FAILURES,
            )
        self._start(self._served, self._port, failures)

    def _fail(self, worker: WorkerProcess) -> None:
        if worker.cause:
            logger.error(worker.cause)
        times = "" if worker.failures == 0 else f" {FAILURES} times in a row"
        logger.error("a worker failed to start%s (%s); stopping", times, _how(worker.process))
        self._stop(STARTUP_FAILURE)

    def _stop_if_told(self) -> None:
        if self._signal is not None and self._code is None:
            if self._has_served:
                info("stopping: waiting for what runs; a second signal stops at once")
            self._stop(0 if self._has_served else 128 + self._signal)

    def _stop(self, code: int) -> None:
        self._code = code
        self._killing_at = monotonic() + self._patience_s()
        for worker in self._workers:
            worker.hear()
            if worker.is_ready:
                worker.process.terminate()
            else:  # it has no clients yet, and a constructor may hang
                worker.process.kill()


def _how(process: multiprocessing.process.BaseProcess) -> str:
    code = process.exitcode
    return f"exit code {code}" if code is None or code >= 0 else name_of_signal(-code)
