"""The `ingress` logger and the filter that says whose record it is.

    logging.getLogger("ingress").addFilter(RequestFilter())  or on any handler of the user's

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
"""Begins as uvicorn's own record of such a failure, which alerts may look for."""

_server_logger = logging.getLogger("uvicorn.error")

MAX_FIELD = 256
"""The longest a field may be, in characters, that a client chooses and nobody has checked."""


class RequestFilter(logging.Filter):
    """Add the current request's and replica's identity to a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = get_request_context()
        replica = REPLICA.get(None)
        record.request_id = context.request_id
        record.route = context.route
        record.application = "" if replica is None else replica.app_name
        record.deployment = context.deployment
        record.replica = context.replica
        record.multiplexed_model_id = _printable(context.multiplexed_model_id)
        return True


def log_failure(call: Call, error: BaseException) -> None:
    """Log what failed a request, once and in the place of the server, which is not told.

    `exc_info` is all of it, for handlers that look there; what is printed is `format_error`.
    """
    if _server_logger.isEnabledFor(logging.ERROR):
        # In the request's context: filters of the user's may ask whose record it is.
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
    """Return `text` as it may stand in a line of a log: no line breaks, no control characters."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:MAX_FIELD]


_IDENTITY = RequestFilter()
logger.addFilter(_IDENTITY)
