"""The host of a replica in a child process.

To the router and to calls its replica is one like any other: slots, cancellations, deadlines and
counts are the same code, on the loop that requests arrive on. Only its user code is remote. The
control loop replaces it once its child has ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Any, ClassVar, TypeVar

from starlette.types import Message, Receive, Scope, Send

from ingress.app.asgi.messages import Chunks
from ingress.app.asgi.spec import BoundApp
from ingress.app.asgi.template import TEMPLATES
from ingress.app.declaration.build import BuiltDeployment
from ingress.context import ReplicaRuntime
from ingress.core.base.counters import LaneLoad
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.loops import BorrowedLoop, run_on, start_on
from ingress.core.calls.tracing import TRACING, span_headers
from ingress.core.execution.execution import SERIAL_LANE, contained
from ingress.core.execution.lanes import lanes_of
from ingress.exceptions import StreamClosedError
from ingress.handle import Invocation
from ingress.serving.processes.child_calls import MakeHandle
from ingress.serving.processes.code import pickled_arguments, reference_to
from ingress.serving.processes.crossing import unsendable
from ingress.serving.processes.frames import (
    Content,
    dumps,
    encode,
    loads,
    outside,
    size_of_content,
)
from ingress.serving.processes.link import Link
from ingress.serving.processes.messages import (
    RESPONSE_BODY,
    ChildReport,
    Frame,
    ReplicaSpec,
    envelope_of,
    message_as_sent,
    scope_as_sent,
)
from ingress.serving.processes.output import levels
from ingress.serving.processes.remote_calls import RemoteCall, RemoteWork, unasked
from ingress.serving.processes.resources import EnvironmentOf, environment_of, visible
from ingress.serving.replicas.host import HostCounts, OwnPart
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.metrics import series
from ingress.telemetry.watchdog import WATCHDOG
from ingress.telemetry.watchdog.stacks import EMPTY, Stack

T = TypeVar("T")
ANSWER_S = 1.0


class ProcessHost:
    """A child process with the user's instance.

    built        the deployment of its replica
    make_handle  returns the handles for the calls that the child makes
    on_lost      is called, on the loop of the frames, when the process has ended by itself
    borrowed     the loop of the frames, at best the one that requests arrive on; user code has
                 another

    It fulfils the `Host` protocol. The other arguments are those of `ThreadHost`, in the child.
    """

    __slots__ = (
        "_counts", "_home", "_prepare", "_replica", "context", "link", "loop", "mailbox",
        "user_code",
    )  # fmt: skip
    isolation = OwnPart.PROCESS
    thread = pools = models = None
    made_there: ClassVar[type[Replica]] = Replica
    """The class of the replica in the child."""

    def __init__(
        self,
        replica: Replica,
        max_ongoing: int,
        func_or_class: Callable[..., Any],
        bound_app: BoundApp | None,
        *,
        built: BuiltDeployment,
        make_handle: MakeHandle,
        on_lost: Callable[[], None],
        lanes: Mapping[str, int] | None = None,
        borrowed: asyncio.AbstractEventLoop,
        factories: object = None,  # the child has its own
        **options: Any,
    ) -> None:
        self._replica = replica
        self._home = BorrowedLoop(str(replica.replica_id), borrowed, replica.on_dead)
        self.loop, self.mailbox = borrowed, self._home.mailbox
        declared = lanes_of(func_or_class, max_ongoing, lanes or {})
        loads = {name: LaneLoad(limit, 0, 0) for name, limit in declared.limits.items()}
        if declared.is_serial:
            loads[SERIAL_LANE] = LaneLoad(1, 0, 0)
        self._counts = HostCounts({}, {}, 0, {}, loads, {})
        # For the names of its methods: there is no instance in this process.
        self.context = ReplicaRuntime(replica.replica_id, func_or_class, loop=borrowed)
        self.link = Link(
            replica.replica_id,
            func_or_class.__module__,
            make_handle,
            on_report=self._take_report,
            on_end=replica.lose,
            on_lost=on_lost,
        )
        self.user_code: Any = RemoteCode(self.link, bound_app)
        self._prepare = partial(
            _prepared,
            built,
            make_replica=self.made_there,
            replica_id=replica.replica_id,
            max_ongoing=max_ongoing,
            lanes=lanes or {},
            **options,
        )

    @property
    def pid(self) -> int:
        return self.link.pid

    @property
    def end(self) -> str:
        return self.link.end

    @property
    def last_output(self) -> str:
        return self.link.last_output

    @property
    def model_ids(self) -> frozenset[str]:
        return self.link.model_ids

    def counts(self) -> HostCounts:
        return self._counts

    def standing(self) -> tuple[float, Stack] | None:
        turned_at = self.link.turned_at
        return None if turned_at is None else (turned_at, EMPTY)

    @property
    def may_stand(self) -> bool:
        return False

    def holder(self) -> Call | None:
        return None  # its process is killed

    def have_computed(self, share: float) -> bool:
        return False  # they do not want the GIL of this process

    async def start(self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any) -> None:
        # In a thread: this looks for the module of the user's class, and counts GPUs.
        specification, environment_of = await asyncio.to_thread(
            self._prepare,
            user_config=user_config,
            place=self.context.place,
            log_levels=levels(),
            log_mark=self.link.mark,
        )
        await run_on(self.loop, self.link.start, specification, environment_of)

    def _take_report(self, report: ChildReport) -> None:
        self._counts = report.counts
        self._replica.stalls.update(report.stalls)
        series.take(series.source_of(self.context, self.pid), report.metrics)
        WATCHDOG.note(report.new_stalls)

    def look(
        self, look: Callable[..., T], *arguments: object, timeout_s: float
    ) -> Callable[..., T]:
        """Begin to call `look(replica, *arguments)` in the child, in a thread beside its loop.

        `look` is a function of a module. Returns a function that waits for the result, and raises
        `TimeoutError` if there is none in `timeout_s`, or the error that `look` raised. It takes a
        shorter time to wait, if there is one. Both are thread-safe, and not for the loop of the
        frames.
        """
        answer = start_on(self.loop, self._look(look, arguments, timeout_s))
        # Longer, because that loop may stand still itself.
        return lambda wait_s=timeout_s + ANSWER_S: loads(answer.result(wait_s))

    async def _look(
        self, look: Callable[..., object], arguments: Sequence[object], timeout_s: float
    ) -> bytes | memoryview:
        async with asyncio.timeout(timeout_s):
            work = self.link.send(Frame.ASK, dumps(("look", (look, *arguments))))
            pickled: bytes | memoryview = await work.outcome()
            return pickled

    def add_threads(self, max_ongoing: int) -> None:
        self.mailbox.post(self.link.send, Frame.ASK, dumps(("add_threads", max_ongoing)))

    def hand_over(self) -> None:
        self.mailbox.post(self.link.hand_over)

    def direct(self, call: Call) -> bool:
        # Where the child's answer is all there is to wait for. A call that cannot begin has a task
        # nevertheless: it frees a slot, and the next one would begin in recursion.
        work, deadline, replica = call.work, call.metadata.deadline, self._replica
        if (
            not isinstance(work, Invocation)
            or work.channel is not None
            or TRACING.tracer is not None  # the waits get spans, in the task
            or (deadline is not None and monotonic() >= deadline)
        ):
            return False
        remote = RemoteCall(loop=self.loop)
        if replica.takes(call) and replica.admit(call, remote):
            remote.begin(call, self._end_call)
            try:
                # A copy: the call's context is entered if a replica that has ended turned it away.
                call.context.copy().run(self.user_code.send, remote, work)
            except BaseException as error:  # of user code, which pickling may call
                # Later, for the reason above.
                self.loop.call_soon(remote.end, None, error)
        return True

    def _end_call(self, work: RemoteCall) -> None:
        """End a call without a task, as `Replica.serve` and its caller end the others."""
        call, error, replica = work.call, work.error, self._replica
        if error is None:
            replica.end(call, None)
            call.settle(work.value)
        elif isinstance(error, asyncio.CancelledError):
            replica.end(call, error)
            replica.settle_cancelled(call, error)
        else:
            error = contained(error, str(replica.replica_id), is_task=False)
            replica.end(call, error)
            assert isinstance(error, Exception)
            replica.fail(call, error)

    async def stop(self) -> None:
        await self.link.stop()

    def join(self, deadline: float) -> list[str]:
        self.link.kill()
        self.link.join()
        return []

    def has_left(self) -> bool:
        return True


class RemoteCode:
    """The user's class or function in a child, in the place of its `UserCode`.

    Each call is one frame down, and the child's answers up. The end of cancelled work is awaited,
    as the slot follows it. Owned by the loop of its frames.
    """

    __slots__ = ("_link", "_templates")

    def __init__(self, link: Link, app: BoundApp | None) -> None:
        self._link = link
        self._templates = None if app is None else app.templates()

    async def reconfigure(self, user_config: object) -> None:
        await self._ask("reconfigure", user_config)

    async def check_health(self) -> None:
        await self._ask("check_health")

    async def autoscaling_stats(self) -> object:
        return await self._ask("autoscaling_stats")

    async def _ask(self, what: str, argument: object = None) -> object:
        return await self._link.send(Frame.ASK, dumps((what, argument))).outcome()

    async def call(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        work = self._link.send(Frame.CALL, _content(args, kwargs))
        try:
            return await work.outcome()
        finally:
            if not work.is_over:
                await work.leave(sys.exception())

    def send(self, work: RemoteCall, invocation: Invocation) -> None:
        """Send a call, in its context. Raises an error if that cannot be pickled."""
        CURRENT_CALL.set(work.call)
        self._link.send_call(work, _content(invocation.args, invocation.kwargs))

    async def stream(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> AsyncGenerator[object, None]:
        """Call a method that returns a generator and yield its items."""
        work = self._link.send(Frame.STREAM, _content(args, kwargs))
        try:
            while items := await work.take():
                for item in items:
                    yield item
                work.give()
        finally:
            if not work.is_over:
                await work.leave(sys.exception())

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request or WebSocket."""
        body, has_more, is_http = b"", False, scope["type"] == "http"
        if self._templates is not None:
            scope[TEMPLATES] = self._templates
        call = CURRENT_CALL.get()
        metadata = call.metadata
        if is_http and call.work.is_unread:
            has_more = True
        elif is_http:
            first = await receive()
            body, has_more = first.get("body", b""), first.get("more_body", False)
        head = envelope_of(metadata, span_headers()), scope_as_sent(scope)
        work = self._link.send(Frame.HTTP, encode((*head, outside(bytes(body)), has_more)))
        feeding: asyncio.Task[None] | None = None

        def feed() -> None:
            nonlocal feeding
            if feeding is None or feeding.done():
                feeding = asyncio.get_running_loop().create_task(self._feed(work, receive))

        def listen() -> None:
            call.work.note_stream(ends_with_client=False)
            feed()

        if has_more or not is_http:
            feed()
        if is_http:
            call.work.note_stream(ends_with_client=True)  # unless the child says that it listens
        work.listen = listen
        try:
            while messages := await work.take():  # at the client's pace
                for message in messages if len(messages) < 3 else _gathered(messages):
                    try:
                        await send(message)
                    except OSError:
                        if is_http:
                            raise
                        # As in a thread: its next `send` raises, and its end is its own.
                        self._close(work)
                work.give()
        finally:
            work.listen = unasked  # the work would be in a cycle with it
            if not work.is_over:
                await work.leave(sys.exception())
            if feeding is not None:
                feeding.cancel()

    async def _feed(self, work: RemoteWork, receive: Receive) -> None:
        """Send the client's messages to user code, as fast as it takes them.

        The disconnect of a request is sent if user code listens: it asks after the whole body.
        """
        message: Message = {"type": ""}
        call = work.call
        assert call is not None
        while not message["type"].endswith(".disconnect"):
            message = await receive()
            work.can_move = False
            content = message_as_sent(message)
            try:
                await work.window.take(size_of_content(content))
                work.frames.post(Frame.INPUT, work.number, content)
            except StreamClosedError:
                return  # the work has ended
            except OSError as problem:  # there is no memory or descriptor left for a large one
                name = call.metadata.deployment.name
                work.fail(unsendable(name, problem, message=message))
                return
            if message.get("more_body") is False:
                return
        if call.is_interrupted:  # the client has left; else the application stops, and may send
            self._close(work)

    def _close(self, work: RemoteWork) -> None:
        """Tell user code that its client has left. So far only `_feed` knows."""
        assert work.call is not None
        work.call.work.hear(is_heard=work.has_heard)
        work.frames.post(Frame.CLOSE, work.number)


def _content(args: Sequence[object], kwargs: Mapping[str, object]) -> Content:
    """Return the content of the current call's frame."""
    metadata = CURRENT_CALL.get().metadata
    try:
        return encode((envelope_of(metadata, span_headers()), args, kwargs))
    except Exception as problem:
        name = metadata.deployment.name
        raise unsendable(name, problem, args=args, kwargs=kwargs) from problem


def _gathered(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages, with neighbouring chunks of a body as one message of several chunks."""

    def is_chunk(message: Message) -> bool:
        return message["type"] == RESPONSE_BODY and bool(message["more_body"])

    for are_chunks, each in groupby(messages, is_chunk):
        if are_chunks:
            body = Chunks.of([message["body"] for message in each])
            yield {"type": RESPONSE_BODY, "body": body, "more_body": True}
        else:
            yield from each


def _prepared(built: BuiltDeployment, **options: Any) -> tuple[bytes, EnvironmentOf]:
    """Return the specification of a child, and the function that makes its environment.

    Raises `TypeError` for what cannot be sent to it.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            f'deployment {built.name!r} has isolation="process", which Windows does not support; '
            "leave it out"
        )
    code = reference_to(built)
    specification = dumps(ReplicaSpec(code=code, arguments=pickled_arguments(built), **options))
    config = built.deployment.config
    gpus = visible() if config.num_gpus else []
    return specification, partial(environment_of, config, built.name, gpus)
