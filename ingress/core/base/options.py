"""The base of every class in `config`: validated, frozen keywords with clear error messages.

    an unknown option     TypeError     names the nearest option, and lists all
    a bad value           ValueError    also for a value of the wrong type

A message names the option, the value, the expected values and the fix, in one line.
"""

from __future__ import annotations

import copy
import difflib
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from ingress.core.base.types import short_key

# HTTP methods whose requests may run twice: RFC 9110, 9.2.2.
IDEMPOTENT_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PUT", "TRACE"})


class Mark(str):
    """A decision on an option of a deployment, in the `Annotated` of its field."""


IN_PLACE = Mark("it can change while the deployment runs: `serving/control/changes`")
ON_RAY = Mark("Ray's own deployment gets it, if the user gave it")
OURS = Mark("on Ray it takes effect in the replica, or is given in another form")
NOT_ON_RAY = Mark("`--engine ray` refuses it")


class Options(BaseModel):
    """Keywords, validated and frozen; the repr shows those that differ from the default."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True
    )

    belong_to: ClassVar[str] = ""
    """The owner of these options in messages; the class's name if empty."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Advice for keywords that are not options, although users may expect them."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Older names of options, which still count."""
    user_frame: ClassVar[int] = 3
    """The number of frames from `normalised` to the user's line."""

    # pydantic's error has many lines and its own type. Hidden from type checkers, which derive the
    # signature from the fields.
    if not TYPE_CHECKING:

        def __init__(self, **given: Any) -> None:
            options = self.normalised(given)
            for name in options:
                if name not in type(self).model_fields:
                    raise TypeError(self._unknown(name))
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise ValueError(self._one_line(error)) from None

    @classmethod
    def normalised(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the given options under their current names. Raises `ValueError` for both."""
        options = dict(given)
        for old in cls.renamed.keys() & options.keys():
            name = cls.renamed[old]
            if name in options:
                raise ValueError(
                    f"{name} and {old} are both given, and are one option; leave {old} out"
                )
            warnings.warn(
                f"{old} is deprecated; use {name}, the same option",
                DeprecationWarning,
                stacklevel=cls.user_frame,
            )
            options[name] = options.pop(old)
        return options

    @classmethod
    def option_names(cls) -> list[str]:
        return sorted(cls.model_fields)

    def changed(self) -> dict[str, Any]:
        """Return the options whose value is not the default."""
        return {
            name: value
            for name, field in type(self).model_fields.items()
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True)
        }

    def __repr_args__(self) -> list[tuple[str | None, object]]:
        return list(self.changed().items())

    @classmethod
    def _unknown(cls, name: str) -> str:
        names = cls.option_names()
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = cls.elsewhere.get(name) or (f"did you mean {nearest[0]}?" if nearest else "")
        known = f"{cls.belong_to or cls.__name__} has: {', '.join(names)}"
        return " ".join(filter(None, [f"unexpected keyword argument {name!r};", hint, known]))

    @classmethod
    def _one_line(cls, error: ValidationError) -> str:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":
            return str(first["ctx"]["error"])
        message = first["msg"]
        if first["type"] != "must_be":
            where = ".".join(str(part) for part in first["loc"])
            expected = message.replace("Input should be", "must be")
            message = f"{where} {expected}, got {first['input']!r}"
        field = cls.model_fields[str(first["loc"][0])]
        default = field.get_default(call_default_factory=True)
        return f"{message}; leave it out for the default, {default!r}"


def _must_be(expected: str, accepts: Callable[[object], bool]) -> BeforeValidator:
    """Make a validator that refuses a value unless `accepts`; the message has `expected`."""

    def check(value: object, info: ValidationInfo) -> object:
        if accepts(value):
            return value
        message = f"{info.field_name} must be {expected}, got {value!r}"
        raise PydanticCustomError("must_be", "{message}", {"message": message})

    return BeforeValidator(check)


def _is_int(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number; infinity, NaN and `True` are not."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_variable(name: object, value: str) -> bool:
    """Return whether an environment can have a variable of this name and value."""
    return isinstance(name, str) and bool(name) and "=" not in name and "\0" not in name + value


def _json_copy(value: object, info: ValidationInfo) -> object:
    """Copy a JSON-serialisable value, so that the recorded value cannot change."""
    bad = _first_not_json(value, str(info.field_name), ())
    if bad is not None:
        where, part = bad
        raise ValueError(
            f"{where} is not JSON-serializable, got {part!r} of type {type(part).__name__}; "
            "pass dicts with string keys, lists, strings, numbers, booleans and None"
        )
    return copy.deepcopy(value)


def _first_not_json(value: object, path: str, above: tuple[int, ...]) -> tuple[str, object] | None:
    """Return path and value of the first part that is not JSON, or that contains itself."""
    if id(value) in above:
        return path, value
    if not isinstance(value, dict | list | tuple):
        return None if _is_json_scalar(value) else (path, value)
    parts: Iterable[tuple[object, object]]
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        where = f"{path}[{key!r}]"
        if not _is_json_scalar(key):
            return where, key
        if bad := _first_not_json(part, where, (*above, id(value))):
            return bad
    return None


def _is_json_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


LANE_RULE = "a name of letters, digits, '_' and '-', other than 'serial' and 'executor'"


def is_lane(name: object) -> bool:
    """Return whether a lane may have this name, which becomes part of its threads' names."""
    is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return bool(is_name) and name not in ("serial", "executor")


def _is_level(value: object) -> bool:
    if isinstance(value, str):
        return value.upper() in logging.getLevelNamesMapping()
    return _is_int(value, at_least=0)


LogLevel = Annotated[
    str | int,
    _must_be("DEBUG, INFO, WARNING, ERROR, CRITICAL or a number of Python's logging", _is_level),
]
LOG_ATTRIBUTES = frozenset((
    "args", "asctime", "created", "exc_info", "exc_text", "filename", "funcName", "levelname",
    "levelno", "lineno", "message", "module", "msecs", "msg", "name", "pathname", "process",
    "processName", "relativeCreated", "stack_info", "taskName", "thread", "threadName",
))  # fmt: skip
"""The attributes of each record of Python's logging. Ray 2.60.0, logging_constants.py."""
LogAttribute = Annotated[
    str,
    _must_be(
        "names of attributes of Python's log records, such as threadName",
        lambda v: v in LOG_ATTRIBUTES,
    ),
]
PositiveInt = Annotated[
    int, Field(ge=1), _must_be("an integer ≥ 1", lambda v: _is_int(v, at_least=1))
]
NonNegativeInt = Annotated[
    int, Field(ge=0), _must_be("an integer ≥ 0", lambda v: _is_int(v, at_least=0))
]
PositiveFloat = Annotated[
    float, Field(gt=0), _must_be("a number > 0", lambda v: is_number(v) and v > 0)
]
NonNegativeFloat = Annotated[
    float, Field(ge=0), _must_be("a number ≥ 0", lambda v: is_number(v) and v >= 0)
]
Fraction = Annotated[
    float, Field(gt=0, le=1), _must_be("a number in (0, 1]", lambda v: is_number(v) and 0 < v <= 1)
]
Port = Annotated[
    int,
    Field(ge=0, le=65535),
    _must_be("an integer from 0 to 65535", lambda v: _is_int(v, at_least=0) and v < 65536),
]
OngoingRequests = Annotated[PositiveInt, _must_be("non-null", lambda v: v is not None)]
QueuedRequests = Annotated[
    int,
    Field(ge=-1),
    _must_be("-1 (no limit) or a positive integer", lambda v: _is_int(v, at_least=-1) and v != 0),
]
Replicas = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"],
    _must_be('an integer ≥ 1 or "auto"', lambda v: v == "auto" or _is_int(v, at_least=1)),
]
ClassPath = Annotated[
    str | type[Any], _must_be("a class or its import path", lambda v: isinstance(v, str | type))
]
FunctionPath = Annotated[
    str | Callable[..., Any],
    _must_be("a function or its import path", lambda v: isinstance(v, str) or callable(v)),
]
LoopChoice = Annotated[
    Literal["own", "shared"],
    _must_be('"own", "shared" or None', lambda v: v is None or v in ("own", "shared")),
]
Isolation = Annotated[
    Literal["thread", "process"],
    _must_be('"thread" or "process"', lambda v: v in ("thread", "process")),
]
LaneLimits = Annotated[
    dict[str, int],
    _must_be(
        "a dict from lanes to their numbers of threads in a replica, such as {'db': 8}; a number "
        f"is an integer ≥ 1, a lane is {LANE_RULE}",
        lambda v: (
            isinstance(v, dict)
            and all(is_lane(name) and _is_int(limit, at_least=1) for name, limit in v.items())
        ),
    ),
]
KeyWeights = Annotated[
    dict[str, float],
    _must_be(
        "a dict from fairness keys to their weights, such as {'gold': 4}; a weight is a number "
        "from 0.001 to 1000",
        lambda v: (
            isinstance(v, dict)
            and all(isinstance(k, str) and is_number(w) and 1e-3 <= w <= 1e3 for k, w in v.items())
        ),
    ),
    AfterValidator(lambda v: {short_key(key): weight for key, weight in v.items()}),
]
IdempotentMethods = Annotated[
    list[str],
    _must_be(
        f"a list of idempotent methods, each one of {', '.join(sorted(IDEMPOTENT_METHODS))}: a "
        "request of another method must not run twice",
        lambda v: (
            isinstance(v, list | tuple | set | frozenset)
            and all(isinstance(each, str) and each in IDEMPOTENT_METHODS for each in v)
        ),
    ),
]
Json = Annotated[Any, AfterValidator(_json_copy)]


def plain(value: object) -> Any:
    """Return a value as a file has it: options as dicts, classes and functions as paths."""
    match value:
        case Options():
            return {name: plain(getattr(value, name)) for name in type(value).model_fields}
        case dict():
            keys = (key if _is_json_scalar(key) else str(key) for key in value)
            return dict(zip(keys, map(plain, value.values()), strict=True))
        case list() | tuple():
            return [plain(each) for each in value]
        case None | str() | int() | float():
            return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)
