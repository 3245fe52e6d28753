"""The explanation of a result that cannot become a response: one sentence for its author.

    Api.get (app.py:21) returned a dict with a DeploymentResponse at ['answer']; write `await`
    Api.get (app.py:21) returned a list with a Lock at [0], which cannot become JSON

Such an error is raised in the encoder, thirty frames away from the line at fault, and none of them
is the user's. The sentence is added to the error, whose type stays, and is logged in the place of
its traceback.
"""

from __future__ import annotations

import ast
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from textwrap import dedent
from traceback import walk_tb
from types import CodeType

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import ResponseValidationError
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import JSONResponse
from starlette.types import Scope

from ingress.app.asgi.compat import serialize_response
from ingress.app.asgi.dependencies import target_of
from ingress.app.asgi.methods import GENERATORS
from ingress.core.base.foreign import advisory
from ingress.core.execution.execution import code_of, kind, name_of
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import is_users, last_line
from ingress.telemetry.tracebacks import ExplainingNote

_UNAWAITED = "A DeploymentResponse is not the answer yet: write `await` where the call is made."
_MOST = 10_000  # parts of a value that are looked at
_DEEPEST = 40
_ENCODERS = {
    getattr(encoder, "__code__", None): name
    for encoder, name in (
        (jsonable_encoder, "obj"),
        (serialize_response, "response_content"),
        (JSONResponse.render, "content"),
    )
}
"""The functions that get a value to encode, and the names of their parameters for it."""
_OURS = {"by_encoder": "result", "by_field": "result", "_to_json": "value"}


def explain(error: BaseException, func: Callable[..., object] | None) -> None:
    """Add the sentence to an error, if it is about the result of user code.

    `func` is the user's function that answered the request, `None` if it is not known. Its failure,
    of user code that the look at a value may call, is no other error of the request.
    """
    with advisory("the explanation of an error"):
        if isinstance(error, Exception) and (sentence := _sentence(error, func)):
            error.add_note(ExplainingNote(sentence))
        elif type(error) is TypeError and "'DeploymentResponse'" in str(error):
            error.add_note(_UNAWAITED)  # Python's text names the class, in a line of the user's


def endpoint_of(scope: Scope) -> Callable[..., object] | None:
    """Return the user's endpoint that the request was routed to, `None` if there is none."""
    target = target_of(scope.get("route"))
    return scope.get("endpoint") if target is None else target.func


def _sentence(error: Exception, func: Callable[..., object] | None) -> str:
    is_invalid = isinstance(error, ResponseValidationError)
    values = [error.body] if isinstance(error, ResponseValidationError) else _encoded(error)
    if not values:
        return ""
    result = values[0]
    parts = list(_parts(result))
    for path, part in parts:
        if hasattr(part, "__anext__"):
            return f"{_told(func, result, path, part)}; iterate it with `async for`"
        if inspect.isawaitable(part):
            is_async = func is None or kind(func).is_async
            advice = "write `await`" if is_async else "write `async def` and `await`"
            return f"{_told(func, result, path, part)}; {advice}"
    if is_invalid:
        return ""  # FastAPI's text names the endpoint, its line and the value
    path, part = _culprit(error, parts, values[-1])
    reason = "" if _names_type_only(error) else f": {last_line(error)}"
    return f"{_told(func, result, path, part)}, which cannot become JSON{reason}"


def _encoded(error: BaseException) -> list[object]:
    """Return the values that were being encoded when an error was raised, the innermost last.

    There are none if user code has raised it.
    """
    found: list[object] = []
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
        name = _ENCODERS.get(code)
        if name is None and frame.f_globals.get("__name__", "").startswith("ingress.app.asgi."):
            name = _OURS.get(code.co_name)
        if name is not None:
            found.append(frame.f_locals[name])
        elif is_users(code.co_filename):
            found.clear()
    cause = error.__cause__ or error.__context__
    while found and cause is not None:
        if any(is_users(each.f_code.co_filename) for each, _ in walk_tb(cause.__traceback__)):
            return []
        cause = cause.__cause__ or cause.__context__
    return found


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of a value that an encoder would look at, each with its path."""
    todo = deque([("", value, 0)])
    for _ in range(_MOST):
        if not todo:
            return
        path, part, depth = todo.popleft()
        yield path, part
        if depth < _DEEPEST:
            todo.extend((f"{path}{step}", each, depth + 1) for step, each in _members(part))


def _members(part: object) -> Iterator[tuple[str, object]]:
    match part:
        case Mapping():
            yield from ((f"[{key!r}]", each) for key, each in part.items())
        case list() | tuple() | set() | frozenset() | deque():
            yield from ((f"[{index}]", each) for index, each in enumerate(part))
        case BaseModel():
            yield from ((f".{name}", each) for name, each in vars(part).items())
        case _ if is_dataclass(part) and not isinstance(part, type):
            yield from ((f".{each.name}", getattr(part, each.name)) for each in fields(part))


def _culprit(
    error: Exception, parts: list[tuple[str, object]], innermost: object
) -> tuple[str, object]:
    """Return the part of a result that no encoder takes, with its path."""
    found = [each for each in parts if each[1] is innermost]
    leaves = [each for each in parts if not any(_members(each[1])) and not _is_json(each[1])]
    if found and not any(_members(innermost)):
        return found[-1]
    return next(iter(leaves), parts[0])


def _is_json(part: object) -> bool:
    try:
        to_json(part, inf_nan_mode="constants")
    except Exception:
        logger.debug("%s cannot become JSON", _a(part), exc_info=True)
        return False
    return not (isinstance(part, float) and part - part != 0)


def _names_type_only(error: Exception) -> bool:
    """Return whether the text of an error says no more than the type of the value."""
    told = isinstance(error, PydanticSerializationError) and "unknown type" in str(error)
    return told or (isinstance(error, ValueError) and str(error).startswith("[TypeError("))


# Words.


def _told(func: Callable[..., object] | None, result: object, path: str, part: object) -> str:
    what = f"{_a(result)} with {_a(part)} at {path}" if path else _a(part)
    if func is None:
        return f"An endpoint returned {what}"
    code = code_of(inspect.unwrap(func))
    place = "" if code is None else f" ({code.co_filename}:{_line_in(code)})"
    verb = "yielded" if kind(func) in GENERATORS else "returned"
    return f"{name_of(func)}{place} {verb} {what}"


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# The line.


@lru_cache(maxsize=1000)  # read once: clients may cause such errors again and again
def _line_in(code: CodeType) -> int:
    """Return the line where a function returns or yields, or its own if there are several."""
    try:
        lines, first = inspect.getsourcelines(code)
        function = ast.parse(dedent("".join(lines))).body[0]
    except (OSError, SyntaxError):  # made by `exec`, or a lambda in the middle of a statement
        return code.co_firstlineno
    nodes = own_nodes(function)
    found = [each for each in nodes if isinstance(each, ast.Return | ast.Yield) and each.value]
    return first - 1 + getattr(found[0] if len(found) == 1 else function, "lineno", 1)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, in order, without those of functions inside it."""
    for each in ast.iter_child_nodes(function):
        yield each
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from own_nodes(each)
