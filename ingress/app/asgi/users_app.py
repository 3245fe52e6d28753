"""The user's `app`: inside of a replica, it is that replica's clone.

    in a replica, in its threads and tasks   its attributes are those of the clone
    anywhere else                            its own

User code and extensions refer to the app by its global name, by a bound method or in a closure:
`app.state.model`, `original_build_middleware_stack()`, `app.add_api_route` at start-up. None of
these finds the clone by itself, so the class of the user's app looks it up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.unbound import refusal
from ingress.context import REPLICA
from ingress.core.base.foreign import subclass

APPS_LOCK = threading.RLock()
"""Held while a user's app is read or changed. Two deployments may share one app and be built in two
threads: both would replace its class."""

_OF_ALL = "dependency_overrides"
"""The attribute that no clone has to itself: tests set it from outside, for all replicas."""

_USERS_APP = "_ingress_users_app"
_SHOWN: ContextVar[Starlette] = ContextVar("ingress_shown")


class UsersApp:
    """A base of the classes of users' apps. Thread-safe, as far as their own class is."""

    def __init_subclass__(cls, **options: object) -> None:
        """Keep a class of the user's from counting, or refusing, its subclasses."""

    _ingress_class: type
    """The class that the user's app had."""

    def __getattr__(self, name: str) -> Any:
        # Set inside of a replica, so it is in the clone only.
        clone = _clone_of(self)
        if clone is not None and name in vars(clone):
            return vars(clone)[name]
        inherited = getattr(super(), "__getattr__", None)
        if inherited is not None:
            return inherited(name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )

    def __setattr__(self, name: str, value: object) -> None:
        clone = None if name == _OF_ALL else _clone_of(self)
        if clone is not None:
            setattr(clone, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        clone = None if name == _OF_ALL else _clone_of(self)
        if clone is not None:
            delattr(clone, name)
        else:
            super().__delattr__(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = _clone_of(self) or refusal(self, scope) or super().__call__  # type: ignore[misc]
        await app(scope, receive, send)


def show_clones(app: Starlette) -> None:
    """Make `app` show the clone inside of each replica.

    Called again, it includes the attributes that were set since. The caller holds `APPS_LOCK`.
    """
    base = class_of(app)
    shown = {name: _shown(name) for name in vars(app) if name != _OF_ALL}
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    app.__class__ = type(
        base.__name__, (UsersApp, base), {**names, **shown, "_ingress_class": base}
    )


def class_of(app: Starlette) -> type[Starlette]:
    """Return the class that the user's app had."""
    return getattr(app, "_ingress_class", type(app))


def mark_clone(clone: Starlette, app: Starlette) -> None:
    """Make `clone` a clone of `app`, which has what no clone has to itself."""
    base = class_of(app)

    def put(_: Starlette, value: object) -> None:
        setattr(app, _OF_ALL, value)

    of_all = property(lambda _: getattr(app, _OF_ALL), put)
    clone.__class__ = subclass(base, {_OF_ALL: of_all})
    vars(clone).pop(_OF_ALL, None)
    vars(clone)[_USERS_APP] = app


@contextmanager
def showing(clone: Starlette) -> Iterator[None]:
    """Show `clone` in the current context, without a replica."""
    token = _SHOWN.set(clone)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def _clone_of(app: object) -> Starlette | None:
    """Return the clone of the current replica; `None` outside, and for another deployment's app."""
    clone = _SHOWN.get(None)
    if clone is None:
        replica = REPLICA.get(None)
        clone = None if replica is None else replica.asgi_app
    return clone if getattr(clone, _USERS_APP, None) is app else None


def _shown(name: str) -> property:
    """Return a property, because it is found before the attribute of the same name."""

    def get(app: UsersApp) -> Any:
        clone = _clone_of(app)
        values = vars(app if clone is None else clone)
        # If it was deleted, the class may have an attribute of that name.
        return values[name] if name in values else getattr(super(UsersApp, app), name)

    def put(app: UsersApp, value: object) -> None:
        vars(app)[name] = value

    def delete(app: UsersApp) -> None:
        vars(app).pop(name)

    return property(get, put, delete)
