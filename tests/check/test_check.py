"""`ingress check`: code that blocks an event loop, as reported on the command line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingress.check.checker import check_application, check_files
from ingress.check.rules import Report
from ingress.core.base.settings import Settings
from tests.checking import (
    Found,
    checked_as_application,
    checked_as_file,
    checked_as_files,
    expected,
    found,
    in_class,
)
from tests.servers import PATIENCE_S, ROOT, environment, invoke, write_module

EXAMPLES = sorted(path.stem for path in (ROOT / "app_examples").glob("*.py"))
EXAMPLES.remove("ray_parallel")  # which needs Ray
OF_THE_FLAG = {"cpu_with_threadpool"}
"""Examples whose docstrings say that they block without the flag."""


def example(name: str, *, flag: bool = False, migrate: bool = False) -> Report:
    module = importlib.import_module(f"app_examples.{name}")
    application = getattr(module, "hello" if name == "hello" else "app")
    settings = Settings(run_sync_in_threadpool=flag)
    return check_application(application, f"app_examples.{name}", ROOT, settings, migrate=migrate)


@pytest.mark.filterwarnings("ignore:max_concurrent_queries")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "slow_server"])
def test_every_blocking_example_is_reported_and_no_other(name: str) -> None:
    report = example(name, migrate=True)
    blocks = name.startswith("blocking_") or name in OF_THE_FLAG

    assert {finding.path.stem for finding in report.findings} == ({name} if blocks else set())
    assert not any(finding.rule.id.startswith("IG") for finding in report.findings)


@pytest.mark.parametrize("name", ["blocking_cpu", "blocking_echo", "blocking_stream"])
def test_the_same_def_in_a_thread_is_not_reported(name: str) -> None:
    assert example(name, flag=True).findings == []


def test_an_async_def_that_blocks_is_reported_at_either_flag() -> None:
    for flag in (False, True):
        (finding,) = example("blocking_http", flag=flag).findings
        assert (finding.rule.id, finding.line) == ("ASYNC210", 22)
        assert "`requests.get` blocks the event loop" in finding.message


HEAD = """
import asyncio, time
import ingress as serve
from fastapi import Depends, FastAPI
app = FastAPI()

@serve.deployment
@serve.ingress(app)
class A:
"""

CASES = {
    "async-def": "async def f(self): time.sleep(1)  #: ASYNC251",
    "def-on-the-loop": "def f(self): time.sleep(1)  #: ASYNC251",
    "generator": "def f(self): yield time.sleep(1)  #: ASYNC251",
    "what-no-async-def-may-have": """
        def f(self):
            yield from []
            time.sleep(1)  #: ASYNC251
            return 3
        """,
    "never-called": "def _f(self): time.sleep(1)",
    "helper": """
        async def f(self): self._g()
        def _g(self): time.sleep(1)  #: ASYNC251
        """,
    "one-level-only": """
        async def f(self): self._g()
        def _g(self): self._h()
        def _h(self): time.sleep(1)
        """,
    "handed-to-a-thread": """
        async def f(self): await asyncio.to_thread(self.g)
        def g(self): time.sleep(1)
        """,
    "inner-called": """
        async def f(self):
            def g(): time.sleep(1)  #: ASYNC251
            g()
        """,
    "inner-handed-on": """
        async def f(self):
            def g(): time.sleep(1)
            await asyncio.to_thread(g)
        """,
    "lambda": """
        async def f(self): self._g(lambda: time.sleep(1))
        def _g(self, h): ...
        """,
    "generator-iterated": """
        async def f(self):
            for x in self._g(): ...
        def _g(self): yield time.sleep(1)  #: ASYNC251
        """,
    "generator-handed-on": """
        async def f(self):
            give(self._g())
        def _g(self): yield time.sleep(1)
        """,
    "generator-returned-is-iterated-on-the-loop": """
        def f(self): return self._g()
        def _g(self): yield time.sleep(1)  #: ASYNC251
        """,
    "expression-returned": "async def f(self): return (time.sleep(1) for _ in 'ab')",
    "expression-consumed": """
        async def f(self): return sum(time.sleep(1) for _ in 'ab')  #: ASYNC251
        """,
    "constructor": "def __init__(self): time.sleep(1)",
    "reconfigure": "def reconfigure(self, c): time.sleep(1)  #: ASYNC251",
    "def-batch": """
        @serve.batch
        def f(self, x): time.sleep(1)
        """,
    "batch": """
        @serve.batch
        async def f(self, x): time.sleep(1)  #: ASYNC251
        """,
    "def-dependency": """
        def dep(self): time.sleep(1)
        @app.get('/')
        def f(self, x=Depends(dep)): ...
        """,
    "def-endpoint-kept-on-the-loop": """
        @app.get('/')
        @serve.method(execution="event_loop")
        def f(self): time.sleep(1)  #: ASYNC251
        """,
    "def-in-a-thread-of-its-own": """
        @serve.method(execution="serial")
        def f(self): time.sleep(1)
        """,
    "def-endpoint": """
        @app.get('/')
        def f(self): time.sleep(1)
        """,
    "endpoint": """
        @app.get('/')
        async def f(self): time.sleep(1)  #: ASYNC251
        """,
    "noqa": "async def f(self): time.sleep(1)  # noqa",
    "noqa-id": "async def f(self): time.sleep(1)  # noqa: ASYNC251",
    "noqa-other": "async def f(self): time.sleep(1)  # noqa: ASYNC210  #: ASYNC251",
    "noqa-at-the-caller": """
        async def f(self): self._g()  # noqa: ASYNC251
        def _g(self): time.sleep(1)
        """,
    "noqa-file": """
        async def f(self): time.sleep(1)
        # ruff: noqa
        """,
}


@pytest.fixture(scope="module")
def found_in_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    programs = {name: in_class(HEAD, body) for name, body in CASES.items()}
    return checked_as_files(tmp_path_factory.mktemp("programs"), programs, Settings())


@pytest.mark.parametrize("name", CASES)
def test_what_runs_on_the_loop_is_checked_and_nothing_else(
    name: str, found_in_files: dict[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = in_class(HEAD, CASES[name])
    report = checked_as_application(tmp_path, monkeypatch, program, Settings())

    assert found_in_files[name] == found(report) == expected(program)


def test_environments_and_hidden_folders_are_not_read(tmp_path: Path) -> None:
    for folder in (".hidden", "venv/lib/python3/site-packages", "src"):
        (tmp_path / folder).mkdir(parents=True)
        write_module(tmp_path / folder, "app", "import time\nasync def f(): time.sleep(1)\n")

    report = check_files([tmp_path], Settings(), migrate=False)

    assert [each.path.parent.name for each in report.findings] == ["src"]


def test_what_python_warns_of_and_what_is_deep_is_read(tmp_path: Path) -> None:
    deep = " + ".join(["'a'"] * 2000)
    source = f"async def f(x='\\d'):\n    import time\n    return {deep} + time.sleep(1)\n"
    write_module(tmp_path, "app", source)

    (finding,) = check_files([tmp_path], Settings(), migrate=True).findings

    assert finding.line == 3


def test_a_file_that_cannot_be_parsed_is_told_of(tmp_path: Path) -> None:
    write_module(tmp_path, "app", "def f(:\n")

    report = check_files([tmp_path], Settings(), migrate=False)

    assert any(note.startswith("not read, ") and "app.py" in note for note in report.notes)


def test_a_constructor_is_checked_where_it_shares_the_loop(tmp_path: Path) -> None:
    program = in_class(HEAD, "def __init__(self): time.sleep(1)  #: ASYNC251")
    shared = Settings(run_user_code_in_separate_thread=False)

    assert found(checked_as_file(tmp_path, program, shared)) == expected(program)


def test_the_command_names_the_caller_of_a_helper_and_ends_with_1(tmp_path: Path) -> None:
    body = "def f(self): self._g()\ndef _g(self): time.sleep(1)"
    write_module(tmp_path, "app", in_class(HEAD, body))

    result = run(tmp_path, "app:a")

    assert result.stdout.startswith(
        "app.py:11:19: ASYNC251 `time.sleep` blocks the event loop, in "
    )
    assert "A._g, called on the event loop by A.f (app.py:10)" in result.stdout
    assert result.exit_code == 1


def test_nothing_found_ends_with_0(tmp_path: Path) -> None:
    write_module(tmp_path, "app", in_class(HEAD, "async def f(self): ..."))

    result = run(tmp_path, "app:a")

    assert result.stdout.splitlines() == [
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=0; functions on an event loop: 1; files read: 1.",
        "No findings.",
    ]
    assert result.exit_code == 0


def test_a_helper_in_another_module_is_followed_by_its_import(tmp_path: Path) -> None:
    write_module(tmp_path, "helpers", "import time\n\ndef wait():\n    time.sleep(1)\n")
    write_module(
        tmp_path,
        "app",
        "from helpers import wait\nimport helpers as h\n"
        "async def f(): wait()\nasync def g(): h.wait()\nasync def k(wait): wait()\n",
    )

    (finding,) = check_files([tmp_path], Settings(), migrate=False).findings
    assert (finding.path.name, finding.line) == ("helpers.py", 4)
    assert finding.functions == ("f", "g")


@pytest.mark.parametrize("importer", ["__init__", "views"])
def test_a_helper_of_the_same_package_is_followed_by_its_relative_import(
    tmp_path: Path, importer: str
) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    write_module(package, "__init__", "")
    write_module(package, "helpers", "import time\n\ndef wait():\n    time.sleep(1)\n")
    write_module(package, importer, "from .helpers import wait\nasync def f(): wait()\n")

    (finding,) = check_files([tmp_path], Settings(), migrate=False).findings
    assert (finding.path.name, finding.line, finding.functions) == ("helpers.py", 4, ("f",))


def run(folder: Path, *arguments: str) -> Any:
    return invoke(folder, "check", *arguments)


def test_a_module_beside_that_of_the_application_is_followed(tmp_path: Path) -> None:
    write_module(tmp_path, "beside", "import time\n\ndef wait():\n    time.sleep(1)\n")
    write_module(
        tmp_path,
        "app",
        "import ingress as serve\nfrom beside import wait\n@serve.deployment\nclass A:\n"
        "    async def __call__(self): wait()\na = A.bind()\n",
    )

    result = run(tmp_path, "app:a")

    assert "beside.py:4" in result.output
    assert result.exit_code == 1


def test_a_module_that_cannot_be_imported_shows_why_and_ends_with_2(tmp_path: Path) -> None:
    write_module(tmp_path, "app", "raise ValueError('at import')\n")

    result = run(tmp_path, "app:a")

    assert "ValueError: at import" in result.stderr
    assert result.exit_code == 2


@pytest.mark.parametrize("target", ["nothing:app", "app:nothing", "nothing.py"])
def test_what_cannot_be_checked_ends_with_2_and_one_line(tmp_path: Path, target: str) -> None:
    write_module(tmp_path, "app", "")

    result = run(tmp_path, target)

    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert result.exit_code == 2


def test_without_ruff_one_line_says_what_to_install(tmp_path: Path) -> None:
    write_module(tmp_path, "app", "async def f(): ...\n")
    script = "import sys; sys.modules['ruff'] = None\nfrom ingress.cli.commands import main; main()"

    result = subprocess.run(
        [sys.executable, "-c", script, "check", "app.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    (line,) = result.stderr.splitlines()
    assert "python -m pip install ruff" in line
    assert result.returncode == 2


@pytest.mark.parametrize("target", ["main:app", "src"])
def test_the_option_run_of_the_last_version_says_what_to_use(tmp_path: Path, target: str) -> None:
    result = invoke(tmp_path, "check", target, "--run", "pytest tests")

    assert result.stderr == (
        "Error: --run is gone; use --migrate, and `pytest --sync-in-threadpool=both`, which runs "
        "your tests with each `def` in a thread, too\n"
    )
    assert result.exit_code == 2
