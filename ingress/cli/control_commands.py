"""`ingress status`, `profile`, `stop`, `reload`, `scale`: commands for a server on this machine.

`status` shows all servers. The others take the only one; of several they list them, and `--name`,
the name of one of its applications, or `--pid` chooses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ingress.cli import cluster_commands, status_tables
from ingress.cli.cluster_commands import AddressOption
from ingress.cli.control_socket import ANSWER_S, CommandError, RunningServer, running_servers
from ingress.cli.run_server import read_settings
from ingress.cli.server_commands import MOST_LOOK_S
from ingress.cli.target import AsJSON, finite, refusal, refusing
from ingress.cli.terminal import console, print_json, tamed, write
from ingress.observe.live.observer import DeploymentProgress
from ingress.observe.timeline.chrome import check_writable
from ingress.observe.timeline.sampling import as_flame_graph, as_speedscope, hottest, paths

ASK_S = 5.0  # for the status of a server
PAUSE_S = 0.2  # between the looks of `--wait`
TIMEOUT_S = 300.0  # the default of `--timeout`
_HOTTEST = 5  # functions

Name = Annotated[
    str | None,
    typer.Option("--name", help="The server that has this application.", show_default=False),
]
Pid = Annotated[
    int | None, typer.Option("--pid", help="The server with this process id.", show_default=False)
]
Wait = Annotated[
    bool, typer.Option("--wait", help="End when it is done; exit with 1 if it was rolled back.")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.1,
        callback=finite,
        help="With --wait: give up after this.",
    ),
]


def status(
    name: Name = None, pid: Pid = None, address: AddressOption = None, as_json: AsJSON = False
) -> None:
    """Print the applications that run on this machine, or on a Ray cluster, and what is wrong.

    [dim]ingress status[/dim]
    [dim]ingress status --address 10.0.0.1:6379[/dim]

    On this machine: all servers of `ingress run`. Rates, and latencies in ms, are
    those of the last minute. `--json` is for one server, in the shape of Ray's
    ServeStatus.

    On a cluster, which RAY_ADDRESS names too, unless --name or --pid is given:
    all applications, their deployers, and what replicas wait for; also as JSON.

    Exits with 0 if all is healthy; else, and if nothing runs, with 1.
    """
    if name is None and pid is None and (address or read_settings().ray_address):
        cluster_commands.status(address, as_json)
        return
    servers, stale = _servers()
    found = _matching(servers, name, pid)
    if stale:
        typer.echo(_removed(stale), err=True)
    if as_json:
        if len(found) > 1:
            raise refusal(_several(found))
        print_json(_as_ray(found[0][1] if found else None))
    else:
        for server, view in found:
            _show(server.pid, tamed(view))
    if not found:
        typer.echo("no server runs", err=True)
    if not found or not all(view and view["is_healthy"] for _, view in found):
        raise typer.Exit(1)


def _show(pid: int, view: Any) -> None:
    """Print a server; without a view it does not answer."""
    if view is None:
        typer.echo(f"server {pid} does not answer")
        return
    console.print(status_tables.headline(view), soft_wrap=True)
    for each in view["applications"]:
        at = f" at {each['route_prefix']}" if each["route_prefix"] else ""
        typer.echo(f"application {each['name']}{at}: {each['status']}")
    console.print(status_tables.deployments(view))
    for line in status_tables.problems(view):
        console.print(line, soft_wrap=True)


def _as_ray(view: Any) -> dict[str, Any]:
    """Return a view in the shape of Ray Serve's `ServeStatus`, with more keys."""
    if view is None:
        return {"proxies": {}, "applications": {}, "target_capacity": None, "is_healthy": False}
    return {
        "proxies": {view["url"]: "HEALTHY"} if view["url"] else {},
        "applications": {
            each["name"]: {
                "status": each["status"],
                "message": each["message"],
                "last_deployed_time_s": each["deployed_at_s"],
                "route_prefix": each["route_prefix"],
                "deployments": {
                    one["name"]: {key: value for key, value in one.items() if key != "recent"}
                    for one in each["deployments"]
                },
            }
            for each in view["applications"]
        },
        "target_capacity": None,
        **{key: view[key] for key in ("pid", "url", "workers", "silent", "is_healthy", "problems")},
    }


def memory(
    name: Name = None,
    pid: Pid = None,
    deployment: Annotated[
        str | None,
        typer.Option(help="Only the processes of this deployment.", show_default=False),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, max=MOST_LOOK_S, callback=finite, help="Time between both looks."),
    ] = 10.0,
    as_json: AsJSON = False,
) -> None:
    """Print the lines and the types of objects by which a server's memory grows.

    [dim]ingress memory --seconds 30[/dim]

    It looks twice, and traces allocations meanwhile: requests take up to three times
    as long. A line is the last of your code before an allocation that is still in use.
    """
    server = chosen(name, pid)
    if not as_json:
        console.print(f"looks again after {seconds:g} s", style="dim")
    found = ask_server(server, "memory", seconds + ANSWER_S, seconds=seconds)
    if deployment is not None:
        own = [each for each in found if f"/{deployment}#" in each["process"]]
        found = own or found  # its replicas are threads of the server's processes
    if as_json:
        print_json({"processes": found})
        return
    for each in tamed(found):
        for line in status_tables.memory(each):
            console.print(line, soft_wrap=True)


def profile(
    name: Name = None,
    pid: Pid = None,
    deployment: Annotated[
        str | None,
        typer.Option(help="Only this one: NAME or APP:NAME.", show_default=False),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=MOST_LOOK_S, callback=finite, help="Time to look.")
    ] = 10.0,
    out: Annotated[
        Path, typer.Option(help="FILE.svg, a flame graph, or FILE.json for www.speedscope.app.")
    ] = Path("profile.svg"),
) -> None:
    """Write a flame graph of a server's user code, by replica, route and thread.

    [dim]ingress profile[/dim]
    [dim]ingress profile --deployment Model --seconds 30 --out model.json[/dim]

    Send requests meanwhile. The server looks at its threads a hundred times a second, which
    takes at most a twentieth of one core. A thread with a request counts while it computes and
    while it waits, for a database say; what awaits is on no thread. In the picture, a function is
    as wide as its time, below its caller; the tooltip has the numbers. In the JSON each thread
    has a profile of its own.
    """
    if out.suffix not in (".svg", ".json"):
        raise refusal(f"--out must end with .svg or .json, got {str(out)!r}")
    with refusing(ValueError):
        check_writable(out, "--out")
    server = chosen(name, pid)
    if deployment is not None:
        applications = ask_server(server, "view", ASK_S)["applications"]
        there = [(app["name"], each["name"]) for app in applications for each in app["deployments"]]
        if not any(deployment in (each, f"{app}:{each}") for app, each in there):
            names = ", ".join(f"{app}:{each}" for app, each in there)
            raise refusal(f"--deployment {deployment}: there is none; name one of {tamed(names)}")
    about = f"looks for {seconds:g} s"
    if not console.is_terminal:
        console.print(about, style="dim")
    columns = TextColumn(about, style="dim"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as it:
        it.add_task("", total=None)
        found, missing = ask_server(server, "profile", seconds + ANSWER_S, seconds=seconds)
    found = tamed(found)
    for line in [*missing, *filter(None, (each["problem"] for each in found))]:
        typer.echo(tamed(f"missing: {line}"), err=True)
    is_picture = out.suffix == ".svg"
    seen = paths(found, deployment, by_thread=not is_picture)
    if not seen and all(each["problem"] for each in found):
        raise refusal("no process could look; try again")
    if not seen:
        raise refusal(f"no user code ran in {seconds:g} s; send requests meanwhile")
    title = f"{sum(seen.values()):.2f} s of threads in {seconds:g} s"
    write(out, (as_flame_graph if is_picture else as_speedscope)(seen, title))
    _tell(f"{out}: {title}; {'a browser' if is_picture else 'www.speedscope.app'} shows it")
    for spent_s, route, function in hottest(seen, _HOTTEST):
        _tell(f"{spent_s:8.2f} s  {route}  {function}")


def stop(
    name: Name = None, pid: Pid = None, wait: Wait = False, timeout: Timeout = TIMEOUT_S
) -> None:
    """Stop a server as SIGTERM does: requests in flight may end, new ones are refused.

    With --wait it ends when the server has ended.
    """
    server = chosen(name, pid)
    if wait:
        Following(server, timeout, _tell).end()
        return
    ask_server(server, "stop")
    typer.echo(f"server {server.pid} stops")


def scale(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="[APP:]DEPLOYMENT=N...", help="The replicas to have, in each worker."
        ),
    ],
    name: Name = None,
    pid: Pid = None,
    wait: Wait = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJSON = False,
) -> None:
    """Change the number of replicas of a deployment that runs.

    [dim]ingress scale shop:Model=4 --wait[/dim]

    New replicas start; surplus ones end their requests first. With `--workers`, all
    workers change or none. A file that is applied later keeps the number, unless its own changes.
    """
    wanted = [_scaling(each) for each in targets]
    server = chosen(name, pid)
    view = ask_server(server, "view", ASK_S)
    known = [
        (each["name"], one["name"]) for each in view["applications"] for one in each["deployments"]
    ]
    replicas: dict[str, dict[str, int]] = {}
    for application, deployment, count in wanted:
        there = [app for app, one in known if application in (None, app) and one == deployment]
        if len(there) != 1:
            what = f"{application}:{deployment}" if application else deployment
            problem = "several applications have" if there else "no application has"
            names = ", ".join(f"{app}:{one}" for app, one in known)
            raise refusal(f"{problem} {what}; name one of {tamed(names)}")
        replicas.setdefault(there[0], {})[deployment] = count
    arguments = {"replicas": replicas}
    _change(server, "scale", arguments, wait=wait, timeout_s=timeout, as_json=as_json)


def reload(
    name: Name = None,
    pid: Pid = None,
    wait: Wait = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJSON = False,
) -> None:
    """Apply the changed file of `ingress run FILE`, as SIGHUP and --watch do.

    [dim]ingress reload --wait[/dim]

    Options of deployments change while their replicas run. What needs new processes
    replaces the workers one after another; without --workers it is refused. A wrong file
    changes nothing.
    """
    _change(chosen(name, pid), "reload", {}, wait=wait, timeout_s=timeout, as_json=as_json)


def _change(
    server: RunningServer,
    command: str,
    arguments: Mapping[str, Any],
    *,
    wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Ask for a change and print it; with `wait`, follow it to its end."""
    if wait:
        # With `--json` the JSON alone has the outcome.
        tell = (lambda line: None) if as_json else _tell
        lines = Following(server, timeout_s, tell).change(command, arguments)
    else:
        lines = ask_server(server, command, **arguments)
    if as_json:
        print_json({"changes": lines, "is_done": wait})
    elif not wait:
        for line in lines or ["nothing to change"]:
            _tell(line)


def _tell(line: str) -> None:
    typer.echo(tamed(line))


def _scaling(text: str) -> tuple[str | None, str, int]:
    """Return application, deployment and number of `APP:DEPLOYMENT=N`."""
    what, _, count = text.partition("=")
    application, _, deployment = what.rpartition(":")
    if not deployment or not count.isdecimal() or not count.isascii():
        raise refusal(f"{text!r} is not of the form APP:DEPLOYMENT=N, such as default:Model=4")
    return application or None, deployment, int(count)


def _names(answer: Any) -> list[str]:
    """Return the applications of a view; none if the server does not answer."""
    return [] if answer is None else [each["name"] for each in answer["applications"]]


def _matching(
    servers: Iterable[tuple[RunningServer, Any]], name: str | None, pid: int | None
) -> list[tuple[RunningServer, Any]]:
    return [
        (server, answer)
        for server, answer in servers
        if (pid is None or server.pid == pid) and (name is None or name in _names(answer))
    ]


def _servers() -> tuple[list[tuple[RunningServer, Any]], list[Path]]:
    """Return each server with its view, `None` if it does not answer, and the stale sockets."""
    if sys.platform == "win32":
        raise refusal("there are no control sockets on Windows")
    with refusing(PermissionError):
        running, stale = running_servers()
    found = []
    for server in running:
        try:
            found.append((server, server.ask("view", ASK_S)))
        except (CommandError, OSError):
            found.append((server, None))
    return found, stale


def _removed(stale: Sequence[Path]) -> str:
    """Return the line that names the sockets of servers that were killed, the first three."""
    named = ", ".join(path.stem for path in stale[:3])
    more = f" and {len(stale) - 3} more" if len(stale) > 3 else ""
    return f"removed the sockets of servers that were killed: pid {named}{more}"


def chosen(name: str | None, pid: int | None) -> RunningServer:
    """Return the server that is meant. Ends the program if none is, or several are."""
    servers, _ = _servers()
    found = _matching(servers, name, pid)
    if len(found) == 1:
        return found[0][0]
    if not servers:
        raise refusal("no server runs on this machine; start one with `ingress run`")
    if not found:
        problem = f"no server is the one with {_given(name, pid)}"
        raise refusal(f"{problem}; there: {_there(servers)}")
    raise refusal(_several(servers))


def _several(servers: Sequence[tuple[RunningServer, Any]]) -> str:
    return f"{len(servers)} servers run; choose one with --name or --pid: {_there(servers)}"


def _there(servers: Iterable[tuple[RunningServer, Any]]) -> str:
    return "; ".join(
        f"--pid {server.pid} has {tamed(', '.join(_names(answer))) or 'no application yet'}"
        for server, answer in servers
    )


def _given(name: str | None, pid: int | None) -> str:
    given = [f"--name {name}"] * (name is not None) + [f"--pid {pid}"] * (pid is not None)
    return " and ".join(given)


def ask_server(
    server: RunningServer, command: str, timeout_s: float = ANSWER_S, **arguments: Any
) -> Any:
    """Return a server's answer. Ends the program if it refuses, or does not answer."""
    with _answering(server):
        return server.ask(command, timeout_s, **arguments)


@contextmanager
def _answering(server: RunningServer) -> Iterator[None]:
    """End the program if the server refuses the command of the block, or does not answer."""
    try:
        yield
    except CommandError as error:
        raise refusal(tamed(str(error))) from None
    except OSError as error:
        raise refusal(f"server {server.pid} does not answer: {error}") from None


class Following:
    """A command that changes a server, followed to its end: `--wait`. `tell` prints a line.

    The command runs in a thread, because a reload of workers takes minutes. Meanwhile, and until
    the replicas are those that the options ask for, each change of a replica is a line.
    """

    def __init__(
        self, server: RunningServer, timeout_s: float, tell: Callable[[str], object]
    ) -> None:
        self._server = server
        self._began = monotonic()
        self._deadline = self._began + timeout_s
        self._timeout_s = timeout_s
        self._tell = tell
        self._states: dict[str, str] | None = None  # of replicas, by their names
        self._told: dict[str, str] = {}

    def change(self, command: str, arguments: Mapping[str, Any]) -> list[str]:
        """Ask for a change, and wait until all replicas are as wanted. Returns its lines.

        Ends the program with the reason if it is refused, rolled back or not done in time.
        """
        self._look()  # the states before
        pool = ThreadPoolExecutor(1, "ingress-ask")
        asked = pool.submit(self._server.ask, command, self._timeout_s, **arguments)
        pool.shutdown(wait=False)
        while not asked.done():
            self._pause()
            self._look()
        with _answering(self._server):
            lines: list[str] = asked.result()
        for line in lines or ["nothing to change"]:
            self._tell(line)
        while not self._is_settled():
            self._pause()
        return lines

    def end(self) -> None:
        """Ask the server to stop, and wait until its process has ended."""
        ask_server(self._server, "stop", self._timeout_s)
        self._tell(f"server {self._server.pid} stops")
        while _is_alive(self._server):
            self._look()
            self._pause()
        self._tell(f"server {self._server.pid} has ended")

    def _look(self) -> list[DeploymentProgress] | None:
        """Tell how the replicas have changed since the last look.

        Returns the progress of each deployment; `None` while a process starts or ends.
        """
        try:
            found: list[DeploymentProgress] | None = self._server.ask("progress", ASK_S)
        except (CommandError, OSError):
            found = None
        if found is None:
            return None
        several = len({each["pid"] for each in found}) > 1
        states = {
            f"{_name(each)}#{tag}" + (f" in process {each['pid']}" if several else ""): state
            for each in found
            for tag, state in each["replicas"].items()
        }
        if self._states is not None:
            for name, state in states.items():
                if state != self._states.get(name):
                    self._say(f"{name} {state}")
            for name in self._states.keys() - states.keys():
                self._say(f"{name} has ended")
        self._states = states
        for each in found:
            name, problem = _name(each), each["problem"]
            if problem and problem != self._told.get(name):
                self._say(f"{name}: {problem}")
            self._told[name] = problem
        return found

    def _is_settled(self) -> bool:
        """Return whether all replicas are as wanted. Ends the program if they will not be."""
        if (found := self._look()) is None:
            return False
        if not all(each["is_settled"] for each in found):
            return False
        if wrong := [each for each in found if each["rejected"]]:
            raise refusal(tamed("; ".join(f"{_name(each)}: {each['rejected']}" for each in wrong)))
        return True

    def _pause(self) -> None:
        if monotonic() >= self._deadline:
            reasons = "; ".join(f"{name}: {text}" for name, text in self._told.items() if text)
            raise refusal(
                tamed(
                    f"not done after {self._timeout_s:g} s, and it goes on"
                    f"{f': {reasons}' if reasons else ''}; --timeout gives it longer"
                )
            )
        sleep(PAUSE_S)

    def _say(self, text: str) -> None:
        self._tell(f"{monotonic() - self._began:5.1f} s  {text}")


def _name(each: DeploymentProgress) -> str:
    return f"{each['application']}:{each['deployment']}"


def _is_alive(server: RunningServer) -> bool:
    try:
        server.connected(ASK_S).close()
    except OSError:
        pass
    else:
        return True
    try:  # its socket closes before its last thread has ended
        os.kill(server.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(server.pid)


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended, and its parent has not looked yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False
