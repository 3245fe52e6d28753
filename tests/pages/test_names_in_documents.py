"""The pages for changes to ingress name only what is in its code."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ingress"
PAGES = ("architecture.md", "concurrency.md")
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"_?[A-Za-z][\w.]*")
PATH = re.compile(r"[a-z_]+(?:/[a-z_]+)+(?:\.[\w.]+)?/?")
OTHERS = {"plugins"}  # an option of mypy


class Names(ast.NodeVisitor):
    """The names in the code of the package, and the attributes of its classes."""

    def __init__(self) -> None:
        self.all: set[str] = set()
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.attributes: dict[str, set[str]] = defaultdict(set)
        self._classes: list[str] = []
        for path in PACKAGE.rglob("*.py"):
            self.all.update(path.relative_to(ROOT).with_suffix("").parts)
            self.visit(ast.parse(path.read_text()))

    def _note(self, name: str) -> None:
        self.all.add(name)
        if self._classes:
            self.attributes[self._classes[-1]].add(name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._note(node.name)
        self.bases[node.name].update(
            each.id for base in node.bases for each in ast.walk(base) if isinstance(each, ast.Name)
        )
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._note(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node.attr)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._note(node.arg)
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.all.update(node.name.split("."))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self._note(node.value)  # in `__slots__`

    def of(self, name: str) -> set[str]:
        found = set(self.attributes[name])
        for base in self.bases[name]:
            found |= self.of(base)
        return found


@cache
def texts_of_tests() -> dict[str, str]:
    """Return the texts of the files of tests, by their names."""
    return {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


@cache
def names() -> Names:
    return Names()


def rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [each.strip() for each in line.strip("|").split(" | ")]


def unknown(page: str) -> Iterator[str]:
    """Yield the names of a page that the code does not have."""
    known = names()
    for token in CODE.findall((ROOT / "docs" / page).read_text()):
        name = token.removesuffix("()").partition("(")[0].lstrip("@")
        files = PACKAGE / name, ROOT / name
        is_test = name in texts_of_tests()
        if is_test or name.endswith("...") or any(each.exists() for each in files):
            continue
        if PATH.fullmatch(name):
            path, _, attribute = name.rstrip("/").partition(".")
            is_here = any((PACKAGE / f"{path}{end}").exists() for end in ("", ".py"))
            if not is_here or (attribute and attribute not in known.all):
                yield token
        elif DOTTED.fullmatch(name):
            first, *rest = name.split(".")
            is_class = first in known.bases and bool(rest)
            here = known.of(first) if is_class else known.all | set(dir(builtins)) | OTHERS
            if not set(rest[:1] if is_class else [first, *rest]) <= here:
                yield token


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_what_the_code_has(page: str) -> None:
    assert [*unknown(page)] == []


def test_the_fields_of_each_class_are_its_own() -> None:
    text = (ROOT / "docs/concurrency.md").read_text()
    table = text[text.index("## Writers of each class") : text.index("## Races")]
    classes: set[str] = set()
    wrong = []
    for first, written, *_ in rows(table):
        tokens = CODE.findall(first)
        classes = {each for each in tokens if each in names().bases} or (
            set() if first else classes
        )
        own = set().union(*map(names().of, classes))
        fields = {*tokens, *CODE.findall(written)} - classes
        if classes:
            is_field = str.isidentifier
            wrong += [
                f"{sorted(classes)}: {each}"
                for each in fields
                if is_field(each) and not keyword.iskeyword(each) and each not in own
            ]
    assert wrong == []


def test_each_race_has_its_test() -> None:
    text = (ROOT / "docs/concurrency.md").read_text()
    written = "\n".join(texts_of_tests().values())
    missing = []
    for *_, cell in rows(text[text.index("## Races") :]):
        for token in CODE.findall(cell):
            words = r"\w*".join(each for each in token.split("...") if each)
            if token not in texts_of_tests() and not re.search(rf"def test_\w*{words}", written):
                missing.append(token)
    assert missing == []
