"""The Ray engine on a real cluster, as users run it from Python and the command line.

The scenarios compare it with the local engine. Skipped without Ray.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.sync.client import connect

import ingress as serve
from ingress.app.declaration.build import BuiltDeployment, build
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.engines.ray import check_installed
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestTimeoutError,
    UserCodeExit,
)
from ingress.schema import ApplicationStatus
from tests.engines import ray_app
from tests.engines.ray_processes import (
    PATIENCE_S,
    QUIET,
    cluster,
    ended,
    environment,
    free_port,
    running,
    wait_until,
)
from tests.servers import INGRESS, ROOT

pytest.importorskip("ray", exc_type=ImportError)
check_installed()

import ray  # noqa: E402
from ray.exceptions import ActorDiedError, RayTaskError  # noqa: E402
from ray.serve import exceptions as rays  # noqa: E402
from ray.serve._private.http_util import ASGIReceiveProxy  # noqa: E402
from ray.serve.context import _get_global_client  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from ingress.engines.ray.application import reference_to  # noqa: E402
from ingress.engines.ray.calls import translated  # noqa: E402
from ingress.engines.ray.messages import by_module  # noqa: E402
from ingress.engines.ray.replica import fetching_when_read  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Check nothing: Ray's own threads and sockets stay while this process is connected."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster(cpus=32) as address:
        yield address
        ray.shutdown()  # else Ray ends this process, a minute after its cluster


@dataclass(frozen=True)
class Served:
    """The application under /x, which runs during these tests."""

    url: str
    front: serve.DeploymentHandle
    child: serve.DeploymentHandle

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, trust_env=False, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def it(address: str) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RAY_ADDRESS", address)
        for name, value in QUIET.items():
            environ.setenv(name, value)
        port = free_port()
        serve.start(serve.HTTPOptions(port=port), engine="ray")
        front = serve.run(ray_app.app, name="x", route_prefix="/x")
        child = serve.get_deployment_handle("Child", "x")
        yield Served(f"http://127.0.0.1:{port}/x", front, child)
        serve.shutdown()


# Without a cluster


def built(application: serve.Application) -> list[BuiltDeployment]:
    return list(build(application, "x", acts_on_all=True).deployments)


def test_a_class_travels_as_its_modules_name_and_one_that_no_module_has_by_value() -> None:
    class Local: ...

    child, front = built(ray_app.app)
    (local,) = built(serve.deployment(Local).bind())

    assert reference_to(child)() is ray_app.Child.func_or_class
    assert reference_to(front)() is ray_app.front.func_or_class
    assert reference_to(local)() is Local  # no module has it, so no import finds it


def test_a_module_that_no_worker_has_is_named_with_what_brings_it() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"module 'nowhere\.at_all' cannot be imported on"
    ):
        by_module("nowhere.at_all", "Child")
    with pytest.raises(
        ImportError, match=r"module 'tests\.engines\.ray_app' of the workers has no"
    ):
        by_module("tests.engines.ray_app", "Absent")


DEPLOYMENT = DeploymentID("Child", "x")


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (
            rays.BackPressureError(3, 2),
            BackPressureError,
            r"num_queued_requests=3, max_queued_requests=2\) on 'Child'",
        ),
        (rays.DeploymentUnavailableError(DEPLOYMENT), DeploymentUnavailableError, "unavailable"),
        (rays.RequestCancelledError("id"), RequestCancelledError, "Request mine was cancelled"),
        (asyncio.CancelledError(), RequestCancelledError, "Request mine was cancelled"),
        (ActorDiedError(), ReplicaUnavailableError, "send the request again if that is safe"),
        (rays.RayServeException("what"), RayServeException, "^what$"),
        (RayTaskError("f", "trace", ray_app.Boom(1, "one")), ray_app.Boom, "one"),
        (ValueError("mine"), ValueError, "mine"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_ray_raises_is_one_of_our_exceptions(
    theirs: BaseException, ours: type[BaseException], text: str
) -> None:
    error = translated(theirs, RequestMetadata("mine", DEPLOYMENT))

    assert type(error) is ours
    assert re.search(text, str(error))


def test_rays_proxy_is_asked_for_messages_only_if_they_are_read() -> None:
    asked: list[Any] = []

    async def fetch(metadata: Any) -> bytes:
        asked.append(metadata)
        messages = [{"type": "http.request", "body": b"x"}, {"type": "http.disconnect"}]
        return bytes(pickle.dumps(messages))

    async def serve_one() -> list[str]:
        theirs = ASGIReceiveProxy({"type": "http"}, "metadata", fetch)
        receive = fetching_when_read(theirs)
        fetching = asyncio.create_task(theirs.fetch_until_disconnect())  # as Ray does
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asked
        messages = [await receive() for _ in range(3)]
        await fetching
        return [each["type"] for each in messages]

    assert asyncio.run(serve_one()) == ["http.request", "http.disconnect", "http.disconnect"]
    assert asked == ["metadata"]


# HTTP


def test_a_fastapi_class_answers_with_its_own_instance(it: Served) -> None:
    assert it.get("/").json() == ["Ada", 1, True]
    assert it.get("/sync").json() == "worker"
    assert it.get("/async").json() == "loop"


def test_a_guard_where_a_router_is_included_holds(it: Served) -> None:
    assert it.get("/guarded/secret").status_code == 401
    assert it.get("/guarded/secret", token="right").json() == "secret"


def test_request_id_route_and_application_are_known_in_the_replica_and_in_those_it_calls(
    it: Served,
) -> None:
    response = it.get("/items/7", **{"x-request-id": "mine"})

    mine, childs = response.json()
    assert mine == {"item": 7, "route": "/x/items/{item}", "request_id": "mine"}
    assert childs == {
        "request_id": "mine",
        "route": "/x/items/{item}",
        "app_name": "x",
        "deployment": "Child",
        "method_name": "context",
        "is_http_request": False,
        "replica_is_of": ["x", "Child"],
    }
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_a_request_id_outside_ascii_comes_back_once(it: Served) -> None:
    headers = [(b"x-request-id", "ü".encode())]
    response = httpx.get(it.url + "/sync", headers=headers, trust_env=False, timeout=PATIENCE_S)

    assert [value for name, value in response.headers.raw if name.lower() == b"x-request-id"] == [
        "ü".encode()
    ]


def test_an_error_of_a_child_is_caught_by_its_class_and_an_uncaught_error_is_a_500(
    it: Served,
) -> None:
    assert it.get("/fail").json() == "Boom 1"
    assert it.get("/error").status_code == 500
    assert it.get("/nothing").status_code == 404


def test_responses_are_arguments_and_deployments_are_found_by_name_inside_a_replica(
    it: Served,
) -> None:
    assert it.get("/sums").json() == 8
    assert it.get("/by-name").json() == 10


def test_a_stream_arrives_and_one_that_fails_never_ends_clean(it: Served) -> None:
    assert it.get("/lines").text == "0\n1\n2\n"
    with pytest.raises(httpx.RemoteProtocolError):
        it.get("/cut")


def test_a_body_arrives_whole(it: Served) -> None:
    body = b"x" * 3_000_000
    response = httpx.post(it.url + "/size", content=body, trust_env=False, timeout=PATIENCE_S)

    assert response.json() == len(body)


def test_a_websocket_echoes(it: Served) -> None:
    with connect(it.url.replace("http", "ws") + "/shout", proxy=None) as client:
        client.send("hey")
        assert client.recv(timeout=PATIENCE_S) == "HEY"


def test_a_client_that_leaves_ends_its_request_and_what_that_called(
    it: Served, tmp_path: Path
) -> None:
    mine, childs = tmp_path / "mine", tmp_path / "childs"

    with pytest.raises(httpx.ReadTimeout):
        httpx.get(
            it.url + "/wait",
            params={"mine": str(mine), "childs": str(childs)},
            timeout=1.0,
            trust_env=False,
        )

    wait_until(lambda: mine.exists() and childs.exists())


def test_a_request_whose_time_is_up_is_answered_408_and_so_is_told_what_it_called(
    it: Served, tmp_path: Path
) -> None:
    mine, childs = tmp_path / "mine", tmp_path / "childs"

    answer = it.get(f"/wait?mine={mine}&childs={childs}", **{"x-request-timeout-seconds": "0.5"})

    assert answer.status_code == 408
    assert re.fullmatch(r"Request \S+ timed out after [\d.]+s\.", answer.text)
    assert issubclass(RequestTimeoutError, RequestCancelledError)
    wait_until(lambda: mine.exists() and childs.exists())


def test_a_plain_function_answers_as_it_does_here(it: Served) -> None:
    serve.run(ray_app.plain_http.bind(), name="plain", route_prefix="/plain")
    url = it.url.removesuffix("/x") + "/plain"

    answers = {
        query: httpx.get(url + query, trust_env=False, timeout=PATIENCE_S)
        for query in ("", "?error=1", "?stream=1")
    }

    assert answers[""].json() == {"path": "/plain"}
    assert answers[""].headers["content-length"] == "17"
    assert (answers["?error=1"].status_code, answers["?error=1"].json()) == (418, {"detail": "tea"})
    assert answers["?stream=1"].text == "0\n1\n2\n"
    serve.delete("plain")


# Handles


def test_a_method_runs_where_it_does_here(it: Served) -> None:
    places = [
        getattr(it.child, name).remote().result()
        for name in ("on_loop", "sync", "in_thread", "in_lane")
    ]

    assert places == ["loop", "loop", "worker", "lane"]
    assert list(it.child.options(stream=True).places.remote(2)) == ["loop", "loop"]


def test_an_exception_is_the_users_own_with_the_replicas_traceback(it: Served) -> None:
    with pytest.raises(ray_app.Boom) as raised:
        it.child.fail.remote().result()

    assert raised.value.number == 1
    assert type(raised.value) is ray_app.Boom
    assert 'raise Boom(1, "one")' in "".join(raised.value.__notes__)


def test_an_exception_arrives_although_its_constructor_cannot_be_called_again(it: Served) -> None:
    with pytest.raises(ray_app.Odd, match="2 two") as raised:
        it.child.fail_oddly.remote().result()

    assert raised.value.number == 2
    assert isinstance(raised.value.__cause__, KeyError)
    assert 'raise Odd(2, text="two")' in "".join(raised.value.__notes__)


def test_an_error_that_is_no_exception_fails_only_its_request(it: Served) -> None:
    with pytest.raises(UserCodeExit) as raised:
        it.child.leave.remote().result()

    assert isinstance(raised.value.__cause__, SystemExit)
    assert it.child.remote(1).result() == 2


def test_methods_are_known_and_what_a_constructor_makes_one_and_private_ones_by_name(
    it: Served,
) -> None:
    assert not hasattr(it.child, "nothing")
    assert it.child.from_constructor.remote().result() == "from the constructor"
    assert it.front.options(method_name="_private").remote().result() == "private"
    with pytest.raises(RayServeException, match="Tried to call a method 'nothing'"):
        it.child.options(method_name="nothing").remote().result()


def test_calls_that_arrive_together_run_together_also_in_a_def(it: Served) -> None:
    # Of eight calls on two replicas, one replica gets at least four: a full batch.
    for method in ("together", "together_in_thread"):
        calls = [getattr(it.child, method).remote(number) for number in range(8)]
        place = "loop" if method == "together" else "worker"
        assert (4, place) in [tuple(call.result()) for call in calls]


def test_calls_for_a_model_go_to_the_replica_that_has_it(it: Served) -> None:
    handle = it.child.options(multiplexed_model_id="mine")
    handle.model.remote().result()
    time.sleep(1.0)  # Ray's routers are told with a delay

    found = {tuple(handle.model.remote().result()) for _ in range(10)}

    assert len(found) == 1


def test_batches_models_and_lanes_are_among_rays_metrics(it: Served) -> None:
    calls = [it.child.together.remote(number) for number in range(8)]
    assert len([call.result() for call in calls]) == 8
    for model in ("first", "second"):  # of which a replica keeps one
        it.child.options(multiplexed_model_id=model).model.remote().result()
    it.child.in_lane.remote().result()
    of_child = 'application="x",.*deployment="Child".*'
    expected = [
        rf'ray_serve_batches_processed\S*{{.*{of_child}function_name="together".*}} [1-9]',
        rf'ray_serve_batched_calls\S*{{.*{of_child}function_name="together".*}} [1-9]',
        rf"ray_serve_num_multiplexed_models{{.*{of_child}}} [1-9]",
        rf"ray_serve_multiplexed_models_load_counter\S*{{.*{of_child}}} [1-9]",
        rf'ray_serve_lane_calls{{.*{of_child}lane="db".*state="ongoing".*}} 0',
    ]

    def missing() -> list[str]:
        found = scraped()
        return [each for each in expected if not re.search(each, found)]

    wait_until(lambda: not missing())


def scraped() -> str:
    """Return the metrics that Prometheus would find on the cluster's node."""
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    return httpx.get(url, trust_env=False, timeout=PATIENCE_S).text


def test_a_cancelled_call_is_cancelled_where_it_runs_and_a_def_is_told(
    it: Served, tmp_path: Path
) -> None:
    for method, file in (("sleep", tmp_path / "slept"), ("work", tmp_path / "told")):
        call = getattr(it.child, method).remote(str(file))
        with pytest.raises(TimeoutError):
            call.result(timeout_s=1.0)
        call.cancel()
        with pytest.raises(RequestCancelledError):
            call.result()
        assert call.cancelled()
        wait_until(file.exists)


def test_an_abandoned_stream_is_closed_where_it_runs(it: Served, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    items = it.child.options(stream=True).items.remote(10**9, str(ended))
    assert next(items) == 0

    del items

    wait_until(ended.exists)


def test_arguments_and_results_are_copies_and_what_cannot_be_copied_is_refused(it: Served) -> None:
    given = [1]

    assert it.child.remote(given).result() == [1, 1]
    with pytest.raises(TypeError, match=r"argument 1 of Child\.__call__ is or contains a lock"):
        it.child.remote(threading.Lock()).result()
    with pytest.raises(TypeError, match=r"argument 'ended' of Child\.sleep is or .* a generator"):
        it.child.sleep.remote(ended=[(number for number in [1])]).result()
    answer = it.get("/forwards")
    assert "argument 1 of Child.__call__ is or contains a Request, which cannot" in answer.text
    with pytest.raises(RayServeException, match="`DeploymentResponse` is not serializable"):
        it.child.remote([it.child.remote(1)]).result()


def test_a_handle_crosses_to_another_process(it: Served) -> None:
    (same,) = it.child.remote([it.child]).result()[:1]

    assert same.deployment_id == it.child.deployment_id
    assert same.remote(2).result() == 4


def test_a_replica_that_dies_is_told_to_its_caller_and_made_again(it: Served) -> None:
    with pytest.raises(ReplicaUnavailableError, match="send the request again if that is safe"):
        it.child.die.remote().result()
    answer = it.get("/child-dies")
    assert answer.status_code == 503
    assert "died before it answered" in answer.text

    assert it.child.remote(2).result() == 4
    running = {"RUNNING": 2}
    wait_until(
        lambda: serve.status().applications["x"].deployments["Child"].replica_states == running
    )


def test_the_flags_are_in_the_workers_environment(it: Served) -> None:
    assert it.child.flags.remote().result() == {
        "INGRESS_ENGINE": "ray",
        "INGRESS_STALL_THRESHOLD_MS": "100",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL": "0",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    }


# Applications


@pytest.mark.parametrize("separate", ["0", "1"])
def test_a_class_made_in_a_function_travels_at_either_value_of_the_flags(
    it: Served, separate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi import FastAPI

    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")
    monkeypatch.setenv("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", separate)
    app = FastAPI()
    app.state.greeting = "hello"

    @serve.ingress(app)
    class Local:
        @app.get("/")
        def root(self) -> str:
            return str(app.state.greeting)

        def sync(self) -> str:
            return ray_app.where()

        async def on_loop(self) -> str:
            return ray_app.where()

    handle = serve.run(serve.deployment(Local).bind(), name="local", route_prefix="/local")

    url = it.url.removesuffix("/x") + "/local/"
    assert httpx.get(url, trust_env=False, timeout=PATIENCE_S).json() == "hello"
    assert handle.sync.remote().result() == "worker"
    assert handle.on_loop.remote().result() == "loop"
    serve.delete("local")


def test_an_application_that_is_deleted_is_gone_for_those_who_have_its_handle(it: Served) -> None:
    handle = serve.run(ray_app.plain_http.bind(), name="brief", route_prefix=None)
    assert "brief" in serve.status().applications

    serve.delete("brief")

    assert "brief" not in serve.status().applications
    with pytest.raises(DeploymentUnavailableError, match="is not deployed"):
        handle.remote().result()  # type: ignore[call-arg]
    with pytest.raises(RayServeException, match="Application 'brief' does not exist"):
        serve.get_app_handle("brief")
    with pytest.raises(KeyError, match="plain_http"):
        serve.get_deployment_handle("plain_http", "brief")


def test_a_constructor_that_fails_fails_the_start_which_is_listed_until_it_is_deleted(
    it: Served,
) -> None:
    message = (
        r"Deploying application 'fails' failed: deployment 'Fails' failed to start: "
        r"ValueError: no model$"
    )
    with pytest.raises(RuntimeError, match=message):
        serve.run(ray_app.fails.bind(), name="fails", route_prefix="/fails")

    assert serve.status().applications["fails"].status is ApplicationStatus.DEPLOY_FAILED
    handle = serve.get_app_handle("fails")
    with pytest.raises(DeploymentUnavailableError, match="because it failed to deploy"):
        handle.remote().result()
    serve.delete("fails")
    assert "fails" not in serve.status().applications


def test_an_argument_that_cannot_be_sent_is_named_before_anything_starts(it: Served) -> None:
    application = ray_app.front.bind(ray_app.child.bind(threading.Lock()), "Ada")

    with pytest.raises(
        TypeError,
        match=r"deployment 'Child': constructor argument 'factor' cannot be sent to a worker: "
        r"cannot pickle '_thread\.lock' object; make it in the constructor",
    ):
        serve.run(application, name="locked")


def test_ray_has_the_options_it_knows_and_those_of_ours_hold(it: Served) -> None:
    class Configured:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        async def reconfigure(self, user_config: Any) -> None:
            self.seen.append(user_config)

        @serve.method(lane="db")
        def place(self) -> str:
            return ray_app.where()

        async def configs(self) -> list[Any]:
            return self.seen

        def record_routing_stats(self) -> dict[str, Any]:
            return {"warm": True}

    deployment = serve.deployment(
        name="Renamed",
        autoscaling_config=serve.AutoscalingConfig(min_replicas=1, max_replicas=2),
        backpressure_config={"status_code": 429},
        graceful_shutdown_wait_loop_s=0.1,
        lanes={"db": 1},
        logging_config=serve.LoggingConfig(log_level="WARNING"),
        max_replicas_per_node=4,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": {"MINE": "1"}}},
        user_config={"level": [1, 2]},
    )(Configured)

    handle = serve.run(deployment.bind(), name="configured", route_prefix=None)

    assert handle.deployment_name == "Renamed"
    assert handle.configs.remote().result() == [{"level": [1, 2]}]
    assert handle.place.remote().result() == "lane"
    serve.delete("configured")


def test_what_ingress_build_wrote_is_deployed_by_ray_itself(it: Served, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    subprocess.run(
        [*INGRESS, "build", "tests.engines.ray_app:app", "--app-dir", str(ROOT), "-o", str(file)],
        env=environment(tmp_path),
        check=True,
    )
    config = yaml.safe_load(file.read_text())
    (application,) = config["applications"]
    application |= {"name": "built", "route_prefix": "/built"}
    for each in application["deployments"]:
        if each["name"] == "Front":
            each["user_config"] = {"level": 5}  # the file takes precedence over the code

    _get_global_client().deploy_apps(ServeDeploySchema(**config), _blocking=True)

    url = it.url.removesuffix("/x") + "/built"
    assert httpx.get(url + "/", trust_env=False, timeout=PATIENCE_S).json() == ["Ada", 5, True]
    assert httpx.get(url + "/sums", trust_env=False, timeout=PATIENCE_S).json() == 8
    assert httpx.get(url + "/guarded/secret", trust_env=False).status_code == 401
    serve.delete("built")


GRPC = """
import ingress as serve
from ray.serve.generated.serve_pb2 import UserDefinedResponse

@serve.deployment
class Greets:
    async def Method1(self, message):
        return UserDefinedResponse(greeting=f"hello {message.name}")

    def Streaming(self, message):
        for number in range(2):
            yield UserDefinedResponse(greeting=f"{number}")

app = Greets.bind()
"""


def test_grpc_options_of_a_file_reach_rays_proxies(tmp_path: Path) -> None:
    (tmp_path / "greets.py").write_text(GRPC)
    messages, services = (
        import_module(f"ray.serve.generated.serve_pb2{each}") for each in ("", "_grpc")
    )
    add = "ray.serve.generated.serve_pb2_grpc.add_UserDefinedServiceServicer_to_server"
    port = free_port()
    config = {
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "grpc_options": {"port": port, "grpc_servicer_functions": [add]},
        "applications": [{"name": "g", "import_path": "greets:app"}],
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    with (
        running(tmp_path, "serve.yaml"),
        import_module("grpc").insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = services.UserDefinedServiceStub(channel)
        asked = messages.UserDefinedMessage(name="you")
        to: dict[str, Any] = {"metadata": (("application", "g"),), "timeout": PATIENCE_S}
        assert stub.Method1(asked, **to).greeting == "hello you"
        assert [each.greeting for each in stub.Streaming(asked, **to)] == ["0", "1"]


def test_the_example_with_ray_tasks_answers_what_its_docstring_says(it: Served) -> None:
    example = import_module("app_examples.ray_parallel")
    serve.run(example.app, name="tasks", route_prefix="/tasks")

    answer = httpx.get(it.url.removesuffix("/x") + "/tasks", trust_env=False, timeout=PATIENCE_S)
    assert answer.text in (example.__doc__ or "")
    assert answer.json() == {"results": [1, 4, 9, 16]}
    serve.delete("tasks")


def test_another_engine_cannot_be_chosen_while_applications_run(it: Served) -> None:
    with pytest.raises(RuntimeError, match="engine='local' cannot be used while applications run"):
        serve.run(ray_app.plain_http.bind(), name="here", engine="local")


# The command line


def run_ingress(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ended([*INGRESS, "run", *arguments], folder, 120.0)


HELLO = ("app_examples.hello:hello", "--app-dir", str(ROOT))
APP = "import ingress as serve\n@serve.deployment\ndef f(): return 1\nhello = f.bind()\n"
SLOW = """
import asyncio
import ingress as serve

@serve.deployment
class Slow:
    async def __call__(self):
        await asyncio.sleep(3)
        return "answered"

app = Slow.bind()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_cluster_of_its_own_an_application_answers_what_it_has_begun_before_it_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    (tmp_path / "slow.py").write_text(SLOW)

    with ThreadPoolExecutor() as clients:
        with running(tmp_path, "slow:app", "--port", str(port), ends_by=number) as server:
            url = f"http://127.0.0.1:{port}"
            assert f"Application 'default' is ready at {url} on Ray" in server.output, server.output
            answer = clients.submit(httpx.get, url, trust_env=False, timeout=PATIENCE_S)
            time.sleep(1.0)  # it has reached the replica and runs for two more seconds

        assert answer.result().text == "answered"


STARTS = """
import ingress as serve

serve.start({"port": PORT, "request_timeout_s": 1})
"""


def test_serve_start_in_the_module_gives_the_options_that_the_command_line_does_not(
    tmp_path: Path,
) -> None:
    port = free_port()
    (tmp_path / "slow.py").write_text(STARTS.replace("PORT", str(port)) + SLOW)

    with running(tmp_path, "slow:app") as server:
        url = f"http://127.0.0.1:{port}"
        assert f"Application 'default' is ready at {url} on Ray" in server.output, server.output
        assert httpx.get(url, trust_env=False, timeout=PATIENCE_S).status_code == 408
        assert "has no effect" not in server.output


def test_an_application_ends_with_ctrl_c_and_the_cluster_that_was_there_stays(
    it: Served, address: str, tmp_path: Path
) -> None:
    with running(tmp_path, *HELLO, "--address", address, "--port", "8000") as server:
        url = it.url.removesuffix("/x")
        answer = httpx.get(url + "/sync?name=Ada", trust_env=False, timeout=PATIENCE_S)

    assert answer.json() == "hi, Ada"
    assert "port=8000 has no effect: Ray Serve runs on this cluster already" in server.output
    assert set(serve.status().applications) == {"x"}
    assert it.get("/").status_code == 200


@pytest.mark.parametrize(
    ("address_given", "message"),
    [
        ("127.0.0.1:1", "cannot connect to a Ray cluster at 127.0.0.1:1: Connection refused"),
        ("nowhere", "address 'nowhere' is not host:port of a Ray cluster"),
        ("ray://127.0.0.1:10001", "is for Ray Client, which cannot stream"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(
    tmp_path: Path, address_given: str, message: str
) -> None:
    (tmp_path / "app.py").write_text(APP)

    result = run_ingress(tmp_path, "app:hello", "--engine", "ray", "--address", address_given)

    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert result.returncode == 1


LACKING = """
import sys
import ingress as serve

if any("default_worker" in each for each in sys.argv):  # of Ray
    raise ModuleNotFoundError("No module named 'lacking'", name="lacking")

@serve.deployment
def f(): return 1

app = f.bind()
"""


def test_a_module_that_the_workers_lack_is_told_without_tracebacks(
    it: Served, address: str, tmp_path: Path
) -> None:
    (tmp_path / "lacking.py").write_text(LACKING)

    where = ("--engine", "ray", "--address", address, "--name", "lacking")
    result = run_ingress(tmp_path, "lacking:app", *where, "--route-prefix", "/lacking")

    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert "module 'lacking' cannot be imported on the workers; send the folder" in line
    assert "Traceback" not in result.stdout + result.stderr
    assert 'File "' not in result.stdout + result.stderr


def test_a_port_that_is_taken_is_one_line_before_a_cluster_is_started(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        result = run_ingress(tmp_path, "app:hello", "--engine", "ray", "--port", str(port))

    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: Failed to bind to address '127.0.0.1:{port}'")
    assert result.returncode == 1
