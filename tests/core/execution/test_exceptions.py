"""`ingress.exceptions`: one tree, each error with its HTTP status."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ingress import exceptions
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    OptionNotActedOnWarning,
    RayServeException,
    ReplicaUnavailableError,
    RequestBodyTimeoutError,
    RequestBodyTooLargeError,
    RequestCancelledError,
    RequestCycleError,
    RequestTimeoutError,
    StreamClosedError,
    SyncMethodOnEventLoopWarning,
    TaskNotFoundError,
    TaskPayloadError,
    TaskQueueError,
    UnknownMethodError,
    UnreadableError,
    UserCodeExit,
)

STATUS_CODES = {
    RayServeException: 500,
    BackPressureError: 503,
    DeploymentUnavailableError: 503,
    ReplicaUnavailableError: 503,
    RequestBodyTimeoutError: 408,
    RequestBodyTooLargeError: 413,
    RequestCancelledError: 499,
    RequestCycleError: 500,
    RequestTimeoutError: 408,
    StreamClosedError: 499,
    UnknownMethodError: 500,
    UnreadableError: 500,
    UserCodeExit: 500,
    TaskNotFoundError: 404,
    TaskPayloadError: 413,
    TaskQueueError: 503,
}
CLASSES = [cls for _, cls in inspect.getmembers(exceptions, inspect.isclass)]
ERRORS = [cls for cls in CLASSES if issubclass(cls, RayServeException)]


def test_every_error_has_the_root_and_the_status_of_the_table() -> None:
    assert {error: error.status_code for error in ERRORS} == STATUS_CODES
    assert all(issubclass(cls, RayServeException | Warning) for cls in CLASSES)


def test_the_picture_at_the_top_names_every_class_and_status() -> None:
    picture = (exceptions.__doc__ or "").splitlines()

    for cls in CLASSES:
        (line,) = [line for line in picture if f"─ {cls.__name__} " in line]
        if issubclass(cls, RayServeException):
            assert line.split(cls.__name__)[1].split()[0] == str(cls.status_code)


@pytest.mark.parametrize("warning", [SyncMethodOnEventLoopWarning, OptionNotActedOnWarning])
def test_a_warning_is_a_user_warning(warning: type[Warning]) -> None:
    assert issubclass(warning, UserWarning)


@pytest.mark.parametrize(
    "error",
    [
        BackPressureError(3, 2, "Echo"),
        BackPressureError(3, 2, "Echo", 429, 1.5),
        RequestCancelledError("r-1"),
        RequestTimeoutError("r-1", 2.5),
        RequestBodyTimeoutError("r-1", 30),
        RequestBodyTimeoutError("r-1", 5.01, 240),
        RequestBodyTooLargeError(1000),
        UserCodeExit(SystemExit(3), "Echo.__call__"),
        RayServeException("what happened"),
        RequestCycleError("A waits for B"),
        StreamClosedError("gone"),
        UnreadableError("app.Odd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: RayServeException) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert (str(copy), copy.message, copy.status_code, copy.retry_after_s) == (
        str(error),
        error.message,
        error.status_code,
        error.retry_after_s,
    )


def test_back_pressure_says_the_numbers_the_deployment_and_what_to_do() -> None:
    error = BackPressureError(9, 8, "Echo")

    assert str(error) == (
        "Request dropped due to backpressure (num_queued_requests=9, max_queued_requests=8) "
        "on 'Echo'; raise it or add replicas."
    )
    assert (error.num_queued_requests, error.max_queued_requests) == (9, 8)


def test_back_pressure_without_a_deployment_has_the_words_of_ray() -> None:
    assert str(BackPressureError(9, 8)) == (
        "Request dropped due to backpressure (num_queued_requests=9, max_queued_requests=8)."
    )


def test_a_user_code_exit_is_an_exception_and_names_what_was_raised_where() -> None:
    error = UserCodeExit(KeyboardInterrupt(), "Echo.run")

    assert isinstance(error, Exception)
    assert str(error).startswith("Echo.run raised KeyboardInterrupt")


def test_a_timeout_is_a_cancellation_in_the_words_of_ray_and_no_timeout_error_of_pythons() -> None:
    error = RequestTimeoutError("r-1", 2.5)

    assert str(error) == "Request r-1 timed out after 2.5s."
    assert isinstance(error, RequestCancelledError)
    assert not isinstance(error, TimeoutError)


def test_a_closed_stream_is_an_os_error_as_in_asgi() -> None:
    assert issubclass(StreamClosedError, OSError)
