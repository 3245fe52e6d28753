"""The record of a call that was slow or that failed, made when its user code has ended."""

from __future__ import annotations

from time import time

from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import Call
from ingress.core.calls.notable import NOTABLE, Ended
from ingress.core.calls.tracing import trace_id_of
from ingress.core.execution.unreadable import readable
from ingress.exceptions import is_cancellation
from ingress.telemetry.mistakes import described
from ingress.telemetry.watchdog.stacks import raised_at

_MOST_TEXT = 500  # of an error


def note_end(
    call: Call, replica_id: ReplicaID, ended: float, failure: BaseException | None
) -> None:
    """Keep a call. A call that was cancelled has not failed."""
    error, place = "", None
    if failure is not None and not call.settled and not is_cancellation(failure):
        failure = readable(failure)
        error = described(failure)
        found = raised_at(failure)
        place = (found.file, found.line, found.function) if found.file else None
    keep(call, replica_id.unique_id, ended, error, place)


def keep(
    call: Call,
    replica: str,
    ended: float,
    error: str,
    place: tuple[str, int, str] | None = None,
) -> None:
    """Keep a call with the text of its error, "" for none."""
    deployment = call.metadata.deployment
    NOTABLE.add(
        call,
        Ended(
            call.title(),
            call.metadata.request_id,
            deployment.app_name,
            deployment.name,
            replica,
            call.started_at,
            call.assigned_at,
            call.began_at,
            call.work.streamed_at,
            ended,
            error[:_MOST_TEXT],
            place,
            trace_id_of(call),
            time(),
        ),
    )
