"""The answers during one test, and the places where code ran.

    answers   of the proxy, to any client; and of handles, to calls from outside
    ran       each `def` that a replica calls for a request: its own thread tells its place

`Observer.installed` patches the request path while it is in use, and restores it afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from starlette.types import Message, Receive, Scope, Send

from ingress.calls.call import CURRENT_CALL, Call
from ingress.calls.loops import running_loop
from ingress.exceptions import RequestCancelledError
from ingress.execution import execution
from ingress.execution.execution import ExecutionMode, ExecutionPlan, Kind, Role
from ingress.handle import DeploymentHandle, DeploymentResponseGenerator
from ingress.http.messages import NORMAL
from ingress.http.proxy import HTTPProxy

_SHOWN = 100
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

    def as_dict(self) -> dict[str, Any]:
        """Return the observations as plain values, which a report carries to another process."""
        with self._lock:
            answers = {request: dict(each) for request, each in self.answers.items()}
            return {"answers": answers, "ran": {name: {**each} for name, each in self.ran.items()}}


class Observer:
    """The observer of requests and calls. The runner of the tests sets a new `seen` for each."""

    __slots__ = ("_streams", "seen")

    def __init__(self) -> None:
        self.seen = Seen()
        # For each stream of a call by handle: the observations, and its name in them.
        self._streams: WeakKeyDictionary[Any, tuple[Seen, str]] = WeakKeyDictionary()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe all calls meanwhile, of replicas that are created meanwhile."""
        wraps: list[tuple[Any, str, Any]] = [
            (execution, "plan", self._plan),
            (HTTPProxy, "__call__", self._respond),
            (DeploymentHandle, "remote", self._remote),
            (DeploymentResponseGenerator, "__next__", self._next),
            (DeploymentResponseGenerator, "__anext__", self._anext),
        ]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wraps]
        try:
            for (owner, name, wrap), (_, _, original) in zip(wraps, originals, strict=True):
                setattr(owner, name, wrap(original))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _plan(self, original: Callable[..., ExecutionPlan]) -> Any:
        def plan(func: Callable[..., Any], role: Role, **given: Any) -> ExecutionPlan:
            made = original(func, role, **given)
            if role in _ROLES and not made.kind.is_async:
                made.func = self._noted(made)
            return made

        return plan

    def _noted(self, plan: ExecutionPlan) -> Callable[..., Any]:
        func, name = plan.func, plan.name
        if plan.kind is Kind.GENERATOR:  # its body runs when it is iterated

            @functools.wraps(func)
            def iterate(*args: Any, **kwargs: Any) -> Any:
                with self.seen.running(name):
                    return (yield from func(*args, **kwargs))

            return iterate

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.seen.running(name):
                return func(*args, **kwargs)

        return call

    def _respond(self, original: Callable[..., Any]) -> Any:
        async def respond(proxy: Any, scope: Scope, receive: Receive, send: Send) -> None:
            seen, answer = self.seen, _Answer()

            async def noted_receive() -> Message:
                message = await receive()
                answer.is_over |= message["type"].endswith(".disconnect")
                return message

            async def noted_send(message: Message) -> None:
                answer.add(message)
                await send(message)

            try:
                await original(proxy, scope, noted_receive, noted_send)
            finally:
                seen.answered(_request(scope), str(answer))

        return respond

    def _remote(self, original: Callable[..., Any]) -> Any:
        def remote(handle: DeploymentHandle, *args: Any, **kwargs: Any) -> Any:
            response = original(handle, *args, **kwargs)
            if CURRENT_CALL.get(None) is None:  # not part of another answer
                method = handle._options.method_name
                observed = self.seen, f"{handle.deployment_name}.{method}()"
                response._call.when_settled(functools.partial(_settled, *observed))
                self._streams[response] = observed
            return response

        return remote

    def _next(self, original: Callable[..., Any]) -> Any:
        def next_item(response: Any) -> Any:
            return self._item(response, original(response))

        return next_item

    def _anext(self, original: Callable[..., Any]) -> Any:
        async def next_item(response: Any) -> Any:
            return self._item(response, await original(response))

        return next_item

    def _item(self, response: Any, item: Any) -> Any:
        observed = self._streams.get(response)
        if observed is not None:
            seen, request = observed
            seen.answered(f"{request} item", _text_of(item))
        return item


class _Answer:
    """The answer to a client. `is_over` once it has left: later messages do not reach it."""

    def __init__(self) -> None:
        self.is_over = False
        self._begins: list[str] = []
        self._body = bytearray()

    def add(self, message: Message) -> None:
        if self.is_over:
            return
        kind = message["type"].partition(".")[2]
        if kind in ("response.start", "http.response.start"):
            self._begins.append(str(message["status"]))
        elif kind in ("response.body", "http.response.body"):
            self._body += message.get("body", b"")
        elif kind == "close":
            code = message.get("code", NORMAL)
            # Race of the handler's end with the client's disconnect: either may be first.
            if code != NORMAL or not self._begins:
                self._begins.append(f"closed {code}")
        elif kind == "accept":
            self._begins.append("accepted")
        elif kind == "send":
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
    thread = threading.current_thread().name
    if thread == "AnyIO worker thread":
        return ExecutionMode.ANYIO.value
    worker = _WORKER.search(thread)
    if worker is None:
        return None
    lane = worker["lane"]
    if lane is None:
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


def _text_of(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the user's `__repr__`
        text = f"{type(value).__name__}, whose repr raised {type(error).__name__}"
    return shortened(_ADDRESS.sub("", text))
