"""Programs to check, with the expected findings as comments on their lines: `#: IG101`."""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path

import pytest

from ingress.check.checker import check_application, check_files
from ingress.check.rules import Report
from ingress.core.base.settings import Settings

_EXPECTED = re.compile(r"#: ([A-Z0-9 ]+)$")
Found = list[tuple[int, str]]


def in_class(head: str, body: str) -> str:
    """Return a program of a head that ends in a `class` line, a body, and `a = A.bind()`."""
    return head + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n\na = A.bind()\n"


def expected(program: str) -> Found:
    """Return the lines and rules of the program's comments."""
    return [
        (number, rule)
        for number, line in enumerate(program.splitlines(), 1)
        if (match := _EXPECTED.search(line))
        for rule in match[1].split()
    ]


def found(report: Report) -> Found:
    return [(each.line, each.rule.id) for each in report.findings]


def checked_as_file(
    folder: Path, program: str, settings: Settings, *, migrate: bool = False
) -> Report:
    (folder / "program.py").write_text(program)
    return check_files([folder / "program.py"], settings, migrate=migrate)


def checked_as_files(
    folder: Path, programs: dict[str, str], settings: Settings, *, migrate: bool = False
) -> dict[str, Found]:
    """Check many programs at once, and return the findings in each."""
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    report = check_files([folder], settings, migrate=migrate)
    return {
        name: [(each.line, each.rule.id) for each in report.findings if each.path.stem == name]
        for name in programs
    }


def checked_as_application(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    settings: Settings,
    *,
    migrate: bool = False,
    gil_is_on: bool = True,
) -> Report:
    """Check the program, imported under a new name because Python caches modules."""
    name = f"program_{folder.name}"
    (folder / f"{name}.py").write_text(program)
    monkeypatch.syspath_prepend(folder)
    application = importlib.import_module(name).a
    return check_application(
        application, name, folder, settings, migrate=migrate, gil_is_on=gil_is_on
    )
