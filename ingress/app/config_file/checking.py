"""A tree as `ServeConfig`; every mistake of a file is one line with its place.

serve.yaml:7:9: applications[0].deployments[0].num_replica is not an option; did you mean
num_replicas?
"""

from __future__ import annotations

import difflib
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from ingress.app.config_file.models import ServeConfig
from ingress.app.config_file.reading import ConfigFileError, FileValue, Key, Position, Where
from ingress.core.base.options import Options

MOST_LINES = 100
T = TypeVar("T")
Unknown = tuple[Where, Key, type[Options]]
"""The way to a key that is no option, the key, and the model of the options beside it."""


def checked(top: FileValue, name: str) -> ServeConfig:
    """Return the options of a tree. Raises `ConfigFileError` with all its mistakes."""
    if not isinstance(top.value, dict):
        raise ConfigFileError(
            [f"{name}:{top.place}: the file must be a mapping with `applications`"]
        )
    options = list(_options_in(top, ServeConfig, ()))
    for node, _, model in options:
        _rename(node, model, name)
    unknown = list(_unknown(options))
    if unknown:
        raise ConfigFileError(_lines(name, unknown, _advice_on))
    try:
        return ServeConfig.model_validate(top.plain())
    except ValueError as error:  # a ValidationError is one too
        found = _causes(error, ())
    placed = sorted({(top.at(where), text) for where, text in found})
    raise ConfigFileError(_lines(name, placed, str))


def _lines(name: str, placed: Sequence[tuple[Position, T]], text: Callable[[T], str]) -> list[str]:
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


def _unknown(
    options: Iterable[tuple[FileValue, Where, type[Options]]],
) -> Iterator[tuple[Position, Unknown]]:
    """Yield each key, at any depth, that is no option."""
    for node, where, model in options:
        for key in node.value:
            if key not in model.model_fields and key not in model.renamed:
                yield node.keys[key], (where, key, model)


def _rename(node: FileValue, model: type[Options], file: str) -> None:
    """Give older names of options their current ones, with a warning that has their place."""
    for old in model.renamed.keys() & node.value.keys():
        if (name := model.renamed[old]) not in node.value:
            place = node.keys[name] = node.keys[old]
            node.value[name] = node.value.pop(old)
            text = f"{old} is deprecated; use {name}, the same option"
            warnings.warn_explicit(text, DeprecationWarning, file, place.line)


def _options_in(
    node: FileValue, annotation: object, where: Where
) -> Iterator[tuple[FileValue, Where, type[Options]]]:
    """Yield the mappings of options. Values of a wrong type are not looked at."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Options):
        if isinstance(node.value, dict):
            yield node, where, annotation
            for key, value in node.value.items():
                if (field := annotation.model_fields.get(key)) is not None:
                    yield from _options_in(value, field.annotation, (*where, key))
    elif origin is list and isinstance(node.value, list):
        for number, each in enumerate(node.value):
            yield from _options_in(each, arguments[0], (*where, number))
    elif origin in (Annotated, Union, types.UnionType):
        for each in arguments:
            yield from _options_in(node, each, where)


def _advice_on(unknown: Unknown) -> str:
    where, key, model = unknown
    told = f"{written((*where, str(key)))} is not an option; "
    if advice := model.elsewhere.get(str(key)):
        return told + advice.rstrip(".")
    names = sorted(model.model_fields)
    nearest = difflib.get_close_matches(str(key), names, n=1)
    return told + (
        f"did you mean {nearest[0]}?" if nearest else f"the options are {', '.join(names)}"
    )


def _causes(error: BaseException, where: Where) -> Iterator[tuple[Where, str]]:
    """Yield path and text of each mistake, also of those in options inside of options."""
    # `Options.__init__` makes one line of an error with all mistakes, which is its context.
    whole = error if isinstance(error, ValidationError) else error.__context__
    if not isinstance(whole, ValidationError):
        yield where, f"{_path_of((*where, ''))}{error}"
        return
    for each in whole.errors(include_url=False):
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


def _path_of(where: Where) -> str:
    """Return the path around an option, which its message names."""
    around = written(where[:-1])
    return f"{around}: " if around else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
