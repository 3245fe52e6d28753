"""The test whether a request comes from this machine."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

IN_PROCESS = "testserver"
"""The server's name and address for `TestClient` in this process; no socket has it."""

_FORWARDED = frozenset((b"forwarded", b"via", b"x-real-ip"))


def is_local(scope: Scope, target: bytes | None) -> bool:
    """Return whether a request was sent from this machine to itself, by a local name.

    `target` is what its client asks for: a path or a URL, b"" or `None` as `target_of` says.

    The Host header is checked too: a web page whose own name resolves to 127.0.0.1 reaches the
    loopback address through its reader's browser, but cannot send another Host. A proxy on this
    machine says in other headers that it forwards the request of another client.
    """
    host = b""
    for name, value in scope["headers"]:
        if name == b"host":
            host = host or value
        elif name in _FORWARDED or name.startswith(b"x-forwarded-"):
            return False
    if target is None or not _is_of_this_machine(target):
        return False
    server = scope.get("server")
    address = server[0] if server else ""
    text = host.decode("latin-1").lower()
    text = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if text == IN_PROCESS:
        return bool(address == IN_PROCESS)
    over_socket_file = server is None or server[1] is None
    return (over_socket_file or address == IN_PROCESS or _is_loopback(address)) and _is_loopback(
        text
    )


def _is_of_this_machine(target: bytes) -> bool:
    """Return whether the target of a request names no other machine. A URL precedes the Host."""
    try:
        url = urlsplit(target)
        return not url.scheme or _is_loopback((url.hostname or b"").decode("latin-1"))
    except ValueError:
        return False


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
