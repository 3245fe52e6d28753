"""Replicas of one deployment in different threads, and deployments that share one app."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request

from ingress.app.asgi.spec import BoundApp, ingress
from ingress.context import get_replica_context
from tests.asgi_helpers import Replica, bound, request

pytestmark = pytest.mark.usefixtures("switch_interval")

REPLICAS = 4


def tag() -> str:
    return get_replica_context().replica_tag


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """Run `work` in several threads that start together."""
    barrier = threading.Barrier(REPLICAS)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(REPLICAS) as threads:
        return list(threads.map(begin, range(REPLICAS)))


def in_a_replica(cls: type, app: BoundApp, number: int, paths: list[str]) -> list[bytes]:
    """Start a replica on a loop of this thread and return the bodies it answers with."""

    async def main() -> list[bytes]:
        replica = Replica(cls, app, number)
        await replica.start()
        try:
            answers = await asyncio.gather(*(request(replica.asgi, path) for path in paths))
        finally:
            await replica.stop()
        return [messages[-1]["body"] for messages, _ in answers]

    return asyncio.run(main())


@pytest.mark.reliability("F05")
def test_each_replica_has_its_own_self_state_plans_and_dependencies() -> None:
    app, router = FastAPI(), APIRouter()

    @ingress(app)
    class K:
        def __init__(self) -> None:
            self.number = app.state.number = tag()

        def method(self) -> str:
            return self.number

        @router.get("/def")
        def sync(
            self,
            request: Request,
            method: Annotated[str, Depends(method)],
            free: Annotated[str, Depends(tag)],
        ) -> list[str]:
            return [self.number, tag(), method, free, app.state.number, request.app.state.number]

        @router.get("/async")
        async def on_loop(self, method: Annotated[str, Depends(method)]) -> list[str]:
            return [self.number, tag(), method, app.state.number] + [self.number] * 2

    app.include_router(router)
    deployment = bound(K)

    bodies = at_once(lambda n: in_a_replica(K, deployment, n, ["/def", "/async"] * 50))

    for number, answered in enumerate(bodies):
        assert set(answered) == {b'["%d"' % number + b',"%d"' % number * 5 + b"]"}


def test_replicas_that_first_serve_at_the_same_time_give_one_schema() -> None:
    app, router = FastAPI(), APIRouter()
    calls: list[int] = []

    @ingress(app)
    class K:
        @router.get("/{name}")
        def root(self, name: str) -> str:
            return name

    app.include_router(router, prefix="/v1")

    def custom() -> dict[str, Any]:
        calls.append(len(app.routes))
        return FastAPI.openapi(app)

    def answers(deployment: BoundApp) -> set[tuple[bytes, ...]]:
        paths = ["/openapi.json", "/v1/x"]
        return set(map(tuple, at_once(lambda n: in_a_replica(K, deployment, n, paths))))

    fastapis = answers(bound(K))
    app.openapi = custom  # type: ignore[method-assign]
    customs = answers(bound(K))

    assert len(fastapis) == 1
    assert customs == fastapis
    assert len(calls) == REPLICAS


def test_deployments_that_share_an_app_are_built_and_described_at_the_same_time() -> None:
    app = FastAPI()
    app.state.name = "shared"

    def declare(number: int) -> type:
        class K:
            def path(self) -> str:
                return str(app.state.name)

        K.__qualname__ = f"K{number}"
        K.path.__qualname__ = f"K{number}.path"
        app.get(f"/{number}")(K.path)
        return ingress(app)(K)

    classes = [declare(number) for number in range(REPLICAS)]
    routes = list(app.routes)

    def build(number: int) -> list[Any]:
        described: set[str] = set()
        for _ in range(10):
            deployment = bound(classes[number])
            described |= set(deployment.openapi()["paths"])
        return [*described, *in_a_replica(classes[number], deployment, 0, [f"/{number}"])]

    # The wait ends early only if another bind runs while `custom` sees another class's routes.
    inside: list[threading.Thread] = []
    bound_inside: list[BoundApp] = []

    def custom() -> dict[str, Any]:
        if not inside:
            bind = threading.Thread(target=lambda: bound_inside.append(bound(classes[1])))
            inside.append(bind)
            Context().run(bind.start)
            bind.join(0.2)
        return FastAPI.openapi(app)

    app.openapi = custom  # type: ignore[method-assign]
    bound(classes[0]).openapi()
    inside[0].join()
    assert [route.path for route in bound_inside[0].routes()] == ["/1"]
    assert at_once(build) == [[f"/{number}", b'"shared"'] for number in range(REPLICAS)]
    assert app.routes == routes
    assert app.state.name == "shared"
