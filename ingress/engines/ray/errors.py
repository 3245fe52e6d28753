"""Ray's exceptions translated to those of ingress, and user exceptions made picklable."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from typing import Any

from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve import exceptions as theirs

from ingress import exceptions
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.exceptions import RayServeException
from ingress.serving.processes.crossing import pickled_error, unpickled_error
from ingress.telemetry.mistakes import described

logger = logging.getLogger("ingress")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_DIED = (RayActorError, ActorDiedError, ActorUnavailableError, WorkerCrashedError)
_CANCELLED = (theirs.RequestCancelledError, TaskCancelledError, asyncio.CancelledError)


def translated(error: BaseException, metadata: RequestMetadata) -> BaseException:
    """Return the exception that the caller of a deployment gets for Ray's exception.

    An exception of user code is returned as it is, as in one process, with the remote traceback as
    a note. An exception of Ray itself becomes one of `ingress.exceptions`.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, BaseException) and cause is not error:
            told = translated(cause, metadata)
            if not isinstance(told, exceptions.RequestCancelledError):
                _add_traceback(told, _COLOUR.sub("", str(error)))
            return told
        return RayServeException(str(error))
    if isinstance(error, exceptions.UserCodeExit):
        error.__cause__ = error.original  # a pickle leaves the cause out
        return error
    if isinstance(error, exceptions.RayServeException):
        return error
    told = _in_our_words(error, metadata)
    if told is not error:
        told.__cause__ = error
    return told


def _in_our_words(error: BaseException, metadata: RequestMetadata) -> BaseException:
    deployment = metadata.deployment
    if isinstance(error, theirs.BackPressureError):
        queued, limit = error.args[:2]
        how = error.status_code, error.retry_after_s  # from `backpressure_config`
        return exceptions.BackPressureError(queued, limit, deployment.name, *how)
    if isinstance(error, theirs.DeploymentUnavailableError):
        return exceptions.DeploymentUnavailableError(error.message)
    if isinstance(error, theirs.ReplicaUnavailableError):
        return exceptions.ReplicaUnavailableError(error.message)
    if isinstance(error, _CANCELLED):
        return exceptions.RequestCancelledError(metadata.request_id)
    if isinstance(error, _DIED):
        return died(deployment, error)
    if isinstance(error, theirs.RayServeException | RayError):
        return RayServeException(str(error))
    return error


def died(deployment: DeploymentID, error: BaseException) -> exceptions.ReplicaUnavailableError:
    """Return the error of a caller whose replica's process ended during the call."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return exceptions.ReplicaUnavailableError(
        f"A replica of {deployment} died before it answered ({reason}); send the request again if "
        "that is safe."
    )


def portable(error: BaseException) -> BaseException:
    """Return an exception of user code, or, if its class cannot be unpickled, one in its place.

    That one is unpickled as the user's, without a call of its constructor.
    """
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # of the class's own code
        logger.debug("a %s cannot be unpickled", type(error).__name__, exc_info=True)
        return _Sent(error)
    return error


class _Sent(RayServeException):
    """An exception on its way to another process."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(described(error))
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled_error, (pickled_error(self.error),)


def _add_traceback(error: BaseException, text: str) -> None:
    try:
        error.add_note(f"\nThe traceback in the replica's process:\n{text}")
    except Exception:  # a user's exception class without attributes
        logger.debug("%s takes no note:\n%s", type(error).__name__, text, exc_info=True)
