"""The warning about a `def` on the event loop.

It comes once per method in a process, so each test has methods of its own.
"""

from __future__ import annotations

import functools
import linecache
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import Depends, FastAPI

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL
from ingress.exceptions import SyncMethodOnEventLoopWarning
from tests.conformance.observe import TIMEOUT_S, served


@pytest.fixture(autouse=True)
def opted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "0")


def warned(target: Any, *methods: str, stream: bool = False, http: tuple[str, ...] = ()) -> Any:
    """Call methods and paths of a deployment; return the method and the line of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with served(target.bind()) as it:
            for method in methods:
                called: Any = it.handle.options(method_name=method, stream=stream).remote()
                assert (list(called) if stream else [called.result(timeout_s=TIMEOUT_S)]) == [1]
            for path in http:
                assert it.get(path).text == "1"
    places = [re.search(r"\((\S+) at (.*):(\d+)\)$", str(each.message)) for each in caught]
    assert all(place and place[2] == __file__ for place in places)
    return [(each[1], linecache.getline(each[2], int(each[3])).strip()) for each in places if each]


# "Serve emits a warning like: RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling sync method '...'
# directly on the asyncio loop. In a future version, sync methods will be run in a threadpool by
# default..."
def test_the_warning_begins_with_the_guides_words_and_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_each_method_warns_once_in_a_process_however_often_it_is_called() -> None:
    @serve.deployment(num_replicas=2)
    class K:
        def a(self) -> int:
            return 1

        def b(self) -> int:
            return 1

    assert warned(K, *"ababab") == [("K.a", "def a(self) -> int:"), ("K.b", "def b(self) -> int:")]
    assert warned(K, *"ababab") == []


def test_a_decorated_method_is_named_with_its_own_line() -> None:
    def logged(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def wrapper(*args: Any) -> Any:
            return func(*args)

        return wrapper

    @serve.deployment
    class K:
        a = logged(lambda self: 1)
        b = logged(lambda self: 1)

    assert warned(K, "a", "b") == [
        ("K.<lambda>", "a = logged(lambda self: 1)"),
        ("K.<lambda>", "b = logged(lambda self: 1)"),
    ]


def test_def_generators_hooks_and_endpoints_called_by_handle_warn_too() -> None:
    app = FastAPI()

    @serve.deployment(user_config={})
    class K:
        def reconfigure(self, config: Any) -> None: ...

        def check_health(self) -> None: ...

        def numbers(self) -> Iterator[int]:
            yield 1

    @serve.deployment
    @serve.ingress(app)
    class Ingress:
        @app.get("/")
        def endpoint(self) -> int:
            return 1

    @serve.deployment
    def function() -> int:
        return 1

    said = [
        *warned(K, "numbers", stream=True),
        *warned(Ingress, "endpoint"),
        *warned(function, "__call__"),
    ]
    assert [method.rpartition(".<locals>.")[2] for method, _ in said] == [
        "K.reconfigure",
        "K.check_health",
        "K.numbers",
        "Ingress.endpoint",
        "function",
    ]


def test_what_is_no_method_on_the_loop_does_not_warn() -> None:
    app = FastAPI()

    def dependency() -> int:
        return 0

    @serve.deployment
    class Child:
        def __init__(self) -> None: ...

        def __del__(self) -> None: ...

        def helper(self) -> int:
            return 1

        async def __call__(self) -> int:
            return self.helper()

    @serve.deployment
    @serve.ingress(app)
    class Ingress:
        def __init__(self) -> None: ...

        def helper(self) -> int:
            return 1

        @app.get("/")
        def endpoint(self, value: int = Depends(dependency)) -> int:
            return value + self.helper()

        @app.get("/async")
        async def async_endpoint(self) -> int:
            return self.helper()

    assert warned(Child, "__call__") == []
    assert warned(Ingress, http=("/", "/async")) == []
