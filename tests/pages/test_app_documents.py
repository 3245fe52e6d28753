"""`app_examples/documents`: uploads, progress, cancellation, and docs/how-to/jobs.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingress as serve
from app_examples.documents import app as example
from ingress.testing import TestClient
from tests.how_to import check_page
from tests.servers import wait_until


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the files of the example in a folder of the test, and no thread of it afterwards."""
    monkeypatch.chdir(tmp_path)
    yield
    serve.shutdown()
    wait_until(lambda: not any("jobs" in each.name for each in threading.enumerate()))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(example, "PAGE_S", 0.01)
    with TestClient(example.app) as found:
        yield found


def test_an_upload_is_a_job_whose_progress_is_followed(client: TestClient) -> None:
    answer = client.post("/documents", files={"file": ("a.txt", b"one two\fthree")})
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/jobs/{answer.json()['id']}"
    events = client.get(f"{answer.headers['location']}/events").text
    assert '"status":"SUCCESS"' in events.splitlines()[-2]
    job = client.get(answer.headers["location"]).json()
    assert job["result"] == {"page": 2, "pages": 2, "words": 3}


def test_two_uploads_with_one_key_are_one_job(client: TestClient) -> None:
    ids = {
        client.post(
            "/documents", files={"file": ("a.txt", b"one")}, headers={"idempotency-key": "k"}
        ).json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 1


def test_a_job_is_cancelled(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "PAGE_S", 3600.0)
    place = client.post("/documents", files={"file": ("a.txt", b"one")}).headers["location"]
    assert client.delete(place).status_code == 204
    wait_until(lambda: client.get(place).json()["status"] == "REVOKED")
    assert client.get("/jobs/none").status_code == 404


def test_the_page(tmp_path: Path) -> None:
    check_page("jobs", tmp_path)
