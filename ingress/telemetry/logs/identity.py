"""The identity of a log record: the request and the replica that its code worked for.

    request_id              of a batch, those of all its requests, joined by commas
    route                   the path template, such as "/items/{id}"
    application, deployment, replica, multiplexed_model_id
    trace_id, span_id       with `--tracing`: of the current span, in hexadecimal digits

All are empty outside of a request. While applications run, `name_records` gives them to every
record of the process, whatever its logger, by a record factory around the current one: no logger
and no handler of the user's is touched. Meanwhile asyncio's logger has a filter: `_is_wanted`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ingress.context import REPLICA
from ingress.core.calls.call import CURRENT_CALL, current_calls
from ingress.core.calls.tracing import log_fields
from ingress.exceptions import is_cancellation

_ASYNCIO = logging.getLogger("asyncio")

FIELDS = (
    "request_id", "route", "application", "deployment", "replica", "multiplexed_model_id",
    "trace_id", "span_id",
)  # fmt: skip

MAX_FIELD = 256
"""Maximum length, in characters, of a field that a client chooses freely."""


def identity() -> dict[str, str]:
    """Return the fields of a record that is made now, by name."""
    call, replica = CURRENT_CALL.get(None), REPLICA.get(None)
    fields = dict.fromkeys(FIELDS, "")
    if replica is not None:
        fields |= {
            "application": replica.app_name,
            "deployment": replica.deployment,
            "replica": replica.replica_tag,
        }
    if call is not None:
        calls = [call] if call.members is None else current_calls()
        fields |= {
            "route": call.current_route(),
            "multiplexed_model_id": printable(call.metadata.multiplexed_model_id),
            "request_id": ",".join([each.metadata.request_id for each in calls]),
        }
    return fields | log_fields(call)


class RequestFilter(logging.Filter):
    """A filter that adds the current request's and replica's identity to a record.

    Fields that the record has already stay: those of `extra`, and those of another process.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        fields = record.__dict__
        if type(fields) is not _Attributes and "multiplexed_model_id" not in fields:
            for name, value in identity().items():
                fields.setdefault(name, value)
        return True


class _Attributes(dict[str, object]):
    """The attributes of a record, with the fields of its identity.

    `logging` asks with `in` whether an attribute is there, and refuses an `extra` of that name.
    The fields do not count: a program that gives `extra={"request_id": ...}` keeps working, and its
    own value wins.
    """

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return name not in FIELDS and super().__contains__(name)

    def __reduce__(
        self,
    ) -> tuple[object, ...]:  # a process without this package may unpickle the record
        return dict, (dict(self),)


@dataclass(frozen=True, slots=True)
class _Factory:
    """A record factory that adds the identity to the records of another."""

    previous: Callable[..., logging.LogRecord]

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.previous(*args, **kwargs)
        fields = getattr(record, "__dict__", None)
        if type(fields) is dict:  # else another one of these has made it
            record.__dict__ = _Attributes({**identity(), **fields})
        return record


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return whether a record of asyncio's is not about a task that a cancellation has ended.

    A task of the user's gets the error of a call that was cancelled with its request. The request
    is over, so no code may await the task any more.
    """
    error = record.exc_info[1] if record.exc_info else None
    return (
        error is None
        or "exception was never retrieved" not in str(record.msg)
        or not is_cancellation(error)
    )


_lock = threading.Lock()


def name_records() -> None:
    """Give each record of this process its identity, from now on. Thread-safe."""
    with _lock:
        _ASYNCIO.addFilter(_is_wanted)  # no effect the second time
        current = logging.getLogRecordFactory()
        if not isinstance(current, _Factory):
            logging.setLogRecordFactory(_Factory(current))


def leave_records() -> None:
    """Restore the record factory, unless another one has been put around it. Thread-safe."""
    with _lock:
        _ASYNCIO.removeFilter(_is_wanted)
        current = logging.getLogRecordFactory()
        if isinstance(current, _Factory):
            logging.setLogRecordFactory(current.previous)


def printable(text: str) -> str:
    """Return `text` without line breaks and control characters, fit for a line of a log."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:MAX_FIELD]
