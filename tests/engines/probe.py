"""Files through which user code and its client, in any process, notify each other.

    note("key", value)       user code: this happened      notes("key")      client: what happened
    hold("key")              user code: wait here          open_gate("key")  client: go on

A name belongs to one scenario. All waits are bounded by `PATIENCE_S`; only a failure takes it all.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "INGRESS_SCENARIO_FOLDER"
PATIENCE_S = 20.0
POLL_S = 0.005


def note(key: str, value: Any = None) -> None:
    """Append a note; several processes may append at once."""
    with (_folder() / f"{key}.notes").open("a") as file:
        file.write(json.dumps(value) + "\n")


def notes(key: str) -> list[Any]:
    """Return the notes, in order."""
    path = _folder() / f"{key}.notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_notes(key: str, count: int = 1) -> list[Any]:
    """Return the notes once there are `count` of them."""
    wait_until(lambda: len(notes(key)) >= count, key)
    return notes(key)


def open_gate(key: str) -> None:
    """Open a gate for present and future waiters."""
    (_folder() / f"{key}.open").touch()


def is_open(key: str) -> bool:
    return (_folder() / f"{key}.open").exists()


def hold_blocking(key: str, value: Any = None) -> None:
    """Note the arrival at a gate, and wait there, blocking the thread."""
    note(key, value)
    wait_until(lambda: is_open(key), key)


async def hold(key: str, value: Any = None) -> None:
    """Note the arrival at a gate, and wait there, leaving the loop free."""
    note(key, value)
    deadline = time.monotonic() + PATIENCE_S
    while not is_open(key):
        assert time.monotonic() < deadline, f"no one opened {key}"
        await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to pass"
        time.sleep(POLL_S)


def here() -> str:
    """Return the kind of thread that runs this line: "loop" or "thread"."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return "thread"
    return "loop"


def thread() -> int:
    return threading.get_ident()


def _folder() -> Path:
    return Path(os.environ[FOLDER])
