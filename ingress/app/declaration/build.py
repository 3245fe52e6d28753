"""The flattening of a bound application into named deployments.

    Gateway.bind(Model.bind(), [Ranker.bind()])

        Model      ()
        Ranker     ()
        Gateway    (HandleSlot('Model'), [HandleSlot('Ranker')])     the ingress deployment, last

Children come before the parents that call them. A node that occurs twice is one deployment; two
nodes with the same name become `Model` and `Model_1`. Mistakes in the application as a whole are
found here, before anything runs. Source: Ray 2.60.0, _private/build_app.py.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from types import FunctionType, MappingProxyType
from typing import Any
from weakref import WeakSet

from ingress.app.asgi import BoundApp, bound_app_of
from ingress.app.declaration.arguments import replaced
from ingress.app.declaration.declaration import Application, Deployment
from ingress.config import LoggingConfig, options_not_acted_on
from ingress.exceptions import OptionNotActedOnWarning, RayServeException

logger = logging.getLogger("ingress")

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
            warnings.warn_explicit(
                f"deployment {each.deployment.name!r} has options without effect in this process: "
                f"{'; '.join(options)}; leave them out, or run it with engine='ray'",
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
