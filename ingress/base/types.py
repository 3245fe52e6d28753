"""The small values that travel between the parts: identities and what is known of a request."""

from __future__ import annotations

from dataclasses import dataclass
from random import getrandbits
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class DeploymentID:
    """One deployment of one application; the key of its router."""

    name: str
    app_name: str = "default"

    def __str__(self) -> str:
        return f"Deployment(name='{self.name}', app='{self.app_name}')"


@dataclass(frozen=True, slots=True)
class ReplicaID:
    """One replica of a deployment; `unique_id` counts from 0 and is never used again."""

    unique_id: str
    deployment_id: DeploymentID

    def __str__(self) -> str:
        return f"{self.deployment_id.name}#{self.unique_id}"


class RequestMetadata(NamedTuple):
    """What is known of a request before user code sees it; it never changes on the way.

    `route` is the HTTP path prefix the request came in by ("" for none); of a call that is made in
    a request, its template. `app_name` is the application that request came to ("" for that of
    `deployment`). `deadline` is when it has to be answered, in `time.monotonic()` seconds. A tuple,
    because one is made for every request and a frozen dataclass takes three times as long (1 us).
    """

    request_id: str
    deployment: DeploymentID
    method_name: str = "__call__"
    route: str = ""
    multiplexed_model_id: str = ""
    is_http_request: bool = False
    is_streaming: bool = False
    app_name: str = ""
    deadline: float | None = None


def new_request_id() -> str:
    """Return a random UUID (version 4) as text. Unique, not secret, and made in half a us."""
    digits = getrandbits(128).to_bytes(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
