"""The commands that write code: `ingress new`, a small project, and `ingress stubs`, for Pyright.

The project passes its tests, ruff and mypy as it is written.

Pyright cannot look up `handle.shout` in the class of the handle. The module that `ingress stubs`
writes maps each class and name to the method, and Pyright takes the types from the method itself.
So it is written again only when a deployment or a method gets another name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated
from urllib.parse import unquote

import typer

from ingress import __version__
from ingress.app.declaration.build import build
from ingress.cli.target import AppDir, load_each, refusal, refusing
from ingress.cli.terminal import OutputOption, write
from ingress.exceptions import RayServeException

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


HEAD = """\
# Written by `ingress stubs`: the methods of handles, for Pyright.
# pyright: basic, reportOverlappingOverload=false
# mypy: ignore-errors
# ruff: noqa
# fmt: off
from collections.abc import Callable
from typing import Any, Literal, Never, ParamSpec, TypeVar, overload

from ingress.handle import DeploymentHandle, StreamingHandle
from ingress.app.declaration.pyright import UnknownMethod, instance

{imports}

__all__ = ["Methods"]
P = ParamSpec("P")
R = TypeVar("R")

class Methods:
{overloads}
"""
OVERLOAD = """\
    @overload
    def __getattr__(self: {handle}[{of}], name: {name}) -> {result}: ..."""


def stubs_command(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="MODULE:APP, such as main:hello, or a file."),
    ],
    output: OutputOption = None,
    app_dir: AppDir = Path("."),
) -> None:
    """Write the types of the methods of handles, for Pyright and Pylance.

    [dim]ingress stubs main:app -o ingress_methods.pyi[/dim]

    Pyright finds the file by this name, in the folder of the project or in `typings`.
    Write it again when a deployment or a method gets another name. The modules are
    imported; nothing in them is created, called or started. mypy has a plugin instead.
    """
    classes = {}
    for each in (each for target in targets for each in load_each(target, app_dir)):
        with refusing(TypeError, ValueError, RayServeException):
            built = build(each.application, each.name, acts_on_all=True)
        for deployment in built.deployments:
            cls = deployment.deployment.func_or_class
            named = _named(cls)
            if isinstance(cls, type) and getattr(named, "func_or_class", named) is cls:
                classes[f"{cls.__module__}.{cls.__name__}"] = cls
    imports = sorted({f"import {cls.__module__}" for cls in classes.values()})
    overloads = "\n".join(_overloads(classes))
    write(output, HEAD.format(imports="\n".join(imports), overloads=overloads))


def _named(func_or_class: object) -> object:
    """Return what has the name of the class in its module: the class, or a deployment of it."""
    module, name = (getattr(func_or_class, each) for each in ("__module__", "__name__"))
    return getattr(sys.modules.get(module), name, None)


def _overloads(classes: dict[str, type]) -> Iterator[str]:
    """Yield an overload for each method; Pyright takes the first one that fits."""
    # Subclasses before their bases. A decorated class fits every class that is not: it comes first.
    order = sorted(classes, key=lambda path: -len(classes[path].__mro__))
    order.sort(key=lambda path: _named(classes[path]) is classes[path])
    for handle in ("StreamingHandle", "DeploymentHandle"):  # the first is a kind of the second
        # Only `Any` fits `Never`: a handle without a class.
        yield OVERLOAD.format(handle=handle, of="Never", name="str", result=f"{handle}[Any]")
        for path in order:
            for name in dir(classes[path]):
                if not name.startswith("_") and callable(getattr(classes[path], name, None)):
                    yield OVERLOAD.format(
                        handle=handle,
                        of=path,
                        name=f'Literal["{name}"], _: Callable[P, R] = instance({path}).{name}',
                        result=f"{handle}[Callable[P, R]]",
                    )
            yield OVERLOAD.format(handle=handle, of=path, name="str", result="UnknownMethod")
        yield OVERLOAD.format(handle=handle, of="Any", name="str", result=f"{handle}[Any]")
