"""`app_examples/`: each example does what its docstring and the guide's comments claim.

Durations stay as in the files. To observe overlap, a subclass of the example's class counts the
calls inside, or holds them at a gate.
"""

from __future__ import annotations

import ast
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import ingress as serve
from app_examples import slow_server
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.observe.inspection import explain
from tests.conformance.observe import TIMEOUT_S, Gate, Served, here, online, results, served
from tests.servers import INGRESS, PATIENCE_S, ServerProcess, environment, process, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.filterwarnings("ignore:max_concurrent_queries is deprecated:DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "app_examples"
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py"))
NO_SERVERS = ("model", "request_batching", "slow_server")
NEEDS_RAY = ("ray_parallel",)  # run by tests/engines
APPLICATIONS = [name for name in EXAMPLES if name not in (*NO_SERVERS, *NEEDS_RAY)]
CURL = re.compile(r"^    curl '?http://127\.0\.0\.1:8000(/[^\s']*)'?(?: {4}|\n    )(\S.*)$", re.M)

TESTED: set[str] = set()


def proves(*examples: str) -> Callable[[Any], Any]:
    """Note which examples a test is about."""
    TESTED.update(examples)
    return lambda test: test


def application(name: str) -> Any:
    module = import_module(f"app_examples.{name}")
    return module.hello if name == "hello" else module.app


def class_of(name: str) -> Any:
    return application(name).deployment.func_or_class


def bound(name: str, cls: type) -> serve.Application:
    """Bind another class with the options and arguments of an example."""
    app = application(name)
    deployment: serve.Deployment = replace(app.deployment, func_or_class=cls)
    return deployment.bind(*app.init_args, **app.init_kwargs)


@contextmanager
def run(name: str, folder: Path, **flags: str) -> Iterator[ServerProcess]:
    """Run an example as a user does, end it with Ctrl-C and check its exit code."""
    target = f"app_examples.{name}:{'hello' if name == 'hello' else 'app'}"
    command = [*INGRESS, "run", target, "--port", "0", "--app-dir", str(ROOT)]
    with process(command, folder, environment(folder, **flags)) as server:
        server.wait_for("is ready")
        yield server
        server.signal(signal.SIGINT)
        assert server.wait() == 0


# Every file


def test_every_example_has_a_test_of_its_own() -> None:
    assert sorted({*TESTED, *NEEDS_RAY}) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_to_run_it_and_what_to_see(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()), clean=False) or ""

    if name in APPLICATIONS:
        attribute = "hello" if name == "hello" else "app"
        assert f"ingress run app_examples.{name}:{attribute}\n" in docstring
        assert "    curl " in docstring
    elif name in NEEDS_RAY:
        assert f"ingress run app_examples.{name}:app --engine ray\n" in docstring
    else:
        assert f"    python -m app_examples.{name}\n" in docstring
    assert f"({name}.py)" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", APPLICATIONS)
def test_curl_shows_what_the_docstring_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SYNC_IN_THREADPOOL, raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 10))
    promised = CURL.findall(import_module(f"app_examples.{name}").__doc__ or "")
    assert promised or name in ("async_stream", "blocking_stream", "numpy_deployment", "streams")

    with slow_server.running(wait=lambda: None) as slow, served(application(name)) as it:
        monkeypatch.setenv("SLOW_SERVER_URL", slow.url)
        assert [(path, it.get(path).text) for path, _ in promised] == promised


# As a user starts them


@pytest.mark.thorough
@proves("hello", "composition", "echo", "fastapi_deployment")
@pytest.mark.parametrize("name", ["hello", "composition", "echo", "fastapi_deployment"])
def test_an_example_runs_from_the_command_line_until_ctrl_c(name: str, tmp_path: Path) -> None:
    promised = CURL.findall(import_module(f"app_examples.{name}").__doc__ or "")

    with run(name, tmp_path) as server:
        answers = [httpx.get(server.url + path, trust_env=False).text for path, _ in promised]

    assert answers == [answer for _, answer in promised]


@proves("serial")
def test_one_thread_makes_the_connection_and_counts_every_visit() -> None:
    with served(application("serial")) as it:
        counts = results([it.handle.remote() for _ in range(50)])

    assert sorted(counts) == list(range(1, 51))


@proves("processes")
def test_a_process_of_an_example_ends_and_the_gateway_and_the_other_process_answer() -> None:
    with served(application("processes")) as it:
        answers = [it.get(path).text for path in ("/primes?below=30", "/crash", "/primes?below=3")]

    assert answers == ["10", "The process of a replica ended.", "1"]


@proves("native_threads")
def test_two_calls_compute_at_a_time_and_health_does_not_wait_for_them() -> None:
    gate = Gate()

    class Gated(class_of("native_threads")):  # type: ignore[misc]
        @serve.method(lane="cpu")
        def rank(self) -> int:
            gate.wait()
            return int(super().rank())

    with served(bound("native_threads", Gated)) as it:
        answers = it.send("/rank", 10)
        gate.wait_for(2)
        wait_until(lambda: it.ongoing() == 10)
        assert it.get("/health").text == '"ok"'
        assert gate.inside == 2
        gate.open()
        assert {answer.result(TIMEOUT_S).text for answer in answers} == {"20"}


@pytest.mark.thorough
@proves("async_stream")
def test_a_stream_from_the_command_line_shows_its_first_line_at_once(tmp_path: Path) -> None:
    with run("async_stream", tmp_path) as server:
        with httpx.stream("GET", server.url, trust_env=False) as response:
            lines = response.iter_lines()
            assert [next(lines), next(lines)] == ["0", "1"]


@proves("streams")
def test_each_way_to_stream_shows_a_line_at_once_and_ends_with_its_client(tmp_path: Path) -> None:
    first_lines = {"/lines": '{"number":0}', "/events": 'data: {"number":0}', "/text": "0"}
    with run("streams", tmp_path) as server:
        for number, (path, expected) in enumerate(first_lines.items()):
            with httpx.stream("GET", server.url + path, trust_env=False) as response:
                assert next(response.iter_lines()) == expected
                assert server.output.count("closed") == number, "it goes on"
            wait_until(lambda: server.output.count("closed") > number)  # noqa: B023


@proves("websocket_echo")
def test_a_websocket_echoes_until_ctrl_c(tmp_path: Path) -> None:
    with ExitStack() as connections:
        with run("websocket_echo", tmp_path) as server:
            address = f"ws://127.0.0.1:{server.port}/echo"
            one, other = (connections.enter_context(connect(address, proxy=None)) for _ in range(2))
            for client, sent, got in ((one, "a", "1: a"), (other, "b", "1: b"), (one, "c", "2: c")):
                client.send(sent)
                assert client.recv(timeout=TIMEOUT_S) == got
        for client in (one, other):
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=TIMEOUT_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001


@pytest.mark.thorough
@proves("hello")
def test_a_generated_client_calls_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, config = tmp_path / "openapi.json", tmp_path / "config.yml"
    openapi = ["openapi", "app_examples.hello:hello", "--app-dir", str(ROOT), "-o", str(schema)]
    config.write_text("post_hooks: []\n")
    generate = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"]
    files = ["--path", str(schema), "--config", str(config)]
    for command in ([*INGRESS, *openapi], [*generate, *files, "--output-path", "hello_client"]):
        subprocess.run(
            command, cwd=tmp_path, env=environment(tmp_path), check=True, timeout=PATIENCE_S
        )
    monkeypatch.syspath_prepend(tmp_path)
    for module in [each for each in sys.modules if each.startswith("hello_client")]:
        monkeypatch.delitem(sys.modules, module)
    api = "hello_client.api.default"
    sync_endpoint = import_module(f"{api}.sync_endpoint_sync_get").sync
    async_endpoint = import_module(f"{api}.async_endpoint_async_get").sync

    with run("hello", tmp_path) as server:
        with import_module("hello_client").Client(base_url=server.url) as client:
            assert sync_endpoint(client=client, name="Ada") == "hi, Ada"
            assert sync_endpoint(client=client) == "hi, you"
            assert async_endpoint(client=client) == "hi from the event loop"


@pytest.mark.thorough
@proves("multiplexed")
def test_the_models_come_and_go_as_the_docstring_says(tmp_path: Path) -> None:
    docstring = import_module("app_examples.multiplexed").__doc__ or ""
    curl = r"curl -H '(\w+): (\w+)' 'http://127\.0\.0\.1:8000(\S+)'\n    (.*)"
    promised = re.findall(curl, docstring)
    assert len(promised) == 3

    with run("multiplexed", tmp_path) as server:
        for header, model_id, path, answer in promised:
            response = httpx.get(server.url + path, headers={header: model_id}, trust_env=False)
            assert response.text == answer
        loaded = httpx.get(server.url + "/loaded", trust_env=False).text
        assert f"`{loaded}`" in docstring
        response = httpx.get(server.url + "/greet?name=you", trust_env=False)
        assert (response.status_code, response.json()["detail"][:11]) == (404, "no model ''")


@proves("model", "request_batching")
@pytest.mark.parametrize(
    ("name", "printed", "warned"),
    [
        ("model", "2\n", "Calling sync method 'Model.__call__' directly on the asyncio loop"),
        ("request_batching", "[0, 2, 4, 6, 8, 10, 12, 14]\n", ""),
    ],
)
def test_a_model_prints_its_results(name: str, printed: str, warned: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"app_examples.{name}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )

    assert result.stdout == printed
    assert warned in result.stderr
    assert bool(warned) == bool(result.stderr)


@proves("slow_server")
def test_the_slow_server_answers_after_a_second(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    environ = {**environment(tmp_path), "SLOW_SERVER_URL": url}
    with process([sys.executable, "-m", "app_examples.slow_server"], tmp_path, environ) as server:
        server.wait_for(re.escape(f"Slow server on {url}"))
        response = httpx.get(url, trust_env=False)
        server.signal(signal.SIGINT)
        assert server.wait() == 0

    assert response.text == "slow"
    assert response.elapsed.total_seconds() >= 1


# The main example and the composition


@proves("hello")
def test_hello_greets_from_threads_and_loops_of_two_replicas() -> None:
    places: set[str] = set()

    class Hello(class_of("hello")):  # type: ignore[misc]
        def sync_endpoint(self, name: str = "you") -> str:
            places.add(here())
            return str(super().sync_endpoint(name))

        async def async_endpoint(self) -> str:
            places.add(here())
            return str(await super().async_endpoint())

    with served(bound("hello", Hello)) as it:
        for _ in range(20):
            assert it.get("/sync").json() == "hi, you"
            assert it.get("/async").json() == "hi from the event loop"

    replicas = ("Hello#0", "Hello#1")
    assert places == {f"thread {each}-worker" for each in replicas} | {
        f"loop {each}" for each in replicas
    }


@proves("composition")
def test_the_composition_calls_model_and_summarizer_at_the_same_time() -> None:
    example = import_module("app_examples.composition")
    gate = Gate()
    received = []

    class Model(example.Model.func_or_class):  # type: ignore[misc, name-defined]
        async def score(self, tokens: Any) -> Any:
            received.append(tokens)
            await gate.wait_async()
            return await super().score(tokens)

    class Summarizer(example.Summarizer.func_or_class):  # type: ignore[misc, name-defined]
        async def __call__(self, text: str) -> Any:
            await gate.wait_async()
            return await super().__call__(text)

    app = example.TextService.bind(
        example.Tokenizer.bind(),
        replace(example.Model, func_or_class=Model).bind({"fine"}, {"bad"}),
        replace(example.Summarizer, func_or_class=Summarizer).bind(),
    )
    with served(app) as it:
        [response] = it.send("/analyse?text=A+fine+day.+Then+rain.")
        gate.wait_for(2)
        gate.open()
        assert response.result().json() == {"score": 1, "summary": "A fine day."}

    assert received == [["a", "fine", "day", "then", "rain"]], "the response came as its value"


# "While this handler awaits asyncio.sleep, the loop is free to start handling other requests."
# "With RAY_SERVE_RUN_SYNC_IN_THREADPOOL=0 (current default), __call__ runs directly on the user
# event loop and blocks it for 1 second." "With RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1, each call runs
# in a thread." "FastAPI runs this in a threadpool." "Runs directly on FastAPI's asyncio loop."
# "This blocks the event loop until the HTTP call finishes."
# "Blocks the event loop between yields." "Yields items without blocking the loop."
LOOP, POOL = "event loop", "threadpool"
PLACES = {
    "echo": [("async def", LOOP, LOOP)],
    "blocking_echo": [("def", LOOP, POOL)],
    "blocking_cpu": [("def", LOOP, POOL)],
    "cpu_with_threadpool": [("def", LOOP, POOL)],
    "fastapi_deployment": [("def", POOL, POOL), ("async def", LOOP, LOOP)],
    "blocking_http": [("async def", LOOP, LOOP)],
    "blocking_stream": [("def generator", LOOP, POOL)],
    "async_stream": [("async def", LOOP, LOOP), ("async def generator", LOOP, LOOP)],
}
"""The code of each example: how it is written, and where it runs without the flag and with it.

`test_explain` sees it there, `test_check` sees what blocks, and `conformance` the consequences.
"""


@proves(*PLACES)
@pytest.mark.parametrize("name", PLACES)
def test_the_code_of_an_example_runs_on_the_loop_or_in_a_thread_as_it_says(name: str) -> None:
    rows = explain(application(name), Settings()).rows
    assert [(row.kind, *(place.where for place in row.places)) for row in rows] == PLACES[name]


@contextmanager
def served_with_slow_server(
    name: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    """Serve an example whose slow server answers when the gate opens."""
    with slow_server.running(gate.wait) as slow, served(application(name)) as it:
        monkeypatch.setenv("SLOW_SERVER_URL", slow.url)
        yield it


# "Non-blocking equivalent with async HTTP client" "Offload blocking I/O to a worker thread."
# "Offload to a thread, free the event loop."
@proves("async_http", "threaded_http", "offload_io")
@pytest.mark.parametrize("name", ["async_http", "threaded_http", "offload_io"])
def test_non_blocking_http_calls_overlap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    with served_with_slow_server(name, gate, monkeypatch) as it:
        responses = it.send(count=3)
        gate.wait_for(3)
        gate.open()
        assert [response.result().text for response in responses] == ["slow"] * 3


# "Multiple threads can run _heavy_numpy in parallel"
@proves("numpy_deployment")
def test_heavy_numpy_runs_in_several_threads_at_once() -> None:
    gate = Gate()
    places = set()

    class LoopProbe(class_of("numpy_deployment")):  # type: ignore[misc]
        def _heavy_numpy(self, array: Any) -> Any:
            places.add(here())
            gate.wait()
            return super()._heavy_numpy(array)

    with served(bound("numpy_deployment", LoopProbe)) as it:
        responses = it.send(count=3)
        gate.wait_for(3)
        gate.open()
        for response in responses:
            rows = response.result().json()
            assert len(rows) == 100
            assert all(len(row) == 100 for row in rows)
        assert places == {it.executor}


# "Ray Serve uses an internal semaphore to limit concurrent in-flight requests per replica to
# max_ongoing_requests." "Requests beyond that limit queue"
# "Up to 100 requests can be in-flight per replica."
# "e.g. @serve.deployment(max_concurrent_queries=1000)"
@proves("my_service", "async_io_bound", "max_concurrent_queries")
@pytest.mark.parametrize(
    ("name", "limit"),
    [("my_service", 32), ("async_io_bound", 100), ("max_concurrent_queries", 1000)],
)
def test_as_many_requests_as_it_says_are_inside_and_the_next_queues(name: str, limit: int) -> None:
    gate = Gate()

    class LoopProbe(class_of(name)):  # type: ignore[misc]
        async def __call__(self, request: Any) -> Any:
            await gate.wait_async()
            return await super().__call__(request)

    with served(bound(name, LoopProbe)) as it:
        responses = [it.handle.remote(None) for _ in range(limit + 1)]
        gate.wait_for(limit)
        assert it.status().queued == 1
        gate.open()
        assert results(responses) == ["ok"] * (limit + 1)


# "CPU-intensive work." "async Offloading patterns: CPU-heavy code in async def"
@proves("offload_cpu")
def test_the_loop_stays_responsive_while_a_thread_computes() -> None:
    gate = Gate()

    class LoopProbe(class_of("offload_cpu")):  # type: ignore[misc]
        def _compute(self, x: int) -> Any:
            gate.wait()
            return super()._compute(x), here()

        async def ping(self) -> str:
            return here()

    with served(bound("offload_cpu", LoopProbe)) as it:
        responses = [it.handle.remote(None) for _ in range(2)]
        gate.wait_for(2)
        assert it.handle.ping.remote().result(timeout_s=TIMEOUT_S) == it.loop
        gate.open()
        assert results(responses) == [str((29999996, it.executor))] * 2


# "requests is a list of request objects."
@proves("batched_model", "batched_model_offload")
@pytest.mark.parametrize("name", ["batched_model", "batched_model_offload"])
def test_the_model_gets_many_inputs_at_once_and_each_client_its_own_result(name: str) -> None:
    sizes = []

    class LoopProbe(class_of(name)):  # type: ignore[misc]
        async def _run_model(self, inputs: list[str]) -> Any:
            sizes.append(len(inputs))
            return await super()._run_model(inputs)

    with served(bound(name, LoopProbe)) as it:
        numbers = range(32)
        answers = [it.send(f"/?input={number}")[0] for number in numbers]
        texts = [answer.result().text for answer in answers]

    assert texts == [f"result_{number}" for number in numbers]
    assert sum(sizes) == 32
    assert max(sizes) > 1


# "allows multiple batches to be in flight simultaneously (up to the max_concurrent_batches limit)"
@proves("concurrent_batches")
def test_two_batches_are_in_flight_at_once() -> None:
    gate = Gate()

    class LoopProbe(class_of("concurrent_batches")):  # type: ignore[misc]
        def _compute(self) -> None:
            gate.wait()

    with served(bound("concurrent_batches", LoopProbe)) as it:
        responses = it.send(count=12)
        gate.wait_for(2)
        gate.open()
        assert [response.result().text for response in responses] == ["ok"] * 12
        assert gate.most_inside == 2


@proves("batched_stream")
def test_each_client_of_a_batched_stream_gets_as_much_as_it_asked_for() -> None:
    with online(application("batched_stream")) as it:
        short, long = it.send("/?words=2")[0], it.send("/?words=4")[0]

        assert short.result().text == "word0,word1,"
        assert long.result().text == "word0,word1,word2,word3,"
