"""The import paths that users write: each is there, and has the names that users import from it.

Paths of Ray Serve keep its names: `ray.serve.handle` is `ingress.handle`. All other modules and
folders of the package may move.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ingress
from tests.programs import run_python

PACKAGE = Path(ingress.__file__).parent
EXCEPTIONS = [
    *("BackPressureError", "CompiledRoutesOffWarning", "DeploymentUnavailableError"),
    *("OptionNotActedOnWarning", "RayServeException", "ReplicaUnavailableError"),
    *("RequestBodyTimeoutError", "RequestBodyTooLargeError", "RequestCancelledError"),
    *("RequestCycleError", "RequestTimeoutError", "RouteNotServedWarning", "StreamClosedError"),
    *("SyncMethodOnEventLoopWarning", "UnknownMethodError", "UnreadableError", "UserCodeExit"),
]
PATHS = {
    "ingress.api": [
        *("RunTarget", "delete", "get_app_handle", "get_deployment_handle", "run", "run_many"),
        *("serving_until_signal", "shutdown", "shutdown_async", "stalls", "start", "status"),
    ],
    "ingress.autoscaling_policy": [
        *("default_autoscaling_policy", "replica_queue_length_autoscaling_policy"),
    ],
    "ingress.batching": ["batch"],
    "ingress.config": [
        *("AutoscalingConfig", "AutoscalingContext", "AutoscalingPolicy", "BackpressureConfig"),
        *("DeploymentConfig", "HTTPOptions", "LoggingConfig", "RequestRouterConfig"),
    ],
    "ingress.context": ["ReplicaContext", "get_replica_context"],
    "ingress.exceptions": EXCEPTIONS,
    "ingress.handle": [
        *("DeploymentHandle", "DeploymentResponse", "DeploymentResponseGenerator"),
    ],
    "ingress.logs": ["RequestFilter"],
    "ingress.metrics": ["Counter", "Gauge", "Histogram"],
    "ingress.mypy": ["plugin"],
    "ingress.request_context": [
        *("RequestContext", "get_batch_request_contexts", "get_request_context"),
    ],
    "ingress.request_router": [
        *("ConsistentHashRouter", "FIFOMixin", "LocalityMixin", "MultiplexMixin"),
        *("PendingRequest", "PowerOfTwoChoicesRequestRouter", "PrefixCacheAffinityRouter"),
        *("ReplicaID", "ReplicaResult", "RequestRouter", "RoundRobinRouter", "RunningReplica"),
        "SyncRequestRouter",
    ],
    "ingress.schema": [
        *("CeleryAdapterConfig", "TaskProcessorAdapter", "TaskProcessorConfig", "TaskResult"),
        *("ApplicationStatus", "ApplicationStatusOverview", "DeploymentStatus"),
        *("DeploymentStatusOverview", "LoggingConfig", "ReplicaDetails", "ReplicaRank"),
        "ServeStatus",
    ],
    "ingress.task_consumer": [
        *("instantiate_adapter_from_config", "task_consumer", "task_handler"),
    ],
    "ingress.task_processor": ["CeleryTaskProcessorAdapter"],
    "ingress.testing": [
        *("AsyncClient", "Latch", "LeakCheck", "TestClient", "VirtualClock", "leak_check"),
    ],
}
SHORT = 10  # lines of a module that only re-exports


@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_has_its_names(path: str) -> None:
    module = importlib.import_module(path)

    assert [name for name in PATHS[path] if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in PATHS.items() for name in names if name in ingress.__all__],
)
def test_a_name_is_the_same_at_its_path_as_at_the_top(path: str, name: str) -> None:
    assert getattr(importlib.import_module(path), name) is getattr(ingress, name)


def test_every_module_at_the_top_is_a_public_path() -> None:
    modules = {f"ingress.{each.stem}" for each in PACKAGE.glob("[!_]*.py")}

    assert modules == {*PATHS} - {"ingress.testing"}


def test_a_module_that_only_re_exports_is_short() -> None:
    long = {}
    for path in PACKAGE.glob("[!_]*.py"):
        text = path.read_text()
        made = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if not any(isinstance(node, made) for node in ast.parse(text).body):
            long[path.name] = len(text.splitlines())

    assert sorted(long) == ["batching.py", "logs.py", "metrics.py", "task_processor.py"]
    assert max(long.values()) <= SHORT


def test_paths_are_attributes_of_the_package_when_it_alone_is_imported() -> None:
    ran = run_python(
        "-c", "import ingress; print(*[n for n in dir(ingress) if hasattr(ingress, n)])"
    )
    used = {path.partition(".")[2] for path in PATHS} - {
        "mypy",
        "request_router",
        "task_consumer",
        "task_processor",
        "testing",
    }

    assert used <= {*ran.stdout.split()}, ran.stderr


def test_an_exception_has_its_public_path_in_a_traceback() -> None:
    places = {getattr(ingress.exceptions, name).__module__ for name in EXCEPTIONS}

    assert places == {"ingress.exceptions"}


def test_the_command_and_the_pytest_plugin_are_found_by_their_entry_points() -> None:
    scripts = {each.value for each in entry_points(group="console_scripts", name="ingress")}
    plugins = {each.value for each in entry_points(group="pytest11", name="ingress.testing.plugin")}

    assert (scripts, plugins) == ({"ingress.cli:main"}, {"ingress.testing.plugin"})
    assert callable(entry_points(group="console_scripts")["ingress"].load())
    assert entry_points(group="pytest11")["ingress.testing.plugin"].load().__name__ in plugins


def test_a_file_that_was_built_for_a_cluster_finds_its_builder() -> None:
    assert importlib.util.find_spec("ingress.engines.ray.builder") is not None
