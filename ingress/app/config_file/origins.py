"""The effective values of a file, and where each comes from.

    command line    an option of `ingress run`
    file            the value in the file, or a variable of its `runtime_env.env_vars`
    code            `@serve.deployment(...)`, `.options(...)`, `serve.start(...)`
    environment     a variable, which is the default of an option or a flag
    default         none of these

The first one that has a value wins, as in Ray: a variable is a default, so code beats it. The
variables of the file replace those of the environment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ingress.app.config_file.loading import ConfigFile, Loaded
from ingress.app.config_file.reading import Where
from ingress.app.declaration.build import BuiltDeployment, build
from ingress.app.declaration.declaration import Application
from ingress.config import DeploymentConfig, HTTPOptions
from ingress.core.base import settings as flags
from ingress.core.base.options import plain
from ingress.core.base.settings import Settings

HTTP_VARIABLES = {
    "host": flags.HTTP_HOST,
    "request_timeout_s": flags.REQUEST_TIMEOUT_S,
    "limit_connections": flags.LIMIT_CONNECTIONS,
    "max_header_bytes": flags.MAX_HEADER_BYTES,
    "header_timeout_s": flags.HEADER_TIMEOUT_S,
    "body_buffer_bytes": flags.BODY_BUFFER_BYTES,
    "body_idle_timeout_s": flags.BODY_IDLE_TIMEOUT_S,
    "min_body_rate": flags.MIN_BODY_RATE,
    "max_body_size": flags.MAX_BODY_SIZE,
}
"""The variables that are defaults of `HTTPOptions`."""
SETTINGS = {
    flags.SYNC_IN_THREADPOOL: "run_sync_in_threadpool",
    flags.USER_CODE_IN_SEPARATE_THREAD: "run_user_code_in_separate_thread",
    flags.ROUTER_IN_SEPARATE_LOOP: "run_router_in_separate_loop",
    flags.MAX_RETRIES: "max_retries",
    flags.STALL_THRESHOLD_MS: "stall_threshold_s",
    flags.WEDGED_AFTER_S: "wedged_after_s",
    flags.NOT_READY_AFTER_S: "not_ready_after_s",
    flags.ADAPT_SWITCH_INTERVAL: "adapt_switch_interval",
    flags.FREEZE_GC: "freeze_gc",
    flags.RAISE_FILE_LIMIT: "raise_file_limit",
    flags.SET_NATIVE_THREADS: "set_native_threads",
    flags.SESSION_ID_HEADER_KEY: "session_header",
    flags.PRIORITY_HEADER: "priority_header",
    flags.ENGINE: "engine",
    flags.START_METHOD: "start_method",
    flags.PIN_CPUS: "pin_cpus",
    flags.TRACE_FILE: "trace_file",
    flags.TRACING: "tracing",
    flags.TRACE_URL: "trace_url",
}
"""The fields of `Settings`, by the variables that set them."""


class Origin(StrEnum):
    """The sources of a value, in rising order of precedence."""

    DEFAULT = "default"
    ENVIRONMENT = "environment"
    CODE = "code"
    FILE = "file"
    COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Effective:
    """One effective value. `detail` is the line and column, or the variable, of its origin."""

    where: Where
    value: object
    origin: Origin
    detail: str = ""


def effective(
    file: ConfigFile,
    loaded: Sequence[Loaded],
    *,
    from_code: HTTPOptions,
    command_line: Mapping[str, object],
    log_level: str | None = None,
) -> Iterator[Effective]:
    """Yield all effective values, in the order of a file.

    `from_code` has the options of `serve.start`, `command_line` keywords of `HTTPOptions`.
    """
    variables = file.environment()
    settings = Settings.from_environment({**file.environ, **variables})
    look = _Sources(file, variables)
    yield from look.http(settings, from_code, command_line)
    yield from look.logging(log_level)
    for number, each in enumerate(loaded):
        yield from look.application(number, each)
    yield from (look.variable(each, value_of(each, settings)) for each in SETTINGS)


def value_of(variable: str, settings: Settings) -> object:
    """Return the value in use of one of `SETTINGS`, as a variable would set it."""
    value = getattr(settings, SETTINGS[variable])
    if variable == flags.STALL_THRESHOLD_MS:
        return 0 if value is None else value * 1e3
    return int(value) if isinstance(value, bool) else value


def nested(values: Sequence[Effective]) -> dict[str, object]:
    """Return the values in the shape of a file, without the flags."""
    top: dict[str | int, Any] = {}
    for each in values:
        if each.where[0] == "environment":
            continue
        inside = top
        for step in each.where[:-1]:
            inside = inside.setdefault(step, {})
        inside[each.where[-1]] = each.value
    return _with_lists(top)  # type: ignore[no-any-return]


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(each) for key, each in value.items()}
    return list(parts.values()) if (parts and all(isinstance(key, int) for key in parts)) else parts


@dataclass(frozen=True, slots=True)
class _Sources:
    """The sources of values, beside the code."""

    file: ConfigFile
    variables: Mapping[str, str]

    def _chosen(
        self, where: Where, value: object, in_file: bool, in_code: bool, variable: str = ""
    ) -> Effective:
        value = plain(value)
        if in_file:
            return Effective(where, value, Origin.FILE, self.file.place_of(where))
        if in_code:
            return Effective(where, value, Origin.CODE)
        if variable and (found := self.variable(variable, value)).origin is not Origin.DEFAULT:
            return Effective(where, value, found.origin, found.detail)
        return Effective(where, value, Origin.DEFAULT)

    def variable(self, name: str, value: object) -> Effective:
        """Return the value of a flag, which a variable may set."""
        where: Where = ("environment", name)
        is_separate = name in (flags.USER_CODE_IN_SEPARATE_THREAD, flags.ROUTER_IN_SEPARATE_LOOP)
        for each in (name, flags.THROUGHPUT_OPTIMIZED) if is_separate and value == 0 else (name,):
            if each in self.variables:
                return Effective(where, value, Origin.FILE, f"env_vars {each}")
            if self.file.environ.get(each):
                return Effective(where, value, Origin.ENVIRONMENT, each)
        return Effective(where, value, Origin.DEFAULT)

    def http(
        self, settings: Settings, from_code: HTTPOptions, command_line: Mapping[str, object]
    ) -> Iterator[Effective]:
        in_file = self.file.config.http_options
        for name in HTTPOptions.model_fields:
            where: Where = ("http_options", name)
            if name == "location":
                continue
            if name in command_line:
                yield Effective(where, shown(name, command_line[name]), Origin.COMMAND_LINE)
                continue
            is_in_file = name in in_file.model_fields_set
            is_in_code = name in from_code.model_fields_set
            value = getattr(in_file if is_in_file else from_code, name)
            if not is_in_file and not is_in_code:
                value = http_default(name, settings, value)
            variable = HTTP_VARIABLES.get(name, "")
            yield self._chosen(where, shown(name, value), is_in_file, is_in_code, variable)

    def logging(self, level: str | None) -> Iterator[Effective]:
        given = self.file.config.logging
        for name in ("log_level", "enable_access_log"):
            where: Where = ("logging_config", name)
            if name == "log_level" and level is not None:
                yield Effective(where, level.upper(), Origin.COMMAND_LINE)
                continue
            yield self._chosen(where, getattr(given, name), name in given.model_fields_set, False)

    def application(self, number: int, loaded: Loaded) -> Iterator[Effective]:
        config = loaded.config
        around: Where = ("applications", number)
        for name in ("name", "route_prefix", "import_path", "args"):
            in_file = name in config.model_fields_set
            yield self._chosen((*around, name), getattr(config, name), in_file, False)
        env: Where = (*around, "runtime_env")
        for name, text in config.runtime_env.env_vars.items():
            value = self.variables.get(name, text)
            yield self._chosen((*env, "env_vars", name), value, True, False)
        if (folder := config.runtime_env.working_dir) is not None:
            yield self._chosen((*env, "working_dir"), folder, True, False)
        code = {each.name: each.deployment.config for each in _built(loaded.written)}
        given = {each.name: each.model_fields_set for each in config.deployments}
        now = {each.name: each for each in _built(loaded.application)}
        # Those of the file first: their indexes are those of the file.
        for index, name in enumerate(dict.fromkeys([*given, *now])):
            where = (*around, "deployments", index)
            yield from self._deployment(where, now[name], code[name], given.get(name, ()))

    def _deployment(
        self, where: Where, built: BuiltDeployment, code: DeploymentConfig, given: Collection[str]
    ) -> Iterator[Effective]:
        yield self._chosen((*where, "name"), built.name, "name" in given, True)
        config = built.deployment.config
        for name in DeploymentConfig.model_fields:
            value = getattr(config, name)
            # An option that excludes another takes it away: what is set is in the last config.
            in_code = name in code.model_fields_set & config.model_fields_set
            yield self._chosen((*where, name), value, name in given, in_code)


def _built(application: Application) -> Sequence[BuiltDeployment]:
    return build(application, "default", acts_on_all=True).deployments


def shown(name: str, value: object) -> object:
    """Return a value as others may see it: without passwords."""
    return "********" if name == "ssl_keyfile_password" and value is not None else plain(value)


def http_default(name: str, settings: Settings, otherwise: object) -> object:
    """Return an option's default in this environment."""
    if name in ("host", "request_timeout_s"):
        return settings.http_host if name == "host" else settings.request_timeout_s
    return getattr(settings.http_limits, name, otherwise)
