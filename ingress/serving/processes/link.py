"""The server's end of a child: its process, its frames, and the work that it does.

start   a socket pair and shared memory are made, the process starts, its replica says it serves
send    one frame for each call; the answers end the `RemoteWork` of that call
lost    the process has ended: all its work ends, with `NotBegunError` if it had not begun
stuck   its loop does not turn: it begins no more work, and work that it had not begun ends so

User code in the child can write to the link. What the protocol does not have ends this link only:
its process is killed, and replaced. An answer that cannot be read fails its call only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from secrets import token_hex

from ingress.core.base.signals import name_of_signal
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import Call
from ingress.core.calls.loops import mailbox_of
from ingress.core.calls.retries import NotBegunError
from ingress.exceptions import ReplicaUnavailableError
from ingress.serving.processes.child_calls import ChildCalls, MakeHandle
from ingress.serving.processes.child_process import ChildProcess
from ingress.serving.processes.crossing import unpickled_error, unreadable
from ingress.serving.processes.frames import Buffers, Content, FrameError, Frames
from ingress.serving.processes.messages import (
    OF_CALLS,
    UPWARD,
    ChildReport,
    Frame,
    model_ids_of,
    report_of,
    unknown,
)
from ingress.serving.processes.output import ChildOutput
from ingress.serving.processes.remote_calls import RemoteCall, RemoteWork
from ingress.serving.processes.resources import EnvironmentOf
from ingress.serving.processes.shared_memory import SharedNumbers
from ingress.serving.replicas.host import gone_error, not_begun_error
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import last_line as described

_LAST_FRAMES_S = 0.1  # for frames of a child that has ended
_SEEN_S = 0.01  # until all processors have seen a write: 10,000 times as long as they take
_START_ENDS_S = 0.3  # for `__del__` after a cancelled constructor; a delete waits for 0.5 s


class Link:
    """The server's end of one child. Owned by the loop of its frames; any thread reads `end`.

    end        the description of the process's end, "" while it runs
    module     of the user's class, for a fork server
    model_ids  the ids of the models that the child has or is loading
    on_lost    is called when the process has ended, unless it was stopped
    on_end     is called as soon as the process has ended
    on_report  is called with the counters of the child
    mark       tells log records from other lines of its output
    """

    __slots__ = (
        "_child",
        "_child_calls",
        "_ended",
        "_frames",
        "_is_stopping",
        "_last",
        "_make_handle",
        "_module",
        "_odd_kinds",
        "_on_report",
        "_output",
        "_replica_id",
        "_shared",
        "_started",
        "_tell_end",
        "_tell_lost",
        "_works",
        "end",
        "mark",
        "model_ids",
    )  # fmt: skip

    def __init__(
        self,
        replica_id: ReplicaID,
        module: str,
        make_handle: MakeHandle,
        *,
        on_report: Callable[[ChildReport], None],
        on_end: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._replica_id = replica_id
        self._make_handle = make_handle
        self._child_calls: ChildCalls | None = None
        self._shared: SharedNumbers | None = None
        self._child: ChildProcess | None = None
        self._frames: Frames | None = None
        self._started: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._odd_kinds: set[int] = set()  # of reports that could not be read
        self._last = 0
        self._works: dict[int, RemoteWork | RemoteCall] = {}
        self._module = module
        self._on_report, self._tell_end, self._tell_lost = on_report, on_end, on_lost
        self.mark = token_hex(8)
        deployment = replica_id.deployment_id
        self._output = ChildOutput(
            self.mark,
            {
                "application": deployment.app_name,
                "deployment": deployment.name,
                "replica": replica_id.unique_id,
            },
        )
        self.end = ""
        self.model_ids: frozenset[str] = frozenset()

    @property
    def pid(self) -> int:
        """The process's id; 0 before it has started."""
        return 0 if self._child is None else self._child.pid

    @property
    def last_output(self) -> str:
        """The last lines that the child wrote, "" if there are none. Thread-safe."""
        lines = self._output.last_lines
        return "\nThe last lines of its output:\n" + "\n".join(lines) if lines else ""

    @property
    def turned_at(self) -> float | None:
        """The time at which the child's user loop last turned; `None` if it does not serve.

        Thread-safe.
        """
        shared = self._shared
        if shared is None or self.end or self._is_stopping:
            return None
        return shared.numbers.turned_at or None

    async def start(self, specification: bytes, environment_of: EnvironmentOf) -> None:
        """Start the process, and return once its replica serves. Raises the error of its start."""
        loop = asyncio.get_running_loop()
        started, self._ended = loop.create_future(), loop.create_future()
        self._started = started
        mailbox = mailbox_of(loop)
        # There may be no child that does all this at its end: there are too many threads, or the
        # specification is too large.
        with ExitStack() as undo:
            env_vars, give_back = environment_of()
            undo.callback(give_back)
            ours, theirs = socket.socketpair()
            undo.callback(theirs.close)
            shared = SharedNumbers()
            undo.callback(shared.close)
            frames = Frames(ours, self._on_frame, self._on_lost, lambda: shared.numbers.beats)
            undo.callback(frames.close)
            frames.post_inline(Frame.START, specification)

            def on_exit() -> None:
                give_back()  # before the replacement starts
                mailbox.post(self._on_exit)

            name, module, output = str(self._replica_id), self._module, self._output
            self._child = ChildProcess(name, module, theirs, shared, env_vars, output, on_exit)
            self._shared, self._frames = shared, frames
            self._child_calls = ChildCalls(frames, self._make_handle, self._call_of)
            undo.pop_all()
        await started

    async def stop(self) -> None:
        """Have the child run the user's shutdown code, and wait for its end."""
        self._is_stopping = True
        if self._frames is None or self._ended is None:
            return  # it was never started
        started = self._started
        if started is None or not started.done() or started.cancelled():
            # There is no instance while it imports a module, and no `__del__` to wait for. A
            # constructor that blocks its loop never reads the order.
            has_loop = self._shared is not None and self._shared.numbers.beats > 0
            wait_s = _START_ENDS_S if has_loop else 0.0
            asyncio.get_running_loop().call_later(wait_s, self.kill)
        self._frames.post(Frame.STOP, 0)
        await self._ended

    def kill(self) -> None:
        """End the process, if it runs. Thread-safe."""
        self._is_stopping = True
        if self._child is not None:
            self._child.kill()

    def join(self) -> None:
        """Wait for the end of a process that was killed. Thread-safe."""
        if self._child is not None:
            self._child.join()

    def send(self, kind: Frame, content: Content) -> RemoteWork:
        assert self._frames is not None
        self._last += 1
        work = RemoteWork(kind, self._last, self._frames)
        if self.end:
            work.end(error=gone_error(self._replica_id, self.end, NotBegunError))
        else:
            # May raise: there is no work then.
            self._frames.post(kind, self._last, content, at_once=not self._works)
            self._works[self._last] = work
        return work

    def send_call(self, work: RemoteCall, content: Content) -> None:
        """Send the frame of a call that no task waits for. The process has not ended."""
        assert self._frames is not None
        self._last += 1
        # May raise: there is no work then.
        self._frames.post(Frame.CALL, self._last, content, at_once=not self._works)
        work.number, work.frames = self._last, self._frames
        self._works[self._last] = work

    def hand_over(self) -> None:
        """Have the child begin no more work, and end the work that it has not begun."""
        if not self.end and not self._is_stopping and self._shared is not None:
            self._shared.numbers.is_ending = True
            # Race with a child that begins work at this moment, see `SharedNumbers.begin`: a
            # processor may show its writes later than it reads. A child that is held up in between
            # has shown its write. Refusals of work that ends here arrive for nothing.
            asyncio.get_running_loop().call_later(_SEEN_S, self._move)

    def _move(self) -> None:
        if not self.end and self._shared is not None and (unbegun := self._unbegun(self._shared)):
            logger.warning(
                "%s: the requests that it has not begun go to other replicas: %d",
                *(self._replica_id, len(unbegun)),
            )
            self._end_works(unbegun, not_begun_error(self._replica_id))

    def _unbegun(self, shared: SharedNumbers) -> list[int]:
        """Return the numbers of the work that user code in the child cannot have seen."""
        last_begun, being_read = shared.numbers.last_begun, shared.numbers.being_read
        works = self._works.items()
        return [n for n, each in works if n > last_begun and n != being_read and each.can_move]

    def _end_works(self, numbers: list[int], error: ReplicaUnavailableError) -> None:
        for work in [self._works.pop(each) for each in numbers]:
            try:
                work.end(error=copy(error))  # each is raised, and has a traceback of its own
            except Exception:  # the other calls must end, too
                logger.exception("%s: a call did not end with its replica", self._replica_id)

    def _call_of(self, number: int) -> Call | None:
        work = self._works.get(number)
        return None if work is None else work.call

    # Frames of the child.

    def _on_frame(self, kind: int, number: int, content: memoryview, buffers: Buffers) -> None:
        work = self._works.get(number)
        if work is None and number >= UPWARD:
            assert self._child_calls is not None
            self._child_calls.on_frame(kind, number, content, buffers)
        elif work is None and not number:
            self._on_frame_of_child(kind, content)
        elif work is None:
            if number > self._last:
                raise FrameError(f"a frame of call {number}, which it did not get")
            if kind not in OF_CALLS:  # else user code sends although its call has ended
                raise unknown(kind)
        else:
            work.on_frame(kind, content, buffers)
            if work.is_over:
                del self._works[number]

    def _on_frame_of_child(self, kind: int, content: memoryview) -> None:
        if kind in (Frame.MODELS, Frame.REPORT):
            try:
                if kind == Frame.MODELS:
                    self.model_ids = model_ids_of(content)
                else:
                    self._on_report(report_of(content))
            except Exception as problem:  # the counters before it stay
                if kind not in self._odd_kinds:
                    self._odd_kinds.add(kind)
                    text = unreadable("a report of its process", problem)
                    logger.error("%s: %s", self._replica_id, text)
        elif kind not in (Frame.READY, Frame.FAILED):
            raise unknown(kind)
        elif self._started is None or self._started.done():
            pass  # the start was given up
        elif kind == Frame.READY:
            self._started.set_result(None)
        else:
            self._started.set_exception(unpickled_error(content))

    # The end of the child.

    def _on_exit(self) -> None:
        """Note that the process has ended; its last frames may be on their way."""
        if self._frames is not None and self._frames.is_open:
            # A process that user code started may hold the socket open.
            asyncio.get_running_loop().call_later(_LAST_FRAMES_S, self._frames.close)
        else:
            self._lose()

    def _on_lost(self) -> None:
        """Note that the connection is closed: the process ends, or has ended."""
        child = self._child
        if child is not None and not child.has_ended:
            # It cannot serve without a connection; `_on_exit` follows.
            asyncio.get_running_loop().call_later(_LAST_FRAMES_S, child.kill)
        else:
            self._lose()

    def _lose(self) -> None:
        child, shared = self._child, self._shared
        if self.end or child is None or shared is None:
            return
        fault = None if self._frames is None else self._frames.fault
        self.end = end_of(child.pid, child.code, child.failure, fault)
        self._tell_end()
        if self._child_calls is not None:
            self._child_calls.stop()
        self._end_works(
            self._unbegun(shared), gone_error(self._replica_id, self.end, NotBegunError)
        )
        shared.close()
        self._end_works(
            [*self._works], gone_error(self._replica_id, self.end, ReplicaUnavailableError)
        )
        if self._started is not None and not self._started.done():
            self._started.set_exception(RuntimeError(self.end + self.last_output))
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        if not self._is_stopping:
            is_foreseen = fault is None or isinstance(fault, FrameError)
            exc_info = None if is_foreseen else fault
            logger.error("%s: %s", self._replica_id, self.end, exc_info=exc_info)
            self._tell_lost()


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
    name = name_of_signal(-code)
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"its process {pid} was killed by {name}{hint}"
