"""The logging of one process of `ingress run`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ingress.config import LoggingConfig
from ingress.telemetry.logs.handlers import Printer, act_on_options
from ingress.telemetry.logs.options import ACCESS, LOGS
from ingress.telemetry.logs.streams import write_json


@dataclass(frozen=True, slots=True)
class ProcessLogs:
    """The logging of a process, as its command line and its file want it.

    `is_logged` says whether requests are. `prints` is false with `--log-config`: then the handlers
    are those of that file, and requests are logged if it has a handler for `ingress.access`.
    """

    config: LoggingConfig = field(default_factory=LoggingConfig)
    is_logged: bool = True
    prints: bool = True

    def adopt(self) -> None:
        """Act on the options in this process, before it imports the application."""
        LOGS.has_handlers = self.prints
        LOGS.is_logged = self.is_logged and bool(logging.getLogger(ACCESS).handlers)
        LOGS.set_process(self.config)
        act_on_options()
        if self.prints:
            # For the user's own loggers, as long as the program gives them no handlers.
            logging.lastResort = Printer(level=logging.WARNING)
        if self.config.encoding == "JSON":
            write_json()
