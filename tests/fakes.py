"""Fakes that record calls, for tests of one part without the parts below it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from time import monotonic
from typing import TYPE_CHECKING, Any

from ingress.app.declaration.declaration import Application
from ingress.context import ReplicaRuntime
from ingress.core.base.types import DeploymentID, ReplicaID, RequestMetadata, new_request_id
from ingress.core.calls.call import NO_WORK, Call
from ingress.serving.replicas.admission import Admission
from ingress.testing import Latch
from tests.servers import PATIENCE_S

if TYPE_CHECKING:
    from ingress.serving.replicas.router import Router


class FakeAdmission(Admission):
    """The admission of a fake replica, which is late and computes as the test says."""

    is_computing = False


class FakeReplica:
    """A `Runner` whose calls end when the test ends them. Thread-safe.

    `started` has every call it started, `skipped` the calls that were settled before their slot
    came, `cancelled` the calls it was told to cancel.
    """

    def __init__(self, router: Router, max_ongoing: int = 1) -> None:
        self.router = router
        self.slots = FakeAdmission(self, max_ongoing)
        self.model_ids: frozenset[str] = frozenset()
        self.started: list[Call] = []
        self.skipped: list[Call] = []
        self.cancelled: list[Call] = []
        self.running: set[Call] = set()
        self.most_running = 0
        self.is_ending = False
        self.is_to_be_replaced = False
        self._lock = threading.Lock()

    @property
    def is_computing(self) -> bool:
        return self.slots.is_computing

    @property
    def ongoing(self) -> int:
        return self.slots.ongoing

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        raise AssertionError("a fake replica has no loop")

    @property
    def replica_id(self) -> ReplicaID:
        raise AssertionError("a fake replica has no id")

    @property
    def context(self) -> ReplicaRuntime:
        raise AssertionError("a fake replica runs no user code")

    def make_current(self) -> None:
        raise AssertionError("a fake replica runs no user code")

    def gone_error(self) -> Exception:
        raise AssertionError("a fake replica stays")

    def admit(self, call: Call) -> bool:
        raise AssertionError("a fake replica runs nothing")

    def fail(self, call: Call, error: Exception) -> None:
        call.settle(error=error)

    def submit(self, call: Call) -> None:
        if call.settled:
            self.skipped.append(call)
            self.release(call)
            return
        with self._lock:
            call.began_at = monotonic()
            self.slots.begun += 1
            self.started.append(call)
            self.running.add(call)
            self.most_running = max(self.most_running, len(self.running))

    async def serve(self, call: Call) -> Any:
        raise AssertionError("a fake replica runs nothing")

    def cancel(self, call: Call) -> None:
        """Record a cancellation; the call runs on, as in a thread, until the test ends it."""
        self.cancelled.append(call)

    def when_ended(self, call: Call, callback: Callable[[], Any]) -> None:
        callback()

    def release(self, call: Call) -> None:
        self.router.release(self, call)

    def finish(self, call: Call, value: Any = None) -> bool:
        """End a call's work and give its slot back. Returns whether this was its answer."""
        with self._lock:
            self.running.remove(call)
        self.release(call)
        return call.settle(value)


def together(*targets: Callable[[], object]) -> None:
    """Run all `targets` at the same time, each in a thread; return when all have ended."""
    gate = threading.Barrier(len(targets))

    def run(target: Callable[[], object]) -> None:
        gate.wait(30)
        target()

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def bind(deployment: Any, *args: Any, **kwargs: Any) -> Application:
    """Return `deployment.bind(...)`. To mypy a class with a decorator is that class."""
    application: Application = deployment.bind(*args, **kwargs)
    return application


def make_call(
    deployment: str = "D", model_id: str = "", *, method: str = "m", left_s: float | None = None
) -> Call:
    """Return a call without a replica; `left_s` is the time until its deadline."""
    metadata = RequestMetadata(
        new_request_id(),
        DeploymentID(deployment),
        method,
        multiplexed_model_id=model_id,
        deadline=None if left_s is None else monotonic() + left_s,
    )
    return Call(metadata, NO_WORK, Context())


def assign(router: Router, *calls: Call) -> None:
    for call in calls:
        router.assign(call)


class Ledger:
    """Number of runs of each request, and of concurrent runs; signals of user code. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs: Counter[Any] = Counter()
        self.running = 0
        self.most_running = 0
        self.leave = Latch(timeout_s=PATIENCE_S)
        self.entered = threading.Event()
        self.cancelled = threading.Event()
        self.closed = threading.Event()

    def enter(self, name: Any = "") -> int:
        """Count a run, and return its number among those of its name."""
        with self.lock:
            self.runs[name] += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            run = self.runs[name]
        self.entered.set()
        return run

    def exit(self) -> None:
        with self.lock:
            self.running -= 1


class Gate:
    """Calls that wait inside until the test lets them go on. `seen` is the test's own."""

    def __init__(self) -> None:
        self.inside = 0
        self.go = Latch(timeout_s=PATIENCE_S)
        self.seen: list[tuple[str, Any]] = []
