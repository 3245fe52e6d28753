"""Policies that choose the replicas of a call, with the names and signatures of Ray Serve.

    class Mine(RequestRouter):
        async def choose_replicas(self, candidate_replicas, pending_request=None):
            return [[best], [second, third]]

    @serve.deployment(request_router_config={"request_router_class": "my.module:Mine"})

A call goes to a replica of the first group that has a free slot, in a group to the one with the
fewest calls. If all chosen replicas are full, the call waits for these:
`serving/replicas/choosing`.

Source: Ray 2.60.0, serve/request_router.py and what it exports.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingress.core.base.types import DeploymentID, ReplicaID, new_request_id
from ingress.core.calls.call import Call
from ingress.telemetry.logs import logger

__all__ = [
    "ConsistentHashRouter",
    "FIFOMixin",
    "LocalityMixin",
    "MultiplexMixin",
    "PendingRequest",
    "PowerOfTwoChoicesRequestRouter",
    "PrefixCacheAffinityRouter",
    "ReplicaID",
    "ReplicaResult",
    "RequestRouter",
    "RoundRobinRouter",
    "RunningReplica",
    "SyncRequestRouter",
]


ReplicaResult = Any
"""The result of a call, which Ray's `on_request_routed` gets; here it is `None`."""
Ranks = Sequence[Sequence["RunningReplica"]]


class Load(Protocol):
    """The calls and models of a replica, as its router counts them."""

    ongoing: int
    max_ongoing: int
    requested: dict[str, int]

    @property
    def model_ids(self) -> frozenset[str]: ...


class RunningReplica:
    """A replica, as a policy sees it. Thread-safe to read.

    There is one machine, so `node_id` and `availability_zone` say nothing. `routing_stats` and
    `replica_metadata` are empty.
    """

    __slots__ = ("replica_id", "slots")

    def __init__(self, replica_id: ReplicaID, slots: Load) -> None:
        self.replica_id = replica_id
        self.slots = slots

    def __repr__(self) -> str:
        return f"RunningReplica({self.replica_id}, {self.num_ongoing_requests} requests)"

    @property
    def num_ongoing_requests(self) -> int:
        """The number of its requests that have a slot now; Ray has it in a cache."""
        return self.slots.ongoing

    @property
    def max_ongoing_requests(self) -> int:
        return self.slots.max_ongoing

    @property
    def multiplexed_model_ids(self) -> frozenset[str]:
        """The ids of the models that it has, is loading, or was just asked for."""
        return self.slots.model_ids | frozenset(list(self.slots.requested))

    @property
    def node_id(self) -> str:
        return ""

    @property
    def availability_zone(self) -> None:
        return None

    @property
    def routing_stats(self) -> dict[str, Any]:
        return {}

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class PendingMetadata:
    """The metadata of a pending request. `internal_request_id` is different for each call."""

    request_id: str
    internal_request_id: str
    call_method: str
    route: str
    app_name: str
    multiplexed_model_id: str
    session_id: str
    is_streaming: bool
    is_http_request: bool


@dataclass(slots=True)
class RoutingContext:
    """Notes of a policy about one request. Here `should_backoff` is always as if true."""

    should_backoff: bool = False
    tried_first_multiplexed_models: bool = False
    tried_fewest_multiplexed_models: bool = False


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that has no replica yet. The arguments of an HTTP request are empty."""

    args: list[Any]
    kwargs: dict[str, Any]
    metadata: PendingMetadata
    created_at: float = field(default_factory=time.time)
    routing_context: RoutingContext = field(default_factory=RoutingContext)

    @classmethod
    def of(cls, call: Call) -> PendingRequest:
        known = call.metadata
        work: Any = call.work
        return cls(
            list(getattr(work, "args", ())),
            dict(getattr(work, "kwargs", {})),
            PendingMetadata(
                known.request_id,
                new_request_id(),
                known.method_name,
                known.route,
                call.app_name,
                known.multiplexed_model_id,
                known.session_id,
                known.is_streaming,
                known.is_http_request,
            ),
        )


class RequestRouter:
    """The base of policies. Owned by one event loop, which runs nothing else.

    One instance for each deployment and process. `choose_replicas` may await and may be slow: only
    the calls of its own deployment wait for it.
    """

    def __init__(self, deployment_id: DeploymentID) -> None:
        self._deployment_id = deployment_id
        self._replicas: dict[ReplicaID, RunningReplica] = {}

    def initialize_state(self, *args: Any, **kwargs: Any) -> None:
        """Take `request_router_kwargs`, as keywords. By default there are none."""
        if kwargs:
            raise TypeError(
                f"request_router_kwargs {sorted(kwargs)} are not parameters of "
                f"{type(self).__name__}.initialize_state; leave them out, or define it with them"
            )

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The replicas that calls may go to."""
        return self._replicas

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that calls may go to from now on."""
        self._replicas = {each.replica_id: each for each in replicas}

    def select_available_replicas(
        self, candidates: Sequence[RunningReplica] | None = None
    ) -> list[RunningReplica]:
        """Return the candidates, by default all replicas, that have a free slot."""
        chosen = list(self._replicas.values()) if candidates is None else candidates
        return [each for each in chosen if each.num_ongoing_requests < each.max_ongoing_requests]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        """Return groups of replicas for a request, the first choice first."""
        raise NotImplementedError(f"{type(self).__name__} must define choose_replicas")

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Take note that a request has a slot of a replica. `result` is `None` here."""

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take note that a request was answered."""


class FIFOMixin:
    """Does nothing here: each request goes to the replica that was chosen for it."""


class LocalityMixin:
    """Does nothing here: all replicas are on this machine."""

    _replicas: dict[ReplicaID, RunningReplica]

    def apply_locality_routing(
        self, pending_request: PendingRequest | None = None
    ) -> set[ReplicaID]:
        """Return the ids of all replicas."""
        return {*self._replicas}

    def rank_replicas_via_locality(
        self, replicas: list[RunningReplica]
    ) -> list[list[RunningReplica]]:
        """Return the replicas as one group."""
        return [replicas]


class MultiplexMixin:
    """Ranks replicas by the models that they have."""

    _replicas: dict[ReplicaID, RunningReplica]

    def apply_multiplex_routing(
        self, pending_request: PendingRequest | None = None
    ) -> set[ReplicaID]:
        """Return the ids of the replicas that have the model, else of those with the fewest."""
        model_id = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        ranked = self.rank_replicas_via_multiplex([*self._replicas.values()], model_id)
        return {each.replica_id for each in next(filter(None, ranked), ())}

    def rank_replicas_via_multiplex(
        self, replicas: list[RunningReplica], multiplexed_model_id: str
    ) -> list[list[RunningReplica]]:
        """Return the replicas that have the model, those with the fewest models, and the others."""
        counts = [(each, each.multiplexed_model_ids) for each in replicas]
        fewest = min((len(ids) for _, ids in counts), default=0)
        ranks: list[list[RunningReplica]] = [[], [], []]
        for each, ids in counts:
            ranks[0 if multiplexed_model_id in ids else 1 if len(ids) == fewest else 2].append(each)
        return ranks


class PowerOfTwoChoicesRequestRouter(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    """Chooses two replicas at random, of which the one with fewer requests is taken.

    The router has the same rule itself, for deployments without a policy of their own: this class
    is run only if it is the base of another.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending_request)
            candidate_replicas = [each for each in candidate_replicas if each.replica_id in ids]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


class PrefixCacheAffinityRouter(PowerOfTwoChoicesRequestRouter):
    """Does nothing here but say so: there is no cache of prefixes whose place could be known."""

    def initialize_state(self, *args: Any, **kwargs: Any) -> None:
        logger.warning(
            "%s: PrefixCacheAffinityRouter knows no prefix caches in this process; it chooses the "
            "better of two replicas. Use ConsistentHashRouter to keep a session at its replica.",
            self._deployment_id,
        )


class SyncRequestRouter(RequestRouter):
    """The base of policies whose choice takes microseconds: they run in the caller's thread.

    `rank` must be thread-safe.
    """

    def rank(self, candidates: list[RunningReplica], request: PendingRequest) -> Ranks:
        raise NotImplementedError(f"{type(self).__name__} must define rank")

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        if pending_request is None:
            return [candidate_replicas]
        return self.rank(candidate_replicas, pending_request)


class RoundRobinRouter(SyncRequestRouter):
    """Chooses the replicas in turn; the next one if a replica is full."""

    def __init__(self, deployment_id: DeploymentID) -> None:
        super().__init__(deployment_id)
        self._turns = itertools.count()  # `next` is one step, in any thread

    def rank(self, candidates: list[RunningReplica], request: PendingRequest) -> Ranks:
        first = next(self._turns) % len(candidates)
        return [[each] for each in (*candidates[first:], *candidates[:first])]


class ConsistentHashRouter(SyncRequestRouter):
    """Keeps the requests of a session at one replica, by consistent hashing of `session_id`.

        num_virtual_nodes       places of each replica on the ring
        num_fallback_replicas   replicas that are asked if the session's is full; 0 for none

    When replicas come or go, only the sessions of these replicas move. A request without a session
    goes to the replica with the fewest requests.
    """

    def __init__(self, deployment_id: DeploymentID) -> None:
        super().__init__(deployment_id)
        self._num_virtual_nodes = 100
        self._num_fallback_replicas = 2
        # Replaced as a whole, because `rank` reads it in other threads.
        self._ring: tuple[list[int], list[RunningReplica]] = [], []

    def initialize_state(
        self, *, num_virtual_nodes: int = 100, num_fallback_replicas: int = 2
    ) -> None:
        for name, value, least in (
            ("num_virtual_nodes", num_virtual_nodes, 1),
            ("num_fallback_replicas", num_fallback_replicas, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")
        self._num_virtual_nodes = num_virtual_nodes
        self._num_fallback_replicas = num_fallback_replicas

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        places = [
            (_place_of(f"{each.replica_id.unique_id}:{number}"), each)
            for each in replicas
            for number in range(self._num_virtual_nodes)
        ]
        places.sort(key=lambda place: place[0])
        self._ring = [place for place, _ in places], [each for _, each in places]

    def rank(self, candidates: list[RunningReplica], request: PendingRequest) -> Ranks:
        places, owners = self._ring
        if not request.metadata.session_id or not places:
            return [candidates]
        first = bisect.bisect_right(places, _place_of(request.metadata.session_id))
        found: dict[RunningReplica, None] = {}
        for owner in itertools.chain(owners[first:], owners[:first]):
            found[owner] = None
            if len(found) > self._num_fallback_replicas:
                break
        return [[each] for each in found]


def _place_of(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
