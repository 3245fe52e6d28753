"""`tests/conftest.py`: the leak check finds the leaks of a test, and hides no failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, source: str) -> str:
    """Return the output of pytest for a test file with our conftest as a plugin."""
    (folder / "test_it.py").write_text(f"import os, pytest, sys, threading, time\n{source}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", os.devnull]
    result = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (
            "threading.Thread(target=time.sleep, args=(9,), daemon=True, name='left').start()",
            "left",
        ),
        ("os.open('/dev/null', os.O_RDONLY)", "/dev/null"),
    ],
    ids=["thread", "descriptor"],
)
def test_a_test_that_leaves_something_is_an_error(tmp_path: Path, leak: str, told: str) -> None:
    output = run(tmp_path, f"def test_it():\n    {leak}\n")

    assert "1 passed, 1 error" in output
    assert told in output.split("left behind:")[-1]


@pytest.mark.thorough
def test_what_goes_within_the_grace_is_no_leak(tmp_path: Path) -> None:
    output = run(
        tmp_path, "def test_it():\n    threading.Thread(target=time.sleep, args=(0.2,)).start()\n"
    )

    assert "1 passed" in output
    assert "error" not in output


@pytest.mark.thorough
def test_a_failing_test_that_leaks_is_reported_as_failed_only(tmp_path: Path) -> None:
    output = run(
        tmp_path, "def test_it():\n    os.open('/dev/null', os.O_RDONLY)\n    assert 1 == 2\n"
    )

    assert "assert 1 == 2" in output
    assert "1 failed" in output
    assert "error" not in output.lower().replace("assertionerror", "")


def test_the_switch_interval_is_short_inside_and_restored_after(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        "def test_a(switch_interval):\n    assert sys.getswitchinterval() < 1e-5\n"
        "def test_b():\n    assert sys.getswitchinterval() > 1e-3\n",
    )

    assert "2 passed" in output
