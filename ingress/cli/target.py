"""`MODULE:APP` at the command line, and its errors in one clear line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from ingress.app.config_file.loading import ConfigFile, is_config_file, target_of
from ingress.app.config_file.reading import ConfigFileError
from ingress.app.declaration import module_app
from ingress.app.declaration.declaration import Application
from ingress.app.declaration.module_app import NotAnApplication
from ingress.core.base.ctrl_c import INTERRUPTED, was_pressed
from ingress.telemetry.mistakes import NEEDS_MULTIPART, format_mistake, place_of

FileOrTarget = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:APP|FILE",
        help="The bound application, such as main:hello, or a file, such as serve.yaml.",
    ),
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="The bound application, such as main:hello.")
]
AppDir = Annotated[
    Path, typer.Option(help="Where MODULE is looked for.", file_okay=False, exists=True)
]


NOTEBOOK = (
    "a notebook, which is not read; name a .py file that `jupyter nbconvert --to script` makes of "
    "it"
)
_MOST = 1e9  # of an option: in seconds 30 years, more than a timer takes
_ONE_LINE = ConsoleDimensions(10_000, 25)


class Output(Console):
    """A standard stream of a command, which prints texts as they are.

    They are names, values and errors of users: a `[red]` or `:x:` in them has no meaning. In a file
    or a pipe, to `grep` say, a row is a line.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def size(self) -> ConsoleDimensions:
        return super().size if self.is_terminal else _ONE_LINE

    @size.setter
    def size(self, given: tuple[int, int]) -> None:
        self.width, self.height = given


_AS_JSON = ContextVar("ingress_as_json", default=False)


def note_json(given: bool) -> bool:
    """Have errors told as JSON too, if the command has `--json`."""
    _AS_JSON.set(given)
    return given


def finite(number: float | None) -> float | None:
    """Refuse the numbers of an option that no one means, which pass a range: `nan`, or huge."""
    if number is not None and not number <= _MOST:
        raise typer.BadParameter(f"{number} is not a number of at most {_MOST:,.0f}")
    return number


AsJSON = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object, also for an error.", callback=note_json),
]


def load(target: str, app_dir: Path, *, is_factory: bool = False) -> Application:
    """Import the application `MODULE:APP`. Ends the program if there is none, or on an error."""
    with reporting_mistakes(target):
        return module_app.load(target, app_dir, is_factory=is_factory)


@dataclass(frozen=True, slots=True)
class NamedApp:
    """An application with its name and its module."""

    name: str
    module: str
    application: Application


def load_each(target: str, app_dir: Path) -> list[NamedApp]:
    """Import the application `MODULE:APP`, or those of a file, with its variables and its folder.

    Ends the program if there is none, or on an error.
    """
    if not is_config_file(target):
        return [NamedApp("default", target.partition(":")[0], load(target, app_dir))]
    file = read_file(Path(target).absolute())
    app_dir = app_dir.absolute()  # the file may have another folder
    with refusing(ConfigFileError):
        file.prepare()
    with reporting_mistakes(target):
        return [
            NamedApp(
                each.config.name, target_of(each.config)[0].partition(":")[0], each.application
            )
            for each in file.load_all(app_dir)
        ]


@contextmanager
def reporting_mistakes(target: str) -> Iterator[None]:
    """Print an error of the block, which imports user code, and end the program."""
    fastapis = logging.getLogger("fastapi")
    fastapis.addFilter(_is_no_mistake)
    try:
        yield
        if was_pressed():  # and user code has swallowed it
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        raise _told(error, target) from None
    finally:
        fastapis.removeFilter(_is_no_mistake)


def _told(error: BaseException, target: str) -> typer.Exit:
    """Print an error of a module while it is imported, and return the end of the program."""
    if isinstance(error, KeyboardInterrupt) or was_pressed():
        place = place_of(error)
        module = target.partition(":")[0]
        text = f"interrupted while {module!r} was imported{place and f', at {place}'}"
        return refusal(text, code=INTERRUPTED)
    if isinstance(error, ConfigFileError | NotAnApplication):
        return refusals(error)
    assert isinstance(error, Exception)
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "ray":
        return refusal(
            f"{place_of(error)}: {error}. For a program of Ray Serve, `ingress migrate FILE` "
            "shows the changes that it needs, and makes them with --write"
        )
    if NEEDS_MULTIPART in str(error):
        return refusal(
            f"{place_of(error)}: forms and uploads need python-multipart; install it: python "
            "-m pip install python-multipart"
        )
    return mistake(format_mistake(error))


def _is_no_mistake(record: logging.LogRecord) -> bool:
    """Return whether a record of FastAPI has another text than the error that it raises next."""
    return NEEDS_MULTIPART not in record.getMessage()


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Print an error of these kinds in one line, and end the program. Also a decorator."""
    try:
        yield
    except kinds as error:
        raise refusals(error) from None


@refusing(ConfigFileError)
def read_file(path: Path) -> ConfigFile:
    """Read a configuration file. Ends the program with a line for each of its mistakes."""
    return ConfigFile.read(path)


def mistake(text: str) -> typer.Exit:
    """Print a mistake in user code, and return the exception that ends the program."""
    if not _is_told_as_json(text):
        typer.echo(text, err=True)
    return typer.Exit(1)


def refusals(error: Exception) -> typer.Exit:
    """Print an error, or the mistakes of a file, and return the exception that ends the program."""
    lines = error.lines if isinstance(error, ConfigFileError) else [str(error)]
    if not _is_told_as_json("\n".join(lines)):
        for line in lines:
            refusal(line)
    return typer.Exit(1)


def refusal(message: str, code: int = 1) -> typer.Exit:
    """Print an error in one line, and return the exception that ends the program."""
    if not _is_told_as_json(message):
        Output(stderr=True).print(Text.assemble(("Error:", "red"), f" {message}"), soft_wrap=True)
    return typer.Exit(code)


def _is_told_as_json(message: str) -> bool:
    """Print an error as the one object that a command with `--json` prints, if this is one."""
    if _AS_JSON.get():
        typer.echo(json.dumps({"error": message}))
    return _AS_JSON.get()
