"""Fixtures of the package's other tests that do not fit: Playwright has an event loop of its own.

It runs in the thread of the tests, which block it all the time.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Do nothing: the servers are other processes."""


@pytest.fixture(autouse=True)
def blocking_call_check() -> None:
    """Do nothing."""
