"""Processes that user code starts on loops of uvloop: one loop at a time forks in this process."""

from __future__ import annotations

import asyncio
import threading
import types
import weakref
from collections.abc import Callable, Generator
from functools import partial
from time import monotonic
from typing import Any

try:
    from uvloop import Loop
except ImportError:  # as in `loops`; the loops of asyncio need no turns
    Loop = None  # type: ignore[assignment,misc,unused-ignore]

LOOK_S = 0.002  # a fork takes 1 to 5 ms
GRACE_S = 3 * LOOK_S

_forking = threading.Lock()
_last: object = None  # the weak reference to the loop that has forked last; written with the lock
_refused_at = 0.0  # the last time at which another loop had to wait; a lost one costs some ms


def take_turns(ref: weakref.ref[asyncio.AbstractEventLoop]) -> None:
    """Have a loop of uvloop start a process only while no other does. In its thread, or before.

    Race of two such loops: uvloop runs Python's hooks for a fork, which may let another thread run.
    A loop that forks then raises "Racing with another loop to spawn a process", and leaks
    descriptors: https://github.com/MagicStack/uvloop/issues/508. Also, a process would inherit the
    descriptors that are meant for the other one, and keep its pipes open.
    """
    loop = ref()
    if Loop is None or not isinstance(loop, Loop):
        return
    for name in ("subprocess_exec", "subprocess_shell"):
        setattr(loop, name, partial(_spawn, ref, getattr(type(loop), name)))


async def _spawn(ref: Callable[[], object], spawn: Any, *args: Any, **kwargs: Any) -> Any:
    # Not a wait for the lock, which would stall this loop. Not a queue: a loop that has stalled
    # would keep its turn.
    while not _takes_turn(ref):  # noqa: ASYNC110 - an event would belong to one loop
        await asyncio.sleep(LOOK_S)
    return await _steps(partial(spawn, ref(), *args, **kwargs))


def _takes_turn(ref: object) -> bool:
    """Return whether a loop may fork now. Then it holds the lock."""
    global _last, _refused_at
    now = monotonic()
    if ref is _last:
        # A loop that starts many processes would take the lock again before another loop looks.
        return now >= _refused_at + GRACE_S and _forking.acquire(blocking=False)
    if _forking.acquire(blocking=False):
        _last, _refused_at = ref, 0.0
        return True
    _refused_at = now
    return False


@types.coroutine
def _steps(spawn: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """Fork, in the first step of `spawn()`, and release the lock: the loop may stall later."""
    try:
        coroutine = spawn()
        future = coroutine.send(None)
    finally:
        _forking.release()
    try:
        yield future
    except BaseException as error:  # cancelled: uvloop ends the process, and raises it again
        coroutine.throw(error)
        raise
    return (yield from coroutine)
