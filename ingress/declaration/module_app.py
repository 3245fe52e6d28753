"""`MODULE:APP`, the name of an application outside of Python."""

from __future__ import annotations

import importlib
import sys
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from ingress.declaration.declaration import Application, Deployment


class NotAnApplication(Exception):
    """A name that is not an application's; the message is one line for the user."""


def load(target: str, app_dir: Path | None = None, *, is_factory: bool = False) -> Application:
    """Import the application `MODULE:APP`, from `app_dir` first if that is given.

    If `is_factory`, APP is a function without parameters that returns the application.

    Raises `NotAnApplication` if there is no such application, and any error of the module itself.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute or "/" in target or module_name.endswith(".py"):
        raise NotAnApplication(
            f"{target!r} is not of the form MODULE:APP; for the variable `hello` in main.py it is "
            "main:hello"
        )
    if app_dir is not None:
        sys.path.insert(0, str(app_dir.resolve()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        where = "here" if app_dir is None else f"in {app_dir.resolve()}"
        raise NotAnApplication(
            f"there is no module {module_name!r} {where}; check the spelling, or name its "
            "folder with --app-dir"
        ) from None
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            bound = [key for key, value in vars(module).items() if isinstance(value, Application)]
            there = f"it has {', '.join(sorted(bound))}" if bound else "it has no application"
            raise NotAnApplication(
                f"module {module_name!r} has no attribute {attribute!r}; {there}"
            ) from None
    if is_factory:
        found = _made(target, found)
    if isinstance(found, Application):
        return found
    if isinstance(found, Deployment):
        raise NotAnApplication(f"{target!r} is a deployment; bind it: app = {found.name}.bind(...)")
    hint = "decorate its class with @serve.deployment and bind it"
    if callable(found) and not isinstance(found, type):
        bound = [key for key, value in vars(module).items() if isinstance(value, Application)]
        if bound:
            hint = f"did you mean {module_name}:{bound[0]}?"
        elif isfunction(found) and not is_factory:
            hint = "if it returns an application, add --factory"
    raise NotAnApplication(
        f"{target!r} is {_article(type(found).__name__)}, not a bound application; {hint}"
    )


def _made(target: str, factory: Any) -> Any:
    if isinstance(factory, Application):
        raise NotAnApplication(f"{target!r} is an application, not a factory; leave out --factory")
    try:
        signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise NotAnApplication(
            f"--factory calls {target!r} without arguments, which is not possible ({error}); give "
            "its parameters defaults"
        ) from None
    return factory()


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name} object"
