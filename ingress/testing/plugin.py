"""The pytest plugin: `--sync-in-threadpool=0|1|both`.

    0, 1   every test runs with RAY_SERVE_RUN_SYNC_IN_THREADPOOL at that value
    both   every test function has two parameters: it runs as `test[flag0]` and as `test[flag1]`

All tests run at 0, all fixtures are torn down, all applications stop, and all tests run at 1: an
application that a session's fixture serves is started again. With `both`, threads switch after
every few bytecodes, so that races happen. Without the option the plugin does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping

import pytest

from ingress import api
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings, export

FIXTURE = "sync_in_threadpool"
SWITCH_INTERVAL_S = 1e-6

_BEFORE = pytest.StashKey[Mapping[str, str | None]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ingress").addoption(
        "--sync-in-threadpool",
        choices=("0", "1", "both"),
        help=f"run tests with {SYNC_IN_THREADPOOL} at this value, or each test at both",
    )


def pytest_configure(config: pytest.Config) -> None:
    value: str | None = config.getoption("--sync-in-threadpool")
    if value is None:
        return
    config.stash[_BEFORE] = export({SYNC_IN_THREADPOOL: "0" if value == "both" else value})
    if value == "both":
        config.pluginmanager.register(BothValues(), "ingress-both-values")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _BEFORE in config.stash:
        export(config.stash[_BEFORE])


@pytest.fixture
def sync_in_threadpool() -> bool:
    """Return the flag's value in this test: whether `def` methods run in threads."""
    return Settings.from_environment().run_sync_in_threadpool


class BothValues:
    """The plugin of `both`. One per process that runs tests."""

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if FIXTURE not in metafunc.fixturenames:
            metafunc.fixturenames.append(FIXTURE)
        metafunc.parametrize(FIXTURE, ("0", "1"), indirect=True, ids=("flag0", "flag1"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=_flag_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        flag = _flag_of(item)
        export({SYNC_IN_THREADPOOL: flag})
        if nextitem is None or _flag_of(nextitem) == flag:
            return None  # pytest runs the test
        # Without a next test pytest tears down all fixtures, also those of the session.
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        api.shutdown()  # applications left running would keep the flag's old value
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            return (yield)
        finally:
            sys.setswitchinterval(interval)


def _flag_of(item: pytest.Item) -> str:
    """Return the flag's value in a test, 0 for one without parameters, such as unittest's."""
    callspec = getattr(item, "callspec", None)
    flag: str = "0" if callspec is None else callspec.params.get(FIXTURE, "0")
    return flag
