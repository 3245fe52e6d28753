"""The application of `test_processes`: its children import it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import BackgroundTasks, FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine

app = FastAPI()
logger = logging.getLogger("tests.process_app")


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        os.write(2, f"{record.getMessage()}\n".encode())


logger.addHandler(_Stderr())  # as modules do: what a child logs must not be written twice


def pids(name: str, app_name: str = "default") -> list[int]:
    """Return the ids of the processes of a deployment's replicas that get calls."""
    router = local_engine().routers[DeploymentID(name, app_name)]
    return [each.host.pid for each in list(router.replicas)]  # type: ignore[attr-defined]


class OddError(Exception):
    """An error of the application's own."""


@serve.deployment(isolation="process", num_replicas=2)
@serve.ingress(app)
class Api:
    @app.get("/pid")
    async def pid(self) -> int:
        return os.getpid()

    @app.get("/thread/{name}")
    def thread(self, name: str, request: Request) -> dict[str, Any]:
        context = serve.get_request_context()
        return {
            "thread": threading.current_thread().name,
            "id": context.request_id,
            "route": context.route,
            "has_deadline": context.deadline is not None,
            "query": dict(request.query_params),
            "host": request.headers["host"],
        }

    @app.get("/exit")
    async def exit(self) -> None:
        os._exit(3)

    @app.get("/wait")
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @app.get("/odd")
    async def odd(self) -> None:
        raise OddError("odd")

    @app.post("/size")
    async def size(self, request: Request) -> int:
        return len(await request.body())

    @app.post("/echo")
    async def echo(self, request: Request) -> StreamingResponse:
        return StreamingResponse(part async for part in request.stream() if part)

    @app.websocket("/echo")
    async def echo_messages(self, websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(f"{text} from {os.getpid()}")

    @app.get("/sleep")
    async def sleep(self) -> None:
        await asyncio.sleep(0.2)

    @app.get("/stream")
    async def stream(self) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield bytes(4096)
                await asyncio.sleep(0)

        return StreamingResponse(parts())


api = Api.bind()
killed = Api.options(num_replicas=6).bind()


@serve.deployment(
    isolation="process",
    lanes={"db": 1},
    ray_actor_options={"runtime_env": {"env_vars": {"MODEL_FOLDER": "/m"}}},
)
class Model:
    def __init__(self, factor: int = 1) -> None:
        self.factor = factor
        self.events: list[str] = []
        self.barrier: threading.Barrier | None = None
        self.leave_lane = threading.Event()

    def reconfigure(self, user_config: dict[str, int]) -> None:
        self.factor = user_config["factor"]

    async def __call__(self, number: int) -> int:
        return number * self.factor

    async def pid(self) -> int:
        return os.getpid()

    @serve.method(execution="threadpool")
    def meet(self, number: int) -> int:
        """Return once as many calls are here, each in a thread."""
        self.barrier = self.barrier or threading.Barrier(number)
        return self.barrier.wait(20)

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    async def grow(self, size: int) -> None:
        """Have that much more memory."""
        self.ballast = bytes(range(256)) * (size // 256)

    async def variable_here(self, name: str) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get(name)

    async def seen(self) -> list[str]:
        return self.events

    async def stall(self) -> str:
        time.sleep(0.2)
        return serve.get_request_context().request_id

    @serve.method(lane="db")
    def in_lane(self) -> None:
        self.leave_lane.wait(60)

    async def end_lane(self) -> None:
        self.leave_lane.set()

    def program(self, path: str) -> None:
        """Write the descriptors of a program that gets all that it may inherit."""
        os.system(f"ls -l /proc/self/fd > {path}")

    async def request_id(self) -> str:
        return serve.get_request_context().request_id

    async def log(self, count: int) -> str:
        """Log from the loop and from a thread, in turn, and print on both streams."""
        for number in range(count):
            logger.warning("number %d", number, extra={"of": [count]})
            await asyncio.to_thread(logger.debug, "number %d in a thread", number)
        print("on stdout")
        print('{"already": "json"}')
        print("{no json}")
        print("on stderr", file=sys.stderr)
        try:
            raise OddError("x" * 5_000)
        except OddError:
            logger.exception("failed")
        return serve.get_request_context().request_id

    async def odd(self) -> None:
        raise OddError("odd")

    async def lock(self) -> dict[str, Any]:
        return {"model": [threading.Lock()]}

    async def wait(self) -> None:
        self.events.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise

    async def count(self, to: int) -> AsyncIterator[int]:
        try:
            for number in range(to):
                yield number
        finally:
            self.events.append("closed")

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=1)
    async def batched(self, numbers: list[int]) -> list[tuple[int, int]]:
        return [(number, len(numbers)) for number in numbers]

    @serve.multiplexed(max_num_models_per_replica=2)
    async def load(self, model_id: str) -> str:
        return f"model {model_id}"

    async def ask(self) -> str:
        model: str = await self.load(serve.get_multiplexed_model_id())
        return model


model = Model.bind(3)
narrow = Model.options(max_ongoing_requests=1, graceful_shutdown_timeout_s=0).bind()


@serve.deployment(isolation="process")
class Broken:
    def __init__(self, how: str) -> None:
        if how == "exit":
            logging.getLogger("mine").error("a record\nof two lines")
            print("the last words", file=sys.stderr, flush=True)
            os._exit(5)
        if how == "unfinished":
            os.write(2, b"the last line\nand no line break")
            os._exit(5)
        raise OddError(f"it is {how}")

    async def __call__(self) -> None:
        """Never called."""


@serve.deployment(isolation="process")
class Half:
    """A deployment whose constructor fails; its `__del__` leaves a file."""

    async def __init__(self, path: str) -> None:  # type: ignore[misc]
        self.path = Path(path)
        raise OddError("half")

    async def __del__(self) -> None:
        await asyncio.sleep(0)
        with self.path.open("a") as file:
            file.write("gone")

    async def __call__(self) -> None:
        """Never called."""


@serve.deployment(isolation="process")
class Ranked:
    async def reconfigure(self, user_config: Any, rank: Any) -> None:
        self.given = user_config, rank.rank

    async def __call__(self) -> tuple[Any, int, int]:
        return *self.given, serve.get_replica_context().rank.rank


ranked = Ranked.bind()


@serve.deployment(isolation="process")
class ShortLived:
    """A deployment whose process ends soon after its start, again and again."""

    def __init__(self) -> None:
        print("the last words", file=sys.stderr, flush=True)
        threading.Timer(0.1, os._exit, (9,)).start()

    async def __call__(self) -> None:
        """Do nothing."""


@serve.deployment(isolation="process", health_check_timeout_s=1, graceful_shutdown_timeout_s=1)
class Spinning:
    async def pid(self) -> int:
        return os.getpid()

    async def spin(self) -> None:
        while True:
            pass

    async def hold_gil(self) -> None:
        """Wait for ever in C code that does not release the GIL."""
        ctypes.PyDLL(None).pause()

    async def crash(self) -> None:
        ctypes.string_at(0)

    async def allocate(self) -> int:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, limits[1]))
        try:
            return len(bytearray(1 << 34))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


@serve.deployment(isolation="process")
class FailsLater:
    """A deployment whose constructor ends its process once a file exists; it notes each start."""

    def __init__(self, folder: str) -> None:
        with (Path(folder) / "starts").open("a") as file:
            file.write("x")
        if (Path(folder) / "fails").exists():
            print("the last words", flush=True)
            os._exit(5)

    async def pid(self) -> int:
        return os.getpid()


def fails_later(folder: str) -> Any:
    return FailsLater.bind(folder)


spinning = Spinning.bind()
short_lived = ShortLived.bind()


def half(path: str) -> Any:
    return Half.bind(path)


def broken(how: str) -> Any:
    return Broken.bind(how)


@serve.deployment(isolation="process")
class Caller:
    """A deployment that calls `Model` from its own process."""

    def __init__(self, callee: Any) -> None:
        self.callee = callee

    async def pids(self) -> tuple[int, int]:
        return os.getpid(), await self.callee.pid.remote()

    async def ids(self) -> tuple[str, str]:
        return serve.get_request_context().request_id, await self.callee.request_id.remote()

    async def total(self, to: int) -> int:
        return sum([each async for each in self.callee.options(stream=True).count.remote(to)])

    async def odd(self) -> None:
        await self.callee.odd.remote()

    async def wait(self) -> None:
        await self.callee.wait.remote()

    async def seen(self) -> list[str]:
        found: list[str] = await self.callee.seen.remote()
        return found

    async def found(self, name: str) -> tuple[int, int]:
        """Return answers of a deployment by handles that are looked up here."""
        one = serve.get_deployment_handle(name)
        other = serve.get_deployment_handle(name, "model")
        return await one.remote(1), await other.remote(2)

    async def called_by(self, handle: Any, *args: Any) -> Any:
        """Return the answer of a handle that came as an argument."""
        return await handle.remote(*args)

    async def own(self) -> Any:
        """Return a handle."""
        return self.callee

    async def of_app(self, name: str) -> Any:
        return await serve.get_app_handle(name).pids.remote()

    async def status(self) -> Any:
        return serve.status()


@serve.deployment(isolation="process", max_ongoing_requests=1)
class Ring:
    """A deployment that calls the other one of its kind, which calls the first."""

    def __init__(self, other: str) -> None:
        self.other = other

    async def pass_on(self, times: int) -> int:
        if times:
            result: int = await serve.get_deployment_handle(self.other).pass_on.remote(times - 1)
            return result
        return 0

    async def wait_later(self, times: int) -> int:
        response = serve.get_deployment_handle(self.other).wait_later.remote(times - 1)
        await asyncio.sleep(0.05)  # the call was sent, and nothing waits for it
        result: int = await response
        return result

    async def not_awaited(self, times: int) -> int:
        """Call the other one, which calls this one once this call has ended."""
        if times:
            serve.get_deployment_handle(self.other).not_awaited.remote(times - 1)
        return times

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0)
    async def batched(self, times: list[int]) -> list[int]:
        other = serve.get_deployment_handle(self.other)
        return [await other.batched.remote(each - 1) for each in times]


ring = Ring.options(name="First").bind("Second")
other_ring = Ring.options(name="Second").bind("First")


@serve.deployment
class Rings:
    def __init__(self, *rings: Any) -> None:
        self.rings = rings


rings = Rings.bind(ring, other_ring)


caller = Caller.bind(model)


@serve.deployment(isolation="process", num_replicas=3)
class Arrays:
    async def double(self, array: bytes) -> bytes:
        return array + array


@serve.deployment(isolation="process", num_replicas=3)
class ArrayCaller:
    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays

    async def double(self, array: bytes) -> bytes:
        found: bytes = await self.arrays.double.remote(array)
        return found


array_caller = ArrayCaller.bind(Arrays.bind())


downloading = FastAPI()


@serve.deployment(isolation="process")
@serve.ingress(downloading)
class Downloads:
    """Its responses note in a file that their background task has run."""

    @downloading.get("/stream")
    async def stream(self, note: Path) -> StreamingResponse:
        async def items() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1024
                await asyncio.sleep(0.001)

        return StreamingResponse(items(), background=BackgroundTask(note.touch))

    @downloading.get("/receive")
    async def receive(
        self, request: Request, tasks: BackgroundTasks, note: Path | None = None
    ) -> str:
        async def task() -> None:
            if await request.is_disconnected() and note is not None:
                note.touch()

        tasks.add_task(task)
        return "ok"


async def listens(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream until the client leaves; note then in a file that it is told and ends by itself."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"item", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass
    await asyncio.sleep(0.001)  # a cancellation would come here
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    Path(scope["query_string"].decode()).touch()


downloading.mount("/listens", listens)
downloads = Downloads.bind()
