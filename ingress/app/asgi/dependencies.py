"""The callables of `Depends(...)`, run in the replica's own threads and bound to its instance.

    callable                                becomes
    `def`, a class, an object with a        a `Planned`: runs by the replica's plan
      `def __call__`
    a method of the deployment's class      the same; with `yield`, its `self` is bound
    a `def` with `yield` and `@method`      a `PlannedGenerator`: entered and left as planned
    `async def`, `yield`, a security scheme left to FastAPI

FastAPI analyses each dependency with its own `get_dependant`, in whose place `_read` stands: while
a deployment's routes are bound, it has FastAPI analyse the replacement. FastAPI also applies the
user's `app.dependency_overrides` itself, which `Overrides` shows it with replacements as values.

FastAPI would run a plain `def` dependency with AnyIO. On a loop outside of the main thread, AnyIO's
switch to a thread costs as much as the rest of the request.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi.security.base import SecurityBase

from ingress.app.asgi.compat import Dependant, get_dependant, read_dependants_by
from ingress.app.asgi.methods import Methods, Target, plain
from ingress.context import REPLICA
from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import (
    Kind,
    kind_for_fastapi,
    name_of,
    override_of,
    without_partials,
)


class Lifted:
    """A replacement of a dependency, for one place in the tree.

    It is equal to the original, because FastAPI's cache of a request compares by equality.
    """

    def __init__(
        self, original: Callable[..., object], target: Target, owner: Dependencies
    ) -> None:
        self.original = original
        self.target = target
        self.owner = owner
        self.__signature__ = target.signature
        for name in ("__name__", "__qualname__", "__module__"):
            setattr(self, name, getattr(original, name, getattr(type(original), name)))

    def __eq__(self, other: object) -> bool:
        other = original_of(other)
        return self.original is other or bool(self.original == other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)


class Planned(Lifted):
    """A function, run by the current replica's plan."""

    async def __call__(self, /, **values: object) -> Any:
        return await REPLICA.get().plans[self.target].run(**values)


class BoundGenerator(Lifted):
    """A method with `yield`, bound to the current replica's instance and run by FastAPI.

    A plan's stream cannot run it, because an exception of the endpoint must be raised at the user's
    `yield`.
    """

    def __call__(self, /, **values: object) -> Generator[object, None, None]:
        yield from self.target.bound_to(REPLICA.get().servable_object)(**values)


class PlannedGenerator(Planned):
    """A `def` with `yield` and `@serve.method`: both halves run where `@serve.method` says."""

    async def __call__(self, /, **values: object) -> AsyncGenerator[object, None]:  # type: ignore[override]
        plan = REPLICA.get().plans[self.target]
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


class BoundAsyncGenerator(Lifted):
    """As `BoundGenerator`, for `async def`."""

    async def __call__(self, /, **values: object) -> AsyncGenerator[object, None]:
        bound = asynccontextmanager(self.target.bound_to(REPLICA.get().servable_object))
        async with bound(**values) as value:
            yield value


@dataclass(eq=False, slots=True)
class Dependencies:
    """The replacement of the dependencies of one deployment's routes.

    There is one for each place in the tree: equal callables are one dependency within a request
    only, and FastAPI evaluates an annotation at each place anew. `endpoints` are the wrappers of
    the user's endpoints, by the ids of these.
    """

    methods: Methods
    endpoints: dict[int, Any] = field(default_factory=dict)
    _providers: dict[int, Overrides] = field(default_factory=dict)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Have FastAPI analyse the replacements in the current context."""
        token = _READING.set(self)
        try:
            yield
        finally:
            _READING.reset(token)

    def replaced(self, call: Any) -> Any:
        """Return a replacement of `call`, or `call` if FastAPI may run it.

        Raises `TypeError` if FastAPI would ask the client for its `self`.
        """
        if isinstance(call, Lifted) or hasattr(call, "__ingress_target__") or _is_security(call):
            return call
        call = plain(call)
        target = self.methods.target(call)
        kind = kind_for_fastapi(target.func)
        if kind is Kind.GENERATOR and override_of(target.func) is not None:
            return PlannedGenerator(call, target, self)
        if kind is not Kind.FUNCTION and target.func is call and not self.methods.owns(call):
            return call
        return _GENERATORS.get(kind, Planned)(call, target, self)

    def overrides(self, provider: Any) -> Any:
        """Return a provider that shows FastAPI the overrides of a provider of the user's."""
        if provider is None or isinstance(provider, Overrides):
            return provider
        return self._providers.setdefault(id(provider), Overrides(self, provider))

    def check_overrides(self) -> None:
        """Raise `TypeError` or `RuntimeError` for overrides that cannot be served."""
        for each in self._providers.values():
            users = getattr(each.users, "dependency_overrides", None)
            for call in list(users) if isinstance(users, Mapping) else ():
                each.find(call)


@dataclass(eq=False, slots=True)
class Overrides:
    """A provider of dependency overrides, and those overrides, with their values replaced.

    `users` is the user's provider. FastAPI looks one dependency up at each node.
    """

    _owner: Dependencies
    users: Any

    @property
    def dependency_overrides(self) -> Any:
        users = self.users.dependency_overrides
        return self if users else users

    def get(self, call: Any, default: Any) -> Any:
        """Return the replacement that FastAPI analyses next, with replacements below it."""
        found = self.find(call)
        _NEXT.set(self._owner)
        return found

    def find(self, call: Any) -> Any:
        """Return the replacement of the override, or that of the dependency itself.

        Raises `RuntimeError` for an override that depends on the overridden dependency.
        """
        original = original_of(call)
        override = self.users.dependency_overrides.get(original, original)
        if override is original:
            return self._owner.replaced(call)
        if not callable(override):
            raise TypeError(
                f"dependency_overrides[{name_of(original)}] is {override!r}, which is not callable."
            )
        made = self._owner.replaced(override)
        self._follow(made, original, override, set())
        return made

    def _follow(self, made: Any, original: Any, override: Any, seen: set[int]) -> None:
        for node in nodes_of(get_dependant(path="", call=made)):
            each = original_of(node.call)
            next_one = self.users.dependency_overrides.get(each, each)
            if next_one is override and each is not override:
                raise RuntimeError(
                    f"dependency_overrides[{name_of(original)}] is {name_of(override)}, which "
                    f"depends on {name_of(each)}: FastAPI would apply it without end. Let the "
                    "override call the function itself instead of depending on it."
                )
            if next_one is not each and id(next_one) not in seen:
                seen.add(id(next_one))
                self._follow(self._owner.replaced(next_one), original, override, seen)


def original_of(call: Any) -> Any:
    """Return the user's callable of a node in the tree."""
    return call.original if isinstance(call, Lifted) else plain(call)


def nodes_of(dependant: Dependant) -> Iterator[Dependant]:
    """Yield the dependencies in the order of their calls, innermost first."""
    for each in dependant.dependencies:
        yield from nodes_of(each)
        yield each


def take_changes(was: Any, made: Any) -> None:
    """Give the tree of a finished route the changes of user code; `made` has its replacements.

    A node of `was` has its twin in `made`, or is analysed now. The names of the class are known in
    `made`: what they give stays. All else that only `made` has goes.
    """
    for name in _GIVEN:
        setattr(made, name, getattr(was, name))
    for name in _FILLED_IN:
        setattr(made, name, getattr(made, name) or getattr(was, name))
    twins, nodes = list(made.dependencies), []
    for each in was.dependencies:
        if (node := next((twin for twin in twins if _is_twin(twin, each, was)), None)) is None:
            node = _read(call=each.call, **_given(each, was.path))
        else:
            twins = [twin for twin in twins if twin is not node]
        if original_of(node.call) is original_of(each.call):
            take_changes(each, node)
        nodes.append(node)
    theirs, kept = _parameters(was), set(map(_key, nodes))
    ahead: dict[str | int, list[Dependant]] = {}
    more: list[Dependant] = []  # what only the names of the class give, in its place
    for each in made.dependencies:
        if _key(each) in kept:
            ahead[_key(each)], more = more, []
        elif each.name in theirs:
            more.append(each)
    made.dependencies[:] = [x for each in nodes for x in (*ahead.get(_key(each), ()), each)] + more
    hidden = signature_of(was.call).parameters.keys() - signature_of(made.call).parameters.keys()
    ours = _parameters(made) | {each.name for each in made.dependencies} | hidden  # the instance
    for kind in _KINDS:
        fields: list[Any] = getattr(made, kind)
        added = [each for each in getattr(was, kind) if each.name not in ours]
        fields[:] = [each for each in fields if each.name in theirs] + added


def _is_twin(twin: Dependant, node: Dependant, parent: Dependant) -> bool:
    """Return whether `twin` is the replacement of `node`, or what the class has by its name."""
    if twin.name != node.name or original_of(twin.call) is original_of(node.call):
        return twin.name == node.name
    read_again = get_dependant(call=original_of(parent.call), **_given(parent, parent.path))
    return any(
        each.name == node.name and original_of(each.call) is node.call
        for each in read_again.dependencies
    )


def _given(node: Dependant, path: str | None) -> dict[str, Any]:
    return {"path": path or "", **{name: getattr(node, name) for name in _GIVEN}}


def _key(node: Dependant) -> str | int:
    return node.name or id(node)


def _parameters(dependant: Dependant) -> set[str | None]:
    """Return the names of the parameters that are no dependencies."""
    fields = (each.name for kind in _KINDS for each in getattr(dependant, kind))
    return {*fields, *(getattr(dependant, name) for name in _FILLED_IN)} - {None}


def nodes_of_route(route: Any, *, with_endpoint: bool = False) -> Iterator[Dependant]:
    """Yield the dependencies of a route as served, none if it is not FastAPI's."""
    dependant = getattr(route, "dependant", None)
    if dependant is not None:
        yield from nodes_of(dependant)
        if with_endpoint:
            yield dependant


def target_of(route: Any) -> Target | None:
    """Return the target of a cloned route, `None` for another."""
    return getattr(getattr(route, "original_route", route), "_ingress_target", None)


def _is_security(call: Any) -> bool:
    """Return whether FastAPI takes `call` for a security scheme, which the schema names."""
    return isinstance(inspect.unwrap(without_partials(call)), SecurityBase)


def _read(*, call: Any, **given: Any) -> Dependant:
    """Return FastAPI's analysis of a callable, or of its replacement."""
    owner = call.owner if isinstance(call, Lifted) else _READING.get(None)
    reading = _NEXT.get(None) or owner
    _NEXT.set(None)
    if reading is not None:
        with reading.reading():
            return get_dependant(call=reading.replaced(call), **given)
    replica = REPLICA.get(None)
    if replica is not None and (methods := replica.dependencies) is not None:
        # User code adds a route to its replica: its methods are bound, and FastAPI runs the rest.
        call = methods.replaced(call) if methods.methods.owns(call) else call
    return get_dependant(call=call, **given)


def _read_endpoint(*, call: Any, **given: Any) -> Dependant:
    """As `_read`, for an endpoint: the user's function is that of its route."""
    replica = REPLICA.get(None)
    owner = _READING.get(None) or (None if replica is None else replica.dependencies)
    return _read(call=call if owner is None else owner.endpoints.get(id(call), call), **given)


_KINDS = ("path_params", "query_params", "header_params", "cookie_params", "body_params")
_FILLED_IN = tuple(name for name in Dependant.__dataclass_fields__ if name.endswith("_param_name"))
_GIVEN = tuple(signature_of(get_dependant).parameters.keys() - {"path", "call"})
"""The parameters of `get_dependant` that a node has as attributes, beside its call and path."""

_GENERATORS: dict[Kind, type[Lifted]] = {
    Kind.GENERATOR: BoundGenerator,
    Kind.ASYNC_GENERATOR: BoundAsyncGenerator,
}
_READING: ContextVar[Dependencies] = ContextVar("ingress_reading")
"""The routes that are being bound, or the dependency below which FastAPI analyses others."""
_NEXT: ContextVar[Dependencies | None] = ContextVar("ingress_next")
"""For one analysis: FastAPI looks an override up, and analyses it at once."""

read_dependants_by(_read, _read_endpoint)
