"""The folder of the control sockets, and the users that may have sockets in it.

The folder may be in a temporary folder, where any user can make one of that name first. Its owner
and mode are checked before it is used, those of each socket, and the user at the other end of each
connection. No symbolic link is followed.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from struct import Struct

if sys.platform != "win32":
    from pwd import getpwuid

from ingress.core.base.settings import RUNTIME_DIR, is_runtime_folder_named, runtime_folder

_OTHERS_WRITE = 0o022
_MOST_COMMAND = 200  # characters of a command line in a log record
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
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]
        command = " ".join(_without_secrets([os.fsdecode(each) for each in words]))
        return f"{name}, process {process}: {command[:_MOST_COMMAND]}"
    return f"{name}, process {process}"


def _without_secrets(words: list[str]) -> list[str]:
    """Return the words of a command line; a token or a password is not for a log."""
    shown = []
    is_secret = False
    for word in words:
        name, _, value = word.partition("=")
        hides = name.startswith("--") and any(each in name for each in ("token", "password"))
        shown.append("***" if is_secret else f"{name}=***" if hides and value else word)
        is_secret = hides and not value
    return shown


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
