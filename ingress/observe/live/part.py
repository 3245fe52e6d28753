"""The answers of this process to the observer of its server, which may have several processes.

One of them is its configuration: the options in use with their origins, and the callables that the
flag would move.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from ingress.app.config_file.origins import HTTP_VARIABLES, SETTINGS, http_default, shown, value_of
from ingress.config import HTTPOptions
from ingress.core.base.options import plain
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings, environment
from ingress.observe.inspection.explain import rows_of
from ingress.observe.timeline.sampling import profile, record
from ingress.serving.control.running import RunningApplication
from ingress.serving.http.server_options import ServerOptions
from ingress.state.looking import last_lines, look_at, replicas_of
from ingress.state.memory import memory
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
