"""The retry policy: which requests are sent again, after which pause, and within which budget.

    did not start    user code has not seen the request: any method, as often as is configured;
                     the first time at once, because another replica may have a free slot
    may have started its method is listed, no byte of the response has left, the body is at hand,
                     at most 3 attempts, and the budget has a token

The pause before retry n is random between 0 and min(0.5 s, 25 ms * 2^(n-1)): full jitter, so that
requests that failed together do not return together. There is no retry if its pause would end after
the deadline.

Pure: time and chance are arguments. Source: the guide, "Set request retry times"; budget: the
figures of Finagle's `RetryBudget`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from ingress.exceptions import ReplicaUnavailableError

INITIAL_PAUSE_S = 0.025
PAUSE_FACTOR = 2.0
MAX_PAUSE_S = 0.5
MAX_STARTED_RETRIES = 2  # of a request that may have started

BUDGET_SHARE = 0.2  # of the traffic
BUDGET_PER_S = 10
BUDGET_TTL_S = 10


def longest_pause_s(retry: int) -> float:
    """Return the upper end of the pause before retry number `retry`, which counts from 1."""
    # The exponent is bounded, because a float is.
    return min(MAX_PAUSE_S, INITIAL_PAUSE_S * PAUSE_FACTOR ** min(retry - 1, 16))


class NotBegunError(ReplicaUnavailableError):
    """The replica's process ended before a call began: another replica may serve the call.

    It is for the router. The caller gets the error `for_caller`: if the caller is a replica, its
    own call has begun.
    """

    def for_caller(self) -> ReplicaUnavailableError:
        return ReplicaUnavailableError(*self.args)


def pause_s(
    attempt: int, *, max_retries: int, deadline: float | None, now: float, chance: float
) -> float | None:
    """Return the pause after a failed attempt, `None` if no other is to follow.

    `attempt` counts from 1. `chance` is in [0, 1): 0 for an attempt that follows at once.
    """
    pause = chance * longest_pause_s(attempt)
    if attempt > max_retries or (deadline is not None and now + pause >= deadline):
        return None
    return pause


@dataclass(eq=False, slots=True)
class RetryBudget:
    """The budget for retries: one for 5 requests of the last 10 s, and 10 a second. Thread-safe.

    Counted by whole seconds of the clock: the counts of each second are dropped 10 s later.
    """

    _clock: Callable[[], float] = monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # (second, [requests, retries])
    _seconds: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def deposit(self) -> None:
        """Count a request."""
        with self._lock:
            self._now()[0] += 1

    def withdraw(self) -> bool:
        """Take the token for one retry. Returns False if there is none."""
        with self._lock:
            now = self._now()
            if self._balance() < 1:
                return False
            now[1] += 1
            return True

    @property
    def balance(self) -> float:
        """The number of retries left; never negative."""
        with self._lock:
            self._now()
            return self._balance()

    def _balance(self) -> float:
        requests = sum(counts[0] for _, counts in self._seconds)
        retries = sum(counts[1] for _, counts in self._seconds)
        # A deposit may be dropped before the retry that it paid for, which leaves a debt.
        return max(0.0, BUDGET_PER_S * BUDGET_TTL_S + BUDGET_SHARE * requests - retries)

    def _now(self) -> list[int]:
        """Return the counts of the current second; forget those that are too old."""
        second = int(self._clock())
        seconds = self._seconds
        while seconds and seconds[0][0] < second - BUDGET_TTL_S:
            seconds.popleft()
        if not seconds or seconds[-1][0] != second:
            seconds.append((second, [0, 0]))
        return seconds[-1][1]
