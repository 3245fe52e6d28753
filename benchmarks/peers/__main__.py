"""`ingress` against Ray Serve, LitServe, BentoML and mosec: the same no-op over HTTP.

    no-op      requests per second, 32 connections, in turn with ingress
    modes      the same in each mode of Ray Serve that one machine can run
    processes  the same, both with so many processes for user code; and a no-op that computes
    start      from the start of the process to the first answer
    memory     resident memory of all started processes, idle
    ensemble   the guide's, by handle: 10 nodes, their sum, 4 clients x 20 requests
    recursive  the guide's, smaller: 6 deployments x 2 replicas, so a request is 32 calls
    replicas   a no-op on 8 replicas by handle, where the guide has 1,000
    by mode    these three in Ray Serve's throughput mode, and with `ingress` in processes

Each peer is in its own environment, .venv-peers/NAME, which `make bench-peers` makes; a missing
peer is left out. With --peers, the results are printed and not written.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Timer

from benchmarks import command, guides, load
from benchmarks.comparison import in_turn
from benchmarks.document import EQUAL
from benchmarks.results import MIN_PAIRS, Result, Sample
from benchmarks.servers import ROOT, Program, Request, Server, free_port, uvicorn
from benchmarks.starts import starts
from benchmarks.work import COMPUTES, WORKERS

FOLDER = ROOT / ".venv-peers"
START_S = 120.0  # a cluster on two cores takes half a minute
STOP_S = 30.0
CONNECTIONS = 32
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "BENTOML_DO_NOT_TRACK": "True"}

Command = Callable[[Path, str, int], list[str | Path]]
"""Returns the command of a peer for its `bin` folder, a folder for its files, and a port."""


@dataclass(frozen=True, slots=True)
class Load:
    """A row with user code in processes: the app of `ingress`, and the peer's worker processes."""

    name: str
    ours: str
    workers: int
    computes: bool = False
    connections: tuple[int, ...] = (32,)


def both(ours: str) -> tuple[Load, ...]:
    """Return the rows of a peer with two worker processes."""
    return Load("no-op", ours, 2), Load("computing", "ours:predict_computing_2", 2, computes=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of a no-op with its own request format, and the app of `ingress` that matches it."""

    name: str
    package: str
    command: Command
    request: Request
    ours: str = "ours:predict"
    env: Mapping[str, str] = field(default_factory=dict)
    loads: tuple[Load, ...] = ()

    @property
    def bin(self) -> Path:
        return FOLDER / self.package / "bin"

    def server(self, folder: str, **options: str) -> Server:
        env = {**QUIET, "BENTOML_HOME": folder, **self.env, **options}
        return Server(
            self.name,
            lambda port: self.command(self.bin, folder, port),
            self.request,
            env,
            START_S,
            STOP_S,
        )

    def version(self) -> str:
        asked = f"from importlib.metadata import version; print(version({self.package!r}))"
        ran = subprocess.run(
            [self.bin / "python", "-c", asked], capture_output=True, text=True, check=True
        )
        return ran.stdout.strip()


THROUGHPUT = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
BOTH_0 = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of Ray Serve, and the app and variables of `ingress` that stand against it.

    `ours` has as many processes on the way of a request, unless it is "ours:call", which has one.
    A variable of both sides has the same value on both.
    """

    name: str
    env: Mapping[str, str]
    ours: str = "ours:call"
    replicas: int = 1
    own_port: bool = False
    """Whether the client connects to the replica's port, past the proxy."""

    @property
    def is_by_haproxy(self) -> bool:
        return "RAY_SERVE_ENABLE_HA_PROXY" in self.env

    def server(self, peer: Peer, folder: str) -> Server:
        env = {**self.env, WORKERS: str(self.replicas)}
        if self.is_by_haproxy:
            env |= haproxy_files(folder)
        command = with_own_port if self.own_port else ray
        return replace(peer, command=command).server(folder, **env)


HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
MODES = (
    Mode("both 0", BOTH_0),
    Mode("throughput mode", THROUGHPUT),
    Mode("throughput mode, the replica's port", THROUGHPUT, own_port=True),
    Mode("HAProxy", HAPROXY, "ours:process_call"),
    Mode("HAProxy, throughput mode", {**HAPROXY, **THROUGHPUT}, "ours:process_call"),
    Mode(
        "HAProxy, throughput mode, 2 replicas",
        {**HAPROXY, **THROUGHPUT},
        "ours:process_call_2",
        replicas=2,
    ),
)


def haproxy_files(folder: str) -> dict[str, str]:
    """Return the variables for an installed HAProxy, with its files in a folder."""
    name = "RAY_SERVE_HAPROXY_"
    return {
        f"{name}BINARY_PATH": shutil.which("haproxy") or "",
        f"{name}CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        f"{name}SOCKET_PATH": f"{folder}/haproxy.sock",
        f"{name}SERVER_STATE_BASE": folder,
        f"{name}SERVER_STATE_FILE": f"{folder}/server-state",
    }


def with_own_port(bin_: Path, folder: str, port: int) -> list[str | Path]:
    """Return the command of a cluster whose replica listens on `port`, its proxy elsewhere."""
    first, after = (f"RAY_SERVE_DIRECT_INGRESS_{each}_HTTP_PORT" for each in ("MIN", "MAX"))
    ports = (f"{first}={port}", f"{after}={port + 1}")
    return ["env", *ports, *ray(bin_, folder, free_port())]


def ray(bin_: Path, folder: str, port: int) -> list[str | Path]:
    return [bin_ / "python", "-m", "benchmarks.peers.ray_app", folder, str(port)]


def litserve(bin_: Path, folder: str, port: int) -> list[str | Path]:
    return [bin_ / "python", "-m", "benchmarks.peers.litserve_app", str(port)]


def bentoml(
    bin_: Path, folder: str, port: int, app: str = "benchmarks.peers.bentoml_app:Noop"
) -> list[str | Path]:
    return [bin_ / "bentoml", "serve", app, "--host", "127.0.0.1", "--port", str(port)]


def mosec(bin_: Path, folder: str, port: int) -> list[str | Path]:
    app = (bin_ / "python", "-m", "benchmarks.peers.mosec_app")
    return [*app, "--port", str(port), "--path", f"{folder}/mosec{port}"]


VALUE = b'{"value":4}'
PEERS = (
    Peer("Ray Serve", "ray", ray, Request("/", b"hello"), "ours:call"),
    Peer(
        "LitServe",
        "litserve",
        litserve,
        Request("/predict", b'{"output":4}', VALUE),
        loads=both("ours:process_predict_2"),
    ),
    Peer(
        "BentoML",
        "bentoml",
        bentoml,
        Request("/noop", b"4", VALUE),
        env={"BENTOML_CONFIG_OPTIONS": "api_server.logging.access.enabled=false"},
        loads=both("ours:process_predict_2"),
    ),
    Peer(
        "mosec",
        "mosec",
        mosec,
        Request("/inference", b"4", VALUE),
        "ours:inference",
        loads=(
            Load("no-op", "ours:process_inference", 1, connections=(32, 1)),
            Load("computing", "ours:predict_computing_2", 2, computes=True),
        ),
    ),
)


def rates(
    peer: Peer,
    name: str,
    servers: tuple[Server, Server],
    connections: int,
    options: Namespace,
    setup: str = "",
) -> Result:
    """Return a row of a peer: requests of our server and of theirs, in turn."""
    mine, their = servers
    one = partial(load.wrk, request=peer.request, connections=connections, seconds=options.seconds)
    for server in (their, mine):
        one(server)  # to warm up
    runs, baseline = in_turn(partial(one, mine), partial(one, their), options.pairs)
    how_many = f"{connections} connection{'s' if connections > 1 else ''}"
    return Result(name, how_many, setup, runs, peer.name, baseline)


def by_mode(peer: Peer, options: Namespace, folder: str) -> command.Results:
    """Yield the no-op in each mode of Ray Serve."""
    for mode in MODES:
        if mode.is_by_haproxy and shutil.which("haproxy") is None:
            print(f"{mode.name} is left out: haproxy is not installed")
            continue
        shared = {name: value for name, value in mode.env.items() if name not in HAPROXY}
        with mode.server(peer, folder) as their, uvicorn(mode.ours, peer.request, shared) as mine:
            name = f"no-op on {peer.name}"
            yield rates(peer, name, (mine, their), CONNECTIONS, options, mode.name)


def http(peer: Peer, options: Namespace, folder: str) -> command.Results:
    """Yield the no-op, the start, the memory, and the rows with user code in processes."""
    ours = partial(uvicorn, peer.ours, peer.request)
    theirs = partial(peer.server, folder)
    with theirs() as their, ours() as mine:
        yield rates(peer, f"no-op on {peer.name}", (mine, their), CONNECTIONS, options)
    for name, runs, baseline in starts(ours, theirs, options.pairs):
        yield Result(f"{name} of {peer.name}", "", "", runs, peer.name, baseline)
    for row in peer.loads:
        env = {WORKERS: str(row.workers), **({COMPUTES: "1"} if row.computes else {})}
        processes = f"{row.workers} process{'es' if row.workers > 1 else ''}"
        name = f"{row.name} in {processes} on {peer.name}"
        with theirs(**env) as their, uvicorn(row.ours, peer.request) as mine:
            for connections in row.connections:
                yield rates(peer, name, (mine, their), connections, options)


class Guides(Program):
    """The process of `benchmarks.guides`, run on a given module."""

    def __init__(
        self, name: str, python: str | Path, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        command = [python, "-m", "benchmarks.guides", *arguments]
        super().__init__(name, command, {**QUIET, **(env or {})}, START_S, STOP_S)

    @property
    def stdout(self) -> int:
        return subprocess.PIPE

    def wait_until_ready(self) -> None:
        self.run(guides.SHAPES[0])

    def run(self, shape: str) -> Sample:
        """Return the figures of one run of one of the guide's benchmarks."""
        asks, says = self.process.stdin, self.process.stdout
        assert asks is not None
        assert says is not None
        patience = Timer(START_S, self.process.kill)
        patience.start()
        try:
            asks.write(f"{shape}\n".encode())
            asks.flush()
            found: dict[str, float] = json.loads(says.readline())
        except (OSError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # so that its exit code is known
            raise self.failed("did not run") from error
        finally:
            patience.cancel()
            patience.join()
        if errors := found.pop("errors"):
            raise self.failed(f"failed {errors:.0f} requests of {shape}")
        return found


IN_PROCESSES = {**THROUGHPUT, guides.ISOLATION: "process"}
BY_HANDLE: tuple[tuple[str, Mapping[str, str], Mapping[str, str]], ...] = (
    ("", {}, {}),
    ("throughput mode", THROUGHPUT, THROUGHPUT),
    (f"throughput mode, {EQUAL}", THROUGHPUT, IN_PROCESSES),
)
"""The modes of the guide's benchmarks: the variables of Ray Serve, and those of `ingress`."""


def by_handle(options: Namespace, folder: str) -> command.Results:
    """Yield the guide's benchmarks, in a size that Ray Serve can run on one machine."""
    python = FOLDER / "ray" / "bin" / "python"
    for setup, their_env, our_env in BY_HANDLE:
        with (
            Guides("Ray Serve", python, "ray.serve", folder, env=their_env) as theirs,
            Guides("ingress", sys.executable, "ingress", env=our_env) as mine,
        ):
            for shape in guides.SHAPES:
                ours, other = partial(mine.run, shape), partial(theirs.run, shape)
                for warm_up in (ours, other):
                    warm_up()
                runs, baseline = in_turn(ours, other, options.pairs)
                name = f"{shape} on Ray Serve"
                yield Result(name, "4 clients", setup, runs, "Ray Serve", baseline)


def measure(peers: list[Peer], options: Namespace) -> command.Results:
    # A short name: the path of Ray's sockets in it is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ib", dir="/tmp", ignore_cleanup_errors=True) as folder:
        for peer in peers:
            yield from http(peer, options, folder)
        if PEERS[0] in peers:
            yield from by_mode(PEERS[0], options, folder)
            yield from by_handle(options, folder)


def installed(peers: list[Peer]) -> Iterator[Peer]:
    """Yield the installed peers, and print the missing ones."""
    for peer in peers:
        if (FOLDER / peer.package / ".made").exists():
            yield peer
        else:
            print(f"{peer.name} is left out: it is not in .venv-peers/{peer.package}")


def main() -> int:
    names = [peer.package for peer in PEERS]
    parser = ArgumentParser(
        "python -m benchmarks.peers",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=command.pairs, default=MIN_PAIRS, help="of runs")
    parser.add_argument("--seconds", type=command.at_least(1), default=3, help="one run takes")
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="PEER")
    options = parser.parse_args()
    command.require_wrk()
    asked = [peer for peer in PEERS if peer.package in options.peers]
    peers = list(installed(asked))
    versions = {peer.package: peer.version() for peer in peers}
    whole = bool(peers) and options.peers == names
    return command.run(
        "peers", measure(peers, options), options.seconds, whole=whole, others=versions
    )


if __name__ == "__main__":
    sys.exit(main())
