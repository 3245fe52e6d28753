"""hypercorn and granian serve an application over HTTP/2, where a body needs no length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ecosystem.document import version_of
from tests.programs import environment, free_port, process, write_module
from tests.servers import wait_until

pytestmark = pytest.mark.ecosystem

BODIES = """
from fastapi import FastAPI, Request
import ingress as serve

app = FastAPI()

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Bodies:
    @app.post("/json")
    async def json(self, value: dict[str, int]) -> dict[str, int]:
        return value

    @app.get("/size")
    async def size(self, request: Request) -> int:
        return len(await request.body())

    @app.put("/stream")
    async def stream(self, request: Request) -> int:
        return sum([len(part) async for part in request.stream()])

bodies = Bodies.bind()
"""

SERVERS = {
    "hypercorn": ["-b", "127.0.0.1:{port}"],
    "granian": ["--interface", "asgi", "--http", "2", "--host", "127.0.0.1", "--port", "{port}"],
}


@pytest.mark.parametrize("server", SERVERS)
def test_a_body_without_a_length_arrives(server: str, tmp_path: Path) -> None:
    if version_of(server) == "":
        pytest.skip("make test-ecosystem")
    write_module(tmp_path, "bodies", BODIES)
    port = free_port()
    options = [each.format(port=port) for each in SERVERS[server]]
    command = [str(Path(sys.executable).with_name(server)), *options, "bodies:bodies"]

    def parts(*given: bytes) -> Iterator[bytes]:
        yield from given

    json = {"content-type": "application/json"}
    with (
        process(command, tmp_path, environment(tmp_path)) as running,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", http1=False, http2=True) as client,
    ):
        wait_until(lambda: _is_ready(client))
        for _ in range(4):
            answer = client.post("/json", content=parts(b'{"a"', b":1}"), headers=json)
            assert (answer.http_version, answer.text) == ("HTTP/2", '{"a":1}')
            assert "content-length" not in answer.request.headers
            assert client.put("/stream", content=parts(*[b"x" * 9_000] * 50)).json() == 450_000
            assert client.get("/size").json() == 0
        client.close()  # granian waits for its connections
        running.signal()
        running.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/readyz").status_code == 200
    except httpx.ConnectError:
        return False
