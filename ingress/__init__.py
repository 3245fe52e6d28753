"""Ray Serve's programming model at FastAPI speed, in one process: `import ingress as serve`."""

# First: Ctrl-C may come during the other imports.
from ingress.core.base import ctrl_c as _ctrl_c  # noqa: F401

# isort: split
from ingress import _unsupported, exceptions
from ingress import autoscaling_policy as autoscaling_policy
from ingress import batching as batching
from ingress import logs as logs
from ingress import metrics as metrics
from ingress.api import (
    RunTarget,
    delete,
    get_app_handle,
    get_deployment_handle,
    run,
    run_many,
    shutdown,
    shutdown_async,
    stalls,
    start,
    status,
)
from ingress.app.asgi import ingress
from ingress.app.batching.batching import batch
from ingress.app.declaration.declaration import Application, Deployment, deployment
from ingress.config import (
    AutoscalingConfig,
    BackpressureConfig,
    HTTPOptions,
    LoggingConfig,
    RequestRouterConfig,
)
from ingress.context import ReplicaContext, get_replica_context
from ingress.core.calls.call import cancellation
from ingress.core.execution.lanes import method
from ingress.handle import (
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
)
from ingress.request_context import (
    RequestContext,
    get_batch_request_contexts,
    get_request_context,
)
from ingress.serving.replicas.multiplex import get_multiplexed_model_id, multiplexed
from ingress.telemetry.watchdog import Stall

__version__ = "0.2.0"

__all__ = [
    "Application",
    "AutoscalingConfig",
    "BackpressureConfig",
    "Deployment",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "HTTPOptions",
    "LoggingConfig",
    "ReplicaContext",
    "RequestContext",
    "RequestRouterConfig",
    "RunTarget",
    "Stall",
    "batch",
    "cancellation",
    "delete",
    "deployment",
    "exceptions",
    "get_app_handle",
    "get_batch_request_contexts",
    "get_deployment_handle",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_request_context",
    "ingress",
    "method",
    "multiplexed",
    "run",
    "run_many",
    "shutdown",
    "shutdown_async",
    "stalls",
    "start",
    "status",
]

__getattr__ = _unsupported.teller(__name__)
_unsupported.explain_imports()
