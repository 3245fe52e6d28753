"""One caller's part of a batch, and its answer."""

from __future__ import annotations

import asyncio
import copy
import logging
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ingress.core.calls.call import Call
from ingress.core.calls.channel import Channel
from ingress.core.execution import execution
from ingress.exceptions import StreamClosedError

logger = logging.getLogger("ingress")


@dataclass(eq=False, slots=True)
class Item:
    """One caller's part of a batch.

    Only items of one `group` run together: the model id and the shape of the arguments. `ready` is
    done when the item has its answer, or its stream begins. `span` is the caller's OpenTelemetry
    span. `is_over` says that the item was answered, or that its caller has left.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    group: tuple[str, int, frozenset[str]]
    call: Call | None
    ready: asyncio.Future[None]
    channel: Channel[object] | None
    span: object = None
    value: object = None
    error: BaseException | None = None
    is_over: bool = False
    dropped: weakref.ref[AsyncGenerator[object, None]] | None = None

    @property
    def has_left(self) -> bool:
        # Race with a cancellation: it reaches the future at once, but the caller calls `leave` on a
        # later turn of the loop, and a batch may start in between.
        return self.is_over or self.ready.cancelled()

    @property
    def model_id(self) -> str:
        return self.group[0]

    @property
    def first(self) -> object:
        """The value of the first parameter, `None` if there is none."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def begin(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def settle(self, value: object = None, error: BaseException | None = None) -> None:
        """Give the caller its answer, or end its stream. The first call counts."""
        if self.is_over:
            return
        self.is_over = True
        # Not in the future: it refuses a `StopIteration`, and logs an error that is not fetched,
        # because the caller has left at this very moment.
        self.value, self.error = value, error
        if self.channel is not None:
            self.channel.finish(error)
        self.begin()

    async def put(self, value: object) -> None:
        """Give the caller the next part of its stream; wait while it is too far behind."""
        assert self.channel is not None
        try:
            await self.channel.put(value, len(value) if isinstance(value, str | bytes) else 0)
        except StreamClosedError:  # the caller has left; the others go on
            self.is_over = True


def fail(items: list[Item], error: Exception) -> None:
    """Fail the items that have no answer yet, each with an error of its own.

    One error that several tasks raise would collect the frames and contexts of all of them.
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
        logger.debug("%s cannot be copied for each caller", type(error).__name__, exc_info=True)
        return error


def _copied(error: Exception) -> BaseException:
    made = copy.copy(error)
    if type(made) is not type(error):
        return error
    made.args = error.args  # a constructor may have changed its arguments
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)
