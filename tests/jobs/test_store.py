"""The file of jobs: what it survives, what it refuses, and what its errors say."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ingress.core.base.types import JobState as State
from ingress.exceptions import TaskQueueError
from ingress.jobs import store, table
from ingress.jobs.store import Clock, Store, use_store
from ingress.jobs.table import Job, Limits, NewJob, Outcome, Turns
from tests.servers import run_python, wait_until

LIMITS = Limits(60.0, 3, None, None)


@pytest.fixture(autouse=True)
def stores_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "IDLE_S", 0.02)
    yield
    wait_until(lambda: not any("jobs-store" in each.name for each in threading.enumerate()))


def opened(path: Path) -> Store:
    store = use_store(str(path / "jobs.db"))
    store.write(store.own).result()
    return store


def put(store: Store, id: str = "1", **changes: Any) -> Job:
    new = NewJob(id, "q", "work", "[[], {}]", **changes)
    return store.write(table.put, new, is_durable=True).result()


def taken(store: Store, limit: int = 1) -> list[Job]:
    return taken_in(Turns(lambda key: 1.0), store, limit)


def taken_in(turns: Turns, store: Store, limit: int = 1) -> list[Job]:
    jobs, _, _ = store.write(table.look, "q", limit, store.owner, turns).result()
    return jobs


def found(store: Store, id: str = "1") -> Job:
    job = store.read(table.get, id).result()
    assert job is not None
    return job


def held(entered: threading.Event, go: threading.Event) -> None:
    """Hold the store's thread, so that what comes next waits together."""
    entered.set()
    go.wait()


def test_jobs_are_taken_in_order_and_once(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    for id in "123":
        put(jobs, id)
    with ThreadPoolExecutor(8) as pool:
        ids = [each.id for some in pool.map(lambda _: taken(jobs), range(8)) for each in some]
    assert sorted(ids) == ["1", "2", "3"]
    assert taken(jobs) == []


def test_the_end_of_an_older_claim_has_no_effect(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    put(jobs)
    (first,) = taken(jobs)
    assert jobs.write(table.recover, "q", jobs.owner, LIMITS).result() == 1
    (second,) = taken(jobs)
    done = Outcome(State.DONE, "1")
    assert not jobs.write(table.finish, first, done, LIMITS).result()
    assert found(jobs).state == State.RUNNING
    assert jobs.write(table.finish, second, done, LIMITS).result()
    assert found(jobs).state == State.DONE


def test_enqueues_that_wait_together_share_one_commit(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    entered, go = threading.Event(), threading.Event()
    statements: list[str] = []
    jobs.read(lambda db, now: db.set_trace_callback(statements.append))
    jobs.read(lambda db, now: held(entered, go))
    entered.wait()
    answers = [
        jobs.write(table.put, NewJob(str(each), "q", "work", "[]"), is_durable=True)
        for each in range(50)
    ]
    go.set()
    assert [each.result().id for each in answers] == [str(each) for each in range(50)]
    assert [each for each in statements if each in ("commit", "pragma synchronous = full")] == [
        "pragma synchronous = full",
        "commit",
    ]


def test_an_operation_that_fails_is_undone_alone(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    entered, go = threading.Event(), threading.Event()
    jobs.read(lambda db, now: held(entered, go))
    entered.wait()

    def half(db: sqlite3.Connection, now: float) -> None:
        table.put(db, now, NewJob("half", "q", "work", "[]"))
        raise LookupError("in the middle")

    first = jobs.write(table.put, NewJob("1", "q", "work", "[]"), is_durable=True)
    failed = jobs.write(half)
    last = jobs.write(table.put, NewJob("2", "q", "work", "[]"), is_durable=True)
    go.set()
    assert (first.result().id, last.result().id) == ("1", "2")
    with pytest.raises(LookupError, match="in the middle"):
        failed.result()
    assert jobs.read(table.get, "half").result() is None


def test_a_full_disk_is_an_error_and_nothing_half(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    put(jobs)
    pages = jobs.read(lambda db, now: db.execute("pragma page_count").fetchone()[0]).result()
    jobs.read(lambda db, now: db.execute(f"pragma max_page_count = {pages}").fetchone()).result()
    large = NewJob("2", "q", "work", "x" * 100_000)
    with pytest.raises(TaskQueueError, match="does not answer: database or disk is full"):
        jobs.write(table.put, large, is_durable=True).result()
    assert jobs.read(table.get, "2").result() is None
    jobs.read(lambda db, now: db.execute("pragma max_page_count = 100000").fetchone()).result()
    assert jobs.write(table.put, large, is_durable=True).result().id == "2"


def test_a_file_that_another_program_locks_is_an_error_and_nothing_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = opened(tmp_path)
    monkeypatch.setattr(store, "BUSY_S", 0.05)
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(TaskQueueError, match="database is locked; nothing was written"):
        put(jobs)
    other.execute("rollback")
    other.close()
    assert put(jobs).id == "1"


def test_a_file_that_was_deleted_takes_no_jobs(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    put(jobs)
    (tmp_path / "jobs.db").unlink()
    with pytest.raises(TaskQueueError, match="was moved or deleted; restart the server"):
        put(jobs, "2")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        ("create table t (a)", "is a database of another program"),
        (
            f"pragma application_id = {table.APPLICATION_ID}; pragma user_version = 99",
            "newer version",
        ),
        (None, "cannot be used: file is not a database"),
    ],
    ids=["another", "newer", "no database"],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, make: str | None, error: str) -> None:
    path = tmp_path / "jobs.db"
    if make is None:
        path.write_text("not a database, and long enough to be read as one\n" * 100)
    else:
        other = sqlite3.connect(path)
        other.executescript(make)
        other.close()
    with pytest.raises(ValueError, match=error):
        opened(tmp_path)


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = store.file_system_of(tmp_path)
    assert kind
    monkeypatch.setattr(store, "NETWORK", frozenset({kind}))
    with pytest.raises(ValueError, match="on a network file system"):
        opened(tmp_path)


def test_the_clock_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0)
    first = clock.now()
    monkeypatch.setattr(time, "time", lambda: first - 3600.0)
    second = clock.now()
    assert first <= second < first + 60.0
    assert Clock(first + 7200.0).now() >= first + 7200.0  # the last time in the file


def test_a_job_is_not_delayed_by_a_clock_that_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = opened(tmp_path)
    put(jobs, delay_s=0.01)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    wait_until(lambda: taken(jobs))


def test_a_copy_of_the_file_after_a_commit_has_the_job(tmp_path: Path) -> None:
    """The loss of power: what is on the disk at the moment of the answer is enough."""
    jobs = opened(tmp_path)
    for number in range(20):
        put(jobs, str(number))
        copy = tmp_path / f"copy-{number}"
        copy.mkdir()
        for name in ("jobs.db", "jobs.db-wal"):
            shutil.copy(tmp_path / name, copy / name)
    for number in range(20):
        again = opened(tmp_path / f"copy-{number}")
        assert len(taken(again, 100)) == number + 1


CLAIM = """
import sys
from ingress.jobs import table
from ingress.jobs.store import use_store
jobs = use_store(sys.argv[1])
jobs.write(jobs.own).result()
jobs.watch("the test", lambda: None)
turns = table.Turns(lambda key: 1.0)
found, _, _ = jobs.write(table.look, "q", 2, jobs.owner, turns).result()
print(f"owner {jobs.owner} has {len(found)}", flush=True)
sys.stdin.read()
"""


def test_the_jobs_of_a_process_that_was_killed_run_again(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    for id in "123":
        put(jobs, id)
    command = [sys.executable, "-c", CLAIM, str(jobs.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        _, number, _, count = child.stdout.readline().split()
        owner = int(number)
        assert int(count) == 2
        assert jobs.read(jobs.is_alive, owner).result()
        child.kill()
    assert not jobs.read(jobs.is_alive, owner).result()
    assert jobs.write(table.recover, "q", owner, LIMITS).result() == 2
    assert {each.id: each.crashes for each in taken(jobs, 3)} == {"1": 1, "2": 1, "3": 0}


def test_a_job_that_has_killed_its_process_too_often_is_given_up(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    put(jobs)
    limits = Limits(60.0, 2, "failed", None)
    for _ in range(2):
        assert taken(jobs)
        jobs.write(table.recover, "q", jobs.owner, limits).result()
    assert found(jobs).state == State.DEAD
    (letter,) = jobs.read(table.listed, "failed").result()
    assert "the process that ran it died" in letter.payload


def test_a_forked_child_has_a_store_of_its_own(tmp_path: Path) -> None:
    code = f"""
import os
from ingress.jobs.store import use_store
mine = use_store({str(tmp_path / "jobs.db")!r})
mine.watch("the test", lambda: None)
mine.write(mine.own).result()
if (child := os.fork()) == 0:
    theirs = use_store({str(tmp_path / "jobs.db")!r})
    theirs.write(theirs.own).result()
    assert theirs is not mine and theirs.owner != mine.owner
    assert theirs.read(theirs.is_alive, mine.owner).result()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert mine.read(mine.is_alive, mine.owner).result()
print("well")
"""
    assert "well" in run_python("-c", code).stdout


def test_results_are_kept_for_their_time(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    put(jobs)
    (job,) = taken(jobs)
    limits = Limits(0.001, 3, None, None)
    jobs.write(table.finish, job, Outcome(State.DONE, "1"), limits).result()
    wait_until(lambda: jobs.write(table.expire).result())
    assert jobs.read(table.get, "1").result() is None
    assert put(jobs).state == State.WAITING


def test_a_store_that_nobody_uses_has_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path) is first
    put(first)
    owner = first.owner
    wait_until(lambda: not any("jobs-store" in each.name for each in threading.enumerate()))
    again = opened(tmp_path)
    assert again.owner > owner
    assert not again.read(again.is_alive, owner).result()
    assert found(again).state == State.WAITING


def test_no_request_is_lost_to_the_end_of_an_idle_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch_interval: None
) -> None:
    monkeypatch.setattr(store, "IDLE_S", 0.0)
    jobs = use_store(str(tmp_path / "jobs.db"))
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda number: put(jobs, str(number)).id, range(40)))
    assert len(jobs.read(table.listed, "q").result()) == len(ids)


def test_jobs_take_turns_by_their_keys_and_weights_and_wait_for_their_time(
    tmp_path: Path,
) -> None:
    jobs = opened(tmp_path)
    for number, key in enumerate(["a"] * 6 + ["b", "", "gold", "gold", "gold"]):
        put(jobs, f"{key}{number}", fairness_key=key)
    put(jobs, "a-later", fairness_key="a", delay_s=3600.0)
    put(jobs, "z-later", fairness_key="z", delay_s=3600.0)
    turns = Turns(lambda key: 2.0 if key == "gold" else 1.0)

    order = [job.id for _ in range(6) for job in taken_in(turns, jobs, 2)]

    assert order == [
        *("a0", "b6", "gold8", "gold9", "7", "a1", "gold10", "a2", "a3", "a4", "a5"),
    ]
    assert taken_in(turns, jobs, 2) == []


def test_jobs_without_keys_and_jobs_of_one_key_are_taken_as_they_are_due(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    for key in ("", "a"):
        for number in range(3):
            put(jobs, f"{key}{number}", fairness_key=key)
        assert [job.id for job in taken(jobs, 5)] == [f"{key}{number}" for number in range(3)]


def test_many_keys_cost_a_look_no_search_through_their_jobs(tmp_path: Path) -> None:
    jobs = opened(tmp_path)
    insert = (
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 50000) "
        "insert into job (id, queue, name, payload, state, due, created, updated, fairness_key) "
        "select i, 'q', 'work', '[]', 'waiting', 0, 0, 0, 'k' || (i % 500) from n"
    )
    jobs.write(lambda db, now: db.execute(insert)).result()
    turns = Turns(lambda key: 1.0)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    jobs.write(lambda db, now: db.set_progress_handler(count, 100)).result()
    keys = {job.fairness_key for job in taken_in(turns, jobs, 10)}

    assert len(keys) == 10
    assert steps < 200, "of 100 instructions of SQLite"


VERSION_1 = """
create table job (
  seq integer primary key autoincrement, id text not null unique, queue text not null,
  name text not null, payload text not null, state text not null, due real not null,
  created real not null, updated real not null, tries integer not null default 0,
  crashes integer not null default 0, claim integer not null default 0, owner integer,
  cancelled integer not null default 0, key text, result text, error text, progress text,
  trace text, expires real);
create index job_due on job (queue, state, due, seq);
create table owner (id integer primary key autoincrement);
insert into job (id, queue, name, payload, state, due, created, updated)
  values ('old', 'q', 'work', '[[], {}]', 'waiting', 0, 0, 0);
pragma user_version = 1;
"""


def test_a_file_of_the_version_before_is_used_on_with_its_jobs(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "jobs.db")
    db.executescript(f"{VERSION_1}pragma application_id = {table.APPLICATION_ID};")
    db.close()

    jobs = opened(tmp_path)
    put(jobs, "new", fairness_key="a")

    assert {job.id: job.fairness_key for job in taken(jobs, 2)} == {"old": "", "new": "a"}
