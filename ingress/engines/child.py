"""The main function of a replica's process: `ingress.processes.child`, without an engine."""

from __future__ import annotations

from ingress.engines import serve_only
from ingress.processes import child


def main(socket: int, page: int, name: str) -> None:
    """Serve one replica until the server says to stop."""
    serve_only(name)
    child.main(socket, page)
