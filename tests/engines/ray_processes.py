"""A Ray cluster, and applications that `ingress run` serves on it, each in a separate process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import INGRESS, ROOT, ServerProcess
from tests.servers import free_port as free_port

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
PATIENCE_S = 60.0  # a replica is a process that imports Ray
# It lives until its standard input is closed, so it ends with the process that started it.
CLUSTER = """
import sys, tempfile, ray
with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
    ray.init(num_cpus=int(sys.argv[1]), include_dashboard=False, object_store_memory=10**8,
             _temp_dir=folder, log_to_driver=False)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """Run a cluster in a separate process; yield its address."""
    environ = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(cpus)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        lines = iter(holder.stdout.readline, "")
        yield next(line.strip() for line in lines if re.fullmatch(r"[\d.]+:\d+\n", line))
    finally:
        holder.stdin.close()
        holder.wait(PATIENCE_S)


def environment(folder: Path, **environ: str) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {
        **given,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        **QUIET,
        **environ,
    }


def ended(
    command: list[str], folder: Path, timeout_s: float = PATIENCE_S, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a folder whose modules it can import."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, **environ),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def running(
    folder: Path, *arguments: str, ends_by: signal.Signals = signal.SIGINT
) -> Iterator[ServerProcess]:
    """Run an application on Ray as a user does, and end it with Ctrl-C, or as a container."""
    command = [*INGRESS, "run", *arguments, "--engine", "ray"]
    server = ServerProcess(command, folder, environment(folder))
    try:
        wait_until(lambda: "Ctrl-C to stop" in server.output or server.process.poll() is not None)
        yield server
        server.signal(ends_by)
        assert server.wait(PATIENCE_S) == 0, server.output
        assert "Metrics at" not in server.output  # the port is that of Ray's dashboard
    finally:
        server.process.kill()
        server.process.wait()
