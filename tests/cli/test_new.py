"""`ingress new`: the project that it writes passes its own tests, ruff and mypy, and serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ingress_run, run_ingress
from tests.servers import environment, get

PLUGIN = ["-p", "ingress.testing.plugin", "-p", "no:cacheprovider"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    done = run_ingress(folder, "new", "shop")
    assert done.returncode == 0, done.stderr
    assert "pip install -e" in done.stdout
    return folder / "shop"


@pytest.mark.parametrize(
    "command",
    [
        ["pytest", "-q", *PLUGIN, "--sync-in-threadpool=both"],
        ["ruff", "check", "--no-cache", "."],
        ["ruff", "format", "--no-cache", "--check", "."],
        ["mypy"],
        ["ingress", "check", "app:app"],
        ["ingress", "config", "serve.yaml"],
    ],
    ids=["pytest", "ruff check", "ruff format", "mypy", "ingress check", "ingress config"],
)
def test_the_project_passes_as_it_is_written(project: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env=environment(project),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_project_serves_by_its_file(project: Path) -> None:
    with ingress_run(project, "serve.yaml") as server:
        server.wait_for("is ready at")
        assert json.loads(get(server.port, "/score?text=good").body) == {"text": "good", "score": 1}


def test_no_placeholder_is_left_and_nothing_is_hidden(project: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file() and "cache" not in str(path)]
    names = {path.relative_to(project).as_posix() for path in files}
    assert {"app.py", "Dockerfile", ".github/workflows/test.yml", ".gitignore"} <= names
    assert [path for path in files if path.suffix != ".pyc" and "{{name" in path.read_text()] == []
    assert 'name = "shop"' in (project / "pyproject.toml").read_text()


def test_another_folder_may_be_empty_and_is_told_with_its_quotes(tmp_path: Path) -> None:
    (tmp_path / "my shop").mkdir()
    done = run_ingress(tmp_path, "new", "shop", "--folder", "my shop")
    assert done.returncode == 0, done.stderr
    assert "cd 'my shop'" in done.stdout
    assert (tmp_path / "my shop" / "app.py").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1shop"], "'1shop' is no name of a project; use letters"),
        (["../shop"], "is no name of a project"),
        (["full"], "full is there already, and is not an empty folder"),
        (["shop", "--folder", "full/kept.txt/a"], "cannot write full/kept.txt/a/app.py: Not a dir"),
    ],
)
def test_a_wrong_name_writes_nothing(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept")
    before = sorted(os.walk(tmp_path))

    done = run_ingress(tmp_path, "new", *arguments)

    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())
    assert sorted(os.walk(tmp_path)) == before
