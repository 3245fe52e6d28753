"""The Ray engine without Ray: the options passed to Ray, and the ones refused.

Tests that need Ray are in tests/engines.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

import ingress as serve
from ingress.app.declaration.build import BuiltDeployment, build
from ingress.config import DeploymentConfig, HTTPOptions
from ingress.core.base.options import NOT_ON_RAY, ON_RAY, OURS
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.engines.ray.config_file import config_of
from ingress.engines.ray.lowering import (
    environment_for_workers,
    http_options_for_ray,
    import_folders,
    options_for_ray,
)
from ingress.engines.ray.messages import CALL, as_arrived, as_sent, remote_name
from ingress.schema import TaskProcessorConfig
from ingress.task_consumer import task_consumer, task_handler
from tests.programs import (
    ROOT,
    UVICORN,
    environment,
    process,
    run_ingress,
    run_python,
    said_by,
    write_module,
)

needs_no_ray = pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")

APP = """
import ingress as serve

@serve.deployment(num_replicas=2, lanes={"db": 3}, ray_actor_options={"num_cpus": 0.5})
class Child: ...

@serve.deployment(user_config={"a": 1}, health_check_period_s=3)
class Hello:
    def __init__(self, child): ...
    def reconfigure(self, user_config): ...
    def __call__(self): return "hi"

hello = Hello.bind(Child.bind())
"""


class Plain:
    async def __call__(self) -> str:
        return "hi"


def built(**options: Any) -> BuiltDeployment:
    application = serve.deployment(**options)(Plain).bind()
    return build(application, "default", acts_on_all=True).ingress


def lowered(**options: Any) -> dict[str, Any]:
    return options_for_ray(built(**options), {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


def test_jobs_in_a_file_of_one_machine_are_refused() -> None:
    class Consumer:
        @task_handler
        async def work(self) -> None: ...

    config = TaskProcessorConfig(queue_name="q")
    application = serve.deployment(task_consumer(task_processor_config=config)(Consumer)).bind()
    with pytest.raises(
        ValueError, match="which the nodes of a Ray cluster do not share; give Task"
    ):
        options_for_ray(build(application, "default", acts_on_all=True).ingress, {})


# Options


def test_every_option_of_a_deployment_has_its_place_on_ray() -> None:
    places = [DeploymentConfig.marked(each) for each in (ON_RAY, OURS, NOT_ON_RAY)]
    assert sorted(chain(*places)) == sorted(DeploymentConfig.model_fields)


def test_what_was_not_given_is_left_to_ray_but_for_our_defaults() -> None:
    assert lowered() == {
        "name": "Plain",
        "max_ongoing_requests": 100,
        "num_replicas": 1,
        "ray_actor_options": {"runtime_env": {"env_vars": {}}},
    }


def test_ray_gets_the_given_options_and_of_a_config_only_the_given_fields() -> None:
    options = lowered(
        max_queued_requests=7,
        graceful_shutdown_timeout_s=3.0,
        autoscaling_config=serve.AutoscalingConfig(max_replicas=4),
        backpressure_config={"status_code": 429},
        logging_config=serve.LoggingConfig(log_level="DEBUG"),
        lanes={"db": 2},
    )

    assert options["max_queued_requests"] == 7
    assert options["graceful_shutdown_timeout_s"] == 3.0
    assert options["autoscaling_config"] == {"max_replicas": 4}
    assert options["backpressure_config"] == {"status_code": 429}
    assert options["logging_config"] == {"log_level": "DEBUG"}
    assert "num_replicas" not in options  # Ray refuses the two together
    assert "lanes" not in options


def test_the_flags_go_into_the_workers_environment_and_the_users_own_variables_win() -> None:
    flags = environment_for_workers(Settings(run_sync_in_threadpool=True, stall_threshold_s=None))
    runtime_env = {"pip": ["numpy"], "env_vars": {"MINE": "1", "INGRESS_STALL_THRESHOLD_MS": "9"}}
    actor = {"num_gpus": 1, "runtime_env": runtime_env}

    options = options_for_ray(built(ray_actor_options=actor), flags, default_cpus=0.0)

    env_vars = options["ray_actor_options"]["runtime_env"].pop("env_vars")
    assert options["ray_actor_options"] == {
        "num_cpus": 0.0,
        "num_gpus": 1,
        "runtime_env": {"pip": ["numpy"]},
    }
    assert env_vars == {
        "INGRESS_ENGINE": "ray",
        "INGRESS_STALL_THRESHOLD_MS": "9",
        "MINE": "1",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    }
    assert Settings.from_environment(flags) == Settings(
        run_sync_in_threadpool=True, stall_threshold_s=None, engine="ray"
    )


def test_workers_import_from_where_this_process_does_but_for_what_comes_with_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    folders = import_folders()

    assert folders[0] == str(tmp_path.resolve())
    assert not [each for each in folders if "site-packages" in each or "lib-dynload" in each]
    assert environment_for_workers(Settings(), folders)["PYTHONPATH"].endswith("${PYTHONPATH}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"request_router_config": {"request_router_class": "ingress.serving.replicas:Mine"}},
            "request_router_class='ingress.serving.replicas:Mine' of deployment 'Plain' cannot run",
        ),
        (
            {"autoscaling_config": {"policy": {"policy_function": "ingress:mine"}}},
            "policy_function='ingress:mine' of deployment 'Plain' cannot run on Ray",
        ),
        ({"fairness_key": "x-tenant"}, "fairness_key of deployment 'Plain' cannot be set on Ray"),
        ({"fairness_config": {"weights": {"a": 2}}}, "fairness_config of deployment 'Plain' "),
    ],
    ids=["router", "policy", "key", "weights"],
)
def test_what_cannot_work_on_ray_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lowered(**options)


def test_http_options_become_rays_and_a_retry_of_what_has_started_is_refused() -> None:
    given = HTTPOptions(port=9000, keep_alive_timeout_s=5.5, request_timeout_s=2)

    assert http_options_for_ray(given, Settings(request_timeout_s=9)) == {
        "host": "127.0.0.1",
        "port": 9000,
        "keep_alive_timeout_s": 5,
        "request_timeout_s": 2,
    }
    assert http_options_for_ray(HTTPOptions(), Settings(request_timeout_s=9)) == {
        "host": "127.0.0.1",
        "port": 8000,
        "request_timeout_s": 9,
    }
    with pytest.raises(ValueError, match=r"retry_started_methods=\['GET'\] has no effect on Ray"):
        http_options_for_ray(HTTPOptions(retry_started_methods=["GET"]), Settings())
    with pytest.raises(ValueError, match="header_timeout_s and limit_connections cannot be set on"):
        http_options_for_ray(HTTPOptions(limit_connections=9, header_timeout_s=9), Settings())


# Calls


@pytest.mark.parametrize(
    ("method", "name"),
    [("score", "score"), *((n, CALL) for n in ("__call__", "_private", "check_health", "app"))],
)
def test_ray_is_told_a_methods_own_name_unless_it_means_something_else_there(
    method: str, name: str
) -> None:
    assert remote_name(method) == name


def test_a_deadline_crosses_as_the_time_that_is_left() -> None:
    deployment = DeploymentID("Plain")
    metadata = RequestMetadata("id", deployment, method_name="score", deadline=None)

    assert as_arrived(as_sent(metadata)) == metadata
    assert as_sent(metadata._replace(deadline=0.0)).deadline == 0.0


# Bad input


def test_an_engine_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="engine must be 'local' or 'ray', got 'raay'"):
        serve.start(engine="raay")


RUN = ["run", "app:hello", "--port", "0"]
RUN_ON_RAY = [*RUN, "--engine", "ray"]
BUILD = ["build", "app:hello"]
REFUSED: list[tuple[list[str], str]] = [
    ([*RUN, "--engine", "raay"], "--engine must be local or ray, got 'raay'"),
    ([*RUN_ON_RAY, "--workers", "2"], "--reload and --workers are for the local eng"),
    ([*RUN_ON_RAY, "--reload"], "--reload and --workers are for the local engine"),
    ([*RUN_ON_RAY, "--admin", "127.0.0.1:0"], "--admin and --admin-token are for the "),
    ([*RUN_ON_RAY, "--admin-token", "secret"], "--admin and --admin-token are for the "),
    ([*RUN_ON_RAY, "--metrics-routes", "9"], "--metrics-routes is for the "),
    ([*RUN_ON_RAY, "--drain-delay", "1"], "--drain-delay is for the local engine"),
    ([*RUN, "--address", "127.0.0.1:1"], "--address and --working-dir are for --engine ray"),
    ([*RUN, "--working-dir", "."], "--address and --working-dir are for --engine ray"),
    (
        ["run", "serve.yaml", "--watch", "--engine", "ray"],
        "--watch is for the local engine; on Ray, run the comm",
    ),
    (
        [*BUILD, "--working-dir", "."],
        "--working-dir '.' is no address that the nodes of a cluster can",
    ),
    ([*BUILD, "--route-prefix", "shop"], "Invalid route_prefix 'shop', must start with"),
    ([*BUILD, "-o", "nowhere/serve.yaml"], "cannot write 'nowhere/serve.yaml': No such file"),
]


def test_what_an_engine_or_a_cluster_cannot_use_is_refused_in_one_line(folder: Path) -> None:
    (folder / "serve.yaml").write_text("applications:\n- name: one\n  import_path: app:hello\n")
    said = said_by(folder, *[words for words, _ in REFUSED])

    for (words, message), (code, _, lines) in zip(REFUSED, said, strict=True):
        (line,) = lines
        assert line.startswith(f"Error: {message}"), words
        assert code == 1


@pytest.mark.thorough
@needs_no_ray
@pytest.mark.parametrize("how", ["option", "environment"])
def test_without_ray_one_line_says_how_to_get_it(folder: Path, how: str) -> None:
    arguments, environ = (RUN_ON_RAY, {}) if how == "option" else (RUN, {"INGRESS_ENGINE": "ray"})
    result = run_ingress(folder, *arguments, **environ)

    (line,) = result.stderr.splitlines()
    assert line == (
        "Error: the ray engine needs Ray Serve 2.60, which is not installed; in a clone of this "
        'project: python -m pip install -e ".[ray]"'
    )
    assert result.returncode == 1


@needs_no_ray
def test_without_ray_what_is_asked_of_the_engine_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"needs Ray Serve 2\.60, which is not installed"):
        serve.run(serve.deployment(Plain).bind(), engine="ray")
    assert serve.status().applications == {}


@needs_no_ray
def test_another_version_of_ray_is_named_with_the_one_that_is_supported(folder: Path) -> None:
    other = folder / "other"
    metadata = other / "ray-2.41.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.41.0\n")

    path = os.pathsep.join([str(other), str(folder), str(ROOT)])
    result = run_ingress(folder, "run", "app:hello", "--engine", "ray", PYTHONPATH=path)

    (line,) = result.stderr.splitlines()
    assert line == (
        "Error: the ray engine supports Ray 2.60.x, and 2.41.0 is installed; "
        "python -m pip install 'ray[serve]==2.60.*'"
    )


def test_a_server_of_its_own_does_not_run_an_application_that_is_meant_for_ray(
    folder: Path,
) -> None:
    environ = {**environment(folder), "INGRESS_ENGINE": "ray"}

    with process([*UVICORN, "app:hello"], folder, environ) as server:
        assert server.wait() != 0

    assert "INGRESS_ENGINE='ray'" in server.output
    assert "use ingress run --engine ray" in server.output


@pytest.mark.parametrize("code", ["", "serve.run(app, route_prefix=None); serve.shutdown()"])
def test_nothing_but_its_engine_imports_ray(tmp_path: Path, code: str) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")  # an importable module named `ray`
    script = (
        "import sys, ingress as serve\n"
        "app = serve.deployment(lambda: None, name='one').bind()\n"
        f"{code}\n"
        "print('ray' in sys.modules, 'ingress.engines.ray' in sys.modules)\n"
    )
    ran = run_python("-c", script, folder=tmp_path)

    assert (ran.stdout, ran.returncode) == ("False False\n", 0), ran.stderr


# ingress build


def test_build_writes_what_names_the_application_its_options_and_the_flags(folder: Path) -> None:
    file = folder / "serve.yaml"

    options = {SYNC_IN_THREADPOOL: "1"}
    result = run_ingress(folder, "build", "app:hello", "-o", "serve.yaml", **options)

    assert result.returncode == 0, result.stderr
    assert file.read_text().startswith("# For `serve deploy`")
    config = yaml.safe_load(file.read_text())
    (application,) = config["applications"]
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert application["import_path"] == "ingress.engines.ray.builder:build"
    assert application["args"] == {"target": "app:hello"}
    assert application["runtime_env"]["env_vars"][SYNC_IN_THREADPOOL] == "1"
    assert application["deployments"] == [
        {
            "name": "Child",
            "max_ongoing_requests": 100,
            "num_replicas": 2,
            "ray_actor_options": {"num_cpus": 0.5},
        },
        {
            "name": "Hello",
            "max_ongoing_requests": 100,
            "num_replicas": 1,
            "health_check_period_s": 3.0,
            "user_config": {"a": 1},
        },
    ]


def test_a_request_timeout_is_in_the_file_for_the_proxies_and_for_the_replicas() -> None:
    application = build(serve.deployment(Plain).bind(), "default")

    config = config_of({"app:hello": application}, Settings(request_timeout_s=2.5))

    assert config["http_options"]["request_timeout_s"] == 2.5
    assert config["applications"][0]["args"]["request_timeout_s"] == 2.5


def test_build_takes_the_name_prefix_host_and_folder_of_the_application(folder: Path) -> None:
    url = "https://files.example/app.zip"
    given = ("--name", "shop", "--route-prefix", "/shop", "--host", "10.0.0.1")

    result = run_ingress(folder, "build", "app:hello", *given, "--working-dir", url)

    config = yaml.safe_load(result.stdout)
    (application,) = config["applications"]
    assert config["http_options"]["host"] == "10.0.0.1"
    assert (application["name"], application["route_prefix"]) == ("shop", "/shop")
    assert application["args"] == {"target": "app:hello", "name": "shop"}
    assert application["runtime_env"]["working_dir"] == url


LARGE = """
import ingress as serve

@serve.deployment(num_replicas=5, ray_actor_options={"num_cpus": 3})
class Wide: ...

@serve.deployment(
    autoscaling_config={"min_replicas": 1, "max_replicas": 6},
    ray_actor_options={"num_gpus": 0.5, "resources": {"tape": 1}},
)
class Model:
    def __init__(self, wide): ...
    def __call__(self): return "hi"

app = Model.bind(Wide.bind())
"""


def test_a_manifest_for_kuberay_has_image_gpus_probes_and_room_for_all_replicas(
    tmp_path: Path,
) -> None:
    write_module(tmp_path, "large", LARGE)
    given = ("--kuberay", "--image", "registry.example/shop:1", "--name", "My Shop")

    result = run_ingress(tmp_path, "build", "large:app", *given)

    assert result.returncode == 0, result.stderr
    manifest = yaml.safe_load(result.stdout)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert manifest["metadata"]["name"] == "my-shop"
    spec = manifest["spec"]
    serve_config = yaml.safe_load(spec["serveConfigV2"])
    assert serve_config["http_options"]["host"] == "0.0.0.0"  # of a pod
    assert [each["name"] for each in serve_config["applications"]] == ["My Shop"]
    cluster = spec["rayClusterConfig"]
    assert cluster["rayVersion"] == "2.60.0"
    assert cluster["enableInTreeAutoscaling"] is True
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    plain, gpu = cluster["workerGroupSpecs"]
    # A pod of 4 CPUs holds one replica that needs 3; a GPU holds two that need a half, but each
    # needs the one tape of its pod.
    assert (plain["minReplicas"], plain["maxReplicas"]) == (5, 5)
    assert (gpu["minReplicas"], gpu["maxReplicas"]) == (1, 6)
    assert gpu["rayStartParams"]["resources"] == '"{\\"tape\\": 1}"'
    for group in (head, plain, gpu):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "registry.example/shop:1"
        assert "livenessProbe" in container
        assert ("readinessProbe" in container) == (group is not head)
        limits = container["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == ("1" if group is gpu else None)
