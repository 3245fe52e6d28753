"""The `LoggingConfig` of the process and those of its deployments, and what acts on them.

    LOGS       the configs. A deployment without one has its application's; an option that its
               config leaves out is the process's
    Printer    a handler: formats a record, and gives it to the sink of a standard stream
    select     a filter of `LOGGERS`: level, and file in `logs_dir`, of the record's deployment
    Foreign    a filter of uvicorn's loggers: the records of user code, and uvicorn's warnings

Under `ingress run`, `Printer`s print the records of these loggers, of uvicorn's, and of loggers
without handlers. Elsewhere the program's own handlers do, except for deployments with an
`encoding` or `additional_log_standard_attrs`: `select` prints their records itself.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from ingress.config import LoggingConfig
from ingress.core.base.settings import wants_colors
from ingress.telemetry.logs.formats import AccessText, JSONFormatter, TextFormatter
from ingress.telemetry.logs.identity import RequestFilter
from ingress.telemetry.logs.last_lines import LAST_LINES
from ingress.telemetry.logs.sinks import FILES, STDERR, STDOUT

ACCESS = "ingress.access"
RAY = "ray.serve"
LOGGERS = ("ingress", ACCESS, RAY)
"""The loggers that `LoggingConfig` is for. `ray.serve` is the name in code of Ray Serve's users."""


@dataclass(eq=False, slots=True)
class LogOptions:
    """The options of logging that count now. Thread-safe.

    config       of the process
    has_handlers the handlers of this package print the records, so that `encoding` counts for all
    is_logged    requests are logged, unless the option of their deployment says otherwise
    """

    config: LoggingConfig = field(default_factory=LoggingConfig)
    has_handlers: bool = False
    is_logged: bool = False
    # Replaced as a whole: any thread reads it while the control loop changes it.
    _by_deployment: Mapping[tuple[Any, Any], LoggingConfig] = field(default_factory=dict)
    _own_levels: dict[str, int] = field(default_factory=dict)  # before an option was given
    # For records of deployments without a level.
    _defaults: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set_application(self, name: str, configs: Mapping[str, LoggingConfig | None]) -> None:
        """Set the configs of an application's deployments; none if it does not run any more."""
        with self._lock:
            kept = {key: each for key, each in self._by_deployment.items() if key[0] != name}
            new = {(name, key): each for key, each in configs.items() if each is not None}
            self._by_deployment = {**kept, **new}
            self._set_levels()

    def set_process(self, config: LoggingConfig) -> None:
        with self._lock:
            self.config = config
            self._set_levels()

    def given(self, application: str, deployment: str, option: str) -> Any:
        """Return an option for records of a deployment, `None` if it was given nowhere."""
        for config in (self._by_deployment.get((application, deployment)), self.config):
            if config is not None and _has(config, option):
                return getattr(config, option)
        return None

    def of(self, record: logging.LogRecord, option: str) -> Any:
        """Return an option for a record, `None` if it was given nowhere."""
        fields = record.__dict__
        return self.given(fields.get("application", ""), fields.get("deployment", ""), option)

    def level_of(self, record: logging.LogRecord) -> int:
        """Return the least level for the deployment of a record."""
        fields = record.__dict__
        config = self._by_deployment.get((fields.get("application"), fields.get("deployment")))
        if config is not None and _has(config, "log_level"):
            return number_of(config.log_level)
        return self._defaults.get(record.name, 0) if record.name in self._own_levels else 0

    def logs_access(self, application: str, deployment: str) -> bool:
        """Return whether requests to a deployment are logged."""
        config = self._by_deployment.get((application, deployment))
        return config is None or config.enable_access_log

    @property
    def is_used(self) -> bool:
        """Return whether an option was given anywhere."""
        return bool(self._by_deployment or self.config.model_fields_set)

    def _set_levels(self) -> None:
        """Let the loggers pass the records of the deployment with the least level.

        The filter drops those of the others.
        """
        configs = list(self._by_deployment.values())
        given = [number_of(each.log_level) for each in configs if _has(each, "log_level")]
        for name in LOGGERS:
            logger = logging.getLogger(name)
            own = self._own_levels.pop(name, logger.level)
            logger.setLevel(own)
            is_given = _has(self.config, "log_level")
            if given or is_given:
                self._own_levels[name] = own
                default = number_of(self.config.log_level) if is_given else 0
                default = default or logger.getEffectiveLevel()
                self._defaults[name] = default
                logger.setLevel(min([default, *given]))


def _has(config: LoggingConfig, option: str) -> bool:
    return option in config.model_fields_set


def number_of(level: str | int) -> int:
    return level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]


LOGS = LogOptions()


_SINKS = {"stdout": STDOUT, "stderr": STDERR}
_ACCESS_SIZE = 400  # characters of a line that has yet to be formatted


@lru_cache(maxsize=64)
def _formatter(encoding: str, attributes: Sequence[str], *, colors: bool) -> logging.Formatter:
    if encoding == "JSON":
        return JSONFormatter(attributes)
    return TextFormatter(attributes, colors=colors)


def formatter_for(record: logging.LogRecord, *, colors: bool) -> logging.Formatter:
    """Return the formatter that the options of a record's deployment ask for."""
    attributes = LOGS.of(record, "additional_log_standard_attrs") or ()
    return _formatter(LOGS.of(record, "encoding") or "TEXT", tuple(attributes), colors=colors)


@lru_cache(maxsize=2)
def _is_terminal(stream: str) -> bool:
    return os.isatty(1 if stream == "stdout" else 2)


@lru_cache(maxsize=2)
def _has_colors(stream: str) -> bool:
    return _is_terminal(stream) and wants_colors()


class Printer(logging.Handler):
    """A handler that prints on `stream`, in a thread of the sink's own."""

    stream = "stderr"

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._sink = _SINKS[self.stream]
        self.addFilter(RequestFilter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sink.put(formatter_for(record, colors=_has_colors(self.stream)).format(record))
            LAST_LINES.add(record)
        except Exception:  # as each handler of `logging`
            self.handleError(record)

    def flush(self) -> None:
        self._sink.flush()


class AccessPrinter(Printer):
    """A handler of access lines, for people on a terminal, else one JSON object a line.

    A line is formatted by the sink's thread: an event loop only makes the record.
    """

    stream = "stdout"

    def emit(self, record: logging.LogRecord) -> None:
        self._sink.put(partial(_access_line, record, self.stream), _ACCESS_SIZE)


def _access_line(record: logging.LogRecord, stream: str) -> str:
    encoding = LOGS.of(record, "encoding")
    if encoding == "JSON" or (encoding is None and not _is_terminal(stream)):
        attributes = LOGS.of(record, "additional_log_standard_attrs") or ()
        return _formatter("JSON", tuple(attributes), colors=False).format(record)
    return _access_text(colors=_has_colors(stream)).format(record)


@lru_cache(maxsize=2)
def _access_text(*, colors: bool) -> logging.Formatter:
    return AccessText(colors=colors)


def select(record: logging.LogRecord) -> bool:
    """Act on the options of the record's deployment: a filter."""
    if not LOGS.is_used:
        return True
    _IDENTITY.filter(record)
    if record.levelno < LOGS.level_of(record):
        return False
    if folder := LOGS.of(record, "logs_dir"):
        _write(record, folder)
    formats = ("encoding", "additional_log_standard_attrs")
    if LOGS.has_handlers or all(LOGS.of(record, name) is None for name in formats):
        return True
    _OWN.handle(record)
    return False


class Foreign(logging.Filter):
    """A filter that leaves out uvicorn's own records below WARNING, unless a level was given.

    User code logs to uvicorn's loggers, too: they have a handler, which its own may not have.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING or "log_level" in LOGS.config.model_fields_set:
            return True
        return not record.pathname.startswith(_folders())


@lru_cache(maxsize=1)
def _folders() -> tuple[str, ...]:
    """Return the folders of uvicorn, and of the library that logs its WebSockets for it."""
    found = map(find_spec, ("uvicorn", "websockets"))
    return tuple(os.path.join(os.path.dirname(str(each.origin)), "") for each in found if each)


_IDENTITY = RequestFilter()
_OWN = Printer()


def _write(record: logging.LogRecord, folder: str) -> None:
    """Write a record into the file of its replica, or that of the process, in `logs_dir`."""
    is_access = record.name == ACCESS and LOGS.of(record, "encoding") != "JSON"
    formatter = _access_text(colors=False) if is_access else formatter_for(record, colors=False)
    text = formatter.format(record)
    FILES.put((os.path.join(folder, _file_name(record)), text), len(text))


def _file_name(record: logging.LogRecord) -> str:
    """Return a name as Ray Serve's, with the process, since other workers have the same ids."""
    fields: dict[str, Any] = record.__dict__
    if not fields.get("deployment"):
        return f"serve_{os.getpid()}.log"
    names = (fields[name] for name in ("application", "deployment", "replica"))
    return re.sub(r"[^\w.-]", "_", f"replica_{'_'.join(names)}_{os.getpid()}.log")


_SELECTED = (*LOGGERS, "uvicorn.error")
_PRINTED = (*LOGGERS, "uvicorn")
_before: dict[str, tuple[list[logging.Handler], bool]] = {}


def act_on_options() -> None:
    """Make the loggers act on `LOGS`, by a filter. Idempotent."""
    for name in _SELECTED:
        logging.getLogger(name).addFilter(select)


def use(config: LoggingConfig) -> None:
    """Act on the `logging_config` of `serve.start`, until `stop_using`.

    Under `ingress run`, which prints the records already, the options of its command line count.
    """
    if LOGS.has_handlers and not _before:
        given = {name: getattr(config, name) for name in config.model_fields_set}
        command_line = {name: getattr(LOGS.config, name) for name in LOGS.config.model_fields_set}
        LOGS.set_process(LoggingConfig(**{**given, **command_line}))
        LOGS.is_logged = LOGS.is_logged and config.enable_access_log
        return
    for name in _PRINTED:
        logger = logging.getLogger(name)
        _before.setdefault(name, (logger.handlers, logger.propagate))
        logger.handlers = [AccessPrinter() if name == ACCESS else Printer()]
        logger.propagate = False
    LOGS.has_handlers = True
    LOGS.is_logged = config.enable_access_log
    options = {name: getattr(config, name) for name in config.model_fields_set}
    LOGS.set_process(LoggingConfig(**{"log_level": "INFO", **options}))
    act_on_options()


def stop_using() -> None:
    """Restore the handlers that the loggers had before `use`."""
    if not _before:
        return
    for name, (handlers, propagate) in _before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
    _before.clear()
    LOGS.has_handlers = LOGS.is_logged = False
    LOGS.set_process(LoggingConfig())
