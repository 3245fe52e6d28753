"""The choice of a replica: the usual policy, and policies of users, see `request_router`.

The usual policy is for a call that need not wait: the router calls `TwoChoices` under its lock,
from any thread. A call of a deployment that has a policy of its own may wait:

    assign -> the queue -> the policy chooses, without the router's lock -> `Router.place`
              a free slot of a chosen replica: the call starts
              none: it waits for the first of these to be free; the policy is asked again when
              replicas come or go, and, if it is asynchronous, after a pause

`RoutedCalls` are the waiting calls, each with the replicas that it wants. `Chooser` runs the
policy: a `SyncRequestRouter` in the caller's thread, any other on an event loop of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from random import random
from typing import Any, Protocol, TypeVar, cast

from ingress.config import RequestRouterConfig
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import Call
from ingress.core.calls.loops import EventLoopThread
from ingress.exceptions import UserCodeExit
from ingress.request_router import (
    ConsistentHashRouter,
    PendingRequest,
    PowerOfTwoChoicesRequestRouter,
    PrefixCacheAffinityRouter,
    Ranks,
    RequestRouter,
    RoundRobinRouter,
    RunningReplica,
    SyncRequestRouter,
)
from ingress.serving.replicas.admission import Admission, AdmittingRunner
from ingress.serving.replicas.overload import HEAD_START_S, UsualTimes, WaitingCalls
from ingress.telemetry.logs import logger


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


_RAYS = {
    each.__name__: each
    for each in (
        ConsistentHashRouter,
        PowerOfTwoChoicesRequestRouter,
        PrefixCacheAffinityRouter,
        RoundRobinRouter,
    )
}


def policy_of(config: RequestRouterConfig | None, deployment: DeploymentID) -> RequestRouter | None:
    """Return the policy that a deployment has of its own, `None` for the router's.

    Raises `ValueError` or `TypeError` for a class that is none, or cannot be imported.
    """
    if config is None:
        return None
    cls = _class_of(config.request_router_class)
    if cls is PowerOfTwoChoicesRequestRouter:
        return None
    if not (isinstance(cls, type) and issubclass(cls, RequestRouter)):
        raise TypeError(
            f"request_router_class={config.request_router_class!r} must be a subclass of "
            "ingress.request_router.RequestRouter, or its import path"
        )
    policy = cls(deployment)
    policy.initialize_state(**config.request_router_kwargs)
    return policy


def _class_of(path: str | type) -> Any:
    if isinstance(path, type):
        return path
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module.partition(".")[0] == "ray" and name in _RAYS:
        return _RAYS[name]
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"request_router_class={path!r} cannot be imported: {error}; name it as "
            "'package.module:Class'"
        ) from None


class RoutedCalls(WaitingCalls):
    """The waiting calls of a deployment with a policy. Guarded by its router's lock."""

    __slots__ = ("_wanted", "_wanting")

    def __init__(self, usual: UsualTimes) -> None:
        super().__init__(usual)
        self._wanted: dict[Call, frozenset[Admission]] = {}
        self._wanting: dict[Admission, OrderedDict[Call, None]] = {}

    def want(self, call: Call, chosen: frozenset[Admission]) -> None:
        """Note the replicas that a waiting call waits for, in place of those before."""
        self._forget(call, keeps=chosen)
        self._wanted[call] = chosen
        for each in chosen:
            self._wanting.setdefault(each, OrderedDict()).setdefault(call)

    def has_chosen(self, call: Call) -> bool:
        """Return whether the policy has chosen, and all that it has chosen were full."""
        return call in self._wanted

    def waiting(self) -> list[Call]:
        return [*self._classes[1], *self._classes[0], *self._classes[-1]]

    def next_for(self, slots: Admission) -> Call | None:
        """Remove the call that is served next by this replica, `None` if no call wants it."""
        calls = self._wanting.get(slots)
        if not calls:
            return None
        call = next(iter(calls))
        if len(self._classes[0]) < self.size:
            call = min(calls, key=self._turn_of)
        self.discard(call)
        return call

    def _turn_of(self, call: Call) -> float:
        return self._class_of(call)[call] - call.metadata.priority * HEAD_START_S

    def discard(self, call: Call) -> bool:
        self._forget(call)
        return super().discard(call)

    def clear(self) -> list[Call]:
        self._wanted.clear()
        self._wanting.clear()
        return super().clear()

    def _forget(self, call: Call, keeps: frozenset[Admission] = frozenset()) -> None:
        for each in self._wanted.pop(call, frozenset()) - keeps:
            calls = self._wanting[each]
            del calls[call]
            if not calls:
                del self._wanting[each]


class PlaceCall(Protocol):
    """`Router.place`: start a waiting call on a chosen replica; `False` while it has to wait."""

    def __call__(self, call: Call, ranks: list[list[Admission]]) -> bool: ...


class Chooser:
    """Runs the policy of one deployment. `ask`, `update` and `close` are thread-safe.

    `place` is `Router.place`, `fail(call, error)` ends a call whose policy failed, and `waiting`
    returns the calls in the queue.
    """

    __slots__ = (
        "_candidates", "_changed", "_fail", "_home", "_name", "_pauses", "_place", "_policy",
        "_tasks", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        policy: RequestRouter,
        name: str,
        pauses: RequestRouterConfig,
        place: PlaceCall,
        fail: Callable[[Call, Exception], Any],
        waiting: Callable[[], list[Call]],
    ) -> None:
        self._policy, self._name, self._pauses = policy, name, pauses
        self._place, self._fail, self._waiting = place, fail, waiting
        self._candidates: list[RunningReplica] = []
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        is_sync = isinstance(policy, SyncRequestRouter)
        self._home = None if is_sync else EventLoopThread(f"{name}-request-router")

    def update(self, replicas: list[AdmittingRunner]) -> None:
        """Take the replicas from now on, and choose again for the calls that wait.

        Called on the control loop only.
        """
        candidates = [RunningReplica(each.replica_id, each.slots) for each in replicas]
        if self._home is None:
            self._show(candidates)
            # Race with `ask` in other threads, which may have read the candidates before: it reads
            # them again after it has placed its call, and this lists the calls after the change.
            self._candidates = candidates
            for call in self._waiting():
                self.ask(call)
        else:
            self._home.mailbox.post(self._update, candidates)

    def _show(self, candidates: list[RunningReplica]) -> None:
        try:
            self._policy.update_replicas(candidates)
        except Exception:
            logger.exception("%s: update_replicas of its request router failed", self._name)

    def _update(self, candidates: list[RunningReplica]) -> None:
        self._show(candidates)
        self._candidates = candidates
        self._changed.set()
        self._changed = asyncio.Event()

    def ask(self, call: Call) -> None:
        if self._home is not None:
            self._home.mailbox.post(self._begin, call)
            return
        assert isinstance(self._policy, SyncRequestRouter)
        request = PendingRequest.of(call)
        while candidates := self._candidates:  # else `update` asks again
            try:
                ranks = self._policy.rank(candidates, request)
                if self._place(call, _slots_of(ranks)):
                    break
            except BaseException as error:  # of the user's policy: the caller gets it
                self._fail_by_policy(call, error)
                break
            if candidates is self._candidates:
                break

    def _begin(self, call: Call) -> None:
        if call not in self._tasks:  # else it was asked for while replicas came or went
            task = asyncio.get_running_loop().create_task(self._choose(call))
            self._tasks[call] = task
            task.add_done_callback(partial(self._ended, call))

    async def _choose(self, call: Call) -> None:
        """Ask the policy until the call has its slot, or has left the queue."""
        policy, pause_s = self._policy, self._pauses.initial_backoff_s
        pending = PendingRequest.of(call)
        while not call.settled:
            changed, candidates = self._changed, self._candidates
            if candidates:
                ranks = await policy.choose_replicas(list(candidates), pending)
                if self._place(call, _slots_of(ranks)):
                    break
            try:
                async with asyncio.timeout(pause_s):
                    await changed.wait()
            except TimeoutError:
                pause_s = min(pause_s * self._pauses.backoff_multiplier, self._pauses.max_backoff_s)
        if call.runner is not None:
            replica_id = call.runner.replica_id
            policy.on_request_routed(pending, replica_id, None)
            if type(policy).on_request_completed is not RequestRouter.on_request_completed:
                internal_id = pending.metadata.internal_request_id
                call.when_settled(lambda _: self._completed(replica_id, internal_id))

    def _completed(self, *known: Any) -> None:
        assert self._home is not None
        self._home.mailbox.post(self._policy.on_request_completed, *known)

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        del self._tasks[call]
        if task.cancelled():  # the router refuses all calls by then
            return
        error = task.exception()
        if error is not None:
            self._fail_by_policy(call, error)

    def _fail_by_policy(self, call: Call, error: BaseException) -> None:
        self._fail(call, error if isinstance(error, Exception) else UserCodeExit(error, self._name))

    def close(self) -> None:
        """End the policy's loop. A policy that blocks is left behind in its daemon thread."""
        if self._home is not None:
            self._home.stop(0.0)


def _slots_of(ranks: Ranks) -> list[list[Admission]]:
    try:
        return [[cast(Admission, each.slots) for each in group] for group in ranks]
    except (AttributeError, TypeError):
        raise TypeError(
            f"choose_replicas must return a list of lists of its candidates, got {ranks!r}"
        ) from None
