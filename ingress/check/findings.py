"""A finding of a check, and the report of all findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ingress.check.rules import RULES, Rule

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
