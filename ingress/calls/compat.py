"""The private names of AnyIO; no other module uses one.

AnyIO has no public way to cancel a task once, or to run a thread of our own as one of its worker
threads, from which `anyio.from_thread.run` works.
"""

from __future__ import annotations

from ingress.base.private_names import require, unsupported

SUPPORTED = ">=4.11,<5"

require(
    "anyio",
    SUPPORTED,
    (
        "anyio._backends._asyncio:AsyncIOBackend",
        "anyio._backends._asyncio:CancelScope._deliver_cancellation",
        "anyio._backends._asyncio:WorkerThread._report_result",
        "anyio._backends._asyncio:_task_states",
        "anyio._core._eventloop:claim_worker_thread",
        "anyio._core._eventloop:threadlocals",
    ),
)

from anyio._backends._asyncio import (  # noqa: E402 - after the check
    AsyncIOBackend,
    CancelScope,
    WorkerThread,
    _task_states,
)
from anyio._core._eventloop import claim_worker_thread, threadlocals  # noqa: E402

__all__ = [
    "AsyncIOBackend",
    "CancelScope",
    "WorkerThread",
    "claim_worker_thread",
    "task_states",
    "threadlocals",
]

task_states = _task_states

_FIELDS = (
    "_cancel_called", "_child_scopes", "_host_task", "_parent_scope", "_pending_uncancellations",
    "_shield",
)  # fmt: skip
_scope = CancelScope()
_missing = [f"CancelScope.{name}" for name in _FIELDS if not hasattr(_scope, name)]
if _missing:
    raise unsupported("anyio", SUPPORTED, _missing)
