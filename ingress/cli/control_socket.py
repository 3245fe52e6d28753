"""The control socket of a running `ingress run`, and the clients that find it.

    a request     {"command": "scale", "arguments": {...}}     one line of JSON
    an answer     {"result": ...} or {"error": "..."}           one line of JSON

A Unix socket with the mode 0600 in the runtime folder: its user may stop the server anyway, and no
other user but root may connect. Only JSON crosses it.

The folder may be in a temporary folder, where any user can make one of that name first: its owner
and mode are checked before it is used, those of each socket, and the user at the other end of each
connection. No symbolic link is followed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import socketserver
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from ingress.core.base.settings import RUNTIME_DIR, is_runtime_folder_named, runtime_folder
from ingress.telemetry.logs import logger

if sys.platform != "win32":
    from pwd import getpwuid

_OTHERS_WRITE = 0o022
_MOST_COMMAND = 200  # characters of a command line in a log record
_SECRET = re.compile(r"(--[^=\0]*(?:token|password)[^=\0]*[=\0])[^\0]+")
_CREDENTIALS = Struct("iII")  # Linux: process, user, group


def made_folder() -> Path:
    """Return the runtime folder, made if it is not there. Raises `OSError` if it cannot be used."""
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if trusted_owner(folder) != os.geteuid():
        raise _refusal(folder, "belongs to another user")
    return folder


def trusted_owner(folder: Path) -> int:
    """Return the user whose servers have their sockets in a folder.

    That is this user. Root may use the folder of another user that a variable names. Raises
    `FileNotFoundError` if there is no folder, `PermissionError` if another user could have made it,
    or may write to it.
    """
    found, me = folder.lstat(), os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        is_link = stat.S_ISLNK(found.st_mode)
        raise _refusal(folder, "is a symbolic link" if is_link else "is no folder")
    if found.st_uid != me and (me != 0 or not is_runtime_folder_named()):
        raise _refusal(folder, "belongs to another user")
    if found.st_mode & _OTHERS_WRITE:
        raise _refusal(folder, "may be written by other users")
    return found.st_uid


def is_trusted_socket(path: Path, owner: int) -> bool:
    """Return whether a file is a socket of this user, which others may not connect to."""
    try:
        found = path.lstat()
    except OSError:  # its server has just ended
        return False
    is_socket = stat.S_ISSOCK(found.st_mode)
    return is_socket and found.st_uid == owner and not found.st_mode & _OTHERS_WRITE


def user_at(other_end: socket.socket) -> int | None:
    """Return the user at the other end of a connection; `None` where the system does not tell."""
    return None if (found := _peer_at(other_end)) is None else found[1]


def described_peer(other_end: socket.socket) -> str:
    """Return the process and the user at the other end of a connection, in words."""
    if (found := _peer_at(other_end)) is None:
        return "a process of this user"
    process, user = found
    name = str(user)
    with suppress(KeyError):
        name = getpwuid(user).pw_name
    with suppress(OSError):  # it has ended
        command = shown_line(os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()))
        return f"{name}, process {process}: {command[:_MOST_COMMAND]}"
    return f"{name}, process {process}"


def shown_line(cmdline: str) -> str:
    """Return the command line of a process; a token or a password is not for a log."""
    return _SECRET.sub(r"\1***", cmdline).rstrip("\0").replace("\0", " ")


def _peer_at(other_end: socket.socket) -> tuple[int, int] | None:
    if sys.platform != "linux":
        return None
    given = other_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(given)
    return process, user


def _refusal(folder: Path, problem: str) -> PermissionError:
    return PermissionError(
        f"the folder of the control sockets, {str(folder)!r}, {problem}, so it is not used; "
        f"remove it, or set {RUNTIME_DIR} to another folder"
    )


SUFFIX = ".sock"
MOST_BYTES = 65536  # of a request
READ_S = 5.0  # for the request's line
MOST_SOCKETS = 16  # in an answer
ANSWER_S = 300.0  # for a command that waits for constructors
JOIN_S = 1.0

LOGGED = frozenset(("reload", "replace", "retire", "scale", "stop"))
"""The commands that change a server: each is a line in its log."""


Command = Callable[[Mapping[str, Any]], Any]
"""A command: it gets the arguments of a request, and returns JSON."""


@dataclass(frozen=True, slots=True)
class SocketsAnswer:
    """An answer with copies of open descriptors, for a client on this machine. JSON as words."""

    value: dict[str, Any]
    descriptors: list[int]

    def __iter__(self) -> Iterator[str]:
        return iter([f"{len(self.descriptors)} sockets handed over"])


class CommandError(Exception):
    """A command that cannot be done; the message is one line for the user."""


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    address_family = getattr(socket, "AF_UNIX", socket.AF_INET)  # none on Windows

    daemon_threads = True
    request_queue_size = 16
    commands: Mapping[str, Command]

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.error("the control socket failed: %r", sys.exc_info()[1])


class _Handler(socketserver.StreamRequestHandler):
    timeout = READ_S
    server: _Server

    def handle(self) -> None:
        descriptors: list[int] = []
        try:
            result = self._result()
            if isinstance(result, SocketsAnswer):
                descriptors, result = result.descriptors, result.value
            answer = {"result": result}
        except CommandError as error:
            answer = {"error": str(error)}
        except Exception as error:
            logger.exception("the command of a control socket failed")
            answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):  # the client has gone
            data = json.dumps(answer).encode() + b"\n"
            if descriptors:
                socket.send_fds(self.connection, [data], descriptors)
            else:
                self.wfile.write(data)

    def _result(self) -> Any:
        try:
            line = self.rfile.readline(MOST_BYTES + 1)
            if user_at(self.connection) not in (None, 0, os.geteuid()):
                raise CommandError("this server belongs to another user")
            request = json.loads(line)
            name, arguments = request["command"], request.get("arguments", {})
            command = self.server.commands[name]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CommandError(
                'a request is one line, {"command": ..., "arguments": {}}; the commands: '
                f"{', '.join(sorted(self.server.commands))}"
            ) from None
        if not isinstance(arguments, dict):
            raise CommandError(f"arguments must be an object, got {arguments!r}")
        if name not in LOGGED:
            return command(arguments)
        what = " ".join([name, *(json.dumps(each) for each in arguments.values())])
        who = described_peer(self.connection)
        if name == "stop":  # afterwards there may be no log any more
            logger.info("%s, asked for by %s", what, who)
            return command(arguments)
        try:
            done = command(arguments)
        except Exception as error:
            logger.warning("%s, asked for by %s, failed: %s", what, who, error)
            raise
        outcome = "; ".join(map(str, done or ())) or "nothing to change"
        logger.info("%s, asked for by %s: %s", what, who, outcome)
        return done


@contextmanager
def control_socket(
    commands: Mapping[str, Command], pid: int | None = None
) -> Iterator[Path | None]:
    """Answer commands at the control socket of this process while the context is open.

    Yields its path, `None` if there can be none: on Windows, or in a folder that cannot be written.
    Then the log has the reason, and the server serves without it. Its name is the process's id, or
    `pid`.
    """
    with ExitStack() as opened:
        path: Path | None = None
        if hasattr(socket, "AF_UNIX"):
            try:
                path = opened.enter_context(_listening(commands, pid or os.getpid()))
            except OSError as error:
                logger.warning(
                    "no control socket, so `ingress status` does not find this server: %s%s",
                    error,
                    "" if RUNTIME_DIR in str(error) else f"; set {RUNTIME_DIR} to another folder",
                )
        yield path


@contextmanager
def _listening(commands: Mapping[str, Command], pid: int) -> Iterator[Path]:
    folder = made_folder()
    path = folder / f"{pid}{SUFFIX}"
    # Under another name until it listens: a `.sock` that refuses a connection is stale.
    waiting = folder / f".{pid}"
    waiting.unlink(missing_ok=True)
    address: Any = str(waiting)
    with _Server(address, _Handler, bind_and_activate=False) as server:
        server.commands = commands
        try:
            server.server_bind()
            waiting.chmod(0o600)
            server.server_activate()
            file = waiting.lstat()
            waiting.replace(path)
        finally:
            waiting.unlink(missing_ok=True)
        thread = threading.Thread(
            target=server.serve_forever, args=(0.2,), name="ingress-control-socket", daemon=True
        )
        thread.start()
        try:
            yield path
        finally:
            with suppress(OSError):
                # In another container, with the same folder, another server may have the same id.
                if os.path.samestat(file, path.lstat()):
                    path.unlink()
            server.shutdown()
            thread.join(JOIN_S)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has a control socket, as a client sees it.

    `user` is the user that it runs as; `None` for any.
    """

    pid: int
    path: Path
    user: int | None = None

    def connected(self, timeout_s: float) -> socket.socket:
        """Return a connection to its socket. Raises `OSError`."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.settimeout(timeout_s)
            client.connect(str(self.path))
            # The file may have been replaced since its owner was looked at.
            if self.user is not None and user_at(client) not in (None, self.user):
                raise PermissionError("another user listens at its socket")
        except BaseException:
            client.close()
            raise
        return client

    def ask(self, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Return the result of a command. Its text may have any characters.

        Raises `CommandError` if the server refuses it, `OSError` if it does not answer.
        """
        with self.connected(timeout_s) as client:
            request = {"command": command, "arguments": arguments}
            client.sendall(json.dumps(request).encode() + b"\n")
            with client.makefile("rb") as file:
                line = file.readline()
        return _result_of(line)

    def ask_for_sockets(self, command: str, timeout_s: float) -> tuple[Any, list[int]]:
        """Return the result of a command, and the descriptors that come with it. Raises as `ask`.

        The answer is short: it comes as one message.
        """
        with self.connected(timeout_s) as client:
            client.sendall(json.dumps({"command": command}).encode() + b"\n")
            line, descriptors, _, _ = socket.recv_fds(client, MOST_BYTES, MOST_SOCKETS)
        return _result_of(line), list(descriptors)


def _result_of(line: bytes) -> Any:
    """Return the result in an answer. Raises `CommandError` for a refusal, `OSError` for none."""
    if not line:
        raise ConnectionResetError("it ended before it answered")
    try:
        answer = json.loads(line)
        if "error" in answer:
            raise CommandError(str(answer["error"]))
        return answer["result"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConnectionError("its answer is not one of `ingress run`") from None


def running_servers() -> tuple[list[RunningServer], list[Path]]:
    """Return the servers that listen, and the stale sockets, which are removed.

    A socket is stale if its server was killed. No server that starts is taken for one: its socket
    has its name only once it listens. Files that this user's servers have not made are ignored.
    Raises `PermissionError` if the folder is not to be trusted.
    """
    folder = runtime_folder()
    found: list[RunningServer] = []
    stale: list[Path] = []
    try:
        owner = trusted_owner(folder)
    except FileNotFoundError:
        return found, stale
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if not path.stem.isdecimal() or not is_trusted_socket(path, owner):
            continue
        server = RunningServer(int(path.stem), path, owner)
        try:
            server.connected(READ_S).close()
        except ConnectionRefusedError:
            if owner == os.geteuid():
                path.unlink(missing_ok=True)
                stale.append(path)
        except (FileNotFoundError, PermissionError):  # it has just ended, or is another user's
            continue
        except OSError:  # too busy to accept
            found.append(server)
        else:
            found.append(server)
    return found, stale
