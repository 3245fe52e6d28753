"""`MODULE:APP`, the name of an application, or of its builder, outside of Python."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from inspect import isfunction
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette

from ingress.app.asgi.layer import Layer, attributes_of, holds, layers_around
from ingress.app.asgi.spec import users_app_of
from ingress.app.declaration.declaration import Application, Deployment
from ingress.core.base.signatures import signature_of


class NotAnApplication(Exception):
    """A name that is not an application's; the message is one line for the user."""


def load(
    target: str,
    app_dir: Path | None = None,
    *,
    is_factory: bool = False,
    arguments: Mapping[str, object] | None = None,
) -> Application:
    """Import the application `MODULE:APP`, from `app_dir` first if that is given.

    If `is_factory`, APP is a function without parameters that returns the application. A function
    with one parameter is a builder, which is called with `arguments`, see `built_with`.

    Raises `NotAnApplication` if there is no such application, and any error of the module itself.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute or "/" in target or module_name.endswith(".py"):
        raise NotAnApplication(
            f"{target!r} is not of the form MODULE:APP; for the variable `hello` in main.py it is "
            "main:hello"
        )
    if app_dir is not None and sys.path[0] != (folder := str(app_dir.resolve())):
        sys.path.insert(0, folder)
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
    bound = [key for key, value in vars(module).items() if issubclass(type(value), Application)]
    try:
        found: Any = attrgetter(attribute)(module)
    except AttributeError:
        there = f"it has {', '.join(sorted(bound))}" if bound else "it has no application"
        raise NotAnApplication(
            f"module {module_name!r} has no attribute {attribute!r}; {there}"
        ) from None
    if is_factory:
        found = _made(target, found)
    elif arguments or _is_builder(found) or (arguments is not None and isfunction(found)):
        found = built_with(target, found, arguments or {})
        if not isinstance(found, Application):
            raise NotAnApplication(
                f"the builder {target!r} returned {_article(type(found).__name__)}, not a bound "
                "application; end it with return Name.bind(...)"
            )
    if isinstance(found, Application):
        return _noted(found, (), target)
    if (within := _within(found, target)) is not None:
        return within
    if isinstance(found, Deployment):
        raise NotAnApplication(f"{target!r} is a deployment; bind it: app = {found.name}.bind(...)")
    hint = _way_to_serve(found, target, bound, is_factory=is_factory)
    kind = _article(type(found).__name__)
    raise NotAnApplication(f"{target!r} is {kind}, not a bound application; {hint}")


_around: WeakKeyDictionary[Starlette, list[object]] = WeakKeyDictionary()
"""The layers with which the app of each application was named, the outermost first."""


def _noted(application: Application, layers: Sequence[object], target: str) -> Application:
    """Note the layers of an application's app. Raises `NotAnApplication` if it has others."""
    app = users_app_of(application.deployment.func_or_class)
    if isinstance(app, Starlette):
        known = _around.setdefault(app, list(layers))
        if len(known) != len(layers) or any(a is not b for a, b in zip(known, layers, strict=True)):
            raise NotAnApplication(
                f"the FastAPI app of {target!r} is named twice, with different middleware around "
                "it, which would belong to both; give each its own app and class, or add the "
                "middleware to the app: app.add_middleware(...)"
            )
    return application


def _within(found: object, target: str) -> Application | None:
    """Return the application that middleware stands around, which its FastAPI app gets instead.

    `None` if there is none, or several, or a deployment without an app.
    """
    if isinstance(found, Starlette) or not (layers := layers_around(found, Application)):
        return None
    innermost, attribute = layers[-1]
    application = attributes_of(innermost)[attribute]
    assert isinstance(application, Application)
    app = users_app_of(application.deployment.func_or_class)
    if not isinstance(app, Starlette):
        return None
    is_new = app not in _around
    _noted(application, [layer for layer, _ in layers], target)
    for layer, name in reversed(layers) if is_new else ():  # each that is added is outside
        app.add_middleware(Layer, around=layer, attribute=name)
    return application


def _way_to_serve(found: Any, target: str, bound: list[str], *, is_factory: bool) -> str:
    """Return what to do with an object that is no application. `bound` are those of its module."""
    module_name, _, attribute = target.partition(":")
    if type(found).__module__.partition(".")[0] == "ray":
        return "it is one of Ray Serve; `ingress migrate FILE --write` rewrites its imports"
    if callable(found) and not isinstance(found, type):
        if holds(found, Application):
            of_python = type(found).__module__ in ("builtins", "functools")
            kind = "MIDDLEWARE" if of_python else type(found).__name__
            around = f"give the middleware to the FastAPI app, app.add_middleware({kind}, ...)"
            if isinstance(found, Starlette):
                around = "give the path of its mount by --route-prefix"
            named = f", such as {module_name}:{bound[0]}" if bound else " in the module"
            return (
                f"what is around this application is not served: {around}, and name the "
                f"application{named}; or serve both by uvicorn {target}"
            )
        if bound:
            return f"did you mean {module_name}:{bound[0]}?"
    if isfunction(found) and not is_factory:
        return "if it returns an application, add --factory"
    if isinstance(found, Starlette):
        return (
            "its routes as they are: "
            f"name = serve.deployment(name='Name')(serve.ingress({attribute})()).bind()"
        )
    return "decorate its class with @serve.deployment and bind it"


def _is_builder(found: object) -> bool:
    return isfunction(found) and len(signature_of(found).parameters) == 1


def built_with(target: str, builder: Any, arguments: Mapping[str, object]) -> Any:
    """Return the result of a builder: a function with one parameter, the arguments.

    The parameter is a dict, or the pydantic model of its annotation. Source: Ray 2.60.0,
    _private/api.py. Raises `NotAnApplication` for an object that takes no arguments, or not these.
    """
    if isinstance(builder, Application):
        raise NotAnApplication(
            f"{target!r} is an application, and only a builder takes arguments, got "
            f"{', '.join(arguments)}; leave them out, or name a function with one parameter"
        )
    parameters = list(signature_of(builder).parameters.values()) if isfunction(builder) else []
    if len(parameters) != 1:
        raise NotAnApplication(
            f"{target!r} is no application builder; a builder is a function with exactly one "
            "parameter, the dict of its arguments"
        )
    try:
        kind: object = get_type_hints(builder).get(parameters[0].name)
    except NameError:  # an annotation for type checkers only
        kind = None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return builder(dict(arguments))
    try:
        model = kind.model_validate(dict(arguments))
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors(include_url=False)
        ]
        raise NotAnApplication(
            f"the arguments of {target!r} are not those of {kind.__name__}: {'; '.join(wrong)}"
        ) from None
    return builder(model)


def _made(target: str, factory: Any) -> object:
    if isinstance(factory, Application):
        raise NotAnApplication(f"{target!r} is an application, not a factory; leave out --factory")
    try:
        signature_of(factory).bind()
    except (TypeError, ValueError) as error:
        raise NotAnApplication(
            f"--factory calls {target!r} without arguments, which is not possible ({error}); give "
            "its parameters defaults"
        ) from None
    return factory()


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name} object"
