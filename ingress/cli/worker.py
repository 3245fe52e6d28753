"""One worker process of `ingress run --workers` or `--reload`, and its messages to the supervisor.

    a heartbeat each second   the worker lives, and whether it serves
    a text                    the cause of a failed start
    a number and a value      the answer to a command of the control socket

uvicorn's own supervisor, of `--reload`, gets no messages.

Only the supervisor ends a worker: it sends SIGTERM. A Ctrl-C at a terminal reaches workers too, and
they ignore it. If the supervisor ends, its workers drain and end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socket
from time import monotonic, sleep
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ingress.api import LAME_DUCK_S, RunTarget, run
from ingress.app.asgi.unserved_routes import log_if_not_callable
from ingress.app.config_file.difference import changed_names
from ingress.app.config_file.loading import ConfigFile
from ingress.app.config_file.reading import ConfigFileError
from ingress.app.declaration import module_app
from ingress.app.declaration.build import with_options
from ingress.app.declaration.module_app import NotAnApplication
from ingress.cli.admin import Admin, resolved
from ingress.cli.control_socket import Command, CommandError, control_socket
from ingress.cli.server_commands import (
    SCALE,
    Changes,
    change,
    commands_of,
    jobs,
    run_in_worker,
)
from ingress.config import LoggingConfig
from ingress.core.base.settings import Settings
from ingress.core.base.signals import stop_signals
from ingress.core.base.standard_streams import make_lossy
from ingress.core.calls.loops import run_blocking
from ingress.engines import local_engine
from ingress.engines.hosting import CombinedApp
from ingress.exceptions import OptionNotActedOnWarning
from ingress.observe.live.observer import Observer, parts_of
from ingress.serving.http.address import SharedPort, url_of
from ingress.serving.http.server_options import ServerOptions
from ingress.serving.http.uvicorn_server import UvicornServer
from ingress.state.server import Snapshot
from ingress.telemetry.logs.streams import ProcessLogs
from ingress.telemetry.mistakes import format_mistake

BEAT_S = 1.0
SLACK_S = 0.5  # a heartbeat that is a little early pushes a snapshot too
LAST_WORDS_S = 3.0  # after the time for the worker's requests
STARTUP_FAILURE = 3  # uvicorn's exit code

logger = logging.getLogger("uvicorn.error")


@dataclass(frozen=True, slots=True)
class Served:
    """The applications that `ingress run` serves, as a worker process gets them.

    Those of `file`, or else the one that `target`, `name`, `route_prefix` and, for a builder,
    `arguments` describe. `http` are the keywords of `HTTPOptions` that the command line gives;
    relative paths of the file begin at `folder`. `logs` is the logging of each
    process. `changes` are options that commands have changed, by application and deployment.
    """

    target: str
    app_dir: Path
    name: str
    route_prefix: str
    server: ServerOptions
    _: KW_ONLY
    is_factory: bool = False
    arguments: Mapping[str, str] | None = None
    logs: ProcessLogs = field(default_factory=ProcessLogs)
    file: ConfigFile | None = None
    http: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    changes: Changes = field(default_factory=dict)

    def changed_by(self, wanted: Changes) -> Served:
        """Return the same applications with other options."""
        merged = {name: dict(options) for name, options in self.changes.items()}
        for name, deployments in wanted.items():
            options = merged.setdefault(name, {})
            for deployment, given in deployments.items():
                options[deployment] = {**options.get(deployment, {}), **given}
        return replace(self, changes=merged)

    def with_file(self, file: ConfigFile) -> Served:
        """Return the same server with another version of its file.

        Options that a command has changed stay, unless the file itself changes them.
        """
        assert self.file is not None
        changed = changed_names(self.file, file)
        kept = {
            name: {
                deployment: {
                    option: value
                    for option, value in options.items()
                    if option not in changed.get(name, {}).get(deployment, ())
                }
                for deployment, options in deployments.items()
            }
            for name, deployments in self.changes.items()
        }
        return replace(self, file=file, server=self.server_with(file), changes=kept)

    def server_with(self, file: ConfigFile) -> ServerOptions:
        """Return the options of the server with another version of the file."""
        http = {**file.http_options(self.folder), **self.http}
        return replace(self.server, http=http, origins=file.process_origins(self.http))

    def configure(self, config: uvicorn.Config) -> None:
        """Set the arguments of HTTP, which the file, or `serve.start` in a module, may change.

        Those of the command line alone are in it. For after `load`.
        """
        options = local_engine().http.options
        limits = options.limits(Settings.from_environment().http_limits)
        for name, value in self.server.uvicorn_arguments(options, limits).items():
            if name not in self.server.uvicorn or name == "http":
                setattr(config, name, value)

    def load(self) -> ASGIApp:
        """Import the applications in this process. Raises as `module_app.load`."""
        self.logs.adopt()
        # The command has said these, when it imported the module.
        warnings.filterwarnings("ignore", category=OptionNotActedOnWarning)
        warnings.filterwarnings("ignore", message="the variables? ", category=UserWarning)
        local_engine().use(self.server)
        if self.file is not None:
            self.file.prepare()
        return CombinedApp(local_engine(), partial(run_all, list(self.targets())))

    def targets(self) -> Iterator[RunTarget]:
        """Import the applications, one after another."""
        for each in self._written():
            if each.name in self.changes:
                changed = self.changes[each.name]
                origins = {name: dict.fromkeys(given, SCALE) for name, given in changed.items()}
                each.target = with_options(each.target, changed, origins)
            yield each

    def _written(self) -> Iterator[RunTarget]:
        if self.file is None:
            found = module_app.load(
                self.target, self.app_dir, is_factory=self.is_factory, arguments=self.arguments
            )
            yield RunTarget(found, self.name, self.route_prefix)
            return
        for each in self.file.load_all(self.app_dir):
            yield RunTarget(each.application, each.config.name, each.config.route_prefix)


def run_all(
    targets: Sequence[RunTarget], engine: str = "local", logs: LoggingConfig | None = None
) -> None:
    """Start the applications on an engine, one after another."""
    for each in targets:
        if each.route_prefix is not None:
            log_if_not_callable(each.target.deployment.func_or_class)
        run(
            each.target, name=each.name, route_prefix=each.route_prefix, logging_config=logs,
            engine=engine,
        )  # fmt: skip


def work(config: uvicorn.Config, served: Served, port: SharedPort, pipe: Connection) -> None:
    """Serve until SIGTERM. The main function of a new process; exits with 3 if it cannot start."""
    for number in stop_signals():
        # Left to the supervisor. Not `SIG_IGN`: processes that user code starts would inherit it.
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
    make_lossy()
    config.configure_logging()
    server = Worker(
        config,
        pipe,
        lame_duck_s=max(LAME_DUCK_S, served.server.drain_delay_s),
        owns_socket=port.has_own_sockets,
        pushes=served.server.admin is not None and not served.server.admin.is_off,
    )
    threading.Thread(target=server.beat, name="ingress-beat", daemon=True).start()
    cause = Cause(server)
    logger.addFilter(cause)
    try:
        config.app = served.load()
        served.configure(config)
    except (ConfigFileError, NotAnApplication) as error:  # a file has changed since it was read
        cause.lines.append(str(error))
    except Exception as error:  # of user code: the supervisor prints it
        cause.lines.append(format_mistake(error))
    try:
        if not cause.lines:
            server.run([port.open()])
            if server.pushes:
                server.push(at_the_end=True)
    except SystemExit:
        pass
    except OSError as error:
        logger.error("cannot serve: %s", error)
    except Exception:
        logger.exception("cannot serve")
    if not server.started:
        server.report("\n".join(cause.lines))
        sys.exit(STARTUP_FAILURE)


class Worker(UvicornServer):
    """uvicorn's server in a worker process. `pushes` snapshots for the supervisor's listener."""

    def __init__(
        self,
        config: uvicorn.Config,
        pipe: Connection,
        *,
        lame_duck_s: float,
        owns_socket: bool,
        pushes: bool,
    ) -> None:
        super().__init__(config, lame_duck_s=lame_duck_s, owns_socket=owns_socket)
        self._patience_s = lame_duck_s + (config.timeout_graceful_shutdown or 0) + LAST_WORDS_S
        self._pipe = pipe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # a pipe is for one thread at a time
        self.pushes = pushes

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.report(self.started)

    def report(self, what: bool | str | tuple[int, Any] | Snapshot) -> None:
        with self._lock, suppress(OSError):  # the supervisor has ended; `beat` handles that
            self._pipe.send(what)

    def beat(self) -> None:
        """Send the supervisor a heartbeat each second, until either process ends.

        Answers its commands too, each in a thread of its own.
        """
        due = push_at = monotonic()
        try:
            while True:
                if self._pipe.poll(max(0.0, due - monotonic())):
                    asked = self._pipe.recv()
                    threading.Thread(
                        target=self._answer, args=asked, name="ingress-command", daemon=True
                    ).start()
                if monotonic() >= due:
                    self.report(self.started)
                    due = monotonic() + BEAT_S
                    if self.started and self.pushes and monotonic() >= push_at:
                        push_at = self.push() + BEAT_S - SLACK_S
        except (EOFError, OSError):  # the supervisor has ended
            _end(self._patience_s)

    def push(self, *, at_the_end: bool = False) -> float:
        """Send the supervisor a snapshot; at the end, of the applications that have stopped.

        Returns when the next one may follow, after `BEAT_S`: the pause is 100 times the cost,
        because the snapshot of very many replicas takes a while.
        """
        began = monotonic()
        try:
            self.report(local_engine().snapshot(of_stopped=at_the_end))
        except Exception:
            logging.getLogger("ingress").exception("no snapshot of this worker")
        return began + 100 * (monotonic() - began)

    def _answer(self, number: int, command: str, arguments: Mapping[str, Any]) -> None:
        if command == "retire":
            local_engine().leave()
            assert self._loop is not None  # it serves
            run_blocking(self._loop, self.retire(**arguments))
            self.report((number, None))
            return
        self.report((number, run_in_worker(command, arguments)))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        signal.signal(signal.SIGTERM, self.handle_exit)
        yield


Keeping = Callable[[Served, Collection[int | None]], Command]
"""It makes the command that applies changed code, of the served and the threads before them."""


class ReloadedServer(UvicornServer):
    """uvicorn's server in the process of `--reload`. It prints `line` once it serves."""

    def __init__(
        self, config: uvicorn.Config, line: str, control: AbstractContextManager[object]
    ) -> None:
        super().__init__(config, owns_socket=False)
        self._line = line
        self._control = control

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # At its end uvicorn sends itself the signal again, which ends the process.
        with super().capture_signals(), self._control:
            yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._line, flush=True)


def work_until_reloaded(
    config: uvicorn.Config,
    served: Served,
    line: str,
    keeping: Keeping | None,
    sockets: list[socket],
) -> None:
    """Serve until SIGTERM, or until the process that watches the files ends.

    uvicorn's supervisor of `--reload` runs this in a new process. `keeping` makes the command by
    which the supervisor has changes applied without another process.
    """
    make_lossy()
    threads = {each.ident for each in threading.enumerate()}
    threading.Thread(target=_outlive_no_parent, args=(config,), daemon=True).start()
    try:
        if served.file is not None:  # it may be the file that has changed
            served = served.with_file(ConfigFile.read(served.file.path, served.file.environ))
        config.app = served.load()
        served.configure(config)
    except (ConfigFileError, NotAnApplication) as error:
        sys.exit(f"Error: {error}")
    except Exception as error:
        raise SystemExit(format_mistake(error)) from error
    url = url_of(sockets[0], is_tls=config.is_ssl)
    observer = Observer(partial(parts_of, local_engine()), lambda: url)
    commands = _commands_of_the_reloaded(observer)
    if keeping is not None:
        commands["changed"] = keeping(served, threads)
    control = control_socket(commands, os.getppid())
    try:
        options = resolved(served.server.admin)
        with observer, closing(Admin(local_engine().snapshot, options, observer)) as admin:
            admin.listen()
            lines = "\n".join(filter(None, (line, admin.line)))
            ReloadedServer(config, lines, control).run(sockets)
    except RuntimeError as error:
        sys.exit(f"Error: {error}")


def _commands_of_the_reloaded(observer: Observer) -> dict[str, Command]:
    """Return the commands of the control socket, which has the command's process id: that stays."""

    def view(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {**observer.view(), "pid": os.getppid()}

    def reload(arguments: Mapping[str, Any]) -> None:
        raise CommandError(
            "this server runs with --reload: it restarts by itself when its file or code changes"
        )

    def stop(arguments: Mapping[str, Any]) -> None:
        os.kill(os.getppid(), signal.SIGTERM)

    return {**commands_of(observer, change, jobs), "reload": reload, "stop": stop, "view": view}


def _outlive_no_parent(config: uvicorn.Config) -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _end((config.timeout_graceful_shutdown or 0) + LAST_WORDS_S)


def _end(patience_s: float) -> None:
    """Make this process drain and exit, within the time for its requests."""
    given_up = monotonic() + patience_s
    while monotonic() < given_up:  # repeated: the signal handler may not be set yet
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(BEAT_S)
    os._exit(1)


class Cause(logging.Filter):
    """A filter that keeps uvicorn's errors of a failed start: the supervisor prints them once."""

    def __init__(self, server: uvicorn.Server) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._server = server

    def filter(self, record: logging.LogRecord) -> bool:
        if self._server.started or record.levelno < logging.ERROR:
            return True
        self.lines.append(logging.Formatter().format(record).rstrip())
        return False
