"""The scenarios of `tests/engines` with each deployment in child processes: the same as in threads.

`make test` runs a tenth of them. What differs is in docs/deviations.md, and as on Ray, where
replicas are processes too.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.suite import Scenario, scenarios
from tests.engines.verdicts import ROOT, Results

AS_ON_RAY = {
    "what_a_method_does_to_its_argument_the_caller_does_not_see",
    "a_result_that_cannot_be_copied_is_an_error",
    "a_response_inside_a_list_is_refused",
}
TENTH = {"models", "pair", "paths", "places"}  # applications whose scenarios are various
SCENARIOS = [each for each in scenarios() if "local" in each.columns and each.module != "examples"]
RECORD = Results.read().observations


def observed(names: list[str], flag: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engines.column", "process", flag, str(folder)]
    ran = subprocess.run(
        [*command, "--only", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads((folder / f"process-{flag}.json").read_text())
    return found


def expected(name: str, flag: str) -> Any:
    return RECORD[f"{'ray' if name in AS_ON_RAY else 'local'}-{flag}"][name]


def names_of(chosen: list[Scenario], flag: str) -> list[str]:
    return [each.name for each in chosen if flag in each.flags]


@pytest.mark.reliability("P07")
def test_scenarios_in_processes_are_as_in_threads(tmp_path: Path) -> None:
    chosen = [each for each in SCENARIOS if each.app and each.app.__name__ in TENTH]
    assert len(chosen) * 10 >= len(SCENARIOS)

    found = observed(names_of(chosen, "1"), "1", tmp_path)

    assert found == {name: expected(name, "1") for name in names_of(chosen, "1")}


@pytest.mark.reliability("P07")
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle")
@pytest.mark.parametrize("flag", ["0", "1"])
def test_all_scenarios_in_processes_are_as_in_threads(flag: str, tmp_path: Path) -> None:
    names = names_of(SCENARIOS, flag)

    found = observed(names, flag, tmp_path)

    assert found == {name: expected(name, flag) for name in names}


def test_those_that_differ_are_scenarios() -> None:
    assert {each.name for each in SCENARIOS} >= AS_ON_RAY
