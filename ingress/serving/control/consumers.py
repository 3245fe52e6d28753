"""Consumers of jobs: what a deployment's class may bring, and when it begins and ends.

The controller opens it once the deployment's replicas serve; it begins with its application. A
drain begins with `pause`, and ends with `close`, after the last replica. What a consumer is made of
is not known here: a class with `@task_consumer` brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ingress.core.base.foreign import stored
from ingress.handle import DeploymentHandle

CONSUMER = "__ingress_consumer__"


class Consumer(Protocol):
    """Runs the jobs of a queue as calls of a deployment. Thread-safe.

    counts  jobs of the queue by state, as far as known, at most some seconds old
    ended   jobs that have ended here, by their ends
    """

    queue: str
    ended: dict[str, int]

    @property
    def counts(self) -> dict[str, float]: ...

    def begin(self) -> None:
        """Begin to take jobs."""

    def waiting(self) -> int:
        """Return the number of jobs that wait for a slot."""

    def pause(self, timeout_s: float) -> None:
        """Take no more jobs; those that run have `timeout_s`."""

    def ask(self, action: str, **arguments: Any) -> Any:
        """Return the jobs, or change them: for `ingress jobs`. Blocks. Raises `ValueError`."""

    def close(self, timeout_s: float) -> None:
        """Hand back the jobs that have not ended. Blocks."""


class ConsumerOf(Protocol):
    """The mark of a class that brings a consumer."""

    @property
    def is_of_one_machine(self) -> bool:
        """Return whether its jobs are in a file, which other machines do not reach."""

    def open(
        self,
        handle: DeploymentHandle,
        room: Callable[[], int],
        slots: int,
        slots_of: Callable[[str], float],
    ) -> Consumer:
        """Connect. `slots_of` returns the number of jobs of a fairness key's turn."""


def consumer_of(func_or_class: Any) -> ConsumerOf | None:
    """Return what a class brings, `None` for a class without `@task_consumer`."""
    found: ConsumerOf | None = stored(func_or_class, CONSUMER)
    return found
