"""`@multiplexed`: a cache for an `async def` that loads a model by its id, see `models`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

from ingress._unsupported import refuse
from ingress.context import REPLICA
from ingress.core.base.signatures import signature_of
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.execution.execution import Kind, kind, name_of

if TYPE_CHECKING:
    from ingress.serving.replicas.models import Models

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

NO_LIMIT = -1


@overload
def multiplexed(func: F, /) -> F: ...
@overload
def multiplexed(*, max_num_models_per_replica: int = 3) -> Callable[[F], F]: ...
def multiplexed(
    func: Any = None, /, max_num_models_per_replica: int = 3, **unsupported: Never
) -> Any:
    """Cache the models that an `async def` loads by their ids.

    The method or function has one parameter, the model's id, and returns the model. A call returns
    the cached model or loads it. If the cache is full, the least recently used model is evicted,
    and its `__del__` is run. -1 is no limit. Raises `TypeError` or `ValueError` at decoration.
    Source: Ray 2.60.0, api.py and multiplex.py.
    """
    refuse("serve.multiplexed", unsupported, multiplexed)
    limit = max_num_models_per_replica
    given: object = limit
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"max_num_models_per_replica must be an integer, got {limit!r}.")
    if limit <= 0 and limit != NO_LIMIT:
        raise ValueError(
            f"max_num_models_per_replica must be positive, or -1 for no limit, got {limit}; leave "
            "it out for the default, 3."
        )

    def decorate(func: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        if not callable(func):
            raise TypeError(
                "The `multiplexed` decorator must be used with a function or method, got "
                f"{func!r}; give the limit by name: max_num_models_per_replica=3."
            )
        if kind(func) is not Kind.COROUTINE:
            raise TypeError(
                "@serve.multiplexed can only be used to decorate async functions or methods, got "
                f"{name_of(func)}; make it an `async def` that returns the model."
            )
        signature = signature_of(func)
        count = len(signature.parameters)
        if count not in (1, 2) or (count == 1 and "self" in signature.parameters):
            raise TypeError(_one_id(func, str(signature)))

        @wraps(func)
        async def load(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != count:
                try:
                    args = signature.bind(*args, **kwargs).args
                except TypeError as error:
                    raise TypeError(_one_id(func, str(error))) from None
            *owner, model_id = args
            _check_id(model_id)
            replica = REPLICA.get(None)
            if replica is None or replica.models is None:
                raise RuntimeError(
                    "`@serve.multiplex` can only be used within a deployment (failed to retrieve "
                    f"Serve replica context): {name_of(func)} was called outside of one."
                )
            models: Models = replica.models
            return await models.get(func, owner, model_id, limit)

        load.__ingress_loader__ = func  # type: ignore[attr-defined]  # for `inspection`
        return load

    return decorate if func is None else decorate(func)


def get_multiplexed_model_id() -> str:
    """Return the model id that the current request names, "" if none.

    In a batch function it is the id of the batch, in a function that loads a model that model's.
    """
    call = CURRENT_CALL.get(None)
    return "" if call is None else call.metadata.multiplexed_model_id


def _check_id(model_id: object) -> None:
    if not isinstance(model_id, str):
        raise TypeError(f"The model ID must be a string, got {model_id!r}.")
    if not model_id:
        raise ValueError(
            "The model ID cannot be empty. A request names it in the header "
            "serve_multiplexed_model_id, a caller with handle.options(multiplexed_model_id=...)."
        )


def _one_id(func: Callable[..., Any], problem: str) -> str:
    return (
        "Functions decorated with `@serve.multiplexed` must take exactly one argument, the "
        f"multiplexed model ID (str); {name_of(func)}: {problem}"
    )
