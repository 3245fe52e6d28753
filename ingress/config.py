"""The options that users set in code, validated where they are written.

Names, defaults and accepted values: Ray 2.60.0, serve/config.py; error messages:
`ingress.core.base.options`. The default of `max_ongoing_requests` is the guide's 100 (Ray: 5). All
options are recorded; `NOT_ACTED_ON` has those without effect, `app/declaration/cluster_options`
those that one process cannot fulfil.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from ingress._unsupported import teller
from ingress.core.base.options import (
    IN_PLACE,
    NOT_ON_RAY,
    ON_RAY,
    OURS,
    ClassPath,
    Fraction,
    FunctionPath,
    IdempotentMethods,
    Isolation,
    Json,
    KeyWeights,
    LaneLimits,
    LogAttribute,
    LogLevel,
    LoopChoice,
    Mark,
    NonNegativeFloat,
    NonNegativeInt,
    OngoingRequests,
    Options,
    Port,
    PositiveFloat,
    PositiveInt,
    QueuedRequests,
    Replicas,
    is_number,
    is_variable,
)
from ingress.core.base.settings import HTTPLimits
from ingress.core.base.types import DeploymentID, ReplicaID, TimeStampedValue
from ingress.core.execution.execution import Kind, kind

NOT_ACTED_ON: frozenset[str] = frozenset()
"""Deployment options without effect in this process; none at the moment. Of `ray_actor_options`
only `num_cpus` has an effect, and `num_gpus` and `env_vars` where replicas have processes of their
own: `options_not_acted_on` covers the others too."""


DEFAULT_POLICY = "ingress.autoscaling_policy:default_autoscaling_policy"


class AutoscalingPolicy(Options):
    """The policy that decides the number of replicas: a function or its import path.

    It may be a class, too, which is made once, with `policy_kwargs`, and then called.
    """

    policy_function: FunctionPath = DEFAULT_POLICY
    policy_kwargs: dict[str, Any] = Field(default_factory=dict)


class AutoscalingConfig(Options):
    """Options of autoscaling: the number of replicas follows the load."""

    renamed: ClassVar[Mapping[str, str]] = {
        "target_num_ongoing_requests_per_replica": "target_ongoing_requests"
    }

    min_replicas: NonNegativeInt = 1
    initial_replicas: NonNegativeInt | None = None
    max_replicas: PositiveInt = 1
    target_ongoing_requests: PositiveFloat = 2
    metrics_interval_s: PositiveFloat = 10.0
    look_back_period_s: PositiveFloat = 30.0
    smoothing_factor: PositiveFloat = 1.0
    upscale_smoothing_factor: PositiveFloat | None = None
    downscale_smoothing_factor: PositiveFloat | None = None
    upscaling_factor: PositiveFloat | None = None
    downscaling_factor: PositiveFloat | None = None
    downscale_delay_s: NonNegativeFloat = 600.0
    downscale_to_zero_delay_s: NonNegativeFloat | None = None
    upscale_delay_s: NonNegativeFloat = 30.0
    aggregation_function: Literal["mean", "max", "min"] = "mean"
    policy: AutoscalingPolicy = Field(default_factory=AutoscalingPolicy)

    @property
    def upscaling(self) -> float:
        """The factor of a difference upwards; two older options are its defaults."""
        return self.upscaling_factor or self.upscale_smoothing_factor or self.smoothing_factor

    @property
    def downscaling(self) -> float:
        """The factor of a difference downwards; two older options are its defaults."""
        return self.downscaling_factor or self.downscale_smoothing_factor or self.smoothing_factor

    @property
    def first_count(self) -> int:
        """The number of replicas at the start."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        low, start, high = self.min_replicas, self.initial_replicas, self.max_replicas
        if high < low:
            raise ValueError(
                f"max_replicas ({high}) must be greater than or equal to min_replicas ({low}); "
                "raise max_replicas or lower min_replicas"
            )
        if start is not None and not low <= start <= high:
            raise ValueError(
                f"initial_replicas ({start}) must be between min_replicas ({low}) and "
                f"max_replicas ({high}); leave it out to start with min_replicas"
            )
        return self


@dataclass(frozen=True, slots=True)
class AutoscalingContext:
    """The load and the replicas of a deployment, as an autoscaling policy gets them.

    `total_num_requests` and `total_queued_requests` are aggregated over the look-back period; times
    are Unix time in seconds. `raw_metrics` are the values that `record_autoscaling_stats` of each
    replica returned in that period, the latest last; `aggregated_metrics` are one number for each.
    A name that no replica has recorded yet is in neither.
    """

    deployment_id: DeploymentID
    deployment_name: str
    app_name: str
    current_num_replicas: int
    target_num_replicas: int
    running_replicas: list[ReplicaID]
    total_num_requests: float
    total_queued_requests: float
    policy_state: dict[str, Any]
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 1
    last_scale_up_time: float | None = None
    last_scale_down_time: float | None = None
    current_time: float | None = None
    config: AutoscalingConfig | None = None
    aggregated_metrics: dict[str, dict[ReplicaID, float]] = field(default_factory=dict)
    raw_metrics: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = field(default_factory=dict)

    @property
    def total_running_requests(self) -> float:
        """The requests that run, without those that wait."""
        return max(0.0, self.total_num_requests - self.total_queued_requests)


class BackpressureConfig(Options):
    """The refusal of a request when the queue is full: status, and `Retry-After` in seconds."""

    status_code: Literal[503, 429] = 503
    retry_after_s: NonNegativeFloat | None = None


class RequestRouterConfig(Options):
    """The policy that chooses the replica of a request: a class or its import path."""

    request_router_class: ClassPath = "ingress.request_router:PowerOfTwoChoicesRequestRouter"
    request_router_kwargs: Json = Field(default_factory=dict)
    request_routing_stats_period_s: PositiveFloat = 10.0
    request_routing_stats_timeout_s: PositiveFloat = 30.0
    initial_backoff_s: PositiveFloat = 0.025
    backoff_multiplier: PositiveFloat = 2.0
    max_backoff_s: PositiveFloat = 0.5


class FairnessConfig(Options):
    """The shares of fairness keys in a queue; a key that is not in `weights` has weight 1.

    `max_queued_per_key` is the number of calls of one key that may wait, -1 for no limit.
    """

    weights: KeyWeights = Field(default_factory=dict)
    max_queued_per_key: QueuedRequests = -1

    def slots_of(self, key: str) -> float:
        """Return the number of slots of a key's turn, at least 1."""
        return self.weights.get(key, 1.0) / self._least

    @cached_property
    def _least(self) -> float:
        return min(1.0, *self.weights.values(), 1.0)


def check_key_function(function: object) -> None:
    """Raise `ValueError`, with the fix, for what cannot be the function of a `fairness_key`."""
    fix = "write `def key(request): return request.headers.get('x-tenant')`"
    if not callable(function) or kind(function) is not Kind.FUNCTION:
        raise ValueError(
            f"fairness_key must be the name of a header or a `def` that returns a str, got "
            f"{function!r}, and it runs on the server's loop before the request waits; {fix}"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f"fairness_key={function!r} must take one argument, the request: {error}; {fix}"
        ) from None
    except ValueError:  # Python cannot tell the parameters of some functions in C
        pass


def _checked_key(key: object) -> object:
    if not (key is None or (isinstance(key, str) and _KEY.fullmatch(key))):
        check_key_function(key)
    elif str(key).lower() in _SECRET:
        raise ValueError(
            f"fairness_key={key!r} is a header with secrets, and keys are shown in metrics and "
            "errors; give a function that returns the name of the client, such as "
            "`def key(request): return tenant_of(request.headers)`"
        )
    return key


_KEY = re.compile(r"[-!#$%&'*+.^`|~\w]+(:[\w.]+)?", re.ASCII)
"""The name of a header, RFC 9110, 5.6.2, or the import path of a function."""
_SECRET = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


class LoggingConfig(Options):
    """Options of logging: format, level, destination, access log."""

    encoding: Literal["TEXT", "JSON"] = "TEXT"
    log_level: LogLevel = "INFO"
    logs_dir: str | None = None
    enable_access_log: bool = True
    additional_log_standard_attrs: list[LogAttribute] = Field(default_factory=list)


class HTTPOptions(Options):
    """Options of the HTTP server that `serve.start` and `serve.run` start.

    `host=None` disables HTTP. The default of `host` is `RAY_SERVE_DEFAULT_HTTP_HOST`, else
    127.0.0.1; with port 0 the system chooses a port. The default of `request_timeout_s` is
    `RAY_SERVE_REQUEST_PROCESSING_TIMEOUT_S`, else none. `retry_started_methods` are the HTTP
    methods that may be retried although user code may have run.

    docs/limits.md describes the limits on the size and duration of what a client sends. Their
    defaults come from the environment, `INGRESS_MAX_BODY_SIZE` and so on; `None` means no limit.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "middlewares": "it has been removed; add the middleware to the FastAPI app.",
        "num_cpus": "it has been removed; the server has no CPUs of its own.",
    }

    host: str | None = "127.0.0.1"
    port: Port = 8000
    root_path: str = ""
    root_url: str = ""
    request_timeout_s: PositiveFloat | None = None
    retry_started_methods: IdempotentMethods = Field(default_factory=list)
    keep_alive_timeout_s: PositiveFloat = 90
    limit_connections: PositiveInt | None = None
    max_header_bytes: PositiveInt = 65536
    header_timeout_s: PositiveFloat | None = 15.0
    body_buffer_bytes: PositiveInt = 65536
    body_idle_timeout_s: PositiveFloat | None = 30.0
    min_body_rate: NonNegativeFloat | None = 240
    max_body_size: PositiveInt | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    location: object = None

    @model_validator(mode="after")
    def _certificate_is_whole(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError(
                f"ssl_keyfile={self.ssl_keyfile!r} and ssl_certfile={self.ssl_certfile!r} must be "
                "given together; give both, or neither for plain HTTP"
            )
        return self

    def limits(self, otherwise: HTTPLimits) -> HTTPLimits:
        """Return the limits that were given, and the others from `otherwise`."""
        given = {each.name for each in fields(HTTPLimits)} & self.model_fields_set
        return replace(otherwise, **{name: getattr(self, name) for name in given})


ACTOR_OPTIONS = (
    *("accelerator_type", "fallback_strategy", "label_selector", "memory", "num_cpus"),
    *("num_gpus", "resources", "runtime_env"),
)
"""The names that `ray_actor_options` may have: Ray 2.60.0, `_private/config.py`."""


class DeploymentConfig(Options):
    """The options of one deployment, without its name. Each says what Ray makes of it."""

    belong_to: ClassVar[str] = "@serve.deployment"
    is_whole: ClassVar[bool] = True  # not only the options that replace those in code
    elsewhere: ClassVar[Mapping[str, str]] = {
        "route_prefix": "pass it to serve.run(app, route_prefix=...).",
        "version": "it has been removed; leave it out.",
        **dict.fromkeys(
            ("num_cpus", "num_gpus", "memory", "resources", "runtime_env", "accelerator_type"),
            "it is an option of ray_actor_options.",
        ),
    }
    renamed: ClassVar[Mapping[str, str]] = {"max_concurrent_queries": "max_ongoing_requests"}
    user_frame: ClassVar[int] = 5  # two normalised(), __init__, deployment() or .options()

    num_replicas: Annotated[Replicas, IN_PLACE, OURS] = 1
    max_ongoing_requests: Annotated[OngoingRequests, IN_PLACE, OURS] = 100
    max_queued_requests: Annotated[QueuedRequests, IN_PLACE, ON_RAY] = -1
    lanes: Annotated[LaneLimits, OURS] = Field(default_factory=dict)
    loop: Annotated[LoopChoice | None, OURS] = None
    isolation: Annotated[Isolation, OURS] = "thread"
    max_requests_per_replica: Annotated[PositiveInt | None, IN_PLACE, OURS] = None
    max_memory_mb: Annotated[PositiveFloat | None, IN_PLACE, OURS] = None
    user_config: Annotated[Json, IN_PLACE, ON_RAY] = None
    graceful_shutdown_timeout_s: Annotated[NonNegativeFloat, IN_PLACE, ON_RAY] = 20.0
    graceful_shutdown_wait_loop_s: Annotated[NonNegativeFloat, IN_PLACE, ON_RAY] = 2.0
    health_check_period_s: Annotated[PositiveFloat, IN_PLACE, ON_RAY] = 10.0
    health_check_timeout_s: Annotated[PositiveFloat, IN_PLACE, ON_RAY] = 30.0
    ray_actor_options: Annotated[dict[str, Any], OURS] = Field(default_factory=dict)
    backpressure_config: Annotated[BackpressureConfig | None, IN_PLACE, ON_RAY] = None
    autoscaling_config: Annotated[AutoscalingConfig | None, IN_PLACE, ON_RAY] = None
    request_router_config: Annotated[RequestRouterConfig | None, ON_RAY] = None
    fairness_key: Annotated[Any, AfterValidator(_checked_key), IN_PLACE, NOT_ON_RAY] = None
    fairness_config: Annotated[FairnessConfig | None, IN_PLACE, NOT_ON_RAY] = None
    logging_config: Annotated[LoggingConfig | None, ON_RAY] = None
    max_constructor_retry_count: Annotated[PositiveInt, IN_PLACE, ON_RAY] = 20
    max_replicas_per_node: Annotated[PositiveInt | None, IN_PLACE, ON_RAY] = None
    placement_group_bundles: Annotated[list[dict[str, float]] | None, ON_RAY] = None
    placement_group_strategy: Annotated[str | None, ON_RAY] = None
    placement_group_bundle_label_selector: Annotated[list[dict[str, str]] | None, ON_RAY] = None
    placement_group_fallback_strategy: Annotated[list[dict[str, Any]] | None, ON_RAY] = None
    gang_scheduling_config: Annotated[object, ON_RAY] = None
    deployment_actors: Annotated[object, ON_RAY] = None
    rolling_update_percentage: Annotated[Fraction, IN_PLACE, ON_RAY] = 0.2
    max_surge_percent: Annotated[NonNegativeFloat, IN_PLACE, ON_RAY] = 0

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def option_names(cls) -> list[str]:
        return sorted(["name", *cls.model_fields])

    @classmethod
    def marked(cls, mark: Mark) -> frozenset[str]:
        """Return the names of the options with this mark."""
        return frozenset(n for n, each in cls.model_fields.items() if mark in each.metadata)

    @classmethod
    def normalised(cls, given: dict[str, Any]) -> dict[str, Any]:
        options = super().normalised(given)
        for name in ("num_replicas", "ray_actor_options"):
            if options.get(name, ...) is None:
                del options[name]
        if isinstance(actor := options.get("ray_actor_options"), dict):
            options["ray_actor_options"] = {k: v for k, v in actor.items() if v is not None}
        return options

    @model_validator(mode="after")
    def _replicas_have_one_source(self) -> Self:
        is_manual = "num_replicas" in self.model_fields_set and self.num_replicas != "auto"
        if is_manual and self.autoscaling_config is not None:
            raise ValueError(
                "Manually setting num_replicas is not allowed when autoscaling_config is "
                f"provided, got num_replicas={self.num_replicas}; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _actor_options_are_those_of_ray(self) -> Self:
        for name in self.ray_actor_options:
            if name not in ACTOR_OPTIONS:
                nearest = difflib.get_close_matches(str(name), ACTOR_OPTIONS, n=1)
                others = nearest[0] if nearest else f"one of {', '.join(ACTOR_OPTIONS)}"
                raise ValueError(
                    f"Specifying {name!r} in ray_actor_options is not allowed; leave it out, or "
                    f"write {others}"
                )
        runtime_env = self.ray_actor_options.get("runtime_env", {})
        variables = runtime_env.get("env_vars") if isinstance(runtime_env, dict) else None
        if not isinstance(runtime_env, dict):
            raise ValueError(
                "ray_actor_options['runtime_env'] must be a valid dictionary, got "
                f"{runtime_env!r}; leave it out for none"
            )
        if not isinstance(variables, dict | None):
            raise ValueError(
                "ray_actor_options['runtime_env']['env_vars'] must be a valid dictionary, got "
                f"{variables!r}; leave it out for none"
            )
        return self

    @model_validator(mode="after")
    def _resources_are_numbers(self) -> Self:
        cpus = self.ray_actor_options.get("num_cpus", 1)
        if not is_number(cpus) or cpus < 0:
            raise ValueError(
                f"ray_actor_options['num_cpus'] must be a number ≥ 0, got {cpus!r}; "
                "leave it out for the default, 1"
            )
        gpus = self.ray_actor_options.get("num_gpus", 0)
        if self.isolation == "process" and not (
            is_number(gpus) and gpus >= 0 and (gpus <= 1 or gpus == int(gpus))
        ):
            raise ValueError(
                "ray_actor_options['num_gpus'] must be a whole number, or a part of one GPU below "
                f"1, got {gpus!r}; leave it out for none"
            )
        return self

    @model_validator(mode="after")
    def _calls_can_take_turns(self) -> Self:
        routing, defaults = self.request_router_config, RequestRouterConfig()
        is_fair = self.fairness_key is not None or self.fairness_config is not None
        if is_fair and (routing or defaults).request_router_class != defaults.request_router_class:
            raise ValueError(
                "fairness_key and fairness_config order the queue of the default request router, "
                f"got request_router_class={routing and routing.request_router_class!r}, with "
                "which each call waits for replicas of its own; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _isolation_fits(self) -> Self:
        if self.isolation == "process" and self.loop == "shared":
            raise ValueError(
                'loop="shared" is for replicas in threads, got isolation="process", where each '
                "replica has a process and a loop of its own; leave one of them out"
            )
        for name in ("max_requests_per_replica", "max_memory_mb"):
            value = getattr(self, name)
            if value is not None and self.is_whole and self.isolation != "process":
                raise ValueError(
                    f"{name}={value!r} is for replicas with a process of their own, got isolation="
                    f'{self.isolation!r}; add isolation="process", or leave it out'
                )
        return self

    @model_validator(mode="after")
    def _variables_are_text(self) -> Self:
        if self.isolation == "process":
            for name, value in self.env_vars.items():
                if not isinstance(value, str):
                    raise ValueError(
                        "ray_actor_options['runtime_env']['env_vars'] must have values of text, "
                        f"got {name!r}: {value!r}; write {name!r}: {str(value)!r}"
                    )
                if not is_variable(name, value):
                    raise ValueError(
                        "ray_actor_options['runtime_env']['env_vars'] must have names of text "
                        "without '=', and no NUL in a name or value, got "
                        f"{name!r}: {value!r}; correct it"
                    )
        return self

    @property
    def env_vars(self) -> dict[str, str]:
        """The environment variables of a replica with a process of its own."""
        return dict(self.ray_actor_options.get("runtime_env", {}).get("env_vars") or {})

    @property
    def autoscaling(self) -> AutoscalingConfig | None:
        """The options of autoscaling, `None` for a fixed number of replicas.

        `num_replicas="auto"` means 1 to 100 replicas, unless `autoscaling_config` has others. There
        are at most `max_replicas_per_node`, because this process is one node.
        """
        config = self.autoscaling_config
        if self.num_replicas == "auto":
            given = (
                {} if config is None else {n: getattr(config, n) for n in config.model_fields_set}
            )
            config = AutoscalingConfig(**{"min_replicas": 1, "max_replicas": 100, **given})
        most = self.max_replicas_per_node
        if config is None or most is None or config.max_replicas <= most:
            return config
        return config.model_copy(update={"max_replicas": most})

    @property
    def first_count(self) -> int:
        """The number of replicas at the start; autoscaling may begin with none."""
        scaling = self.autoscaling
        if scaling is not None:
            return scaling.first_count
        assert isinstance(self.num_replicas, int)
        return self.num_replicas

    @property
    def replica_count(self) -> int:
        """The number of replicas to plan for, at least 1."""
        return max(1, self.first_count)

    @property
    def num_cpus(self) -> float:
        """The CPUs a replica may use: `ray_actor_options["num_cpus"]`, default 1 as in Ray."""
        return float(self.ray_actor_options.get("num_cpus", 1))

    @property
    def num_gpus(self) -> float:
        """The GPUs of a replica with a process of its own: whole ones, or a part of one."""
        return float(self.ray_actor_options.get("num_gpus", 0))

    def with_options(self, **options: Any) -> DeploymentConfig:
        """Return a config with these options changed. Raises as the constructor."""
        return DeploymentConfig(**self.updated(options)).with_origins(self.origins_without(options))

    def origin_of(self, option: str) -> str:
        """Return the origin of an option's value: "default", "code", or a file or command."""
        if option not in self.model_fields_set:
            return "default"
        return self._origins.get(option, "code")

    def with_origins(self, origins: Mapping[str, str]) -> DeploymentConfig:
        """Return the same config, in which these options come from elsewhere than code."""
        if not origins:
            return self
        same = self.model_copy()
        same._origins = {**self._origins, **origins}
        return same

    def origins_without(self, options: Iterable[str]) -> dict[str, str]:
        """Return the origins other than code, without those of the options that are named."""
        changed = set(options)
        return {name: each for name, each in self._origins.items() if name not in changed}

    def updated(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the options given to this config, updated with `options`, as keywords.

        An option that excludes a recorded option replaces it.
        """
        recorded = {name: getattr(self, name) for name in self.model_fields_set}
        for name, replaced in _TAKES_THE_PLACE_OF.items():
            if name in options and options[name] != "auto" != recorded.get(replaced):
                recorded.pop(replaced, None)
        return recorded | dict(options)


_OPTIONS_OF: Mapping[str, type[Options]] = {
    "autoscaling_config": AutoscalingConfig,
    "backpressure_config": BackpressureConfig,
    "fairness_config": FairnessConfig,
    "logging_config": LoggingConfig,
    "request_router_config": RequestRouterConfig,
}
for _key, _model in _OPTIONS_OF.items():
    _model.elsewhere = dict.fromkeys(
        DeploymentConfig.model_fields, f"it is an option of the deployment, beside {_key}."
    )
    DeploymentConfig.elsewhere = {
        **dict.fromkeys(_model.model_fields, f"it is an option of {_key}."),
        **DeploymentConfig.elsewhere,
    }


_TAKES_THE_PLACE_OF = {
    "autoscaling_config": "num_replicas",
    "num_replicas": "autoscaling_config",
    **DeploymentConfig.renamed,
}


class DeploymentOptions(TypedDict, total=False):
    """The keywords of `@deployment` and `.options`, for editors and type checkers."""

    name: str
    num_replicas: int | Literal["auto"] | None
    max_ongoing_requests: int
    max_concurrent_queries: int
    max_queued_requests: int
    lanes: dict[str, int]
    loop: Literal["own", "shared"] | None
    isolation: Literal["thread", "process"]
    max_requests_per_replica: int | None
    max_memory_mb: float | None
    user_config: object
    graceful_shutdown_timeout_s: float
    graceful_shutdown_wait_loop_s: float
    health_check_period_s: float
    health_check_timeout_s: float
    ray_actor_options: dict[str, Any] | None
    backpressure_config: BackpressureConfig | dict[str, Any] | None
    autoscaling_config: AutoscalingConfig | dict[str, Any] | None
    request_router_config: RequestRouterConfig | dict[str, Any] | None
    fairness_key: str | Callable[[Any], str | None] | None
    fairness_config: FairnessConfig | dict[str, Any] | None
    logging_config: LoggingConfig | dict[str, Any] | None
    max_constructor_retry_count: int
    max_replicas_per_node: int | None
    placement_group_bundles: list[dict[str, float]] | None
    placement_group_strategy: str | None
    placement_group_bundle_label_selector: list[dict[str, str]] | None
    placement_group_fallback_strategy: list[dict[str, Any]] | None
    gang_scheduling_config: object
    deployment_actors: object
    rolling_update_percentage: float
    max_surge_percent: float


def options_not_acted_on(config: DeploymentConfig) -> list[str]:
    """Return `option=value` for each option that was set, is not the default and does nothing."""
    silent = {name: each for name, each in config.changed().items() if name in NOT_ACTED_ON}
    others = {key: value for key, value in config.ray_actor_options.items() if key != "num_cpus"}
    if config.isolation == "process":
        others.pop("num_gpus", None)
        if others.get("runtime_env", {}).keys() <= {"env_vars"}:
            others.pop("runtime_env", None)
    if config.max_memory_mb is not None and sys.platform != "linux":
        silent["max_memory_mb"] = config.max_memory_mb  # no other system has /proc
    if others:
        silent["ray_actor_options"] = others
    return [f"{name}={value!r}" for name, value in silent.items()]


__getattr__ = teller(__name__)
