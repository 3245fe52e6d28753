"""What the command line prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingress.budget import ThreadBudget
from ingress.declaration import Application
from ingress.inspection import explain
from ingress.settings import Settings
from ingress.target import refusal

console = Console()


def write(output: Path, text: str) -> None:
    """Write a file. Ends the program, with one line, if that cannot be done."""
    try:
        output.write_text(text)
    except OSError as error:
        problem = f"cannot write {str(output)!r}: {error.strerror}"
        raise refusal(f"{problem}; give -o a path in a folder that is there") from None


def print_plan(application: Application, settings: Settings, budget: ThreadBudget | None) -> None:
    """Print where each deployment and each route runs."""
    explanation = explain(application, settings)
    deployments = Table("deployment", "replicas", "max ongoing", "queue", box=None, pad_edge=False)
    callables = Table("route", "calls", "written", "runs in", box=None, pad_edge=False)
    for each in explanation.deployments:
        config = each.deployment.config
        queue = config.max_queued_requests
        deployments.add_row(
            each.name,
            str(config.replica_count),
            str(config.max_ongoing_requests),
            "no limit" if queue < 0 else str(queue),
        )
    for row in explanation.rows:
        if row.is_route:
            place = row.places[settings.run_sync_in_threadpool]
            callables.add_row(row.what, row.name, row.kind, place.where)
    console.print(deployments, Text(), callables, Text(), sep="\n", end="")
    if budget is None:  # each replica is a process, with as many as Ray gives it
        return
    console.print(budget.summary + "\n", highlight=False, soft_wrap=True)
    if budget.warning:
        console.print(f"[yellow]Warning:[/yellow] {budget.warning}\n", highlight=False)


LOGGING: dict[str, Any] = {
    **uvicorn.config.LOGGING_CONFIG,
    "loggers": {
        **uvicorn.config.LOGGING_CONFIG["loggers"],
        "ingress": {"handlers": ["default"], "level": "INFO", "propagate": False},
        "uvicorn": {"handlers": ["default"], "level": "WARNING", "propagate": False},
        "uvicorn.error": {"level": "WARNING"},
    },
}
