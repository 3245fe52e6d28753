"""`ingress check`: what blocks an event loop, seen as the application's user sees it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ingress as serve
from ingress.check.checker import check_application, check_files
from ingress.check.findings import Report
from ingress.settings import Settings
from tests.servers import INGRESS, PATIENCE_S, ROOT, environment, write_module

EXAMPLES = sorted(path.stem for path in (ROOT / "app_examples").glob("*.py"))
OF_THE_FLAG = {"cpu_with_threadpool"}
"""Examples that say themselves that they block without the flag."""


def example(name: str, *, flag: bool = False, migrate: bool = False) -> Report:
    module = importlib.import_module(f"app_examples.{name}")
    application = getattr(module, "hello" if name == "hello" else "app")
    settings = Settings(run_sync_in_threadpool=flag)
    return check_application(application, f"app_examples.{name}", ROOT, settings, migrate=migrate)


def checked(folder: Path, source: str, *, flag: bool = False, separate: bool = True) -> list[str]:
    """Return `line: id` of what is found in a file that is not imported."""
    write_module(folder, "app", source)
    settings = Settings(run_sync_in_threadpool=flag, run_user_code_in_separate_thread=separate)
    report = check_files([folder / "app.py"], settings, migrate=False)
    return [f"{each.line}: {each.rule.id}" for each in report.findings]


@pytest.mark.filterwarnings("ignore:max_concurrent_queries")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "slow_server"])
def test_every_blocking_example_is_reported_and_no_other(name: str) -> None:
    found = {finding.path.stem for finding in example(name).findings}

    blocks = name.startswith("blocking_") or name in OF_THE_FLAG
    assert found == ({name} if blocks else set())


@pytest.mark.parametrize("name", ["blocking_cpu", "blocking_echo", "blocking_stream"])
def test_the_same_def_in_a_thread_is_not_reported(name: str) -> None:
    assert example(name, flag=True).findings == []


def test_an_async_def_that_blocks_is_reported_at_either_flag() -> None:
    for flag in (False, True):
        (finding,) = example("blocking_http", flag=flag).findings
        assert (finding.rule.id, finding.line) == ("ASYNC210", 22)
        assert "`requests.get` blocks the event loop" in finding.message


DEPLOYMENT = """
import asyncio, time
import ingress as serve
from fastapi import FastAPI
app = FastAPI()

@serve.deployment
class Plain:
"""


def deployment(body: str) -> str:
    return DEPLOYMENT + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param("async def f(self): time.sleep(1)", ["9: ASYNC251"], id="async-def"),
        pytest.param("def f(self): time.sleep(1)", ["9: ASYNC251"], id="def-on-the-loop"),
        pytest.param("def f(self): yield time.sleep(1)", ["9: ASYNC251"], id="generator"),
        pytest.param(
            "def f(self):\n    yield from []\n    time.sleep(1)\n    return 3",
            ["11: ASYNC251"],
            id="what-no-async-def-may-have",
        ),
        pytest.param("def _f(self): time.sleep(1)", [], id="nobody-calls-it"),
        pytest.param(
            "async def f(self): self._g()\ndef _g(self): time.sleep(1)",
            ["10: ASYNC251"],
            id="helper",
        ),
        pytest.param(
            "async def f(self): self._g()\ndef _g(self): self._h()\ndef _h(self): time.sleep(1)",
            [],
            id="one-level-only",
        ),
        pytest.param(
            "async def f(self): await asyncio.to_thread(self.g)\ndef g(self): time.sleep(1)",
            [],
            id="handed-to-a-thread",
        ),
        pytest.param(
            "async def f(self):\n    def g(): time.sleep(1)\n    g()",
            ["10: ASYNC251"],
            id="inner-called",
        ),
        pytest.param(
            "async def f(self):\n    def g(): time.sleep(1)\n    await asyncio.to_thread(g)",
            [],
            id="inner-handed-on",
        ),
        pytest.param(
            "async def f(self): self._g(lambda: time.sleep(1))\ndef _g(self, h): ...",
            [],
            id="lambda",
        ),
        pytest.param(
            "async def f(self):\n    for x in self._g(): ...\ndef _g(self): yield time.sleep(1)",
            ["11: ASYNC251"],
            id="generator-iterated",
        ),
        pytest.param(
            "async def f(self):\n    give(self._g())\ndef _g(self): yield time.sleep(1)",
            [],
            id="generator-handed-on",
        ),
        pytest.param(
            "def f(self): return self._g()\ndef _g(self): yield time.sleep(1)",
            ["10: ASYNC251"],
            id="generator-returned-is-iterated-on-the-loop",
        ),
        pytest.param(
            "async def f(self): return (time.sleep(1) for _ in 'ab')", [], id="expression-returned"
        ),
        pytest.param(
            "async def f(self): return sum(time.sleep(1) for _ in 'ab')",
            ["9: ASYNC251"],
            id="expression-consumed",
        ),
        pytest.param("def __init__(self): time.sleep(1)", [], id="constructor"),
        pytest.param("def reconfigure(self, c): time.sleep(1)", ["9: ASYNC251"], id="reconfigure"),
        pytest.param("@serve.batch\ndef f(self, x): time.sleep(1)", [], id="def-batch"),
        pytest.param(
            "@serve.batch\nasync def f(self, x): time.sleep(1)", ["10: ASYNC251"], id="batch"
        ),
        pytest.param("@app.get('/')\ndef f(self): time.sleep(1)", [], id="def-endpoint"),
        pytest.param(
            "@app.get('/')\nasync def f(self): time.sleep(1)", ["10: ASYNC251"], id="endpoint"
        ),
        pytest.param("async def f(self): time.sleep(1)  # noqa", [], id="noqa"),
        pytest.param("async def f(self): time.sleep(1)  # noqa: ASYNC251", [], id="noqa-id"),
        pytest.param(
            "async def f(self): time.sleep(1)  # noqa: ASYNC210", ["9: ASYNC251"], id="noqa-other"
        ),
        pytest.param(
            "async def f(self): self._g()  # noqa: ASYNC251\ndef _g(self): time.sleep(1)",
            [],
            id="noqa-at-the-caller",
        ),
        pytest.param("async def f(self): time.sleep(1)\n# ruff: noqa", [], id="noqa-file"),
    ],
)
def test_what_runs_on_the_loop_is_checked_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, found: list[str]
) -> None:
    assert checked(tmp_path, deployment(body)) == found

    # Python keeps what it imported, and so must each case have a module of its own.
    name = f"app_{tmp_path.name}"
    write_module(tmp_path, name, deployment(body) + "a = serve.ingress(app)(Plain.func_or_class)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    application = serve.deployment(module.a).bind()
    report = check_application(application, name, tmp_path, Settings(), migrate=False)
    assert [f"{each.line}: {each.rule.id}" for each in report.findings] == found


def test_an_application_is_checked_as_its_files_are(tmp_path: Path) -> None:
    source = (
        deployment("def f(self): self._g()\ndef _g(self): time.sleep(1)") + "a = Plain.bind()\n"
    )
    write_module(tmp_path, "app", source)

    result = run(tmp_path, "app:a")

    assert result.stdout.startswith(
        "app.py:10:19: ASYNC251 `time.sleep` blocks the event loop, in "
    )
    assert "Plain._g, called on the event loop by Plain.f (app.py:9)" in result.stdout
    assert result.returncode == 1


def test_a_constructor_is_checked_where_it_shares_the_loop(tmp_path: Path) -> None:
    source = deployment("def __init__(self): time.sleep(1)")

    assert checked(tmp_path, source, separate=False) == ["9: ASYNC251"]


def test_a_helper_in_another_module_is_followed_by_its_import(tmp_path: Path) -> None:
    write_module(tmp_path, "helpers", "import time\n\ndef wait():\n    time.sleep(1)\n")
    write_module(
        tmp_path,
        "app",
        "from helpers import wait\nimport helpers as h\n"
        "async def f(): wait()\nasync def g(): h.wait()\nasync def k(wait): wait()\n",
    )
    report = check_files([tmp_path], Settings(), migrate=False)

    (finding,) = report.findings
    assert (finding.path.name, finding.line) == ("helpers.py", 4)
    assert finding.functions == ("f", "g")


def run(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INGRESS, "check", *arguments],
        cwd=folder,
        env={**environment(folder), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("target", ["nothing:app", "app:nothing", "nothing.py"])
def test_what_cannot_be_checked_ends_with_2_and_one_line(tmp_path: Path, target: str) -> None:
    write_module(tmp_path, "app", "")

    result = run(tmp_path, target)

    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert result.returncode == 2


def test_without_ruff_one_line_says_what_to_install(tmp_path: Path) -> None:
    write_module(tmp_path, "app", "async def f(): ...\n")
    script = "import sys; sys.modules['ruff'] = None\nfrom ingress.cli import main; main()"

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
    assert "python -m pip install 'fastapi-ingress[check]'" in line
    assert result.returncode == 2
