"""The defects that once left guards open, put back one at a time: `compare` must find each.

    python -m tests.differential.mutants [COUNT]

COUNT is the most programs that a defect may take, 2,000 by default.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args, get_origin
from unittest.mock import patch

from fastapi import params
from fastapi.dependencies import utils

from ingress.app.asgi import compat, dependencies, methods, routes
from ingress.context import REPLICA
from tests.differential.compare import compare

Mutant = Callable[[], Any]
AT_A_TIME = 50


def first_parameter_is_the_instance() -> Any:
    """Any function of the class gets the instance, whatever its first parameter is."""

    def is_bound(func: Any, owner: Any) -> bool:
        return methods._first(func) is not None

    return patch.object(methods, "_is_bound", is_bound)


def names_of_the_class_are_not_known() -> Any:
    """An annotation of a method is read as FastAPI reads that of a function."""
    read = methods._read

    def of_the_module(func: Any, owner: Any = None, *, skip_first: bool = False) -> Any:
        found = read(func)
        kept = list(found.parameters.values())[skip_first:]
        return found.replace(parameters=kept)

    return patch.object(methods, "_read", of_the_module)


def first_depends_of_an_annotated_counts() -> Any:
    """While there are overrides, FastAPI sees the first `Depends` of an `Annotated`."""
    analyse = compat.get_dependant

    def with_first(*, call: Any, **given: Any) -> Any:
        signature = getattr(call, "__signature__", None)
        if REPLICA.get(None) is not None and signature is not None:
            call.__signature__ = signature.replace(
                parameters=[
                    each.replace(annotation=_with_first(each.annotation))
                    for each in signature.parameters.values()
                ]
            )
        return analyse(call=call, **given)

    return patch.object(dependencies, "get_dependant", with_first)


def _with_first(annotation: Any) -> Any:
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *metadata = get_args(annotation)
    found = [each for each in metadata if isinstance(each, params.Depends)]
    return Annotated[(kind, found[0])] if found else annotation


def equal_callables_are_one() -> Any:
    """One replacement stands for all callables that are equal."""
    known: dict[Any, Any] = {}
    replaced = dependencies.Dependencies.replaced

    def by_equality(self: Any, call: Any) -> Any:
        key = (id(self), dependencies.original_of(call))
        return known.setdefault(key, replaced(self, call))

    return patch.object(dependencies.Dependencies, "replaced", by_equality)


def wrapped_methods_are_not_bound() -> Any:
    """A decorator hides a method, whose `self` FastAPI then asks the client for."""
    owner, asks = methods.Methods._owner, methods.asks_for_self

    def of_functions(self: Any, func: Any) -> Any:
        return None if hasattr(func, "__wrapped__") else owner(self, func)

    def never(func: Any) -> bool:
        return not hasattr(func, "__wrapped__") and asks(func)

    return _both(
        patch.object(methods.Methods, "_owner", of_functions),
        patch.object(methods, "asks_for_self", never),
    )


def instance_is_a_keyword() -> Any:
    """The instance is passed to each wrapper by the name `self`."""
    return patch.object(
        methods, "_takes_instance_by_name", lambda func: hasattr(func, "__wrapped__")
    )


def layers_of_routes_are_dropped() -> Any:
    """A layer that user code has put around a route's app is bypassed."""
    return patch.object(routes.RouteTree, "_keep_changes", lambda *_: None)


def overrides_are_looked_up_by_the_replacement() -> Any:
    """The replacement of a dependency is the key of its override."""

    def get(self: Any, call: Any, default: Any) -> Any:
        found = self.users.dependency_overrides.get(call, call)
        return self._owner.replaced(found)

    return patch.object(dependencies.Overrides, "find", lambda self, call: get(self, call, call))


def methods_below_others_are_not_bound() -> Any:
    """While there are overrides, FastAPI runs what is below an `async def` as it is."""
    get = dependencies.Overrides.get

    def as_it_is(self: Any, call: Any, default: Any) -> Any:
        users = self.users.dependency_overrides
        is_overridden = users.get(dependencies.original_of(call)) is not None
        return get(self, call, default) if is_overridden else call

    def read(*, call: Any, **given: Any) -> Any:
        return original(call=call, **given) if REPLICA.get(None) else reading(call=call, **given)

    reading, original = dependencies._read, compat.get_dependant
    return _both(
        patch.object(dependencies.Overrides, "get", as_it_is),
        patch.object(utils, "get_dependant", read),
    )


def values_called_self_collide() -> Any:
    """A replacement has a parameter `self` of its own."""

    async def call(self: Any, **values: Any) -> Any:
        return await REPLICA.get().plans[self.target].run(**values)

    return patch.object(dependencies.Planned, "__call__", call)


MUTANTS: tuple[Mutant, ...] = (
    first_parameter_is_the_instance,
    names_of_the_class_are_not_known,
    first_depends_of_an_annotated_counts,
    equal_callables_are_one,
    wrapped_methods_are_not_bound,
    instance_is_a_keyword,
    layers_of_routes_are_dropped,
    overrides_are_looked_up_by_the_replacement,
    methods_below_others_are_not_bound,
    values_called_self_collide,
)


@contextmanager
def _both(*patches: Any) -> Iterator[None]:
    with patches[0], patches[1]:
        yield


def programs_until_found(mutant: Mutant, count: int) -> int | None:
    """Return the number of programs after which a mutant was found, `None` if it was not."""
    with mutant():
        for first in itertools.takewhile(lambda n: n < count, itertools.count(0, AT_A_TIME)):
            bad, _ = compare(range(first, first + AT_A_TIME), ["011"], report=lambda _: None)
            if bad:
                return first + AT_A_TIME
    return None


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    found = {each.__name__: programs_until_found(each, count) for each in MUTANTS}
    for name, after in found.items():
        print(f"{name:44} {'NOT FOUND' if after is None else f'found within {after} programs'}")
    sys.exit(None in found.values())


if __name__ == "__main__":
    main()
