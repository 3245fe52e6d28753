"""The GIL of this process: on, off, and who turned it on.

Only a free-threaded build of CPython has a choice. There the GIL is off until an extension module
is imported that has not declared that it needs none: CPython then turns it on for the whole
process, for good. `PYTHON_GIL=0` and `-X gil=0` forbid that.
"""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from typing import Any

IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""True on a build of CPython that can run without the GIL."""

_TURNED_ON = re.compile(r"\(GIL\) has been enabled to load module '([^']+)'")


def is_on() -> bool:
    """Return whether the GIL is on now: threads then run Python code one at a time."""
    # Asked each time: an import may turn it on.
    return not IS_FREE_THREADED or bool(sys._is_gil_enabled())  # type: ignore[attr-defined, unused-ignore]


def turned_on_by() -> str:
    """Return the extension module that turned the GIL on; empty if none did, or it is not known."""
    # CPython names it in a warning alone. Python remembers each warning that it has shown in the
    # module that caused it, whoever imported the extension, also before this package.
    bootstrap: Any = importlib._bootstrap
    for each in list(getattr(bootstrap, "__warningregistry__", ())):
        if isinstance(each, tuple) and (found := _TURNED_ON.search(str(each[0]))):
            return found[1]
    return ""


def told() -> str:
    """Return a line on the GIL for the user; empty on a Python that always has it."""
    if not IS_FREE_THREADED:
        return ""
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))}, free-threaded"
    if not is_on():
        return f"{python}, GIL off: threads compute side by side"
    if getattr(sys.flags, "gil", None) == 1:
        return f"{python}, but the GIL is on: PYTHON_GIL=1, or -X gil=1, asks for it"
    module = turned_on_by()
    whose = f"the extension module {module}" if module else "an extension module"
    return (
        f"{python}, but the GIL is on: {whose} has not declared that it needs none; use a version "
        "that does, or, if you know that it is safe, PYTHON_GIL=0"
    )
