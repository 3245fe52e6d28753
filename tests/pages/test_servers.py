"""Processes of tests heed signals as at a terminal, wherever the tests were started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import environment, process

WAITING = """
import signal
try:
    print("waiting", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("heard")
"""


@pytest.fixture
def ignoring() -> Iterator[None]:
    """Ignore SIGINT, as a background job of a shell and its child processes do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_reaches_a_process_whose_parent_ignores_it(ignoring: None, tmp_path: Path) -> None:
    with process([sys.executable, "-c", WAITING], tmp_path, environment(tmp_path)) as started:
        started.wait_for("waiting")
        started.signal(signal.SIGINT)

        assert started.wait() == 0
        assert "heard" in started.output
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
