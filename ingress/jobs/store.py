"""One SQLite file of jobs, and the thread of this process that reads and writes it.

    submit -> the thread takes all that wait -> one transaction, one sync -> each gets its answer

So eight clients share the time of one sync (group commit), and no event loop waits for the disk.
A commit that an enqueue is part of is on the disk (`synchronous=FULL`) before it is answered; the
end of a job needs no sync, because a job whose end is lost runs again.

Several processes may use one file. Each holds a lock of the operating system on one byte of
FILE-owners, from before its first claim until it ends: who gets that lock knows that the owner is
dead, whatever its clock, its process id or its container. Locks of POSIX (`fcntl`) belong to the
process: a forked child does not keep them, and a second descriptor of that file, once closed,
would give them back. So there is one `Store` for each file in a process.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from ingress.exceptions import TaskQueueError
from ingress.jobs import table
from ingress.telemetry.logs import logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

IDLE_S = 0.2  # without a request or a consumer, until the file is closed
POLL_S = 0.01  # between two looks for what other processes have written
BUSY_S = 5.0  # for another process that holds the file
MAX_BATCH = 512
SQLITE_NEEDED = (3, 35)  # for RETURNING
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "ceph", "glusterfs",
                     "fuse.glusterfs", "lustre", "afs"})  # fmt: skip


class _Request(NamedTuple):
    """One operation of the table, and who waits for it.

    `writes` is False for one that only reads, which needs no transaction.
    """

    run: Callable[[sqlite3.Connection, float], Any]
    answer: Future[Any]
    writes: bool
    is_durable: bool


class Clock:
    """Unix time that never goes back, and goes on while the system's clock stands or was set back.

    `at_least` is the last time in the file. Owned by the store's thread.
    """

    __slots__ = ("_last", "_ticks")

    def __init__(self, at_least: float) -> None:
        self._last, self._ticks = at_least, time.monotonic()

    def now(self) -> float:
        ticks = time.monotonic()
        self._last = max(time.time(), self._last + ticks - self._ticks)
        self._ticks = ticks
        return self._last


class Store:
    """The jobs in one file. Thread-safe; there is one for each file, which `use_store` returns.

    The thread and the descriptors are there while somebody watches, and for `IDLE_S` after the last
    request. `owner` is the number under which this process claims jobs, from the first `watch` on.
    """

    __slots__ = (
        "_clock", "_db", "_inbox", "_locks", "_starting", "_thread", "_version", "_watchers",
        "_which", "owner", "path",
    )  # fmt: skip

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner = 0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watchers: dict[object, Callable[[], None]] = {}
        self._inbox: SimpleQueue[_Request] = SimpleQueue()

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def open(self) -> None:
        """Open the file, unless it is, and wait for that. Raises `ValueError` with the fix."""
        try:
            self.read(lambda db, now: None).result()
        except TaskQueueError as error:
            raise ValueError(str(error)) from None

    def read(self, operation: Callable[..., T], *args: Any) -> Future[T]:
        """Read the table. The answer may raise `TaskQueueError`."""
        return self._submit(operation, args, writes=False)

    def write(self, operation: Callable[..., T], *args: Any, is_durable: bool = False) -> Future[T]:
        """Change the table. A durable change is on the disk before it is answered, and wakes."""
        return self._submit(operation, args, is_durable=is_durable)

    def _submit(
        self,
        operation: Callable[..., T],
        args: tuple[Any, ...],
        *,
        writes: bool = True,
        is_durable: bool = False,
    ) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a caller that goes does not undo it
        run = lambda db, now: operation(db, now, *args)  # noqa: E731
        # Race with the thread, which ends when it is idle: it looks into the inbox under this lock.
        with self._starting:
            self._inbox.put(_Request(run, answer, writes, is_durable))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ingress-jobs-store", daemon=True
                )
                self._thread.start()
        return answer

    def watch(self, key: object, wake: Callable[[], None]) -> None:
        """Call `wake`, in the store's thread, whenever there may be something new."""
        self._watchers = {**self._watchers, key: wake}  # replaced: the thread goes through it
        self.read(lambda db, now: None)  # the thread waits longer while nobody watches

    def unwatch(self, key: object) -> None:
        self._watchers = {each: wake for each, wake in self._watchers.items() if each != key}

    def is_alive(self, db: sqlite3.Connection, now: float, owner: int) -> bool:
        """Return whether the process of an owner lives; an operation, for `read`."""
        if owner == self.owner:
            return True
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, owner)
        except OSError:
            return True
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, owner)
        return False

    # The store's thread.

    def _run(self) -> None:
        try:
            self._open()
        except (ValueError, OSError, sqlite3.Error) as error:
            self._refuse(TaskQueueError(str(error)))
            return
        is_used = True
        while is_used:
            try:
                is_used = self._serve()
            except Exception:  # of a watcher: nobody would answer what comes next
                logger.exception("the job store %s failed", self.path)

    def _open(self) -> None:
        # In this thread: no event loop waits for the disk.
        self._db = _opened(self.path)
        self._which = _which(self.path)
        self._locks = os.open(f"{self.path}-owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        (last,) = self._db.execute("select max(updated) from job").fetchone()
        self._clock, self._version, self.owner = Clock(last or 0.0), -1, 0

    def _refuse(self, error: TaskQueueError) -> None:
        """End the thread, and answer all that waits for it."""
        with self._starting, suppress(Empty):
            self._thread = None
            while True:
                self._inbox.get_nowait().answer.set_exception(error)

    def _serve(self) -> bool:
        """Answer all that waits. Returns False once it has been idle, and everything is closed."""
        batch: list[_Request] = []
        with suppress(Empty):
            batch.append(self._inbox.get(timeout=POLL_S if self._watchers else IDLE_S))
            while len(batch) < MAX_BATCH:
                batch.append(self._inbox.get_nowait())
        self._answer([each for each in batch if not each.writes])
        writes = [each for each in batch if each.writes]
        if writes:
            self._write(writes)
        if self._watchers and (self._has_changed() or any(each.is_durable for each in writes)):
            for wake in self._watchers.values():
                wake()
        return bool(batch or self._watchers) or not self._has_ended()

    def _has_ended(self) -> bool:
        with self._starting:
            if not self._inbox.empty() or self._watchers:
                return False
            self._thread = None
            with suppress(sqlite3.Error):
                self._db.close()
            os.close(self._locks)  # and with it the owner's lock
            return True

    def _has_changed(self) -> bool:
        """Return whether another process has written since the last look."""
        with suppress(sqlite3.Error):
            before = self._version
            (self._version,) = self._db.execute("pragma data_version").fetchone()
            return before != self._version
        return False

    def _answer(self, requests: list[_Request]) -> None:
        now = self._clock.now()
        for each in requests:
            try:
                value = each.run(self._db, now)
            except Exception as error:
                each.answer.set_exception(self._error(error))
            else:
                each.answer.set_result(value)

    def _write(self, requests: list[_Request]) -> None:
        """Write all in one transaction. An operation that fails is undone alone."""
        db, done = self._db, []
        is_durable = any(each.is_durable for each in requests)
        try:
            if _which(self.path) != self._which:
                raise TaskQueueError(f"{self.path} was moved or deleted; restart the server")
            db.execute(f"pragma synchronous = {'full' if is_durable else 'normal'}")
            self._begin()
            now = self._clock.now()
            for each in requests:
                db.execute("savepoint job")
                try:
                    done.append((each, each.run(db, now)))
                except Exception as error:
                    if not db.in_transaction:  # the disk is full: SQLite has undone all
                        raise
                    db.execute("rollback to job")
                    each.answer.set_exception(self._error(error))
                db.execute("release job")
            db.execute("commit")
        except Exception as error:
            with suppress(sqlite3.Error):
                db.rollback()
            for each in requests:
                if not each.answer.done():
                    each.answer.set_exception(self._error(error))
            return
        for each, value in done:
            each.answer.set_result(value)

    def _begin(self) -> None:
        """Begin a transaction. SQLite's own waiting is not used: it sleeps for up to 100 ms.

        A process that sleeps so long hardly finds the file free among others that do not.
        """
        until = time.monotonic() + BUSY_S
        while True:
            try:
                self._db.execute("begin immediate")
                return
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & 0xFF
                if code != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(random.uniform(0.0005, 0.0015))

    def _error(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.Error):
            return error
        told = TaskQueueError(
            f"the job store {self.path} does not answer: {error}; nothing was written"
        )
        told.__cause__ = error
        return told

    def own(self, db: sqlite3.Connection, now: float) -> int:
        """Return the owner of this process, and make it first; an operation, for `write`."""
        if not self.owner:
            self.owner = db.execute("insert into owner default values").lastrowid or 0
            db.execute("delete from owner where id < ?", (self.owner,))
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, self.owner)
        return self.owner


def _which(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of its name; `None` if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _opened(path: Path) -> sqlite3.Connection:
    """Open the file, or make it. Raises `ValueError` with the fix."""
    fix = "give SQLiteAdapterConfig(path=...) a file on a local disk that this process may write"
    given = f"path={str(path)!r}"
    if fcntl is None:
        raise ValueError(
            "the embedded job store needs the locks of a POSIX system; on Windows use "
            "CeleryAdapterConfig(...)"
        )
    if sqlite3.sqlite_version_info < SQLITE_NEEDED:
        raise ValueError(
            f"the embedded job store needs SQLite 3.35, this Python has {sqlite3.sqlite_version}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{given}: there is no directory {path.parent}; make it, or {fix}")
    if (kind := file_system_of(path.parent)) in NETWORK:
        raise ValueError(f"{given} is on a network file system ({kind}), whose locks fail; {fix}")
    try:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise ValueError(f"{given} cannot be opened: {error}; {fix}") from None
    try:
        return _prepared(db, given, fix)
    except sqlite3.Error as error:
        db.close()
        raise ValueError(f"{given} cannot be used: {error}; {fix}") from None
    except BaseException:
        db.close()
        raise


def _prepared(db: sqlite3.Connection, given: str, fix: str) -> sqlite3.Connection:
    """Make the table, unless it is there. Raises `ValueError` if the file is another's."""
    (application,) = db.execute("pragma application_id").fetchone()
    (version,) = db.execute("pragma user_version").fetchone()
    (tables,) = db.execute("select count(*) from sqlite_master").fetchone()
    if application != table.APPLICATION_ID and (application or version or tables):
        raise ValueError(f"{given} is a database of another program; {fix}")
    if version > table.VERSION:
        raise ValueError(
            f"{given} was written by a newer version of this package (format {version}, this one "
            f"reads {table.VERSION}); install that version, or give another file"
        )
    (mode,) = db.execute("pragma journal_mode = wal").fetchone()
    if mode != "wal":
        raise ValueError(f"{given}: its file system has no WAL mode for SQLite ({mode}); {fix}")
    db.execute("begin immediate")
    # Race of two processes that make the file: the second finds the table.
    (version,) = db.execute("pragma user_version").fetchone()
    for statement in {0: table.SCHEMA, 1: table.UPGRADE}.get(version, "").split(";"):
        db.execute(statement)
    db.execute("commit")
    db.execute("pragma busy_timeout = 0")
    return db


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of a folder, "" where it cannot be told."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""
    found, best = "", -1
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        place = fields.split()[4].replace("\\040", " ")
        if folder.resolve().is_relative_to(place) and len(place) >= best:
            found, best = rest.split()[0], len(place)
    return found


_stores: dict[Path, Store] = {}
_inherited: list[Store] = []  # of the parent: a connection must not be closed in another process
_lock = threading.Lock()


def use_store(path: str) -> Store:
    """Return the store of a file, opened. Raises `ValueError` with the fix."""
    file = Path(path).expanduser().resolve()
    with _lock:
        store = _stores.setdefault(file, Store(file))
    store.open()
    return store


def _forget_parent() -> None:
    """In a forked child: the parent's stores have no thread here, and are not used."""
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_stores.values())
    _stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
