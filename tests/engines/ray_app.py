"""Deployments for the tests of the Ray engine, in a module that workers can import."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, WebSocket
from fastapi.responses import StreamingResponse

import ingress as serve


def where() -> str:
    """Return the kind of thread this is, and whether a loop runs in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        name = threading.current_thread().name
        return "lane" if "-db-" in name else "worker"
    return "loop"


class Boom(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.number = number


class Odd(Exception):
    """An error that pickle can dump but not load."""

    def __init__(self, number: int, *, text: str) -> None:
        super().__init__(f"{number} {text}")
        self.number = number


@serve.deployment(num_replicas=2, max_ongoing_requests=8, lanes={"db": 2})
class Child:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.from_constructor = lambda: "from the constructor"

    async def __call__(self, value: Any) -> Any:
        return value * self.factor

    async def on_loop(self) -> str:
        return where()

    def sync(self) -> str:
        return where()

    @serve.method(execution="threadpool")
    def in_thread(self) -> str:
        return where()

    @serve.method(lane="db")
    def in_lane(self) -> str:
        return where()

    async def fail(self) -> None:
        raise Boom(1, "one")

    async def fail_oddly(self) -> None:
        try:
            os.environ["NO_SUCH_VARIABLE"]
        except KeyError as error:
            raise Odd(2, text="two") from error

    async def leave(self) -> None:
        sys.exit(3)

    async def die(self) -> None:
        os._exit(1)

    async def items(self, count: int, ended: str = "") -> AsyncIterator[int]:
        try:
            for number in range(count):
                yield number
        finally:
            if ended:
                Path(ended).touch()

    def places(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield where()

    async def sleep(self, ended: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            Path(ended).touch()

    @serve.method(execution="threadpool")
    def work(self, told: str) -> None:
        end = time.monotonic() + 60
        while not serve.cancellation().requested and time.monotonic() < end:
            time.sleep(0.01)
        Path(told).touch()

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=5)
    async def together(self, values: list[int]) -> list[tuple[int, str]]:
        return [(len(values), where()) for _ in values]

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=5)
    def together_in_thread(self, values: list[int]) -> list[tuple[int, str]]:
        return [(len(values), where()) for _ in values]

    @serve.multiplexed(max_num_models_per_replica=1)
    async def load(self, model_id: str) -> tuple[str, int]:
        return model_id, os.getpid()

    async def model(self) -> tuple[str, int]:
        return await self.load(serve.get_multiplexed_model_id())

    async def context(self) -> dict[str, Any]:
        request, replica = serve.get_request_context(), serve.get_replica_context()
        return {
            "request_id": request.request_id,
            "route": request.route,
            "app_name": request.app_name,
            "deployment": request.deployment,
            "method_name": request.method_name,
            "is_http_request": request.is_http_request,
            "replica_is_of": (replica.app_name, replica.deployment),
        }

    async def flags(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("RAY_SERVE_RUN_", "INGRESS_"))
        }


api = FastAPI()
guarded = APIRouter()


def guard(token: str = Header(default="")) -> None:
    if token != "right":
        raise HTTPException(401, "who are you?")


@serve.deployment(user_config={"level": 1}, health_check_period_s=1)
@serve.ingress(api)
class Front:
    def __init__(self, child: serve.DeploymentHandle, name: str) -> None:
        self.child = child
        self.name = name
        self.level = 0
        self.checks = 0

    def reconfigure(self, user_config: dict[str, int]) -> None:
        self.level = user_config["level"]

    def check_health(self) -> None:
        assert self.level, "before reconfigure"
        self.checks += 1

    @api.get("/")
    async def root(self) -> list[Any]:
        return [self.name, self.level, self.checks > 0]

    @api.get("/sync")
    def sync(self) -> str:
        return where()

    @api.get("/async")
    async def on_loop(self) -> str:
        return where()

    @api.get("/items/{item}")
    async def item(self, item: int) -> list[dict[str, Any]]:
        request = serve.get_request_context()
        mine = {"item": item, "route": request.route, "request_id": request.request_id}
        return [mine, await self.child.context.remote()]

    @guarded.get("/secret")
    async def secret(self) -> str:
        return "secret"

    @api.get("/fail")
    async def fail(self) -> str:
        try:
            await self.child.fail.remote()
        except Boom as error:
            return f"Boom {error.number}"
        return "nothing"

    @api.get("/forwards")
    async def forwards(self, request: Request) -> str:
        try:
            return str(await self.child.remote(request))
        except TypeError as error:
            return str(error)

    @api.get("/child-dies")
    async def child_dies(self) -> None:
        await self.child.die.remote()

    @api.get("/error")
    async def error(self) -> None:
        raise ValueError("mine")

    @api.get("/sums")
    async def sums(self) -> Any:
        return await self.child.remote(self.child.remote(self.child.remote(1)))

    @api.get("/by-name")
    async def by_name(self) -> Any:
        return await serve.get_deployment_handle("Child").remote(5)

    @api.get("/lines")
    async def lines(self) -> StreamingResponse:
        items = self.child.options(stream=True).items.remote(3)
        return StreamingResponse(f"{item}\n" async for item in items)

    @api.get("/cut")
    async def cut(self) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            yield "one\n"
            await asyncio.sleep(0.2)
            raise ValueError("in the middle")

        return StreamingResponse(lines())

    @api.get("/wait")
    async def wait(self, mine: str, childs: str) -> None:
        try:
            await self.child.sleep.remote(childs)
        finally:
            Path(mine).touch()

    @api.post("/size")
    async def size(self, request: Request) -> int:
        return len(await request.body())

    @api.websocket("/shout")
    async def shout(self, websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text.upper())

    def plain(self) -> str:
        return where()

    async def _private(self) -> str:
        return "private"


api.include_router(guarded, prefix="/guarded", dependencies=[Depends(guard)])


@serve.deployment
class Fails:
    def __init__(self) -> None:
        raise ValueError("no model")


# Type checkers do not see the type that a class decorator returns.
child: Any = Child
front: Any = Front
fails: Any = Fails
app: serve.Application = front.bind(child.bind(2), "Ada")


@serve.deployment
async def plain_http(request: Request) -> Any:
    if "error" in request.query_params:
        raise HTTPException(418, "tea")
    if "stream" in request.query_params:
        return (f"{number}\n" for number in range(3))
    return {"path": request.url.path}
