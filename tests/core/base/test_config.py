"""`ingress.config`: options that are accepted, recorded or refused, and the messages."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import ingress
from ingress.app.config_file.models import DeploymentOverrides
from ingress.app.declaration.cluster_options import CLUSTER_ONLY
from ingress.config import (
    NOT_ACTED_ON,
    AutoscalingConfig,
    BackpressureConfig,
    DeploymentConfig,
    DeploymentOptions,
    HTTPOptions,
    LoggingConfig,
    RequestRouterConfig,
    options_not_acted_on,
)
from ingress.core.base.options import Options
from ingress.core.base.settings import HTTPLimits

CHANGED: dict[str, Any] = {
    "autoscaling_config": {"max_replicas": 4},
    "backpressure_config": {"status_code": 429},
    "loop": "shared",
    "isolation": "process",
    "deployment_actors": ["actor"],
    "fairness_config": {"weights": {"gold": 4}},
    "fairness_key": "x-tenant",
    "gang_scheduling_config": {"gang_size": 2},
    "graceful_shutdown_timeout_s": 5,
    "graceful_shutdown_wait_loop_s": 1,
    "health_check_period_s": 1,
    "health_check_timeout_s": 1,
    "logging_config": {"encoding": "JSON"},
    "max_constructor_retry_count": 1,
    "max_memory_mb": 512,
    "max_ongoing_requests": 7,
    "max_queued_requests": 7,
    "lanes": {"db": 8},
    "max_replicas_per_node": 1,
    "max_requests_per_replica": 1000,
    "max_surge_percent": 10,
    "num_replicas": 2,
    "placement_group_bundle_label_selector": [{"zone": "a"}],
    "placement_group_bundles": [{"CPU": 1}],
    "placement_group_fallback_strategy": [{"bundles": []}],
    "placement_group_strategy": "PACK",
    "ray_actor_options": {"num_cpus": 2},
    "request_router_config": {"request_router_class": "module:Router"},
    "rolling_update_percentage": 0.5,
    "user_config": {"threshold": 0.5},
}


def configured(**options: Any) -> DeploymentConfig:
    """Make a config from values that a type checker would refuse."""
    return DeploymentConfig(**options)


def refused(error: type[Exception], message: str, **options: Any) -> None:
    """Assert that the options are refused with exactly this one line."""
    with pytest.raises(error) as caught:
        configured(**options)
    assert type(caught.value) is error
    assert str(caught.value) == message


REFUSED: dict[str, tuple[str, str, list[Any]]] = {
    "num_replicas": ('an integer ≥ 1 or "auto"', "1", [0, -1, 1.5, True, "many", math.nan]),
    "max_ongoing_requests": ("an integer ≥ 1", "100", [0, -1, "5", True, 1.0, math.nan]),
    "max_queued_requests": (
        "-1 (no limit) or a positive integer", "-1", [0, -2, 1.5, -1.0, False, "8"],
    ),
    "graceful_shutdown_timeout_s": (
        "a number ≥ 0", "20.0", [math.inf, math.nan, "5", True, -1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_out_of_range_is_refused_with_the_rule_and_the_default(name: str) -> None:
    rule, default, values = REFUSED[name]
    for value in values:
        message = f"{name} must be {rule}, got {value!r}; leave it out for the default, {default}"
        refused(ValueError, message, **{name: value})


def test_max_ongoing_requests_of_none_is_refused_in_the_words_of_ray() -> None:
    message = "max_ongoing_requests must be non-null, got None; leave it out for the default, 100"
    refused(ValueError, message, max_ongoing_requests=None)


def test_num_replicas_beside_autoscaling_is_refused() -> None:
    message = (
        "Manually setting num_replicas is not allowed when autoscaling_config is provided, got "
        "num_replicas=2; leave one of them out"
    )
    refused(ValueError, message, num_replicas=2, autoscaling_config={"max_replicas": 3})


@pytest.mark.parametrize("num_replicas", ["auto", None])
def test_auto_and_none_may_stand_beside_autoscaling(num_replicas: Any) -> None:
    config = DeploymentConfig(num_replicas=num_replicas, autoscaling_config=AutoscalingConfig())

    assert config.replica_count == 1


def test_min_replicas_above_max_replicas_is_refused_with_both_numbers() -> None:
    message = (
        "max_replicas (2) must be greater than or equal to min_replicas (3); raise max_replicas or "
        "lower min_replicas"
    )
    refused(ValueError, message, autoscaling_config={"min_replicas": 3, "max_replicas": 2})


@pytest.mark.parametrize("initial", [1, 6])
def test_initial_replicas_outside_the_bounds_is_refused_with_the_numbers(initial: int) -> None:
    with pytest.raises(ValueError, match=rf"\({initial}\) .* \(2\) and max_replicas \(5\)"):
        AutoscalingConfig(min_replicas=2, initial_replicas=initial, max_replicas=5)


def test_an_unknown_option_is_a_type_error_with_the_nearest_name_and_the_list() -> None:
    with pytest.raises(TypeError) as caught:
        configured(max_ongoing_request=5)

    message = str(caught.value)
    assert "'max_ongoing_request'; did you mean max_ongoing_requests?" in message
    assert all(name in message for name in ["name", *CHANGED])
    assert "\n" not in message


def test_an_option_like_no_other_gets_the_list_and_no_guess() -> None:
    with pytest.raises(TypeError, match=r"keyword argument 'xyz'; HTTPOptions has: .*, host, k"):
        HTTPOptions(xyz=1)  # type: ignore[call-arg]


def test_route_prefix_is_sent_to_serve_run() -> None:
    with pytest.raises(TypeError, match=r"pass it to serve\.run\(app, route_prefix="):
        configured(route_prefix="/")


def test_max_concurrent_queries_is_a_deprecated_name_of_max_ongoing_requests() -> None:
    with pytest.warns(DeprecationWarning, match="use max_ongoing_requests"):
        config = configured(max_concurrent_queries=1000)

    assert config.max_ongoing_requests == 1000


def test_both_names_of_max_ongoing_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="both given"):
        configured(max_concurrent_queries=8, max_ongoing_requests=8)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("user_config", "path"),
    [
        pytest.param({"a": [1, {2}]}, "user_config['a'][1] ", id="set"),
        pytest.param({"a": {"b": (0, object())}}, "user_config['a']['b'][1] ", id="in-a-tuple"),
        pytest.param({("a", 1): 2}, "user_config[('a', 1)] ", id="key"),
        pytest.param(b"bytes", "user_config ", id="bytes"),
        pytest.param({"a": CYCLE}, "user_config['a'][0] ", id="cycle"),
    ],
)
def test_user_config_json_cannot_hold_is_refused_with_the_path(user_config: Any, path: str) -> None:
    with pytest.raises(ValueError, match="is not JSON-serializable") as caught:
        DeploymentConfig(user_config=user_config)

    assert str(caught.value).startswith(path)


def test_user_config_is_recorded_as_it_was() -> None:
    given: dict[str, Any] = {"a": [1, (2.5, None)], "b": True}
    config = DeploymentConfig(user_config=given)
    given["a"].append("later")

    assert config.user_config == {"a": [1, (2.5, None)], "b": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backpressure_config": {"status_code": 404}}, "status_code must be 503 or 429, got 404"),
        ({"logging_config": {"log_level": -1}}, "or a number of Python's logging, got -1"),
        ({"logging_config": {"encoding": "XML"}}, "encoding must be 'TEXT' or 'JSON', got 'XML'"),
        (
            {"logging_config": {"additional_log_standard_attrs": ["asctime", "threadNam"]}},
            "must be names of attributes of Python's log records, such as threadName, got 'threa",
        ),
        ({"autoscaling_config": {"min_replicas": -1}}, "min_replicas must be an integer ≥ 0"),
        ({"autoscaling_config": 5}, "autoscaling_config must be a valid dictionary or instance of"),
        ({"request_router_config": {"request_router_class": 5}}, "must be a class or its import"),
        ({"ray_actor_options": {"num_cpus": "2"}}, "['num_cpus'] must be a number ≥ 0, got '2'"),
        ({"ray_actor_options": {"num_cpus": math.inf}}, "must be a number ≥ 0, got inf"),
        ({"ray_actor_options": [1]}, "ray_actor_options must be a valid dictionary, got [1]"),
        (
            {"ray_actor_options": {"num_gpu": 1}},
            "'num_gpu' in ray_actor_options is not allowed; leave it out, or write num_gpus",
        ),
        (
            {"ray_actor_options": {"max_restarts": 1}},
            "leave it out, or write one of accelerator_type",
        ),
        ({"ray_actor_options": {"runtime_env": "x"}}, "['runtime_env'] must be a valid dictionary"),
        (
            {"ray_actor_options": {"runtime_env": {"env_vars": ["A=1"]}}},
            "['env_vars'] must be a valid dictionary, got ['A=1']",
        ),
        (
            {"fairness_config": {"weights": {"gold": 0}}},
            "weights must be a dict from fairness keys to their weights, such as {'gold': 4}; a we",
        ),
        ({"fairness_config": {"weights": {"gold": -1}}}, "a weight is a number from 0.001 to 1000"),
        ({"fairness_config": {"weights": {"gold": 1e308}}}, "a number from 0.001 to 1000, got"),
        ({"fairness_config": {"weights": {1: 1}}}, "a dict from fairness keys to their weights"),
        (
            {"fairness_config": {"max_queued_per_key": 0}},
            "max_queued_per_key must be -1 (no limit) or a positive integer, got 0",
        ),
        ({"rolling_update_percentage": 0}, "must be a number in (0, 1], got 0"),
        ({"placement_group_strategy": 3}, "placement_group_strategy must be a valid string, got 3"),
    ],
)
def test_a_bad_value_is_one_line_of_ours(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"; leave it out") as caught:
        DeploymentConfig(**options)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port must be an integer from 0 to 65535, got 65536"),
        ({"ssl_keyfile": "key.pem"}, "must be given together"),
        ({"request_timeout_s": 0}, "request_timeout_s must be a number > 0, got 0"),
    ],
)
def test_http_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="; ") as caught:
        HTTPOptions(**options)

    assert message in str(caught.value)


async def slow_key(request: object) -> str:
    return str(request)


def key_of_two(request: object, tenant: str) -> str:
    return f"{request}{tenant}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fairness_key": "X Tenant"}, "must be the name of a header or a `def` that returns a "),
        ({"fairness_key": 5}, "must be the name of a header or a `def` that returns a str, got 5"),
        ({"fairness_key": slow_key}, "it runs on the server's loop before the request waits; wri"),
        ({"fairness_key": key_of_two}, "must take one argument, the request: missing a required"),
        ({"fairness_key": "Authorization"}, "is a header with secrets, and keys are shown in"),
        (
            {
                "fairness_key": "x-tenant",
                "request_router_config": {"request_router_class": "module:Router"},
            },
            "got request_router_class='module:Router', with which each call waits for replicas of ",
        ),
    ],
)
def test_a_fairness_key_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="fairness_key") as caught:
        DeploymentConfig(**options)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fairness_key_is_a_header_a_path_or_a_function() -> None:
    for key in ("x-tenant", "X_Tenant.id", "app.keys:tenant", str, lambda request: "tenant"):
        assert DeploymentConfig(fairness_key=key).fairness_key == key


@pytest.mark.parametrize("name", ["middlewares", "num_cpus"])
def test_http_options_that_ray_removed_are_refused(name: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match="has been removed"):
        HTTPOptions(**options)


def http_limits(options: HTTPOptions) -> dict[str, Any]:
    return {each.name: getattr(options, each.name) for each in dataclasses.fields(HTTPLimits)}


def test_the_defaults_are_those_of_ray_except_max_ongoing_requests() -> None:
    config, scaling, http = DeploymentConfig(), AutoscalingConfig(), HTTPOptions()

    assert (config.num_replicas, config.max_ongoing_requests) == (1, 100)
    assert (config.max_queued_requests, config.max_constructor_retry_count) == (-1, 20)
    assert (config.graceful_shutdown_wait_loop_s, config.graceful_shutdown_timeout_s) == (2, 20)
    assert (config.health_check_period_s, config.health_check_timeout_s) == (10, 30)
    assert (config.rolling_update_percentage, scaling.target_ongoing_requests) == (0.2, 2)
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 1)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30, 600)
    assert (http.host, http.port, http.keep_alive_timeout_s) == ("127.0.0.1", 8000, 90)
    assert http.limits(HTTPLimits()) == HTTPLimits() == HTTPLimits(**http_limits(http))
    assert RequestRouterConfig().max_backoff_s == 0.5
    assert BackpressureConfig().status_code == 503
    assert LoggingConfig().log_level == "INFO"


@pytest.mark.parametrize("level", ["DEBUG", 0, 15])
def test_a_log_level_is_a_name_or_a_number_from_0_on(level: str | int) -> None:
    assert LoggingConfig(log_level=level).log_level == level


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DeploymentConfig().num_replicas = 2


def test_the_repr_shows_what_differs_from_the_default() -> None:
    config = DeploymentConfig(
        num_replicas=1, max_ongoing_requests=8, logging_config=LoggingConfig(encoding="JSON")
    )

    assert repr(config) == (
        "DeploymentConfig(max_ongoing_requests=8, logging_config=LoggingConfig(encoding='JSON'))"
    )


TWO, THREE = {"num_replicas": 2}, {"autoscaling_config": {"max_replicas": 3}}
SCALED_TO_3 = {"autoscaling_config": AutoscalingConfig(max_replicas=3)}


@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        pytest.param(TWO, {"max_queued_requests": 3}, TWO, id="kept"),
        pytest.param(TWO, THREE, {"num_replicas": 1}, id="autoscaling-for-a-number"),
        pytest.param(THREE, TWO, {"autoscaling_config": None}, id="a-number-for-autoscaling"),
        pytest.param(THREE, {"num_replicas": "auto"}, SCALED_TO_3, id="auto-beside-autoscaling"),
    ],
)
def test_updating_keeps_what_can_stand_beside_the_new_options(
    before: dict[str, Any], options: dict[str, Any], after: dict[str, Any]
) -> None:
    config = DeploymentConfig(**DeploymentConfig(**before).updated(options))

    assert {name: getattr(config, name) for name in after} == after


def test_num_cpus_is_what_ray_actor_options_say_and_one_by_default() -> None:
    assert DeploymentConfig().num_cpus == 1.0
    assert DeploymentConfig(ray_actor_options={"num_cpus": 0.5}).num_cpus == 0.5


def test_the_typed_keywords_are_the_options() -> None:
    deprecated = {"max_concurrent_queries"}

    assert DeploymentOptions.__annotations__.keys() - deprecated == {"name", *CHANGED}
    assert set(CHANGED) == set(DeploymentConfig.model_fields)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_an_option_is_listed_when_changed_exactly_if_nothing_acts_on_it(name: str) -> None:
    isolation = "thread" if name == "loop" else "process"  # processes share no loop
    listed = options_not_acted_on(configured(**{"isolation": isolation, name: CHANGED[name]}))

    assert [option.partition("=")[0] for option in listed] == [name] * (name in NOT_ACTED_ON)


@pytest.mark.parametrize("name", ["max_requests_per_replica", "max_memory_mb"])
def test_only_replicas_in_processes_are_retired(name: str) -> None:
    given = DeploymentConfig(isolation="process", **{name: CHANGED[name]})
    message = (
        f"{name}={getattr(given, name)!r} is for replicas with a process of their own, got "
        "isolation='thread'; add isolation=\"process\", or leave it out"
    )
    refused(ValueError, message, **{name: CHANGED[name]})


def test_a_file_may_give_a_limit_to_a_deployment_that_has_processes_in_code() -> None:
    given = DeploymentOverrides(name="Model", max_memory_mb=512).overriding()

    assert configured(isolation="process").with_options(**given).max_memory_mb == 512
    with pytest.raises(ValueError, match=r"max_memory_mb=512\.0 is for replicas with a process"):
        configured().with_options(**given)


def test_a_default_value_given_by_hand_is_not_listed() -> None:
    assert options_not_acted_on(DeploymentConfig(max_surge_percent=0, logging_config=None)) == []


def test_what_has_no_effect_of_ray_actor_options_is_listed() -> None:
    config = DeploymentConfig(
        num_replicas="auto", ray_actor_options={"num_cpus": 2, "num_gpus": 1, "memory": 9}
    )

    assert options_not_acted_on(config) == ["ray_actor_options={'num_gpus': 1, 'memory': 9}"]


def test_a_null_of_ray_actor_options_is_its_default() -> None:
    nothing = {"num_cpus": None, "num_gpus": None, "runtime_env": None}
    config = DeploymentConfig(isolation="process", ray_actor_options=nothing)

    assert (config.num_cpus, config.num_gpus, config.env_vars) == (1, 0, {})
    assert options_not_acted_on(config) == []


def test_the_options_not_acted_on_are_those_nothing_reads() -> None:
    """An option has an effect here only if a module above `config` reads it, as `config.<option>`.

    Options that only the Ray engine reads have their effect there.
    """
    package = Path(ingress.__file__).parent
    read_as = {name: name for name in CHANGED}
    read_as |= {"num_replicas": "first_count", "ray_actor_options": "num_cpus"}
    read_as |= {"autoscaling_config": "autoscaling"}
    read = {
        node.attr
        for path in package.rglob("*.py")
        if path.name not in ("config.py", "build.py", "declaration.py")
        and path.parent.name != "ray"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config")
    }

    assert {name for name in CHANGED if read_as[name] not in read} == NOT_ACTED_ON | {*CLUSTER_ONLY}


def test_every_config_has_one_base_that_refuses() -> None:
    classes = [AutoscalingConfig, BackpressureConfig, DeploymentConfig, HTTPOptions, LoggingConfig]

    assert all(issubclass(cls, Options) for cls in [*classes, RequestRouterConfig])
