"""Handles: calls of a deployment from Python, on any event loop or in any thread.

    handle.remote(x)                   -> DeploymentResponse: `await` it, or `.result()` in a thread
    handle.method.remote(x)            the same, for a method
    handle.options(stream=True)        -> DeploymentResponseGenerator: `async for`, or `for`
    handle.broadcast("method", x)      -> DeploymentBroadcastResponse: a call of every replica
    handle.choose_replica(x)           -> ReplicaSelection with a slot, for `handle.dispatch`

Arguments and results pass by reference. A `DeploymentResponse` that is an argument is resolved
first. A response inside a list or another value is passed as it is; the callee awaits it.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Never, NoReturn, Protocol, Self, cast

from typing_extensions import TypeVar

from ingress._unsupported import absent_member, absent_method, refuse, teller
from ingress.core.base.options import is_number
from ingress.core.base.types import (
    PRIORITIES,
    DeploymentID,
    RequestMetadata,
    new_request_id,
    short_key,
)
from ingress.core.calls.call import (
    CURRENT_CALL,
    NO_WORK,
    Call,
    Queue,
    Runner,
    Work,
    begin_wait,
    end_wait,
)
from ingress.core.calls.channel import Channel, EndOfStream
from ingress.core.calls.loops import Wakeup, running_loop
from ingress.core.calls.tracing import TRACING, trace_call
from ingress.exceptions import (
    RayServeException,
    RequestCancelledError,
    StreamClosedError,
    UnknownMethodError,
)

# The class or function of a deployment. By default `Any`, so that a bare name means any of them.
T_co = TypeVar("T_co", covariant=True, default=Any)
F = TypeVar("F", bound=Callable[..., Any])
# The answer to a call, or an item of its stream.
R_co = TypeVar("R_co", covariant=True, default=Any)


class UserMethods(Protocol):
    """The user code of a replica, as a call by handle sees it."""

    def call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Awaitable[Any]: ...

    def stream(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]: ...


class Directory(Protocol):
    """The routers of deployments; looked up at every call, as a deployment may be replaced."""

    def router(self, deployment_id: DeploymentID) -> CallRouter: ...

    def methods(self, deployment_id: DeploymentID) -> Names | None: ...

    def when_resolved(self, responses: list[DeploymentResponse], then: Callable[[], None]) -> None:
        """Call `then` once all responses are settled, on the router loop if there is one."""

    def later(self, callback: Callable[[], Any]) -> None:
        """Call `callback` soon, on one of the framework's loops."""

    def expire(self, call: Call, deadline: float) -> None:
        """Make a call expire at its deadline, on one of the framework's loops."""


_here: Directory | None = None


def use_here(directory: Directory) -> None:
    """Set the directory for the handles that arrive in this process."""
    global _here
    _here = directory


def directory_here() -> Directory:
    """Return the directory of this process. A pickled directory becomes this one elsewhere."""
    if _here is None:
        raise RuntimeError(
            "a DeploymentHandle is needed in a process that runs no deployment, or before its "
            "replica is made; get it in the constructor, with serve.get_app_handle(...)"
        )
    return _here


class Names(Protocol):
    """The names of methods: one can be asked for without a list of all."""

    def __contains__(self, name: str, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...


class CallRouter(Queue, Protocol):
    """The queue of a deployment that takes calls by handle, in this process or elsewhere."""

    def assign(self, call: Call) -> None:
        """Start the call, now or when a slot is free, or settle it as refused."""

    def broadcast(self, call: Call) -> None:
        """Make the call on each replica, and settle it with the list of these, or as refused."""

    def dispatch(self, reserved: Call, call: Call, runner: Any) -> None:
        """Run the call in the slot that `reserved` has on a replica, or settle it as refused."""


TakeCall = Callable[[CallRouter, Call], None]


@dataclass(eq=False, repr=False, slots=True)
class Invocation(Work):
    """The work of a call by handle on its replica: a method and its resolved arguments.

    The items of a generator go into `channel`, which is `None` for a single result. An engine that
    runs the method in another process reads the fields instead.
    """

    method: str
    args: list[Any]
    kwargs: dict[str, Any]
    channel: Channel[object] | None

    def __call__(self, user_code: UserMethods) -> Awaitable[Any]:
        if self.channel is None:
            return user_code.call(self.method, self.args, self.kwargs)
        return self._pump(user_code, self.channel)

    async def _pump(self, user_code: UserMethods, channel: Channel[object]) -> None:
        """Put the method's items into the channel."""
        async with aclosing(user_code.stream(self.method, self.args, self.kwargs)) as items:
            async for item in items:
                if not await pass_on(item, channel):
                    return  # `aclosing` closes the generator


@dataclass(eq=False, repr=False, slots=True)
class BoundInvocation(Invocation):
    """The work of a call that one replica was chosen for: no other one runs it.

    `slot` is for routers to other processes: the slot that the call has, `None` for a broadcast.
    """

    slot: Any = None
    is_bound = True

    @classmethod
    def of(cls, work: Any) -> Self:
        return cls(work.method, [*work.args], dict(work.kwargs), work.channel)


@dataclass(eq=False, repr=False, slots=True)
class Reservation(Invocation):
    """The work of a call that only holds a slot, until `dispatch` or the end of its selection.

    `held` has the replica while the slot is held: the thread that pops it decides about the slot.
    `place` has the public fields of the selection.
    """

    wake: Callable[[], object]
    held: list[Any] = field(default_factory=list)
    place: dict[str, Any] = field(default_factory=dict)
    is_over: bool = False

    def start(self, call: Call, runner: Runner) -> None:
        call.runner = runner
        self.hold(call, runner, {**_HERE, "replica_id": runner.replica_id.unique_id})

    def hold(self, call: Call, runner: Any, place: dict[str, Any]) -> None:
        """Note the replica whose slot the call has. Thread-safe."""
        self.place = place
        self.held.append(runner)
        if self.is_over:  # a race with `give_back`, which reads `held` after it has set this
            self.give_back(call)
        self.wake()

    def take(self) -> Any:
        """Return the replica whose slot is held, to one caller only; `None` to the others."""
        with suppress(IndexError):
            return self.held.pop()

    def give_back(self, call: Call) -> None:
        """Give the slot back, unless it was taken. Thread-safe."""
        self.is_over = True
        if (runner := self.take()) is not None:
            runner.release(call)
        call.settle()


_HERE: dict[str, Any] = {
    **dict.fromkeys(("port", "availability_zone")),
    "node_ip": "127.0.0.1",
    "node_id": "",
    "replica_metadata": {},
}


async def pass_on(item: Any, channel: Channel[object]) -> bool:
    """Put an item of a stream into its channel. Returns False if its consumer has gone."""
    size = len(item) if isinstance(item, str | bytes) else 0
    try:
        await channel.put(item, size)
    except StreamClosedError:
        return False
    return True


def _beside_users(function: F) -> F:
    """Return a method whose name a deployment's method may have: `handle.name.remote()`."""

    def bound(handle: DeploymentHandle) -> Any:
        method: Any = partial(function, handle)
        method.remote = handle.options(method_name=function.__name__).remote
        return method

    return cast(Any, property(bound))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class HandleOptions:
    """The options that `handle.options` sets."""

    method_name: str = "__call__"
    stream: bool = False
    multiplexed_model_id: str = ""
    session_id: str = ""
    priority: int | None = None
    fairness_key: str | None = None


class DeploymentHandle(Generic[T_co]):
    """A handle to one deployment. Thread-safe, immutable, cheap to make.

    Handles of the same deployment with the same options are equal. `DeploymentHandle["Model"]` says
    to type checkers which class or function is called: docs/typing.md.
    """

    __slots__ = ("__weakref__", "_directory", "_id", "_options", "_take")

    def __init__(
        self,
        deployment_id: DeploymentID,
        directory: Directory,
        options: HandleOptions = HandleOptions(),
        take: TakeCall | None = None,
    ) -> None:
        """`take` gets the calls that have their arguments, in the place of the router's queue."""
        self._id, self._directory, self._options = deployment_id, directory, options
        self._take = take

    @property
    def deployment_id(self) -> DeploymentID:
        return self._id

    @property
    def deployment_name(self) -> str:
        return self._id.name

    @property
    def app_name(self) -> str:
        return self._id.app_name

    def options(
        self,
        *,
        method_name: str | None = None,
        stream: bool | None = None,
        multiplexed_model_id: str | None = None,
        session_id: str | None = None,
        priority: str | None = None,
        fairness_key: str | None = None,
        **unsupported: Never,
    ) -> DeploymentHandle[T_co]:
        """Return a handle with these options; options that are not given stay as they are.

        `session_id` is for a `request_router_class` that routes by it. Calls of `priority` "high"
        leave the queue before those that are "normal", and these before "low" ones. Calls of one
        `fairness_key` take turns with those of other keys. Without these two, a call has those of
        the request that makes it.
        """
        if unsupported:
            refuse("handle.options", unsupported, DeploymentHandle.options)
        given: dict[str, Any] = {
            "method_name": method_name,
            "stream": stream,
            "multiplexed_model_id": multiplexed_model_id,
            "session_id": session_id,
            "priority": None if priority is None else _level_of(priority),
            "fairness_key": fairness_key,
        }
        for name in ("method_name", "multiplexed_model_id", "session_id", "fairness_key"):
            if not isinstance(given[name], str | None):
                raise TypeError(f"{name} must be a string, got {given[name]!r}")
        if not isinstance(stream, bool | None):
            raise TypeError(f"stream must be True or False, got {stream!r}")
        if fairness_key is not None:
            given["fairness_key"] = short_key(fairness_key)
        changed = {name: value for name, value in given.items() if value is not None}
        return DeploymentHandle(self._id, self._directory, replace(self._options, **changed))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the deployment; never blocks.

        Returns a `DeploymentResponse`, or a `DeploymentResponseGenerator` with `stream=True`.
        """
        options, take = self._options, self._take
        parent = CURRENT_CALL.get(None)
        deadline = None if parent is None else parent.deadline
        inherited = 0 if parent is None else parent.metadata.priority
        priority = inherited if options.priority is None else options.priority
        its_key = "" if parent is None else parent.metadata.fairness_key
        key = its_key if options.fairness_key is None else options.fairness_key
        metadata = RequestMetadata(
            # A batch has no request id of its own.
            request_id=(parent and parent.metadata.request_id) or new_request_id(),
            deployment=self._id,
            method_name=options.method_name,
            route="" if parent is None else parent.current_route(),
            multiplexed_model_id=options.multiplexed_model_id,
            is_streaming=options.stream,
            app_name="" if parent is None else parent.app_name,
            deadline=deadline,
            session_id=options.session_id,
            priority=priority,
            fairness_key=key,
        )
        call = Call(metadata, NO_WORK, copy_context())
        if TRACING.tracer is not None or call.started_at >= TRACING.next_look:
            trace_call(call)
        if parent is not None and deadline is not None:
            call.started_at = parent.started_at  # the error names the request's timeout
        # Looked up now, so that a handle outlives a redeployment.
        router = call.queue = self._directory.router(self._id)
        responses = _responses_among((*args, *kwargs.values()))
        channel: Channel[object] | None = Channel() if options.stream else None

        def submit() -> None:
            call.waits_for = frozenset()
            if call.settled:  # cancelled while its arguments were resolved
                return
            try:
                resolved, named = list(args), kwargs
                if responses:
                    resolved = [_resolved(arg) for arg in args]
                    named = {name: _resolved(arg) for name, arg in kwargs.items()}
            except Exception as error:  # of the call whose result is an argument
                call.settle(error=error)
                return
            call.work = Invocation(options.method_name, resolved, named, channel)
            if take is None:
                router.assign(call)
            else:
                take(router, call)

        if parent is not None:
            parent.adopt(call)
        if deadline is not None and not call.is_over():
            self._directory.expire(call, deadline)
        if responses and not call.settled:
            call.waits_for = frozenset(response._call for response in responses)
            self._directory.when_resolved(responses, submit)
        elif not call.settled:  # else it is too late to begin
            submit()
        if channel is None:
            return DeploymentResponse(call)
        return DeploymentResponseGenerator(call, channel, self._directory)

    @_beside_users
    def broadcast(
        self, method_name: str, *args: Any, **kwargs: Any
    ) -> DeploymentBroadcastResponse[Any]:
        """Call a method on each replica that serves now; never blocks.

        On a replica without a free slot the call is the next to get one. The queue of the
        deployment, and `max_queued_requests`, are for other calls.
        """

        def take(router: CallRouter, call: Call) -> None:
            call.work = BoundInvocation.of(call.work)
            router.broadcast(call)

        options = replace(self.options(method_name=method_name)._options, stream=False)
        return DeploymentBroadcastResponse(self._by(take, options).remote(*args, **kwargs)._call)

    @_beside_users
    def choose_replica(
        self, *args: Any, **kwargs: Any
    ) -> AbstractAsyncContextManager[ReplicaSelection]:
        """Reserve a slot of the replica that a call with these arguments would go to.

        The context gives a `ReplicaSelection` for `dispatch`. Its end gives the slot back, unless
        it was used. Raises the errors of a call that is refused.
        """
        return self._choose(args, kwargs)

    @asynccontextmanager
    async def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[ReplicaSelection]:
        selection = await self.reserve(args, kwargs)
        try:
            yield selection
        finally:
            selection.release()

    async def reserve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ReplicaSelection:
        """Return the selection of `choose_replica`, which the caller has to release."""
        placed = Wakeup(asyncio.get_running_loop())
        work = Reservation("", [], {}, None, placed.wake)

        def take(router: CallRouter, call: Call) -> None:
            asked: Any = call.work
            work.method, work.args, work.kwargs = asked.method, asked.args, asked.kwargs
            call.work = work
            router.assign(call)

        response = self._by(take, self._options).remote(*args, **kwargs)
        call = response._call
        call.when_settled(placed.wake)
        try:
            waiter = begin_wait(call)
            try:
                await placed.wait()
            finally:
                end_wait(call, waiter)
            if not work.held:
                call.outcome()
        except BaseException:
            call.cancel()
            work.give_back(call)
            raise
        return ReplicaSelection(**work.place, _handle=self, _response=response, _work=work)

    @_beside_users
    def dispatch(self, selection: ReplicaSelection, *args: Any, **kwargs: Any) -> Any:
        """Make the call on the replica of a selection, in its slot. Returns what `remote` does.

        The options are those of the handle that chose. Raises `RuntimeError` for a selection that
        was dispatched before, `ValueError` for one of another deployment.
        """
        if selection._handle._id != self._id:
            # Text: Ray 2.60.0, handle.py.
            raise ValueError(
                "Cannot dispatch a selection created for a different deployment. This handle is "
                f"for {self._id}, but the selection was created for {selection._handle._id}."
            )
        if selection._is_used:
            # Text: Ray 2.60.0, replica_wrapper.py.
            raise RuntimeError(
                f"ReplicaSelection for {selection.replica_id} has already been dispatched. Each "
                "selection can only be dispatched once."
            )
        selection._is_used = True
        reserved, work = selection._response._call, selection._work

        def take(router: CallRouter, call: Call) -> None:
            if (runner := work.take()) is None:
                call.settle(
                    error=RuntimeError(
                        f"the slot of replica {selection.replica_id} was given back at the end of "
                        "`async with handle.choose_replica(...)`; dispatch inside it"
                    )
                )
            else:
                call.work = BoundInvocation.of(call.work)
                router.dispatch(reserved, call, runner)

        response = self._by(take, selection._handle._options).remote(*args, **kwargs)
        # If an argument has failed, or the call was cancelled before it had all of them.
        response._call.when_settled(lambda _: work.give_back(reserved))
        return response

    def _by(self, take: TakeCall, options: HandleOptions) -> DeploymentHandle:
        return DeploymentHandle(self._id, self._directory, options, take)

    def __getattr__(self, name: str) -> DeploymentHandle:
        if not name.startswith("_"):
            methods = self._directory.methods(self._id)
            if methods is None or name in methods:
                return self.options(method_name=name)
            raise UnknownMethodError(absent_method(self._id.name, name, [*methods]))
        way = (
            f"; a method of this name is called by handle.options(method_name={name!r}).remote(...)"
        )
        raise AttributeError(
            f"'DeploymentHandle' object has no attribute '{name}'{'' if name[:2] == '__' else way}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        method = self._options.method_name
        name = "handle" if method == "__call__" else f"handle.{method}"
        raise TypeError(
            f"a handle of deployment '{self._id.name}' is not callable; its calls are "
            f"{name}.remote(...), and their answers are awaited: await {name}.remote(...)"
        )

    def shutdown(self) -> None:
        """Do nothing but warn, because Ray Serve has this method and a handle holds nothing."""
        _warn_of_shutdown("shutdown")

    async def shutdown_async(self) -> None:
        """Do nothing but warn, as `shutdown`."""
        _warn_of_shutdown("shutdown_async")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeploymentHandle) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return (self._id, self._options, id(self._directory))

    def __repr__(self) -> str:
        return f"DeploymentHandle(deployment='{self._id.name}', app='{self._id.app_name}')"

    def __copy__(self) -> DeploymentHandle[T_co]:
        return self

    def __deepcopy__(self, memo: object) -> DeploymentHandle[T_co]:
        return self


if TYPE_CHECKING:

    class StreamingHandle(DeploymentHandle[T_co]):
        """A handle with `stream=True`, to `ingress.mypy`; at run time a `DeploymentHandle`."""

        def remote(self, *args: Any, **kwargs: Any) -> DeploymentResponseGenerator[Any]: ...

        def __getattr__(self, name: str) -> StreamingHandle[Any]: ...

    MYPY = False  # True to mypy, which has a plugin
    if not MYPY:
        from ingress.app.declaration.pyright import HandleView, Methods, StreamingView

        # isort: split
        from ingress_methods import *  # noqa: F403  # the `Methods` that `ingress stubs` writes

        class DeploymentHandle(HandleView[T_co], Methods):
            """A handle to one deployment: `await handle.method.remote(...)`."""

        class StreamingHandle(StreamingView[T_co]):
            """A handle with `stream=True`: `async for item in handle.method.remote(...)`."""


@dataclass(eq=False, slots=True)
class ReplicaSelection:
    """A replica with a slot for one call, which `handle.dispatch` makes.

    Of a replica in this server only `replica_id` says something.
    """

    replica_id: str
    node_ip: str
    port: int | None
    node_id: str
    availability_zone: str | None
    replica_metadata: dict[str, Any]
    _handle: DeploymentHandle = field(repr=False)
    _response: Any = field(repr=False)  # its end would cancel the call that holds the slot
    _work: Reservation = field(repr=False)
    _is_used: bool = field(default=False, repr=False)

    @property
    def address(self) -> str:
        return f"{self.node_ip}:{self.port}" if self.port else self.node_ip

    def to_dict(self) -> dict[str, Any]:
        """Return the public fields."""
        return dict(self._work.place)

    def release(self) -> None:
        """Give the slot back, unless it was used. Thread-safe."""
        self._work.give_back(self._response._call)


def _responses_among(arguments: tuple[Any, ...]) -> list[DeploymentResponse]:
    """Return the responses that have to be awaited first. Raises `RuntimeError` for a stream."""
    found = []
    for each in arguments:
        if type(each) is DeploymentResponseGenerator:
            raise RuntimeError(
                "Streaming deployment handle results cannot be passed to downstream handle calls. "
                "If you have a use case requiring this feature, iterate here and pass the items."
            )
        if isinstance(each, DeploymentResponse):
            found.append(each)
    return found


def _warn_of_shutdown(method: str) -> None:
    warnings.warn(
        f"handle.{method}() has no effect, because a handle holds no resources; leave it out. A "
        f'method of the deployment is called with handle.options(method_name="{method}").remote()',
        UserWarning,
        stacklevel=3,
    )


class _Response:
    """The base of `DeploymentResponse` and `DeploymentResponseGenerator`."""

    __slots__ = ("__weakref__", "_call")
    _advice = "pass it as an argument of its own, or await it first"

    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def request_id(self) -> str:
        return self._call.metadata.request_id

    def __getattr__(self, name: str) -> Any:
        raise absent_member(self, name)

    def __repr__(self) -> str:
        call = self._call
        state = "failed" if call.error is not None else "done" if call.settled else "pending"
        return f"{type(self).__name__}(request_id='{self.request_id}', {state})"

    def cancel(self) -> None:
        """Cancel the request, wherever it is. No effect once it is answered."""
        self._call.cancel()

    def cancelled(self) -> bool:
        """Return whether the request was cancelled before it was answered."""
        return isinstance(self._call.error, RequestCancelledError)

    def __reduce__(self) -> NoReturn:
        # Text: Ray 2.60.0, handle.py.
        raise RayServeException(
            f"`{type(self).__name__}` is not serializable. Inside a list or another value, it "
            f"cannot go to another process: {self._advice}"
        )


class DeploymentResponse(_Response, Generic[R_co]):
    """A pending answer. It may be awaited any number of times."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, R_co]:
        return self._wait().__await__()

    def __aiter__(self) -> NoReturn:
        raise TypeError(self._one_answer("async for"))

    def __iter__(self) -> NoReturn:
        raise TypeError(self._one_answer("for"))

    def _one_answer(self, loop: str) -> str:
        method = self._call.metadata.method_name
        name = "handle" if method == "__call__" else f"handle.{method}"
        return (
            f"`{loop}` over a DeploymentResponse, which is the one answer to a call: await it, or "
            f"call a generator with stream=True: `{loop} item in handle.options(stream=True)"
            f"{name.removeprefix('handle')}.remote(...)`"
        )

    async def _wait(self) -> R_co:
        try:
            await self._call.wait()
        except asyncio.CancelledError:
            self._call.cancel()  # the task no longer wants the answer
            raise
        outcome: R_co = self._call.outcome()
        return outcome

    def result(self, *, timeout_s: float | None = None) -> R_co:
        """Wait for the answer in a thread and return it.

        Raises the exception of user code, `TimeoutError` after `timeout_s` (the request continues),
        and `RuntimeError` in a running event loop, which `result` would block.
        """
        if not (timeout_s is None or is_number(timeout_s)):
            raise TypeError(
                f"timeout_s must be a number of seconds, got {timeout_s!r}; leave it out to wait "
                "as long as it takes"
            )
        _refuse_in_loop("await response")
        if not self._call.wait_blocking(timeout_s):
            raise TimeoutError(f"Timed out waiting for the result after {timeout_s} s.")
        outcome: R_co = self._call.outcome()
        return outcome


class DeploymentResponseGenerator(_Response, Generic[R_co]):
    """A stream of answers; iterate with `async for`, or with `for` in a thread.

    Several consumers may take turns, but only one can wait for the next item. A second one gets
    `RuntimeError`, as with a Python generator.
    """

    __slots__ = ("_channel", "_directory", "_turn")
    _advice = "iterate over it, and pass the items"

    def __init__(self, call: Call, channel: Channel[Any], directory: Directory) -> None:
        super().__init__(call)
        self._turn = threading.Lock()  # held while a consumer waits; acquired without blocking
        self._channel, self._directory = channel, directory
        call.when_settled(lambda call: _end(channel, call.error))

    def __aiter__(self) -> AsyncIterator[R_co]:
        return self

    async def __anext__(self) -> R_co:
        waiter = self._begin_turn()
        try:
            item: R_co = await self._channel.get()
            return item
        except EndOfStream:
            raise StopAsyncIteration from None
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        finally:
            end_wait(self._call, waiter)
            self._turn.release()

    def __iter__(self) -> Iterator[R_co]:
        return self

    def __next__(self) -> R_co:
        _refuse_in_loop("`async for` or `await response.__anext__()`", quote=False)
        waiter = self._begin_turn()
        try:
            item: R_co = self._channel.get_blocking()
            return item
        except EndOfStream:
            raise StopIteration from None
        finally:
            end_wait(self._call, waiter)
            self._turn.release()

    def _begin_turn(self) -> Call | None:
        """Wait for the next item as the only consumer; return the call that waits, if any."""
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "another consumer waits for the next item of this DeploymentResponseGenerator; "
                "make a call for each consumer, or let one consumer pass the items on"
            )
        try:
            return begin_wait(self._call)
        except BaseException:  # a cycle
            self._turn.release()
            raise

    async def aclose(self) -> None:
        """Stop the stream; the deployment's generator is closed where it runs."""
        self._call.cancel()

    def __await__(self) -> NoReturn:
        raise TypeError(
            "`DeploymentResponseGenerator` cannot be awaited directly. Use `async for` or "
            "`await response.__anext__() instead`."
        )

    def result(self, *, timeout_s: float | None = None) -> NoReturn:
        raise TypeError(
            "`DeploymentResponseGenerator` has no single result. Use `for` or `async for`."
        )

    def __del__(self) -> None:
        # An abandoned stream: its producer waits for room in the channel. Cancelled later, because
        # the garbage collector may run this in a thread that holds the lock `cancel` needs.
        if not self._call.settled:
            self._directory.later(self._call.cancel)


class DeploymentBroadcastResponse(Generic[R_co]):
    """The pending answers of all replicas, in no order. They may be fetched any number of times."""

    __slots__ = ("_root",)

    def __init__(self, root: Call) -> None:
        self._root = root  # whose answer is the list of the replicas' calls

    def results(
        self, *, timeout_s: float | None = None, return_exceptions: bool = False
    ) -> list[R_co]:
        """Wait for the answers in a thread, and return them.

        Raises the first exception of a replica, unless `return_exceptions` puts it into the list;
        `TimeoutError` after `timeout_s` (the calls continue); `RuntimeError` in a running event
        loop, which this would block.
        """
        _check_timeout(timeout_s)
        _refuse_in_loop("await response.results_async()")
        until = None if timeout_s is None else monotonic() + timeout_s

        def outcome(call: Call) -> Any:
            if not call.wait_blocking(None if until is None else max(0.0, until - monotonic())):
                raise TimeoutError(_LATE)
            if return_exceptions and call.error is not None and call is not self._root:
                return call.error
            return call.outcome()

        return [outcome(each) for each in outcome(self._root)]

    async def results_async(
        self, *, timeout_s: float | None = None, return_exceptions: bool = False
    ) -> list[R_co]:
        """Return the answers, as `results` does, on the running loop.

        A task that is cancelled while it waits cancels the calls.
        """
        _check_timeout(timeout_s)

        async def outcome(call: Call) -> Any:
            await call.wait()
            return call.outcome()

        try:
            async with asyncio.timeout(timeout_s) as limit:
                found: list[R_co] = await asyncio.gather(
                    *map(outcome, await outcome(self._root)), return_exceptions=return_exceptions
                )
                return found
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(_LATE) from None
            raise error  # of a replica
        except asyncio.CancelledError:
            self._root.cancel()
            for each in self._root.value or ():
                each.cancel()
            raise

    def __await__(self) -> NoReturn:
        raise TypeError(
            "`DeploymentBroadcastResponse` cannot be awaited directly. Use "
            "`await response.results_async()`, or `response.results()` in a thread."
        )

    def __repr__(self) -> str:
        return "DeploymentBroadcastResponse()"


_LATE = "Timed out waiting for broadcast results."  # Text: Ray 2.60.0, handle.py.


def _check_timeout(timeout_s: Any) -> None:
    if not (timeout_s is None or (is_number(timeout_s) and timeout_s >= 0)):
        raise ValueError(f"timeout_s must be None or non-negative, got {timeout_s!r}.")


def _end(channel: Channel[object], error: BaseException | None) -> None:
    channel.finish(error)
    if isinstance(error, RequestCancelledError):
        channel.close()  # drops the items that were not taken yet


def _level_of(priority: Any) -> int:
    level = PRIORITIES.get(priority) if isinstance(priority, str) else None
    if level is None:
        raise ValueError(
            f"priority must be 'high', 'normal' or 'low', got {priority!r}; leave it out for the "
            "priority of the request that makes the call"
        )
    return level


def _resolved(arg: Any) -> Any:
    return arg._call.outcome() if isinstance(arg, DeploymentResponse) else arg


def _refuse_in_loop(instead: str, *, quote: bool = True) -> None:
    if running_loop() is not None:
        instead = f"`{instead}`" if quote else instead
        raise RuntimeError(
            "Sync methods should not be called from within an `asyncio` event loop. "
            f"Use {instead} instead."
        )


__getattr__ = teller(__name__)
