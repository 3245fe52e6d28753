"""The views that engines start: the package registers this module when it is imported.

Each is imported at its first use: a process without a listener or a recording has none of their
code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingress.observe.timeline.chrome import Window
    from ingress.serving.control.factories import Instrument
    from ingress.serving.http.admin_address import AdminOptions
    from ingress.state.server import Server


def listen(server: Server, options: AdminOptions, /) -> tuple[str, Callable[[], None]]:
    """Start an admin listener with the page. Returns its URL, and a function that stops both."""
    from ingress.observe.admin.listener import AdminListener
    from ingress.observe.live.observer import Observer, parts_of
    from ingress.observe.live.page import routes
    from ingress.state.server import snapshot_of

    observer = Observer(partial(parts_of, server))
    listener = AdminListener(partial(snapshot_of, server), options, routes(observer))
    views = ExitStack()
    views.enter_context(observer)
    views.callback(listener.stop)
    return listener.url, views.close


def record(path: str, /) -> tuple[Window, Instrument]:
    """Start a recording to a file. Returns it, and the instrument that records."""
    from ingress.observe.timeline import instrumentation
    from ingress.observe.timeline.chrome import Window

    window = Window(path)
    return window, partial(instrumentation.record, window.recorder)
