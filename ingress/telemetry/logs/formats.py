"""The formats of log records: text, JSON with Ray Serve's names, and access lines.

Clients and users choose parts of a message: a model id, a path, the text of an exception. None of
it can begin a line that looks like another record, or steer a terminal: control characters are
escaped, and a further line of a message that begins like a record is indented.

The record of a failure has one traceback, without the frames of the server, and not long.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from traceback import walk_tb

from ingress.core.base.foreign import attempt
from ingress.core.base.libraries import is_ours
from ingress.core.base.options import LOG_ATTRIBUTES
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.execution.errors import readable, traceback_of
from ingress.telemetry.logs.identity import FIELDS, RequestFilter, printable
from ingress.telemetry.tracebacks import format_error

_NOT_SHOWN = LOG_ATTRIBUTES | {"color_message", "skip_context_filter"}
_FLATTENED = "ray_serve_extra_fields"
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LIKE_A_RECORD = re.compile(r"\n(?=(?:(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\{))")
_COLORS = {"DEBUG": 36, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 91}


def tame(text: str) -> str:
    """Return text in which no line looks like another record, and no character is a command."""
    if "\n" in text:
        text = _LIKE_A_RECORD.sub("\n    | ", text)
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def message_of(record: logging.LogRecord) -> str:
    """Return the message of a record, also if its arguments do not fit. Never fails."""
    return attempt(
        record.getMessage,
        lambda error: f"{_plain(record.msg)} (its arguments do not fit: {_plain(error)})",
    )


def _plain(value: object) -> object:
    """Return a value that JSON has no type for in another way. Never fails."""

    def plain() -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return str(value)

    name = type(value).__name__
    return attempt(plain, lambda error: f"<{name} that cannot be shown: {type(error).__name__}>")


def _dumped(fields: dict[str, object]) -> str:
    try:
        return json.dumps(fields, default=_plain, allow_nan=False, skipkeys=True)
    except (ValueError, TypeError, RecursionError):  # NaN, a value that contains itself
        safe = (str, int, bool, type(None))
        plain = {k: v if isinstance(v, safe) else str(_plain(v)) for k, v in fields.items()}
        return json.dumps(plain)


class _Formatter(logging.Formatter):
    """A format that may have further attributes of each record, and colors."""

    def __init__(self, attributes: Sequence[str] = (), *, colors: bool = False) -> None:
        super().__init__()
        self._attributes, self._colors = tuple(attributes), colors


class JSONFormatter(_Formatter):
    """One JSON object for each record, in one line, with the names of Ray Serve's JSON logs.

    `attributes` are further attributes of each record. Empty fields of the identity are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": message_of(record),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            "name": record.name,
            "timestamp_ns": int(record.created * 1e9),
        }
        if text := exception_of(self, record):
            fields["exc_text"] = text
        if record.stack_info:
            fields["stack_info"] = record.stack_info
        for name in self._attributes:
            fields.setdefault(name, getattr(record, name, None))
        for name, value in list(record.__dict__.items()):
            if name == _FLATTENED and isinstance(value, dict):
                fields.update(value)
            elif name not in _NOT_SHOWN and (value or name not in FIELDS):
                fields[name] = value
        if fields.get("deployment"):
            fields.setdefault("component_name", "replica")
        request_id = fields.get("request_id")
        if isinstance(request_id, str) and "," in request_id:
            fields["request_ids"] = request_id.split(",")
        return _dumped(fields)


class TextFormatter(_Formatter):
    """The text of `ingress run`: level, message, and the replica and the request, if any.

    INFO:     loaded [Model#0 8d3f...]
    """

    def format(self, record: logging.LogRecord) -> str:
        first, *others = tame(message_of(record)).split("\n", 1)
        made = {"message": message_of, "asctime": self.formatTime}  # by other formatters, if any
        for name in self._attributes:
            value = made[name](record) if name in made else getattr(record, name, None)
            first += f" {name}={tame(str(_plain(value)))}"
        if whose := [each for each in _whose(record) if each not in first]:
            first += f" [{tame(' '.join(whose))}]"
        parts = [f"{prefix_of(record.levelname, colors=self._colors)} {first}", *others]
        if text := exception_of(self, record):
            parts.append(tame(text))
        if record.stack_info:
            parts.append(tame(record.stack_info))
        return "\n".join(parts)


def _whose(record: logging.LogRecord) -> list[str]:
    fields = record.__dict__
    deployment, replica = fields.get("deployment"), fields.get("replica")
    names = [
        f"{deployment}#{replica}" if deployment else "",
        fields.get("request_id"),
        _trace_of(fields),
    ]
    return [str(each) for each in names if each]


def _trace_of(fields: Mapping[str, object]) -> str:
    """Return the trace and the span of a record in words, "" without them."""
    trace_id, span_id = fields.get("trace_id"), fields.get("span_id")
    return f"trace {trace_id}{f' span {span_id}' if span_id else ''}" if trace_id else ""


def prefix_of(level: str, *, colors: bool) -> str:
    """Return a level as uvicorn prints it: followed by a colon, and padded."""
    padding = " " * (8 - len(level))
    color = _COLORS.get(level)
    if colors and color:
        level = f"\x1b[{color}m{level}\x1b[0m"
    return f"{level}:{padding}"


def exception_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a record, "" if it has none. Never fails."""
    if record.exc_text:
        return record.exc_text
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    info, error = record.exc_info, record.exc_info[1]
    record.exc_text = attempt(
        lambda: formatter.formatException(info),
        lambda _: f"{type(readable(error)).__name__}: it cannot be shown",
    )
    return record.exc_text


def _one_word(text: str) -> str:
    """Return a text of a client that is one word: neither a further field nor a command."""
    return printable(text).replace(" ", "\\x20")


class AccessText(_Formatter):
    """An access line as text.

    INFO:     127.0.0.1:51234 GET /items/{id} 200 3.1ms queue 0.2ms Items#0 8d3f...
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = record.__dict__
        status = str(fields.get("status", ""))
        replica = f"{fields['deployment']}#{fields['replica']}" if fields.get("replica") else ""
        rest = [
            f"{fields.get('latency_ms', 0):.1f}ms",
            f"queue {fields.get('queue_ms', 0):.1f}ms",
            *filter(None, (replica, fields.get("request_id"), _trace_of(fields))),
        ]
        head = [_one_word(str(fields.get(each) or "")) for each in ("client", "method")]
        route = _one_word(fields.get("route") or fields.get("path") or "-")
        if self._colors:
            color = 31 if status >= "5" else 33 if status >= "4" else 32
            status = f"\x1b[{color}m{status}\x1b[0m"
            route, rest = f"\x1b[1m{route}\x1b[0m", [f"\x1b[2m{' '.join(rest)}\x1b[0m"]
        line = " ".join([*filter(None, head), route, status, *rest])
        return f"{prefix_of(record.levelname, colors=self._colors)} {line}"


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
