"""The client of a scenario: a handle and HTTP, and plain values for answers and errors."""

from __future__ import annotations

import asyncio
import builtins
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

import httpx

from tests.engines.api import COLUMN, serve
from tests.engines.probe import PATIENCE_S, wait_until

EXCEPTIONS = (
    "BackPressureError",
    "DeploymentUnavailableError",
    "ReplicaUnavailableError",
    "RequestCancelledError",
    "RayServeException",
)

HEALTH_OF_ALL = threading.Lock()
"""For scenarios that change, or read, the health of the server, which other scenarios share."""


class Client:
    """A client of one running application; it can deploy others. A context manager."""

    def __init__(self, name: str, base_url: str, handle: Any = None, suffix: str = "") -> None:
        self.name = name
        self.suffix = suffix
        self.handle = handle
        self.base_url = base_url
        # A connection for each request: uvicorn may close a connection after an error.
        self.http = httpx.Client(
            base_url=base_url,
            timeout=PATIENCE_S,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._pool = ThreadPoolExecutor(24)
        self._deployed: list[str] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._deployed:
            discard(name)
        self._pool.shutdown(wait=False)
        self.http.close()

    @property
    def prefix(self) -> str:
        """Route prefix of the application."""
        return f"/{self.name}"

    def deploy(self, app: Any, name: str, **options: Any) -> Any:
        """Deploy one more application, until the scenario ends; returns its handle."""
        name += self.suffix
        self._deployed.append(name)
        options.setdefault("route_prefix", None)
        handle = serve.run(app, name=name, **options)
        if prefix := options["route_prefix"]:
            wait_until(lambda: prefix in self.http.get("/-/routes").json(), prefix)
        return handle

    def forget(self, name: str) -> None:
        """Delete an application that `deploy` started, now."""
        self._deployed.remove(name + self.suffix)
        serve.delete(name + self.suffix)

    def get(self, path: str = "/", **headers: str) -> httpx.Response:
        """Send a GET request to the application."""
        return self.request("GET", path, headers=headers)

    def request(self, method: str, path: str = "/", **options: Any) -> httpx.Response:
        return self.http.request(method, self.prefix + path, **options)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method by handle and return its result."""
        return self.handle.options(method_name=method, **options).remote(*args).result()

    def start(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `work` in another thread."""
        return self._pool.submit(work, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)


def discard(name: str) -> None:
    """Delete an application that is no longer used; on Ray, do not wait for its end."""
    if os.environ[COLUMN] in ("local", "process"):
        serve.delete(name)
    else:
        import_module("ray.serve").delete(name, _blocking=False)


def answer(response: httpx.Response) -> dict[str, Any]:
    """Return status, media type and body."""
    return {
        "status": response.status_code,
        "type": response.headers.get("content-type"),
        "body": response.text,
    }


def raised(error: BaseException) -> str:
    """Return the name of the error's first class that a user can name in an `except`."""
    for cls in type(error).__mro__:
        if cls.__name__ in EXCEPTIONS or hasattr(builtins, cls.__name__):
            return cls.__name__
    raise error


def text(error: BaseException) -> str:
    """Return the error's message, without the traceback that Ray puts around it."""
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, BaseException) else error)


def outcome(work: Callable[[], Any], *, says: bool = False) -> Any:
    """Return the result of `work`, or the error it raised and its message."""
    try:
        return {"result": work()}
    except Exception as error:
        told = {"raised": raised(error)}
        return told | {"says": text(error)} if says else told


def refused(work: Callable[[], Any], *words: str) -> dict[str, Any]:
    """Return the error that `work` raised, and the `words` its message lacks."""
    try:
        work()
    except Exception as error:
        return {"raised": raised(error), "missing": [w for w in words if w not in text(error)]}
    return {"raised": None}
