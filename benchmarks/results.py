"""Results: every run, medians over all runs, and their JSON.

A `Sample` is one run: its figures by name, with the unit in the name; the first is the main figure
of the row. A pair of consecutive runs, of `ingress` and the baseline, adds three figures for each:
`baseline_<name>`, `<name>_ratio` (ingress / baseline) and `<name>_added`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.servers import ROOT, BenchmarkError

Sample = Mapping[str, float]
FOLDER = ROOT / "benchmarks" / "results"
LIBRARIES = ("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools", "anyio")
MIN_PAIRS = 5  # fewer do not show the spread


@dataclass(frozen=True, slots=True)
class Figure:
    """Median and range of one figure over all runs."""

    median: float
    least: float
    greatest: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Result:
    """One line of a table: row, setup, load and all runs.

    `setup` is empty if all settings have their defaults. Raises `BenchmarkError` for a comparison
    of fewer than `MIN_PAIRS` pairs.
    """

    row: str
    load: str
    setup: str
    runs: Sequence[Sample]
    baseline: str = ""
    baseline_runs: Sequence[Sample] = ()

    def __post_init__(self) -> None:
        if self.baseline and len(self.baseline_runs) != len(self.runs):
            raise BenchmarkError(f"{self.row}: not every run has one to be compared with")
        if self.baseline and len(self.runs) < MIN_PAIRS:
            raise BenchmarkError(
                f"{self.row}: {len(self.runs)} pairs are too few; {MIN_PAIRS} or more are needed"
            )

    @property
    def main(self) -> str:
        """The name of the main figure of the row."""
        return next(iter(self.runs[0]))

    @cached_property
    def figures(self) -> dict[str, Figure]:
        found = {}
        for name in self.runs[0]:
            ours = [run[name] for run in self.runs]
            found[name] = Figure.of(ours)
            if self.baseline:
                theirs = [run[name] for run in self.baseline_runs]
                pairs = list(zip(ours, theirs, strict=True))
                found[f"baseline_{name}"] = Figure.of(theirs)
                found[f"{name}_ratio"] = Figure.of([a / b if b else 0.0 for a, b in pairs])
                found[f"{name}_added"] = Figure.of([round(a - b, 9) for a, b in pairs])
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "load": self.load,
            "setup": self.setup,
            "baseline": self.baseline,
            "figures": {
                name: {"median": figure.median, "min": figure.least, "max": figure.greatest}
                for name, figure in self.figures.items()
            },
            "runs": list(self.runs),
            "baseline_runs": list(self.baseline_runs),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Result:
        del value["figures"]  # for readers; derived from the runs
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one command, with machine and versions."""

    date: str
    machine: str
    python: str
    libraries: dict[str, str]
    seconds_per_run: int
    results: list[Result]

    @classmethod
    def of(
        cls, results: list[Result], seconds_per_run: int, others: Mapping[str, str] | None = None
    ) -> Report:
        return cls(
            datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            machine(),
            platform.python_version(),
            {name: version(name) for name in LIBRARIES} | dict(others or {}),
            seconds_per_run,
            results,
        )

    def write(self, path: Path) -> None:
        document = {name: getattr(self, name) for name in self.__slots__}
        document["results"] = [result.as_json() for result in self.results]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        document = json.loads(path.read_text())
        document["results"] = [Result.from_json(value) for value in document["results"]]
        return cls(**document)


def machine() -> str:
    return f"{os.cpu_count()} cores"
