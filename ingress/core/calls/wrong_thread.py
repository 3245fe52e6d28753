"""Reports of `call_soon` from another thread than the loop's own.

Each line of code is reported once for each deployment and kind of object.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ingress.core.base.libraries import is_library

logger = logging.getLogger("ingress")

_LINES = 1000  # of code, after which there are no more reports
_LOOPS = frozenset(("asyncio.base_events", "asyncio.events", "asyncio.runners"))

_told: set[tuple[str, str, str, int]] = set()


def report(callback: Callable[..., Any], args: tuple[Any, ...], loop_name: str) -> None:
    """Log that this thread calls back on the loop `loop_name`: the object, the line, the remedy."""
    inner: FrameType | None = sys._getframe(2)
    value: Any = None
    while inner is not None and _package_of(inner) == "asyncio":
        if inner.f_globals.get("__name__") not in _LOOPS:
            value = inner.f_locals.get("self", value)
        inner = inner.f_back
    if value is None:
        value = _set_by(callback, args)
    place = _users(inner)
    file, line = (place.f_code.co_filename, place.f_lineno or 0) if place is not None else ("", 0)
    kind = "call_soon" if value is None else _kind_of(value)
    key = loop_name.partition("#")[0], kind, file, line  # of a deployment, not of each replica
    # Race of two threads at one line: `set.add` is one step, and a second record does no harm.
    if key in _told or len(_told) >= _LINES:
        return
    _told.add(key)
    name = _name_of(value, place)
    is_on_loop = asyncio._get_running_loop() is not None
    logger.warning(
        "%s: %s belongs to the event loop %s, and was used %s %s. ingress has woken that loop, "
        "which asyncio does not do. %s. See docs/async-objects.md.",
        f"{file}:{line}" if place is not None else "A library",
        f"{name} ({kind})" if name else kind,
        loop_name,
        "on the event loop" if is_on_loop else "in the thread",
        threading.current_thread().name,
        'Let the replicas share one loop: @serve.deployment(loop="shared")'
        if is_on_loop
        else "Make the function `async def`, or hand the step over with loop.call_soon_threadsafe",
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _set_by(callback: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the future or the task that a callback is of, `None` for any other function."""
    for each in (*args, getattr(callback, "__self__", None)):
        if isinstance(each, asyncio.Future):
            return each
    return None


def _kind_of(value: Any) -> str:
    cls = type(value)
    return f"{cls.__module__.partition('.')[0].lstrip('_')}.{cls.__name__}"


def _users(inner: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code, or else of a library other than ingress."""
    frame = inner
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return inner if inner is not None and _package_of(inner) != "ingress" else None


def _name_of(value: Any, place: FrameType | None) -> str:
    """Return the variable that user code has the object in, "" if there is none."""
    if value is None or place is None:
        return ""
    for variables in (place.f_locals, place.f_globals):
        for name, each in [*variables.items()]:
            if each is value:
                return name
    return ""
