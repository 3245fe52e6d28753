"""What the running code may know of the request it works for.

Read when asked for, from the call and the replica that are current: a request that does not ask
pays nothing. Both are context variables, so it holds wherever `get_replica_context` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingress.calls.call import CURRENT_CALL, Call, current_calls
from ingress.context import REPLICA


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request on one replica; all empty outside of a request.

    `route` is the path template of the endpoint with the application's prefix, such as
    "/api/items/{id}"; before an endpoint was found, or if there is none, the prefix. It,
    `request_id` and `app_name` are those of the HTTP request a call was made for, also in the
    deployments that are called then; `is_http_request` tells the first of them. `deadline` is on
    the clock of `time.monotonic()`, in seconds.
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

    A batch has a context of its own, with the model id its requests share and no request id. In a
    constructor and other code of a replica that runs for no request, only `app_name`,
    `deployment` and `replica` are there.
    """
    return _context_of(CURRENT_CALL.get(None))


def get_batch_request_contexts() -> list[RequestContext]:
    """Return the contexts of all requests of the current batch, in the order of its items.

    Elsewhere it is that of the current request alone, and empty if there is none.
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
