"""Admission: whether a replica may get a call now.

    it has a free slot    of `max_ongoing_requests`
    it is in time         or the call is patient, and its worker threads do not compute
    the router has it     one that leaves, or is wedged, was removed

A replica begins calls late if its event loop is busy, or does not get the GIL: more than `LATE_S`
after they got their slot. Then it gets one call with a deadline at a time, the next when that one
begins. While its worker threads compute, and the pressure on the GIL is high, this goes for all
calls: more computing threads would only wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic, thread_time
from typing import Protocol

from ingress.context import ReplicaRuntime
from ingress.core.calls.call import Runner
from ingress.core.execution.gil_pressure import GIL_PRESSURE

LATE_S = 0.01  # between the assignment of a slot and the first line of user code
CALLS_IN_TIME = 16  # one after another, until a replica is not late any more
COMPUTING = 0.5  # of a processor, of all worker threads
STILL_COMPUTING = 0.1  # once they compute: the loops may have most of a look

# Values of `Admission.position` other than an index into the replicas with a free slot.
FULL = -1
REMOVED = -2  # or not added yet
HELD = -3  # the replica gets its next call when it has begun the last


class Admission:
    """The slots of one replica, and its lateness.

    Written under its router's lock:
        max_ongoing    number of slots
        ongoing        number of calls that have a slot
        given          number of calls that got a slot, without those that gave it back unused
        requested      number of calls that have a slot, by the model they name
        position       index in the router's list of replicas with a free slot; or FULL, HELD or
                       REMOVED
    Written on the replica's loop:
        begun          number of calls that it has begun
        is_late        true while it begins calls late, because of other calls that it runs

    `have_computed(share)` says whether its worker threads had this share of a processor lately.
    While `position` is `HELD`, the replica counts a call that begins and then asks the router for
    the next one, with `Router.resume`.
    """

    __slots__ = (
        "_clocks", "_computes", "_have_computed", "_in_time", "_shares", "begun", "given",
        "is_late", "max_ongoing", "ongoing", "position", "replica", "requested",
    )  # fmt: skip

    def __init__(
        self,
        replica: AdmittingRunner,
        max_ongoing: int,
        have_computed: Callable[[float], bool] = lambda share: False,
    ) -> None:
        self.replica = replica
        self.max_ongoing = max_ongoing
        self.ongoing = self.given = self.begun = 0
        self.requested: dict[str, int] = {}
        self.position = REMOVED
        self.is_late = False
        self._have_computed = have_computed
        self._in_time = 0
        self._computes = False
        self._shares: Mapping[int, float] = {}  # those of the watchdog's look that was judged last
        self._clocks = 0.0, 0.0  # time, and CPU time of the user loop, when a call last began late

    @property
    def model_ids(self) -> frozenset[str]:
        """The ids of the models that the replica has or is loading."""
        return self.replica.model_ids

    @property
    def is_computing(self) -> bool:
        """True if each call must wait for the last to begin, also a patient one."""
        return self._computes and GIL_PRESSURE.is_high

    def is_behind(self) -> bool:
        """Return whether the replica is late, and has yet to begin a call that it was given."""
        return self.is_late and self.given > self.begun

    def may_take(self, *, is_patient: bool) -> bool:
        """Return whether the replica may get a call now; a call without a deadline is patient."""
        return self.ongoing < self.max_ongoing and (
            not self.is_behind() or (is_patient and not self.is_computing)
        )

    def count_model(self, model_id: str, change: int) -> None:
        """Count the calls that name a model. A model without calls is dropped."""
        count = self.requested.get(model_id, 0) + change
        if count:
            self.requested[model_id] = count
        else:
            del self.requested[model_id]

    def note_begin(self, *, is_late: bool) -> None:
        """Notice whether the replica is late, when a call begins late, or in time again."""
        if is_late:
            self.is_late, self._in_time = self._delays_calls(), 0
        else:
            self._in_time += 1
            # While threads compute, all free slots at once would start as many of them.
            self.is_late = self._in_time < CALLS_IN_TIME or self._note_computing()

    def _delays_calls(self) -> bool:
        """Return whether calls begin late because of other calls of this replica.

        While threads queue for the GIL, the replicas beside them begin late as well, and so does
        one with many streams of short steps in its threads. To give those one call at a time would
        only add to their delay.
        """
        now, ran_s = monotonic(), thread_time()
        before, ran_before_s = self._clocks
        self._clocks = now, ran_s
        computes = self._note_computing()
        return computes or not GIL_PRESSURE.is_high or ran_s - ran_before_s >= (now - before) / 2

    def _note_computing(self) -> bool:
        """Notice whether its worker threads compute, while the pressure on the GIL is high."""
        if not GIL_PRESSURE.is_high:
            self._computes = False
        elif (shares := GIL_PRESSURE.shares) is not self._shares or not shares:
            self._shares = shares
            least = STILL_COMPUTING if self._computes else COMPUTING
            self._computes = self._have_computed(least)
        return self._computes


class AdmittingRunner(Runner, Protocol):
    """A replica as its router sees it."""

    @property
    def context(self) -> ReplicaRuntime: ...

    @property
    def slots(self) -> Admission: ...

    @property
    def model_ids(self) -> frozenset[str]: ...
