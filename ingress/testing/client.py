"""`TestClient`, FastAPI's with the handles of the applications it serves, and `AsyncClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from anyio.from_thread import start_blocking_portal
from starlette import testclient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.app.declaration.declaration import Application, Deployment
from ingress.engines import local_engine
from ingress.engines.hosting import NO_SERVER
from ingress.handle import DeploymentHandle

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    httpx = testclient.httpx  # its HTTPX, of two


class TestClient(testclient.TestClient):
    """FastAPI's `TestClient` for a bound deployment, or for an app that mounts some.

        with TestClient(hello) as client:
            assert client.get("/sync").json() == "hi, you"
            assert client.handle.greet.remote("you").result() == "hi, you"

    It takes the same arguments as FastAPI's and behaves the same. The applications run inside the
    `with`, as under a server: a bound deployment and the applications of the app's lifespan from
    its beginning, a mounted one from its first request or handle on. At the end all of them are
    stopped, and no thread is left. Without `with`, `close()` stops them.

    If a WebSocket handler returns without an answer, connecting raises `RuntimeError`. A server
    answers 500 then, and Starlette's client waits forever.
    """

    __test__ = False

    def __init__(self, app: ASGIApp, *args: Any, **kwargs: Any) -> None:
        if isinstance(app, Deployment):
            raise TypeError(
                f"TestClient takes a bound deployment, got the deployment {app.name!r}; use "
                f"TestClient({app.name}.bind(...))"
            )
        super().__init__(_Handshakes(app), *args, **kwargs)
        self.app = app
        self._applications = list(dict.fromkeys(_applications(app, set())))

    @property
    def handle(self) -> DeploymentHandle:
        """A handle to the application, as `serve.run` returns it.

        Raises `ValueError` if there are several applications; then use `get_app_handle`.
        """
        return self.get_app_handle()

    def get_app_handle(self, application: Application | None = None) -> DeploymentHandle:
        """Return a handle to one application, by default the only one.

        Raises `RuntimeError` outside of `with`, `ValueError` for an application of another app.
        """
        return local_engine().app_handle(self._name_of(application))

    def get_deployment_handle(
        self, deployment_name: str, application: Application | None = None
    ) -> DeploymentHandle:
        """Return a handle to a deployment of an application, by default of the only application.

        Raises as `get_app_handle`, and `KeyError` if there is no such deployment.
        """
        return local_engine().deployment_handle(deployment_name, self._name_of(application))

    def close(self) -> None:
        super().close()
        self._stop_applications()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._stop_applications()

    def _name_of(self, application: Application | None) -> str:
        """Start the application unless it runs, and return its name."""
        known = self._applications
        if application is None and len(known) == 1:
            (application,) = known
        elif application is None or application not in known:
            what = "which one?" if application is None else f"not {application!r};"
            raise ValueError(
                f"{what} this client's app has the applications {known}; give one of them"
            )
        if self.portal is None:
            raise RuntimeError(
                "there is a handle while the application runs; use "
                "`with TestClient(app) as client:`"
            )
        name: str = self.portal.call(type(application)._host.start, application)
        return name

    def _stop_applications(self) -> None:
        for application in self._applications:
            if application._hosted is None:
                continue
            if self.portal is not None:
                self.portal.call(_stop, application)
            else:
                with start_blocking_portal() as portal:
                    portal.call(_stop, application)


class AsyncClient(httpx.AsyncClient):
    """HTTPX's `AsyncClient` for a bound deployment, or for an app that mounts some.

        async with AsyncClient(hello) as client:
            assert (await client.get("/sync")).json() == "hi, you"

    The app's lifespan runs inside the `async with`, and all user code of replicas in threads runs
    on the event loop of the test, as with `httpx.ASGITransport`. So `dependency_overrides` may give
    an endpoint objects of that loop, such as the test's database session. At the end all
    applications are stopped.

    An error of the app is raised in the test, unless `raise_app_exceptions` is false.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        base_url: str = "http://testserver",
        raise_app_exceptions: bool = True,
        **kwargs: Any,
    ) -> None:
        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(self._lifespan_state)}, receive, send)

        transport = httpx.ASGITransport(with_state, raise_app_exceptions=raise_app_exceptions)
        super().__init__(transport=transport, base_url=base_url, **kwargs)
        self._app = app
        self._lifespan_state: dict[str, object] = {}  # HTTPX has a `_state`
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        # One task for both ends: a task group of the lifespan must be closed where it was opened.
        self._lifespan = asyncio.create_task(self._run_lifespan())
        self._is_up = asyncio.get_running_loop().create_future()
        self._messages.put_nowait({"type": "lifespan.startup"})
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait([self._lifespan, self._is_up], return_when=first)
            if self._lifespan.done():
                self._lifespan.result()
        except BaseException:
            self._lifespan.cancel()
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._messages.put_nowait({"type": "lifespan.shutdown"})
        try:
            await self._lifespan
        finally:
            await self._stop(kind, error, trace)

    async def _run_lifespan(self) -> None:
        NO_SERVER.set(True)  # for `FastAPI(lifespan=application.lifespan)`, which gets no scope
        scope = {"type": "lifespan", "state": self._lifespan_state}
        await self._app(scope, self._messages.get, self._answer)

    async def _answer(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            self._is_up.set_result(None)

    async def _stop(self, *error: Any) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            for application in _applications(self._app, set()):
                await _stop(application)


async def _stop(application: Application) -> None:
    # Another client's lifespan may still use it.
    await type(application)._host.close(application, unless_in_lifespan=True)


@dataclass(eq=False, slots=True)
class _Handshakes:
    """An app that raises if a WebSocket handler returns without an answer."""

    _app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        is_answered = False

        async def answer(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        await self._app(scope, receive, answer)
        if not is_answered:
            raise RuntimeError(
                f"the WebSocket handler of {scope['path']!r} returned without an answer; call "
                "accept() or close() first. A server answers 500 then"
            )


def _applications(app: object, seen: set[int]) -> Iterator[Application]:
    """Yield the applications in an app: itself, mounted, in a router, or behind a middleware."""
    if id(app) in seen:
        return
    seen.add(id(app))
    if isinstance(app, Application):
        yield app
        return
    # A mount and a middleware have an `app`; an included router is its route's `original_router`.
    inside = [getattr(app, "app", None), getattr(app, "original_router", None)]
    for inner in (*inside, *(getattr(app, "routes", None) or ())):
        if inner is not None:
            yield from _applications(inner, seen)
