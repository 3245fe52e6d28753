"""One file of Ray Serve's users: its imports and dotted names rewritten, and the rest found.

Only the spans of these names change; all other text stays as it is.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ingress._unsupported import MISPLACED
from ingress.migrate import advice
from ingress.migrate.bindings import NEWLINE, Bindings, Scope, chain, hidden_uses

_DOTTED = re.compile(r"\w+\s*\.\s*serve")
_UNUSED = re.compile(r"#.*\b(F401|unused-import)\b")
_ABOUT_MODULES = {"import_module", "__import__", "importorskip", "patch", "setattr"}
_OF_DEPLOYMENTS = {"deploy", "get_handle"}  # in earlier versions
_RAYS_PATH = re.compile(r"ray\.serve(\.\w+)*")
_WIDTH = 88
_SERVE = "ray.serve -> ingress"
"""The group of `from ray import serve`, which becomes `import ingress as serve`."""


@dataclass(frozen=True, slots=True)
class ManualFix:
    """A line that needs a hand. `line` and `column` count from 1."""

    line: int
    column: int
    name: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new text of a file, and its findings, whose lines are those of the old text."""

    text: str
    findings: list[ManualFix]


def rewritten(text: str, shared: Collection[str] = ()) -> Rewritten:
    """Rewrite the text of a file. Raises `SyntaxError` or `ValueError` if it is no Python.

    `shared` are the names that other files import from modules.
    """
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(text)
        rewriter = _Rewriter(text, Bindings(text, tree), shared)
        result = rewriter.run()
        ast.parse(result.text)
    return result


@dataclass(slots=True)
class _Rewriter:
    text: str
    bindings: Bindings
    shared: Collection[str]
    edits: dict[tuple[int, int], str] = field(default_factory=dict)
    findings: set[ManualFix] = field(default_factory=set)
    kept: set[tuple[Scope, str]] = field(default_factory=set)
    """The names that some code still uses for Ray itself."""
    whole: set[tuple[Scope, str]] = field(default_factory=set)
    """Those whose `ray.serve` is still used."""
    dotted: set[tuple[Scope, str]] = field(default_factory=set)
    """The names whose `ray.serve` became a name of ingress."""
    uses_serve: bool = False
    given: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The imports of a block so far."""
    lines: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    prefix: str = "ingress"
    removed: Counter[int] = field(default_factory=Counter)

    def run(self) -> Rewritten:
        begins = [0, *(match.end() for match in NEWLINE.finditer(self.text))]
        self.starts = begins
        self.lines = [
            self.text[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)
        ]
        self.prefix = self._free_name()
        self.uses_serve = self.bindings.has_serve
        for node, scope in self.bindings.nodes:
            if isinstance(node, ast.Attribute):
                self._look_for_serve(node, scope)
        starts = self._starts_of_ray() if self.uses_serve else {}
        later = {part for each in starts for part in ast.walk(each)}
        for node, scope in self.bindings.nodes:
            if node not in later:
                self._look(node, scope)
        for home in dict.fromkeys(scope for _, scope in self.bindings.nodes):
            for name, full in home.names.items():
                if full == "ray" and (home, name) not in self.kept and name not in home.mixed:
                    self._look_behind(home, name)
        self._remove_starts(starts)
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
                self._look_around(node, scope)
                if (found := self._full(node, scope)) is not None:
                    self._use(node, scope, *found)
                elif isinstance(node, ast.Attribute) and node.attr.startswith("_to_object_ref"):
                    self._tell(node, f".{node.attr}", advice.CORE["ObjectRef"])
            case ast.Call():
                self._call(node, scope)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "runtime_env":
                        self._tell_all(advice.in_runtime_env(value))

    def _look_for_serve(self, node: ast.Attribute, scope: Scope) -> None:
        found = self._full(node, scope)
        if found is not None and found[2][:2] == ["ray", "serve"]:
            self.uses_serve = True
            if len(found[2]) == 2 and not isinstance(node.ctx, ast.Load):
                found[0].mixed.add(found[1])  # `ray.serve = fake`

    def _starts_of_ray(self) -> dict[ast.stmt, tuple[Scope, str]]:
        """Return `ray.init()` and similar statements of the file's top, or of its `__main__`.

        Elsewhere they may belong to a fixture, or to a branch that uses Ray. The values are the
        bindings of Ray.
        """
        scope = self.bindings.nodes[0][1]  # that of the module
        top = self.bindings.tree.body
        main = [each for each in top if isinstance(each, ast.If) and _is_main(each.test)]
        inside = [each for block in main for each in block.body]
        found = {each: self._starts(each, scope) for each in (*top, *inside)}
        return {each: binding for each, binding in found.items() if binding is not None}

    def _starts(self, node: ast.stmt, scope: Scope) -> tuple[Scope, str] | None:
        """Return the binding of Ray that a statement starts or ends, `None` for another one."""
        body: list[ast.stmt] = []
        calls = [["ray", "is_initialized"]]
        match node:
            case ast.Expr(ast.Call(func, args, keywords)) if _says_nothing_here(args, keywords):
                calls = [["ray", "init"], ["ray", "shutdown"]]
            case ast.If(
                ast.UnaryOp(ast.Not(), ast.Call(func, [], [])) | ast.Call(func, [], []), body, []
            ):
                pass
            case _:
                return None
        found = self._full(func, scope)
        if found is None or found[2] not in calls:
            return None
        home, name, _ = found
        if home.names[name] != "ray" or name in home.mixed:
            return None
        return found[:2] if all(self._starts(each, scope) == found[:2] for each in body) else None

    def _remove_starts(self, starts: dict[ast.stmt, tuple[Scope, str]]) -> None:
        """Remove the statements, unless other code uses Ray: then they are findings."""
        left: set[ast.AST] = set()
        for each, binding in starts.items():
            if binding in self.kept:
                left.update(ast.walk(each))
            else:
                self._remove(each)
        for node, scope in self.bindings.nodes:
            if node in left:
                self._look(node, scope)

    def _look_around(self, node: ast.Name | ast.Attribute, scope: Scope) -> None:
        """Keep an import that a class body uses until it binds the name itself: `ray = ray`."""
        parts = chain(node)
        if parts is None or not scope.is_class or parts[0].id not in scope.names:
            return
        name, module = parts[0].id, [*scope.above()][-1]
        if module.names.get(name) == "ray" and isinstance(parts[0].ctx, ast.Load):
            self.kept.add((module, name))
            self.whole.add((module, name))
            self._tell(node, "ray", advice.MIXED)

    def _look_behind(self, home: Scope, name: str) -> None:
        """Keep the import of a name that something may use in a way that is not understood."""
        found = list(hidden_uses(self.bindings, name, is_global=home.parent is None))
        for node, scope in self.bindings.nodes:
            if isinstance(node, ast.Import) and home.parent is None and scope is home:
                found += [
                    (alias, "ray", advice.SHARED)
                    for alias in node.names
                    if (alias.asname or alias.name.partition(".")[0]) == name
                    and self._is_shared(node, alias, name)
                ]
        if found:
            self.kept.add((home, name))
            self._tell_all(iter(found))

    def _is_shared(self, node: ast.Import, alias: ast.alias, name: str) -> bool:
        """Return whether other files may use an import, or its author says that some do."""
        begin, end = self._span(node)
        line = self.text[begin:end] + self.text[end:].partition("\n")[0]
        return name in self.shared or alias.name == alias.asname or _UNUSED.search(line) is not None

    def _full(self, node: ast.AST, scope: Scope) -> tuple[Scope, str, list[str]] | None:
        """Return the scope and name of a binding of Ray, and the full name that a node means."""
        parts = chain(node)
        if parts is None or (found := scope.find(parts[0].id)) is None:
            return None
        if isinstance(parts[0].ctx, ast.Store | ast.Del):
            return None
        path = [*found[1].split("."), *(each.attr for each in parts[1])]
        return found[0], parts[0].id, path

    def _use(
        self,
        node: ast.Name | ast.Attribute,
        scope: Scope,
        home: Scope,
        name: str,
        path: list[str],
    ) -> None:
        parts = chain(node)
        assert parts is not None
        bound = home.names[name].split(".")
        if path[:2] == ["ray", "serve"]:
            lacks = advice.lack(path[2:])
            if lacks and not (len(bound) > 2 and advice.lack(bound[2:])):  # else at its import
                self._tell(node, ".".join(path), lacks)
            if bound == ["ray"] and (lacks or not self._rename(parts[1][0], scope, home, name)):
                self.kept.add((home, name))
                self.whole.add((home, name))
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

    def _rename(self, node: ast.Attribute, scope: Scope, home: Scope, name: str) -> bool:
        """Put the name of ingress in the place of `ray.serve`. Returns False if it cannot."""
        span = self._span(node)
        fix = ""
        if name in home.mixed:
            fix = advice.MIXED
        elif nested := list(_others(scope, home)):
            self.kept.update(nested)
            fix = advice.NESTED
        elif not _DOTTED.fullmatch(self.text[slice(*span)]):  # in an f-string of Python 3.11
            fix = advice.BY_HAND
        if fix:
            self._tell(node, "ray.serve", fix)
            return False
        self.edits[span] = self.prefix
        self.dotted.add((home, name))
        return True

    def _call(self, node: ast.Call, scope: Scope) -> None:
        found = self._full(node.func, scope)
        path = found[2][2:] if found is not None and found[2][:2] == ["ray", "serve"] else []
        self._tell_all(advice.in_call(node, path, has_serve=self.bindings.has_serve))
        for keyword in node.keywords:
            if keyword.arg == "runtime_env":
                self._tell_all(advice.in_runtime_env(keyword.value))
        last = chain(node.func)
        name = (last[1][-1].attr if last[1] else last[0].id) if last else ""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if self.bindings.has_serve and method in _OF_DEPLOYMENTS:
            self._tell(node, f".{method}", f"of a deployment: {MISPLACED['Deployment'][method]}")
        for each in node.args[:1] if name in _ABOUT_MODULES else []:
            value = each.value if isinstance(each, ast.Constant) else None
            if isinstance(value, str) and _RAYS_PATH.fullmatch(value):
                self._tell(each, f'"{value}"', advice.A_STRING)

    # Its imports

    def _import(self, node: ast.Import, scope: Scope) -> None:
        old = [each.name + (f" as {each.asname}" if each.asname else "") for each in node.names]
        new: list[str] = []
        given = self.given[id(self.bindings.blocks[node][1])]
        for text, alias in zip(old, node.names, strict=True):
            found = self._import_of(alias, text, scope)
            new += [each for each in found if each == text or each not in given]
            given.update(found)
        new = list(dict.fromkeys(new))
        if new == old:
            return
        if not self.uses_serve and not (self._is_tried(node) and not new):
            self._tell(node, "ray", advice.UNUSED)
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
        home = scope.home(name)
        serve = "ingress" if self.prefix == "ingress" else f"ingress as {self.prefix}"
        added = [serve] if (home, name) in self.dotted else []
        is_module = rest[:1] == ["serve"] and advice.is_module(rest[1:])
        if rest and not is_module:
            fix = advice.remedy(rest[1:]) if rest[0] == "serve" else advice.for_core(tuple(rest))
            self._tell(alias, alias.name, fix)
        ours = ".".join(["ingress", *rest[1:]])
        if rest and alias.asname:
            return [f"{ours} as {alias.asname}"] if is_module else [text]
        if name in home.mixed:
            self._tell(alias, "ray", advice.MIXED)
            return [text]
        if not rest:
            return [*added, *([text] if (home, name) in self.kept else [])]
        if not is_module or (home, name) in self.whole:
            return [*added, text]
        kept = ["ray"] if (home, name) in self.kept else []
        return [ours if self.prefix == "ingress" else serve, *kept]

    def _is_tried(self, node: ast.stmt) -> bool:
        """Return whether a statement is all of a `try`, and so a question whether Ray is there."""
        parent, block = self.bindings.blocks[node]
        return isinstance(parent, ast.Try) and len(block) - self.removed[id(block)] == 1

    def _import_from(self, node: ast.ImportFrom) -> None:
        first, *rest = (node.module or "").split(".")
        if first != "ray":
            return
        modules = [self._module_of(alias, rest, node) for alias in node.names]
        if all(each == node.module for each in modules):
            return
        begin, end = self._span(node)
        segment = self.text[begin:end]
        if len({*modules}) == 1 and modules[0] != _SERVE:
            pattern = r"(from(?:\s|\\)+)" + r"\s*\.\s*".join([first, *rest])
            if found := re.match(pattern, segment):
                self.edits[begin + found.end(1), begin + found.end()] = modules[0]
                return
        items = _items_of(node, segment, modules)
        has_comments = any(each.has_comments for each in items)
        if self._begins_line(begin) and (self._ends_line(end) or not has_comments):
            new = _written(items, self._indent(begin), self._newline())
        elif has_comments:
            self._tell(node, f"from {node.module} import ...", advice.BY_HAND)
            return
        else:
            new = _written(items, "", "; ")
        self.edits[begin, end] = new

    def _module_of(self, alias: ast.alias, rest: list[str], node: ast.ImportFrom) -> str:
        """Return the module to import one name from: that of the statement if there is no other."""
        module = node.module or ""
        full = f"{module}.{alias.name}"
        if full == "ray.serve":
            return _SERVE
        if alias.name == "*":
            self._tell(alias, full, advice.STAR)
        elif rest[:1] == ["serve"]:
            if (found := advice.target(rest[1:], alias.name)) is not None:
                return found
            self._tell(alias, full, advice.remedy([*rest[1:], alias.name]))
        else:
            name = alias.asname or alias.name
            is_used = any(name == each for _, each in self.kept)
            if rest or not is_used:  # else it is found where it is used
                self._tell(alias, full, advice.for_core((*rest, alias.name)))
        return module

    def _remove(self, node: ast.stmt) -> None:
        parent, block = self.bindings.blocks[node]
        begin, end = self._span(node)
        if self._is_tried(node):
            self._tell(node, "import ray", advice.PROBED)
            return
        if len(block) - self.removed[id(block)] == 1:
            is_needed = not isinstance(parent, ast.Module)  # a block has a statement
        else:
            self.removed[id(block)] += 1
            is_needed = not (self._begins_line(begin) and self._ends_line(end))
        if not is_needed:
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
        found = NEWLINE.search(self.text)
        return found.group() if found else "\n"

    def _free_name(self) -> str:
        """Return the name for ingress: another one if the file has its own `ingress`."""
        scopes = {scope for _, scope in self.bindings.nodes}
        taken = {name for scope in scopes for name in scope.names}
        taken |= {each.id for each in ast.walk(self.bindings.tree) if isinstance(each, ast.Name)}
        own = {each for each in scopes if "ingress" in each.names}
        homes = {each for each in scopes if "ray" in each.names.values()}
        # In another scope, an import of it would hide this one, also in the lines before it.
        is_ours = own == homes and [each.names["ingress"] for each in own] == ["ray.serve"]
        if "ingress" not in taken or (is_ours and not any("ingress" in each.mixed for each in own)):
            return "ingress"
        name = "serve"
        while name in taken:
            name = f"ingress_{name}"
        return name

    def _tell(self, node: ast.AST, name: str, fix: str) -> None:
        line = getattr(node, "lineno", 1)
        column = self._index(line, getattr(node, "col_offset", 0)) - self.starts[line - 1] + 1
        self.findings.add(ManualFix(line, column, name, fix))

    def _tell_all(self, found: Iterator[advice.Found]) -> None:
        for node, name, fix in found:
            self._tell(node, name, fix)


def _others(scope: Scope, home: Scope) -> Iterator[tuple[Scope, str]]:
    """Yield the imports of Ray from a scope to `home`, which would hide that of `home`."""
    for each in takewhile(lambda each: each is not home, (scope, *scope.above())):
        yield from ((each, name) for name, full in each.names.items() if full == "ray")


def _says_nothing_here(args: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    """Return whether the arguments of `ray.init` are about a cluster only, and run no code."""
    is_for_all = all(each.arg not in (None, "runtime_env") for each in keywords)
    parts = [part for each in (*args, *keywords) for part in ast.walk(each)]
    return is_for_all and not any(isinstance(each, ast.Call | ast.NamedExpr) for each in parts)


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test) == "__name__ == '__main__'"


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


@dataclass(slots=True)
class _ImportedName:
    """One name of the statement: the module to import it from, and the comments at it."""

    text: str
    name: str
    module: str
    before: list[str] = field(default_factory=list)
    after: str = ""

    @property
    def has_comments(self) -> bool:
        return bool(self.before or self.after)


def _items_of(node: ast.ImportFrom, segment: str, modules: Sequence[str]) -> list[_ImportedName]:
    """Return the names of a statement, each with its module from `modules`."""
    items = []
    for alias, module in zip(node.names, modules, strict=True):
        text = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        items.append(_ImportedName(text, alias.asname or alias.name, module))
    lines = [alias.lineno - node.lineno + 1 for alias in node.names]
    for token in tokenize.generate_tokens(io.StringIO(segment).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            here = [item for item, at in zip(items, lines, strict=True) if at == line]
            later = [item for item, at in zip(items, lines, strict=True) if at > line]
            if here or not later:
                last = (here or items)[-1]
                last.after = "  ".join(filter(None, (last.after, token.string)))
            else:
                later[0].before.append(token.string)
    return items


def _written(items: list[_ImportedName], indent: str, newline: str) -> str:
    """Return a statement for each module, in the order of their first names."""
    groups: dict[str, list[_ImportedName]] = {}
    for item in items:
        groups.setdefault(item.module, []).append(item)
    lines: list[str] = []
    for module, members in groups.items():
        lines += _serve(members) if module == _SERVE else _from(module, members, indent)
    return f"{newline}{indent}".join(lines)


def _serve(members: list[_ImportedName]) -> list[str]:
    lines = []
    for each in members:
        after = f"  {each.after}" if each.after else ""
        lines += [*each.before, f"import ingress as {each.name}{after}"]
    return lines


def _from(module: str, members: list[_ImportedName], indent: str) -> list[str]:
    short = f"from {module} import {', '.join(each.text for each in members)}"
    if not any(each.has_comments for each in members) and len(indent + short) <= _WIDTH:
        return [short]
    lines = [f"from {module} import ("]
    for each in members:
        after = f"  {each.after}" if each.after else ""
        lines += [*(f"    {line}" for line in each.before), f"    {each.text},{after}"]
    return [*lines, ")"]
