"""The observer of a server: it asks its processes, keeps the history, and logs problems."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, Self, TypedDict

from ingress.observe.live.history import Growth, History, Series, deployments_of
from ingress.observe.live.part import Configuration
from ingress.observe.live.problems import LOGGED, add_problems, is_growing
from ingress.observe.live.view import Problem, View, view_of
from ingress.observe.timeline.sampling import Profile, merged_traces
from ingress.state.looking import LinesPart, LogLine, Look
from ingress.state.memory import MemoryOfProcess

logger = logging.getLogger("ingress")

JOIN_S = 1.0
LOOK_S = 2.0
OVER_S = 5.0
OVER = {
    "errors": "no request has failed for a minute",
    "held": "its calls end again",
    "memory": "the memory does not grow any more",
    "queue": "no request waits for a slot",
    "replica": "no replica fails more than the others",
}
FRESH_S = 0.4  # a view this old is shown again: two viewers cost as much as one


class DeploymentProgress(TypedDict):
    """The progress of a deployment in one process: whether its replicas are as wanted.

    `replicas` has their states, by tag. `problem` is in words; `rejected` is the reason if the last
    change was given up.
    """

    pid: int
    application: str
    deployment: str
    is_settled: bool
    rejected: str
    problem: str
    replicas: dict[str, str]


class Ask(Protocol):
    """Asks all processes of a server one question, see `part.WHAT`."""

    def __call__(self, what: str, argument: float = 0.0, /) -> tuple[list[Any], Mapping[int, str]]:
        """Return the parts, and the reasons of the processes without one, by id: `view.SILENT`."""


Key = tuple[str, str, str]
"""An application, a deployment, and the kind of a problem."""


@dataclass(slots=True)
class _Told:
    """A problem that goes on, in monotonic time."""

    began_at: float
    seen_at: float = 0.0
    is_logged: bool = False


def _where(key: Key) -> str:
    where = ":".join(filter(None, key[:2]))
    return f"{where}: " if where else ""


class Observer:
    """The views of one server, and its history. Thread-safe."""

    __slots__ = (
        "_ask", "_growth", "_history", "_is_over", "_lock", "_thread", "_told", "_url", "_view",
        "_viewed_at",
    )  # fmt: skip

    def __init__(self, ask: Ask, url: Callable[[], str | None] = lambda: None) -> None:
        self._ask = ask
        self._url = url
        self._history = History()
        self._growth = Growth()
        self._told: dict[Key, _Told] = {}
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
        """Begin to look every 2 s, for the rates of the last minutes and for problems."""
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
                    parts, _ = self._ask("snapshot")
                    self._history.add(monotonic(), parts)
                    memory = self._growth.add(monotonic(), parts)
                if self._told or self._history.has_trouble() or any(map(is_growing, memory)):
                    self._log(self.view()["problems"])
            except Exception:  # no process answers, while the server starts or stops
                logger.debug("no process tells its counters", exc_info=True)
            self._is_over.wait(LOOK_S)

    def _log(self, problems: Sequence[Problem]) -> None:
        """Log each problem that two looks in a row have seen, once, and its end."""
        now = monotonic()
        seen = {
            (each["application"], each["deployment"], each["kind"]): each["text"]
            for each in problems
            if each["kind"] in LOGGED
        }
        for key, text in seen.items():
            told = self._told.setdefault(key, _Told(now))
            told.seen_at = now
            if not told.is_logged and (now > told.began_at or key[2] == "held"):
                told.is_logged = True
                logger.warning("%s%s", _where(key), text)
        for key, told in list(self._told.items()):
            if now - told.seen_at >= OVER_S:
                del self._told[key]
                if told.is_logged:
                    took_s = told.seen_at - told.began_at
                    logger.info("%sover after %.0f s: %s", _where(key), took_s, OVER[key[2]])

    def view(self) -> View:
        """Return the state of the server, at most `FRESH_S` old."""
        with self._lock:
            if self._view is not None and monotonic() - self._viewed_at < FRESH_S:
                return self._view
        return self.look()

    def look(self) -> View:
        """Return the state of the server now."""
        with self._lock:
            looks: list[Look]
            looks, absent = self._ask("look")
            parts = [each.snapshot for each in looks]
            self._history.add(monotonic(), parts)
            rates, span_s = self._history.window()
            recent = self._history.recent()
            refused = self._history.refused()
            memory = self._growth.add(monotonic(), parts)
            view = view_of(looks, absent, rates, refused, span_s, recent, memory, self._url())
            add_problems(view, absent)
            self._view, self._viewed_at = view, monotonic()
            return view

    def progress(self) -> list[DeploymentProgress] | None:
        """Return the progress of the deployments now, by process; `None` while one is absent."""
        parts, absent = self._ask("snapshot")
        if absent:
            return None
        return [
            {
                "pid": part.pid,
                "application": app,
                "deployment": name,
                "is_settled": each.is_settled,
                "rejected": each.undone_change,
                "problem": each.message,
                "replicas": {one.replica_id: one.state for one in each.replicas},
            }
            for part in parts
            for (app, name), each in deployments_of(part)
        ]

    def configuration(self) -> Configuration:
        """Return the options, and the callables that the flag would move, of one process."""
        parts, _ = self._ask("configuration")
        first: Configuration | None = next(iter(parts), None)
        return {"flag": None, "moves": [], "options": []} if first is None else first

    def lines(
        self, process: int, application: str, deployment: str, replica: str, request_id: str = ""
    ) -> list[LogLine]:
        """Return the last log lines of a replica, or those of them that a request has made."""
        parts: list[LinesPart]
        parts, _ = self._ask("lines")
        names = (process, application, deployment, replica)
        return [
            line
            for part in parts
            for each in part["replicas"]
            if (part["pid"], each["application"], each["deployment"], each["replica"]) == names
            for line in each["lines"]
            if not request_id or request_id in line["request_ids"]
        ]

    def memory(self, seconds: float) -> list[MemoryOfProcess]:
        """Return what grows in each process in some seconds. It blocks."""
        parts, _ = self._ask("memory", seconds)
        return [each for part in parts for each in part]

    def profile(self, seconds: float) -> tuple[list[Profile], list[str]]:
        """Return the stacks of each process, and why some are missing. It blocks."""
        parts, absent = self._ask("profile", seconds)
        missing = [f"worker {pid} {reason}" for pid, reason in absent.items()]
        return [each for part in parts for each in part], missing

    def record(self, seconds: float) -> tuple[str | None, list[str]]:
        """Return a recording of all processes, and why some are missing in it. It blocks.

        It is `None` if one is being made. Raises `TimeoutError` if no process answers.
        """
        parts, absent = self._ask("record", seconds)
        missing = [f"worker {pid} {reason}" for pid, reason in absent.items()]
        if not parts:
            raise TimeoutError(f"no process has recorded: {', '.join(missing) or 'none serves'}")
        return merged_traces([part["trace"] for part in parts]), missing

    def series(self, application: str, deployment: str, route: str) -> Series:
        """Return the last 15 minutes of a route, or of all routes of a deployment."""
        return self._history.series((application, deployment, route))
