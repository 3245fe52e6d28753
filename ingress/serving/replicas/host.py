"""The host of a replica: the place where its user code runs.

    thread_host.ThreadHost                a thread with an event loop, or another owner's loop
    processes.process_host.ProcessHost    a child process

The `Replica` admits calls, counts them and ends them; its host has the user's instance, the
threads, the batches and the models, and says what can be known of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ingress.context import ReplicaRuntime
from ingress.core.base.counters import BatchCount, LaneLoad, Latency
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import Call
from ingress.core.calls.loops import Mailbox
from ingress.core.calls.retries import NotBegunError
from ingress.core.execution.lane_pools import ReplicaPools
from ingress.exceptions import ReplicaUnavailableError
from ingress.serving.replicas.models import Models
from ingress.serving.replicas.user_code import UserCode
from ingress.telemetry.watchdog.stacks import Stack


class OwnPart(Enum):
    """The part of a replica that is its own: it ends, or can be replaced, when that is stuck."""

    NONE = "none"  # its event loop is another owner's, or that of other replicas too
    THREAD = "thread"  # an event loop; no code can end a thread that user code blocks
    PROCESS = "process"  # which is killed


class HostCounts(NamedTuple):
    """The counts of what the user code of a replica has done, and does now: a copy.

    The batches that were run, and the calls that wait for one, by function; the requests for a
    model; the times of loads and unloads; the load of each lane; the waits for a thread, by lane.
    """

    batches: dict[str, BatchCount]
    batch_queues: dict[str, int]
    model_gets: int
    model_times: dict[str, Latency]
    lanes: dict[str, LaneLoad]
    thread_waits: dict[str, Latency]


class Host(Protocol):
    """The place where the user code of a replica runs.

    loop      the loop on which the replica admits, serves and ends its calls
    mailbox   of that loop
    thread    the ident of the loop's thread; `None` if that is another owner's
    pools     the worker threads; `None` if they are in another process
    models    what `@multiplexed` methods loaded; `None` if that is in another process
    direct    begins a call without a task, and returns whether it did; `None` if each has a task
    """

    context: ReplicaRuntime
    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox
    user_code: UserCode

    @property
    def isolation(self) -> OwnPart: ...

    @property
    def thread(self) -> int | None: ...

    @property
    def pools(self) -> ReplicaPools | None: ...

    @property
    def models(self) -> Models | None: ...

    @property
    def direct(self) -> Callable[[Call], bool] | None: ...

    @property
    def pid(self) -> int:
        """The id of the process; 0 before there is one. Thread-safe."""

    @property
    def end(self) -> str:
        """The reason why no call can run here any more; "" while they can. Thread-safe."""

    @property
    def last_output(self) -> str:
        """The last lines that user code wrote, if they are its own. Thread-safe."""

    @property
    def model_ids(self) -> frozenset[str]:
        """The ids of the models that it has or is loading. Thread-safe."""

    def counts(self) -> HostCounts:
        """Return what user code has done, and does now. Thread-safe."""

    def standing(self) -> tuple[float, Stack] | None:
        """Return the last heartbeat of a user loop that may stand, and its stack; else `None`.

        The heartbeat is another one if the loop has turned in between. Thread-safe.
        """

    @property
    def may_stand(self) -> bool:
        """Return whether user code runs that may block the loop for any time. Thread-safe.

        A model is being loaded or unloaded, or `reconfigure` runs. A child tells so by itself.
        """

    def holder(self) -> Call | None:
        """Return the call that the user loop works for now, if that can be known. Thread-safe."""

    def have_computed(self, share: float) -> bool:
        """Return whether threads of this process had this share of a processor lately for it."""

    def hand_over(self) -> None:
        """Give back the calls that were sent elsewhere and have not begun there. Thread-safe."""

    def add_threads(self, max_ongoing: int) -> None:
        """Allow worker threads for so many calls. No thread ends. Thread-safe."""

    async def start(self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any) -> None:
        """Make the user's instance. Raises the errors of user code."""

    async def stop(self) -> None:
        """Run the user's shutdown code, on the loop. All calls have ended."""

    def join(self, deadline: float) -> list[str]:
        """End all threads or the process, and return what user code still blocks. It waits."""

    def has_left(self) -> bool:
        """Return whether what `join` left behind has ended meanwhile. Thread-safe."""


def gone_error(
    replica_id: ReplicaID,
    end: str,
    kind: type[ReplicaUnavailableError] = ReplicaUnavailableError,
) -> ReplicaUnavailableError:
    """Return the error of a call that its replica does not answer, because that ends.

    `end` is the reason if it ended by itself, "" if it was stopped.
    """
    how = f"died before it answered: {end}" if end else "was stopped before it answered"
    error = kind(
        f"Replica {replica_id} of {replica_id.deployment_id} {how}; send the request again if "
        "that is safe."
    )
    error.has_died = bool(end)
    return error


def not_begun_error(replica_id: ReplicaID) -> NotBegunError:
    """Return the error of a call that a stuck replica has not begun, and never will."""
    return NotBegunError(
        f"Replica {replica_id} of {replica_id.deployment_id} is stuck, and has not begun the "
        "request; send it again."
    )
