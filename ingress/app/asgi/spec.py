"""`@serve.ingress(app)`, which gives a class an ASGI app.

    app                                      each replica serves
    FastAPI, APIRouter                       a clone of it, its routes bound to the instance
    Starlette                                a clone of it, with a state of its own
    any other ASGI app, object or function   the app itself
    a `def` without parameters               its result, from one call per replica
    none, and `__serve_build_asgi_app__`     that method's result

The decorator only records its argument; called without a class, it makes one. The routes are bound
when the deployment is built, so that routes declared after the class are included.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, overload

import fastapi
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.routing import Router
from starlette.types import ASGIApp

from ingress.app.asgi.apps import BoundRoutes
from ingress.app.asgi.methods import Methods, note_class
from ingress.app.asgi.parts import Part
from ingress.app.asgi.replica_app import BUILDER_METHOD, MakePlan, ReplicaApp
from ingress.app.asgi.routes import RouteInfo, check_routes
from ingress.app.asgi.template import RouteTemplates
from ingress.app.asgi.unserved_routes import hide_self
from ingress.app.asgi.users_app import APPS_LOCK, show_clones
from ingress.context import ReplicaRuntime
from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import Role, kind

C = TypeVar("C", bound=type)


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """The argument of `@serve.ingress`; the class has it as `__ingress_spec__`.

    Either `app` or `builder` is set; neither for a class that builds its app itself.
    """

    app: ASGIApp | APIRouter | None = None
    builder: Callable[[], ASGIApp] | None = None

    def bind(self, cls: type) -> BoundApp:
        """Bind the routes declared so far. Raises `TypeError` or `RayServeException`."""
        if hasattr(cls, BUILDER_METHOD) or self.app is None:
            return BoundApp(cls, self.builder, None)
        app = self.app
        if isinstance(app, APIRouter):
            # Included now, not at decoration: older FastAPIs copy the existing routes.
            whole = fastapi.FastAPI()  # looked up now: a tracer may have replaced the class
            whole.include_router(app)
            return BoundApp(cls, None, BoundRoutes(whole, cls, app))
        return BoundApp(cls, None, BoundRoutes(app, cls))


def bound_app_of(func_or_class: Callable[..., Any]) -> BoundApp | None:
    """Return the app that `@serve.ingress` gave to a class, bound to it; `None` without one.

    Raises `TypeError` or `RayServeException` for bad routes.
    """
    spec: IngressSpec | None = getattr(func_or_class, "__ingress_spec__", None)
    return spec.bind(func_or_class) if spec and isinstance(func_or_class, type) else None


def users_app_of(func_or_class: Callable[..., Any]) -> ASGIApp | APIRouter | None:
    """Return the app that `@serve.ingress` gave to a class, as it is."""
    spec: IngressSpec | None = getattr(func_or_class, "__ingress_spec__", None)
    return None if spec is None else spec.app


@dataclass(eq=False, slots=True)
class BoundApp:
    """The app of one deployment. Thread-safe: the replicas share it.

    Only `_latest` changes, in one step, when the user's app has got other routes.
    """

    _cls: type
    _builder: Callable[[], ASGIApp] | None
    _latest: BoundRoutes | None

    @property
    def _routes(self) -> BoundRoutes | None:
        if self._latest is not None:
            self._latest = self._latest.current()
        return self._latest

    def for_replica(self, context: ReplicaRuntime, make_plan: MakePlan) -> ReplicaApp:
        """Make the app of a replica whose constructor has not run yet."""
        return ReplicaApp(self._cls, self._builder, self._routes, context, make_plan)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema, without a replica. Raises `TypeError` if there is none."""
        routes = self._routes
        if routes is None:
            raise TypeError(
                f"{self._cls.__qualname__} has no OpenAPI schema before it runs: each replica "
                "builds its own app. Give @serve.ingress(app) a FastAPI app."
            )
        return routes.openapi()

    def routes(self) -> list[RouteInfo]:
        """Return the routes in declared order; an empty list for an app that is not a Starlette."""
        routes = self._routes
        return [] if routes is None else list(routes.infos)

    def templates(self) -> RouteTemplates:
        """Return the path templates of the HTTP routes."""
        routes = [each for each in self.routes() if not each.is_websocket]
        # A middleware may answer before FastAPI reads.
        may_answer = self._latest is not None and getattr(self._latest.app, "user_middleware", None)
        reads = {
            (each.path, method): is_read
            for each in routes
            for method, is_read in each.body_reads.items()
            if not (is_read and may_answer)
        }
        return RouteTemplates((each.path for each in routes), reads)

    def parts(self) -> list[Part]:
        """Return the user's callables in the app, or the builder of an app built per replica."""
        routes = self._routes
        if routes is not None:
            return routes.parts()
        build = getattr(self._cls, BUILDER_METHOD, self._builder)
        assert build is not None  # the decorator checks it
        return [Part("app builder", build, Role.LIFECYCLE)]

    @property
    def app(self) -> Any:
        """The user's app, `None` for an app that is built per replica."""
        return None if self._latest is None else self._latest.app

    @property
    def docs_path(self) -> str | None:
        """The path of FastAPI's interactive documentation, `None` if there is none."""
        app = self.app
        return app.docs_url if isinstance(app, FastAPI) and app.openapi_url else None


class Decorator(Protocol):
    """The result of `ingress(app)`."""

    @overload
    def __call__(self, cls: C) -> C: ...
    @overload
    def __call__(self) -> type: ...


def ingress(app: Any = None) -> Decorator:
    """Serve a class through an ASGI app; the app's routes become its methods.

    `ingress(app)()` makes a class for an app that needs none: it takes any constructor arguments
    and keeps them as `args` and `kwargs`.

    Raises `TypeError`, `ValueError` or `RayServeException` at decoration if the app or the class
    can never work.
    """
    if hasattr(app, "func_or_class"):
        raise _wrong_order(app)
    if inspect.isclass(app):
        raise TypeError(
            f"@serve.ingress needs an app: @serve.ingress(app). Got the class {app.__name__}."
        )
    spec = _spec(app)

    def decorate(cls: Any = None) -> Any:
        if cls is None:
            # The caller's module, where workers on Ray look for the class.
            cls = _class_without_methods(sys._getframe(1).f_globals.get("__name__", __name__))
        _check_class(cls, spec)
        cls.__ingress_spec__ = spec
        with APPS_LOCK:
            note_class(spec.app, cls)
            if isinstance(spec.app, Starlette):
                show_clones(spec.app)
                hide_self(spec.app, cls)
        return cls

    return decorate


def _class_without_methods(module: str) -> type:
    """Return a new class for an app whose routes are functions. Source: Ray 2.60.0, api.py."""

    class ASGIIngressDeployment:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.args = args
            self.kwargs = kwargs

    ASGIIngressDeployment.__module__ = module
    ASGIIngressDeployment.__qualname__ = ASGIIngressDeployment.__name__
    return ASGIIngressDeployment


def _spec(app: object) -> IngressSpec:
    if app is None or isinstance(app, (FastAPI, APIRouter)):
        return IngressSpec(app)
    if callable(app):
        if _is_builder(app):
            return IngressSpec(builder=app)
        if _accepts(app, 3):
            return IngressSpec(app)
    raise TypeError(
        f"@serve.ingress got {app!r} of type {type(app).__name__}; it expects a FastAPI, "
        "APIRouter, ASGI callable or builder function. A builder is a `def` without parameters "
        f"that returns the app; to build it with `await`, define `async def {BUILDER_METHOD}`."
    )


def _is_builder(app: Callable[..., object]) -> bool:
    """Return whether `app` is a sync function that needs no arguments and takes no `*args`."""
    if not (inspect.isroutine(app) or isinstance(app, partial)) or kind(app).is_async:
        return False
    takes_any = any(
        each.kind is inspect.Parameter.VAR_POSITIONAL
        for each in signature_of(app).parameters.values()
    )
    return _accepts(app, 0) and not takes_any


def _accepts(app: Callable[..., object], count: int) -> bool:
    try:
        signature_of(app).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return count == 3
    return True


def _check_class(cls: object, spec: IngressSpec) -> None:
    if hasattr(cls, "func_or_class"):
        raise _wrong_order(cls)
    if not inspect.isclass(cls):
        raise ValueError(f"@serve.ingress must be used with a class. Got {cls!r}.")
    if any("__call__" in vars(base) for base in cls.__mro__):
        raise ValueError(
            "Classes passed to @serve.ingress may not have __call__ method. "
            f"Rename {cls.__qualname__}.__call__ and give it a route, for example @app.get('/')."
        )
    if spec.app is None and spec.builder is None and not hasattr(cls, BUILDER_METHOD):
        raise ValueError(
            f"serve.ingress() called without an app argument requires {cls.__qualname__} to define "
            f"`{BUILDER_METHOD}`."
        )
    if isinstance(spec.app, (Starlette, Router)):
        methods = Methods(cls)
        methods.check_fields()
        check_routes(spec.app, methods)


def _wrong_order(deployment: object) -> TypeError:
    name = getattr(deployment, "name", "MyDeployment")
    return TypeError(
        f"'{name}' is a deployment already; put @serve.deployment above @serve.ingress:\n"
        "    @serve.deployment\n"
        "    @serve.ingress(app)"
    )
