"""`ingress jobs`: the jobs of a server that runs on this machine, and what to do with them."""

from __future__ import annotations

import json
from time import time
from typing import Annotated, Any

import typer
from rich.table import Table

from ingress.cli.control_commands import Name, Pid, ask_server, chosen
from ingress.cli.target import AsJSON, refusal
from ingress.cli.terminal import console, print_json, tamed
from ingress.core.base.types import JobState as State

jobs = typer.Typer(
    name="jobs",
    help="List, show, cancel, retry and purge the jobs of task consumers that run here.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


Id = Annotated[str, typer.Argument(help="The id of a job.", show_default=False)]
Queue = Annotated[
    str | None, typer.Option("--queue", "-q", help="Only this queue.", show_default=False)
]
OfState = Annotated[
    State | None, typer.Option("--state", help="Only jobs in this state.", show_default=False)
]


@jobs.command("list")
def list_(
    queue: Queue = None,
    state: OfState = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of a queue.")] = 50,
    name: Name = None,
    pid: Pid = None,
    as_json: AsJSON = False,
) -> None:
    """Print the jobs of the queues, the newest first.

    [dim]ingress jobs list --state dead[/dim]
    """
    found = _asked(name, pid, "list", queue=queue, state=state, limit=limit)["jobs"]
    if as_json:
        print_json([_told(each) for each in found])
        return
    table = Table(box=None, pad_edge=False)
    for head in ("id", "queue", "task", "state", "age", "tries", "error"):
        table.add_column(head, overflow="fold" if head == "id" else "ellipsis")
    for each in found:
        age, error = f"{max(0.0, time() - each['created']):.0f} s", each["error"] or ""
        table.add_row(
            *(each[key] for key in ("id", "queue", "name", "state")), age, f"{each['tries']}", error
        )
    console.print(table if found else "no job")


@jobs.command()
def show(id: Id, name: Name = None, pid: Pid = None) -> None:
    """Print one job as JSON: its arguments, progress, result, last error."""
    found = _asked(name, pid, "list", id=id)["jobs"]
    if not found:
        raise refusal(f"there is no job {id!r}")
    print_json(_told(found[0]))


@jobs.command()
def cancel(id: Id, name: Name = None, pid: Pid = None) -> None:
    """Take a job out of its queue, or cancel its call if it runs."""
    if not _asked(name, pid, "cancel", id=id)["number"]:
        raise refusal(f"{id!r} is no job that waits or runs")
    typer.echo(f"cancelled {id}")


@jobs.command()
def retry(
    id: Annotated[str | None, typer.Argument(help="The id of a job.", show_default=False)] = None,
    queue: Queue = None,
    state: OfState = None,
    name: Name = None,
    pid: Pid = None,
) -> None:
    """Run jobs again that were given up or cancelled: one, or all in a state.

    [dim]ingress jobs retry --state dead --queue documents[/dim]
    """
    if (id is None) == (state is None) or state in (State.WAITING, State.RUNNING, State.DONE):
        raise refusal("give either the id of a job, or --state dead, unreadable or cancelled")
    number = _asked(name, pid, "retry", queue=queue, id=id, state=state)["number"]
    if id is not None and not number:
        raise refusal(f"{id!r} is no job that was given up or cancelled")
    typer.echo(f"jobs that run again: {number}")


@jobs.command()
def purge(
    queue: Annotated[str, typer.Option("--queue", "-q", help="The queue.", show_default=False)],
    state: Annotated[State, typer.Option(help="Jobs in this state.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    name: Name = None,
    pid: Pid = None,
) -> None:
    """Delete the jobs of a queue that are in a state, for good. Those that run stay."""
    if not yes:
        typer.confirm(f"Delete all {state} jobs of the queue {queue!r}?", abort=True)
    number = _asked(name, pid, "purge", queue=queue, state=state)["number"]
    typer.echo(f"jobs deleted: {number}")


def _asked(name: str | None, pid: int | None, action: str, **arguments: Any) -> Any:
    return tamed(ask_server(chosen(name, pid), "jobs", action=action, **arguments))


def _told(job: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what is JSON in it as values."""
    values = {key: job[key] and json.loads(job[key]) for key in ("payload", "result", "progress")}
    args, kwargs = values.pop("payload")
    hidden = ("seq", "claim", "trace", "payload")
    shown = {key: value for key, value in job.items() if key not in hidden}
    return {**shown, "args": args, "kwargs": kwargs, **values}
