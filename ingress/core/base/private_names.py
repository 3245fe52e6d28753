"""One check, and one error, for the private names of other libraries.

Each library has a `compat` module, the only one that uses its private names:

    AnyIO                ingress.core.calls.compat
    FastAPI, Starlette   ingress.app.asgi.compat
    uvicorn              ingress.serving.http.compat

A name without which nothing works is checked when its `compat` module is imported. A name without
which only something is slower is looked up there, and `CompiledRoutesOffWarning` says what is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from types import CodeType
from typing import Any

_ABSENT = object()


class UnsupportedVersionError(ImportError):
    """A library is installed in a version that lacks what this package needs of it."""


def find(path: str, default: object = None) -> Any:
    """Return what `module:name.attribute` names, `default` if it is not there.

    `module:name.function(other)` is there, as `True`, if the code of that function uses the
    attribute, parameter or key `other`. It is for names that only instances have.
    """
    if path.endswith(")"):
        path, _, used = path[:-1].partition("(")
        return _uses(getattr(find(path), "__code__", None), used) or default
    module, _, names = path.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return default
    for name in names.split("."):
        fields = getattr(found, "__dataclass_fields__", {})  # one without a default is no attribute
        found = getattr(found, name, fields.get(name, _ABSENT))
        if found is _ABSENT:
            return default
    return found


def _uses(value: object, name: str) -> bool:
    if isinstance(value, CodeType):
        names = (*value.co_names, *value.co_varnames)
        return name in names or any(_uses(each, name) for each in value.co_consts)
    return bool(value == name or (isinstance(value, tuple) and name in value))


def require(distribution: str, supported: str, paths: Iterable[str]) -> None:
    """Raise `UnsupportedVersionError` if a library lacks one of these names.

    `supported` are its supported versions, as pip takes them.
    """
    missing = [path for path in paths if find(path, _ABSENT) is _ABSENT]
    if missing:
        raise unsupported(distribution, supported, missing)


def unsupported(
    distribution: str, supported: str, missing: Iterable[str]
) -> UnsupportedVersionError:
    """Return the error for names that a library lacks."""
    return UnsupportedVersionError(
        f"{distribution} {version(distribution)} lacks {', '.join(missing)}, which ingress needs; "
        f'install a supported version: python -m pip install "{distribution}{supported}"'
    )
