"""The callables of `Depends(...)`, run in the replica's own threads and bound to its instance.

    callable                                becomes
    `def`, a class, an object with a        a `LiftedFunction`: runs by the replica's plan
      `def __call__`
    a method of the deployment's class      the same; with `yield`, its `self` is bound
    a `def` with `yield` and `@method`      a `LiftedPlacedGenerator`: entered and left as planned
    `async def`, `yield`, a security scheme left to FastAPI

FastAPI would run a plain `def` dependency with AnyIO. On a loop outside of the main thread, AnyIO's
switch to a thread costs as much as the rest of the request.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Annotated, get_args, get_origin

from fastapi import params
from fastapi.security.base import SecurityBase

from ingress.app.asgi.compat import Dependant, get_typed_signature
from ingress.app.asgi.methods import Methods, Target, kind_for_fastapi
from ingress.context import REPLICA
from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import Kind, override_of


class Lifted:
    """A replacement of a dependency, equal to the original.

    Equality makes the user's `app.dependency_overrides`, whose keys are the originals, apply to the
    replacement, and makes both one dependency in FastAPI's cache of a request. `__signature__` is
    for FastAPI, which analyses a dependency again at each request once there are overrides.
    """

    def __init__(
        self, original: Callable[..., object], target: Target, signature: inspect.Signature
    ) -> None:
        self._original = original
        self._target = target
        self.func = target.func
        self.__signature__ = signature
        self.__name__ = getattr(original, "__name__", type(original).__name__)
        self.__qualname__ = getattr(original, "__qualname__", type(original).__qualname__)
        self.__module__ = original.__module__

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if isinstance(other, Lifted) else other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)


class LiftedFunction(Lifted):
    """A function, run by the current replica's plan."""

    async def __call__(self, **values: object) -> object:
        return await REPLICA.get().plans[self.func].run(**values)


class LiftedGenerator(Lifted):
    """A method with `yield`, bound to the current replica's instance and run by FastAPI.

    A plan's stream cannot run it, because an exception of the endpoint must be raised at the user's
    `yield`.
    """

    def __call__(self, **values: object) -> Generator[object, None, None]:
        bound = self._target.bound_to(REPLICA.get().servable_object)
        with contextmanager(bound)(**values) as value:
            yield value


class LiftedPlacedGenerator(Lifted):
    """A `def` with `yield` and `@serve.method`: both halves run where `@serve.method` says."""

    async def __call__(self, **values: object) -> AsyncGenerator[object, None]:
        plan = REPLICA.get().plans[self.func]
        manager = contextmanager(plan.func)(**values)
        value = await plan.run_part(manager.__enter__)
        try:
            yield value
        except BaseException as error:
            # A cleanup, because it must run even if the request is cancelled.
            leave = partial(manager.__exit__, type(error), error, error.__traceback__)
            if not await plan.run_part(leave, is_cleanup=True):
                raise
        else:
            await plan.run_part(partial(manager.__exit__, None, None, None), is_cleanup=True)


class LiftedAsyncGenerator(Lifted):
    """As `LiftedGenerator`, for `async def`."""

    async def __call__(self, **values: object) -> AsyncGenerator[object, None]:
        bound = self._target.bound_to(REPLICA.get().servable_object)
        async with asynccontextmanager(bound)(**values) as value:
            yield value


_UNPLANNED: dict[Kind, type[LiftedGenerator | LiftedAsyncGenerator]] = {
    Kind.GENERATOR: LiftedGenerator,
    Kind.ASYNC_GENERATOR: LiftedAsyncGenerator,
}


@dataclasses.dataclass(eq=False)
class Dependencies:
    """The lifted dependencies of a deployment's routes; a replica makes plans for `targets`."""

    _methods: Methods
    _lifted: dict[Callable[..., object], Callable[..., object]] = dataclasses.field(
        default_factory=dict
    )
    targets: list[Target] = dataclasses.field(default_factory=list)

    def lift(self, dependant: Dependant) -> None:
        """Replace the callables of the dependant's dependencies, at any depth."""
        dependant.dependencies[:] = [self._replaced(each) for each in dependant.dependencies]

    def _replaced(self, dependant: Dependant) -> Dependant:
        self.lift(dependant)
        assert dependant.call is not None  # for types
        call = self._call(dependant.call)
        if call is dependant.call:
            return dependant
        known = signature_of(call).parameters
        return dataclasses.replace(  # a copy: older FastAPIs cache results of `call`
            dependant,
            call=call,
            query_params=[field for field in dependant.query_params if field.name in known],
        )

    def _call(self, original: Callable[..., object]) -> Callable[..., object]:
        if original not in self._lifted:
            self._lifted[original] = self._make(original)
        return self._lifted[original]

    def _make(self, original: Callable[..., object]) -> Callable[..., object]:
        target = self._methods.target(original)
        kind = kind_for_fastapi(target.func)
        is_method = target.descriptor is not None
        is_placed = kind is Kind.GENERATOR and override_of(target.func) is not None
        is_lifted = is_method or is_placed or kind is Kind.FUNCTION
        if not is_lifted or isinstance(original, SecurityBase):
            return original
        signature = self._signature(original, skip_first=target.takes_self)
        if is_placed or kind not in _UNPLANNED:
            self.targets.append(target)
        lifted: Callable[..., Callable[..., object]]
        lifted = LiftedPlacedGenerator if is_placed else _UNPLANNED.get(kind, LiftedFunction)
        return lifted(original, target, signature)

    def _signature(self, original: Callable[..., object], *, skip_first: bool) -> inspect.Signature:
        parameters = get_typed_signature(original).parameters.values()
        return inspect.Signature(
            [self._parameter(each) for each in list(parameters)[1 if skip_first else 0 :]]
        )

    def _parameter(self, parameter: inspect.Parameter) -> inspect.Parameter:
        """Return the parameter with the callable of its `Depends` lifted.

        A `Depends` in an `Annotated` becomes a default, which is equivalent for FastAPI: `typing`
        caches one `Annotated` for equal arguments, so a new one would have the original. The
        parameter becomes keyword-only, so that a default may precede a parameter without one.
        """
        parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        annotated, *metadata = (
            get_args(parameter.annotation)
            if get_origin(parameter.annotation) is Annotated
            else (parameter.annotation,)
        )
        for value in (parameter.default, *metadata):
            if isinstance(value, params.Depends) and value.dependency is not None:
                lifted = copy.copy(value)
                object.__setattr__(lifted, "dependency", self._call(value.dependency))  # frozen
                return parameter.replace(annotation=annotated, default=lifted)
        return parameter
