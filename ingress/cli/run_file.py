"""The part of `ingress run` that a file has: its options, under those of the command line."""

from __future__ import annotations

import warnings
from typing import Any

import typer

from ingress.api import RunTarget
from ingress.app.config_file.loading import ConfigFile
from ingress.app.config_file.reading import ConfigFileError
from ingress.cli.target import refusal, refusing, reporting_mistakes
from ingress.cli.worker import Served
from ingress.config import LoggingConfig
from ingress.core.base.settings import log_encoding
from ingress.exceptions import OptionNotActedOnWarning
from ingress.telemetry.logs.process import ProcessLogs


def check_file(file: ConfigFile, **options: Any) -> None:
    """Refuse options of the command line that each application of a file has."""
    for name, value in options.items():
        if value:
            raise refusal(
                f"--{name.replace('_', '-')} is for MODULE:APP; in {file.path.name}, each "
                "application has its own"
            )


def builder_arguments(
    words: list[str] | None, file: ConfigFile | None, *, is_factory: bool
) -> dict[str, str] | None:
    """Return the arguments KEY=VALUE of a builder, `None` if there are none."""
    if not words:
        return None
    if file is not None:
        raise refusal(f"{words[0]!r}: in {file.path.name}, each application has its own `args`")
    if is_factory:
        raise refusal(
            f"{words[0]!r} is for a builder, which has one parameter; leave out --factory"
        )
    for word in words:
        key, _, value = word.partition("=")
        if not key or not value:  # the words of Ray 2.60.0, scripts.py
            raise refusal(
                f"invalid application argument {word!r}, it must be of the form KEY=VALUE"
            )
    return dict(word.split("=", 1) for word in words)


def print_unused(file: ConfigFile) -> None:
    """Print, in one line of standard error, the options that only a cluster acts on."""
    if unused := file.config.for_a_cluster():
        text = f"Without effect here, only on a cluster: {'; '.join(unused)}"
        typer.echo(f"{file.path.name}: {text}", err=True)


def process_logs(
    file: ConfigFile | None,
    level: str | None,
    encoding: str | None,
    *,
    access_log: bool,
    prints: bool,
) -> ProcessLogs:
    """Return the logging of the command line, else of the file, else of the environment.

    `prints` is false with a `--log-config`.
    """
    options: dict[str, Any] = {}
    with refusing(ValueError):
        if (named := log_encoding()) is not None:
            options["encoding"] = named
    if file is not None:
        config = file.config.logging
        options |= {name: getattr(config, name) for name in config.model_fields_set}
    if encoding is not None:
        if not prints:
            raise refusal("--log-format and --log-config are both given; the file has the format")
        options["encoding"] = encoding
    if level is not None:
        options["log_level"] = level.upper()
    is_logged = access_log and options.get("enable_access_log", True)
    return ProcessLogs(LoggingConfig(**options), is_logged, prints)


@refusing(ConfigFileError)
def prepare(file: ConfigFile) -> dict[str, str | None]:
    """Set the variables and the folder of a file. Returns the variables' previous values.

    Ends the program if its applications disagree.
    """
    return file.prepare()


def load_targets(served: Served) -> list[RunTarget]:
    """Import the applications. Ends the program on an error."""
    with reporting_mistakes(served.target):
        targets = list(served.targets())
    if served.file is not None:  # they are named: the file's by `print_unused`, the code's just now
        warnings.filterwarnings("ignore", category=OptionNotActedOnWarning)
    return targets
