"""One local Ray cluster with an HTTP server, for as long as its standard input is open.

    python -m tests.engines.cluster PORT    prints its address once it is ready

It ends with the process that started it, even if that process is killed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

CPUS = 64  # replicas count as one each, and most of them wait
OBJECT_STORE_BYTES = 100 * 1024 * 1024
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # for the cluster of this run and its clients
}
ROOT = Path(__file__).parent.parent.parent


@contextmanager
def cluster(port: int) -> Iterator[str]:
    """Run a cluster in a separate process; yield its address."""
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.engines.cluster", str(port)]
    holder = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        for line in holder.stdout:
            if line.startswith("address "):
                yield line.split()[1]
                break
        else:
            raise RuntimeError(f"no cluster: it ended with {holder.wait()}")
    finally:
        holder.stdin.close()
        holder.wait()


def main() -> None:
    ray = import_module("ray")
    serve = import_module("ray.serve")
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # a short path: it holds sockets
        ray.init(
            num_cpus=CPUS,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _system_config={"prestart_worker_first_driver": False},
            log_to_driver=False,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        print(f"address {ray.get_runtime_context().gcs_address}", flush=True)
        sys.stdin.read()
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
