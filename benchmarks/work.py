"""Work of the endpoints, for servers of every kind: it imports nothing but the standard library."""

from __future__ import annotations

from time import thread_time

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
