"""docs/reliability.md lists every promise, and the tests it names exist."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.programs import run_python
from tests.reliability import figures
from tests.reliability.page import PAGE, page
from tests.reliability.promises import carriers, promises

PROMISES = promises()


def test_every_promise_has_a_test_and_every_test_a_promise() -> None:
    found = carriers()

    assert {each.id for each in PROMISES if not each.not_yet} == set(found)


def test_the_page_lists_every_promise_once() -> None:
    listed = re.findall(r"^\| (?:\*\*)?([A-Z]\d\d)", PAGE.read_text(), re.MULTILINE)

    assert Counter(listed) == Counter(each.id for each in PROMISES)


def test_every_test_that_the_page_names_exists_and_carries_the_id() -> None:
    found = carriers()
    rows = re.findall(r"^\| \*\*(\w\d\d)\*\*.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    named = {(id, test) for id, tests in rows for test in re.findall(r"`([^`]+)`", tests)}

    assert named
    assert {(id, test) for id, test in named if test not in found.get(id, [])} == set()


MEASURED = """
import pytest

@pytest.mark.reliability("A01")
@pytest.mark.parametrize("value", [0.5, 0.95])
def test_goodput(figures, value):
    figures.at_least("goodput", value, 0.9, plain=0.2)
    figures.at_most("p99 in ms", 80.0, 100.0)

def test_without_a_promise():
    pass
"""


@pytest.mark.thorough
def test_a_figure_that_misses_its_bar_fails_its_test_and_says_so_on_the_page(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_it.py").write_text(MEASURED)
    record = tmp_path / "record"
    options = ["-q", "-p", "tests.conftest", "-c", os.devnull, "--rootdir", str(tmp_path)]
    words = ["-m", "pytest", *options, "-k", "A01", str(tmp_path)]
    ran = run_python(*words, **{figures.FILE: str(record)})

    assert "1 failed, 1 passed, 1 deselected" in ran.stdout
    assert "goodput: 0.5, required >= 0.9" in ran.stdout
    made = page([json.loads(line) for line in record.read_text().splitlines()])
    (row,) = [line for line in made.splitlines() if line.startswith("| **A01**")]
    assert "1 failed, 1 passed<br>goodput: 0.5 to 0.95 (>= 0.9) **not met**<br>p99 in ms: 80" in row
    assert "| goodput: 0.2 |" in row
    assert "- A01, goodput: 0.5 to 0.95 (>= 0.9)\n- A01: `test_goodput` failed" in made


def test_without_a_record_nothing_is_written(
    figures: figures.Figures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    figures.note("goodput", 1.0)

    assert [*tmp_path.iterdir()] == []
