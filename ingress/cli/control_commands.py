"""`ingress status`, `stop`, `reload` and `scale`: commands for a server that runs on this machine.

They take the only server that runs. Of several they list them, and `--name`, the name of one of its
applications, or `--pid` chooses.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from ingress.cli import cluster_commands
from ingress.cli.cluster_commands import Address
from ingress.cli.control_socket import ANSWER_S, CommandError, RunningServer, running_servers
from ingress.cli.serving import read_settings
from ingress.cli.target import refusal
from ingress.cli.terminal import console

ASK_S = 5.0  # for the status of a server

Name = Annotated[
    str | None,
    typer.Option("--name", help="The server that has this application.", show_default=False),
]
Pid = Annotated[
    int | None, typer.Option("--pid", help="The server with this process id.", show_default=False)
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(
    name: Name = None, pid: Pid = None, address: Address = None, as_json: AsJSON = False
) -> None:
    """Print the applications that run on this machine, or on a Ray cluster.

    [dim]ingress status[/dim]
    [dim]ingress status --address 10.0.0.1:6379[/dim]

    On this machine: those of `ingress run`. On a cluster, which RAY_ADDRESS may name too:
    all, their deployers, and what replicas wait for.
    """
    if name is None and pid is None and (address or read_settings().ray_address):
        cluster_commands.status(address, as_json)
        return
    servers, stale = _servers()
    found = [
        (server, answer)
        for server, answer in servers
        if (pid is None or server.pid == pid) and (name is None or name in _names(answer))
    ]
    if as_json:
        typer.echo(json.dumps([answer for _, answer in found], indent=2))
        return
    for path in stale:
        typer.echo(f"removed the stale socket {path}: its server was killed", err=True)
    if not found:
        typer.echo("no server runs", err=True)
    for _, answer in found:
        _show(answer)


def stop(name: Name = None, pid: Pid = None) -> None:
    """Stop a server as SIGTERM does: requests in flight may end, new ones are refused."""
    server = _chosen(name, pid)
    _ask(server, "stop")
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
    as_json: AsJSON = False,
) -> None:
    """Change the number of replicas of a deployment that runs.

    [dim]ingress scale shop:Model=4[/dim]

    New replicas start; surplus ones end their requests first. With `--workers`, all
    workers change or none. A file that is applied later keeps the number, unless its own changes.
    """
    wanted = [_scaling(each) for each in targets]
    server = _chosen(name, pid)
    status = _ask(server, "status", ASK_S)
    replicas: dict[str, dict[str, int]] = {}
    for application, deployment, count in wanted:
        there = [
            each
            for each, found in status["applications"].items()
            if application in (None, each) and deployment in found["deployments"]
        ]
        if len(there) != 1:
            known = ", ".join(
                f"{each}:{one}"
                for each, found in status["applications"].items()
                for one in found["deployments"]
            )
            what = f"{application}:{deployment}" if application else deployment
            problem = "several applications have" if there else "no application has"
            raise refusal(f"{problem} {what}; name one of {known}")
        replicas.setdefault(there[0], {})[deployment] = count
    done = _ask(server, "scale", replicas=replicas)
    if as_json:
        typer.echo(json.dumps(done, indent=2))
        return
    for line in done or ["nothing to change"]:
        typer.echo(line)


def reload(name: Name = None, pid: Pid = None, as_json: AsJSON = False) -> None:
    """Apply the changed file of `ingress run FILE`, as SIGHUP and --watch do.

    [dim]ingress reload[/dim]

    Options of deployments change while their replicas run. What needs new processes
    replaces the workers one after another; without --workers it is refused. A wrong file
    changes nothing.
    """
    done = _ask(_chosen(name, pid), "reload")
    if as_json:
        typer.echo(json.dumps(done, indent=2))
        return
    for line in done or ["nothing to change"]:
        typer.echo(line)


def _scaling(text: str) -> tuple[str | None, str, int]:
    """Return application, deployment and number of `APP:DEPLOYMENT=N`."""
    what, _, count = text.partition("=")
    application, _, deployment = what.rpartition(":")
    if not deployment or not count.isdecimal() or not count.isascii():
        raise refusal(f"{text!r} is not of the form APP:DEPLOYMENT=N, such as default:Model=4")
    return application or None, deployment, int(count)


def _names(answer: Any) -> list[str]:
    return [] if answer is None else list(answer["applications"])


def _servers() -> tuple[list[tuple[RunningServer, Any]], list[Any]]:
    """Return each server with its status, `None` if it does not answer, and the stale sockets."""
    if sys.platform == "win32":
        raise refusal("there are no control sockets on Windows")
    running, stale = running_servers()
    found = []
    for server in running:
        try:
            found.append((server, server.ask("status", ASK_S)))
        except (CommandError, OSError):
            found.append((server, None))
    return found, stale


def _chosen(name: str | None, pid: int | None) -> RunningServer:
    """Return the server that is meant. Ends the program if none is, or several are."""
    servers, _ = _servers()
    found = [
        server
        for server, answer in servers
        if (pid is None or server.pid == pid) and (name is None or name in _names(answer))
    ]
    if len(found) == 1:
        return found[0]
    there = "; ".join(
        f"--pid {server.pid} has {', '.join(_names(answer)) or 'no application yet'}"
        for server, answer in servers
    )
    if not servers:
        raise refusal("no server runs on this machine; start one with `ingress run`")
    if not found:
        raise refusal(f"no server is the one with {_given(name, pid)}; there: {there}")
    raise refusal(f"{len(found)} servers run; choose one with --name or --pid: {there}")


def _given(name: str | None, pid: int | None) -> str:
    given = [f"--name {name}"] * (name is not None) + [f"--pid {pid}"] * (pid is not None)
    return " and ".join(given)


def _ask(server: RunningServer, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
    try:
        return server.ask(command, timeout_s, **arguments)
    except CommandError as error:
        raise refusal(str(error)) from None
    except OSError as error:
        raise refusal(f"server {server.pid} does not answer: {error}") from None


def _show(answer: Any) -> None:
    if answer is None:
        typer.echo("a server does not answer")
        return
    workers = answer["workers"]
    several = f", {len(workers)} workers" if len(workers) > 1 else ""
    typer.echo(f"server {answer['pid']}{several}{_at(answer['url'])}")
    table = Table("application", "deployment", "status", "replicas", "ongoing", "queued")
    table.box, table.pad_edge = None, False
    for name, application in answer["applications"].items():
        table.add_row(name, "", application["status"], "", "", "")
        for deployment, each in application["deployments"].items():
            states = ", ".join(f"{n} {state}" for state, n in each["replica_states"].items())
            per_worker = each.get("per_worker")
            if per_worker:
                states += f" ({' + '.join(map(str, per_worker))})"
            table.add_row(
                *("", deployment, each["status"], states),
                *(str(each["ongoing"]), str(each["queued"])),
            )
    console.print(table)
    for name, application in answer["applications"].items():
        for message in (application["message"], *_messages(application)):
            if message:
                typer.echo(f"{name}: {message}")


def _messages(application: Any) -> list[str]:
    return [each["message"] for each in application["deployments"].values()]


def _at(url: str | None) -> str:
    return "" if url is None else f" at {url}"
