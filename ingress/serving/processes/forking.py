"""The server's side of fork servers: one for each module and set of environment variables.

INGRESS_START_METHOD=forkserver    a child is a copy of a process that has imported its module
"""

from __future__ import annotations

import errno
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import IO

from ingress.core.base.settings import PINNED_CPUS, environment
from ingress.serving.processes.fork_server import ENDED, FORKED
from ingress.serving.processes.resources import VISIBLE

PROLOGUE = """\
import ctypes, json, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
sys.path[:] = json.loads(sys.argv[2])
"""
# Before the imports: they may take seconds, in which the parent may end.
_BOOT = f"""\
{PROLOGUE}
os.set_inheritable(int(sys.argv[3]), False)
import importlib
from ingress.engines.child import main
from ingress.serving.processes.fork_server import serve
try:
    importlib.import_module(sys.argv[4])
except BaseException:
    pass  # each child raises it, for its server
serve(int(sys.argv[3]), main)
"""
_TRIES = 2
_LOOK_S = 0.1

logger = logging.getLogger("ingress")


class ForkServer:
    """A fork server, and the thread that starts it and waits for its end. Thread-safe.

    Linux kills it with the thread that started it, so that thread lives as long as it. `users` is
    the number of its children, with those that are being forked. Its import is over when it
    `has_answered`.
    """

    __slots__ = (
        "_module", "_process", "_theirs", "_thread", "_variables", "control", "has_answered",
        "has_ended", "users",
    )  # fmt: skip

    def __init__(self, module: str, variables: Mapping[str, str]) -> None:
        self.has_answered = False
        self.has_ended = False
        self.users = 0
        self._module = module
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        # A packet for each child, whole or not at all: threads may send at the same time.
        self.control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(
            target=self._main, name=f"{module}-fork-server", daemon=True
        )
        try:
            Context().run(self._thread.start)
        except RuntimeError:  # there are too many threads
            self.control.close()
            self._theirs.close()
            raise

    def _main(self) -> None:
        try:
            with self._theirs:
                descriptor = self._theirs.fileno()
                given = [os.getpid(), json.dumps(sys.path), descriptor, self._module]
                process = self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *map(str, given)],
                    pass_fds=[descriptor],
                    env={**environment(), **self._variables},
                    stdin=subprocess.DEVNULL,
                )
            if self.has_ended and not self.has_answered:
                process.kill()
            process.wait()
        except Exception:  # as of `Popen`; the children are spawned, and fail by themselves
            logger.exception("a fork server could not be started")
        finally:
            self.has_ended = True
            self.control.close()

    def end(self) -> None:
        """End the fork server, which has no children. One that still imports is killed.

        Race with its start: this sets the flag and then reads the process, the thread sets the
        process and then reads the flag, so one of the two kills it.
        """
        self.has_ended = True
        if self._process is not None and not self.has_answered:
            self._process.kill()
        self.control.close()


class ForkedProcess:
    """A child of a fork server, with the methods of `subprocess.Popen` that are needed."""

    __slots__ = ("_is_unwanted", "_life", "_server", "pid", "stderr", "stdout")

    def __init__(
        self,
        server: ForkServer,
        pid: int,
        life: socket.socket,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        self._server = server
        self._is_unwanted = False
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self._life = life

    def kill(self) -> None:
        """Have the fork server kill it: only there the pid cannot be another process's by now."""
        self._is_unwanted = True
        try:
            self._life.shutdown(socket.SHUT_WR)  # which does not block, as a loop may call this
        except OSError:
            pass  # it has ended, or its fork server has, and it with that

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


def fork(
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

    Raises as `fork`.
    """
    life, theirs = socket.socketpair()
    (out, stdout), (err, stderr) = os.pipe(), os.pipe()
    try:
        socket.send_fds(server.control, [message], [*inherited, stdout, stderr, theirs.fileno()])
    except OSError:
        pass
    finally:
        theirs.close()
        os.close(stdout)
        os.close(stderr)
    while not _has_message(life) and not is_unwanted():
        pass
    told = b"" if is_unwanted() else _received(life, FORKED.size)
    if told:
        server.has_answered = True
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


def _has_message(life: socket.socket) -> bool:
    """Wait for a while, and return whether a message, or the end, has arrived."""
    with selectors.DefaultSelector() as selector:
        selector.register(life, selectors.EVENT_READ)
        return bool(selector.select(_LOOK_S))


def _received(life: socket.socket, size: int) -> bytes:
    """Return a message, and nothing if the fork server has ended."""
    try:
        told = life.recv(size, socket.MSG_WAITALL)
    except OSError:
        return b""
    return told if len(told) == size else b""
