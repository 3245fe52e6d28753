"""What a check found, and the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ingress.check.rules import RULES, Rule

UNKNOWN_FIX = "move the call to a thread: await asyncio.to_thread(...)"


class CheckError(RuntimeError):
    """It could not be checked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line that breaks a rule. `line` and `column` count from 1.

    `functions` are those that get there, as `Class.method`. `place` is the state it is about, such
    as `self.cache`. `fix` is for this one, "" for the rule's. `evidence` is what a run saw.
    """

    rule: Rule
    path: Path
    line: int
    column: int
    message: str
    functions: tuple[str, ...] = ()
    place: str = ""
    fix: str = ""
    end_line: int = 0
    evidence: str = ""

    @property
    def advice(self) -> str:
        return self.fix or self.rule.fix

    @property
    def key(self) -> tuple[str, int, int, str]:
        return (str(self.path), self.line, self.column, self.rule.id)

    def also(self, functions: tuple[str, ...]) -> Finding:
        return replace(self, functions=tuple(dict.fromkeys([*self.functions, *functions])))

    def confirmed(self, evidence: str) -> Finding:
        return replace(self, evidence=evidence)


@dataclass(slots=True)
class Report:
    """`notes` say what was looked at, and what a run dropped; `failure` why it is not all."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    def add(self, findings: list[Finding]) -> None:
        """Add what is not there yet, in the order of files and lines."""
        known = {finding.key for finding in self.findings}
        for finding in findings:
            if finding.key not in known:
                known.add(finding.key)
                self.findings.append(finding)
        self.findings.sort(key=lambda finding: finding.key)


def shown(path: Path) -> str:
    """Return a path as CI systems look for it: below the current folder if it is there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def rule_of(rule_id: str, title: str) -> Rule:
    """Return the rule, made up from its title if a newer ruff has one we do not know."""
    return RULES.get(rule_id) or Rule(rule_id, title, UNKNOWN_FIX)
