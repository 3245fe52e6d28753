"""Requests that an OpenAPI schema allows, and requests that it forbids, on a running server.

No answer is a 5xx or unknown to the schema, and no request hangs. All checks run but one: the
`Allow` of a 405 names the methods of the first route only, as it does in Starlette.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import INGRESS, ROOT, ServerProcess, environment, process
from tests.reliability.figures import Figures
from tests.servers import ROUNDS

SCHEMATHESIS = [sys.executable, "-m", "schemathesis.cli", "run"]
HANGS_S = 5.0


@pytest.fixture(params=["1", "0"] if ROUNDS else ["1"], ids=lambda value: f"separate{value}")
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    command = [*INGRESS, "run", "tests.surface_app:surface", "--port", "0"]
    with process(command, tmp_path, environment(tmp_path, separate=request.param)) as running:
        running.wait_for("is ready")
        yield running
        assert running.process.poll() is None
        assert "Traceback" not in running.output


def tried(server: ServerProcess, folder: Path, *options: str) -> Any:
    """Return the report of schemathesis; fail if it found an error."""
    report = folder / "report.json"
    options = ("--exclude-checks", "allow_header_conformance", *options)
    options += ("--report", "json", "--report-json-path", str(report), "--no-color")
    options += ("--request-timeout", str(HANGS_S), "--generation-database", "none")
    ran = subprocess.run(
        [*SCHEMATHESIS, f"{server.url}/openapi.json", *options],
        cwd=folder,
        env=environment(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(report.read_text())["test_cases"]


@pytest.mark.thorough
@pytest.mark.reliability("C01")
def test_what_the_schema_says_is_what_is_answered(
    figures: Figures, server: ServerProcess, tmp_path: Path
) -> None:
    cases = tried(server, tmp_path, "--seed", "1", "--phases", "fuzzing", "--max-examples", "15")

    figures.at_least("cases in the default run", cases["generated"], 50)


@pytest.mark.slow
@pytest.mark.reliability("C01")
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_thousands_of_cases_from_the_schema_find_nothing(
    figures: Figures, server: ServerProcess, tmp_path: Path, seed: str
) -> None:
    cases = tried(server, tmp_path, "--seed", seed, "--max-examples", "400")

    figures.at_least(f"cases of seed {seed}", cases["generated"], 1_700)  # 5,000 in total
    figures.at_most("5xx, violations of the schema, hangs", cases["with_failures"], 0)
