"""Ray Serve's programming model at FastAPI speed, in one process: `import ingress as serve`."""

from ingress import exceptions
from ingress.api import (
    delete,
    get_app_handle,
    get_deployment_handle,
    run,
    shutdown,
    start,
    status,
)
from ingress.asgi import ingress
from ingress.batching import batch
from ingress.config import (
    AutoscalingConfig,
    BackpressureConfig,
    HTTPOptions,
    LoggingConfig,
    RequestRouterConfig,
)
from ingress.context import ReplicaContext, get_replica_context
from ingress.declaration import Application, Deployment, deployment
from ingress.handle import (
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
)

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
    "RequestRouterConfig",
    "batch",
    "delete",
    "deployment",
    "exceptions",
    "get_app_handle",
    "get_deployment_handle",
    "get_replica_context",
    "ingress",
    "run",
    "shutdown",
    "start",
    "status",
]
