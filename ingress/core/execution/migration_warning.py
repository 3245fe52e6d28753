"""The warning for a `def` that runs on the event loop, once per method and process."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from collections.abc import Callable

from ingress.core.execution.callables import code_of, underlying
from ingress.exceptions import SyncMethodOnEventLoopWarning

logger = logging.getLogger("ingress")

_warned: set[tuple[str, str, int]] = set()
_warned_lock = threading.Lock()


def warn_of_def_on_loop(func: Callable[..., object], name: str) -> None:
    """Warn, once for each method. Source: seed "Environment flags"."""
    # The method's own line, not the line of a wrapper, which all decorated methods share.
    code = code_of(inspect.unwrap(underlying(func)))
    file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
    # Not the code object: equal code in two files compares equal.
    method = (name, file, line)
    with _warned_lock:
        if method in _warned:
            return
        _warned.add(method)
    text = (
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling sync method "
        f"'{name}' directly on the asyncio loop. In a future version, sync methods will "
        "be run in a threadpool by default. While it runs, no other request of this replica "
        "makes progress. Once the method and what it shares are thread-safe, opt in with "
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1, or with @serve.method(execution='threadpool') for "
        "this one; to stay on the loop, make it `async def`, or say execution='event_loop'. "
        f"({name} at {file}:{line})"
    )
    try:
        warnings.warn_explicit(text, SyncMethodOnEventLoopWarning, file, line)
    except SyncMethodOnEventLoopWarning:  # `-W error` is for tests; it must not fail the request
        logger.warning("%s", text)
