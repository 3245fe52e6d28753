"""Messages to systemd, for units with `Type=notify`: the server is ready, or stops.

Source: sd_notify(3). One datagram to the socket that the variable NOTIFY_SOCKET names.
"""

from __future__ import annotations

import logging
import socket

from ingress.core.base.settings import notify_socket

logger = logging.getLogger("ingress")


def notify(state: str) -> None:
    """Send a state such as "READY=1" to systemd, if it has started this process."""
    if (address := notify_socket()) is None or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):  # an abstract socket, without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.connect(address)
            client.sendall(state.encode())
    except OSError as error:
        logger.warning("systemd cannot be told %r at NOTIFY_SOCKET=%r: %s", state, address, error)
