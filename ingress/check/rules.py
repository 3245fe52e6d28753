"""The rules, with their ids, titles and fixes; the findings of a check, and its report.

    ASYNC2xx   ruff's: a call that blocks the event loop
    IG1xx      ingress's: code that is not safe in a thread, or on the loop of another replica

Each rule has a page of its own in docs/rules/.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ingress.app.declaration.names import shown

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `title` and `fix` are one line each; its page explains the reason."""

    id: str
    title: str
    fix: str

    @property
    def page(self) -> str:
        return f"docs/rules/{self.id}.md"


RULES = {
    rule.id: rule
    for rule in (
        Rule(
            "ASYNC210",
            "Blocking HTTP call on the event loop",
            "await httpx.AsyncClient().get(...), or await asyncio.to_thread(requests.get, ...)",
        ),
        Rule(
            "ASYNC212",
            "Blocking httpx client on the event loop",
            "httpx.AsyncClient, and await its methods",
        ),
        Rule(
            "ASYNC220",
            "Subprocess created by a blocking call on the event loop",
            "await asyncio.create_subprocess_exec(...)",
        ),
        Rule(
            "ASYNC221",
            "Subprocess run by a blocking call on the event loop",
            "await asyncio.create_subprocess_exec(...), or await asyncio.to_thread(...)",
        ),
        Rule(
            "ASYNC222",
            "Blocking wait for a process on the event loop",
            "await process.wait() of asyncio.create_subprocess_exec(...)",
        ),
        Rule(
            "ASYNC230",
            "File opened on the event loop",
            "open and read it in a `def`: await asyncio.to_thread(read, path)",
        ),
        Rule(
            "ASYNC240",
            "File system call on the event loop",
            "anyio.Path, or await asyncio.to_thread(path.read_text)",
        ),
        Rule(
            "ASYNC250",
            "Blocking input() on the event loop",
            "await asyncio.to_thread(input)",
        ),
        Rule(
            "ASYNC251",
            "time.sleep on the event loop",
            "await asyncio.sleep(...)",
        ),
        Rule(
            "IG101",
            "Unsynchronised read-modify-write of shared state",
            "with self._lock: around the read and the write, or keep the state in an `async def`",
        ),
        Rule(
            "IG102",
            "Check-then-act on shared state",
            "with self._lock: around both, or one atomic step such as setdefault or pop(key, None)",
        ),
        Rule(
            "IG103",
            "Event loop used in a `def`",
            "make the method `async def`, or asyncio.run_coroutine_threadsafe(..., loop)",
        ),
        Rule(
            "IG104",
            "Sync wrapper round an `async def`",
            "make the wrapper `async def` and await the wrapped function",
        ),
        Rule(
            "IG105",
            "`def` that returns an awaitable",
            "make the function `async def` and await the awaitable",
        ),
        Rule(
            "IG106",
            "Thread-affine object made in the constructor or the module",
            "make it once per thread (threading.local); for an `async def`, in `__init__` or the "
            'lifespan; or @serve.method(execution="serial")',
        ),
        Rule(
            "IG107",
            "Setting of the process made in the constructor",
            '@serve.deployment(isolation="process"), or set it once, at the top of the module',
        ),
        Rule(
            "IG111",
            "Object of one event loop that replicas share",
            'make it in __init__ or the lifespan, or declare it: @serve.deployment(loop="shared")',
        ),
        Rule(
            "IG112",
            "Global that replicas in processes do not share",
            "keep it in a deployment of its own, in a database, or on the instance",
        ),
        Rule(
            "IG113",
            "Argument that cannot be sent to a process",
            "make it in the constructor",
        ),
    )
}


UNKNOWN_FIX = "move the call to a thread: await asyncio.to_thread(...)"


class CheckError(RuntimeError):
    """The check failed; the message says how to fix that."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line that breaks a rule. `line` and `column` count from 1.

    `functions` are those that reach the line, as `Class.method`. `fix` is for this finding, "" for
    the rule's.
    """

    rule: Rule
    path: Path
    line: int
    column: int
    message: str
    functions: tuple[str, ...] = ()
    fix: str = ""

    @property
    def advice(self) -> str:
        return self.fix or self.rule.fix

    @property
    def key(self) -> tuple[str, int, int, str]:
        return (str(self.path), self.line, self.column, self.rule.id)


@dataclass(slots=True)
class Report:
    """The result of a check.

    `notes` list the checked functions and files. `failure` is the reason why the report is
    incomplete.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    def add(self, findings: list[Finding]) -> None:
        """Add the new findings, in the order of files and lines."""
        known = {finding.key for finding in self.findings}
        for finding in findings:
            if finding.key not in known:
                known.add(finding.key)
                self.findings.append(finding)
        self.findings.sort(key=lambda finding: finding.key)


def rule_of(rule_id: str, title: str) -> Rule:
    """Return the rule, or one made from the title for an unknown rule of a newer ruff."""
    return RULES.get(rule_id) or Rule(rule_id, title, UNKNOWN_FIX)


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def rendered(report: Report, format: Format) -> str:
    return _FORMATS[format](report)


def _text(report: Report) -> str:
    lines = []
    for each in report.findings:
        lines += [
            f"{shown(each.path)}:{each.line}:{each.column}: {each.rule.id} {each.message}",
            f"    fix: {each.advice}",
            f"    {each.rule.page}",
        ]
    count = len(report.findings)
    found = f"{count or 'No'} finding{'' if count == 1 else 's'}"
    return "\n".join([*lines, *report.notes, f"{found}."])


def _json(report: Report) -> str:
    findings = [
        {
            "rule": each.rule.id,
            "title": each.rule.title,
            "path": shown(each.path),
            "line": each.line,
            "column": each.column,
            "message": each.message,
            "functions": list(each.functions),
            "fix": each.advice,
            "page": each.rule.page,
        }
        for each in report.findings
    ]
    return json.dumps({"findings": findings, "notes": report.notes}, indent=2)


def _sarif(report: Report) -> str:
    rules = {each.rule.id: each.rule for each in report.findings}
    driver: dict[str, object] = {
        "name": "ingress check",
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": rule.title},
                "help": {"text": f"{rule.fix} ({rule.page})"},
            }
            for rule in rules.values()
        ],
    }
    results = [
        {
            "ruleId": each.rule.id,
            "level": _level(each),
            "message": {"text": _message(each)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(each)},
                        "region": {"startLine": each.line, "startColumn": each.column},
                    }
                }
            ],
        }
        for each in report.findings
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _github(report: Report) -> str:
    """Return workflow commands. Source: GitHub's "Workflow commands", `error` and `warning`."""
    return "\n".join(
        f"::{_level(each)} file={_property(shown(each.path))},line={each.line},col={each.column},"
        f"title={_property(each.rule.id + ' ' + each.rule.title)}::{_data(_message(each))}"
        for each in report.findings
    )


def _level(finding: Finding) -> str:
    """Return "error" for a blocking call, "warning" for the rest."""
    return "error" if finding.rule.id.startswith("ASYNC") else "warning"


def _message(finding: Finding) -> str:
    return f"{finding.message}. Fix: {finding.advice}"


def _uri(finding: Finding) -> str:
    path = shown(finding.path)
    return finding.path.as_uri() if path.startswith("/") else path.replace("\\", "/")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_FORMATS: dict[Format, Callable[[Report], str]] = {
    Format.TEXT: _text,
    Format.JSON: _json,
    Format.SARIF: _sarif,
    Format.GITHUB: _github,
}
