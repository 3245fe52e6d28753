"""The control socket of a running `ingress run`, and the clients that find it.

    a request     {"command": "scale", "arguments": {...}}     one line of JSON
    an answer     {"result": ...} or {"error": "..."}           one line of JSON

A Unix socket with the mode 0600 in the runtime folder: its user may stop the server anyway, and no
other user may connect. Only JSON crosses it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ingress.base.settings import RUNTIME_DIR, runtime_folder

SUFFIX = ".sock"
MOST_BYTES = 65536  # of a request
READ_S = 5.0  # for the request's line
ANSWER_S = 300.0  # for a command that waits for constructors
JOIN_S = 1.0

logger = logging.getLogger("ingress")

Command = Callable[[Mapping[str, Any]], Any]
"""A command: it gets the arguments of a request, and returns JSON."""


class CommandError(Exception):
    """A command that cannot be done; the message is one line for the user."""


def made_folder() -> Path:
    """Return the runtime folder, made if it is not there. Raises `OSError` if it cannot be used.

    A folder that another user owns, or may write to, is refused: its sockets could be replaced.
    """
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"{str(folder)!r} must belong to this user, and no other user may write to it"
        )
    return folder


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 16
    commands: Mapping[str, Command]

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.error("the control socket failed: %r", sys.exc_info()[1])


class _Handler(socketserver.StreamRequestHandler):
    timeout = READ_S
    server: _Server

    def handle(self) -> None:
        try:
            answer = {"result": self._result()}
        except CommandError as error:
            answer = {"error": str(error)}
        except Exception as error:
            logger.exception("the command of a control socket failed")
            answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):  # the client has gone
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _result(self) -> Any:
        try:
            line = self.rfile.readline(MOST_BYTES + 1)
            request = json.loads(line)
            name, arguments = request["command"], request.get("arguments", {})
            command = self.server.commands[name]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            known = ", ".join(sorted(self.server.commands))
            raise CommandError(
                f'a request is one line, {{"command": ..., "arguments": {{}}}}; the commands: '
                f"{known}"
            ) from None
        if not isinstance(arguments, dict):
            raise CommandError(f"arguments must be an object, got {arguments!r}")
        return command(arguments)


class ControlSocket:
    """The control socket of this process, while the context is open.

    `path` is `None` if there can be none: on Windows, or in a folder that cannot be written. Then
    the log has the reason, and the server serves without it. Its name is the process's id, or
    `pid`.
    """

    def __init__(self, commands: Mapping[str, Command], pid: int | None = None) -> None:
        self.path: Path | None = None
        self._pid = pid or os.getpid()
        self._commands = commands
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if hasattr(socket, "AF_UNIX"):
            try:
                self._open()
            except OSError as error:
                logger.warning(
                    "no control socket, so `ingress status` does not find this server: %s; correct "
                    "that, or set %s to another folder",
                    error,
                    RUNTIME_DIR,
                )
        return self

    def _open(self) -> None:
        folder = made_folder()
        path = folder / f"{self._pid}{SUFFIX}"
        # Under another name until it listens: a `.sock` that refuses a connection is stale.
        waiting = folder / f".{self._pid}"
        waiting.unlink(missing_ok=True)
        server = _Server(str(waiting), _Handler, bind_and_activate=False)
        try:
            server.commands = self._commands
            server.server_bind()
            waiting.chmod(0o600)
            server.server_activate()
            waiting.replace(path)
        except BaseException:
            server.server_close()
            waiting.unlink(missing_ok=True)
            raise
        self.path, self._server = path, server
        self._thread = threading.Thread(
            target=server.serve_forever, args=(0.2,), name="ingress-control-socket", daemon=True
        )
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is None or self._thread is None or self.path is None:
            return
        self.path.unlink(missing_ok=True)
        self._server.shutdown()
        self._thread.join(JOIN_S)
        self._server.server_close()


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has a control socket, as a client sees it."""

    pid: int
    path: Path

    def ask(self, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Return the result of a command.

        Raises `CommandError` if the server refuses it, `OSError` if it does not answer.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            client.connect(str(self.path))
            request = {"command": command, "arguments": arguments}
            client.sendall(json.dumps(request).encode() + b"\n")
            with client.makefile("rb") as file:
                line = file.readline()
        if not line:
            raise ConnectionResetError("it ended before it answered")
        answer = json.loads(line)
        if "error" in answer:
            raise CommandError(answer["error"])
        return answer["result"]


def running_servers() -> tuple[list[RunningServer], list[Path]]:
    """Return the servers that listen, and the stale sockets, which are removed.

    A socket is stale if its server was killed. No server that starts is taken for one: its socket
    has its name only once it listens.
    """
    found: list[RunningServer] = []
    stale: list[Path] = []
    for path in sorted(runtime_folder().glob(f"*{SUFFIX}")):
        if not path.stem.isdecimal():
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(READ_S)
            try:
                client.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                stale.append(path)
            except FileNotFoundError:  # it has just ended
                continue
            except OSError:  # too busy to accept
                found.append(RunningServer(int(path.stem), path))
            else:
                found.append(RunningServer(int(path.stem), path))
    return found, stale
