"""The JSON that goes into the store and comes out of it, read as the handlers are annotated."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, PydanticSerializationError, to_json

from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import name_of
from ingress.exceptions import TaskPayloadError

Read = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]


class UnreadableArgumentsError(Exception):
    """The arguments of a job do not fit its handler."""


def dumped(value: object, limit: int, what: str) -> str:
    """Return a value as JSON, as FastAPI writes a response. Raises `TaskPayloadError`."""
    try:
        found = to_json(value, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError) as error:
        raise TaskPayloadError(
            f"{what} cannot be written as JSON: {error}; give numbers, texts, lists, dicts or "
            "Pydantic models"
        ) from None
    if len(found) > limit:
        raise TaskPayloadError(
            f"{what} has {len(found)} bytes as JSON, more than max_payload_bytes={limit}; store it "
            "elsewhere and give its name, or raise SQLiteAdapterConfig(max_payload_bytes=...)"
        )
    return found.decode()


def loaded(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def reader_of(func: Callable[..., Any]) -> Read:
    """Return what makes the arguments of a handler from JSON, as its annotations say.

    Raises `TypeError` for a parameter that JSON cannot fill.
    """
    _self, *parameters = signature_of(func).parameters.values()
    hints = _hints(func)
    typed = [each.replace(annotation=hints.get(each.name, Any)) for each in parameters]
    for each in typed:
        try:
            TypeAdapter(each.annotation)
        except (PydanticUserError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise TypeError(
                f"the parameter {each.name!r} of the task handler {name_of(func)} is "
                f"{each.annotation!r}, which JSON cannot fill: {reason}; give it a Pydantic model, "
                "a number, a text, a list or a dict"
            ) from None

    def collect(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return args, kwargs

    collect.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    collect.__annotations__ = {each.name: each.annotation for each in typed}
    adapter: TypeAdapter[Any] = TypeAdapter(collect)  # type: ignore[arg-type]  # a call

    def read(
        args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        try:
            found: tuple[Sequence[Any], Mapping[str, Any]] = adapter.validate_python(
                ArgsKwargs(tuple(args), dict(kwargs))
            )
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                for each in error.errors(include_url=False, include_input=False)
            )
            raise UnreadableArgumentsError(
                f"the arguments do not fit {name_of(func)}: {'; '.join(problems)}"
            ) from None
        return found

    return read


def _hints(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(func, include_extras=True)
    except Exception as error:
        raise TypeError(
            f"the annotations of the task handler {name_of(func)} cannot be read: {error}; name "
            "classes of its module"
        ) from None
