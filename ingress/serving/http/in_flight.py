"""The requests in flight, from the start of their reply to the answer to a failure.

    serve    attempt after attempt; an error becomes a response, a cut response or a log record
    sweep    every 25 ms: which clients have left, which bodies have stalled
    drain    the end of an application's requests

The proxy of this process and the replicas on Ray serve with it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from threading import get_ident
from time import monotonic

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.cors import allowing_origin
from ingress.app.asgi.messages import (
    GOING_AWAY,
    SERVICE_RESTART,
    TRY_AGAIN_LATER,
    adding_request_id,
)
from ingress.app.asgi.responses import error_response, refusal_of
from ingress.core.base.counters import CLIENT_LEFT, LATENCY_BUCKETS_MS
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.core.calls.call import CURRENT_CALL, NO_CONTEXT, NO_WORK, Call, Runner
from ingress.core.calls.deadlines import deadlines_of
from ingress.core.calls.tracing import TRACING, note_exemplar
from ingress.serving.http import uvicorn_connection
from ingress.serving.http.asgi_driver import respond
from ingress.serving.http.body import answer_and_close
from ingress.serving.http.reply import Reply
from ingress.serving.replicas.router import Router
from ingress.telemetry.logs import log_failure, logger
from ingress.telemetry.notable import keep

SWEEP_S = 0.025
STREAM_GRACE_S = 5.0  # for a stream to end, once its application is told to stop
TAKING_S = 1.0  # for the client of a stream to take its end, once its work is cancelled


class InFlight:
    """The replies that one ASGI application makes, possibly on several loops at once.

    `apps` are the classes of applications that a server may call directly, and then only log what
    they raise: the errors are logged here instead. `watches` the clients, unless the server itself
    cancels the request of a client that has left.
    """

    __slots__ = ("_apps", "_swept", "_watches", "replies")

    def __init__(self, *apps: type, watches: bool) -> None:
        self._apps = apps
        self._watches = watches
        # Any HTTP loop adds to it and removes from it; `drain` reads it.
        self.replies: set[Reply] = set()
        self._swept: set[asyncio.AbstractEventLoop] = set()

    async def serve(self, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, attempt after attempt, to its response or the answer to its failure.

        Raises the error of a failure that is neither answered nor logged.
        """
        following: Reply | None = reply
        while following is not None:
            reply, following = following, None
            self.begin(reply)
            deadline = reply.call.metadata.deadline
            if deadline is not None:
                deadlines_of(reply.loop).add(reply.call, deadline)
            try:
                await respond(reply)
            except ClientDisconnect:
                pass
            except Exception as error:
                if reply.attempts is not None:
                    following = await reply.attempts.again(reply, error)
                if following is None and not await self._is_answered(
                    error, reply, scope, receive, send
                ):
                    raise
            finally:
                self.replies.discard(reply)
                if deadline is not None:
                    deadlines_of(reply.loop).discard(reply.call)
                leave(reply, scope if following is None else None)

    def begin(self, reply: Reply) -> None:
        self.replies.add(reply)
        if self._watches and reply.loop not in self._swept:
            self._begin_sweeps(reply.loop)

    async def _is_answered(
        self, error: Exception, reply: Reply, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Answer for a request that failed. Returns False if the error must be raised.

        It is raised as by Starlette, for an application that wraps this one. A server would only
        log it, and close a connection that other requests may use.
        """
        if reply.status:
            is_answered = await self._cut(error, reply, receive)
        else:
            send = adding_request_id(send, reply.call.metadata.request_id)
            is_answered = await _send_error(error, reply, scope, receive, send)
        return is_answered or await self._is_logged(error, reply, receive)

    async def _is_logged(self, error: Exception, reply: Reply, receive: Receive) -> bool:
        """Log an error that only the server would see, and cut a response that has begun.

        Returns False if uvicorn does not call one of `apps` directly: the error must be raised.
        """
        if not isinstance(uvicorn_connection.called_app(receive), self._apps):
            return False
        log_failure(reply.call, error)
        if not uvicorn_connection.is_answer_complete(receive):
            await uvicorn_connection.cut(receive)
        return True

    def _begin_sweeps(self, loop: asyncio.AbstractEventLoop) -> None:
        for each in list(self._swept):
            if each.is_closed():  # before its last sweep
                self._swept.discard(each)
        self._swept.add(loop)
        loop.call_later(SWEEP_S, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the replies that are older than a sweep watch for their client's disconnect.

        Most requests end before their first sweep, and cost no task and no timer for this.
        """
        now = monotonic()
        before = now - SWEEP_S
        mine = [reply for reply in list(self.replies) if reply.loop is loop]
        for reply in mine:
            if reply.call.started_at <= before:
                reply.watch(now)
        if mine:
            loop.call_later(SWEEP_S, self._sweep, loop)
        else:
            self._swept.discard(loop)

    async def _cut(self, error: Exception, reply: Reply, receive: Receive) -> bool:
        """Cut a response that has begun. Returns False if the error must be logged or raised."""
        if not (
            reply.is_http and reply.was_ended_by(error) and await uvicorn_connection.cut(receive)
        ):
            return False
        token = CURRENT_CALL.set(reply.call)  # for the log record
        logger.warning(
            "request %s to %s was cut: %s",
            reply.call.metadata.request_id,
            reply.call.current_route(),
            error,
        )
        CURRENT_CALL.reset(token)
        return True

    async def drain(self, router: Router, timeout_s: float, *, is_replaced: bool = False) -> None:
        """Wait for an application's requests, and cancel the rest at the timeout. On any loop.

        A stream may never end by itself: its user code is told that the client is gone, and is
        cancelled after `STREAM_GRACE_S`. A client that does not read is then cut. `is_replaced`
        selects the close code of WebSockets.
        """
        code = SERVICE_RESTART if is_replaced else GOING_AWAY
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        grace = loop.time() + min(STREAM_GRACE_S, timeout_s)
        while in_flight := [each for each in list(self.replies) if each.router is router]:
            now = loop.time()
            for reply in in_flight:
                if now >= deadline or (now >= grace and reply.is_stream):
                    reply.stop()
                    if now >= grace + TAKING_S and reply.is_stream:
                        reply.post(_abort, reply)
                elif reply.is_stream:
                    reply.post(reply.disconnect, code)
            if now >= deadline:
                return
            await asyncio.sleep(0.01)

    def restart_websockets(self, runner: Runner) -> None:
        """Have the clients of a replica's WebSockets connect anew: code 1012. On any loop."""
        for each in list(self.replies):
            if each.call.runner is runner and not each.is_http and each.is_stream:
                each.post(each.disconnect, SERVICE_RESTART)

    def stop_on(self, runner: Runner) -> None:
        """Cancel the requests that a replica has begun. On any loop.

        Those on their way to it, or back to the queue, go to another replica.
        """
        for each in list(self.replies):
            if each.call.runner is runner and each.call.began_at:
                each.stop()


async def _send_error(
    error: Exception, reply: Reply, scope: Scope, receive: Receive, send: Send
) -> bool:
    """Tell the client that its request failed. Returns False if the error must be logged too."""
    if not reply.is_http:
        reason = refusal_of(error)
        if reason is None:
            return False
        # A server answers `websocket.close` with 403, which no client tries again.
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
            return True
    response = error_response(error, of_app=reply.router.bound_app is not None)
    response = allowing_origin(reply.router.app, reply.call.metadata.route, scope, response)
    reply.status = response.status_code
    if reply.body is not None and reply.body.is_open:
        await answer_and_close(response, scope, receive, send)
    else:
        await response(scope, receive, send)
    return response.status_code != 500


def _abort(reply: Reply) -> None:
    """Drop the connection if its client does not take what was sent to it."""
    transport = uvicorn_connection.transport_of(reply.receive)
    if transport is not None and transport.get_write_buffer_size():
        transport.abort()


def leave(reply: Reply, scope: Scope | None) -> None:
    """Count a request, unless another attempt follows, and have its reply drop its call.

    `scope` is the server's; `None` for an attempt. The call's user code may still run. If the reply
    kept the call, both would wait for the garbage collector. Race with `drain` on another loop,
    which may have found the reply just before: it finds a call that is settled.
    """
    call, reply.call = reply.call, _SETTLED
    work = reply.work
    route = work.label(call) if work.scope else work.route_label
    del reply.work
    if scope is None:
        return
    http, status = reply.router.http, reply.status or CLIENT_LEFT
    method, thread = scope.get("method", "WS"), get_ident()
    latency = http.by_label.get((thread, route, method, status))
    if latency is None:
        latency = http.of(thread, route, method, status)
    # As `Latency.add`, whose call would cost every request.
    latency_ms = (monotonic() - call.started_at) * 1e3
    latency.total_ms += latency_ms
    bucket = 0 if latency_ms <= 1.0 else bisect_left(LATENCY_BUCKETS_MS, latency_ms)
    latency.buckets[bucket] += 1
    if TRACING.tracer is not None:
        note_exemplar(call, latency, bucket, latency_ms)
    if not reply.status or (call.error is not None and call.was_cancelled()):
        latency.cancelled += 1
    if reply.status >= 500 and (call.error is None or call.runner is None):
        _note_failure(reply, call)  # of which the replica does not know


def _note_failure(reply: Reply, call: Call) -> None:
    """Keep a request that was answered 5xx without an error of user code."""
    error, replica = f"answered {reply.status}", ""
    if call.error is not None:
        error += f": {type(call.error).__name__}: {call.error}"
    if call.runner is not None:
        replica = call.runner.replica_id.unique_id
    keep(call, replica, monotonic(), error)


_SETTLED = Call(RequestMetadata("", DeploymentID("")), NO_WORK, NO_CONTEXT)
_SETTLED.settle()
