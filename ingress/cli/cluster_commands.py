"""`ingress status` and `ingress delete`: the applications of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ingress.cli.run_server import read_settings
from ingress.cli.target import AsJSON, refusal, refusing
from ingress.cli.terminal import console, print_json
from ingress.core.base.settings import RAY_ADDRESS
from ingress.engines import ray_engine
from ingress.observe.live.problems import all_healthy
from ingress.schema import ApplicationStatusOverview
from ingress.serving.http.server_options import ServerOptions
from ingress.telemetry.logs.formats import tame

if TYPE_CHECKING:
    from ingress.engines.ray.engine import RayEngine

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster.  [default: RAY_ADDRESS]",
        show_default=False,
    ),
]


def status(
    address: AddressOption = None,
    as_json: AsJSON = False,
) -> None:
    """Print the applications of a Ray cluster, their deployers, and what replicas wait for.

    [dim]ingress status --address 10.0.0.1:6379[/dim]

    Exits with 0 if all is healthy, else, and if there is none, with 1.
    """
    engine = _connected(address)
    found = engine.status().applications
    deployers = {name: engine.deployer(name) for name in found}
    waits = engine.waits()
    if as_json:
        applications = {
            name: {**asdict(each), "deployed": deployers[name]} for name, each in found.items()
        }
        print_json({"applications": applications, "waits": waits, "is_healthy": are_healthy(found)})
    elif found:
        _show(found, deployers, waits)
    else:
        typer.echo("no application is on this cluster", err=True)
    if not are_healthy(found):
        raise typer.Exit(1)


def are_healthy(found: Mapping[str, ApplicationStatusOverview]) -> bool:
    """Return whether there is an application, and all are healthy: as on this machine."""
    deployments = [one.status for each in found.values() for one in each.deployments.values()]
    return bool(found) and all_healthy([each.status for each in found.values()], deployments)


def _show(
    found: Mapping[str, ApplicationStatusOverview],
    deployers: Mapping[str, str],
    waits: Iterable[str],
) -> None:
    table = Table("application", "deployment", "status", "replicas", box=None, pad_edge=False)
    for name, application in found.items():
        name = tame(name)
        table.add_row(Text(name), "", application.status, "")
        for deployment, each in application.deployments.items():
            states = ", ".join(f"{count} {state}" for state, count in each.replica_states.items())
            table.add_row("", Text(tame(deployment)), each.status, states)
    console.print(table)
    for name, application in found.items():
        typer.echo(tame(f"{name}: deployed {deployers[name]}"))
        of_deployments = [each.message for each in application.deployments.values()]
        for message in filter(None, [application.message, *of_deployments]):
            typer.echo(tame(f"{name}: {message}"))
    for line in waits:
        typer.echo(tame(line))


def delete(
    name: Annotated[str, typer.Argument(help="The application.")], address: AddressOption = None
) -> None:
    """Delete an application from a Ray cluster, also one that another process deployed.

    [dim]ingress delete hello --address 10.0.0.1:6379[/dim]

    Requests in flight may end. The process that deployed it, if it still runs, serves no more.
    """
    engine = _connected(address)
    running = sorted(engine.status().applications)
    if name not in running:
        raise refusal(f"no application {name!r} is on this cluster; there: {running}")
    engine.delete(name)
    typer.echo(f"application {name!r} is deleted")


def _connected(address: str | None) -> RayEngine:
    """Return the engine, connected to a cluster that runs. Ends the program if there is none."""
    address = address or read_settings().ray_address
    if address in (None, "local"):
        raise refusal(
            f"which cluster? Give --address HOST:PORT, or set {RAY_ADDRESS}; `ray start --head` "
            "prints it"
        )
    with refusing(RuntimeError):
        engine = ray_engine()
        engine.use(address, None, ServerOptions())
        engine.connect(quietly=True)
    return engine
