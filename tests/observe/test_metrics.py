"""`/metrics`: Ray's names and labels, sums, formats, the table, the board and the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, WebSocket
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_text
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.counters import (
    LATENCY_BUCKETS_MS,
    BatchChoice,
    BatchCount,
    LaneLoad,
    Latency,
    ReplicaCounts,
    UserMetric,
    UserSeries,
)
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine
from ingress.observe.admin.exposition import RouteLimit, exposition
from ingress.observe.admin.families import COUNTER, FAMILIES, HISTOGRAM
from ingress.observe.admin.listener import as_json
from ingress.state.applications import ApplicationSnapshot
from ingress.state.deployments import DeploymentSnapshot, HTTPCount, JobsSnapshot, ReplicaSnapshot
from ingress.state.server import ProcessSnapshot, Snapshot, merged, snapshot_of
from ingress.testing import Latch
from tests.observe.test_admin import admin_port, serving
from tests.observe.test_admin import folder as folder
from tests.programs import ROOT, write_module
from tests.servers import PATIENCE_S, Connection, bind, get, served, set_flags, wait_until

RAYS = json.loads((ROOT / "tests" / "ray_metrics.json").read_text())
"""The metrics of a real Ray Serve 2.60.0: type, labels and buckets of each, without node labels.

That server had no batch and no model: their buckets, and `ray_serve_batch_queue_length`, are those
of Ray's source, constants.py and batching.py.
"""

OF_RAYS_PARTS = {"actor_id", "handle"}
WITHOUT = {"ray_serve_num_router_requests_total": {"route"}}
"""Labels of Ray that a metric does not have here."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str, read: Any = read_text) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def latency(*values: float) -> Latency:
    made = Latency()
    for each in values:
        made.add(each)
    return made


NAMED = 'a "b" \\c'
REPLICA = {"application": NAMED, "deployment": "Model", "replica": "0"}
"""The labels of the first replica of `everything`."""


def everything(*, replicas: int = 1) -> Snapshot:
    """Return a snapshot with a sample of each metric."""
    counts = ReplicaCounts(
        routes={"/items/{id}": latency(0.5, 3.0, 700_000.0)},
        errors={"/items/{id}": {"ValueError": 1}},
        stalls={"Model.block": latency(250.0)},
        thread_waits={"": latency(1.5), "db": latency(2.5)},
        batches={"Model.predict": BatchCount(execution=latency(20.0, 30.0))},
        model_gets=9,
        model_times={"load": latency(5.0, 6.0, 7.0), "unload": latency(8.0)},
    )
    for size in (3, 4):
        counts.batches["Model.predict"].begin(size, size, 4, 9.0)
    counts.batches["Model.predict"].chosen = BatchChoice(32, 0.002, 0.05, "as measured")
    counts.routes["/items/{id}"].errors = counts.routes["/items/{id}"].cancelled = 1
    deployment = DeploymentSnapshot(
        "HEALTHY", "", "", replicas, 1, 10, 1, 2, 3, 4, 5, 6,
        [HTTPCount("/items/{id}", "GET", 200, latency(5.0)),
         HTTPCount("/items/{id}", "GET", 503, latency(6.0))],
        [ReplicaSnapshot(str(n), "server", 1, "RUNNING", 2, 100, 1, "", 0,
                         {"db": LaneLoad(4, 1, 2)}, ["a", "b"], {"Model.predict": 5}, counts)
         for n in range(replicas)],
        jobs=JobsSnapshot("q", 3, 1, 2, 1, 1, 9.0, {"done": 4, "dead": 1}),
        keys={"a": 5, "c": 2, "other": 9},
    )  # fmt: skip
    application = ApplicationSnapshot("RUNNING", "", "/", 0.0, {"Model": deployment})
    return Snapshot(
        1.0,
        1,
        processes=[ProcessSnapshot("server", 1, 1000, 1.5, 7, 0.25)],
        applications={NAMED: application},
        unrouted=[HTTPCount("", "GET", 404, latency(0.0))],
    )


def test_a_server_has_rays_names_with_its_counts(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0") as server:
        for path in ("/items/1", "/items/2", "/items/0", "/nowhere"):
            get(server.port, path)
        answer = get(admin_port(server), "/metrics")

    found = samples(answer.body.decode())
    route = {"application": "default", "route": "/items/{number}", "method": "GET"}
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert value(found, "ray_serve_num_http_requests_total", **route, status_code="200") == 2
    assert value(found, "ray_serve_http_request_latency_ms_count", **route, status_code="200") == 2
    assert value(found, "ray_serve_num_http_error_requests_total", **route, error_code="500") == 1
    names = {"application": "default", "deployment": "Api"}
    assert value(found, "ray_serve_num_router_requests_total", **names) == 4
    assert value(found, "ray_serve_application_status", application="default") == 6
    assert value(found, "ray_serve_deployment_status", **names) == 6
    by_name: dict[str, float] = {}
    for (name, _), number in found.items():
        by_name[name] = by_name.get(name, 0) + number
    assert by_name["ray_serve_deployment_request_counter_total"] == 3
    assert by_name["ray_serve_deployment_error_counter_total"] == 1
    assert by_name["ray_serve_deployment_processing_latency_ms_count"] == 4
    assert by_name["ray_serve_deployment_replica_starts_total"] == 2


def test_a_websocket_is_counted_under_101_and_is_no_error(shutdown: None) -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Socket:
        @app.websocket("/echo")
        async def echo(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text(await websocket.receive_text())

    counts = ("ray_serve_num_http_requests_total", "ray_serve_num_http_error_requests_total")

    def counted() -> list[tuple[dict[str, str], float]]:
        found = samples(exposition(snapshot_of(local_engine())).decode())
        return [
            (dict(labels), number)
            for (name, labels), number in found.items()
            if name in counts and ("method", "WS") in labels
        ]

    with connect(f"ws://127.0.0.1:{served(bind(Socket))}/echo") as client:
        client.send("hello")
        assert client.recv(PATIENCE_S) == "hello"
    wait_until(counted)
    ((labels, number),) = counted()
    assert (labels["route"], labels["status_code"], number) == ("/echo", "101", 1)


def test_a_batch_is_counted_with_its_size_the_time_it_waited_and_the_time_it_ran() -> None:
    @serve.deployment
    class Batched:
        @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.05, batch_size_fn=sum)
        async def double(self, numbers: list[int]) -> list[int]:
            return [2 * each for each in numbers]

        async def __call__(self, number: int) -> int:
            return int(await self.double(number))

    handle = serve.run(bind(Batched), route_prefix=None)
    assert handle.remote(4).result(timeout_s=20) == 8

    def counted() -> Samples:
        return samples(exposition(local_engine().snapshot()).decode())

    names = {"application": "default", "deployment": "Batched", "replica": "0"}
    of_batch, execution = {**names, "function_name": "double"}, "ray_serve_batch_execution_time_ms"
    wait_until(lambda: value(counted(), f"{execution}_count", **of_batch) == 1)
    found = counted()
    [replica] = local_engine().routers[DeploymentID("Batched", "default")].replicas
    assert not replica.context.batch_queues  # an empty queue is dropped
    serve.shutdown()

    assert value(found, "ingress_batched_calls_total", **of_batch) == 1
    assert value(found, "ray_serve_actual_batch_size_sum", **of_batch) == 4
    assert value(found, "ray_serve_batch_utilization_percent_sum", **of_batch) == 50
    assert value(found, "ray_serve_batch_wait_time_ms_count", **of_batch) == 1
    assert value(found, "ray_serve_batch_wait_time_ms_sum", **of_batch) >= 45
    assert value(found, f"{execution}_sum", **of_batch) < 20_000


BATCHES_AND_MODELS = """
import asyncio
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

class Model:
    def __init__(self):
        self.gate = asyncio.Event()

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0)
    async def held(self, numbers: list[int]):
        await self.gate.wait()
        return numbers

    @app.get("/held")
    async def of_batch(self):
        return await self.held(1)

    @app.get("/open")
    async def open(self):
        self.gate.set()

    @serve.multiplexed(max_num_models_per_replica=1)
    async def load(self, model_id: str):
        return model_id

    @app.get("/models/{name}")
    async def of_model(self, name: str):
        return await self.load(name)

here = serve.deployment(serve.ingress(app)(Model)).bind()
far = serve.deployment(isolation="process")(serve.ingress(app)(Model)).bind()
"""


@pytest.mark.parametrize("app", ["here", "far"])
def test_batches_and_models_have_rays_sizes_queues_and_times(tmp_path: Path, app: str) -> None:
    write_module(tmp_path, "app", BATCHES_AND_MODELS)
    replica = {"application": "default", "deployment": "Model", "replica": "0"}
    batch, prefix = {**replica, "function_name": "held"}, "ray_serve_multiplexed"
    with serving(tmp_path, "--admin", "127.0.0.1:0", app=app) as server:
        port = admin_port(server)

        def shows(name: str, number: float, **labels: str) -> bool:
            key = name, tuple(sorted(labels.items()))
            return samples(get(port, "/metrics").body.decode()).get(key) == number

        def wait_for(name: str, number: float, **labels: str) -> None:
            wait_until(lambda: shows(name, number, **labels))

        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(get, server.port, "/held")]
            wait_for("ray_serve_batches_processed_total", 1, **batch)
            answers += [threads.submit(get, server.port, "/held") for _ in range(3)]
            wait_for("ray_serve_batch_queue_length", 3, **batch)
            assert get(server.port, "/open").status == 200
            assert [each.result().body for each in answers] == [b"1"] * 4
        for name in ("a", "a", "b"):
            assert get(server.port, f"/models/{name}").body == b'"%s"' % name.encode()

        wait_for("ray_serve_batch_queue_length", 0, **batch)
        wait_for("ray_serve_actual_batch_size_sum", 4, **batch)
        wait_for(f"{prefix}_model_unload_latency_ms_count", 1, **replica)
        wait_for("ray_serve_registered_multiplexed_model_id", 1, **replica, model_id="b")
        found = samples(get(port, "/metrics").body.decode())

    assert value(found, "ray_serve_actual_batch_size_bucket", **batch, le="1.0") == 1
    assert value(found, "ray_serve_actual_batch_size_bucket", **batch, le="4.0") == 2
    assert value(found, "ray_serve_batch_utilization_percent_sum", **batch) == 25 + 75
    assert value(found, "ray_serve_batch_utilization_percent_bucket", **batch, le="30.0") == 1
    assert value(found, f"{prefix}_get_model_requests_counter_total", **replica) == 3
    assert value(found, f"{prefix}_models_load_counter_total", **replica) == 2
    assert value(found, f"{prefix}_models_unload_counter_total", **replica) == 1
    assert value(found, f"{prefix}_model_load_latency_ms_count", **replica) == 2
    assert not any(dict(labels).get("model_id") == "a" for _, labels in found)


def test_each_metric_is_shown_with_the_type_and_the_labels_of_the_table() -> None:
    text = exposition(everything()).decode()
    shown = {family.name: family for family in read_text(text)}

    for each in FAMILIES:
        family = shown.pop(each.name.removesuffix("_total") if each.kind == COUNTER else each.name)
        assert family.type == each.kind, each.name
        labels = {name for sample in family.samples for name in sample.labels}
        assert labels - {"le"} == {*each.labels}, each.name
    assert not shown


def buckets_of(found: Samples, name: str) -> list[str]:
    """Return the bounds of a histogram, in order, each once."""
    labels = [dict(each) for shown, each in found if shown == f"{name}_bucket"]
    return list(dict.fromkeys(each["le"] for each in labels))


def test_rays_metrics_have_rays_types_labels_and_buckets() -> None:
    shown = samples(exposition(everything()).decode())
    for each in FAMILIES:
        if each.name.startswith("ray_"):
            rays = RAYS[each.name]
            assert rays["type"] == each.kind, each.name
            absent = OF_RAYS_PARTS | WITHOUT.get(each.name, set())
            assert {*rays["labels"]} - absent == {*each.labels}, each.name
            if each.kind == HISTOGRAM:
                assert rays["buckets"] == buckets_of(shown, each.name), each.name


def test_open_metrics_says_the_same() -> None:
    text = exposition(everything()).decode()
    opened = exposition(everything(), is_open_metrics=True).decode()

    assert opened.endswith("# EOF\n")
    assert samples(opened, read_open) == samples(text)
    assert "# TYPE ray_serve_num_http_requests counter" in opened
    assert "# TYPE ray_serve_num_http_requests_total counter" in text


def test_open_metrics_is_for_those_that_ask_for_it(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0") as server:
        get(server.port, "/items/1")
        accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n"
        answer = get(admin_port(server), "/metrics", accept)

    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert samples(answer.body.decode(), read_open)


def test_replicas_of_one_number_in_several_workers_are_summed() -> None:
    snapshot = everything()
    [application] = snapshot.applications.values()
    [replica] = application.deployments["Model"].replicas
    application.deployments["Model"].replicas.append(replica)
    application.deployments["Model"].ended["0"] = replica.counts
    found = samples(exposition(snapshot).decode())
    times = "ray_serve_deployment_processing_latency_ms"

    assert value(found, "ray_serve_replica_processing_queries", **REPLICA) == 4
    assert value(found, f"{times}_count", **REPLICA, route="/items/{id}") == 9
    assert value(found, f"{times}_bucket", **REPLICA, route="/items/{id}", le="1.0") == 3
    assert value(found, "ray_serve_deployment_replica_starts_total", **REPLICA) == 3


def test_functions_of_one_name_in_two_classes_are_one_series() -> None:
    snapshot = everything()
    [replica] = snapshot.applications[NAMED].deployments["Model"].replicas
    replica.counts.batches["Other.predict"] = replica.counts.batches["Model.predict"].copy()
    text = exposition(snapshot)

    assert len(labels_of(text)) == len({*labels_of(text)})
    of_batch = {**REPLICA, "function_name": "predict"}
    assert value(samples(text.decode()), "ray_serve_batches_processed_total", **of_batch) == 4


def test_at_most_100_models_of_a_replica_are_shown() -> None:
    snapshot = everything()
    [replica] = snapshot.applications[NAMED].deployments["Model"].replicas
    replica.models = [f"model{number}" for number in range(150)]
    found = samples(exposition(snapshot).decode())

    shown = [name for name, _ in found if name == "ray_serve_registered_multiplexed_model_id"]
    assert len(shown) == 100
    assert value(found, "ray_serve_num_multiplexed_models", **REPLICA) == 150


def test_the_keys_with_the_most_calls_are_named_as_the_busiest_routes_are() -> None:
    snapshot = everything()
    snapshot.applications[NAMED].deployments["Model"].keys["b"] = 7
    found = samples(exposition(RouteLimit(2).limited(snapshot)).decode())

    queued = {
        dict(labels)["key"]: number
        for (name, labels), number in found.items()
        if name == "ingress_queued_by_key"
    }
    assert queued == {"other": 16, "b": 7}


def labels_of(text: bytes) -> list[str]:
    """Return the name and the labels of each sample; Prometheus refuses or drops a second one."""
    lines = text.decode().splitlines()
    return [each.rpartition(" ")[0] for each in lines if not each.startswith("#")]


def test_no_sample_is_written_twice_although_the_ingress_had_another_name_before() -> None:
    left, now = everything(), everything()
    [application] = left.applications.values()
    application.deployments = {"Old": application.deployments["Model"]}
    snapshot = merged([now], left)
    [application] = snapshot.applications.values()
    application.deployments["Old"] = everything().applications[NAMED].deployments["Model"]
    text = exposition(snapshot)

    assert len(labels_of(text)) == len({*labels_of(text)})
    names = {"application": NAMED, "route": "/items/{id}", "method": "GET"}
    found = samples(text.decode())
    assert value(found, "ray_serve_num_http_requests_total", **names, status_code="200") == 2
    errors = "ray_serve_num_deployment_http_error_requests_total"
    for deployment in ("Model", "Old"):
        assert value(found, errors, **names, deployment=deployment, error_code="503") == 1


def test_metrics_of_two_processes_that_show_one_name_are_written_once() -> None:
    metrics = [
        UserMetric("foo", "counter", "", [], [], [UserSeries([], 1)]),
        UserMetric("foo_total", "gauge", "", [], [], [UserSeries([], 7)]),
        UserMetric("foo_count", "gauge", "", [], [], [UserSeries([], 7)]),
    ]
    for is_open in (False, True):
        text = exposition(Snapshot(1.0, 1, metrics=metrics), is_open_metrics=is_open)
        assert labels_of(text).count("ray_foo_total{}") == 1
        assert labels_of(text).count("ray_foo_count{}") == 1


def test_half_a_surrogate_pair_is_shown_escaped() -> None:
    snapshot = everything()
    snapshot.unrouted[0].route = "/\ud800"
    snapshot.metrics = [UserMetric("mine", "gauge", "of \ud801", [], [], [UserSeries([], 7)])]
    [application] = snapshot.applications.values()
    application.message = "failed: \ud802"

    found = samples(exposition(snapshot).decode())
    labels = {"route": r"/\ud800", "method": "GET", "status_code": "404"}
    assert value(found, "ray_serve_num_http_requests_total", **labels) == 1
    assert value(found, "ray_mine") == 7
    shown = json.loads(as_json(snapshot))
    assert [each["message"] for each in shown["applications"].values()] == ["failed: ?"]
    assert shown["metrics"][0]["series"][0]["value"] == 7


def test_a_users_metric_is_spelled_as_ray_spells_it() -> None:
    names = ["application", "deployment", "replica", "model"]
    of_replica = ["default", "Model", "0"]
    snapshot = Snapshot(
        1.0,
        1,
        metrics=[
            UserMetric("my_counter", "counter", "mine", names, [],
                       [UserSeries([*of_replica, "m"], 2)]),
            UserMetric("my_histogram", "histogram", "a\nb", names, [1.0, 10.0],
                       [UserSeries([*of_replica, ""], 12.5, [1, 0, 1])]),
            UserMetric("serve_application_status", "gauge", "", [], [], [UserSeries([], 9)]),
        ],
    )  # fmt: skip
    for read in (read_text, read_open):
        text = exposition(snapshot, is_open_metrics=read is read_open).decode()
        found = samples(text, read)
        mine = {"application": "default", "deployment": "Model", "replica": "0"}
        assert value(found, "ray_my_counter_total", **mine, model="m") == 2
        assert value(found, "ray_my_histogram_bucket", **mine, le="10.0") == 1
        assert value(found, "ray_my_histogram_sum", **mine) == 12.5
        assert not any(name == "ray_serve_application_status" for name, _ in found)
    assert {*RAYS["ray_my_counter_total"]["labels"]} == {*names}


def test_1000_replicas_are_all_written(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = everything(replicas=1000)
    usual = ReplicaCounts(routes={"/items/{id}": latency(0.5, 3.0)})
    for replica in snapshot.applications[NAMED].deployments["Model"].replicas:
        replica.counts, replica.lanes, replica.models = usual, {}, []
    begin = thread_time()
    text = exposition(snapshot)
    took_ms = (thread_time() - begin) * 1e3
    with capsys.disabled():
        print(f"\n/metrics of 1,000 replicas: {took_ms:.0f} ms, {len(text) / 1e6:.1f} MB")

    lines = text.count(b"\nray_serve_deployment_processing_latency_ms_bucket")
    assert lines == 1000 * (len(LATENCY_BUCKETS_MS) + 1)


# The page, the board and the alerts.


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \| (.*?) \|$", page, re.MULTILINE)

    assert sorted(rows) == sorted(
        (
            each.name,
            each.kind,
            ", ".join(f"`{label}`" for label in each.labels),
            each.description,
            "yes" if each.name.startswith("ray_") else "ingress only",
        )
        for each in FAMILIES
    )


def expressions() -> Iterator[str]:
    """Yield the queries of the alerts and of the board, with its variables set."""
    rules = yaml.safe_load((ROOT / "docs" / "metrics" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    board = json.loads((ROOT / "docs" / "metrics" / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            query: str = target["expr"].replace("$__rate_interval", "1m")
            yield query.replace("$application", ".*")


def test_each_query_is_about_metrics_and_labels_that_there_are() -> None:
    known: dict[str, set[str]] = {}
    for each in FAMILIES:
        suffixes = ("_bucket", "_sum", "_count") if each.kind == HISTOGRAM else ("",)
        for suffix in suffixes:
            known[each.name + suffix] = {*each.labels, *(["le"] if suffix == "_bucket" else [])}
    for query in expressions():
        names = re.findall(r"(?:ray_serve|ingress)_\w+", query)
        grouped = {
            word for group in re.findall(r"by \(([^)]*)\)", query) for word in group.split(", ")
        }
        assert names, query
        for name in names:
            assert grouped <= known[name], query


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_accepts_the_alerts_the_queries_and_the_text(tmp_path: Path) -> None:
    rules = [{"record": f"query{n}", "expr": each} for n, each in enumerate(expressions())]
    queries = tmp_path / "queries.yml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for path in (ROOT / "docs" / "metrics" / "alerts.yml", queries):
        checked = subprocess.run(
            ["promtool", "check", "rules", path], capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr
    text = exposition(everything())
    linted = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert b"error while linting" not in linted.stderr  # what it says of style is about Ray's names


@pytest.mark.parametrize("separate", ["0", "1"])
@pytest.mark.parametrize("prefix", ["/", "/shop"])
def test_a_request_that_no_endpoint_saw_has_its_route(
    shutdown: None, monkeypatch: pytest.MonkeyPatch, prefix: str, separate: str
) -> None:
    set_flags(monkeypatch, separate, "1")
    app, begun, latch = FastAPI(), Latch(), Latch()

    @serve.deployment(max_ongoing_requests=1, max_queued_requests=2)
    @serve.ingress(app)
    class Api:
        @app.get("/items/{number}")
        def item(self, number: int) -> int:
            begun.count_down()
            latch.wait()
            return number

    port = served(bind(Api), route_prefix=prefix)
    target, route = (f"{prefix.rstrip('/')}/items/{each}" for each in ("7", "{number}"))

    def of_deployment() -> DeploymentSnapshot:
        return snapshot_of(local_engine()).applications["default"].deployments["Api"]

    def counts() -> dict[tuple[str, int], int]:
        return {(each.route, each.status): each.latency.count for each in of_deployment().http}

    request = f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with Connection(port) as first, Connection(port) as second, Connection(port) as third:
        first.send(request)
        begun.wait()
        second.send(request)
        third.send(request)
        wait_until(lambda: of_deployment().queued == 2)
        assert get(port, target).status == 503  # refused before there is a call
    wait_until(lambda: counts().get((route, 499), 0) >= 2)
    latch.count_down()  # on the server's own loop, a request lasts as long as its thread
    wait_until(lambda: counts() == {(route, 503): 1, (route, 499): 3})


MANY_ROUTES = """
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

class Api:
    pass

def add(number):
    @app.get(f"/{number}")
    def one():
        return 1 / (number % 5)

for number in range(40):
    add(number)
api = serve.deployment(num_replicas=8)(serve.ingress(app)(Api)).bind()
"""
COUNTS = (
    "ray_serve_num_http_requests_total",
    "ray_serve_deployment_request_counter_total",
    "ray_serve_deployment_error_counter_total",
)


def by_route(text: str, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for (sample, labels), number in samples(text).items():
        if sample == name:
            route = dict(labels)["route"]
            found[route] = found.get(route, 0) + number
    return found


def scraped(port: int, total: int) -> str:
    """Return the metrics once they count so many requests."""
    text = ""

    def counts_them() -> bool:
        nonlocal text
        text = get(port, "/metrics").body.decode()
        return sum(by_route(text, COUNTS[0]).values()) == total

    wait_until(counts_them)
    return text


def test_the_busiest_routes_are_named_and_the_others_are_one_which_never_decreases(
    tmp_path: Path,
) -> None:
    write_module(tmp_path, "app", MANY_ROUTES)
    more = ("--admin", "127.0.0.1:0", "--metrics-routes", "3")
    with serving(tmp_path, *more, app="api") as server:
        port = admin_port(server)
        for route in [*range(30), 7, 7, 7, 9, 9, 20]:
            get(server.port, f"/{route}")
        # Those who ask within `FRESH_S` of each other see one snapshot.
        first = scraped(port, total=36)
        for route in [*range(40)] * 3:
            get(server.port, f"/{route}")
        second = scraped(port, total=156)
    assert by_route(first, COUNTS[0]) == {"/7": 4, "/9": 3, "/20": 2, "other": 27}
    assert by_route(second, COUNTS[0]) == {"/7": 7, "/9": 6, "/20": 5, "other": 138}
    assert by_route(second, COUNTS[1]) == {"/7": 7, "/9": 6, "/20": 0, "other": 112}
    assert by_route(second, COUNTS[2]) == {"/20": 5, "other": 26}


def test_fewer_routes_than_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGRESS_METRICS_ROUTES", "-3")
    with pytest.raises(ValueError, match=r"INGRESS_METRICS_ROUTES must be an integer ≥ 1, got '-3"):
        serve.start(admin="127.0.0.1:0")
