"""Applications as ASGI apps, for a server that is not that of `serve.run`: their starts and stops.

lifespan (uvicorn, `with TestClient`)      started and stopped by the lifespan, on its loop
a first request without lifespan           started once, also by concurrent requests; stopped by
                                           `await application.aclose()`, `serve.shutdown()`
                                           or at exit
the same, or a lifespan, without a server  started once for each event loop of callers, on which its
(`httpx.ASGITransport`, `LifespanManager`) replicas in threads then run; stopped also by the end of
                                           that loop
`FastAPI(lifespan=application.lifespan)`   started and stopped by the parent app's lifespan
several applications (`CombinedApp`)       started and stopped by the lifespan, through the engine:
                                           routes, health check and drain are those of `serve.run`,
                                           and a later `serve.run` changes what is served

A caller on its own loop may give the application objects of that loop: the connection of a test, by
`dependency_overrides`. So each such loop has an instance, with the objects of its constructor.
While a lifespan of a server runs the application, that instance answers all callers.

A lifespan ends when all requests have ended. A stream may have no end, so an application under
uvicorn begins to drain when uvicorn gets its signal.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, current_thread, main_thread
from time import monotonic
from typing import Protocol

from starlette.types import Receive, Scope, Send

from ingress.app.asgi.unserved_routes import log_if_not_callable
from ingress.app.declaration.cluster_options import build_here
from ingress.app.declaration.declaration import Application
from ingress.context import REPLICA, AppLifespan
from ingress.core.base.settings import EVENT_LOOP, event_loop, export
from ingress.core.calls.loops import Wakeup, asyncio_loop, new_event_loop, run_on, start_on
from ingress.engines.applications import CLOSED, INTERRUPTED, Start
from ingress.engines.local import LocalEngine
from ingress.schema import ApplicationStatus
from ingress.serving.control.running import RunningApplication
from ingress.serving.http.leaving import close_after_answers, is_listening
from ingress.serving.http.proxy import HTTPProxy, ProxyApp, RouteTable
from ingress.telemetry.mistakes import format_failed_start
from ingress.telemetry.watchdog import WATCHDOG

# Period of the check whether uvicorn must stop, the same as uvicorn's own; and the time that
# uvicorn then has to close its connections and WebSockets.
TICK_S = 0.1
# Longest time that a stopping server still listens, and the period of that check.
CLOSING_S = 1.0
LOOK_S = 0.01

NO_SERVER: ContextVar[bool] = ContextVar("ingress_no_server", default=False)
"""True in a lifespan that a client of `ingress.testing` runs on the loop of its test."""


def _has_no_server(scope: Scope) -> bool:
    """Return whether a client calls the app itself, on its own loop.

    uvicorn, hypercorn, granian, Mangum    `asgi` with a `spec_version`
    `httpx.ASGITransport`, Daphne          `asgi` without a `spec_version`
    httpx-ws                               no `asgi`
    `LifespanManager`                      no `asgi`, and a `state`
    Starlette's `TestClient`               the same, in a thread of its own
    """
    if NO_SERVER.get():
        return True
    asgi = scope.get("asgi")
    if asgi is None:
        return "state" not in scope or current_thread() is main_thread()
    # `request.state` of a parent app adds a state to a request, but not to a lifespan.
    return "spec_version" not in asgi and (scope["type"] != "lifespan" or "state" not in scope)


class _StoppingServer(Protocol):
    """The part of uvicorn's server that says that it has a signal."""

    should_exit: bool


Left = tuple[HTTPProxy, Sequence[RunningApplication]]
"""The applications that run when a server stops, and the proxy of their requests."""


@dataclass(eq=False, slots=True)
class _Drain:
    """The drain that begins when uvicorn must stop. Owned by the loop of the lifespan."""

    engine: LocalEngine
    over_at: float | None = None  # its deadline, once it has begun

    @property
    def left_s(self) -> float | None:
        """The rest of its time; `None` if it has not begun."""
        return None if self.over_at is None else max(0.0, self.over_at - monotonic())

    @contextmanager
    def watching(self, end_starts: Callable[[], Awaitable[Left | None]]) -> Iterator[None]:
        """Drain as soon as uvicorn must stop, while this context is open.

        `end_starts()` ends the starts, for which uvicorn would wait, and returns what runs.
        """
        server = _uvicorn_server()
        loop = asyncio_loop()
        task = None if server is None else loop.create_task(self._stop_with(server, end_starts))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _stop_with(
        self, server: _StoppingServer, end_starts: Callable[[], Awaitable[Left | None]]
    ) -> None:
        while not server.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        if (left := await end_starts()) is None:
            return
        proxy, running = left
        command_line = self.engine.http.command_line
        # Clients connect elsewhere from the moment in which uvicorn does not listen. A worker of
        # `ingress run` listens for `drain_delay_s` more.
        proxy.is_leaving = True
        given_up = monotonic() + CLOSING_S + command_line.drain_delay_s
        while is_listening(server) and monotonic() < given_up:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        # Not earlier: a client whose connection is closed while uvicorn listens reconnects at once.
        # If uvicorn has not accepted that connection when it closes its socket, it is reset.
        close_after_answers(server)
        await asyncio.sleep(TICK_S)
        timeout_s = command_line.shutdown_timeout_s
        if timeout_s is None:
            timeout_s = max((each.graceful_shutdown_timeout_s for each in running), default=0.0)
        self.over_at = monotonic() + timeout_s
        drains = (proxy.in_flight.drain(each.ingress.router, timeout_s) for each in running)
        await asyncio.gather(*drains)


def _uvicorn_server() -> _StoppingServer | None:
    """Return the uvicorn server that gets this process's signals, or `None` for any other server.

    ASGI does not offer this. As of 0.29 uvicorn's signal handler is a method of its server.
    """
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return server if hasattr(server, "should_exit") else None


def _take_over_loop() -> None:
    """Have the loops of replicas be of the kind that uvicorn's `--loop` names."""
    name = getattr(getattr(_uvicorn_server(), "config", None), "loop", "auto")
    kinds = {"none": "asyncio", "asyncio": "asyncio", "uvloop": "uvloop"}
    if event_loop() == "auto" and isinstance(name, str) and (name in kinds or ":" in name):
        export({EVENT_LOOP: kinds.get(name, name)})


class Hosted:
    """One application that is served as an ASGI app. Thread-safe: requests come on any loop.

    `guests` are its instances for callers without a server, by their loop `_callers_loop`.
    `servers` counts those of the `lifespans` that are not a `TestClient`'s.
    """

    __slots__ = (
        "_application", "_callers_loop", "_drain", "_end_of_loop", "_engine", "_lender", "_lock",
        "_proxy", "_running", "_start_of", "_starting", "guests", "lifespans", "servers",
    )  # fmt: skip

    def __init__(
        self,
        engine: LocalEngine,
        application: Application,
        callers_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._engine = engine
        self._callers_loop = callers_loop
        self._end_of_loop: AsyncGenerator[None, None] | None = None
        self.guests: dict[asyncio.AbstractEventLoop, Hosted] = {}
        self._application = application
        self._lock = Lock()
        self._proxy = HTTPProxy()
        self._running: RunningApplication | None = None
        self._starting: Future[None] | None = None
        self._start_of: Start | None = None
        self._lender: asyncio.AbstractEventLoop | None = None
        self.lifespans = self.servers = 0
        self._drain = _Drain(engine)

    @property
    def proxy(self) -> HTTPProxy | None:
        """The proxy for requests, while the application runs."""
        running = self._running
        if running is None or running.status is ApplicationStatus.DELETING:
            return None
        if self._lender is not None and self._lender.is_closed():
            return None
        return self._proxy

    @property
    def name(self) -> str | None:
        """The application's name, while it runs."""
        running = self._running
        return None if running is None or self.proxy is None else running.name

    def is_in_lifespan(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether a server's lifespan runs the application, or one on this loop."""
        return self.servers > 0 or (self.lifespans > 0 and self._lender is loop)

    async def guest(self) -> Hosted:
        """Return the instance for callers on the running loop. It stops at the end of that loop."""
        if self._engine.factories.new_loop is not new_event_loop:
            return self  # a test has made loops for the replicas: see `VirtualClock`
        loop = asyncio_loop()
        if loop not in self.guests:
            # First of all: other requests come on this loop while those below stop.
            guest = self.guests[loop] = Hosted(self._engine, self._application, loop)
            # `asyncio.run` and `asyncio.Runner` close the asynchronous generators that have begun.
            guest._end_of_loop = self._stop_at_end(loop)
            await anext(guest._end_of_loop)
            for other in [each for each in list(self.guests) if each.is_closed()]:
                # Race with a first request on a third loop: one of the two takes it out.
                if (left := self.guests.pop(other, None)) is not None:
                    await left.stop()
        return self.guests[loop]

    async def _stop_at_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            # On another loop: this one warns of asynchronous generators that begin now.
            await asyncio.to_thread(asyncio.run, self.guests.pop(loop).stop(0.0))

    async def start(self, lender: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the application unless it runs. Every caller waits for the same start.

        User code may live on the loop `lender`. Without a lender it gets a loop of the engine,
        because a loop that may end early is never borrowed.
        """
        wakeup = Wakeup(asyncio_loop())
        with self._lock:
            if self.proxy is not None:
                return
            if self._starting is None:
                threads = self._engine.acquire()
                self._starting = start_on(threads.control.loop, self._start(lender))
                self._starting.add_done_callback(self._started)
            starting = self._starting
        # Each caller has its own wake-up, because the start must survive the cancellation of a
        # caller.
        starting.add_done_callback(wakeup.wake)
        await wakeup.wait()
        starting.result()

    async def _leave(self, is_servers: bool) -> None:
        """Stop the application, unless another lifespan still needs it."""
        with self._lock:
            self.lifespans -= 1
            self.servers -= is_servers
            if self.lifespans > 0:
                return
        lifespans = self._app_lifespans()
        for each in lifespans:
            each.leave_shared()
        await self.stop()
        for each in lifespans:
            if each.shutdown_error is not None:
                raise each.shutdown_error

    def _app_lifespans(self) -> list[AppLifespan]:
        """Return the lifespans of the ingress deployment's replicas, those of its ASGI app."""
        running = self._running
        replicas = [] if running is None else list(running.ingress.router.replicas)
        found = [each.context.lifespan for each in replicas]
        return [each for each in found if each is not None]

    def share_state(self, state: dict[str, object]) -> None:
        """Put the state that the app's lifespan has yielded into a caller's, as Starlette does.

        Each replica has a state of its own, and its requests get that; the caller gets one.
        """
        for each in self._app_lifespans()[:1]:
            each.share(state)

    @asynccontextmanager
    async def lifespan(self, *, is_servers: bool = True) -> AsyncIterator[None]:
        """Start the application for a lifespan, on its loop, and stop it at the end."""
        _take_over_loop()
        with self._drain.watching(self._end_starts):
            await self.start(None if self._callers_loop else asyncio.get_running_loop())
            with self._lock:
                self.lifespans += 1
                self.servers += is_servers
            try:
                yield
            finally:
                await self._leave(is_servers)

    async def _end_starts(self) -> Left | None:
        await self._end_start(INTERRUPTED)
        running = self._running
        return None if running is None else (running.proxy, [running])

    async def _start(self, lender: asyncio.AbstractEventLoop | None) -> None:
        """Start the application. Runs on the control loop."""
        self.lifespans = self.servers = 0
        self._drain.over_at = None
        previous, self._running = self._running, None
        engine = self._engine
        if previous is not None:  # its loop was closed without a stop, so it cannot drain
            await engine.apps.stop(previous, timeout_s=0.0)
        self._proxy = HTTPProxy()
        self._proxy.limits = engine.request_limits()
        log_if_not_callable(self._application.deployment.func_or_class)
        name = engine.apps.free_name()
        built = build_here(self._application, name)
        application = RunningApplication(name, "/", self._proxy, callers_loop=self._callers_loop)
        start = self._start_of = Start(application)
        serving_loop = engine.threads.user_loop if lender is None else lambda: lender
        await engine.start_application(start, built, serving_loop)
        running = start.application
        self._proxy.table = RouteTable({"/": running.ingress.router})
        self._running, self._lender = running, self._callers_loop or lender

    def _started(self, starting: Future[None]) -> None:
        with self._lock:
            self._starting = None  # after a failure the next request tries again
            start, self._start_of = self._start_of, None
        failed = starting.cancelled() or starting.exception() is not None
        # A start that another caller ended is released by that caller.
        if failed and (start is None or self._engine.apps.take(start, INTERRUPTED)):
            self._engine.release()

    async def stop(self, timeout_s: float | None = None) -> None:
        """Stop the application, if it runs or starts."""
        await self._end_start(CLOSED)
        with self._lock:
            running, self._running = self._running, None
        if running is None or running.stopping is not None:
            return
        running.proxy.is_draining = True
        left_s = self._drain.left_s if timeout_s is None else timeout_s
        async with self._engine.operating_on_loop() as threads:
            if threads is not None:
                await run_on(threads.control.loop, self._engine.apps.stop, running, left_s)

    async def _end_start(self, reason: str) -> None:
        start, apps = self._start_of, self._engine.apps
        async with self._engine.operating_on_loop() as threads:
            if threads is not None and start is not None and apps.take(start, reason):
                await run_on(threads.control.loop, apps.end_and_release, start)


@dataclass(eq=False, slots=True)
class Hosting:
    """The `ApplicationHost` of every application that is served as an ASGI app in this process."""

    _engine: LocalEngine
    _lock: Lock = field(default_factory=Lock)

    def __call__(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> Coroutine[None, None, None]:
        hosted: Hosted | None = application._hosted
        # From a server, so that this instance answers; `_serve` finds others.
        if hosted is not None and "spec_version" in scope.get("asgi", ()):
            proxy = hosted.proxy
            if proxy is not None and scope["type"] != "lifespan":
                return proxy(scope, receive, send)
        return self._serve(application, scope, receive, send)

    async def _serve(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        hosted = self._get(application)
        if self._is_for_guest(hosted, scope):
            hosted = await hosted.guest()
        if scope["type"] == "lifespan":
            share = partial(hosted.share_state, scope.get("state", {}))
            lifespan = hosted.lifespan(is_servers="asgi" in scope)
            await _answer_lifespan(self._engine, lifespan, receive, send, share)
            return
        proxy = None
        while proxy is None:
            await hosted.start()
            proxy = hosted.proxy
        await proxy(scope, receive, send)

    @staticmethod
    def _is_for_guest(hosted: Hosted, scope: Scope) -> bool:
        """Return whether an instance on the running loop answers, not the one for servers."""
        if not _has_no_server(scope):
            return False
        loop = asyncio_loop()
        guest = hosted.guests.get(loop)
        if scope["type"] == "lifespan" or (guest is not None and guest.proxy is not None):
            return True
        # A replica that calls its own application gets the instance that it belongs to.
        return REPLICA.get(None) is None and not hosted.is_in_lifespan(loop)

    async def start(self, application: Application) -> str:
        """Start an application unless it runs, as a first request does. Returns its name."""
        hosted = self._get(application)
        while (name := hosted.name) is None:
            await hosted.start()
        return name

    async def close(self, application: Application, *, unless_in_lifespan: bool = False) -> None:
        hosted = self._get(application)
        here, instances = asyncio_loop(), [hosted]
        for loop, guest in list(hosted.guests.items()):
            if loop is here or not loop.is_running():
                instances.append(guest)
        for each in instances:
            if not (unless_in_lifespan and each.lifespans > 0):
                await each.stop()

    @asynccontextmanager
    async def lifespan(self, application: Application) -> AsyncIterator[None]:
        hosted = self._get(application)
        if NO_SERVER.get():
            hosted = await hosted.guest()
        async with hosted.lifespan():
            yield

    def _get(self, application: Application) -> Hosted:
        with self._lock:
            if application._hosted is None:
                object.__setattr__(application, "_hosted", Hosted(self._engine, application))
            hosted: Hosted = application._hosted
            return hosted


async def _answer_lifespan(
    engine: LocalEngine,
    lifespan: AbstractAsyncContextManager[None],
    receive: Receive,
    send: Send,
    began: Callable[[], None] = lambda: None,
) -> None:
    """Answer the lifespan protocol: start on the current loop, and stop."""
    await receive()
    started = False
    try:
        async with lifespan:
            started = True
            began()
            with WATCHDOG.reporting_on_signal(), engine.writing_on_signal():
                await send({"type": "lifespan.startup.complete"})
                await receive()
    except BaseException as error:
        if not started:
            has_cause = error.__cause__ is not None  # user code raised it
            text = format_failed_start(error) if has_cause else traceback.format_exc()
            # An error without an answer means "no lifespan" to uvicorn, which would serve anyway.
            await send({"type": "lifespan.startup.failed", "message": text})
        elif isinstance(error, Exception):  # its replica has logged the traceback
            text = "".join(traceback.format_exception_only(error)).strip()
            await send({"type": "lifespan.shutdown.failed", "message": text})
        raise
    await send({"type": "lifespan.shutdown.complete"})


@dataclass(eq=False, slots=True)
class CombinedApp(ProxyApp):
    """The ASGI app of the applications that `start` starts. `start` runs in a thread.

    Owned by the HTTP loop.
    """

    _engine: LocalEngine
    _start: Callable[[], None]
    _drain: _Drain = field(init=False)

    def __post_init__(self) -> None:
        self._drain = _Drain(self._engine)

    @property
    def proxy(self) -> HTTPProxy:
        return self._engine.http.proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(self._engine, self._lifespan(), receive, send)
        else:
            await self.proxy(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        engine = self._engine
        engine.lender = asyncio.get_running_loop()
        try:
            with self._drain.watching(self._end_starts):
                try:
                    await asyncio.to_thread(self._start)
                except Exception:
                    await asyncio.to_thread(engine.shutdown, 0.0)
                    raise
                yield
                await asyncio.to_thread(engine.shutdown, self._drain.left_s)
        finally:
            engine.lender = None

    async def _end_starts(self) -> Left | None:
        if self._engine.apps.starting:
            await asyncio.to_thread(self._engine.shutdown, 0.0)
            return None
        return self.proxy, list(self._engine.applications.values())
