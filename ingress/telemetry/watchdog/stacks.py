"""A thread's stack, read from its frames by another thread.

    users     code outside the standard library, the installed packages and ingress
    place     the innermost line of user code, whatever library call it waits in
    imports   the module that is imported; `place` is then the line that imports it
    method    the user's method that ingress called, by its name in `execution`

A thread runs on while its frames are read. The lines may be a few steps apart, but never invalid.
Each sample is one of several, and they vote.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from asyncio.events import Handle
from collections.abc import Callable
from contextvars import Context, ContextVar
from dataclasses import dataclass
from traceback import walk_stack, walk_tb
from types import AsyncGeneratorType, CodeType, FrameType
from typing import Any, TypeVar

from ingress.context import ReplicaRuntime
from ingress.core.base import gil
from ingress.core.base.libraries import is_library
from ingress.core.calls.loops import Mailbox
from ingress.core.execution.execution import ExecutionPlan

T = TypeVar("T")

_DEPTH = 64  # lines kept of a stack
_DEBUGGERS = frozenset(("bdb", "debugpy", "pydevd", "_pydevd_bundle"))
_PLANS = frozenset(
    getattr(ExecutionPlan, name).__code__ for name in ("run", "run_part", "iterate", "items")
)
_DISPATCH = frozenset((Mailbox._drain.__code__, Handle._run.__code__))
_IMPORT = "<frozen importlib._bootstrap>", "_find_and_load"
_LOOPS = frozenset(("asyncio.base_events", "asyncio.events", "asyncio.runners"))
# An asyncio loop waits in one of these modules; a uvloop loop waits in no Python frame.
_SELECTORS = frozenset(("asyncio.windows_events", "selectors"))


def current_frames() -> dict[int, FrameType]:
    """Return the frame of each other thread.

    The caller's own frame is left out: it would be in a reference cycle with the result, which
    keeps every other frame alive until the garbage collector runs.
    """
    frames = _current_frames()
    del frames[threading.get_ident()]
    return frames


def _current_frames_uncollected() -> dict[int, FrameType]:
    """Return the frame of each thread, with the garbage collector off meanwhile.

    Until 3.11.9 Python may collect in the middle of `sys._current_frames`, while it holds a lock
    that a thread with the GIL needs to start another thread. A finalizer that releases the GIL
    there deadlocks the process (python/cpython#106883). Race with code that switches the collector
    off just between these lines: it is on again.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if is_enabled:
            gc.enable()


_current_frames: Callable[[], dict[int, FrameType]] = (
    sys._current_frames if sys.version_info >= (3, 11, 9) else _current_frames_uncollected
)


@dataclass(frozen=True, slots=True)
class CodeLine:
    """One line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


NOWHERE = CodeLine("", 0, "")


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread: its lines, the innermost first.

    `place` is the innermost line of user code. Without user code it is the innermost line of all,
    and `is_users` is false. Lines of an import do not count: what they run is not what was called.
    """

    lines: tuple[CodeLine, ...] = ()
    place: CodeLine = NOWHERE
    method: str = ""
    imports: str = ""
    is_users: bool = False
    is_debugged: bool = False


EMPTY = Stack()


def awaiting(coroutine: object) -> CodeLine:
    """Return the innermost line of user code that a suspended coroutine awaits, else `NOWHERE`.

    Callable from any thread: if the coroutine runs on meanwhile, the line is one that it was at.
    """
    place = NOWHERE
    for _ in range(_DEPTH * 4):  # it may run on, and start others
        frame = _first(coroutine, "cr_frame", "ag_frame", "gi_frame")
        if frame is not None and not is_library(frame.f_code.co_filename):
            place = CodeLine(frame.f_code.co_filename, frame.f_lineno or 0, _name_of(frame.f_code))
        waits_for = _first(coroutine, "cr_await", "ag_await", "gi_yieldfrom")
        if waits_for is None and frame is None:
            # The step of an async generator, which names the generator to the collector only.
            steps = gc.get_referents(coroutine)
            waits_for = next((each for each in steps if isinstance(each, AsyncGeneratorType)), None)
        if waits_for is None:
            break
        coroutine = waits_for
    return place


def raised_at(error: BaseException) -> CodeLine:
    """Return the last line of user code that an error passed, else `NOWHERE`."""
    place = NOWHERE
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_library(code.co_filename):
            place = CodeLine(code.co_filename, line, _name_of(code))
    return place


def _first(value: object, *names: str) -> Any:
    return next((each for name in names if (each := getattr(value, name, None)) is not None), None)


def read(frame: FrameType | None, replica: ReplicaRuntime | None = None) -> Stack:
    """Return the stack of the thread whose innermost frame is `frame`.

    `replica` gives the user's package, which may be installed like any library.
    """
    package = _package_of(replica)
    lines: list[CodeLine] = []
    place = outermost = NOWHERE
    method = ""
    imports = ""
    importer = NOWHERE
    is_debugged = is_outside = False
    while frame is not None:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        name = module.partition(".")[0]
        here = CodeLine(code.co_filename, frame.f_lineno or code.co_firstlineno, _name_of(code))
        if len(lines) < _DEPTH:
            lines.append(here)
        is_outside = is_outside or module in _LOOPS  # a whole program may run in an import
        if (code.co_filename, code.co_name) == _IMPORT and not is_outside:
            imports = str(frame.f_locals.get("name", ""))
            place = outermost = importer = NOWHERE
        elif importer is NOWHERE and imports and name != "importlib":
            importer = here
        if not is_library(code.co_filename) or (name == package and package):
            outermost = here
            place = here if place is NOWHERE else place
        elif not method and code in _PLANS:
            method = frame.f_locals["self"].name
        elif name in _DEBUGGERS:
            is_debugged = True
        frame = frame.f_back
    is_users = place is not NOWHERE
    if not is_users and lines:
        place = importer if imports else lines[0]
    return Stack(tuple(lines), place, method or outermost.function, imports, is_users, is_debugged)


def is_idle(frame: FrameType | None, waits_in: CodeType | None) -> bool:
    """Return whether a thread with an event loop waits for events.

    `waits_in` is the result of `base_of_loop` for that loop.
    """
    if frame is None or frame.f_code is waits_in:
        return True
    return frame.f_globals.get("__name__") in _SELECTORS


def is_idle_worker(frame: FrameType) -> bool:
    """Return whether a worker thread of ingress has nothing to do."""
    from ingress.core.execution.threads import WorkerThreads  # imports AnyIO's backend

    return frame.f_code is WorkerThreads._main.__code__


def base_of_loop() -> CodeType | None:
    """Return the code that runs the current loop. Called from a callback of that loop.

    It is the innermost frame's while no callback runs: asyncio's `_run_once`, or the caller of
    `run_forever` of a loop that is not written in Python.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code in _DISPATCH:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def running_task(loop: asyncio.AbstractEventLoop, frame: FrameType) -> tuple[int, Context | None]:
    """Return the identity and the context of the task that runs in a thread's frames.

    0 and `None` if a callback runs, or another task than when the frames were read.
    """
    if (task := asyncio.current_task(loop)) is None:
        return 0, None
    root = getattr(task.get_coro(), "cr_frame", None)
    if root is not None and all(each is not root for each, _ in walk_stack(frame)):
        return 0, None
    return id(task), context_of(task)


def value_in(context: Context | None, variable: ContextVar[T]) -> T | None:
    """Return the value of a variable in a context that may be missing; `None` if it has none."""
    return None if context is None else context.get(variable)


def worker_context(frame: FrameType | None) -> Context | None:
    """Return a copy of the context of the call that a worker thread of ingress runs."""
    from ingress.core.execution.threads import ThreadWork  # imports AnyIO's backend

    while frame is not None:
        if frame.f_code is ThreadWork.__call__.__code__:
            return _copy(frame.f_locals["self"].context)
        frame = frame.f_back
    return None


def context_of(task: asyncio.Task[object]) -> Context | None:
    """Return a copy of the context that a task runs in. Callable from any thread."""
    get_context = getattr(task, "get_context", None)
    if get_context is not None:  # Python 3.12
        return _copy(get_context())
    found = next((each for each in gc.get_referents(task) if isinstance(each, Context)), None)
    return None if found is None else _copy(found)


def _copy(context: Context) -> Context:
    """Return a copy of a context that another thread may be running in."""
    if gil.is_on():
        return context.copy()
    # Race with a variable that is set there: without the GIL this frees the tree that `copy` reads.
    # The collector stops all threads while it lists what an object refers to. A context refers to
    # its tree of variables, which never changes, and a leaf to each value and then its variable.
    copy = Context()
    todo = [each for each in gc.get_referents(context) if not isinstance(each, Context)]
    while todo:
        found = iter(gc.get_referents(todo.pop()))
        for each in found:
            if type(each).__name__.startswith("hamt_"):
                todo.append(each)
            elif isinstance(variable := next(found, None), ContextVar):
                copy.run(variable.set, each)
    return copy


def _package_of(replica: ReplicaRuntime | None) -> str:
    servable = None if replica is None else replica.servable_object
    module = getattr(servable, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def _name_of(code: CodeType) -> str:
    """Return `Class.method`, also inside its comprehensions and lambdas."""
    names = code.co_qualname.split(".<locals>.")
    return next((name for name in reversed(names) if not name.startswith("<")), names[-1])
