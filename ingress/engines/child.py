"""A replica's process: its main function, and the functions of a server that work there.

The main function starts the replica that its parent describes, and waits.

The main thread waits for the order to stop. The replica's loop, in its own thread, reads the
frames: no call crosses threads on its way to an `async def`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn

from ingress.app.asgi.spec import bound_app_of
from ingress.app.declaration.build import fill
from ingress.core.base.settings import Settings, take_pinned_cpus
from ingress.core.base.types import DeploymentID
from ingress.core.calls.loops import run_blocking
from ingress.core.execution.gil_pressure import EXPECTED_S, GIL_PRESSURE
from ingress.engines.current import use_only
from ingress.handle import DeploymentHandle, directory_here, use_here
from ingress.serving.processes.crossing import failing, pickled_error
from ingress.serving.processes.frame_server import BEAT_S, FrameServer
from ingress.serving.processes.frames import (
    LARGE,
    Frames,
    loads,
    receive_blocking,
    send_blocking,
)
from ingress.serving.processes.messages import Frame, ReplicaSpec
from ingress.serving.processes.output import LogLines, take_over
from ingress.serving.processes.shared_memory import SharedNumbers
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.thread_host import ThreadHost
from ingress.telemetry.logs import logger

STOP_S = 3600.0  # at most: the parent kills a child that takes longer than it may


def main(descriptor: int, shared: int, name: str) -> None:
    """Serve one replica until the parent says to stop, or ends."""
    use_only(ChildEngine(name))
    for each in (descriptor, shared):  # not for the programs that user code starts
        os.set_inheritable(each, False)
    faulthandler.enable(all_threads=False)  # its lines reach the status
    # Ctrl-C and a service's stop reach the parent too, which says when to stop. Handlers, because
    # the programs that user code starts would inherit ignored signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    end = socket.socket(fileno=descriptor)
    try:
        if cores := take_pinned_cpus():
            os.sched_setaffinity(0, cores)  # before there is another thread, which inherits it
        _, content = receive_blocking(end)
        spec: ReplicaSpec = loads(content)
        replica, server, stopping = _made(spec, SharedNumbers(shared))
    except EOFError:
        return  # the parent has given the start up
    except BaseException as error:  # of the user's module: the server raises it
        send_blocking(end, Frame.FAILED, pickled_error(error, LARGE))
        return
    has_started = run_blocking(replica.loop, _serve(replica, server, end, spec))
    _wait(stopping, server)
    asyncio.run(replica.stop(STOP_S))
    if not has_started:  # the server waits for the end of a failed start, and Python takes its time
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait(stopping: SimpleQueue[None], server: FrameServer) -> None:
    """Wait for the order to stop. A loop that loads a model may stand meanwhile."""
    while True:
        try:
            return stopping.get(timeout=BEAT_S)
        except Empty:
            server.excuse()


def _made(
    spec: ReplicaSpec, shared: SharedNumbers
) -> tuple[Replica, FrameServer, SimpleQueue[None]]:
    """Return the replica of a specification, which has not started, and the orders to stop it."""
    GIL_PRESSURE.adapts = Settings.from_environment().adapt_switch_interval
    # A frame costs its loop one wait for the GIL, and the server's loop is in another process:
    # shorter turns would only take time from what computes.
    GIL_PRESSURE.shortest_s = EXPECTED_S
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a pipe here
    logs = LogLines(spec.log_mark, str(spec.replica_id))
    take_over(logs, spec.log_levels)
    target = spec.code()
    take_over(logs, spec.log_levels)
    replica = spec.make_replica(
        spec.replica_id,
        partial(
            ThreadHost,
            func_or_class=target,
            bound_app=bound_app_of(target),
            num_cpus=spec.num_cpus,
            lanes=spec.lanes,
            sync_in_threadpool=spec.sync_in_threadpool,
            stall_threshold_s=spec.stall_threshold_s,
        ),
        max_ongoing=spec.max_ongoing,
        release=lambda replica, call: None,  # by the frame of the call's end: the parent's slot
    )
    replica.context.place = spec.place
    stopping: SimpleQueue[None] = SimpleQueue()
    shared.close_descriptor()
    return replica, FrameServer(replica, shared, partial(stopping.put, None)), stopping


async def _serve(
    replica: Replica, server: FrameServer, end: socket.socket, spec: ReplicaSpec
) -> bool:
    """Begin to take frames, and start the replica; return whether that worked.

    Runs on the user loop.
    """

    def leave() -> None:
        fault = server.frames.fault
        if fault is not None:  # user code has taken bytes from the socket, say
            logger.error("%s: its server sent %s", replica.replica_id, fault, exc_info=fault)
        if not replica.is_ending:
            os._exit(1)  # the parent has ended: there is no caller left

    def handle(name: str) -> DeploymentHandle:
        app_name = replica.replica_id.deployment_id.app_name
        return server.directory.handle(DeploymentID(name, app_name))

    server.frames = server.directory.frames = Frames(end, server.on_frame, leave)
    use_here(server.directory)
    server.begin_start()
    try:
        with failing(server.frames, 0):
            given_args, given_kwargs = loads(spec.arguments)
            args, kwargs = fill(given_args, given_kwargs, handle)
            await replica.start(args, kwargs, spec.user_config)
            server.beat()
            server.frames.post(Frame.READY, 0)
            return True
    except asyncio.CancelledError:
        pass  # by the order to stop, for which the main thread looks next
    finally:
        server.starting = None
    return False


@dataclass(eq=False, slots=True)
class ChildEngine:
    """The engine of a replica's process: it has handles, whose calls the server's process makes.

    The server knows which deployments run, so a handle of one that does not fails at its call.
    """

    _replica: str

    @property
    def is_running(self) -> bool:
        return True

    def app_handle(self, name: str) -> DeploymentHandle:
        return DeploymentHandle(DeploymentID("", name), directory_here())

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle:
        return DeploymentHandle(DeploymentID(deployment_name, app_name), directory_here())

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise RuntimeError(
            f"this is the process of replica {self._replica}, in which serve.run(), serve.status() "
            "and the other functions of a server are not available, except those that return "
            "handles; in a script, put serve.run() under `if __name__ == '__main__':`, because "
            "child processes import the script"
        )

    start = use_grpc = run = delete = leave = writing_on_signal = shutdown = status = url = _refuse
