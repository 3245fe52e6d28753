"""Servers and replicas that are killed in the middle of jobs: each job ends at least once."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.programs import ROOT, ServerProcess, environment, ingress_run
from tests.servers import wait_until

APP = "tests.jobs.jobs_app:main"


class Log:
    """The lines of the handlers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def seen(self, what: str) -> Counter[int]:
        """Return how often each job was begun, or ended."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return Counter(int(each.split()[1]) for each in lines if each.startswith(what))

    def processes(self) -> set[int]:
        """Return the processes that have begun jobs."""
        return {int(each.split()[2]) for each in self._path.read_text().splitlines()}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    own = {"JOBS_FILE": str(tmp_path / "jobs.db"), "JOBS_LOG": str(tmp_path / "log")}
    return environment(ROOT) | own


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def enqueue(server: ServerProcess, name: str, number: int, seconds: float | None = None) -> str:
    given = {"number": number} if seconds is None else {"number": number, "seconds": seconds}
    answer = httpx.post(f"{server.url}/jobs/{name}", params=given)
    assert answer.status_code == 202
    id: str = answer.json()["id"]
    return id


def test_jobs_survive_a_server_that_is_killed(
    tmp_path: Path, environ: dict[str, str], log: Log
) -> None:
    with ingress_run(tmp_path, APP, environ=environ) as server:
        running = enqueue(server, "work", 1, 3600)
        waiting = [enqueue(server, "work", number, 0) for number in range(2, 6)]
        wait_until(lambda: log.seen("begin")[1])
        server.process.kill()
        server.process.wait()
    with ingress_run(tmp_path, APP, environ=environ) as server:
        wait_until(lambda: log.seen("begin")[1] == 2)
        wait_until(lambda: all(log.seen("end")[number] for number in range(2, 6)))
        job = httpx.get(f"{server.url}/jobs/{running}").json()
        assert (job["status"], job["attempts"]) == ("STARTED", 2)
        assert httpx.get(f"{server.url}/jobs/{waiting[0]}").json()["result"] == 2
        server.signal(signal.SIGKILL)


def test_a_job_that_kills_its_replica_is_given_up_after_so_many_times(
    tmp_path: Path, environ: dict[str, str], log: Log
) -> None:
    environ |= {"JOBS_ISOLATION": "process", "JOBS_CRASHES": "2"}
    with ingress_run(tmp_path, APP, environ=environ) as server:
        id = enqueue(server, "die", 1)
        other = enqueue(server, "work", 2, 0)
        url = f"{server.url}/jobs/"
        wait_until(lambda: httpx.get(url + id).json()["status"] == "FAILURE")
        assert log.seen("begin")[1] == 2
        assert "died" in httpx.get(url + id).json()["error"]
        wait_until(lambda: httpx.get(url + other).json()["status"] == "SUCCESS")
