"""`serve.status()` over the life of an application: it starts, fails, is unhealthy, is deleted."""

from typing import Any

from tests.engines.api import serve
from tests.engines.client import HEALTH_OF_ALL, Client, outcome
from tests.engines.probe import hold, hold_blocking, is_open, open_gate, wait_for_notes, wait_until
from tests.engines.suite import scenario

STATUSES = "Statuses over time"


class Slow:
    def __init__(self, key: str) -> None:
        hold_blocking(key)

    async def __call__(self, *_: Any) -> str:
        return "served"


class Failing:
    def __init__(self) -> None:
        raise ValueError("no weights")


class Ill:
    def check_health(self) -> None:
        if is_open("ill") and not is_open("well"):
            raise ValueError("the model is gone")


class Held:
    async def __call__(self) -> str:
        await hold("deleting")
        return "ended"


def _status(it: Client, name: str) -> Any:
    return serve.status().applications.get(name + it.suffix)


def _words(seen: Any) -> Any:
    deployments = seen.deployments.values()
    return [str(seen.status.value), *sorted({str(each.status.value) for each in deployments})]


@scenario(STATUSES, None)
def an_application_that_starts_is_deploying_and_then_running(it: Client) -> Any:
    key = f"slow{it.suffix}"
    running = it.start(
        lambda: it.deploy(serve.deployment(name="Slow")(Slow).bind(key), "slow_start")
    )
    wait_until(lambda: _status(it, "slow_start") and _status(it, "slow_start").deployments)
    before = _status(it, "slow_start")
    open_gate(key)
    running.result()
    after = _status(it, "slow_start")
    return [[_words(each), each.message] for each in (before, after)]


@scenario(STATUSES, None)
def an_application_that_failed_is_listed_until_it_is_deleted(it: Client) -> Any:
    prefix = f"/failed{it.suffix}"
    limited = serve.deployment(max_constructor_retry_count=1)
    refused = outcome(
        lambda: it.deploy(limited(Failing).bind(), "failed", route_prefix=prefix, blocking=False)
    )
    seen = _status(it, "failed")
    if seen is None:
        return [refused, None]
    (deployment,) = seen.deployments.values()
    found = [
        _words(seen),
        "Failing" in seen.message,
        str(getattr(deployment.status_trigger, "value", deployment.status_trigger)),
        "no weights" in deployment.message,
    ]
    wait_until(lambda: it.http.get(prefix).status_code != 404)
    status = it.http.get(prefix).status_code
    it.forget("failed")
    wait_until(lambda: _status(it, "failed") is None)
    return [refused, found, status]


@scenario(STATUSES, None)
def an_application_whose_health_check_fails_is_unhealthy(it: Client) -> Any:
    checked = serve.deployment(health_check_period_s=0.1, health_check_timeout_s=5)
    it.deploy(checked(Ill).bind(), "ill")
    before = _words(_status(it, "ill"))
    with HEALTH_OF_ALL:
        open_gate("ill")
        wait_until(lambda: _status(it, "ill").status.value == "UNHEALTHY")
        seen = _status(it, "ill")
        open_gate("well")
        wait_until(lambda: _status(it, "ill").status.value == "RUNNING")
    return [before, _words(seen), seen.message, _words(_status(it, "ill"))]


@scenario(STATUSES, None)
def an_application_that_is_deleted_is_deleting_until_its_requests_end(it: Client) -> Any:
    handle = it.deploy(serve.deployment(Held).bind(), "held")
    response = handle.remote()
    wait_for_notes("deleting")
    deleting = it.start(lambda: it.forget("held"))
    wait_until(lambda: _status(it, "held").status.value == "DELETING")
    seen = _status(it, "held")
    open_gate("deleting")
    ended = response.result()
    deleting.result()
    wait_until(lambda: _status(it, "held") is None)
    return [str(seen.status.value), seen.message, ended]
