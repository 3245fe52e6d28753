"""Event loops with a home, and the one way to call into them.

    EventLoopThread   a loop of ours in a thread of its own: it outlives what user code does to it
    BorrowedLoop      somebody else's running loop, which we never stop
    Mailbox           calls into one loop from any thread: one wake-up per burst, none lost

Only this module, `threads` and `channel` reach across threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context
from time import monotonic
from typing import Any, Protocol, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # Windows, or installed without the extra
    from asyncio import new_event_loop  # type: ignore[assignment,unused-ignore]

if sys.platform != "win32":  # which has no such limit
    import resource

logger = logging.getLogger("ingress")

T = TypeVar("T")
# What a loop of uvloop holds open; one of asyncio's holds 3.
DESCRIPTORS_PER_LOOP = 5
# What connections, files and libraries may want besides.
_SPARE_DESCRIPTORS = 64
# How long a loop that is being closed waits for tasks that swallow their cancellation.
_LAST_WORDS_S = 1.0

OnDead = Callable[[Callable[..., Any], tuple[Any, ...]], None]


def _drop(callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Whoever waited on a loop that is gone is gone with it."""


def reserve_descriptors(loops: int) -> None:
    """Raise this process's soft limit of open files to its hard one.

    Raises `RuntimeError` if that many loops more do not fit even so: before the first is made,
    because one that fails in the middle of a start leaves the others half done.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = len(os.listdir("/dev/fd")) + loops * DESCRIPTORS_PER_LOOP + _SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise RuntimeError(
            f"{loops} event loops more need {needed} file descriptors in all, and this process "
            f"may have {hard}; raise the limit (`ulimit -n {needed}`, LimitNOFILE= of a service), "
            "start fewer replicas, or let them share a loop with "
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0"
        )


class Mailbox:
    """Calls into one event loop. Thread-safe.

    A hop costs a deque append; only the first post after a drain wakes the loop. If the loop is
    closed or closing, every undelivered item goes to `on_dead(callback, args)` in the thread that
    noticed, so that no caller waits for an answer that cannot come.
    """

    __slots__ = (
        "__weakref__",
        "_burial",
        "_closed",
        "_context",
        "_items",
        "_loop",
        "_on_dead",
        "_woken",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, on_dead: OnDead = _drop) -> None:
        self._loop = loop
        self._on_dead = on_dead
        self._items: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._woken = False
        self._closed = False
        self._burial = threading.Lock()
        # An empty context of its own: scheduled with the poster's, a drain would run everybody
        # else's items with the first poster's variables.
        self._context = Context()

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have `callback(*args)` called on the loop, after everything posted before it."""
        self._items.append((callback, args))
        # Race with `_drain`: it clears the flag *before* it looks how much there is. If the flag
        # is still set here, that look is yet to come and will see this item.
        if not self._closed:
            try:
                if not self._woken:
                    self._woken = True
                    self._loop.call_soon_threadsafe(self._drain, context=self._context)
                elif self._loop.is_closed():  # it went without a drain it owed us, nor a word
                    self._closed = True
            except (RuntimeError, ReferenceError):  # the loop is closed, or collected
                self._closed = True
        # Race with `close`: it sets the flag before it empties the deque, this looks at the flag
        # after appending, so at least one of the two sees the item; `popleft` gives it to one.
        if self._closed:
            self._bury()

    def close(self) -> None:
        """Deliver nothing more: the loop has stopped. Called by the loop's owner."""
        self._closed = True
        self._bury()

    def _drain(self) -> None:
        self._woken = False
        items = self._items
        # Only what is here now: a flood that arrives meanwhile cannot keep the loop.
        left = len(items)
        try:
            while left:
                left -= 1
                callback, args = items.popleft()
                try:
                    callback(*args)
                except Exception as error:
                    self._loop.call_exception_handler(
                        {"message": f"{callback!r} posted to an event loop", "exception": error}
                    )
        except IndexError:
            return  # `close` emptied the deque in another thread
        finally:
            if left > 0 and items:  # a `BaseException` is on its way out; the others still count
                self._woken = True
                self._loop.call_soon(self._drain, context=self._context)

    def _bury(self) -> None:
        items = self._items
        # One thread at a time, and never itself again: `on_dead` frees a slot, whose next owner is
        # posted to the same dead loop. Race with who is refused here: it has appended already, and
        # the one that buries looks once more after it has let go.
        while items and self._burial.acquire(blocking=False):
            try:
                while items:
                    callback, args = items.popleft()
                    self._on_dead(callback, args)
            except IndexError:
                continue  # a last drain on the loop was quicker
            finally:
                self._burial.release()


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)
_mailboxes_lock = threading.Lock()


class _LastUsed(threading.local):
    loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
    mailbox: Mailbox | None = None


_last_used = _LastUsed()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the loop's one mailbox for answers. What arrives after its end is dropped."""
    last = _last_used
    if last.mailbox is not None and last.loop is not None and last.loop() is loop:
        return last.mailbox
    with _mailboxes_lock:
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            # The mailbox must not keep its own key alive, hence the weak proxy.
            mailbox = _mailboxes[loop] = Mailbox(weakref.proxy(loop))
    last.loop, last.mailbox = weakref.ref(loop), mailbox
    return mailbox


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if one does."""
    return asyncio._get_running_loop()


def runs_here(loop: asyncio.AbstractEventLoop, thread: int) -> bool:
    """Whether we are on a loop, of which we know in which `get_ident()` it ran.

    To ask for the running loop is a system call. Race with the end of the loop: another thread may
    get that number then, so the loop itself is asked too.
    """
    return threading.get_ident() == thread and loop.is_running()


class Wakeup:
    """Wake one waiter on a loop once, from any thread. Made on that loop."""

    __slots__ = ("_future", "_loop", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self, *_: Any) -> None:
        if runs_here(self._loop, self._thread):
            self._set()
        else:
            mailbox_of(self._loop).post(self._set)

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


class Home(Protocol):
    """Where a component lives: a loop, whose thread it need not know."""

    name: str
    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox

    @property
    def ident(self) -> int | None:
        """The thread, as `threading.get_ident()` calls it; `None` if it is somebody else's."""

    def stop(self, timeout_s: float) -> bool: ...


class BorrowedLoop:
    """A running loop that belongs to somebody else; stopping it only stops our use of it."""

    __slots__ = ("loop", "mailbox", "name")

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, on_dead: OnDead = _drop) -> None:
        self.name = name
        self.loop = loop
        self.mailbox = Mailbox(loop, on_dead)

    @property
    def ident(self) -> int | None:
        return None

    def stop(self, timeout_s: float) -> bool:
        self.mailbox.close()
        return True


class EventLoopThread:
    """An event loop in its own daemon thread.

    User code on it may call `loop.stop()` or let a `SystemExit` out of a task it started; the
    thread then logs that and runs the loop again. Only `stop` ends it.
    """

    __slots__ = ("_stopping", "_thread", "loop", "mailbox", "name")

    def __init__(
        self,
        name: str,
        on_dead: OnDead = _drop,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = new_event_loop,
    ) -> None:
        self.name = name
        self.loop = new_loop()
        self.mailbox = Mailbox(self.loop, on_dead)
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"EventLoopThread({self.name!r})"

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> bool:
        """Cancel what runs, close the loop and wait for the thread. Thread-safe, idempotent.

        Returns False if user code still blocks the thread after `timeout_s`; the thread is then
        left behind and ends when that code returns.
        """
        self._stopping = True
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:
            pass  # already closed by an earlier stop
        if not self.is_current():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.mailbox.close()
                return False
        return True

    def _main(self) -> None:
        while not self._stopping:
            try:
                self.loop.run_forever()
            except BaseException:
                logger.exception("user code ended the event loop of %s; it runs again", self.name)
            else:
                if not self._stopping:
                    logger.error("user code stopped the event loop of %s; it runs again", self.name)
        self._close()

    def _close(self) -> None:
        # First of all, so that nothing begins behind the back of what is being ended.
        self.mailbox.close()
        deadline = monotonic() + _LAST_WORDS_S
        told: set[asyncio.Task[Any]] = set()
        while (tasks := asyncio.all_tasks(self.loop)) and monotonic() < deadline:
            for task in tasks - told:  # once: a second time would cut its `finally` short
                task.cancel()
            told |= tasks
            self._wait(tasks, deadline)
        closing = self.loop.create_task(self.loop.shutdown_asyncgens())
        self._wait({closing}, monotonic() + _LAST_WORDS_S)
        self.loop.close()

    def _wait(self, tasks: set[asyncio.Task[Any]], deadline: float) -> None:
        # Bounded: a task may swallow its cancellation, and this thread must end.
        try:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=deadline - monotonic()))
        except BaseException:  # from one of the tasks; the others still count
            logger.exception("while the event loop of %s was closed", self.name)


async def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on `loop` and await its result; cancellation travels along."""
    if running_loop() is loop:
        return await coroutine
    errors: list[Exception] = []

    async def run() -> T | None:
        # Round the future, not in it: asyncio makes a new `TimeoutError` of one, with no traceback.
        try:
            return await coroutine
        except Exception as error:
            errors.append(error)
            return None

    try:
        future = start_on(loop, run())
    except RuntimeError:
        coroutine.close()
        raise
    result = await asyncio.wrap_future(future)
    if errors:
        raise errors.pop()
    return result  # type: ignore[return-value]


def run_blocking(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    timeout_s: float | None = None,
) -> T:
    """Run `coroutine` on `loop` from another thread and wait for its result."""
    return start_on(loop, coroutine).result(timeout_s)


def start_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start `coroutine` on `loop`, from any thread. Raises `RuntimeError` if the loop is closed."""
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise
