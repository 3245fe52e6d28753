"""The operating system's side of a child: its start, its end and its exit code.

INGRESS_START_METHOD=spawn         a child is a new Python
INGRESS_START_METHOD=forkserver    a child is a copy of a process that has imported its module: a
                                   fork server, one for each module and set of variables

Linux kills a process with the thread that started it, so that thread lives as long as the process.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import IO

from ingress.core.base.settings import PINNED_CPUS, environment, start_method
from ingress.serving.processes.fork_server import ENDED, FORKED
from ingress.serving.processes.output import ChildOutput
from ingress.serving.processes.resources import VISIBLE
from ingress.serving.processes.shared_memory import SharedNumbers
from ingress.telemetry.logs import logger

# Before the imports: they may take seconds, in which the parent may end.
_PROLOGUE = """\
import ctypes, json, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
sys.path[:] = json.loads(sys.argv[2])
from ingress.engines.child import main
"""
_CHILD = "main(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])\n"
_FORK_SERVER = """\
os.set_inheritable(int(sys.argv[3]), False)
import importlib
from ingress.serving.processes.fork_server import serve
try:
    importlib.import_module(sys.argv[4])
except BaseException:
    pass  # each child raises it, for its server
serve(int(sys.argv[3]), main)
"""
JOIN_S = 1.0
LAST_LINES_S = 0.1
_TRIES = 2
_LOOK_S = 0.1


def _python(
    code: str,
    name: str,
    variables: Mapping[str, str],
    inherited: Sequence[int],
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python that ends with this thread; `output` is that of `subprocess.Popen`."""
    given = [os.getpid(), json.dumps(sys.path), *inherited, name]
    return subprocess.Popen(
        [sys.executable, "-c", _PROLOGUE + code, *map(str, given)],
        pass_fds=inherited,
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


class ChildProcess:
    """A child, and the thread that starts it and waits for its end. Thread-safe.

    The child has a socket of its parent and the shared numbers, and its environment with
    `env_vars`. The thread calls `on_exit()` at the end. A fork server imports `module` before it
    forks. A negative `code` is the number of the signal that killed the child; `failure` says why
    it could not be started.
    """

    __slots__ = (
        "_end",
        "_env_vars",
        "_is_unwanted",
        "_module",
        "_name",
        "_on_exit",
        "_process",
        "_shared",
        "_thread",
        "code",
        "failure",
        "output",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        module: str,
        end: socket.socket,
        shared: SharedNumbers,
        env_vars: Mapping[str, str],
        output: ChildOutput,
        on_exit: Callable[[], None],
    ) -> None:
        self.code: int | None = None
        self.failure: Exception | None = None
        self.output = output
        self._name = name
        self._module = module
        self._end = end
        self._shared = shared
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
        name, variables = self._name, self._env_vars
        inherited = (self._end.fileno(), self._shared.descriptor)
        forked = None
        if start_method() == "forkserver":
            forked = _fork(self._module, name, variables, inherited, lambda: self._is_unwanted)
        return forked or _python(_CHILD, name, variables, inherited, subprocess.PIPE)

    def _main(self) -> None:
        try:
            try:
                self._process = self._started()
            finally:
                self._end.close()
                self._shared.close_descriptor()
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


class ForkServer:
    """A fork server, and the thread that starts it and waits for its end. Thread-safe.

    `users` is the number of its children, with those that are being forked.
    """

    __slots__ = ("_process", "control", "has_ended", "users")

    def __init__(self, module: str, variables: Mapping[str, str]) -> None:
        self.has_ended = False
        self.users = 0
        self._process: subprocess.Popen[bytes] | None = None
        # A packet for each child, whole or not at all: threads may send at the same time.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thread = threading.Thread(
            target=self._main,
            args=(module, variables, theirs),
            name=f"{module}-fork-server",
            daemon=True,
        )
        try:
            Context().run(thread.start)
        except RuntimeError:  # there are too many threads
            self.control.close()
            theirs.close()
            raise

    def _main(self, module: str, variables: Mapping[str, str], theirs: socket.socket) -> None:
        try:
            with theirs:
                process = self._process = _python(
                    _FORK_SERVER, module, variables, [theirs.fileno()]
                )
            if self.has_ended:
                process.terminate()
            process.wait()
        except Exception:  # as of `Popen`; the children are spawned, and fail by themselves
            logger.exception("a fork server could not be started")
        finally:
            self.has_ended = True
            self.control.close()

    def end(self) -> None:
        """End the fork server, which has no children: by a signal while it imports the module.

        Race with its start: this sets the flag and then reads the process, the thread sets the
        process and then reads the flag, so one of the two ends it.
        """
        self.has_ended = True
        if self._process is not None:
            self._process.terminate()  # without effect once it serves: then it ends as this closes
        self.control.close()


@dataclass(eq=False, slots=True)
class ForkedProcess:
    """A child of a fork server, with the methods of `subprocess.Popen` that are needed."""

    _server: ForkServer
    pid: int
    _life: socket.socket
    stdout: IO[bytes]
    stderr: IO[bytes]
    _is_unwanted: bool = False

    def kill(self) -> None:
        """Have the fork server kill it: only there the pid cannot be another process's by now."""
        self._is_unwanted = True
        with suppress(OSError):  # it has ended, or its fork server has, and it with that
            self._life.shutdown(socket.SHUT_WR)  # which does not block, as a loop may call this

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        with self._life:
            told = _received(self._life, ENDED.size)
        code = int(ENDED.unpack(told)[0]) if told else -signal.SIGKILL
        # After a crash, the replacement comes at once, for which the module is there.
        _leave(self._server, is_final=not code or self._is_unwanted)
        return code


_servers: dict[tuple[object, ...], ForkServer] = {}
_lock = threading.Lock()
_told: set[str] = set()


def _fork(
    module: str,
    name: str,
    variables: Mapping[str, str],
    inherited: Sequence[int],
    is_unwanted: Callable[[], bool],
) -> ForkedProcess | None:
    """Return a child, forked after the import of its module, `None` if that is not possible.

    Raises `OSError` if it cannot be forked now, or once it `is_unwanted` before.
    """
    own = {key: variables[key] for key in (VISIBLE, PINNED_CPUS) if key in variables}
    shared = {key: value for key, value in variables.items() if key not in own}
    threads = 0
    for _ in range(_TRIES):  # an idle one may end at this moment
        server = _server(module, shared)
        try:
            found = _forked(server, json.dumps((name, own)).encode(), inherited, is_unwanted)
        except BaseException:
            _leave(server, is_final=True)
            raise
        if isinstance(found, ForkedProcess):
            return found
        threads = found
        _leave(server, is_final=True)
        if threads:
            break
    reason = f"it has {threads} threads after the import" if threads else "its fork server ended"
    if module not in _told:
        _told.add(module)
        logger.warning(
            "INGRESS_START_METHOD=forkserver is not possible for module %s: %s; its replicas are "
            "spawned. Start threads in the constructor, not in the module; for those of native "
            "libraries, set ray_actor_options={'num_cpus': 1}",
            module,
            reason,
        )
    return None


def _server(module: str, variables: Mapping[str, str]) -> ForkServer:
    key = module, os.getpid(), *sorted(variables.items())
    with _lock:
        server = _servers.get(key)
        if server is None or server.has_ended:
            server = _servers[key] = ForkServer(module, variables)
        server.users += 1
        return server


def _leave(server: ForkServer, *, is_final: bool) -> None:
    """Count one child less. The last that was stopped ends the fork server.

    Race with a start in another thread: it counts its child under the same lock.
    """
    with _lock:
        server.users -= 1
        if is_final and not server.users:
            server.end()  # before it is used again


def _forked(
    server: ForkServer,
    message: bytes,
    inherited: Sequence[int],
    is_unwanted: Callable[[], bool],
) -> ForkedProcess | int:
    """Return a child, or the number of threads that forbid it, 0 if the fork server has ended.

    Raises as `_fork`.
    """
    life, theirs = socket.socketpair()
    (out, stdout), (err, stderr) = os.pipe(), os.pipe()
    with suppress(OSError):  # it has ended
        socket.send_fds(server.control, [message], [*inherited, stdout, stderr, theirs.fileno()])
    theirs.close()
    os.close(stdout)
    os.close(stderr)
    told = _received(life, FORKED.size, is_unwanted)
    pid, threads = FORKED.unpack(told) if told else (0, 0)
    if pid:
        return ForkedProcess(server, pid, life, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0))
    life.close()
    os.close(out)
    os.close(err)
    if is_unwanted():  # a child that is forked meanwhile finds `life` closed, and is killed
        raise OSError(errno.ECANCELED, "it was stopped before")
    if threads < 0:
        raise OSError(-threads, f"its fork server could not fork: {os.strerror(-threads)}")
    return int(threads)


def _received(
    life: socket.socket, size: int, is_unwanted: Callable[[], bool] | None = None
) -> bytes:
    """Return a message, and nothing if the fork server has ended, or the child `is_unwanted`."""
    life.settimeout(None if is_unwanted is None else _LOOK_S)
    while is_unwanted is None or not is_unwanted():
        try:
            told = life.recv(size, socket.MSG_WAITALL)
        except TimeoutError:
            continue
        except OSError:
            break
        return told if len(told) == size else b""
    return b""
