"""The flattening of a bound application into named deployments.

    Gateway.bind(Model.bind(), [Ranker.bind()])

        Model      ()
        Ranker     ()
        Gateway    (HandleSlot('Model'), [HandleSlot('Ranker')])     the ingress deployment, last

Children come before the parents that call them. A node that occurs twice is one deployment; two
nodes with the same name become `Model` and `Model_1`. Mistakes in the application as a whole are
found here, before anything runs. Source: Ray 2.60.0, _private/build_app.py.

Applications in constructor arguments are found in containers and in attributes of the user's own
objects, at any depth. An object that holds one is copied, so that the user's stays as it is; all
other objects are passed as they are. Objects whose Python code says how they are pickled
(`__reduce__`), such as loggers and enums, are not looked into: their attributes are not what a copy
of them has.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from ingress.app.asgi.spec import BoundApp, bound_app_of
from ingress.app.declaration.declaration import Application, Deployment
from ingress.config import LoggingConfig, options_not_acted_on
from ingress.core.base.foreign import attempt, dict_of, slots_of, stored
from ingress.exceptions import OptionNotActedOnWarning, RayServeException
from ingress.telemetry.logs import logger

# What a warning was about: applications are built for `explain`, for the plan and for the start.
_told: WeakSet[Deployment | Application] = WeakSet()


@dataclass(frozen=True, slots=True)
class HandleSlot:
    """The placeholder of an application in the arguments, to be replaced by its handle."""

    deployment_name: str


@dataclass(frozen=True, eq=False)
class BuiltDeployment:
    """One deployment under its name in the application, with slots for handles in its arguments."""

    name: str
    deployment: Deployment
    init_args: tuple[object, ...]
    init_kwargs: dict[str, object]

    @property
    def is_asgi(self) -> bool:
        """Return whether the class has an ASGI app, set by `@ingress(app)`."""
        return hasattr(self.deployment.func_or_class, "__ingress_spec__")

    def is_same_as(self, other: BuiltDeployment) -> bool:
        """Return whether replicas of the other one do: its class, arguments and options are equal.

        Objects that cannot be compared, such as arrays, differ unless they are the same ones.
        """
        ours, others = self.deployment, other.deployment
        return ours.func_or_class is others.func_or_class and attempt(
            lambda: (
                bool(ours.config == others.config)
                and bool((self.init_args, self.init_kwargs) == (other.init_args, other.init_kwargs))
            ),
            lambda _: False,
        )

    @cached_property
    def bound_app(self) -> BoundApp | None:
        """The class's app, bound to the class, with the routes declared until the first access.

        `None` if the class has no app. Raises `TypeError` or `RayServeException` for bad routes.
        """
        return bound_app_of(self.deployment.func_or_class)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltApplication:
    """The deployments of one application, children first."""

    name: str
    deployments: tuple[BuiltDeployment, ...]

    @property
    def ingress(self) -> BuiltDeployment:
        """The deployment that receives requests from outside: the one that was run."""
        return self.deployments[-1]


def build(application: Application, name: str, *, acts_on_all: bool = False) -> BuiltApplication:
    """Flatten `application`, to run under `name`.

    `acts_on_all` is true for an engine on which every option has an effect.

    Raises `ValueError` for a `user_config` without `reconfigure` and for arguments that contain
    themselves, `RayServeException` for more than one `@ingress` class. Otherwise warns once for
    each deployment, with `OptionNotActedOnWarning`, about options that have no effect yet.
    """
    plan = _Flattening(name)
    plan.add(application)
    built = BuiltApplication(name, tuple(plan.built.values()))
    _check(built)
    if not acts_on_all:
        _warn_of_options_not_acted_on(built)
    return built


def with_logging(application: Application, config: LoggingConfig, origin: str = "") -> Application:
    """Return the application with this config for the deployments that have none of their own."""
    plan = _Flattening("")
    plan.add(application)
    names = [each.name for each in plan.built.values() if each.deployment.logging_config is None]
    origins = {name: {"logging_config": origin} for name in names} if origin else {}
    return with_options(application, {name: {"logging_config": config} for name in names}, origins)


def with_options(
    application: Application,
    overrides: Mapping[str, Mapping[str, Any]],
    origins: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Application:
    """Return the application with other options for the deployments of these names.

    The names are those of `build`; `origins` has, for each, the origins of options that do not
    come from code. Raises `ValueError` for the name of no deployment, and for the bad value of an
    option.
    """
    plan = _Flattening("")
    plan.add(application)
    names = {node: built.name for node, built in plan.built.items()}
    for name in overrides:
        if name not in names.values():
            raise ValueError(
                f"Deployment {name!r} does not exist. Available: {list(names.values())}"
            )
    made: dict[Application, Application] = {}

    for node, name in names.items():  # children first
        options = overrides.get(name)
        args, kwargs = replaced((node.init_args, node.init_kwargs), Application, made.__getitem__)
        if options is None and args is node.init_args and kwargs is node.init_kwargs:
            made[node] = node
            continue
        deployment = node.deployment
        if options is not None:
            deployment = deployment.options(name=name, **options)
            config = deployment.config.with_origins(origins.get(name, {}))
            deployment = replace(deployment, config=config)
        made[node] = Application(deployment, args, kwargs)
    return made[application]


def fill(
    args: tuple[object, ...], kwargs: dict[str, object], make_handle: Callable[[str], object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with `make_handle(deployment_name)` in place of each slot.

    Containers and objects with a slot are copied; all others are the user's own.
    """
    return replaced((args, kwargs), HandleSlot, lambda slot: make_handle(slot.deployment_name))


@dataclass(slots=True)
class _Flattening:
    """One walk over the nodes of an application."""

    app_name: str
    built: dict[Application, BuiltDeployment] = field(default_factory=dict)
    unfinished: list[Application] = field(default_factory=list)  # each in the arguments of the last

    def add(self, node: Application) -> BuiltDeployment:
        if node in self.built:
            return self.built[node]
        if node in self.unfinished:
            cycle = [*self.unfinished[self.unfinished.index(node) :], node]
            raise ValueError(
                f"bind() makes a cycle: {' -> '.join(each.deployment.name for each in cycle)}; a "
                "deployment cannot be an argument of itself: look the handle up when it is needed, "
                "with serve.get_deployment_handle(name)"
            )
        self.unfinished.append(node)
        args, kwargs = replaced(
            (node.init_args, node.init_kwargs),
            Application,
            lambda each: HandleSlot(self.add(each).name),
        )
        name = self._free_name(node)
        self.built[node] = BuiltDeployment(name, node.deployment, args, kwargs)
        self.unfinished.pop()
        return self.built[node]

    def _free_name(self, node: Application) -> str:
        wanted = node.deployment.name
        taken = {built.name for built in self.built.values()}
        names = chain([wanted], (f"{wanted}_{number}" for number in count(1)))
        name = next(each for each in names if each not in taken)
        if name != wanted and node not in _told:
            _told.add(node)
            logger.warning(
                "application %r has several deployments named %r; this one is now %r. "
                "Give it a name of its own with .options(name=...)",
                self.app_name,
                wanted,
                name,
            )
        return name


def _check(built: BuiltApplication) -> None:
    for each in built.deployments:
        target = each.deployment.func_or_class
        if each.deployment.config.user_config is None or hasattr(target, "reconfigure"):
            continue
        what = "class" if inspect.isclass(target) else "function, not a class,"
        raise ValueError(
            f"user_config is set but deployment {each.name!r} is a {what} missing reconfigure "
            "method; define `def reconfigure(self, user_config)` or leave user_config out"
        )
    if sum(each.is_asgi for each in built.deployments) > 1:
        raise RayServeException(
            f'Found multiple FastAPI deployments in application "{built.name}". Please only '
            "include one deployment with @serve.ingress in your application to avoid this issue."
        )


def _warn_of_options_not_acted_on(built: BuiltApplication) -> None:
    """Warn at the line of each deployment that has such options, once for each deployment."""
    for each in built.deployments:
        options = options_not_acted_on(each.deployment.config)
        if options and each.deployment not in _told:
            _told.add(each.deployment)
            config = each.deployment.config
            acts = "num_gpus" in config.ray_actor_options or config.env_vars
            own = ', or add isolation="process" for num_gpus and env_vars'
            warnings.warn_explicit(
                f"deployment {each.deployment.name!r} has options without effect in this process: "
                f"{'; '.join(options)}; leave them out, or run it with engine='ray'"
                + (own if acts and config.isolation == "thread" else ""),
                OptionNotActedOnWarning,
                *place_of(each.deployment.func_or_class),
            )


def place_of(func_or_class: type | FunctionType) -> tuple[str, int]:
    """Return file and line of a class or function."""
    try:
        file = inspect.getsourcefile(func_or_class) or inspect.getfile(func_or_class)
        return file, inspect.getsourcelines(func_or_class)[1]
    except (OSError, TypeError):  # it was not read from a file
        return "<unknown>", 0


T = TypeVar("T")
K = TypeVar("K")

CONTAINERS = (dict, list, tuple, set, frozenset)
_WHOLE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_ATOMS = frozenset(map(id, (type(None), bool, int, float, complex, str, bytes, bytearray)))


def replaced(value: T, kind: type[K], replace: Callable[[K], object]) -> T:
    """Return `value` with `replace(each)` in the place of each instance of `kind` in it.

    What holds none is returned as it is. Raises `ValueError` for a container that holds one and
    contains itself, `TypeError` for an object that holds one and cannot be copied.
    """
    whole: T = _Replacement(kind, replace, _holders(value, kind)).of(value)
    return whole


class _Replacement(Generic[K]):
    """One pass over arguments. Each object that holds an instance of `kind` is copied once."""

    def __init__(self, kind: type[K], replace: Callable[[K], object], holders: set[int]) -> None:
        self._kind, self._replace, self._holders = kind, replace, holders
        self._copies: dict[int, Any] = {}

    def of(self, value: Any, above: tuple[int, ...] = ()) -> Any:
        if issubclass(type(value), self._kind):
            return self._replace(value)
        if id(value) not in self._holders:
            return value
        if issubclass(type(value), CONTAINERS):
            return self._container(value, above)
        return self._object(value)

    def _container(self, value: Any, above: tuple[int, ...]) -> Any:
        if id(value) in above:
            raise ValueError(
                f"the arguments of an application contain themselves: {value!r} is inside itself; "
                "pass a container without a cycle"
            )
        parts = list(value.values() if isinstance(value, dict) else value)
        above = (*above, id(value))
        made = [self.of(part, above) for part in parts]
        if all(new is old for new, old in zip(made, parts, strict=True)):
            return value
        if isinstance(value, dict):
            return dict(zip(value, made, strict=True))
        if isinstance(value, tuple) and hasattr(value, "_make"):  # a namedtuple
            return type(value)._make(made)
        return next(kind for kind in CONTAINERS if isinstance(value, kind))(made)

    def _object(self, value: T) -> T:
        if id(value) in self._copies:
            known: T = self._copies[id(value)]
            return known
        made: T = _new_like(value)
        self._copies[id(value)] = made
        attributes = dict_of(value)
        if attributes:
            dict_of(made).update({name: self.of(each) for name, each in attributes.items()})
        for slot, each in slots_of(value):
            slot.__set__(made, self.of(each))
        return made


def _holders(root: object, kind: type) -> set[int]:
    """Return the ids of the objects and containers from which an instance of `kind` is reached."""
    parents: dict[int, list[int]] = {}
    seen: dict[int, object] = {id(root): root}
    holders: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        for part in _parts(value):
            if id(type(part)) in _ATOMS:
                continue
            if issubclass(type(part), kind):
                holders.add(id(value))
                continue
            parents.setdefault(id(part), []).append(id(value))
            if id(part) not in seen:
                seen[id(part)] = part  # kept, so that no other object gets its id
                waiting.append(part)
    unfinished = list(holders)
    while unfinished:
        above = [each for each in parents.get(unfinished.pop(), ()) if each not in holders]
        holders.update(above)
        unfinished += above
    return holders


def _parts(value: Any) -> Iterator[object]:
    cls = type(value)
    if issubclass(cls, dict):
        yield from list(dict.values(value))
    elif issubclass(cls, CONTAINERS):
        kind: Any = next(kind for kind in CONTAINERS if issubclass(cls, kind))
        yield from list(kind.__iter__(value))
    elif _is_looked_into(cls):
        yield from list(dict_of(value).values())
        yield from (each for _, each in slots_of(value))


def _is_looked_into(cls: type) -> bool:
    if issubclass(cls, _WHOLE) or str(stored(cls, "__module__")).partition(".")[0] == "ingress":
        return False
    return not any(isinstance(each, FunctionType) for each in (cls.__reduce__, cls.__reduce_ex__))


def _new_like(value: T) -> T:
    cls = type(value)
    try:
        return object.__new__(cls)
    except TypeError:
        pass  # a class derived from one that is written in C
    try:
        return copy.copy(value)
    except Exception as error:
        raise TypeError(
            f"an argument of type {cls.__name__} holds an application and cannot be copied: "
            f"{error}; pass the application as an argument of its own"
        ) from error
