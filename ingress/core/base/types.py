"""The small values shared by all parts: identities, and the metadata of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
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


class TimeStampedValue(NamedTuple):
    """A value that a replica recorded, and when: Unix time in seconds."""

    timestamp: float
    value: float


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """The place of a replica among those of its deployment, from 0; a process is one node."""

    rank: int
    node_rank: int = 0
    local_rank: int = 0


class ReplicaPlace(NamedTuple):
    """The place of a replica in its deployment when it started.

    `world_size` is the number of replicas that the deployment should have; `code_version` grows
    with each `serve.run` of the application.
    """

    rank: ReplicaRank
    world_size: int
    code_version: str


class RequestMetadata(NamedTuple):
    """The metadata of a request, known before user code runs; it never changes.

    `route` is the HTTP path prefix of the request ("" for none), or, for a call that is made in a
    request, the request's path template. `app_name` is the application that received the request
    ("" for the application of `deployment`). `deadline` is in seconds of `time.monotonic()`.
    `session_id` is for policies that route by it. `priority` is a value of `PRIORITIES`; calls of
    one `fairness_key` share a place in a fair queue. A tuple, because one is made per request, and
    a frozen dataclass takes three times as long (1 us).
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
    session_id: str = ""
    priority: int = 0
    fairness_key: str = ""


class JobState(StrEnum):
    """The states of a job; the words that commands and metrics show."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    UNREADABLE = "unreadable"
    CANCELLED = "cancelled"


PRIORITIES = {"high": 1, "normal": 0, "low": -1}


_MOST_OF_KEY = 200


def short_key(key: str) -> str:
    """Return a fairness key, or a digest of one that is long or cannot be printed."""
    if len(key) <= _MOST_OF_KEY and key.isprintable():
        return key
    return blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def new_request_id() -> str:
    """Return a random UUID (version 4) as text. Unique, not secret, and made in half a us."""
    digits = getrandbits(128).to_bytes(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
