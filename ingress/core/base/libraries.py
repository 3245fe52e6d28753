"""The files of libraries: the standard library, installed packages, ingress itself."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LIBRARIES = (
    _OURS,
    "<frozen ",
    *{
        in_any_form(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for in_any_form in (str, os.path.realpath)
    },
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@lru_cache(1024)
def is_library(file: str) -> bool:
    """Return whether a code's file is outside the user's code."""
    return file.startswith(_LIBRARIES) or any(each in file for each in _INSTALLED)


def is_ours(file: str) -> bool:
    """Return whether a code's file is one of this package."""
    return file.startswith(_OURS)
