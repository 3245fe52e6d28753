"""Objects that do not like to be looked at: no start, request or view runs their code, or fails."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request

import ingress as serve
from ingress.check.checker import check_application
from ingress.core.base.settings import Settings
from ingress.observe.inspection.explain import explain
from ingress.state.memory import memory_of
from ingress.testing import TestClient

ran: list[str] = []
"""The code of the objects below that has run."""


def refuse(*args: object, **options: object) -> Any:
    ran.append(inspect.stack()[1].function)
    raise RuntimeError("there is no request")


class Proxy:
    """As werkzeug's `LocalProxy` without a request."""

    def __getattribute__(self, name: str) -> Any:
        refuse()


class Lazy:
    """As Django's settings before they are configured."""

    def __getattr__(self, name: str) -> Any:
        refuse()


class Stubborn:
    __eq__ = __bool__ = __len__ = __iter__ = __repr__ = __hash__ = refuse


class Named:
    """Properties in the places of a function's attributes."""

    __name__ = __wrapped__ = __signature__ = __code__ = __func__ = property(refuse)
    __dict__ = __doc__ = __annotations__ = property(refuse)

    def __call__(self) -> None:
        refuse()


class Pretender(Lazy):
    """An object that says that it is of another class."""

    def __init__(self, kind: type) -> None:
        vars(self)["kind"] = kind

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return object.__getattribute__(self, "__dict__")["kind"]


class Descriptor:
    __get__ = __set__ = refuse


class Described:
    value = Descriptor()
    __name__ = Descriptor()


class Mapping(dict[str, int]):
    items = values = keys = __iter__ = __len__ = get = refuse


class Sequence(list[int]):
    __iter__ = __len__ = __getitem__ = refuse


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__module__", "__mro__", "__dict__"):
            refuse()
        return super().__getattribute__(name)


class OfMeta(metaclass=Meta):
    pass


class Hidden(type):
    __getattribute__ = __hash__ = __eq__ = refuse


class Module(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        refuse()


def circular() -> None:
    pass


circular.__wrapped__ = circular  # type: ignore[attr-defined]


def odd() -> None:
    pass


odd.__module__ = odd.__signature__ = Lazy()  # type: ignore[assignment, attr-defined]
odd.__annotations__ = {"value": Proxy()}


FOREIGN: dict[str, Callable[[], Any]] = {
    "proxy": Proxy,
    "settings": Lazy,
    "stubborn": Stubborn,
    "named": Named,
    **{
        f"says {kind.__name__}": functools.partial(Pretender, kind)
        for kind in (types.FunctionType, types.MethodType, types.ModuleType, type, str, dict)
    },
    "described": Described,
    "mapping": lambda: Mapping(a=1),
    "sequence": lambda: Sequence([1]),
    "class": lambda: OfMeta,
    "instance": OfMeta,
    "module": lambda: Module("lazy"),
    "circular": lambda: circular,
    "odd": lambda: odd,
}

thing: Any = None
things: Any = None
part: Any = None


def helper() -> Any:
    return thing(1), things, part


def place(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make an object, and put it where user code names it."""
    made = FOREIGN[name]()
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "thing", made)
    monkeypatch.setattr(here, "things", [made, {"key": made}])
    monkeypatch.setattr(here, "part", functools.partial(print, made))
    ran.clear()
    return made


def application(foreign: Any) -> Any:
    app = FastAPI()
    app.state.thing = foreign

    class Layer:
        def __init__(self, app: Any, given: Any) -> None:
            self.app, self.given = app, given

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

    app.add_middleware(Layer, given=foreign)

    def defaulted(value: Any = foreign) -> Any:
        return value

    def guard(request: Request) -> None:
        request.state.thing = foreign

    guard.mark = foreign  # type: ignore[attr-defined]

    @serve.deployment
    @serve.ingress(app)
    class Api:
        attribute = foreign

        def __init__(self, *args: Any) -> None:
            self.things = [*args, foreign]

        @app.get("/")
        async def get(self, request: Request, _: None = Depends(guard)) -> str:
            return "ok" if self.things else str((helper(), defaulted(), foreign))

    @serve.deployment
    class Caller:
        def __init__(self, api: Any, *args: Any) -> None:
            self.api, self.args = api, args

    return Api.bind(foreign, [foreign])


# No fixture has the object, which pytest would look at.
each_object = pytest.mark.parametrize("name", FOREIGN)


@each_object
def test_no_code_of_an_object_runs_at_a_start_or_in_a_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestClient(application(place(name, monkeypatch))) as client:
        answers = [client.get(path).status_code for path in ("/", "/openapi.json")]
    assert (answers, code_that_ran(name)) == ([200, 200], [])


@each_object
def test_no_code_of_an_object_runs_when_it_is_explained_and_checked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = application(place(name, monkeypatch))
    settings = Settings()
    explained = explain(app, settings)
    checked = check_application(app, __name__, Path(__file__).parents[3], settings, migrate=True)
    assert (bool(explained), bool(checked), code_that_ran(name)) == (True, True, [])


def test_no_code_of_a_class_runs_when_the_objects_of_a_process_are_counted() -> None:
    kept = [[Hidden("OfHidden", (), {})()], Proxy()]
    ran.clear()

    found = memory_of("server", 0.0)

    assert (found["problem"], ran, len(kept)) == ("", [], 2)


def code_that_ran(name: str) -> list[str]:
    # `inspect.getattr_static` itself asks a metaclass for names of the class.
    return [] if name in ("class", "instance") else list(ran)
