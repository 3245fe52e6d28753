"""The user's `app`: inside of a replica, it is that replica's clone.

    in a replica, in its threads and tasks   its attributes are those of the clone
    anywhere else                            its own; `state` and attributes that are not FastAPI's
                                             are those of the clone, if it can be only one

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

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.unserved_routes import refusal
from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.foreign import subclass
from ingress.core.calls.loops import running_loop

APPS_LOCK = threading.RLock()
"""Held while a user's app is read or changed. Two deployments may share one app and be built in two
threads: both would replace its class."""

_OF_ALL = "dependency_overrides"
"""The attribute that no clone has to itself: tests set it from outside, for all replicas."""

_USERS_APP = "_ingress_users_app"
_SHOWN: ContextVar[Starlette] = ContextVar("ingress_shown")
_FRAMEWORKS = {*vars(FastAPI()), "__class__", "__call__"} - {"state"}

_serving: tuple[ReplicaRuntime, ...] = ()
"""The replicas in this process that have a clone; replaced as a whole, under `APPS_LOCK`."""


class UsersApp:
    """A base of the classes of users' apps. Thread-safe, as far as their own class is."""

    def __init_subclass__(cls, **options: object) -> None:
        """Keep a class of the user's from counting, or refusing, its subclasses."""

    _ingress_class: type
    """The class that the user's app had."""

    def __getattr__(self, name: str) -> Any:
        # Set inside of a replica, so it is in the clone only.
        clone = _clone_of(self, name)
        if clone is not None and name in vars(clone):
            return vars(clone)[name]
        inherited = getattr(super(), "__getattr__", None)
        if inherited is not None:
            return inherited(name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{_doubt(self)}",
            name=name,
            obj=self,
        )

    def __setattr__(self, name: str, value: object) -> None:
        clone = None if name == _OF_ALL else _clone_of(self, name)
        if clone is not None:
            setattr(clone, name, value)
            return
        if name not in _FRAMEWORKS and (doubt := _doubt(self)):
            raise _unseen(f"app.{name}", "set", doubt)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        clone = None if name == _OF_ALL else _clone_of(self, name)
        if clone is not None:
            delattr(clone, name)
            return
        if name not in _FRAMEWORKS and (doubt := _doubt(self)):
            raise _unseen(f"app.{name}", "deleted", doubt)
        super().__delattr__(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: Any = _clone_of(self, "__call__") or refusal(self, scope) or super().__call__  # type: ignore[misc]
        await app(scope, receive, send)


class _StateInDoubt(State):
    """An app's own state, while several replicas have states of their own."""

    def __init__(self, state: State, doubt: str) -> None:
        super().__init__(state._state)
        vars(self)["_doubt"] = doubt

    def __getattr__(self, name: str) -> Any:
        if name in self._state:
            return self._state[name]
        raise AttributeError(f"'State' object has no attribute {name!r}{self._doubt}")

    def __setattr__(self, name: str, value: object) -> None:
        raise _unseen(f"app.state.{name}", "set", self._doubt)

    def __delattr__(self, name: str) -> None:
        raise _unseen(f"app.state.{name}", "deleted", self._doubt)

    __setitem__, __delitem__ = __setattr__, __delattr__

    def __getitem__(self, key: str) -> Any:
        if key in self._state:
            return self._state[key]
        raise KeyError(f"{key!r}{self._doubt}")


def _unseen(name: str, change: str, doubt: str) -> AttributeError:
    return AttributeError(f"{name} cannot be {change} here, where no replica would see it{doubt}")


def show_clones(app: Starlette) -> None:
    """Make `app` show the clone inside of each replica.

    Called again, it includes the attributes that were set since. The caller holds `APPS_LOCK`.
    """
    base = class_of(app)
    shown = {name: _shown(name) for name in vars(app) if name != _OF_ALL}
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    if base.__eq__ is object.__eq__:
        names |= {"__eq__": _is_shown, "__hash__": object.__hash__}
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

    def equals(clone: Starlette, other: object) -> bool:
        return other is clone or (other is app and other == clone)

    own: dict[str, object] = {_OF_ALL: of_all}
    if base.__eq__ is object.__eq__:  # else the user's class decides
        # One object with the app to dicts and sets in the replica, and never with another clone.
        own |= {"__eq__": equals, "__hash__": lambda _: hash(app)}
    clone.__class__ = subclass(base, own)
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


def serves(replica: ReplicaRuntime) -> None:
    """Count a replica among those that have a clone."""
    global _serving
    with APPS_LOCK:
        _serving = (*_serving, replica)


def has_ended(replica: ReplicaRuntime) -> None:
    """Count a replica no more among those that have a clone."""
    global _serving
    with APPS_LOCK:
        _serving = tuple(each for each in _serving if each is not replica)


def _clone_of(app: object, name: str = "state") -> Starlette | None:
    """Return the clone of the current replica; `None` outside, and for another deployment's app.

    Threads and timers of the user's know no replica: for what user code has set, the clone is then
    that of the only replica, or of the only one on the running loop.
    """
    clone = _SHOWN.get(None)
    if clone is None:
        replica = REPLICA.get(None)
        if replica is None and name not in _FRAMEWORKS:
            loop, found = running_loop(), _replicas_of(app)
            here = [each for each in found if each.loop is loop and loop is not None]
            alone = [each for each in found if each.place is None or each.place.world_size == 1]
            if len(here or found) == 1 and (here or alone):
                replica = (here or alone)[0]
        clone = None if replica is None else replica.asgi_app
    return clone if getattr(clone, _USERS_APP, None) is app else None


def _replicas_of(app: object) -> list[ReplicaRuntime]:
    return [each for each in _serving if getattr(each.asgi_app, _USERS_APP, None) is app]


def _is_shown(app: Starlette, other: object) -> bool:
    return other is app or (other is not None and other is _clone_of(app))


def _doubt(app: object) -> str:
    """Return the words for an attribute that is missing where no replica is known, or ""."""
    if REPLICA.get(None) is not None or not _replicas_of(app):
        return ""
    return (
        f". Each replica has an app of its own, and the thread "
        f"{threading.current_thread().name!r} belongs to none: use asyncio.to_thread, or start "
        "the function with its context: Thread(target=contextvars.copy_context().run, "
        "args=(function,)), executor.submit(contextvars.copy_context().run, function)"
    )


def _shown(name: str) -> property:
    """Return a property, because it is found before the attribute of the same name."""

    def get(app: UsersApp) -> Any:
        clone = _clone_of(app, name)
        values = vars(app if clone is None else clone)
        if clone is None and type(values.get(name)) is State and (doubt := _doubt(app)):
            return _StateInDoubt(values[name], doubt)
        # If it was deleted, the class may have an attribute of that name.
        return values[name] if name in values else getattr(super(UsersApp, app), name)

    def put(app: UsersApp, value: object) -> None:
        vars(app)[name] = value

    def delete(app: UsersApp) -> None:
        vars(app).pop(name)

    return property(get, put, delete)
