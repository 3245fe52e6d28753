"""The table of jobs, and each change of it: one statement, or two in one transaction.

    waiting --claim--> running --finish--> done | dead | unreadable | cancelled
       ^                  |
       +---- retry, hand back, the death of its owner

A job belongs to the claim that runs it: each claim has a number, and a change that names an older
one finds nothing. So what comes late from a consumer that was taken for dead has no effect.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ingress.core.base.types import JobState as State

VERSION = 2
MOST_IDLE = 1000  # keys without a job that is due, in one look: the next goes on there
APPLICATION_ID = 0x696E6A6F  # "injo", in the header of the file

_TURNS = "create index job_turn on job (queue, fairness_key, due, seq) where state = 'waiting'"
SCHEMA = f"""
create table job (
  seq integer primary key autoincrement, id text not null unique, queue text not null,
  name text not null, payload text not null, state text not null, due real not null,
  created real not null, updated real not null, tries integer not null default 0,
  crashes integer not null default 0, claim integer not null default 0, owner integer,
  cancelled integer not null default 0, key text, result text, error text, progress text,
  trace text, expires real, fairness_key text not null default '');
create index job_due on job (queue, state, due, seq);
create unique index job_key on job (queue, key) where key is not null;
create index job_expires on job (expires) where expires is not null;
create index job_owner on job (owner) where owner is not null;
{_TURNS};
create table owner (id integer primary key autoincrement);
pragma application_id = {APPLICATION_ID};
pragma user_version = {VERSION};
"""
UPGRADE = f"""
alter table job add column fairness_key text not null default '';
{_TURNS};
pragma user_version = {VERSION};
"""
"""From version 1."""


NOT_OVER = (State.WAITING, State.RUNNING, State.DEAD, State.UNREADABLE)


class Job(NamedTuple):
    """One row. Times are those of the store's clock, in seconds of Unix time.

    payload    the arguments as JSON: [args, kwargs]
    due        when a waiting job may begin
    tries      claims that are counted as attempts; crashes: those that ended with a process
    claim      number of the last claim
    owner      the store that runs it, `None` if none does
    cancelled  1 once somebody has cancelled it
    trace      the W3C trace context of its enqueue, as JSON
    """

    seq: int
    id: str
    queue: str
    name: str
    payload: str
    state: str
    due: float
    created: float
    updated: float
    tries: int
    crashes: int
    claim: int
    owner: int | None
    cancelled: int
    key: str | None
    result: str | None
    error: str | None
    progress: str | None
    trace: str | None
    expires: float | None
    fairness_key: str


class NewJob(NamedTuple):
    """The part of a job that its enqueue gives. `delay_s` counts from the enqueue."""

    id: str
    queue: str
    name: str
    payload: str
    delay_s: float = 0.0
    key: str | None = None
    trace: str | None = None
    fairness_key: str = ""


class Turns:
    """The fairness key whose jobs a consumer takes now, and the jobs that its turn still has.

    `slots_of` returns the number of jobs of a key's turn. Owned by the store's thread.
    """

    __slots__ = ("key", "left", "slots_of")

    def __init__(self, slots_of: Callable[[str], float]) -> None:
        self.slots_of = slots_of
        self.key, self.left = "", 0


class Limits(NamedTuple):
    """The options of a queue for the jobs that end."""

    keep_results_s: float
    max_crashes: int
    failed_queue: str | None
    unreadable_queue: str | None

    def queue_for(self, state: str) -> str | None:
        """Return the queue that gets a message about a job in this state."""
        return {State.DEAD: self.failed_queue, State.UNREADABLE: self.unreadable_queue}.get(
            State(state)
        )


class Outcome(NamedTuple):
    """The end of one claim. `delay_s` is that of a job that waits again.

    `counts` is False for a claim that was no attempt: the job was handed back.
    """

    state: State
    result: str | None = None
    error: str | None = None
    delay_s: float = 0.0
    counts: bool = True
    crashed: bool = False


def put(db: sqlite3.Connection, now: float, new: NewJob) -> Job:
    """Add a job. Returns the one that exists, if it has the same id, or the same key."""
    db.execute(
        "insert into job (id, queue, name, payload, state, due, created, updated, key, trace, "
        "fairness_key) values (?, ?, ?, ?, 'waiting', ?, ?, ?, ?, ?, ?) on conflict do nothing",
        (
            *(new.id, new.queue, new.name, new.payload, now + new.delay_s, now, now),
            *(new.key, new.trace, new.fairness_key),
        ),
    )
    if (found := get(db, now, new.id)) is None:
        found = _one(db, "queue = ? and key = ?", (new.queue, new.key))
    assert found is not None
    return found


def look(
    db: sqlite3.Connection, now: float, queue: str, limit: int, owner: int, turns: Turns
) -> tuple[list[Job], float | None, list[int]]:
    """Take jobs to run, in turns of their keys.

    Returns them, the seconds until the next is due, and cancelled jobs. The seconds are `None` if
    no other waits; the cancelled jobs are the `seq` of those that the owner runs.
    """
    jobs = _claimed(db, now, queue, limit, owner, turns)
    (due,) = db.execute(
        "select min(due) from job where queue = ? and state = 'waiting'", (queue,)
    ).fetchone()
    found = "select seq from job where owner = ? and state = 'running' and cancelled"
    cancelled = [seq for (seq,) in db.execute(found, (owner,))]
    return jobs, None if due is None else max(0.0, due - now), cancelled


_OF_KEYS = "(fairness_key) from job indexed by job_turn where queue = :q and state = 'waiting'"
_FOLLOWING = (
    f"select coalesce((select min{_OF_KEYS} and fairness_key > :key), (select min{_OF_KEYS}))"
)


def _claimed(
    db: sqlite3.Connection, now: float, queue: str, limit: int, owner: int, turns: Turns
) -> list[Job]:
    """Take jobs that are due, from key to key in their order as text."""
    jobs: list[Job] = []
    idle: set[str] = set()  # since the last job: the keys none of whose jobs are due
    while len(jobs) < limit and len(idle) < MOST_IDLE:
        if not turns.left:
            (key,) = db.execute(_FOLLOWING, {"q": queue, "key": turns.key}).fetchone()
            if key is None or key in idle:
                break
            is_alone = key == turns.key
            turns.left = limit - len(jobs) if is_alone else round(turns.slots_of(key))
            turns.key = key
        room = min(turns.left, limit - len(jobs))
        rows = db.execute(
            "update job set state = 'running', owner = ?, claim = claim + 1, tries = tries + 1, "
            "updated = ? where seq in (select seq from job where queue = ? and state = 'waiting' "
            "and fairness_key = ? and due <= ? order by due, seq limit ?) returning *",
            (owner, now, queue, turns.key, now, room),
        ).fetchall()
        jobs += sorted(map(Job._make, rows), key=lambda job: (job.due, job.seq))
        turns.left = turns.left - room if len(rows) == room else 0
        if rows:
            idle.clear()
        else:
            idle.add(turns.key)
    return jobs


def finish(db: sqlite3.Connection, now: float, job: Job, outcome: Outcome, limits: Limits) -> bool:
    """Write the end of a claim. Returns False if the job has another owner meanwhile."""
    is_over = outcome.state in (State.DONE, State.CANCELLED)
    rows = db.execute(
        "update job set state = case when cancelled and ?1 = 'waiting' then 'cancelled' else ?1 "
        "end, result = ?2, error = coalesce(?3, error), due = ?4, updated = ?5, owner = null, "
        "tries = tries - ?6, crashes = crashes + ?7, "
        "expires = case when ?8 or (cancelled and ?1 = 'waiting') then ?9 end "
        "where seq = ?10 and claim = ?11 and state = 'running' returning *",
        (
            *(outcome.state, outcome.result, outcome.error, now + outcome.delay_s, now),
            *(not outcome.counts, outcome.crashed, is_over, now + limits.keep_results_s),
            *(job.seq, job.claim),
        ),
    ).fetchall()
    _tell(db, now, map(Job._make, rows), limits)
    return bool(rows)


def recover(db: sqlite3.Connection, now: float, queue: str, owner: int, limits: Limits) -> int:
    """Have the jobs of a process that has died run again. Returns their number."""
    rows = db.execute(
        "update job set state = case when cancelled then 'cancelled' when crashes + 1 >= ?1 then "
        "'dead' else 'waiting' end, crashes = crashes + 1, due = ?2, updated = ?2, owner = null, "
        "expires = case when cancelled then ?3 end, error = 'the process that ran it died' "
        "where queue = ?4 and owner = ?5 and state = 'running' returning *",
        (limits.max_crashes, now, now + limits.keep_results_s, queue, owner),
    ).fetchall()
    _tell(db, now, map(Job._make, rows), limits)
    return len(rows)


def _tell(db: sqlite3.Connection, now: float, jobs: Iterable[Job], limits: Limits) -> None:
    """Send a message about each job that was given up, with Ray Serve's arguments."""
    for job in jobs:
        if (queue := limits.queue_for(job.state)) is not None:
            args, kwargs = json.loads(job.payload)
            error = job.error or ""
            about = (
                [job.id, error, str(args), str(kwargs), error]
                if job.state == State.DEAD
                else [job.name, job.id, job.payload, error, str(kwargs)]
            )
            put(db, now, NewJob(f"{job.id}-{job.claim}", queue, job.name, json.dumps([about, {}])))


def note_progress(db: sqlite3.Connection, now: float, job: Job, progress: str) -> None:
    """Write the progress of a claim."""
    db.execute(
        "update job set progress = ?, updated = ? "
        "where seq = ? and claim = ? and state = 'running'",
        (progress, now, job.seq, job.claim),
    )


def cancel(db: sqlite3.Connection, now: float, id: str, keep_s: float) -> Job | None:
    """Take a waiting job out, or mark a running one. Returns the job as it is then."""
    db.execute(
        "update job set expires = case state when 'waiting' then ?1 end, "
        "state = case state when 'waiting' then 'cancelled' else state end, cancelled = 1, "
        "updated = ?2 where id = ?3 and state in ('waiting', 'running')",
        (now + keep_s, now, id),
    )
    return get(db, now, id)


def owners(db: sqlite3.Connection, now: float, queue: str) -> list[int]:
    """Return the owners of the jobs of a queue that run."""
    found = (
        "select distinct owner from job where owner is not null and queue = ? and state = 'running'"
    )
    return [owner for (owner,) in db.execute(found, (queue,))]


def counts(
    db: sqlite3.Connection, now: float, queue: str, states: Sequence[str] = NOT_OVER
) -> dict[str, Any]:
    """Return the number of jobs in these states, and more of those that wait.

    `retrying` have been tried, `due` may begin now, `oldest_s` is the longest wait of those. The
    states that a job ends in well are left out by default: they may have millions.
    """
    found = (
        "select state, count(*) from job "
        f"where queue = ? and state in ({', '.join('?' * len(states))}) group by state"
    )
    by_state: dict[str, Any] = dict.fromkeys(states, 0) | dict(db.execute(found, (queue, *states)))
    retried, due, oldest = db.execute(
        "select count(*) filter (where tries > 0), count(*) filter (where due <= ?1), min(due) "
        "from job where queue = ?2 and state = 'waiting'",
        (now, queue),
    ).fetchone()
    waited_s = 0.0 if oldest is None else max(0.0, now - oldest)
    return {**by_state, "retrying": retried, "due": due, "oldest_s": waited_s}


def get(db: sqlite3.Connection, now: float, id: str) -> Job | None:
    return _one(db, "id = ?", (id,))


def listed(
    db: sqlite3.Connection,
    now: float,
    queue: str,
    id: str | None = None,
    state: str | None = None,
    limit: int = 100,
) -> list[Job]:
    """Return one job of a queue, or those in a state, the newest first."""
    where, given = _where(queue, id, state)
    rows = db.execute(f"select * from job {where} order by seq desc limit ?", (*given, limit))
    return [Job._make(row) for row in rows]


def retry(db: sqlite3.Connection, now: float, queue: str, id: str | None, state: str | None) -> int:
    """Have the jobs run again that have ended without a result, as if they were new.

    They are one job, or all in a state. Returns their number.
    """
    where, given = _where(queue, id, state)
    return db.execute(
        "update job set state = 'waiting', tries = 0, crashes = 0, cancelled = 0, due = ?, "
        f"updated = ?, expires = null {where} and state in ('dead', 'unreadable', 'cancelled')",
        (now, now, *given),
    ).rowcount


def purge(db: sqlite3.Connection, now: float, queue: str, id: str | None, state: str | None) -> int:
    """Delete one job of a queue, or those in a state. Those that run stay. Returns their number."""
    where, given = _where(queue, id, state)
    return db.execute(f"delete from job {where} and state != 'running'", given).rowcount


def expire(db: sqlite3.Connection, now: float) -> int:
    """Delete jobs whose results were kept long enough, some at a time."""
    return db.execute(
        "delete from job where seq in (select seq from job where expires <= ? limit 1000)", (now,)
    ).rowcount


def _where(queue: str, id: str | None, state: str | None) -> tuple[str, tuple[str, ...]]:
    given = {"queue": queue, "id": id, "state": state}
    known = {name: value for name, value in given.items() if value is not None}
    return "where " + " and ".join(f"{name} = ?" for name in known), tuple(known.values())


def _one(db: sqlite3.Connection, where: str, given: tuple[object, ...]) -> Job | None:
    row = db.execute(f"select * from job where {where}", given).fetchone()
    return None if row is None else Job._make(row)
