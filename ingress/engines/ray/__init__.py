"""Applications on a Ray cluster: processes, placement, routing, scaling and recovery are Ray's.

    this process         RayEngine     an Application -> Ray Serve deployments of `RayReplica`
    a replica's process  RayReplica    our own `Replica` with the user's class, called by Ray
    both                 RemoteRouter  a call by handle -> one by Ray's handle, and its answer

    lowering     the options of a deployment, the flags and `HTTPOptions`, as Ray takes them
    code         the user's classes and arguments on their way to a worker
    messages     what is told a replica: what it is, and what each call is
    errors       Ray's exceptions -> ours
    calls        the handles' way to other processes
    replica      what runs in a replica's process
    cluster      connecting to a cluster, or starting one; what may be wrong with it
    application  an application as Ray Serve deployments
    engine       what `ingress.api` asks
    builder      what Ray's own `serve deploy` asks
    config_file  what `ingress build` writes

User code runs in our own runtime, as in one process: where a `def` runs, lanes, batches, models,
contexts and what is refused do not depend on the engine. `lowering`, `messages` and `config_file`
do not import Ray; nothing outside of this package does.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SUPPORTED", "check_installed"]

SUPPORTED = "2.60"
"""The versions of Ray that are supported begin with this. We use what Ray does not promise to keep:
its request context, and the message by which a replica says what models it has."""

HOW_TO_INSTALL = 'python -m pip install -e ".[ray]"'


def check_installed() -> None:
    """Raise `RuntimeError` if Ray Serve is not installed, or in a version that is not supported."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise RuntimeError(
            f"the ray engine needs Ray Serve {SUPPORTED}, which is not installed; in a clone of "
            f"this project: {HOW_TO_INSTALL}"
        ) from None
    if not (installed + ".").startswith(SUPPORTED + "."):
        raise RuntimeError(
            f"the ray engine supports Ray {SUPPORTED}.x, and {installed} is installed; "
            f"python -m pip install 'ray[serve]=={SUPPORTED}.*'"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # Ray's own, of what it uses itself
            import ray.serve  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"Ray {installed} is installed without Ray Serve ({error}); "
            f"python -m pip install 'ray[serve]=={SUPPORTED}.*'"
        ) from None
