"""The user's class and its constructor arguments, as they travel to a child.

by path     the child imports the module; for a script, the file of `__main__`
by value    no module has it: it is made in a function, or in a notebook. Needs cloudpickle
arguments   pickled, with slots for handles
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from starlette.datastructures import State

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.names import found_in, names_of
from ingress.serving.processes.frames import dumps, loads, pickle_by_value
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import last_line as described

_MAIN = "__mp_main__"
"""The name of the parent's script in a child, as for `multiprocessing`: its guard is false."""
_DEPTH = 8


Code: TypeAlias = type | FunctionType
Reference: TypeAlias = Callable[[], Code]
"""A class or function as it travels: a `partial`, which finds it where it arrives."""


def by_path(module: str, name: str, main: str, is_module: bool) -> Code:
    """Import a class or function under a name of its module, or of the script `main`.

    `main` is the script's path, or the name of the module that `python -m` runs, if `is_module`.
    Raises `ImportError` if this process cannot.
    """
    found = import_main(main, is_module=is_module) if main else importlib.import_module(module)
    target = found_in(found, name)
    if target is None:
        raise ImportError(f"{main or module!r} has no {name!r} in a child")
    return target


def by_value(pickled: bytes) -> Code:
    """Return a class or function that no child can import, pickled by cloudpickle."""
    pickle_by_value()
    target: Code = loads(pickled)
    return target


def reference_to(built: BuiltDeployment) -> Reference:
    """Return the reference to a deployment's class or function.

    From then on this process knows the objects of a script's classes, and those of classes that
    no module has. Raises `TypeError` if a child can neither import nor unpickle it.
    """
    target = built.deployment.func_or_class
    module = sys.modules.get(target.__module__)
    if module is not None:
        main, is_module = _script() if module.__name__ == "__main__" else ("", False)
        if main or module.__name__ != "__main__":
            for name in names_of(module, target):
                if main:
                    accept_main()
                return partial(by_path, module.__name__, name, main, is_module)
    if importlib.util.find_spec("cloudpickle") is None:
        raise TypeError(
            f"deployment {built.name!r}: no module has {target.__qualname__}, so a child process "
            "cannot import it; put it at the top of a module, or install cloudpickle"
        )
    try:
        pickled = pickled_code(target, importlib.import_module("cloudpickle"))
    except Exception as error:
        raise TypeError(
            f"deployment {built.name!r}: {target.__qualname__} cannot be sent to a child process: "
            f"{error}; put it at the top of a module"
        ) from error
    pickle_by_value()
    return partial(by_value, pickled)


def pickled_code(target: type | FunctionType, cloudpickle: Any) -> bytes:
    """Return a class or function, pickled by value. `cloudpickle` is that module, or Ray's copy.

    It may contain the parts of a FastAPI app: locks, which arrive unlocked, and a `State`, whose
    `__getattr__` recurses in the default pickler.
    """

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> object:
            if isinstance(obj, _LOCKS):
                return (threading.Lock if type(obj) is _LOCKS[0] else threading.RLock), ()
            if isinstance(obj, State):
                return State, ({name: obj[name] for name in obj},)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(target)
        return file.getvalue()


_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _script() -> tuple[str, bool]:
    """Return `main` and `is_module` of this process's script; "" if it was not started with one."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # the name in a folder or an archive
        return spec.name, True
    path = getattr(main, "__file__", None) or ""
    return (path if os.path.isfile(path) else ""), False  # "<stdin>" is none


def import_main(main: str, *, is_module: bool = False) -> ModuleType:
    """Run the parent's script, once, as the module `__main__` of this process."""
    if _MAIN not in sys.modules:
        module = ModuleType(_MAIN)
        if is_module:  # with its package, to which its imports may be relative
            vars(module).update(runpy.run_module(main, run_name=_MAIN, alter_sys=True))
        else:
            vars(module).update(runpy.run_path(main, run_name=_MAIN))
        sys.modules["__main__"] = sys.modules[_MAIN] = module
    return sys.modules[_MAIN]


def imported(replica: object, names: Sequence[str]) -> list[str]:
    """Return those of these modules that a child has imported; for `ProcessHost.look`."""
    return [each for each in names if each in sys.modules]


def accept_main() -> None:
    """Make objects of the script's classes that children pickle known in this process."""
    if "__main__" in sys.modules:
        sys.modules.setdefault(_MAIN, sys.modules["__main__"])


def pickled_arguments(built: BuiltDeployment) -> bytes:
    """Return the pickled constructor arguments. Raises `TypeError` that names the faulty part."""
    arguments = (built.init_args, built.init_kwargs)
    try:
        return dumps(arguments)
    except Exception as error:
        path = culprit(built.init_args, "args") or culprit(built.init_kwargs, "kwargs")
        raise TypeError(
            f"deployment {built.name!r}: its constructor argument {path} cannot be pickled, and so "
            f"not be sent to a child process: {described(error)}; make it in the constructor, or "
            'use isolation="thread"'
        ) from error


def culprit(value: object, path: str, depth: int = _DEPTH) -> str:
    """Return the path to the innermost part of a value that cannot be pickled; "" for none."""
    try:
        dumps(value)
    except Exception:
        logger.debug("%s cannot be pickled", path, exc_info=True)
        with suppress(Exception):  # of a key whose `repr` fails, say
            for name, part in _parts(value, path) if depth else ():
                if found := culprit(part, name, depth - 1):
                    return found
        return path
    return ""


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}", part) for name, part in attributes.items())
