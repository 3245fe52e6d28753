"""`ingress check --migrate`: code that is not safe once each `def` runs in a thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingress.check.checker import check_files
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

HEAD = """
import asyncio, decimal, functools, os, random, sqlite3, sys, threading, time
try: import torch
except ImportError: ...
try: from selenium import webdriver
except ImportError: ...
from fastapi import Depends, FastAPI
import ingress as serve

app, COUNT, SEEN, LOCK, LOCAL = FastAPI(), 0, {}, threading.Lock(), threading.local()
CONFIG = app.state

def timed(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapper

def synchronized(func):
    @functools.wraps(func)
    def wrapper(self, *args, **kwargs):
        with self._mine:
            return func(self, *args, **kwargs)
    return wrapper

def synchronized_with(lock):
    def decorate(func):
        @functools.wraps(func)
        def wrapper(*args, **kwargs):
            with lock:
                return func(*args, **kwargs)
        return wrapper
    return decorate

def counted(func):
    @functools.wraps(func)
    def wrapper(self, *args, **kwargs):
        with self._mine:
            print(self)
        return func(self, *args, **kwargs)
    return wrapper

def bare(func):
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapper

@serve.deployment(lanes={"db": 2})
@serve.ingress(app)
class A:
"""

CASES = {
    # IG101
    "augmented": "def f(self): self.n += 1  #: IG101",
    "assigned": "def f(self): self.n = self.n + 1  #: IG101",
    "by-a-local": """
        def f(self):
            n = self.n
            print(n)
            self.n = n + 1  #: IG101
        """,
    "of-a-key": "def f(self): self.hits['a'] += 1  #: IG101",
    "deeper": "def f(self): self.stats.hits += 1  #: IG101",
    "of-the-class": """
        n = 0
        def f(self): A.n += 1  #: IG101
        """,
    "global": """
        def f(self):
            global COUNT
            COUNT += 1  #: IG101
        """,
    "global-key": "def f(self): SEEN['a'] = SEEN.get('a', 0) + 1  #: IG101",
    "in-a-helper": """
        def f(self): self._g()
        def _g(self): self.n += 1  #: IG101
        """,
    "endpoint": """
        @app.get('/')
        def f(self): self.n += 1  #: IG101
        """,
    "dependency": """
        def dep(self):
            self.n += 1  #: IG101
        @app.get('/')
        def f(self, x=Depends(dep)): ...
        """,
    "serial": """
        @serve.method(execution="serial")
        def f(self): self.n += 1
        """,
    "kept-on-the-loop": """
        @serve.method(execution="event_loop")
        def f(self): self.n += 1
        """,
    "in-a-lane": """
        @serve.method(lane="db")
        def f(self): self.n += 1  #: IG101
        """,
    "generator": """
        def f(self):
            self.n += 1  #: IG101
            yield
        """,
    "in-a-with": """
        def f(self):
            with open('x'): self.n += 1  #: IG101
        """,
    "locked": """
        def f(self):
            with self._lock: self.n += 1
        """,
    "locked-by-global": """
        def f(self):
            with LOCK: self.n += 1
        """,
    "lock-of-any-name": """
        def __init__(self): self._mine = threading.RLock()
        def f(self):
            with self._mine: self.n += 1
        """,
    "not-a-lock": """
        def f(self):
            with self.clock: self.n += 1  #: IG101
        """,
    "acquired": """
        def f(self):
            self._lock.acquire()
            try: self.n += 1
            finally: self._lock.release()
        """,
    "decorator-with-a-lock": """
        def __init__(self): self._mine = threading.RLock()
        @synchronized
        def f(self): self.n += 1
        @synchronized
        def g(self): self._h()
        def _h(self): self.n += 1
        @synchronized_with(LOCK)
        def i(self): self.n += 1
        @timed
        def j(self): self.n += 1  #: IG101
        @counted
        def k(self): self.n += 1  #: IG101
        """,
    "helper-under-a-lock": """
        def f(self):
            with self._lock: self._g()
        def _g(self): self.n += 1
        """,
    "async": "async def f(self): self.n += 1",
    "local": """
        def f(self):
            n = 0
            n += 1
            COUNT = 1
            COUNT += 1
        """,
    "written-only": "def f(self): self.last = time.time()",
    "thread-local": "def f(self): LOCAL.n += 1",
    "constructor": "def __init__(self): self.n = 0; self.n += 1",
    "never-called": "def _f(self): self.n += 1",
    "batch": """
        @serve.batch
        def f(self, x): self.n += 1
        """,
    "noqa": "def f(self): self.n += 1  # noqa: IG101",
    "noqa-other": "def f(self): self.n += 1  # noqa: E501  #: IG101",
    # IG102
    "lazy": """
        def f(self):
            if self.m is None: self.m = 1  #: IG102
        """,
    "cache": """
        def f(self, k):
            if k not in self.d: self.d[k] = 1  #: IG102
        """,
    "cache-returned": """
        def f(self, k):
            if k in self.d:
                print(k)
                return self.d[k]
            self.d[k] = 1  #: IG102
        """,
    "cache-got": """
        def f(self, k):
            v = SEEN.get(k)
            if v is None:
                SEEN[k] = v = 1  #: IG102
            return v
        """,
    "cache-tried": """
        def f(self, k):
            try:
                return self.d[k]
            except KeyError:
                self.d[k] = 1  #: IG102
        """,
    "popped": """
        def __init__(self): self.q = []
        def f(self):
            if self.q: return self.q.pop()  #: IG102
        """,
    "deleted": """
        def f(self, k):
            if k in self.d: del self.d[k]  #: IG102
        """,
    "counted": """
        def f(self, k):
            if k in self.d: self.d[k] += 1  #: IG101
        """,
    "double-checked": """
        def f(self):
            if self.m is None:
                with self._lock:
                    if self.m is None: self.m = 1
        """,
    "one-step": "def f(self, k): return self.d.setdefault(k, 1)",
    "one-step-pop": """
        def f(self, k):
            if k in self.d: self.d.pop(k, None)
        """,
    "lazy-attribute": """
        def f(self):
            if not hasattr(self, 'm'): self.m = 1  #: IG102
        """,
    "getattr": "def f(self): self.n = getattr(self, 'n', 0) + 1  #: IG101",
    "another-attribute": """
        def f(self):
            if self.options.debug: self.options.level = 1
            if CONFIG.debug: CONFIG.level = 1
        """,
    "attribute-of-a-global": "def f(self): app.state.n += 1  #: IG101",
    "append": "def f(self, k): self.items.append(k)",
    "read-only": """
        def f(self, k):
            if k in self.d: return self.d[k]
            return None
        """,
    "another-place": """
        def f(self, k):
            if k in self.d: self.last = k
        """,
    # IG103
    "running-loop": "def f(self): return asyncio.get_running_loop().time()  #: IG103",
    "task": """
        def f(self): asyncio.create_task(self.g())  #: IG103
        async def g(self): ...
        """,
    "ready": """
        def f(self):
            try: asyncio.get_running_loop()
            except RuntimeError: pass
        """,
    "kept-loop": "def f(self): self.loop.call_soon(print)  #: IG103",
    "thread-safe": "def f(self): self.loop.call_soon_threadsafe(print)",
    "event": """
        def __init__(self): self.ready = asyncio.Event()
        def f(self): self.ready.set()  #: IG103
        """,
    "event-of-threads": """
        def __init__(self): self.ready = threading.Event()
        def f(self): self.ready.set()
        """,
    "asyncio-run": """
        def f(self): return asyncio.run(self.g())
        async def g(self): ...
        """,
    "loop-in-async": "async def f(self): asyncio.get_running_loop()",
    # IG104, IG105
    "wrapper": """
        @timed
        async def f(self): ...  #: IG104
        """,
    "wrapper-without-wraps": """
        @bare
        async def f(self): ...  #: IG104
        """,
    "awaitable": """
        def f(self): return self._g()  #: IG105
        async def _g(self): ...
        """,
    "awaitable-asyncio": "def f(self): return asyncio.sleep(1)  #: IG105",
    # IG106
    "sqlite": """
        def __init__(self): self.db = sqlite3.connect('x')  #: IG106
        def f(self): return self.db.execute('')
        """,
    "sqlite-in-the-serial-thread": """
        def __init__(self): self.db = sqlite3.connect('x')
        @serve.method(execution="serial")
        def f(self): return self.db.execute('')
        """,
    "sqlite-shared": """
        def __init__(self): self.db = sqlite3.connect('x', check_same_thread=False)
        def f(self): return self.db.execute('')
        """,
    "sqlite-not-shared": """
        def __init__(self): self.db = sqlite3.connect('x', uri=False)  #: IG106
        def f(self): return self.db.execute('')
        """,
    "sqlite-in-async": """
        def __init__(self): self.db = sqlite3.connect('x')
        async def f(self): return self.db.execute('')
        """,
    "local-filled": """
        def __init__(self):
            self.own = threading.local()
            self.own.n = 1  #: IG106
        def f(self): return self.own.n
        """,
    "local-of-the-module-filled": """
        def __init__(self): LOCAL.n = 1  #: IG106
        def f(self): return LOCAL.n
        """,
    "local-filled-where-it-is-used": """
        def __init__(self): self.own = threading.local()
        def f(self):
            self.own.n = 1
            return self.own.n
        """,
    "browser": """
        def __init__(self): self.browser = webdriver.Firefox()  #: IG106
        def f(self): return self.browser.title
        """,
    "environment": """
        def __init__(self):
            os.environ['PORT'] = '1'  #: IG107
            self.set_up()
        def set_up(self): os.chdir('/')  #: IG107
        def f(self): os.environ['PORT'] = '2'
        """,
    "environment-read": "def __init__(self): self.port = os.environ['PORT']",
    "seed": "def __init__(self): random.seed(1)  #: IG107",
    "limit": "def __init__(self): sys.setrecursionlimit(9)  #: IG107",
    "process-group": """
        def __init__(self): torch.distributed.init_process_group('gloo')  #: IG107
        """,
    "precision": """
        def __init__(self): decimal.getcontext().prec = 50  #: IG106
        def f(self): return decimal.Decimal(1) / 3
        """,
}


AT_1 = Settings(run_sync_in_threadpool=True)


@pytest.fixture(scope="module")
def found_in_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    programs = {name: in_class(HEAD, body) for name, body in CASES.items()}
    return checked_as_files(tmp_path_factory.mktemp("programs"), programs, AT_1, migrate=True)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_safe_in_a_thread_is_found_and_nothing_else(
    name: str, found_in_files: dict[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = in_class(HEAD, CASES[name])
    report = checked_as_application(tmp_path, monkeypatch, program, AT_1, migrate=True)

    assert found_in_files[name] == found(report) == expected(program)


@pytest.mark.parametrize("flag", [False, True], ids=["flag-0", "flag-1"])
def test_the_flag_as_it_is_makes_no_difference(tmp_path: Path, flag: bool) -> None:
    program = in_class(HEAD, CASES["augmented"])

    report = checked_as_file(tmp_path, program, Settings(run_sync_in_threadpool=flag), migrate=True)

    assert found(report) == expected(program)


def test_a_function_is_named_with_the_one_that_calls_it(tmp_path: Path) -> None:
    body = "def f(self):\n    self.n += 1\n    self._g()\ndef _g(self): self.m += 1"

    report = checked_as_file(tmp_path, in_class(HEAD, body), Settings(), migrate=True)

    own, called = (each.message for each in report.findings)
    assert " in A.f, which runs in threads" in own
    assert " in A._g, called by A.f, which runs in threads" in called


ONE_AT_A_TIME = """
    def f(self): self.n += 1
    def g(self): SEEN['a'] += 1  #: IG101
"""


def test_one_request_at_a_time_has_its_instance_for_itself_not_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = in_class(HEAD.replace("lanes={", "max_ongoing_requests=1, lanes={"), ONE_AT_A_TIME)
    as_file = checked_as_file(tmp_path, program, Settings(), migrate=True)
    as_app = checked_as_application(tmp_path, monkeypatch, program, Settings(), migrate=True)

    assert found(as_file) == found(as_app) == expected(program)


def test_a_library_decorator_is_unwrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = in_class(HEAD, "@functools.lru_cache\nasync def f(self): ...  #: IG104")

    report = checked_as_application(tmp_path, monkeypatch, program, Settings(), migrate=True)

    assert found(report) == expected(program)


def test_what_another_module_of_the_users_shares_is_shared(tmp_path: Path) -> None:
    (tmp_path / "state.py").write_text("class Jobs:\n    running = False\n\nCACHE, count = {}, 0\n")
    head = HEAD.replace(
        "import asyncio", "import state\nfrom state import CACHE, Jobs\nimport asyncio"
    )
    body = """
        def f(self):
            if Jobs.running: return
            Jobs.running = True  #: IG102
        def g(self, k):
            if k not in CACHE: CACHE[k] = 1  #: IG102
        def h(self): state.count += 1  #: IG101
    """
    program = in_class(head, body)

    report = checked_as_file(tmp_path, program, Settings(), migrate=True)
    assert found(report) == [], "the other module is not among the files"

    report = check_files([tmp_path], Settings(), migrate=True)
    assert found(report) == expected(program)


@pytest.mark.parametrize("flag", [False, True], ids=["flag-0", "flag-1"])
def test_a_connection_of_the_module_is_found_without_migrate(tmp_path: Path, flag: bool) -> None:
    made = """
DB = sqlite3.connect('x')  #: IG106
FREE = sqlite3.connect('x', check_same_thread=False)
"""
    program = in_class(
        HEAD.replace("CONFIG = app.state\n", f"CONFIG = app.state\n{made}"),
        """
        async def f(self): return DB.execute('')
        async def g(self): return FREE.execute('')
        """,
    )

    report = checked_as_file(tmp_path, program, Settings(run_sync_in_threadpool=flag))

    assert found(report) == expected(program)
