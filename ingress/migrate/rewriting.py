"""One file of Ray Serve's users: its imports and dotted names rewritten, and the rest found.

Only the spans of these names change; all other text stays as it is.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingress.migrate import advice, keywords, names
from ingress.migrate.bindings import Bindings, Scope, chain
from ingress.migrate.imports import SERVE, items_of, written

_NEWLINE = re.compile(r"\r\n|\r|\n")
_DOTTED = re.compile(r"\w+\s*\.\s*serve")
_ABOUT_MODULES = {"import_module", "__import__", "importorskip", "patch", "setattr"}
_RAYS_PATH = re.compile(r"ray\.serve(\.\w+)*")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that needs a hand. `line` and `column` count from 1."""

    line: int
    column: int
    name: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new text of a file, and its findings, whose lines are those of the old text."""

    text: str
    findings: list[Finding]


def rewritten(text: str) -> Rewritten:
    """Rewrite the text of a file. Raises `SyntaxError` or `ValueError` if it is no Python."""
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(text)
        rewriter = _Rewriter(text, Bindings(text, tree))
        result = rewriter.run()
        ast.parse(result.text)
    return result


@dataclass(slots=True)
class _Rewriter:
    text: str
    bindings: Bindings
    edits: dict[tuple[int, int], str] = field(default_factory=dict)
    findings: set[Finding] = field(default_factory=set)
    kept: set[tuple[Scope, str]] = field(default_factory=set)
    """The names that some code still uses for Ray itself."""
    dotted: set[Scope] = field(default_factory=set)
    """The scopes whose `ray.serve` became a name of ingress."""
    lines: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    prefix: str = "ingress"
    removed: Counter[int] = field(default_factory=Counter)

    def run(self) -> Rewritten:
        begins = [0, *(match.end() for match in _NEWLINE.finditer(self.text))]
        self.starts = begins
        self.lines = [
            self.text[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)
        ]
        self.prefix = self._free_name()
        for node, scope in self.bindings.nodes:
            self._look(node, scope)
        for node, scope in self.bindings.nodes:
            match node:
                case ast.Import():
                    self._import(node, scope)
                case ast.ImportFrom(level=0):
                    self._import_from(node)
        text = self.text
        for (begin, end), new in sorted(self.edits.items(), reverse=True):
            text = text[:begin] + new + text[end:]
        return Rewritten(text, sorted(self.findings, key=lambda each: (each.line, each.column)))

    # What the code uses

    def _look(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Name() | ast.Attribute():
                if (found := self._full(node, scope)) is not None:
                    self._use(node, *found)
                elif isinstance(node, ast.Attribute) and node.attr.startswith("_to_object_ref"):
                    self._tell(node, f".{node.attr}", advice.CORE["ObjectRef"])
            case ast.Call():
                self._call(node, scope)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "runtime_env":
                        self._tell_all(keywords.in_runtime_env(value))
            case ast.Assign([ast.Name("__all__")], ast.List(exported) | ast.Tuple(exported)):
                for each in exported:
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        bound = scope.find(each.value)
                        if bound is not None and bound[1] == "ray":
                            self.kept.add((bound[0], each.value))
                            self._tell(each, "ray", advice.EXPORTED)

    def _full(self, node: ast.AST, scope: Scope) -> tuple[Scope, str, list[str]] | None:
        """Return the scope and name of a binding of Ray, and the full name that a node means."""
        parts = chain(node)
        if parts is None or (found := scope.find(parts[0].id)) is None:
            return None
        if isinstance(parts[0].ctx, ast.Store | ast.Del):
            return None
        path = [*found[1].split("."), *(each.attr for each in parts[1])]
        return found[0], parts[0].id, path

    def _use(self, node: ast.Name | ast.Attribute, home: Scope, name: str, path: list[str]) -> None:
        parts = chain(node)
        assert parts is not None
        bound = home.names[name].split(".")
        if path[:2] == ["ray", "serve"]:
            lacks = names.lack(path[2:])
            if lacks and not (len(bound) > 2 and names.lack(bound[2:])):  # else at its import
                self._tell(node, ".".join(path), lacks)
            if bound == ["ray"] and (lacks or not self._rename(parts[1][0], home)):
                self.kept.add((home, name))
        elif len(path) == 1:
            self.kept.add((home, name))
            self._tell(node, "ray", advice.MODULE)
        else:
            self.kept.add((home, name))
            if len(bound) <= 2:
                fix = advice.for_core(tuple(path[1:]))
                decorated = next(
                    (each for key, each in self.bindings.decorated.items() if _called(key) is node),
                    None,
                )
                if path[1] == "remote" and isinstance(decorated, ast.ClassDef):
                    fix = advice.ACTOR
                self._tell(node, ".".join(path), fix)

    def _rename(self, node: ast.Attribute, home: Scope) -> bool:
        """Put the name of ingress in the place of `ray.serve`. Returns False if it cannot."""
        span = self._span(node)
        if not _DOTTED.fullmatch(self.text[slice(*span)]):  # in an f-string of Python 3.11
            self._tell(node, "ray.serve", advice.BY_HAND)
            return False
        self.edits[span] = self.prefix
        self.dotted.add(home)
        return True

    def _call(self, node: ast.Call, scope: Scope) -> None:
        found = self._full(node.func, scope)
        path = found[2][2:] if found is not None and found[2][:2] == ["ray", "serve"] else []
        self._tell_all(keywords.in_call(node, path, has_serve=self.bindings.has_serve))
        for keyword in node.keywords:
            if keyword.arg == "runtime_env":
                self._tell_all(keywords.in_runtime_env(keyword.value))
        last = chain(node.func)
        name = (last[1][-1].attr if last[1] else last[0].id) if last else ""
        for each in node.args[:1] if name in _ABOUT_MODULES else []:
            value = each.value if isinstance(each, ast.Constant) else None
            if isinstance(value, str) and _RAYS_PATH.fullmatch(value):
                self._tell(each, f'"{value}"', advice.A_STRING)

    # Its imports

    def _import(self, node: ast.Import, scope: Scope) -> None:
        old = [each.name + (f" as {each.asname}" if each.asname else "") for each in node.names]
        new: list[str] = []
        for text, alias in zip(old, node.names, strict=True):
            new += self._import_of(alias, text, scope)
        new = list(dict.fromkeys(new))
        if new == old:
            return
        if not new:
            self._remove(node)
            return
        begin, end = self._span(node)
        if len(node.names) == 1 and self._begins_line(begin):
            joint = f"{self._newline()}{self._indent(begin)}"
            self.edits[begin, end] = joint.join(f"import {each}" for each in new)
        else:
            first, last = self._span(node.names[0])[0], self._span(node.names[-1])[1]
            self.edits[first, last] = ", ".join(new)

    def _import_of(self, alias: ast.alias, text: str, scope: Scope) -> list[str]:
        """Return the imports in the place of one."""
        first, *rest = alias.name.split(".")
        if first != "ray":
            return [text]
        name = alias.asname or "ray"
        is_kept = (scope, name) in self.kept
        serve = "ingress" if self.prefix == "ingress" else f"ingress as {self.prefix}"
        if not rest:
            has_serve = self._has_import(scope, "ray.serve")
            added = [serve] if scope in self.dotted and not has_serve else []
            return [*added, *([text] if is_kept else [])]
        if rest[0] != "serve":
            self._tell(alias, alias.name, advice.for_core(tuple(rest)))
            return [text]
        if not names.is_module(rest[1:]):
            self._tell(alias, alias.name, names.remedy(rest[1:]))
            return [text]
        ours = ".".join(["ingress", *rest[1:]])
        if alias.asname:
            return [f"{ours} as {alias.asname}"]
        added = ["ray"] if is_kept and not self._has_import(scope, "ray") else []
        return [ours if self.prefix == "ingress" else serve, *added]

    def _has_import(self, scope: Scope, module: str) -> bool:
        """Return whether a scope has an `import` of a module, or of `ray.serve` one within."""
        for node, where in self.bindings.nodes:
            if isinstance(node, ast.Import) and where is scope:
                for alias in node.names:
                    is_within = module != "ray" and alias.name.startswith(f"{module}.")
                    if not alias.asname and (alias.name == module or is_within):
                        return True
        return False

    def _import_from(self, node: ast.ImportFrom) -> None:
        first, *rest = (node.module or "").split(".")
        if first != "ray":
            return
        modules = [self._module_of(alias, rest, node) for alias in node.names]
        if all(each == node.module for each in modules):
            return
        begin, end = self._span(node)
        segment = self.text[begin:end]
        if len({*modules}) == 1 and modules[0] != SERVE:
            pattern = r"(from(?:\s|\\)+)" + r"\s*\.\s*".join([first, *rest])
            if found := re.match(pattern, segment):
                self.edits[begin + found.end(1), begin + found.end()] = modules[0]
                return
        items = items_of(node, segment, modules)
        has_comments = any(each.has_comments for each in items)
        if self._begins_line(begin) and (self._ends_line(end) or not has_comments):
            new = written(items, self._indent(begin), self._newline())
        elif has_comments:
            self._tell(node, f"from {node.module} import ...", advice.BY_HAND)
            return
        else:
            new = written(items, "", "; ")
        self.edits[begin, end] = new

    def _module_of(self, alias: ast.alias, rest: list[str], node: ast.ImportFrom) -> str:
        """Return the module to import one name from: that of the statement if there is no other."""
        module = node.module or ""
        full = f"{module}.{alias.name}"
        if full == "ray.serve":
            return SERVE
        if alias.name == "*":
            self._tell(alias, full, advice.STAR)
        elif rest[:1] == ["serve"]:
            if (found := names.target(rest[1:], alias.name)) is not None:
                return found
            self._tell(alias, full, names.remedy([*rest[1:], alias.name]))
        else:
            name = alias.asname or alias.name
            is_used = any(name == each for _, each in self.kept)
            if rest or not is_used:  # else it is found where it is used
                self._tell(alias, full, advice.for_core((*rest, alias.name)))
        return module

    def _remove(self, node: ast.stmt) -> None:
        parent, block = self.bindings.blocks[node]
        begin, end = self._span(node)
        if len(block) - self.removed[id(block)] == 1:
            if isinstance(parent, ast.Try):
                self._tell(node, "import ray", advice.PROBED)
            elif isinstance(parent, ast.Module):
                self._remove_line(begin, end)
            else:
                self.edits[begin, end] = "pass"
            return
        self.removed[id(block)] += 1
        if self._begins_line(begin) and self._ends_line(end):
            self._remove_line(begin, end)
        else:
            self.edits[begin, end] = "pass"

    def _remove_line(self, begin: int, end: int) -> None:
        """Remove whole lines, and one of two blank lines that would then meet."""
        first = bisect_right(self.starts, begin) - 1
        last = bisect_right(self.starts, end) - 1
        is_after_blank = first == 0 or not self.lines[first - 1].strip()
        if is_after_blank and last + 1 < len(self.lines) and not self.lines[last + 1].strip():
            last += 1
        start = self.starts[first]
        self.edits[start, start + sum(map(len, self.lines[first : last + 1]))] = ""

    # Places

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Return the begin and end of a node in the text; `ast` counts bytes of UTF-8."""
        begin = self._index(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
        end = self._index(getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0))
        return begin, end

    def _index(self, line: int, column: int) -> int:
        head = self.lines[line - 1].encode()[:column].decode(errors="ignore")
        return self.starts[line - 1] + len(head)

    def _begins_line(self, begin: int) -> bool:
        return not self._indent(begin).strip()

    def _indent(self, begin: int) -> str:
        return self.text[self.starts[bisect_right(self.starts, begin) - 1] : begin]

    def _ends_line(self, end: int) -> bool:
        return re.match(r"[ \t\f]*(#.*)?(?:[\r\n]|$)", self.text[end:]) is not None

    def _newline(self) -> str:
        found = _NEWLINE.search(self.text)
        return found.group() if found else "\n"

    def _free_name(self) -> str:
        """Return the name for ingress: another one if the file has its own `ingress`."""
        scopes = {scope for _, scope in self.bindings.nodes}
        taken = {name for scope in scopes for name in scope.names}
        others = {
            name
            for scope in scopes
            for name, full in scope.names.items()
            if name == "ingress" and full != "ray.serve"
        }
        if not others:
            return "ingress"
        return "serve" if "serve" not in taken else "ingress_serve"

    def _tell(self, node: ast.AST, name: str, fix: str) -> None:
        line = getattr(node, "lineno", 1)
        column = self._index(line, getattr(node, "col_offset", 0)) - self.starts[line - 1] + 1
        self.findings.add(Finding(line, column, name, fix))

    def _tell_all(self, found: Iterator[keywords.Found]) -> None:
        for node, name, fix in found:
            self._tell(node, name, fix)


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node
