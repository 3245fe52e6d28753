"""`ingress.app.declaration`: results and errors of `@deployment` and `.bind()`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from ingress.app.declaration.declaration import Application, Deployment, deployment
from ingress.testing import TestClient


class Model:
    def __init__(self, path: str, scale: float = 1.0, *, device: str) -> None:
        self.path = path


@deployment
def echo(value: str) -> str:
    return value


def test_bare_and_with_options_declare_the_same() -> None:
    bare, called = deployment(Model), deployment(num_replicas=2, name="Other")(Model)

    assert (bare.name, bare.func_or_class, bare.config.num_replicas) == ("Model", Model, 1)
    assert (called.name, called.func_or_class, called.config.num_replicas) == ("Other", Model, 2)


@deployment
class Limited:
    LIMIT = 3

    class Item(BaseModel):
        child: Limited.Item | None = None

    @classmethod
    def made(cls) -> type:
        return cls

    def limit(self) -> int:
        return Limited.LIMIT + 1


def test_the_name_of_a_class_has_its_attributes_and_the_options() -> None:
    assert Limited.func_or_class().limit() == 4
    assert Limited.made() is Limited.func_or_class
    assert Limited.Item(child=Limited.Item()).child == Limited.Item()
    assert Limited.num_replicas == 1
    assert copy.deepcopy(Limited).LIMIT == 3
    with pytest.raises(AttributeError, match="'Deployment' object has no attribute 'LIMITS'"):
        _ = Limited.LIMITS  # type: ignore[attr-defined]


@deployment
class Counting:
    calls = 0

    async def __call__(self) -> int:
        Counting.calls += 1
        return Counting.calls


def test_a_class_counts_under_its_name_as_without_the_decorator() -> None:
    with TestClient(Counting.bind()) as client:
        assert [client.get("/").json(), client.get("/").json()] == [1, 2]
    assert (Counting.calls, vars(Counting.func_or_class)["calls"]) == (2, 2)
    del Counting.calls
    assert not hasattr(Counting.func_or_class, "calls")


def test_an_option_in_the_wrong_place_is_told_its_place() -> None:
    for name in ("max_ongoing_requests", "max_queued_requests", "health_check_period_s"):
        with pytest.raises(TypeError, match=f"{name}'; it is an option of the deployment, beside"):
            deployment(autoscaling_config={"max_replicas": 2, name: 3})(Model)
    for name, place in {
        "min_replicas": "autoscaling_config",
        "retry_after_s": "backpressure_config",
        "log_level": "logging_config",
        "num_gpus": "ray_actor_options",
        "request_router_class": "request_router_config",
    }.items():
        with pytest.raises(TypeError, match=f"{name}'; it is an option of {place}"):
            deployment(**{name: 1})(Model)  # type: ignore[call-overload]


def test_a_function_is_a_deployment_of_its_name() -> None:
    assert isinstance(echo, Deployment)
    assert echo.name == "echo"


def test_options_gives_a_new_deployment_and_leaves_the_old_one() -> None:
    first = deployment(num_replicas=2, max_queued_requests=5)(Model)
    second = first.options(name="Second", num_replicas=3)

    assert (second.name, second.config.num_replicas) == ("Second", 3)
    assert second.config.max_queued_requests == 5
    assert (first.name, first.config.num_replicas) == ("Model", 2)


def test_a_declaration_cannot_be_changed() -> None:
    application = deployment(Model).bind("p", device="cpu")

    with pytest.raises(dataclasses.FrozenInstanceError):
        application.deployment.name = "other"
    for name in ("num_replicas", "bind"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"by Model\.options\(\.\.\.\)"):
            setattr(application.deployment, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        echo.limit = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        application.init_args = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "target", [Model("p", device="cpu"), 3, echo], ids=lambda target: type(target).__name__
)
def test_only_a_class_or_function_can_be_a_deployment(target: Any) -> None:
    with pytest.raises(TypeError, match="must be called on a class or function, got"):
        deployment(target)


def test_a_name_without_its_keyword_declares_what_ray_does_and_warns_at_its_line() -> None:
    with pytest.warns(UserWarning, match=r"write @serve\.deployment\(name='counter'\)") as told:
        made = deployment("counter", num_replicas=2)(Model)

    assert (made.name, made.config.num_replicas) == ("Model", 2)
    assert told[0].filename == __file__


def test_calling_a_deployment_says_to_bind() -> None:
    with pytest.raises(RuntimeError, match=r"use Model\.bind\(\.\.\.\)"):
        deployment(Model)("p")


def test_subclassing_a_deployment_says_what_to_subclass() -> None:
    declared = deployment(Model)

    with pytest.raises(TypeError, match=r"then decorate: class B\(Model\.func_or_class\)"):

        class Sub(declared):  # type: ignore[misc, valid-type]
            pass


@pytest.mark.parametrize(
    ("name", "error"), [("a#b", ValueError), ("", ValueError), (3, TypeError), (None, TypeError)]
)
def test_a_name_is_a_non_empty_string_without_a_hash(name: Any, error: type[Exception]) -> None:
    rule = f"a non-empty string without '#', got {name!r}"

    with pytest.raises(error, match=rule):
        deployment(name=name)
    with pytest.raises(error, match=rule):
        deployment(Model).options(name=name)


def test_a_bad_option_is_refused_before_the_class_is_there() -> None:
    with pytest.raises(ValueError, match="num_replicas"):
        deployment(num_replicas=0)
    with pytest.raises(TypeError, match=r"did you mean max_ongoing_requests\?"):
        deployment(max_ongoing_request=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"did you mean name\?"):
        deployment(nam="x")  # type: ignore[call-overload]


@pytest.mark.parametrize("declare", ["deployment", "options"])
def test_max_concurrent_queries_warns_at_the_line_that_says_it(declare: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if declare == "deployment":
            made = deployment(max_concurrent_queries=1000)(Model)
        else:
            made = deployment(max_ongoing_requests=3)(Model).options(max_concurrent_queries=1000)

    assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)]
    assert made.config.max_ongoing_requests == 1000


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, r"Model\.bind\(\) does not match .*: missing path, device"),
        (("p",), {}, "missing device"),
        (("p", 1, 2), {"device": "cpu"}, "too many positional arguments"),
        (("p",), {"device": "cpu", "dtype": 1}, "unexpected keyword argument 'dtype'"),
        (("p",), {"device": "cpu", "path": "q"}, "multiple values for argument 'path'"),
    ],
)
def test_bind_refuses_what_the_constructor_does_not_take(
    args: tuple[Any, ...], kwargs: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TypeError, match=problem) as caught:
        deployment(Model).bind(*args, **kwargs)

    assert "Model.__init__(path: 'str', scale: 'float' = 1.0, *, device: 'str')" in str(
        caught.value
    )


def test_bind_takes_what_a_constructor_with_stars_or_none_takes() -> None:
    class Anything:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    class Nothing: ...

    assert deployment(Anything).bind(1, a=2).init_args == (1,)
    assert deployment(Nothing).bind().init_args == ()
    with pytest.raises(TypeError, match="too many positional"):
        deployment(Nothing).bind(1)  # type: ignore[call-arg]


def test_a_function_takes_no_constructor_arguments() -> None:
    with pytest.raises(ValueError, match=r"init_args not supported for function deployments"):
        echo.bind("value")  # type: ignore[call-arg]


def test_the_reprs_say_what_was_written() -> None:
    declared = deployment(num_replicas=2)(Model)
    application = declared.bind("p" * 99, device=echo.bind())  # type: ignore[arg-type]

    assert repr(declared) == "Deployment(name='Model', num_replicas=2)"
    assert repr(echo.bind()) == "Application(echo.bind())"
    assert repr(application) == (
        "Application(Model.bind('pppppppppppp...ppppppppppppp', device=Application(echo.bind())))"
    )


def test_an_application_is_an_asgi3_app_to_servers() -> None:
    call = echo.bind().__call__

    assert inspect.iscoroutinefunction(call)
    assert list(inspect.signature(call).parameters) == ["scope", "receive", "send"]


def test_every_bind_is_a_node_of_its_own_that_can_be_referred_to_weakly() -> None:
    first, second = echo.bind(), echo.bind()

    assert len({first, second}) == 2
    assert weakref.ref(first)() is first


class Host:
    """An engine that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def __call__(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.calls.append((application, scope, receive, send))

    async def close(self, application: Application) -> None:
        self.calls.append(("close", application))

    @asynccontextmanager
    async def lifespan(self, application: Application) -> AsyncIterator[None]:
        self.calls.append(("start", application))
        yield
        self.calls.append(("stop", application))


async def receive() -> Message:
    return {"type": "http.request"}


async def send(message: Message) -> None:
    del message


@pytest.mark.anyio
async def test_the_asgi_face_hands_everything_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host, application = Host(), echo.bind()
    monkeypatch.setattr(Application, "_host", host, raising=False)

    await application({"type": "http"}, receive, send)
    async with application.lifespan(object()):
        host.calls.append("inside")
    await application.aclose()

    assert host.calls == [
        (application, {"type": "http"}, receive, send),
        ("start", application),
        "inside",
        ("stop", application),
        ("close", application),
    ]


def test_openapi_of_a_deployment_without_an_app_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"'echo' has no OpenAPI schema; put @serve\.ingress"):
        echo.bind().openapi()


def test_the_spec_of_an_ingress_class_stays_reachable() -> None:
    class Spec:
        def bind(self, cls: type) -> Spec:
            return self

        def openapi(self) -> dict[str, Any]:
            return {"openapi": "3.1.0"}

    class Hello:
        __ingress_spec__ = Spec()

    declared = deployment(num_replicas=2)(Hello)

    assert declared.func_or_class is Hello
    assert declared.bind().openapi() == {"openapi": "3.1.0"}
