"""The applications of a file: imported, built with their arguments, with the file's options."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ingress.app.config_file.models import RAY_BUILDER, ApplicationConfig, ServeConfig, checked
from ingress.app.config_file.reading import ConfigFileError, FileValue, Where, read
from ingress.app.declaration import module_app
from ingress.app.declaration.build import build, with_logging, with_options
from ingress.app.declaration.cluster_options import check_here, without_cluster_options
from ingress.app.declaration.declaration import Application
from ingress.app.declaration.module_app import NotAnApplication
from ingress.core.base.settings import environment, export
from ingress.exceptions import RayServeException

SUFFIXES = (".json", ".yaml", ".yml")
_PATHS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})


def is_config_file(target: str) -> bool:
    """Return whether a target of the command line is a file rather than MODULE:APP."""
    return ":" not in target and target.endswith(SUFFIXES)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One application of a file. `written` has the options of the code, without the file's."""

    config: ApplicationConfig
    written: Application
    application: Application


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read without mistakes. `top` has the places of its values.

    `stamp` is the time and the size of the version that was read, see `stamp_of`. `environ` is the
    environment without the variables of any version: a value may add to a variable, and each worker
    process sets it again. With `on_cluster` its applications are for another engine, which acts on
    all options.
    """

    path: Path
    config: ServeConfig
    top: FileValue
    stamp: tuple[int, int] | None
    environ: Mapping[str, str]
    on_cluster: bool = False

    @classmethod
    def read(cls, path: Path, environ: Mapping[str, str] | None = None) -> Self:
        """Read a file. Raises `ConfigFileError` with all its mistakes.

        `environ` is that of an earlier version; by default it is the environment now.
        """
        stamp = stamp_of(path)  # before: a change meanwhile is then seen by the next look
        top = read(path)
        known = environment() if environ is None else environ
        return cls(path, checked(top, str(path)), top, stamp, known)

    def environment(self) -> dict[str, str]:
        """Return the variables of all applications. Raises `ValueError` if two disagree."""
        return self.config.environment(self.environ)

    def folder(self) -> Path | None:
        """Return the folder of `working_dir`, if there is one. Raises `ValueError` for two."""
        return self.config.folder(self.path.parent)

    def http_options(self, folder: Path) -> dict[str, object]:
        """Return the options of HTTP that the file has. Their relative paths begin at `folder`."""
        options = self.config.http_options
        given = {name: getattr(options, name) for name in options.model_fields_set}
        for name in _PATHS & given.keys():
            given[name] = given[name] and str(folder / given[name])
        return given

    def process_origins(self, command_line: Iterable[str]) -> dict[str, str]:
        """Return the places of the options of HTTP and of the variables that the file sets.

        Without those that the command line gives.
        """
        given = self.config.http_options.model_fields_set - set(command_line)
        found = self._origins(("http_options",), given)
        for number, each in enumerate(self.config.applications):
            around: Where = ("applications", number, "runtime_env", "env_vars")
            found |= self._origins(around, each.runtime_env.env_vars)
        return found

    def prepare(self) -> dict[str, str | None]:
        """Set the variables and the current folder that the applications share.

        Returns the variables' previous values, for `export`. Raises `ConfigFileError` if two
        applications need different ones.
        """
        try:
            variables, folder = self.environment(), self.folder()
        except ValueError as error:
            raise ConfigFileError([f"{self.path}: {error}"]) from None
        if folder is not None:
            os.chdir(folder)
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        return export(variables)

    def load_all(self, app_dir: Path | None) -> list[Loaded]:
        """Import the applications, one after another. Raises as `load`."""
        return [self.load(number, app_dir) for number in range(len(self.config.applications))]

    def load(self, number: int, app_dir: Path | None) -> Loaded:
        """Import the application of that number.

        Raises any error of its module, and `ConfigFileError` if there is no such application, or
        its deployments cannot have these options.
        """
        config = self.config.applications[number]
        target, arguments = target_of(config)
        where: Where = ("applications", number)
        try:
            written = module_app.load(target, app_dir, arguments=arguments)
            # It warns of options in the code.
            build(written, config.name, acts_on_all=self.on_cluster)
        except (NotAnApplication, RayServeException) as error:
            place = self.top.at((*where, "import_path"))
            raise ConfigFileError([f"{self.path}:{place}: {error}"]) from None
        application = written
        for index, each in enumerate(config.deployments):
            given = each.overriding()
            options = given if self.on_cluster else without_cluster_options(given)
            try:
                # One after another, so that a mistake is at the place of its deployment.
                application = with_options(
                    application,
                    {each.name: options},
                    {each.name: self._origins((*where, "deployments", index), given)},
                )
                build(application, config.name, acts_on_all=True)
            except ValueError as error:
                place = self.top.at((*where, "deployments", index))
                raise ConfigFileError([f"{self.path}:{place}: {error}"]) from None
        if not self.on_cluster:
            self._check_here(application, number)
        if config.logging_config is not None:
            origin = self.place_of((*where, "logging_config"))
            application = with_logging(application, config.logging_config, origin)
        return Loaded(config, written, application)

    def place_of(self, where: Where) -> str:
        """Return the place of a value as FILE:LINE:COLUMN."""
        return f"{self.path.name}:{self.top.at(where)}"

    def _origins(self, around: Where, names: Iterable[str]) -> dict[str, str]:
        return {name: self.place_of((*around, name)) for name in names}

    def _check_here(self, application: Application, number: int) -> None:
        """Raise `ConfigFileError`, with the place, for options that one process cannot fulfil."""
        config = self.config.applications[number]
        entries = {each.name: index for index, each in enumerate(config.deployments)}
        for built in build(application, config.name, acts_on_all=True).deployments:
            try:
                check_here(built)
            except ValueError as error:
                index = entries.get(built.name)
                steps: Where = ("import_path",) if index is None else ("deployments", index)
                place = self.top.at(("applications", number, *steps))
                raise ConfigFileError([f"{self.path}:{place}: {error}"]) from None


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return the time and the size of a file; `None` while it is absent, as in a replacement."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def target_of(config: ApplicationConfig) -> tuple[str, dict[str, object]]:
    """Return the application as MODULE:APP, and the arguments of its builder.

    A file of `ingress build` names the builder for Ray, and the application as its argument.
    """
    if config.import_path == RAY_BUILDER:
        return str(config.args.get("target")), dict(config.args.get("args") or {})
    path = config.import_path
    return path if ":" in path else ":".join(path.rpartition(".")[::2]), config.args
