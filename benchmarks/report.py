"""What was measured, as a table for the terminal and as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.measure import Pair, Sample, median_of

WIDTH = 120  # columns of text the table takes
LIBRARIES = ("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools", "anyio")


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table: medians over its pairs, which it keeps."""

    row: str
    connections: int
    flags: str
    pairs: list[Pair]

    @property
    def plain(self) -> Sample:
        return median_of([pair.plain for pair in self.pairs])

    @property
    def ingress(self) -> Sample:
        return median_of([pair.ingress for pair in self.pairs])

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Median, least and greatest ratio of a pair."""
        ratios = [pair.ratio for pair in self.pairs]
        return median(ratios), min(ratios), max(ratios)

    @property
    def added_p50_ms(self) -> float:
        return median(pair.ingress.p50_ms - pair.plain.p50_ms for pair in self.pairs)

    def as_json(self) -> dict[str, Any]:
        middle, least, greatest = self.ratios
        return {
            "row": self.row,
            "connections": self.connections,
            "flags": self.flags,
            "ratio": {"median": middle, "min": least, "max": greatest},
            "plain": asdict(self.plain),
            "ingress": asdict(self.ingress),
            "added_p50_ms": self.added_p50_ms,
            "pairs": [asdict(pair) for pair in self.pairs],
        }


def table(results: list[Result]) -> Table:
    made = Table(title=f"ingress against plain FastAPI and Starlette, {machine()}", box=SIMPLE_HEAD)
    for column in ("row", "flags"):
        made.add_column(column, no_wrap=True)
    for column in (
        "conn.",
        "plain\nreq/s",
        "ingress\nreq/s",
        "ratio\n\\[min-max]",
        "plain ms\np50 / p99",
        "ingress ms\np50 / p99",
        "added\np50 ms",
    ):
        made.add_column(column, justify="right", no_wrap=True)
    for result in results:
        plain, ours = result.plain, result.ingress
        middle, least, greatest = result.ratios
        made.add_row(
            result.row,
            result.flags,
            str(result.connections),
            f"{plain.requests_per_s:,.0f}",
            f"{ours.requests_per_s:,.0f}",
            f"{middle:.2f} \\[{least:.2f}-{greatest:.2f}]",
            f"{plain.p50_ms:.2f} / {plain.p99_ms:.2f}",
            f"{ours.p50_ms:.2f} / {ours.p99_ms:.2f}",
            f"{result.added_p50_ms:+.3f}" if result.connections == 1 else "",
        )
    return made


def write(path: Path, results: list[Result], seconds: int) -> None:
    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "seconds_per_run": seconds,
        "results": [result.as_json() for result in results],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> str:
    return f"{os.cpu_count()} cores"
