"""Starting, configuring, finding, replacing and stopping applications; their contexts."""

import asyncio
from typing import Any

from fastapi import FastAPI

from tests.engines.api import serve
from tests.engines.client import Client, outcome, refused
from tests.engines.probe import here, hold, note, notes, open_gate, wait_for_notes, wait_until
from tests.engines.suite import Deviation, scenario

APPLICATIONS = "Running, finding and deleting applications"
CONFIG = "`user_config`"


class Who:
    def __init__(self) -> None:
        replica = serve.get_replica_context()
        self.first = [replica.deployment, replica.app_name, replica.servable_object is None]

    async def __call__(self, *_: Any) -> str:
        return "who"

    async def context(self) -> Any:
        replica = serve.get_replica_context()
        return [replica.deployment, replica.app_name, replica.servable_object is self]

    async def in_constructor(self) -> Any:
        return self.first

    async def in_thread(self) -> Any:
        return await asyncio.to_thread(lambda: serve.get_replica_context().deployment)

    async def tag(self) -> Any:
        replica = serve.get_replica_context()
        return [replica.replica_tag == replica.replica_id.unique_id, len(replica.replica_tag) > 0]

    async def model(self) -> str:
        return serve.get_multiplexed_model_id()

    async def rank(self) -> Any:
        return [type(getattr(serve.get_replica_context(), "world_size", None)).__name__]


def who() -> Any:
    return serve.deployment(Who).bind()


CONTEXT = "What code knows of its replica and request"


@scenario(CONTEXT, who)
def code_knows_its_deployment_and_application(it: Client) -> Any:
    return it.call("context")


@scenario(CONTEXT, who)
def the_constructor_knows_them_and_has_no_instance_yet(it: Client) -> Any:
    return it.call("in_constructor")


@scenario(CONTEXT, who)
def a_thread_of_the_replica_knows_them_too(it: Client) -> Any:
    return it.call("in_thread")


@scenario(CONTEXT, who)
def the_tag_is_the_unique_id_of_the_replica(it: Client) -> Any:
    return it.call("tag")


@scenario(CONTEXT, who)
def without_a_model_the_id_is_empty(it: Client) -> Any:
    return [it.call("model"), it.call("model", multiplexed_model_id="m")]


@scenario(CONTEXT, who)
def a_replica_knows_its_rank(it: Client) -> Any:
    return it.call("rank")


@scenario(CONTEXT, None)
def outside_of_a_replica_there_is_no_context(it: Client) -> Any:
    return refused(serve.get_replica_context, "may only be called from within")


request_api = FastAPI()


@serve.ingress(request_api)
class RequestFront:
    def __init__(self, child: Any) -> None:
        self.child = child

    @request_api.get("/items/{number}")
    async def item(self, number: int) -> Any:
        mine = serve.get_request_context()
        theirs = await self.child.remote()
        return [mine.route, mine.request_id, mine.app_name, mine.is_http_request, theirs]


class RequestChild:
    async def __call__(self) -> Any:
        mine = serve.get_request_context()
        return [mine.route, mine.request_id, mine.deployment, mine.is_http_request]


def request_contexts() -> Any:
    return serve.deployment(RequestFront).bind(serve.deployment(RequestChild).bind())


@scenario(CONTEXT, request_contexts, columns=("local", "ray"))
def a_request_knows_its_route_and_id_also_in_the_calls_it_makes(it: Client) -> Any:
    return it.get("/items/3", **{"x-request-id": "known"}).json()


# Configuration


class Configured:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def reconfigure(self, config: Any) -> None:
        self.seen.append(config)

    async def __call__(self, *_: Any) -> Any:
        return self.seen


def configured() -> Any:
    return serve.deployment(user_config={"a": [1]})(Configured).bind()


@scenario(CONFIG, configured)
def the_configuration_is_there_before_the_first_request(it: Client) -> Any:
    return it.handle.remote().result()


class Ranked:
    async def reconfigure(self, config: Any, rank: Any) -> None:
        self.given = [config, rank.rank, rank.node_rank, rank.local_rank]

    async def __call__(self) -> Any:
        return self.given


def ranked() -> Any:
    return serve.deployment(Ranked).bind()


@scenario(CONFIG, ranked)
def reconfigure_gets_its_rank_if_it_has_a_parameter_for_it(it: Client) -> Any:
    return it.handle.remote().result()


@scenario(CONFIG, None, Deviation("found before anything is started"))
def a_configuration_without_reconfigure_does_not_start(it: Client) -> Any:
    limited = serve.deployment(user_config={"a": 1}, max_constructor_retry_count=1)
    return refused(lambda: it.deploy(limited(Who).bind(), "unconfigured"), "reconfigure")


@scenario(CONFIG, None)
def a_configuration_must_be_json(it: Client) -> Any:
    return refused(
        lambda: serve.deployment(user_config={"a": object()})(Who), "not JSON-serializable"
    )


# Starting


class Failing:
    def __init__(self) -> None:
        raise ValueError("no weights")


@scenario("Start and stop", None, Deviation("the error says why"))
def a_constructor_that_fails_is_a_start_that_fails_with_its_reason(it: Client) -> Any:
    limited = serve.deployment(max_constructor_retry_count=1)
    return refused(lambda: it.deploy(limited(Failing).bind(), "failing"), "no weights")


class Unhealthy:
    def check_health(self) -> None:
        raise ValueError("not well")


@scenario("Health checks", None, Deviation("the error says why"))
def a_replica_that_is_not_healthy_at_first_does_not_start(it: Client) -> Any:
    limited = serve.deployment(max_constructor_retry_count=1)
    return refused(lambda: it.deploy(limited(Unhealthy).bind(), "unhealthy"), "not well")


class AsyncMade:
    async def __init__(self, word: str, other: str = "default") -> None:  # type: ignore[misc]
        await asyncio.sleep(0)
        self.words = [here(), word, other]

    async def __call__(self, *_: Any) -> Any:
        return self.words


def async_made() -> Any:
    return serve.deployment(AsyncMade).bind("word", other="other")


@scenario("Where an `async def` runs", async_made)
def a_constructor_may_be_a_coroutine(it: Client) -> Any:
    return it.handle.remote().result()


# Applications


@scenario(APPLICATIONS, who)
def an_application_is_found_by_name(it: Client) -> Any:
    by_name = serve.get_app_handle(it.name).remote().result()
    by_deployment = serve.get_deployment_handle("Who", it.name).remote().result()
    return [by_name, by_deployment]


@scenario(APPLICATIONS, None)
def an_application_that_is_not_there_is_told(it: Client) -> Any:
    return refused(lambda: serve.get_app_handle("absent"), "absent", "does not exist")


@scenario(APPLICATIONS, None)
def a_deployment_handle_outside_needs_the_application(it: Client) -> Any:
    return refused(lambda: serve.get_deployment_handle("Who"))


@scenario(APPLICATIONS, who)
def the_status_has_the_words_of_ray_serve(it: Client) -> Any:
    found = serve.status().applications[it.name]
    deployment = found.deployments["Who"]
    return [
        str(found.status.value),
        str(deployment.status.value),
        {str(getattr(k, "value", k)): n for k, n in deployment.replica_states.items() if n},
        found.last_deployed_time_s > 1e9,
    ]


@scenario(APPLICATIONS, None)
def deleting_what_is_not_there_is_no_error(it: Client) -> Any:
    return outcome(lambda: serve.delete("absent"))


@scenario(APPLICATIONS, None)
def a_deleted_application_is_not_listed_nor_routed(it: Client) -> Any:
    prefix = f"/short{it.suffix}"
    it.deploy(serve.deployment(Who).bind(), "short-lived", route_prefix=prefix)
    there = f"short-lived{it.suffix}" in serve.status().applications
    it.forget("short-lived")
    wait_until(lambda: prefix not in it.http.get("/-/routes").json())
    gone = f"short-lived{it.suffix}" in serve.status().applications
    return [there, gone, it.http.get(prefix).status_code]


@scenario(APPLICATIONS, None)
def without_a_prefix_it_is_not_served_over_http(it: Client) -> Any:
    handle = it.deploy(serve.deployment(Who).bind(), "unrouted")
    routes = it.http.get("/-/routes").json().values()
    return [handle.remote().result(), f"unrouted{it.suffix}" in routes]


class Version:
    def __init__(self, number: int) -> None:
        self.number = number

    async def __call__(self, *_: Any) -> int:
        return self.number


@scenario(APPLICATIONS, None)
def an_application_of_the_same_name_is_replaced_and_its_handle_stays(it: Client) -> Any:
    made = serve.deployment(graceful_shutdown_wait_loop_s=0.1)(Version)
    handle = it.deploy(made.bind(1), "versions")
    first = handle.remote().result()
    it._deployed.remove(f"versions{it.suffix}")
    other = it.deploy(made.bind(2), "versions")
    return [first, other.remote().result(), handle.remote().result()]


@scenario(APPLICATIONS, None)
def a_prefix_in_use_is_refused(it: Client) -> Any:
    prefix = f"/used{it.suffix}"
    it.deploy(serve.deployment(Who).bind(), "first-user", route_prefix=prefix)
    made = serve.deployment(Who).bind()
    return refused(lambda: it.deploy(made, "second-user", route_prefix=prefix))


# Stopping


class Stopping:
    def __init__(self, key: str, child: Any = None) -> None:
        self.key = key

    async def __call__(self, *_: Any) -> str:
        await hold(self.key)
        return "ended well"

    def __del__(self) -> None:
        note(f"{self.key}-deleted", self.key)


@scenario("Start and stop", None)
def a_request_that_runs_ends_before_its_replica_is_deleted(it: Client) -> Any:
    made = serve.deployment(graceful_shutdown_wait_loop_s=0.1)(Stopping)
    handle = it.deploy(made.bind("drain"), "drain")
    call = handle.remote()
    wait_for_notes("drain")
    deleting = it.start(it.forget, "drain")
    before = len(notes("drain-deleted"))
    open_gate("drain")
    result = call.result()
    deleting.result()
    return [before, result, wait_for_notes("drain-deleted")]


@scenario("Start and stop", None)
def a_request_that_does_not_end_in_time_is_cut_off(it: Client) -> Any:
    made = serve.deployment(graceful_shutdown_timeout_s=0.3, graceful_shutdown_wait_loop_s=0.1)
    handle = it.deploy(made(Stopping).bind("cut-off"), "cut-off")
    call = handle.remote()
    wait_for_notes("cut-off")
    it.forget("cut-off")
    try:
        return call.result(timeout_s=10)
    except Exception:
        return "an error"


# The flags


class Flags:
    async def __call__(self, *_: Any) -> Any:
        import os

        names = ("RUN_SYNC_IN_THREADPOOL", "RUN_USER_CODE_IN_SEPARATE_THREAD")
        return [os.environ.get(f"RAY_SERVE_{name}") for name in names]


def flags() -> Any:
    return serve.deployment(Flags).bind()


@scenario("Flags", flags)
def a_replica_has_the_flags_of_who_deployed_it(it: Client) -> Any:
    return it.handle.remote().result()
