"""The handlers of a deployment, and the calls by handle that jobs become.

The JSON that goes into the store and comes out of it is read as the handlers are annotated.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, PydanticSerializationError, to_json

from ingress.app.declaration.names import TASK
from ingress.core.base.foreign import advisory
from ingress.core.base.signatures import signature_of
from ingress.core.base.types import RequestMetadata, new_request_id
from ingress.core.calls.call import CURRENT_CALL, NO_CONTEXT, NO_WORK, Call
from ingress.core.calls.loops import Wakeup
from ingress.core.execution.execution import Kind, kind, name_of
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestTimeoutError,
    TaskPayloadError,
)
from ingress.handle import DeploymentHandle


@dataclass(frozen=True, slots=True)
class Handler:
    """One method of a deployment that handles the jobs of a name. `streams`: it is a generator."""

    name: str
    method: str
    streams: bool
    read: Read


def handlers_of(cls: type) -> dict[str, Handler]:
    """Return the handlers of a class by their names. Raises `TypeError` or `ValueError`."""
    found: dict[str, Handler] = {}
    for method in dir(cls):
        func = inspect.getattr_static(cls, method)
        if isinstance(func, staticmethod | classmethod) and hasattr(func.__func__, TASK):
            raise TypeError(
                f"the task handler {cls.__qualname__}.{method} is a {type(func).__name__}, which "
                f"is no method of a replica; remove @{type(func).__name__}, and give it self"
            )
        if (name := getattr(func, TASK, None)) is None:
            continue
        if name in found:
            raise ValueError(
                f"{cls.__qualname__}: two task handlers have the name {name!r}: "
                f"{found[name].method} and {method}; give one another @task_handler(name=...)"
            )
        streams = kind(func) in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)
        found[name] = Handler(name, method, streams, reader_of(func))
    if not found:
        raise ValueError(
            f"{cls.__qualname__} has @task_consumer and no method with @task_handler; put it on "
            "the method that handles the jobs"
        )
    return found


class JobCalls:
    """The calls of one deployment's handlers. Thread-safe."""

    __slots__ = ("handle", "handlers")

    def __init__(self, handle: DeploymentHandle, handlers: Mapping[str, Handler]) -> None:
        self.handle, self.handlers = handle, handlers

    def handler(self, name: str) -> Handler:
        """Return the handler of a name. Raises `UnreadableArgumentsError` if there is none."""
        if (handler := self.handlers.get(name)) is None:
            raise UnreadableArgumentsError(
                f"{self.handle.deployment_id} has no task handler {name!r}; it has: "
                f"{', '.join(self.handlers)}"
            )
        return handler

    def begin(
        self,
        handler: Handler,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        job_id: str,
        timeout_s: float | None = None,
        trace: str | None = None,
        fairness_key: str = "",
    ) -> Any:
        """Call a handler. Returns a response, or a stream; its request id is that of the job.

        Raises `UnreadableArgumentsError`, and what `handle.remote` raises.
        """
        given, named = handler.read(args, kwargs)
        metadata = RequestMetadata(
            request_id=job_id,
            deployment=self.handle.deployment_id,
            deadline=None if timeout_s is None else monotonic() + timeout_s,
        )
        context = _context_of(trace)
        context.run(CURRENT_CALL.set, Call(metadata, NO_WORK, NO_CONTEXT))
        handle = self.handle.options(
            method_name=handler.method, stream=handler.streams, fairness_key=fairness_key
        )
        return context.run(lambda: handle.remote(*given, **named))


async def code_has_ended(response: Any) -> None:
    """Wait until no code of a call runs: a `def` runs on after its call was cancelled."""
    call, over = response._call, Wakeup(asyncio.get_running_loop())
    if (runner := call.runner) is not None:
        runner.when_ended(call, over.wake)
        await over.wait()


def code_end(response: Any) -> threading.Event:
    """Return an event that is set once no code of a call runs, for threads."""
    over, call = threading.Event(), response._call
    if (runner := call.runner) is None:
        over.set()
    else:
        runner.when_ended(call, over.set)
    return over


def has_begun(response: Any) -> bool:
    return bool(response._call.began_at)


def is_handed_back(error: Exception, response: Any, *, is_stopping: bool) -> bool:
    """Return whether the error of a call says nothing about its job, which runs again.

    `response` is `None` if there was no call.
    """
    if isinstance(error, RequestCancelledError):
        return is_stopping and not isinstance(error, RequestTimeoutError)
    if isinstance(error, ReplicaUnavailableError):
        return not error.has_died
    if not isinstance(error, BackPressureError | DeploymentUnavailableError):
        return False
    return is_stopping or response is None or not has_begun(response)


def current_trace() -> str | None:
    """Return the trace context of the running code as JSON, `None` if it is in no trace."""
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        with advisory("the trace context of a job"):
            from opentelemetry.propagate import inject

            inject(carrier)
    return json.dumps(carrier) if carrier else None


def _context_of(trace: str | None) -> Context:
    """Return a new context, in the trace that the job was enqueued in."""
    context = Context()
    if trace is not None and "opentelemetry.trace" in sys.modules:
        with advisory("the trace context of a job"):
            from opentelemetry.context import attach
            from opentelemetry.propagate import extract

            context.run(lambda: attach(extract(json.loads(trace))))
    return context


class JobFunction:
    """A handler as a function that blocks, for adapters that run jobs in threads of their own.

    `function(*args, **kwargs)` runs one job; `run` says more about it. A generator returns its last
    item. Both raise the error of the handler, and `UnreadableArgumentsError`.
    """

    __slots__ = ("__name__", "_calls", "_handler")

    def __init__(self, calls: JobCalls, handler: Handler) -> None:
        self._calls, self._handler = calls, handler
        self.__name__ = handler.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs, job_id=new_request_id())

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        job_id: str,
        on_progress: Callable[[Any], None] = lambda item: None,
        on_begin: Callable[[Any], None] = lambda response: None,
        trace: str | None = None,
    ) -> Any:
        """Run one job. `on_begin` gets the response, which can cancel it."""
        response = self._calls.begin(self._handler, args, kwargs, job_id=job_id, trace=trace)
        on_begin(response)
        if not self._handler.streams:
            return response.result()
        last = None
        for last in response:
            on_progress(last)
        return last


Read = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]


class UnreadableArgumentsError(Exception):
    """The arguments of a job do not fit its handler."""


def dumped(value: object, limit: int, what: str) -> str:
    """Return a value as JSON, as FastAPI writes a response. Raises `TaskPayloadError`."""
    try:
        found = to_json(value, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError) as error:
        raise TaskPayloadError(
            f"{what} cannot be written as JSON: {error}; give numbers, texts, lists, dicts or "
            "Pydantic models"
        ) from None
    if len(found) > limit:
        raise TaskPayloadError(
            f"{what} has {len(found)} bytes as JSON, more than max_payload_bytes={limit}; store it "
            "elsewhere and give its name, or raise SQLiteAdapterConfig(max_payload_bytes=...)"
        )
    return found.decode()


def loaded(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def reader_of(func: Callable[..., Any]) -> Read:
    """Return what makes the arguments of a handler from JSON, as its annotations say.

    Raises `TypeError` for a parameter that JSON cannot fill.
    """
    _self, *parameters = signature_of(func).parameters.values()
    hints = _hints(func)
    typed = [each.replace(annotation=hints.get(each.name, Any)) for each in parameters]
    for each in typed:
        try:
            TypeAdapter(each.annotation)
        except (PydanticUserError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise TypeError(
                f"the parameter {each.name!r} of the task handler {name_of(func)} is "
                f"{each.annotation!r}, which JSON cannot fill: {reason}; give it a Pydantic model, "
                "a number, a text, a list or a dict"
            ) from None

    def collect(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return args, kwargs

    collect.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    collect.__annotations__ = {each.name: each.annotation for each in typed}
    adapter: TypeAdapter[Any] = TypeAdapter(collect)  # type: ignore[arg-type]  # a call

    def read(
        args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        try:
            found: tuple[Sequence[Any], Mapping[str, Any]] = adapter.validate_python(
                ArgsKwargs(tuple(args), dict(kwargs))
            )
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                for each in error.errors(include_url=False, include_input=False)
            )
            raise UnreadableArgumentsError(
                f"the arguments do not fit {name_of(func)}: {'; '.join(problems)}"
            ) from None
        return found

    return read


def _hints(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(func, include_extras=True)
    except Exception as error:
        raise TypeError(
            f"the annotations of the task handler {name_of(func)} cannot be read: {error}; name "
            "classes of its module"
        ) from None
