"""The answers during one test, and the places where code ran.

    answers   of the proxy, to any client; and of handles, to calls from outside
    ran       each `def` that a replica calls for a request: its own thread tells its place

While `Observer.installed` is in use, the engine makes the parts of applications with its factories.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.loops import running_loop
from ingress.core.execution import execution
from ingress.core.execution.execution import ExecutionMode, ExecutionPlan, Kind, Role
from ingress.engines import local_engine
from ingress.exceptions import RequestCancelledError
from ingress.handle import DeploymentHandle, DeploymentResponseGenerator
from ingress.serving.control.factories import Factories
from ingress.serving.http.access import AccessLine
from ingress.serving.http.asgi_messages import NORMAL
from ingress.serving.http.proxy import HTTPProxy

_SHOWN = 100
T = TypeVar("T")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WORKER = re.compile(r"#[^#]*?(?:-(?P<lane>.+))?-worker-\d+$")
_ROLES = frozenset((Role.METHOD, Role.ENDPOINT, Role.BATCH))


@dataclass(slots=True)
class Seen:
    """The observations of one run of a test. Thread-safe."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    ran: dict[str, dict[str, int]] = field(default_factory=dict)
    _active: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, request: str, answer: str) -> None:
        with self._lock:
            self.answers.setdefault(request, Counter())[answer] += 1

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Record that a callable runs in this thread."""
        where = place()
        if where is None:  # the caller is not a request
            yield
            return
        with self._lock:
            self._active[name] += 1
            places = self.ran.setdefault(name, {})
            places[where] = max(places.get(where, 0), self._active[name])
        try:
            yield
        finally:
            with self._lock:
                self._active[name] -= 1

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the observations as plain values, which a report carries to another process."""
        with self._lock:
            answers = {request: dict(each) for request, each in self.answers.items()}
            return {"answers": answers, "ran": {name: {**each} for name, each in self.ran.items()}}


@dataclass(eq=False, slots=True)
class Observer:
    """The observer of requests and calls. The runner of the tests sets a new `seen` for each."""

    seen: Seen = field(default_factory=Seen)

    def installed(self) -> AbstractContextManager[None]:
        """Observe the applications that start meanwhile."""
        return local_engine().instrumented(self._instrument)

    def _instrument(self, factories: Factories) -> Factories:
        return replace(
            factories,
            proxy=partial(_ObservedProxy, self),
            handle=partial(_ObservedHandle, self),
            plan=partial(self._plan, factories.plan),
        )

    def _plan(
        self,
        make_plan: Callable[..., ExecutionPlan],
        func: Callable[..., object],
        role: Role,
        **given: Any,
    ) -> ExecutionPlan:
        made = make_plan(func, role, **given)
        if role not in _ROLES or made.kind.is_async:
            return made
        return replace(made, func=self._noted(made))

    def _noted(self, plan: ExecutionPlan) -> Callable[..., object]:
        func, name = plan.func, plan.name
        if plan.kind is Kind.GENERATOR:  # its body runs when it is iterated

            @wraps(func)
            def iterate(*args: object, **kwargs: object) -> Generator[object, object, object]:
                with self.seen.running(name):
                    return (yield from func(*args, **kwargs))

            return iterate

        @wraps(func)
        def call(*args: object, **kwargs: object) -> object:
            with self.seen.running(name):
                return func(*args, **kwargs)

        return call


class _ObservedProxy(HTTPProxy):
    """A proxy that records its answers."""

    __slots__ = ("_observer",)

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if type(send) is AccessLine:  # with the access log on, it calls this again
            await super().__call__(scope, receive, send)
            return
        seen, answer = self._observer.seen, _Answer()

        async def noted_receive() -> Message:
            message = await receive()
            answer.is_over |= message["type"].endswith(".disconnect")
            return message

        async def noted_send(message: Message) -> None:
            answer.add(message)
            await send(message)

        try:
            await super().__call__(scope, noted_receive, noted_send)
        finally:
            seen.answered(_request(scope), str(answer))


class _ObservedHandle(DeploymentHandle):
    """A handle that records the answers to calls from outside."""

    __slots__ = ("_observer",)

    def __init__(self, observer: Observer, *args: Any) -> None:
        super().__init__(*args)
        self._observer = observer

    def options(self, **given: Any) -> DeploymentHandle:
        made = super().options(**given)
        return _ObservedHandle(self._observer, self._id, self._directory, made._options)

    def remote(self, *args: object, **kwargs: object) -> Any:
        response = super().remote(*args, **kwargs)
        if CURRENT_CALL.get(None) is not None:  # part of another answer
            return response
        seen, request = self._observer.seen, f"{self.deployment_name}.{self._options.method_name}()"
        response._call.when_settled(partial(_settled, seen, request))
        if isinstance(response, DeploymentResponseGenerator):
            return _ObservedStream(response, seen, request)
        return response


class _ObservedStream(DeploymentResponseGenerator):
    """A stream that records the items its consumer takes. It shares the state of `_original`."""

    __slots__ = ("_original", "_request", "_seen")

    def __init__(self, original: DeploymentResponseGenerator, seen: Seen, request: str) -> None:
        self._original = original  # its `__del__` would cancel the call
        self._seen, self._request = seen, request
        self._call, self._turn = original._call, original._turn
        self._channel, self._directory = original._channel, original._directory

    def __next__(self) -> object:
        return self._noted(super().__next__())

    async def __anext__(self) -> object:
        return self._noted(await super().__anext__())

    def _noted(self, item: T) -> T:
        self._seen.answered(f"{self._request} item", _text_of(item))
        return item


@dataclass(eq=False, slots=True)
class _Answer:
    """The answer to a client. `is_over` once it has left: later messages do not reach it."""

    is_over: bool = False
    _begins: list[str] = field(default_factory=list)
    _body: bytearray = field(default_factory=bytearray)

    def add(self, message: Message) -> None:
        if self.is_over:
            return
        match message["type"].partition(".")[2]:
            case "response.start" | "http.response.start":
                self._begins.append(str(message["status"]))
            case "response.body" | "http.response.body":
                self._body += message.get("body", b"")
            case "close":
                # Race of the handler's end with the client's disconnect: either may be first.
                if (code := message.get("code", NORMAL)) != NORMAL or not self._begins:
                    self._begins.append(f"closed {code}")
            case "accept":
                self._begins.append("accepted")
            case "send":
                self._body += message.get("bytes") or str(message.get("text", "")).encode()
                self._body += b"\n"

    def __str__(self) -> str:
        begin = ", ".join(self._begins) or "no answer"
        return f"{begin} {shortened(repr(bytes(self._body).decode(errors='replace')))}"


def place() -> str | None:
    """Return the place of the current thread, in the words of `ingress explain`.

    `None` for any other thread.
    """
    if running_loop() is not None:
        return ExecutionMode.EVENT_LOOP.value
    if (thread := threading.current_thread().name) == "AnyIO worker thread":
        return ExecutionMode.ANYIO.value
    if (worker := _WORKER.search(thread)) is None:
        return None
    if (lane := worker["lane"]) is None:
        return ExecutionMode.THREADPOOL.value
    return ExecutionMode.SERIAL.value if lane == execution.SERIAL_LANE else f"lane {lane}"


def shortened(text: str) -> str:
    """Return a text, or its beginning with its length and a digest."""
    if len(text) <= _SHOWN:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return f"{text[: _SHOWN - 30]}... ({len(text)} characters, {digest[:8]})"


def _request(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    what = scope.get("method", "WebSocket")
    return f"{what} {scope['path']}{'?' + query if query else ''}"


def _settled(seen: Seen, request: str, call: Call) -> None:
    error = call.error
    if isinstance(error, RequestCancelledError):
        seen.answered(request, "cancelled")
    elif error is not None:
        seen.answered(request, f"raised {type(error).__name__}: {shortened(str(error))}")
    elif not call.metadata.is_streaming:
        seen.answered(request, _text_of(call.value))


def _text_of(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the user's `__repr__`
        text = f"{type(value).__name__}, whose repr raised {type(error).__name__}"
    return shortened(_ADDRESS.sub("", text))
