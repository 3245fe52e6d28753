"""A changed file, applied to a server that runs: at SIGHUP, with `--watch`, by `ingress reload`.

    options of deployments     changed while their replicas run, in this process or in all workers
    applications               started, run again and stopped; worker processes are replaced instead
    the rest                   needs new processes: workers are replaced one after another, and one
                               process says that it has to be restarted, and changes nothing

A file that is wrong changes nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ingress import api
from ingress.app.config_file.difference import CodeFiles, Difference, differences, for_new_processes
from ingress.app.config_file.loading import ConfigFile, stamp_of
from ingress.app.config_file.reading import ConfigFileError
from ingress.cli.control_socket import CommandError
from ingress.cli.sd_notify import notifying_reload
from ingress.cli.server_commands import change, check
from ingress.cli.worker import Served
from ingress.cli.worker_commands import WorkersCommands
from ingress.config import DeploymentConfig, HTTPOptions
from ingress.core.base.options import IN_PLACE
from ingress.core.base.settings import Settings, export
from ingress.serving.http.address import Address, SharedPort
from ingress.serving.http.server_options import ServerOptions
from ingress.telemetry.logs import logger

LOOK_S = 1.0  # with `--watch`
JOIN_S = 1.0


AT_START = frozenset({"logging_config"})
"""Differences that the supervisor's own configuration has."""

Reload = Callable[[], list[str]]


class FileState:
    """The version of the file that a server runs, and the code that it has imported.

    Owned by the thread that holds `changing`. `before` are the values that the file's variables had
    before, `folder` is the current folder of the command.
    """

    def __init__(
        self, file: ConfigFile, app_dir: Path, before: Mapping[str, str | None], folder: Path
    ) -> None:
        self.changing = threading.Lock()
        self.file = file
        self._app_dir = app_dir
        self._before = before
        self._folder = folder
        self._code = self._code_of(file)

    def _code_of(self, file: ConfigFile) -> CodeFiles:
        folder = file.folder()
        return CodeFiles([self._app_dir, *([] if folder is None else [folder])])

    def read(self) -> tuple[ConfigFile, list[str]]:
        """Return the file as it is now, and what in it needs new processes.

        Raises `CommandError` with all its mistakes.
        """
        try:
            new = ConfigFile.read(self.file.path, self.file.environ)
            reasons = for_new_processes(self.file, new)
        except ConfigFileError as error:
            raise CommandError("\n".join(error.lines)) from None
        except ValueError as error:
            raise CommandError(f"{self.file.path}: {error}") from None
        return new, [*reasons, *(f"the code of {each}" for each in self._code.changed())]

    def difference(self, new: ConfigFile) -> Difference:
        """Return the differences of the applications. Raises `CommandError` if one is wrong."""
        try:
            # Their modules are imported already: the old version is imported again at no cost.
            before = self.file.load_all(None)
            return differences(before, new.load_all(None), DeploymentConfig.marked(IN_PLACE))
        except ConfigFileError as error:
            raise CommandError("\n".join(error.lines)) from None
        except Exception as error:  # a builder of the user
            raise CommandError(f"{type(error).__name__}: {error}; nothing was changed") from None

    def prepare(self, file: ConfigFile) -> None:
        """Set the variables and the folder of a version, for processes that start later."""
        export(self._before)
        os.chdir(self._folder)
        self._before = file.prepare()

    def take(self, new: ConfigFile) -> None:
        """Remember the version that runs now."""
        self.file = new
        self._code = self._code_of(new)


def reload_one_process(state: FileState) -> list[str]:
    """Apply the file to this process. Returns a line for each change.

    Raises `CommandError` if the file is wrong or needs a new process; nothing has changed then.
    """
    with state.changing:
        new, reasons = state.read()
        if reasons:
            raise CommandError(
                f"{', '.join(reasons)} changed: this needs a new process: start "
                "`ingress run ... --replace`, which takes over, or run with --workers. Nothing was "
                "changed"
            )
        found = state.difference(new)
        check(found.options)
        lines = _run(found)
        lines += change(found.options, state.file.path.name)
        for name in found.removed:
            api.delete(name)
            lines.append(f"{name}: removed")
        state.take(new)
        return lines


class WorkersAddress:
    """The address of the workers, which another version of the file may change.

    Owned by the thread that holds `FileState.changing`. `options` are those of the start: of
    `serve.start` in a module, with those of the file and of the command line in their place.
    """

    def __init__(
        self, served: Served, port: SharedPort, options: HTTPOptions, settings: Settings
    ) -> None:
        in_module = options.model_fields_set - served.server.http.keys()
        self._in_module = HTTPOptions(**{name: getattr(options, name) for name in in_module})
        self._served = served
        self._settings = settings
        self._port = port
        self._address = self._of(served.server)[0]

    def _of(self, server: ServerOptions) -> tuple[Address, bool]:
        """Return the address, and whether it is one for TLS."""
        options = server.over(self._in_module)
        return server.address(options, self._settings), options.ssl_certfile is not None

    def moved(self, new: ConfigFile) -> SharedPort | None:
        """Return the bound port of a version; `None` if it has the address that is served now.

        Raises `CommandError` if that cannot be bound.
        """
        address, _ = self._of(self._served.server_with(new))
        if address == self._address:
            return None
        try:
            return SharedPort(address.bind(), address)
        except RuntimeError as error:
            raise CommandError(f"{error}; nothing was changed") from None

    def take(self, new: ConfigFile, port: SharedPort | None) -> str:
        """Remember the version that is served now. Returns its URL."""
        self._port = port or self._port
        self._address, is_tls = self._of(self._served.server_with(new))
        return self._port.url(is_tls=is_tls)


def reload_workers(
    state: FileState, commands: WorkersCommands, address: WorkersAddress
) -> list[str]:
    """Apply the file to all worker processes. Returns a line for each change.

    What only differs in options that need no new replicas is changed in each worker. Otherwise
    the workers are replaced one after another. Raises `CommandError` if the file is wrong, or
    the first new worker does not start; nothing has changed then.
    """
    with state.changing:
        new, reasons = state.read()
        if fixed := [each for each in reasons if each in AT_START]:
            raise CommandError(
                f"{', '.join(fixed)} changed: the command itself has them; restart `ingress run`. "
                "Nothing was changed"
            )
        found = Difference() if reasons else state.difference(new)
        again = [each.config.name for each in (*found.added, *found.again)] + found.removed
        if not reasons and not again:
            lines = commands.change(found.options, state.file.path.name) if found.options else []
            commands.workers.remember_file(new)
            state.take(new)
            return lines
        port = address.moved(new)
        state.prepare(new)
        try:
            commands.roll(new, port)
        except CommandError:
            state.prepare(state.file)
            raise
        state.take(new)
        commands.url = address.take(new, port)
        return [f"workers replaced: {', '.join(reasons or again)} changed"]


def _run(found: Difference) -> list[str]:
    """Start applications, and run again those whose replicas must be made anew."""
    lines: list[str] = []
    added: list[str] = []
    try:
        for each in (*found.added, *found.again):
            name, prefix = each.config.name, each.config.route_prefix
            api.run(each.application, name=name, route_prefix=prefix, engine="local")
            if each in found.added:
                added.append(name)
            lines.append(f"{name}: {'added' if each in found.added else 'run again'}")
    except Exception as error:
        for name in added:
            try:
                api.delete(name)
            except Exception:
                logger.exception("%s was added, and cannot be removed again", name)
        raise CommandError(f"{error}; what ran serves on") from None
    return lines


@dataclass(eq=False, slots=True)
class Reloads:
    """The thread that applies a file when it is asked to, or when `watched` changes.

    Without `reload`, a request is answered with one line of the log.
    """

    _reload: Reload | None
    _watched: ConfigFile | None = None
    # `put` is reentrant: a signal handler calls it at any line.
    _asked: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    _is_ready: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Ask for the file to be applied. For signal handlers: takes no lock."""
        self._asked.put(True)

    def command(self, arguments: Mapping[str, Any]) -> list[str]:
        """Apply the file at once: the command of the control socket."""
        if self._reload is None:
            raise CommandError(
                "this server has no file; start it with `ingress run serve.yaml`, or start a new "
                "one with --replace, which takes over"
            )
        with notifying_reload():
            return self._reload()

    def begin(self) -> None:
        """Apply the file from now on: the server is ready."""
        self._is_ready.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread while this context is open."""
        thread = threading.Thread(target=self._run, name="ingress-reload", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._asked.put(False)
            self._is_ready.set()
            thread.join(JOIN_S)

    def _run(self) -> None:
        self._is_ready.wait()
        seen = None if self._watched is None else self._watched.stamp
        while True:
            is_asked: bool | None = None
            with suppress(Empty):
                is_asked = self._asked.get(timeout=None if self._watched is None else LOOK_S)
            if is_asked is False:
                return
            stamp = None if self._watched is None else stamp_of(self._watched.path)
            if is_asked or stamp != seen:
                seen = stamp
                self._apply()

    def _apply(self) -> None:
        if self._reload is None:
            logger.info("SIGHUP is ignored: there is no file to apply; it serves on")
            return
        try:
            lines = self.command({})
        except CommandError as error:
            for line in str(error).splitlines():
                logger.error("the file is not applied: %s", line)
        except Exception:
            logger.exception("the file is not applied")
        else:
            logger.info("the file is applied: %s", "; ".join(lines) or "nothing to change")
