"""Compares observations column by column: the same, different on purpose, or a failure.

docs/compatibility.json has the observations of the last whole run; `page` makes
docs/compatibility.md of them. Reading them does not need Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.engines.suite import Scenario, scenarios

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "compatibility.json"
Observations = Mapping[str, Mapping[str, Any]]
"""The observation of each scenario, by column and flag, such as "local-0"."""


class Verdict(StrEnum):
    SAME = "same"
    ON_PURPOSE = "on purpose"
    NOT_SUPPORTED = "not supported"
    DIFFERENT = "DIFFERENT"
    VANISHED = "VANISHED"
    FAILED = "FAILED"
    MISSING = "MISSING"


FAILURES = (Verdict.DIFFERENT, Verdict.VANISHED, Verdict.FAILED, Verdict.MISSING)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario in one column, at one value of the flag, against its oracle."""

    scenario: Scenario
    column: str
    flag: str
    verdict: Verdict
    expected: Any = None
    observed: Any = None

    def __str__(self) -> str:
        where = f"{self.scenario.name} [{self.column}, flag {self.flag}]: {self.verdict}"
        return (
            f"{where}\n    {self.scenario.oracle}: {_shown(self.expected)}\n"
            f"    {self.column}: {_shown(self.observed)}"
        )


def compare(scenarios: list[Scenario], found: Observations) -> Iterator[Comparison]:
    """Compare each column with the oracle of its scenario; the oracle itself must not fail."""
    for each in scenarios:
        for flag in each.flags:
            expected = found.get(f"{each.oracle}-{flag}", {}).get(each.name, _MISSING)
            for column in each.columns:
                observed = found.get(f"{column}-{flag}", {}).get(each.name, _MISSING)
                verdict = _verdict(each, column, flag, expected, observed)
                yield Comparison(each, column, flag, verdict, expected, observed)


_MISSING = "not observed"


def _verdict(scenario: Scenario, column: str, flag: str, expected: Any, observed: Any) -> Verdict:
    if observed is _MISSING or expected is _MISSING:
        return Verdict.MISSING
    if isinstance(observed, dict) and "failed" in observed:
        return Verdict.FAILED
    deviation = None if column == scenario.oracle else scenario.deviation(column, flag)
    if observed == expected:
        return Verdict.VANISHED if deviation else Verdict.SAME
    if deviation is None:
        return Verdict.DIFFERENT
    return Verdict.ON_PURPOSE if deviation.is_supported else Verdict.NOT_SUPPORTED


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "failed" in value:
        return str(value["failed"]).strip().replace("\n", "\n      ")
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run: its observations, the audit of the API, and the versions it ran on."""

    ray: str
    python: str
    date: str
    took_s: int
    observations: Observations
    api: list[dict[str, str]]

    def write(self, path: Path = RESULTS) -> None:
        """Write one line for each scenario and each name, so that a diff is readable."""
        columns = ",\n".join(
            f"  {json.dumps(column)}: {{\n{_lines(observed)}\n  }}"
            for column, observed in self.observations.items()
        )
        api = ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in self.api)
        head = {name: getattr(self, name) for name in ("ray", "python", "date", "took_s")}
        fields = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
        path.write_text(
            f'{{\n{fields},\n "observations": {{\n{columns}\n }},\n "api": [\n{api}\n ]\n}}\n'
        )

    def with_observations(self, found: Observations, api: list[dict[str, str]]) -> Results:
        """Return these results with newer observations of some scenarios, in their order."""
        names = [each.name for each in scenarios()]
        merged = {
            column: {
                name: known[name]
                for name in names
                if name in (known := {**self.observations.get(column, {}), **found.get(column, {})})
            }
            for column in self.observations
        }
        return replace(self, observations=merged, api=api)

    @classmethod
    def read(cls, path: Path = RESULTS) -> Results:
        return cls(**json.loads(path.read_text()))


def _lines(observed: Mapping[str, Any]) -> str:
    return ",\n".join(
        f"   {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in observed.items()
    )
