"""The fork server: a process that has imported the user's module, and forks children.

    server -> fork server    name, variables; the child's socket, its memory, its two streams, and
                             its `life`
    fork server -> server    on `life`: pid and number of threads, then the exit code
    server -> fork server    on `life`: its end kills the child

It has one thread, which no child can find holding a lock. It ends with the server, by the kernel's
signal, and its children with it; without children it ends after `IDLE_S`.

The one of `multiprocessing` ends if a fork fails, forks although it has threads, and has the same
variables for all modules. Threads that start and await its processes at once lose exit codes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from struct import Struct

from ingress.core.base.settings import export

IDLE_S = 10.0
FORKED = Struct("<ii")  # pid, 0 if there is none; the number of threads, or an error's, negative
ENDED = Struct("<i")
MESSAGE_BYTES = 65536
_DESCRIPTORS = 5
_PR_SET_PDEATHSIG = 1


def serve(control: int, main: Callable[[int, int, str], None]) -> None:
    """Fork children until the server ends, or needs none. Runs `main` in each of them."""
    server = _ForkServer(socket.socket(fileno=control))
    gc.collect()
    gc.freeze()  # a collection would write to pages that the children share
    forked = server.run()
    if forked is not None:
        main(*forked)


class _ForkServer:
    """The children of this process. `lives` has a socket for each that has not ended."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.lives: dict[int, socket.socket] = {}
        self.selector = DefaultSelector()
        self.selector.register(control, EVENT_READ, 0)
        self.woken, self.waker = socket.socketpair()
        for each in (self.woken, self.waker):
            each.setblocking(False)
        self.selector.register(self.woken, EVENT_READ, -1)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)

    def run(self) -> tuple[int, int, str] | None:
        """Return the arguments of `main` in a child, and nothing in the fork server at its end."""
        while True:
            ready = self.selector.select(None if self.lives else IDLE_S)
            if not ready and not self.lives:
                return None
            for key, _ in ready:
                if key.data > 0:
                    # Else it was waited for in this turn: its `life` is closed, and the pid free.
                    if key.data in self.lives:
                        self.selector.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)
                elif key.data < 0:
                    self.woken.recv(4096)
                    self.reap()
                else:
                    message, descriptors, _, _ = socket.recv_fds(
                        self.control, MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                    if not message:
                        return None
                    if len(descriptors) < _DESCRIPTORS:  # more than this process may have
                        for each in descriptors:
                            os.close(each)
                        continue
                    forked = self.fork(json.loads(message), descriptors)
                    if forked is not None:
                        return forked

    def reap(self) -> None:
        """Tell the server the exit codes of children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            life = self.lives.pop(pid, None)
            if life is not None:
                if life in self.selector.get_map():
                    self.selector.unregister(life)
                _tell(life, ENDED.pack(os.waitstatus_to_exitcode(status)))
                life.close()

    def fork(
        self, given: tuple[str, dict[str, str]], descriptors: list[int]
    ) -> tuple[int, int, str] | None:
        """Fork a child. Returns the arguments of its `main` in the child, and nothing here."""
        name, variables = given
        *inherited, life_descriptor = descriptors
        life = socket.socket(fileno=life_descriptor)
        parent = os.getpid()
        pid = -1
        try:
            threads = len(os.listdir("/proc/self/task"))
            if threads == 1:  # else a child would have their locks, and nothing that releases them
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
        except OSError as error:  # too many processes: the children that there are live on
            threads = -(error.errno or 1)
        if pid:
            _tell(life, FORKED.pack(max(pid, 0), threads))
            for each in inherited:
                os.close(each)
            if pid > 0:
                self.lives[pid] = life
                self.selector.register(life, EVENT_READ, pid)
            else:
                life.close()
            return None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel knew
            os._exit(1)
        end, shared, *outputs = inherited
        for number, each in enumerate(outputs, 1):
            os.dup2(each, number)
            os.close(each)
        self.close(life)
        export(variables)
        return end, shared, name

    def close(self, life: socket.socket) -> None:
        """Close what is the fork server's, in a child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for each in (self.control, self.woken, self.waker, life, *self.lives.values()):
            each.close()


def _tell(life: socket.socket, message: bytes) -> None:
    with suppress(OSError):  # the server has given the child up, or has ended
        life.send(message)
