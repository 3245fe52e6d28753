"""Signals to a server: while it starts, once it serves, and repeated."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.programs import INGRESS, ServerProcess, environment, free_port, process, write_module
from tests.servers import ROUNDS, Connection, is_ready, wait_until

STARTS = ROUNDS * 3 or 3  # 100 rounds under `make test-reliability`

APP = """
import asyncio, threading
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class App:
    @app.get("/slow")
    async def slow(self):
        await asyncio.sleep(0.1)
        return "slow"

hello = App.bind()

@serve.deployment
class Hangs:
    def __init__(self):
        print("constructs", flush=True)
        threading.Event().wait()

hangs = Hangs.bind()
"""

BLOCKING = """
import sys
import app, ingress as serve
if __name__ == "__main__":
    serve.start({"port": 0})
    print("serving on", *serve.status().proxies, flush=True)
    serve.run(getattr(app, sys.argv[1]), blocking=True)
"""

COMMANDS = {
    "ingress run": [*INGRESS, "run", "--port", "0", "app:"],
    "serve.run": [sys.executable, "blocking.py", ""],
}


@pytest.fixture(params=COMMANDS)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    write_module(tmp_path, "blocking", BLOCKING)
    return tmp_path


def command(how: str, app: str) -> list[str]:
    *words, last = COMMANDS[how]
    return [*words, last + app]


@pytest.mark.thorough
@pytest.mark.reliability("B15")
@pytest.mark.timeout(60 + 20 * STARTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_as_soon_as_the_health_check_succeeds_drops_nothing(
    folder: Path, number: signal.Signals
) -> None:
    for _ in range(STARTS):
        port = free_port()
        command = [*INGRESS, "run", "app:hello", "--port", str(port)]
        with process(command, folder, environment(folder)) as server:
            wait_until(partial(is_ready, port))
            with Connection(port) as client:
                client.request("/slow")
                server.signal(number)

                assert client.answer().body == b'"slow"'
            assert server.wait() == 0, server.output


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_start_that_hangs(
    folder: Path, how: str, number: signal.Signals, code: int
) -> None:
    with process(command(how, "hangs"), folder, environment(folder)) as server:
        server.wait_for("constructs")
        server.signal(number)
        began = time.monotonic()
        # After an unhandled `KeyboardInterrupt` Python ends the process by SIGINT.
        assert server.wait() in ((code, -signal.SIGINT) if number == signal.SIGINT else (code,))
        assert time.monotonic() - began < 5.0
        assert "Error" not in server.output


def test_a_signal_in_the_middle_of_a_start_is_not_lost(folder: Path, how: str) -> None:
    """A signal at any moment ends it; before a handler exists, the system does."""
    for delay_s in (0.2, 0.4, 0.6, 0.8, 1.0) if ROUNDS else (0.3, 0.7):
        with process(command(how, "hello"), folder, environment(folder)) as server:
            time.sleep(delay_s)
            server.signal()
            assert server.wait() in (0, 143, -signal.SIGTERM)


@pytest.mark.thorough
def test_a_terminal_that_closes_stops_a_program(folder: Path) -> None:
    with process(command("serve.run", "hello"), folder, environment(folder)) as server:
        with serving(server) as client:
            client.request("/slow")
            server.signal(signal.SIGHUP)

            assert client.answer().body == b'"slow"'
        assert server.wait() == 0


def test_a_terminal_that_closes_does_not_end_ingress_run(folder: Path) -> None:
    with process(command("ingress run", "hello"), folder, environment(folder)) as server:
        with serving(server) as client:
            server.signal(signal.SIGHUP)
            server.wait_for("SIGHUP is ignored: there is no file to apply; it serves on")
            client.request("/slow")

            assert client.answer().body == b'"slow"'
        server.signal()
        assert server.wait() == 0
        assert server.output.count("SIGHUP") == 1


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize(("app", "code"), [("hello", 0), ("hangs", 143)], ids=["serves", "starts"])
def test_a_signal_that_does_not_wake_the_main_thread_is_not_lost(
    folder: Path, how: str, app: str, code: int
) -> None:
    """The system may hand it to any thread, or to the main thread just before that one waits."""
    with process(command(how, app), folder, environment(folder)) as server:
        if app == "hello":
            wait_until(lambda: is_ready(server.port))
        else:
            server.wait_for("constructs")
        pid = server.process.pid
        others = {int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()} - {pid}
        assert ctypes.CDLL(None).tgkill(pid, min(others), signal.SIGTERM) == 0
        assert server.wait() == code


def serving(server: ServerProcess) -> Connection:
    wait_until(lambda: is_ready(server.port))
    return Connection(server.port)


LISTENS = """
import asyncio, signal
from contextlib import asynccontextmanager
from fastapi import FastAPI
import ingress as serve

@asynccontextmanager
async def lifespan(given):
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    replica = serve.get_replica_context().replica_tag
    def told(text):
        # One write: two replicas print at once.
        print(f"{text} {serve.get_replica_context().replica_tag}\\n", end="", flush=True)
        assert asyncio.get_running_loop() is loop
    loop.add_signal_handler(signal.SIGUSR2, told, "user")
    loop.add_signal_handler(signal.SIGTERM, told, "stop")
    loop.add_signal_handler(signal.SIGHUP, told, "taken back")
    assert loop.remove_signal_handler(signal.SIGHUP)
    assert not loop.remove_signal_handler(signal.SIGHUP)
    try:
        loop.add_signal_handler(signal.SIGKILL, told, "never")
    except RuntimeError as error:
        print(error, flush=True)
    yield
    print("down", replica, flush=True)

@serve.deployment(num_replicas=2)
@serve.ingress(FastAPI(lifespan=lifespan))
class Listens: ...

listens = Listens.bind()
"""


CHAINS = """
import asyncio, signal, sys, threading
from contextlib import asynccontextmanager
from signal import getsignal, signal as register
from fastapi import FastAPI
import ingress as serve

def chained(number, text):
    before = getsignal(number)
    loop = asyncio.get_running_loop()
    def handler(number, frame):
        assert asyncio.get_running_loop() is loop
        print(f"{text} {signal.Signals(number).name}\\n", end="", flush=True)
        if callable(before):
            before(number, frame)
    assert register(number, handler) == before
    assert signal.getsignal(number) is handler
    return before

@asynccontextmanager
async def lifespan(app):
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        chained(number, "first")
    second = chained(signal.SIGTERM, "second")
    signal.signal(signal.SIGUSR2, chained(signal.SIGUSR2, "taken back"))
    default = chained(signal.SIGCONT, "taken back")
    signal.signal(signal.SIGCONT, default)
    assert signal.getsignal(signal.SIGCONT) == default
    for bad in (signal.SIGINT, signal.SIG_IGN), (1000, print), (signal.SIGKILL, print):
        try:
            signal.signal(*bad)
        except (ValueError, OSError, RuntimeError) as error:
            print(type(error).__name__, error, flush=True)
    yield
    print("down", flush=True)

app = FastAPI(lifespan=lifespan)

@serve.deployment
@serve.ingress(app)
class Chains: ...

chains = Chains.bind()
in_process = Chains.options(isolation="process").bind()
"""


def is_handled(server: ServerProcess, number: signal.Signals) -> bool:
    """Return whether the process has a handler, which the main thread takes once it has started."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_lifespan_chains_handlers_by_signal_signal(tmp_path: Path) -> None:
    write_module(tmp_path, "app", CHAINS)
    with process([*INGRESS, "run", "--port", "0", "app:chains"], tmp_path,
                 environment(tmp_path)) as server:  # fmt: skip
        server.wait_for("is ready")
        wait_until(partial(is_handled, server, signal.SIGUSR2))
        for number in (signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
            server.signal(number)
            server.wait_for(f"first {number.name}\n")
        assert server.wait() == 0
        told = server.output
        assert told.index("second SIGTERM") < told.index("first SIGTERM") < told.index("down")
        assert told.count("SIGHUP is ignored") == 1
        assert "taken back" not in told
        assert told.count("ValueError signal only works in main thread") == 1


HOLDS = """
import asyncio, gc, signal, weakref
from contextlib import asynccontextmanager
from fastapi import FastAPI
import ingress as serve

class Model: ...
MODELS = weakref.WeakSet()

@asynccontextmanager
async def lifespan(app):
    model = Model()
    MODELS.add(model)
    signal.signal(signal.SIGUSR2, lambda number, frame: print(model))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, model)
    yield

@serve.deployment
@serve.ingress(FastAPI(lifespan=lifespan))
class Holds: ...

@serve.deployment
class Replaces:
    def __call__(self):
        for _ in range(4):
            serve.run(Holds.bind(), name="holds", route_prefix="/holds")
        gc.collect()
        return len(MODELS)

replaces = Replaces.bind()
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_handlers_of_a_replica_that_has_ended_hold_nothing(tmp_path: Path, loop: str) -> None:
    write_module(tmp_path, "app", HOLDS)
    with process([*INGRESS, "run", "--port", "0", "--loop", loop, "app:replaces"], tmp_path,
                 environment(tmp_path)) as server:  # fmt: skip
        with serving(server) as client:
            client.request("/")
            assert client.answer().body == b"1"
        server.signal()
        assert server.wait() == 0


@pytest.mark.parametrize("how", ["process", "uvicorn"])
def test_a_handler_that_no_thread_passes_on_is_refused_with_the_way_to_have_it(
    tmp_path: Path, how: str
) -> None:
    write_module(tmp_path, "app", CHAINS)
    words = [*INGRESS, "run", "--port", "0", "app:in_process"]
    if how == "uvicorn":
        words = [sys.executable, "-m", "uvicorn", "--port", "0", "app:chains"]
    with process(words, tmp_path, environment(tmp_path)) as server:
        assert server.wait() != 0
        assert "main thread only. Register the handler at the top of the module" in server.output


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_handlers_of_a_replicas_loop_run_there_before_the_stop(tmp_path: Path, loop: str) -> None:
    write_module(tmp_path, "app", LISTENS)
    with process([*INGRESS, "run", "--port", "0", "--loop", loop, "app:listens"], tmp_path,
                 environment(tmp_path)) as server:  # fmt: skip
        server.wait_for("is ready")
        wait_until(partial(is_handled, server, signal.SIGUSR2))
        for number, text in ((signal.SIGUSR2, "user"), (signal.SIGTERM, "stop")):
            server.signal(number)
            for replica in range(2):
                server.wait_for(f"{text} {replica}\n")
        assert server.wait() == 0
        assert server.output.count("down") == 2
        assert server.output.rindex("stop") < server.output.index("down")
        assert server.output.count("sig 9 cannot be caught") == 2
        assert "taken back" not in server.output
