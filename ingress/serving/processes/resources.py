"""The environment of a child: its variables, its native threads, its cores and its GPUs.

    runtime_env.env_vars    with the variables that they name, of the server or from above
    num_cpus                OMP_NUM_THREADS and its like, unless the user has set a variable; with
                            INGRESS_PIN_CPUS=1 as many cores
    num_gpus                CUDA_VISIBLE_DEVICES: GPUs of its own, or a part of one

The GPUs are those of CUDA_VISIBLE_DEVICES, else those that the driver lists; the cores are those
that the server may use. Each process of the server counts for itself.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from ingress.config import DeploymentConfig
from ingress.core.base.settings import (
    NATIVE_THREADS,
    PIN_CPUS,
    PINNED_CPUS,
    environment,
    expanded,
    pins_cpus,
    threads_set,
)
from ingress.telemetry.logs import logger

K = TypeVar("K", str, int)
EnvironmentOf = Callable[[], tuple[dict[str, str], Callable[[], None]]]
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_SPACE = 1e-9  # of three thirds


_lock = threading.Lock()
_gpus: defaultdict[str, float] = defaultdict(float)  # the part of each that is in use
_cores: defaultdict[int, float] = defaultdict(float)  # the number of children that each has


def _take_gpus(number: float, name: str, ids: Sequence[str]) -> list[str]:
    """Take GPUs of `ids`, or a part of one, for a replica of a deployment, and return theirs.

    A part is taken where least is free, so that whole ones stay free for others. Raises
    `RuntimeError` if the machine has none, or too few that are free.
    """
    part = min(number, 1.0)
    with _lock:
        free = {each: 1.0 - _gpus[each] for each in ids}
        least_first = sorted(ids, key=free.__getitem__)
        fitting = [each for each in least_first if free[each] >= part - _SPACE]
        taken = fitting[: max(1, int(number))]
        if len(taken) < number:
            raise RuntimeError(_missing(name, number, ids, free))
        for each in taken:
            _gpus[each] += part
    return taken


def _take_cores(number: int, name: str) -> list[int]:
    """Take the cores with the fewest children, for a replica of a deployment.

    Raises `RuntimeError` if there are too few.
    """
    with _lock:
        there = sorted(os.sched_getaffinity(0), key=lambda each: (_cores[each], each))
        taken = there[:number]
        if len(taken) < number:
            raise RuntimeError(
                f"deployment {name!r} asks for ray_actor_options={{'num_cpus': {number}}} a "
                f"replica, and this process may use {len(taken)} of the machine's cores; use "
                f"fewer, or unset {PIN_CPUS}"
            )
        for each in taken:
            _cores[each] += 1
    return taken


def _give(used: dict[K, float], taken: Iterable[K], part: float) -> None:
    with _lock:
        for each in taken:
            used[each] -= part


def environment_of(
    config: DeploymentConfig, name: str, gpus: Sequence[str]
) -> tuple[dict[str, str], Callable[[], None]]:
    """Return the variables of a child, and the function to call after its end, in any thread.

    `name` is that of the deployment, `gpus` are those of this process. Raises as `_take_gpus` and
    `_take_cores`.
    """
    there = environment()
    found: dict[str, str] = {}
    with ExitStack() as taken:
        if "num_cpus" in config.ray_actor_options:
            threads = max(1, int(config.num_cpus))
            ours = threads_set(there)  # by `ingress run`, for all that its process computes
            found |= dict.fromkeys(
                (each for each in NATIVE_THREADS if not there.get(each) or each in ours),
                str(threads),
            )
            if config.num_cpus and pins_cpus():
                cores = _take_cores(threads, name)
                taken.callback(_give, _cores, cores, 1)
                found[PINNED_CPUS] = ",".join(map(str, cores))
        if number := config.num_gpus:
            ids = _take_gpus(number, name, gpus)
            taken.callback(_give, _gpus, ids, min(number, 1.0))
            found[VISIBLE] = ",".join(ids)
        return found | expanded(config.env_vars, there | found), taken.pop_all().close


def visible(there: Mapping[str, str] | None = None) -> list[str]:
    """Return the ids of the GPUs that this process may use. It may take seconds: see `_counted`."""
    given = (environment() if there is None else there).get(VISIBLE)
    if given is not None:
        ids = [each.strip() for each in given.split(",")]
        # As for CUDA, which ends the list at the first id that is none.
        end = next((at for at, each in enumerate(ids) if each in ("", "-1")), len(ids))
        return ids[:end]
    return [str(number) for number in range(_counted())]


def _counted() -> int:
    """Return the number of GPUs that NVML counts, or that the driver lists without it."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    except Exception:  # of a module that is not there, or of a machine without a driver
        logger.debug("NVML counts no GPUs; the driver's list is used", exc_info=True)
        return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def _missing(name: str, number: float, ids: Sequence[str], free: Mapping[str, float]) -> str:
    asked = f"deployment {name!r} asks for ray_actor_options={{'num_gpus': {number:g}}} a replica"
    if not ids:
        return (
            f"{asked}, and this machine has no GPU that {VISIBLE} or the driver lists; set "
            f"{VISIBLE}, or leave num_gpus out"
        )
    left = ", ".join(f"{each}: {free[each]:.2g}" for each in ids)
    return f"{asked}, and too little is free of the GPUs ({left}); use fewer replicas, or a part"
