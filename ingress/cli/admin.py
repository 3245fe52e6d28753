"""The admin listener of `ingress run`: on 127.0.0.1:8265, unless `--admin` says something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ingress.core.base.settings import admin_settings
from ingress.engines import local_engine
from ingress.observe.live.observer import Observer
from ingress.observe.live.page import routes
from ingress.serving.http.admin_address import OFF, AdminOptions
from ingress.state.server import Snapshot


def admin_options(address: str | None, token: str | None) -> AdminOptions:
    """Return the options of the command line, or else of the environment.

    Raises `ValueError` for an address that is none, or that others reach and has no token.
    """
    known_address, known_token = admin_settings()
    token = token or known_token
    if address is not None:
        return AdminOptions(address, token)
    if known_address is not None:
        return AdminOptions(known_address, token, takes_next_port=True)
    return AdminOptions(token=token)


def resolved(options: AdminOptions | None) -> AdminOptions:
    """Return the options, or those of `serve.start` in the module where there are none."""
    if options is None:
        return AdminOptions(OFF)
    by_code = local_engine().admin.options
    return by_code if by_code is not None and not options.is_given else options


@contextmanager
def admin_listening(
    make: Callable[[], Snapshot],
    options: AdminOptions,
    observer: Observer,
    on_listening: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> Iterator[str]:
    """Have an admin listener in this context, and yield a line that names it, "" if it is off.

    `on_listening` gets a function that stops it earlier. Raises `RuntimeError` if its address is
    busy.
    """
    if options.is_off:
        yield ""
        return
    from ingress.observe.admin.listener import AdminListener

    listener = AdminListener(make, options, routes(observer))
    on_listening(listener.stop)
    try:
        yield f"Metrics at {listener.url}/metrics, page at {listener.url}/"
    finally:
        listener.stop()
