"""The server's task of a reply, with any ASGI server: a coroutine that feeds its states.

    respond    read the body -> submit the call -> send what comes from the replica -> its end

`direct` does the same without a task where a connection of uvicorn's allows that, and hands over to
`respond` in the middle of a request where it does not.
"""

from __future__ import annotations

import asyncio
from time import monotonic

import anyio

from ingress.core.calls.call import Call, Runner
from ingress.core.calls.channel import Channel
from ingress.serving.http.access import AccessLine
from ingress.serving.http.reply import Reply
from ingress.serving.http.reply_state import (
    ABANDONED,
    BREAK,
    COMPLETE,
    CUT,
    END,
    OVER,
    READ,
    READING,
    UNSENT,
    ReplyEvent,
)


async def respond(reply: Reply) -> None:
    """Serve a request to the end of its call. Raises the error that its client is to be told."""
    call = reply.call
    last: tuple[ReplyEvent, ...] = ()
    try:
        if reply.state is READING:
            if reply.body is not None or call.metadata.deadline is not None:
                await _read(reply)
            reply.on(READ)
            reply.router.assign(call)
        elif reply.state is COMPLETE:  # handed over; else its end is told
            call.when_settled(reply.note_end)
        while True:
            came = reply.came
            if came is None:
                if reply.state in OVER:
                    break
                reply.event = event = reply.loop.create_future()
                await event
                continue
            reply.came = None
            if isinstance(came, tuple):
                await reply.send_response(*came)
                if call.settled:
                    last = (END,)
                    break
                call.when_settled(reply.note_end)
            elif isinstance(came, BaseException):
                raise came
            elif isinstance(came, Channel):
                await reply.forward(came)
                call.when_settled(reply.note_end)
            else:
                await _serve_on(came, call)
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if not (is_cancelled and await reply.ends_by_itself()) and _must_raise(reply, error):
            if is_cancelled:
                await work_ended(reply)
            raise
    finally:
        actions = reply.leave(*last)
    if actions and (call.error is not None or reply.ended_by is not None or not reply.is_http):
        await reply.conclude(actions[0])


async def _read(reply: Reply) -> None:
    """Read the body ahead, and keep the task of a call that must not run in it."""
    reply.task = asyncio.current_task()
    body = reply.body
    if body is None:
        return
    if body.is_read_ahead:
        # Before the call takes a slot: a slow upload must not hold one.
        reply.first = await body.read_ahead()
    elif body.error is not None:
        raise body.error
    if type(reply.send) is AccessLine:
        reply.send.queued_at = monotonic()
    if not (body.is_open or body.may_be_too_large) and reply.call.metadata.deadline is None:
        reply.task = None  # the call may run in the server's task


async def _serve_on(runner: Runner, call: Call) -> None:
    """Run the call in the server's task, in a slot of a replica on this loop."""
    if not runner.admit(call):
        return
    try:
        await runner.serve(call)
    except asyncio.CancelledError:
        # Cancelled by `cancel`, by the server, or by the replica: when it ends, it cancels the
        # tasks that its calls run in, here the server's.
        if not runner.is_ending or not call.settle(error=runner.gone_error()):
            raise
        task = asyncio.current_task()
        assert task is not None
        if task.uncancel():
            raise  # not by the replica alone
    except Exception as error:  # of user code: the client gets a 500
        runner.fail(call, error)
    else:
        call.settle()


def _must_raise(reply: Reply, error: BaseException) -> bool:
    """Take an error that ends `respond`, and return whether it is the server's to see."""
    if isinstance(error, OSError):
        reply.on(UNSENT)
    elif isinstance(error, asyncio.CancelledError):
        if reply.state is CUT:
            assert reply.task is not None
            if reply.task.uncancel():  # the server has cancelled it too
                reply.on(BREAK)
        elif reply.ended_by is None:  # else the stop has cancelled this task, with its call
            reply.on(BREAK)
    else:
        reply.on(BREAK)
    return reply.state is ABANDONED


async def work_ended(reply: Reply) -> None:
    """Wait until user code has cleaned up, `graceful_shutdown_timeout_s` at most.

    The server's task was cancelled. Shielded, because a cancelled AnyIO scope cancels again on
    every turn of the loop. A second cancellation by the server ends the wait.
    """
    call = reply.call
    if call.runner is None:
        return
    ended = reply.loop.create_future()

    def note() -> None:
        if not ended.done():  # the wait may have ended first
            ended.set_result(None)

    call.runner.when_ended(call, lambda: reply.mailbox.post(note))
    with anyio.move_on_after(reply.router.graceful_shutdown_timeout_s, shield=True):
        await ended
