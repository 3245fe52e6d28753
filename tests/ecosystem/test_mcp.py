"""Servers of the Model Context Protocol: docs/how-to/mcp.md and its application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from ingress.request_router import ConsistentHashRouter
from tests.ecosystem.document import version_of
from tests.how_to import check_page
from tests.servers import PATIENCE_S, bind, ongoing, served, wait_until

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(version_of("fastmcp") == "", reason="make test-mcp"),
]


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    serve.shutdown()


def example(name: str, replicas: int) -> Any:
    """Return a deployment of the example, whose tools also say where they run."""
    from app_examples.plants import app as plants_mcp

    example = getattr(plants_mcp, name)

    class Where:
        def find(self, plant: str) -> str:
            """Find."""
            found: str = example.func_or_class.find(self, plant)
            return f"{found}, {threading.current_thread().name}"

        async def count(self) -> str:
            """Count."""
            return f"{threading.current_thread().name} {serve.get_request_context().route}"

    cls = type(name, (Where, example.func_or_class), {})
    router = {"request_router_class": ConsistentHashRouter}
    return serve.deployment(num_replicas=replicas, request_router_config=router)(cls)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["WithSDK", "WithFastMCP"])
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_run_as_methods_a_def_in_a_thread_and_an_async_def_on_the_loop(
    name: str, replicas: int, mode: Any
) -> None:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    port = served(bind(example(name, replicas)))

    async def talk(session: str) -> list[str]:
        async with (
            httpx2.AsyncClient(headers={"x-session-id": session}) as http,
            Client(
                streamable_http_client(f"http://127.0.0.1:{port}/mcp/", http_client=http), mode=mode
            ) as client,
        ):
            found = await client.call_tool("find", {"plant": "plum"})
            where = await client.call_tool("count", {})
            return [each.content[0].text for each in (found, where)]

    for session in range(5):
        found, where = asyncio.run(talk(str(session)))
        assert found.startswith("on a tree, AnyIO worker thread")
        assert "worker" not in where
        assert where.endswith(" /mcp/")  # the request's own context


def of_streams(name: str) -> type:
    """Return the class of a server with sessions, which answers with streams of events."""
    from fastapi import FastAPI
    from fastmcp import FastMCP
    from mcp.server import MCPServer

    class Tools:
        def __init__(self) -> None:
            self.seen: list[str] = []
            self.may_end = threading.Event()

        def block(self) -> str:
            """Block a thread."""
            self.seen.append("began")
            assert self.may_end.wait(PATIENCE_S)
            return "blocked"

        async def wait(self) -> None:
            """Wait on the loop."""
            self.seen.append("began")
            try:
                await asyncio.Event().wait()
            finally:
                self.seen.append("cancelled")

        async def noted(self) -> list[str]:
            """Return what was seen."""
            self.may_end.set()
            return self.seen

        def __serve_build_asgi_app__(self) -> FastAPI:
            methods = (self.block, self.wait, self.noted)
            if name == "fastmcp":
                tools = FastMCP("tools", tools=[*methods]).http_app(path="/")
                app = FastAPI(lifespan=tools.lifespan)
            else:
                server = MCPServer("tools")
                for each in methods:
                    server.add_tool(each)
                tools = server.streamable_http_app(streamable_http_path="/")

                @asynccontextmanager
                async def lifespan(_: FastAPI) -> AsyncIterator[None]:
                    async with server.session_manager.run():
                        yield

                app = FastAPI(lifespan=lifespan)
            app.mount("/mcp", tools)
            return app

    return Tools


async def call(port: int, tools: list[str], mode: Any, **headers: str) -> list[Any]:
    """Call tools in one session. Returns the last results as Python objects."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    url = f"http://127.0.0.1:{port}/mcp/"
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        return [(await client.call_tool(each, {})).structured_content for each in tools]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["sdk", "fastmcp"])
def test_sessions_whose_clients_leave_streams_of_events_are_kept(name: str, replicas: int) -> None:
    router = {
        "request_router_class": ConsistentHashRouter,
        "request_router_kwargs": {"num_fallback_replicas": 0},
    }
    deployment = serve.deployment(num_replicas=replicas, request_router_config=router)
    port = served(bind(deployment(serve.ingress()(of_streams(name)))))
    for session in range(12):
        headers = {"x-session-id": str(session)}
        assert asyncio.run(call(port, ["noted"] * 3, "legacy", **headers)) == [{"result": []}] * 3


@pytest.mark.parametrize("name", ["sdk", "fastmcp"])
@pytest.mark.parametrize(("tool", "slots"), [("wait", 0), ("block", 1)])
def test_a_deadline_cancels_a_tool_on_the_loop_and_a_def_keeps_the_slot(
    name: str, tool: str, slots: int
) -> None:
    port = served(bind(serve.deployment(serve.ingress()(of_streams(name)))))
    timeout = {"x-request-timeout-seconds": "1"}
    with pytest.raises(ExceptionGroup):
        asyncio.run(call(port, [tool], "auto", **timeout))
    wait_until(lambda: ongoing() == slots)
    seen = ["began"] if tool == "block" else ["began", "cancelled"]
    assert asyncio.run(call(port, ["noted"], "auto")) == [{"result": seen}]
    wait_until(lambda: ongoing() == 0)


def test_the_page_about_mcp_is_right(tmp_path: Path) -> None:
    check_page("mcp", tmp_path)
