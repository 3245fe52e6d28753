"""The rules, with their ids, titles and fixes; the findings of a check, and its report.

    ASYNC2xx   ruff's: a call that blocks the event loop
    IG1xx      ingress's: code that is not safe in a thread, or on the loop of another replica

Each rule has a page of its own in docs/rules/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


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
            "Thread-affine object made in the constructor",
            'make it once per thread (threading.local), or @serve.method(execution="serial")',
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
