"""Every block of the documents is run, here or by the test that `ELSEWHERE` names."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from tests.documents import ROOT, blocks
from tests.servers import INGRESS, UVICORN, environment, process, wait_until, write_module
from tests.tutorial import PAGES

ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/async-objects.md": "test_loop_sharing.py",
    "docs/explain.md": "test_explain.py",
    "docs/how-to/catalogue.md": "test_app_catalogue.py",
    "docs/how-to/chat.md": "test_app_chat.py",
    "docs/how-to/database.md": "test_how_to.py",
    "docs/how-to/images.md": "test_app_images.py",
    "docs/how-to/jobs-on-many-machines.md": "test_how_to.py",
    "docs/how-to/jobs.md": "test_app_documents.py",
    "docs/how-to/mcp.md": "ecosystem/test_mcp.py",
    "docs/how-to/search.md": "test_app_search.py",
    "docs/migrating.md": "test_guides.py",
    "docs/opentelemetry.md": "ecosystem/test_tracing.py",
    "docs/testing.md": "test_guides.py",
    "docs/tour.md": "test_readme.py",
    "docs/where-code-runs.md": "test_readme.py",
    **{f"docs/learn/{page.name}": "test_tutorial.py" for page in PAGES},
}
"""The documents whose blocks other tests run, and these tests."""

SESSIONS = {
    "$ ingress trace ": "test_trace.py",
    "$ ingress run serve.yaml --replace\n": "test_replacing.py",
    "$ ingress memory ": "test_memory_growth.py",
    "$ ingress reload --wait\n": "test_following.py",
    "$ ingress status\n": "test_control_commands.py",
    '$ echo \'{"command": "livez"}\'': "test_control_commands.py",
}
"""The sessions whose commands other tests run, with an output that is not the same each time."""

RULES = "test_check_report.py", "test_loop_sharing.py"  # the Python of docs/rules

NOT_RUN = {
    "docs/cluster.md": "its commands need a cluster of several machines",
    "docs/config-file.md": "its blocks are parts of a file and of an output",
}

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MODULE = """
from fastapi import FastAPI
import ingress as serve

api = FastAPI()

@serve.deployment
@serve.ingress(api)
class Seen:
    @api.get("/{path:path}")
    def seen(self, path: str):
        return "seen"

app = hello = shout = Seen.bind()

def make_app():
    return app
"""

_PLACE = {
    "--host 0.0.0.0": "--host 127.0.0.1",
    "--port 80 ": "--port 0 ",
    "--workers 4": "--workers 2",
    "--workers 8": "--workers 2",
}
"""The parts of a command that the machine of a test cannot have, and those in their place."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_here(language: str) -> list[object]:
    """Return the blocks of a language that this module runs, with the names of their documents."""
    found: list[object] = []
    for path in DOCUMENTS:
        name = name_of(path)
        is_of_rules = name.startswith("docs/rules/") and language == "python"
        if name not in ELSEWHERE and name not in NOT_RUN and not is_of_rules:
            for number, (of, text) in enumerate(blocks(path)):
                if of == language and not text.startswith(tuple(SESSIONS)):
                    found.append(pytest.param(text, id=f"{path.stem}-{number}"))
    return found


def read(test: str) -> str:
    (path,) = (ROOT / "tests").rglob(test)
    return path.read_text()


def test_each_document_is_run_by_a_test() -> None:
    assert {*ELSEWHERE, *NOT_RUN} <= {name_of(path) for path in DOCUMENTS if blocks(path)}
    for document, test in ELSEWHERE.items():
        text = read(test)
        is_of_tutorial = document.startswith("docs/learn/")  # whose pages are not named one by one
        assert is_of_tutorial or Path(document).name in text or document in text
    for begin, test in SESSIONS.items():
        assert any(text.startswith(begin) for path in DOCUMENTS for _, text in blocks(path)), begin
        assert read(test)
    for test in RULES:
        assert "rules" in read(test)
    languages = {language for path in DOCUMENTS for language, _ in blocks(path)}
    assert languages == {"console", "python", "text", "toml", "yaml"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("text", blocks_here("python"))
def test_a_pages_code_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    name = re.match(r"# (\w+)\.py\n", text)
    assert name is not None, f"which file is this?\n{text}"
    bound = re.search(r"^(\w+) = \w+\.bind\(", text, re.MULTILINE)
    write_module(tmp_path, name[1], text.replace("serve.start(", "dict(options="))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name[1])
        if bound is not None:
            with TestClient(getattr(module, bound[1])) as client:
                assert client.get("/").status_code == 200
    finally:
        sys.modules.pop(name[1], None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("main", "app", "shout"):
        write_module(tmp_path, name, MODULE)
    (tmp_path / ".env").write_text("FROM_FILE=yes\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "plain.py").write_text("import time\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_one(): pass\n")
    return tmp_path


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("text", blocks_here("console"))
def test_the_commands_of_a_page_do_their_work(folder: Path, text: str) -> None:
    lines = text.splitlines()
    assert all(line.startswith("$ ") for line in lines), "compare the output in a test of its own"
    for line in lines:
        command = re.split(r"\s{2,}", line.removeprefix("$ "))[0]
        if "--engine ray" not in command:  # make test-ray
            run(command, folder)


def run(command: str, folder: Path) -> None:
    for shown, real in _PLACE.items():
        command = f"{command} ".replace(shown, real).strip()
    uds = folder / "s"
    command = command.replace("/run/shop.sock", str(uds))
    environ = environment(folder)
    words = shlex.split(command)
    while (variable := words[0].partition("="))[1]:
        environ[variable[0]] = variable[2]
        del words[0]
    words[:1] = {"ingress": INGRESS, "uvicorn": UVICORN}[words[0]]
    if " run " not in command and "uvicorn" not in command:
        done = subprocess.run(words, cwd=folder, env=environ, timeout=100, check=False)
        assert done.returncode == 0, command
        return
    if "--uds" not in words and "--port" not in words:
        words += ["--port", "0"]
    with process(words, folder, environ) as server:
        wait_until(
            lambda: (
                re.search("is ready at|Uvicorn running", server.output)
                or server.process.poll() is not None
            ),
            timeout_s=60,
        )
        base = "http://localhost" if "--uds" in words else server.url
        transport = httpx.HTTPTransport(uds=str(uds)) if "--uds" in words else None
        with httpx.Client(transport=transport, base_url=base, timeout=60) as client:
            answer = client.get("/shop/any")
            assert (answer.status_code, answer.text) == (200, '"seen"'), command
