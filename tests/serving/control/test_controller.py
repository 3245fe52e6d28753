"""`control.controller`: an application starts as a whole or not at all, and stops."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from fastapi import FastAPI

import ingress as serve
from ingress.exceptions import DeploymentUnavailableError
from ingress.handle import DeploymentHandle
from ingress.schema import ApplicationStatus
from ingress.testing import Latch
from tests.fakes import bind
from tests.servers import result, wait_until

PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.usefixtures("shutdown"),
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
]


@serve.deployment
class Fine:
    async def __call__(self, value: Any = "fine") -> Any:
        return value


@serve.deployment(num_replicas=3)
class Broken:
    def __init__(self, *_: Any) -> None:
        if serve.get_replica_context().replica_tag == "2":
            raise LookupError("no model here")


class Hiding:
    """A layer that does not show the app inside, where each replica puts its own."""

    __slots__ = ()

    async def __call__(self, *_: object) -> None:
        raise AssertionError("never called")


unclonable = FastAPI()
unclonable.middleware_stack = Hiding()


@serve.deployment
@serve.ingress(unclonable)
class CannotBeCloned:
    @unclonable.get("/")
    async def root(self) -> str:
        return "never"


overridden = FastAPI()


class Base:
    @overridden.get("/")
    async def root(self) -> str:
        return "base"


@serve.deployment
@serve.ingress(overridden)
class CannotBeBound(Base):
    async def root(self, more: int) -> str:  # type: ignore[override]
        return "other parameters"


@pytest.mark.parametrize(
    ("target", "name", "says"),
    [
        (bind(CannotBeBound), "root", "root"),
        (bind(Broken, bind(Fine)), "Broken", "no model here"),
        (bind(CannotBeCloned), "CannotBeCloned", "hides the stack"),
    ],
    ids=["routes", "constructor", "app"],
)
def test_one_failed_start_fails_all_and_leaves_nothing(target: Any, name: str, says: str) -> None:
    before = threading.active_count()
    with pytest.raises((RuntimeError, TypeError), match=says) as caught:
        serve.run(target, route_prefix=None)

    assert name in str(caught.value)
    assert serve.status().applications["default"].status is ApplicationStatus.DEPLOY_FAILED
    wait_until(lambda: threading.active_count() == before)
    assert result(serve.run(bind(Fine), route_prefix=None).remote()) == "fine"


class Latches:
    def __init__(self) -> None:
        self.started = Latch()
        self.leave = Latch()
        self.order: list[str] = []


latches = Latches()


@serve.deployment
class Child:
    async def __call__(self) -> str:
        return "child"

    def __del__(self) -> None:
        latches.order.append("child")


@serve.deployment
class Parent:
    def __init__(self, child: DeploymentHandle) -> None:
        self.child = child

    async def __call__(self) -> Any:
        latches.started.count_down()
        await latches.leave
        return await self.child.remote()

    def __del__(self) -> None:
        latches.order.append("parent")


def test_what_is_in_flight_still_reaches_its_children_while_the_application_stops() -> None:
    latches.__init__()  # type: ignore[misc]
    handle = serve.run(bind(Parent, bind(Child)), route_prefix=None)
    response = handle.remote()
    latches.started.wait()
    stopping = threading.Thread(target=serve.delete, args=("default",))
    stopping.start()
    wait_until(lambda: serve.status().applications["default"].status is ApplicationStatus.DELETING)
    latches.leave.count_down()
    stopping.join(PATIENCE_S)

    assert result(response) == "child"
    assert latches.order == ["parent", "child"], "callers first, each destroyed once"
    with pytest.raises(DeploymentUnavailableError):
        handle.remote()


@serve.deployment(graceful_shutdown_timeout_s=0.1, max_ongoing_requests=1)
class Endless:
    async def __call__(self) -> None:
        latches.started.count_down()
        await asyncio.Future()


def test_calls_that_do_not_end_in_time_are_cut_and_waiting_calls_fail() -> None:
    latches.__init__()  # type: ignore[misc]
    handle = serve.run(bind(Endless), route_prefix=None)
    running, waiting = handle.remote(), handle.remote()
    latches.started.wait()
    begin = time.monotonic()
    serve.shutdown()

    assert time.monotonic() - begin < 0.1 + 2
    for response in (running, waiting):
        with pytest.raises(serve.exceptions.RayServeException):
            result(response)


LIMITED = """
import resource, threading
import ingress as serve
resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))

class Replica:
    def __call__(self):
        return "served"

try:
    handle = serve.run(serve.deployment(Replica, num_replicas=80).bind(), route_prefix=None)
    print(handle.remote().result())
except RuntimeError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE), threading.active_count())
serve.shutdown()
"""


def test_replicas_get_the_file_descriptors_the_hard_limit_allows() -> None:
    result = run_python(LIMITED.format(hard=1000))
    assert "served" in result
    assert "(1000, 1000) 8" in result  # and some eighty threads


def test_more_loops_than_descriptors_fail_before_the_first_is_made() -> None:
    result = run_python(LIMITED.format(hard=300))
    assert "80 more event loops need " in result
    assert "and this process may open 300; raise the limit" in result
    assert "Too many open files" not in result


BARE = """mount -t tmpfs none /dev && : > /dev/null && mount -t tmpfs none /proc && exec "$@" """
IN_BARE_CHROOT = ["unshare", "-rm", "sh", "-c", BARE, "sh"]
"""The beginning of a command that runs where neither `/dev/fd` nor `/proc` is there."""


def can_hide() -> bool:
    """Return whether this user may have a `/dev` and a `/proc` of its own."""
    try:
        return subprocess.run([*IN_BARE_CHROOT, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_hide(), reason="needs Linux's unshare, for this user")
def test_applications_start_in_a_chroot_without_a_descriptor_list() -> None:
    assert "served" in run_python(LIMITED.format(hard=1000), *IN_BARE_CHROOT)


def run_python(code: str, *before: str) -> str:
    command = [*before, sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
