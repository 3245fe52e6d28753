"""The record that a router keeps of each of its replicas: its slots, and counts of its calls."""

from __future__ import annotations

from ingress.core.calls.call import Runner

# Values of `Slots.position` other than an index into the replicas with a free slot.
FULL = -1
REMOVED = -2  # or not added yet
HELD = -3  # the replica gets its next call when it has begun the last


class Slots:
    """The slots of one replica, and counts of its calls. Written under its router's lock.

    replica      the replica, on which a call that has a slot starts
    max_ongoing  number of slots
    ongoing      number of calls that have a slot
    given        number of calls that got a slot, without those that gave it back unused
    requested    number of calls that have a slot, by the model they name
    position     index in the router's list of replicas with a free slot; or FULL, HELD or REMOVED
    """

    __slots__ = ("given", "max_ongoing", "ongoing", "position", "replica", "requested")

    def __init__(self, replica: Runner, max_ongoing: int) -> None:
        self.replica = replica
        self.max_ongoing = max_ongoing
        self.ongoing = self.given = 0
        self.requested: dict[str, int] = {}
        self.position = REMOVED

    @property
    def model_ids(self) -> frozenset[str]:
        """The ids of the models that the replica has or is loading."""
        return self.replica.model_ids

    def is_behind(self) -> bool:
        """Return whether the replica is late, and has yet to begin a call that it was given."""
        return self.replica.is_late and self.given > self.replica.begun

    def count_model(self, model_id: str, change: int) -> None:
        """Count the calls that name a model. A model without calls is dropped."""
        count = self.requested.get(model_id, 0) + change
        if count:
            self.requested[model_id] = count
        else:
            del self.requested[model_id]
