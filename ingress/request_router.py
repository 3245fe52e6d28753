"""Which replica next: pure policies over the replicas that have a free slot."""

from __future__ import annotations

from collections.abc import Sequence
from random import random
from typing import Protocol, TypeVar


class HasOngoing(Protocol):
    ongoing: int


R = TypeVar("R", bound=HasOngoing)


class PowerOfTwoChoicesRequestRouter:
    """Look at two replicas at random and take the one with fewer ongoing requests.

    Source: Ray 2.60.0, pow_2_router.py; here the counts are exact, not cached.
    """

    def choose(self, candidates: Sequence[R]) -> R:
        """Return one of `candidates`, of which there is at least one."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = int(random() * count)
        second = int(random() * (count - 1))
        second += second >= first
        one, other = candidates[first], candidates[second]
        return one if one.ongoing <= other.ongoing else other
