"""The user's files, parsed: their functions, the values of names, and calls between functions."""

from __future__ import annotations

import ast
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType

from ingress.app.declaration.names import targets_of

OURS = Path(__file__).parents[1]
_CONSUMERS = {"all", "any", "dict", "list", "max", "min", "next", "set", "sorted", "sum", "tuple"}
_NOQA = re.compile(r"#\s*noqa(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?", re.I)
_CODE = re.compile(r"[A-Z]+[0-9]+")
_FILE_NOQA = re.compile(r"^\s*#\s*(?:ruff|flake8)\s*:\s*noqa(?P<codes>\s*:.*)?\s*$", re.I | re.M)

AnyDef = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False, slots=True)
class Function:
    """One `def` or `async def`. `cls` is the class of the method that it is, or is inside."""

    file: SourceFile
    node: AnyDef
    name: str
    cls: str
    parent: Function | None
    children: dict[str, Function] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        return isinstance(self.node, ast.AsyncFunctionDef)

    @property
    def is_generator(self) -> bool:
        return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(self.node))

    @property
    def first_line(self) -> int:
        """The line at which Python says the function begins: its first decorator's."""
        return min([self.node.lineno, *(each.lineno for each in self.node.decorator_list)])

    @property
    def receiver(self) -> str:
        """The parameter that is the instance or class, "" if there is none."""
        outer = self
        while outer.parent is not None:
            outer = outer.parent
        if not outer.cls or "staticmethod" in outer.decorators:
            return ""
        arguments = [*outer.node.args.posonlyargs, *outer.node.args.args]
        return arguments[0].arg if arguments else ""

    @property
    def decorators(self) -> set[str]:
        """The last parts of its decorators' names."""
        return {last_name(each) for each in self.node.decorator_list}


class SourceFile:
    """One parsed file. `module` is its dotted name."""

    def __init__(self, path: Path, module: str, text: str) -> None:
        self.path = path
        self.module = module
        self.text = text
        self.tree = ast.parse(text, str(path))
        self.functions: list[Function] = []
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, str] = {}
        self._collect()

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")  # as `ast` counts lines: not at form feeds

    @cached_property
    def globals(self) -> set[str]:
        """The names that the module assigns to at its top level."""
        return {
            each.id
            for statement in self.tree.body
            for target in targets_of(statement)
            for each in ast.walk(target)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }

    def function_at(self, line: int) -> Function | None:
        """Return the innermost function that contains the line."""
        around = [
            each
            for each in self.functions
            if each.node.lineno <= line <= (each.node.end_lineno or 0)
        ]
        return max(around, key=lambda each: each.node.lineno, default=None)

    def allows(self, rule_id: str, *lines: int) -> bool:
        """Return whether a `# noqa` of one of these lines, or of the file, is for the rule."""
        comments = [match["codes"] for match in _FILE_NOQA.finditer(self.text)]
        for line in lines:
            comments += [match["codes"] for match in _NOQA.finditer(self._line(line))]
        return any(codes is None or rule_id in _CODE.findall(codes.upper()) for codes in comments)

    def _line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def _collect(self) -> None:
        """Note functions, classes and imports, each with its enclosing scope."""
        waiting: list[tuple[ast.AST, str, str, Function | None]] = [(self.tree, "", "", None)]
        while waiting:
            node, prefix, cls, parent = waiting.pop()
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    function = Function(self, node, prefix + node.name, cls, parent)
                    self.functions.append(function)
                    if parent is not None:
                        parent.children[node.name] = function
                    prefix, parent = f"{function.name}.", function
                case ast.ClassDef():
                    cls, parent = prefix + node.name, None
                    self.classes[cls] = node
                    prefix = f"{cls}."
                case ast.Import() | ast.ImportFrom():
                    self._note_imports(node)
            children = [(each, prefix, cls, parent) for each in ast.iter_child_nodes(node)]
            waiting += reversed(children)

    def _note_imports(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self.imports[alias.asname or alias.name] = f"{self._base(node)}.{alias.name}"
            elif alias.asname:
                self.imports[alias.asname] = alias.name
            else:
                name = alias.name.partition(".")[0]
                self.imports[name] = name

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.path.name == "__init__.py"
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


class Sources:
    """The user's files, and the definitions in them by full name."""

    def __init__(self) -> None:
        self.files: dict[Path, SourceFile] = {}
        self.unread: list[Path] = []
        self._modules: dict[str, SourceFile] = {}
        self._functions: dict[str, Function] = {}
        self._at: dict[tuple[Path, int, str], Function] = {}

    def add(self, path: Path, module: str) -> SourceFile | None:
        """Read a file. Returns `None` if this Python cannot parse it."""
        try:
            with (
                tokenize.open(path) as opened,
                warnings.catch_warnings(action="ignore"),
            ):  # `tokenize.open` finds the encoding as Python does
                file = SourceFile(path.resolve(), module, opened.read())
        except (OSError, SyntaxError, ValueError, RecursionError):
            self.unread.append(path)
            return None
        self.files[file.path] = self._modules[module] = file
        for function in file.functions:
            self._functions[f"{module}.{function.name}"] = function
            self._at[file.path, function.first_line, function.node.name] = function
        return file

    def functions(self) -> Iterator[Function]:
        for file in self.files.values():
            yield from file.functions

    def of_code(self, code: CodeType | None) -> Function | None:
        """Return the function that Python compiled to this code, `None` if it is not the user's."""
        if code is None:
            return None
        return self._at.get((_resolved(code.co_filename), code.co_firstlineno, code.co_name))

    def full_name(self, expression: ast.expr, file: SourceFile) -> str:
        """Return the full name of a name or attribute, `package.module.name`; "" if unknown."""
        head, _, rest = dotted(expression).partition(".")
        if not head:
            return ""
        known = file.imports.get(head) or f"{file.module}.{head}"
        return self._followed(f"{known}.{rest}" if rest else known)

    def function(self, full_name: str) -> Function | None:
        return self._functions.get(full_name)

    def decorators_of(self, function: Function) -> Iterator[Function]:
        """Yield the user functions that decorate a function."""
        for each in function.node.decorator_list:
            func = each.func if isinstance(each, ast.Call) else each
            if (found := self.function(self.full_name(func, function.file))) is not None:
                yield found

    def method(self, file: SourceFile, cls: str, name: str) -> Function | None:
        """Return a method of a class, or of a base of it in the user's files."""
        candidates = (self._functions.get(f"{base}.{name}") for base in self.mro(file, cls))
        return next((each for each in candidates if each is not None), None)

    def mro(self, file: SourceFile, cls: str, depth: int = 8) -> Iterator[str]:
        """Yield the full names of a class and its bases, depth first."""
        yield f"{file.module}.{cls}"
        node = file.classes.get(cls)
        for base in [] if node is None or not depth else node.bases:
            if home := self.class_called(self.full_name(base, file)):
                yield from self.mro(*home, depth - 1)

    def class_called(self, full_name: str) -> tuple[SourceFile, str] | None:
        module, dot, name = full_name.rpartition(".")
        while dot:
            if (file := self._modules.get(module)) is not None and name in file.classes:
                return file, name
            module, dot, outer = module.rpartition(".")
            name = f"{outer}.{name}"  # the class may be inside another
        return None

    def is_class(self, name: str, file: SourceFile) -> bool:
        owner, name = self._home(name, file)
        return name in owner.classes

    def is_module(self, name: str, file: SourceFile) -> bool:
        return file.imports.get(name) in self._modules

    def is_global(self, name: str, file: SourceFile) -> bool:
        """Return whether a name is a global that a user module assigns to."""
        owner, name = self._home(name, file)
        return name in owner.globals

    def _home(self, name: str, file: SourceFile) -> tuple[SourceFile, str]:
        """Return the file that a name was imported from, and its name there."""
        for _ in range(4):
            module, _, original = file.imports.get(name, "").rpartition(".")
            if module not in self._modules:
                break
            file, name = self._modules[module], original
        return file, name

    def _followed(self, full_name: str, depth: int = 4) -> str:
        """Return the full name that imports lead to."""
        module, _, name = full_name.rpartition(".")
        file = self._modules.get(module)
        if file is not None and name in file.imports and full_name not in self._functions and depth:
            return self._followed(file.imports[name], depth - 1)
        return full_name


def dotted(expression: ast.AST) -> str:
    """Return `a.b.c` for a chain of names, "" for anything else."""
    parts = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return ""
    return ".".join([expression.id, *reversed(parts)])


def last_name(decorator: ast.expr) -> str:
    """Return the last part of a decorator's name, with or without arguments."""
    func = decorator.func if isinstance(decorator, ast.Call) else decorator
    return dotted(func).rpartition(".")[2]


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def own_nodes(node: AnyDef) -> Iterator[ast.AST]:
    """Yield the nodes that run when the function is called, in the order of the source.

    The bodies of inner functions and classes are left out, and generator expressions that other
    code may iterate.
    """
    # Not by recursion: a sum of a thousand strings is a thousand levels deep.
    waiting: list[tuple[ast.AST, bool]] = [(each, False) for each in reversed(node.body)]
    while waiting:
        each, is_consumed = waiting.pop()
        yield each
        if isinstance(each, AnyDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(each, ast.GeneratorExp) and not is_consumed:
            waiting.append((each.generators[0].iter, False))
            continue
        children = [(child, consumes(each, child)) for child in ast.iter_child_nodes(each)]
        waiting += reversed(children)


def consumes(node: ast.AST, child: ast.AST) -> bool:
    """Return whether running `node` iterates `child` at once."""
    match node:
        case ast.For() | ast.comprehension():
            return child is node.iter
        case ast.Call(func):
            is_join = isinstance(func, ast.Attribute) and func.attr == "join"
            return child is not func and (dotted(func) in _CONSUMERS or is_join)
    return isinstance(node, ast.YieldFrom | ast.Starred)


@lru_cache(maxsize=4096)
def _resolved(file_name: str) -> Path:
    """Return the resolved path of a file. Cached, because many functions are in few files."""
    return Path(file_name).resolve()


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call in the body of `caller` that runs the body of `callee`."""

    caller: Function
    callee: Function
    node: ast.Call


def callee(call: ast.Call, caller: Function, sources: Sources) -> Function | None:
    """Return the user function that is called, `None` if it is unknown."""
    target = call.func
    if isinstance(target, ast.Name):
        scope: Function | None = caller
        while scope is not None:
            if target.id in scope.children:
                return scope.children[target.id]
            if target.id in parameters(scope):
                return None
            scope = scope.parent
    elif isinstance(target, ast.Attribute) and dotted(target.value) == (caller.receiver or None):
        return sources.method(caller.file, caller.cls, target.attr)
    return sources.function(sources.full_name(target, caller.file))


def calls_of(caller: Function, sources: Sources, *, returned: bool = False) -> Iterator[CallSite]:
    """Yield the calls of `def`s whose bodies run as part of the caller's.

    A generator's call counts only if it is iterated here, or with `returned` if the caller's caller
    iterates it. Awaited calls of decorated functions are left out: a decorator may have moved them
    to a thread.
    """
    nodes = list(own_nodes(caller.node))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if (found := callee(node, caller, sources)) is None or found.is_async or found is caller:
            continue
        parent = parents.get(node, caller.node)
        if isinstance(parent, ast.Await) and found.node.decorator_list:
            continue
        is_iterated = consumes(parent, node) or (returned and isinstance(parent, ast.Return))
        if not found.is_generator or is_iterated:
            yield CallSite(caller, found, node)


def parameters(function: Function) -> set[str]:
    arguments = function.node.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {each.arg for each in (*named, arguments.vararg, arguments.kwarg) if each is not None}
