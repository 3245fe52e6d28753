"""Every environment variable, read into one frozen object when an engine starts.

Nothing is read at import: `import ingress` cannot fail because of the environment, and an engine
that is started again sees the environment of that moment.

    RAY_SERVE_RUN_SYNC_IN_THREADPOOL             0   `def` methods: 0 on the loop, 1 in a thread
    RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD   1   one event loop thread per replica
    RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP        1   one event loop thread for waiting requests
    RAY_SERVE_DEFAULT_HTTP_HOST          127.0.0.1   where `serve.run` listens
    INGRESS_ENGINE                           local   which engine runs the application
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SYNC_IN_THREADPOOL = "RAY_SERVE_RUN_SYNC_IN_THREADPOOL"
USER_CODE_IN_SEPARATE_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
ROUTER_IN_SEPARATE_LOOP = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says, validated. Source: seed "Environment flags"."""

    run_sync_in_threadpool: bool = False
    run_user_code_in_separate_thread: bool = True
    run_router_in_separate_loop: bool = True
    http_host: str = "127.0.0.1"
    engine: str = "local"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables. Raises `ValueError` naming the variable and its value."""
        env = os.environ if environ is None else environ
        return cls(
            run_sync_in_threadpool=_flag(env, SYNC_IN_THREADPOOL, default=False),
            run_user_code_in_separate_thread=_flag(env, USER_CODE_IN_SEPARATE_THREAD, default=True),
            run_router_in_separate_loop=_flag(env, ROUTER_IN_SEPARATE_LOOP, default=True),
            http_host=env.get("RAY_SERVE_DEFAULT_HTTP_HOST") or "127.0.0.1",
            engine=env.get("INGRESS_ENGINE") or "local",
        )


def _flag(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = env.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}; set it to 0 or 1, or unset it")
    return value == "1"
