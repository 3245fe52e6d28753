"""One HTTP request, attempt after attempt.

    Reply.respond -> failed -> Attempts.again -> another Reply, or None: the failure is final

Only requests whose method is in `HTTPOptions.retry_started_methods` have `Attempts`. No other is
ever sent again once user code may have seen it. `Router.reassign` sends calls again that no user
code has seen, for any method and for handles too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import random
from time import monotonic

from starlette.types import Receive, Scope

from ingress.core.base.settings import HTTPLimits
from ingress.core.calls import retries
from ingress.core.calls.deadlines import TIMEOUT_HEADER, earlier
from ingress.core.calls.retries import RetryBudget
from ingress.exceptions import ReplicaUnavailableError, RequestTimeoutError
from ingress.serving.http.access import note_call
from ingress.serving.http.reply import Reply
from ingress.serving.http.request_head import USUAL_HEADERS, RoutingHeaders


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of HTTP requests: their time, the methods that are retried, and their size.

    `timeout_s` bounds the request, or one attempt if its method is in `retried_methods`. `headers`
    are the names of those that say how a request is routed.
    """

    timeout_s: float | None = None
    retried_methods: frozenset[str] = frozenset()
    http: HTTPLimits = field(default_factory=HTTPLimits)
    headers: RoutingHeaders = USUAL_HEADERS


class Attempts:
    """The attempts at one request whose method may be tried again. Owned by the HTTP loop.

    `timeout_s` and `metadata.deadline` bound one attempt; `last_deadline` is the client's, and
    bounds the whole request.
    """

    __slots__ = ("_began_at", "_budget", "_last_deadline", "_number", "_scope", "_timeout_s")

    def __init__(
        self,
        scope: Scope,
        timeout_s: float | None,
        budget: RetryBudget,
        last_deadline: float | None,
    ) -> None:
        self._scope = scope
        self._timeout_s = timeout_s
        self._budget = budget
        self._last_deadline = last_deadline
        self._number = 1
        self._began_at = 0.0  # when the request began; 0 until it is tried again

    def scope(self) -> Scope:
        """Return a copy of the scope for one attempt: user code writes into its scope."""
        scope = self._scope
        return {**scope, "state": dict(scope["state"])} if "state" in scope else dict(scope)

    async def again(self, failed: Reply, error: Exception) -> Reply | None:
        """Return the next attempt, after a pause, or `None` if this failure is final."""
        deadline = self._last_deadline
        # A timer may fire up to a millisecond early, which would leave time for an attempt.
        is_late = deadline is not None and failed.call.metadata.deadline == deadline
        if (is_late and isinstance(error, RequestTimeoutError)) or not _is_ours(failed, error):
            return None
        if failed.status != 0 or not failed.has_whole_body:
            return None
        pause_s = retries.pause_s(
            self._number,
            max_retries=retries.MAX_STARTED_RETRIES,
            deadline=deadline,
            now=monotonic(),
            chance=random(),
        )
        if pause_s is None or not self._budget.withdraw():
            return None
        if await _leaves_within(pause_s, failed.receive):
            return None
        return self._next(failed)

    def _next(self, failed: Reply) -> Reply:
        now = monotonic()
        deadline = self._last_deadline
        if self._timeout_s is not None:
            own = now + self._timeout_s
            deadline = own if deadline is None else min(own, deadline)
        self._number += 1
        self._began_at = self._began_at or failed.call.started_at
        failed.router.note_retry()
        attempt = _repeated(failed, self.scope(), deadline)
        # A 408 names the time from here to the deadline: the limit that was passed.
        attempt.call.started_at = self._began_at if deadline == self._last_deadline else now
        return attempt


def _is_ours(failed: Reply, error: Exception) -> bool:
    """Return whether the replica is gone, or the time of this attempt is up.

    User code may raise the same types, of its own or a child's: then that is its answer.
    """
    if isinstance(error, RequestTimeoutError):
        deadline = failed.call.metadata.deadline  # the replica may have been the first to notice
        return failed.was_ended_by(error) or (deadline is not None and monotonic() >= deadline)
    if isinstance(error, ReplicaUnavailableError):
        # A replica that is stuck has given the request up.
        is_ending = failed.call.runner is not None and failed.call.runner.is_ending
        return is_ending or failed.was_ended_by(error)
    return False


async def _leaves_within(seconds: float, receive: Receive) -> bool:
    """Wait, after the whole body was read, and return whether the client leaves meanwhile."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


def _repeated(failed: Reply, scope: Scope, deadline: float | None) -> Reply:
    """Return another reply to the same request, with its body, from another replica."""
    metadata = failed.call.metadata._replace(deadline=deadline)
    other = Reply(metadata, failed.router, scope, failed.receive, failed.send)
    other.first = failed.first
    note_call(failed.send, other.call, failed.router.templates)
    other.attempts = failed.attempts
    other.call.runner = failed.call.runner  # the router prefers another replica
    return other


def client_deadline(scope: Scope, now: float) -> float | None:
    """Return the deadline that the client asks for, `None` if it asks for none."""
    timeout_s: float | None = None
    for name, value in scope["headers"]:
        if name == TIMEOUT_HEADER:
            timeout_s = earlier(timeout_s, value)
    return None if timeout_s is None else now + timeout_s
