"""The observer of a server: it asks its processes, keeps the history, and logs problems.

`WHAT` has the questions, which each process answers about itself. One is its configuration: the
options in use with their origins, and the callables that the flag would move.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, Self, TypedDict

from ingress.app.config_file.origins import HTTP_VARIABLES, SETTINGS, http_default, shown, value_of
from ingress.config import HTTPOptions
from ingress.core.base.options import plain
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings, environment
from ingress.observe.inspection.explain import rows_of
from ingress.observe.live.history import Growth, History, Series, deployments_of
from ingress.observe.live.problems import LOGGED, add_problems, is_growing
from ingress.observe.live.view import Problem, View, view_of
from ingress.observe.timeline.sampling import Profile, merged_traces, profile, record
from ingress.serving.control.running import RunningApplication
from ingress.serving.http.server_options import ServerOptions
from ingress.state.looking import LogLine, Look, last_lines, look_at, replicas_of
from ingress.state.memory import MemoryOfProcess, memory
from ingress.state.server import HTTPSide, Server, snapshot_of


class Flag(TypedDict):
    """The environment variable that decides where a `def` runs."""

    name: str
    value: str


Move = TypedDict(
    "Move",
    {"application": str, "deployment": str, "what": str, "name": str, "from": str, "to": str},
)
"""A callable that the flag would move, and both places."""


class Option(TypedDict):
    """An option, its value as a file has it, and its origin."""

    where: str
    value: object
    origin: str


class Configuration(TypedDict):
    """The options of one process, and the callables that the flag would move."""

    flag: Flag | None
    moves: list[Move]
    options: list[Option]


def configuration_of(server: Server) -> Configuration:
    """Return the configuration of a process. It reads the users' source files.

    The origins are those of `config_file.origins`, and "ingress scale".
    """
    applications, settings = list(server.applications.values()), server.settings
    return {
        "flag": {"name": SYNC_IN_THREADPOOL, "value": str(int(settings.run_sync_in_threadpool))},
        "moves": [move for each in applications for move in _moves(each, settings)],
        "options": [
            *(option for each in applications for option in _options(each)),
            *_http(server.http, settings),
            *_variables(settings, server.http.command_line),
        ],
    }


def _moves(application: RunningApplication, settings: Settings) -> Iterator[Move]:
    flag = int(settings.run_sync_in_threadpool)
    built = [each.built for each in list(application.deployments.values())]
    for row in rows_of(built, settings) if built else ():
        if row.moves:
            yield {
                "application": application.name,
                "deployment": row.deployment,
                "what": row.what,
                "name": row.name,
                "from": row.places[flag].where,
                "to": row.places[1 - flag].where,
            }


def _options(application: RunningApplication) -> Iterator[Option]:
    """Yield the options of each deployment: those that are set come first."""
    for name, deployment in list(application.deployments.items()):
        config = deployment.config
        given = config.model_fields_set
        for option in sorted(type(config).model_fields, key=lambda each: each not in given):
            yield {
                "where": f"{application.name}:{name}.{option}",
                "value": plain(getattr(config, option)),
                "origin": config.origin_of(option),
            }


def _http(http: HTTPSide, settings: Settings) -> Iterator[Option]:
    command_line, from_code = http.command_line, http.options.model_fields_set
    for name in HTTPOptions.model_fields:
        if name == "location":
            continue
        value = getattr(http.options, name)
        if name in command_line.http:
            origin = command_line.origins.get(name, "command line")
        elif name in from_code:
            origin = "code"
        else:
            value = http_default(name, settings, value)
            origin = _origin_of(HTTP_VARIABLES.get(name, ""), command_line)
        yield {"where": f"http_options.{name}", "value": shown(name, value), "origin": origin}


def _variables(settings: Settings, command_line: ServerOptions) -> Iterator[Option]:
    """Yield the settings of the process by the variables that set them."""
    values = {each: value_of(each, settings) for each in SETTINGS}
    for name, value in {**values, **settings.native_threads}.items():
        origin = _origin_of(name, command_line)
        yield {"where": f"environment.{name}", "value": plain(value), "origin": origin}


def _origin_of(variable: str, command_line: ServerOptions) -> str:
    if variable in command_line.origins:
        return command_line.origins[variable]
    return "environment" if environment().get(variable) else "default"


def parts_of(server: Server, what: str, argument: float = 0.0) -> tuple[list[Any], dict[int, str]]:
    """Return the answer of this process as its `Observer` asks for it: no process is absent."""
    return [WHAT[what](server, argument)], {}


WHAT: Mapping[str, Callable[[Server, float], Any]] = {
    "snapshot": lambda server, _: snapshot_of(server),
    "look": lambda server, _: look_at(server),
    "configuration": lambda server, _: configuration_of(server),
    "lines": lambda server, _: last_lines(),
    "memory": memory,
    "profile": profile,
    "record": lambda server, seconds: {
        "pid": os.getpid(),
        "trace": record(replicas_of(server), seconds),
    },
}
"""The questions of an observer; the last three block for so many seconds."""


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
    """Asks all processes of a server one question, see `WHAT`."""

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
    """The views of one server, and its history. Thread-safe.

    While it is open as a context, it looks every 2 s, for the rates of the last minutes and for
    problems.
    """

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
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
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
        parts: list[dict[tuple[int, str, str, str], list[LogLine]]]
        parts, _ = self._ask("lines")
        return [
            line
            for part in parts
            for line in part.get((process, application, deployment, replica), ())
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
