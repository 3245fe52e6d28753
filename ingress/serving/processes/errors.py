"""Exceptions that cross between two processes, and descriptions of a process's end."""

from __future__ import annotations

import logging
import signal
from typing import Any

from ingress.core.base.types import ReplicaID
from ingress.core.calls.retries import NotBegunError
from ingress.core.execution.execution import contained
from ingress.core.execution.mistakes import last_line as described
from ingress.core.execution.tracebacks import explanation_of, format_error
from ingress.exceptions import RayServeException, UserCodeExit
from ingress.serving.processes.code import culprit
from ingress.serving.processes.frames import FrameError, dumps, loads

logger = logging.getLogger("ingress")

_KEPT = 8_000  # characters: two such texts are less than `LARGE`, even with four bytes each


def pickled_error(error: BaseException, at_most: int | None = None) -> bytes:
    """Return an error and its traceback's text, pickled; an error that cannot be is described.

    So is one whose pickle has more than `at_most` bytes: some contain the document they are about.
    """
    text = format_error(error)
    told = described(error)
    try:
        content = dumps((error, text))
        _checked(loads(content))
    except Exception as problem:
        told = f"{told} (it cannot be sent to another process: {described(problem)})"
        sent = RayServeException(told)
        if explanation := explanation_of(error):
            sent.add_note(explanation)
        content = dumps((sent, text))
    if at_most is not None and len(content) > at_most:
        return dumps((RayServeException(told[:_KEPT]), text[-_KEPT:]))
    return content


def unpickled_error(content: memoryview) -> BaseException:
    """Return the error that `pickled_error` was given, with its traceback as a note.

    Never fails: one that cannot be read, or that a loop would not survive, is described.
    """
    try:
        error, text = _checked(loads(content))
    except Exception as problem:  # its module is known to the child only
        return unreadable("the exception that user code raised", problem)
    try:
        BaseException.add_note(error, f"\nThe traceback in the replica's process:\n{text}")
    except Exception:  # a user's exception class without attributes
        logger.debug("%s takes no note:\n%s", type(error).__name__, text, exc_info=True)
    return error


def _checked(told: Any) -> tuple[BaseException, str]:
    """Return an error that arrived, and its traceback, as they may leave user code.

    Raises an `Exception` if a pickle had something else in their place.
    """
    error, text = told
    # No future takes a `StopIteration`.
    if not issubclass(type(error), BaseException) or issubclass(type(error), StopIteration):
        raise TypeError(f"its pickle has the {type(error).__name__} {error!r:.100}")
    if isinstance(error, UserCodeExit):
        error.__cause__ = error.original  # a pickle leaves the cause out
    return contained(error, "user code", is_task=False), str(text)


def unreadable(what: str, problem: Exception) -> RayServeException:
    """Return the error of a value that arrived: as its class is known to the other process only."""
    return RayServeException(f"{what} cannot be read: {described(problem)}")


def unsendable(deployment: str, problem: Exception, **values: object) -> RayServeException:
    """Return the error of values that cannot be pickled, which names the part at fault.

    `deployment` is the one that gets them or makes them; a value's name begins the path to a part.
    """
    paths = (culprit(value, name) for name, value in values.items())
    path = next(filter(None, paths), next(iter(values)))
    has_advice = (OSError, RayServeException)  # a response says how it can be passed on
    advice = (
        '; send plain data instead, make the object where it is needed, or use isolation="thread"'
    )
    return RayServeException(
        f"{path}, of a call of deployment {deployment!r}, cannot be sent to another process: "
        f"{described(problem)}{'' if isinstance(problem, has_advice) else advice}"
    )


def end_of(
    pid: int, code: int | None, failure: Exception | None, fault: Exception | None = None
) -> str:
    """Return the description of a process's end: by its exit code, negative for a signal.

    `fault` is the error of what it has sent, if the server has ended it.
    """
    if failure is not None:
        return f"its process could not be started: {failure}"
    if isinstance(fault, FrameError):
        return (
            f"its process {pid} was ended, because it sent {fault}; user code must not write to a "
            "descriptor that it has not opened"
        )
    if fault is not None:
        return f"its process {pid} was ended, because a frame failed: {described(fault)}"
    if code is None:
        return f"its process {pid} closed its connection"
    if code >= 0:
        return f"its process {pid} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"its process {pid} was killed by {name}{hint}"


def not_begun(replica_id: ReplicaID) -> NotBegunError:
    """Return the error of a call that a stuck replica has not begun, and never will."""
    return NotBegunError(
        f"Replica {replica_id} of {replica_id.deployment_id} is stuck, and has not begun the "
        "request; send it again."
    )
