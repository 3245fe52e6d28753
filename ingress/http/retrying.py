"""One HTTP request, attempt after attempt.

    Exchange.respond -> failed -> Attempt.again -> another Attempt, or None: the failure is final

Only requests whose method is in `HTTPOptions.retry_started_methods` are `Attempt`s. All others are
`Exchange`s, and are never sent again once user code may have seen them. `Router.reassign` sends
calls again that no user code has seen, for any method and for handles too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import random
from time import monotonic
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ingress.base.settings import HTTPLimits
from ingress.base.types import RequestMetadata
from ingress.calls import retries
from ingress.calls.deadlines import TIMEOUT_HEADER, earlier
from ingress.calls.retries import RetryBudget
from ingress.exceptions import ReplicaUnavailableError, RequestTimeoutError
from ingress.http.exchange import Exchange
from ingress.replicas.router import Router


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of HTTP requests: their time, the methods that are retried, and their size.

    `timeout_s` bounds the request, or one attempt if its method is in `retried_methods`.
    """

    timeout_s: float | None = None
    retried_methods: frozenset[str] = frozenset()
    http: HTTPLimits = field(default_factory=HTTPLimits)


class Attempt(Exchange):
    """One attempt at a request whose method may be tried again. Owned by the HTTP loop.

    `timeout_s` and `metadata.deadline` bound one attempt; `last_deadline` is the client's, and
    bounds the whole request.
    """

    __slots__ = (
        "_began_at",
        "_body",
        "_budget",
        "_last_deadline",
        "_number",
        "_scope",
        "_timeout_s",
    )

    def __init__(
        self,
        metadata: RequestMetadata,
        router: Router,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        timeout_s: float | None,
        budget: RetryBudget,
        number: int = 1,
        last_deadline: float | None = None,
        **of_body: Any,
    ) -> None:
        # Copies for user code, which writes into its scope.
        inner = {**scope, "state": dict(scope["state"])} if "state" in scope else dict(scope)
        super().__init__(metadata, router, inner, receive, send, **of_body)
        self._scope = scope
        self._timeout_s = timeout_s
        self._budget = budget
        self._last_deadline = last_deadline
        self._number = number
        self._began_at = 0.0  # when the request began; 0 for the first attempt
        self._body: Message | None = None  # set when user code begins

    async def _work(self, user_code: Any) -> None:
        self._body = self._first
        await super()._work(user_code)

    async def again(self, error: Exception) -> Attempt | None:
        if not self._is_ours(error):
            return None
        pause_s = retries.pause_s(
            retries.Failure(
                self._number,
                may_have_started=True,
                is_listed=True,
                has_answered=self.started,
                is_replayable=not self._expects_more,
            ),
            max_retries=0,
            deadline=self._last_deadline,
            now=monotonic(),
            chance=random(),
            withdraw=self._budget.withdraw,
        )
        if pause_s is None:
            return None
        try:
            async with asyncio.timeout(pause_s):
                # The whole body has been read: only the disconnect is left to receive.
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return self._next()
        return None

    def _is_ours(self, error: Exception) -> bool:
        """Return whether the replica is gone, or the time of this attempt is up.

        User code may raise the same types, of its own or a child's: then that is its answer.
        """
        if isinstance(error, RequestTimeoutError):
            deadline = self.metadata.deadline  # the replica may have been the first to notice
            return self._cut_by is not None or (deadline is not None and monotonic() >= deadline)
        if isinstance(error, ReplicaUnavailableError):
            return self.runner is not None and self.runner.is_ending
        return False

    def _next(self) -> Attempt:
        now = monotonic()
        deadline = self._last_deadline
        if self._timeout_s is not None:
            own = now + self._timeout_s
            deadline = own if deadline is None else min(own, deadline)
        attempt = Attempt(
            self.metadata._replace(deadline=deadline),
            self.router,
            self._scope,
            self._receive,
            self._send,
            timeout_s=self._timeout_s,
            budget=self._budget,
            number=self._number + 1,
            last_deadline=self._last_deadline,
        )
        attempt._began_at = self._began_at or self.started_at
        # A 408 names the time from here to the deadline: the limit that was passed.
        attempt.started_at = attempt._began_at if deadline == self._last_deadline else now
        attempt._first = self._body or self._first
        attempt.runner = self.runner  # the router prefers another replica
        return attempt


def client_deadline(scope: Scope, now: float) -> float | None:
    """Return the deadline that the client asks for, `None` if it asks for none."""
    timeout_s: float | None = None
    for name, value in scope["headers"]:
        if name == TIMEOUT_HEADER:
            timeout_s = earlier(timeout_s, value)
    return None if timeout_s is None else now + timeout_s
