"""Work of the endpoints, for servers of every kind: it imports nothing but the standard library.

NumPy only for the model that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import sleep, thread_time

CPU_S = 0.005
"""Processor time of the CPU-bound endpoints."""
WORKERS = "BENCHMARK_WORKERS"
"""The variable with the number of worker processes of a peer."""
COMPUTES = "BENCHMARK_COMPUTES"
"""The variable that is set if the no-op of a peer computes."""


def compute() -> None:
    """Use `CPU_S` of this thread's own time, in Python."""
    end = thread_time() + CPU_S
    while thread_time() < end:
        pass


# The batched models. Each call has the same row.

TARGET_MS = 50
FIXED_S = 0.02
WIDTH, LAYERS = 1200, 8
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables for one thread of the model: client and server share the machine's cores."""


def network() -> Callable[[int], list[float]]:
    """Return eight layers of NumPy: the time of a batch grows with its number of rows."""
    import numpy as np

    weights = np.random.default_rng(1).standard_normal((LAYERS, WIDTH, WIDTH), dtype=np.float32)
    row = np.zeros(WIDTH, dtype=np.float32)

    def predict(count: int) -> list[float]:
        values = np.stack([row] * count)
        for each in weights:
            values = np.tanh(values @ each)
        return [float(each) + 1.0 for each in values[:, 0]]

    return predict


def nap(count: int) -> list[float]:
    """Take `FIXED_S`, whatever the number of rows."""
    sleep(FIXED_S)
    return [1.0] * count
