"""Servers of the Model Context Protocol: docs/how-to/mcp.md and its application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from ingress.request_router import ConsistentHashRouter
from tests.ecosystem.document import version_of
from tests.how_to import check_page
from tests.servers import bind, served

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


def test_the_page_about_mcp_is_right(tmp_path: Path) -> None:
    check_page("mcp", tmp_path)
