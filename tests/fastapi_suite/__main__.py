"""Run FastAPI's tests plain and through deployments, and print the counts and every difference.

    python -m tests.fastapi_suite                    all of them: 6 minutes
    python -m tests.fastapi_suite tests/test_sse.py  some of them

Exits with 1 if, of all tests that pass plain, less than `GOAL` pass through a deployment, or if an
artefact's check fails. Tests on trio do not count: an application needs asyncio. Nor do artefacts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fastapi_suite.artefacts import BORROWED, Artefact, artefacts
from tests.fastapi_suite.sdist import source

GOAL = 0.995
WORKERS = 2

Outcomes = dict[str, dict[str, Any]]


def run(served_by: str, tests: Sequence[str]) -> Outcomes:
    """Run tests, and return the outcome of each by its id."""
    folder = source()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = Path(temporary, "outcomes.json")
        options = [f"--served-by={served_by}", f"--outcomes={outcomes}", "-n", str(WORKERS)]
        ignored = ["--ignore=tests/benchmarks", "--ignore=tests/memory_benchmarks"]
        quiet = ["-q", "--tb=no", "-r", "N", "-p", "no:cacheprovider", "-p", "no:sugar"]
        command = [sys.executable, "-m", "pytest", "-p", "through_ingress"]
        subprocess.run(
            [*command, *options, *ignored, *quiet, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.DEVNULL,
            check=False,  # failures are in the outcomes
        )
        found: Outcomes = json.loads(outcomes.read_text())
    return found


def passed(outcomes: Outcomes) -> set[str]:
    return {test for test, each in outcomes.items() if each["outcome"] == "passed"}


def checked(known: dict[str, Artefact]) -> list[str]:
    """Return the known tests that fail on the event loop of their test, where they should pass."""
    tests = [test for test, each in known.items() if each.check == BORROWED]
    return sorted(set(tests) - passed(run("borrowed", tests))) if tests else []


def main(tests: Sequence[str]) -> int:
    plain = run("fastapi", tests or ["tests"])
    through = run("ingress", tests or ["tests"])
    known = {test: each for test, each in artefacts().items() if test in plain}
    listed = {test for test, each in known.items() if not each.counts}
    on_trio = {test for test, each in plain.items() if each.get("trio")}
    expected = passed(plain) - on_trio
    different = sorted(expected - passed(through))
    print(f"plain FastAPI        {len(expected):5} asyncio tests pass")
    print(f"through deployments  {len(expected) - len(different):5} of them pass")
    for title, names in (
        ("artefacts", [each for each in different if each in listed]),
        ("artefacts that pass", sorted(listed - set(different))),
        ("differences", [each for each in different if each not in listed]),
    ):
        print(f"\n{title}: {len(names)}")
        for each in names:
            why = through.get(each, {}).get("why", "did not run")
            print(f"  {each}\n      {known[each].reason if each in known else why}")
    counted = expected - listed
    share = len(counted & passed(through)) / max(len(counted), 1)
    failed = checked(known)
    print(f"\nwithout artefacts: {share:.2%} of {len(counted)}, the goal is {GOAL:.1%}")
    print(f"of these, fail on the event loop of their test too: {failed or 'none'}")
    return int((share < GOAL and not tests) or bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
