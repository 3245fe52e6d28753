"""The pytest plugin: `--sync-in-threadpool=0|1|both`.

    0, 1   every test runs with RAY_SERVE_RUN_SYNC_IN_THREADPOOL at that value
    both   every test runs twice, as `test[flag0]` and `test[flag1]`, with a report of differences

Without the option it does nothing. pytest imports it in every run, so the code for `both` is
imported only with that value.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings, export

_BEFORE = pytest.StashKey[Mapping[str, str | None]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ingress").addoption(
        "--sync-in-threadpool",
        choices=("0", "1", "both"),
        help=f"run tests with {SYNC_IN_THREADPOOL} at this value, or at both, and compare",
    )


def pytest_configure(config: pytest.Config) -> None:
    value: str | None = config.getoption("--sync-in-threadpool")
    if value is None:
        return
    config.stash[_BEFORE] = export({SYNC_IN_THREADPOOL: "0" if value == "both" else value})
    if value == "both":
        from ingress.testing.both import BothValues

        config.pluginmanager.register(BothValues(config), "ingress-both-values")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _BEFORE in config.stash:
        export(config.stash[_BEFORE])


@pytest.fixture
def sync_in_threadpool() -> bool:
    """Return the flag's value in this test: whether `def` methods run in threads."""
    return Settings.from_environment().run_sync_in_threadpool
