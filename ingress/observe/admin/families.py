"""The metrics of `/metrics`: names, types, labels, values; the table in docs/metrics.md has them.

The names that begin with `ray_serve_` are those that Ray 2.60's own endpoint shows, with its labels
but for the ones that name Ray's actors, handles and nodes: Grafana's boards for Ray Serve work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ingress.core.base.counters import Latency

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
HTTP = ("application", "route", "method", "status_code")
DEPLOYMENT = ("application", "deployment")
REPLICA = ("application", "deployment", "replica")
ROUTE = (*REPLICA, "route")
BATCH = (*REPLICA, "function_name")
PROCESS = ("process",)


class Family(NamedTuple):
    """One metric. The name of a counter ends with `_total`.

    `of` returns its value from the part of a snapshot that has these labels: a process, a
    deployment, a replica, the `Latency` of a route, or the `BatchCount` of a function. A metric
    without it is made from several parts, by `exposition`.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str
    of: Callable[[Any], float | Latency] | None = None


OF_PARTS = (
    Family(
        "ray_serve_num_router_requests_total",
        COUNTER,
        DEPLOYMENT,
        "Calls that the router of a deployment accepted.",
        lambda each: each.requests,
    ),
    Family(
        "ray_serve_deployment_queued_queries",
        GAUGE,
        DEPLOYMENT,
        "Calls that wait for a slot.",
        lambda each: each.queued,
    ),
    Family(
        "ray_serve_num_ongoing_requests_at_replicas",
        GAUGE,
        DEPLOYMENT,
        "Calls that have a slot of a replica.",
        lambda each: each.ongoing,
    ),
    Family(
        "ray_serve_deployment_request_counter_total",
        COUNTER,
        ROUTE,
        "Calls that a replica has served without an error.",
        lambda each: each.count - each.errors - each.cancelled,
    ),
    Family(
        "ray_serve_deployment_processing_latency_ms",
        HISTOGRAM,
        ROUTE,
        "Time that a call took on its replica, in ms.",
        lambda each: each,
    ),
    Family(
        "ray_serve_replica_processing_queries",
        GAUGE,
        REPLICA,
        "Calls that have a slot of the replica.",
        lambda each: each.ongoing,
    ),
    Family(
        "ray_serve_batches_processed_total",
        COUNTER,
        BATCH,
        "Batches of a @serve.batch function that were run.",
        lambda each: each.batches,
    ),
    Family(
        "ray_serve_batch_wait_time_ms",
        HISTOGRAM,
        BATCH,
        "Time from the first call of a batch until the batch begins, in ms.",
        lambda each: each.wait,
    ),
    Family(
        "ray_serve_batch_execution_time_ms",
        HISTOGRAM,
        BATCH,
        "Time that a batch took, in ms.",
        lambda each: each.execution,
    ),
    Family(
        "ray_serve_autoscaling_target_replicas",
        GAUGE,
        DEPLOYMENT,
        "Replicas that the deployment should have.",
        lambda each: each.target_replicas,
    ),
    Family(
        "ingress_requests_rejected_total",
        COUNTER,
        DEPLOYMENT,
        "Calls that were refused: the queue was full, or they could not be answered in time.",
        lambda each: each.rejected,
    ),
    Family(
        "ingress_requests_shed_total",
        COUNTER,
        DEPLOYMENT,
        "Calls that waited, and were refused because they could not be answered in time any more.",
        lambda each: each.shed,
    ),
    Family(
        "ingress_request_retries_total",
        COUNTER,
        DEPLOYMENT,
        "Calls that were sent to another replica.",
        lambda each: each.retries,
    ),
    Family(
        "ingress_requests_cancelled_total",
        COUNTER,
        ROUTE,
        "Calls on a replica that their callers have cancelled, or whose clients have left.",
        lambda each: each.cancelled,
    ),
    Family(
        "ingress_requests_expired_total",
        COUNTER,
        DEPLOYMENT,
        "Calls whose deadline passed.",
        lambda each: each.expired,
    ),
    Family(
        "ingress_replica_losses_total",
        COUNTER,
        DEPLOYMENT,
        "Replicas that ended by themselves, such as a process that was killed, and were replaced.",
        lambda each: each.losses,
    ),
    Family(
        "ingress_replica_failed_starts_total",
        COUNTER,
        DEPLOYMENT,
        "Starts of replicas that failed.",
        lambda each: each.failed_starts,
    ),
    Family(
        "ingress_deployment_held_seconds",
        GAUGE,
        DEPLOYMENT,
        "Seconds for which all slots have been held and no call has ended; 0 if a slot is free.",
        lambda each: each.held_s,
    ),
    Family(
        "ingress_replica_slots",
        GAUGE,
        REPLICA,
        "Slots: max_ongoing_requests.",
        lambda each: each.max_ongoing,
    ),
    Family(
        "ingress_replica_orphans",
        GAUGE,
        REPLICA,
        "Calls that hold a slot although they have been answered: their code does not end.",
        lambda each: each.orphans,
    ),
    Family(
        "ingress_batched_calls_total",
        COUNTER,
        BATCH,
        "Calls in the batches that were run.",
        lambda each: each.calls,
    ),
    Family(
        "ingress_process_resident_memory_bytes",
        GAUGE,
        PROCESS,
        "Resident memory of a process: server, supervisor, worker-1, or server/default/Model#0.",
        lambda each: each.rss_bytes,
    ),
    Family(
        "ingress_process_cpu_seconds_total",
        COUNTER,
        PROCESS,
        "CPU time of a process.",
        lambda each: each.cpu_s,
    ),
    Family(
        "ingress_process_threads",
        GAUGE,
        PROCESS,
        "Threads of a process.",
        lambda each: each.threads,
    ),
    Family(
        "ingress_gil_wait_seconds_total",
        COUNTER,
        PROCESS,
        "Seconds by which the watchdog woke late, as other threads held the GIL; 0 while it is "
        "off.",
        lambda each: each.gil_wait_s,
    ),
    Family(
        "ingress_processor_wait_seconds_total",
        COUNTER,
        PROCESS,
        "Seconds for which the watchdog was ready to run and had no processor; 0 if not on Linux.",
        lambda each: each.processor_wait_s,
    ),
)
"""The metrics that a part of a snapshot has a value of. `exposition` makes those that follow."""

HTTP_REQUESTS = Family("ray_serve_num_http_requests_total", COUNTER, HTTP, "HTTP requests.")
HTTP_ERRORS = Family(
    "ray_serve_num_http_error_requests_total",
    COUNTER,
    ("application", "route", "method", "error_code"),
    "HTTP requests that were answered with 400 or more, or whose client left (499).",
)
DEPLOYMENT_HTTP_ERRORS = Family(
    "ray_serve_num_deployment_http_error_requests_total",
    COUNTER,
    (*DEPLOYMENT, "route", "method", "error_code"),
    "The same, with the deployment that got the requests.",
)
HTTP_LATENCY = Family(
    "ray_serve_http_request_latency_ms",
    HISTOGRAM,
    HTTP,
    "Time from the head of a request to the end of its response, in ms.",
)
QUEUED_BY_KEY = Family(
    "ingress_queued_by_key",
    GAUGE,
    (*DEPLOYMENT, "key"),
    "Calls that wait for a slot, by their fairness key; those of most keys are one, other.",
)
DEPLOYMENT_ERRORS = Family(
    "ray_serve_deployment_error_counter_total",
    COUNTER,
    (*ROUTE, "exception_type"),
    "Calls that raised an exception, or whose deadline passed.",
)
STARTS = Family(
    "ray_serve_deployment_replica_starts_total",
    COUNTER,
    REPLICA,
    "Starts of the replica: 1, or with --workers those in all workers.",
)
HEALTHY = Family(
    "ray_serve_deployment_replica_healthy",
    GAUGE,
    REPLICA,
    "1 if the replica is healthy, 0 if it is not.",
)
BATCH_SIZE = Family(
    "ray_serve_actual_batch_size",
    HISTOGRAM,
    BATCH,
    "Size of a batch when it begins: its calls, or what batch_size_fn says.",
)
BATCH_UTILIZATION = Family(
    "ray_serve_batch_utilization_percent",
    HISTOGRAM,
    BATCH,
    "The same, in percent of max_batch_size or of the chosen size.",
)
BATCH_QUEUE = Family(
    "ray_serve_batch_queue_length",
    GAUGE,
    BATCH,
    "Calls whose batch has not begun.",
)
MODELS = Family(
    "ray_serve_num_multiplexed_models",
    GAUGE,
    REPLICA,
    "Models it has or is loading.",
)
MODEL_IDS = Family(
    "ray_serve_registered_multiplexed_model_id",
    GAUGE,
    (*REPLICA, "model_id"),
    "1 for each model it has or is loading, at most 100 of them.",
)
MODEL_GETS = Family(
    "ray_serve_multiplexed_get_model_requests_counter_total",
    COUNTER,
    REPLICA,
    "Times that code asked for a model, which was there or had to be loaded.",
)
MODEL_LOADS = Family(
    "ray_serve_multiplexed_models_load_counter_total", COUNTER, REPLICA, "Models loaded."
)
MODEL_UNLOADS = Family(
    "ray_serve_multiplexed_models_unload_counter_total",
    COUNTER,
    REPLICA,
    "Models that were unloaded.",
)
MODEL_LOAD_TIME = Family(
    "ray_serve_multiplexed_model_load_latency_ms",
    HISTOGRAM,
    REPLICA,
    "Time that the load of a model took, in ms, without failed loads.",
)
MODEL_UNLOAD_TIME = Family(
    "ray_serve_multiplexed_model_unload_latency_ms",
    HISTOGRAM,
    REPLICA,
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
    DEPLOYMENT,
    "1 DEPLOY_FAILED, 2 UNHEALTHY, 3 UPDATING, 4 UPSCALING, 5 DOWNSCALING, 6 HEALTHY.",
)
STALLS = Family(
    "ingress_loop_stall_seconds",
    HISTOGRAM,
    (*REPLICA, "method"),
    "Stalls of the replica's event loop, in seconds, by the method that blocked it.",
)
THREAD_WAIT = Family(
    "ingress_thread_wait_seconds",
    HISTOGRAM,
    (*REPLICA, "lane"),
    "Time that a def waited for a worker thread, in seconds; no lane for the replica's own.",
)
LANE_CALLS = Family(
    "ingress_lane_calls",
    GAUGE,
    (*REPLICA, "lane", "state"),
    'Calls of a lane: "ongoing" in its threads, or "queued".',
)
LANE_LIMIT = Family("ingress_lane_threads", GAUGE, (*REPLICA, "lane"), "Threads of a lane.")
CHOSEN_SIZE = Family(
    "ingress_batch_chosen_size",
    GAUGE,
    BATCH,
    "Largest size that target_latency_ms had chosen for the last batch.",
)
CHOSEN_WAIT = Family(
    "ingress_batch_chosen_wait_seconds",
    GAUGE,
    BATCH,
    "Longest wait for one more call that it had chosen, in seconds.",
)
WORKERS = Family(
    "ingress_workers", GAUGE, ("state",), 'Processes that serve: "ready", or "silent".'
)

JOBS = Family(
    "ingress_jobs",
    GAUGE,
    (*DEPLOYMENT, "queue", "state"),
    "Jobs of a queue: waiting, of these retrying; running, dead, unreadable.",
)
JOBS_OLDEST = Family(
    "ingress_jobs_oldest_seconds",
    GAUGE,
    (*DEPLOYMENT, "queue"),
    "Seconds for which the first job that waits could have begun.",
)
JOBS_ENDED = Family(
    "ingress_jobs_ended_total",
    COUNTER,
    (*DEPLOYMENT, "queue", "state"),
    "Attempts at jobs that have ended: done, dead, unreadable, cancelled, or waiting again.",
)

FAMILIES = (*OF_PARTS, *(each for each in list(globals().values()) if isinstance(each, Family)))

_BY_LABELS: dict[tuple[str, ...], list[tuple[Family, Callable[[Any], Any]]]] = defaultdict(list)
for _each in OF_PARTS:
    if _each.of is not None:
        _BY_LABELS[_each.labels].append((_each, _each.of))


def samples_of(labels: tuple[str, ...], part: object) -> list[tuple[Family, float | Latency]]:
    """Return the samples of a part of a snapshot, which has these labels."""
    return [(family, of(part)) for family, of in _BY_LABELS[labels]]


def summed_samples(
    labels: tuple[str, ...], parts: Sequence[object]
) -> list[tuple[Family, float | Latency]]:
    """Return the sums of the samples of several parts, such as one replica id in all workers."""
    return [(family, sum(map(of, parts))) for family, of in _BY_LABELS[labels]]
