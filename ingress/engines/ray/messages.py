"""The messages to a replica in another process: its specification and its calls. Pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from time import monotonic

from ingress.app.declaration.names import found_in
from ingress.core.base.types import RequestMetadata
from ingress.serving.processes.code import Code, Reference

NOT_ON_THE_WORKERS = "cannot be imported on the workers"

CALL = "ingress_call"
"""Method name given to Ray in place of a name that Ray treats specially: `__call__`, which is for
HTTP there, Ray's hooks, and private names. The call's metadata hold the real name."""

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


def by_module(module: str, name: str) -> Code:
    """Import a class or function, under its own name or its deployment's.

    Raises `ImportError` if this process cannot.
    """
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise
        raise ModuleNotFoundError(
            f"module {module!r} {NOT_ON_THE_WORKERS}; send the folder it is "
            "in with ingress run --working-dir, or install it there",
            name=error.name,
        ) from None
    if (target := found_in(found, name)) is None:
        raise ImportError(
            f"module {module!r} of the workers has no {name!r}; give the "
            "workers the same version of the module"
        )
    return target


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """The specification of a replica.

    `code` refers to the user's class or function. `arguments` are its pickled constructor
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


def as_sent(metadata: RequestMetadata) -> RequestMetadata:
    """Return a call's metadata as they cross: `deadline` is the time that is left.

    Ray's router has used the session id, and knows no priorities and no fairness keys.
    """
    deadline = metadata.deadline
    left_s = None if deadline is None else max(0.0, deadline - monotonic())
    return metadata._replace(deadline=left_s, session_id="", priority=0, fairness_key="")


def as_arrived(sent: RequestMetadata) -> RequestMetadata:
    """Return a call's metadata, with the deadline on this process's clock."""
    return sent._replace(deadline=None if sent.deadline is None else monotonic() + sent.deadline)


_RAYS = HOOKS | {"app", "docs_path"}


def remote_name(method_name: str) -> str:
    """Return the method name given to Ray. Ray's logs and metrics show this name."""
    is_plain = not method_name.startswith("_") and method_name not in _RAYS
    return method_name if is_plain else CALL
