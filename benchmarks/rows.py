"""The comparisons of `python -m benchmarks`. `benchmarks.apps` has the endpoints.

`benchmarks.starts` measures rows without connections, on new processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.apps import CHUNK, CHUNKS, PIECE, PIECES
from benchmarks.servers import ROOT, Request, Server, ingress_run, uvicorn
from ingress.core.base.settings import (
    ROUTER_IN_SEPARATE_LOOP,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
)


@dataclass(frozen=True, slots=True)
class Served:
    """An app of `benchmarks.apps` in a checkout, and the way to serve it.

    `label` names it as the baseline. uvicorn serves it; with `workers`, `ingress run` does in so
    many processes.
    """

    label: str
    app: str
    env: Mapping[str, str] = field(default_factory=dict)
    workers: int | None = None
    root: Path = ROOT

    def server(self, request: Request) -> Server:
        if self.workers is None:
            return uvicorn(self.app, request, self.env, self.root)
        options = ("--workers", str(self.workers))
        return ingress_run(self.label, self.app, options, request, self.env, root=self.root)


@dataclass(frozen=True, slots=True)
class Row:
    """One request, two apps that give the same answer, and the numbers of connections."""

    name: str
    what: str
    request: Request
    baseline: Served
    ours: Served
    setup: str = ""
    connections: tuple[int, ...] = (32,)
    client: str = "wrk"


def ours(app: str, **env: str) -> Served:
    return Served("ingress", f"ours:{app}", env)


FASTAPI = Served("plain FastAPI", "plain:fastapi_app")
FASTAPI_STREAMS = Served("plain FastAPI", "plain:streams_app")
FASTAPI_CLIENTS = Served("plain FastAPI", "plain:clients_app")
STARLETTE = Served("plain Starlette", "plain:starlette_app")
METHODS = ours("methods")
BOTH_0 = ours("methods", **{USER_CODE_IN_SEPARATE_THREAD: "0", ROUTER_IN_SEPARATE_LOOP: "0"})
WATCHED = Served("ingress", "watched:methods")
ONE_REPLICA = Served("one replica", METHODS.app)
ONE_DEPLOYMENT = Served("one deployment", "ours:chain_1")
ONE_WORKER = Served("one worker", "ours:computing", workers=1)
UNBATCHED = Served("without `@batch`", "ours:unbatched")

ASYNC = Request("/async", b'"hello"')
QUERY = Request("/async/7?name=me", b'{"item_id":7,"name":"me"}')
ITEM = b'{"name":"lamp","price":12.5,"tags":["a","b"]}'
MODEL = Request("/model", ITEM, ITEM)
HELLO = Request("/", b"hello")
STAY = Request("/stay", b'"hello"')
FEW = (4,)  # one stream keeps a server busy for milliseconds


def stream(path: str, item: str) -> Request:
    return Request(path, item.encode() * CHUNKS)


ROWS = (
    Row(
        "async", "`async def`, returns a string", ASYNC, FASTAPI, METHODS, connections=(1, 32, 256)
    ),
    Row("async-query", "`async def`, path and query, returns JSON", QUERY, FASTAPI, METHODS),
    Row("model", "pydantic body in, `response_model` out", MODEL, FASTAPI, METHODS),
    Row(
        "def",
        "`def`, returns a string",
        Request("/def", b'"hello"'),
        FASTAPI,
        METHODS,
        connections=(1, 32, 256),
    ),
    Row(
        "def-depends",
        "`def` with a `def` dependency",
        Request("/def-depends?name=me", b'"hello me"'),
        FASTAPI,
        METHODS,
    ),
    Row("async", "", ASYNC, FASTAPI, BOTH_0, "both 0"),
    Row("async-query", "", QUERY, FASTAPI, BOTH_0, "both 0"),
    Row("model", "", MODEL, FASTAPI, BOTH_0, "both 0"),
    Row(
        "stream",
        "100 chunks of 1 KiB from an async generator",
        stream("/stream", CHUNK),
        FASTAPI_STREAMS,
        ours("streams"),
        connections=FEW,
    ),
    Row(
        "stream-def",
        "the same from a sync generator",
        stream("/stream-def", CHUNK),
        FASTAPI_STREAMS,
        ours("streams"),
        connections=FEW,
    ),
    Row(
        "lines-def",
        "the same as JSON lines, from a `def` that yields",
        stream("/lines", f'"{CHUNK}"\n'),
        FASTAPI_STREAMS,
        ours("streams"),
        connections=FEW,
    ),
    Row(
        "events-def",
        "the same as server-sent events",
        stream("/events", f'data: "{CHUNK}"\n\n'),
        FASTAPI_STREAMS,
        ours("streams"),
        connections=FEW,
    ),
    Row(
        "websocket",
        "WebSocket, 32 characters there and back",
        STAY,
        FASTAPI_CLIENTS,
        ours("clients"),
        connections=(1, 32),
        client="websocket",
    ),
    Row(
        "leaving",
        "one answer, and one request whose client leaves after 2 ms; the rate counts answers",
        STAY,
        FASTAPI_CLIENTS,
        ours("clients"),
        client="leaving",
    ),
    Row("call", "`async def __call__`, without FastAPI", HELLO, STARLETTE, ours("call")),
    Row(
        "call-def",
        "`def __call__`, without FastAPI; against a `def` route, which Starlette runs in a thread",
        Request("/def", b"hello"),
        STARLETTE,
        ours("call_def", **{SYNC_IN_THREADPOOL: "0"}),
        "sync 0",
    ),
    Row(
        "call-def",
        "",
        Request("/def", b"hello"),
        STARLETTE,
        ours("call_def", **{SYNC_IN_THREADPOOL: "1"}),
        "sync 1",
    ),
    Row(
        "batch-32",
        "a NumPy model behind `@batch`, 32 a batch",
        Request("/?sample=3", b"8"),
        UNBATCHED,
        ours("batched"),
    ),
    Row("chain-2", "a deployment that awaits another", HELLO, ONE_DEPLOYMENT, ours("chain_2")),
    Row("chain-5", "five in a row", HELLO, ONE_DEPLOYMENT, ours("chain_5")),
    Row("replicas-2", "`async`, on two replicas", ASYNC, ONE_REPLICA, ours("methods_2")),
    Row("replicas-8", "`async`, on eight", ASYNC, ONE_REPLICA, ours("methods_8")),
    Row(
        "workers-2",
        "a `def` that computes for 5 ms, `ingress run --workers 2`",
        Request("/compute", b'"hello"'),
        ONE_WORKER,
        Served("ingress", ONE_WORKER.app, workers=2),
    ),
)

THREAD = Served("a thread", METHODS.app)
PROCESS = Served("ingress", "ours:process_methods")
COMPUTE = Request("/compute", b'"hello"')
PROCESS_ROWS = (
    Row(
        "process",
        "`async`, one replica in a process",
        ASYNC,
        FASTAPI,
        PROCESS,
        connections=(1, 32),
    ),
    Row(
        "crossing",
        "lower bound: an ASGI function in another process, against the server's; without ingress",
        HELLO,
        Served("the same process", "crossing:here"),
        Served("another process", "crossing:there"),
        connections=(1,),
    ),
    Row("process-thread", "the same, against a replica in a thread", ASYNC, THREAD, PROCESS),
    Row(
        "process-stream",
        "100 chunks of 1 KiB, from a process against from a thread",
        stream("/stream", CHUNK),
        Served("a thread", "ours:streams"),
        Served("ingress", "ours:process_streams"),
        connections=FEW,
    ),
    Row(
        "process-download",
        "105 MB in chunks of 64 KiB, from a process against plain FastAPI",
        Request("/download", PIECE * PIECES),
        FASTAPI_STREAMS,
        Served("ingress", "ours:process_streams"),
        connections=(1,),
    ),
    Row(
        "process-compute-2",
        "a `def` that computes for 5 ms, on 2 processes against one thread",
        COMPUTE,
        Served("a thread", "ours:computing"),
        Served("ingress", "ours:process_computing_2"),
    ),
)
"""The comparisons of `python -m benchmarks.processes`."""
