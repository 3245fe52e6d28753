"""`serve.metrics`: counters, gauges and histograms of user code."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

import ingress as serve
from ingress.core.base.counters import MAX_ENDED, UserMetric, UserSeries
from ingress.observe.admin.exposition import exposition
from ingress.observe.admin.listener import as_json
from ingress.state.server import Snapshot
from ingress.telemetry.metrics.series import MAX_SERIES, collected, replica_ended, take
from tests.fakes import together
from tests.observe.test_admin import admin_port, serving
from tests.observe.test_metrics import samples, value
from tests.programs import run_python, write_module
from tests.servers import bind, get, served, wait_until

APP = """
import os
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

class Api:
    def __init__(self):
        self.calls = serve.metrics.Counter("my_calls", "Calls.", ("model", "route"))
        self.calls.set_default_tags({"model": "small"})
        self.size = serve.metrics.Gauge("my_size")
        self.time = serve.metrics.Histogram("my_time", boundaries=[1, 10])

    @app.get("/items/{number}")
    async def item(self, number: int):
        self.calls.inc()
        self.calls.inc(2, tags={"model": "large"})
        self.size.set(number)
        self.time.observe(number)
        return os.getpid()

hello = serve.deployment(serve.ingress(app)(Api)).bind()
far = serve.deployment(isolation="process")(serve.ingress(app)(Api)).bind()
"""

OF_REPLICA = {"application": "default", "deployment": "Api", "replica": "0"}
ROUTE = "/items/{number}"


def line_of(source: str) -> int:
    """Return the number of the first line of this file that has a text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if source in line)


def found(name: str) -> UserMetric:
    return next(each for each in collected() if each.name == name)


@pytest.mark.parametrize("app", ["hello", "far"])
def test_a_replicas_metrics_have_its_tags_and_rays_names(tmp_path: Path, app: str) -> None:
    write_module(tmp_path, "app", APP)
    with serving(tmp_path, "--admin", "127.0.0.1:0", app=app) as server:
        port = admin_port(server)
        for number in (0, 5, 50):
            get(server.port, f"/items/{number}")

        def scraped() -> Any:
            return samples(get(port, "/metrics").body.decode())

        calls = "ray_my_calls_total"
        small = {**OF_REPLICA, "model": "small", "route": ROUTE}
        wait_until(lambda: value(scraped(), "ray_my_size", **OF_REPLICA) == 50
                   if "ray_my_size" in str(scraped()) else False)  # fmt: skip
        now = scraped()
        assert value(now, calls, **small) == 3
        assert value(now, calls, **{**small, "model": "large"}) == 6
        assert value(now, "ray_my_time_bucket", **OF_REPLICA, le="1.0") == 1
        assert value(now, "ray_my_time_bucket", **OF_REPLICA, le="10.0") == 2
        assert value(now, "ray_my_time_sum", **OF_REPLICA) == 55
        if app == "far":  # a killed process keeps its counters, and has no gauges any more
            os.kill(int(get(server.port, "/items/1").body), signal.SIGKILL)
            wait_until(lambda: ("ray_my_size", tuple(OF_REPLICA.items())) not in scraped())
            assert value(scraped(), calls, **small) >= 3


def test_replicas_of_one_process_share_a_metric_and_differ_in_their_tags() -> None:
    @serve.deployment(num_replicas=2)
    class Shared:
        def __init__(self) -> None:
            self.calls = serve.metrics.Counter("shared_calls")

        async def __call__(self, request: Any) -> str:
            self.calls.inc()
            return "answer"

    port = served(bind(Shared))
    for _ in range(20):
        assert get(port, "/").status == 200
    series = found("shared_calls").series
    serve.shutdown()

    assert {tuple(each.labels[:2]) for each in series} == {("default", "Shared")}
    assert sum(each.value for each in series) == 20


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: serve.metrics.Counter(""), "Invalid metric name: ''"),
        (lambda: serve.metrics.Counter("my-calls"), "Invalid metric name: 'my-calls'"),
        (lambda: serve.metrics.Counter("serve_num_http_requests"), "Serve's own"),
        (lambda: serve.metrics.Counter("c1", tag_keys=("replica",)), "'replica' tag is reserved"),
        (lambda: serve.metrics.Counter("c2", tag_keys=("a-b",)), "Invalid tag key 'a-b'"),
        (lambda: serve.metrics.Counter("c3", tag_keys=("a", "a")), "must be different"),
        (lambda: serve.metrics.Histogram("h1"), "boundaries argument should be provided"),
        (lambda: serve.metrics.Histogram("h2", boundaries=[2, 1]), "ascending order"),
        (lambda: serve.metrics.Histogram("h4", boundaries=[float("nan")]), "ascending order"),
        (lambda: serve.metrics.Histogram("h5", boundaries=[float("inf")]), "positive numbers"),
        (lambda: serve.metrics.Histogram("h3", boundaries=[1], tag_keys=("le",)), "'le'"),
        (lambda: serve.metrics.Counter("c4").inc(0), "value must be >0, got 0"),
        (lambda: serve.metrics.Counter("c5", tag_keys=("a",)).inc(), "Missing value for tag key"),
        (lambda: serve.metrics.Gauge("g1").set(1, {"b": "c"}), "Unrecognized tag key 'b'"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()


def test_a_name_has_one_kind_and_one_set_of_tags_while_it_is_used() -> None:
    first = serve.metrics.Counter("clashing", tag_keys=("a",))
    here = f"at test_user_metrics.py:{line_of('    first = serve.metrics')}"
    for make, words in (
        (
            lambda: serve.metrics.Counter("clashing", tag_keys=("b",)),
            f"as a counter with the tags ['a'] {here}, and as a counter with the tags ['b'] at ",
        ),
        (
            lambda: serve.metrics.Gauge("clashing", tag_keys=("a",)),
            f"as a counter {here}, and as a gauge at ",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            make()
        assert str(error.value).startswith("metric 'clashing' is declared in two ways: ")
        assert str(error.value).endswith("one of them another name")
    first.inc(tags={"a": "x"})
    del first  # the application was replaced by a version with other tags

    serve.metrics.Counter("clashing", tag_keys=("b",)).inc(tags={"b": "y"})
    assert [each.labels[3:] for each in found("clashing").series] == [["y"]]


def test_two_metrics_that_would_show_one_name_are_refused_while_both_are_used() -> None:
    first: Any = serve.metrics.Counter("twice")
    with pytest.raises(ValueError, match="be shown as ray_twice_total; give one") as error:
        serve.metrics.Gauge("twice_total")
    assert str(error.value).startswith("the counter 'twice' at test_user_metrics.py:")
    first = serve.metrics.Histogram("thrice", boundaries=[1])
    for suffix in ("bucket", "sum", "count"):
        with pytest.raises(ValueError, match=f"ray_thrice_{suffix}; give one"):
            serve.metrics.Gauge(f"thrice_{suffix}")
    del first  # the application was replaced

    serve.metrics.Gauge("thrice_sum").set(3)
    serve.metrics.Gauge("twice_total").set(2)


class Declares:
    """Declares the metrics of a list, and counts in each."""

    def __init__(self, *metrics: tuple[str, dict[str, Any]]) -> None:
        self.made = [(kind, getattr(serve.metrics, kind)(**given)) for kind, given in metrics]

    async def __call__(self) -> None:
        for kind, metric in self.made:
            record = {"Counter": "inc", "Gauge": "set", "Histogram": "observe"}[kind]
            getattr(metric, record)(1.0, tags=dict.fromkeys(metric.info["tag_keys"], "x"))


def declared(name: str, isolation: Any, *metrics: tuple[str, dict[str, Any]]) -> Any:
    """Run a deployment that declares metrics, and return its handle."""
    deployment = serve.deployment(Declares).options(name=name, isolation=isolation)
    return serve.run(bind(deployment, *metrics), name=name, route_prefix=None)


def test_metrics_of_two_processes_that_differ_are_both_shown_or_it_is_said(
    shutdown: None, caplog: pytest.LogCaptureFixture
) -> None:
    small: dict[str, Any] = {"name": "seconds", "boundaries": [0.1, 1.0]}
    large: dict[str, Any] = {"name": "seconds", "boundaries": [1.0, 10.0, 100.0]}
    with caplog.at_level("WARNING", "ingress"):
        for handle in (
            declared("Small", "process", ("Histogram", small), ("Counter", {"name": "typed"})),
            declared("Large", "process", ("Histogram", large), ("Gauge", {"name": "typed"})),
            declared("A", "process", ("Counter", {"name": "tagged", "tag_keys": ("a",)})),
            declared("B", "thread", ("Counter", {"name": "tagged", "tag_keys": ("b", "c")})),
        ):
            handle.remote().result()
            handle.remote().result()
        wait_until(lambda: caplog.text.count("is declared in two ways") == 3)
    text = exposition(Snapshot(1.0, 1, metrics=collected())).decode()

    here = f"at test_user_metrics.py:{line_of('getattr(serve.metrics, kind)')}"
    assert (
        f"'seconds' is declared in two ways: as a histogram with the boundaries [1.0, 10.0, 100.0] "
        f"in deployment 'Large' {here}, and as a histogram with the boundaries [0.1, 1.0] in "
        f"deployment 'Small' {here}; give both the same boundaries, or one of them another name. "
        "/metrics shows both"
    ) in caplog.text
    assert (
        f"as a gauge in deployment 'Large' {here}, and as a counter in deployment 'Small' {here}; "
        "give one of them another name. /metrics shows only one of them"
    ) in caplog.text
    assert (
        f"with the tags ['a'] in deployment 'A' {here}, and as a counter with the tags ['b', 'c'] "
        f"in deployment 'B' {here}; give both the same tags"
    ) in caplog.text
    of = {
        name: {"application": name, "deployment": name, "replica": "0"}
        for name in ("Small", "Large", "A", "B")
    }
    shown = samples(text)
    assert value(shown, "ray_seconds_bucket", **of["Small"], le="0.1") == 0
    assert value(shown, "ray_seconds_bucket", **of["Large"], le="100.0") == 2
    assert value(shown, "ray_tagged_total", **of["A"], a="x") == 2
    assert value(shown, "ray_tagged_total", **of["B"], b="x", c="x") == 2
    assert value(shown, "ray_typed_total", **of["Small"]) == 2
    assert text.count("# TYPE ray_seconds histogram") == text.count("# TYPE ray_tagged_total") == 1
    assert "# TYPE ray_typed gauge" not in text


def test_of_two_series_with_the_same_labels_one_is_shown() -> None:
    def told(boundaries: list[float], tags: list[str]) -> UserMetric:
        series = UserSeries(["app", *["" for _ in tags]], 1, [1] * (len(boundaries) + 1))
        return UserMetric("same", "histogram", "", ["application", *tags], boundaries, [series])

    metrics = [told([1.0], []), told([2.0], []), told([1.0], ["a"])]
    text = exposition(Snapshot(1.0, 1, metrics=metrics)).decode()
    assert value(samples(text), "ray_same_count", application="app") == 2
    assert text.count("ray_same_count") == 1
    assert 'le="2.0"' not in text


def test_an_infinite_boundary_is_the_last_bucket_that_is_always_there() -> None:
    histogram = serve.metrics.Histogram("endless", boundaries=[1, float("inf")])
    histogram.observe(0.5)
    histogram.observe(9)
    text = exposition(Snapshot(1.0, 1, metrics=[found("endless")])).decode()

    buckets = [each for each in text.splitlines() if each.startswith("ray_endless_bucket")]
    assert [each.rpartition("le=")[2] for each in buckets] == ['"1.0"} 1', '"+Inf"} 2']


def test_a_tag_that_is_half_a_surrogate_pair_is_shown_escaped() -> None:
    counter = serve.metrics.Counter("by_text", tag_keys=("who",))
    counter.inc(tags={"who": "\ud800"})  # as json.loads reads it from a client's body
    snapshot = Snapshot(1.0, 1, metrics=[found("by_text")])

    shown = [dict(labels) for _, labels in samples(exposition(snapshot).decode())]
    assert {"who": r"\ud800"} in shown
    assert rb"\\ud800" in as_json(snapshot)


def test_replicas_that_have_ended_leave_their_counts_and_their_room() -> None:
    values = MAX_SERIES // 2

    def deploy() -> str:
        @serve.deployment
        class Busy:
            def __init__(self) -> None:
                counter = serve.metrics.Counter("by_replicas", tag_keys=("value",))
                for number in range(values):
                    counter.inc(tags={"value": str(number)})

            async def __call__(self) -> str:
                return serve.get_replica_context().replica_tag

        return str(serve.run(bind(Busy), route_prefix=None).remote().result(timeout_s=20))

    tags = [deploy() for _ in range(4)]

    series = found("by_replicas").series
    serve.shutdown()

    assert "other" not in {each.labels[3] for each in series}
    assert {each.labels[2] for each in series} == {*tags}
    assert sum(each.value for each in series) == 4 * values
    assert sum(each.value for each in found("by_replicas").series) == 4 * values


def test_children_that_have_ended_are_kept_as_other_counters_are_and_live_ones_always() -> None:
    def told(pid: int, count: float) -> list[UserMetric]:
        names = ["application", "deployment", "replica"]
        series = [UserSeries(["kept", "Model", str(pid)], count)]
        return [
            UserMetric("of_children", "counter", "", names, [], series),
            UserMetric("now_of_children", "gauge", "", names, [], series),
        ]

    for pid in range(MAX_ENDED + 50):
        source = ("kept", "Model", str(pid), pid)
        take(source, told(pid, 1))
        if pid:  # the first one lives on
            replica_ended(source)
    take(source, told(pid, 5))  # its last words come late

    counts = {each.labels[2]: each.value for each in found("of_children").series}
    assert len(counts) == MAX_ENDED + 1
    assert (counts["0"], counts[str(pid)]) == (1, 5)
    assert [each.labels[2] for each in found("now_of_children").series] == ["0"]


@pytest.mark.reliability("S12")
def test_a_tag_with_too_many_values_is_capped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter = serve.metrics.Counter("by_user", tag_keys=("user",))
    for number in range(MAX_SERIES + 50):
        counter.inc(tags={"user": str(number)})
    values = {each.labels[3]: each.value for each in found("by_user").series}

    assert len(values) == MAX_SERIES + 1
    assert values["other"] == 50
    assert [each.levelname for each in caplog.records if "by_user" in each.message] == ["WARNING"]


def test_a_metric_can_be_pickled() -> None:
    histogram = serve.metrics.Histogram("pickled", "d", [1.0, 2.0], ("a",))

    copied = pickle.loads(pickle.dumps(histogram))
    assert copied.info == histogram.info


def test_threads_lose_no_count(switch_interval: None) -> None:
    counter = serve.metrics.Counter("by_threads")

    def count() -> None:
        for _ in range(2000):
            counter.inc()

    together(*[count] * 4)

    assert [each.value for each in found("by_threads").series] == [8000]


def test_what_registers_outside_of_a_replica_is_not_shared(shutdown: None) -> None:
    """Replicas share metrics of `prometheus_client`; what runs beside them has its own."""

    @serve.deployment(num_replicas=2)
    class Counts:
        def __init__(self) -> None:
            self.counter = Counter("shared", "Counted by all replicas.", registry=registry)

        async def __call__(self) -> None:
            self.counter.inc()

    registry = CollectorRegistry()
    served(bind(Counts))
    Counter("mine", "Made by the test.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Counter("shared", "Made by the test.", registry=registry)


def test_a_replica_registers_collectors_that_do_not_describe_themselves(
    shutdown: None, tmp_path: Path
) -> None:
    @serve.deployment
    class Mine:
        def __call__(self) -> str:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, str(tmp_path))
            ProcessCollector(registry=registry)
            return str(generate_latest(registry), "ascii")

    handle = serve.run(Mine.bind(), route_prefix=None)
    assert "process_cpu_seconds_total" in handle.remote().result()


FIRST_IMPORT = """
import sys
from contextlib import asynccontextmanager
from fastapi import FastAPI
import ingress as serve
from ingress.testing import TestClient

@asynccontextmanager
async def lifespan(app):
    from prometheus_client import Counter
    app.state.seen = Counter("seen_by_lifespan", "x")
    yield

app = FastAPI(lifespan=lifespan)

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Counting:
    def __init__(self):
        from prometheus_client import Counter
        class Own(Counter): ...
        self.seen = [Counter("seen", "x"), Own("seen_by_own", "x")]

    @app.get("/")
    async def count(self):
        for each in [*self.seen, app.state.seen]:
            each.inc()

assert "prometheus_client" not in sys.modules
with TestClient(Counting.bind()) as client:
    for _ in range(6):
        assert client.get("/").status_code == 200
from prometheus_client import generate_latest
print(generate_latest().decode())
"""


def test_replicas_share_metrics_of_a_library_that_a_constructor_imports_first() -> None:
    ran = run_python("-c", FIRST_IMPORT)
    for name in ("seen", "seen_by_own", "seen_by_lifespan"):
        assert f"{name}_total 6.0" in ran.stdout, ran.stderr
