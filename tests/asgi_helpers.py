"""Replicas of a deployment without router and proxy, for tests of `asgi`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.app.asgi.replica_app import ReplicaApp
from ingress.app.asgi.spec import BoundApp, IngressSpec
from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.types import DeploymentID, ReplicaID
from ingress.core.calls.loops import BorrowedLoop
from ingress.core.execution.execution import ExecutionPlan, Role, plan
from ingress.core.execution.threads import WorkerPool

WORKER = "K#0-worker"
"""Prefix of the thread names of the first replica's worker threads."""


def bound(cls: type) -> BoundApp:
    """Build the deployment."""
    spec: IngressSpec = cls.__ingress_spec__  # type: ignore[attr-defined]
    return spec.bind(cls)


def under_server(app: ASGIApp) -> ASGIApp:
    """Return an app that passes requests on as from a server without lifespan, such as a parent."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)

    return called


class Replica:
    """One replica on the running loop. `asgi` is its ASGI app."""

    def __init__(self, cls: type, app: BoundApp, number: int = 0) -> None:
        self.context = ReplicaRuntime(ReplicaID(str(number), DeploymentID("K")))
        self._cls = cls
        self._bound = app
        self._pool: WorkerPool | None = None
        self._app: ReplicaApp | None = None

    def _plan(self, func: Callable[..., Any], role: Role) -> ExecutionPlan:
        assert self._pool is not None
        return plan(func, role, sync_in_threadpool=False, pool=self._pool)

    async def start(self) -> None:
        self._pool = WorkerPool(
            BorrowedLoop(str(self.context.replica_id), asyncio.get_running_loop()), limit=8
        )
        token = REPLICA.set(self.context)
        try:
            self._app = self._bound.for_replica(self.context, self._plan)
            instance = self.context.servable_object = self._cls()
            await self._app.attach(instance)
            await self._app.lifespan.startup()
        finally:
            REPLICA.reset(token)

    async def stop(self) -> None:
        if self._app is not None:
            await self._app.shutdown()
        if self._pool is not None:
            self._pool.shutdown()

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        token = REPLICA.set(self.context)
        try:
            await self._app(scope, receive, send)
        finally:
            REPLICA.reset(token)


class Deployment:
    """Replicas behind one ASGI app, which uses them in turn."""

    def __init__(self, cls: type, *, replicas: int = 1) -> None:
        app = bound(cls)
        self.replicas = [Replica(cls, app, number) for number in range(replicas)]
        self._served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            replica = self.replicas[self._served % len(self.replicas)]
            self._served += 1
            await replica.asgi(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as started:
            for replica in self.replicas:
                started.push_async_callback(replica.stop)
                await replica.start()
            yield

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def serve(cls: type, *, replicas: int = 1, **options: Any) -> TestClient:
    """Return a client of the class, a context manager. Requests alternate between replicas."""
    return TestClient(Deployment(cls, replicas=replicas), **options)


def json_of(cls: type, path: str, headers: dict[str, str] | None = None) -> Any:
    """Return the content of one answer of the class."""
    with serve(cls) as client:
        return client.get(path, headers=headers).json()


async def request(
    app: Callable[[Scope, Receive, Send], Any], path: str, **scope: Any
) -> tuple[list[dict[str, Any]], Exception | None]:
    """Send one request; return the ASGI messages of the answer and the error of the app."""
    messages: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]
    if scope.get("type") == "websocket":
        first = [{"type": "websocket.connect"}]

    async def receive() -> Any:
        return first.pop() if first else await asyncio.Future()

    async def send(message: Any) -> None:
        messages.append(message)

    path, _, query = path.partition("?")
    base = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "query_string": query.encode(),
        "headers": [],
        "server": ("test", 80),
    }
    try:
        await app(base | scope, receive, send)
    except Exception as error:
        return messages, error
    return messages, None
