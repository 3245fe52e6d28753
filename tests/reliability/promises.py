"""The promises by id, and the tests that carry each id."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"
MARK = "pytest.mark.reliability"


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise. `not_yet` names the missing part; such a promise has no test."""

    id: str
    promise: str
    note: str = ""
    not_yet: str = ""


def promises() -> list[Promise]:
    """Return all promises in the order of their ids."""
    text = (Path(__file__).parent / "promises.toml").read_text()
    return [Promise(id, **fields) for id, fields in tomllib.loads(text).items()]


def carriers() -> dict[str, list[str]]:
    """Return the tests that carry each id, as `tests/file.py::test`, read from their source."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text()
        if MARK in source:
            name = path.relative_to(ROOT).as_posix()
            for ids, test in _marked(ast.parse(source)):
                for id in ids:
                    found[id].append(f"{name}::{test}")
    return dict(found)


def _marked(module: ast.Module) -> list[tuple[list[str], str]]:
    """Return ids and name of each test of a module that has the mark, itself or by the module."""
    of_all: list[str] = []
    tests: list[tuple[list[str], str]] = []
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                of_all = _ids(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.startswith("Test"):
                tests.append((_ids(value), name))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test_"):
                ids = [id for each in node.decorator_list for id in _ids(each)]
                tests.append((ids, node.name))
    return [([*of_all, *ids], name) for ids, name in tests]


def _ids(node: ast.expr) -> list[str]:
    """Return the ids of every mark in an expression."""
    return [
        argument.value
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == MARK
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
