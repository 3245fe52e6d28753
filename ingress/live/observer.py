"""The observer of a server: it asks its processes, and keeps the history."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from ingress.live.history import STEP_S, History
from ingress.live.view import view_of

FRESH_S = 0.4  # a view this old is shown again: two viewers cost as much as one

Ask = Callable[[str], tuple[list[dict[str, Any]], list[int]]]
"""`ask("part")` returns the parts of the processes, and the ids of those that are silent."""


class Observer:
    """The views of one server, and its history. Thread-safe."""

    __slots__ = ("_ask", "_history", "_is_over", "_lock", "_thread", "_url", "_view", "_viewed_at")

    def __init__(self, ask: Ask, url: Callable[[], str | None] = lambda: None) -> None:
        self._ask = ask
        self._url = url
        self._history = History()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._view: dict[str, Any] = {}
        self._viewed_at = 0.0
        self._thread = threading.Thread(target=self._main, name="ingress-history", daemon=True)

    def start(self) -> None:
        """Begin to look every 5 s, for the rates of the last minutes."""
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(1.0)

    def _main(self) -> None:
        while not self._is_over.is_set():
            try:
                parts, _ = self._ask("counts")
                self._history.add(monotonic(), _counts(parts))
            except Exception:  # no process answers, while the server starts or stops
                pass
            self._is_over.wait(STEP_S)

    def view(self) -> dict[str, Any]:
        """Return the state of the server, at most `FRESH_S` old."""
        with self._lock:
            if self._view and monotonic() - self._viewed_at < FRESH_S:
                return self._view
        return self.look()

    def look(self) -> dict[str, Any]:
        """Return the state of the server now."""
        with self._lock:
            parts, silent = self._ask("part")
            self._history.add(monotonic(), _counts(parts))
            rates, span_s = self._history.window()
            recent = self._history.recent()
            self._view = view_of(parts, silent, rates, span_s, recent, self._url())
            self._viewed_at = monotonic()
            return self._view

    def series(self, application: str, deployment: str, route: str) -> dict[str, Any]:
        """Return the last 15 minutes of a route, or of all routes of a deployment."""
        return self._history.series((application, deployment, route))


def _counts(parts: Sequence[Mapping[str, Any]]) -> list[tuple[int, Any]]:
    return [(part["pid"], part["counts"]) for part in parts]
