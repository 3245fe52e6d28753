"""pytest's `--sync-in-threadpool`: a user's tests, run by a separate pytest."""

from __future__ import annotations

import asyncio
import gc
import os
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from textwrap import dedent
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from starlette.testclient import TestClient as StarletteClient

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.observe.inspection import explain
from ingress.testing import Latch, TestClient
from ingress.testing.comparison import Moved, Run, differences, moved
from ingress.testing.observation import Observer, shortened
from tests.servers import ROOT, bind, served, set_flags

pytest_plugins = ("pytester",)

SHOP = """
    import time, uuid
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

        @app.get("/receipt")
        async def receipt(self) -> str:
            return uuid.uuid4().hex

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
        def test_one_is_sold_once(client):
            assert buy_at_once(client).count(True) == 1
        """,
        "-v",
        is_apart=True,
    )

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1, warnings=1)
    shows(
        result,
        "*test_one_is_sold_once?flag0? PASSED*",
        "*test_one_is_sold_once?flag1? FAILED*",
        "*RAY_SERVE_RUN_SYNC_IN_THREADPOOL: 0 and 1*",
        "on the event loop at 0, and at 1, as the flag says:",
        "  Stock.buy: threadpool, ? calls at once",
        "DIFFERS test_it.py::test_one_is_sold_once",
        "  passed at 0; failed at 1: assert ? == 1",
        "  POST /buy: only at 0:*200 'false'; only at 1:*200 'true'",
        "tests at 0 and at 1: 1; that differ: 1",
    )


def test_a_race_that_no_assertion_notices_is_found_by_its_answers(run: Any) -> None:
    result = run(
        """
        @pytest.mark.parametrize("times", [1])
        def test_all_are_answered(client, times):
            assert len(buy_at_once(client)) == 4
        """
    )

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, warnings=1)
    shows(
        result,
        "DIFFERS test_it.py::test_all_are_answered?1?",
        "  POST /buy: only at 0:*200 'false'; only at 1:*200 'true'",
    )


def test_answers_that_are_never_the_same_are_no_finding(run: Any) -> None:
    result = run(
        """
        def test_a_receipt(client):
            assert len(client.get("/receipt").json()) == 32
        """
    )

    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=2)
    shows(
        result,
        "at 0 again, because answers differ",
        "never the same, at 0 either: test_it.py::test_a_receipt: GET /receipt",
        "tests at 0 and at 1: 1; that differ: 0",
    )


def test_an_answer_that_depends_on_the_tests_before_is_compared_all_the_same(run: Any) -> None:
    """A test that runs again runs after the same tests as before."""
    result = run(
        """
        @pytest.fixture(scope="session")
        def client():
            with TestClient(shop) as client:
                yield client

        def test_a_sale(client):
            buy_at_once(client)

        def test_what_was_sold(client):
            assert client.get("/sold").status_code == 200

        def test_a_receipt(client):
            client.get("/receipt")
        """
    )

    shows(
        result,
        "DIFFERS test_it.py::test_what_was_sold",
        "  GET /sold: only at 0: 200 '1'; only at 1: 200 '?'",
        "never the same, at 0 either: test_it.py::test_a_receipt: GET /receipt",
        "tests at 0 and at 1: 3; that differ: 2",
    )


def test_a_method_that_was_never_called_twice_at_once_is_not_said_to_be_safe(run: Any) -> None:
    result = run(
        """
        def test_nothing_is_sold_yet(client):
            assert client.get("/sold").json() == 0
        """
    )

    assert result.ret == pytest.ExitCode.OK
    shows(
        result, "  Stock.count: threadpool, never two at once, so no test shows whether it is safe*"
    )


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

    result.assert_outcomes(passed=4, warnings=1)


def test_answers_over_every_way_and_warnings_are_compared(run: Any) -> None:
    result = run(
        """
        import asyncio, sys, warnings
        import ingress as serve
        from fastapi import FastAPI, WebSocket
        from fastapi.responses import StreamingResponse

        app = FastAPI()

        def place():
            try:
                return asyncio.get_running_loop() and "loop"
            except RuntimeError:
                return "thread"

        @serve.deployment
        class Where:
            def one(self): return place()
            def many(self): yield place()
            def fails(self): raise ValueError(place())
            def warns(self):
                if place() == "thread": warnings.warn("not for threads")
                else: warnings.warn("not for loops")

        @serve.deployment
        @serve.ingress(app)
        class Front:
            def __init__(self, where): self.where = where
            @app.get("/status")
            async def status(self):
                from fastapi import HTTPException
                raise HTTPException(418 if await self.where.one.remote() == "loop" else 419)
            @app.get("/stream")
            async def stream(self):
                return StreamingResponse(self.where.options(stream=True).many.remote())
            @app.websocket("/socket")
            async def socket(self, websocket: WebSocket):
                await websocket.accept()
                await websocket.send_text(await self.where.one.remote())

        @pytest.fixture
        def client():
            with TestClient(Front.bind(Where.bind())) as client:
                yield client

        def test_all(client):
            client.get("/status"), client.get("/stream")
            with client.websocket_connect("/socket") as socket:
                socket.receive_text()
            where = client.get_deployment_handle("Where")
            where.one.remote().result(), where.warns.remote().result()
            list(where.options(stream=True).many.remote())
            with pytest.raises(ValueError):
                where.fails.remote().result()
        """
    )

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["passed"] == 2
    shows(
        result,
        "DIFFERS test_it.py::test_all",
        "  GET /status: only at 0: 418 *; only at 1: 419 *",
        "  GET /stream: only at 0: 200 'loop'; only at 1: 200 'thread'",
        "  WebSocket /socket: only at 0: accepted 'loop*'; only at 1: accepted 'thread*'",
        "  Where.fails(): only at 0: raised ValueError: loop; only at 1: *Error: thread",
        "  Where.many() item: only at 0: 'loop'; only at 1: 'thread'",
        "  Where.one(): only at 0: 'loop'; only at 1: 'thread'",
        "  only at 0: UserWarning: not for loops (test_it.py:*)",
        "  only at 1: UserWarning: not for threads (test_it.py:*)",
    )


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
    shows(result, "tests at 0 only, *: 1", "tests at 0 and at 1: 1; that differ: 0")


@pytest.mark.thorough
def test_processes_of_xdist_are_compared_too(run: Any) -> None:
    result = run(
        """
        def test_one_is_sold_once(client):
            assert buy_at_once(client).count(True) == 1

        def test_a_receipt(client):
            client.get("/receipt")
        """,
        "-n2",
        is_apart=True,
    )

    result.assert_outcomes(passed=3, failed=1, warnings=1)
    shows(
        result,
        "DIFFERS test_it.py::test_a_receipt",
        "DIFFERS test_it.py::test_one_is_sold_once",
        "  passed at 0; failed at 1: assert ? == 1",
        "not run at 0 again: some of these answers may never be the same",
    )


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
    result.stdout.no_fnmatch_line("*0 and 1*")


def test_without_the_option_nothing_happens(run: Any) -> None:
    result = run(
        """
        import os, sys

        def test_environment(sync_in_threadpool):
            assert "RAY_SERVE_RUN_SYNC_IN_THREADPOOL" not in os.environ
            assert sync_in_threadpool is False
            assert "ingress.testing.both" not in sys.modules
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


# Observations.


def test_the_places_are_those_that_explain_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags(monkeypatch, "1")
    app = FastAPI()

    def dependency() -> int:
        return 1

    @serve.deployment(lanes={"db": 2})
    @serve.ingress(app)
    class Places:
        @app.get("/")
        def endpoint(self, number: int = Depends(dependency)) -> int:
            return number

        @serve.method(execution="event_loop")
        def on_loop(self) -> None:
            pass

        @serve.method(execution="threadpool")
        def in_pool(self) -> None:
            pass

        @serve.method(execution="serial")
        def in_serial(self) -> None:
            pass

        @serve.method(lane="db")
        def in_lane(self) -> None:
            pass

        @serve.batch
        def in_batch(self, numbers: list[int]) -> list[int]:
            return numbers

    application = bind(Places)
    observer = Observer()
    with observer.installed(), TestClient(application) as client:
        client.get("/").raise_for_status()
        for name in ("on_loop", "in_pool", "in_serial", "in_lane"):
            getattr(client.handle, name).remote().result()
        client.handle.in_batch.remote(1).result()

    rows = explain(application, Settings.from_environment()).rows
    printed = {row.name: row.places[False].where for row in rows}
    ran = {name: where for name, (where,) in observer.seen.as_dict()["ran"].items()}
    assert sorted(set(ran.values())) == ["event loop", "lane db", "serial thread", "threadpool"]
    assert ran == {name: printed[name] for name in ran}
    assert len(ran) == 7


@pytest.mark.parametrize("client", ["starlettes", "transport", "socket"])
def test_an_answer_is_seen_whichever_client_asks(client: str) -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Greeter:
        @app.get("/greet", status_code=203)
        async def greet(self) -> str:
            return "hello"

    application, observer = bind(Greeter), Observer()

    async def ask() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(application), base_url="http://there"
        ) as inside:
            await inside.get("/greet?a=1")
        await application.aclose()

    with observer.installed():
        if client == "starlettes":
            with StarletteClient(application) as inside:
                inside.get("/greet?a=1")
        elif client == "transport":
            asyncio.run(ask())
        else:
            httpx.get(f"http://127.0.0.1:{served(application)}/greet?a=1")
            serve.shutdown()

    assert observer.seen.as_dict()["answers"] == {"GET /greet?a=1": {"203 '\"hello\"'": 1}}


def test_answers_are_counted_once_with_the_access_log_on() -> None:
    """It calls the proxy again: the observed one recorded, and called, itself again and again."""

    @serve.deployment
    def hello() -> str:
        return "hello"

    observer = Observer()
    with observer.installed():
        serve.start({"port": 0}, logging_config={"enable_access_log": True})
        try:
            httpx.get(f"http://127.0.0.1:{served(bind(hello))}/")
        finally:
            serve.shutdown()

    assert observer.seen.as_dict()["answers"] == {"GET /": {"200 'hello'": 1}}


def test_calls_that_are_there_at_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags(monkeypatch, "1", sync="1")
    go, inside = Latch(), Latch(3)

    @serve.deployment
    class Model:
        def wait(self) -> None:
            inside.count_down()
            go.wait()

        def quick(self) -> None:
            pass

    observer = Observer()
    with observer.installed(), TestClient(bind(Model)) as client:
        answers = [client.handle.wait.remote() for _ in range(3)]
        inside.wait()
        go.count_down()
        for answer in [*answers, client.handle.quick.remote(), client.handle.quick.remote()]:
            answer.result()

    ran = observer.seen.as_dict()["ran"]
    most = {name.rpartition(".")[2]: places for name, places in ran.items()}
    assert most["wait"] == {"threadpool": 3}


def test_afterwards_nothing_is_observed() -> None:
    @serve.deployment
    class Greeter:
        def __call__(self) -> str:
            return "hello"

    observer = Observer()
    with observer.installed():
        pass
    with TestClient(bind(Greeter)) as client:
        assert client.get("/").text == client.handle.remote().result() == "hello"

    assert observer.seen.as_dict() == {"answers": {}, "ran": {}}


def test_a_stream_that_is_dropped_is_cancelled_and_one_that_is_kept_goes_on() -> None:
    """An observed stream stands for the call's own, which would be cancelled when collected."""

    @serve.deployment
    class Numbers:
        async def __call__(self) -> AsyncIterator[int]:
            try:
                yield 1
                await asyncio.Event().wait()
            finally:
                ended.count_down()

        async def two(self) -> AsyncIterator[int]:
            yield 1
            yield 2

    ended, observer = Latch(), Observer()
    with observer.installed(), TestClient(bind(Numbers)) as client:
        handle = client.handle.options(stream=True)
        kept = handle.two.remote()
        gc.collect()
        assert isinstance(kept, serve.handle.DeploymentResponseGenerator)
        assert list(kept) == [1, 2]
        dropped = handle.remote()
        assert next(dropped) == 1
        del dropped
        gc.collect()
        ended.wait()

    answers = observer.seen.as_dict()["answers"]
    assert answers["Numbers.two() item"] == {"1": 1, "2": 1}


# Differences.


def test_a_difference_is_about_one_thing() -> None:
    on_loop = {"Model.f": {"event loop": 1}, "Model.g": {"lane a": 1}}
    in_pool = {"Model.f": {"threadpool": 4}, "Model.g": {"lane b": 1}, "Model.h": {"lane a": 1}}
    at_0 = Run("passed", answers={"GET /": {"200 'a'": 2, "200 'b'": 1}}, ran=on_loop)
    at_1 = Run("failed", "why", answers={"GET /": {"200 'a'": 1}}, ran=in_pool)
    at_1.warn(UserWarning, "first\nsecond", "it.py", 7)
    at_0.warn(serve.exceptions.SyncMethodOnEventLoopWarning, "of the flag", "it.py", 8)

    assert differences(at_0, at_1) == {
        "outcome": "passed at 0; failed at 1: why",
        "GET /": "GET /: only at 0: 200 'a', 200 'b'; only at 1: nothing",
        "UserWarning: first (it.py:7)": "only at 1: UserWarning: first (it.py:7)",
        "place of Model.g": "Model.g ran in lane a at 0, in lane b at 1",
        "call of Model.h": "Model.h was called only at 1",
    }
    assert moved(at_0, at_1) == [Moved("Model.f", "threadpool", 4)]
    assert differences(at_0, at_0) == {}


def test_the_order_of_answers_is_no_difference_and_many_are_cut_short() -> None:
    answers = {f"200 '{number}'": 1 for number in range(9)}
    backwards = dict(reversed(answers.items()))

    assert differences(Run(answers={"/": answers}), Run(answers={"/": backwards})) == {}
    told = differences(Run(answers={"/": answers}), Run())["/"]
    assert told == "/: only at 0: 200 '0', 200 '1', 200 '2', and 6 others; only at 1: nothing"


def test_texts_that_begin_alike_are_told_apart() -> None:
    one, other = shortened("a" * 1000), shortened("a" * 999 + "b")

    assert one != other
    assert len(one) < 120
    assert shortened("short") == "short"
