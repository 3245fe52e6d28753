"""Applications on a Ray cluster: processes, placement, routing, scaling and recovery are Ray's.

    this process         RayEngine     an Application -> Ray Serve deployments of `RayReplica`
    a replica's process  RayReplica    ingress's `Replica` with the user's class, called by Ray
    both                 RemoteRouter  a call by handle -> one by Ray's handle, and its answer

    lowering     deployment options, flags and `HTTPOptions` -> Ray's options
    messages     the messages to a replica: its specification and its calls
    calls        calls by handle to other processes; their arguments must be picklable; Ray's
                 exceptions -> the exceptions of ingress
    replica      the code that runs in a replica's process, and its reports to Ray
    cluster      connects to a cluster or starts one, explains its failures, prints its log, and
                 knows the processes that deployed its applications
    waits        replicas that wait for resources
    application  an application as Ray Serve deployments, pickled for the workers
    engine       the engine of `ingress.api`
    builder      the application builder for Ray's own `serve deploy`
    config_file  the files that `ingress build` writes: for `serve deploy`, and for KubeRay

User code runs in ingress's own runtime, as in one process. The threads of `def` methods, lanes,
batches, models, contexts and refusals do not depend on the engine. `lowering`, `messages` and
`config_file` do not import Ray; no module outside this package does.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SUPPORTED", "check_installed"]

SUPPORTED = "2.60"
"""Prefix of the supported Ray versions. The engine uses two parts of Ray without a stable API: the
request context, and the message in which a replica lists its models."""

HOW_TO_INSTALL = 'python -m pip install -e ".[ray]"'


def check_installed() -> None:
    """Raise `RuntimeError` if Ray Serve is not installed, or its version is not supported."""
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
        with warnings.catch_warnings(action="ignore"):  # Ray warns about its own dependencies
            import ray.serve  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"Ray {installed} is installed without Ray Serve ({error}); "
            f"python -m pip install 'ray[serve]=={SUPPORTED}.*'"
        ) from None
