"""What several threads write has all its attributes from the start: docs/concurrency.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forced_race import FIELDS
from tests.servers import PATIENCE_S, ROOT


@pytest.mark.parametrize("kind", FIELDS)
def test_two_threads_that_write_one_request_do_not_end_the_process(kind: str) -> None:
    """On CPython 3.11 they did: with a segmentation fault, or a lost attribute."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.forced_race", kind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout
    assert "survived" in ran.stdout
