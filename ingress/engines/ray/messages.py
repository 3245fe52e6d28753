"""The messages to a replica in another process: its specification and its calls. Pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from ingress.core.base.types import DeploymentID, RequestMetadata

if TYPE_CHECKING:  # it imports Ray
    from ingress.engines.ray.code import Reference

CALL = "ingress_call"
"""Method name given to Ray in place of a name that Ray treats specially: `__call__`, which is for
HTTP there, Ray's hooks, and private names. The envelope holds the real name."""

HOOKS = frozenset(
    {
        "check_health",
        "reconfigure",
        "record_autoscaling_stats",
        "record_replica_metadata",
        "record_routing_stats",
    }
)
"""Methods that Ray itself calls, if the class has them."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The specification of a replica.

    `code` is a `Reference` to the user's class or function. `arguments` are its pickled constructor
    arguments, with slots for handles. `methods` has the callable methods of each deployment of the
    application; `None` for any name. `request_timeout_s` is the proxies'. Ray holds the options
    that may change later.
    """

    code: Reference
    arguments: bytes
    num_cpus: float
    lanes: Mapping[str, int] = field(default_factory=dict)
    methods: Mapping[str, list[str] | None] = field(default_factory=dict)
    request_timeout_s: float | None = None
    stop_timeout_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """The metadata of a call, without its arguments. `left_s` is the time until its deadline."""

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
        """Return the call's metadata, with the deadline on this process's clock."""
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
    """Return the method name given to Ray. Ray's logs and metrics show this name."""
    is_plain = not method_name.startswith("_") and method_name not in _RAYS
    return method_name if is_plain else CALL
