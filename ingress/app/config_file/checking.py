"""A tree as `ServeConfig`; every mistake of a file is one line with its place.

serve.yaml:7:9: applications[0].deployments[0].num_replica is not an option; did you mean
num_replicas?
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ingress.app.config_file.models import ServeConfig
from ingress.app.config_file.reading import ConfigFileError, Key, Node, Place, Where
from ingress.core.base.options import Options

MOST_LINES = 100
T = TypeVar("T")
Unknown = tuple[Where, Key, type[BaseModel]]
"""The way to a key that is no option, the key, and the model of the options beside it."""


def checked(top: Node, name: str) -> ServeConfig:
    """Return the options of a tree. Raises `ConfigFileError` with all its mistakes."""
    if not isinstance(top.value, dict):
        raise ConfigFileError(
            [f"{name}:{top.place}: the file must be a mapping with `applications`"]
        )
    unknown = list(_unknown(top, ServeConfig, ()))
    if unknown:
        raise ConfigFileError(_lines(name, unknown, _advice_on))
    try:
        return ServeConfig.model_validate(top.plain())
    except ValueError as error:  # a ValidationError is one too
        found = _causes(error, ())
    placed = sorted({(top.at(where), text) for where, text in found})
    raise ConfigFileError(_lines(name, placed, str))


def _lines(name: str, placed: Sequence[tuple[Place, T]], text: Callable[[T], str]) -> list[str]:
    """Return a line for each mistake; one line in all for more of them than people read."""
    shown = placed if len(placed) <= MOST_LINES else placed[:1]
    lines = [f"{name}:{place}: {text(each)}" for place, each in shown]
    if len(shown) < len(placed):
        lines = [f"{lines[0]}; and {len(placed) - 1:,} more mistakes, the last at {placed[-1][0]}"]
    return lines


def written(where: Where) -> str:
    """Return a path as text: `applications[0].name`."""
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _unknown(node: Node, model: type[BaseModel], where: Where) -> Iterator[tuple[Place, Unknown]]:
    """Yield each key, at any depth, that is no option."""
    if not isinstance(node.value, dict):
        return  # the validation says so
    fields = model.model_fields
    for key, value in node.value.items():
        field = fields.get(key) if isinstance(key, str) else None
        if field is None:
            yield node.keys[key], (where, key, model)
            continue
        yield from _inside(value, field.annotation, (*where, key))


def _inside(node: Node, annotation: object, where: Where) -> Iterator[tuple[Place, Unknown]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _unknown(node, annotation, where)
        return
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        yield from _inside(node, arguments[0], where)
    elif origin in (Union, types.UnionType):
        for each in arguments:
            yield from _inside(node, each, where)
    elif origin is list and isinstance(node.value, list):
        for number, each in enumerate(node.value):
            yield from _inside(each, arguments[0], (*where, number))


def _advice_on(unknown: Unknown) -> str:
    where, key, model = unknown
    return f"{written((*where, str(key)))} {_advice(key, model)}"


def _advice(key: Key, model: type[BaseModel]) -> str:
    names = sorted(model.model_fields)
    elsewhere = model.elsewhere if issubclass(model, Options) else {}
    if isinstance(key, str) and key in elsewhere:
        return f"is not an option; {elsewhere[key].rstrip('.')}"
    nearest = difflib.get_close_matches(str(key), names, n=1)
    if nearest:
        return f"is not an option; did you mean {nearest[0]}?"
    return f"is not an option; the options are {', '.join(names)}"


def _flat(error: ValidationError, where: Where) -> Iterator[tuple[Where, str]]:
    """Yield path and text of each mistake, also of those in options inside of options."""
    for each in error.errors(include_url=False):
        inside = (*where, *each["loc"])
        context = each.get("ctx", {}).get("error")
        if isinstance(context, ValueError):
            yield from _causes(context, inside)
        elif each["type"] == "must_be":
            yield inside, f"{_path_of(inside)}{each['msg']}"
        elif each["type"] == "missing":
            yield inside, f"{written(inside)} is missing; it is required"
        else:
            expected = each["msg"].replace("Input should be", "must be")
            yield inside, f"{written(inside)} {expected}, got {_shown(each['input'])}"


def _causes(error: ValueError, where: Where) -> Iterator[tuple[Where, str]]:
    # `Options.__init__` makes one line of an error with all mistakes, which is its context.
    if isinstance(error, ValidationError):
        yield from _flat(error, where)
    elif isinstance(error.__context__, ValidationError):
        yield from _flat(error.__context__, where)
    else:
        yield where, f"{_path_of((*where, ''))}{error}"


def _path_of(where: Where) -> str:
    """Return the path around an option, which its message names."""
    around = written(where[:-1])
    return f"{around}: " if around else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
