"""The pytest plugin: `--sync-in-threadpool=0|1|both`.

    0, 1   every test runs with RAY_SERVE_RUN_SYNC_IN_THREADPOOL at that value
    both   every test runs twice, as `test[flag0]` and `test[flag1]`, and what differs is reported

Without the option it does nothing. pytest imports it for every run, so what it needs for `both` is
imported then.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from ingress.settings import SYNC_IN_THREADPOOL, Settings

_BEFORE = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ingress").addoption(
        "--sync-in-threadpool",
        choices=("0", "1", "both"),
        help=f"run tests with {SYNC_IN_THREADPOOL} at this value, or at both, and compare",
    )


def pytest_configure(config: pytest.Config) -> None:
    value: Any = config.getoption("--sync-in-threadpool")
    if value is None:
        return
    config.stash[_BEFORE] = os.environ.get(SYNC_IN_THREADPOOL)
    if value == "both":
        from ingress.testing.both import BothValues

        config.pluginmanager.register(BothValues(config), "ingress-both-values")
    else:
        os.environ[SYNC_IN_THREADPOOL] = value


def pytest_unconfigure(config: pytest.Config) -> None:
    if _BEFORE in config.stash:
        before = config.stash[_BEFORE]
        if before is None:
            os.environ.pop(SYNC_IN_THREADPOOL, None)
        else:
            os.environ[SYNC_IN_THREADPOOL] = before


@pytest.fixture
def sync_in_threadpool() -> bool:
    """Whether `def` methods run in threads in this test: what the flag says."""
    return Settings.from_environment().run_sync_in_threadpool
