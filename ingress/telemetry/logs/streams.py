"""The logging of one process of `ingress run`, and its standard output and error.

With `--log-format json` each line is a JSON object. What user code prints, what Python writes about
a warning or an exception, and what a library writes becomes the `message` of an object. A line that
is a JSON object already stays as it is. Only writes past Python's `sys.stdout` and
`sys.stderr`, such as those of C code, are not seen.

Not an `io.TextIOWrapper`: all threads would share the beginning of one line, and a program that
detaches the stream, or gives it another encoding, would break it for all others.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ingress.config import LoggingConfig
from ingress.telemetry.logs.formats import JSONFormatter
from ingress.telemetry.logs.options import ACCESS, LOGS, Printer, act_on_options
from ingress.telemetry.logs.sinks import STDERR, STDOUT, Sink, at_exit

LONGEST = 64 * 1024  # characters of a text without a line break that wait for one

logger = logging.getLogger("ingress")
_formatter = JSONFormatter()


class JSONStream(io.TextIOBase):
    """A text stream that puts each line into a sink as a JSON object.

    A text that ends with a line break is one line, even with further line breaks in it: a traceback
    is written at once. Each thread has its own beginning of a line. Programs find the attributes
    of the standard streams of Python, as far as they have a meaning here.
    """

    mode = "w"
    encoding, errors = "utf-8", "backslashreplace"
    line_buffering = write_through = True
    _is_of_a_child = False

    def __init__(self, name: str, sink: Sink, number: int) -> None:
        super().__init__()
        self._stream_name = name
        self.name = f"<{name}>"
        self._sink = sink
        self._number = number
        self._begun: dict[int, str] = {}  # by thread; each writes its own
        self.buffer = _Bytes(self)
        _streams.append(self)

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        thread = threading.get_ident()
        begun = self._begun.pop(thread, "") + text
        if begun.endswith("\n") or len(begun) > LONGEST:
            self.put(begun)
        else:
            self._begun[thread] = begun
        return len(text)

    def flush(self) -> None:
        """Do nothing: the sink writes, and must not be waited for.

        A forked child waits: `multiprocessing` flushes the streams just before it ends the child.
        """
        if self._is_of_a_child:
            self._sink.flush()

    def reconfigure(self, **options: object) -> None:
        """Do nothing: each line is one object in UTF-8, whatever a program prefers."""

    def detach(self) -> _Bytes:  # type: ignore[override]
        """Return the binary side. The stream can still be used."""
        return self.buffer

    def finish(self) -> None:
        """Put the texts that no line break has ended."""
        for thread in list(self._begun):
            self.put(self._begun.pop(thread, ""))  # the thread may print just now

    def forget(self) -> None:
        """Drop the texts that were begun before a fork: the parent ends them."""
        self._begun.clear()
        self._is_of_a_child = True

    def put(self, text: str, fields: Mapping[str, object] | None = None) -> None:
        """Write whole lines; `fields` are those of a line that another process has printed."""
        lines = text.rstrip("\n")
        if not lines.strip():
            return
        if lines.startswith("{") and all(is_json_object(each) for each in lines.split("\n")):
            self._sink.put(lines)
            return
        record = logging.getLogRecordFactory()(
            self._stream_name, logging.INFO, "", 0, lines, None, None
        )
        record.__dict__.update(fields or {})
        self._sink.put(_formatter.format(record))


class _Bytes(io.RawIOBase):
    """The binary side of a stream, for programs that write bytes."""

    mode = "wb"

    def __init__(self, stream: JSONStream) -> None:
        super().__init__()
        self._stream = stream
        self.name = stream.name
        self.raw = self

    def fileno(self) -> int:
        return self._stream.fileno()

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: a wrapper of a program, such as `io.TextIOWrapper`, closes it at its end."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = bytes(data)
        self._stream.write(view.decode("utf-8", "backslashreplace"))
        return len(view)


_streams: list[JSONStream] = []


def _finish_all() -> None:
    for each in _streams:
        each.finish()


def _forget_all() -> None:
    for each in _streams:
        each.forget()


at_exit(_finish_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def is_json_object(line: str | bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def write_json() -> None:
    """Make standard output and error JSON, with warnings and errors that end a thread. Idempotent.

    Streams that a program has replaced are replaced too.
    """
    if not isinstance(sys.stdout, JSONStream):
        sys.stdout = JSONStream("stdout", STDOUT, 1)
    if not isinstance(sys.stderr, JSONStream):
        sys.stderr = JSONStream("stderr", STDERR, 2)
    logging.captureWarnings(True)
    warnings_logger = logging.getLogger("py.warnings")
    if not warnings_logger.handlers:
        warnings_logger.addHandler(Printer())
        warnings_logger.propagate = False
    sys.excepthook = _log_end
    threading.excepthook = _log_thread_end


def json_stream(number: int) -> JSONStream | None:
    """Return standard output, 1, or error, 2, if it is JSON."""
    stream = sys.stdout if number == 1 else sys.stderr
    return stream if isinstance(stream, JSONStream) else None


def _log_end(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logger.critical("the program ends with an error", exc_info=(kind, error, traceback))


def _log_thread_end(ended: threading.ExceptHookArgs) -> None:
    name = "" if ended.thread is None else ended.thread.name
    if ended.exc_value is not None and not issubclass(ended.exc_type, SystemExit):
        found = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        logger.error("the thread %s ended with an error", name, exc_info=found)


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
