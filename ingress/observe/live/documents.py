"""The JSON documents of a server's state: the parts of its processes, and the view of them all.

    CountPart, Part                the answers of a process to its observer: `observe/live/part`
    Configuration, Recording       other answers of a process
    View                           the state that `ingress top` and the page show:
                                   `observe/live/view`
    Series                         the chart of one route: `observe/live/history`

The keys are those of the JSON that the page reads. A part has counters by deployment and by route,
whose keys are tuples, so it is pickled between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

from ingress.telemetry.logs.last_lines import LogLine

Sums = tuple[int, int, int, float, tuple[int, ...]]
"""Calls that have ended, those of them that failed, those that their callers have cancelled; the
duration in ms, and its buckets, of all but those whose client left before the answer.
"""

Deployment = tuple[str, str]
"""An application and one of its deployments."""

# Replicas.


class Line(TypedDict):
    """A line of code with its source."""

    file: str
    line: int
    function: str
    source: str


class StallOfLoop(TypedDict):
    """A stall of an event loop. `at` is Unix time."""

    at: float
    ms: float
    reason: str
    is_over: bool
    method: str
    request_ids: list[str]
    waited: int
    imports: str
    line: Line | None
    holders: list[str]
    scarcity: str


class StallsIn(TypedDict):
    """The stalls at one line in some time: how often, the longest, the most that waited for one."""

    times: int
    ms: float
    waited: int


class StallsOfLine(StallOfLoop):
    """The longest stall at a line in 15 minutes, and all of them in that time and in a minute."""

    minute: StallsIn | None
    quarter: StallsIn


class Named(TypedDict):
    """A call as a line of `ingress top` names it. `ms` is its age."""

    request_id: str
    title: str
    ms: float | None


class LoopRun(Named):
    """A call that runs on an event loop."""

    method: str
    line: Line | None


class ThreadRun(LoopRun):
    """A call that runs in a worker thread."""

    thread: str


class Loop(TypedDict):
    """An event loop. `busy` is its thread's share of a processor since the last look."""

    thread: str
    is_shared: bool
    busy: float | None
    stands_ms: float
    runs: LoopRun | None


class Threads(TypedDict):
    """The worker threads of a replica, or of one lane."""

    limit: int
    alive: int
    queued: int
    runs: list[ThreadRun]


class Lane(Threads):
    """A declared lane, or "serial"; `queued` are the calls that wait for it."""

    name: str
    ongoing: int


class Batches(TypedDict):
    """The size and the wait that `target_latency_ms` has chosen for a function, and why."""

    name: str
    size: int
    wait_ms: float
    target_ms: float
    reason: str


class RunningCall(Named):
    """A call of a replica, and the place where it runs or waits."""

    queue_ms: float
    where: str
    line: Line | None
    is_orphan: bool


class ReplicaNow(TypedDict):
    """The calls and threads of a replica now. `pid` is that of its child process."""

    application: str
    deployment: str
    replica: str
    state: str
    pid: int | None
    slots: int
    ongoing: int
    loop: Loop
    threads: Threads
    lanes: list[Lane]
    batches: list[Batches]
    calls: list[RunningCall]
    more_calls: int
    stalls: list[StallOfLoop]
    worst: list[StallsOfLine]


class ReplicaOfServer(ReplicaNow):
    """The same in the view of a server. `process` is the id of the server's process.

    `rate`, `errors` and `cancelled` are the calls a second of the last minute, those that failed,
    and those that their callers have cancelled.
    """

    process: int
    rate: float
    errors: float
    cancelled: float


# Parts.


class Counters(TypedDict):
    """The counters of a deployment; `routes` is by source and route, `replicas` by tag.

    For `held_s` all slots have been held and no call has ended; `refused` counts the calls that
    were refused for overload.
    """

    queued: int
    ongoing: int
    requests: int
    refused: int
    held_s: float
    routes: dict[tuple[str, str], Sums]
    replicas: dict[str, Sums]


class CountPart(TypedDict):
    """The counters of one process, and its memory and that of its children, in bytes by name."""

    pid: int
    counts: dict[Deployment, Counters]
    memory: dict[str, int]


class LinesOfReplica(TypedDict):
    """The last log lines of a replica, the oldest first."""

    application: str
    deployment: str
    replica: str
    lines: list[LogLine]


class LinesPart(TypedDict):
    """The last log lines of the replicas of one process."""

    pid: int
    replicas: list[LinesOfReplica]


class GrownLine(TypedDict):
    """A line of code, and the bytes and blocks that it has allocated and that are in use."""

    file: str
    line: int
    source: str
    bytes: int
    blocks: int


class GrownType(TypedDict):
    """A type, and by how many its objects have become more."""

    type: str
    objects: int


class MemoryOfProcess(TypedDict):
    """The growth of one process between two moments; `problem` says why it is not known."""

    process: str
    problem: str
    before_bytes: int
    after_bytes: int
    lines: list[GrownLine]
    types: list[GrownType]


class MemoryPart(TypedDict):
    """The growth of a process of the server, and of its children."""

    pid: int
    processes: list[MemoryOfProcess]


class ProcessMemory(TypedDict):
    """The resident memory of a process, and its growth by the hour; `None` until it is known."""

    process: str
    rss_bytes: int
    bytes_per_h: float | None


class DeploymentPart(TypedDict):
    """A deployment in one process."""

    status: str
    status_trigger: str
    message: str
    replica_states: dict[str, int]
    orphans: int
    is_bounded: bool


class Links(TypedDict):
    """The route prefix of an application, and the path of its documentation."""

    route_prefix: str | None
    docs: str | None


class ApplicationPart(Links):
    """An application in one process."""

    status: str
    message: str
    deployed_at_s: float
    deployments: dict[str, DeploymentPart]


class Part(CountPart):
    """The state of one process. `slowest` and `failed` are calls of `calls.notable`."""

    url: str | None
    applications: dict[str, ApplicationPart]
    replicas: list[ReplicaNow]
    slowest: list[dict[str, Any]]
    failed: list[dict[str, Any]]


class DeploymentProgress(TypedDict):
    """The progress of a deployment in one process: whether its replicas are as wanted.

    `replicas` has their states, by tag. `problem` is in words; `rejected` is the reason if the last
    change failed, and the options before are in use.
    """

    pid: int
    application: str
    deployment: str
    is_settled: bool
    has_failed: bool
    rejected: str
    problem: str
    replicas: dict[str, str]


class Progress(TypedDict):
    """The progress of all deployments of a process."""

    pid: int
    deployments: list[DeploymentProgress]


class Flag(TypedDict):
    """The environment variable that decides where a `def` runs."""

    name: str
    value: str


Move = TypedDict(
    "Move",
    {"application": str, "deployment": str, "what": str, "name": str, "from": str, "to": str},
)
"""A callable that the flag would move, and both places."""


class Option(TypedDict):
    """An option, its value as a file has it, and its origin."""

    where: str
    value: object
    origin: str


class Configuration(TypedDict):
    """The options of one process, and the callables that the flag would move."""

    flag: Flag | None
    moves: list[Move]
    options: list[Option]


class ConfigurationPart(Configuration):
    """The configuration with the id of its process."""

    pid: int


class Recording(TypedDict):
    """A recording of one process; `trace` is `None` while another one is made."""

    pid: int
    trace: str | None


class Ask(Protocol):
    """Asks all processes of a server one question, see `part.WHAT`."""

    def __call__(self, what: str, argument: float = 0.0, /) -> tuple[list[Any], Mapping[int, str]]:
        """Return the parts, and the reasons of the processes without one, by id: `words.SILENT`."""


# The view.


class Rates(TypedDict):
    """Rates a second, and latencies of answers in ms, or `None`.

    `cancelled` are the requests whose callers cancelled them or left, no errors; `left` are those
    of them whose clients left before the answer began, which are in no latency.
    """

    rate: float
    errors: float
    cancelled: float
    left: float
    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None


class Interval(Rates):
    """The rates of one interval of a chart. `ago_s` is the age of its end."""

    ago_s: float
    queued: int


class Series(TypedDict):
    """A chart of the last 15 minutes."""

    step_s: float
    points: list[Interval]


class Recent(TypedDict):
    """The last intervals of a deployment, for a small chart."""

    rate: list[float]
    p99: list[float | None]


class Problem(TypedDict):
    """A problem in words; `level` is "bad" or "warn", `state` that of its deployment or "".

    `kind` is one word, which stays while the text has other numbers. Source:
    `observe/live/problems`.
    """

    level: str
    kind: str
    application: str
    deployment: str
    text: str
    state: str


class DeploymentView(Rates):
    """A deployment in all processes, with its rates of the last minute.

    `state` is `status`, unless a problem says more. `refused` is a rate, too. A deployment
    `is_bounded` if its queue has a limit.
    """

    name: str
    status: str
    state: str
    status_trigger: str
    message: str
    replica_states: dict[str, int]
    slots: int
    orphans: int
    queued: int
    ongoing: int
    requests: int
    refused: float
    held_s: float
    is_bounded: bool
    recent: Recent


class ApplicationView(Links):
    """An application in all processes."""

    name: str
    status: str
    message: str
    deployed_at_s: float
    deployments: list[DeploymentView]


class RouteView(Rates):
    """The rates of one route."""

    application: str
    deployment: str
    route: str


class View(TypedDict):
    """The state of a server."""

    at: float
    pid: int
    url: str | None
    workers: list[int]
    silent: list[int]
    span_s: float
    is_healthy: bool
    problems: list[Problem]
    applications: list[ApplicationView]
    routes: list[RouteView]
    replicas: list[ReplicaOfServer]
    trace_url: str
    memory: list[ProcessMemory]
    slowest: list[dict[str, Any]]
    failed: list[dict[str, Any]]
