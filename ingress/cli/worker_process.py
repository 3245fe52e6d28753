"""One worker process, as its supervisor sees it, and what is asked of all workers."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import uvicorn

from ingress.app.config_file.loading import ConfigFile
from ingress.cli.worker import Served, work
from ingress.core.base.signals import stop_signals
from ingress.serving.http.shared_port import SharedPort
from ingress.state.server import Snapshot

LATE_S = 5.0  # five heartbeats: no command is sent to it
LAST_MESSAGES_S = 1.0

spawn = multiprocessing.get_context("spawn")


@dataclass(eq=False, slots=True)
class Asked:
    """One command for all workers. `answers` maps process ids to values, or to an error's text.

    Written by the supervisor's thread only, until `is_answered` is set. `is_given_up` is its
    caller's: the supervisor then forgets it, with the answers that came.
    """

    command: str
    arguments: Mapping[str, Any]
    refusal: str = ""  # the reason if it was sent to no worker
    is_early: bool = False  # if that is the start of a worker
    starting: tuple[int, ...] = ()  # the workers that it was not sent to
    waits_for: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)
    is_answered: threading.Event = field(default_factory=threading.Event)
    is_given_up: bool = False

    def wait(self, timeout_s: float) -> None:
        """Wait for the answers; give those up that are still missing then."""
        self.is_given_up = not self.is_answered.wait(timeout_s)

    def answer(self, pid: int, value: Any) -> None:
        """Record the answer of a worker."""
        if pid in self.waits_for:
            self.waits_for.discard(pid)
            self.answers[pid] = value
            if not self.waits_for:
                self.is_answered.set()

    def refuse(self, reason: str, *, is_early: bool = False) -> None:
        """End it without an answer."""
        self.refusal, self.is_early = reason, is_early
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

    def end(self, error: str = "") -> None:
        """End it."""
        self.error = error
        self.is_over.set()


class WorkerProcess:
    """One worker, as its supervisor sees it. `failures` counts the failed starts just before it.

    Its `number` is the least that no other worker has: a worker that replaces it has it again.
    A thread reads its messages and calls `wake` for each: a worker that stands still in the middle
    of one holds that thread, and not the supervisor.
    """

    __slots__ = (
        "_pipe", "_reader", "_silence_s", "_told", "_wake", "answers", "cause", "failures",
        "heard_at", "is_ready", "killing_at", "number", "pid", "process", "snapshot",
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
        self._pipe, theirs = spawn.Pipe()
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
                told = self._pipe.recv()
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
            self._pipe.close()

    def send(self, told: Any) -> None:
        """Send a message. Raises `OSError` if the worker has ended."""
        self._pipe.send(told)

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
