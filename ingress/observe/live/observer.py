"""The observer of a server: it asks its processes, keeps the history, and logs held slots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Self

from ingress.observe.live.documents import (
    Ask,
    Configuration,
    Counters,
    CountPart,
    Deployment,
    DeploymentProgress,
    Series,
    View,
)
from ingress.observe.live.history import History
from ingress.observe.live.problems import HELD_S, is_held
from ingress.observe.live.recording import merged_traces
from ingress.observe.live.view import view_of

logger = logging.getLogger("ingress")

JOIN_S = 1.0
LOOK_S = 2.0
FRESH_S = 0.4  # a view this old is shown again: two viewers cost as much as one


class Observer:
    """The views of one server, and its history. Thread-safe."""

    __slots__ = (
        "_ask", "_held", "_history", "_is_over", "_lock", "_thread", "_url", "_view", "_viewed_at",
    )  # fmt: skip

    def __init__(self, ask: Ask, url: Callable[[], str | None] = lambda: None) -> None:
        self._ask = ask
        self._url = url
        self._history = History()
        self._held: dict[Deployment, float] = {}  # those that were logged, and for how long
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._view: View | None = None
        self._viewed_at = 0.0
        self._thread = threading.Thread(target=self._main, name="ingress-history", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to look every 2 s, for the rates of the last minutes and for held slots."""
        self._thread.start()

    def stop(self) -> None:
        """End the looks."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _main(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._lock:  # in the order in which they were asked for
                    parts, _ = self._ask("counts")
                    self._history.add(monotonic(), _counts(parts))
                self._log_held(_held_s(parts))
            except Exception:  # no process answers, while the server starts or stops
                logger.debug("no process tells its counters", exc_info=True)
            self._is_over.wait(LOOK_S)

    def _log_held(self, held_s: Mapping[Deployment, float]) -> None:
        """Log each deployment whose slots are held while others wait, once, and its end."""
        for name in [each for each in self._held if each not in held_s]:
            logger.info("%s:%s: its calls end again, after %.0f s", *name, self._held.pop(name))
        self._held.update((name, held_s[name]) for name in self._held)
        if held_s.keys() <= self._held.keys():
            return
        for application in self.view()["applications"]:
            for each in application["deployments"]:
                name = application["name"], each["name"]
                if name in self._held or name not in held_s or not is_held(each):
                    continue
                self._held[name] = each["held_s"]
                for problem in self.view()["problems"]:
                    if (problem["application"], problem["deployment"]) == name:
                        logger.warning("%s:%s: %s", *name, problem["text"])
                        break

    def view(self) -> View:
        """Return the state of the server, at most `FRESH_S` old."""
        with self._lock:
            if self._view is not None and monotonic() - self._viewed_at < FRESH_S:
                return self._view
        return self.look()

    def look(self) -> View:
        """Return the state of the server now."""
        with self._lock:
            parts, absent = self._ask("part")
            self._history.add(monotonic(), _counts(parts))
            rates, span_s = self._history.window()
            recent = self._history.recent()
            refused = self._history.refused()
            self._view = view_of(parts, absent, rates, refused, span_s, recent, self._url())
            self._viewed_at = monotonic()
            return self._view

    def progress(self) -> list[DeploymentProgress] | None:
        """Return the progress of the deployments now, by process; `None` while one is absent."""
        parts, absent = self._ask("progress")
        return None if absent else [each for part in parts for each in part["deployments"]]

    def configuration(self) -> Configuration:
        """Return the options, and the callables that the flag would move, of one process."""
        parts, _ = self._ask("configuration")
        first: Configuration | None = next(iter(parts), None)
        return {"flag": None, "moves": [], "options": []} if first is None else first

    def record(self, seconds: float) -> tuple[str | None, list[str]]:
        """Return a recording of all processes, and why some are missing in it. It blocks.

        It is `None` if one is being made. Raises `TimeoutError` if no process answers.
        """
        parts, absent = self._ask("record", seconds)
        missing = [f"worker {pid} {reason}" for pid, reason in absent.items()]
        if not parts:
            raise TimeoutError(f"no process has recorded: {', '.join(missing) or 'none serves'}")
        return merged_traces(parts), missing

    def series(self, application: str, deployment: str, route: str) -> Series:
        """Return the last 15 minutes of a route, or of all routes of a deployment."""
        return self._history.series((application, deployment, route))


def _held_s(parts: Sequence[CountPart]) -> dict[Deployment, float]:
    """Return the deployments whose slots have all been held for a while, and for how long."""
    return {
        name: each["held_s"]
        for part in parts
        for name, each in part["counts"].items()
        if each["held_s"] >= HELD_S
    }


def _counts(parts: Sequence[CountPart]) -> list[tuple[int, dict[Deployment, Counters]]]:
    return [(part["pid"], part["counts"]) for part in parts]
