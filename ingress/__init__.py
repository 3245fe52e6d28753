"""Ray Serve's programming model at FastAPI speed, in one process: `import ingress as serve`."""

# First: Ctrl-C may come during the other imports.
from ingress.core.base import ctrl_c as _ctrl_c  # noqa: F401

# isort: split
import typing as _typing

from ingress import _unsupported, exceptions
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
from ingress.engines.views import use_views as _use_views
from ingress.handle import (
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
)
from ingress.observe import engine_views as _engine_views
from ingress.request_context import (
    RequestContext,
    get_batch_request_contexts,
    get_request_context,
)
from ingress.serving.replicas.multiplex import get_multiplexed_model_id, multiplexed

if _typing.TYPE_CHECKING:
    from ingress import api as api
    from ingress import autoscaling_policy as autoscaling_policy
    from ingress import batching as batching
    from ingress import logs as logs
    from ingress import metrics as metrics
    from ingress import schema as schema
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
    from ingress.app.asgi.spec import ingress
    from ingress.app.batching.batching import batch
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

_MODULES = {"api", "autoscaling_policy", "batching", "logs", "metrics", "schema"}
# A program that only declares deployments needs few of these; all would take as long to import as
# the rest of the package.
__getattr__ = _unsupported.teller(
    __name__,
    at_first_use={
        **{name: f"ingress.{name}" for name in _MODULES},
        **dict.fromkeys(
            (
                *("RunTarget", "delete", "get_app_handle", "get_deployment_handle", "run"),
                *("run_many", "shutdown", "shutdown_async", "stalls", "start", "status"),
            ),
            "ingress.api",
        ),
        "Stall": "ingress.telemetry.watchdog",
        "batch": "ingress.app.batching.batching",
        "ingress": "ingress.app.asgi.spec",
    },
)
_unsupported.explain_imports()
_use_views(_engine_views)  # engines import no view


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
