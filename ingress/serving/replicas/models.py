"""The model caches of a replica: the models used last, and the models in use.

    get(id) -> not there -> waits for room -> loads -> ready -> evicted: `__del__`, gone
               there: the one that is ready, or the one that is being loaded

A cache belongs to one loading function of one object. All requests for one id wait for one load,
which runs as a call of its own. A model is in use, and is not evicted, while a request runs that
has asked for it. Never more than `max_num_models_per_replica` models are loaded, being loaded or
being unloaded at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Set
from contextvars import Context, copy_context
from itertools import islice
from time import monotonic
from typing import Any

from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.counters import LOAD, UNLOAD, Latency
from ingress.core.base.types import RequestMetadata
from ingress.core.calls.call import CURRENT_CALL, NO_WORK, Call, begin_wait, current_users, end_wait
from ingress.core.calls.deadlocks import NO_NODES, Node, check_deadlock
from ingress.core.calls.loops import mailbox_of, run_on
from ingress.core.calls.tracing import trace_load
from ingress.core.execution.execution import Role
from ingress.exceptions import ReplicaUnavailableError, RequestCycleError
from ingress.serving.replicas.user_code import MakePlan, spare_second_del
from ingress.telemetry.logs import logger

Loader = Callable[..., Any]


class Models:
    """All models of one replica. Owned by its user loop; any thread reads `ids` and the counts.

    `running` has the calls that the replica runs. `in_use` has the calls that got a model, and the
    calls in which a model is loaded, until they end. `gets` counts requests for a model, `times`
    has the times of its loads and unloads.
    """

    __slots__ = (
        "_caches", "_running", "_tasks", "gets", "ids", "in_use", "is_stopped", "loop",
        "make_plan", "replica", "times",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        replica: ReplicaRuntime,
        make_plan: MakePlan,
        running: Collection[Call],
    ) -> None:
        self.loop, self.replica, self.make_plan = loop, replica, make_plan
        self.ids: frozenset[str] = frozenset()
        self.gets = 0
        self.times: dict[str, Latency] = {}
        self.in_use: dict[Call, set[_Model]] = {}
        self.is_stopped, self._running = False, running
        self._caches: dict[tuple[Any, ...], _Cache] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        replica.models = self

    @property
    def is_busy(self) -> bool:
        """Return whether a model is being loaded or unloaded. Any thread may ask."""
        return bool(self._tasks)

    async def get(self, func: Loader, owner: list[Any], model_id: str, limit: int) -> Any:
        """Return a model, loaded if necessary. On any loop. Raises the error of the load."""
        return await run_on(self.loop, self._get, func, owner, model_id, limit)

    async def _get(self, func: Loader, owner: list[Any], model_id: str, limit: int) -> Any:
        self.gets += 1
        # The cache holds the owner, so that no other object ever has its `id`.
        key = (func, *map(id, owner))
        cache = self._caches.get(key)
        if cache is None:
            cache = self._caches[key] = _Cache(self, func, owner, limit)
        return await cache.get(model_id)

    def use(self, model: _Model, calls: Collection[Call]) -> None:
        """Keep a model while these calls run."""
        for call in calls:
            # A call that has ended would never release the model.
            is_batch = call.members is not None and not call.settled
            if is_batch or call in self._running or call in self.in_use:
                model.users.add(call)
                self.in_use.setdefault(call, set()).add(model)

    def end(self, call: Call) -> None:
        """Release the models of a call that has ended."""
        for model in self.in_use.pop(call, ()):
            model.users.discard(call)
            model.cache.make_room()

    def note_time(self, kind: str, since: float) -> None:
        """Count a load or unload of a model that began at `since`."""
        self.times.setdefault(kind, Latency()).add((monotonic() - since) * 1e3)

    def publish(self) -> None:
        """Show the router the ids of the current models."""
        self.ids = frozenset(each for cache in self._caches.values() for each in cache.staying())

    def start(
        self, work: Coroutine[Any, Any, None], context: Context | None = None
    ) -> asyncio.Task[None]:
        """Run `work` in a task of this replica, by default outside of any request."""
        if context is None:
            context = Context()
            context.run(REPLICA.set, self.replica)
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancel all loads and unload all models, side by side; load no more."""
        self.is_stopped = True
        for cache in self._caches.values():
            cache.empty()
        try:
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:  # the time to stop is over
                task.cancel()
            self._caches.clear()


class _Model(Node):
    """One model of a cache, from the first request for it until it is gone. Owned by the user loop.

    has_ended  is set when the load has ended, with `value`, the model, or with `error`
    waits_for  the call in which it is loaded, while that runs
    behind     number of requests for other models that wait behind this load
    waiting    the calls of each request that waits for the model: one call, those of a batch and
               the batch itself, or none
    users      the calls that got the model and still run
    stuck      if the load was failed to break a deadlock: the nodes of the deadlock
    """

    __slots__ = (
        "behind", "cache", "error", "gone", "has_ended", "has_room", "id", "is_leaving",
        "lets_pass", "passed", "room", "stuck", "task", "users", "value", "waiting",
    )  # fmt: skip

    def __init__(self, cache: _Cache, model_id: str) -> None:
        self.is_awaited, self.waits_for = False, NO_NODES
        self.cache, self.id = cache, model_id
        self.value: Any = None
        self.error: Exception | None = None
        self.has_room = self.is_leaving = self.lets_pass = False
        self.behind = 0
        self.task: asyncio.Task[None]  # of the load
        self.waiting: list[tuple[Call, ...]] = []
        self.users: set[Call] = set()
        self.stuck: Set[Node] = NO_NODES
        self.has_ended, self.room = asyncio.Event(), asyncio.Event()
        self.passed, self.gone = asyncio.Event(), asyncio.Event()

    @property
    def deployment_name(self) -> str:
        return self.cache.deployment_name

    @property
    def is_ready(self) -> bool:
        return self.has_ended.is_set() and self.error is None and not self.is_leaving

    def holders(self) -> frozenset[Node] | None:
        return self.cache.holders(self)

    def break_deadlock(self, chain: str, stuck: Set[Node]) -> None:
        self.cache.break_deadlock(self, chain, stuck)

    def requesters(self) -> set[Call]:
        return {call for calls in self.waiting for call in calls}

    def go(self) -> None:
        """End the wait for room, and let the requests behind go on."""
        self.room.set()
        self.passed.set()

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        """End the load with the model or an error. No effect if it has ended."""
        if not self.has_ended.is_set():
            self.value, self.error, self.waits_for = value, error, NO_NODES
            self.has_ended.set()

    def fail(self, error: Exception) -> None:
        """End the load, which waits for room, with an error."""
        self.end(error=error)
        self.go()

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises the error of the load."""
        await self._wait_for(self.has_ended)
        if self.error is not None:
            raise self.error

    async def stand_behind(self) -> None:
        """Wait until the load has room."""
        self.behind += 1
        try:
            await self._wait_for(self.passed)
        finally:
            self.behind -= 1

    async def _wait_for(self, event: asyncio.Event) -> None:
        waiter = begin_wait(self)
        try:
            await event.wait()
        finally:
            end_wait(self, waiter)

    def leave(self) -> None:
        """Give the model to no more requests; a request for it waits until it is gone."""
        self.is_leaving = True
        self.gone.clear()


class _Cache:
    """The models that one function loaded for one object. Owned by the user loop.

    It is also the queue in which its models wait for room.
    """

    __slots__ = ("_limit", "_models", "_owner", "_plan", "_replica", "_taken", "_waiting")

    def __init__(self, replica: Models, func: Loader, owner: list[Any], limit: int) -> None:
        self._replica, self._owner = replica, owner
        self._plan = replica.make_plan(func, Role.METHOD)
        self._limit = limit  # -1 for none
        self._models: OrderedDict[str, _Model] = OrderedDict()  # last used, last
        self._taken = 0  # models with room: loaded, being loaded or being unloaded
        # The loads that wait for room, in order, each with the calls whose end would make room.
        # Race with `break_deadlock`, in another thread: the thread that pops a load decides about
        # it.
        self._waiting: dict[_Model, frozenset[Node]] = {}

    @property
    def deployment_name(self) -> str:
        return self._replica.replica.deployment

    async def get(self, model_id: str) -> Any:
        """Return the model for the current calls; wait for it or load it if necessary."""
        calls = current_users()
        while True:
            model = self._models.get(model_id) or self._begin(model_id)
            if model.is_leaving:
                await model.gone.wait()  # one load or unload of a model at a time
            elif self._waiting and (load := self._ahead(model, calls)) is not None:
                await load.stand_behind()
            elif model.is_ready:
                if not self._waiting:
                    self._models.move_to_end(model_id)
                self._replica.use(model, calls)
                return model.value
            else:
                try:
                    await self._wait_for(model, calls)
                except RequestCycleError:
                    if not model.stuck or not model.stuck.isdisjoint(calls):
                        raise
                    await model.gone.wait()  # others were in the deadlock: load the model anew

    async def _wait_for(self, model: _Model, calls: tuple[Call, ...]) -> None:
        """Wait until a model is loaded. Raises the error of the load."""
        model.waiting.append(calls)
        self.make_room()  # now that these calls wait, a model that only they use may make room
        try:
            # Not returned: for a task of no running request the model may have been evicted by now.
            await model.loaded()
        finally:
            model.waiting.remove(calls)
            # No request wants the model any more.
            if not model.waiting and not model.has_ended.is_set():
                self._cancel(model)

    def _ahead(self, model: _Model, calls: Collection[Call]) -> _Model | None:
        """Return the load that `calls` must wait behind if they ask for this model now, or `None`.

        While n loads wait, the n least recently used models are given to no new calls: otherwise a
        model that always has requests would never make room. A call that has a model, or loads one,
        gets any that is there: two calls that wait for each other's models are a deadlock.
        """
        if any(call in self._replica.in_use for call in calls):
            return None
        waiting = list(self._waiting)
        loads = [each for each in waiting if not (each.lets_pass or each.passed.is_set())]
        ready = (each for each in self._models.values() if each.is_ready)
        return loads[0] if model in islice(ready, len(loads)) else None

    def staying(self) -> list[str]:
        return [model.id for model in self._models.values() if not model.is_leaving]

    def empty(self) -> None:
        """Begin to unload all models, and cancel all loads."""
        for model in list(self._models.values()):
            if model.is_ready:
                model.leave()
                self._replica.start(self._evict(model))
            elif not model.is_leaving:
                self._cancel(model)
        self._replica.publish()

    # Loading.

    def _begin(self, model_id: str) -> _Model:
        if self._replica.is_stopped:
            raise ReplicaUnavailableError(
                f"{self._plan.name} was called after its replica had stopped."
            )
        call = CURRENT_CALL.get(None)
        metadata = RequestMetadata(
            "" if call is None else call.metadata.request_id,
            self._replica.replica.replica_id.deployment_id,
            method_name=self._plan.name,
            route="" if call is None else call.current_route(),
            multiplexed_model_id=model_id,
            app_name="" if call is None else call.app_name,
        )
        # A call of its own: a request's call may be cancelled while others wait for the model.
        context = copy_context()
        load = Call(metadata, NO_WORK, context)
        context.run(CURRENT_CALL.set, load)
        model = self._models[model_id] = _Model(self, model_id)
        model.waits_for = frozenset((load,))
        self._replica.in_use[load] = set()
        model.task = self._replica.start(self._load(model), context)
        # Not in the task: a task that is cancelled soon enough ends without having begun.
        model.task.add_done_callback(lambda _: self._on_load_ended(model, load))
        self._replica.publish()
        return model

    async def _load(self, model: _Model) -> None:
        try:
            await self._wait_for_room(model)
            if model.has_ended.is_set():
                return
            begin = monotonic()
            with trace_load(model.id):
                value = await self._plan.run(*self._owner, model.id)
            self._replica.note_time(LOAD, begin)
        except Exception as error:
            logger.exception("Failed to load model %.200r with %s", model.id, self._plan.name)
            model.end(error=error)
        else:
            # Before one of them goes on: the model must not be evicted in between.
            self._replica.use(model, model.requesters())
            model.end(value)
            if model.is_leaving:  # the load ignored its cancellation
                model.is_leaving = False
                model.gone.set()
                self._replica.publish()

    def _on_load_ended(self, model: _Model, load: Call) -> None:
        load.settle()
        load.release_references()
        self._replica.end(load)
        model.go()
        # If it was cancelled: the replica stops, or no request wanted the model.
        model.end(error=ReplicaUnavailableError(f"The load of model {model.id!r} was stopped."))
        if model.error is not None:
            self._forget(model)
        else:
            self.make_room()  # its requests may have ended, while other loads wait

    def _cancel(self, model: _Model) -> None:
        model.leave()
        model.task.cancel()
        self._replica.publish()

    def _forget(self, model: _Model) -> None:
        """Remove a model that was not loaded or is unloaded, and pass on its room."""
        del self._models[model.id]
        model.gone.set()
        self._replica.publish()
        if model.has_room:
            self._taken -= 1
            self.make_room()

    # Room.

    async def _wait_for_room(self, model: _Model) -> None:
        """Wait until the model may be loaded, or the load has ended because it never can be."""
        self._waiting[model] = frozenset()
        self.make_room()
        try:
            await model.room.wait()
        finally:
            self._waiting.pop(model, None)

    def make_room(self) -> None:
        """Give the room that there is to the loads that wait, in order."""
        for load in list(self._waiting):
            if self._limit < 0 or self._taken < self._limit:
                if self._waiting.pop(load, None) is not None:
                    self._taken += 1
                    load.has_room = True
                    load.go()
            elif (victim := self._victim(load)) is not None:
                if self._waiting.pop(load, None) is not None:
                    victim.leave()
                    self._replica.publish()
                    self._replica.start(self._evict(victim, load))
            else:
                self._waiting[load] = self._holders(load)
                check_deadlock(load)

    def _victim(self, load: _Model) -> _Model | None:
        """Return the least recently used model that no call uses.

        If there is none, a model that is used only by requests that wait for this very load: a
        request that asks for more models than there is room for gives up one of its own.
        """
        ready = [model for model in self._models.values() if model.is_ready]
        idle = (model for model in ready if not model.users)
        requesters = load.requesters()
        return next(idle, None) or next((m for m in ready if m.users <= requesters), None)

    def _holders(self, load: _Model) -> frozenset[Node]:
        """Return the calls and models of which one must end before there can be room."""
        holders: set[Node] = set()
        for model in self._models.values():
            if model.is_ready:
                holders |= model.users
            elif model.has_room:
                holders.add(model)  # it is being loaded or unloaded, and will have ended
        return frozenset(holders - load.requesters())

    async def _evict(self, model: _Model, load: _Model | None = None) -> None:
        """Unload a model, and give its room to a load if that still waits for it."""
        await self._unload(model)
        if load is not None and not load.is_leaving and not load.has_ended.is_set():
            model.has_room, load.has_room = False, True
            load.go()
        self._forget(model)

    async def _unload(self, model: _Model) -> None:
        """Run a model's `__del__`, once."""
        value, model.value = model.value, None
        begin = monotonic()
        try:
            if hasattr(type(value), "__del__"):
                await self._run_del(model, value)
        finally:
            self._replica.note_time(UNLOAD, begin)

    async def _run_del(self, model: _Model, value: Any) -> None:
        try:
            await self._replica.make_plan(value.__del__, Role.UNLOAD).run()
        except Exception:
            logger.exception("Failed to unload model %.200r of %s", model.id, self._plan.name)
        finally:
            spare_second_del(value)

    # The queue of the models that wait for room. Thread-safe.

    def holders(self, load: _Model) -> frozenset[Node] | None:
        """Return the nodes of which one must end before a load has room; `None` if it has."""
        return self._waiting.get(load)

    def break_deadlock(self, load: _Model, chain: str, stuck: Set[Node]) -> None:
        """Fail a load that can never have room, or let the requests behind it go on."""
        mailbox = mailbox_of(self._replica.loop)
        if load.behind:  # let those requests go on: all may wait for one of them to end
            load.lets_pass = True
            mailbox.post(load.passed.set)
        elif self._waiting.pop(load, None) is not None:
            error = RequestCycleError(
                f"Model {load.id!r:.200} can never be loaded: max_num_models_per_replica="
                f"{self._limit}, and all loaded models are used by requests that wait for this "
                f"model, in the cycle {chain}. Raise max_num_models_per_replica of "
                f"{self._plan.name}, or break the cycle."
            )
            load.stuck = stuck
            mailbox.post(load.fail, error)
