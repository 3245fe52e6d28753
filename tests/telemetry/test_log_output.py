"""The lines that a server writes: their format, the access log, and sinks that do not take them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.servers import (
    INGRESS,
    Connection,
    ServerProcess,
    environment,
    ingress_run,
    wait_until,
    write_module,
)

MODULE = """
import asyncio, logging, threading, warnings
import ingress as serve
from fastapi import FastAPI, WebSocket

mine = logging.getLogger("mine")
ours = logging.getLogger("ingress")
app = FastAPI()

@serve.deployment(logging_config={"enable_access_log": False, "log_level": "DEBUG"})
@serve.ingress(quiet := FastAPI())
class Quiet:
    @quiet.get("/")
    async def get(self):
        ours.debug("details of Quiet")
        return 1

@serve.deployment
@serve.ingress(app)
class Api:
    @app.get("/items/{number}")
    async def item(self, number: int):
        mine.warning("item %s", number)
        ours.debug("details of Api")
        logging.getLogger("ray.serve").info("as in Ray Serve", extra={"cost": 3, "what": {1}})
        print("printed", number)
        print('{"already": "json"}')
        warnings.warn(f"careful with {number}")
        await asyncio.to_thread(mine.warning, "in a thread")
        thread = threading.Thread(target=int, args=("no number",), name="of-mine")
        thread.start()
        thread.join()
        return number

    @app.get("/fail")
    def fail(self):
        mine.warning("a name\\nERROR:    forged\\n{\\"levelname\\": \\"ERROR\\"}\\x1b[2Jend")
        raise ValueError("broken\\nERROR:    forged too")

    @app.get("/wait")
    async def wait(self):
        print("waiting")
        await asyncio.sleep(60)

    @app.get("/flood")
    async def flood(self):
        for _ in range(180):
            print("x" * 60_000)

    @app.post("/body")
    async def body(self, text: dict):
        return text

    @app.websocket("/talk")
    async def talk(self, socket: WebSocket):
        await socket.accept()
        logging.getLogger("uvicorn.error").info("said to uvicorn's logger")
        await socket.close(4000)

hello = Api.bind()
alone = Quiet.bind()
"""

FILE = """
proxy_location: Disabled
logging_config: {{encoding: JSON, log_level: WARNING, additional_log_standard_attrs: [threadName]}}
applications:
- {{name: main, import_path: "logged:hello", route_prefix: /, deployments: [
    {{name: Api, logging_config: {{log_level: INFO, logs_dir: "{folder}/logs"}}}}]}}
- {{name: quiet, import_path: "logged:alone", route_prefix: /quiet}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "logged", MODULE)
    return tmp_path


def objects(text: str) -> list[dict[str, Any]]:
    """Return the lines of an output, each of which must be a JSON object."""
    found = []
    for line in text.splitlines():
        each = json.loads(line)
        assert isinstance(each, dict), line
        found.append(each)
    return found


def lines_with(server: ServerProcess, name: str, value: object, count: int = 1) -> Any:
    """Wait for this number of JSON lines with a field of this value, and return them."""

    def found() -> list[dict[str, Any]]:
        whole = server.output[: server.output.rfind("\n") + 1]
        read = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
        return [each for each in read if each.get(name) == value]

    wait_until(lambda: len(found()) >= count)
    return found()


def test_with_json_each_line_of_the_server_and_of_user_code_is_an_object(folder: Path) -> None:
    with ingress_run(folder, "logged:hello", "--log-format", "json") as server:
        server.wait_for("is ready at")
        assert httpx.get(f"{server.url}/items/7", headers={"x-request-id": "one"}).json() == 7
        assert httpx.get(f"{server.url}/fail", headers={"x-request-id": "two"}).status_code == 500
        [failed] = lines_with(server, "name", "uvicorn.error")
        lines_with(server, "status", 500)
        server.signal()
        assert server.wait() == 0

    found = objects(server.output)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        by_name.setdefault(each.get("name", ""), []).append(each)
    assert any("runs in" in each["message"] for each in by_name["stdout"])  # the plan
    assert by_name[""] == [{"already": "json"}]
    [said, in_thread] = [each for each in by_name["mine"] if each["request_id"] == "one"]
    place = {
        "route": "/items/{number}",
        "application": "default",
        "deployment": "Api",
        "replica": "0",
        "component_name": "replica",
    }
    del said["asctime"], said["lineno"], said["process"], said["timestamp_ns"]
    assert said == {
        "levelname": "WARNING",
        "message": "item 7",
        "filename": "logged.py",
        "name": "mine",
        "request_id": "one",
        **place,
    }
    assert in_thread["request_id"] == "one"
    [rays] = by_name["ray.serve"]
    assert (rays["cost"], rays["what"]) == (3, "{1}")
    [printed] = [each for each in by_name["stdout"] if each["message"] == "printed 7"]
    assert {**printed, **place, "request_id": "one"} == printed
    [warned] = by_name["py.warnings"]
    assert "careful with 7" in warned["message"]
    assert any("of-mine" in each["message"] and "exc_text" in each for each in by_name["ingress"])
    assert failed["exc_text"].startswith('Traceback (most recent call last):\n  File "')
    assert "logged.py" in failed["exc_text"].splitlines()[1]
    assert server.output.count("ValueError: broken") == 1
    assert failed["request_id"] == "two"


def test_the_access_log_has_each_request_once_with_its_route_and_its_replica(folder: Path) -> None:
    with ingress_run(folder, "logged:hello") as server:
        server.wait_for("is ready at")
        with httpx.Client(base_url=server.url) as client:
            client.get("/items/1", headers={"x-request-id": "one"})
            client.get("/nowhere%0aERROR%1b[31m/" + "a" * 5000)
            client.post("/body", json={"a": 1})
            client.get("/-/healthz")
        with connect(f"{server.url.replace('http', 'ws')}/talk") as socket:
            with pytest.raises(Exception, match="4000"):
                socket.recv()
        with Connection(server.port) as left:
            left.request("/wait")
            server.wait_for("waiting")
        [item] = lines_with(server, "route", "/items/{number}")
        [absent] = lines_with(server, "status", 404)
        [posted] = lines_with(server, "method", "POST")
        [talked] = lines_with(server, "method", "WS")
        [gone] = lines_with(server, "route", "/wait")

    fields = {
        "request_id": "one",
        "route": "/items/{number}",
        "application": "default",
        "deployment": "Api",
        "replica": "0",
        "method": "GET",
        "status": 200,
        "serve_access_log": True,
        "levelname": "INFO",
        "name": "ingress.access",
    }
    assert {name: item[name] for name in fields} == fields
    assert re.fullmatch(r"127\.0\.0\.1:\d+", item["client"])
    assert 0 <= item["queue_ms"] <= item["latency_ms"]
    assert item["message"] == f"GET /items/{{number}} 200 {item['latency_ms']:.1f}ms"
    assert absent["path"].startswith(r"/nowhere\nERROR\x1b[31m/aaa")
    assert len(absent["path"]) == 256
    assert "route" not in absent
    assert (posted["route"], posted["status"]) == ("/body", 200)
    assert absent["request_id"]
    assert "/-/healthz" not in server.output
    assert "INFO:     said to uvicorn's logger [Api#0 " in server.output
    assert "connection open" not in server.output, "that is uvicorn's own"
    assert (talked["route"], talked["status"]) == ("/talk", 4000)
    assert gone["status"] == 499
    for each in (talked, gone):  # their lines are written when the rest of the request is over
        assert each["request_id"]
        assert (each["deployment"], each["replica"]) == ("Api", "0")
        assert each["queue_ms"] < each["latency_ms"]


@pytest.mark.thorough
def test_with_text_no_text_of_a_client_or_an_exception_looks_like_a_record(folder: Path) -> None:
    with ingress_run(folder, "logged:hello", "--log-format", "text") as server:
        server.wait_for("is ready at")
        httpx.get(f"{server.url}/fail", headers={"x-request-id": "two"})
        server.wait_for("forged too")
        server.wait_for(r"INFO:     127\.0\.0\.1:\d+ GET /fail 500 \d+\.\dms queue \d")

    assert r"a name [Api#0 two]" in server.output
    assert r"\x1b[2Jend" in server.output
    assert "\x1b" not in server.output
    assert re.findall(r"^(?:ERROR:? .*forged|\{).*", server.output, re.MULTILINE) == []


@pytest.mark.thorough
@pytest.mark.parametrize("words", [["--no-access-log"], ["--log-level", "warning"]])
def test_the_access_log_can_be_turned_off(folder: Path, words: list[str]) -> None:
    with ingress_run(folder, "logged:hello", "--log-format", "text", *words) as server:
        server.wait_for("is ready at")
        assert httpx.get(f"{server.url}/items/1").status_code == 200
        server.signal()
        assert server.wait() == 0

    assert "/items/{number} 200" not in server.output
    assert "item 1" in server.output


@pytest.mark.thorough
def test_a_file_has_the_logging_of_the_process_and_of_a_deployment(folder: Path) -> None:
    (folder / "serve.yaml").write_text(FILE.format(folder=folder))
    with ingress_run(folder, "serve.yaml") as server:
        server.wait_for("Application 'quiet' is ready")
        assert httpx.get(f"{server.url}/items/1").json() == 1
        assert httpx.get(f"{server.url}/quiet/").json() == 1
        lines_with(server, "message", "details of Quiet")
        server.signal()
        assert server.wait() == 0
        [path] = (folder / "logs").iterdir()

    found = objects(server.output)
    messages = {each.get("message", "") for each in found}
    assert not {each for each in messages if each.startswith("details of Api")}
    [said] = [each for each in found if each.get("message") == "as in Ray Serve"]
    assert said["threadName"] == "Api#0"
    assert [each["deployment"] for each in found if each.get("serve_access_log")] == ["Api"]
    # The process has WARNING, so that nothing of level INFO comes from outside of Api.
    assert not [each for each in messages if each.startswith("stopping")]
    assert re.fullmatch(r"replica_main_Api_0_\d+\.log", path.name)
    kept = objects(path.read_text())
    assert {"as in Ray Serve", "GET /items/{number} 200"} <= {
        each["message"].rpartition(" ")[0] if "serve_access_log" in each else each["message"]
        for each in kept
    }


def python(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=environment(folder)
    )


PRINTING = """
import io, multiprocessing, sys
from ingress.telemetry.logs.streams import write_json

def child():
    print("printed in a forked child")
    sys.stdout.write("begun there")
    raise ValueError("of the child")

write_json()
sys.stdout.write("begun ")
child = multiprocessing.get_context("fork").Process(target=child)
child.start()
child.join()
sys.stdout.reconfigure(line_buffering=True)
print("and ended in", sys.stdout.name, sys.stdout.mode)
io.TextIOWrapper(sys.stdout.detach(), write_through=True).write("wrapped\\n")
print("the last words", end="", flush=True)
"""


def test_streams_as_json_are_like_pythons_and_lose_nothing(tmp_path: Path) -> None:
    done = python(tmp_path, PRINTING)

    assert [each["message"] for each in objects(done.stdout)] == [
        "printed in a forked child",
        "begun there",
        "begun and ended in <stdout> w",
        "wrapped",
        "the last words",
    ]
    assert objects(done.stderr)[-1]["message"] == "ValueError: of the child"


SCRIPT = """
import logging
import ingress as serve

@serve.deployment(logging_config={"log_level": "DEBUG", "encoding": "JSON"})
class Loud:
    async def __call__(self):
        logging.getLogger("ingress").debug("of Loud")

@serve.deployment
class Plain:
    def __init__(self, loud):
        self.loud = loud

    async def __call__(self):
        logging.getLogger("ingress").debug("debug of Plain")
        logging.getLogger("ingress").warning("of Plain")
        await self.loud.remote()

logging.basicConfig(format="root %(levelname)s %(message)s", level="WARNING")
logging.getLogger("mine").warning("before")
START
response = serve.run(Plain.bind(Loud.bind()), name="app", route_prefix=None).remote()
response.result()
print(response.request_id)
serve.shutdown()
logging.getLogger("ingress").warning("after")
"""


def test_in_a_program_only_deployments_with_a_config_are_logged_otherwise(tmp_path: Path) -> None:
    done = python(tmp_path, SCRIPT.replace("START", ""))

    lines = done.stderr.splitlines()
    [loud] = [json.loads(each) for each in lines if each.startswith("{")]
    assert (loud["message"], loud["levelname"]) == ("of Loud", "DEBUG")
    assert loud["request_id"] == done.stdout.strip()
    rest = [each.strip() for each in lines if not each.startswith("{")]
    assert rest == ["root WARNING before", "root WARNING of Plain", "root WARNING after"]


def test_serve_start_gives_all_records_a_format_until_the_shutdown(tmp_path: Path) -> None:
    start = "serve.start({'host': None}, logging_config={'encoding': 'JSON'})"
    lines = python(tmp_path, SCRIPT.replace("START", start)).stderr.splitlines()
    found = [json.loads(each) for each in lines if each.startswith("{")]
    assert [each["message"] for each in found] == ["of Plain", "of Loud"]
    rest = [each.strip() for each in lines if not each.startswith("{")]
    assert rest == ["root WARNING before", "root WARNING after"]


@contextmanager
def writing_to(
    output: int, folder: Path, *words: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Serve with this standard output, and with a file for errors."""
    errors = folder / "errors.txt"
    command = [*INGRESS, "run", "logged:hello", "--log-format", "json", *words]
    with errors.open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=output, stderr=log
        )
    try:
        yield server, errors
    finally:
        server.kill()
        server.wait()


def told_of_drops(errors: Path) -> list[str]:
    return [each["message"] for each in objects(errors.read_text()) if "dropped" in each["message"]]


def test_a_pipe_that_is_not_read_stops_no_request_and_is_told_of_once(folder: Path) -> None:
    read, write = os.pipe()
    try:
        with writing_to(write, folder, "--port", "0") as (server, errors):
            port = int(read_until(read, rb"127\.0\.0\.1:(\d+)")[1])
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                assert client.get("/flood").status_code == 200  # 11 MB; 8.5 fit
                assert client.get("/items/1").json() == 1
            server.terminate()
            assert server.wait(60) == 0
    finally:
        os.close(read)
        os.close(write)

    assert told_of_drops(errors) == [
        "ingress-log-stdout: log lines are dropped, because they are read too slowly"
    ]


def read_until(descriptor: int, pattern: bytes) -> re.Match[bytes]:
    text = b""
    while not (found := re.search(pattern, text)):
        part = os.read(descriptor, 65536)
        assert part, text
        text += part
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
def test_a_full_disk_ends_nothing_and_is_told_of_once(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        with writing_to(full.fileno(), folder, "--uds", "server.sock") as (server, errors):
            wait_until((folder / "server.sock").exists)
            transport = httpx.HTTPTransport(uds=str(folder / "server.sock"))
            with httpx.Client(transport=transport, base_url="http://server") as client:
                wait_until(lambda: client.get("/-/readyz").status_code == 200)
                assert [client.get(f"/items/{n}").json() for n in range(20)] == [*range(20)]
            server.terminate()
            assert server.wait(60) == 0

    [told] = told_of_drops(errors)
    assert "No space left on device" in told
