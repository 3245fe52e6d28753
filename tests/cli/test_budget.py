"""`inspection.budget`: cores divided among native threads, and `ingress run` with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

import ingress as serve
from ingress.app.declaration.build import build
from ingress.app.declaration.declaration import Application
from ingress.core.base.settings import NATIVE_THREADS, SYNC_IN_THREADPOOL, Settings
from ingress.observe.inspection.budget import ThreadBudget, available_cores, thread_budget
from tests.servers import environment, get, ingress_run, write_module


class Async:
    def __init__(self, *others: Any) -> None: ...

    async def __call__(self) -> None: ...


class Sync:
    def __call__(self) -> None: ...


class Serial:
    @serve.method(execution="serial")
    def __call__(self) -> None: ...


class Batched:
    @serve.batch(max_concurrent_batches=2)
    def __call__(self, items: list[int]) -> list[int]:
        return items


fastapi_app = FastAPI()


@serve.ingress(fastapi_app)
class Endpoints:
    @fastapi_app.get("/")
    def endpoint(self) -> None: ...

    @fastapi_app.get("/async")
    async def async_endpoint(self) -> None: ...


def bound(cls: type, **options: Any) -> Application:
    return deployed(cls, **options).bind()


def deployed(cls: type, **options: Any) -> serve.Deployment:
    return serve.deployment(**options)(cls)


def budget(
    application: Application, environ: Any = (), *, cores: float = 16, processes: int = 1
) -> ThreadBudget:
    settings = Settings.from_environment(dict(environ))
    return thread_budget(build(application, "default"), settings, processes=processes, cores=cores)


# Number of threads.


@pytest.mark.parametrize(
    ("application", "threads"),
    [
        pytest.param(bound(Async), 16, id="one-loop"),
        pytest.param(bound(Async, num_replicas=4), 4, id="a-loop-a-replica"),
        pytest.param(bound(Async, num_replicas=40), 1, id="never-none"),
        pytest.param(bound(Sync), 16, id="def-on-the-loop"),
        pytest.param(bound(Endpoints), 1, id="a-thread-a-call"),
        pytest.param(bound(Endpoints, max_ongoing_requests=1, num_replicas=2), 1, id="few-calls"),
        pytest.param(bound(Endpoints, lanes={"cpu": 2}), 8, id="lane"),
        pytest.param(bound(Endpoints, lanes={"cpu": 2, "db": 2}, num_replicas=2), 2, id="lanes"),
        pytest.param(bound(Serial), 16, id="serial"),
        pytest.param(bound(Serial, lanes={"cpu": 3}), 4, id="serial-and-lane"),
        pytest.param(bound(Batched), 8, id="batches"),
        pytest.param(bound(Async, ray_actor_options={"num_cpus": 4}), 4, id="num_cpus"),
        pytest.param(bound(Async, ray_actor_options={"num_cpus": 0.5}), 1, id="half-a-core"),
        pytest.param(bound(Async, ray_actor_options={"num_cpus": 64}), 16, id="no-such-cores"),
        pytest.param(
            bound(Endpoints, ray_actor_options={"num_cpus": 4}, lanes={"cpu": 2}), 2, id="of-a-lane"
        ),
    ],
)
def test_each_call_has_its_share_of_the_cores(application: Application, threads: int) -> None:
    assert budget(application).threads == threads


@pytest.mark.parametrize(
    ("cls", "options", "threads"),
    [
        (Sync, {"environ": {SYNC_IN_THREADPOOL: "1"}}, 1),
        (Async, {"processes": 4}, 4),
        (Async, {"cores": 1.5}, 1),
    ],
    ids=["a def where the flag puts it in threads", "worker processes", "a part of a core"],
)
def test_flag_processes_and_whole_cores_count(cls: type, options: Any, threads: int) -> None:
    assert budget(bound(cls), **options).threads == threads


def test_deployments_divide_what_is_left_by_those_who_say_what_they_need() -> None:
    model = deployed(Async, name="Model", ray_actor_options={"num_cpus": 6}, num_replicas=2)
    gateway = deployed(Async, name="Gateway").bind(model.bind())
    shares = {share.deployment: share.cores for share in budget(gateway).shares}

    assert shares == {"Model": 6, "Gateway": 4}
    assert budget(gateway).threads == 4, "one environment: the least of them"


def test_a_deployment_that_needs_no_core_takes_none() -> None:
    model = deployed(Async, name="Model").bind()
    made = budget(deployed(Async, name="Gateway", ray_actor_options={"num_cpus": 0}).bind(model))

    assert made.threads == 16
    assert made.product == "1 replica of Model x 1 call x 16 native threads"


def test_the_product_is_what_is_multiplied() -> None:
    model = deployed(Serial, name="Model", num_replicas=2).bind()
    made = budget(deployed(Async, name="Gateway").bind(model))

    assert made.product == (
        "(2 replicas of Model x 1 call + 1 replica of Gateway x 1 call) x 5 native threads"
    )
    assert made.runnable == 15
    assert made.summary == f"16 cores: {made.product} (OMP_NUM_THREADS=5, set by `ingress run`)"


# Environment variables.


def test_all_variables_are_set_to_the_same_number() -> None:
    assert budget(bound(Serial, num_replicas=4)).variables == dict.fromkeys(NATIVE_THREADS, "4")


def test_variables_that_are_set_stay_and_so_do_those_that_default_to_them() -> None:
    made = budget(bound(Async), {"OMP_NUM_THREADS": "3"})

    assert made.threads == 3
    assert made.summary.endswith("x 3 native threads (OMP_NUM_THREADS=3)")
    assert made.variables == {"VECLIB_MAXIMUM_THREADS": "16"}


def test_one_that_nothing_follows_is_left_alone() -> None:
    variables = budget(bound(Async), {"MKL_NUM_THREADS": "3"}).variables
    assert variables.keys() == {*NATIVE_THREADS} - {"MKL_NUM_THREADS"}


@pytest.mark.parametrize("value", ["many", "0", "4,2"])
def test_a_value_that_is_no_number_is_the_librarys_to_read(value: str) -> None:
    made = budget(bound(Async), {"OMP_NUM_THREADS": value})

    assert made.threads == 16
    assert "OMP_NUM_THREADS" not in made.variables


def test_too_many_threads_are_warned_of_with_the_product_and_the_fix() -> None:
    assert budget(bound(Endpoints, lanes={"cpu": 8}), {"OMP_NUM_THREADS": "16"}).warning == (
        "1 replica of Endpoints x 8 calls x 16 native threads (OMP_NUM_THREADS) are 128 runnable "
        "threads on 16 cores; set OMP_NUM_THREADS=2, or leave it to `ingress run`"
    )


@pytest.mark.parametrize("threads", ["", "1", "2"])
def test_as_many_as_the_cores_are_worth_is_no_reason_to_warn(threads: str) -> None:
    assert budget(bound(Endpoints, lanes={"cpu": 8}), {"OMP_NUM_THREADS": threads}).warning is None


def test_more_calls_than_cores_is_no_reason_to_warn_if_each_has_one_thread() -> None:
    assert budget(bound(Endpoints, lanes={"db": 50})).warning is None


# The cores.


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


MINE = len(os.sched_getaffinity(0))


CGROUP, V1, V2 = "proc/self/cgroup", "sys/fs/cgroup/cpu/cpu.cfs_", "sys/fs/cgroup/cpu.max"
OF_THE_HOST = {
    CGROUP: "5:memory:/\n4:cpu,cpuacct:/docker/of-the-host\n0::/",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "75000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
}
NO_QUOTA = {CGROUP: "4:cpu:/", f"{V1}quota_us": "-1", f"{V1}period_us": "100000"}
IN_A_POD = {
    CGROUP: "0::/pod/box",
    "sys/fs/cgroup/pod/cpu.max": "25000 100000",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, MINE, id="no-cgroups"),
        pytest.param({CGROUP: "0::/", V2: "50000 100000"}, 0.5, id="v2"),
        pytest.param({CGROUP: "0::/", V2: "max 100000"}, MINE, id="no-limit"),
        pytest.param(IN_A_POD, 0.25, id="v2-parent"),
        pytest.param(OF_THE_HOST, 0.75, id="v1-in-a-container"),
        pytest.param(NO_QUOTA, MINE, id="v1-no-limit"),
        pytest.param({CGROUP: "0::/", V2: "9900000 100000"}, min(MINE, 99), id="more-than-are"),
    ],
)
def test_the_cores_are_those_the_process_may_use(
    files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    assert available_cores(tree(tmp_path, **files)) == cores


# `ingress run`.

SVD = """
import os
{at_import}
import ingress as serve
from fastapi import FastAPI
app = FastAPI()

@serve.deployment(lanes={{"cpu": {calls}}})
@serve.ingress(app)
class Svd:
    @app.get("/")
    @serve.method(lane="cpu")
    def threads(self):
        import numpy, threadpoolctl
        numpy.linalg.svd(numpy.eye(50))
        pools = threadpoolctl.threadpool_info()
        return {{"pools": [pool["num_threads"] for pool in pools], "pid": os.getpid(),
                "env": os.environ["OMP_NUM_THREADS"]}}

svd = Svd.bind()
"""


def unset(folder: Path) -> dict[str, str]:
    """Return an environment without variables for native threads."""
    every = environment(folder)
    return {name: value for name, value in every.items() if name not in NATIVE_THREADS}


def run(folder: Path, *, calls: int, at_import: str = "", **environ: str) -> tuple[Any, str]:
    """Return the endpoint's findings, and the output."""
    write_module(folder, "svd", SVD.format(calls=calls, at_import=at_import))
    with ingress_run(folder, "svd:svd", environ={**unset(folder), **environ}) as server:
        server.wait_for("is ready")
        found = json.loads(get(server.port, "/").body)
        assert found["pid"] == server.process.pid
        assert found["pools"], "threadpoolctl sees NumPy's"
        return found, server.output


CHILD = """
import os
import ingress as serve

@serve.deployment(isolation="process", ray_actor_options={"num_cpus": 7})
class Child:
    async def __call__(self, request):
        return [os.environ[each] for each in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]

child = Child.bind()
"""


def test_a_child_process_has_the_threads_of_its_num_cpus_under_run(tmp_path: Path) -> None:
    write_module(tmp_path, "child", CHILD)
    environ = unset(tmp_path) | {"MKL_NUM_THREADS": "5"}
    with ingress_run(tmp_path, "child:child", environ=environ) as server:
        server.wait_for("is ready")
        assert json.loads(get(server.port, "/").body) == ["7", "5"]


@pytest.mark.parametrize("at_import", ["", "import numpy"], ids=["numpy-later", "numpy-at-import"])
def test_run_gives_numpy_the_threads_it_prints(tmp_path: Path, at_import: str) -> None:
    cores = int(available_cores())
    found, output = run(tmp_path, calls=cores, at_import=at_import)

    assert set(found["pools"]) == {1}
    assert found["env"] == "1"
    assert "lane cpu" in output
    assert f": 1 replica of Svd x {cores} call{'s' * (cores > 1)} x 1 native thread (" in output
    assert "(OMP_NUM_THREADS=1" in output
    assert ("starting again with OMP_NUM_THREADS=1" in output) == (bool(at_import) and cores > 1)


def test_a_restart_for_numpy_is_in_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "apps").mkdir()
    cores = int(available_cores())
    write_module(tmp_path / "apps", "svd", SVD.format(calls=cores, at_import="import numpy"))
    (tmp_path / "serve.yaml").write_text(
        "applications:\n- {name: svd, import_path: 'svd:svd', runtime_env: {working_dir: apps}}\n"
    )
    with ingress_run(tmp_path, "serve.yaml", environ=unset(tmp_path)) as server:
        server.wait_for("is ready")
        assert ("starting again with OMP_NUM_THREADS=1" in server.output) == (cores > 1)


ENVIRONMENT = """
import os
import ingress as serve

@serve.deployment
class Environment:
    def __init__(self):
        print("each call has", os.environ["OMP_NUM_THREADS"])

app = Environment.bind()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_run_divides_the_cores_among_its_processes(tmp_path: Path, workers: int) -> None:
    write_module(tmp_path, "environ", ENVIRONMENT)
    options = ("--workers", str(workers))
    with ingress_run(tmp_path, "environ:app", *options, environ=unset(tmp_path)) as server:
        found = server.wait_for(r"each call has (\d+)")[1]
        server.signal()
        server.wait()  # the workers end, too

    assert found == str(max(1, int(available_cores()) // workers))


def test_run_never_changes_what_is_set(tmp_path: Path) -> None:
    found, output = run(tmp_path, calls=50, at_import="import numpy", OMP_NUM_THREADS="2")

    assert found["env"] == "2"
    assert "starting again" not in output
    if (cores := available_cores()) < 100:
        assert set(found["pools"]) == {2}
        assert f"are 100 runnable threads on {cores:g} cores; set OMP_NUM_THREADS=1" in output
