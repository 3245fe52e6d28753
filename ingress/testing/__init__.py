"""For tests of applications: a client, latches, a leak check, a clock, and a pytest plugin.

    client        `TestClient`: FastAPI's, with the application's handles
    latch         `Latch`: code under test and its test wait for each other
    leaks         `leak_check`: nothing is left behind
    clock         `VirtualClock`: a minute of `asyncio.sleep` takes no time

    plugin        pytest's `--sync-in-threadpool=0|1|both`
    both          each test at both values of the flag: order, start-up, report
    observation   what was answered and where code ran while one test did
    comparison    what differs between two runs of a test

No module of the product imports it, and importing it patches nothing: `observation` and `clock` put
themselves into the product while they are in use, and take themselves out again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingress.testing.clock import VirtualClock
from ingress.testing.latch import Latch
from ingress.testing.leaks import LeakCheck, leak_check

if TYPE_CHECKING:
    from ingress.testing.client import TestClient

__all__ = ["Latch", "LeakCheck", "TestClient", "VirtualClock", "leak_check"]


def __getattr__(name: str) -> Any:
    # At first use: pytest imports the plugin for every test run, and not all have an HTTP client.
    if name == "TestClient":
        from ingress.testing.client import TestClient

        return TestClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
