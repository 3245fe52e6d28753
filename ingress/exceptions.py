"""Every error and warning a user can catch.

    Exception
    └─ RayServeException                  500
       ├─ BackPressureError               503  the deployment's queue is full (503 or 429)
       ├─ DeploymentUnavailableError      503  the deployment failed to start, or was deleted
       ├─ ReplicaUnavailableError         503  the replica stopped during the call
       ├─ RequestCancelledError           499  the caller cancelled the request
       │  └─ RequestTimeoutError          408  the request's deadline passed
       │     └─ RequestBodyTimeoutError   408  the request's body stopped arriving
       ├─ RequestBodyTooLargeError        413  the request's body exceeds `max_body_size`
       ├─ RequestCycleError               500  the request is part of a deadlock of calls
       ├─ StreamClosedError               499  the consumer of a stream has gone
       ├─ TaskNotFoundError               404  the job store has no job of that id
       ├─ TaskPayloadError                413  arguments or a result that a job cannot have
       ├─ TaskQueueError                  503  the job store does not answer
       ├─ UnknownMethodError              500  the deployment has no method of that name
       ├─ UnreadableError                 500  user code raised an exception that cannot be read
       └─ UserCodeExit                    500  user code raised no `Exception`, e.g. `SystemExit`

    Warning
    ├─ UserWarning
    │  ├─ CompiledRoutesOffWarning        FastAPI's own handlers answer all routes
    │  ├─ RouteNotServedWarning           a route that no deployment serves
    │  ├─ SyncMethodOnEventLoopWarning    a `def` method runs on the event loop
    │  └─ OptionNotActedOnWarning         an option is recorded and has no effect yet
    └─ DeprecationWarning                 max_concurrent_queries

The proxy answers with `status_code` and, if `retry_after_s` is set, with a `Retry-After` header.
Mistakes of the caller raise `TypeError` or `ValueError` where they are made. The names are Ray
Serve's where Ray Serve has one.
"""

from __future__ import annotations

from starlette import requests, websockets  # modules: all classes here are the framework's

from ingress._unsupported import teller


def is_cancellation(error: BaseException) -> bool:
    """Return whether the error only tells user code that its answer is no longer wanted.

    Such an error is not reported when user code raises it. Nor is a group of only such errors, as
    task groups raise it.
    """
    return is_disconnect(error, RequestCancelledError)


def is_disconnect(error: BaseException | None, *more: type[Exception]) -> bool:
    """Return whether the error only tells user code that its client, or its consumer, has gone.

    Or that it is of the classes `more`. A group is such an error if all of its errors are.
    """
    theirs = (requests.ClientDisconnect, websockets.WebSocketDisconnect)
    told = (StreamClosedError, *theirs, *more)
    if isinstance(error, BaseExceptionGroup):
        return error.split(told)[1] is None
    return isinstance(error, told)


class RayServeException(Exception):
    """The base class of all errors of the framework."""

    status_code: int = 500
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        return str(self)


class BackPressureError(RayServeException):
    """The request was refused: `max_queued_requests` others already wait, or `reason` says why.

    The deployment's `backpressure_config` sets the status and the seconds of `Retry-After`.
    """

    status_code = 503

    def __init__(
        self,
        num_queued_requests: int,
        max_queued_requests: int,
        deployment: str = "",
        status_code: int = 503,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(
            num_queued_requests, max_queued_requests, deployment, status_code, retry_after_s, reason
        )
        self.num_queued_requests = num_queued_requests
        self.max_queued_requests = max_queued_requests
        self.deployment = deployment
        self.status_code = status_code
        self.retry_after_s = retry_after_s
        self.reason = reason

    def __str__(self) -> str:
        if self.reason:
            on = f" on '{self.deployment}'" if self.deployment else ""
            return f"Request dropped due to backpressure{on}: {self.reason}."
        where = f" on '{self.deployment}'; raise it or add replicas" if self.deployment else ""
        return (
            f"Request dropped due to backpressure (num_queued_requests={self.num_queued_requests}, "
            f"max_queued_requests={self.max_queued_requests}){where}."
        )


class DeploymentUnavailableError(RayServeException):
    """The deployment failed to start or was deleted."""

    status_code = 503


class ReplicaUnavailableError(RayServeException):
    """The replica's event loop has stopped; user code did not answer the call.

    `has_died` says that it ended by itself: nobody stopped it.
    """

    status_code = 503
    has_died: bool = False


class RequestCancelledError(RayServeException):
    """The caller cancelled the call."""

    status_code = 499

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"Request {self.request_id} was cancelled."


class RequestTimeoutError(RequestCancelledError):
    """The request's deadline passed: the framework cancelled the request, not the caller.

    Not a `TimeoutError`, which user code raises and which answers 500. Text: Ray 2.60.0, proxy.py.
    """

    status_code = 408

    def __init__(self, request_id: str, timeout_s: float) -> None:
        RayServeException.__init__(self, request_id, timeout_s)
        self.request_id = request_id
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"Request {self.request_id} timed out after {self.timeout_s}s."


class RequestBodyTimeoutError(RequestTimeoutError):
    """The request's body stalled for `body_idle_timeout_s`, or was slower than `min_body_rate`.

    `min_rate` is that rate, in bytes a second, and `timeout_s` then the time that the server waited
    for the body.
    """

    def __init__(self, request_id: str, timeout_s: float, min_rate: float | None = None) -> None:
        super().__init__(request_id, timeout_s)
        self.args = (request_id, timeout_s, min_rate)
        self.min_rate = min_rate

    def __str__(self) -> str:
        if self.min_rate is not None:
            return (
                f"The body of request {self.request_id} is too slow: it came at less than "
                f"{self.min_rate:g} bytes a second for {self.timeout_s:.1f}s."
            )
        return f"The body of request {self.request_id} stalled for {self.timeout_s:g}s."


class RequestBodyTooLargeError(RayServeException):
    """The request's body is larger than `max_body_size`."""

    status_code = 413

    def __init__(self, max_body_size: int) -> None:
        super().__init__(max_body_size)
        self.max_body_size = max_body_size

    def __str__(self) -> str:
        return f"The request's body is too large: the limit is {self.max_body_size} bytes."


class TaskNotFoundError(RayServeException, LookupError):
    """The job store has no job of that id: it never had, or its result was kept long enough."""

    status_code = 404


class TaskPayloadError(RayServeException, ValueError):
    """The arguments, the result or the progress of a job are no JSON, or too large."""

    status_code = 413


class TaskQueueError(RayServeException):
    """The job store did not answer: the disk is full, the file is locked or gone.

    Of what was asked, nothing was written.
    """

    status_code = 503


TASK_ERRORS = (TaskNotFoundError, TaskPayloadError, TaskQueueError)

CALL_ERRORS = (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    *TASK_ERRORS,
)
"""Errors of calls to other deployments, with a status that tells the client what to do."""


def needs_no_record(error: BaseException) -> bool:
    """Return whether an error of user code whose request is over meanwhile is not to be logged.

    A cancellation, and the error of a call: a deadline may shed the call, and pass before the error
    arrives. No code of the user's has failed.
    """
    return is_cancellation(error) or isinstance(error, CALL_ERRORS)


class RequestCycleError(RayServeException):
    """A deadlock: all slots, or all room for a model, are held by calls that wait for this one."""


class StreamClosedError(RayServeException, OSError):
    """The consumer of a stream has gone; an `OSError`, as ASGI requires of `send`."""

    status_code = 499


class UnknownMethodError(RayServeException, AttributeError):
    """The deployment has no such method; an `AttributeError`, as Python requires of `hasattr`."""


class UnreadableError(RayServeException):
    """User code raised an exception whose attributes cannot be read: reading them raises another.

    `UnreadableError` replaces that exception where it leaves user code, with its traceback and
    causes.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"user code raised {self.name}, whose attributes cannot be read; the request failed"


class UserCodeExit(RayServeException):
    """User code raised something that is not an `Exception`, such as `SystemExit`.

    The original becomes this error before it leaves its task, because a `SystemExit` or
    `KeyboardInterrupt` that reaches an event loop ends that loop. The original is `__cause__`.
    """

    def __init__(self, original: BaseException, where: str = "user code") -> None:
        super().__init__(original, where)
        self.original = original
        self.where = where

    def __str__(self) -> str:
        name = type(self.original).__name__
        return f"{self.where} raised {name}, which is not an Exception; the request failed"


class CompiledRoutesOffWarning(UserWarning):
    """FastAPI or Starlette has changed a function, or lacks a name: routes are not compiled."""


class RouteNotServedWarning(UserWarning):
    """A route is declared with a method that no deployment serves: its requests get 404."""


class SyncMethodOnEventLoopWarning(UserWarning):
    """A `def` method of a deployment runs on the event loop and blocks it while it runs."""


class OptionNotActedOnWarning(UserWarning):
    """A deployment option was given, validated and recorded, but has no effect yet."""


__getattr__ = teller(__name__)
