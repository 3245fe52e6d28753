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
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

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

logger = logging.getLogger("ingress")

EnvironmentOf = Callable[[], tuple[dict[str, str], Callable[[], None]]]
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_SPACE = 1e-9  # of three thirds


class GPUs:
    """The GPUs of this process, and the part of each that is in use. Thread-safe."""

    __slots__ = ("_lock", "_used")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    def take(self, number: float, name: str, ids: Sequence[str]) -> list[str]:
        """Take GPUs of `ids`, or a part of one, for a replica of a deployment, and return theirs.

        A part is taken where least is free, so that whole ones stay free for others. Raises
        `RuntimeError` if the machine has none, or too few that are free.
        """
        part = min(number, 1.0)
        with self._lock:
            free = {each: 1.0 - self._used.get(each, 0.0) for each in ids}
            fitting = sorted((each for each in ids if free[each] >= part - _SPACE), key=free.get)  # type: ignore[arg-type]
            taken = fitting[: max(1, int(number))]
            if len(taken) < number:
                raise RuntimeError(_missing(name, number, ids, free))
            for each in taken:
                self._used[each] = self._used.get(each, 0.0) + part
        return taken

    def give(self, ids: Sequence[str], number: float) -> None:
        """Give back what `take` returned: the child has ended."""
        with self._lock:
            for each in ids:
                left = self._used[each] - min(number, 1.0)
                if left > _SPACE:
                    self._used[each] = left
                else:
                    del self._used[each]


class Cores:
    """The number of children that are pinned to each core. Thread-safe."""

    __slots__ = ("_children", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: Counter[int] = Counter()

    def take(self, number: int, name: str, cores: Iterable[int]) -> list[int]:
        """Take the cores with the fewest children, for a replica of a deployment.

        Raises `RuntimeError` if there are too few.
        """
        with self._lock:
            taken = sorted(cores, key=lambda each: (self._children[each], each))[:number]
            if len(taken) < number:
                raise RuntimeError(
                    f"deployment {name!r} asks for ray_actor_options={{'num_cpus': {number}}} a "
                    f"replica, and this process may use {len(taken)} of the machine's cores; use "
                    f"fewer, or unset {PIN_CPUS}"
                )
            self._children.update(taken)
        return taken

    def give(self, cores: Sequence[int]) -> None:
        """Give back what `take` returned: the child has ended."""
        with self._lock:
            self._children.subtract(cores)


GPUS = GPUs()
CORES = Cores()


def environment_of(
    config: DeploymentConfig, name: str, gpus: Sequence[str]
) -> tuple[dict[str, str], Callable[[], None]]:
    """Return the variables of a child, and the function to call after its end, in any thread.

    `name` is that of the deployment, `gpus` are those of this process. Raises as `GPUs.take` and
    `Cores.take`.
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
                cores = CORES.take(threads, name, os.sched_getaffinity(0))
                taken.callback(CORES.give, cores)
                found[PINNED_CPUS] = ",".join(map(str, cores))
        if number := config.num_gpus:
            ids = GPUS.take(number, name, gpus)
            taken.callback(GPUS.give, ids, number)
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
