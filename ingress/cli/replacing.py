"""`ingress run --replace`: a new server takes the place of a running one, and no request is lost.

    new                                   old
    finds the old one by its address
    "replace"                         --> answers with its listening sockets (SCM_RIGHTS)
    starts its applications               serves
    "retire", once all are ready      --> tells systemd the new process id, accepts no more
    accepts                               open connections end, then it ends

If the new one does not become ready, the old one has only passed copies of its sockets, and serves
on. Connections that wait to be accepted are in the kernel's queue, which both have. Worker
processes have a socket each: there the new ones bind the same port, and the old ones empty their
queues. If one process takes the place of workers, it accepts before they retire.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from ingress.cli.control_socket import (
    Command,
    CommandError,
    RunningServer,
    SocketsAnswer,
    running_servers,
)
from ingress.cli.sd_notify import notify
from ingress.cli.target import refusal, refusing
from ingress.cli.terminal import say, tamed
from ingress.cli.workers import Supervisor
from ingress.config import HTTPOptions
from ingress.core.base.settings import Settings
from ingress.engines import local_engine
from ingress.serving.http.address import SharedPort, url_of
from ingress.serving.http.server_options import ServerOptions

ASK_S = 10.0
RETIRE_S = 600.0
"""Seconds in which the open connections of a replaced server may end, also streams."""


def take_over(server: RunningServer) -> None:
    """Have a server accept no more connections.

    Ends the program if it refuses: another one replaces it.
    """
    try:
        server.ask("retire", ASK_S, pid=os.getpid())
    except CommandError as error:
        raise refusal(tamed(f"server {server.pid} is not replaced: {error}")) from None
    except OSError:
        say(f"server {server.pid} has ended meanwhile")
    else:
        say(f"replaces server {server.pid}, which ends its open connections")


def replaced_by(options: ServerOptions) -> tuple[RunningServer | None, ServerOptions]:
    """Return the server that listens at the address of these options, and the options with it.

    Ends the program if it cannot be replaced. Without one there is nothing to replace.
    """
    wanted = _place(options)
    with refusing(PermissionError):
        found, _ = running_servers()
    refusals = []
    for server in found:
        try:
            view = server.ask("view", ASK_S)
            if not view["url"] or _place_of(view["url"]) != wanted:
                continue
            if server.pid == 1:
                raise CommandError(
                    "it is process 1 of its container, which ends with it; replace the container"
                )
            return server, _taken(options, *server.ask_for_sockets("replace", ASK_S))
        except (CommandError, OSError) as error:  # it may be one that ends its open connections
            refusals.append(f"server {server.pid} cannot be replaced: {error}")
    if refusals:
        raise refusal(tamed("; ".join(refusals)))
    say(f"no server at {wanted} to replace")
    return None, options


def _taken(options: ServerOptions, told: Any, sockets: list[int]) -> ServerOptions:
    if not sockets:
        return replace(options, replaces=True, shares_port=True)
    for each in sockets:
        os.set_inheritable(each, True)  # by the workers
    return replace(options, replaces=True, fd=sockets[0], uds=told["uds"])


def _place(options: ServerOptions) -> str:
    """Return the address that these options ask for."""
    if options.fd is not None:
        with socket.socket(fileno=os.dup(options.fd)) as given:
            return _place_of(url_of(given, is_tls=False))
    if options.uds is not None:
        return f"unix:{options.uds}"
    address = options.address(HTTPOptions(**options.http), Settings.from_environment())
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


def _place_of(url: str) -> str:
    return url if url.startswith("unix:") else urlsplit(url).netloc


@dataclass(eq=False, slots=True)
class Handover:
    """The commands with which a server is replaced. `sockets` are those that it listens on.

    `retire` serves open connections to their ends, for at most so many seconds, and returns.
    `stop_admin` frees the address of the admin listener. Thread-safe: of two servers that ask it to
    retire, one is refused.
    """

    _sockets: Callable[[], Sequence[socket.socket]]
    _retire: Callable[[float], object]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _heir: int | None = None
    stop_admin: Callable[[], object] = lambda: None

    def table(self) -> dict[str, Command]:
        return {"replace": self.replace, "retire": self.retire}

    def replace(self, arguments: Mapping[str, Any]) -> SocketsAnswer:
        """Hand out copies of the listening sockets."""
        self._check()
        found = self._sockets()
        name = found[0].getsockname() if found else None
        path = name if isinstance(name, str) and name and not name.startswith("\0") else None
        return SocketsAnswer({"uds": path}, [each.fileno() for each in found])

    def retire(self, arguments: Mapping[str, Any]) -> list[str]:
        """Let another process serve the sockets; end with the last open connection."""
        heir = int(arguments["pid"])
        with self._lock:
            self._check()
            self._heir = heir
        # While this is the main process of the unit: systemd hears no other.
        notify(f"MAINPID={heir}")
        self.stop_admin()  # the other process has its own at this address
        threading.Thread(target=self._end, name="ingress-retire", daemon=True).start()
        return [f"process {heir} serves from now on"]

    def _check(self) -> None:
        if self._heir is not None:
            raise CommandError(f"process {self._heir} replaces it already")

    def _end(self) -> None:
        self._retire(RETIRE_S)
        os.kill(os.getpid(), signal.SIGTERM)


def handover_of_one_process() -> Handover:
    """Return the commands of a server that is one process."""
    engine = local_engine()

    def sockets() -> list[socket.socket]:
        server = engine.http.server
        if server is None:
            raise CommandError("it does not listen yet")
        return server.hand_over()

    return Handover(sockets, engine.retire)


def handover_of_workers(supervisor: Supervisor, port: SharedPort) -> Handover:
    """Return the commands of a server with worker processes."""

    def retire(wait_s: float) -> None:
        port.is_handed_over = True
        with suppress(CommandError):  # it stops already
            supervisor.ask("retire", {"wait_s": wait_s}, wait_s + ASK_S)

    return Handover(port.shared, retire)
