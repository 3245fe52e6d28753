"""Blocking calls in code that runs on an event loop: ruff's ASYNC2 rules, applied to that code.

    an `async def`                       unchanged
    a `def` that runs on the loop        as if it were `async def`
    a `def` that one of these calls      the same, and the message names the caller
    any other `def`                      not checked: it runs in a thread, or in an unknown place

ruff gets copies of the files with `async ` before those `def`s. Line numbers stay the same.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ingress.app.declaration.names import shown
from ingress.check.rules import CheckError, Finding, rule_of
from ingress.check.sources import CallSite, Function, SourceFile, Sources, calls_of, own_nodes
from ingress.check.subjects import Subject
from ingress.core.base.settings import SYNC_IN_THREADPOOL
from ingress.core.execution.execution import ExecutionMode, Role

_PREFIX = "async "


@dataclass(slots=True)
class OnLoop:
    """The reason why a function is checked: a subject, its callers, or neither for `async def`."""

    function: Function
    subject: Subject | None = None
    calls: tuple[CallSite, ...] = ()

    def __str__(self) -> str:
        name = self.function.name
        if self.calls:
            first, *others = self.calls
            where = f"{first.caller.name} ({shown(first.caller.file.path)}:{first.node.lineno})"
            more = f" and {len(others)} more" if others else ""
            return f"{name}, called on the event loop by {where}{more}"
        if self.subject is not None and not self.function.is_async:
            return f"{name}, a `def` that runs on the event loop ({self.subject.reason})"
        return f"`async def` {name}"


def on_loop(
    sources: Sources, subjects: list[Subject], *, constructors: bool
) -> dict[Function, OnLoop]:
    """Return the functions that run on an event loop, with one level of calls into `def`s.

    `constructors` says whether constructors count. On a loop of its own, a starting replica has no
    requests that its constructor could delay.
    """
    lifecycle = {each.function for each in subjects if each.role is Role.LIFECYCLE}
    found = {function: OnLoop(function) for function in sources.functions() if function.is_async}
    found |= {
        each.function: OnLoop(each.function, each)
        for each in subjects
        if each.function.is_async or each.mode is ExecutionMode.EVENT_LOOP
    }
    if not constructors:
        for function in lifecycle:
            found.pop(function, None)
    returning = {each.function for each in subjects if each.role is Role.METHOD}
    for caller in list(found):
        for call in calls_of(caller, sources, returned=caller in returning):
            known = found.setdefault(call.callee, OnLoop(call.callee))
            if known.subject is None:
                known.calls += (call,)
    return found


def blocking_calls(
    sources: Sources, subjects: list[Subject], *, constructors: bool
) -> tuple[list[Finding], int]:
    """Return the blocking calls, and the number of functions checked.

    Raises `CheckError` without ruff.
    """
    functions = on_loop(sources, subjects, constructors=constructors)
    copies: dict[SourceFile, str] = {
        file: _rewritten(file, [each for each in functions if each.file is file])
        for file in {function.file for function in functions}
    }
    found = (_finding(file, diagnostic, functions) for file, diagnostic in _ruff(copies))
    return [each for each in found if each is not None], len(functions)


class Diagnostic(TypedDict):
    """One diagnostic of ruff's JSON output; it has more keys. Places are a row and a column."""

    code: str
    filename: str
    message: str
    location: dict[str, int]
    end_location: dict[str, int]


def _finding(
    file: SourceFile, diagnostic: Diagnostic, functions: dict[Function, OnLoop]
) -> Finding | None:
    line, column = diagnostic["location"]["row"], diagnostic["location"]["column"]
    function = file.function_at(line)
    reason = None if function is None else functions.get(function)
    if function is None or reason is None:
        return None  # an `async def` that is not checked
    if not function.is_async and line == function.node.lineno:
        column -= len(_PREFIX)
    if _is_left_to_others(function, line, column):
        return None
    rule_id = diagnostic["code"]
    calls = [
        call for call in reason.calls if not call.caller.file.allows(rule_id, call.node.lineno)
    ]
    if reason.calls and not calls:
        return None
    what = _text(file, diagnostic, function, line, column)
    return Finding(
        rule_of(rule_id, diagnostic["message"]),
        file.path,
        line,
        column,
        f"{what} blocks the event loop, in {reason}",
        tuple(dict.fromkeys(call.caller.name for call in calls)) or (function.name,),
        fix=_fix(rule_of(rule_id, "").fix, reason),
    )


def _fix(fix: str, reason: OnLoop) -> str:
    if (subject := reason.subject) is None or subject.function.is_async:
        return fix
    in_thread = f"{SYNC_IN_THREADPOOL}=1 (see --migrate), or " if subject.moves else ""
    return f"{in_thread}`async def` and {fix}"


def _text(
    file: SourceFile, diagnostic: Diagnostic, function: Function, line: int, column: int
) -> str:
    """Return the called name, as the source spells it."""
    end = diagnostic["end_location"]
    if end["row"] != line:
        return diagnostic["message"].rstrip(".")
    shift = len(_PREFIX) if not function.is_async and line == function.node.lineno else 0
    text = file.lines[line - 1][column - 1 : end["column"] - 1 - shift]
    return f"`{text.partition('(')[0]}`"


def _is_left_to_others(function: Function, line: int, column: int) -> bool:
    """Return whether the call is in a generator expression that is not iterated here.

    `StreamingResponse(f(x) for x in y)` iterates it in a thread.
    """
    position = (line, column - 1)
    for node in ast.walk(function.node):
        if isinstance(node, ast.GeneratorExp) and _has(node, position):
            return not any(
                isinstance(each, ast.Call) and (each.lineno, each.col_offset) == position
                for each in own_nodes(function.node)
            )
    return False


def _has(node: ast.expr, position: tuple[int, int]) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= position < end


def _rewritten(file: SourceFile, functions: list[Function]) -> str:
    """Return the text with the `def`s among the functions made `async def`."""
    lines = list(file.lines)
    places = [(each.node.lineno, each.node.col_offset) for each in functions if not each.is_async]
    for line, offset in sorted(places, reverse=True):
        text = lines[line - 1].encode()
        lines[line - 1] = (text[:offset] + _PREFIX.encode() + text[offset:]).decode()
    return "\n".join(lines)


def _ruff(copies: dict[SourceFile, str]) -> list[tuple[SourceFile, Diagnostic]]:
    """Return ruff's diagnostics of the copies, each with its original file."""
    if importlib.util.find_spec("ruff") is None:
        raise CheckError("ingress check needs ruff; install it: python -m pip install ruff")
    with tempfile.TemporaryDirectory(prefix="ingress-check-") as folder:
        originals = {}
        for number, (file, text) in enumerate(copies.items()):
            copy = Path(folder, f"{number}.py")
            copy.write_text(text, encoding="utf-8")
            originals[str(copy.resolve())] = file
        # Without the project's configuration, because blocking is not a matter of style. `noqa`
        # comments still apply.
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--exit-zero"]
        version = f"--target-version=py3{sys.version_info.minor}"
        options = ["--quiet", "--output-format=json", "--select=ASYNC2", version]
        done = subprocess.run(
            [*command, *options, folder],
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if done.returncode != 0:
        raise CheckError(f"ruff failed: {done.stderr.strip()}")
    # A copy that ruff cannot parse has a diagnostic, too, without an ASYNC2 code.
    return [
        (originals[str(Path(each["filename"]).resolve())], each)
        for each in json.loads(done.stdout or "[]")
        if (each["code"] or "").startswith("ASYNC2")
    ]
