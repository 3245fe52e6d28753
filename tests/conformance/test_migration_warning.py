"""The warning about a `def` on the event loop.

Most tests run in a separate process, because the warning comes once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ingress as serve
from ingress.base.settings import SYNC_IN_THREADPOOL
from ingress.exceptions import SyncMethodOnEventLoopWarning
from tests.conformance.observe import TIMEOUT_S, served

ROOT = Path(__file__).parent.parent.parent

HEAD = """\
import asyncio, functools, warnings
import ingress as serve
from fastapi import Depends, FastAPI
from starlette.testclient import TestClient

def run(application, *methods, stream=False, http=()):
    handle = serve.run(application, route_prefix=None)
    for method in methods:
        called = handle.options(method_name=method, stream=stream).remote()
        print("answer", list(called) if stream else called.result(timeout_s=60))
    serve.shutdown()
    if http:
        with TestClient(application) as client:
            for path in http:
                print("answer", client.get(path).text)
"""


def warned(folder: Path, source: str, *options: str, sync_in_threadpool: str = "0") -> list[str]:
    """Return the output of a program, with `warning METHOD LINE` for each warning."""
    file = folder / "program.py"
    file.write_text(f"{HEAD}\n{source}")
    flags = {SYNC_IN_THREADPOOL: sync_in_threadpool, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", *options, str(file)],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = result.stdout.splitlines()
    for line in result.stderr.splitlines():
        # As Python prints a warning, or as a log record with `-W error`.
        if "RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling" in line:
            method, _, place = line.rpartition(" (")[2].rstrip(")").partition(" at ")
            name, _, number = place.rpartition(":")
            assert name == str(file)
            found.append(f"warning {method} {_source_line(source, int(number))}")
    return found


def _source_line(source: str, number: int) -> str:
    return source.splitlines()[number - 1 - len(HEAD.splitlines()) - 1].strip()


# "Serve emits a warning like: RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling sync method '...'
# directly on the asyncio loop. In a future version, sync methods will be run in a threadpool by
# default..."
def test_the_warning_begins_with_the_guides_words_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "0")

    class Blocking:
        def __call__(self) -> int:
            return 1

    with (
        warnings.catch_warnings(record=True) as caught,
        served(serve.deployment(Blocking).bind()) as it,
    ):
        warnings.simplefilter("always")
        assert it.handle.remote().result(timeout_s=TIMEOUT_S) == 1

    [warning] = caught
    text = str(warning.message)
    line = Blocking.__call__.__code__.co_firstlineno
    assert text.startswith(
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling sync method 'Blocking.__call__' "
        "directly on the asyncio loop. In a future version, sync methods will be run in a "
        "threadpool by default"
    )
    for advice in ("thread-safe", "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1", "`async def`"):
        assert advice in text
    assert f"Blocking.__call__ at {__file__}:{line}" in text
    assert warning.category is SyncMethodOnEventLoopWarning
    assert issubclass(warning.category, UserWarning)
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert caplog.records == []  # said once


TWO_METHODS = """
@serve.deployment(num_replicas=2)
class K:
    def a(self): return "a"
    def b(self): return "b"

for _ in range(2):
    run(K.bind(), *"ababab")
"""


def test_each_method_warns_once_in_a_process_however_often_it_is_called(tmp_path: Path) -> None:
    said = warned(tmp_path, TWO_METHODS)

    assert said == [
        *(f"answer {name}" for name in "abababababab"),
        'warning K.a def a(self): return "a"',
        'warning K.b def b(self): return "b"',
    ]


def test_equal_methods_of_two_files_are_two_methods(tmp_path: Path) -> None:
    same = "import ingress as serve\n@serve.deployment\nclass M:\n    def __call__(self): pass\n"
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(same)
    program = """
import warnings, one, other
warnings.showwarning = lambda *said: print("WARNING")
run(one.M.bind(), "__call__")
run(other.M.bind(), "__call__")
"""

    assert warned(tmp_path, program) == ["WARNING", "answer None"] * 2


def test_a_decorated_method_is_named_with_its_own_line(tmp_path: Path) -> None:
    said = warned(
        tmp_path,
        """
def logged(func):
    @functools.wraps(func)
    def wrapper(*args):
        return func(*args)
    return wrapper

@serve.deployment
class K:
    a = logged(lambda self: "a")
    b = logged(lambda self: "b")

run(K.bind(), "a", "b")
""",
    )

    assert said[2:] == [
        'warning K.<lambda> a = logged(lambda self: "a")',
        'warning K.<lambda> b = logged(lambda self: "b")',
    ]


def test_def_generators_hooks_and_endpoints_called_by_handle_warn_too(tmp_path: Path) -> None:
    said = warned(
        tmp_path,
        """
@serve.deployment(user_config={})
class K:
    def reconfigure(self, config): "reconfigure"
    def check_health(self): "check_health"
    def numbers(self): yield 1

run(K.bind(), "numbers", stream=True)

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Ingress:
    @app.get("/")
    def endpoint(self): return 1

run(Ingress.bind(), "endpoint")

@serve.deployment
def function(): return 2

run(function.bind(), "__call__")
""",
    )

    assert said[:3] == ["answer [1]", "answer 1", "answer 2"]
    assert [line.split()[1] for line in said[3:]] == [
        "K.reconfigure",
        "K.check_health",
        "K.numbers",
        "Ingress.endpoint",
        "function",
    ]


def test_what_is_no_method_on_the_loop_does_not_warn(tmp_path: Path) -> None:
    said = warned(
        tmp_path,
        """
app = FastAPI()

def dependency(): return 1

@serve.deployment
class Child:
    def __init__(self): pass
    def __del__(self): pass
    def helper(self): return 3
    async def __call__(self): return self.helper()

run(Child.bind(), "__call__")

@serve.deployment
@serve.ingress(app)
class Ingress:
    def __init__(self): pass
    def helper(self): return 2
    @app.get("/")
    def endpoint(self, one: int = Depends(dependency)): return one + self.helper()
    @app.get("/async")
    async def async_endpoint(self): return self.helper()

run(Ingress.bind(), http=["/", "/async"])
""",
    )

    assert said == ["answer 3", "answer 3", "answer 2"]


# "You can opt in to the future behavior now by setting: export RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1"
def test_nothing_warns_once_opted_in(tmp_path: Path) -> None:
    said = warned(
        tmp_path,
        """
@serve.deployment(user_config={})
class K:
    def reconfigure(self, config): pass
    def check_health(self): pass
    def value(self): return 1
    def values(self): yield 2

run(K.bind(), "value")
run(K.bind(), "values", stream=True)
""",
        sync_in_threadpool="1",
    )

    assert said == ["answer 1", "answer [2]"]


def test_the_request_that_warns_succeeds_also_when_warnings_are_errors(
    tmp_path: Path,
) -> None:
    said = warned(
        tmp_path,
        """
@serve.deployment(user_config={})
class K:
    def reconfigure(self, config): pass
    def check_health(self): pass
    def value(self): return 1
    def values(self): yield 1

run(K.bind(), "value")
run(K.bind(), "values", stream=True)
""",
        "-W",
        "error",
    )

    assert said[:2] == ["answer 1", "answer [1]"]
    assert len(said) == 6
