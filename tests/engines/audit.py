"""Every public name, parameter, option and attribute of `ray.serve`, compared with `ingress`.

`theirs()` needs Ray; a whole run stores its result. `audit` compares that with this version
without Ray. A name is public if it has no leading underscore and was not imported from elsewhere.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any

from pydantic import BaseModel

import ingress
from ingress.base.unsupported import MEMBERS, NAMES, PARAMETERS
from ingress.config import NOT_ACTED_ON, DeploymentConfig

MODULES = ("config", "context", "exceptions", "handle", "schema")
"""Modules of Ray Serve whose classes are compared in detail; of other modules, only the names."""

RECORDED = "recorded, with a warning, in one process; acted on by the Ray engine"
PRIVATE_OF_RAY = "for Ray's own use"


def theirs() -> list[dict[str, str]]:
    """Return the public surface of the Ray Serve that is installed."""
    serve = import_module("ray.serve")
    found = [
        {"kind": _kind(getattr(serve, name)), "name": f"serve.{name}"}
        for name in dir(serve)
        if not name.startswith("_") and name != "ray"
    ]
    for name in dir(serve):
        value = getattr(serve, name)
        if not name.startswith("_") and inspect.isfunction(value):
            found += _parameters(f"serve.{name}", value)
    for module in MODULES:
        of_module = import_module(f"ray.serve.{module}")
        for name in dir(of_module):
            value = getattr(of_module, name)
            if inspect.isclass(value) and value.__module__ == of_module.__name__:
                found += _class(module, value)
    found += _class("declaration", serve.Deployment)
    found += _parameters("serve.RunTarget", serve.RunTarget)
    found += _parameters(
        "handle.options", import_module("ray.serve.handle").DeploymentHandle.options
    )
    return found


def _kind(value: Any) -> str:
    if inspect.ismodule(value):
        return "module"
    return "class" if inspect.isclass(value) else "function"


def _parameters(function: str, value: Any) -> list[dict[str, str]]:
    names = [name for name in inspect.signature(value).parameters if name != "self"]
    return [{"kind": "parameter", "name": f"{function}({name})"} for name in names]


def _class(module: str, cls: type) -> list[dict[str, str]]:
    if cls.__name__.startswith("_"):
        return []
    owner = f"{module}.{cls.__name__}"
    found = [{"kind": "class", "name": owner}]
    kind = "field" if issubclass(cls, BaseModel) else "attribute"
    return found + [{"kind": kind, "name": f"{owner}.{name}"} for name in sorted(_members(cls))]


def _members(cls: type) -> set[str]:
    if issubclass(cls, BaseModel):
        return {*cls.model_fields}
    if issubclass(cls, Enum):
        return {*cls.__members__}
    inherited = {*dir(Exception)} if issubclass(cls, BaseException) else set()
    names = {name for name in dir(cls) if not name.startswith("_")} - inherited
    if dataclasses.is_dataclass(cls):
        names |= {each.name for each in dataclasses.fields(cls) if not each.name.startswith("_")}
    return names


# The names of `ingress`


def audit(surface: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return each entry with a `verdict` (same, wider, not acted on, absent) and any reason.

    Of an absent class only the class itself is returned.
    """
    known = {each["name"] for each in surface}
    judged = [{**each, **_judged(each["kind"], each["name"], known)} for each in surface]
    gone = {e["name"] for e in judged if e["kind"] == "class" and e["verdict"] == "absent"}
    return [each for each in judged if each["name"].rpartition(".")[0] not in gone]


def _judged(kind: str, name: str, known: set[str]) -> dict[str, str]:
    if kind == "parameter":
        return _judged_parameter(*name.removesuffix(")").split("("))
    if name.startswith("serve."):
        return _judged_name(name.removeprefix("serve."), known)
    module, cls, *member = name.split(".")
    if member:
        return _judged_member(module, cls, member[0])
    return _judged_class(module, cls, known)


def _judged_name(name: str, known: set[str]) -> dict[str, str]:
    if name in NAMES:
        return _absent(NAMES[name])
    ours = getattr(ingress, name, None)
    if ours is None:
        return _absent("")
    if not inspect.isfunction(ours):
        return {"verdict": "same"}
    names = {*inspect.signature(ours).parameters} - {
        "absent",
        "options",
        "func_or_class",
        "unsupported",
    }
    if name == "deployment":
        names |= {*DeploymentConfig.model_fields, "max_concurrent_queries"}
    return _wider(each for each in names if f"serve.{name}({each})" not in known)


def _judged_parameter(function: str, name: str) -> dict[str, str]:
    if function in ("serve.deployment", "serve.Deployment.options"):
        return _judged_option(name)
    advice = PARAMETERS.get(function, {})
    if name in advice:
        return _absent(advice[name])
    if function in {f"serve.{each}" for each in NAMES}:
        return _absent(NAMES[function.removeprefix("serve.")])
    if name.startswith("_") and name != "_func":
        return _absent(PRIVATE_OF_RAY)
    ours: Any = ingress
    if function == "handle.options":
        ours = ingress.DeploymentHandle.options
    else:
        ours = getattr(ingress, function.removeprefix("serve."))
    return {"verdict": "same"} if name in inspect.signature(ours).parameters else _absent("")


def _judged_option(name: str) -> dict[str, str]:
    if name in ("_func_or_class", "name"):
        return {"verdict": "same"}
    if name in DeploymentConfig.elsewhere:
        return _absent(DeploymentConfig.elsewhere[name])
    if name in NOT_ACTED_ON:
        return {
            "verdict": "not acted on",
            "because": "in one process: recorded, with a warning; the Ray engine acts on it",
        }
    return {"verdict": "same"} if name in DeploymentConfig.model_fields else _absent("")


def _judged_class(module: str, cls: str, known: set[str]) -> dict[str, str]:
    if (ours := _ours(module, cls)) is not None:
        return _wider(each for each in _members(ours) if f"{module}.{cls}.{each}" not in known)
    return _absent(MEMBERS.get(module, {}).get(cls, ""))


def _judged_member(module: str, cls: str, name: str) -> dict[str, str]:
    ours = _ours(module, cls)
    if ours is None:
        return _absent("its class is")
    if name in _all_members(ours):
        return {"verdict": "same"}
    if issubclass(ours, BaseException):
        return _absent(PRIVATE_OF_RAY)  # how Ray sends an error to another process
    elsewhere = getattr(ours, "elsewhere", {})
    return _absent(elsewhere.get(name) or MEMBERS.get(cls, {}).get(name, ""))


def _ours(module: str, cls: str) -> Any:
    home = "declaration" if module == "declaration" else module
    found = vars(import_module(f"ingress.{home}")).get(cls)
    return found if inspect.isclass(found) else None


def _all_members(cls: type) -> set[str]:
    if cls is ingress.Deployment:
        return _members(cls) | {*DeploymentConfig.model_fields}
    return _members(cls)


def _wider(own: Iterable[str]) -> dict[str, str]:
    names = ", ".join(f"`{name}`" for name in sorted(own))
    return {"verdict": "wider", "because": f"and {names}"} if names else {"verdict": "same"}


def _absent(because: str) -> dict[str, str]:
    return {"verdict": "absent", "because": because}


def undecided(judged: list[dict[str, str]]) -> Iterator[str]:
    """Yield the names that are absent without a reason."""
    for each in judged:
        if each["verdict"] == "absent" and not each["because"]:
            yield each["name"]
