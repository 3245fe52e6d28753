"""The package as a whole: the cost of its import, its exports, and its texts."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import ingress
from ingress.app.asgi import compat as asgi
from ingress.core.calls import compat as calls
from ingress.serving.http import compat as http
from tests import long
from tests.programs import ROOT, run_python

MODULES = sorted((ROOT / "ingress").rglob("*.py"))
TEXTS = ["*.md", "*.toml", "Makefile", ".ci/run"]
FOLDERS = ["ingress", "app_examples", "tests", "benchmarks", "docs"]


def test_importing_it_imports_no_heavy_library_and_nothing_that_only_a_server_needs() -> None:
    script = (
        "import ingress, sys\n"
        "heavy = {'anyio._backends._asyncio', 'httpx', 'ingress.check', 'mypy', 'ray', 'rich', "
        "'typer', 'uvicorn', 'ingress.app.asgi.compiled', 'ingress.app.batching.batching', "
        "'ingress.telemetry.watchdog'}\n"
        "print(*heavy & {*sys.modules})"
    )
    ran = run_python("-c", script)

    assert (ran.stdout.split(), ran.returncode) == ([], 0), ran.stderr


def test_a_worker_process_imports_none_of_the_commands() -> None:
    script = "import ingress.cli.worker, sys; print(*{'httpx', 'rich', 'typer'} & {*sys.modules})"
    ran = run_python("-c", script)

    assert (ran.stdout.split(), ran.returncode) == ([], 0), ran.stderr


def test_its_version_is_that_of_the_installed_distribution() -> None:
    assert ingress.__version__ == version("fastapi-ingress")


def test_pip_takes_the_versions_that_the_error_for_a_missing_name_calls_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pattern = re.compile(r"([\w-]+)(?:\[\w+\])?(.*)")
    parts = [pattern.fullmatch(each) for each in project["dependencies"]]
    taken = {part[1]: part[2] for part in parts if part is not None}

    assert (taken["anyio"], taken["uvicorn"]) == (calls.SUPPORTED, http.SUPPORTED)
    assert (taken["fastapi"], taken["starlette"]) == (asgi.SUPPORTED, asgi.SUPPORTED_STARLETTE)


def test_the_package_is_the_command_line() -> None:
    ran = run_python("-m", "ingress", "run", "--help")

    assert ("MODULE:APP" in ran.stdout, ran.returncode) == (True, 0), ran.stderr


def test_all_is_sorted_and_equals_what_is_importable() -> None:
    importable = {
        name
        for name in dir(ingress)
        if not name.startswith("_")
        and (name == "exceptions" or not inspect.ismodule(getattr(ingress, name)))
    }

    assert ingress.__all__ == sorted(importable)


def texts() -> Iterator[Path]:
    for pattern in TEXTS:
        yield from ROOT.glob(pattern)
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py"))


def test_no_text_says_to_install_the_unrelated_package_of_that_name() -> None:
    wrong = re.compile(r"pip install\s+(-\S+\s+)*[\"']?ingress(?![\w-])")
    told = [
        str(path) for path in texts() if path != Path(__file__) and wrong.search(path.read_text())
    ]

    assert told == []
    assert wrong.search('pip install -U "ingress[ray]"')
    assert not wrong.search("pip install -e .  # fastapi-ingress")


def is_sleep(node: ast.AST) -> bool:
    """Return whether a node is a call of a `sleep` that takes time."""
    match node:
        case ast.Call(func=ast.Attribute(attr="sleep"), args=[ast.Constant(value=0), *_]):
            return False
        case ast.Call(func=ast.Attribute(ast.Name("time" | "asyncio" | "anyio"), "sleep")):
            return True
    return False


def test_tests_wait_for_signals_and_seldom_sleep() -> None:
    sleeps = tests = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if {"reliability", "drills"} & set(path.parts):  # their sleeps are the load
            continue
        text = path.read_text()
        tests += len(re.findall(r"^ *(?:async )?def test_", text, re.MULTILINE))
        if ".sleep(" in text:
            sleeps += sum(map(is_sleep, ast.walk(ast.parse(text))))

    assert sleeps <= 0.04 * tests


def test_each_test_that_is_listed_as_long_is_there() -> None:
    gone = []
    for line in long.listed():
        path, *names = line.partition("[")[0].split("::")
        file = ROOT / path
        text = file.read_text() if file.exists() else ""
        if not any(f"def {names[-1]}(" in text or f"{each} = " in text for each in names):
            gone.append(line)
    assert gone == []


def using(names: dict[str, set[str]]) -> set[str]:
    """Return the modules that use one of the names of a module, such as `{"pickle": {"loads"}}`."""
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(ast.Name(module), name):
                    used = {name}
                case ast.ImportFrom(module=str(module)):
                    used = {each.name for each in node.names}
                case _:
                    continue
            if used & names.get(module, set()):
                found.add(path.relative_to(ROOT / "ingress").as_posix())
    return found


def test_pickles_are_read_from_frames_and_from_ray_only() -> None:
    names = {"load", "loads", "Unpickler"}
    modules = using({"pickle": names, "cloudpickle": names, "marshal": names, "dill": names})

    assert {each for each in modules if not each.startswith("engines/ray/")} == {
        "serving/processes/frames.py"
    }


LIBRARIES = ("anyio", "fastapi", "starlette", "uvicorn")
COMPAT = {
    "app/asgi/compat.py",
    "core/calls/compat.py",
    "serving/http/compat.py",
}
OTHERS = {"", "_LRUCacheWrapper", "_loop", "_run"}  # of functools, users' objects, asyncio
UNDOCUMENTED = (
    *("fastapi.datastructures.Default", "fastapi.dependencies", "fastapi.routing"),
    "fastapi.utils",
)
ROUTING = {f"fastapi.routing.{name}" for name in ("APIRoute", "APIRouter", "APIWebSocketRoute")}


def defined(tree: ast.AST, *, read: bool = False) -> Iterator[str]:
    """Yield the names that a module defines, or reads, also as attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), attr=name, ctx=ctx):
                if read or isinstance(ctx, ast.Store):
                    yield name


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{each.name}" for each in node.names)


def test_only_compat_modules_use_private_names_of_the_libraries_below() -> None:
    made = re.compile(
        r"^(?:\w+ )*(_[A-Za-z]\w*)|(?:def |class |self\.)(_[A-Za-z]\w*)", re.MULTILINE
    )
    private: set[str] = set()
    for library in LIBRARIES:
        folder = Path(importlib.import_module(library).__file__ or "").parent
        for path in folder.rglob("*.py"):
            private.update(*made.findall(path.read_text()))
    private -= OTHERS
    keys = re.compile(r"fastapi_\w+_astack|fastapi\.telemetry")
    trees = {path: ast.parse(path.read_text()) for path in MODULES}
    ours = {name for tree in trees.values() for name in defined(tree)}

    found = []
    for path, tree in trees.items():
        module = path.relative_to(ROOT / "ingress").as_posix()
        if module in COMPAT or module.startswith("engines/ray/"):
            continue
        own = {*defined(tree, read=True)}
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(ast.Name("self" | "cls"), name):
                    is_private = name in private - ours
                case ast.Attribute(attr=name):
                    is_private = name in private - own
                case ast.Constant(str(name)):
                    is_private = name in private - own or keys.fullmatch(name) is not None
                case _:
                    continue
            if is_private:
                found.append(f"{module}:{node.lineno} {name}")
        found += [
            f"{module} {name}"
            for name in imported(tree)
            if name.split(".")[0] in LIBRARIES
            and ("._" in name or name.startswith(UNDOCUMENTED))
            and name not in ROUTING
        ]

    assert found == []


def test_only_settings_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb"}

    assert using({"os": names}) == {"core/base/settings.py"}


def test_no_docstring_opens_with_a_question_word() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        (path.relative_to(ROOT).as_posix(), ast.get_docstring(node) or "")
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]

    assert [each for each in texts if re.match(r"(What|Whether|Where|How|Who)\b", each[1])] == []


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for name in ingress.__all__ if inspect.isfunction(getattr(ingress, name))}

    assert functions.isdisjoint(path.stem for path in MODULES if path.name != "__init__.py")
