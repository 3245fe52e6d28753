"""Standard output and error of a server with `--log-format json`: one JSON object for each line.

What user code prints, what Python writes about a warning or an exception, and what a library writes
becomes the `message` of an object. A line that is a JSON object already stays as it is. Only writes
past Python's `sys.stdout` and `sys.stderr`, such as those of C code, are not seen.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from types import TracebackType
from typing import Any

from ingress.logs.formats import JSONFormatter
from ingress.logs.handlers import Printer
from ingress.logs.sinks import STDERR, STDOUT, Sink

LONGEST = 64 * 1024  # characters of a text without a line break that wait for one

logger = logging.getLogger("ingress")
_formatter = JSONFormatter()


class JSONStream(io.TextIOBase):
    """A text stream that puts each line into a sink as a JSON object.

    A text that ends with a line break is one line, even with further line breaks in it: a traceback
    is written at once. Each thread has its own beginning of a line.
    """

    def __init__(self, name: str, sink: Sink, number: int) -> None:
        super().__init__()
        self._stream_name = name
        self._sink = sink
        self._number = number
        self._begun = threading.local()
        self.buffer = _Bytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        begun = getattr(self._begun, "text", "") + text
        if begun.endswith("\n") or len(begun) > LONGEST:
            self._begun.text = ""
            self._put(begun)
        else:
            self._begun.text = begun
        return len(text)

    def flush(self) -> None:
        """Do nothing: the sink writes, and must not be waited for."""

    def _put(self, text: str) -> None:
        lines = text.rstrip("\n")
        if not lines.strip():
            return
        if lines.startswith("{") and all(_is_object(each) for each in lines.split("\n")):
            self._sink.put(lines)
            return
        record = logging.getLogRecordFactory()(
            self._stream_name, logging.INFO, "", 0, lines, None, None
        )
        self._sink.put(_formatter.format(record))


class _Bytes(io.RawIOBase):
    """The binary side of a stream, for programs that write bytes."""

    def __init__(self, stream: JSONStream) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = bytes(data)
        self._stream.write(view.decode("utf-8", "backslashreplace"))
        return len(view)


def _is_object(line: str) -> bool:
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
