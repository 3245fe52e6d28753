"""`ingress.context`: the replica that the running code belongs to."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.engines import local_engine
from ingress.exceptions import RayServeException
from ingress.handle import DeploymentHandle
from tests.fakes import bind
from tests.servers import settle

PATIENCE_S = 60.0


def who() -> str:
    context = serve.get_replica_context()
    return f"{context.app_name}/{context.deployment}#{context.replica_tag}"


@serve.deployment
class Model:
    def __init__(self) -> None:
        self.in_constructor = who(), serve.get_replica_context().servable_object

    async def everywhere(self) -> dict[str, Any]:
        return {
            "task": await asyncio.create_task(self.awho()),
            "to_thread": await asyncio.to_thread(who),
            "run_in_executor": await asyncio.get_running_loop().run_in_executor(None, who),
            "loop": who(),
        }

    async def awho(self) -> str:
        return who()

    async def is_self(self) -> bool:
        return serve.get_replica_context().servable_object is self

    async def constructed(self) -> Any:
        return self.in_constructor

    async def by_hand(self, copied: bool) -> str:
        said: list[str] = []

        def target() -> None:
            try:
                said.append(who())
            except RayServeException as error:
                said.append(str(error))

        run = contextvars.copy_context().run if copied else lambda function: function()
        thread = threading.Thread(target=run, args=(target,), name="by-hand")
        thread.start()
        await asyncio.to_thread(thread.join, PATIENCE_S)
        return said[0]


@pytest.fixture
def model(flags: Settings) -> Iterator[DeploymentHandle]:
    yield serve.run(bind(Model), name="app", route_prefix=None)
    serve.shutdown()


def test_it_holds_wherever_a_request_goes(model: DeploymentHandle) -> None:
    here = model.everywhere.remote().result(timeout_s=PATIENCE_S)

    assert here == dict.fromkeys(["task", "to_thread", "run_in_executor", "loop"], "app/Model#0")
    assert model.is_self.remote().result(timeout_s=PATIENCE_S)


def test_in_the_constructor_there_is_no_instance_yet(model: DeploymentHandle) -> None:
    assert model.constructed.remote().result(timeout_s=PATIENCE_S) == ("app/Model#0", None)


def test_a_thread_started_by_hand_is_told_how_to_get_it(model: DeploymentHandle) -> None:
    said = model.by_hand.remote(False).result(timeout_s=PATIENCE_S)

    if getattr(sys.flags, "thread_inherit_context", 0):  # as by default on free-threaded Python
        assert said == "app/Model#0"
    else:
        assert "'by-hand'" in said
        assert "copy_context().run" in said
    assert model.by_hand.remote(True).result(timeout_s=PATIENCE_S) == "app/Model#0"


def test_outside_of_a_deployment_it_raises() -> None:
    with pytest.raises(RayServeException, match="may only be called from within a deployment"):
        serve.get_replica_context()


@pytest.mark.usefixtures("separate", "shutdown")
def test_a_later_reconfigure_finds_itself_in_its_replica() -> None:
    @serve.deployment(user_config=1)
    class Model:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def reconfigure(self, user_config: int) -> None:
            context = serve.get_replica_context()
            self.seen.append((user_config, context.deployment, context.servable_object is self))

        async def __call__(self) -> list[Any]:
            return self.seen

    handle = serve.run(bind(Model), route_prefix=None)
    local_engine().change("default", {"Model": {"user_config": 2}})
    settle()

    assert handle.remote().result() == [(1, "Model", True), (2, "Model", True)]
