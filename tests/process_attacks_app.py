"""User code that writes to the link of its own child: the children of `test_process_attacks` and of
`test_process_unreadable`.

The frames are built here by the description in `ingress/serving/processes/frames.py`, not by its
code.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import select
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from struct import Struct
from typing import Any

from fastapi import FastAPI

import ingress as serve
from ingress.core.base.counters import Latency
from ingress.core.calls.call import CURRENT_CALL
from ingress.exceptions import UserCodeExit
from ingress.serving.processes.messages import OF_CALLS, Frame

HEAD = Struct("<IQBB")
PLACE = Struct("<IQQ")
UP = 1 << 63
PLAIN, PARTS, SHARED, NEW = range(4)
LOST, DROP = 254, 255
COUNTS: tuple[Any, ...] = ({}, {}, 0, {}, {}, {})
NO_NEWS: tuple[Any, ...] = (COUNTS, {}, [], [])

app = FastAPI()


def frame(
    kind: int, call: int, content: bytes = b"", form: int = PLAIN, length: int | None = None
) -> bytes:
    length = len(content) if length is None else length
    return HEAD.pack(length, call, kind, form) + content


def file_of(size: int) -> int:
    """Return the descriptor of memory that its maker may still shorten."""
    descriptor = os.memfd_create("attack")
    os.ftruncate(descriptor, size)
    return descriptor


def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY)


Sent = tuple[bytes, list[int]]
Attack = Callable[[int], Sent]
"""Returns the bytes and the descriptors of an attack, by a call of this number."""

ATTACKS: dict[str, Attack] = {
    "noise": lambda n: (b"\xff" * 64, []),
    "text": lambda n: (b"as to standard output\n" * 3, []),
    "zeros": lambda n: (bytes(1000), []),
    "half-a-frame": lambda n: (frame(Frame.REPORT, 0, bytes(100))[:40], []),
    "half-a-head": lambda n: (bytes(3), []),
    "2-GB": lambda n: (frame(Frame.DONE, n, b"x", length=2 << 30), []),
    "a-kind-that-there-is-not": lambda n: (frame(99, n), []),
    "a-kind-of-the-server": lambda n: (frame(Frame.CALL, n), []),
    "a-kind-of-no-call": lambda n: (frame(Frame.ITEM, 0), []),
    "an-http-answer-for-a-call": lambda n: (frame(Frame.ANSWER, n), []),
    "a-form-that-there-is-not": lambda n: (frame(Frame.DONE, n, bytes(64), 7), []),
    "a-call-that-there-is-not": lambda n: (frame(Frame.DONE, n + 1000), []),
    "a-call-upward-that-there-is-not": lambda n: (frame(Frame.CREDIT, UP + 7, bytes(12)), []),
    "a-segment-that-there-is-not": lambda n: (
        frame(Frame.DONE, n, PLACE.pack(9, 4096, 100), SHARED), []
    ),
    "no-descriptor": lambda n: (frame(Frame.DONE, n, PLACE.pack(9, 4096, 100), NEW), []),
    "a-socket-for-a-segment": lambda n: (
        frame(Frame.DONE, n, PLACE.pack(9, 4096, 100), NEW), [socket.socket().detach()]
    ),
    "a-segment-shorter-than-it-says": lambda n: (
        frame(Frame.DONE, n, PLACE.pack(9, 1 << 20, 100), NEW), [file_of(4096)]
    ),
    "a-segment-that-can-be-shortened": lambda n: (
        frame(Frame.DONE, n, PLACE.pack(9, 4096, 100), NEW), [file_of(4096)]
    ),
    "a-content-longer-than-its-segment": lambda n: (
        frame(Frame.DONE, n, PLACE.pack(9, 4096, 1 << 40), NEW), [file_of(4096)]
    ),
    "an-empty-segment": lambda n: (frame(Frame.DONE, n, PLACE.pack(9, 0, 0), NEW), [file_of(0)]),
    "descriptors-for-nothing": lambda n: (
        frame(Frame.CREDIT, n, bytes(12)), [_null() for _ in range(10)]
    ),
    "more-parts-than-it-has": lambda n: (
        frame(Frame.DONE, n, Struct("<QQ").pack(1 << 60, 5), PARTS), []
    ),
    "no-parts": lambda n: (frame(Frame.DONE, n, bytes(64), PARTS), []),
    "a-segment-dropped-that-there-is-not": lambda n: (frame(DROP, 0, bytes(8)), []),
    "half-a-number": lambda n: (frame(DROP, 0, b"abc"), []),
    "half-a-place": lambda n: (frame(LOST, 0, b"abc"), []),
}  # fmt: skip

NEWS: dict[str, Attack] = {
    "models-of-no-type": lambda n: (frame(Frame.MODELS, 0, pickle.dumps(5)), []),
    "models-without-names": lambda n: (
        frame(Frame.MODELS, 0, pickle.dumps(frozenset((1, "m")))), []
    ),
    "no-counters": lambda n: (frame(Frame.REPORT, 0, pickle.dumps(("x",) * 4)), []),
    "no-batches": lambda n: (
        frame(Frame.REPORT, 0, pickle.dumps((({"m": 5}, *COUNTS[1:]), {}, [], []))), []
    ),
    "no-latency": lambda n: (frame(Frame.REPORT, 0, pickle.dumps((COUNTS, {"m": 5}, [], []))), []),
    "other-buckets": lambda n: (
        frame(Frame.REPORT, 0, pickle.dumps((COUNTS, {"m": Latency(buckets=[1])}, [], []))), []
    ),
    "no-metric": lambda n: (
        frame(Frame.REPORT, 0, pickle.dumps((COUNTS, {}, ["metric"], []))), []
    ),
    "no-pickle": lambda n: (frame(Frame.REPORT, 0, b"no pickle"), []),
}  # fmt: skip


def noise(seed: int) -> Attack:
    """Return an attack of up to 12 frames by chance, most of them almost right."""

    def made(number: int) -> Sent:
        chance = random.Random(seed)
        return b"".join(_by_chance(chance, number) for _ in range(chance.randrange(1, 13))), []

    return made


def _by_chance(chance: random.Random, number: int) -> bytes:
    odd = chance.choice([None, 5, "x", (200, [], b""), {"type": "http.response.body"}, NO_NEWS])
    content = chance.choice([
        chance.randbytes(chance.randrange(40)), b"", bytes(12), pickle.dumps(odd),
        PLACE.pack(chance.randrange(3), chance.choice([0, 4096, 1 << 62]), chance.randrange(9999)),
    ])  # fmt: skip
    kind = chance.choice([*OF_CALLS, *OF_CALLS, *Frame, LOST, DROP, chance.randrange(256)])
    call = chance.choice([number] * 12 + [0, 0, number - 1, number + 1, UP, UP + 1, UP + 2])
    form = chance.choice([PLAIN] * 12 + [PARTS, SHARED, NEW, chance.randrange(256)])
    sent = frame(kind, call, content, form)
    return sent[: chance.randrange(len(sent))] if chance.random() < 0.05 else sent


def link(server: int) -> socket.socket:
    """Return the socket of this child whose other end is the server's, as anyone may find it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        peer = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if found.type == socket.SOCK_STREAM and Struct("iII").unpack(peer)[0] == server:
            return found
        found.close()
    raise LookupError("there is no link")


class BadReprError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")

    __repr__ = __str__


class ElsewhereOdd(Exception):
    """An exception, or a value, that is odd where it arrives: only its process can read it."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how

    def __reduce__(self) -> Any:
        return _arrived, (os.getpid(), self.how)


def _arrived(pid: int, how: str) -> Any:
    if os.getpid() == pid:
        return ElsewhereOdd(how)
    match how:
        case "no exception":
            return {}
        case "raises":
            raise ValueError("it cannot be read")
        case "raises what has no text":
            raise BadReprError
        case "exits":
            raise SystemExit(3)
        case "interrupts":
            raise KeyboardInterrupt
        case "is cancelled":
            raise asyncio.CancelledError
        case "is an interrupt":
            return KeyboardInterrupt()
        case "is a cancellation":
            return asyncio.CancelledError()
        case "stops an iteration":
            return StopIteration(1)
        case "exits without cause":
            return UserCodeExit.__new__(UserCodeExit)
    raise LookupError(how)


class NoExceptionError(Exception):
    def __reduce__(self) -> Any:
        return dict, ()


class EmptyError(Exception):
    """An error that is false."""

    def __len__(self) -> int:
        return 0


class Unsendable:
    """A value whose pickling ends programs."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)


class _BadKey:
    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


class Methods:
    def __init__(self) -> None:
        self.leave = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> int:
        await self.leave.wait()
        return os.getpid()

    async def end_wait(self) -> None:
        self.leave.set()

    async def attack(self, server: int, name: str) -> None:
        """Write an attack to the link, and wait for its answer, which does not come."""
        attack = ATTACKS.get(name) or NEWS.get(name) or noise(int(name))
        content, descriptors = attack(CURRENT_CALL.get().number)  # type: ignore[attr-defined]
        with link(server) as socket_of_link:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
            socket_of_link.sendmsg([content], rights if descriptors else [])
        for each in descriptors:
            os.close(each)
        if name not in NEWS:
            await asyncio.Event().wait()

    async def shorten(self, argument: Any = None) -> list[str]:
        """Shorten all memory that is shared with the server, and return what came of it."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if "memfd:ingress" in os.readlink(f"/proc/self/fd/{name}"):
                    os.ftruncate(int(name), 0)
                    found.append("done")
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    found.append(os.strerror(error.errno or 0))
        return found

    async def same(self, value: Any) -> Any:
        return value

    async def raise_odd(self, how: str) -> None:
        raise ElsewhereOdd(how)

    async def raise_no_exception(self) -> None:
        raise NoExceptionError("its text")

    async def raise_empty(self) -> None:
        raise EmptyError("its text")

    async def unsendable(self) -> Any:
        return Unsendable()

    async def bad_key(self) -> Any:
        return {_BadKey(): Unsendable()}

    async def return_odd(self, how: str) -> Any:
        return ElsewhereOdd(how)

    async def stream_odd(self, how: str) -> AsyncIterator[Any]:
        yield 1
        yield ElsewhereOdd(how)

    async def stream_raise(self, how: str) -> AsyncIterator[Any]:
        yield 1
        raise EmptyError("its text") if how == "empty" else NoExceptionError("its text")


@serve.deployment(isolation="process")
class Target(Methods):
    """A deployment whose children attack."""


@serve.deployment(isolation="process")
@serve.ingress(app)
class Web(Methods):
    """The same behind HTTP."""

    @app.get("/take/{server}")
    async def take(self, server: int) -> None:
        """Take the length, number and kind of the next frame: the loop reads the rest as one."""
        with link(server) as found:
            select.select([found], [], [])
            found.recv(HEAD.size - 1)

    @app.get("/attack/{server}/{name}")
    async def attacked(self, server: int, name: str) -> None:
        await self.attack(server, name)

    @app.get("/pid")
    async def own_pid(self) -> int:
        return os.getpid()


web = Web.bind()


@serve.deployment(isolation="process")
class Caller(Methods):
    """A deployment that gets answers of another one, which it cannot read."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target

    async def ask(self, method: str, *arguments: Any) -> str:
        try:
            await getattr(self.target, method).remote(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@serve.deployment
class Targets:
    """The root of an application with many of these deployments."""

    def __init__(self, *targets: Any) -> None:
        self.targets = targets


def named(names: list[str]) -> Any:
    """Return an application with a `Target` for each name."""
    targets = [Target.options(name=each).bind() for each in names]
    return Targets.bind(*targets)
