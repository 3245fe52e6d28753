"""The types of batched functions, for type checkers. At run time they are functions.

Annotations cannot turn the lists of a signature into their items. So the parameters are `...`, and
`ingress.mypy` fills them in.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from typing import Any, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Results = Sequence[R] | Awaitable[Sequence[R]]
BatchPart = Sequence[R | type[StopIteration]]
Parts = Iterator[BatchPart[R]] | AsyncIterator[BatchPart[R]]


class Limited(Protocol):
    """The functions of a batched function that change its limits."""

    __name__: str

    def set_max_batch_size(self, max_batch_size: int) -> None: ...
    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None: ...
    def _get_max_batch_size(self) -> int: ...
    def _get_batch_wait_timeout_s(self) -> float: ...


class Batched(Limited, Protocol[P, R_co]):
    """A batched function, to type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]: ...


class BatchedStream(Limited, Protocol[P, R_co]):
    """A batched generator, to type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[R_co, None]: ...


class BatchDecorator(Protocol):
    """The result of `batch(...)` with options: the decorator."""

    @overload
    def __call__(self, func: Callable[..., Parts[R]], /) -> BatchedStream[..., R]: ...
    @overload
    def __call__(self, func: Callable[..., Results[R]], /) -> Batched[..., R]: ...
    @overload
    def __call__(self, func: Callable[..., object], /) -> Any: ...
