"""Redis and RabbitMQ of this machine, each on loopback, with a port and a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.servers import wait_until

START_S = 60.0
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the other one changes the user


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, str]]:
    """Run Redis. Returns the URLs of a broker and of a result backend."""
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    (port,) = _free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with _running(program, *options, folder=folder):
        wait_until(lambda: _listens(port), START_S)
        yield f"redis://127.0.0.1:{port}/0", f"redis://127.0.0.1:{port}/1"


@contextmanager
def rabbitmq(folder: Path) -> Iterator[tuple[str, str]]:
    """Run RabbitMQ, and SQLite files for the results. Returns the same."""
    if not RABBITMQ.exists() or (epmd := shutil.which("epmd")) is None:
        pytest.skip("rabbitmq-server is not installed: apt-get install rabbitmq-server")
    port, names, nodes = _free_ports(3)
    (folder / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    (folder / "plugins").write_text("[].\n")
    environ = {
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(names),
        "HOME": str(folder),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        "RABBITMQ_DIST_PORT": str(nodes),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_LOG_BASE": str(folder),
        "RABBITMQ_MNESIA_BASE": str(folder),
        "RABBITMQ_NODENAME": f"ingress-{port}@localhost",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    with ExitStack() as stack:
        stack.enter_context(
            _running(epmd, "-address", "127.0.0.1", "-port", str(names), folder=folder)
        )
        wait_until(lambda: _listens(names), START_S)
        stack.enter_context(_running(str(RABBITMQ), folder=folder, **environ))
        wait_until(lambda: _listens(port), START_S)
        yield f"amqp://guest:guest@127.0.0.1:{port}//", f"file://{_made(folder / 'results')}"


Broker = Callable[[Path], AbstractContextManager[tuple[str, str]]]
BROKERS: dict[str, Broker] = {"redis": redis, "rabbitmq": rabbitmq}


@contextmanager
def _running(program: str, *options: str, folder: Path, **environ: str) -> Iterator[None]:
    with (folder / f"{Path(program).name}.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options],
            stdout=log,
            stderr=log,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    try:
        yield
    finally:  # its group: RabbitMQ's script starts Erlang
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _listens(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
