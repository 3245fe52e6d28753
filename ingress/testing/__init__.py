"""Tools for tests of applications: a client, latches, a leak check, a clock, and a pytest plugin.

    client        `TestClient`: FastAPI's, with the application's handles; `AsyncClient`: HTTPX's
    latch         `Latch`: code under test and its test wait for each other
    leaks         `leak_check`: a test fails if it leaves threads, tasks or slots behind
    clock         `VirtualClock`: a minute of `asyncio.sleep` takes no time

    plugin        pytest's `--sync-in-threadpool=0|1|both`

No other module of ingress imports this package, and its import changes nothing. `clock` hands the
engine a factory of its own while it is in use (`control.factories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingress.testing.clock import VirtualClock
from ingress.testing.latch import Latch
from ingress.testing.leaks import LeakCheck, leak_check

if TYPE_CHECKING:
    from ingress.testing.client import AsyncClient, TestClient

__all__ = ["AsyncClient", "Latch", "LeakCheck", "TestClient", "VirtualClock", "leak_check"]


def __getattr__(name: str) -> type:
    # Imported at its first use: pytest imports the plugin in every test run, and not every
    # environment has an HTTP client.
    if name in ("AsyncClient", "TestClient"):
        from ingress.testing import client

        found: type = getattr(client, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
