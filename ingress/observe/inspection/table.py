"""An explanation as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.names import shown
from ingress.core.base import gil
from ingress.core.base.settings import (
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
)
from ingress.core.execution.execution import name_of
from ingress.observe.inspection.budget import counted
from ingress.observe.inspection.explain import Explanation, Level, Place, Remark, Row, has_own_loop

READABLE = 100
"""Longest line of prose, in characters."""

_LEFT_OUT = (
    (),
    ("why",),
    ("why", "guards"),
    ("why", "guards", "compiled"),
    ("why", "guards", "compiled", "findings"),
)
"""The columns that a narrow terminal does without, in the order of the attempts."""

_COMPILED = {True: Text("yes"), False: Text("no", "yellow"), None: Text()}
_STYLE_OF = {Level.NOTE: "dim", Level.WARN: "red"}
_STYLES = {"event loop": "cyan", "threadpool": "green", "AnyIO thread": "yellow"}


def show(explanation: Explanation, console: Console, *, diff: bool = False) -> None:
    """Print a table for each deployment, then the findings, then a line of counts.

    With `diff` it prints only the rows whose place the flag decides.
    """
    rows = _chosen(explanation, diff=diff)
    for each in explanation.deployments:
        own = [row for row in rows if row.deployment == each.name]
        if own or not diff:
            console.print(_title(each, explanation), highlight=False)
            _print_table(own, explanation, console, diff=diff)
            console.print()
    for finding, where in _grouped(rows):
        console.print(_said(finding), width=min(console.width, READABLE))
        for name in dict.fromkeys(map(_named, where)):  # a teardown has its dependency's name
            console.print(Text(f"  {name}"), soft_wrap=True)
    for finding in explanation.findings:
        console.print(_said(finding), width=min(console.width, READABLE))
    if explanation.findings or any(row.findings for row in rows):
        console.print()
    console.print(explanation.budget.summary, highlight=False, soft_wrap=True)
    if told := gil.told():
        console.print(told, highlight=False, soft_wrap=True)
    console.print(_summary(explanation), highlight=False, soft_wrap=True)


def as_json(explanation: Explanation, *, diff: bool = False) -> dict[str, Any]:
    """Return the explanation as JSON values. Names and types of existing keys do not change."""
    settings = explanation.settings
    return {
        "flags": {
            SYNC_IN_THREADPOOL: int(settings.run_sync_in_threadpool),
            USER_CODE_IN_SEPARATE_THREAD: int(settings.run_user_code_in_separate_thread),
        },
        "deployments": [
            {
                "name": each.name,
                "replicas": each.deployment.config.first_count,
                "max_ongoing_requests": each.deployment.config.max_ongoing_requests,
                "place": each.deployment.config.isolation,
            }
            for each in explanation.deployments
        ],
        "native_threads": {
            "cores": explanation.budget.cores,
            "each_call": explanation.budget.threads,
            "product": explanation.budget.product,
        },
        "gil": {"is_on": gil.is_on(), "turned_on_by": gil.turned_on_by()},
        "rows": [_row_as_json(row) for row in _chosen(explanation, diff=diff)],
        "findings": [asdict(each) for each in explanation.findings],
    }


def _row_as_json(row: Row) -> dict[str, object]:
    return {
        "deployment": row.deployment,
        "what": row.what,
        "name": row.name,
        "kind": row.kind,
        "compiled": row.is_compiled,
        "guards": list(row.guards),
        "file": row.file,
        "line": row.line,
        "places": {str(flag): asdict(place) for flag, place in enumerate(row.places)},
        "moves": row.moves,
        "findings": [asdict(each) for each in row.findings],
    }


def _chosen(explanation: Explanation, *, diff: bool) -> list[Row]:
    return [row for row in explanation.rows if row.moves or not diff]


def _print_table(
    rows: list[Row], explanation: Explanation, console: Console, *, diff: bool
) -> None:
    columns = _columns(rows, explanation, diff=diff)
    unlimited = console.options.update(width=10_000)
    for left_out in _LEFT_OUT:
        table = Table(box=None, pad_edge=False)
        shown = {head: cells for head, cells in columns.items() if head not in left_out}
        for head in shown:
            table.add_column(head, overflow="fold")
        for cells in zip(*shown.values(), strict=True):
            table.add_row(*cells)
        width = console.measure(table, options=unlimited).maximum
        if width <= console.width:
            break
    console.print(table)


def _columns(rows: list[Row], explanation: Explanation, *, diff: bool) -> dict[str, list[Text]]:
    flag = int(explanation.settings.run_sync_in_threadpool)
    here = [row.places[flag] for row in rows]
    if diff:
        places = {f"at {at}": [_where(row.places[at]) for row in rows] for at in (0, 1)}
    else:
        places = {
            "runs in": list(map(_where, here)),
            f"at {1 - flag}": [
                _where(row.places[1 - flag]) if row.moves else Text("same", "dim") for row in rows
            ],
        }
    columns = {
        "what": [Text(row.what) for row in rows],
        "code": [Text(row.name, "bold") for row in rows],
        "written": [Text(row.kind) for row in rows],
        "compiled": [_COMPILED[row.is_compiled] for row in rows],
        "guards": [Text(", ".join(row.guards)) for row in rows],
        **places,
        "threads": [Text("-" if each.threads is None else str(each.threads)) for each in here],
        "why": [Text(each.reason, "dim") for each in here],
        "findings": [
            Text(" ").join(Text(each.id, _STYLE_OF[each.level]) for each in row.findings)
            for row in rows
        ],
    }
    if_any = ("compiled", "guards", "findings")
    return {head: cells for head, cells in columns.items() if head not in if_any or any(cells)}


def _where(place: Place) -> Text:
    return Text(place.where, _STYLES.get(place.where, "green"))


def _title(each: BuiltDeployment, explanation: Explanation) -> Text:
    config = each.deployment.config
    replicas = config.first_count
    is_own = has_own_loop(config, explanation.settings)
    loop = f"event loop {each.name}#N" if is_own else "the server's event loop"
    if config.isolation == "process":
        loop = f"each in a process, {loop}"
    many = f"{counted(replicas, 'replica')} x {config.max_ongoing_requests} requests at once"
    if (key := config.fairness_key) is not None:
        many += f", in turns by {key if isinstance(key, str) else name_of(key)}"
    return Text(each.name, "bold") + f"  {many}, {loop}"


def _grouped(rows: Iterable[Row]) -> Iterator[tuple[Remark, list[Row]]]:
    """Yield each finding once, the gravest first, with the rows it is about."""
    found: dict[Remark, list[Row]] = {}
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
        f"{counted(len(rows), 'row')}, {counted(warnings, 'warning')}; "
        f"{SYNC_IN_THREADPOOL}={flag}, and {moving or 'none'} would move at {1 - flag}"
    )


def _said(finding: Remark) -> Text:
    head = Text(f"{finding.level} ", _STYLE_OF[finding.level]) + Text(f"{finding.id}: ", "bold")
    return head + finding.text


def _named(row: Row) -> str:
    return f"{row.name} ({shown(row.file)}:{row.line})" if row.file else row.name
