"""`ingress check --run`: the user's tests confirm or refute the findings of `--migrate`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingress.check.write_recording import Trace, traced_class, traced_state
from tests.fakes import together
from tests.servers import PATIENCE_S, environment, run_ingress, write_module

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]

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

    def __del__(self):
        print("the instance ended with", self.n)

counter = Counter.bind()
"""

TESTS = """
from starlette.testclient import TestClient
import ingress as serve
from app import counter

def test_the_application():
    handle = serve.run(counter, route_prefix=None)
    try:
        counts = [handle.count.remote() for _ in range(50)]
        assert [each.result() for each in counts] == list(range(1, 51))
        assert [handle.count_safely.remote().result() for _ in range(2)] == [1, 2]
        assert handle.lazy.remote("a").result() == 50
        assert handle.now.remote().result() > 0
        assert handle.rows.remote().result() == [(1,)]
        assert list(handle.options(stream=True).items.remote()) == [1, 2]
    finally:
        serve.shutdown()

def test_an_endpoint():
    with TestClient(counter) as client:
        assert [client.get("/hit").json() for _ in range(2)] == [1, 2]
"""


ASKS = {
    "read": lambda each: each.there,
    "getattr": lambda each: getattr(each, "absent", 0),
    "hasattr": lambda each: int(hasattr(each, "absent")),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_write_is_too_late_if_a_thread_wrote_since_it_read(ask: Callable[[Any], int]) -> None:
    class Plain:
        there = 0

    trace = Trace(frozenset({"there", "absent"}))
    instance = traced_class(Plain, trace)()
    read, written = threading.Event(), threading.Event()

    def slow() -> None:
        trace.begin_call()
        n = ask(instance)
        read.set()
        written.wait()
        instance.there = instance.absent = n + 1

    thread = threading.Thread(target=slow)
    thread.start()
    read.wait()
    trace.begin_call()
    instance.there = instance.absent = 7
    written.set()
    thread.join()

    assert sum(writes.lost for writes in trace.writes.values()) == 1


CONTAINERS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": ({"k": 1}, lambda c: "k" in c, lambda c: c.pop("k")),
    "another-key": ({"k": 1}, lambda c: len(c), lambda c: c.update(j=1)),
    "defaultdict": (defaultdict(int, k=1), lambda c: c["k"], lambda c: c.__setitem__("k", 2)),
    "counter": (Counter("aab"), lambda c: c["a"], lambda c: c.__setitem__("a", 2)),
    "ordered": (OrderedDict(k=1), lambda c: bool(c), lambda c: c.popitem()),
    "list": ([1], lambda c: bool(c), lambda c: c.pop()),
    "set": ({1}, lambda c: 1 in c, lambda c: c.remove(1)),
    "deque": (deque([1], maxlen=3), lambda c: len(c), lambda c: c.popleft()),
}


@pytest.mark.parametrize(("value", "ask", "act"), CONTAINERS.values(), ids=CONTAINERS)
def test_an_act_on_a_container_is_too_late_if_another_thread_acted_since_it_was_asked(
    value: Any, ask: Callable[[Any], Any], act: Callable[[Any], Any]
) -> None:
    trace = Trace(frozenset({"c"}))
    traced = traced_state({"c": value, "other": value}, trace)
    container = traced["c"]
    assert container == value
    assert isinstance(container, type(value))
    assert traced["other"] is value
    expected = value.copy()
    act(expected)

    def work() -> None:
        trace.begin_call()
        ask(container)
        act(container)
        acted.append(container == expected)  # compare here: a comparison reads

    acted: list[bool] = []
    trace.begin_call()
    ask(container)
    together(work)
    assert acted == [True]
    assert [writes.lost for writes in trace.writes.values()] == [0]
    try:
        act(container)
    except (KeyError, IndexError):
        pass  # the act may fail, being too late

    assert [writes.lost for writes in trace.writes.values()] == [1]


def test_an_act_on_another_key_is_not_too_late() -> None:
    trace = Trace(frozenset({"c"}))
    container = traced_state({"c": {}}, trace)["c"]

    def work() -> None:
        trace.begin_call()
        container["a"] = 1

    trace.begin_call()
    assert "b" not in container
    together(work)
    container["b"] = 1

    assert [writes.lost for writes in trace.writes.values()] == [0, 0]


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_ingress(folder, "check", *arguments, "--format", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


def test_a_lost_update_is_confirmed_and_no_request_fails(folder: Path) -> None:
    # The user's tests pass at flag 0, which shows that no request fails.
    write_module(folder, "test_app", TESTS)

    result = check(folder, "app:counter", "--run", "pytest -sq -p no:cacheprovider")

    report = json.loads(result.stdout)
    evidence: dict[str, Any] = {}
    for each in report["findings"]:
        if each["rule"].startswith("IG"):
            text = APP.splitlines()[each["line"] - 1].strip()
            evidence[text] = each["evidence"]
    assert "overwrote another's" in evidence.pop("self.n = n + 1  # lost")
    assert "overwrote another's" in evidence.pop("self.model = object()  # twice")
    assert "overwrote another's" in evidence.pop("self.cache[key] = 1  # twice")
    assert "overwrote another's" in evidence.pop('self.yielded = getattr(self, "yielded", 0) + 1')
    assert "no running event loop" in evidence.pop(
        "return asyncio.get_running_loop().time()  # no loop"
    )
    assert "created in a thread" in evidence.pop('self.db = sqlite3.connect(":memory:")')
    assert "overwrote another's" in evidence.pop("self.hits += 1  # lost")
    assert evidence == {"self.n += 1": ""}, "no test calls it"
    (dropped,) = [note for note in report["notes"] if note.startswith("dropped: ")]
    assert "IG101 `self.guarded`" in dropped
    assert "the instance ended with 50\n" in result.stderr, "a rehearsal is undone"
    assert "2 passed" in result.stderr
    assert result.returncode == 1


@pytest.mark.thorough
def test_what_the_tests_leave_running_is_tried_too(folder: Path) -> None:
    write_module(
        folder,
        "test_app",
        "import ingress as serve\nfrom app import counter\n"
        "def test_this():\n    serve.run(counter, route_prefix=None).count.remote().result()\n",
    )

    result = check(folder, "app:counter", "--run", "python -m pytest -q -p no:cacheprovider")

    findings = {each["line"]: each for each in json.loads(result.stdout)["findings"]}
    line = next(at for at, text in enumerate(APP.splitlines(), 1) if "self.n = n + 1" in text)
    assert "overwrote another's" in findings[line]["evidence"]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["make test", "", "python tests.py"])
def test_what_is_not_pytest_is_refused_with_one_line(folder: Path, command: str) -> None:
    result = check(folder, "app:counter", "--run", command)

    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: --run takes a command of pytest's, such as 'pytest tests'; got ")
    assert result.returncode == 2


@pytest.mark.thorough
def test_tests_that_fail_are_told_of_and_leave_the_findings(folder: Path) -> None:
    write_module(folder, "test_app", "def test_this():\n    assert False\n")

    result = check(folder, "app:counter", "--run", "pytest -q -p no:cacheprovider")

    assert "IG101" in result.stdout
    assert "Error: pytest ended with 1: not all tests passed, or none ran" in result.stderr
    assert result.returncode == 2


@pytest.mark.thorough
def test_without_the_option_the_plugin_does_nothing(folder: Path) -> None:
    write_module(
        folder,
        "test_app",
        "from ingress.serving.control.factories import Factories\n"
        "from ingress.engines import local_engine\n"
        "def test_this():\n    assert local_engine().factories == Factories()\n",
    )

    result = subprocess.run(
        [*PYTEST, "-p", "ingress.check.plugin"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert "1 passed" in result.stdout
