"""Random modules that use Ray and Ray Serve in many ways; what one does, and its unbound names."""

from __future__ import annotations

import builtins
import re
import symtable
import sys
from random import Random
from types import ModuleType
from typing import Any

IMPORTS = (
    *("import ray", "import ray as r", "import ray.serve", "import ray.serve.handle"),
    *("import ray.util", "import ray, sys", "import ray as ray", "import ray.serve as rs"),
    *("from ray import serve", "from ray import get, serve as s", "from ray.serve import run, llm"),
    *("import ingress", "import sys, ray as r, ray.serve", "import ray.serve, ray"),
)
# The name of an import is §.
USES = (
    *("§.serve.run(1)", "§.get(2)", "log(§)", "x = §.serve", "log(§.serve)", "del §", "§ = None"),
    *("§.serve.run = log", "for § in (1, 2): log(§)"),
    *(
        "log([§ for § in (1, 2)])",
        "log([(§ := 3) for _ in (1,)])",
        "log((lambda: §.serve.run(4))())",
    ),
    *("f'{§.serve.run(5)} é {§.serve.llm}'", "globals()['§'].get(6)", "eval('§.get(7)')"),
    *(
        "exec('§.serve.run(8)')",
        "getattr(sys.modules[__name__], '§').get(9)",
        "locals()['§'].get(1)",
    ),
    *("getattr(§, 'serve').run(2)", "vars(sys.modules[__name__])['§'].put(3)"),
    *("__all__ = ['§']", "__all__ = ('§', 'x')", "__all__ = ['x']; __all__ += ['§']"),
    *("__all__ = []; __all__.append('§')", "__all__ = [] + '§ x'.split()", "__all__: list = ['§']"),
    *(
        "x: '§.ObjectRef' = 1",
        "x: §.serve.Application = 1",
        "class §: pass",
        "class C:\n    § = §",
        "def §(): pass",
    ),
    *("def f(x: 'list[§.serve.run]' = 1): log(x)", "(§).serve.run(4)", "§ . serve . run(5)"),
    *(
        "§.init()",
        "if not §.is_initialized(): §.init()",
        "with §.init(): pass",
        "import json as §",
        "try: import ray\nexcept ImportError: § = None",
    ),
    *(
        "if x: import ray; import ray.serve",
        "@§.serve.deployment\nclass D: pass",
        "log(§.serve.handle)",
    ),
    *("@§.remote\ndef task(): pass", "match 1:\n    case §: log(§)", "x = 1  # type: §.ObjectRef"),
    *("try: 1 / 0\nexcept Exception as §: pass", "serve.run(6)", "s.run(7)", "run(8)", "rs.run(9)"),
    *(
        "ingress = 1; log(ingress)",
        "import ingress; ingress.run(1)",
        "log(globals()['x'])",
        "log(dir() == 1)",
    ),
    *("(lambda *, § = 1: log(§))()", "sys.modules[__name__].§.get(2)", "§.serve.start(x=§.get(3))"),
)
STARTS = ("ray.init", "ray.is_initialized")
AROUND = (
    "if x:\n<4>\nelse:\n<4>",
    "def f():\n<4>\nf()",
    "def f():\n<4>\n    def g():\n<8>\n    g()\nf()",
    "def f():\n    global §\n<4>\nf()",
    "def f():\n<4>\n    def g():\n        nonlocal §\n<8>\n    g()\nf()",
    "def f(§=1):\n<4>\nf()",
    "class C:\n<4>\n    def m(self): log(self.§)\nC().m()",
    "class C:\n<4>\n    def m(self):\n<8>\nC().m()",
    "try:\n<4>\nexcept (AttributeError, TypeError, KeyError):\n<4>",
    "for _ in range(2):\n<4>",
)


def random_module(random: Random) -> str:
    """Return the text of a module, which may be none."""
    return f"# é\nimport sys\nx = 1\n{_block(random, 3)}\n"


def _block(random: Random, depth: int) -> str:
    parts = []
    for _ in range(random.randint(1, 4)):
        kinds = (IMPORTS, USES, USES, AROUND) if depth else (IMPORTS, USES)
        part = random.choice(random.choice(kinds))

        def inner(match: re.Match[str]) -> str:
            indent = " " * int(match[1])
            return "\n".join(indent + line for line in _block(random, depth - 1).split("\n"))

        part = re.sub("<(.)>", inner, part)
        parts.append(part.replace("§", random.choice(("ray", "ray", "ray", "r"))))
    return "\n".join(parts)


def exported(text: str) -> list[str]:
    """Run a module. Return the calls that it makes, and the names that it exports and has.

    A name of Ray Serve is that of ingress. Calls that start Ray do not count. Raises as the module
    does.
    """
    calls: list[str] = []

    class Fake:
        def __init__(self, path: str) -> None:
            self.__dict__["path"] = "ingress" + path[9:] if path.startswith("ray.serve") else path

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Fake(f"{self.path}.{name}")

        def __call__(self, *given: object, **named: object) -> Any:
            if self.path not in STARTS:
                calls.append(f"{self.path}{[_shown(each) for each in (*given, *named.values())]}")
            return Fake(f"{self.path}()")

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    fakes = {"ray": Fake("ray"), "ingress": Fake("ingress")}
    fakes["ray"].__dict__["serve"] = fakes["ingress"]

    def import_(name: str, *given: Any) -> Any:
        root, *rest = name.split(".")
        if root not in fakes:
            return __import__(name, *given)
        found = fakes[root]
        for each in rest if len(given) > 2 and given[2] else ():
            found = getattr(found, each)
        return found

    module = ModuleType("program")
    module.__dict__.update(
        __builtins__={**vars(builtins), "__import__": import_},
        log=lambda *given: calls.append(f"log{[_shown(each) for each in given]}"),
    )
    sys.modules["program"] = module
    try:
        exec(compile(text, "program", "exec"), module.__dict__)
    finally:
        del sys.modules["program"]
    names = module.__dict__.get("__all__", ())
    return [*calls, *(f"{name} {_shown(getattr(module, name))}" for name in names)]


def _shown(value: object) -> str:
    path = getattr(value, "path", None)
    return str(path) if path else type(value).__name__


def unbound(text: str) -> set[tuple[str, str]]:
    """Return the names that a module uses and never binds, with the names of their scopes."""
    tables = [("", symtable.symtable(text, "program", "exec"))]
    for path, table in tables:  # it grows
        tables += [(f"{path}/{each.get_name()}", each) for each in table.get_children()]
    found = {
        (path, each.get_name()): each for path, table in tables for each in table.get_symbols()
    }
    bound = {
        name
        for (path, name), each in found.items()
        if not path or each.is_declared_global()
        if each.is_assigned() or each.is_imported()
    }
    return {
        (path, name)
        for (path, name), each in found.items()
        if (each.is_global() or not path) and each.is_referenced() and name not in bound
    }
