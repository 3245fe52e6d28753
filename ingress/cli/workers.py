"""Worker processes that share a port, and their supervisor.

if a worker                              the supervisor
ends after it has served                 starts another worker
is silent for `SILENCE_S`                kills it, and starts another worker
cannot start, and none has started yet   stops, with exit code 3, and prints the cause once
fails to start three times in a row      does the same
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from time import monotonic
from types import FrameType

import uvicorn

from ingress.base.signals import stop_signals
from ingress.cli.worker import LAST_WORDS_S, STARTUP_FAILURE, Served, work
from ingress.http.shared_port import SharedPort

SILENCE_S = 30  # a worker that holds the GIL for some seconds is busy, not dead
FAILURES = 3
LOOK_S = 1.0

logger = logging.getLogger("uvicorn.error")
info = logging.getLogger("ingress").info  # uvicorn's logger has the level WARNING by default
_spawn = multiprocessing.get_context("spawn")


class WorkerProcess:
    """One worker, as its supervisor sees it. `failures` counts the failed starts just before it."""

    def __init__(
        self, config: uvicorn.Config, served: Served, port: SharedPort, failures: int = 0
    ) -> None:
        self.failures = failures
        self._silence_s = config.timeout_worker_healthcheck
        self.is_ready = False
        self.cause = ""
        self.heard_at = monotonic()
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=work, args=(config, served, port, theirs))
        with _signals_blocked():
            self.process.start()
        theirs.close()  # otherwise the pipe would stay open after the worker's end

    def hear(self) -> None:
        """Read the messages of the worker."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                told = self.pipe.recv()
                self.heard_at = monotonic()
                if isinstance(told, str):
                    self.cause = told
                else:
                    self.is_ready = told

    @property
    def is_silent(self) -> bool:
        return self.is_ready and monotonic() - self.heard_at > self._silence_s


class Supervisor:
    """The supervisor: it keeps `config.workers` worker processes alive until a signal stops it.

    It calls `when_ready` once, when all of them serve.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        served: Served,
        port: SharedPort,
        when_ready: Callable[[], None],
    ) -> None:
        self._config = config
        self._served = served
        self._port = port
        self._when_ready: Callable[[], None] | None = when_ready
        self._workers: list[WorkerProcess] = []
        self._has_served = False
        self._signal: int | None = None
        self._code: int | None = None  # the exit code, once it stops
        self._killing_at = 0.0
        self._waking, self._wakes = _spawn.Pipe(duplex=False)

    def run(self) -> int:
        """Return the exit code: 0 if a signal stopped it, 3 if its workers cannot serve."""
        with self._hearing_signals():
            for _ in range(self._config.workers):
                self._start()
            while self._workers:
                self._wait()
                for worker in list(self._workers):
                    self._look_at(worker)
                self._report_ready()
                self._stop_if_told()
        assert self._code is not None
        return self._code

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        previous = {each: signal.signal(each, self._on_signal) for each in stop_signals()}
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
        self._wakes.send_bytes(b"")

    def _start(self, failures: int = 0) -> None:
        self._workers.append(WorkerProcess(self._config, self._served, self._port, failures))

    def _wait(self) -> None:
        """Wait until a worker sends a message or ends, or a signal comes."""
        ends = [each.process.sentinel for each in self._workers]
        pipes: list[Connection] = [each.pipe for each in self._workers if not each.pipe.closed]
        if self._waking in wait([self._waking, *ends, *pipes], LOOK_S):
            self._waking.recv_bytes()

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
            info("worker %s is ready", worker.process.pid)
        process = worker.process
        is_late = self._code is not None and monotonic() > self._killing_at
        if process.is_alive():
            if worker.is_silent or is_late:
                logger.error("worker %s does not answer; it is killed", process.pid)
                process.kill()
            return
        process.join()
        worker.hear()  # its last messages
        worker.pipe.close()
        self._workers.remove(worker)
        if self._code is not None:
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
        self._start(failures)

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
        graceful_s = self._served.server.drain_delay_s
        graceful_s += self._config.timeout_graceful_shutdown or 0
        self._killing_at = monotonic() + graceful_s + LAST_WORDS_S
        for worker in self._workers:
            worker.hear()
            if worker.is_ready:
                worker.process.terminate()
            else:  # it has no clients yet, and a constructor may hang
                worker.process.kill()


def run_workers(
    config: uvicorn.Config, served: Served, port: SharedPort, when_ready: Callable[[], None]
) -> int:
    """Serve in `config.workers` processes until a signal. Returns the exit code."""
    return Supervisor(config, served, port, when_ready).run()


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


def _how(process: multiprocessing.process.BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
