"""Messages to systemd, for units with `Type=notify`: the server is ready, reloads, lives, or stops.

Source: sd_notify(3). One datagram to the socket that the variable NOTIFY_SOCKET names.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns

from ingress.core.base.settings import notify_socket, watchdog_s
from ingress.core.calls.loops import mailbox_of
from ingress.telemetry.logs import logger

READY = "READY=1"


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


@contextmanager
def notifying_reload() -> Iterator[None]:
    """Tell systemd that a reload begins, and that it is over; also for `Type=notify-reload`."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")
    try:
        yield
    finally:
        notify(READY)


def feed_watchdog(loop: asyncio.AbstractEventLoop) -> None:
    """Show systemd that a loop turns, twice in the time of `WatchdogSec=`, if that is set."""
    if (period_s := watchdog_s()) is None:
        return

    def feed() -> None:
        notify("WATCHDOG=1")
        loop.call_later(period_s / 2, feed)

    mailbox_of(loop).post(feed)
