"""A replica's process: Ray calls ingress, which runs the user's code as in one process.

    Ray's proxy  -> HTTPReplica, an ASGI app -> Reply  -----+
    Ray's router -> RemoteMethod             -> Invocation -+-> Router -> Replica -> user code

Ray sees a class with only `async def` methods. Ingress's `Replica` runs the `def` methods, lanes,
batches, models and contexts, on a loop of its own or, with the flag at 0, on Ray's. It also counts
the slots: Ray frees a slot when a request is cancelled, `Replica` when its thread returns.

It reports its models to Ray's router, which prefers replicas that have the model of a request, and
its counts as metrics of Ray:

    name                                     labels         as in
    serve_batches_processed                  function_name  `ray.serve.batch`
    serve_batched_calls                      function_name  the calls in those batches
    serve_num_multiplexed_models                            `ray.serve.multiplexed`
    serve_multiplexed_models_load_counter
    serve_multiplexed_models_unload_counter
    serve_lane_calls                         lane, state    "ongoing" in its threads, or "queued"

`ray.serve.metrics` adds deployment, replica and application. The counters are the runtime's own
ints, which are read each `PERIOD_S`; a request makes no metric.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ray import serve as ray_serve
from ray.serve import metrics
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client, _get_serve_request_context
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.app.asgi.methods import GENERATORS
from ingress.app.asgi.replica_app import ASGI
from ingress.app.asgi.spec import bound_app_of
from ingress.app.declaration.build import fill
from ingress.context import REPLICA
from ingress.core.base.counters import LOAD, UNLOAD
from ingress.core.base.settings import Settings
from ingress.core.base.types import (
    DeploymentID,
    ReplicaID,
    ReplicaPlace,
    ReplicaRank,
    RequestMetadata,
    new_request_id,
)
from ingress.core.calls.call import Call
from ingress.core.calls.channel import Channel
from ingress.core.calls.loops import run_on
from ingress.core.execution.execution import kind
from ingress.core.execution.threads import lend_executor
from ingress.engines.ray.calls import RayDirectory, RayHandle, portable, use_here
from ingress.engines.ray.messages import HOOKS, ActorSpec, as_arrived
from ingress.exceptions import DeploymentUnavailableError
from ingress.handle import (
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
    Invocation,
)
from ingress.serving.control.consumers import consumer_of
from ingress.serving.http.in_flight import InFlight
from ingress.serving.http.reply import Reply
from ingress.serving.http.request_head import REQUEST_ID_HEADER, content_length, read_head
from ingress.serving.http.websocket import WebSocketReply
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router
from ingress.serving.replicas.thread_host import ThreadHost
from ingress.telemetry.logs import logger
from ingress.telemetry.metrics.user_metrics import use_theirs
from ingress.telemetry.mistakes import described

T = TypeVar("T")

PERIOD_S = 2.0
MODELS_PERIOD_S = 0.1  # Ray's own. Source: Ray 2.60.0, constants.py


def _place(rank: ReplicaRank) -> ReplicaPlace:
    """Return the place of this process's replica, with a rank that Ray's context may not have."""
    context = ray_serve.get_replica_context()
    here = ReplicaRank(rank.rank, rank.node_rank, rank.local_rank)
    return ReplicaPlace(here, context.world_size, str(context.code_version))


class RayReplica:
    """The class of a deployment on Ray, one instance per actor. Owned by the loop of Ray's calls.

    `children` are Ray's handles of the deployments in the user's constructor arguments. All names
    of this class are private: public names are the user's methods.
    """

    async def __init__(  # type: ignore[misc]
        self, spec: ActorSpec, children: dict[str, RayHandle]
    ) -> None:
        context = ray_serve.get_replica_context()
        self._deployment = DeploymentID(context.deployment, context.app_name)
        self._spec = spec
        # Ray's config, because a `serve deploy` file overrides the code. There is no public name.
        self._config = context._deployment_config
        self._user_config = self._config.user_config
        self._children = children
        self._directory = RayDirectory(
            self._find_handle, self._find_methods, self._is_of_our_application
        )
        use_here(self._directory)
        use_theirs(make_rays)
        _log_where_ray_does()
        try:
            await self._start(ReplicaID(context.replica_tag, self._deployment))
        except Exception as error:
            raise RuntimeError(
                f"deployment '{context.deployment}' failed to start: {described(error)}"
            ) from error

    async def _start(self, replica_id: ReplicaID) -> None:
        spec, settings = self._spec, Settings.from_environment()
        target = spec.code()
        given_args, given_kwargs = pickle.loads(spec.arguments)
        args, kwargs = fill(
            given_args,
            given_kwargs,
            lambda name: self._directory.handle(DeploymentID(name, self._deployment.app_name)),
        )
        borrowed = None
        if not settings.run_user_code_in_separate_thread:
            borrowed = asyncio.get_running_loop()
            lend_executor(borrowed)
        timeout_s = self._config.graceful_shutdown_timeout_s
        self._router = Router(self._deployment, graceful_shutdown_timeout_s=timeout_s)
        bound_app = bound_app_of(target)
        self._router.bound_app = bound_app
        self._replica = Replica(
            replica_id,
            partial(
                ThreadHost,
                func_or_class=target,
                bound_app=bound_app,
                num_cpus=spec.num_cpus,
                lanes=spec.lanes,
                sync_in_threadpool=settings.run_sync_in_threadpool,
                borrowed=borrowed,
                stall_threshold_s=settings.stall_threshold_s,
            ),
            max_ongoing=self._config.max_ongoing_requests,
            release=self._router.release,
            resume=self._router.resume,
        )
        self._replica.context.place = _place(ray_serve.get_replica_context().rank)
        self._model_ids = ModelIds(self._replica)
        # Ray cancels the request of a client that has left, and logs what a request raises.
        self._in_flight = InFlight(watches=False)
        for hook in HOOKS - {"reconfigure"}:
            if hasattr(target, hook):  # Ray looks for these once, after the constructor
                setattr(self, hook, _Hook(self, hook))
        await self._replica.start(args, kwargs, self._user_config)
        self._router.add(self._replica)
        if (found := consumer_of(target)) is not None:
            handle: DeploymentHandle = DeploymentHandle(self._deployment, self._directory)
            slots = self._config.max_ongoing_requests
            # Ray's handles do not say which calls have begun: all its jobs count as waiting.
            self._consumer = await asyncio.to_thread(
                found.open, handle, lambda: slots, slots, lambda key: 1.0
            )
            self._consumer.begin()
        self._metrics = ReplicaMetrics(self._replica)

    def __getattr__(self, name: str) -> RemoteMethod:
        """Return the object that Ray calls for a user method. The call checks that it exists."""
        if name.startswith("_") or name in HOOKS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return RemoteMethod(self, name)

    # Methods that Ray itself calls.

    async def reconfigure(self, user_config: object, rank: ReplicaRank) -> None:
        """Give the user's instance a new config or rank. Those of its start are not given again.

        Ray calls this at every change of the rank, because there is a parameter for it.
        """
        context = self._replica.context
        before, context.place = context.place, _place(rank)
        is_moved = before is None or context.place.rank != before.rank
        is_moved = is_moved and self._replica.user_code.takes_rank()
        if user_config != self._user_config or is_moved:
            self._user_config = user_config
            await self._on_user_loop(self._replica.user_code.reconfigure(user_config))

    async def _run_hook(self, name: str) -> object:
        if name == "check_health":
            await self._replica.check_health()
            return None
        return await self._on_user_loop(self._replica.user_code.call(name, (), {}))

    async def _on_user_loop(self, work: Coroutine[None, None, T]) -> T:
        async def run() -> T:
            REPLICA.set(self._replica.context)
            return await work

        return await run_on(self._replica.loop, run)

    async def __del__(self) -> None:
        """Stop the replica. Ray calls this when requests have ended or their timeout is over."""
        if (replica := self.__dict__.get("_replica")) is not None:
            self._router.refuse(f"{self._deployment} is unavailable because it was stopped.")
            self._model_ids.stop()
            if (consumer := self.__dict__.get("_consumer")) is not None:
                consumer.pause(self._spec.stop_timeout_s)
            if "_metrics" in self.__dict__:  # it started
                self._metrics.stop()
            await replica.stop(self._spec.stop_timeout_s)
            if consumer is not None:
                await asyncio.to_thread(consumer.close, self._spec.stop_timeout_s)
        self._directory.close()

    def _find_handle(self, deployment_id: DeploymentID) -> RayHandle:
        if self._is_of_our_application(deployment_id) and deployment_id.name in self._children:
            return self._children[deployment_id.name]
        try:
            found: RayHandle = ray_serve.get_deployment_handle(
                deployment_id.name, deployment_id.app_name
            )
            return found
        except Exception as error:
            raise DeploymentUnavailableError(
                f"{deployment_id} is unavailable because it is not deployed."
            ) from error

    def _find_methods(self, deployment_id: DeploymentID) -> list[str] | None:
        if not self._is_of_our_application(deployment_id):
            return None
        return self._spec.methods.get(deployment_id.name)

    def _is_of_our_application(self, deployment_id: DeploymentID) -> bool:
        return (
            deployment_id.app_name == self._deployment.app_name
            and deployment_id.name in self._spec.methods
        )

    # Calls by handle.

    async def _call(self, sent: RequestMetadata, args: Any, kwargs: Any) -> Any:
        invocation = Invocation(sent.method_name, args, kwargs, None)
        try:
            return await DeploymentResponse(self._submit(sent, invocation))
        except Exception as error:
            raise portable(error) from error.__cause__

    async def _stream(self, sent: RequestMetadata, args: Any, kwargs: Any) -> AsyncIterator[Any]:
        channel: Channel[object] = Channel()
        call = self._submit(sent, Invocation(sent.method_name, args, kwargs, channel))
        items = DeploymentResponseGenerator(call, channel, self._directory)
        try:
            async for item in items:
                yield item
        except Exception as error:
            raise portable(error) from error.__cause__
        finally:
            await items.aclose()

    def _submit(self, sent: RequestMetadata, invocation: Invocation) -> Call:
        call = Call(as_arrived(sent), invocation, copy_context())
        if call.deadline is not None:
            self._directory.expire(call, call.deadline)
        if sent.multiplexed_model_id:
            self._model_ids.watch()
        self._router.assign(call)
        return call

    # HTTP.

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request or WebSocket from Ray's proxy."""
        metadata, _, now = read_head(
            scope,
            self._deployment,
            scope.get("root_path") or "/",
            self._spec.request_timeout_s,
            request_id=_id_of_rays_proxy(scope),
        )
        if metadata.multiplexed_model_id:
            self._model_ids.watch()
        send = _without_our_id(send, metadata.request_id)
        # Without this header there may be a body too, but mostly there is none, and to ask Ray's
        # proxy takes longer than a short request.
        has_body = True if content_length(scope) else None
        if not has_body and scope["type"] == "http":
            receive = fetching_when_read(receive)
        kind = Reply if scope["type"] == "http" else WebSocketReply
        inner = {**scope, "asgi": ASGI}
        reply = kind(metadata, self._router, inner, receive, send, has_body=has_body)
        if now:
            reply.call.started_at = now
        try:
            await self._in_flight.serve(reply, scope, receive, send)
        except Exception as error:
            raise portable(error) from error.__cause__  # Ray logs it, and cuts the response


@ray_serve.ingress()
class HTTPReplica(RayReplica):
    """The class of the deployment that receives the application's HTTP requests."""

    docs_path = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                await self._serve(scope, receive, send)
                return
            # The user's app has its own lifespan, which ends with the replica.
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})

        routes = getattr(self._replica.context.asgi_app, "routes", None)
        if routes is not None:  # for the labels of Ray's logs and metrics
            app.routes = routes  # type: ignore[attr-defined]
        return app


class RemoteMethod:
    """A user method, as Ray calls it.

    It is an object, because it returns an awaitable or an iterator as the call needs, and Ray runs
    a plain function in a thread or warns about it.
    """

    def __init__(self, replica: RayReplica, name: str) -> None:
        self.__name__ = name
        self._replica = replica

    def __call__(self, sent: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(sent, RequestMetadata):
            context = _get_serve_request_context()
            if context.grpc_context is not None:
                return self._of_grpc(context, (sent, *args), kwargs)
            raise TypeError(
                f"{self.__name__!r} belongs to a deployment of ingress; call it by its handle, "
                "ingress.get_deployment_handle(...)"
            )
        if sent.is_streaming:
            return self._replica._stream(sent, args, kwargs)
        return self._replica._call(sent, args, kwargs)

    def _of_grpc(self, context: Any, args: Any, kwargs: Any) -> Any:
        """Call the method with the message of a client of Ray's gRPC proxy."""
        replica = self._replica
        method = getattr(replica._replica.context.servable_object, self.__name__, None)
        is_streaming = callable(method) and kind(method) in GENERATORS
        sent = RequestMetadata(
            request_id=context.request_id,
            deployment=replica._deployment,
            method_name=self.__name__,
            route=context.route,
            is_streaming=is_streaming,
            app_name=context.app_name,
        )
        return (replica._stream if is_streaming else replica._call)(sent, args, kwargs)


class _Hook:
    """A user hook, as Ray calls it. It is an object for the same reason."""

    def __init__(self, replica: RayReplica, name: str) -> None:
        self.__name__ = name
        self._replica = replica

    def __call__(self) -> Awaitable[object]:
        return self._replica._run_hook(self.__name__)


def _id_of_rays_proxy(scope: Scope) -> str:
    """Return the request's id as Ray's proxy answers with it: the first of several."""
    ids = (value for name, value in scope["headers"] if name == REQUEST_ID_HEADER and value)
    return next(ids, b"").decode("latin-1") or new_request_id()


def fetching_when_read(receive: Receive) -> Receive:
    """Return a `receive` that gets messages from Ray's proxy only if they are read.

    Ray starts to fetch them with each request, and the first fetch, a call of the proxy's process,
    takes longer than a short request. Ray itself cancels the request of a client that leaves.
    The names are private, so `SUPPORTED` names one version.
    """
    if (fetch := getattr(receive, "_receive_asgi_messages", None)) is None:
        return receive
    is_read = asyncio.Event()

    async def fetch_when_read(metadata: object) -> bytes:
        await is_read.wait()
        messages: bytes = await fetch(metadata)
        return messages

    async def reading() -> Message:
        is_read.set()
        return await receive()

    receive._receive_asgi_messages = fetch_when_read  # type: ignore[attr-defined]
    return reading


def _without_our_id(send: Send, request_id: str) -> Send:
    """Return a `send` without the request id: Ray's proxy adds it to every response."""
    ours = (b"x-request-id", request_id.encode())

    async def send_without_our_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [pair for pair in message.get("headers", ()) if tuple(pair) != ours]
            message = {**message, "headers": headers}
        await send(message)

    return send_without_our_id


def _log_where_ray_does() -> None:
    """Send log records where Ray Serve's go: its log files and the driver's terminal."""
    rays = logging.getLogger("ray.serve")
    for handler in rays.handlers:
        if handler not in logger.handlers:
            logger.addHandler(handler)
    logger.setLevel(rays.level)
    logger.propagate = False


class ReplicaMetrics:
    """The publisher of one replica's metrics. Owned by the loop on which Ray calls the replica."""

    __slots__ = ("_made", "_replica", "_task", "_told")

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._made: dict[str, metrics.Metric] = {}
        self._told: dict[tuple[str, str], int] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self._publish()
            except Exception:
                logger.exception("could not publish the metrics of %s", self._replica.replica_id)

    def _publish(self) -> None:
        replica, counts = self._replica, self._replica.host.counts()
        for function, count in counts.batches.items():
            self._count("serve_batches_processed", count.batches, function=function)
            self._count("serve_batched_calls", count.calls, function=function)
        times = counts.model_times
        if LOAD in times:
            self._set("serve_num_multiplexed_models", len(replica.model_ids), {})
            self._count("serve_multiplexed_models_load_counter", times[LOAD].count)
            if UNLOAD in times:
                self._count("serve_multiplexed_models_unload_counter", times[UNLOAD].count)
        for lane, load in counts.lanes.items():
            self._set("serve_lane_calls", load.ongoing, {"lane": lane, "state": "ongoing"})
            self._set("serve_lane_calls", load.queued, {"lane": lane, "state": "queued"})

    def _count(self, name: str, value: int, function: str = "") -> None:
        """Add to a counter what was counted since the last time."""
        more = value - self._told.get((name, function), 0)
        if more > 0:
            # As in Ray: the name without that of its class.
            labels = {"function_name": function.rpartition(".")[2]} if function else {}
            self._metric(metrics.Counter, name, labels).inc(more, tags=labels)
            self._told[name, function] = value

    def _set(self, name: str, value: int, labels: Mapping[str, str]) -> None:
        self._metric(metrics.Gauge, name, labels).set(value, tags=dict(labels))

    def _metric(
        self, kind: type[metrics.Metric], name: str, labels: Mapping[str, str]
    ) -> metrics.Metric:
        if name not in self._made:
            self._made[name] = kind(name, description=_DESCRIPTIONS[name], tag_keys=tuple(labels))
        return self._made[name]


_DESCRIPTIONS = {
    "serve_batches_processed": "Batches that were run.",
    "serve_batched_calls": "Calls in the batches that were run.",
    "serve_num_multiplexed_models": "Models that the replica has or is loading.",
    "serve_multiplexed_models_load_counter": "Models that were loaded.",
    "serve_multiplexed_models_unload_counter": "Models that were unloaded.",
    "serve_lane_calls": "Calls in a lane, by their state.",
}


def make_rays(kind: str, name: str, **arguments: object) -> metrics.Metric:
    """Return Ray's own metric of `serve.metrics`, with the tags of the replica that Ray runs."""
    made = {"counter": metrics.Counter, "gauge": metrics.Gauge, "histogram": metrics.Histogram}
    return made[kind](name, **arguments)


@dataclass(eq=False, slots=True)
class ModelIds:
    """The reporter of one replica's models. Owned by the loop on which Ray calls the replica.

    Its task begins with the first `watch`.
    """

    _replica: Replica
    _told: frozenset[str] = frozenset()
    _task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Report changes from now on. Called when a request names a model."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                self._tell(self._replica.model_ids)
            except Exception:
                logger.exception(
                    "could not report the models of %s to Ray", self._replica.replica_id
                )
            await asyncio.sleep(MODELS_PERIOD_S)

    def _tell(self, ids: frozenset[str]) -> None:
        if ids == self._told:
            return
        # As in `ray.serve.multiplexed`; there is no public name for it.
        _get_global_client().record_request_routing_info(
            RequestRoutingInfo(
                replica_id=ray_serve.get_replica_context().replica_id,
                multiplexed_model_ids=sorted(ids),
            )
        )
        self._told = ids
