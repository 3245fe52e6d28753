"""Tools of the Model Context Protocol as methods, with the official SDK and with FastMCP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastmcp import FastMCP
from mcp.server import MCPServer

import ingress as serve


class Plants:
    """The tools. Each replica has its own object."""

    def __init__(self) -> None:
        self.grows = {"plum": "on a tree", "pea": "on a vine"}

    def find(self, plant: str) -> str:
        """Return where a plant grows. A `def`, so it runs in a worker thread."""
        return self.grows[plant]

    async def count(self) -> int:
        """Return the number of plants. An `async def`, so it runs on the replica's event loop."""
        return len(self.grows)


@serve.deployment(num_replicas=2)
@serve.ingress()
class WithSDK(Plants):
    """Served by the official SDK: without sessions, so any replica answers any request."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        server = MCPServer("plants")
        for tool in (self.find, self.count):
            server.add_tool(tool)
        tools = server.streamable_http_app(
            streamable_http_path="/", json_response=True, stateless_http=True
        )

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with server.session_manager.run():
                yield

        app = FastAPI(lifespan=lifespan)
        app.mount("/mcp", tools)
        return app


@serve.deployment(
    num_replicas=2,
    request_router_config={
        "request_router_class": "ingress.request_router:ConsistentHashRouter",
        "request_router_kwargs": {"num_fallback_replicas": 0},
    },
)
@serve.ingress()
class WithFastMCP(Plants):
    """Served by FastMCP, with sessions: `x-session-id` keeps a client with its replica."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        server = FastMCP("plants", tools=[self.find, self.count])
        tools = server.http_app(path="/", json_response=True)
        app = FastAPI(lifespan=tools.lifespan)
        app.mount("/mcp", tools)
        return app


sdk = WithSDK.bind()
fast = WithFastMCP.bind()
