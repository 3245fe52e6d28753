"""The application of `test_process_errors`: its children import it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
from fastapi import FastAPI, HTTPException, WebSocket
from fastapi.responses import JSONResponse
from starlette.requests import Request

import ingress as serve


class Missing(Exception):
    def __init__(self, *, item: str) -> None:
        super().__init__(f"no {item}")
        self.item = item


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class NoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("its text", 2)


class Prefixed(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"prefix: {text}")


class New(Exception):
    def __new__(cls, code: int, *, reason: str) -> New:
        made = super().__new__(cls, code)
        made.reason = reason
        return made

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)

    reason: str


class Reduced(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced, (self.code,)


def _reduced(code: int) -> Reduced:
    return Reduced(code=code)


class BadReduce(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("it cannot be pickled")


class Slots(Exception):
    __slots__ = ("__secret", "code", "unset")
    code: int
    unset: int

    def __init__(self, *, code: int) -> None:
        self.code, self.__secret = code, "s"


@dataclass
class Fields(Exception):
    code: int
    reason: str = "why"


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Disk(OSError):
    def __init__(self, *, path: str) -> None:
        super().__init__(28, "no space", path)
        self.path = path


class Both(KeyError, OSError):
    def __init__(self, *, path: str) -> None:
        super().__init__(path)


class Errors(ExceptionGroup[Exception]):
    def __new__(cls, *members: Exception) -> Errors:
        return super().__new__(cls, "its members", members)

    def __init__(self, *members: Exception) -> None:
        self.count = len(members)

    count: int


class Textless(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        raise RuntimeError("it has no text")


class Model(pydantic.BaseModel):
    number: int


def _invalid() -> Exception:
    try:
        Model(number="x")  # type: ignore[arg-type]
    except pydantic.ValidationError as error:
        return error
    raise AssertionError


KINDS: dict[str, Callable[[], Exception]] = {
    "keywords": lambda: Missing(item="a"),
    "two arguments": lambda: TwoArguments(1, "why"),
    "no arguments": NoArguments,
    "changes its arguments": lambda: Prefixed("text"),
    "__new__": lambda: New(1, reason="why"),
    "__reduce__": lambda: Reduced(code=3),
    "__reduce__ that raises": lambda: BadReduce("text"),
    "slots": lambda: Slots(code=4),
    "dataclass": lambda: Fields(code=5),
    "frozen": lambda: Frozen(code=6),
    "OSError": lambda: Disk(path="/data"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "not there", "a", None, "b"),
    "two bases": lambda: Both(path="/data"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
    "KeyError": lambda: KeyError("name"),
    "ImportError": lambda: ImportError("no module", name="m", path="p"),
    "group": lambda: ExceptionGroup("group", [Missing(item="b"), ValueError(1)]),
    "group's subclass": lambda: Errors(Missing(item="c"), ExceptionGroup("in", [KeyError(1)])),
    "HTTPException": lambda: HTTPException(status_code=404, detail={"not": "here"}),
    "pydantic": _invalid,
    "no text": lambda: Textless(code=7),
}


def facts(error: BaseException) -> object:
    """Return the facts of an exception that its users see."""
    try:
        text = str(error)
    except RuntimeError as failed:
        text = repr(failed)
    kind = type(error)
    names = ("errno", "filename2", "object", "name", "path", "code", "_Slots__secret", "unset")
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    is_plain = not members and not isinstance(error, pydantic.ValidationError)  # it sets its own
    return (
        kind, text, error.args if is_plain else (),
        {name: each for name, each in vars(error).items() if name != "__notes__"},
        [getattr(error, name, "none") for name in names], [facts(each) for each in members],
    )  # fmt: skip


class Wrapped(Exception):
    def __init__(self, *, original: BaseException) -> None:
        super().__init__("wrapped")
        self.original = original
        self.lock = threading.Lock()
        self.own = self


def deep(number: int) -> None:
    if not number:
        raise Missing(item="at the bottom")
    deeper(number)


def deeper(number: int) -> None:
    deep(number - 1)


class Failing:
    """Methods that raise, return or yield an exception of a kind."""

    def __init__(self, other: str = "", fails: str = "") -> None:
        self.other = other
        self.fails = fails
        self.checks = 0
        if fails == "__init__":
            raise Missing(item="at the start")

    def reconfigure(self, user_config: object) -> None:
        if self.fails == "reconfigure":
            raise Missing(item="at the start")

    def check_health(self) -> None:
        self.checks += 1
        if self.fails == "check_health" and self.checks > 1:
            raise Missing(item="of health")

    async def call(self, name: str) -> None:
        raise KINDS[name]()

    async def stream(self, name: str) -> AsyncIterator[int]:
        yield 1
        raise KINDS[name]()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=5)
    async def batch(self, names: list[str]) -> list[int]:
        raise KINDS[names[0]]()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=5, per_item_errors=True)
    async def items(self, names: list[str]) -> list[Exception]:
        return [KINDS[name]() for name in names]

    async def value(self, name: str) -> Exception:
        return KINDS[name]()

    async def values(self, name: str) -> AsyncIterator[Exception]:
        yield KINDS[name]()

    async def local(self) -> None:
        class LocalError(Exception):
            pass

        raise LocalError("its text") from KeyError("cause")

    async def wrap(self) -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise Missing(item="second")  # noqa: B904
        except Missing as error:
            error.add_note("a note")
            raise Wrapped(original=error) from error

    async def suppress(self) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise Missing(item="second") from None

    async def chain(self, length: int) -> None:
        error: Exception = KeyError("the first")
        for number in range(length):
            following = ValueError(number)
            following.__cause__, error = error, following
        raise error

    async def hop(self, times: int, wraps: bool) -> None:
        """Fail after so many calls, each in the other process."""
        if not times:
            raise Missing(item="at the end")
        try:
            await serve.get_deployment_handle(self.other).hop.remote(times - 1, wraps)
        except Exception as error:
            if wraps:
                raise ValueError(times) from error
            raise

    async def deep(self) -> None:
        deep(200)


app = FastAPI()


@app.exception_handler(Missing)
async def on_missing(request: Request, error: Missing) -> JSONResponse:
    return JSONResponse({"missing": error.item}, 410)


@serve.deployment
@serve.ingress(app)
class Api:
    """The endpoints of a deployment in threads, which call one that fails."""

    def __init__(self, failing: Any, *others: Any) -> None:
        self.failing = failing

    @app.get("/call/{name}")
    async def call(self, name: str) -> None:
        await self.failing.call.remote(name)

    @app.get("/deep")
    async def deep(self) -> None:
        try:
            await self.failing.deep.remote()
        except Missing as error:
            raise LookupError("outer") from error

    @app.websocket("/deep")
    async def deep_socket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await self.deep()


def bound(isolation: Literal["thread", "process"]) -> Any:
    deployment = serve.deployment(Failing).options(isolation=isolation)
    first = deployment.options(name="First").bind("Second")
    return Api.bind(first, deployment.options(name="Second").bind("First"))
