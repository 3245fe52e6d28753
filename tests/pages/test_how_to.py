"""The programs of docs/how-to do what their pages say."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

import ingress as serve
from ingress.testing import TestClient
from tests.documents import ROOT, blocks
from tests.servers import INGRESS, PATIENCE_S, environment, process, wait_until, write_module

PAGES = ROOT / "docs" / "how-to"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Import the program of a page, in a folder of its own."""
    loaded: list[str] = []

    def load(page: str) -> ModuleType:
        (text,) = [text for language, text in blocks(PAGES / page) if language == "python"]
        name = re.match(r"# (\w+)\.py\n", text)
        assert name is not None
        write_module(tmp_path, name[1], text)
        loaded.append(name[1])
        return importlib.import_module(name[1])

    monkeypatch.syspath_prepend(tmp_path)
    yield load
    for name in loaded:
        sys.modules.pop(name, None)


def test_a_key_is_asked_for(program: Callable[..., Any]) -> None:
    with TestClient(program("auth.md").private) as client:
        assert client.get("/").json() == "anyone"
        assert client.get("/me").status_code in (401, 403)
        assert client.get("/me", headers={"authorization": "Bearer s3cret"}).json() == "ada"
        assert client.get("/me", headers={"authorization": "Bearer no"}).status_code == 403
        assert client.get("/admin", headers={"authorization": "Bearer s3cret"}).status_code == 403
        admin = client.get("/admin", headers={"authorization": "Bearer hopper"}).json()
        assert admin == "settings of grace"


def test_a_file_is_read_in_a_thread_and_a_body_in_parts(program: Callable[..., Any]) -> None:
    content = b"x" * 3_000_000
    with TestClient(program("uploads.md").files) as client:
        answer = client.post("/file", files={"upload": ("a.bin", content)}).json()
        assert client.post("/stream", content=content).json() == len(content)
    digest = hashlib.sha256(content).hexdigest()
    assert answer == {"name": "a.bin", "bytes": len(content), "sha256": digest}


def test_a_job_that_is_not_awaited_runs_on_after_the_answer(
    program: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with TestClient(program("background-work.md").jobs) as client:
        assert client.post("/job", params={"job": "a"}).status_code == 202
        assert client.post("/after", params={"job": "b"}).json() == "answered"
        wait_until(lambda: client.get("/").json() == ["a"])
        wait_until(lambda: "answered: b" in capsys.readouterr().out)


def test_jobs_of_a_broker_say_how_far_they_are(program: Callable[..., Any]) -> None:
    with TestClient(program("jobs-on-many-machines.md").main) as client:
        answer = client.post("/pages", json=["one", "three"])
        assert answer.status_code == 202
        url = f"/pages/{answer.json()['id']}"
        wait_until(lambda: client.get(url).json()["result"] == {"done": 2, "letters": 5})
        assert client.delete(url).status_code == 200
        assert client.get(url).json()["status"] == "SUCCESS"


def test_tokens_are_events(program: Callable[..., Any]) -> None:
    with TestClient(program("sse.md").chat) as client:
        text = client.get("/chat", params={"prompt": "hey"}).text
    assert re.findall(r'data: \{"text":"(.+)"\}', text) == ["You", "said:", "hey"]


def test_what_one_member_says_all_members_get(program: Callable[..., Any]) -> None:
    with TestClient(program("websockets.md").room) as client:
        with client.websocket_connect("/room") as one, client.websocket_connect("/room") as other:
            wait_until(lambda: client.get("/").json() == 2)
            one.send_text("hello")
            assert (one.receive_text(), other.receive_text()) == ("hello", "hello")
        wait_until(lambda: client.get("/").json() == 0)


def test_applications_share_a_server(program: Callable[..., Any]) -> None:
    shop = program("several-apps.md")
    serve.start({"port": 0})
    try:
        serve.run_many(
            [
                serve.RunTarget(shop.catalogue, name="catalogue", route_prefix="/catalogue"),
                serve.RunTarget(shop.orders, name="orders", route_prefix="/orders"),
            ]
        )
        (url,) = serve.status().proxies
        assert httpx.get(f"{url}/catalogue/").json() == ["pen", "ink"]
        assert httpx.get(f"{url}/orders/").json() == ["1 x pen", "1 x ink"]
    finally:
        serve.shutdown()


def test_each_replica_has_an_engine_of_its_own(
    program: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiosqlite")
    monkeypatch.chdir(tmp_path)
    shelf = program("database.md")
    loops = []

    def engine(url: str) -> Any:
        loops.append(asyncio.get_running_loop())
        return create_async_engine(url)

    create_async_engine = shelf.create_async_engine
    monkeypatch.setattr(shelf, "create_async_engine", engine)
    with TestClient(shelf.shelf) as client:
        assert client.post("/ink").status_code == 201
        assert [client.get("/").json() for _ in range(8)] == [["ink"]] * 8
    assert len(set(loops)) == len(loops) == 2


def test_a_model_is_loaded_once_and_chosen_by_the_request(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = program("models.md")
    loaded: list[str] = []

    class Counted(models.Model):  # type: ignore[misc, name-defined]
        def __init__(self, language: str) -> None:
            loaded.append(language)
            super().__init__(language)

    monkeypatch.setattr(models, "Model", Counted)
    with TestClient(models.api) as client:
        assert client.get("/").json() == "en: hello"
        for language in ("de", "de", "fr", "de", "fr"):
            found = client.get("/", params={"language": language})
            assert found.json() == f"{language}: hello"
    assert sorted(loaded) == ["de", "en", "en", "fr"]


def test_a_leak_is_found_at_its_line(tmp_path: Path) -> None:
    (text,) = [text for language, text in blocks(PAGES / "leak.md") if language == "python"]
    write_module(tmp_path, "shop", text)
    over = threading.Event()

    def order() -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            while not over.is_set():
                client.post("/", content=b"x" * 10_000).raise_for_status()

    command = [*INGRESS, "run", "shop:shop", "--port", "0"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        server.wait_for("is ready")
        with ThreadPoolExecutor() as pool:
            ordering = pool.submit(order)
            try:
                found = subprocess.run(
                    [*INGRESS, "memory", "--seconds", "2", "--pid", str(server.process.pid)],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    env=environment(tmp_path),
                    check=False,
                )
            finally:
                over.set()
            ordering.result(PATIENCE_S)
    assert "shop.py:17: self.seen.append(await request.body())" in found.stdout, found


NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")

BEHIND = """
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

import ingress as serve

app = FastAPI()


@serve.deployment
@serve.ingress(app)
class Main:
    @app.get("/client")
    async def client(self, request: Request) -> dict[str, str]:
        assert request.client is not None
        return {"client": request.client.host, "scheme": request.url.scheme}

    @app.get("/stream")
    async def stream(self) -> StreamingResponse:
        return StreamingResponse(self.two())

    async def two(self):
        yield "first"
        await serve_more.wait()
        yield "second"

    @app.get("/more")
    async def more(self) -> None:
        serve_more.set()


import asyncio

serve_more = asyncio.Event()
hello = Main.bind()
"""


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_the_configuration_of_nginx_passes_streams_and_the_address(tmp_path: Path) -> None:
    text = (PAGES / "proxies.md").read_text()
    (command,) = [t for language, t in blocks(PAGES / "proxies.md") if language == "console"]
    (config,) = re.findall(r"^```text\n(upstream.*?)^```$", text, re.MULTILINE | re.DOTALL)
    uds = tmp_path / "s"
    config = config.replace("/run/shop.sock", str(uds))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = config.replace("listen 80;", f"listen {address};")
    whole = (
        f"daemon off; pid {tmp_path}/pid; error_log stderr;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")  # else one that may not enter this folder
        + "events {}\nhttp {\naccess_log off;\n"
        + "".join(
            f"{name}_temp_path {tmp_path}/{name};\n"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        + config
        + "}\n"
    )
    (tmp_path / "nginx.conf").write_text(whole)
    write_module(tmp_path, "main", BEHIND)
    words = shlex.split(command.removeprefix("$ ").replace("/run/shop.sock", str(uds)))
    with process([*INGRESS, *words[1:]], tmp_path, environment(tmp_path)) as server:
        wait_until(lambda: "is ready at" in server.output, timeout_s=60)
        proxy = subprocess.Popen(
            [str(NGINX), "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)]
        )
        try:
            wait_until((tmp_path / "pid").exists)
            with httpx.Client(base_url=f"http://{address}") as client:
                seen = client.get("/client", headers={"x-forwarded-for": "203.0.113.9"}).json()
                assert seen["client"] == "127.0.0.1"  # not what the client claims
                with client.stream("GET", "/stream") as answer:
                    parts = answer.iter_text()
                    assert next(parts) == "first"  # not held back by the proxy
                    assert httpx.get(f"http://{address}/more").status_code == 200
                    assert next(parts) == "second"
        finally:
            proxy.terminate()
            proxy.wait(10)
