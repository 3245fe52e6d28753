"""The user's class or function inside one replica.

    start: constructor -> ASGI app and its lifespan start-up -> reconfigure -> check_health
    a call: `call`, `stream` or `http`
    stop:  lifespan shutdown -> __del__, once

`execution` decides whether each of these runs on the loop or in a thread.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.bad_results import explain
from ingress.app.asgi.responses import send_stream, send_value
from ingress.app.asgi.spec import BoundApp
from ingress.app.declaration.names import PublicMethods
from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import ExecutionPlan, Kind, Role, is_generator
from ingress.exceptions import UnknownMethodError
from ingress.serving.replicas.collectors import share_collectors

MakePlan = Callable[[Callable[..., Any], Role], ExecutionPlan]


_NEEDS_MAIN_THREAD = re.compile("(signal|set_wakeup_fd|add_signal_handler).* main thread")
_SIGNALS = (
    "Constructors and lifespans run in their replica's thread, and Python takes signal handlers in "
    "the main thread only. Register the handler at the top of the module, or serve with `ingress "
    "run` without --workers, which passes signals on to replicas in threads. For the stop, "
    "SIGTERM and Ctrl-C run the part of the lifespan after `yield`, and `__del__`"
)

_GENERATORS = (Kind.GENERATOR, Kind.ASYNC_GENERATOR)


class UserCode:
    """The user's class or function inside one replica. Owned by the replica's user loop."""

    __slots__ = (
        "_app",
        "_context",
        "_func_or_class",
        "_health",
        "_instance",
        "_make_plan",
        "_plans",
        "_takes_request",
    )

    def __init__(
        self,
        func_or_class: Callable[..., Any],
        bound_app: BoundApp | None,
        context: ReplicaRuntime,
        make_plan: MakePlan,
    ) -> None:
        self._func_or_class = func_or_class
        self._context = context
        self._make_plan = make_plan
        self._app = None if bound_app is None else bound_app.for_replica(context, make_plan)
        self._instance: Any = None
        self._plans: dict[str, ExecutionPlan] = {}
        self._takes_request = True
        self._health: ExecutionPlan | None = None

    async def start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any = None
    ) -> None:
        """Make the instance ready to serve. Raises the errors of user code."""
        REPLICA.set(self._context)
        share_collectors()
        try:
            await self._construct(args, kwargs)
            self._context.servable_object = self._instance
            if self._app is not None:
                await self._app.attach(self._instance)
                await self._app.lifespan.startup()
        except ValueError as error:
            if not _NEEDS_MAIN_THREAD.search(str(error)):
                raise
            raise ValueError(f"{error}. {_SIGNALS}").with_traceback(error.__traceback__) from None
        if self._app is None and callable(self._instance):
            # Not the signature of the instance: Python drops a first parameter there, also of a
            # `staticmethod`.
            is_class = inspect.isclass(self._func_or_class)
            call = self._instance.__call__ if is_class else self._instance
            self._takes_request = bool(signature_of(call).parameters)
        if user_config is not None or self.takes_rank():
            await self.reconfigure(user_config)
        if hasattr(self._instance, "check_health"):
            self._health = self._make_plan(self._instance.check_health, Role.METHOD)
            await self._health.run()

    async def _construct(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        cls = self._func_or_class
        if not inspect.isclass(cls):
            self._instance = cls
            return
        init = self._make_plan(cls.__init__, Role.LIFECYCLE)
        made_by_type = type(cls).__call__ is type.__call__ and "__new__" not in _attributes(cls)
        if init.kind is Kind.COROUTINE or (made_by_type and hasattr(cls, "__del__")):
            # Kept before it is complete, as on Ray: `stop` runs its `__del__` also if the
            # constructor fails or is cancelled. The garbage collector awaits none, and runs none
            # while the error is kept, whose traceback has the instance.
            self._instance = cls.__new__(cls)
            await init.run(self._instance, *args, **kwargs)
        else:
            self._instance = await self._make_plan(cls, Role.LIFECYCLE).run(*args, **kwargs)

    def takes_rank(self) -> bool:
        """Return whether `reconfigure` has a parameter `rank`: then it is always called.

        Source: Ray 2.60.0, replica.py.
        """
        method = getattr(self._instance, "reconfigure", None)
        if method is None or not inspect.isclass(self._func_or_class):
            return False
        return "rank" in signature_of(method).parameters

    async def reconfigure(self, user_config: Any) -> None:
        REPLICA.set(self._context)
        rank = {"rank": self._context.public.rank} if self.takes_rank() else {}
        await self._make_plan(self._instance.reconfigure, Role.METHOD).run(user_config, **rank)

    async def check_health(self) -> None:
        """Raise what the user's `check_health` raises; without one, a running loop is healthy."""
        if self._health is not None:
            REPLICA.set(self._context)
            await self._health.run()

    async def autoscaling_stats(self) -> Any:
        """Return what the user's `record_autoscaling_stats` returns. Raises its errors."""
        REPLICA.set(self._context)
        return await self.call("record_autoscaling_stats", (), {})

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method and return its result. Raises `TypeError` for a generator."""
        plan = self._plans.get(method) or self._plan(method)
        if plan.kind in (Kind.COROUTINE, Kind.FUNCTION):
            result = await plan.run(*args, **kwargs)
            if not is_generator(result):
                return result
            await plan.iterate(result).aclose()
        raise TypeError(
            f"Method '{method}' returned a generator. You must use `handle.options(stream=True)` "
            "to call generators on a deployment."
        )

    def stream(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Call a method that returns a generator and yield its items."""
        return (self._plans.get(method) or self._plan(method)).stream(*args, **kwargs)

    def http(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one HTTP request or WebSocket."""
        if self._app is not None:
            return self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return send({"type": "websocket.close", "code": 1000, "reason": ""})
        return self._plain(scope, receive, send)

    async def _plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plans.get("__call__") or self._plan("__call__")
        args = (Request(scope, receive, send),) if self._takes_request else ()
        try:
            if plan.kind in _GENERATORS:
                await send_stream(plan.stream(*args), send)
                return
            result = await plan.run(*args)
            if is_generator(result):
                await send_stream(plan.iterate(result), send)
            else:
                await send_value(result, plan.pool, scope, receive, send)
        except Exception as error:
            explain(error, plan.func)
            raise

    async def stop(self) -> None:
        """Shut the ASGI app down, then run `__del__` once. Raises what they raise."""
        REPLICA.set(self._context)
        instance, self._instance = self._instance, None
        try:
            if self._app is not None:
                await self._app.shutdown()
        finally:
            delete = getattr(instance, "__del__", None)
            if delete is not None and inspect.isclass(self._func_or_class):
                plan = self._make_plan(delete, Role.LIFECYCLE)
                try:
                    await plan.run()
                finally:
                    spare_second_del(instance)

    def is_batched(self, method: str, func: Callable[..., Any]) -> bool:
        """Return whether a method that was called is this function under `@serve.batch`."""
        plan = self._plans.get(method)
        batcher = None if plan is None else getattr(plan.func, "__ingress_batcher__", None)
        return batcher is not None and batcher.handler.func is func

    def methods(self) -> list[str]:
        """Return the public names a handle may call."""
        return [*PublicMethods(self._instance)]

    def _plan(self, method: str) -> ExecutionPlan:
        """Make the plan of a method at its first call."""
        target: Any = self._func_or_class  # the only method of a function deployment
        if inspect.isclass(target):
            target = getattr(self._instance, method, None)
            if not callable(target):
                fix = ""
                if method == "__call__":
                    fix = " For HTTP, define `__call__`, or use @serve.ingress(app) and routes."
                raise UnknownMethodError(
                    f"Tried to call a method '{method}' that does not exist. "
                    f"Available methods: {self.methods()}.{fix}"
                )
        plan = self._plans[method] = self._make_plan(target, Role.METHOD)
        return plan


def _attributes(cls: type) -> set[str]:
    """Return the attributes that a class and its bases define, without those of `object`."""
    return {name for base in cls.__mro__ if base is not object for name in vars(base)}


def spare_second_del(instance: Any) -> None:
    """Keep the garbage collector from running a `__del__` that has run.

    The collector looks at the instance's class, so the instance gets one without it.
    """
    cls = type(instance)
    try:
        instance.__class__ = type(
            cls.__name__, (cls,), {"__slots__": (), "__del__": lambda self: None}
        )
    except TypeError:
        pass  # a class that cannot be subclassed or replaced: `__del__` runs once more
