"""Run a project's tests plain and through deployments, and print the counts and every difference.

    python -m tests.suites fastapi                    all of FastAPI's: 6 minutes
    python -m tests.suites fastapi tests/test_sse.py  some of them
    python -m tests.suites starlette                  all of Starlette's: 2 minutes

Exits with 1 if a test passes plain, fails through a deployment and is not listed, if a listed one
passes or is gone, or if the check of an artefact fails. See `differences` for the list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.suites.differences import BORROWED, KINDS, Difference, differences
from tests.suites.sdist import PROJECTS, Project

WORKERS = 2
TIMEOUT_S = 30

Outcomes = dict[str, dict[str, Any]]


def run(project: Project, served_by: str, tests: Sequence[str]) -> Outcomes:
    """Run tests, and return the outcome of each by its id. Raises `SystemExit` if pytest failed."""
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = Path(temporary, "outcomes.json")
        options = [f"--served-by={served_by}", f"--outcomes={outcomes}", "-n", str(WORKERS)]
        limits = [f"--timeout={TIMEOUT_S}", *(f"--ignore={each}" for each in project.ignored)]
        quiet = ["-q", "--tb=no", "-r", "N", "-p", "no:cacheprovider", "-p", "no:sugar"]
        command = [sys.executable, "-m", "pytest", "-p", "through_ingress"]
        done = subprocess.run(
            [*command, *options, *limits, *quiet, *tests],
            cwd=project.source(),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,  # failures are in the outcomes
        )
        if not outcomes.exists():
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        found: Outcomes = json.loads(outcomes.read_text())
    return found


def passed(outcomes: Outcomes) -> set[str]:
    return {test for test, each in outcomes.items() if each["outcome"] == "passed"}


def failed_checks(project: Project, listed: dict[str, Difference]) -> list[str]:
    """Return the listed tests that fail on the event loop of their test, where they should pass."""
    tests = [test for test, each in listed.items() if each.check == BORROWED]
    return sorted(set(tests) - passed(run(project, "borrowed", tests))) if tests else []


def show(title: str, reasons: Iterable[tuple[str, str]]) -> None:
    reasons = list(reasons)
    print(f"\n{title}: {len(reasons)}")
    for test, reason in reasons:
        print(f"  {test}\n      {reason}")


def main(name: str, *tests: str) -> int:
    project = PROJECTS[name]
    plain = run(project, "itself", tests or ["tests"])
    through = run(project, "ingress", tests or ["tests"])
    listed = {test: each for test, each in differences(name).items() if test in plain or not tests}
    expected = passed(plain)
    different = sorted(expected - passed(through))
    print(f"plain                {len(expected):5} asyncio tests of {project.source().name} pass")
    print(f"through deployments  {len(expected) - len(different):5} of them pass")
    for kind in KINDS:
        found = [test for test in different if test in listed and listed[test].kind == kind]
        show(f"{kind}s", ((test, listed[test].reason) for test in found))
    unlisted = [test for test in different if test not in listed]
    expected_to_fail = {test for test, each in listed.items() if not (each.races and test in plain)}
    surplus = sorted(expected_to_fail - set(different))
    wrong = failed_checks(project, {test: listed[test] for test in listed if test in plain})
    lost = {"why": "did not run"}
    show("not listed", ((test, through.get(test, lost)["why"]) for test in unlisted))
    passes = {True: "it passes", False: "it does not pass plain"}
    show("listed, but not different", ((test, passes[test in expected]) for test in surplus))
    show("fail on the event loop of the test too", ((test, listed[test].reason) for test in wrong))
    return int(bool(unlisted or surplus or wrong))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
