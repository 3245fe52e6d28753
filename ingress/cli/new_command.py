"""`ingress new`: a small project that passes its tests, ruff and mypy as it is written."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated
from urllib.parse import unquote

import typer

from ingress import __version__
from ingress.cli.target import refusal

TEMPLATE = files("ingress.cli") / "template"
PLACES = {
    "app.py.txt": "app.py",
    "test_app.py.txt": "test_app.py",
    "serve.yaml.txt": "serve.yaml",
    "pyproject.toml.txt": "pyproject.toml",
    "Dockerfile.txt": "Dockerfile",
    "workflow.yml.txt": ".github/workflows/test.yml",
    "README.md.txt": "README.md",
    "gitignore.txt": ".gitignore",
}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the project and its folder.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Another folder, which is empty or absent."),
    ] = None,
) -> None:
    """Write a small project: a service, its tests, serve.yaml, a Dockerfile, a workflow.

    [dim]ingress new shop[/dim]

    The service has a model that batches and an endpoint that calls it. The project passes its
    tests, ruff and mypy as it is written: change it from there.
    """
    if not NAME.fullmatch(name):
        raise refusal(
            f"NAME: {name!r} is no name of a project; use letters, digits, - and _, such as "
            "my-service",
            code=2,
        )
    place = Path(name) if folder is None else folder
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise refusal(f"{place} is there already, and is not an empty folder; choose another", 2)
    for source, target in PLACES.items():
        text = (TEMPLATE / source).read_text(encoding="utf-8")
        text = text.replace("{{name}}", name).replace("{{version}}", __version__)
        path = place / target
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            why = error.strerror
            raise refusal(f"cannot write {path}: {why}; choose another --folder", 2) from None
        typer.echo(f"{path}")
    typer.echo(f"\nNext:\n  cd {quote(str(place))}")
    if where := _installed_from():
        typer.echo(
            f"  python -m pip install {where}   # fastapi-ingress, which is on no package index yet"
        )
    typer.echo(
        '  python -m pip install -e ".[test]"\n'
        "  pytest\n"
        "  ingress run app:app   # http://127.0.0.1:8000/docs"
    )


def _installed_from() -> str:
    """Return the folder or wheel that this package was installed from, "" for a package index."""
    try:
        origin = distribution("fastapi-ingress").read_text("direct_url.json")
    except PackageNotFoundError:
        return quote(str(Path(__file__).parents[2]))
    url: str = json.loads(origin)["url"] if origin else ""
    return quote(unquote(url.removeprefix("file://")))
