"""An explanation for a terminal, and as what JSON has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingress.build import BuiltDeployment
from ingress.inspection.explain import Explanation, Finding, Level, Place, Row
from ingress.settings import SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD

READABLE = 100
"""How long a line of prose may be."""

_STYLES = {"event loop": "cyan", "threadpool": "green", "AnyIO thread": "yellow"}


def show(explanation: Explanation, console: Console, *, diff: bool = False) -> None:
    """Print a table for each deployment, then what is to be said, then a line that counts.

    With `diff` only the rows whose place the flag decides.
    """
    rows = _chosen(explanation, diff=diff)
    built = {each.name: each for each in explanation.deployments}
    tables = [
        (built[name], _table(list(group), explanation, diff=diff))
        for name, group in groupby(rows, key=attrgetter("deployment"))
    ]
    if not console.is_terminal:  # a file, or a pipe to `grep`: a row is a line
        wide = console.options.update(width=10_000)
        widths = [console.measure(table, options=wide).maximum for _, table in tables]
        console = Console(width=max([console.width, *widths]), file=console.file)
    for each, table in tables:
        console.print(_title(each, explanation), highlight=False)
        console.print(table)
        console.print()
    for finding, where in _grouped(rows):
        style = "red" if finding.level is Level.WARN else "dim"
        head = Text(f"{finding.level} ", style) + Text(f"{finding.id}: ", "bold")
        console.print(head + finding.text, width=min(console.width, READABLE))
        for name in dict.fromkeys(map(_named, where)):  # a dependency and its teardown are one
            console.print(Text(f"  {name}"), soft_wrap=True)
    if any(row.findings for row in rows):
        console.print()
    console.print(_summary(explanation), highlight=False, soft_wrap=True)


def as_json(explanation: Explanation, *, diff: bool = False) -> dict[str, Any]:
    """Return the same as JSON has it. Of what is there names and types do not change."""
    settings = explanation.settings
    return {
        "flags": {
            SYNC_IN_THREADPOOL: int(settings.run_sync_in_threadpool),
            USER_CODE_IN_SEPARATE_THREAD: int(settings.run_user_code_in_separate_thread),
        },
        "deployments": [
            {
                "name": each.name,
                "replicas": each.deployment.config.replica_count,
                "max_ongoing_requests": each.deployment.config.max_ongoing_requests,
            }
            for each in explanation.deployments
        ],
        "rows": [_row_as_json(row) for row in _chosen(explanation, diff=diff)],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "deployment": row.deployment,
        "what": row.what,
        "name": row.name,
        "kind": row.kind,
        "file": row.file,
        "line": row.line,
        "places": {str(flag): _place_as_json(place) for flag, place in enumerate(row.places)},
        "moves": row.moves,
        "findings": [
            {"id": each.id, "level": each.level.value, "text": each.text} for each in row.findings
        ],
    }


def _place_as_json(place: Place) -> dict[str, Any]:
    return {name: getattr(place, name) for name in Place.__slots__}


def _chosen(explanation: Explanation, *, diff: bool) -> list[Row]:
    return [row for row in explanation.rows if row.moves or not diff]


def _table(rows: Iterable[Row], explanation: Explanation, *, diff: bool) -> Table:
    flag = int(explanation.settings.run_sync_in_threadpool)
    places = ("at 0", "at 1") if diff else ("runs in", f"at {1 - flag}")
    table = Table("what", "code", "written", *places, "threads", "why", box=None, pad_edge=False)
    for row in rows:
        now, other = row.places[flag], row.places[1 - flag]
        first, second = row.places if diff else (now, other)
        table.add_row(
            Text(row.what),
            Text(row.name, _style_of(row)),
            Text(row.kind),
            _where(first),
            _where(second) if row.moves else Text("the same", "dim"),
            Text("-" if now.threads is None else str(now.threads)),
            Text(now.reason, "dim"),
        )
    return table


def _style_of(row: Row) -> str:
    return "red" if any(each.level is Level.WARN for each in row.findings) else "bold"


def _where(place: Place) -> Text:
    return Text(place.where, _STYLES.get(place.where, ""))


def _title(each: BuiltDeployment, explanation: Explanation) -> Text:
    config = each.deployment.config
    replicas = config.replica_count
    is_own = explanation.settings.run_user_code_in_separate_thread
    loop = f"event loop {each.name}#N" if is_own else "the server's event loop"
    many = f"{_count(replicas, 'replica')} x {config.max_ongoing_requests} requests at once"
    return Text(each.name, "bold") + f"  {many}, {loop}"


def _grouped(rows: Iterable[Row]) -> Iterator[tuple[Finding, list[Row]]]:
    """Yield each finding once, the gravest first, with the rows it is about."""
    found: dict[Finding, list[Row]] = {}
    for row in rows:
        for finding in row.findings:
            found.setdefault(finding, []).append(row)
    yield from sorted(found.items(), key=lambda item: -item[0].level.gravity)


def _summary(explanation: Explanation) -> str:
    rows = explanation.rows
    warnings = explanation.count(Level.WARN)
    flag = int(explanation.settings.run_sync_in_threadpool)
    moving = sum(row.moves for row in rows)
    return (
        f"{_count(len(rows), 'row')}, {_count(warnings, 'warning')}; "
        f"{SYNC_IN_THREADPOOL}={flag}, and {moving or 'none'} would move at {1 - flag}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _named(row: Row) -> str:
    if not row.file:
        return row.name
    path, here = Path(row.file), Path.cwd()
    file = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{row.name} ({file}:{row.line})"
