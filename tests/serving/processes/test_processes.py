"""`isolation="process"`: user code in child processes, behind the same router and handles."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine
from ingress.exceptions import RayServeException, ReplicaUnavailableError, RequestCycleError
from ingress.handle import DeploymentHandle
from tests import process_app
from tests.process_app import OddError, pids
from tests.servers import PATIENCE_S, forking, served, wait_until


@pytest.fixture(scope="module")
def caller() -> Iterator[DeploymentHandle]:
    """A deployment with one replica, which calls another one, without HTTP."""
    process_app.logger.setLevel(logging.DEBUG)  # of the children, too
    with forking():
        yield serve.run(process_app.caller, name="model", route_prefix=None)
    process_app.logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def model(caller: DeploymentHandle) -> DeploymentHandle:
    """The deployment that is called."""
    return serve.get_deployment_handle("Model", "model")


@pytest.fixture(scope="module")
def url(caller: DeploymentHandle) -> str:
    """The address of an application with two replicas."""
    port = served(process_app.api, name="api", route_prefix="/")
    return f"http://127.0.0.1:{port}"


# Calls by handle.


class Locked:
    """An object with a part that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_user_code_runs_in_a_process_of_its_own(model: DeploymentHandle) -> None:
    assert model.remote(14).result() == 42
    assert [model.pid.remote().result()] == pids("Model", "model") != [os.getpid()]


def test_a_child_has_the_variables_of_its_runtime_env(model: DeploymentHandle) -> None:
    assert model.variable.remote("MODEL_FOLDER").result() == "/m"
    assert model.variable.remote("PATH").result() == os.environ["PATH"]


def test_an_error_crosses_as_it_is_with_its_traceback(model: DeploymentHandle) -> None:
    with pytest.raises(OddError, match="odd") as caught:
        model.odd.remote().result()

    assert "in odd" in "".join(caught.value.__notes__)


def test_an_argument_that_cannot_be_pickled_is_named(model: DeploymentHandle) -> None:
    with pytest.raises(
        RayServeException, match=r"args\[0\]\['a'\], of a call of deployment 'Model'"
    ):
        model.remote({"a": threading.Lock()}).result()
    with pytest.raises(RayServeException, match=r"kwargs\['number'\]\.lock, of .*; send plain"):
        model.remote(number=Locked()).result()


def test_a_response_inside_a_list_is_refused_with_advice_that_works(
    model: DeploymentHandle,
) -> None:
    items, response = model.options(stream=True).count.remote(2), model.remote(1)

    with pytest.raises(RayServeException, match=r"iterate over it, and pass the items$"):
        model.remote([items]).result()
    with pytest.raises(RayServeException, match=r"as an argument of its own, or await it first$"):
        model.remote([response]).result()

    assert model.remote([*items]).result() == [0, 1] * 3
    assert model.remote(response).result() == 9


def test_a_result_that_cannot_be_pickled_is_named(model: DeploymentHandle) -> None:
    with pytest.raises(RayServeException, match=r"result\['model'\]\[0\], of a call of .* 'M"):
        model.lock.remote().result()


@pytest.mark.reliability("P08")
def test_a_cancellation_reaches_user_code_and_frees_the_slot(model: DeploymentHandle) -> None:
    (replica,) = local_engine().routers[DeploymentID("Model", "model")].replicas
    before = model.seen.remote().result()
    response = model.wait.remote()
    wait_until(lambda: model.seen.remote().result()[len(before) :] == ["begun"])

    response.cancel()

    wait_until(lambda: model.seen.remote().result()[len(before) :] == ["begun", "cancelled"])
    wait_until(lambda: replica.slots.ongoing == 0)


def test_a_call_with_one_answer_has_no_task_in_the_process_of_the_server(
    model: DeploymentHandle,
) -> None:
    (replica,) = local_engine().routers[DeploymentID("Model", "model")].replicas
    begun = model.seen.remote().result().count("begun")
    responses = [model.wait.remote() for _ in range(3)]
    wait_until(lambda: model.seen.remote().result().count("begun") == begun + 3)

    running = [str(each.get_coro()) for each in asyncio.all_tasks(replica.loop)]

    assert not [each for each in running if "Replica._run" in each]
    for response in responses:
        response.cancel()
    wait_until(lambda: replica.slots.ongoing == 0)


def test_calls_that_cannot_be_sent_fail_one_after_the_other(caller: DeploymentHandle) -> None:
    handle: DeploymentHandle = serve.run(process_app.narrow, name="narrow", route_prefix=None)
    first = handle.wait.remote()
    wait_until(lambda: first._call.began_at > 0)
    # More than Python allows calls within calls: the end of one frees the slot of the next.
    unsendable = [handle.remote(threading.Lock()) for _ in range(sys.getrecursionlimit())]
    late = handle.pid.remote()

    first.cancel()

    for response in unsendable:
        with pytest.raises(RayServeException, match="cannot be sent"):
            response.result()
    assert late.result() != os.getpid()
    stopped = handle.wait.remote()
    wait_until(lambda: stopped._call.began_at > 0)
    serve.delete("narrow")
    with pytest.raises(ReplicaUnavailableError, match="was stopped before it answered"):
        stopped.result()


def test_a_generator_streams_and_ends_when_its_consumer_has_gone(model: DeploymentHandle) -> None:
    before = model.seen.remote().result().count("closed")
    streaming = model.options(stream=True)
    assert list(streaming.count.remote(100)) == list(range(100))

    endless = streaming.count.remote(10**9)
    next(endless)
    endless.cancel()

    wait_until(lambda: model.seen.remote().result().count("closed") == before + 2)


def test_calls_of_one_batch_run_together_in_the_child(model: DeploymentHandle) -> None:
    responses = [model.batched.remote(number) for number in range(4)]

    assert [each.result() for each in responses] == [(number, 4) for number in range(4)]


def test_the_router_knows_the_models_of_a_child(model: DeploymentHandle) -> None:
    (replica,) = local_engine().routers[DeploymentID("Model", "model")].replicas

    assert model.options(multiplexed_model_id="m").ask.remote().result() == "model m"

    wait_until(lambda: replica.model_ids == {"m"})


def test_records_of_a_child_come_through_the_handlers_of_the_server_in_order(
    model: DeploymentHandle, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    request_id = model.log.remote(40).result()

    def ours() -> list[logging.LogRecord]:
        return [each for each in caplog.records if each.name == "tests.process_app"]

    wait_until(lambda: len(ours()) == 81)
    *numbers, last = ours()
    assert [each.getMessage() for each in numbers] == [
        text for each in range(40) for text in (f"number {each}", f"number {each} in a thread")
    ]
    for each in ours():
        assert vars(each)["request_id"] == request_id
        assert vars(each)["deployment"] == "Model"
        assert each.processName == "Model#0"
        assert [each.process] == pids("Model", "model")
    assert vars(numbers[0])["of"] == [40]
    assert last.exc_text is not None
    assert "x" * 5_000 in last.exc_text
    out, err = "", ""

    def has_printed() -> bool:  # each stream in its own time
        nonlocal out, err
        output = capfd.readouterr()
        out, err = out + output.out, err + output.err
        return "no json" in out and "on stderr" in err

    wait_until(has_printed)
    [pid] = pids("Model", "model")
    whose = f"[Model#0 {pid}]"
    assert out == f'on stdout {whose}\n{{"already": "json"}}\n{{no json}} {whose}\n'
    found = [err.count(each) for each in ("number 7\n", f"on stderr {whose}\n", "\x1e")]
    assert found == [1, 1, 0]


def test_a_stall_in_a_child_is_logged_counted_and_listed(
    model: DeploymentHandle, caplog: pytest.LogCaptureFixture
) -> None:
    ours = logging.getLogger("ingress")
    for each in list(ours.filters):
        if getattr(each, "__name__", "") == "_is_no_stall":  # of tests/conftest.py
            ours.removeFilter(each)

    def stalls(request_id: str) -> list[serve.Stall]:
        return [each for each in serve.stalls() if request_id in each.request_ids]

    request_id = model.stall.remote().result()

    wait_until(lambda: stalls(request_id))
    (stall,) = stalls(request_id)
    assert (stall.deployment, stall.method) == ("Model", "Model.stall")
    assert stall.place.file == process_app.__file__
    (replica,) = serve.status().applications["model"].deployments["Model"].replicas
    assert [each.count for each in replica.stall_ms.values()] == [1]
    wait_until(lambda: [each for each in caplog.records if hasattr(each, "stall")])
    (record,) = [each for each in caplog.records if hasattr(each, "stall")]
    assert "The event loop of Model#0 stalled" in record.getMessage()
    assert vars(record)["request_id"] == request_id
    later = [model.stall.remote().result() for _ in range(2)]
    wait_until(lambda: stalls(later[1]))
    assert [len(stalls(each)) for each in (request_id, *later)] == [1, 1, 1]


def test_the_status_has_the_lanes_and_batches_of_a_child(model: DeploymentHandle) -> None:
    calls = [model.in_lane.remote() for _ in range(3)]

    def lane() -> Any:
        (replica,) = serve.status().applications["model"].deployments["Model"].replicas
        found = replica.lanes["db"]
        return found.ongoing, found.queued

    wait_until(lambda: lane() == (1, 2))
    model.end_lane.remote().result()
    for each in calls:
        each.result()
    wait_until(lambda: lane() == (0, 0))
    model.batched.remote(1).result()
    (counted,) = local_engine().routers[DeploymentID("Model", "model")].replicas
    wait_until(lambda: counted.host.counts().batches)  # type: ignore[attr-defined]


# Calls that a child makes.


def test_a_child_calls_another_deployment_for_its_request(caller: DeploymentHandle) -> None:
    ours, theirs = caller.pids.remote().result()
    assert [ours, theirs] == [*pids("Caller", "model"), *pids("Model", "model")]

    ours, theirs = caller.ids.remote().result()
    assert ours == theirs


def test_a_child_gets_the_items_and_errors_of_another_deployment(caller: DeploymentHandle) -> None:
    assert caller.total.remote(100).result() == sum(range(100))

    with pytest.raises(OddError, match="odd"):
        caller.odd.remote().result()


@pytest.mark.reliability("P08")
def test_a_cancellation_goes_through_a_child_to_the_deployment_it_calls(
    caller: DeploymentHandle,
) -> None:
    before = caller.seen.remote().result()
    response = caller.wait.remote()
    wait_until(lambda: caller.seen.remote().result()[len(before) :] == ["begun"])

    response.cancel()

    wait_until(lambda: caller.seen.remote().result()[len(before) :] == ["begun", "cancelled"])


def test_a_child_finds_deployments_and_applications_by_name(caller: DeploymentHandle) -> None:
    assert caller.found.remote("Model").result() == (3, 6)
    assert caller.of_app.remote("model").result() == caller.pids.remote().result()

    with pytest.raises(RayServeException, match=r"name='Absent'.*is unavailable"):
        caller.found.remote("Absent").result()
    with pytest.raises(RayServeException, match="Application 'absent' does not exist"):
        caller.of_app.remote("absent").result()


def test_handles_cross_in_arguments_and_results(
    caller: DeploymentHandle, model: DeploymentHandle
) -> None:
    assert caller.called_by.remote(model, 14).result() == 42
    assert caller.called_by.remote(model.options(method_name="variable"), "ABSENT").result() is None

    handle = caller.own.remote().result()

    assert handle == model
    assert handle.remote(14).result() == 42


def test_other_functions_of_a_server_are_refused_in_a_child(caller: DeploymentHandle) -> None:
    with pytest.raises(RuntimeError, match="this is the process of replica Caller#0, in which"):
        caller.status.remote().result()


@pytest.fixture(scope="module")
def ring(caller: DeploymentHandle) -> DeploymentHandle:
    """One of two deployments that call each other, with one slot each."""
    serve.run(process_app.rings, name="rings", route_prefix=None)
    return serve.get_deployment_handle("First", "rings")


@pytest.mark.reliability("P08")
@pytest.mark.parametrize("method", ["pass_on", "wait_later", "batched"])
def test_a_call_that_waits_for_itself_through_two_processes_fails(
    ring: DeploymentHandle, method: str
) -> None:
    with pytest.raises(RequestCycleError, match=r"'First'.*First -> Second -> First"):
        ring.options(method_name=method).remote(9).result(timeout_s=PATIENCE_S)

    assert ring.pass_on.remote(1).result(timeout_s=PATIENCE_S) == 0


def test_a_call_that_is_not_awaited_makes_no_cycle(ring: DeploymentHandle) -> None:
    assert ring.not_awaited.remote(9).result(timeout_s=PATIENCE_S) == 9
    assert ring.pass_on.remote(1).result(timeout_s=PATIENCE_S) == 0


# HTTP.


def test_requests_are_served_by_the_children(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with httpx.Client(base_url=url) as client:
        found = {client.get("/pid").json() for _ in range(40)}

    assert found == set(pids("Api", "api"))
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []


def test_a_request_has_its_context_and_a_def_endpoint_its_thread(url: str) -> None:
    headers = {"x-request-id": "r-1", "x-request-timeout-seconds": "20"}

    answer = httpx.get(f"{url}/thread/t?a=b", headers=headers)

    assert answer.headers["x-request-id"] == "r-1"
    told = answer.json()
    assert told.pop("thread").startswith("Api#")
    assert told.pop("host") in url
    assert told == {
        "id": "r-1",
        "route": "/thread/{name}",
        "has_deadline": True,
        "query": {"a": "b"},
    }


def test_bodies_larger_than_the_windows_cross_both_ways(url: str) -> None:
    body = os.urandom(1 << 20)

    assert httpx.post(f"{url}/size", content=body).json() == len(body)
    assert httpx.post(f"{url}/echo", content=body).content == body


@pytest.mark.reliability("P08")
def test_a_deadline_answers_408_and_stops_the_work(url: str) -> None:
    answer = httpx.get(f"{url}/wait", headers={"x-request-timeout-seconds": "0.2"})

    assert answer.status_code == 408
    router = local_engine().routers[DeploymentID("Api", "api")]
    wait_until(lambda: router.num_ongoing == 0)


def test_an_error_in_an_endpoint_is_500(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def of_route() -> list[str]:
        return [each.levelname for each in caplog.records if vars(each).get("route") == "/odd"]

    assert httpx.get(f"{url}/odd").status_code == 500
    wait_until(of_route)  # the record comes from the child, as others may
    assert of_route() == ["ERROR"]


def test_a_websocket_crosses_both_ways(url: str) -> None:
    with connect(f"{url.replace('http', 'ws')}/echo") as websocket:
        for text in ("a", "b"):
            websocket.send(text)
            answer = websocket.recv(timeout=20)
            assert isinstance(answer, str)
            assert answer.startswith(f"{text} from ")
            assert int(answer.split()[-1]) in pids("Api", "api")


# The option.


def test_isolation_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match='isolation must be "thread" or "process", got \'fork\''):
        serve.deployment(isolation="fork")  # type: ignore[call-overload]


def test_variables_that_are_no_text_are_refused() -> None:
    options = {"runtime_env": {"env_vars": {"MODEL_GPU": 1}}}

    with pytest.raises(ValueError, match="text, got 'MODEL_GPU': 1; write 'MODEL_GPU': '1'"):
        serve.deployment(isolation="process", ray_actor_options=options)
