"""The threads of the engine in this process.

    ingress-control   the controller, health checks, and work without a loop of its own
    ingress-router    calls that wait for something else than a slot (flag)
    ingress-http      uvicorn, if `serve.run` serves HTTP
    ingress-trace     writes the recorded requests (`INGRESS_TRACE`)
    ingress-user      the loop of replicas that share one (`loop="shared"`); where no server lends
                      its loop, that of all user code without threads of its own

The threads start with the first application and end with the last. An engine that starts again
reads the environment again.
"""

from __future__ import annotations

import asyncio

from ingress.core.base.settings import Settings
from ingress.core.calls.deadlines import Deadlines, deadlines_of
from ingress.core.calls.loops import EventLoopThread, NewLoop, new_event_loop
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.core.execution.threads import LoopExecutor, lend_executor
from ingress.engines.views import Recording, record
from ingress.serving.control.factories import Instrument
from ingress.telemetry.watchdog import WATCHDOG

CONTROL_THREADS = 32  # for joining the threads of replicas that stop, side by side
JOIN_S = 1.0
WRITE_S = 10.0  # for the last file of a recorder: some MB of text


class EngineThreads:
    """The engine's own loops, from the first application to the last.

    `window` records the requests, if `INGRESS_TRACE` names its file.
    """

    __slots__ = (
        "_executor", "_user", "control", "deadlines", "instrument", "router", "settings", "window",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        GIL_PRESSURE.adapts = settings.adapt_switch_interval
        self.window: Recording | None = None
        self.instrument: Instrument | None = None  # of the window
        if settings.trace_file is not None:  # first, because this may raise
            self.window, self.instrument = record(settings.trace_file)
        self.control = EventLoopThread("ingress-control")
        self._executor = LoopExecutor("ingress-control", CONTROL_THREADS, self.control.loop)
        self.control.mailbox.post(self.control.loop.set_default_executor, self._executor)
        self.router = (
            # Callbacks posted after its stop run at once, so that routers refuse these calls.
            EventLoopThread("ingress-router", lambda callback, args: callback(*args))
            if settings.run_router_in_separate_loop
            else None
        )
        # For calls by handle. HTTP requests have their deadlines on the loop that answers them.
        self.deadlines: Deadlines = deadlines_of((self.router or self.control).loop)
        self._user: EventLoopThread | None = None

    def user_loop(self, new_loop: NewLoop = new_event_loop) -> asyncio.AbstractEventLoop:
        """Return the user loop that replicas share. Called on the control loop."""
        if self._user is None:
            self._user = EventLoopThread("ingress-user", new_loop=new_loop)
            lend_executor(self._user.loop)
        return self._user.loop

    def stop(self) -> None:
        self._executor.shutdown()
        self._executor.threads.join(JOIN_S)
        for home in (self._user, self.router, self.control):
            if home is not None:
                home.stop(JOIN_S)
        WATCHDOG.join(JOIN_S)
        if self.window is not None:
            self.window.stop(WRITE_S)
