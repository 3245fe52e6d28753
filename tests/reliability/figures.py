"""Measurements of tests: checked against their requirements, recorded for docs/reliability.md.

With `INGRESS_RELIABILITY_FIGURES` each figure, and the outcome of each test that carries an id,
becomes a line of JSON in that file. Without it nothing is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = "INGRESS_RELIABILITY_FIGURES"
MARK = "reliability"


class Figures:
    """The figures of one test. A figure that misses its requirement fails the test at its end."""

    def __init__(self, item: pytest.Item) -> None:
        self.missed: list[str] = []
        self._item = item

    def at_least(
        self, what: str, value: float, required: float, *, plain: float | None = None, row: str = ""
    ) -> None:
        self._add(what, value, f">= {shown(required)}", value >= required, plain, row)

    def at_most(
        self, what: str, value: float, required: float, *, plain: float | None = None, row: str = ""
    ) -> None:
        self._add(what, value, f"<= {shown(required)}", value <= required, plain, row)

    def note(
        self, what: str, value: float | str, *, plain: float | str | None = None, row: str = ""
    ) -> None:
        """Record a figure that has no requirement."""
        self._add(what, value, "", True, plain, row)

    def _add(
        self,
        what: str,
        value: float | str,
        required: str,
        holds: bool,
        plain: float | str | None,
        row: str,
    ) -> None:
        line = f"{what}: {shown(value)}"
        line += f", required {required}" if required else ""
        print(line + ("" if plain is None else f"; plain FastAPI: {shown(plain)}"))
        if not holds:
            self.missed.append(line)
        figure = {"what": what, "value": value, "required": required, "holds": holds}
        write(self._item, [row] if row else ids_of(self._item), figure | {"plain": plain})


def ids_of(item: pytest.Item) -> list[str]:
    """Return the ids that a test carries."""
    return [str(id) for mark in item.iter_markers(MARK) for id in mark.args]


def write(item: pytest.Item, ids: list[str], fields: dict[str, Any]) -> None:
    """Append one line; several processes may, at once."""
    if (file := os.environ.get(FILE)) and ids:
        line = json.dumps({"test": item.nodeid.partition("[")[0], "ids": ids} | fields)
        with Path(file).open("a") as lines:
            lines.write(line + "\n")


def shown(value: float | str) -> str:
    """Return a figure with its significant digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
