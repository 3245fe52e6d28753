"""A result that cannot become a response: a sentence in the log, in the place of a traceback."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from pydantic import BaseModel

import ingress as serve
from tests.servers import bind, get, result, served, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.usefixtures("shutdown"),
]


class Model(BaseModel):
    part: Any


class Strict(BaseModel):
    part: int


@dataclass
class Record:
    part: Any


class Opaque:
    __slots__ = ()


class Failing:
    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        raise LookupError("no items")


app = FastAPI()


@serve.deployment
class Callee:
    async def __call__(self, value: int = 1) -> int:
        return value + 1

    async def items(self) -> AsyncIterator[int]:
        yield 1


@serve.deployment
@serve.ingress(app)
class Endpoints:
    def __init__(self, callee: Any) -> None:
        self.callee = callee

    @app.get("/response", response_model=None)
    async def response(self) -> Any:
        return self.callee.remote()  # HERE

    @app.get("/typed")
    async def typed(self) -> int:
        return self.callee.remote()  # type: ignore[no-any-return]  # HERE

    @app.get("/model", response_model=None)
    async def model(self) -> Model:
        return Model(part=self.callee.remote())  # HERE

    @app.get("/typed_model")
    async def typed_model(self) -> Model:
        answer = self.callee.remote()
        return Model(part=[answer])  # HERE

    @app.get("/record")
    async def record(self) -> Any:
        return {"records": [Record(self.callee.remote())]}  # HERE

    @app.get("/several", response_model=None)
    async def several(self, count: int = 2) -> Any:  # HERE
        if not count:
            return []
        first, second = self.callee.remote(), self.callee.remote()
        return [await first, second]

    @app.get("/stream")
    async def stream(self) -> Any:
        return self.callee.options(stream=True).items.remote()  # HERE

    @app.get("/future")
    async def future(self) -> Any:
        return asyncio.get_running_loop().create_future()  # HERE

    @app.get("/thread")
    def thread(self) -> Any:
        return (self.callee.remote(),)  # HERE

    @app.get("/items")
    async def items(self) -> AsyncIterator[Any]:
        yield self.callee.remote()  # HERE

    async def dependency(self) -> Any:
        return self.callee.remote()

    @app.get("/depends")
    async def depends(self, answer: Any = Depends(dependency)) -> Any:
        return {"answer": answer}  # HERE

    @app.get("/used")
    async def used(self, answer: Any = Depends(dependency)) -> Any:
        return answer + 1

    @app.get("/opaque", response_model=None)
    async def opaque(self) -> Any:
        return {"list": [1, Opaque()]}  # HERE

    @app.get("/opaque_model")
    async def opaque_model(self) -> Model:
        return Model(part=Opaque())  # HERE

    @app.get("/number", response_model=None)
    async def number(self) -> Any:
        return [float("nan")]  # HERE

    @app.get("/binary", response_model=None)
    async def binary(self) -> Any:
        return b"\xff"  # HERE

    @app.get("/awaited")
    def awaited(self) -> Any:
        return self.callee.remote()

    @app.get("/failing", response_model=None)
    async def failing(self) -> Any:
        return Failing()

    @app.get("/invalid")
    async def invalid(self) -> Strict:
        return {"part": "text"}  # type: ignore[return-value]

    async def loop(self) -> list[int]:
        return [each async for each in self.callee.items.remote()]

    def thread_loop(self) -> list[int]:
        return list(self.callee.items.remote())


@serve.deployment
class Plain:
    def __init__(self, callee: Any) -> None:
        self.callee = callee

    async def __call__(self, request: Any) -> Any:
        return [self.callee.remote()]  # HERE


@serve.deployment
class PlainItems:
    def __init__(self, callee: Any) -> None:
        self.callee = callee

    async def __call__(self, request: Any) -> AsyncIterator[Any]:
        yield {"n": self.callee.remote()}  # HERE


def line_in(func: Any) -> int:
    lines, first = inspect.getsourcelines(func)
    return next(first + n for n, line in enumerate(lines) if line.endswith("# HERE\n"))


def no_json(value: object) -> str:
    """Return what `json` says of a value that is no JSON, with its notes."""
    with pytest.raises(ValueError) as caught:
        json.dumps(value, allow_nan=False)
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def told(port: int, path: str, caplog: pytest.LogCaptureFixture) -> str:
    """Return the text of the record of a request that fails."""
    caplog.clear()
    answer = get(port, path)
    assert answer.status == 500 or not answer.is_complete
    assert b"Error" in answer.body or not answer.body
    records: list[logging.LogRecord] = []

    def is_logged() -> bool:
        records[:] = [each for each in caplog.records if each.name == "uvicorn.error"]
        return bool(records)

    wait_until(is_logged)
    (record,) = records
    assert record.levelno == logging.ERROR
    assert path in record.getMessage()
    return str(record.exc_text)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_forgotten_await_and_a_value_that_is_no_json_are_told_in_one_sentence(
    caplog: pytest.LogCaptureFixture, isolation: Any
) -> None:
    deployment: Any = Endpoints
    port = served(bind(deployment.options(isolation=isolation), bind(Callee)))
    cls = deployment.func_or_class

    def here(name: str) -> str:
        return f"Endpoints.{name} ({__file__}:{line_in(getattr(cls, name))})"

    returned = "returned a DeploymentResponse; write `await`"
    expected = {
        "response": returned,
        "typed": returned,
        "model": "returned a Model with a DeploymentResponse at .part; write `await`",
        "typed_model": "returned a Model with a DeploymentResponse at .part[0]; write `await`",
        "record": "returned a dict with a DeploymentResponse at ['records'][0].part; write `await`",
        "several": "returned a list with a DeploymentResponse at [1]; write `await`",
        "stream": "returned a DeploymentResponseGenerator; iterate it with `async for`",
        "future": "returned a Future; write `await`",
        "thread": "returned a tuple with a DeploymentResponse at [0]; "
        "write `async def` and `await`",
        "items": "yielded a DeploymentResponse; write `await`",
        "depends": "returned a dict with a DeploymentResponse at ['answer']; write `await`",
        "opaque": "returned a dict with an Opaque at ['list'][1], which cannot become JSON",
        "opaque_model": "returned a Model with an Opaque at .part, which cannot become JSON",
        "number": "returned a list with a float at [0], which cannot become JSON: ValueError: "
        f"{no_json([math.nan])}",
        "binary": "returned a bytes, which cannot become JSON: UnicodeDecodeError: 'utf-8' codec "
        "can't decode byte 0xff in position 0: invalid start byte",
    }
    found = {name: told(port, f"/{name}", caplog) for name in expected}
    assert found == {name: f"{here(name)} {text}" for name, text in expected.items()}


def test_an_error_with_a_users_line_or_the_endpoint_stays(caplog: pytest.LogCaptureFixture) -> None:
    port = served(bind(Endpoints, bind(Callee)))
    failing = told(port, "/failing", caplog)
    assert f'File "{__file__}"' in failing
    assert "LookupError: no items" in failing
    used = told(port, "/used", caplog)
    assert "return answer + 1" in used
    assert used.endswith("write `await` where the call is made.")
    invalid = told(port, "/invalid", caplog)
    assert "ResponseValidationError" in invalid
    assert "GET /invalid" in invalid
    assert get(port, "/awaited").body == b"2"


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Plain, "returned a list with a DeploymentResponse at [0]; write `await`"),
        (PlainItems, "yielded a dict with a DeploymentResponse at ['n']; write `await`"),
    ],
)
def test_a_plain_deployment_is_told_too(
    caplog: pytest.LogCaptureFixture, cls: Any, sentence: str
) -> None:
    port = served(bind(cls, bind(Callee)))
    call = cls.func_or_class.__call__
    where = f"{call.__qualname__} ({__file__}:{line_in(call)})"
    assert told(port, "/", caplog) == f"{where} {sentence}"


@pytest.mark.parametrize(("method", "loop"), [("loop", "async for"), ("thread_loop", "for")])
def test_a_loop_over_a_call_without_stream_is_told_to_pass_it(method: str, loop: str) -> None:
    handle = serve.run(bind(Endpoints, bind(Callee)), route_prefix=None)
    with pytest.raises(TypeError) as raised:
        result(handle.options(method_name=method).remote())
    assert str(raised.value) == (
        f"`{loop}` over a DeploymentResponse, which is the one answer to a call: await it, or "
        f"call a generator with stream=True: `{loop} item in "
        "handle.options(stream=True).items.remote(...)`"
    )
