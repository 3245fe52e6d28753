"""What is told a replica in another process: what it is, and what each call is. Pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ingress.base.types import DeploymentID, RequestMetadata

CALL = "ingress_call"
"""Ray's name for what it shall not look for under its own: `__call__`, which is for HTTP there, the
hooks it calls itself, and all that is private. The call says what is meant."""

HOOKS = frozenset(
    {
        "check_health",
        "reconfigure",
        "record_autoscaling_stats",
        "record_replica_metadata",
        "record_routing_stats",
    }
)
"""Methods that Ray calls itself, if they are there."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica is made of.

    `code` is a `Reference` to the user's class or function, `arguments` its pickled constructor
    arguments with slots for handles. `methods` says, for each deployment of the application, what
    its handle may call; `None` for any name. `request_timeout_s` is the proxies'. What may change
    later, Ray has.
    """

    code: Any
    arguments: bytes
    num_cpus: float
    lanes: Mapping[str, int] = field(default_factory=dict)
    methods: Mapping[str, list[str] | None] = field(default_factory=dict)
    request_timeout_s: float | None = None
    stop_timeout_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of a call, beside its arguments. `left_s` is what it has of its time."""

    method_name: str
    is_streaming: bool
    request_id: str
    route: str
    app_name: str
    multiplexed_model_id: str
    left_s: float | None

    @classmethod
    def of(cls, metadata: RequestMetadata) -> Envelope:
        deadline = metadata.deadline
        return cls(
            metadata.method_name,
            metadata.is_streaming,
            metadata.request_id,
            metadata.route,
            metadata.app_name,
            metadata.multiplexed_model_id,
            None if deadline is None else max(0.0, deadline - monotonic()),
        )

    def metadata(self, deployment: DeploymentID) -> RequestMetadata:
        """Return what it is on the clock of this process."""
        return RequestMetadata(
            self.request_id,
            deployment,
            method_name=self.method_name,
            route=self.route,
            multiplexed_model_id=self.multiplexed_model_id,
            is_streaming=self.is_streaming,
            app_name=self.app_name,
            deadline=None if self.left_s is None else monotonic() + self.left_s,
        )


_RAYS = HOOKS | {"app", "docs_path"}


def remote_name(method_name: str) -> str:
    """Return the name that Ray is given for a method, which is what its logs and metrics show."""
    is_plain = not method_name.startswith("_") and method_name not in _RAYS
    return method_name if is_plain else CALL
