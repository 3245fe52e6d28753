# mypy: ignore-errors
"""Deployments and handles to Pyright, which has no plugins: docs/typing.md.

`ingress.handle` and `ingress.app.declaration.declaration` import this stub for Pyright only. mypy
has `ingress.mypy`, and no code runs here.

    deployment(Class)       a class `Deployed[type[Class]]`: Pyright takes the result of a class
                            decorator, and only a class may stand in `DeploymentHandle["Class"]`
    Deployed(Any)           it may stand for the class itself and for a `Protocol`
    Application             a handle too, because `bind` takes applications in their places
    DeploymentHandle[Never] only a bare `DeploymentHandle`, whose class is `Any`
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from types import FunctionType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    Unpack,
    final,
    overload,
)

from starlette.types import Receive, Scope, Send
from typing_extensions import TypeVar

from ingress.app.declaration.declaration import Application, Deployment
from ingress.config import DeploymentConfig, DeploymentOptions
from ingress.core.base.types import DeploymentID
from ingress.handle import (
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
    StreamingHandle,
)

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
K = TypeVar("K", bound=type[object])
K_co = TypeVar("K_co", covariant=True, default=Any)
T_co = TypeVar("T_co", covariant=True, default=Any)

class Methods:
    @overload
    def __getattr__(self: StreamingHandle[Any], name: str) -> StreamingHandle[Any]: ...
    @overload
    def __getattr__(self: DeploymentHandle[Any], name: str) -> DeploymentHandle[Any]: ...

class HandleOptions(TypedDict, total=False):
    multiplexed_model_id: str | None
    session_id: str | None
    priority: str | None

class HandleView(Generic[T_co]):
    @property
    def deployment_id(self) -> DeploymentID: ...
    @property
    def deployment_name(self) -> str: ...
    @property
    def app_name(self) -> str: ...
    def shutdown(self) -> None: ...
    async def shutdown_async(self) -> None: ...
    @overload
    def options(
        self, *, stream: Literal[True], **options: Unpack[HandleOptions]
    ) -> StreamingHandle[T_co]: ...
    @overload
    def options(
        self, *, stream: Literal[False], **options: Unpack[HandleOptions]
    ) -> DeploymentHandle[T_co]: ...
    @overload
    def options(self, **options: Unpack[HandleOptions]) -> Self: ...
    @overload
    def options(
        self, *, method_name: str, stream: Literal[True], **options: Unpack[HandleOptions]
    ) -> StreamingHandle[Any]: ...
    @overload
    def options(
        self,
        *,
        method_name: str | None = None,
        stream: bool | None = None,
        **options: Unpack[HandleOptions],
    ) -> DeploymentHandle[Any]: ...
    @overload
    def remote(self: DeploymentHandle[Never], *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def remote(
        self: DeploymentHandle[Callable[P, Never]], *args: P.args, **kwargs: P.kwargs
    ) -> DeploymentResponse[Any]: ...
    @overload
    def remote(
        self: DeploymentHandle[Callable[..., Iterator[Any] | AsyncIterator[Any]]],
        *args: Any,
        **kwargs: Any,
    ) -> CallWithStreamTrue: ...
    @overload
    def remote(
        self: DeploymentHandle[Callable[P, Awaitable[R] | R]], *args: P.args, **kwargs: P.kwargs
    ) -> DeploymentResponse[R]: ...
    @overload
    def remote(
        self: DeploymentHandle[Callable[Concatenate[A, P], Awaitable[R] | R]],
        a: A | DeploymentResponse[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DeploymentResponse[R]: ...
    @overload
    def remote(
        self: DeploymentHandle[Callable[Concatenate[A, B, P], Awaitable[R] | R]],
        a: A | DeploymentResponse[A],
        b: B | DeploymentResponse[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DeploymentResponse[R]: ...
    @overload
    def remote(
        self: DeploymentHandle[Callable[Concatenate[A, B, C, P], Awaitable[R] | R]],
        a: A | DeploymentResponse[A],
        b: B | DeploymentResponse[B],
        c: C | DeploymentResponse[C],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DeploymentResponse[R]: ...

class StreamingView(DeploymentHandle[T_co]):
    @overload
    def remote(
        self: StreamingHandle[Never], *args: Any, **kwargs: Any
    ) -> DeploymentResponseGenerator[Any]: ...
    @overload
    def remote(
        self: StreamingHandle[Callable[P, Iterator[R] | AsyncIterator[R]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DeploymentResponseGenerator[R]: ...
    @overload
    def remote(
        self: StreamingHandle[Callable[Concatenate[A, P], Iterator[R] | AsyncIterator[R]]],
        a: A | DeploymentResponse[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DeploymentResponseGenerator[R]: ...

class ApplicationView(DeploymentHandle[T_co]):
    @property
    def deployment(self) -> Deployment[T_co]: ...
    @property
    def init_args(self) -> tuple[object, ...]: ...
    @property
    def init_kwargs(self) -> dict[str, object]: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...
    async def aclose(self) -> None: ...
    def lifespan(self, parent: object = None) -> AbstractAsyncContextManager[None]: ...
    def openapi(self) -> dict[str, Any]: ...

class DeploymentView(Protocol[T_co]):
    @property
    def name(self) -> str: ...
    @property
    def func_or_class(self) -> type | FunctionType: ...
    @property
    def config(self) -> DeploymentConfig: ...
    @property
    def bind(self) -> Callable[..., Application[Any]]: ...
    @property
    def options(self) -> Callable[..., Deployment[Any]]: ...

class DeployedFunction(Deployment[T_co]):
    def options(self, **options: Unpack[DeploymentOptions]) -> Self: ...
    def bind(self) -> Application[T_co]: ...
    def __getattr__(self, name: str) -> Any: ...

class Bind(Protocol[K_co, T_co]):
    def __call__(
        self: Bind[Callable[P, object], T], *args: P.args, **kwargs: P.kwargs
    ) -> Application[T]:
        """Return the application whose replicas are made with these constructor arguments."""

@final
class Deployed(Any, Generic[K_co]):
    def __init__(self, deployments_cannot_be_constructed_directly: Never, /) -> None: ...
    # In a stub, `Any` as a base gives each other attribute of the class the type `Any`.
    name: ClassVar[str]
    func_or_class: ClassVar[type | FunctionType]
    config: ClassVar[DeploymentConfig]
    @classmethod
    def options(cls, **options: Unpack[DeploymentOptions]) -> type[Self]:
        """Return the same deployment with these options changed."""
    bind: ClassVar[Bind[K_co, Deployed[K_co]]]
    def __call__(
        self: Deployed[Callable[..., Callable[P, R]]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

class Declare(Protocol):
    @overload
    def __call__(self, func_or_class: K, /) -> type[Deployed[K]]: ...
    @overload
    def __call__(self, func_or_class: F, /) -> DeployedFunction[F]: ...

class Decorator(Protocol):
    @overload
    def __call__(self, func_or_class: K, /) -> type[Deployed[K]]:
        """Declare a class or a function as a deployment, bare or with options."""
    @overload
    def __call__(self, func_or_class: F, /) -> DeployedFunction[F]: ...
    @overload
    def __call__(self, name: str = "", /, **options: Unpack[DeploymentOptions]) -> Declare: ...

@overload
def instance(of: type[Deployed[Callable[..., T]]]) -> T: ...
@overload
def instance(of: type[T]) -> T: ...

class CallWithStreamTrue:
    """The method returns a generator: `handle.options(stream=True).method.remote(...)`."""

class UnknownMethod:
    """The class of the handle has no method of this name, or `ingress stubs` has to run again."""
