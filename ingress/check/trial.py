"""`--run`: run the user's tests, and confirm or drop the findings of `--migrate`.

    confirmed   an update was lost, a check was out of date at its act, or a thread got an error
                because it has no event loop or is not the object's own thread
    dropped     the line ran in several threads at once, often enough, and no update was lost
    neither     no test called it in pytest's own process, or it is not about an attribute

`rehearsal` decides which calls are tried, and when.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ingress.app.declaration.assignments import shown
from ingress.check.findings import CheckError, Finding, Report
from ingress.check.plugin import WATCHED, Raised, Written

ENOUGH_WRITES = 4
_RACES = ("IG101", "IG102")
_ERRORS = {"IG103": "event loop", "IG106": "same thread"}
"""Words in the text of an error that prove a finding: asyncio's, and SQLite's."""


def tried(report: Report, command: str) -> Report:
    """Run the tests, and return the report with their decisions.

    Raises `CheckError` for a command that is not pytest's.
    """
    words = _pytest(command)
    with tempfile.TemporaryDirectory(prefix="ingress-check-") as folder:
        watched = [
            {"functions": each.functions, "attribute": each.place.removeprefix("self.")}
            for each in report.findings
            if each.rule.id in (*_RACES, *_ERRORS)
        ]
        Path(folder, WATCHED).write_text(json.dumps(watched))
        words += ["-p", "ingress.check.plugin", "--ingress-rehearsal", folder]
        # To stderr, so that the output of the tests does not get into the report.
        code = subprocess.run(words, stdout=sys.stderr, check=False).returncode
        outcomes = [json.loads(path.read_text()) for path in Path(folder).glob("outcome-*.json")]
    writes = [write for each in outcomes for write in each["writes"]]
    errors = [error for each in outcomes for error in each["errors"]]
    return _decided(report, writes, errors, code)


def _pytest(command: str) -> list[str]:
    words = shlex.split(command)
    program = Path(words[0]).name if words else ""
    # Always this Python's pytest, because this Python has the plugin.
    if program in ("pytest", "py.test"):
        return [sys.executable, "-m", "pytest", *words[1:]]
    if program.startswith("python") and words[1:3] == ["-m", "pytest"]:
        return [sys.executable, *words[1:]]
    raise CheckError(f"--run takes a command of pytest's, such as 'pytest tests'; got {command!r}")


def _decided(report: Report, writes: list[Written], errors: list[Raised], code: int) -> Report:
    decided = Report(notes=list(report.notes))
    untried = 0
    for finding in report.findings:
        is_race = finding.rule.id in _RACES
        can_be_tried = is_race and finding.place.startswith("self.")
        seen = [each for each in writes if can_be_tried and _is_write_of(finding, each)]
        count, lost = sum(each["count"] for each in seen), sum(each["lost"] for each in seen)
        threads = max((each["threads"] for each in seen), default=0)
        error = _raised(finding, errors)
        if error:
            decided.findings.append(replace(finding, evidence=error))
        elif lost:
            evidence = f"{lost} of {count} writes in {threads} threads overwrote another's"
            decided.findings.append(replace(finding, evidence=evidence))
        elif threads > 1 and count >= ENOUGH_WRITES:
            decided.notes.append(
                f"dropped: {shown(finding.path)}:{finding.line} {finding.rule.id} `{finding.place}`"
                f", {count} writes in {threads} threads, none overwrote another's"
            )
        else:
            untried += is_race
            decided.findings.append(finding)
    if untried:
        decided.notes.append(
            f"not tried: {untried}; no test calls them here, or their state is not in self"
        )
    if code != 0:
        decided.failure = f"pytest ended with {code}: not all tests passed, or none ran"
    return decided


def _is_write_of(finding: Finding, seen: Written) -> bool:
    return f"self.{seen['attribute']}" == finding.place and _is_at(finding, seen)


def _raised(finding: Finding, errors: list[Raised]) -> str:
    """Return the error that proves the finding, "" if none was raised."""
    words = _ERRORS.get(finding.rule.id)
    # An object from the constructor raises where it is used, not on the finding's line.
    here = (each for each in errors if finding.rule.id == "IG106" or _is_at(finding, each))
    return next((each["text"] for each in here if words and words in each["text"]), "")


def _is_at(finding: Finding, seen: Written | Raised) -> bool:
    is_line = finding.line <= seen["line"] <= max(finding.line, finding.end_line)
    return is_line and Path(seen["path"]).resolve() == finding.path
