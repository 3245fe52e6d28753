"""The records of failures: one traceback, without the frames of the server, and not long."""

from __future__ import annotations

import logging
from contextvars import copy_context
from traceback import walk_tb

from ingress.core.base.libraries import is_ours
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.execution.unreadable import traceback_of
from ingress.telemetry.logs.identity import RequestFilter
from ingress.telemetry.tracebacks import format_error

FAILURE = "Exception in ASGI application: request %s to %s, replica %s"
"""Begins like uvicorn's own record of such a failure, which alerts may match."""

_server_logger = logging.getLogger("uvicorn.error")
_IDENTITY = RequestFilter()


def _with_short_traceback(record: logging.LogRecord) -> bool:
    """Give a record the text that a failed request has, for all handlers.

    A record of this package, or of uvicorn about an error that passed through this package: of a
    WebSocket, or of an app that is mounted in another one.
    """
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if error is not None and not record.exc_text:
        frames = walk_tb(traceback_of(error))
        if record.name == "ingress" or any(
            is_ours(frame.f_code.co_filename) for frame, _ in frames
        ):
            record.exc_text = format_error(error)
    return True


for _name in ("ingress", "uvicorn.error"):
    logging.getLogger(_name).addFilter(_with_short_traceback)


def log_failure(call: Call, error: BaseException) -> None:
    """Log the error that failed a request, once. The server does not get the error.

    `exc_info` has the whole error, for handlers that read it; the printed text is `format_error`'s.
    """
    if _server_logger.isEnabledFor(logging.ERROR):
        # In the request's context, because the user's filters may read it.
        copy_context().run(_log_failure, call, error)


def _log_failure(call: Call, error: BaseException) -> None:
    CURRENT_CALL.set(call)
    replica = "-"
    if call.runner is not None:
        call.runner.make_current()
        replica = str(call.runner.replica_id)
    record = _server_logger.makeRecord(
        _server_logger.name,
        logging.ERROR,
        __file__,
        0,
        FAILURE,
        (call.metadata.request_id, call.current_route(), replica),
        (type(error), error, error.__traceback__),
        "log_failure",
    )
    record.exc_text = format_error(error)
    _IDENTITY.filter(record)
    _server_logger.handle(record)
