"""The results of `@deployment` and `.bind()`.

    @deployment     class or function  ->  Deployment     the class or function, and its options
    .bind(...)      Deployment         ->  Application    a deployment with constructor arguments

Both are immutable and do nothing by themselves. An `Application` in the arguments of another one
is replaced by a handle (`build`). It is also an ASGI app: `Application._host` is the engine that
serves it. `ingress.engines` sets that attribute, because engines are above this module.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
import warnings
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import FrozenInstanceError, dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol, Unpack, overload

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from typing_extensions import TypeVar

from ingress._unsupported import absent_member
from ingress.app.asgi.methods import is_read_by_fastapi
from ingress.config import DeploymentConfig, DeploymentOptions
from ingress.core.base.signatures import signature_of
from ingress.core.calls.loops import asyncio_loop
from ingress.core.execution.lanes import check_lanes

T = TypeVar("T", default=Any)
F = TypeVar("F", bound=Callable[..., object])
# The class or function of a deployment. By default `Any`, so that a bare name means any of them.
T_co = TypeVar("T_co", covariant=True, default=Any)


class ApplicationHost(Protocol):
    """The server of applications that are used as ASGI apps."""

    def __call__(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> Coroutine[None, None, None]:
        """Answer one connection; start the application first if it does not run."""

    async def start(self, application: Application) -> str:
        """Start the application, unless it runs. Returns the name under which it runs."""

    async def close(self, application: Application, *, unless_in_lifespan: bool = False) -> None:
        """Stop the application if it runs; on request, only if no lifespan stops it."""

    def lifespan(self, application: Application) -> AbstractAsyncContextManager[None]:
        """Start the application on entry and stop it on exit."""


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Deployment(Generic[T_co]):
    """A class or function with deployment options; `.bind(...)` makes an `Application` of it."""

    name: str
    func_or_class: type | FunctionType
    config: DeploymentConfig

    def options(self, **options: Unpack[DeploymentOptions]) -> Deployment[T_co]:
        """Return the same deployment with these options changed."""
        name = options.pop("name", self.name)
        config = DeploymentConfig(**self.config.updated(options))
        kept = self.config.origins_without(options)
        return Deployment(_valid_name(name), self.func_or_class, config.with_origins(kept))

    def bind(self, *args: Any, **kwargs: Any) -> Application[T_co]:
        """Return the application whose replicas are made with these constructor arguments.

        Raises `TypeError` if the constructor does not take the arguments, `ValueError` if there are
        arguments for a function, or if a method's lane is not among the deployment's `lanes`.
        """
        check_lanes(self.func_or_class, self.config.lanes)
        call = inspect.getattr_static(self.func_or_class, "__call__", None)
        _check_markers(self.func_or_class if inspect.isfunction(self.func_or_class) else call)
        if inspect.isclass(self.func_or_class):
            _check_arguments(self, self.func_or_class, args, kwargs)
        elif args or kwargs:
            raise ValueError(
                f"init_args not supported for function deployments, got {_call(self, args, kwargs)}"
                f"; use {self.name}.bind(), or make it a class"
            )
        return Application(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an option by its name, `deployment.num_replicas`, or an attribute of the class.

        Code of the class names it by its own name, which is the deployment's: `Api.LIMIT`.
        """
        if name in DeploymentConfig.model_fields:
            return getattr(self.config, name)
        is_own = name in Deployment.__slots__  # not set yet, in a copy
        if not is_own and not name.startswith("__") and inspect.isclass(self.func_or_class):
            with suppress(AttributeError):
                return getattr(self.func_or_class, name)
        raise absent_member(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the class, as `__getattr__` reads it: `Api.count += 1`."""
        if name in Deployment.__slots__ and not hasattr(self, name):  # it is being made
            object.__setattr__(self, name, value)
        else:
            setattr(self._class_with(name), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._class_with(name), name)

    def _class_with(self, name: str) -> type:
        """Return the class, whose attribute of this name may be changed."""
        is_own = hasattr(Deployment, name) or name in DeploymentConfig.model_fields
        if is_own or not inspect.isclass(self.func_or_class):
            raise FrozenInstanceError(
                f"cannot assign to {name!r} of deployment {self.name!r}; an option is changed by "
                f"{self.name}.options(...), which returns another deployment"
            )
        return self.func_or_class

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Deployments cannot be constructed directly; use {self.name}.bind(...) and run that"
        )

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:
        # Python calls this for a base that is not a class.
        raise TypeError(
            f"{self.name} is a deployment, not a class; subclass the class, then decorate: "
            f"class B({self.name}.func_or_class)"
        )

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.config.changed().items()]
        return f"Deployment({', '.join([f'name={self.name!r}', *options])})"


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class Application(Generic[T_co]):
    """A deployment and its constructor arguments; an ASGI app, and the argument of `serve.run`."""

    _host: ClassVar[ApplicationHost]

    deployment: Deployment[T_co]
    init_args: tuple[object, ...]
    init_kwargs: dict[str, object]
    # The host's data on this application; here, because the host reads it at every request.
    _hosted: Any = field(default=None, init=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`Application`; for `fastapi run --app` it is `FastAPI`.

        That command serves any ASGI app, but takes only what is a `FastAPI` to its `isinstance`.
        """
        if sys._getframe(1).f_globals.get("__name__") == "fastapi_cli.discover":
            return FastAPI
        return type(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI connection. Servers require exactly these three parameters."""
        try:
            await type(self)._host(self, scope, receive, send)
        except RuntimeError:
            asyncio_loop()  # raises its own error on the loop of another library
            raise

    async def aclose(self) -> None:
        """Stop an application that its first request started, as under `parent.mount`."""
        await type(self)._host.close(self)

    def lifespan(self, parent: object = None) -> AbstractAsyncContextManager[None]:
        """Run the application while a parent app runs: `FastAPI(lifespan=application.lifespan)`."""
        return type(self)._host.lifespan(self)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema of the FastAPI app without starting anything.

        Raises `TypeError` if the deployment's class has no `@ingress(app)`.
        """
        cls = self.deployment.func_or_class
        spec = getattr(cls, "__ingress_spec__", None)
        if spec is None:
            raise TypeError(
                f"deployment {self.deployment.name!r} has no OpenAPI schema; put "
                "@serve.ingress(app) with a FastAPI app under its @serve.deployment"
            )
        schema: dict[str, Any] = spec.bind(cls).openapi()
        return schema

    def __getattr__(self, name: str) -> Any:
        raise absent_member(self, name)

    def __repr__(self) -> str:
        return f"Application({_call(self.deployment, self.init_args, self.init_kwargs)})"


class Declare(Protocol):
    """The result of `deployment(...)` with options: the decorator."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a class is a callable too
        self, func_or_class: type[T], /
    ) -> Deployment[T]: ...
    @overload
    def __call__(self, func_or_class: F, /) -> Deployment[F]: ...


if TYPE_CHECKING:
    from abc import ABCMeta

    class DeploymentClass(Deployment[T_co], ABCMeta):  # type: ignore[misc]  # two layouts
        """The metaclass that `ingress.mypy` gives to decorated classes; none at run time.

        To mypy, a decorated class is a class and not the decorator's result (python/mypy#3135).
        """


@overload
def deployment(  # type: ignore[overload-overlap]  # a class is a callable too
    func_or_class: type[T], /
) -> Deployment[T]: ...
@overload
def deployment(func_or_class: F, /) -> Deployment[F]: ...
@overload
def deployment(name: str = "", /, **options: Unpack[DeploymentOptions]) -> Declare: ...
def deployment(
    func_or_class: Callable[..., object] | str | None = None,
    /,
    **options: Unpack[DeploymentOptions],
) -> Any:
    """Declare a class or a function as a deployment, bare or with options.

    The default of `name` is the name of the class or function. A string in the place of the class
    has no effect but a warning, as `@serve.deployment("name")` has none in Ray 2.60.0, api.py.
    Raises `TypeError` for an unknown option, `ValueError` for a bad value.
    """
    if isinstance(func_or_class, str):
        warnings.warn(
            f"@serve.deployment({func_or_class!r}) does not set the name, in Ray Serve neither; "
            f"write @serve.deployment(name={func_or_class!r}), or leave it out for the name of the "
            "class",
            UserWarning,
            stacklevel=2,
        )
        func_or_class = None
    given: dict[str, Any] = {**options}
    name = _valid_name(given.pop("name")) if "name" in given else None
    config = DeploymentConfig(**given)

    def declare(func_or_class: Callable[..., object]) -> Deployment:
        if not inspect.isclass(func_or_class) and not inspect.isfunction(func_or_class):
            raise TypeError(
                "`@serve.deployment` must be called on a class or function, got "
                f"{func_or_class!r} of type {type(func_or_class).__name__}; decorate its class"
            )
        return Deployment(name or func_or_class.__name__, func_or_class, config)

    return declare if func_or_class is None else declare(func_or_class)


if TYPE_CHECKING:
    MYPY = False  # True to mypy, which has a plugin
    if not MYPY:
        from ingress.app.declaration.pyright import ApplicationView, Decorator, DeploymentView

        class Deployment(DeploymentView[T_co], Protocol[T_co]):
            """A class or function with deployment options; `.bind(...)` makes an `Application`."""

        class Application(ApplicationView[T_co]):
            """A deployment and its constructor arguments; an ASGI app, and for `serve.run`."""

        deployment: Decorator


def _valid_name(name: object) -> str:
    rule = f"a deployment's name must be a non-empty string without '#', got {name!r}"
    if not isinstance(name, str):
        raise TypeError(f"{rule} of type {type(name).__name__}; give a string")
    if not name or "#" in name:
        raise ValueError(f"{rule}; '#' separates the name from the replica's id in logs")
    return name


def _check_arguments(
    deployment: Deployment, cls: type, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raise `TypeError` if the constructor does not take these arguments."""
    try:
        signature = signature_of(cls)
    except ValueError:  # some classes written in C have no signature
        return
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        problem = str(error)
    else:
        required = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        missing = [name for name in required if name not in given]
        if not missing:
            _check_markers(inspect.getattr_static(cls, "__init__"), given)
            return
        problem = f"missing {', '.join(missing)}"
    raise TypeError(
        f"{_call(deployment, args, kwargs)} does not match "
        f"{cls.__name__}.__init__{signature}: {problem}; give bind() the constructor's arguments"
    )


def _check_markers(func: Any, given: Collection[str] = ()) -> None:
    """Raise `TypeError` if FastAPI would have to fill a parameter of a function that we call."""
    for each in signature_of(func).parameters.values() if inspect.isfunction(func) else ():
        if each.name not in given and is_read_by_fastapi(each, func):
            code = func.__code__
            raise TypeError(
                f"{func.__qualname__} ({code.co_filename}:{code.co_firstlineno}): '{each.name}' is "
                "a dependency or a parameter of the request, but FastAPI does not call this "
                "function, so it would never run. Declare it in a method that is a route, "
                "`@app.get(...)` of a class with `@serve.ingress(app)`, and give the constructor "
                "its values by `bind(...)`."
            )


def _call(deployment: Deployment, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    shown = [*map(reprlib.repr, args), *(f"{k}={reprlib.repr(v)}" for k, v in kwargs.items())]
    return f"{deployment.name}.bind({', '.join(shown)})"
