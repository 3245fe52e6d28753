"""The ASGI lifespan of one replica's app: start-up, shutdown, and its state."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message

from ingress.context import ReplicaRuntime
from ingress.core.execution.execution import contained
from ingress.exceptions import RayServeException

logger = logging.getLogger("ingress")


@dataclass(eq=False, slots=True)
class Lifespan:
    """The lifespan of one app. Owned by the user loop.

    Start-up and shutdown run in one task, because a lifespan is one context manager: a task group
    or context variable must be closed in the task that opened it. `state` is the yielded state;
    each request gets a copy. `shutdown_error` is the error of the shutdown. A server reads both
    from its own loop, after start-up and after the stop.
    """

    _context: ReplicaRuntime
    state: dict[str, object] = field(default_factory=dict)
    shutdown_error: Exception | None = None
    _task: asyncio.Task[None] | None = None
    _messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    _answered: asyncio.Future[None] | None = None
    _error: BaseException | None = None
    _failed: str | None = None
    _is_up: bool = False
    _shared: dict[str, object] = field(default_factory=dict)

    def share(self, state: dict[str, object]) -> None:
        """Put the yielded state into `state`, until the shutdown."""
        state.update(self.state)
        self._shared = state

    def leave_shared(self) -> None:
        """Let the caller keep the state after the shutdown: its application stops as a whole."""
        self._shared = {}

    async def startup(self) -> None:
        """Run the app's start-up; `REPLICA` must be set. Raises the error of the start-up."""
        app = self._context.asgi_app
        self._answered = asyncio.get_running_loop().create_future()
        self._messages.put_nowait({"type": "lifespan.startup"})
        self._task = asyncio.create_task(self._run(app), name="lifespan")
        try:
            await self._answered
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._is_up:
            return
        # A Starlette whose middleware could not be built.
        is_unfinished = isinstance(app, Starlette) and app.middleware_stack is None
        if self._failed is not None or (self._error is not None and is_unfinished):
            raise self._failure("start-up")
        if self._error is not None and isinstance(app, Starlette):
            logger.warning(
                "a middleware of %r raises %r for the lifespan, so that the app is served without "
                "start-up and shutdown, as uvicorn serves it; let the middleware pass on scopes "
                "whose type is 'lifespan'",
                app,
                self._error,
            )
        else:
            logger.debug("%r does not support lifespan and is served without", app)

    async def shutdown(self) -> None:
        """Run the app's shutdown, once, if it has started up. Raises the error of the shutdown."""
        if self._task is None or not self._is_up:
            return
        self._is_up = False
        if self._task.cancelled():  # its loop ends: the cancellation has run the shutdown
            return
        # A server that runs on would keep the objects of a replica that has been replaced. Race
        # with `share`: a replica that ends while its server starts may leave its objects there.
        for key, value in self.state.items():
            if self._shared.get(key) is value:
                del self._shared[key]
        self._messages.put_nowait({"type": "lifespan.shutdown"})
        await self._task
        if self._failed is not None or self._error is not None:
            failure = self._failure("shutdown")
            if isinstance(failure, Exception):
                self.shutdown_error = failure
            raise failure

    async def _run(self, app: ASGIApp) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
        }
        try:
            await app(scope, self._messages.get, self._send)
        except BaseException as error:
            self._error = contained(error, "the lifespan")  # a `SystemExit` would end the loop
            if not isinstance(self._error, Exception):
                raise
        finally:
            self._answer()

    async def _send(self, message: Message) -> None:
        match message["type"]:
            case "lifespan.startup.complete":
                self._is_up = True
                self._answer()
            case "lifespan.startup.failed" | "lifespan.shutdown.failed":
                # Starlette raises the error next; a raw app may just return.
                self._failed = message.get("message", "")

    def _answer(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _failure(self, phase: str) -> BaseException:
        if self._error is not None:
            return self._error
        return RayServeException(f"The ASGI app's lifespan {phase} failed: {self._failed}")
