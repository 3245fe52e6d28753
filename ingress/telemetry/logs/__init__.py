"""Log records: their identity, their formats, and the threads that write them.

    identity      the request and the replica of each record, by a record factory and a filter
    failures      the record of a request that failed
    formats       a record as text, as a JSON object with Ray Serve's names, as an access line
    last_lines    the last lines of each replica, for the page
    sinks         bounded queues of lines, each with the thread that writes them
    options       the `LoggingConfig` of the process, and of each deployment; the handlers and the
                  filter that act on these options
    streams       standard output and error as JSON objects, for `--log-format json`

Read `options` first. User code needs `RequestFilter` at most:

    logging.getLogger("mine").addFilter(RequestFilter())  or on any handler
"""

from __future__ import annotations

import logging

from ingress.telemetry.logs.formats import FAILURE as FAILURE
from ingress.telemetry.logs.formats import log_failure as log_failure
from ingress.telemetry.logs.identity import MAX_FIELD as MAX_FIELD
from ingress.telemetry.logs.identity import RequestFilter as RequestFilter

logger = logging.getLogger("ingress")
logger.addFilter(RequestFilter())
