"""Errors of values that cannot cross between two processes, and of a process's end."""

from __future__ import annotations

import signal

from ingress.core.base.types import ReplicaID
from ingress.core.calls.retries import NotBegunError
from ingress.exceptions import RayServeException
from ingress.serving.processes.code import culprit
from ingress.serving.processes.frames import FrameError
from ingress.telemetry.mistakes import last_line as described


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
