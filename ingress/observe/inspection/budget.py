"""The number of native threads that each call may have, in BLAS, OpenMP and similar libraries.

    cores / (replicas x calls of a replica that compute at once)        at least 1

Such libraries use as many threads as there are cores, for every call. Two calls at once on two
cores are then four threads that spin while they wait for each other. The libraries read environment
variables when they are loaded, for the whole process: `ingress run` sets those that are not set.

    calls at once    the threads of the replica's lanes and its serial thread, if there are any
                     else the replica's cores, if a `def` runs in its threadpool
                     else 1, on its event loop
    a replica's cores    `ray_actor_options={"num_cpus": n}`, else an equal part of the rest
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingress.app.batching.batching import Batcher
from ingress.app.declaration.build import BuiltApplication, BuiltDeployment
from ingress.app.declaration.names import PublicMethods
from ingress.core.base.settings import NATIVE_THREADS, OMP_NUM_THREADS, Settings
from ingress.core.execution.execution import ExecutionMode, ExecutionPlan, Lanes, Role, plan
from ingress.core.execution.lanes import lanes_of

FOLLOW_OMP = ("BLIS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables of libraries that read `OMP_NUM_THREADS` if their own variable is not set."""

_SELDOM = {"check_health", "reconfigure"}


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one deployment. `cores` and `calls` are those of one replica."""

    deployment: str
    replicas: int
    calls: int
    cores: float

    @property
    def threads(self) -> int:
        """Number of native threads that each call can have."""
        return max(1, int(self.cores / self.calls))


@dataclass(frozen=True, slots=True)
class ThreadBudget:
    """The native threads of an application's process.

    `explicit` are the variables that are already set. Their values are not changed. The others are
    set if `sets_variables`.
    """

    cores: float
    shares: tuple[Share, ...]
    explicit: Mapping[str, str]
    sets_variables: bool = True

    @property
    def fair(self) -> int:
        """Number of threads a call should have: the smallest that any deployment can give."""
        return min((share.threads for share in self.shares if share.cores), default=1)

    @property
    def threads(self) -> int:
        """Number of threads a call has: the variable's value, if it is set to a number."""
        given = self.explicit.get(OMP_NUM_THREADS, "")
        if given.isdecimal() and int(given):
            return int(given)
        return self.fair if self.sets_variables else int(self.cores)

    @property
    def variables(self) -> dict[str, str]:
        """The variables to set before a library that reads them is imported."""
        if not self.sets_variables:
            return {}
        follows = FOLLOW_OMP if OMP_NUM_THREADS in self.explicit else ()
        missing = (name for name in NATIVE_THREADS if name not in (*self.explicit, *follows))
        return dict.fromkeys(missing, str(self.fair))

    @property
    def runnable(self) -> int:
        """Number of threads that compute if every call does that may."""
        calls = sum(share.replicas * share.calls for share in self.shares if share.cores)
        return calls * self.threads

    @property
    def warning(self) -> str | None:
        """The warning if there are more threads than cores and fewer suffice, else `None`."""
        if self.threads <= self.fair or self.runnable <= self.cores:
            return None
        return (
            f"{self.product} ({OMP_NUM_THREADS}) are {self.runnable} runnable threads on "
            f"{self.cores:g} cores; set {OMP_NUM_THREADS}={self.fair}, or leave it to `ingress run`"
        )

    @property
    def summary(self) -> str:
        """The whole product in one line, and the source of its setting."""
        if OMP_NUM_THREADS in self.explicit:
            setting = f"{OMP_NUM_THREADS}={self.threads}"
        elif self.sets_variables:
            setting = f"{OMP_NUM_THREADS}={self.threads}, set by `ingress run`"
        else:
            setting = f"{OMP_NUM_THREADS} is not set"
        return f"{counted(f'{self.cores:g}', 'core')}: {self.product} ({setting})"

    @property
    def product(self) -> str:
        """The product of the replicas, their calls and each call's threads, as text."""
        calls = " + ".join(
            f"{counted(share.replicas, 'replica')} of {share.deployment} x "
            f"{counted(share.calls, 'call')}"
            for share in self.shares
            if share.cores
        )
        if sum(share.cores > 0 for share in self.shares) != 1:
            calls = f"({calls})"
        return f"{calls} x {counted(self.threads, 'native thread')}"


def thread_budget(
    built: BuiltApplication, settings: Settings, *, processes: int = 1, cores: float | None = None
) -> ThreadBudget:
    """Divide the cores, by default those this process may use, among the deployments."""
    cores = available_cores() if cores is None else cores
    configs = [each.deployment.config for each in built.deployments]
    counts = [each.replica_count * processes for each in configs]
    asked = [each.num_cpus if "num_cpus" in each.ray_actor_options else None for each in configs]
    taken = sum(count * each for count, each in zip(counts, asked, strict=True) if each)
    others = sum(count for count, each in zip(counts, asked, strict=True) if each is None)
    # Demands beyond the existing cores are scaled down. The others share at least one core.
    scale = min(1.0, max(1.0, cores - (others > 0)) / taken) if taken else 1.0
    left = max(1.0, cores - taken * scale) / others if others else 0.0
    shares = []
    for each, count, own in zip(built.deployments, counts, asked, strict=True):
        share = left if own is None else own * scale
        shares.append(Share(each.name, count, _calls_at_once(each, settings, share), share))
    return ThreadBudget(cores, tuple(shares), settings.native_threads, settings.set_native_threads)


def plans_of(
    func: Callable[..., object], role: Role, lanes: Lanes
) -> tuple[ExecutionPlan, ExecutionPlan]:
    """Return the plans of a function at 0 and at 1, without threads: no code is run."""
    no_pool: Any = None
    off = plan(func, role, sync_in_threadpool=False, pool=no_pool, lanes=lanes)
    return off, plan(func, role, sync_in_threadpool=True, pool=no_pool, lanes=lanes)


def available_cores(root: Path = Path("/")) -> float:
    """Return the number of cores that this process may use, by its affinity and cgroup quotas."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min([float(count), *_quotas(root)])


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores that each cgroup above this process allows. Source: Linux, cgroups(7)."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            for folder in _and_above(mounts, path):
                quota, _, period = _read(folder / "cpu.max").partition(" ")
                yield from _quotient(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _and_above(mounts / controllers, path):
                quota = _read(folder / "cpu.cfs_quota_us")
                yield from _quotient(quota, _read(folder / "cpu.cfs_period_us"))


def _and_above(mount: Path, path: str) -> Iterable[Path]:
    """Return a cgroup's folder and those above; in a container only the last one may exist."""
    below = Path(path.lstrip("/"))
    return (mount / each for each in (below, *below.parents))


def _quotient(quota: str, period: str) -> Iterator[float]:
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return
    if cores > 0:  # -1 is no limit
        yield cores


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _calls_at_once(built: BuiltDeployment, settings: Settings, cores: float) -> int:
    """Return the number of calls of a replica that may compute at once."""
    config = built.deployment.config
    lanes = lanes_of(built.deployment.func_or_class, config.max_ongoing_requests, config.lanes)
    if named := sum(lanes.limits.values()) + lanes.is_serial:
        return named
    calls = 1
    for func, role, at_most in _called(built):
        made = plans_of(func, role, lanes)[settings.run_sync_in_threadpool]
        if made.mode is ExecutionMode.THREADPOOL:
            calls = max(calls, at_most or lanes.limit)
    return max(1, min(calls, int(cores)))


def _called(built: BuiltDeployment) -> Iterator[tuple[Callable[..., object], Role, int | None]]:
    """Yield the functions that requests call, their roles and their limits of calls at once."""
    target = built.deployment.func_or_class
    funcs: list[Callable[..., object]] = [target]
    if inspect.isclass(target):
        names = {*PublicMethods(target), "__call__"} - _SELDOM
        funcs = [getattr(target, name) for name in names if name in dir(target)]
    for func in funcs:
        if isinstance(batcher := getattr(func, "__ingress_batcher__", None), Batcher):
            handler = batcher.handler
            yield handler.func, Role.BATCH, handler.at_once
        elif not built.is_asgi:
            yield func, Role.METHOD, None
    if built.bound_app is not None:
        yield from ((route.func, Role.ENDPOINT, None) for route in built.bound_app.routes())


def counted(number: int | str, what: str) -> str:
    """Return a number of things: 1 core, 2 cores."""
    return f"{number} {what}{'' if str(number) == '1' else 's'}"
