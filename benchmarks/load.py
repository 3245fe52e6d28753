"""One run of load on a server, by wrk or by a client of `benchmarks` in a separate process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

from benchmarks.results import Sample
from benchmarks.servers import JSON, ROOT, BenchmarkError, Request, Server

PATIENCE_S = 20.0
"""Seconds that a client may take beyond its run."""

POST = b"""wrk.method = "POST"
wrk.headers["content-type"] = "%b"
wrk.body = [[%b]]
"""
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


def wrk(server: Server, request: Request, connections: int, seconds: int) -> Sample:
    """Run wrk, closed-loop. Raises `BenchmarkError` if an answer is not a success."""
    url = f"http://127.0.0.1:{server.port}{request.path}"
    command = ["wrk", "--latency", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s"]
    with tempfile.NamedTemporaryFile("wb", suffix=".lua") as script:
        if request.body is not None:
            script.write(POST % (JSON.encode(), request.body))
            script.flush()
            command += ["--script", script.name]
        printed = output_of([*command, url], server, seconds)
    if "Non-2xx" in printed or "Socket errors" in printed:
        raise BenchmarkError(f"{server.name}: wrk {url} failed:\n{printed}")
    found = parse(printed)
    if not found["requests_per_s"]:
        asked = f"{request.method} {request.path}"
        raise BenchmarkError(f"{server.name}: no {asked} was answered in {seconds} s; give it more")
    return found


def client(kind: str, server: Server, connections: int, seconds: int) -> Sample:
    """Run a client of `benchmarks.client`."""
    command = [sys.executable, "-m", "benchmarks.client", kind]
    command += [str(server.port), str(connections), str(seconds)]
    rate, p50_ms, p99_ms = json.loads(output_of(command, server, seconds))
    name = "messages_per_s" if kind == "websocket" else "requests_per_s"
    return {name: rate, "p50_ms": p50_ms, "p99_ms": p99_ms}


def parse(printed: str) -> Sample:
    """Parse the output of `wrk --latency`."""
    rate = re.search(r"Requests/sec:\s+([\d.]+)", printed)
    latency = dict(re.findall(r"^\s+(50|99)%\s+([\d.]+\w+) *$", printed, re.MULTILINE))
    if rate is None or len(latency) != 2:
        raise BenchmarkError(f"wrk printed something else than expected:\n{printed}")
    return {
        "requests_per_s": float(rate[1]),
        "p50_ms": _to_ms(latency["50"]),
        "p99_ms": _to_ms(latency["99"]),
    }


def output_of(command: list[str], server: Server, seconds: int) -> str:
    """Return the output of a client. Raises `BenchmarkError` if it fails or does not end."""
    name = command[0] if command[0] == "wrk" else " ".join(command[1:4])
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + PATIENCE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{server.name}: {name} got no answer and did not end") from error
    if ran.returncode:
        said = (ran.stderr or ran.stdout).strip().splitlines()
        raise BenchmarkError(f"{server.name}: {name} failed: {said[-1] if said else 'silently'}")
    return ran.stdout


def _to_ms(text: str) -> float:
    number = text.rstrip("msu")
    return float(number) * _UNITS_MS[text[len(number) :]]
