"""`ingress profile`: the functions of a running server under their replicas, routes and threads."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ingress.core.base.settings import RUNTIME_DIR
from tests.programs import (
    INGRESS,
    ServerProcess,
    ingress_run,
    process,
    run_ingress,
    write_module,
)
from tests.programs import environment as environment_of
from tests.servers import get

APP = """
import time
import ingress as serve
from fastapi import FastAPI

app = FastAPI()

def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

def on_the_loop():
    spin(0.01)

@serve.deployment(isolation="process")
class Child:
    def compute(self):
        spin(0.01)

@serve.deployment(lanes={"db": 1})
@serve.ingress(app)
class Api:
    def __init__(self, child):
        self.child = child

    @app.get("/items/{number}")
    async def item(self, number: int):
        on_the_loop()

    @app.get("/slow")
    @serve.method(lane="db")
    def slow(self):
        time.sleep(0.01)

    @app.get("/child")
    async def ask(self):
        await self.child.compute.remote()

hello = Api.bind(Child.bind())
"""
PATHS = ("/items/1", "/slow", "/child")
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    write_module(tmp_path, "main", APP)
    with tempfile.TemporaryDirectory() as folder:
        yield {**environment_of(tmp_path), RUNTIME_DIR: folder}


@contextmanager
def load(server: ServerProcess) -> Iterator[None]:
    """Send requests, one after another, until the context ends."""
    is_over, port = threading.Event(), server.port

    def send() -> None:
        for path in cycle(PATHS):
            if is_over.is_set():
                return
            assert get(port, path).status == 200

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_function_is_found_under_its_replica_its_route_and_its_thread(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with ingress_run(tmp_path, "main:hello", "--no-access-log", environ=environ) as server:
        server.wait_for("Ctrl-C to stop")
        none = run_ingress(tmp_path, "profile", "--seconds", "0.1", **environ)
        assert "no user code ran in 0.1 s; send requests meanwhile" in none.stderr
        wrong = run_ingress(tmp_path, "profile", "--deployment", "Chil", **environ)
        assert "--deployment Chil: there is none; name one of default:Child" in wrong.stderr
        with load(server):
            ran = run_ingress(tmp_path, "profile", "--seconds", "1", "--out", "p.json", **environ)
            assert ran.returncode == 0, ran.stderr
            drawn = run_ingress(
                tmp_path, "profile", "--seconds", "1", "--deployment", "Child", **environ
            )
            assert drawn.returncode == 0, drawn.stderr
    found = json.loads((tmp_path / "p.json").read_text())
    names = [each["name"].partition(" (")[0] for each in found["shared"]["frames"]]
    stacks = {
        (profile["name"].partition(" in process")[0], *(names[number] for number in sample))
        for profile in found["profiles"]
        for sample in profile["samples"]
    }
    assert any(
        stack[0].startswith("default:Api#")
        and stack[1:] == ("GET /items/{number}", "Api.item", "on_the_loop", "spin")
        for stack in stacks
    )
    assert any(stack[1:3] == ("GET /slow", "Api.slow") for stack in stacks)
    assert any("-db-worker" in profile["name"] for profile in found["profiles"])
    assert ("default:Child#0", "Child.compute", "Child.compute", "spin") in stacks
    assert "GET /items/{number}  spin (main.py:8)" in ran.stdout

    picture = ElementTree.parse(tmp_path / "profile.svg").getroot()
    titles = [str(each.text).partition(" (")[0] for each in picture.iter(f"{_SVG}title")]
    assert {"Child.compute", "spin"} <= set(titles)
    assert not any("Api" in each for each in titles)


def test_a_second_profile_at_once_is_not_taken_for_idle_code(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with ingress_run(tmp_path, "main:hello", "--no-access-log", environ=environ) as server:
        server.wait_for("Ctrl-C to stop")
        first = [*INGRESS, "profile", "--seconds", "20"]
        with process(first, tmp_path, environ) as profile:
            profile.wait_for("looks for 20 s")
            second = run_ingress(tmp_path, "profile", "--seconds", "0.1", **environ)
    assert "missing: another profile is being made" in second.stderr
    assert "no process could look; try again" in second.stderr


def test_all_workers_are_in_a_profile(tmp_path: Path, environ: dict[str, str]) -> None:
    options = ("--workers", "2", "--no-access-log")
    with ingress_run(tmp_path, "main:hello", *options, environ=environ) as server:
        server.wait_for("Ctrl-C to stop")
        with load(server):
            ran = run_ingress(tmp_path, "profile", "--seconds", "2", "--out", "p.json", **environ)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "p.json").read_text())
    processes = {
        each["name"].partition(",")[0].rpartition(" ")[2]
        for each in found["profiles"]
        if each["name"].startswith("default:Api#0")
    }
    assert len(processes) == 2


def test_a_file_of_another_kind_is_refused_before_a_server_is_asked(tmp_path: Path) -> None:
    ran = run_ingress(tmp_path, "profile", "--out", "profile.png")
    assert ran.returncode == 1
    assert "--out must end with .svg or .json, got 'profile.png'" in ran.stderr
