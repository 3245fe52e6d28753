"""The usual policy: the better of two replicas with a free slot, for a call that need not wait.

The router calls it under its lock, from any thread. Policies of users: `request_router`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import random
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica, as a policy sees it. `requested` counts its calls by the model they name."""

    ongoing: int
    requested: dict[str, int]

    @property
    def model_ids(self) -> frozenset[str]:
        """The ids of the models that it has or is loading."""


R = TypeVar("R", bound=Candidate)


class TwoChoices:
    """A policy that draws two replicas at random and takes the one with fewer ongoing requests.

    Source: Ray 2.60.0, pow_2_router.py; here the counts are exact, not cached. With 128 replicas
    or more, the router takes an idle replica while there is one.
    """

    __slots__ = ()

    def choose(self, candidates: Sequence[R], awake: R | None = None) -> R:
        """Return one of `candidates`, of which there is at least one.

        `awake` is a candidate that is at work, so that one call more wakes no thread: it is one of
        the two, and wins a tie.
        """
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = int(random() * count)
        if awake is not None:
            other = candidates[first]
            if other is awake:
                other = candidates[first - 1]
            return awake if awake.ongoing <= other.ongoing else other
        second = int(random() * (count - 1))
        second += second >= first
        one, other = candidates[first], candidates[second]
        return one if one.ongoing <= other.ongoing else other

    def choose_for_model(self, candidates: Sequence[R], model_id: str) -> R:
        """Prefer replicas that have or will have the model, else those with the fewest models.

        Source: Ray 2.60.0, request_router.py, without its wait for a full replica.
        """
        fit = [r for r in candidates if model_id in r.model_ids or model_id in r.requested]
        if not fit:
            counts = [len(each.model_ids | each.requested.keys()) for each in candidates]
            fewest = min(counts)
            fit = [each for each, count in zip(candidates, counts, strict=True) if count == fewest]
        return self.choose(fit)
