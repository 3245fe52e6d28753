"""`ingress run` with the options that uvicorn has, in each way in which it serves."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from ingress.app.declaration.module_app import NotAnApplication, load
from tests.programs import (
    INGRESS,
    environment,
    free_port,
    process,
    run_ingress,
    said_by,
    write_module,
)
from tests.servers import Connection

WAYS = {"one": [], "workers": ["--workers", "2"], "reload": ["--reload"]}

APP = """
import asyncio, os
from fastapi import FastAPI, Request
from pydantic import BaseModel
import ingress as serve

app = FastAPI()

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Seen:
    def __init__(self, said=""):
        self.said = said

    @app.get("/seen")
    async def seen(self, request: Request):
        scope = request.scope
        return {
            "root_path": scope["root_path"],
            "scheme": scope["scheme"],
            "client": scope["client"] and scope["client"][0],
            "at_import": AT_IMPORT,
            "said": self.said,
            "application": serve.get_replica_context().app_name,
        }

    @app.post("/size")
    async def size(self, request: Request) -> int:
        return len(await request.body())

    @app.get("/slow")
    async def slow(self):
        print("slow began", flush=True)
        await asyncio.sleep(1000)

AT_IMPORT = os.environ.get("FROM_FILE")
hello = Seen.bind()

def make():
    return Seen.bind()

class Words(BaseModel):
    word: str
    count: int = 1

def build(words: Words):
    return Seen.options(num_replicas=words.count).bind(words.word * words.count)

def build_of_dict(words):
    return Seen.bind(repr(words))

def build_nothing(words):
    return words
"""

STARTS = """
from app import *
serve.start({"port": PORT, "max_body_size": 3, **MORE})
"""

LOGS = """
version: 1
disable_existing_loggers: false
formatters: {mine: {format: 'mine %(levelname)s %(name)s %(message)s'}}
handlers: {mine: {class: logging.StreamHandler, formatter: mine}}
loggers:
  ingress: {handlers: [mine], level: INFO}
  uvicorn: {handlers: [mine], level: WARNING}
"""

LISTENING = """
import os, socket, sys
bound = socket.create_server(("127.0.0.1", 0))
os.set_inheritable(bound.fileno(), True)
words = [*sys.argv[1:], "--fd", str(bound.fileno())]
os.execv(sys.executable, [sys.executable, "-m", "ingress", "run", "app:hello", *words])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


@pytest.fixture(
    params=[
        *(pytest.param(WAYS[way], id=way) for way in ("one", "workers")),
        # As with --workers, one process more: `make test-reliability`.
        pytest.param(WAYS["reload"], id="reload", marks=pytest.mark.slow),
    ]
)
def way(request: pytest.FixtureRequest) -> list[str]:
    way: list[str] = request.param
    return way


def starts(port: int, **more: object) -> str:
    return STARTS.replace("PORT", str(port)).replace("MORE", repr(more))


def run(*words: str) -> list[str]:
    return [*INGRESS, "run", *words]


@pytest.mark.thorough
def test_name_prefix_factory_variables_and_socket_act_in_each_way(
    folder: Path, way: list[str]
) -> None:
    path = folder / "s"
    (folder / "variables").write_text("FROM_FILE=yes\n")
    words = ["app:make", "--factory", "--name", "shop", "--route-prefix", "/v1", "--uds", str(path)]
    more = ["--env-file", "variables", "--root-path", "/outer"]
    with process(run(*words, *more, *way), folder, environment(folder)) as server:
        server.wait_for(f"Application 'shop' is ready at unix:{path}/v1")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            answer = client.get("/v1/seen").json()
            routes = client.get("/-/routes").json()
        server.signal()
        assert server.wait() in (0, -15)

    assert answer["root_path"] == "/outer/v1"
    assert answer["at_import"] == "yes"
    assert answer["application"] == "shop"
    assert routes == {"/v1": "shop"}
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["app:build", "word=a=b", "count=2"], "a=ba=b"),
        pytest.param(
            ["app:build_of_dict", "--workers", "2", "word=a", "count=2"],
            "{'word': 'a', 'count': '2'}",
            marks=pytest.mark.thorough,
        ),
        pytest.param(["app:build_of_dict"], "{}", marks=pytest.mark.thorough),
    ],
    ids=["pydantic", "dict-in-workers", "nothing"],
)
def test_a_builder_gets_the_arguments_of_the_command_line(
    folder: Path, words: list[str], said: str
) -> None:
    with process(run(*words, "--port", "0"), folder, environment(folder)) as server:
        assert httpx.get(f"{server.url}/seen").json()["said"] == said


def test_mistakes_with_builders_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "app.py").rename(folder / "builders.py")
    for target, arguments, told in (
        ("build", {"count": "x"}, "not those of Words: word: Field required; count: .* integer"),
        ("build", None, "not those of Words: word: Field required"),
        ("build_nothing", {"a": "b"}, "returned a dict object, not a bound application; end it"),
        ("make", {"a": "b"}, "a function with exactly one parameter"),
        ("make", None, "if it returns an application, add --factory|did you mean builders:hello"),
    ):
        with pytest.raises(NotAnApplication, match=told):
            load(f"builders:{target}", arguments=arguments)


@pytest.mark.thorough
def test_a_socket_whose_server_was_killed_is_used_again(folder: Path) -> None:
    path = folder / "s"
    command = run("app:hello", "--uds", str(path))
    with process(command, folder, environment(folder)) as server:
        server.wait_for("is ready at unix:")
        second = run_ingress(folder, *command[3:])
        server.process.kill()
        server.wait()
    assert "a server listens there already" in second.stderr
    assert path.exists()

    with process(command, folder, environment(folder)) as server:
        server.wait_for("is ready at unix:")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, file = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-passout", "pass:secret", "-keyout", str(key), "-out", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    return str(key), str(file)


@pytest.mark.thorough
def test_tls_and_believed_proxies_act_in_each_way(
    folder: Path, way: list[str], certificate: tuple[str, str]
) -> None:
    key, file = certificate
    tls = ["--ssl-keyfile", key, "--ssl-certfile", file, "--ssl-keyfile-password", "secret"]
    ciphers = ["--ssl-ciphers", "ECDHE-RSA-AES128-GCM-SHA256"]
    clients = ["--ssl-cert-reqs", "2", "--ssl-ca-certs", file]
    words = ["app:hello", "--port", "0", *tls, *ciphers, *clients, "--forwarded-allow-ips", "*"]
    with process(run(*words, *way), folder, environment(folder)) as server:
        url = server.wait_for(r"is ready at (https://127.0.0.1:\d+)")[1]
        context = ssl.create_default_context(cafile=file)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/seen", verify=context)
        context.load_cert_chain(file, key, "secret")
        headers = {"x-forwarded-for": "9.9.9.9", "x-forwarded-proto": "http"}
        answer = httpx.get(f"{url}/seen", headers=headers, verify=context).json()
        plain = httpx.get(f"{url}/seen", verify=context).json()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE-RSA-AES256-GCM-SHA384")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/seen", verify=context)

    assert (answer["client"], answer["scheme"]) == ("9.9.9.9", "http")
    assert (plain["client"], plain["scheme"]) == ("127.0.0.1", "https")


PARSERS = {
    "h11": (["--http", "h11"], "HTTP/1.1"),
    "zttp": (["--http", "zttp"], "HTTP/1.1"),
    "http2": (["--http", "zttp", "--http2"], "HTTP/2"),
}


@pytest.mark.parametrize(("words", "version"), PARSERS.values(), ids=PARSERS)
def test_a_parser_that_is_asked_for_serves_and_bodies_have_their_limit(
    folder: Path, words: list[str], version: str
) -> None:
    if find_spec(words[1]) is None:
        pytest.skip(f"{words[1]} is not installed: it has no wheel for this Python")
    command = run("app:hello", "--port", "0", *words)
    environ = {**environment(folder), "INGRESS_MAX_BODY_SIZE": "8"}
    with process(command, folder, environ) as server:
        is_http2 = version == "HTTP/2"
        with httpx.Client(base_url=server.url, http1=not is_http2, http2=is_http2) as client:
            for body, status in ((b"12345678", 200), (b"123456789", 413), (b"1", 200)):
                answer = client.post("/size", content=body)
                assert (answer.status_code, answer.http_version) == (status, version)
        assert ("no limits for connections" in server.output) == ("zttp" in words)
        assert "[dim]" not in server.output


@pytest.mark.thorough
def test_logs_and_timeouts_act_in_each_way_and_the_port_beats_that_of_the_module(
    folder: Path, way: list[str]
) -> None:
    port = free_port()
    write_module(folder, "starts", starts(port, host=None))
    (folder / "logs.yaml").write_text(LOGS)
    words = ["starts:hello", "--port", "0", "--log-config", "logs.yaml", "--log-level", "debug"]
    more = ["--timeout-graceful-shutdown", "1", "--timeout-keep-alive", "1"]
    off = ["--no-access-log", "--no-proxy-headers"]
    with process(run(*words, *more, *off, *way), folder, environment(folder)) as server:
        server.wait_for("is ready at ")
        assert server.port != port
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/seen")
        with httpx.Client(base_url=server.url, headers={"x-forwarded-for": "9.9.9.9"}) as client:
            answers = [client.get("/seen") for _ in range(20)]
            # Another option of `serve.start` still acts.
            assert client.post("/size", content=b"four").status_code == 413
        assert {each.json()["client"] for each in answers} == {"127.0.0.1"}
        with Connection(server.port) as idle:
            began = time.monotonic()
            idle.request("/seen", headers="")
            idle.receive_all()
            assert time.monotonic() - began < 10.0  # by default 90 s
        with Connection(server.port) as slow:
            slow.request("/slow")
            server.wait_for("slow began")
            began = time.monotonic()
            server.signal()
            assert server.wait() in (0, -15)
            assert 0.9 < time.monotonic() - began < 10.0  # by default 20 s

    output = server.output
    assert "mine INFO uvicorn.error Started server process" in output  # by default, warnings only
    assert '"GET /seen' not in output
    assert " ended " not in output  # of a worker


@pytest.mark.thorough
def test_the_port_of_the_module_is_used_if_the_command_line_has_none(folder: Path) -> None:
    port = free_port()
    write_module(folder, "starts", starts(port))
    command = run("starts:hello", "--workers", "2")
    with process(command, folder, environment(folder)) as server:
        server.wait_for("is ready at ")
        assert server.port == port
        assert httpx.get(f"{server.url}/seen").json()["client"] == "127.0.0.1"


def test_an_inherited_socket_is_served_in_each_way(folder: Path, way: list[str]) -> None:
    command = [sys.executable, "-c", LISTENING, *way]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("is ready at ")
        assert httpx.get(f"{server.url}/seen").json()["application"] == "default"


@pytest.mark.thorough
def test_workers_print_the_same_plan_and_the_same_line_as_one_process(folder: Path) -> None:
    printed = []
    for way in (WAYS["one"], WAYS["workers"]):
        command = run("app:hello", "--port", "0", *way)
        with process(command, folder, environment(folder)) as server:
            server.wait_for("is ready at ")
            # Each has its own control socket, which in one process answers during the start too.
            own = (" cores: ", "control socket ", "Metrics at ")
            lines = [line for line in server.output.splitlines() if not any(w in line for w in own)]
            printed.append([line.replace(f":{server.port}", "") for line in lines])

    one, workers = printed
    assert one[:-1] == workers[:-1]
    assert workers[-1] == one[-1].replace(" (Ctrl-C", ", in 2 processes (Ctrl-C")


REFUSED = {
    "two-addresses": (["--uds", "s", "--port", "1"], "--uds and --host or --port are both given"),
    "uds-and-fd": (["--uds", "s", "--fd", "3"], "--uds and --fd are both given"),
    "uds-nowhere": (["--uds", "no/such/s"], "in a folder that exists"),
    "fd-closed": (["--fd", "77"], "fd=77 is not an open socket: Bad file descriptor"),
    "no-key": (["--ssl-certfile", "app.py"], "--ssl-certfile needs a certificate and its key"),
    "no-certificate": (["--ssl-ciphers", "x"], "give both --ssl-certfile and --ssl-keyfile"),
    "not-pem": (["--ssl-certfile", "app.py", "--ssl-keyfile", "app.py"], "the files are PEM"),
    "no-parser": (["--http", "x"], "--http must be auto, h11, httptools or zttp, got 'x'"),
    "http2-alone": (["--http2"], "--http2 needs --http zttp"),
    "no-loop": (
        ["--loop", "bogus"],
        "the event loop must be auto, asyncio, uvloop, or MODULE:NAME",
    ),
    "no-logging": (["--log-config", "app.py"], "--log-config 'app.py' cannot be used"),
    "no-workers": (["--timeout-worker-healthcheck", "9"], "is for --workers"),
    "both": (["--reload", "--workers", "2"], "--reload serves in one process"),
    "prefix": (["--route-prefix", "api"], "Invalid route_prefix 'api', must start with"),
    "on-ray": (["--engine", "ray", "--uds", "s"], "--uds is for the local engine"),
    "on-ray-too": (["--engine", "ray", "--no-proxy-headers"], "--no-proxy-headers is for"),
    "no-factory": (["--factory"], "'app:hello' is an application, not a factory"),
    "argument": (["word=a"], "'app:hello' is an application, and only a builder takes arguments"),
    "no-argument": (["word"], "invalid application argument 'word', it must be of the form KEY="),
    "factory-argument": (["--factory", "word=a"], "a builder, which has one parameter; leave out"),
    "host": (["--host", "10.255.255.1"], "an address of this machine, got '10.255.255.1'"),
}


def test_options_that_make_no_sense_are_refused_in_one_line(folder: Path) -> None:
    said = said_by(folder, *[run("app:hello", *words)[3:] for words, _ in REFUSED.values()])

    for (code, _, lines), (_, part) in zip(said, REFUSED.values(), strict=True):
        (line,) = lines
        assert line.startswith("Error: ")
        assert part in line
        assert code == 1


def test_a_file_that_is_not_there_is_refused_by_the_option(folder: Path) -> None:
    done = run_ingress(folder, "run", "app:hello", "--env-file", "nowhere")

    assert "Invalid value for '--env-file': File 'nowhere' does not exist" in done.stderr
    assert done.returncode == 2
