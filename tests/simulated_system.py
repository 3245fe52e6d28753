"""A Linux without the parts that Windows or macOS does not have, from the start of Python on.

A `sitecustomize.py` that imports this module makes it so in its process, if `SIMULATED_SYSTEM` is
"win32" or "darwin". Python's own modules and the packages below ingress are imported before: they
were installed for Linux. What Windows has instead of fork, such as its way to start processes, is
not simulated.
"""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import builtins
import contextlib
import io
import multiprocessing.popen_spawn_posix
import multiprocessing.resource_tracker
import os
import select
import signal
import socket
import socketserver
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import fastapi.testclient
import rich.live
import typer
import uvicorn.loops.asyncio
import uvicorn.supervisors
import watchfiles

IMPORTED = (fastapi, rich, typer, uvicorn, watchfiles, multiprocessing)
SYSTEM = os.environ.get("SIMULATED_SYSTEM", "linux")
FOLDERS = ("/proc", "/sys") if SYSTEM == "darwin" else ("/proc", "/sys", "/dev/fd")

ONLY_LINUX = {
    os: "memfd_create sched_getaffinity sched_setaffinity pidfd_open eventfd O_PATH",
    socket: "SO_PEERCRED AF_NETLINK SOCK_CLOEXEC SOCK_NONBLOCK SOCK_SEQPACKET TCP_USER_TIMEOUT "
    "TCP_INFO TCP_DEFER_ACCEPT",
    signal: "SIGRTMIN SIGRTMAX SIGPWR sigtimedwait sigwaitinfo",
    time: "pthread_getcpuclockid CLOCK_BOOTTIME",
    select: "epoll",
}
ONLY_UNIX_MODULES = "curses fcntl grp pty pwd readline resource syslog termios tty uvloop"
ONLY_UNIX = {
    os: "WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG O_CLOEXEC O_DIRECTORY O_NOFOLLOW "
    "O_NONBLOCK chown chroot fchmod fchown fork forkpty getegid geteuid getgid getgroups "
    "getloadavg getpgid getpgrp getpriority getsid getuid killpg lchown mkfifo nice openpty pipe2 "
    "posix_spawn pread preadv pwrite pwritev readv register_at_fork sched_yield sendfile setgid "
    "setpgid setpriority setsid setuid statvfs sysconf uname wait waitid writev",
    socket: "AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT MSG_NOSIGNAL SCM_RIGHTS SO_REUSEPORT "
    "recv_fds send_fds",
    socketserver: "UnixStreamServer UnixDatagramServer ThreadingUnixStreamServer ForkingMixIn "
    "ForkingTCPServer",
    signal: "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 "
    "SIGUSR2 SIGWINCH SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm pause pthread_kill pthread_sigmask "
    "setitimer siginterrupt sigpending sigwait",
    time: "clock_gettime clock_getres CLOCK_MONOTONIC CLOCK_THREAD_CPUTIME_ID",
    select: "poll",
}


def become(system: str) -> None:
    """Take away what a system does not have."""
    parts = [ONLY_LINUX, ONLY_UNIX] if system == "win32" else [ONLY_LINUX]
    for module, names in (each for part in parts for each in part.items()):
        for name in names.split():
            with contextlib.suppress(AttributeError):  # this Linux has none
                delattr(module, name)
    if system == "win32":
        sys.modules.update(dict.fromkeys(ONLY_UNIX_MODULES.split()))  # type: ignore[arg-type]
        for name in ("add_signal_handler", "remove_signal_handler"):
            setattr(asyncio.SelectorEventLoop, name, _refuse)
        for target, name, value in (
            (asyncio, "ProactorEventLoop", asyncio.SelectorEventLoop),
            (signal, "SIGBREAK", signal.SIGTERM),
            (socket, "socketpair", _pair),
        ):
            setattr(target, name, value)
    else:
        import fcntl

        for name in [name for name in vars(fcntl) if "SEAL" in name]:
            delattr(fcntl, name)
    for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
        setattr(os, name, _hiding(getattr(os, name)))
    builtins.open = io.open = _hiding(builtins.open)
    sys.platform = system


def _refuse(*_: object) -> NoReturn:
    raise NotImplementedError


def _pair(*_: object) -> tuple[socket.socket, socket.socket]:
    """Return two sockets that are connected, as Python makes them on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


def _hiding(function: Any) -> Callable[..., Any]:
    """Return a function of a path for which some folders do not exist."""

    def hidden(path: Any = ".", *args: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **options)

    return hidden


if SYSTEM != "linux":
    become(SYSTEM)
