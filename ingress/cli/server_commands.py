"""The commands of the control socket: of a server in one process, and of a worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

from ingress.cli.control_socket import Command, CommandError
from ingress.cli.sd_notify import notify
from ingress.engines import local_engine
from ingress.exceptions import RayServeException
from ingress.observe.live.observer import WHAT, Observer
from ingress.serving.control import changes
from ingress.telemetry.logs import logger

MOST_LOOK_S = 240.0
SCALE = "ingress scale"
"""The origin of the options that the command sets."""

Changes = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Options to change, by application and deployment."""


class JobsAnswer(TypedDict):
    """The answer of a server to `ingress jobs`: rows of jobs, or the number of those changed."""

    queues: list[str]
    jobs: list[dict[str, Any]]
    number: int


class Failed(str):
    """The text of an error in a worker."""


def commands_of(
    observer: Observer, change: Callable[..., list[str]], jobs: Callable[..., JobsAnswer]
) -> dict[str, Command]:
    """Return the commands of a server; `change` and `jobs` are those of it, or of its workers."""
    return {
        "livez": lambda arguments: "success",  # from a thread: it lives, whatever its loops do
        "view": lambda arguments: observer.view(),
        "progress": lambda arguments: observer.progress(),
        "memory": lambda arguments: observer.memory(seconds_of(arguments)),
        "profile": lambda arguments: observer.profile(seconds_of(arguments)),
        "jobs": lambda arguments: jobs(**arguments),
        "stop": stop,
        "scale": lambda arguments: change(scaling(arguments), SCALE, is_scaling=True),
    }


def commands_of_a_worker() -> dict[str, Command]:
    """Return the commands that the supervisor passes on to each worker."""
    return {
        **{what: partial(_part, what) for what in WHAT},
        "check": lambda arguments: check(**arguments),
        "jobs": lambda arguments: jobs(**arguments),
        "change": lambda arguments: change(**arguments),
    }


def run_in_worker(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the answer of a worker to a command; `Failed` if it raises."""
    try:
        return commands_of_a_worker()[name](arguments)
    except Exception as error:  # the command's process shows it
        logger.debug("the command %r failed", name, exc_info=True)
        return Failed(str(error) if isinstance(error, CommandError) else repr(error))


def seconds_of(arguments: Mapping[str, Any]) -> float:
    """Return the time of a look that takes some. Raises `CommandError` if it takes too long."""
    seconds = arguments.get("seconds", 10.0)
    if not isinstance(seconds, int | float) or not 0 < seconds <= MOST_LOOK_S:
        raise CommandError(f"seconds must be a number up to {MOST_LOOK_S:g}, got {seconds!r}")
    return seconds


def stop(arguments: Mapping[str, Any]) -> None:
    """Stop this process as SIGTERM does."""
    notify("STOPPING=1")  # systemd would take the end for an exit of its own accord
    os.kill(os.getpid(), signal.SIGTERM)


def scaling(arguments: Mapping[str, Any]) -> Changes:
    """Return the changes of `{"replicas": {application: {deployment: number}}}`."""
    replicas = arguments.get("replicas")
    if not isinstance(replicas, dict) or not all(isinstance(v, dict) for v in replicas.values()):
        raise CommandError(f"replicas must map applications to deployments, got {replicas!r}")
    return {
        name: {each: {"num_replicas": count} for each, count in deployments.items()}
        for name, deployments in replicas.items()
    }


def check(wanted: Changes, *, is_scaling: bool = False) -> None:
    """Raise `CommandError` if the running applications cannot have these options.

    `is_scaling` says that a user sets numbers of replicas: autoscaling would set them again.
    """
    running = local_engine().applications
    for name, options in wanted.items():
        if (application := running.get(name)) is None:
            there = ", ".join(map(repr, list(running))) or "none"
            raise CommandError(f"no application {name!r} runs; running: {there}")
        for each in options if is_scaling else ():
            deployment = application.deployments.get(each)
            if deployment is not None and deployment.config.autoscaling is not None:
                raise CommandError(
                    f"{name}:{each} has as many replicas as its autoscaling_config says; change "
                    "min_replicas and max_replicas there, or set num_replicas in its place"
                )
        try:
            changes.checked(application, options)
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from None


def change(wanted: Changes, origin: str, *, is_scaling: bool = False) -> list[str]:
    """Change options of running applications, of all or of none. Returns a line for each.

    `origin` is the file or the command that asks for them.
    """
    check(wanted, is_scaling=is_scaling)
    return [
        f"{name}: {each}"
        for name, options in wanted.items()
        for each in local_engine().change(name, options, origin=origin)
    ]


def jobs(action: str, queue: str | None = None, **arguments: Any) -> JobsAnswer:
    """Return the jobs of a queue, or of all, or change them. Raises `CommandError`."""
    running = [each.deployments.values() for each in list(local_engine().applications.values())]
    consumers = {each.consumer.queue: each.consumer for some in running for each in list(some)
                 if each.consumer is not None}  # fmt: skip
    if queue is not None and queue not in consumers:
        there = ", ".join(map(repr, sorted(consumers))) or "none"
        raise CommandError(f"no deployment runs the jobs of a queue {queue!r}; there: {there}")
    found = JobsAnswer(queues=sorted(consumers), jobs=[], number=0)
    for name, consumer in consumers.items():
        if queue in (None, name):
            try:
                answer = consumer.ask(action, **arguments)
            except (ValueError, RayServeException) as error:
                raise CommandError(str(error)) from None
            found["jobs"] += answer if action == "list" else []
            found["number"] += 0 if action == "list" else answer
    return found


def _part(what: str, arguments: Mapping[str, Any]) -> Any:
    return WHAT[what](local_engine(), arguments.get("argument", 0.0))
