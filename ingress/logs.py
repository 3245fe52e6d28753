"""The `ingress` logger and the filter that says whose record it is.

    logging.getLogger("ingress").addFilter(RequestFilter())  or on any handler of the user's

Every record that passes the filter has `request_id`, `route`, `application`, `deployment`,
`replica` and `multiplexed_model_id`, empty outside of a request.
"""

from __future__ import annotations

import logging

from ingress.context import REPLICA
from ingress.request_context import get_request_context

logger = logging.getLogger("ingress")

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


def _printable(text: str) -> str:
    """Return `text` as it may stand in a line of a log: no line breaks, no control characters."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:MAX_FIELD]


logger.addFilter(RequestFilter())
