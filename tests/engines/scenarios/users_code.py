"""Forms that code written for Ray Serve has: classes made for apps, nested applications, builders,
handles that are compared, names without a keyword."""

import os
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ingress.app.declaration.module_app import built_with
from ingress.core.base.settings import warn_of_unused
from tests.engines.api import COLUMN, serve
from tests.engines.client import Client, answer, outcome
from tests.engines.suite import scenario


class Child:
    async def __call__(self, *_: Any) -> str:
        return "child"


child = serve.deployment(Child)

# Apps without a class


async def ask_child(request: Request) -> PlainTextResponse:
    made = serve.get_replica_context().servable_object
    (handle,) = made.args
    return PlainTextResponse(f"{await handle.remote()} {made.kwargs['word']}")


def build_fastapi() -> FastAPI:
    app = FastAPI()
    app.get("/ask")(ask_child)
    return app


FastAPIClass = serve.ingress(build_fastapi())()
StarletteClass = serve.ingress(Starlette(routes=[Route("/ask", ask_child)]))()
BuilderClass = serve.ingress(build_fastapi)()


def fastapi_without_a_class() -> Any:
    return serve.deployment(FastAPIClass).bind(child.bind(), word="fastapi")


def starlette_without_a_class() -> Any:
    return serve.deployment(StarletteClass).bind(child.bind(), word="starlette")


def builder_without_a_class() -> Any:
    return serve.deployment(BuilderClass).bind(child.bind(), word="builder")


@scenario("FastAPI classes", fastapi_without_a_class)
def an_app_of_functions_needs_no_class_and_keeps_the_arguments_of_bind(it: Client) -> Any:
    return [answer(it.get("/ask")), serve.deployment(FastAPIClass).name]


@scenario("Other ASGI apps", starlette_without_a_class)
def a_starlette_app_needs_no_class(it: Client) -> Any:
    return answer(it.get("/ask"))


@scenario("Apps made in the replica", builder_without_a_class)
def a_function_that_makes_the_app_needs_no_class(it: Client) -> Any:
    return answer(it.get("/ask"))


@scenario("FastAPI classes", None)
def without_a_class_and_an_app_there_is_nothing_to_serve(it: Client) -> Any:
    return outcome(lambda: serve.ingress()())


# Applications in objects


@dataclass
class Settings:
    name: str
    model: Any


class Nested:
    def __init__(self, settings: Settings, others: list[Settings]) -> None:
        self.settings, self.others = settings, others

    async def __call__(self, *_: Any) -> Any:
        found = [self.settings, *self.others]
        return [[type(each).__name__, each.name, await each.model.remote()] for each in found]


def nested() -> Any:
    inside = Settings("a", child.bind())
    return serve.deployment(Nested).bind(inside, [Settings("b", inside.model)])


@scenario("Composition", nested)
def an_application_in_an_object_arrives_as_a_handle(it: Client) -> Any:
    deployments = serve.status().applications[it.name].deployments
    return [it.handle.remote().result(), sorted(deployments)]


# Batched generators


class Streams:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=10)
    async def numbers(self, starts: list[int]) -> AsyncIterator[list[int]]:
        self.sizes.append(len(starts))
        for step in range(40):
            yield [start + step for start in starts]

    async def one_after_another(self) -> Any:
        streams = [self.numbers(start) for start in range(3)]
        items = [[item async for item in each] for each in streams]
        return [[len(each), each[-1]] for each in items], self.sizes


def streams() -> Any:
    return serve.deployment(Streams).bind()


@scenario("`@batch`", streams)
def streams_iterated_one_after_another_share_a_batch(it: Client) -> Any:
    return it.call("one_after_another")


# Handles and declarations


def known() -> Any:
    return child.bind()


@scenario("Methods of handles", known)
def handles_of_one_deployment_are_equal(it: Client) -> Any:
    first, second = serve.get_app_handle(it.name), serve.get_app_handle(it.name)
    return [first == second, len({first, second})]


@scenario("Methods of handles", known)
def an_unknown_method_raises_the_frameworks_error(it: Client) -> Any:
    return outcome(lambda: it.handle.absent.remote().result())


@scenario("Methods of handles", None)
def a_handle_may_be_shut_down(it: Client) -> Any:
    handle = it.deploy(child.bind(), "shut_handle")
    before = handle.remote().result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [before, handle.shutdown()]


@scenario("Declaring a deployment", None)
def a_name_without_its_keyword_is_no_name(it: Client) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        declare: Any = serve.deployment
        made = declare("counter", num_replicas=2)(Child)
    return [made.name, made.num_replicas]


@scenario("Running, finding and deleting applications", None)
def run_takes_a_logging_config(it: Client) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = it.deploy(child.bind(), "logged", logging_config={"log_level": "WARNING"})
    return handle.remote().result()


# Builders and variables


class Arguments(BaseModel):
    model: str
    copies: int = 1


def build_typed(arguments: Arguments) -> Any:
    return child.options(name=f"{arguments.model}{arguments.copies + 1}").bind()


def build_of_dict(arguments: Any) -> Any:
    return child.options(name="-".join(["of", *sorted(arguments)])).bind()


def build_of_two(first: Any, second: Any) -> Any:
    return child.bind()


def _made(builder: Any, arguments: dict[str, str]) -> Any:
    """Return what the command line makes of a builder and of words KEY=VALUE."""
    if os.environ[COLUMN] == "native":
        api: Any = import_module("ray.serve._private.api")
        app = api.call_user_app_builder_with_args_if_necessary(builder, arguments)
        return app._bound_deployment.name
    return built_with("module:builder", builder, arguments).deployment.name


@scenario("Running, finding and deleting applications", None)
def a_builder_gets_its_arguments_as_a_dict_or_as_its_model(it: Client) -> Any:
    built = [
        _made(build_typed, {"model": "large", "copies": "2"}),
        _made(build_of_dict, {"b": "1", "a": "2"}),
        _made(build_of_dict, {}),
    ]
    mistakes = [
        outcome(lambda: _made(build_typed, {"copies": "x"})),
        outcome(lambda: _made(build_of_two, {"a": "1"})),
    ]
    return [built, ["raised" in each for each in mistakes]]


@scenario("Flags", None, columns=("local",))
def a_variable_without_effect_here_is_named(it: Client) -> Any:
    set_here = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_RUN_SYNC_IN_THREADPOLL": "1"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_unused(set_here)
    return sorted(str(each.message) for each in told)
