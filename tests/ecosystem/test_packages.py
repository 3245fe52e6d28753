"""Each package gives the same answers on a class, with one replica and two, as on functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.as_class import APPS
from tests.ecosystem.document import REASONS, RESULTS, Result, version_of
from tests.ecosystem.serving import MARK
from tests.programs import ROOT

TIME_LIMIT_S = 60

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(version_of("slowapi") == "", reason="make test-ecosystem"),
    pytest.mark.timeout(4 * TIME_LIMIT_S),
]


def answers(name: str, replicas: int) -> Any:
    """Return the answers of one form, in a process of its own, or the error that ended it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ecosystem.serving", name, str(replicas)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return done.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in APPS.glob("*.py")))
def test_a_package_works_on_a_class_as_on_functions(name: str) -> None:
    functions, one, two = (answers(name, replicas) for replicas in (0, 1, 2))

    RESULTS.mkdir(exist_ok=True)
    requests = 0 if isinstance(functions, str) else len(functions)
    result = Result(name, requests, one=one == functions, two=two == functions)
    Path(RESULTS, f"{name}.json").write_text(result.to_json())
    assert not isinstance(functions, str), functions
    assert one == functions
    assert two == functions or name in REASONS
