"""Policies that choose the replica of a request: the classes of `ray.serve.request_router`."""

from ingress.base.types import ReplicaID
from ingress.replicas.request_router import (
    ConsistentHashRouter,
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    PowerOfTwoChoicesRequestRouter,
    PrefixCacheAffinityRouter,
    RequestRouter,
    RoundRobinRouter,
    RunningReplica,
    SyncRequestRouter,
)

__all__ = [
    "ConsistentHashRouter",
    "FIFOMixin",
    "LocalityMixin",
    "MultiplexMixin",
    "PendingRequest",
    "PowerOfTwoChoicesRequestRouter",
    "PrefixCacheAffinityRouter",
    "ReplicaID",
    "RequestRouter",
    "RoundRobinRouter",
    "RunningReplica",
    "SyncRequestRouter",
]
