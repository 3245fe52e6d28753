"""Calls by handle to other processes, and their errors: Ray's exceptions in ingress's words.

    handle.remote() -> RemoteRouter.assign -> a task on `ingress-ray` -> Ray's handle -> RayReplica
                       the answer settles the call, as for a replica in this process

A call is `ingress.core.calls.call.Call` on both engines: awaiting, iteration, cancellation,
timeouts and calls as arguments are the same code. Only the transport is Ray's.

Arguments that cannot be pickled are named before the call is sent: Ray itself would send the call
again and again, or fail it with an error of the unpickling.
"""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol
from weakref import WeakSet

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
from ray.serve import context as ray_context
from ray.serve import exceptions as theirs

from ingress import exceptions
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.core.calls.call import Call
from ingress.core.calls.call_tasks import CallTasks, LoopOfHandles
from ingress.core.calls.loops import EventLoopThread, Mailbox
from ingress.engines.ray.messages import as_sent, remote_name
from ingress.exceptions import RayServeException
from ingress.handle import (
    BoundInvocation,
    CallRouter,
    DeploymentHandle,
    Invocation,
    Reservation,
    pass_on,
)
from ingress.serving.processes.crossing import pickled_error, unpickled_error
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import described

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_DIED = (RayActorError, ActorDiedError, ActorUnavailableError, WorkerCrashedError)
_CANCELLED = (theirs.RequestCancelledError, TaskCancelledError, asyncio.CancelledError)


class RayResponse(Protocol):
    """Ray's `DeploymentResponse` or `DeploymentResponseGenerator`."""

    def __await__(self) -> Generator[None, None, object]: ...

    def __aiter__(self) -> AsyncIterator[object]: ...

    def cancel(self) -> None: ...


class RayHandle(Protocol):
    """Ray's `DeploymentHandle`."""

    def options(self, **options: object) -> RayHandle: ...

    def broadcast(self, method_name: str, *args: object, **kwargs: object) -> Any: ...

    def choose_replica(
        self, *args: object, **kwargs: object
    ) -> AbstractAsyncContextManager[Any]: ...

    def dispatch(self, selection: Any, *args: object, **kwargs: object) -> RayResponse: ...

    def remote(self, *args: object, **kwargs: object) -> RayResponse: ...


FindHandle = Callable[[DeploymentID], RayHandle]
FindMethods = Callable[[DeploymentID], list[str] | None]


class RayDirectory(LoopOfHandles):
    """The directory in which handles find the deployments of a cluster. Thread-safe.

    There is one per process. `is_known` returns whether a deployment exists, without a request to
    the cluster. The directory's loop lives until `close`. A pickled directory becomes that of the
    process it is unpickled in.
    """

    __slots__ = ("_find_handle", "_find_methods", "_home", "_routers", "is_known")

    def __init__(
        self,
        find_handle: FindHandle,
        find_methods: FindMethods,
        is_known: Callable[[DeploymentID], bool],
    ) -> None:
        self.is_known = is_known
        self._find_handle = find_handle
        self._find_methods = find_methods
        # Calls that begin while the engine shuts down must not wait forever.
        self._home = EventLoopThread("ingress-ray", _refuse)
        super().__init__(self._home.loop, self._home.mailbox)
        self._routers: dict[DeploymentID, RemoteRouter] = {}

    def handle(self, deployment_id: DeploymentID) -> DeploymentHandle:
        return DeploymentHandle(deployment_id, self)

    def router(self, deployment_id: DeploymentID) -> CallRouter:
        if (router := self._routers.get(deployment_id)) is None:
            router = RemoteRouter(self._home, lambda: self._find_handle(deployment_id))
            router = self._routers.setdefault(deployment_id, router)
        return router

    def methods(self, deployment_id: DeploymentID) -> list[str] | None:
        return self._find_methods(deployment_id)

    def forget(self, app_name: str) -> None:
        """Drop the routers of an application, because it was deployed again or deleted."""
        for deployment_id in list(self._routers):
            if deployment_id.app_name == app_name:
                self._routers.pop(deployment_id, None)

    def close(self) -> None:
        """End the loop and cancel the calls in flight."""
        self._home.stop(1.0)

    def __reduce__(self) -> tuple[Callable[[], RayDirectory], tuple[()]]:
        return _unpickled, ()


def _refuse(callback: Callable[..., object], args: tuple[object, ...]) -> None:
    for call in args:
        if isinstance(call, Call):
            call.cancel()


_here: RayDirectory | None = None


def use_here(directory: RayDirectory | None) -> None:
    """Set the directory for handles that are unpickled in this process."""
    global _here
    _here = directory


def directory_here() -> RayDirectory | None:
    """Return the directory of this process: its replica's, or its engine's."""
    return _here


def _unpickled() -> RayDirectory:
    if _here is None:
        raise RuntimeError(
            "a DeploymentHandle was unpickled in a process that runs no deployment; make it there: "
            "serve.start(engine='ray'), then serve.get_app_handle(...)"
        )
    return _here


@dataclass(frozen=True, slots=True)
class RaySlot:
    """The slot of a selection of Ray's, which is kept until `over` is set."""

    selection: Any
    mailbox: Mailbox
    over: asyncio.Event

    def release(self, call: Call) -> None:
        self.mailbox.post(self.over.set)


class RemoteRouter(CallTasks):
    """The `CallRouter` of a deployment in other processes. Its tasks run on the directory's loop.

    Ray's router waits for a replica, retries on another and refuses calls. A cycle of calls through
    several processes is not detected.
    """

    __slots__ = ("_find_handle", "_handles")

    def __init__(self, home: EventLoopThread, find_handle: Callable[[], RayHandle]) -> None:
        super().__init__(home.loop, home.mailbox)
        self._find_handle = find_handle
        self._handles: dict[tuple[str, bool], RayHandle] = {}

    async def run(self, call: Call) -> None:
        metadata = call.metadata
        invocation = call.work
        assert isinstance(invocation, Invocation)
        response: RayResponse | None = None
        slot: RaySlot | None = getattr(invocation, "slot", None)
        try:
            _show_request(metadata)
            check_arguments(metadata, invocation)
            handle = self._handle(metadata)
            args, kwargs = (as_sent(metadata), *invocation.args), invocation.kwargs
            if isinstance(invocation, Reservation):
                async with handle.choose_replica(*args, **kwargs) as selection:
                    held = RaySlot(selection, self._mailbox, asyncio.Event())
                    invocation.hold(call, held, selection.to_dict())
                    await held.over.wait()
                return
            if isinstance(invocation, BoundInvocation) and slot is None:
                name = remote_name(metadata.method_name)
                every = handle.broadcast(name, *args, **kwargs)
                found = await every.results_async(return_exceptions=True)
                self.settle_each(call, (_outcome(each, metadata) for each in found))
                return
            if slot is not None:
                response = handle.dispatch(slot.selection, *args, **kwargs)
            else:
                response = handle.remote(*args, **kwargs)
            if invocation.channel is None:
                call.settle(await response)
            else:
                async for item in response:
                    if not await pass_on(item, invocation.channel):
                        response.cancel()
                        break
                call.settle()
        except asyncio.CancelledError as error:
            # A settled call was cancelled here, otherwise the replica was cancelled elsewhere.
            if response is not None and call.settled:
                response.cancel()
            call.settle(error=translated(error, metadata))
        except Exception as error:  # the caller gets it
            call.settle(error=translated(error, metadata))
        finally:
            if slot is not None:
                slot.release(call)

    def _handle(self, metadata: RequestMetadata) -> RayHandle:
        key = remote_name(metadata.method_name), metadata.is_streaming
        if (handle := self._handles.get(key)) is None:
            name, is_streaming = key
            handle = self._find_handle().options(method_name=name, stream=is_streaming)
            self._handles[key] = handle
        if metadata.multiplexed_model_id:
            handle = handle.options(multiplexed_model_id=metadata.multiplexed_model_id)
        if metadata.session_id:
            handle = handle.options(session_id=metadata.session_id)
        return handle


def _outcome(found: object, metadata: RequestMetadata) -> tuple[object, BaseException | None]:
    """Return value and error of a replica in a broadcast."""
    if isinstance(found, BaseException):
        return None, translated(found, metadata)
    return found, None


def _show_request(metadata: RequestMetadata) -> None:
    """Make Ray log this call under its request's id, and not cancel it with another request.

    Ray would cancel the call with the request that it finds in the context. The names are private,
    so `SUPPORTED` names one version.
    """
    ray_context._serve_request_context.set(
        ray_context._RequestContext(
            route=metadata.route,
            request_id=metadata.request_id,
            app_name=metadata.app_name or metadata.deployment.app_name,
        )
    )


_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})
_COLLECTIONS = frozenset({dict, frozenset, list, set, tuple})
ITEMS_CHECKED = 32  # of a collection
DEPTH = 4

_sent: WeakSet[type] = WeakSet()
"""Types of which an object has been pickled and unpickled. Others are tried once: 10 us each."""


def check_arguments(metadata: RequestMetadata, invocation: Invocation) -> None:
    """Raise `TypeError`, with the name or the number of the argument, if one cannot be pickled."""
    positional = ((str(number), value) for number, value in enumerate(invocation.args, 1))
    named = ((repr(name), value) for name, value in invocation.kwargs.items())
    for name, value in chain(positional, named):
        for each in _of_new_types(value, DEPTH):
            _check(each, name, metadata)


def _of_new_types(value: Any, depth: int) -> Iterator[object]:
    """Yield the value, or the parts of a collection, whose types were not tried yet."""
    if (kind := type(value)) in _PLAIN:
        return
    if kind in _COLLECTIONS:
        if depth:
            for each in islice(value.values() if kind is dict else value, ITEMS_CHECKED):
                yield from _of_new_types(each, depth - 1)
    elif kind not in _sent and not kind.__module__.startswith("ray."):
        yield value  # Ray's own references are pickled in its context only


def _check(value: object, name: str, metadata: RequestMetadata) -> None:
    buffers: list[pickle.PickleBuffer] = []  # so that large arrays are not copied
    try:
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        pickle.loads(data, buffers=buffers)
    except RayServeException:  # a response says what to do with it
        raise
    except Exception as problem:
        raise TypeError(
            f"argument {name} of {metadata.deployment.name}.{metadata.method_name} is or contains "
            f"a {type(value).__name__}, which cannot be pickled for another process "
            f"({described(problem)}); pass the values that the method needs of it"
        ) from None
    _sent.add(type(value))


# Errors.


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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return exceptions.ReplicaUnavailableError(
            f"A replica of {deployment} died before it answered ({reason}); send the request again "
            "if that is safe."
        )
    if isinstance(error, theirs.RayServeException | RayError):
        return RayServeException(str(error))
    return error


def portable(error: BaseException) -> BaseException:
    """Return an exception of user code, or, if its class cannot be unpickled, one in its place.

    That one is unpickled as the user's, without a call of its constructor.
    """
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # of the class's own code
        logger.debug("a %s cannot be unpickled", type(error).__name__, exc_info=True)
        return _SentError(error)
    return error


class _SentError(RayServeException):
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
