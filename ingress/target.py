"""What `MODULE:APP` names; and one clear line for whatever is wrong at the command line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ingress.declaration import Application, Deployment

Target = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="The bound application, such as main:hello.")
]
AppDir = Annotated[
    Path, typer.Option(help="Where MODULE is looked for.", file_okay=False, exists=True)
]


def load(target: str, app_dir: Path) -> Application:
    """Import what `MODULE:APP` names. Ends the program, with one line, if it is no application."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute or "/" in target or module_name.endswith(".py"):
        raise refusal(
            f"{target!r} is not of the form MODULE:APP; for the variable `hello` in main.py it is "
            "main:hello"
        )
    sys.path.insert(0, str(app_dir.resolve()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise refusal(
            f"there is no module {module_name!r} in {app_dir.resolve()}; check the spelling, or "
            "say where it is with --app-dir"
        ) from None
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            bound = [key for key, value in vars(module).items() if isinstance(value, Application)]
            there = f"it has {', '.join(sorted(bound))}" if bound else "it has no application"
            raise refusal(
                f"module {module_name!r} has no attribute {attribute!r}; {there}"
            ) from None
    if isinstance(found, Application):
        return found
    if isinstance(found, Deployment):
        raise refusal(f"{target!r} is a deployment; bind it: app = {found.name}.bind(...)")
    hint = "decorate its class with @serve.deployment and bind it"
    if callable(found) and not isinstance(found, type):
        bound = [key for key, value in vars(module).items() if isinstance(value, Application)]
        if bound:
            hint = f"did you mean {module_name}:{bound[0]}?"
    raise refusal(
        f"{target!r} is {_article(type(found).__name__)}, not a bound application; {hint}"
    )


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name} object"


def refusal(message: str) -> typer.Exit:
    """Print what is wrong, in one line, and return what ends the program."""
    Console(stderr=True).print(
        f"[red]Error:[/red] {escape(message)}", highlight=False, soft_wrap=True
    )
    return typer.Exit(1)
