"""The operating system's side of a child: its start, its end and its exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import Context

from ingress.core.base.settings import environment, start_method
from ingress.serving.processes.forking import PROLOGUE, ForkedProcess, fork
from ingress.serving.processes.output import Output
from ingress.serving.processes.page import SharedPage

_BOOT = f"""\
{PROLOGUE}
from ingress.engines.child import main
main(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
"""
JOIN_S = 1.0
LAST_LINES_S = 0.1


class ChildProcess:
    """A child, and the thread that starts it and waits for its end. Thread-safe.

    The child has a socket and a page of its parent, and its environment with `env_vars`. Linux
    kills it with the thread that started it, so that thread lives as long as the child. `on_exit()`
    is called there. A fork server imports `module` before it forks. A negative `code` is the number
    of the signal that killed the child; `failure` says why it could not be started.
    """

    __slots__ = (
        "_end", "_env_vars", "_is_unwanted", "_module", "_name", "_on_exit", "_page", "_process",
        "_thread", "code", "failure", "output",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        module: str,
        end: socket.socket,
        page: SharedPage,
        env_vars: Mapping[str, str],
        output: Output,
        on_exit: Callable[[], None],
    ) -> None:
        self.code: int | None = None
        self.failure: Exception | None = None
        self.output = output
        self._name = name
        self._module = module
        self._end = end
        self._page = page
        self._env_vars = env_vars
        self._on_exit = on_exit
        self._is_unwanted = False
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._thread = threading.Thread(target=self._main, name=f"{name}-process", daemon=True)
        Context().run(self._thread.start)

    @property
    def pid(self) -> int:
        """The process's id; 0 before it has started."""
        return 0 if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended, or did not start."""
        return self.code is not None or self.failure is not None

    def kill(self) -> None:
        """Kill the process, if it runs or is being started.

        Race with its start: this sets the flag and then reads the process, the thread sets the
        process and then reads the flag, so one of the two kills it.
        """
        self._is_unwanted = True
        if self._process is not None and not self.has_ended:
            self._process.kill()

    def join(self, timeout_s: float = JOIN_S) -> bool:
        """Wait for the process's end. Returns False if it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _started(self) -> subprocess.Popen[bytes] | ForkedProcess:
        inherited = (self._end.fileno(), self._page.descriptor)
        if start_method() == "forkserver":
            forked = fork(
                self._module, self._name, self._env_vars, inherited, lambda: self._is_unwanted
            )
            if forked is not None:
                return forked
        given = [os.getpid(), json.dumps(sys.path), *inherited, self._name]
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, given)],
            pass_fds=inherited,
            env={**environment(), **self._env_vars},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _main(self) -> None:
        try:
            try:
                self._process = self._started()
            finally:
                self._end.close()
                self._page.close_descriptor()
            self._attend(self._process)
        except Exception as error:  # the start waits for `on_exit`, whatever went wrong
            self.failure = error
        finally:
            self._on_exit()

    def _attend(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        """Pass on what the process writes, and wait for its end."""
        if self._is_unwanted:
            process.kill()
        name, pipes = f"{self._name}-output", (process.stdout, process.stderr)
        reading = threading.Thread(
            target=self.output.pass_on, args=(process.pid, *pipes), name=name, daemon=True
        )
        try:
            Context().run(reading.start)
        except RuntimeError:  # there are too many threads
            process.kill()
            process.wait()
            for each in pipes:
                if each is not None:
                    each.close()
            raise
        code = process.wait()
        reading.join(LAST_LINES_S)  # a program that user code started may hold a pipe open
        self.code = code
