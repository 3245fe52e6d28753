"""The `ingress` logger and the filter that says whose record it is.

    logging.getLogger("ingress").addFilter(RequestFilter())  or on any handler of the user's

Every record that passes the filter has `request_id`, `deployment`, `replica` and `application`,
empty outside of a request.
"""

from __future__ import annotations

import logging

from ingress.call import CURRENT_CALL
from ingress.context import REPLICA

logger = logging.getLogger("ingress")


class RequestFilter(logging.Filter):
    """Add the current request's and replica's identity to a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        call = CURRENT_CALL.get(None)
        replica = REPLICA.get(None)
        record.request_id = call.metadata.request_id if call is not None else ""
        record.deployment = replica.deployment if replica is not None else ""
        record.replica = replica.replica_tag if replica is not None else ""
        record.application = replica.app_name if replica is not None else ""
        return True


logger.addFilter(RequestFilter())
