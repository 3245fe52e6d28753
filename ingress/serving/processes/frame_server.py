"""The server of a child's frames: those that arrive begin, feed and cancel the replica's calls.

It has for a child the part that a router and a proxy have in the server's process. The parent's
router counts the slots, so a call that arrives has one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import Context
from functools import partial
from time import monotonic
from typing import Any

from ingress.context import REPLICA
from ingress.core.base.counters import copied
from ingress.core.calls.loops import mailbox_of
from ingress.core.calls.tracing import TRACING, adopt, trace_id_of
from ingress.exceptions import RayServeException, UserCodeExit
from ingress.handle import Invocation
from ingress.serving.processes.child_calls import ServerDirectory, Waits
from ingress.serving.processes.crossing import failing, pickled_error, read, unreadable, unsendable
from ingress.serving.processes.frames import (
    Buffers,
    Content,
    Frames,
    dumps,
    encode,
    loads,
    outside,
)
from ingress.serving.processes.hosted_call import HostedCall, HostedRequest
from ingress.serving.processes.messages import UPWARD, Frame, message_of, metadata_of, scope_of
from ingress.serving.processes.shared_memory import SharedNumbers
from ingress.serving.replicas.host import not_begun_error
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.metrics import series
from ingress.telemetry.watchdog import WATCHDOG, Stall

BEAT_S = 0.25


class FrameServer:
    """The calls of a child's replica. Owned by the user loop.

    `stop()` ends the process, in another thread. `starting` is the task of the replica's start.
    """

    __slots__ = (
        "_calls",
        "_last_stall",
        "_models",
        "_reported",
        "_shared",
        "_stop",
        "_tasks",
        "directory",
        "frames",
        "replica",
        "starting",
    )  # fmt: skip

    def __init__(self, replica: Replica, shared: SharedNumbers, stop: Callable[[], None]) -> None:
        self.replica = replica
        self.starting: asyncio.Task[None] | None = None
        self.frames: Frames
        self.directory = ServerDirectory(replica.loop)
        self._shared = shared
        self._stop = stop
        self._calls: dict[int, HostedCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._models: frozenset[str] = frozenset()
        self._reported = dumps(
            ({}, {}, 0, {}, {}, {}, {}, [], [])
        )  # the last that the parent knows
        self._last_stall: Stall | None = None

    def on_frame(self, kind: int, number: int, content: memoryview, buffers: Buffers) -> None:
        if number >= UPWARD:
            work = self.directory.works.get(number)
            if work is not None:
                work.on_frame(kind, content, buffers)
                if work.is_over:
                    del self.directory.works[number]
        elif kind <= Frame.HTTP:
            self._on_call(kind, number, content, buffers)
        elif kind == Frame.ASK:
            self._on_ask(number, content)
        elif kind == Frame.STOP:
            if self.starting is not None:
                self.starting.cancel()
            try:
                self._report()  # the last
            finally:
                self._stop()
        elif (call := self._calls.get(number)) is not None:  # else it has ended meanwhile
            self._on_message(kind, call, content, buffers)

    def begin_start(self) -> None:
        """Show the parent that the instance is about to be made, in the current task."""
        self.starting = asyncio.current_task()
        self._shared.numbers.beats += 1

    def beat(self) -> None:
        """Show the parent, now and again and again, that the user loop turns, and report."""
        self._shared.numbers.turned_at = monotonic()
        self._shared.numbers.beats += 1
        self.replica.loop.call_later(BEAT_S, self.beat)  # first: a report may raise
        self._report()

    def _tell_models(self) -> None:
        if self.replica.model_ids != self._models:
            self._models = self.replica.model_ids
            self.frames.post(Frame.MODELS, 0, dumps(self._models))

    def _report(self) -> None:
        self._tell_models()
        stalls = [each for each in WATCHDOG.stalls() if each.is_over]
        new = stalls[stalls.index(self._last_stall) + 1 :] if self._last_stall in stalls else stalls
        counts = tuple(self.replica.host.counts())
        told = counts, copied(self.replica.stalls), series.collected()
        report = dumps((*told, new))
        if report != self._reported:
            self.frames.post(Frame.REPORT, 0, report)
            # Without the stalls, so that they are not told again.
            self._reported = dumps((*told, []))
            self._last_stall = stalls[-1] if stalls else None

    def excuse(self) -> None:
        """Show the parent that the user loop may stand. Thread-safe.

        A model is being loaded, or `reconfigure` runs.
        """
        if self.replica.host.may_stand:
            self._shared.numbers.turned_at = monotonic()

    def _on_call(self, kind: int, number: int, content: memoryview, buffers: Buffers) -> None:
        # Else a request that ends this process here would end one replica after the other.
        self._shared.numbers.being_read = number
        try:
            call = self._arrived(kind, number, loads(content, buffers))
        except Exception as error:  # of reading the arguments, which may run user code
            self.frames.post(Frame.FAILED, number, pickled_error(error))
            return
        finally:
            self._shared.numbers.being_read = 0
        call.waits_for = Waits(self.directory, number)
        self._calls[number] = call
        call.task = self.replica.loop.create_task(self._run(call), context=call.context)

    def _on_ask(self, number: int, content: memoryview) -> None:
        answer = self._answer(number, bytes(content))
        task = self.replica.loop.create_task(answer, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arrived(self, kind: int, number: int, content: Any) -> HostedCall:
        deployment = self.replica.replica_id.deployment_id
        if kind == Frame.HTTP:
            envelope, values, body, has_more = content
            metadata = metadata_of(envelope, deployment, is_http=True, is_streaming=False)
            first = None
            if values[0] == "http":
                first = {"type": "http.request", "body": bytes(body), "more_body": has_more}
            request = HostedRequest(scope_of(values), first)
            return HostedCall(number, self.frames, metadata, request)
        envelope, args, kwargs = content
        is_streaming = kind == Frame.STREAM
        metadata = metadata_of(envelope, deployment, is_http=False, is_streaming=is_streaming)
        invocation = Invocation(metadata.method_name, args, kwargs, None)
        call = HostedCall(number, self.frames, metadata, invocation)
        adopt(envelope[-1], call.context)
        return call

    def _on_message(
        self, kind: int, call: HostedCall, content: memoryview, buffers: Buffers
    ) -> None:
        if kind == Frame.INPUT:
            size = len(content) + sum(map(len, buffers))
            try:
                if call.request is not None:
                    call.request.accept(message_of(content, buffers), size)
            except Exception as problem:  # of the code of its values: the call's user code gets it
                call.cancel(unreadable("a message of the client", problem))
        elif kind == Frame.CREDIT:
            call.window.give(content)
        elif kind == Frame.CLOSE:
            call.close()
        elif kind == Frame.CANCEL:
            reason = None
            if content:
                try:
                    reason = read("the reason of a cancellation", content)
                except RayServeException as problem:  # it is cancelled nevertheless
                    reason = problem
            call.cancel(reason)

    async def _run(self, call: HostedCall) -> None:
        """Run a call on the replica, and send its end."""
        replica = self.replica
        error: BaseException | None = None
        value: object = None
        try:
            if not self._shared.begin(call.number):
                raise not_begun_error(replica.replica_id)
            call.runner = replica
            if replica.admit(call):
                value = await replica.serve(call)
        except asyncio.CancelledError as cancelled:
            error = UserCodeExit(cancelled, str(replica.replica_id))
        except Exception as raised:  # of user code: the caller gets it
            error = raised
            if call.settled:  # the server does not get it
                replica.fail(call, raised)
        if call.settled:  # cancelled, or its deadline passed
            error = call.error
        elif replica.is_ending:
            error = replica.gone_error()
        call.settle(value, error)
        if TRACING.tracer is not None:
            self._tell_trace(call)
        self._end(call, value, error)

    def _tell_trace(self, call: HostedCall) -> None:
        # The server knows the trace of a call by handle: it has sent it.
        trace_id = trace_id_of(call) if call.request is not None else ""
        if trace_id:
            self.frames.post(Frame.TRACE, call.number, trace_id.encode())

    def _end(self, call: HostedCall, value: object, error: BaseException | None) -> None:
        del self._calls[call.number]
        call.close()  # tasks of other calls may wait for room: those that broadcast
        if call.metadata.multiplexed_model_id:
            self._tell_models()
        if error is None:
            try:
                self.frames.post(*call.last_frame(value), at_once=not self._calls)
                return
            except Exception as problem:  # of the code of its class: the caller gets it
                error = unsendable(call.deployment_name, problem, result=value)
        if call.request is not None:
            call.request.flush()
        self.frames.post(Frame.FAILED, call.number, pickled_error(error))

    async def _answer(self, number: int, content: bytes) -> None:
        """Answer a request to the replica itself."""
        REPLICA.set(self.replica.context)
        with failing(self.frames, number):
            what, argument = loads(content)
            answer: Content = b""
            if what == "look":
                look = partial(self._look, number, *argument)
                # Not in the replica's executor: user code may hold all of its threads.
                thread = threading.Thread(target=look, name="ingress-look", daemon=True)
                Context().run(thread.start)
                return
            if what == "check_health":
                await self.replica.check_health()
            elif what == "autoscaling_stats":
                answer = encode(await self.replica.autoscaling_stats())
            elif what == "add_threads":
                self.replica.host.add_threads(argument)
            else:
                await self.replica.reconfigure(argument)
            self.frames.post(Frame.DONE, number, answer)

    def _look(self, number: int, look: Callable[..., object], *arguments: object) -> None:
        """Answer with the result of a function. Its pickle is made here, beside the user loop."""
        frame: tuple[Frame, int, Content]
        try:
            frame = Frame.DONE, number, encode(outside(dumps(look(self.replica, *arguments))))
        except Exception as error:  # the server gets it
            frame = Frame.FAILED, number, pickled_error(error)
        mailbox_of(self.replica.loop).post(self.frames.post, *frame)
