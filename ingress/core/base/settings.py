"""All environment variables, read into one frozen object when an engine starts.

Nothing is read at import: `import ingress` cannot fail because of the environment, and a restarted
engine reads the environment again.

    RAY_SERVE_RUN_SYNC_IN_THREADPOOL             0   `def` methods: 0 on the loop, 1 in a thread
    RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD   1   one event loop thread per replica
    RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP        1   one event loop thread for waiting requests
    RAY_SERVE_THROUGHPUT_OPTIMIZED               0   1: the default of the two above is 0
    RAY_SERVE_REQUEST_PROCESSING_TIMEOUT_S       0   deadline of an HTTP request in seconds; 0: none
    RAY_SERVE_HTTP_REQUEST_MAX_RETRIES          10   retries of a request that has not started
    RAY_SERVE_DEFAULT_HTTP_HOST          127.0.0.1   where `serve.run` listens
    INGRESS_STALL_THRESHOLD_MS                 100   stall of an event loop that is reported; 0: off
    INGRESS_WEDGED_AFTER_S                           seconds that a loop may stand, or orphans hold
                                                     all slots; default: `health_check_timeout_s`
    INGRESS_NOT_READY_AFTER_S                        seconds that all slots may be held without an
                                                     end; then the deployment is not ready
    INGRESS_ADAPT_SWITCH_INTERVAL                1   shorter GIL switch interval while loops wait
    INGRESS_FREEZE_GC                            1   `gc.freeze` while applications run
    INGRESS_RAISE_FILE_LIMIT                     1   soft limit of open files to the hard limit
    INGRESS_HANDLE_SIGNALS                       1   handlers for stop signals, SIGUSR1 and SIGUSR2
    INGRESS_SET_NATIVE_THREADS                   1   `ingress run` sets OMP_NUM_THREADS and others
    INGRESS_ENGINE                           local   the engine that runs applications: local or ray
    RAY_ADDRESS                                      the Ray cluster; empty starts a local one
    RAY_SERVE_SESSION_ID_HEADER_KEY       x-session-id   header with the session id; empty: none
    INGRESS_PRIORITY_HEADER                          header with the priority; empty: none
    RAY_SERVE_LOG_ENCODING                    TEXT   format of log records: TEXT or JSON
    INGRESS_TRACE                                    file for the recording of requests (`timeline`)
    INGRESS_TRACING                              0   spans of calls and batches (`calls.tracing`)
    INGRESS_TRACE_URL                                link of the page to a trace: {trace_id}
    INGRESS_LIMIT_CONNECTIONS                    0   connections of a process at most; 0: no limit
    INGRESS_MAX_HEADER_BYTES                 65536   bytes of a request's headers at most
    INGRESS_HEADER_TIMEOUT_S                    15   seconds for the headers to arrive; 0: any time
    INGRESS_BODY_BUFFER_BYTES                65536   bytes of a body read before a slot is taken
    INGRESS_BODY_IDLE_TIMEOUT_S                 30   seconds without a byte of a body; 0: any time
    INGRESS_MIN_BODY_RATE                      240   bytes a second of a body at least; 0: any rate
    INGRESS_MAX_BODY_SIZE                        0   bytes of a body at most; 0: no limit
    INGRESS_EVENT_LOOP                        auto   event loops, as `ingress run --loop` takes them
    INGRESS_START_METHOD                     spawn   start of child processes: spawn or forkserver
    INGRESS_PIN_CPUS                             0   `num_cpus` cores for each child process
    INGRESS_RUNTIME_DIR                              folder of the control sockets
    INGRESS_ADMIN                              off   admin listener: HOST:PORT, a path, or off
    INGRESS_ADMIN_TOKEN                              token of its clients, `Authorization: Bearer`
    INGRESS_METRICS_ROUTES                           routes of an application that /metrics names

    OMP_NUM_THREADS and the others of `NATIVE_THREADS` are the number of threads of native
    libraries; `ingress run` sets those that are not set (`ingress.observe.inspection.budget`)
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SYNC_IN_THREADPOOL = "RAY_SERVE_RUN_SYNC_IN_THREADPOOL"
USER_CODE_IN_SEPARATE_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
ROUTER_IN_SEPARATE_LOOP = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
THROUGHPUT_OPTIMIZED = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
REQUEST_TIMEOUT_S = "RAY_SERVE_REQUEST_PROCESSING_TIMEOUT_S"
STALL_THRESHOLD_MS = "INGRESS_STALL_THRESHOLD_MS"
WEDGED_AFTER_S = "INGRESS_WEDGED_AFTER_S"
NOT_READY_AFTER_S = "INGRESS_NOT_READY_AFTER_S"
ADAPT_SWITCH_INTERVAL = "INGRESS_ADAPT_SWITCH_INTERVAL"
FREEZE_GC = "INGRESS_FREEZE_GC"
RAISE_FILE_LIMIT = "INGRESS_RAISE_FILE_LIMIT"
HANDLE_SIGNALS = "INGRESS_HANDLE_SIGNALS"
SET_NATIVE_THREADS = "INGRESS_SET_NATIVE_THREADS"
HTTP_HOST = "RAY_SERVE_DEFAULT_HTTP_HOST"
MAX_RETRIES = "RAY_SERVE_HTTP_REQUEST_MAX_RETRIES"
ENGINE = "INGRESS_ENGINE"
ENGINES = ("local", "ray")
RAY_ADDRESS = "RAY_ADDRESS"
SESSION_ID_HEADER_KEY = "RAY_SERVE_SESSION_ID_HEADER_KEY"
SESSION_HEADER = "x-session-id"
PRIORITY_HEADER = "INGRESS_PRIORITY_HEADER"
LOG_ENCODING = "RAY_SERVE_LOG_ENCODING"
TRACE_FILE = "INGRESS_TRACE"
TRACING = "INGRESS_TRACING"
TRACE_URL = "INGRESS_TRACE_URL"
LIMIT_CONNECTIONS = "INGRESS_LIMIT_CONNECTIONS"
MAX_HEADER_BYTES = "INGRESS_MAX_HEADER_BYTES"
HEADER_TIMEOUT_S = "INGRESS_HEADER_TIMEOUT_S"
BODY_BUFFER_BYTES = "INGRESS_BODY_BUFFER_BYTES"
BODY_IDLE_TIMEOUT_S = "INGRESS_BODY_IDLE_TIMEOUT_S"
MIN_BODY_RATE = "INGRESS_MIN_BODY_RATE"
MAX_BODY_SIZE = "INGRESS_MAX_BODY_SIZE"
EVENT_LOOP = "INGRESS_EVENT_LOOP"
START_METHOD = "INGRESS_START_METHOD"
PIN_CPUS = "INGRESS_PIN_CPUS"
PINNED_CPUS = "INGRESS_PINNED_CPUS"
RUNTIME_DIR = "INGRESS_RUNTIME_DIR"
_SYSTEMDS_FOLDER = "RUNTIME_DIRECTORY"
ADMIN = "INGRESS_ADMIN"
ADMIN_TOKEN = "INGRESS_ADMIN_TOKEN"
METRICS_ROUTES = "INGRESS_METRICS_ROUTES"
THREADS_SET = "INGRESS_NATIVE_THREADS_SET"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
NATIVE_THREADS = (
    OMP_NUM_THREADS,
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Without Rayon, Polars and TensorFlow, where all calls of a process share one pool."""
_KNOWN = frozenset(
    value
    for name, value in globals().items()
    if name.isupper() and isinstance(value, str) and value.startswith(("INGRESS_", "RAY_"))
)


_INSTEAD: Mapping[str, str] = {
    "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S": "give HTTPOptions(keep_alive_timeout_s=...)",
}
"""Variables of Ray Serve without effect, with what has one."""
_ALIKE = 0.9  # two letters of a name; below, names of other programs would be meant
_told: set[str] = set()
_REFERENCE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)  # of `os.path.expandvars`
_UNSET = re.compile(r"\$\{[A-Z0-9_]+\}")


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """The limits on the size and duration of what a client sends; `None` means no limit.

    The names are those of `HTTPOptions`, whose values take precedence over the environment.
    """

    limit_connections: int | None = None
    max_header_bytes: int = 65536
    header_timeout_s: float | None = 15.0
    body_buffer_bytes: int = 65536
    body_idle_timeout_s: float | None = 30.0
    min_body_rate: float | None = 240
    max_body_size: int | None = None

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> HTTPLimits:
        return cls(
            limit_connections=_count(env, LIMIT_CONNECTIONS, default=0) or None,
            max_header_bytes=_count(env, MAX_HEADER_BYTES, default=65536, at_least=1),
            header_timeout_s=_time(env, HEADER_TIMEOUT_S, "seconds", 15, off="for no limit"),
            body_buffer_bytes=_count(env, BODY_BUFFER_BYTES, default=65536, at_least=1),
            body_idle_timeout_s=_time(env, BODY_IDLE_TIMEOUT_S, "seconds", 30, off="for no limit"),
            min_body_rate=_count(env, MIN_BODY_RATE, default=240) or None,
            max_body_size=_count(env, MAX_BODY_SIZE, default=0) or None,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the environment, validated. Source: seed "Environment flags".

    `request_timeout_s` is `None` for no deadline, as is the guide's default; `stall_threshold_s` is
    `None` to disable the watchdog, `trace_file` to disable the recording. `native_threads` has the
    variables of `NATIVE_THREADS` that are set.
    """

    run_sync_in_threadpool: bool = False
    run_user_code_in_separate_thread: bool = True
    run_router_in_separate_loop: bool = True
    request_timeout_s: float | None = None
    max_retries: int = 10
    stall_threshold_s: float | None = 0.1
    wedged_after_s: float | None = None
    not_ready_after_s: float | None = None
    adapt_switch_interval: bool = True
    freeze_gc: bool = True
    raise_file_limit: bool = True
    set_native_threads: bool = True
    http_host: str = "127.0.0.1"
    engine: str = "local"
    start_method: str = "spawn"
    pin_cpus: bool = False
    ray_address: str | None = None
    trace_file: str | None = None
    tracing: bool = False
    trace_url: str = ""
    session_header: str = SESSION_HEADER
    priority_header: str = ""
    native_threads: Mapping[str, str] = field(default_factory=dict)
    http_limits: HTTPLimits = HTTPLimits()

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables. Raises `ValueError` with the variable and its value."""
        _warn_of_misspelt(env)
        threshold_ms = _time(
            env, STALL_THRESHOLD_MS, "milliseconds", 100, off="to disable the watchdog"
        )
        separate = not _flag(env, THROUGHPUT_OPTIMIZED, default=False)
        return cls(
            run_sync_in_threadpool=_flag(env, SYNC_IN_THREADPOOL, default=False),
            run_user_code_in_separate_thread=_flag(
                env, USER_CODE_IN_SEPARATE_THREAD, default=separate
            ),
            run_router_in_separate_loop=_flag(env, ROUTER_IN_SEPARATE_LOOP, default=separate),
            request_timeout_s=_time(env, REQUEST_TIMEOUT_S, "seconds", 0, off="for no deadline"),
            max_retries=_count(env, MAX_RETRIES, default=10),
            stall_threshold_s=None if threshold_ms is None else threshold_ms / 1e3,
            wedged_after_s=_time(
                env, WEDGED_AFTER_S, "seconds", 0, off="for health_check_timeout_s"
            ),
            not_ready_after_s=_time(env, NOT_READY_AFTER_S, "seconds", 0, off="for any time"),
            adapt_switch_interval=_flag(env, ADAPT_SWITCH_INTERVAL, default=True),
            freeze_gc=_flag(env, FREEZE_GC, default=True),
            raise_file_limit=_flag(env, RAISE_FILE_LIMIT, default=True),
            set_native_threads=_flag(env, SET_NATIVE_THREADS, default=True),
            http_host=env.get(HTTP_HOST) or "127.0.0.1",
            engine=engine_name(env),
            start_method=start_method(env),
            pin_cpus=pins_cpus(env),
            session_header=_header(env, SESSION_ID_HEADER_KEY, default=SESSION_HEADER),
            priority_header=_header(env, PRIORITY_HEADER, default=""),
            ray_address=env.get(RAY_ADDRESS) or None,
            trace_file=env.get(TRACE_FILE) or None,
            tracing=_flag(env, TRACING, default=False),
            trace_url=trace_url(env),
            native_threads={name: env[name] for name in NATIVE_THREADS if env.get(name)},
            http_limits=HTTPLimits.from_environment(env),
        )


def export(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set environment variables, for code that starts later; `None` unsets a variable.

    Returns the previous values, which `export` can restore.
    """
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def export_threads(variables: Mapping[str, str]) -> None:
    """Set variables of `NATIVE_THREADS`, and note in the environment that no user has set them.

    In the environment, because a command may start its process again.
    """
    if variables:
        export({**variables, THREADS_SET: ",".join(variables)})


def threads_set(env: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that `export_threads` has set."""
    return env.get(THREADS_SET, "").split(",")


def environment() -> dict[str, str]:
    """Return a copy of the environment."""
    return dict(os.environ)


def expanded(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return `env_vars` with the values of the variables that they name, as on Ray.

    `$NAME` and `${NAME}` are those of `environ`, or of a variable whose name sorts before. For an
    unset variable, an upper-case `${NAME}` is empty; other text stays. There is no escape.
    Source: Ray 2.60.0, `update_envs` in _private/utils.py, and `RuntimeEnv.serialize`, which sorts.
    """
    found: dict[str, str] = {}
    known = dict(environ)
    for name, value in sorted(variables.items()):
        text = _REFERENCE.sub(lambda each: known.get(each[1] or each[2], each[0]), value)
        found[name] = known[name] = _UNSET.sub("", text)
    return found


def admin_settings() -> tuple[str | None, str | None]:
    """Return the address and the token of the admin listener, `None` for those that are not set."""
    return os.environ.get(ADMIN) or None, os.environ.get(ADMIN_TOKEN) or None


def metrics_routes() -> int | None:
    """Return how many routes of an application `/metrics` names; `None` for all of them.

    Raises `ValueError` for a value that is no such number.
    """
    return _count(os.environ, METRICS_ROUTES, default=0, at_least=1) or None


def wants_colors() -> bool:
    """Return whether colors may be written to a terminal: https://no-color.org."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def notify_socket() -> str | None:
    """Return the address of systemd's socket, if systemd waits for this process to be ready."""
    return os.environ.get("NOTIFY_SOCKET") or None


def listen_fds() -> int:
    """Return the number of sockets that systemd has opened for this process, from `FIRST_FD` on.

    Source: sd_listen_fds(3).
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return 0
    number = os.environ.get("LISTEN_FDS", "")
    return int(number) if number.isdecimal() else 0


FIRST_FD = 3


def watchdog_s() -> float | None:
    """Return the seconds in which systemd wants a sign of life, `None` if it does not.

    Source: sd_watchdog_enabled(3).
    """
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() else None


def runtime_folder() -> Path:
    """Return the folder of the control sockets of this user's servers, which may not exist.

    INGRESS_RUNTIME_DIR, or the first of what systemd sets for `RuntimeDirectory=`, or a folder of
    the user's session, or one in the temporary folder. The session may be that of another user,
    such as that of the user who has called `sudo`.
    """
    if given := os.environ.get(RUNTIME_DIR):
        return Path(given)
    if systemds := os.environ.get(_SYSTEMDS_FOLDER):
        return Path(systemds.split(":")[0])
    user = os.geteuid()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        with suppress(OSError):
            if os.stat(session).st_uid == user:
                return Path(session) / "ingress"
    return Path(tempfile.gettempdir()) / f"ingress-{user}"


def is_runtime_folder_named() -> bool:
    """Return whether a variable names the runtime folder itself, and so an operator chose it."""
    return bool(os.environ.get(RUNTIME_DIR) or os.environ.get(_SYSTEMDS_FOLDER))


def _warn_of_misspelt(env: Mapping[str, str]) -> None:
    """Warn, once for each, of variables without effect whose name is almost that of another."""
    for name in env.keys() - _told:
        if name in _KNOWN or not name.startswith(("INGRESS_", "RAY_SERVE_", "RAY_ADDRES")):
            continue
        for meant in difflib.get_close_matches(name, _KNOWN, n=1, cutoff=_ALIKE):
            _told.add(name)
            text = f"the variable {name} has no effect; did you mean {meant}?"
            warnings.warn_explicit(text, UserWarning, "<environment>", 1)


def warn_of_unused(env: Mapping[str, str] = os.environ) -> None:
    """Warn, in one line and once, of variables of Ray Serve that have no effect in this process."""
    _warn_of_misspelt(env)
    unused = sorted(
        name for name in env.keys() - _told - _KNOWN if name.startswith("RAY_SERVE_") and env[name]
    )
    if unused:
        _told.update(unused)
        named = [f"{name} ({_INSTEAD[name]})" if name in _INSTEAD else name for name in unused]
        several = f"the variables {', '.join(named)} have"
        whose = several if len(named) > 1 else f"the variable {named[0]} has"
        text = f"{whose} no effect in this process; on Ray, Ray Serve's own variables have one"
        warnings.warn_explicit(text, UserWarning, "<environment>", 1)


def _flag(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = env.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}; set it to 0 or 1, or unset it")
    return value == "1"


def handles_signals() -> bool:
    """Return whether signals may be handled. Raises `ValueError` for a value that is no flag."""
    return _flag(os.environ, HANDLE_SIGNALS, default=True)


def makes_spans() -> bool:
    """Return whether `INGRESS_TRACING` is on. Raises `ValueError` for a value that is no flag."""
    return _flag(os.environ, TRACING, default=False)


def trace_url(env: Mapping[str, str] = os.environ) -> str:
    """Return the URL of one trace in the user interface of a tracing backend, "" for none.

    "{trace_id}" in it stands for the id. Raises `ValueError` for what is no such URL.
    """
    value = env.get(TRACE_URL) or ""
    if value and not (
        re.match(r"https?://[^/{}\s]+/", value) and re.findall(r"{.*?}", value) == ["{trace_id}"]
    ):
        raise ValueError(
            f"{TRACE_URL} must be the http(s) URL of a trace, with {{trace_id}} for its id, got "
            f"{value!r}; for Jaeger, set http://127.0.0.1:16686/trace/{{trace_id}}, or unset it"
        )
    return value


def log_encoding() -> str | None:
    """Return the format of log records that the environment names, `None` for none.

    Raises `ValueError` for an unknown one.
    """
    return _word(os.environ, LOG_ENCODING, ("TEXT", "JSON")) or None


def engine_name(env: Mapping[str, str] = os.environ) -> str:
    """Return the engine that the environment names. Raises `ValueError` for an unknown name."""
    return _word(env, ENGINE, ENGINES) or "local"


def event_loop(env: Mapping[str, str] = os.environ) -> str:
    """Return the kind of all event loops: auto, asyncio, uvloop, or MODULE:NAME."""
    return env.get(EVENT_LOOP) or "auto"


def start_method(env: Mapping[str, str] = os.environ) -> str:
    """Return how child processes start. Raises `ValueError` for what is not possible here."""
    value = _word(env, START_METHOD, ("spawn", "forkserver")) or "spawn"
    if value == "forkserver" and sys.platform != "linux":
        raise ValueError(
            f"{START_METHOD}=forkserver needs Linux, which ends children with their parent; unset "
            "it"
        )
    return value


def pins_cpus(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether child processes are pinned. Raises `ValueError` if that is not possible."""
    pins = _flag(env, PIN_CPUS, default=False)
    if pins and not hasattr(os, "sched_setaffinity"):
        raise ValueError(
            f"{PIN_CPUS}=1 needs a system on which a process can choose its cores, as on Linux, "
            f"got {sys.platform!r}; unset it"
        )
    return pins


def take_pinned_cpus() -> list[int]:
    """Return the cores that the server has chosen for this process, none for all.

    The variable is taken out of the environment: it is not for programs that user code starts.
    """
    return [int(each) for each in os.environ.pop(PINNED_CPUS, "").split(",") if each]


def _word(env: Mapping[str, str], name: str, words: Sequence[str]) -> str:
    """Return a variable that is one of these words, or empty."""
    value = env.get(name, "")
    if value and value not in words:
        raise ValueError(
            f"{name} must be {' or '.join(words)}, got {value!r}; set it to one of these, or unset "
            "it"
        )
    return value


def _time(
    env: Mapping[str, str], name: str, unit: str, default: float, *, off: str
) -> float | None:
    """Return a time in `unit`: `None` for 0, the default if the variable is unset or empty."""
    value = env.get(name) or str(default)
    try:
        time = float(value)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise ValueError(
            f"{name} must be a number of {unit} > 0, or 0 {off}, got {value!r}; correct it, or "
            "unset it"
        )
    return time or None


def _header(env: Mapping[str, str], name: str, *, default: str) -> str:
    value = env.get(name, default)
    if value and not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise ValueError(
            f"{name} must be the name of a header, such as x-session-id, got {value!r}; correct "
            "it, or unset it"
        )
    return value


def _count(env: Mapping[str, str], name: str, *, default: int, at_least: int = 0) -> int:
    value = env.get(name)
    if not value:
        return default
    if not (value.isascii() and value.isdecimal() and int(value) >= at_least):
        raise ValueError(
            f"{name} must be an integer ≥ {at_least}, got {value!r}; correct it, or unset it"
        )
    return int(value)
