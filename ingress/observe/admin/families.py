"""The metrics of `/metrics`: their names, types and labels; the table in docs/metrics.md has them.

The names that begin with `ray_serve_` are those that Ray 2.60's own endpoint shows, with its labels
but for the ones that name Ray's actors, handles and nodes: Grafana's boards for Ray Serve work.
"""

from __future__ import annotations

from typing import NamedTuple

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
_HTTP = ("application", "route", "method", "status_code")
_DEPLOYMENT = ("application", "deployment")
_REPLICA = ("application", "deployment", "replica")
_ROUTE = (*_REPLICA, "route")


class Family(NamedTuple):
    """One metric. The name of a counter ends with `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


HTTP_REQUESTS = Family("ray_serve_num_http_requests_total", COUNTER, _HTTP, "HTTP requests.")
HTTP_ERRORS = Family(
    "ray_serve_num_http_error_requests_total",
    COUNTER,
    ("application", "route", "method", "error_code"),
    "HTTP requests that were answered with 400 or more, or whose client left (499).",
)
DEPLOYMENT_HTTP_ERRORS = Family(
    "ray_serve_num_deployment_http_error_requests_total",
    COUNTER,
    (*_DEPLOYMENT, "route", "method", "error_code"),
    "The same, with the deployment that got the requests.",
)
HTTP_LATENCY = Family(
    "ray_serve_http_request_latency_ms",
    HISTOGRAM,
    _HTTP,
    "Time from the head of a request to the end of its response, in ms.",
)
ROUTER_REQUESTS = Family(
    "ray_serve_num_router_requests_total",
    COUNTER,
    _DEPLOYMENT,
    "Calls that the router of a deployment accepted.",
)
QUEUED = Family(
    "ray_serve_deployment_queued_queries", GAUGE, _DEPLOYMENT, "Calls that wait for a slot."
)
AT_REPLICAS = Family(
    "ray_serve_num_ongoing_requests_at_replicas",
    GAUGE,
    _DEPLOYMENT,
    "Calls that have a slot of a replica.",
)
DEPLOYMENT_REQUESTS = Family(
    "ray_serve_deployment_request_counter_total",
    COUNTER,
    _ROUTE,
    "Calls that a replica has served without an error.",
)
DEPLOYMENT_ERRORS = Family(
    "ray_serve_deployment_error_counter_total",
    COUNTER,
    (*_ROUTE, "exception_type"),
    "Calls that raised an exception, or whose deadline passed.",
)
PROCESSING_LATENCY = Family(
    "ray_serve_deployment_processing_latency_ms",
    HISTOGRAM,
    _ROUTE,
    "Time that a call took on its replica, in ms.",
)
PROCESSING = Family(
    "ray_serve_replica_processing_queries",
    GAUGE,
    _REPLICA,
    "Calls that have a slot of the replica.",
)
STARTS = Family(
    "ray_serve_deployment_replica_starts_total",
    COUNTER,
    _REPLICA,
    "Starts of the replica: 1, or with --workers those in all workers.",
)
HEALTHY = Family(
    "ray_serve_deployment_replica_healthy",
    GAUGE,
    _REPLICA,
    "1 if the replica is healthy, 0 if it is not.",
)
BATCHES = Family(
    "ray_serve_batches_processed_total",
    COUNTER,
    (*_REPLICA, "function_name"),
    "Batches of a @serve.batch function that were run.",
)
BATCH_WAIT = Family(
    "ray_serve_batch_wait_time_ms",
    HISTOGRAM,
    (*_REPLICA, "function_name"),
    "Time from the first call of a batch until the batch begins, in ms.",
)
BATCH_EXECUTION = Family(
    "ray_serve_batch_execution_time_ms",
    HISTOGRAM,
    (*_REPLICA, "function_name"),
    "Time that a batch took, in ms.",
)
BATCH_SIZE = Family(
    "ray_serve_actual_batch_size",
    HISTOGRAM,
    (*_REPLICA, "function_name"),
    "Size of a batch when it begins: its calls, or what batch_size_fn says.",
)
BATCH_UTILIZATION = Family(
    "ray_serve_batch_utilization_percent",
    HISTOGRAM,
    (*_REPLICA, "function_name"),
    "The same, in percent of max_batch_size or of the chosen size.",
)
BATCH_QUEUE = Family(
    "ray_serve_batch_queue_length",
    GAUGE,
    (*_REPLICA, "function_name"),
    "Calls whose batch has not begun.",
)
MODELS = Family(
    "ray_serve_num_multiplexed_models",
    GAUGE,
    _REPLICA,
    "Models it has or is loading.",
)
MODEL_IDS = Family(
    "ray_serve_registered_multiplexed_model_id",
    GAUGE,
    (*_REPLICA, "model_id"),
    "1 for each model it has or is loading, at most 100 of them.",
)
MODEL_GETS = Family(
    "ray_serve_multiplexed_get_model_requests_counter_total",
    COUNTER,
    _REPLICA,
    "Times that code asked for a model, which was there or had to be loaded.",
)
MODEL_LOADS = Family(
    "ray_serve_multiplexed_models_load_counter_total", COUNTER, _REPLICA, "Models loaded."
)
MODEL_UNLOADS = Family(
    "ray_serve_multiplexed_models_unload_counter_total",
    COUNTER,
    _REPLICA,
    "Models that were unloaded.",
)
MODEL_LOAD_TIME = Family(
    "ray_serve_multiplexed_model_load_latency_ms",
    HISTOGRAM,
    _REPLICA,
    "Time that the load of a model took, in ms, without failed loads.",
)
MODEL_UNLOAD_TIME = Family(
    "ray_serve_multiplexed_model_unload_latency_ms",
    HISTOGRAM,
    _REPLICA,
    "Time that the unloading of a model took, in ms.",
)
APPLICATION_STATUS = Family(
    "ray_serve_application_status",
    GAUGE,
    ("application",),
    "1 DEPLOY_FAILED, 2 UNHEALTHY, 3 NOT_STARTED, 4 DELETING, 5 DEPLOYING, 6 RUNNING.",
)
DEPLOYMENT_STATUS = Family(
    "ray_serve_deployment_status",
    GAUGE,
    _DEPLOYMENT,
    "1 DEPLOY_FAILED, 2 UNHEALTHY, 3 UPDATING, 4 UPSCALING, 5 DOWNSCALING, 6 HEALTHY.",
)
TARGET_REPLICAS = Family(
    "ray_serve_autoscaling_target_replicas",
    GAUGE,
    _DEPLOYMENT,
    "Replicas that the deployment should have.",
)
REJECTED = Family(
    "ingress_requests_rejected_total",
    COUNTER,
    _DEPLOYMENT,
    "Calls that were refused: the queue was full, or they could not be answered in time.",
)
SHED = Family(
    "ingress_requests_shed_total",
    COUNTER,
    _DEPLOYMENT,
    "Calls that waited, and were refused because they could not be answered in time any more.",
)
RETRIES = Family(
    "ingress_request_retries_total",
    COUNTER,
    _DEPLOYMENT,
    "Calls that were sent to another replica.",
)
CANCELLED = Family(
    "ingress_requests_cancelled_total",
    COUNTER,
    _ROUTE,
    "Calls on a replica that their callers have cancelled, or whose clients have left.",
)
EXPIRED = Family(
    "ingress_requests_expired_total", COUNTER, _DEPLOYMENT, "Calls whose deadline passed."
)
LOSSES = Family(
    "ingress_replica_losses_total",
    COUNTER,
    _DEPLOYMENT,
    "Replicas that ended by themselves, such as a process that was killed, and were replaced.",
)
FAILED_STARTS = Family(
    "ingress_replica_failed_starts_total", COUNTER, _DEPLOYMENT, "Starts of replicas that failed."
)
HELD = Family(
    "ingress_deployment_held_seconds",
    GAUGE,
    _DEPLOYMENT,
    "Seconds for which all slots have been held and no call has ended; 0 if a slot is free.",
)
SLOTS = Family("ingress_replica_slots", GAUGE, _REPLICA, "Slots: max_ongoing_requests.")
ORPHANS = Family(
    "ingress_replica_orphans",
    GAUGE,
    _REPLICA,
    "Calls that hold a slot although they have been answered: their code does not end.",
)
STALLS = Family(
    "ingress_loop_stall_seconds",
    HISTOGRAM,
    (*_REPLICA, "method"),
    "Stalls of the replica's event loop, in seconds, by the method that blocked it.",
)
THREAD_WAIT = Family(
    "ingress_thread_wait_seconds",
    HISTOGRAM,
    (*_REPLICA, "lane"),
    "Time that a def waited for a worker thread, in seconds; no lane for the replica's own.",
)
LANE_CALLS = Family(
    "ingress_lane_calls",
    GAUGE,
    (*_REPLICA, "lane", "state"),
    'Calls of a lane: "ongoing" in its threads, or "queued".',
)
LANE_LIMIT = Family("ingress_lane_threads", GAUGE, (*_REPLICA, "lane"), "Threads of a lane.")
BATCHED_CALLS = Family(
    "ingress_batched_calls_total",
    COUNTER,
    (*_REPLICA, "function_name"),
    "Calls in the batches that were run.",
)
CHOSEN_SIZE = Family(
    "ingress_batch_chosen_size",
    GAUGE,
    (*_REPLICA, "function_name"),
    "Largest size that target_latency_ms had chosen for the last batch.",
)
CHOSEN_WAIT = Family(
    "ingress_batch_chosen_wait_seconds",
    GAUGE,
    (*_REPLICA, "function_name"),
    "Longest wait for one more call that it had chosen, in seconds.",
)
MEMORY = Family(
    "ingress_process_resident_memory_bytes",
    GAUGE,
    ("process",),
    "Resident memory of a process: server, supervisor, worker-1, or server/default/Model#0.",
)
CPU = Family("ingress_process_cpu_seconds_total", COUNTER, ("process",), "CPU time of a process.")
THREADS = Family("ingress_process_threads", GAUGE, ("process",), "Threads of a process.")
GIL_WAIT = Family(
    "ingress_gil_wait_seconds_total",
    COUNTER,
    ("process",),
    "Seconds by which the watchdog woke late, as other threads held the GIL; 0 while it is off.",
)
PROCESSOR_WAIT = Family(
    "ingress_processor_wait_seconds_total",
    COUNTER,
    ("process",),
    "Seconds for which the watchdog was ready to run and had no processor; 0 if not on Linux.",
)
WORKERS = Family(
    "ingress_workers", GAUGE, ("state",), 'Processes that serve: "ready", or "silent".'
)

FAMILIES = tuple(each for each in list(globals().values()) if isinstance(each, Family))
