"""Every public name, parameter, option and attribute of `ray.serve`, compared with `ingress`.

    python -m tests.engines.audit               print all of them, from what was recorded
    python -m tests.engines.audit --installed   the same, of the Ray Serve that is installed

    same         it is there and does the same; `because` says what it takes besides or refuses
    on purpose   it is not there, or has no effect, and need not be
    missing      it has no counterpart, or none in one process

docs/compatibility.md is made from this. `theirs()` needs Ray; a run stores its result. `audit`
compares that with this version without Ray. A name is public if it has no leading underscore and
was not imported from elsewhere. The program exits with 1 if a name is neither there nor declared.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import ingress
from ingress._unsupported import (
    MEMBERS,
    NAMES,
    NO_GANGS,
    NO_GRPC,
    NO_PROMETHEUS,
    PARAMETERS,
    REPLICAS,
    STATE,
)
from ingress.app.declaration.cluster_options import CLUSTER_ONLY
from ingress.config import NOT_ACTED_ON, DeploymentConfig

MODULES = ("config", "context", "exceptions", "handle", "schema")
"""Modules of Ray Serve whose classes are compared in detail."""
NAMED = ("autoscaling_policy", "metrics", "request_router")
"""Modules of Ray Serve of which only the names are compared."""

REFUSED = "in one process: refused when it is run; the Ray engine acts on it"
RECORDED = "in one process: recorded, with a warning; the Ray engine acts on it"
PRIVATE_OF_RAY = "for Ray's own use"
MISSING = {
    *(NO_GANGS, NO_GRPC, NO_PROMETHEUS, REPLICAS, STATE, NAMES["llm"]),
    *(NAMES["async_inference_autoscaling_policy"], NAMES["taskiq_task_processor"]),
}
"""The advice for features without a counterpart; other absent names are absent on purpose."""
WITHOUT_EFFECT = {
    "handle.DeploymentHandle.shutdown": "does nothing but warn: a handle holds no resources",
    "handle.DeploymentHandle.shutdown_async": "does nothing but warn, as `shutdown`",
}
WITH_ANOTHER_EFFECT = {
    "serve.deployment(max_constructor_retry_count)": (
        "a first start is tried again only if it is given, see deviations.md"
    )
}
WITHOUT_EFFECT_HERE: set[str] = set()
LONGEST_DEFAULT = 30


def theirs() -> list[dict[str, str]]:
    """Return the public surface of the Ray Serve that is installed."""
    serve = import_module("ray.serve")
    found = [
        {
            "kind": _kind(value),
            "name": f"serve.{name}",
            **_signature(value, is_shown=inspect.isfunction(value)),
        }
        for name in dir(serve)
        if not name.startswith("_") and name != "ray"
        for value in [getattr(serve, name)]
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
    for module in NAMED:
        of_module = import_module(f"ray.serve.{module}")
        found += [
            {"kind": _kind(value), "name": f"{module}.{name}"}
            for name, value in vars(of_module).items()
            if _is_public(of_module, name, value)
        ]
    found += _class("declaration", serve.Deployment)
    found += _parameters("serve.RunTarget", serve.RunTarget)
    found += _parameters(
        "handle.options", import_module("ray.serve.handle").DeploymentHandle.options
    )
    options = import_module("ray.serve._private.config").DeploymentConfig.model_fields
    for each in found:
        option = each["name"].removeprefix("serve.deployment(").removesuffix(")")
        if option in options and each["name"] == f"serve.deployment({option})":
            each["default"] = _default(options[option].get_default(call_default_factory=True))
    return found


def _is_public(module: Any, name: str, value: Any) -> bool:
    is_own = callable(value) and getattr(value, "__module__", "") == module.__name__
    return name in getattr(module, "__all__", [name] if is_own and name[0] != "_" else [])


def _signature(value: Any, *, is_shown: bool = True) -> dict[str, str]:
    """Return the parameters of a function and their defaults, without types."""
    if not is_shown:
        return {}
    parts = []
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return {}
    for each in parameters:
        if each.name == "self":
            continue
        stars = "**" if each.kind is each.VAR_KEYWORD else "*" * (each.kind is each.VAR_POSITIONAL)
        has_default = each.default is not each.empty
        parts.append(f"{stars}{each.name}" + (f"={_default(each.default)}" if has_default else ""))
    return {"signature": f"({', '.join(parts)})"}


def _default(value: Any) -> str:
    shown = repr(value)
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    return shown if len(shown) <= LONGEST_DEFAULT and "<" not in shown else "..."


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
    is_plain = not issubclass(cls, BaseModel | Enum)
    found = [{"kind": "class", "name": owner, **_signature(cls, is_shown=is_plain)}]
    kind = "field" if issubclass(cls, BaseModel) else "attribute"
    return found + [
        {
            "kind": kind,
            "name": f"{owner}.{name}",
            **_signature(member, is_shown=is_plain and inspect.isfunction(member)),
        }
        for name in sorted(_members(cls))
        for member in [inspect.getattr_static(cls, name, None)]
    ]


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
    """Return each entry with a `verdict` (same, on purpose, missing) and the reason or addition.

    Entries that cannot be used at all are marked as `absent`; of an absent class only the class
    itself is returned. Deployment options have the default here as `ours`.
    """
    known = {each["name"] for each in surface}
    judged = [{**each, **_judged(each["kind"], each["name"], known)} for each in surface]
    gone = {e["name"] for e in judged if e["kind"] == "class" and "absent" in e}
    return [_compared(each) for each in judged if each["name"].rpartition(".")[0] not in gone]


def _compared(judged: dict[str, str]) -> dict[str, str]:
    """Add this version's default of a deployment option; another one is on purpose."""
    option = judged["name"].removeprefix("serve.deployment(").removesuffix(")")
    if judged["name"] != f"serve.deployment({option})" or "default" not in judged:
        return judged
    field = DeploymentConfig.model_fields.get(option)
    if field is None:
        return judged
    ours = field.get_default(call_default_factory=True)
    judged = {**judged, "ours": _default(ours)}
    is_equal = judged["ours"] == judged["default"] or _is_equal(ours, judged["default"])
    if judged["verdict"] == "same" and judged["name"] in WITH_ANOTHER_EFFECT:
        because = WITH_ANOTHER_EFFECT[judged["name"]]
        return {**judged, "verdict": "on purpose", "because": because}
    if judged["verdict"] == "same" and not is_equal:
        return {**judged, "verdict": "on purpose", "because": "another default, see deviations.md"}
    return judged


def _is_equal(ours: Any, theirs: str) -> bool:
    """Return whether defaults mean the same: 20.0 and 20, `None` and the options' own defaults."""
    if isinstance(ours, float):
        return repr(int(ours)) == theirs
    return ours is None and theirs.endswith("()")


def _judged(kind: str, name: str, known: set[str]) -> dict[str, str]:
    if name in WITHOUT_EFFECT:
        return {"verdict": "on purpose", "because": WITHOUT_EFFECT[name]}
    if name in WITHOUT_EFFECT_HERE:
        return {"verdict": "missing", "because": RECORDED}
    if kind == "parameter":
        return _judged_parameter(*name.removesuffix(")").split("("))
    if name.startswith("serve."):
        return _judged_name(name.removeprefix("serve."), known)
    module, cls, *member = name.split(".")
    if module in NAMED:
        is_here = hasattr(import_module(f"ingress.{module}"), cls)
        return {"verdict": "same"} if is_here else _absent(MEMBERS.get(module, {}).get(cls, ""))
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
    own = [each for each in names if f"serve.{name}({each})" not in known]
    return _wider(own, _refused(f"serve.{name}", known))


def _refused(function: str, known: set[str]) -> list[str]:
    """Return the parameters of a function of Ray Serve that this version's does not take."""
    given = (each for each in known if each.startswith(f"{function}("))
    names = (each.removeprefix(f"{function}(").removesuffix(")") for each in given)
    return [each for each in names if "absent" in _judged_parameter(function, each)]


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
    if name in CLUSTER_ONLY:
        return {"verdict": "missing", "because": REFUSED}
    if name in NOT_ACTED_ON:
        return {"verdict": "missing", "because": RECORDED}
    return {"verdict": "same"} if name in DeploymentConfig.model_fields else _absent("")


def _judged_class(module: str, cls: str, known: set[str]) -> dict[str, str]:
    if (ours := _ours(module, cls)) is not None:
        return _wider([each for each in _members(ours) if f"{module}.{cls}.{each}" not in known])
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
    home = "app.declaration" if module == "declaration" else module
    found = getattr(import_module(f"ingress.{home}"), cls, None)
    return found if inspect.isclass(found) else None


def _all_members(cls: type) -> set[str]:
    if cls is ingress.Deployment:
        return _members(cls) | {*DeploymentConfig.model_fields}
    return _members(cls)


def _wider(own: list[str], refused: list[str] | tuple[()] = ()) -> dict[str, str]:
    """Return that a name is there, with what it takes besides, and what it refuses."""
    parts = [
        f"{words} {', '.join(f'`{name}`' for name in sorted(names))}"
        for words, names in (("and also", own), ("refuses", refused))
        if names
    ]
    return {"verdict": "same", **({"because": "; ".join(parts)} if parts else {})}


def _absent(because: str) -> dict[str, str]:
    is_missing = not because or because in MISSING
    verdict = "missing" if is_missing else "on purpose"
    return {"verdict": verdict, "because": because, "absent": "yes"}


def undecided(judged: list[dict[str, str]]) -> Iterator[str]:
    """Yield the names that are not the same, without a reason."""
    for each in judged:
        if each["verdict"] != "same" and not each["because"]:
            yield each["name"]


def main() -> int:
    parser = ArgumentParser("python -m tests.engines.audit", description=__doc__)
    parser.add_argument("--installed", action="store_true", help="of the installed Ray Serve")
    options = parser.parse_args()
    recorded = Path(__file__).parent.parent.parent / "docs" / "compatibility.json"
    surface = theirs() if options.installed else json.loads(recorded.read_text())["api"]
    judged = audit(surface)
    for each in judged:
        defaults = f" = {each['default']}, here {each['ours']}" if "ours" in each else ""
        words = f"{each['name']}{each.get('signature', '')}{defaults}"
        print(f"{each['verdict']:10}  {words}  {each.get('because', '')}".rstrip())
    counts = Counter(each["verdict"] for each in judged)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return 1 if any(undecided(judged)) else 0


if __name__ == "__main__":
    sys.exit(main())
