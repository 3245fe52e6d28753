"""Runs of two programs in turn, so that other load on the machine affects both."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.results import MIN_PAIRS, Sample
from benchmarks.servers import BenchmarkError


def in_turn(
    ours: Callable[[], Sample], baseline: Callable[[], Sample], count: int
) -> tuple[list[Sample], list[Sample]]:
    """Return `count` runs of each side; the order alternates from pair to pair."""
    if count < MIN_PAIRS:
        raise BenchmarkError(f"{count} pairs are too few for a median; give {MIN_PAIRS} or more")
    runs: tuple[list[Sample], list[Sample]] = ([], [])
    for number in range(count):
        for side in (1, 0) if number % 2 else (0, 1):
            runs[side].append((ours, baseline)[side]())
    return runs
