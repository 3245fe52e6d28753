"""`ingress check --migrate`: what is not safe once each `def` runs in a thread."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ingress.check.checker import check_application, check_files
from ingress.check.findings import Report
from ingress.settings import Settings
from tests.servers import write_module

HEAD = """
import asyncio, sqlite3, threading, time, functools
from fastapi import FastAPI
import ingress as serve

app, COUNT, SEEN, LOCK, LOCAL = FastAPI(), 0, {}, threading.Lock(), threading.local()

def timed(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapper

def bare(func):
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapper

@serve.deployment
@serve.ingress(app)
class A:
"""
FIRST = HEAD.count("\n") + 1
TAIL = "\na = A.bind()\n"


def source(body: str, head: str = HEAD) -> str:
    return head + "".join(f"    {line}\n" for line in body.splitlines()) + TAIL


def lines(report: Report) -> list[str]:
    """Return `line: id`, the first line of the class's body being 1."""
    return [f"{each.line - FIRST + 1}: {each.rule.id}" for each in report.findings]


def migrated(folder: Path, body: str) -> Report:
    (folder / "app.py").write_text(source(body))
    return check_files([folder / "app.py"], Settings(run_sync_in_threadpool=True), migrate=True)


CASES = {
    # IG101
    "augmented": ("def f(self): self.n += 1", ["1: IG101"]),
    "assigned": ("def f(self): self.n = self.n + 1", ["1: IG101"]),
    "by-a-local": (
        "def f(self):\n    n = self.n\n    time.sleep(0)\n    self.n = n + 1",
        ["4: IG101"],
    ),
    "of-a-key": ("def f(self): self.hits['a'] += 1", ["1: IG101"]),
    "deeper": ("def f(self): self.stats.hits += 1", ["1: IG101"]),
    "of-the-class": ("n = 0\ndef f(self): A.n += 1", ["2: IG101"]),
    "global": ("def f(self):\n    global COUNT\n    COUNT += 1", ["3: IG101"]),
    "global-key": ("def f(self): SEEN['a'] = SEEN.get('a', 0) + 1", ["1: IG101"]),
    "in-a-helper": ("def f(self): self._g()\ndef _g(self): self.n += 1", ["2: IG101"]),
    "endpoint": ("@app.get('/')\ndef f(self): self.n += 1", ["2: IG101"]),
    "generator": ("def f(self):\n    self.n += 1\n    yield", ["2: IG101"]),
    "in-a-with": ("def f(self):\n    with open('x'): self.n += 1", ["2: IG101"]),
    "locked": ("def f(self):\n    with self._lock: self.n += 1", []),
    "locked-by-global": ("def f(self):\n    with LOCK: self.n += 1", []),
    "lock-of-any-name": (
        "def __init__(self): self._mine = threading.RLock()\n"
        "def f(self):\n    with self._mine: self.n += 1",
        [],
    ),
    "not-a-lock": ("def f(self):\n    with self.clock: self.n += 1", ["2: IG101"]),
    "acquired": (
        "def f(self):\n    self._lock.acquire()\n    try: self.n += 1\n"
        "    finally: self._lock.release()",
        [],
    ),
    "helper-under-a-lock": (
        "def f(self):\n    with self._lock: self._g()\ndef _g(self): self.n += 1",
        [],
    ),
    "async": ("async def f(self): self.n += 1", []),
    "local": ("def f(self):\n    n = 0\n    n += 1\n    COUNT = 1\n    COUNT += 1", []),
    "written-only": ("def f(self): self.last = time.time()", []),
    "thread-local": ("def f(self): LOCAL.n += 1", []),
    "constructor": ("def __init__(self): self.n = 0; self.n += 1", []),
    "nobody-calls-it": ("def _f(self): self.n += 1", []),
    "batch": ("@serve.batch\ndef f(self, x): self.n += 1", []),
    "noqa": ("def f(self): self.n += 1  # noqa: IG101", []),
    "noqa-other": ("def f(self): self.n += 1  # noqa: E501", ["1: IG101"]),
    # IG102
    "lazy": ("def f(self):\n    if self.m is None: self.m = 1", ["2: IG102"]),
    "cache": ("def f(self, k):\n    if k not in self.d: self.d[k] = 1", ["2: IG102"]),
    "cache-returned": (
        "def f(self, k):\n    if k in self.d:\n        return self.d[k]\n    self.d[k] = 1",
        ["4: IG102"],
    ),
    "cache-got": (
        "def f(self, k):\n    v = SEEN.get(k)\n    if v is None:\n        SEEN[k] = v = 1\n"
        "    return v",
        ["4: IG102"],
    ),
    "cache-tried": (
        "def f(self, k):\n    try:\n        return self.d[k]\n    except KeyError:\n"
        "        self.d[k] = 1",
        ["5: IG102"],
    ),
    "popped": (
        "def __init__(self): self.q = []\ndef f(self):\n    if self.q: return self.q.pop()",
        ["3: IG102"],
    ),
    "deleted": ("def f(self, k):\n    if k in self.d: del self.d[k]", ["2: IG102"]),
    "counted": ("def f(self, k):\n    if k in self.d: self.d[k] += 1", ["2: IG101"]),
    "double-checked": (
        "def f(self):\n    if self.m is None:\n        with self._lock:\n"
        "            if self.m is None: self.m = 1",
        [],
    ),
    "one-step": ("def f(self, k): return self.d.setdefault(k, 1)", []),
    "one-step-pop": ("def f(self, k):\n    if k in self.d: self.d.pop(k, None)", []),
    "lazy-attribute": ("def f(self):\n    if not hasattr(self, 'm'): self.m = 1", ["2: IG102"]),
    "getattr": ("def f(self): self.n = getattr(self, 'n', 0) + 1", ["1: IG101"]),
    "append": ("def f(self, k): self.items.append(k)", []),
    "read-only": ("def f(self, k):\n    if k in self.d: return self.d[k]\n    return None", []),
    "another-place": ("def f(self, k):\n    if k in self.d: self.last = k", []),
    # IG103
    "running-loop": ("def f(self): return asyncio.get_running_loop().time()", ["1: IG103"]),
    "task": ("def f(self): asyncio.create_task(self.g())\nasync def g(self): ...", ["1: IG103"]),
    "ready": (
        "def f(self):\n    try: asyncio.get_running_loop()\n    except RuntimeError: pass",
        [],
    ),
    "kept-loop": ("def f(self): self.loop.call_soon(print)", ["1: IG103"]),
    "thread-safe": ("def f(self): self.loop.call_soon_threadsafe(print)", []),
    "event": (
        "def __init__(self): self.ready = asyncio.Event()\ndef f(self): self.ready.set()",
        ["2: IG103"],
    ),
    "event-of-threads": (
        "def __init__(self): self.ready = threading.Event()\ndef f(self): self.ready.set()",
        [],
    ),
    "asyncio-run": ("def f(self): return asyncio.run(self.g())\nasync def g(self): ...", []),
    "loop-in-async": ("async def f(self): asyncio.get_running_loop()", []),
    # IG104, IG105
    "wrapper": ("@timed\nasync def f(self): ...", ["2: IG104"]),
    "wrapper-without-wraps": ("@bare\nasync def f(self): ...", ["2: IG104"]),
    "awaitable": ("def f(self): return self._g()\nasync def _g(self): ...", ["1: IG105"]),
    "awaitable-asyncio": ("def f(self): return asyncio.sleep(1)", ["1: IG105"]),
    # IG106
    "sqlite": (
        "def __init__(self): self.db = sqlite3.connect('x')\n"
        "def f(self): return self.db.execute('')",
        ["1: IG106"],
    ),
    "sqlite-shared": (
        "def __init__(self): self.db = sqlite3.connect('x', check_same_thread=False)\n"
        "def f(self): return self.db.execute('')",
        [],
    ),
    "sqlite-in-async": (
        "def __init__(self): self.db = sqlite3.connect('x')\n"
        "async def f(self): return self.db.execute('')",
        [],
    ),
    "local-filled": (
        "def __init__(self):\n    self.own = threading.local()\n    self.own.n = 1\n"
        "def f(self): return self.own.n",
        ["2: IG106"],
    ),
}


@pytest.mark.parametrize(("body", "found"), CASES.values(), ids=CASES)
def test_what_is_not_safe_in_a_thread_is_found_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, found: list[str]
) -> None:
    assert lines(migrated(tmp_path, body)) == found

    # Also of the imported class, as its replicas will plan it.
    name = f"app_{tmp_path.name}"
    write_module(tmp_path, name, source(body))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    settings = Settings(run_sync_in_threadpool=True)
    report = check_application(module.a, name, tmp_path, settings, migrate=True)
    assert lines(report) == found


def test_one_request_at_a_time_has_its_instance_for_itself(tmp_path: Path) -> None: ...
