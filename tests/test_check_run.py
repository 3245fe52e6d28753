"""`ingress check --run`: the user's tests decide what `--migrate` has found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.servers import INGRESS, PATIENCE_S, environment, write_module

APP = """
import asyncio, functools, sqlite3, threading, time
from fastapi import FastAPI
import ingress as serve

api = FastAPI()

def synchronized(func):
    @functools.wraps(func)
    def inner(self, *args):
        with self._mine:
            return func(self, *args)
    return inner

@serve.deployment
@serve.ingress(api)
class Counter:
    def __init__(self):
        self.n = self.guarded = self.hits = 0
        self.model = None
        self.cache = {}
        self.db = sqlite3.connect(":memory:")
        self._mine = threading.RLock()

    def count(self):
        n = self.n
        time.sleep(0.002)
        self.n = n + 1  # lost
        return self.n

    @synchronized
    def count_safely(self):
        self.guarded += 1  # kept
        return self.guarded

    def lazy(self, key):
        if self.model is None:
            self.model = object()  # twice
        if key not in self.cache:
            self.cache[key] = 1  # twice
        return self.n

    def items(self):
        self.yielded = getattr(self, "yielded", 0) + 1
        yield from [1, 2]

    @api.get("/hit")
    def hit(self):
        self.hits += 1  # lost
        return self.hits

    def untried(self):
        self.n += 1

    def now(self):
        return asyncio.get_running_loop().time()  # no loop

    def rows(self):
        return self.db.execute("select 1").fetchall()

counter = Counter.bind()
"""

TESTS = """
import ingress as serve
from app import counter

def test_the_application():
    handle = serve.run(counter)
    try:
        counts = [handle.count.remote() for _ in range(50)]
        assert [each.result() for each in counts] == list(range(1, 51))
        assert [handle.count_safely.remote().result() for _ in range(2)] == [1, 2]
        assert handle.lazy.remote("a").result() == 50
        assert handle.now.remote().result() > 0
        assert handle.rows.remote().result() == [(1,)]
        assert list(handle.options(stream=True).items.remote()) == [1, 2]
        [get() for _ in range(2)]
    finally:
        serve.shutdown()

def get():
    import httpx
    return httpx.get("http://127.0.0.1:8000/hit").raise_for_status()
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INGRESS, "check", *arguments, "--format", "json"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


def test_a_lost_update_is_confirmed_and_no_request_fails(folder: Path) -> None:
    # The user's tests are the proof that no request fails: they run at flag 0, and pass.
    write_module(folder, "test_app", TESTS.replace("[get() for _ in range(2)]", "pass"))

    result = check(folder, "app:counter", "--run", "pytest -q -p no:cacheprovider")

    report = json.loads(result.stdout)
    evidence: dict[str, Any] = {}
    for each in report["findings"]:
        if each["rule"].startswith("IG"):
            text = APP.splitlines()[each["line"] - 1].strip()
            evidence[text] = each["evidence"]
    assert "came too late" in evidence.pop("self.n = n + 1  # lost")
    assert "came too late" in evidence.pop("self.model = object()  # twice")
    assert "came too late" in evidence.pop("self.cache[key] = 1  # twice")
    assert "came too late" in evidence.pop('self.yielded = getattr(self, "yielded", 0) + 1')
    assert "no running event loop" in evidence.pop(
        "return asyncio.get_running_loop().time()  # no loop"
    )
    assert "created in a thread" in evidence.pop('self.db = sqlite3.connect(":memory:")')
    assert evidence == {"self.hits += 1  # lost": "", "self.n += 1": ""}
    (dropped,) = [note for note in report["notes"] if note.startswith("dropped: ")]
    assert "IG101 `self.guarded`" in dropped
    assert "1 passed" in result.stderr
    assert result.returncode == 1
