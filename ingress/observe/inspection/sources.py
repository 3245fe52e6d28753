"""The tasks, streams and files that a function hands to Starlette, read from its source.

    tasks.add_task(f, ...), BackgroundTask(f)   a background task
    StreamingResponse(f(...))                   a stream
    return f(...), of a generator function      a returned generator
    FileResponse(...)                           a file

No user code is called. A name is looked up where the function would find it. A value that exists
only at run time, such as a parameter, stays unknown: `func` is `None`.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import FileResponse, StreamingResponse

from ingress.app.asgi.bad_results import own_nodes
from ingress.app.batching.batching import RECEIVERS
from ingress.core.base.foreign import stored, unwrapped
from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import Kind, code_of, kind

_CLASSES = (BackgroundTask, FileResponse, StreamingResponse)


class Use(Enum):
    """The use of a mentioned callable. The values are the words that users read."""

    TASK = "background task"
    STREAM = "stream"
    RETURNED = "returned generator"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Mention:
    """A callable that a function hands over. `text` is its expression in the source."""

    use: Use
    func: Callable[..., object] | None
    text: str

    @property
    def key(self) -> tuple[Use, CodeType | None, str]:
        """The key of a mention, equal for two mentions of the same code."""
        return self.use, code_of(self.func) if self.func is not None else None, self.text


def mentions(func: Callable[..., object], owner: type | None = None) -> Iterator[Mention]:
    """Yield the callables that `func` hands over; `owner` is the class of its `self`."""
    function = unwrapped(func)
    function = stored(function, "__func__", function)
    if not isinstance(function, FunctionType) or not _may_mention(function):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return  # no file, or a lambda in the middle of a line
    names = _Names(function, owner)
    seen = set()
    for node in own_nodes(tree.body[0]):
        for mention in names.read(node):
            if mention.key not in seen:
                seen.add(mention.key)
                yield mention


def _may_mention(function: FunctionType) -> bool:
    """Return whether the source may hold mentions: reading it costs a hundred times this check."""
    code = function.__code__
    if "add_task" in code.co_names or any(isinstance(each, CodeType) for each in code.co_consts):
        return True
    known = {cls.__name__ for cls in _CLASSES}
    found = (function.__globals__.get(name) for name in code.co_names)
    return not known.isdisjoint(code.co_names) or any(
        _is_one(each, _CLASSES) or _is_generator_function(each) for each in found if callable(each)
    )


class _Names:
    """The resolver of the names in one function."""

    def __init__(self, function: FunctionType, owner: type | None) -> None:
        self._function = function
        self._owner = owner
        first = next(iter(signature_of(function).parameters), None)
        self._self = first if first in RECEIVERS else None
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = dict(cells)

    def read(self, node: ast.AST) -> Iterator[Mention]:
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            func = self.find(node.value.func)
            if _is_generator_function(func):
                yield Mention(Use.RETURNED, func, ast.unparse(node.value))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.GeneratorExp):
            yield Mention(Use.RETURNED, self.find(node.value), "a generator expression")
        if not isinstance(node, ast.Call):
            return
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_task":
            yield self._mention(Use.TASK, first or _keyword(node, "func"))
            return
        called = self.find(node.func)
        if _is_one(called, (BackgroundTask,)):
            if first is not None or _keyword(node, "func") is not None:  # not `BackgroundTasks()`
                yield self._mention(Use.TASK, first or _keyword(node, "func"))
        elif _is_one(called, (StreamingResponse,)):
            content = first or _keyword(node, "content")
            body = content.func if isinstance(content, ast.Call) else content
            mention = self._mention(Use.STREAM, body)
            is_known = _is_generator_function(mention.func)
            yield mention if is_known else Mention(Use.STREAM, None, mention.text)
        elif _is_one(called, (FileResponse,)):
            yield Mention(Use.FILE, open, called.__name__)

    def _mention(self, use: Use, node: ast.expr | None) -> Mention:
        if node is None:
            return Mention(use, None, "?")
        func = self.find(node)
        return Mention(use, func if callable(func) else None, ast.unparse(node))

    def find(self, node: ast.expr) -> Any:
        """Return the value of an expression, `None` if it is not known before it runs."""
        match node:
            case ast.Name(name):
                return self._named(name)
            case ast.Attribute(owner, name):
                is_self = isinstance(owner, ast.Name) and owner.id == self._self
                return _attribute(self._owner if is_self else self.find(owner), name)
            case ast.Lambda():
                return self._inner("<lambda>")
            case ast.GeneratorExp():
                return self._inner("<genexpr>")
            case ast.Call(func, [first, *_]) if self.find(func) is partial:
                return self.find(first)
        return None

    def _named(self, name: str) -> object:
        if (inner := self._inner(name)) is not None:
            return inner
        code = self._function.__code__
        if name in code.co_varnames or name in code.co_cellvars:
            return None
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:  # defined further down, so not yet defined
                return None
        return self._function.__globals__.get(name, getattr(builtins, name, None))

    def _inner(self, name: str) -> FunctionType | None:
        """Return an inner function, with its code but without values: it must not be called."""
        found = [
            const
            for const in self._function.__code__.co_consts
            if isinstance(const, CodeType) and const.co_name == name
        ]
        if len(found) != 1:
            return None
        (code,) = found
        cells = tuple(CellType() for _ in code.co_freevars)
        inner = FunctionType(code, self._function.__globals__, name, None, cells)
        inner.__qualname__ = code.co_qualname
        return inner


def _attribute(base: object, name: str) -> Any:
    """Return an attribute without running user code; of an instance, its class's attribute."""
    if base is None:
        return None
    found = inspect.getattr_static(base, name, None)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def _is_generator_function(value: object) -> bool:
    return callable(value) and kind(value) in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)


def _is_one(value: object, classes: tuple[type, ...]) -> bool:
    return isinstance(value, type) and issubclass(value, classes)
