"""The context of the current request, for user code.

It is read on demand from the current call and replica, so a request that does not ask pays nothing.
Both are context variables, so it is available wherever `get_replica_context` is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingress.context import REPLICA
from ingress.core.calls.call import CURRENT_CALL, Call, current_calls


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request on one replica; all fields are empty outside of a request.

    `route` is the path template of the endpoint with the application's prefix, such as
    "/api/items/{id}"; until an endpoint is found, or if there is none, only the prefix. In
    deployments called by handle, `route`, `request_id` and `app_name` are those of the original
    HTTP request; `is_http_request` is true only in the deployment that received it. `deadline` is
    in seconds of `time.monotonic()`.
    """

    request_id: str = ""
    route: str = ""
    app_name: str = ""
    deployment: str = ""
    replica: str = ""
    method_name: str = ""
    multiplexed_model_id: str = ""
    deadline: float | None = None
    is_http_request: bool = False


def get_request_context() -> RequestContext:
    """Return the context of the current request; never `None`.

    A batch has a context of its own, with the model id its requests share and no request id. In
    code of a replica that runs for no request, such as a constructor, only `app_name`,
    `deployment` and `replica` are set.
    """
    return _context_of(CURRENT_CALL.get(None))


def get_batch_request_contexts() -> list[RequestContext]:
    """Return the contexts of all requests of the current batch, in the order of its items.

    Outside of a batch, the list has the context of the current request, or is empty if there is
    none.
    """
    return [_context_of(call) for call in current_calls()]


def _context_of(call: Call | None) -> RequestContext:
    replica = REPLICA.get(None)
    app_name = replica.app_name if replica is not None else ""
    deployment = replica.deployment if replica is not None else ""
    tag = replica.replica_tag if replica is not None else ""
    if call is None:
        return RequestContext(app_name=app_name, deployment=deployment, replica=tag)
    known = call.metadata
    return RequestContext(
        known.request_id,
        call.current_route(),
        call.app_name,
        deployment,
        tag,
        known.method_name,
        known.multiplexed_model_id,
        call.deadline,
        known.is_http_request,
    )
