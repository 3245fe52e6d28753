"""What a check found, and the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ingress.check.rules import RULES, Rule

UNKNOWN_FIX = "move the call to a thread: await asyncio.to_thread(...)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line that breaks a rule. `line` and `column` count from 1.

    `functions` are those that get there: `Class.method`, the ones a run can call. `place` is the
    attribute it is about, for what a run can see. `evidence` is what a run saw, "" without one.
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

    def __post_init__(self) -> None:
        if not self.fix:
            object.__setattr__(self, "fix", self.rule.fix)

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


def rule_of(rule_id: str, title: str) -> Rule:
    """Return the rule, made up from its title if a newer ruff has one we do not know."""
    return RULES.get(rule_id) or Rule(rule_id, title, UNKNOWN_FIX)
