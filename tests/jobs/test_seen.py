"""Jobs in the views of a server, and `ingress jobs`."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from ingress.cli import status_tables
from tests.programs import ROOT, environment, ingress_run, run_ingress
from tests.servers import wait_until

APP = "tests.jobs.jobs_app:main"


def test_jobs_are_seen_and_changed_from_outside(tmp_path: Path) -> None:
    own = {"JOBS_FILE": str(tmp_path / "jobs.db"), "JOBS_LOG": str(tmp_path / "log")}
    environ = environment(ROOT) | own

    def told(*arguments: str) -> str:
        ran = run_ingress(tmp_path, "jobs", *arguments, "--pid", f"{server.process.pid}")
        return ran.stdout + ran.stderr

    with ingress_run(
        tmp_path, APP, "--admin", "127.0.0.1:0", "--workers", "2", environ=environ
    ) as server:
        url = server.url
        running, unreadable = (
            httpx.post(f"{url}/jobs/{name}", params={"number": 1, "seconds": 3600}).json()["id"]
            for name in ("work", "nobody")
        )
        wait_until(lambda: httpx.get(f"{url}/jobs/{unreadable}").json()["status"] == "FAILURE")
        rows = json.loads(told("list", "--json"))
        assert {each["id"]: each["state"] for each in rows} == {
            running: "running",
            unreadable: "unreadable",
        }
        assert "no task handler 'nobody'" in told("list", "--state", "unreadable")
        shown = json.loads(told("show", running))
        assert (shown["args"], shown["name"], shown["tries"]) == ([1, 3600.0], "work", 1)
        assert running in told("list", "--state", "running", "--queue", "jobs")
        assert "there: 'jobs'" in told("list", "--queue", "other")
        assert "is no job that waits or runs" in told("cancel", unreadable)
        assert "give either the id of a job, or --state" in told("retry")
        assert "give either the id of a job, or --state" in told("retry", "--state", "running")
        assert "'no such' is no job that was given up" in told("retry", "no such")
        assert "jobs that run again: 1" in told("retry", "--state", "unreadable")
        assert f"cancelled {running}" in told("cancel", running)
        wait_until(lambda: httpx.get(f"{url}/jobs/{running}").json()["status"] == "REVOKED")
        assert "jobs deleted: 1" in told("purge", "-q", "jobs", "--state", "cancelled", "--yes")
        admin = server.wait_for(r"Metrics at (http://\S+)/metrics")[1]
        gauge = (
            'ingress_jobs{application="default",deployment="Worker",queue="jobs",'
            'state="unreadable"} 1\n'
        )
        wait_until(lambda: gauge in httpx.get(f"{admin}/metrics").text)
        ended = gauge.replace("ingress_jobs", "ingress_jobs_ended_total").replace(" 1\n", " 2\n")
        assert ended in httpx.get(f"{admin}/metrics").text  # once more, not once for each worker
        status = run_ingress(tmp_path, "status", "--pid", f"{server.process.pid}").stdout
        assert "1 unreadable" in status
        assert "1 job of the queue 'jobs' was given up" in " ".join(status.split())


@pytest.mark.parametrize(
    ("jobs", "shown"),
    [
        (None, ""),
        (
            {"waiting": 3, "retrying": 1, "running": 2, "dead": 1, "unreadable": 0},
            "3 waiting, 1 retrying, 2 running, 1 dead",
        ),
    ],
)
def test_the_table_has_the_states_that_are_not_over(
    jobs: dict[str, int] | None, shown: str
) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_tables.jobs_of(jobs))
    assert capture.get().strip() == shown
