"""A report as text, as JSON, as SARIF 2.1.0 and as GitHub's annotations."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum

from ingress.app.declaration.assignments import shown
from ingress.check.rules import Finding, Report

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


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
