"""Features of Ray Serve 2.60 that this package does not have, with advice for error messages.

    NAMES        serve.xyz, and serve.module of a module of Ray Serve
    MEMBERS      attributes of objects that the API returns, and names in its modules
    OLDER        names of earlier versions
    PARAMETERS   keywords of functions and methods; for options see `elsewhere` in `config`
    MISPLACED    names of other objects or functions than the one at hand, or of earlier versions;
                 not names of Ray Serve 2.60

docs/compatibility.md lists the same sentences. Tests check that the lists are complete and that
every sentence reaches the user.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

CONTROLLER = "it is for Ray's own processes, and is set there; leave it out"
LOGGING = "configure logging.getLogger('ingress') with the logging module"
NO_GRPC = "there is no gRPC server; serve HTTP, with @serve.ingress(FastAPI())"
STATE = "keep the state in a deployment of its own and pass its handle: Main.bind(State.bind())"
NO_GANGS = "there are no gangs: each replica is independent of the others; leave it out"
BY_REFERENCE = "how values are passed is the engine's choice; leave it out"
TRACING = "set OpenTelemetry's tracer provider in your own code; see docs/opentelemetry.md"
HTTP_ONLY = "pass serve.start(http_options={...}) what it says of HTTP, and leave the rest out"
HTTP_BEFORE = "call serve.start(http_options={'host': ..., 'port': ...}) before it"
NO_PROMETHEUS = "ask Prometheus in a policy of your own, a class or a function: policy_function"
REPLICAS = "set num_replicas or autoscaling_config"
NO_NODES = "serve.status() has what both engines have, and no nodes"
ALWAYS_RUNS = "a handle needs no start and no end; leave it out"

NAMES: Mapping[str, str] = {
    "ControllerOptions": CONTROLLER,
    "TracingConfig": TRACING,
    "configure_default_serve_logger": LOGGING,
    "experimental": "what is in there is not supported; see serve.__all__",
    "gang": NO_GANGS,
    "generated": NO_GRPC,
    "get_deployment_actor": STATE,
    "get_deployment_actor_context": STATE,
    "get_trace_context": TRACING,
    "gradio_integrations": "mount the Gradio app: gradio.mount_gradio_app(app, blocks, path='/')",
    "grpc_util": NO_GRPC,
    "llm": "write a deployment that calls the model; @serve.batch collects its requests",
    "multiplex": "use serve.multiplexed and serve.get_multiplexed_model_id",
    "scripts": "the command is `ingress`: ingress run module:app",
    "taskiq_task_processor": (
        "use Redis or RabbitMQ by Celery, adapter_config=CeleryAdapterConfig(...), or a file"
    ),
    "async_inference_autoscaling_policy": (
        "leave it out: the default policy counts the jobs that wait for a @task_consumer"
    ),
    "dag": "bind deployments to each other: Main.bind(Child.bind())",
    "utils": "there is nothing public in it; see serve.__all__",
}

OLDER: Mapping[str, str] = {
    "RayServeHandle": "use DeploymentHandle; its remote() returns a DeploymentResponse",
    "RayServeSyncHandle": "use DeploymentHandle, and response.result() in a thread",
    "RayServeDeploymentHandle": "use DeploymentHandle",
    "DAGDriver": "bind deployments to each other, and give routes with @serve.ingress(FastAPI())",
    "DAGHandle": "use DeploymentHandle",
    "InputNode": "bind deployments to each other: Main.bind(Child.bind())",
    "json_request": "call await request.json(), or declare the body of a FastAPI route",
    "get_deployment": "serve.get_deployment_handle(deployment_name, app_name)",
    "list_deployments": "serve.status() lists applications and deployments",
    "build": "the command `ingress build module:app` writes the file",
    "SERVE_LOGGER_NAME": 'write "ray.serve": ingress configures the logger of that name too',
}
"""Names of earlier versions of Ray Serve, in any of its modules."""

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "Deployment": {
        "init_args": "they belong to the application: Name.bind(...).init_args",
        "init_kwargs": "they belong to the application: Name.bind(...).init_kwargs",
        "set_logging_config": LOGGING,
        "version": "it has been removed; leave it out",
    },
    "DeploymentResponse": {"by_reference": BY_REFERENCE},
    "DeploymentResponseGenerator": {"by_reference": BY_REFERENCE},
    "DeploymentHandle": {
        "is_initialized": ALWAYS_RUNS,
        "running_replicas_populated": ALWAYS_RUNS,
    },
    "ReplicaContext": {
        "gang_context": NO_GANGS,
        **dict.fromkeys(
            ("code_version", "rank", "world_size"),
            "only a replica in a thread of this process knows it; pass it to bind()",
        ),
    },
    "ReplicaDetails": dict.fromkeys(
        (
            *("actor_id", "actor_name", "log_file_path", "node_id", "node_instance_id"),
            *("node_ip", "pid", "start_time_s", "worker_id"),
        ),
        NO_NODES,
    ),
    "autoscaling_policy": dict.fromkeys(
        (
            *("PrometheusQueryMixin", "PrometheusSample", "PrometheusScalar"),
            "PrometheusVector",
        ),
        NO_PROMETHEUS,
    ),
    "context": {"DeploymentActorContext": STATE},
    "exceptions": {"gRPCStatusError": NO_GRPC},
    "schema": {
        **dict.fromkeys(
            (
                *("APIType", "ApplicationDetails", "ControllerHealthMetrics", "DeploymentDetails"),
                *("DeploymentNode", "DeploymentTopology", "DurationStats", "ProxyDetails"),
                *("ProxyStatus", "ReplicaRank", "ServeActorDetails", "ServeInstanceDetails"),
                *("Target", "TargetGroup"),
            ),
            NO_NODES,
        ),
        **dict.fromkeys(
            (
                *("DeploymentSchema", "HTTPOptionsSchema", "RayActorOptionsSchema"),
                *("ServeApplicationSchema", "ServeDeploySchema", "gRPCOptionsSchema"),
            ),
            "the file is for the command line: ingress run serve.yaml",
        ),
        **dict.fromkeys(
            (
                *("AutoscalingMetricsHealth", "AutoscalingStatus", "DeploymentAutoscalingDetail"),
                *("ScaleDeploymentRequest", "ScalingDecision"),
            ),
            REPLICAS,
        ),
        "EncodingType": "give the word: encoding='TEXT' or 'JSON'",
        "TracingConfig": TRACING,
    },
    "config": {
        "AggregationFunction": "give the word: aggregation_function='mean', 'max' or 'min'",
        "ControllerOptions": CONTROLLER,
        "DeploymentActorConfig": STATE,
        "GangPlacementStrategy": NO_GANGS,
        "GangRuntimeFailurePolicy": NO_GANGS,
        "GangSchedulingConfig": NO_GANGS,
        "ProxyLocation": "where HTTP is served is the engine's choice; leave it out",
        "gRPCOptions": "on Ray, give a dict: serve.start(engine='ray', grpc_options={...})",
    },
}

PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "serve.run": {
        "_local_testing_mode": "engine='local' is what it is for; leave it out",
        "external_scaler_enabled": REPLICAS,
        "controller_options": CONTROLLER,
    },
    "serve.run_many": {
        "wait_for_ingress_deployment_creation": "it returns when all are ready; leave it out",
        "wait_for_applications_running": "it returns when all are ready; leave it out",
        "_local_testing_mode": "engine='local' is what it is for; leave it out",
        "controller_options": CONTROLLER,
    },
    "serve.RunTarget": {
        "external_scaler_enabled": REPLICAS,
    },
    "serve.start": {
        "proxy_location": "where HTTP is served is the engine's choice; leave it out, or say "
        "host=None in http_options for no HTTP",
        "grpc_options": f"{NO_GRPC}, or start with engine='ray'",
        "tracing_config": TRACING,
        "controller_options": CONTROLLER,
        "kwargs": HTTP_ONLY,
    },
    "handle.options": {
        "_prefer_local_routing": "which replica is next is the router's choice; leave it out",
        "_by_reference": BY_REFERENCE,
        "request_serialization": BY_REFERENCE,
        "response_serialization": BY_REFERENCE,
    },
}


MISPLACED: Mapping[str, Mapping[str, str]] = {
    "Application": {
        "bind": "it is bound already; give all arguments to the first bind()",
        "options": "options come first: Name.options(...).bind(...)",
        "remote": "it does not run yet; handle = serve.run(app), then handle.remote(...)",
    },
    "Deployment": {
        "remote": "it does not run yet; handle = serve.run(Name.bind()), then handle.remote(...)",
        "delete": "serve.delete(name) ends its application",
        "deploy": "serve.run(Name.bind(...)) starts it",
        "get_handle": "serve.run(Name.bind(...)) returns its handle, and so does "
        "serve.get_deployment_handle(deployment_name, app_name)",
        "url": "the URL is that of the server, with the route_prefix of serve.run",
    },
    "DeploymentResponse": dict.fromkeys(
        ("_to_object_ref", "_to_object_ref_sync"),
        "pass the response itself to the next handle, or await it",
    ),
    "handle.options": {"use_new_handle_api": "it has been removed; leave it out"},
    "serve.run": dict.fromkeys(("host", "port", "http_options"), HTTP_BEFORE),
}
"""Attributes that another object has or had, and keywords of another function, with advice."""

MEANT: Mapping[str, Mapping[str, str]] = {
    "handle.options": {"method": "method_name"},
    "serve.batch": {
        "batch_size": "max_batch_size",
        "batch_timeout_s": "batch_wait_timeout_s",
        "timeout_s": "batch_wait_timeout_s",
    },
    "serve.multiplexed": {"max_models": "max_num_models_per_replica"},
}
"""Keywords that are often taken for another one, where the spelling alone does not tell which."""


class AbsentModules:
    """A finder at the end of `sys.meta_path`: the imports in `NAMES` fail with their advice.

    `from ingress import llm` first asks the module for an attribute, then for a submodule. The
    advice of the `AttributeError` is lost on the way.
    """

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        if name in (advice := _advice_on(package)):
            # Without the error's `name`: Python would drop an error about this very module.
            raise ModuleNotFoundError(f"{package} has no {name!r}; {advice[name]}")


def explain_imports() -> None:
    """Make imports of what is absent say what to use instead, for good."""
    if AbsentModules not in sys.meta_path:
        sys.meta_path.append(AbsentModules)


def teller(module: str, at_first_use: Mapping[str, str] = {}) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which raises `AttributeError` with advice.

    The module becomes a package without modules: only then `from module import name` asks a finder.
    `at_first_use` are names that it has, each with the module that is imported for it.
    """
    advice = _advice_on(module)
    vars(sys.modules[module]).setdefault("__path__", [])

    def __getattr__(name: str) -> Any:
        if source := at_first_use.get(name):
            found = importlib.import_module(source)
            value = found if source == f"{module}.{name}" else getattr(found, name)
            setattr(sys.modules[module], name, value)
            return value
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{_told(advice, name)}",
            name=name,
            obj=sys.modules[module],
        )

    return __getattr__


def _advice_on(module: str) -> Mapping[str, str]:
    """Return the advice on names of `ingress`, or of one of its modules."""
    package, _, name = module.partition(".")
    if package != "ingress":
        return {}
    return {**OLDER, **(MEMBERS.get(name, {}) if name else NAMES)}


def absent_member(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object does not have; for `__getattr__`."""
    kind = type(owner).__name__
    advice = {**MEMBERS.get(kind, {}), **MISPLACED.get(kind, {})}
    return AttributeError(
        f"{kind!r} object has no attribute {name!r}{_told(advice, name)}",
        name=name,
        obj=owner,
    )


def absent_method(deployment: str, name: str, methods: list[str]) -> str:
    """Return the message for a method that a deployment does not have; for a handle."""
    told = _told(MEMBERS["DeploymentHandle"], name)
    has = f"Available methods: {methods}" if methods else "Its one call is handle.remote(...)"
    return f"deployment '{deployment}' has no method '{name}'. {has}{told}"


def refuse(function: str, given: Mapping[str, object], signature: Callable[..., object]) -> None:
    """Raise `TypeError` for keywords that the function of that name and signature does not take."""
    for name in given:
        advice = {**PARAMETERS.get(function, {}), **MISPLACED.get(function, {})}
        others = advice["kwargs"] if function == "serve.start" else ""
        known = advice.get(name) or others or _meant(function, name, signature)
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {known}")


def _meant(function: str, name: str, signature: Callable[..., object]) -> str:
    takes = [
        each.name
        for each in inspect.signature(signature).parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name != "self"
    ]
    nearest = MEANT.get(function, {}).get(name) or next(
        iter(difflib.get_close_matches(name, takes, n=1)), None
    )
    hint = "" if nearest is None else f"did you mean {nearest}? "
    return f"{hint}it takes: {', '.join(takes)}"


def _told(advice: Mapping[str, str], name: str) -> str:
    return f"; {advice[name]}" if name in advice else ""
