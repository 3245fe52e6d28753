"""The `ingress` logger, and the filter that adds the request's identity to a record.

    logging.getLogger("ingress").addFilter(RequestFilter())  or on any handler

Every record that passes the filter has `request_id`, `route`, `application`, `deployment`,
`replica` and `multiplexed_model_id`, empty outside of a request.
"""

from __future__ import annotations

import logging
from contextvars import copy_context

from ingress.calls.call import CURRENT_CALL, Call
from ingress.context import REPLICA
from ingress.execution.tracebacks import format_error
from ingress.request_context import get_request_context

logger = logging.getLogger("ingress")

FAILURE = "Exception in ASGI application: request %s to %s, replica %s"
"""Begins like uvicorn's own record of such a failure, which alerts may match."""

_server_logger = logging.getLogger("uvicorn.error")

MAX_FIELD = 256
"""Maximum length, in characters, of a field that a client chooses freely."""


class RequestFilter(logging.Filter):
    """A filter that adds the current request's and replica's identity to a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        replica = REPLICA.get(None)
        if replica is None and "replica" in vars(record):
            return True  # it was made in another process, or in another thread
        context = get_request_context()
        record.request_id = context.request_id
        record.route = context.route
        record.application = "" if replica is None else replica.app_name
        record.deployment = context.deployment
        record.replica = context.replica
        record.multiplexed_model_id = _printable(context.multiplexed_model_id)
        return True


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
        REPLICA.set(call.runner.context)
        replica = str(call.runner.context.replica_id)
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


def _printable(text: str) -> str:
    """Return `text` without line breaks and control characters, fit for a line of a log."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:MAX_FIELD]


_IDENTITY = RequestFilter()
logger.addFilter(_IDENTITY)
