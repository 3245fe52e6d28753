"""`/-/healthz`, `/-/livez` and `/-/readyz`, and the time between SIGTERM and the drain."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.settings import WEDGED_AFTER_S
from ingress.testing import Latch
from tests.programs import INGRESS, environment, process, write_module
from tests.servers import PATIENCE_S, Answer, bind, get, is_ready, overview, served, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")


def probe(port: int, name: str) -> tuple[int, str]:
    answer = get(port, f"/-/{name}")
    return answer.status, answer.body.decode()


def test_probes_of_a_server_from_its_start_to_its_application() -> None:
    may_construct = Latch(timeout_s=PATIENCE_S)
    constructs = Latch(timeout_s=PATIENCE_S)

    @serve.deployment
    class Slow:
        async def __init__(self) -> None:  # type: ignore[misc]
            constructs.count_down()
            await may_construct

        async def __call__(self) -> str:
            return "up"

    serve.start({"port": 0})
    port = int(next(iter(serve.status().proxies)).rpartition(":")[2])
    assert probe(port, "livez") == (200, "alive")
    assert probe(port, "readyz") == (503, "No application runs.")
    starting = threading.Thread(target=serve.run, args=(bind(Slow),))
    starting.start()
    constructs.wait()
    assert probe(port, "livez") == (200, "alive")
    assert probe(port, "readyz") == (503, "Application 'default' is starting.")
    may_construct.count_down()
    starting.join(PATIENCE_S)
    assert probe(port, "readyz") == (200, "ready")
    assert probe(port, "healthz") == (200, "success")
    serve.delete("default")
    assert probe(port, "readyz")[0] == 503


def test_readiness_fails_while_a_deployment_has_no_replica_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WEDGED_AFTER_S, "0.2")
    may_turn = threading.Event()
    wedged = Latch(2, timeout_s=PATIENCE_S)

    @serve.deployment(max_ongoing_requests=1)
    class Model:
        async def wedge(self) -> None:
            wedged.count_down()
            may_turn.wait(PATIENCE_S)

    @serve.deployment
    class Gate:
        def __init__(self, model: Any) -> None: ...

        async def __call__(self) -> str:
            return "open"

    try:
        port = served(bind(Gate, bind(Model)))
        handle = serve.get_deployment_handle("Model", "default")
        stuck = [handle.wedge.remote() for _ in range(2)]
        wedged.wait()
        wait_until(lambda: probe(port, "readyz")[0] == 503)
        wait_until(lambda: "2 replicas are stuck" in overview("Model").message)
        assert probe(port, "readyz") == (503, "default: Model is unhealthy")
        assert probe(port, "healthz") == (503, "default: Model is unhealthy")
        assert probe(port, "livez") == (200, "alive")
        assert get(port, "/").status == 200
    finally:
        may_turn.set()
    for each in stuck:
        each.result(timeout_s=PATIENCE_S)
    wait_until(lambda: probe(port, "readyz") == (200, "ready"))


def test_probes_name_an_unhealthy_deployment_and_do_not_quote_user_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fails = threading.Event()

    @serve.deployment(health_check_period_s=0.05)
    class Model:
        def check_health(self) -> None:
            if fails.is_set():
                raise RuntimeError("cannot log in as root:hunter2")

        async def __call__(self) -> str:
            return "up"

    port = served(bind(Model))
    fails.set()
    seen = set()
    # First the replica is ill; then its successor is none, because its first check fails.
    while "root:hunter2" not in overview("Model").message:
        seen |= {probe(port, name) for name in ("healthz", "readyz")}

    unhealthy = (503, "default: Model is unhealthy")
    wait_until(lambda: probe(port, "readyz") == probe(port, "healthz") == unhealthy)
    without = (503, "default: Model has no replica that serves")
    assert seen <= {(200, "ready"), (200, "success"), unhealthy, without}
    assert "root:hunter2" in caplog.text


APP = """
import ingress as serve

@serve.deployment
class App:
    async def __call__(self):
        return "served"

app = App.bind()
"""


@pytest.mark.parametrize(
    "workers",
    [[], pytest.param(["--workers", "2"], marks=pytest.mark.slow)],
    ids=["one process", "workers"],
)
def test_requests_are_taken_for_the_drain_delay_while_readiness_fails(
    workers: list[str], tmp_path: Path
) -> None:
    write_module(tmp_path, "module", APP)
    command = [*INGRESS, "run", "module:app", "--port", "0", "--drain-delay", "60", *workers]
    with process(command, tmp_path, environment(tmp_path)) as server:
        wait_until(lambda: is_ready(server.port))
        server.wait_for("Application 'default' is ready")
        server.signal(signal.SIGTERM)
        answers: list[Answer] = []
        while not answers or answers[-1].status == 200:
            answers.append(get(server.port, "/-/readyz"))
        assert (answers[-1].status, answers[-1].body) == (503, b"This node is being drained.")
        for _ in range(5):
            answer = get(server.port, "/")
            assert (answer.status, answer.body) == (200, b"served")
        server.signal(signal.SIGTERM)
        server.wait()  # a second signal stops at once
