"""The package as a whole: the cost of its import, its exports, and its texts."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import ingress
from ingress.asgi import compat as asgi
from ingress.calls import compat as calls
from ingress.http import compat as http

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "ingress").rglob("*.py"))
TEXTS = ["*.md", "*.toml", "Makefile", ".ci/run"]
FOLDERS = ["ingress", "app_examples", "tests", "benchmarks", "docs"]


def test_importing_it_imports_none_of_the_heavy_libraries() -> None:
    script = (
        "import ingress, sys\n"
        "heavy = {'httpx', 'ingress.check', 'ray', 'rich', 'typer', 'uvicorn'}\n"
        "print(*heavy & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == []


def test_a_worker_process_imports_none_of_the_commands() -> None:
    script = "import ingress.cli.worker, sys; print(*{'httpx', 'rich', 'typer'} & {*sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == []


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
    result = subprocess.run(
        [sys.executable, "-m", "ingress", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "MODULE:APP" in result.stdout


def test_all_is_sorted_and_equals_what_is_importable() -> None:
    importable = {
        name
        for name, value in vars(ingress).items()
        if not name.startswith("_")
        and (name == "exceptions" or not inspect.ismodule(value))
        and name != "annotations"  # of `from __future__`
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
        if "reliability" in path.parts:  # their sleeps are the load
            continue
        text = path.read_text()
        tests += len(re.findall(r"^ *(?:async )?def test_", text, re.MULTILINE))
        if ".sleep(" in text:
            sleeps += sum(map(is_sleep, ast.walk(ast.parse(text))))

    assert sleeps <= 0.04 * tests


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for name in ingress.__all__ if inspect.isfunction(getattr(ingress, name))}

    assert functions.isdisjoint(path.stem for path in MODULES if path.name != "__init__.py")
