"""Options that only a cluster acts on, and `max_replicas_per_node`, in one process."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from ingress.app.config_file.loading import ConfigFile
from ingress.app.config_file.reading import ConfigFileError
from ingress.app.declaration.build import build
from ingress.app.declaration.cluster_options import CLUSTER_ONLY
from ingress.config import DeploymentConfig
from ingress.engines import local_engine
from ingress.testing import TestClient
from tests.programs import write_module
from tests.servers import settle

VALUES: dict[str, Any] = {
    "deployment_actors": [{"name": "tree", "actor_class": "main:Tree"}],
    "gang_scheduling_config": {"gang_size": 2},
    "placement_group_bundle_label_selector": [{"zone": "a"}],
    "placement_group_bundles": [{"CPU": 1.0}],
    "placement_group_fallback_strategy": [{"bundles": []}],
    "placement_group_strategy": "PACK",
}


class _Echo:
    async def __call__(self, request: Any) -> str:
        return "here"


Echo: Any = serve.deployment(name="Echo")(_Echo)


pytestmark = pytest.mark.usefixtures("shutdown")


def test_every_option_of_a_cluster_has_an_example_here() -> None:
    assert VALUES.keys() == CLUSTER_ONLY.keys()


@pytest.mark.parametrize("name", VALUES)
def test_an_option_for_a_cluster_is_refused_at_the_start_with_place_and_fix(name: str) -> None:
    line = inspect.getsourcelines(_Echo)[1]

    with pytest.raises(ValueError, match=name) as caught:
        serve.run(Echo.options(**{name: VALUES[name]}).bind(), route_prefix=None)

    message = str(caught.value)
    assert message.startswith(f"deployment 'Echo' ({__file__}:{line}) has options for a cluster: ")
    assert f"{name}={VALUES[name]!r}. They cannot act here: {CLUSTER_ONLY[name]}" in message
    assert message.endswith("file, under deployments, or run it with engine='ray'")
    assert serve.status().applications == {}


def test_all_options_for_a_cluster_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"gang_scheduling_config=.*; placement_group_strategy="):
        serve.run(
            Echo.options(
                placement_group_strategy="PACK", gang_scheduling_config={"gang_size": 2}
            ).bind()
        )


def test_the_statistics_of_a_request_router_are_refused_because_none_are_collected() -> None:
    application = Echo.options(request_router_config={"request_routing_stats_period_s": 1}).bind()

    with pytest.raises(ValueError, match=r"router_config\.request_routing_stats_period_s=1\.0"):
        serve.run(application, route_prefix=None)


def test_an_application_that_another_server_serves_is_refused_too() -> None:
    application = Echo.options(placement_group_strategy="PACK").bind()

    with (
        pytest.raises(ValueError, match="placement_group_strategy='PACK'"),
        TestClient(application),
    ):
        pass


def test_an_option_that_is_taken_back_is_not_refused() -> None:
    with TestClient(Echo.options(**VALUES).options(**dict.fromkeys(VALUES)).bind()) as client:
        assert client.get("/").text == "here"


def test_other_engines_and_commands_take_the_options_as_they_are() -> None:
    built = build(Echo.options(**VALUES, max_replicas_per_node=1).bind(), "default")

    assert built.ingress.deployment.config.gang_scheduling_config == {"gang_size": 2}


FILE = """
applications:
- import_path: cluster_app:app
  deployments:
  - name: Main
    {options}
"""
MODULE = """
import ingress as serve
@serve.deployment{options}
class Main:
    async def __call__(self, request): return "here"
app = Main.bind()
"""


def written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_code: str, in_file: str
) -> ConfigFile:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "cluster_app", raising=False)
    write_module(folder, "cluster_app", MODULE.format(options=in_code))
    path = folder / "serve.yaml"
    path.write_text(FILE.format(options=in_file))
    return ConfigFile.read(path)


def config_of(application: serve.Application) -> DeploymentConfig:
    return build(application, "default").ingress.deployment.config


IN_FILE = """placement_group_bundles: [{CPU: 1}]
    request_router_config: {request_routing_stats_period_s: 3, max_backoff_s: 2}"""


def test_a_file_may_have_the_options_of_a_cluster_which_has_no_effect_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, monkeypatch, "", IN_FILE)
    (loaded,) = file.load_all(None)

    assert file.config.for_a_cluster() == [
        "placement_group_bundles=[{'CPU': 1.0}] of Main of application 'default'",
        "request_router_config.request_routing_stats_period_s=3.0 of Main of application 'default'",
    ]
    config = config_of(loaded.application)
    assert config.placement_group_bundles is None
    assert config.request_router_config is not None
    assert config.request_router_config.changed() == {"max_backoff_s": 2}
    with TestClient(loaded.application) as client:
        assert client.get("/").text == "here"


@pytest.mark.parametrize(
    ("in_code", "in_file", "expected"),
    [
        ("(placement_group_strategy='PACK')", "num_replicas: 2", "5:5: deployment 'Main' ("),
        ("(max_replicas_per_node=2)", "num_replicas: 3", "5:5: deployment 'Main' should have 3 r"),
    ],
)
def test_a_file_is_refused_with_the_place_of_its_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_code: str, in_file: str, expected: str
) -> None:
    file = written(tmp_path, monkeypatch, in_code, in_file)

    with pytest.raises(ConfigFileError) as caught:
        file.load_all(None)
    assert f"{file.path}:{expected}" in str(caught.value)


# max_replicas_per_node


@pytest.mark.parametrize(
    "options",
    [
        {"num_replicas": 3},
        {"autoscaling_config": {"min_replicas": 3, "max_replicas": 4}},
        {"autoscaling_config": {"initial_replicas": 3, "max_replicas": 4}},
    ],
    ids=["fixed", "least", "first"],
)
def test_more_replicas_than_a_node_may_have_are_refused(options: dict[str, Any]) -> None:
    (source,) = options

    with pytest.raises(ValueError, match=rf"3 replicas, by its {source}, and .*_node=2 allows"):
        serve.run(Echo.options(max_replicas_per_node=2, **options).bind(), route_prefix=None)


def test_as_many_replicas_as_a_node_may_have_run_and_no_more_can_be_added() -> None:
    serve.run(Echo.options(max_replicas_per_node=2, num_replicas=2).bind(), route_prefix=None)

    with pytest.raises(ValueError, match=r"should have 3 replicas.*max_replicas_per_node=2"):
        local_engine().change("default", {"Echo": {"num_replicas": 3}})
    local_engine().change("default", {"Echo": {"num_replicas": 3, "max_replicas_per_node": 3}})
    settle()
    (deployment,) = serve.status().applications["default"].deployments.values()
    assert len(deployment.replicas) == 3


@pytest.mark.parametrize("options", [{"num_replicas": "auto"}, {"num_replicas": 2}])
def test_autoscaling_stays_within_the_limit_of_a_node(options: dict[str, Any]) -> None:
    scaling = DeploymentConfig(max_replicas_per_node=5, **options).autoscaling
    assert (None if scaling is None else scaling.max_replicas) == (
        5 if options["num_replicas"] == "auto" else None
    )
