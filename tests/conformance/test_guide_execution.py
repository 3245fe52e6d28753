"""The guide "Asyncio and concurrency best practices": execution of user code, and blocking.

Each test stands under the sentences it proves.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request

import ingress as serve
from ingress.core.base.settings import (
    ROUTER_IN_SEPARATE_LOOP,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
    Settings,
)
from tests.conformance.observe import (
    FEW_FLAGS,
    TIMEOUT_S,
    Gate,
    Served,
    flag_values,
    here,
    online,
    served,
)
from tests.servers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the flags from the environment; a test that takes `flags` sets them afterwards."""
    for name in (SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD, ROUTER_IN_SEPARATE_LOOP):
        monkeypatch.delenv(name, raising=False)


def one_after_another(it: Served, gate: Gate, count: int = 3) -> bool:
    """Send requests; return whether only one was inside, although the replica had all of them."""
    responses = it.send(count=count)
    wait_until(lambda: it.ongoing() == count)
    gate.open()
    assert {response.result().status_code for response in responses} == {200}
    assert gate.passed == count
    return gate.most_inside == 1


def all_at_once(it: Served, gate: Gate, count: int = 3, path: str = "/") -> bool:
    """Send requests; return whether they were all inside together."""
    responses = it.send(path, count=count)
    gate.wait_for(count)
    gate.open()
    return {response.result().status_code for response in responses} == {200}


# "The code that runs inside of each replica in a Ray Serve deployment runs on an asyncio event
# loop."
# "Serve uses asyncio event loops for routing and for running replicas."
# "By default, user code runs on a separate event loop from the replica's main/control loop"
def test_by_default_routing_control_and_each_replica_have_loops_of_their_own() -> None:
    class Replicated:
        async def __call__(self) -> str:
            return here()

    with served(serve.deployment(num_replicas=2)(Replicated).bind()) as it:
        threads = {thread.name for thread in threading.enumerate()}
        places = {it.get().text for _ in range(20)}

    assert {"ingress-control", "ingress-router", "Replicated#0", "Replicated#1"} <= threads
    assert places == {"loop Replicated#0", "loop Replicated#1"}


# "By default, user code runs on a separate event loop from the replica's main/control loop, so
# blocking user code doesn't interfere with health checks and autoscaling."
# "This isolation: Protects system tasks (health checks, controller communication) from being
# blocked by user code."
# "When user code and system tasks share a loop, any blocking operation in user code can interfere
# with replica health and control-plane operations."
@pytest.mark.parametrize("separate", ["0", "1"])
def test_blocking_code_holds_up_health_checks_only_on_a_shared_loop(
    monkeypatch: pytest.MonkeyPatch, separate: str
) -> None:
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, separate)
    checked = threading.Event()

    class Child:
        async def check_health(self) -> None:
            checked.set()

    class Parent:
        def __init__(self, child: serve.DeploymentHandle) -> None:
            self.child = child

        async def __call__(self) -> bool:
            checked.clear()
            # On a shared loop the check can never run; a fraction of a second suffices.
            return checked.wait(TIMEOUT_S if separate == "1" else 0.3)

    child = serve.deployment(health_check_period_s=0.01)(Child).bind()
    with served(serve.deployment(Parent).bind(child)) as it:
        assert it.get().json() is (separate == "1")


def test_a_blocked_replica_stops_neither_status_nor_healthz() -> None:
    gate = Gate()

    class Blocked:
        async def __call__(self) -> None:
            gate.wait()

    with served(serve.deployment(Blocked).bind()) as it:
        [response] = it.send()
        gate.wait_for(1)

        assert it.status().replicas[0].ongoing == 1
        assert it.get("/-/healthz").text == "success"

        gate.open()
        assert response.result().status_code == 200


# "async def __call__ runs directly on the replica's user event loop."
# "While this handler awaits asyncio.sleep, the loop is free to start handling other requests."
# "Lets the event loop handle many requests while each waits on I/O."
# "Asyncio gives you concurrency for I/O-bound workloads: While one request waits on the database,
# another can wait on an HTTP call. Handlers yield back to the event loop at each await."
@FEW_FLAGS
def test_requests_share_the_loop_while_each_awaits(flags: Settings) -> None:
    gate = Gate()
    places = set()

    class Echo:
        async def __call__(self, request: Request) -> None:
            places.add(here())
            await gate.wait_async()
            places.add(here())

    with served(serve.deployment(Echo).bind(), flags) as it:
        assert all_at_once(it, gate)
        assert places == {it.loop}


# "With RAY_SERVE_RUN_SYNC_IN_THREADPOOL=0 (current default), __call__ runs directly on the user
# event loop and blocks it for 1 second."
# "In pure Serve, def methods run on the event loop unless you opt into threadpool behavior."
def test_by_default_a_def_handler_blocks_the_loop_of_its_replica() -> None:
    gate = Gate()
    places = set()

    class BlockingEcho:
        def __call__(self, request: Request) -> None:
            places.add(here())
            gate.wait()

    with served(serve.deployment(BlockingEcho).bind()) as it:
        assert one_after_another(it, gate)
        assert places == {it.loop}


# "With RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1, Serve offloads __call__ to a threadpool so the event
# loop stays responsive."
# "When this flag is 1: Serve runs synchronous methods in a threadpool. The event loop is free to
# keep serving other requests while sync methods run."
def test_opted_in_def_handlers_run_in_threads_and_the_loop_answers_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    gate = Gate()

    class BlockingEcho:
        def __call__(self, request: Request) -> None:
            gate.wait()

        async def ping(self) -> str:
            return here()

    with served(serve.deployment(BlockingEcho).bind()) as it:
        responses = it.send(count=3)
        gate.wait_for(3)
        assert it.handle.ping.remote().result(timeout_s=TIMEOUT_S) == it.loop
        gate.open()
        assert {response.result().status_code for response in responses} == {200}


def fastapi_deployment(gate: Gate) -> serve.Application:
    app = FastAPI()

    class FastAPIDeployment:
        @app.get("/sync")
        def sync_endpoint(self) -> str:
            gate.wait()
            return here()

        @app.get("/async")
        async def async_endpoint(self) -> str:
            await gate.wait_async()
            return here()

        @app.get("/ping")
        async def ping(self) -> str:
            return here()

    return serve.deployment(serve.ingress(app)(FastAPIDeployment)).bind()


# "FastAPI always dispatches def endpoints to a threadpool."
# "FastAPI runs this in a threadpool." "Runs directly on FastAPI's asyncio loop."
@FEW_FLAGS
@pytest.mark.parametrize("path", ["/sync", "/async"])
def test_fastapi_endpoints_of_either_kind_overlap_and_leave_the_loop_free(
    flags: Settings, path: str
) -> None:
    gate = Gate()
    with served(fastapi_deployment(gate), flags) as it:
        responses = it.send(path, count=3)
        gate.wait_for(3)
        assert it.get("/ping").json() == it.loop
        gate.open()

        places = {response.result().json() for response in responses}
        assert places == {it.worker if path == "/sync" else it.loop}


# "Blocking code keeps the event loop from processing other work."
# "This blocks the event loop until the HTTP call finishes."
# "No other requests can run on this replica during the request call. Blocking in async def is still
# blocking."
# "Async alone doesn't make CPU work faster." "CPU-bound code doesn't become faster merely because
# it's async."
# (On a shared loop the requests are not even counted meanwhile: that loop would count them.)
@pytest.mark.parametrize("flags", flag_values(user="1", router="1"), indirect=True)
def test_blocking_in_async_def_is_still_blocking(flags: Settings) -> None:
    gate = Gate()

    class BlockingHTTP:
        async def __call__(self, request: Request) -> None:
            gate.wait()

    with served(serve.deployment(BlockingHTTP).bind(), flags) as it:
        assert one_after_another(it, gate)


# "You need more replicas, threads, or native parallelism."
# "For predictable CPU scaling, it's usually simpler to increase the number of replicas."
# "For CPU-heavy workloads, scale replicas ..."
def test_blocking_handlers_overlap_on_several_replicas() -> None:
    gate = Gate()

    class Blocking:
        async def __call__(self, request: Request) -> None:
            gate.wait()

    deployment = serve.deployment(num_replicas=3, max_ongoing_requests=1)(Blocking)
    with served(deployment.bind()) as it:
        assert all_at_once(it, gate)


# "Non-blocking equivalent using a threadpool"
# "Offload blocking I/O to a worker thread."
# "Non-blocking code yields control back to the loop when it's waiting on something."
# "In these cases, you can still get useful parallelism from threads inside a single replica
# process" "Multiple threads can run _heavy_numpy in parallel"
# "Offload to a thread, free the event loop." "CPU-heavy code in async def"
@FEW_FLAGS
@pytest.mark.parametrize("how", ["to_thread", "run_in_executor"])
def test_offloaded_calls_overlap_in_threads_and_leave_the_loop_free(
    flags: Settings, how: str
) -> None:
    gate = Gate()

    class Offloading:
        def _blocking(self) -> str:
            gate.wait()
            return f"{here()} {serve.get_replica_context().deployment}"

        async def __call__(self, request: Request) -> str:
            if how == "to_thread":
                return await asyncio.to_thread(self._blocking)
            return await asyncio.get_running_loop().run_in_executor(None, self._blocking)

        async def ping(self) -> str:
            return here()

    with served(serve.deployment(Offloading).bind(), flags) as it:
        responses = it.send(count=3)
        gate.wait_for(3)
        assert it.handle.ping.remote().result(timeout_s=TIMEOUT_S) == it.loop
        gate.open()

        places = {response.result().text for response in responses}
        assert places == {f"{it.executor} Offloading"}


# "Serve's request router is also run on its own event loop by default"
# "Disabling this makes the router share an event loop with other work."
def test_the_router_has_a_loop_of_its_own_only_if_the_flag_says_so(flags: Settings) -> None:
    async def function() -> None: ...

    with served(serve.deployment(function).bind(), flags):
        threads = {thread.name for thread in threading.enumerate()}

    assert ("ingress-router" in threads) is flags.run_router_in_separate_loop


# "The router can continue routing and load balancing requests even if some replicas are running
# slow user code."
@pytest.mark.parametrize("router", ["0", "1"])
def test_requests_go_to_the_replica_that_is_free(
    monkeypatch: pytest.MonkeyPatch, router: str
) -> None:
    monkeypatch.setenv(ROUTER_IN_SEPARATE_LOOP, router)
    gate = Gate()
    blocked: list[str] = []

    class Sometimes:
        def __call__(self, request: Request) -> str:
            if request.url.path == "/block":
                blocked.append(here())
                gate.wait()
            return here()

    with served(serve.deployment(num_replicas=2)(Sometimes).bind()) as it:
        [slow] = it.send("/block")
        gate.wait_for(1)
        quick = [it.get().text for _ in range(10)]
        gate.open()
        slow.result()

    assert {*quick, *blocked} == {"loop Sometimes#0", "loop Sometimes#1"}
    assert len(set(quick)) == 1


# "You have a def method that is currently running on the event loop. In a future version, that
# method runs in a threadpool instead." "You can opt in to the future behavior now"
@pytest.mark.parametrize(
    ("name", "value"),
    [
        (SYNC_IN_THREADPOOL, "true"),
        (USER_CODE_IN_SEPARATE_THREAD, "yes"),
        (ROUTER_IN_SEPARATE_LOOP, ""),
    ],
)
def test_a_flag_that_is_neither_0_nor_1_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    async def function() -> None: ...

    with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got {value!r}"):
        serve.run(serve.deployment(function).bind(), route_prefix=None)


# "At a high level, requests go through a router to a replica actor that runs your code"
def test_a_request_over_the_network_reaches_the_users_loop(flags: Settings) -> None:
    async def function(request: Any) -> str:
        return here()

    with online(serve.deployment(function).bind(), flags) as it:
        assert it.get().text == it.loop
