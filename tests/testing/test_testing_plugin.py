"""pytest's `--sync-in-threadpool`: a user's tests, run by a separate pytest."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib.metadata import EntryPoint
from textwrap import dedent
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL
from tests.servers import ROOT

pytest_plugins = ("pytester",)

SHOP = """
    import time
    from fastapi import FastAPI
    import ingress as serve

    app = FastAPI()

    @serve.deployment
    class Stock:
        def __init__(self):
            self.left = 1
            self.sold = 0

        def buy(self):
            if self.left > 0:  # check ...
                time.sleep(0.2)
                self.left -= 1  # ... then act
                self.sold += 1
                return True
            return False

        def count(self):
            return self.sold

    @serve.deployment
    @serve.ingress(app)
    class Shop:
        def __init__(self, stock):
            self.stock = stock

        @app.post("/buy")
        async def buy(self) -> bool:
            return await self.stock.buy.remote()

        @app.get("/sold")
        async def sold(self) -> int:
            return await self.stock.count.remote()

    shop = Shop.bind(Stock.bind())
"""

TESTS = """
    from concurrent.futures import ThreadPoolExecutor
    import pytest
    from ingress.testing import TestClient
    from shop import shop

    @pytest.fixture
    def client():
        with TestClient(shop) as client:
            yield client

    def buy_at_once(client):
        with ThreadPoolExecutor(4) as pool:
            return [answer.json() for answer in pool.map(lambda _: client.post("/buy"), range(4))]
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a user's test file beside `shop.py`."""
    monkeypatch.delenv(SYNC_IN_THREADPOOL, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), str(ROOT)]))
    pytester.syspathinsert()
    pytester.makepyfile(shop=SHOP)

    def run(tests: str, *args: str, flag: str = "both", is_apart: bool = False) -> pytest.RunResult:
        path = pytester.path / "test_it.py"
        path.write_text(dedent(TESTS) + dedent(tests))
        options = ["-p", "ingress.testing.plugin", "-p", "no:cacheprovider", *args]
        if flag:
            options.append(f"--sync-in-threadpool={flag}")
        if is_apart:
            return pytester.runpytest_subprocess(*options)
        # Warnings are errors in this suite; the user's tests must not inherit that.
        return pytester.runpytest_inprocess("-Wdefault", *options)

    return run


def shows(result: pytest.RunResult, *lines: str) -> None:
    """Fail unless the output has lines that match these, in this order."""
    result.stdout.fnmatch_lines(lines)


def test_a_check_then_act_race_is_found_by_the_users_own_test(run: Any) -> None:
    result = run(
        """
        @pytest.mark.parametrize("times", [1])
        def test_one_is_sold_once(client, times):
            assert buy_at_once(client).count(True) == 1

        def test_all_are_answered(client):
            assert len(buy_at_once(client)) == 4
        """,
        "-v",
        is_apart=True,
    )

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=3, failed=1, warnings=1)
    shows(
        result,
        "*test_one_is_sold_once?1-flag0? PASSED*",
        "*test_all_are_answered?flag0? PASSED*",
        "*test_one_is_sold_once?1-flag1? FAILED*",
        "*test_all_are_answered?flag1? PASSED*",
    )


def test_threads_switch_often_in_tests_and_as_before_after_them(run: Any) -> None:
    before = sys.getswitchinterval()

    result = run(
        """
        import sys

        def test_it():
            assert sys.getswitchinterval() < 0.001
        """
    )

    result.assert_outcomes(passed=2)
    assert sys.getswitchinterval() == before


def test_fixtures_of_the_session_are_made_anew_for_the_other_value(run: Any) -> None:
    result = run(
        """
        import threading
        import ingress as serve

        @serve.deployment
        class Where:
            def name(self):
                return threading.current_thread().name

        @pytest.fixture(scope="session")
        def handle():
            with TestClient(Where.bind()) as client:
                yield client.handle

        def test_of_a_session(handle, sync_in_threadpool):
            assert handle.name.remote().result().count("worker") == sync_in_threadpool

        def test_that_leaves_it_running(sync_in_threadpool):
            left = serve.run(Where.bind(), name="left", route_prefix=None)
            assert left.name.remote().result().count("worker") == sync_in_threadpool
        """
    )

    serve.shutdown()  # the last test left an application in this process
    result.assert_outcomes(passed=4, warnings=1)


def test_what_is_no_test_function_runs_once(run: Any) -> None:
    result = run(
        """
        import os, unittest

        class TestOld(unittest.TestCase):
            def test_it(self):
                self.assertEqual(os.environ["RAY_SERVE_RUN_SYNC_IN_THREADPOOL"], "0")

        def test_new():
            pass
        """
    )

    result.assert_outcomes(passed=3)


@pytest.mark.thorough
def test_processes_of_xdist_run_both_too(run: Any) -> None:
    result = run(
        """
        def test_one_is_sold_once(client):
            assert buy_at_once(client).count(True) == 1

        def test_none_is_sold_yet(client):
            assert client.get("/sold").json() == 0
        """,
        "-n2",
        is_apart=True,
    )

    result.assert_outcomes(passed=3, failed=1, warnings=2)
    shows(result, "FAILED test_it.py::test_one_is_sold_once?flag1? - assert ? == 1")


@pytest.mark.thorough
@pytest.mark.parametrize("flag", ["0", "1"])
def test_one_value_is_for_all_tests_and_changes_nothing_else(run: Any, flag: str) -> None:
    result = run(
        f"""
        import os

        def test_flag(sync_in_threadpool):
            assert os.environ["RAY_SERVE_RUN_SYNC_IN_THREADPOOL"] == "{flag}"
            assert sync_in_threadpool is ({flag} == 1)
        """,
        "-v",
        flag=flag,
    )

    result.assert_outcomes(passed=1)
    shows(result, "test_it.py::test_flag PASSED*")


def test_without_the_option_nothing_happens(run: Any) -> None:
    result = run(
        """
        import os

        def test_environment(sync_in_threadpool):
            assert "RAY_SERVE_RUN_SYNC_IN_THREADPOOL" not in os.environ
            assert sync_in_threadpool is False
        """,
        flag="",
        is_apart=True,
    )

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*RAY_SERVE*")


def test_pytest_finds_the_plugin_by_an_entry_point_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["pytest11"].items()

    plugin = EntryPoint(name, value, "pytest11").load()

    assert plugin.pytest_addoption is not None
    assert name == plugin.__name__, "so that `-p` and the entry point are one plugin"
