"""Guards, which contain failures of user code in their request.

    ReplicaApp -> ServerErrorMiddleware -> Guard -> m1 -> Guard -> m2 -> Guard -> routes

A compiled route may begin above all of these: see `replica_app`. Its failures then pass through
them.

Starlette calls user code that `execution` does not see: middleware, exception handlers, streamed
bodies, background tasks, `yield` dependencies. `BaseHTTPMiddleware` (`@app.middleware("http")`)
causes three failures unless there is a guard on each side of every middleware. It runs the app
below in a task of its own, and a `SystemExit` or `KeyboardInterrupt` that leaves a task ends the
event loop. It cancels that task again and again. It ends a stream that failed half-way as if the
stream were complete.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.app.asgi.compat import is_late_error
from ingress.app.asgi.layer import Layer
from ingress.core.execution.execution import contained, raise_instead
from ingress.exceptions import RayServeException, StreamClosedError

ANSWER = "ingress.answer"
"""The key under which the scope carries the request's `Answer`."""


@dataclass(eq=False, slots=True)
class Answer:
    """The response to one request. Owned by the task of the request.

    `failure` is the error of an app that failed after a part of its response was sent. Even if a
    middleware handles that error, the end of the body is withheld: the client sees a broken
    connection, not a complete response.
    """

    _send: Send
    failure: Exception | None = None

    async def send(self, message: Message) -> None:
        if self.failure is not None:
            if message["type"] == "http.response.start" and message["status"] >= 500:
                self.failure = None  # a middleware held the failed part back and reports it
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                return
        await self._send(message)


@dataclass(eq=False, repr=False, slots=True)
class OutermostGuard:
    """An ASGI middleware that raises only an `Exception`.

    For the place below `ServerErrorMiddleware`, which always re-raises errors: so failed responses
    need not be noted.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            told = _told(error)
            if told is not error:
                raise_instead(told)
            raise


class Guard(OutermostGuard):
    """A guard that also notes a response that failed."""

    __slots__ = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_half_sent = False

        async def watched_send(message: Message) -> None:
            nonlocal is_half_sent
            await send(message)  # first: if it raises, the message was not sent
            is_half_sent = message["type"] == "http.response.start" or bool(
                message.get("more_body")
            )

        try:
            await self.app(scope, receive, watched_send)
        except BaseException as error:
            told = _told(error)
            # Not for a cancellation: the code that cancels (a timeout, say) handles it.
            answer: Answer | None = scope.get(ANSWER)
            if answer is not None and is_half_sent and isinstance(told, Exception):
                answer.failure = told
            if told is not error:
                raise_instead(told)
            raise


class GuardInTask(Guard):
    """A guard below a `BaseHTTPMiddleware`, which runs it in a task of an AnyIO group.

    In that task, a `finally` block that awaits would be cancelled again and again, and code that
    swallows a cancellation would get thousands. A WebSocket has no such task: the middleware passes
    it on, and a scope here would cancel the server's own task without ever uncancelling it.
    """

    __slots__ = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        from ingress.core.calls.compat import OnceScope  # imports AnyIO's backend

        with OnceScope() as once:

            async def send_if_wanted(message: Message) -> None:
                if once.is_cancelled:  # the middleware no longer reads: `send` would wait for ever
                    await asyncio.sleep(0)  # the cancellation comes here, not in the clean-up
                    raise StreamClosedError("the request was cancelled")
                await send(message)

            await super().__call__(scope, receive, send_if_wanted)


def _told(error: BaseException) -> BaseException:
    """Return the error to raise for one that leaves the app below."""
    told = contained(error, "the ASGI app")
    if is_late_error(told):  # `asgi.apps` has handlers for the errors of calls
        cause = told.__cause__
        if cause is not None and issubclass(type(cause), RayServeException):
            return cause
    return told


def guarded(middleware: list[Middleware]) -> list[Any]:
    """Return the middleware with a guard before, between and after."""
    guards = (each for m in middleware for each in (m, Middleware(guard_below(_class_of(m)))))
    return [Middleware(OutermostGuard), *guards]


def _class_of(middleware: Any) -> Any:
    is_layer = middleware.cls is Layer
    return type(middleware.kwargs["around"]) if is_layer else middleware.cls


def guard_below(middleware: Any) -> type[Guard]:
    """Return the guard for the place below a middleware, given its class."""
    is_base = isinstance(middleware, type) and issubclass(middleware, BaseHTTPMiddleware)
    return GuardInTask if is_base else Guard
