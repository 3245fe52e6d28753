"""`MODULE:APP` at the command line, and its errors in one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ingress.declaration import module_app
from ingress.declaration.declaration import Application
from ingress.declaration.module_app import NotAnApplication

Target = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="The bound application, such as main:hello.")
]
AppDir = Annotated[
    Path, typer.Option(help="Where MODULE is looked for.", file_okay=False, exists=True)
]


def load(target: str, app_dir: Path, *, is_factory: bool = False) -> Application:
    """Import the application `MODULE:APP`. Ends the program with one line if there is none."""
    try:
        return module_app.load(target, app_dir, is_factory=is_factory)
    except NotAnApplication as error:
        raise refusal(str(error)) from None


def refusal(message: str) -> typer.Exit:
    """Print an error in one line, and return the exception that ends the program."""
    Console(stderr=True).print(
        f"[red]Error:[/red] {escape(message)}", highlight=False, soft_wrap=True
    )
    return typer.Exit(1)
