"""Every block of the README, docs/tour.md and docs/where-code-runs.md runs.

Python as a file, commands as typed.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from fastapi.testclient import TestClient

from ingress.exceptions import SyncMethodOnEventLoopWarning
from tests.documents import Reader, blocks, links
from tests.programs import INGRESS, ROOT, environment, process, run_ingress, run_python

README = (ROOT / "README.md").read_text()
PAGES = ROOT / "README.md", ROOT / "docs" / "tour.md", ROOT / "docs" / "where-code-runs.md"
BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [text for language, text in BLOCKS if language == "python"]
CONSOLE = [text for language, text in BLOCKS if language == "console"]


def python_block(name: str) -> str:
    block: str
    (block,) = [text for text in PYTHON if text.startswith(f"# {name}.py\n")]
    return block


@pytest.fixture
def readme_module(tmp_path: Path) -> Iterator[object]:
    """Import a named Python block as the file that its first line names."""

    def load(name: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(python_block(name))
        spec = importlib.util.spec_from_file_location(f"readme_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for name in [name for name in sys.modules if name.startswith("readme_")]:
        del sys.modules[name]


def test_every_block_has_a_test() -> None:
    named = [text for text in PYTHON if re.match(r"# \w+\.py\n", text)]

    assert [language for language, _ in BLOCKS if language not in ("python", "console")] == ["text"]
    assert len(named) == 4
    assert len(PYTHON) == 5
    assert len(CONSOLE) == 6


def test_the_first_application_answers_what_curl_shows(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(python_block("hello"))
    (session,) = [text for text in CONSOLE if text.startswith("$ curl")]
    shown = re.findall(r"^\$ curl (\S+)\n(.+)$", session, re.MULTILINE)
    assert len(shown) == 2
    (command,) = [text for text in CONSOLE if text.startswith("$ ingress run")]

    arguments = [*INGRESS, *shlex.split(command)[2:], "--port", "0"]
    with process(arguments, tmp_path, environment(tmp_path)) as server:
        for url, answer in shown:
            response = httpx.get(url.replace("http://127.0.0.1:8000", server.url))
            assert (response.status_code, response.text) == (200, answer)
        where = httpx.get(f"{server.url}/where").json()

    assert re.fullmatch(r"Hello#[01]-worker-\d+", where)


def test_where_the_first_application_runs_is_printed_and_not_typed(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(python_block("hello"))
    (session,) = [text for text in CONSOLE if text.startswith("$ ingress explain")]
    command, _, shown = session.partition("\n")

    done = run_ingress(tmp_path, *shlex.split(command)[2:])

    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    of_this_machine = re.compile(r"[\d.]+ cores?: |Python [\d.]+, free-threaded")
    shown_lines = [line for line in shown.splitlines() if not of_this_machine.match(line)]
    assert [line for line in lines if not of_this_machine.match(line)] == shown_lines


@pytest.mark.thorough
def test_the_first_application_is_tested_at_both_values_of_the_flag(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.write(python_block("hello"))
    reader.write(python_block("test_hello"))
    (session,) = [text for text in CONSOLE if text.startswith("$ pytest")]

    passed = "test_hello.py ..".ljust(73) + "[100%]"
    reader.run(f"{session}...\n{passed}\n...\n")


def test_deployments_call_each_other(readme_module: object) -> None:
    module = readme_module("shout")  # type: ignore[operator]

    with TestClient(module.shout) as client:
        assert client.get("/shout", params={"text": "hey"}).json() == "HEY!!!"


def test_a_request_streams_batches_and_is_timed(readme_module: object) -> None:
    module = readme_module("chat")  # type: ignore[operator]

    with TestClient(module.chat) as client:
        assert client.get("/answer/loud", params={"prompt": "hey"}).json() == "HEY"
        assert client.get("/answer/quiet", params={"prompt": "Hey"}).json() == "hey"
        assert client.get("/stream", params={"prompt": "a b"}).text == "a\nb\n"
        with client.websocket_connect("/socket") as socket:
            socket.send_text("a b")
            assert [socket.receive_text() for _ in range(2)] == ["a\n", "b\n"]
        answer = client.get("/slow", params={"seconds": 0}, headers={"x-request-id": "mine"})
        assert answer.json() == "mine"
        timeout = {"x-request-timeout-seconds": "0.1"}
        assert client.get("/slow", params={"seconds": 60}, headers=timeout).status_code == 408


def test_the_handle_block_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = [text for text in PYTHON if not re.match(r"# \w+\.py\n", text)]
    path = tmp_path / "block.py"
    path.write_text(block)

    done = run_python("-W", "error", str(path))

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("target", re.findall(r"^\$ make (\w+)", README, re.MULTILINE))
def test_the_make_targets_exist(target: str) -> None:
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_install_command_installs_this_project() -> None:
    (command,) = [text for text in CONSOLE if "pip install" in text]

    assert command == "$ python -m pip install -e .\n"
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'name = "fastapi-ingress"' in pyproject


@pytest.mark.thorough
def test_the_warning_is_quoted_as_it_is_issued(recwarn: pytest.WarningsRecorder) -> None:
    (quoted,) = [text for language, text in BLOCKS if language == "text"]
    begins = " ".join(quoted.split()).removesuffix(" ...")
    script = (
        "import ingress as serve\n"
        "class Model:\n"
        "    def __call__(self): return 1\n"
        "handle = serve.run(serve.deployment(Model).bind(), route_prefix=None)\n"
        "assert handle.remote().result() == 1\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert f"{SyncMethodOnEventLoopWarning.__name__}: {begins}" in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_links_lead_somewhere(page: Path) -> None:
    found = links(page)

    assert found
    assert [link for link in found if not (page.parent / link).exists()] == []


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1500
