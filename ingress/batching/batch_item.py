"""One caller's part of a batch, and its answer."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

from ingress.calls.call import Call
from ingress.calls.channel import Channel
from ingress.exceptions import StreamClosedError
from ingress.execution import execution


@dataclass(eq=False, slots=True)
class Item:
    """One caller's part of a batch.

    `group`, its model id and the shape of its arguments, is what it shares with those it may run
    with. `ready` is done when it has its answer, or its stream begins; `is_over` says that it was
    answered, or that its caller has left.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    group: tuple[str, int, frozenset[str]]
    call: Call | None
    ready: asyncio.Future[None]
    channel: Channel | None
    value: Any = None
    error: BaseException | None = None
    is_over: bool = False

    @property
    def has_left(self) -> bool:
        # Race with a cancellation: it reaches the future at once, its caller comes to `leave` on a
        # later turn of the loop, and a batch may start in between.
        return self.is_over or self.ready.cancelled()

    @property
    def model_id(self) -> str:
        return self.group[0]

    @property
    def first(self) -> Any:
        """The value of the first parameter, `None` if there is none."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def begin(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Give the caller its answer, or end its stream. The first call counts."""
        if self.is_over:
            return
        self.is_over = True
        # Not in the future: it refuses a `StopIteration`, and complains of an error that a caller
        # who left at this very moment does not fetch.
        self.value, self.error = value, error
        if self.channel is not None:
            self.channel.finish(error)
        self.begin()

    async def put(self, value: Any) -> None:
        """Give the next part of a stream; wait while the caller is too far behind."""
        assert self.channel is not None
        try:
            await self.channel.put(value, len(value) if isinstance(value, str | bytes) else 0)
        except StreamClosedError:  # it has left; the others go on
            self.is_over = True


def fail(items: list[Item], error: Exception) -> None:
    """Fail those who have no answer yet, each with an error of its own.

    Raised by several tasks one object would collect the frames and contexts of all of them.
    """
    copies: list[BaseException] = [error]
    copies += [_copy(error) for item in items[1:]]
    for item, each in zip(items, copies, strict=True):
        item.settle(error=each)


def _copy(error: Exception) -> BaseException:
    """Return an equal error of the same type, or the same one if it cannot be copied."""
    try:
        return execution.call_inline(_copied, error)
    except Exception:
        return error


def _copied(error: Exception) -> BaseException:
    made: Any = copy.copy(error)
    if type(made) is not type(error):
        return error
    made.args = error.args  # a constructor may make something else of its own arguments
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    copied: BaseException = made.with_traceback(error.__traceback__)
    return copied
