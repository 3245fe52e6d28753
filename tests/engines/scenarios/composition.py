"""Deployments that call deployments, and handles inside of deployments."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from tests.engines.api import serve
from tests.engines.client import Client, answer, outcome, raised, text
from tests.engines.probe import here, hold, note, notes, wait_for_notes
from tests.engines.suite import scenario


class Child:
    def __init__(self, name: str = "child") -> None:
        self.name = name
        note("children", name)

    async def __call__(self, value: Any = None) -> Any:
        return [self.name, value]

    async def double(self, value: int) -> int:
        return 2 * value

    async def fails(self) -> None:
        raise ValueError("of the child")

    async def letters(self, word: str) -> AsyncIterator[str]:
        for letter in word:
            yield letter

    async def holds(self, key: str) -> None:
        try:
            await hold(key)
        finally:
            task = asyncio.current_task()
            note(f"{key}-ended", "cancelled" if task and task.cancelling() else "done")


class Parent:
    def __init__(self, child: Any, others: Any = None) -> None:
        self.child = child
        self.others = others

    async def __call__(self, value: Any) -> Any:
        return await self.child.remote(value)

    async def pipeline(self, value: int) -> int:
        first = self.child.double.remote(value)
        result: int = await self.child.double.remote(first)
        return result

    async def at_once(self) -> Any:
        calls = [self.child.double.remote(number) for number in range(4)]
        return await asyncio.gather(*calls)

    async def others_say(self) -> Any:
        return [await each.remote() for each in [*self.others["list"], self.others["deep"][0]["x"]]]

    async def spell(self, word: str) -> AsyncIterator[str]:
        async for letter in self.child.options(stream=True).letters.remote(word):
            yield letter

    async def catches(self) -> Any:
        try:
            await self.child.fails.remote()
        except ValueError as error:
            return ["caught", text(error)]

    async def passes_on(self) -> None:
        await self.child.fails.remote()

    def blocks_in_def(self, value: int) -> Any:
        try:
            return [here(), self.child.double.remote(value).result()]
        except RuntimeError as error:
            return [here(), str(error).partition(".")[0]]

    async def blocks_in_coroutine(self) -> Any:
        return outcome(lambda: self.child.double.remote(1).result())

    async def type_of_handle(self) -> Any:
        return [type(self.child).__name__, self.child.deployment_name]

    async def finds(self, name: str) -> Any:
        return await serve.get_deployment_handle(name).double.remote(4)

    async def holds(self, key: str) -> None:
        await self.child.holds.remote(key)

    async def gives_up(self, key: str) -> Any:
        response = self.child.holds.remote(key)
        await asyncio.to_thread(wait_for_notes, key)
        response.cancel()
        try:
            await response
        except Exception as error:
            return raised(error)


def family() -> Any:
    child = serve.deployment(Child)
    shared = child.options(name="Shared").bind("shared")
    others = {"list": [shared, child.options(name="Other").bind("other")], "deep": [{"x": shared}]}
    return serve.deployment(Parent).bind(child.bind(), others)


@scenario("Composition", family)
def a_bound_application_arrives_as_a_handle(it: Client) -> Any:
    return [it.call("type_of_handle"), it.handle.remote(7).result()]


@scenario("Composition", family)
def applications_in_lists_and_dicts_arrive_as_handles(it: Client) -> Any:
    return it.call("others_say")


@scenario("Composition", family)
def one_application_in_two_places_is_one_deployment(it: Client) -> Any:
    it.call("others_say")
    return notes("children").count("shared")


@scenario("Composition", family)
def responses_pass_from_one_call_to_the_next(it: Client) -> Any:
    return it.call("pipeline", 3)


@scenario("Composition", family)
def calls_are_made_at_once(it: Client) -> Any:
    return it.call("at_once")


@scenario("Composition", family)
def a_stream_passes_through(it: Client) -> Any:
    return list(it.handle.options(stream=True).spell.remote("abc"))


@scenario("Composition", family)
def an_error_of_a_child_can_be_caught(it: Client) -> Any:
    return it.call("catches")


@scenario("Composition", family)
def an_error_of_a_child_that_is_not_caught_is_the_callers(it: Client) -> Any:
    return outcome(lambda: it.call("passes_on"), says=True)


@scenario("Where a `def` runs", family)
def a_def_may_wait_for_its_child_only_in_a_thread(it: Client) -> Any:
    return it.call("blocks_in_def", 2)


@scenario("Results and errors of handles", family)
def result_is_refused_in_a_coroutine_of_a_replica(it: Client) -> Any:
    return it.call("blocks_in_coroutine")


@scenario("Running, finding and deleting applications", family)
def a_deployment_finds_another_of_its_application_by_name(it: Client) -> Any:
    return it.call("finds", "Child")


@scenario("Cancellation", family)
def a_cancelled_request_cancels_the_call_it_waits_for(it: Client) -> Any:
    response = it.handle.holds.remote("nested")
    wait_for_notes("nested")
    response.cancel()
    return wait_for_notes("nested-ended")


@scenario("Cancellation", family)
def a_child_call_can_be_cancelled_by_its_caller(it: Client) -> Any:
    return [it.call("gives_up", "given-up"), wait_for_notes("given-up-ended")]


def named_alike() -> Any:
    child = serve.deployment(Child)
    return serve.deployment(Parent).bind(child.bind("one"), {"list": [child.bind("two")]})


@scenario("Composition", named_alike)
def deployments_of_one_name_get_numbers(it: Client) -> Any:
    status = serve.status().applications[it.name]
    return sorted(status.deployments)


api = FastAPI()


@serve.ingress(api)
class Front:
    def __init__(self, child: Any) -> None:
        self.child = child

    @api.get("/double/{value}")
    async def double(self, value: int) -> int:
        result: int = await self.child.double.remote(value)
        return result

    @api.get("/def/{value}")
    def double_in_def(self, value: int) -> int:
        result: int = self.child.double.remote(value).result()
        return result

    @api.get("/fails")
    async def fails(self) -> None:
        await self.child.fails.remote()


def front() -> Any:
    return serve.deployment(Front).bind(serve.deployment(Child).bind())


@scenario("Composition", front)
def an_endpoint_awaits_a_child(it: Client) -> Any:
    return answer(it.get("/double/21"))


@scenario("Where FastAPI endpoints run", front)
def a_def_endpoint_may_wait_for_a_child_at_both_values_of_the_flag(it: Client) -> Any:
    return answer(it.get("/def/21"))


@scenario("FastAPI classes", front)
def an_error_of_a_child_is_a_500(it: Client) -> Any:
    return answer(it.get("/fails"))
