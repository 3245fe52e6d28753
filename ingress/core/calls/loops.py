"""Event loops, own and borrowed, and calls into them from other threads.

    EventLoopThread   a loop in a thread of its own: user code on it cannot end it
    ThreadAware       a loop that `call_soon` from another thread wakes, and reports
    BorrowedLoop      a running loop of another owner, which is never stopped here
    Mailbox           calls into one loop from any thread: one wake-up per burst, none lost
    run_on, start_on  a coroutine on a loop, and its result

Only this module uses the thread-safe functions of loops, and `testing.clock`, whose loops override
them.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from time import monotonic
from typing import Any, Protocol, TypeVar

from ingress.core.base import gil
from ingress.core.base.settings import event_loop
from ingress.core.base.signals import IN_USE, LOOK_S
from ingress.core.calls.spawning import take_turns
from ingress.core.calls.wrong_thread import report

_asyncios: Any
if sys.platform == "win32":
    from asyncio import ProactorEventLoop as _asyncios
else:
    from asyncio import SelectorEventLoop as _asyncios
try:
    from uvloop import Loop as _uvloops
except ImportError:  # Windows, or installed without the extra
    _uvloops = None  # type: ignore[assignment,misc,unused-ignore]

if sys.platform != "win32":  # Windows has no limit of open files
    import resource

logger = logging.getLogger("ingress")

T = TypeVar("T")
# Descriptors that a loop of uvloop holds open; one of asyncio holds 3.
DESCRIPTORS_PER_LOOP = 5
# For connections, files and libraries.
_SPARE_DESCRIPTORS = 64
# The wait of a loop that is being closed for tasks that swallow their cancellation.
_LAST_WORDS_S = 1.0

# For the step of a thread without a loop that calls `call_soon`, see `_call_soon_elsewhere`.
STEP_S = 0.002

NewLoop = Callable[[], asyncio.AbstractEventLoop]
OnDead = Callable[[Callable[..., Any], tuple[Any, ...]], None]


class _CallSoon(threading.local):
    """The function that each thread gets as one loop's `call_soon`."""

    def __init__(self, loop: weakref.ref[Any]) -> None:  # once in each thread
        self.function: Callable[..., Any] = partial(_call_soon_elsewhere, loop)


class ThreadAware:
    """The first base class of loops that `call_soon` from another thread wakes, and reports once.

    `Future.set_result` calls it, and with it `Event.set`, `Queue.put_nowait` and a task's end. With
    asyncio alone such a callback waits until the loop wakes for another reason, which may be never.
    Other methods, such as `call_later`, stay what they are.

    A thread-local lookup instead of an override, because each step of a task calls `call_soon`, a
    request one to five times: an override that compares `get_ident()` adds 350 to 490 ns a call,
    up to 2 % of a request of 83 us; this adds 60, up to 0.4 %, as it runs no Python code (uvloop
    0.23, CPython 3.11).
    """

    call_soon = property(attrgetter("_call_soon_of_thread.function"))

    def __init__(self, *args: Any) -> None:
        self.thread_name = ""
        # Weak, so that a loop ends without the garbage collector.
        self._call_soon_of_thread = _CallSoon(weakref.ref(self))
        super().__init__(*args)

    def run_forever(self) -> None:
        here, self.thread_name = self._call_soon_of_thread, threading.current_thread().name
        before, here.function = here.function, super().call_soon  # type: ignore[misc]
        try:
            super().run_forever()  # type: ignore[misc]
        finally:
            here.function = before

    def add_signal_handler(
        self: Any, number: int, callback: Callable[..., object], *args: object
    ) -> None:
        """Call `callback` on this loop at a signal, also if its thread is not the main thread.

        Python has handlers called in the main thread only: while a server of ingress handles the
        signals of the process, the main thread passes them on. A stop signal stops it afterwards.
        """
        if _gets_signals() or self.is_closed():
            super().add_signal_handler(number, callback, *args)  # type: ignore[misc]
            return
        run: Any = partial(callback, *args)
        IN_USE[-1].call(number, self, partial(_pass_on, self, run, copy_context()))

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        for each in IN_USE.copy():
            each.forget(self)

    def remove_signal_handler(self: Any, number: int) -> bool:
        """Take back the callback of a signal. Returns False if there is none."""
        if _gets_signals():
            return super().remove_signal_handler(number)  # type: ignore[misc,no-any-return]
        return IN_USE[-1].call(number, self, None)


def _gets_signals() -> bool:
    """Return whether no other thread can pass signals on to this one."""
    return not IN_USE or threading.current_thread() is threading.main_thread()


def _call_soon_elsewhere(
    ref: weakref.ref[Any],
    callback: Callable[..., Any],
    *args: Any,
    context: Context | None = None,
) -> asyncio.Handle:
    """Do the work of `call_soon` in a thread that does not run the loop."""
    loop = ref()
    if loop is None or loop.is_closed():
        raise RuntimeError("Event loop is closed")
    if running_loop() is loop:  # nest_asyncio has replaced its `run_forever`
        return super(ThreadAware, loop).call_soon(callback, *args, context=context)  # type: ignore[no-any-return, misc]
    context = copy_context() if context is None else context
    handle = asyncio.Handle(callback, args, loop, context)
    run = partial(_run_handle, handle, callback, args)
    if not loop.is_running():
        # Race with the loop's start: thread-safe in either case.
        loop.call_soon_threadsafe(run, context=context)
        return handle
    report(callback, args, loop.thread_name)
    # Race of the waiter that this wakes with the step that wakes it, such as `Event.set`: it goes
    # through its waiters, and fails with "deque mutated" if one leaves meanwhile. So the callback
    # runs after that step: after the present callback of this thread's loop, and where there is no
    # loop, after a time in which the step has most likely ended.
    if (here := running_loop()) is not None:
        here.call_soon(_pass_on, loop, run, context)
    else:
        loop.call_soon_threadsafe(partial(loop.call_later, STEP_S, run, context=context))
    return handle


def _pass_on(loop: asyncio.AbstractEventLoop, run: Callable[[], None], context: Context) -> None:
    try:
        loop.call_soon_threadsafe(run, context=context)
    except RuntimeError:
        return  # the loop has been closed meanwhile, and its waiters are gone


def _run_handle(
    handle: asyncio.Handle, callback: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if not handle.cancelled():
        callback(*args)


class _Guarded(ThreadAware):
    """The first base class of loops that are not closed while another thread wakes them.

    Without the GIL, uvloop 0.23 crashes then: `call_soon_threadsafe` finds the loop open, and uses
    what `close` has freed meanwhile. A thread may take the lock again: a finalizer may post.
    """

    def __init__(self) -> None:
        self._waking = threading.RLock()
        super().__init__()

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        with self._waking:
            return super().call_soon_threadsafe(callback, *args, context=context)  # type: ignore[misc,no-any-return]

    def close(self) -> None:
        with self._waking:
            super().close()


@cache
def loop_class(name: str) -> Any:
    """Return the class of a kind of event loops, as `ingress run --loop` takes it.

    Kept: a function that makes loops has to make one to tell its class. Raises `ValueError` if
    there is none.
    """
    if name == "uvloop" and _uvloops is None:
        raise ValueError(
            "the event loop uvloop is not installed; install it (python -m pip install uvloop), or "
            "choose asyncio"
        )
    module, _, attribute = name.partition(":")
    if name in ("auto", "asyncio", "uvloop"):
        return _asyncios if name == "asyncio" or _uvloops is None else _uvloops
    try:
        found: Any = attrgetter(attribute)(importlib.import_module(module)) if attribute else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the event loop {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(
            f"the event loop must be auto, asyncio, uvloop, or MODULE:NAME of a class or a "
            f"function that makes one, got {name!r}"
        )
    if not isinstance(found, type):
        try:
            made = found()
            made.close()
        except Exception as error:
            raise ValueError(f"the event loop {name!r} makes no loop: {error}") from error
        found = type(made)
    if not issubclass(found, asyncio.AbstractEventLoop):
        raise ValueError(f"the event loop {name!r} is a {found.__name__}, which is no event loop")
    return found


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop: of uvloop if that is installed, or as `INGRESS_EVENT_LOOP` says.

    Each has a class of its own: nest_asyncio replaces methods in the class of a loop that it
    patches, and would take them from all others.
    """
    bases = (_Guarded if gil.IS_FREE_THREADED else ThreadAware, loop_class(event_loop()))
    loop: Any = type("EventLoop", bases, {})()
    take_turns(weakref.ref(loop))  # weak: a loop ends without the garbage collector
    return loop  # type: ignore[no-any-return]


def _drop(callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Do nothing: the waiters on a loop that is gone are gone with it."""


def reserve_descriptors(loops: int, *, may_raise: bool = True) -> None:
    """Raise this process's soft limit of open files to its hard limit, if that is allowed.

    Raises `RuntimeError` if `loops` more loops do not fit even then. Called before the first loop
    is made: a failure in the middle of a start would leave the others half made.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not may_raise:
        hard = soft
    elif soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = 0
    with suppress(OSError):  # a chroot may have no list
        held = len(os.listdir("/dev/fd"))
    needed = held + loops * DESCRIPTORS_PER_LOOP + _SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise RuntimeError(
            f"{loops} more event loops need {needed} file descriptors in all, and this process "
            f"may open {hard}; raise the limit (`ulimit -n {needed}`, LimitNOFILE= of a service), "
            "start fewer replicas, or let them share a loop with "
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0"
        )


@dataclass(eq=False, slots=True, weakref_slot=True)
class Mailbox:
    """Calls into one event loop. Thread-safe.

    A post costs a deque append; only the first post after a drain wakes the loop. If the loop is
    closed or closing, every undelivered item goes to `on_dead(callback, args)` in the thread that
    notices, so that no caller waits for an answer that cannot come.
    """

    _loop: asyncio.AbstractEventLoop
    _on_dead: OnDead = _drop
    _items: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=deque)
    _woken: bool = False
    _closed: bool = False
    _burial: threading.Lock = field(default_factory=threading.Lock)
    # An empty context: with the context of the thread that posts first, a drain would run the
    # items of all other threads with its variables.
    _context: Context = field(default_factory=Context)

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have `callback(*args)` called on the loop, after everything posted before."""
        self._items.append((callback, args))
        # Race with `_drain`: it clears `_woken` *before* it counts the items. If `_woken` is still
        # set here, that count is yet to come and will include this item.
        if not self._closed:
            try:
                if not self._woken:
                    self._woken = True
                    self._loop.call_soon_threadsafe(self._drain, context=self._context)
                elif self._loop.is_closed():  # without the pending drain, and without `close`
                    self._closed = True
            except (RuntimeError, ReferenceError):  # the loop is closed, or collected
                self._closed = True
        # Race with `close`: it sets `_closed` before it empties the deque, this reads `_closed`
        # after appending, so at least one of the two sees the item; `popleft` gives it to one.
        if self._closed:
            self._bury()

    def close(self) -> None:
        """Stop delivering: the loop has stopped. Called by the loop's owner."""
        self._closed = True
        self._bury()

    def _drain(self) -> None:
        self._woken = False
        items = self._items
        # Only the items that are here now: a flood that arrives meanwhile must not keep the loop.
        left = len(items)
        try:
            while left:
                left -= 1
                callback, args = items.popleft()
                try:
                    callback(*args)
                except Exception as error:  # the loop logs it, and the other items must run
                    self._loop.call_exception_handler(
                        {"message": f"{callback!r} posted to an event loop", "exception": error}
                    )
        except IndexError:
            return  # `close` emptied the deque in another thread
        finally:
            if left > 0 and items:  # a `BaseException` is being raised; the other items must run
                self._woken = True
                self._loop.call_soon(self._drain, context=self._context)

    def _bury(self) -> None:
        items = self._items
        # One thread at a time, and without recursion: `on_dead` frees a slot, and the next call
        # that gets it is posted to the same dead loop. Race with a thread that is refused the lock:
        # it has appended already, and the thread with the lock checks the items once more after it
        # has released the lock.
        while items and self._burial.acquire(blocking=False):
            try:
                while items:
                    callback, args = items.popleft()
                    self._on_dead(callback, args)
            except IndexError:
                continue  # a last drain on the loop took the item
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
    """Return the loop's shared mailbox, for the answers to calls. Drops posts after its end."""
    last = _last_used
    if last.mailbox is not None and last.loop is not None and last.loop() is loop:
        return last.mailbox
    with _mailboxes_lock:
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            # The mailbox must not keep its own key alive, hence the weak proxy.
            mailbox = _mailboxes[loop] = Mailbox(weakref.proxy(loop))
            if not isinstance(loop, ThreadAware):  # a server's; no effect on asyncio's
                mailbox.post(take_turns, weakref.ref(loop))
    last.loop, last.mailbox = weakref.ref(loop), mailbox
    return mailbox


running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop
"""Return the event loop that runs in this thread, if one does."""


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop. Raises `RuntimeError` on the loop of another library."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "an application was called on an event loop that is not asyncio's, such as trio's, and "
            "needs asyncio: use uvicorn, TestClient(..., backend='asyncio'), or "
            "anyio_backend = 'asyncio' in tests"
        ) from None


def runs_here(loop: asyncio.AbstractEventLoop, thread: int) -> bool:
    """Return whether this code is on `loop`, which ran in the thread with this `get_ident()`.

    Asking for the running loop is a system call. Race with the end of the loop: another thread may
    get that number then, so the loop itself is asked too.
    """
    return threading.get_ident() == thread and loop.is_running()


class Wakeup:
    """A wake-up of one waiter on a loop: once, from any thread. Made on that loop."""

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
    """The loop that a component runs on, whose thread it need not know."""

    name: str
    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox

    @property
    def ident(self) -> int | None:
        """The thread's `threading.get_ident()`; `None` if the loop is borrowed."""

    def stop(self, timeout_s: float) -> bool: ...


class BorrowedLoop:
    """A running loop of another owner; `stop` only ends its use here."""

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

    __slots__ = ("_has_ended", "_stopping", "_thread", "loop", "mailbox", "name")

    def __init__(
        self,
        name: str,
        on_dead: OnDead = _drop,
        new_loop: NewLoop = new_event_loop,
    ) -> None:
        self.name = name
        self.loop = new_loop()
        self.mailbox = Mailbox(self.loop, on_dead)
        self._stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Free-threaded Python gives a thread the context of the one that starts it: a request's.
        Context().run(self._thread.start)

    def __repr__(self) -> str:
        return f"EventLoopThread({self.name!r})"

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    @property
    def has_ended(self) -> bool:
        """Return whether the thread has ended, or the loop was closed in its place. Thread-safe."""
        # A flag: `Thread.is_alive` takes a lock, and the control loop asks each replica.
        return self._has_ended or self.loop.is_closed()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> bool:
        """Cancel all tasks, close the loop and wait for the thread. Thread-safe, idempotent.

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

    def _run(self) -> None:
        try:
            self._main()
        finally:
            self._has_ended = True

    def _main(self) -> None:
        # A loop that user code stopped and closed cannot run again: its replica is replaced.
        while not self._stopping and not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except BaseException:
                if not self.loop.is_closed():
                    logger.exception(
                        "user code ended the event loop of %s; the loop is restarted", self.name
                    )
            else:
                if not self._stopping:
                    logger.error(
                        "user code stopped the event loop of %s; the loop is restarted", self.name
                    )
        if self.loop.is_closed():
            self.mailbox.close()
            logger.error("user code closed the event loop of %s", self.name)
        else:
            self._close()

    def _close(self) -> None:
        # First, so that nothing new begins while tasks are being ended.
        self.mailbox.close()
        deadline = monotonic() + _LAST_WORDS_S
        told: set[asyncio.Task[Any]] = set()
        while (tasks := asyncio.all_tasks(self.loop)) and monotonic() < deadline:
            for task in tasks - told:  # once: a second cancellation would cut a `finally` short
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
        except BaseException:  # from one of the tasks; the others must still end
            logger.exception("a task failed while the event loop of %s was closed", self.name)


async def run_on(
    loop: asyncio.AbstractEventLoop, func: Callable[..., Coroutine[Any, Any, T]], *args: Any
) -> T:
    """Run `func(*args)` on `loop` and await its result; a cancellation is passed on to it.

    Its coroutine is made there: one made here would never be awaited if it is cancelled first.
    """
    if running_loop() is loop:
        return await func(*args)
    errors: list[Exception] = []

    async def run() -> T | None:
        # Errors bypass the future: asyncio replaces a `TimeoutError` in it, without its traceback.
        try:
            return await func(*args)
        except Exception as error:  # raised below, on the other loop
            errors.append(error)
            return None

    result = await asyncio.wrap_future(start_on(loop, run()))
    if errors:
        raise errors.pop()
    return result  # type: ignore[return-value]


def run_blocking(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    timeout_s: float | None = None,
) -> T:
    """Run `coroutine` on `loop` from another thread and wait for its result."""
    future = start_on(loop, coroutine)
    # Not in one go: a signal may come just before the main thread blocks, and not wake it.
    while timeout_s is None and not wait([future], LOOK_S).done:
        pass
    return future.result(timeout_s)


def start_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start `coroutine` on `loop`, from any thread. Raises `RuntimeError` if the loop is closed."""
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise
