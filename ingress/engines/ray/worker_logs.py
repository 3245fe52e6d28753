"""The log lines of Ray's workers, as a terminal shows them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypedDict

from ray._private.ray_logging import global_worker_stdstream_dispatcher

from ingress.engines.ray.code import NOT_ON_THE_WORKERS

_PRINTER = "ray_print_logs"
_RECORD = re.compile(r"[A-Z]+ \d{4}-\d\d-\d\d ")


class LogBatch(TypedDict):
    """Lines of a worker, as Ray's dispatcher hands them on; it has other keys too."""

    lines: list[str]


def shorten_tracebacks() -> None:
    """Print no traceback for a module that the workers lack: the start's error has it all."""
    if (printer := dict(global_worker_stdstream_dispatcher.handlers).get(_PRINTER)) is None:
        return
    global_worker_stdstream_dispatcher.remove_handler(_PRINTER)
    global_worker_stdstream_dispatcher.add_handler(_PRINTER, _shortened(printer))


def _shortened(printer: Callable[[LogBatch], None]) -> Callable[[LogBatch], None]:
    def print_short(data: LogBatch) -> None:
        if any(NOT_ON_THE_WORKERS in line for line in data["lines"]):
            data = {**data, "lines": [each for each in data["lines"] if _RECORD.match(each)]}
        printer(data)

    return print_short
